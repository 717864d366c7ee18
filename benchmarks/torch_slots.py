"""What a save costs by its size, against a raw clone, and by how many there are in a layer.

A slot clones what is saved (and a read clones it again), so that later writes through any alias change no decision.
Save or read and clone run next to each other inside one region; a figure is the median of their ratios. Small saves
show the bookkeeping, large ones the copy. The number of saves is counted in bytecode instructions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch

from roundpipe_torch import checkpoint, doing_recompute, save_for_recompute

from ._interpreter import effort
from ._rows import Row

SIZES = (1, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28)
NUMBERS = (1, 10, 100, 1_000)


def spent(size: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(ours, clone) seconds of saving and of reading."""
    data, found = torch.ones(size, dtype=torch.uint8), {"save": [], "read": []}
    clock = time.process_time

    def layer(x: torch.Tensor) -> torch.Tensor:
        start = clock()
        copy = data.clone()
        between = clock()
        (saved,) = save_for_recompute(data)
        found["read" if doing_recompute() else "save"].append((clock() - between, between - start))
        del copy, saved
        return x.sin()

    for _ in range(rounds + 1):
        checkpoint(layer, torch.ones(2, requires_grad=True)).sum().backward()
    return {what: pairs[1:] for what, pairs in found.items()}  # the first warms up


def by_size(quick: bool) -> Iterator[Row]:
    for size in SIZES[:4] if quick else SIZES:
        for what, pairs in spent(size, min(400, max(7, (1 << 26) // size)) if not quick else 5).items():
            ours = statistics.median(o for o, _ in pairs)
            clone = statistics.median(c for _, c in pairs)
            ratio = statistics.median(o / c for o, c in pairs if c)
            large = size >= 1 << 24
            yield Row(
                "A save by its size in bytes",
                "ours",
                what,
                ours,
                "s",
                ratio,
                "clone",
                bar=1.1 if large else None,
                at=size,
                tolerance=0.2 if large else None,
            )
            yield Row("A save by its size in bytes", "clone", what, clone, "s", at=size)


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
