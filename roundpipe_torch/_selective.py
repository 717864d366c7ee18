"""Selective checkpointing: what torch keeps of a layer under a `context_fn` where the phases differ (R10).

Torch counts the operations of each kind. The third product of the recompute gets what the third of the forward gave. A
recompute that leaves out a decision would get what the decision's own product gave, without a word. So from the
first question or decision on, operations are counted for each expression of the code by itself, and what has not been
kept for one is computed again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, _CachedTorchDispatchMode, _CachingTorchDispatchMode

from ._matching import line_of, region_codes
from ._torchs import CALLS

__all__ = ["count_by_line", "modes_on"]

modes_on: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Whether there are any, which see each operation."""
_HELD = "roundpipe"
"""Under which the forward's entries by line are found among those that are not; all others are kinds of operations."""


def count_by_line() -> None:
    """From here on, in the forwards and recomputes under way. Both phases call this first at the same point."""
    mode: Any
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode.__dict__.get("storage"), _ByLine):
            continue
        if type(mode) is _CachingTorchDispatchMode:  # one that derives from it may keep other books
            mode.storage[_HELD] = held = _Held()
            _let_count(mode, held)
        elif type(mode) is _CachedTorchDispatchMode and _HELD in mode.storage:
            _let_count(mode, mode.storage[_HELD])


def _let_count(mode: Any, held: _Held) -> None:
    if _NUMBERED:
        counter = mode.func_counter = _Counter()
        mode.storage = _Numbered(held, counter)
        return
    mode.storage = _Lists(held)
    if isinstance(mode, _CachedTorchDispatchMode):
        old: Any = mode
        old.policy_fn = _where_kept(old.policy_fn, old.storage)


_NUMBERED = hasattr(checkpoint, "_RECOMPUTE")
"""Whether torch numbers the operations, those that it does not keep too. Before 2.12 it has a list of what it keeps."""


class _Held(dict[Any, Any]):
    """Entries by kind and line."""


class _ByLine:
    """Stands for torch's own entries."""

    def __init__(self, held: _Held) -> None:
        self._held = held


class _Counter(dict[Any, int]):
    """How often each kind of operation came at each line."""

    line = 0  # of the last one asked for

    def __getitem__(self, kind: Any) -> int:
        self.line = _line()
        return self.get((kind, self.line), 0)

    def __setitem__(self, kind: Any, count: int) -> None:
        super().__setitem__((kind, self.line), count)


class _Entries(dict[int, Any]):
    """Of one kind at one line, by number."""

    def get(self, number: int, default: Any = None) -> Any:
        return super().get(number, checkpoint._RECOMPUTE)


class _Numbered(_ByLine):
    """Torch asks the counter first, then this."""

    def __init__(self, held: _Held, counter: _Counter) -> None:
        super().__init__(held)
        self._counter = counter

    def __getitem__(self, kind: Any) -> _Entries:
        entries: _Entries = self._held.setdefault((kind, self._counter.line), _Entries())
        return entries

    get = __getitem__


class _Lists(_ByLine):
    """What is kept of each kind, in order."""

    def __getitem__(self, kind: Any) -> list[Any]:
        entries: list[Any] = self._held.setdefault((kind, _line()), [])
        return entries

    get = __getitem__

    def __contains__(self, kind: Any) -> bool:
        return (kind, _line()) in self._held


def _where_kept(policy: Callable[..., Any], storage: _Lists) -> Callable[..., Any]:
    """`policy`, but to compute again what has not been kept for its line."""

    def at_this_line(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if operator not in storage:
            return CheckpointPolicy.PREFER_RECOMPUTE
        return policy(context, operator, *args, **kwargs)

    return at_this_line


def _line() -> int:
    return line_of(sys._getframe(2), _calls_a_part)


def _calls_a_part(code: CodeType) -> bool:
    """Whether it is that of a function which calls a checkpointed one, in the forward or in the recompute."""
    return code in region_codes or (code.co_filename == checkpoint.__file__ and code.co_name in _CALLERS)


_CALLERS = (*CALLS, "recompute_fn")
