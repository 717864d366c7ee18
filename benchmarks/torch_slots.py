"""What a save costs by its size, against a raw clone, and by how many there are in a layer.

A slot clones what is saved (and a read clones it again), so that later writes through any alias change no decision.
Save or read and clone run next to each other inside one region; a figure is the median of their ratios. Small saves
show the bookkeeping, large ones the copy. The number of saves is counted in bytecode instructions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from roundpipe_torch import checkpoint, doing_recompute, save_for_recompute

from ._interpreter import effort
from ._rows import Row

SIZES = (1, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28)
NUMBERS = (1, 10, 100, 1_000)


def spent(size: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(ours, clone) seconds of saving and of reading. The two take turns in going first, and a pair is both orders:
    memory that was freed a moment ago makes whichever comes first the faster one."""
    data = torch.ones(size, dtype=torch.uint8)
    ways: list[Callable[[], object]] = [lambda: save_for_recompute(data), data.clone]
    times: dict[str, list[list[float]]] = {"save": [], "read": []}
    clock, first = time.process_time, 0

    def layer(x: torch.Tensor) -> torch.Tensor:
        took, kept = [0.0, 0.0], []
        for n in (first, 1 - first):
            start = clock()
            kept.append(ways[n]())
            took[n] = clock() - start
        times["read" if doing_recompute() else "save"].append(took)
        return x.sin()

    for _ in range(rounds + 1):
        for first in (0, 1):  # noqa: B007 - the layer looks at it
            checkpoint(layer, torch.ones(2, requires_grad=True)).sum().backward()
    return {
        what: [((a[0] + b[0]) / 2, (a[1] + b[1]) / 2) for a, b in zip(took[2::2], took[3::2], strict=True)]
        for what, took in times.items()  # the first round warms up
    }


def by_size(quick: bool) -> Iterator[Row]:
    table = "A save by its size in bytes"
    for size in SIZES[:4] if quick else SIZES:
        rounds = 3 if quick else min(200, max(5, (1 << 27) // size))
        large = size >= 1 << 24  # where the copy is all that counts
        for what, pairs in spent(size, rounds).items():
            ours, clone = (statistics.median(pair[n] for pair in pairs) for n in (0, 1))
            ratio = statistics.median(o / c for o, c in pairs if c)
            goal, tolerance = (1.1, 0.2) if large else (None, None)
            yield Row(table, "ours", what, ours, "s", ratio, "clone", goal, size, tolerance)
            yield Row(table, "clone", what, clone, "s", at=size)


def instructions(count: int) -> float:
    def layer(x: torch.Tensor) -> torch.Tensor:
        for n in range(count):
            save_for_recompute(n, name=str(n))
        return x.sin()

    x = torch.ones(2, requires_grad=True)

    def step() -> None:
        checkpoint(layer, x).sum().backward()

    step()
    return effort(step).instructions


def rows(quick: bool) -> Iterator[Row]:
    yield from by_size(quick)
    none = instructions(0)
    base = (instructions(10) - none) / 10
    for count in NUMBERS[:3] if quick else NUMBERS:
        each = (instructions(count) - none) / count
        yield Row("Saves in one layer", "ours", "instructions of a save", each, "", each / base, "10", 1.1, count, 0.05)
