"""Cost per region, from 10 to 100,000 regions in one step: it should not grow with their number.

A chain of tiny layers, forward and backward, ours and torch's non-reentrant checkpoint in turn. Each figure is compared
with that of 100 regions, run just before and after it. A step without any region, in which autograd begins and ends all
the same, is taken off: of one of 10 it would be some percent. A step of the size goes before, as in training: the first
one has to get its memory from the system, page by page. All regions of a step live at once, so Python's cycle
collector walks over more and more objects that are no garbage; it is measured with the collector and without, and what
it costs is its own. `held` counts what a region that waits for its backward holds; `instructions` has no clock in it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from ._interpreter import effort
from ._meter import Meter
from ._rounds import paired
from ._rows import Row
from ._ways import OURS, TORCH, Layer, ours, torch_ways
from .torch_overhead import tiny

SIZES, BASE = (10, 100, 1_000, 10_000, 100_000), 100
FLAT = 1.10


def chain(layer: Layer, count: int) -> torch.Tensor:
    w, x = torch.full((8, 8), 0.125, requires_grad=True), torch.ones(4, 8, requires_grad=True)
    for _ in range(count):
        x = layer(w, x)
    return x


def seconds(layer: Layer, count: int, total: int) -> float:
    """CPU time of a region in a step of `count`, over as many steps as give `total` regions."""
    steps = max(1, total // count)
    spent = []
    for regions in (0, count):
        start = time.process_time()
        for _ in range(steps):
            chain(layer, regions).sum().backward()
        spent.append((time.process_time() - start) / steps)
    return (spent[1] - spent[0]) / count


def timings(table: str, ways: dict[str, Layer], quick: bool) -> Iterator[Row]:
    total, rounds = (500, 1) if quick else (1_000, 9)
    sizes = SIZES[:3] if quick else SIZES
    for layer in ways.values():
        seconds(layer, BASE, BASE)
    for count in sizes:
        spent: dict[str, list[float]] = {name: [] for name in ways}
        base: dict[str, list[float]] = {name: [] for name in ways}
        for layer in ways.values():
            chain(layer, count).sum().backward()
        for _ in range(min(rounds, max(1, 40_000 // count))):
            for name, layer in ways.items():
                gc.collect()
                beside = max(total, count // 5)  # long enough for the machine's own ups and downs
                before = seconds(layer, BASE, beside)
                spent[name].append(seconds(layer, count, total))
                base[name].append((before + seconds(layer, BASE, beside)) / 2)
        for name in ways:
            median, ratio = statistics.median(spent[name]), paired(spent[name], base[name])
            bar = FLAT if name == OURS else None
            # One step of the largest sizes is all that fits: told, not gated.
            tolerance = 0.15 if name == OURS and count <= 1_000 else None
            yield Row(table, name, "CPU time of a region", median, "s", ratio, "100 regions", bar, count, tolerance)


def without_collector(measure: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    gc.collect()
    gc.disable()
    try:
        yield from measure()
    finally:
        gc.enable()


def held(layer: Layer, count: int) -> dict[str, int]:
    """Bytes of tensors, and objects that the collector walks over, of `count` regions that wait for their backward."""
    chain(layer, BASE).sum().backward()
    gc.collect()
    before = len(gc.get_objects())
    with Meter() as meter:
        kept = chain(layer, count)
    gc.collect()
    found = {"bytes held by a region": meter.live, "objects held by a region": len(gc.get_objects()) - before}
    del kept
    return found


def rows(quick: bool) -> Iterator[Row]:
    layers = {name: way(tiny) for name, way in (torch_ways() | ours()).items() if name in (TORCH, OURS)}
    yield from without_collector(lambda: timings("Without the cycle collector", layers, quick))
    yield from timings("With the cycle collector", layers, quick)
    for name, layer in layers.items():
        few, many = held(layer, 200), held(layer, 1_000)
        for what in ("bytes held by a region", "objects held by a region"):
            value = round((many[what] - few[what]) / 800, 1)
            tolerance = 0.05 if name == OURS else None
            yield Row("Held", name, what, value, "B" if "bytes" in what else "", tolerance=tolerance)
        chain(layer, 10).sum().backward()
        one = effort(lambda layer=layer: chain(layer, 10).sum().backward()).instructions / 10
        for count in (10, 100, 1_000)[: 2 if quick else 3]:
            each = effort(lambda n=count, layer=layer: chain(layer, n).sum().backward()).instructions / count
            bar, tolerance = (1.01, 0.02) if name == OURS else (None, None)
            yield Row(
                "Instructions of a region", name, "instructions", each, "", each / one, "10", bar, count, tolerance
            )
