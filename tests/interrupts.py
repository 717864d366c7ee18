"""Raises in the midst of the library: as a signal does, whose handler raises wherever Python is."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

PACKAGES = ("roundpipe_core", "roundpipe_torch", "roundpipe_jax")


class At:
    """In its block, raises `error` before the n-th line of the library that this thread comes to.

    Those are more places than Python looks for signals at: calls, and the ends of loops. `seen` counts them.
    """

    def __init__(self, n: int, error: Callable[[], BaseException] = KeyboardInterrupt) -> None:
        self.n, self.error, self.seen = n, error, 0
        self.raised: BaseException | None = None

    def __enter__(self) -> At:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        sys.settrace(self._before)

    def came_through(self, error: BaseException) -> None:
        """Assert that `error` is the very one that was raised, and let go of it."""
        raised, self.raised = self.raised, None
        if error is not raised:
            raise AssertionError(f"at line {self.n} {raised!r} was raised, and another error came") from error

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_globals.get("__name__") or ""
        return self._line if name.partition(".")[0] in PACKAGES else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.seen += 1
            if self.seen == self.n and (_enters_handler(frame) or _ends_block(frame) or _is_finalizing(frame)):
                self.n += 1
            elif self.seen == self.n:
                sys.settrace(None)
                self.raised = self.error()
                raise self.raised
        return self._line


def _enters_handler(frame: FrameType) -> bool:
    """Whether an error is on its way. No signal arrives there, and a tracer that raises leaks that error."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in ("PUSH_EXC_INFO", "WITH_EXCEPT_START")


def _ends_block(frame: FrameType) -> bool:
    """Whether the next thing is the call that ends a `with` whose body is over.

    Python looks for signals after a call, which is still in the body, and then in the call of `__exit__`. What a tracer
    raises between the two, nobody could meet.
    """
    code = frame.f_code
    names = [
        step.opname for step in dis.get_instructions(code) if step.offset >= frame.f_lasti and step.opname != "SWAP"
    ]
    return names[:3] == ["LOAD_CONST"] * 3 and names[3] in ("PRECALL", "CALL")


def _is_finalizing(frame: FrameType | None) -> bool:
    """Whether Python ignores what is raised."""
    while frame is not None and frame.f_code.co_qualname != "finalize.__call__" and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def raised_at(n: int, error: Callable[[], BaseException], step: Callable[[], Any]) -> BaseException:
    """Run `step` with an error before its n-th line, and give that error, which has come through."""
    at = At(n, error)
    try:
        with at:
            step()
    except BaseException as raised:
        at.came_through(raised)
        return raised
    if at.raised is None and n > 1:  # the last lines are a finalizer's
        return raised_at(n - 1, error, step)
    raise AssertionError(f"line {n}: the error was swallowed")


def lines(step: Callable[[], Any]) -> int:
    """How many lines of the library `step` runs."""
    with At(-1) as every:
        step()
    return every.seen


def some(count: int, tries: int, start: int = 0) -> range:
    """Places spread over all: about `tries` of 1 to `count`, other ones for each `start`."""
    stride = max(count // tries, 1)
    return range(1 + start % stride, count + 1, stride)
