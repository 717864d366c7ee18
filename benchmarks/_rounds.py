"""Ways to do the same thing, timed in turns, so that what else the machine does meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def ratios(ways: dict[str, Callable[[], object]], base: str, rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """Median CPU time of a call, and of its ratio to that of `base` in the same round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            start = time.process_time()
            for _ in range(calls):
                way()
            if turn:  # the first round warms up
                seconds[name].append(time.process_time() - start)
    return {
        name: {
            "ratio": statistics.median(s / b for s, b in zip(spent, seconds[base], strict=True)),
            "microseconds": statistics.median(spent) / calls * 1e6,
        }
        for name, spent in seconds.items()
    }
