"""Ways to do the same thing, timed in turns, so that what else the machine does meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ._rows import Row

Clock = Callable[[], float]


def in_turns(
    ways: Mapping[str, Callable[[], object]], rounds: int, calls: int = 1, clock: Clock = time.process_time
) -> dict[str, list[float]]:
    """Seconds of a call of each way, one figure for each round. CPU time, unless another clock is given."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            start = clock()
            for _ in range(calls):
                way()
            if turn:  # the first round warms up
                seconds[name].append((clock() - start) / calls)
    return seconds


def paired(spent: list[float], base: list[float]) -> float:
    """The median over the rounds of the ratio to `base` in the same round."""
    return statistics.median(s / b for s, b in zip(spent, base, strict=True))


def timed(
    table: str,
    what: str,
    ways: Mapping[str, Callable[[], object]],
    base: str,
    rounds: int,
    calls: int = 1,
    *,
    ours: Collection[str],
    tolerance: float = 0.12,
    clock: Clock = time.process_time,
    **more: Any,
) -> list[Row]:
    """Rows of medians, each with its ratio to `base`. Those of `ours` are gated."""
    seconds = in_turns(ways, rounds, calls, clock)
    return [
        Row(
            table,
            name,
            what,
            statistics.median(spent),
            "s",
            paired(spent, seconds[base]),
            base,
            tolerance=tolerance if name in ours else None,
            **more,
        )
        for name, spent in seconds.items()
    ]
