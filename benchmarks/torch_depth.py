"""Regions inside regions, 1 to 200 deep: how often the innermost code runs, and how often it decides.

Every level is a checkpointed function that calls the next one and then computes on. A level is run by the forward, by
its own recompute, and by the recompute of every level above it. So the work of a step grows with the square of the
depth, whoever checkpoints; what differs is whether decisions are made again as well. Counted, not timed.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from roundpipe_torch import checkpoint, recompute_once

from ._rows import Row, counts
from ._ways import OURS, TORCH, torchs

DEPTHS = (1, 10, 50, 100, 200)
WAYS: dict[str, Callable[..., Any]] = {
    TORCH: torchs,
    OURS: checkpoint,
    "torch reentrant": functools.partial(torch_checkpoint, use_reentrant=True),
    "ours, reentrant": functools.partial(checkpoint, use_reentrant=True),
}


def counted(way: Callable[..., Any], depth: int) -> dict[str, float]:
    levels = decisions = 0
    w = torch.full((4, 4), 0.25, requires_grad=True)

    def decide(x: torch.Tensor) -> torch.Tensor:
        nonlocal decisions
        decisions += 1
        return x.argmax(-1, keepdim=True)

    def level(x: torch.Tensor, left: int) -> torch.Tensor:
        nonlocal levels
        levels += 1
        best = recompute_once(decide, x)
        x = torch.tanh(x @ w) + x.gather(-1, best)
        if left > 1:
            x = way(level, x, left - 1)
        return torch.tanh(x @ w)  # so that a recompute cannot stop before the region inside

    way(level, torch.ones(2, 4, requires_grad=True), depth).sum().backward()
    return {"levels run": levels, "decisions for each level": decisions / depth}


def on_a_deep_stack(run: Callable[[], Any]) -> Any:
    """A thread's stack has 8 MB by default, and Python's limit is 1000 frames."""
    found: list[Any] = []

    def guarded() -> None:
        try:
            found.append(run())
        except Exception as error:
            found.append(error)

    limit, size = sys.getrecursionlimit(), threading.stack_size(512 << 20)
    sys.setrecursionlimit(100_000)
    try:
        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(size)
    return found[0]


def rows(quick: bool) -> Iterator[Row | str]:
    for depth in DEPTHS[:3] if quick else DEPTHS:
        for name, way in WAYS.items():
            found = on_a_deep_stack(lambda way=way, depth=depth: counted(way, depth))
            if isinstance(found, Exception):
                yield f"{name}, {depth} deep: {type(found).__name__}: {str(found).partition('. ')[0]}"
                continue
            yield from counts("Regions in regions", {name: found}, ours=(OURS, "ours, reentrant"), at=depth)
