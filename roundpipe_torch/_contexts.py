"""Torch's own checkpoint taken for a region: by contexts given to it, or because something is decided inside (R2, R8).

It runs its part again by itself. What is saved in there would be decided again, and a region in there would begin
anew. So the part is taken for a region, as if `recompute_contexts` had been passed. That needs what torch keeps of the
part from one phase to the other, which the hooks of either know. The reentrant kind keeps nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import takewhile
from types import TracebackType
from typing import Any, Literal

import torch
from torch._guards import TracingContext

from roundpipe_core._phase import Phase, Run, open_slot, run_finders, thread
from roundpipe_core._places import Place
from roundpipe_core._replay import TapeRun
from roundpipe_core._slots import Slot, label_of

from . import _compile
from ._errors import saved_inside_torchs
from ._matching import region_codes
from ._run import TorchRun
from ._selective import count_by_line, modes_on
from ._state import Generators, generators_on
from ._torchs import LABEL, Part, in_backward_of_others, innermost, is_ours, part_of, parts_around

__all__ = ["recompute_contexts", "region_of"]

_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def recompute_contexts(label: str = "recompute_contexts") -> _Contexts:
    """Two context managers that bring saves to torch's own checkpoint function, as its `context_fn`.

    >>> import torch
    >>> from torch.utils.checkpoint import checkpoint as torchs
    >>> from roundpipe_torch import recompute_contexts, save_for_recompute
    >>> def layer(x):
    ...     scale, = save_for_recompute(x.detach().max())
    ...     return (x * scale).exp()
    >>> y = torchs(layer, torch.ones(2, requires_grad=True), use_reentrant=False, context_fn=recompute_contexts)
    >>> y.sum().backward()

    For code where only `context_fn` can be passed. Torch matches saved tensors by position and count, so there both
    phases must save the same tensors: keep the decision under `torch.no_grad()` or detached, as above. A layer with a
    differentiable gate in its forward branch only needs `roundpipe_torch.checkpoint`.

    Args:
        label: what messages call the layer.

    Returns:
        The context managers for the forward and for each recompute.
    """
    if TracingContext.try_get() is not None:
        return _compile.contexts()
    shared = _Shared(label)
    return _PhaseContext(shared, recompute=False), _PhaseContext(shared, recompute=True)


class _Shared:
    """The slot that a pair of contexts has in common, once the forward has begun."""

    __slots__ = ("label", "slot")

    def __init__(self, label: str) -> None:
        self.label = label
        self.slot = Slot(label)


class _PhaseContext:
    """Sets the phase. Can be entered again: one graph may be recomputed many times (R11)."""

    __slots__ = ("_outer", "_recompute", "_shared", "ac_graph_id")  # the last is written by torch.compile

    def __init__(self, shared: _Shared, recompute: bool) -> None:
        self._shared, self._recompute = shared, recompute
        self._outer: list[Run | None] = []

    def __enter__(self) -> None:
        phase = Phase.RECOMPUTE
        if not self._recompute:
            phase, self._shared.slot = open_slot(self._shared.label)
        self._outer.append(thread.run)
        outer = None if self._recompute else thread.run
        part = part_of(innermost(False))
        generators = None if part is None else part.generators if self._recompute else _generators(part)
        run = TorchRun(phase, self._shared.slot, None, generators, outer)
        run.torchs_recompute = self._recompute
        if part is not None:
            part.belongs_to(run)
        thread.run = run

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        thread.run = self._outer.pop()
        return False


def region_of(hooks: Any, outer: Run | None) -> TorchRun | None:
    """The run of torch's own checkpoint, inside of `outer`, where `hooks` are the innermost.

    None if there is none, or if `outer` is it or a part of it.
    """
    if is_ours(hooks):
        return None
    around = [*outer.around()] if isinstance(outer, TorchRun) else []
    new = [*takewhile(lambda part: part.run() not in around, parts_around(hooks, region_codes))]
    run = None
    for part in reversed(new):
        run = part.run() or _entered(part, run or outer)
    return run


def _entered(part: Part, outer: Run | None) -> TorchRun:
    """A run of a part of torch's, for this phase of it."""
    run: TorchRun
    if part.backward is not None:
        run = TorchRun(Phase.RECOMPUTE, part.slot or Slot(part.label), None, part.generators)
        run.torchs_recompute = True
    elif isinstance(outer, (TapeRun, _TapedPart)):
        run = _TapedPart(outer, part)
    else:
        run = TorchRun(*open_slot(part.label, outer), None, _generators(part), outer)
        if outer is not None:
            run.flips = outer.flips
    part.belongs_to(run)
    return run


