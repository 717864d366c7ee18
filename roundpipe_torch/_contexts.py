"""Torch's own checkpoint taken for a region: by contexts given to it, or because regions of ours are inside (R8).

It runs its part again by itself, and a region in there would begin anew, and decide again. So the part is taken for a
region around them, as if `recompute_contexts` had been passed. That needs what torch keeps of the part from one phase
to the other, which the hooks of either know.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import takewhile
from types import TracebackType
from typing import Any, Literal

from torch._guards import TracingContext

from roundpipe_core._phase import Phase, Run, open_slot, thread
from roundpipe_core._slots import Slot

from . import _compile
from ._matching import region_codes
from ._run import TorchRun
from ._torchs import Part, innermost, is_ours, part_of, parts_around

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
    differentiable gate in its forward branch only needs `roundpipe_torch.checkpoint`. The random numbers of a
    skipped decision are not made up for either (R7).

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
        run = TorchRun(phase, self._shared.slot, None, None, outer)
        run.torchs_recompute = self._recompute
        part = part_of(innermost(False))
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
    if part.backward is None:
        run = TorchRun(*open_slot(_LABEL, outer), None, None, outer)
    else:
        run = TorchRun(Phase.RECOMPUTE, part.slot or Slot(_LABEL), None, None)
        run.torchs_recompute = True
    part.belongs_to(run)
    return run


_LABEL = "torch.utils.checkpoint"
