"""Work that several threads share, and that gets done where there are no more of them.

A program that ends starts none, so `concurrent.futures` would refuse what is saved at exit.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

__all__ = ["begun", "each"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def begun(work: Callable[[], None]) -> Callable[[], None]:
    """Let a thread do `work`, which raises nothing. What is returned waits for it."""
    thread = threading.Thread(target=work)
    try:
        thread.start()
    except RuntimeError:  # the program ends, or has as many as it may
        work()
        return lambda: None
    return thread.join


def each(function: Callable[[_Item], _Result], items: Sequence[_Item], threads: int) -> list[_Result]:
    """`function` of each of `items`, in their order; what the first raises that fails."""
    left = collections.deque(enumerate(items))
    results: dict[int, Any] = {}
    faults: dict[int, Exception] = {}

    def work() -> None:
        while left:
            try:
                n, item = left.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                results[n] = function(item)
            except Exception as error:
                faults[n] = error

    waits = [begun(work) for _ in range(min(threads, len(items)) - 1)]
    try:
        work()
    finally:
        left.clear()  # if this one is interrupted
        for wait in waits:
            wait()
    for n in sorted(faults):
        raise faults[n]
    return [results[n] for n in range(len(items))]