def _generators(part: Part) -> Generators | None:
    """Those that torch sets back for the recompute (R7)."""
    return None if part.devices is None else Generators(generators_on(part.devices))


class _TapedPart(TorchRun):
    """The forward of torch's own checkpoint under a tape. There it is no region (R13): inference runs without it.

    What is on the tape, or comes from there, is kept for the recompute as well.
    """

    def __init__(self, outer: TapeRun | _TapedPart, part: Part) -> None:
        self._tape: TapeRun
        if isinstance(outer, _TapedPart):
            self._tape = outer._tape
            outer.count((outer.scope, label_of(part.label)))
            slot = outer.slot.begun(outer.scope, part.label)
        else:
            self._tape, slot = outer, Slot(part.label)
        super().__init__(self._tape.phase, slot, None, _generators(part), outer)

    def open_scope(self, name: str) -> Any:
        return super().open_scope(name), self._tape.open_scope(name)

    def close_scope(self, before: Any) -> None:
        own, tapes = before
        super().close_scope(own)
        self._tape.close_scope(tapes)

    def child(self, label: Any) -> Slot:
        slot = self._tape.child(label)
        self.count((self.scope, label_of(label)))
        self.slot.children.setdefault((self.scope, label_of(label)), []).append(slot)
        return slot

    def save(
        self, data: tuple[Any, ...], name: str | None, place: Place, offload: bool | None = None
    ) -> tuple[Any, ...]:
        data = self._tape.save(data, name, place)
        self._written((self.scope, name), self.slot.write((self.scope, name), data, place), offload)
        return data

    def get(self, name: str | None, place: Place) -> tuple[Any, ...]:
        key = self.scope, name
        if key not in self.slot.entries:
            self._written(key, self.slot.write(key, self._tape.get(name, place), place))
        data: tuple[Any, ...] = self.slot.read(key, place).restore()
        return data

    def once(self, function: Callable[[], Any], called: Any, place: Place) -> Any:
        key = self.numbered(self.slot.once_name(self.scope, label_of(called)))
        value = self._tape.once(lambda: self.without_gradient(function), called, place)
        self._written(key, self.slot.write(key, value, place))
        return value


class _Again(Run):
    """The recompute of a reentrant checkpoint of others. Its forward, which had no gradient, has kept nothing."""

    def __init__(self) -> None:
        super().__init__(Phase.RECOMPUTE, Slot(LABEL))

    def save(
        self, data: tuple[Any, ...], name: str | None, place: Place, offload: bool | None = None
    ) -> tuple[Any, ...]:
        raise saved_inside_torchs(self.slot.label, place)

    def get(self, name: str | None, place: Place) -> tuple[Any, ...]:
        raise saved_inside_torchs(self.slot.label, place)

    def once(self, function: Callable[[], Any], called: Any, place: Place) -> Any:
        raise saved_inside_torchs(self.slot.label, place)


def _run_here(outer: Run | None) -> Run | None:
    """The run of torch's own checkpoint that this code belongs to; `outer` if there is none."""
    if modes_on():
        count_by_line()
    hooks = innermost(False)
    if is_ours(hooks) or not (outer is None or isinstance(outer, (TorchRun, TapeRun))):
        return outer
    if hooks is not None:
        return region_of(hooks, outer) or outer
    if not isinstance(outer, TorchRun) and torch._C._current_graph_task_id() != -1 and in_backward_of_others():
        return _Again()
    return outer


run_finders.append(_run_here)
