"""What the interpreter does, counted: calls of Python functions, of built-in ones, and bytecode instructions.

Counts of one program are the same on a busy machine and on a quiet one.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple


class Effort(NamedTuple):
    calls: int
    builtins: int
    instructions: int


def effort(run: Callable[[], object]) -> Effort:
    """Of `run()`, on this thread; autograd runs a backward on the CPU on it, too."""
    collects = gc.isenabled()
    gc.disable()  # finalizers run when they will
    try:
        calls, builtins = _calls(run)
        return Effort(calls, builtins, _instructions(run))
    finally:
        if collects:
            gc.enable()


def _calls(run: Callable[[], object]) -> tuple[int, int]:
    seen = {"call": 0, "c_call": 0}

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event in seen:
            seen[event] += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen["call"] - 1, seen["c_call"] - 1  # not run itself, and not the end of the watch


def _instructions(run: Callable[[], object]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            count += 1
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return count
