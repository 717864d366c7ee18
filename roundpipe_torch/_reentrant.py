"""The second engine: the forward leaves no graph, the gradient comes from the recompute's own (`use_reentrant=True`).

The two phases may do anything differently. Unlike torch's, this one takes keyword and nested tensors, gives any
structure back, trains weights behind inputs without gradient, and sees a saved value that carries gradient (R5).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from roundpipe_core import MismatchError
from roundpipe_core._backend import expand
from roundpipe_core._errors import message
from roundpipe_core._phase import Phase, thread
from roundpipe_core._slots import Slot
from roundpipe_core._trees import Spec, flatten, unflatten

from ._before import Before
from ._buffers import Buffers, copies, not_misled
from ._errors import (
    drawn_in_a_crowd,
    drawn_in_another_layout,
    sharded_inside,
    started_inside,
    wrong_option,
)
from ._frames import Options
from ._hooks import Hooked, Resting, left_since, now
from ._keep import forget_with, release
from ._matching import Trace, other_layout, region_codes
from ._offload import Parcel
from ._ranks import step_is_over
from ._run import TorchRun, is_told, pack_plainly, unpack_plainly
from ._state import Ambient, DrawWatch, Generators, Visit, generators_of, modules_of, replayed
from ._uncompiled import run_as_it_is
from ._usage import held

__all__ = ["reentrant"]


def reentrant(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    phase: Phase,
    slot: Slot,
    options: Options,
) -> Any:
    """Run `function` as a region of the second engine."""
    if options.contexts is not None or options.debug or options.verify != "off":
        raise wrong_option(
            slot.label,
            "context_fn, debug and verify do not go with use_reentrant=True.",
            "leave them out, or use the default engine (use_reentrant=False).",
        )
    leaves: list[Any] = []
    spec = flatten((args, kwargs), leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    region = _Region(function, spec, leaves, slot, options)
    anchor = torch.empty(0, requires_grad=True)
    with _NO_CONTEXT if region.parcel is None or isinstance(thread.run, TorchRun) else region.parcel.inputs():
        outputs = _Reentrant.apply(region, phase, anchor, *tensors)  # type: ignore[no-untyped-call]
    given = iter(outputs)
    return unflatten(region.output_spec, (next(given) if leaf is _TENSOR else leaf for leaf in region.output_leaves))


_TENSOR = object()
_retains: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_NO_CONTEXT = contextlib.nullcontext()


class _Region:
    """What both directions need, but for the tensors, which autograd keeps."""

    __slots__ = (
        "__weakref__", "ambient", "buffers", "crowded", "function", "generators", "hooked", "leaves", "located",
        "outermost", "output_leaves", "output_spec", "parcel", "slot", "spec", "trace",
    )  # fmt: skip

    def __init__(
        self, function: Callable[..., Any], spec: Spec, leaves: list[Any], slot: Slot, options: Options
    ) -> None:
        self.function, self.spec, self.slot = function, spec, slot
        self.leaves = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.generators = Generators(generators_of(function, leaves)) if options.preserve_rng_state else None
        self.ambient = Ambient()
        self.buffers = Buffers.of(function, leaves)
        self.parcel = None if options.offload is None else Parcel(options.offload)
        self.crowded = False
        self.hooked: list[Hooked] = []  # tensors from before it that the forward has put hooks on
        self.located = is_told(thread.run)
        self.outermost = True  # of the regions of this engine
        self.trace = Trace(False, self.located)
        self.output_spec: Spec
        self.output_leaves: list[Any] = []

    def forward(self, phase: Phase, tensors: tuple[torch.Tensor, ...]) -> list[Any]:
        """The leaves of the outputs.

        With a graph, so that a saved value's gradient shows (R5), but one that keeps nothing.
        """
        visit, mark = Visit() if self.generators else None, now()
        try:
            run = TorchRun(phase, self.slot, self.trace, self.generators, thread.run)
            run.witnesses = (*run.witnesses, self.trace)
            with torch.enable_grad(), saved_tensors_hooks(partial(_drop, self.slot, run.witnesses), _refuse):
                self.outermost, run.own_graph = not run.own_graph, True
                run.observe(self.buffers)
                if self.parcel is not None:
                    run.plan, run.parcel = self.parcel.plan, self.parcel
                leaves = self._run(run, tensors)
        finally:
            self.crowded = visit is not None and visit.end()
        if self.buffers is not None:
            self.buffers.settle(self.trace.told_at >= 0)
        self.hooked = [*run.hooked, *left_since(mark, self.function, (*tensors, *self.leaves), {})]
        self.parcel = run.parcel
        if self.slot.rows is not None and not isinstance(thread.run, TorchRun):
            forget_with(self, self.slot)
        if self.generators and self.generators.missed():
            raise started_inside(self.slot.label)
        if self.outermost:
            held(self.slot, tensors, {}, self.parcel)
        return leaves

    @run_as_it_is
    def replay(self, tensors: tuple[torch.Tensor, ...]) -> list[Any]:
        """The leaves of the outputs of a recompute."""
        if step_is_over(modules_of(self.function, self.leaves)):
            raise sharded_inside(self.slot.label)
        before = Before(self.generators, self.buffers)
        try:
            attempt = partial(self._replay, tensors, before.numbers)
            leaves, drew = replayed(partial(not_misled, self.buffers, attempt), self.generators, self.crowded)
        except BaseException:
            before.restore()
            raise
        if drew:
            raise drawn_in_a_crowd(self.slot.label)
        return leaves

    def _replay(
        self, tensors: tuple[torch.Tensor, ...], numbers: Sequence[torch.Tensor], watch: DrawWatch | None
    ) -> tuple[list[Any], bool]:
        generators, trace = self.generators, Trace(False, self.located)
        visit = Visit() if generators else None
        run = TorchRun(Phase.RECOMPUTE, self.slot, trace, generators)
        run.own_graph, run.witnesses = True, (trace,)
        hooks = (
            saved_tensors_hooks(partial(_note, self.slot, trace), unpack_plainly)
            if self.trace.told_at >= 0
            else _NO_CONTEXT
        )
        try:
            run.observe(self.buffers)
            run.hooked = self.hooked
            run.knowing = self.trace.told_at >= 0
            buffers = copies(self.buffers, self.slot, run.knowing)
            with torch.enable_grad(), self.ambient.restored() or _NO_CONTEXT, buffers, hooks, watch or _NO_CONTEXT:
                run.begin()
                with Resting(self.hooked, self.function, (*tensors, *self.leaves), {}):
                    leaves = self._run(run, tensors)
            relaid = other_layout(self.trace, trace)
            if relaid is not None and run.drew():
                raise drawn_in_another_layout(self.slot.label, relaid)
        finally:
            crowded = visit is not None and visit.end()
            if generators:
                generators.set(numbers)
        return leaves, crowded

    def _run(self, run: TorchRun, tensors: tuple[torch.Tensor, ...]) -> list[Any]:
        given = iter(tensors)
        args, kwargs = unflatten(self.spec, (next(given) if leaf is _TENSOR else leaf for leaf in self.leaves))
        outer = thread.run
        try:
            thread.run = run
            outputs = self.function(*args, **kwargs)
        finally:
            thread.run = outer
        leaves: list[Any] = []
        self.output_spec = flatten(outputs, leaves, expand)
        return leaves


region_codes |= {_Region._run.__code__}


class _Reentrant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: _Region, phase: Phase, anchor: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.region = region
        ctx.save_for_backward(*tensors)
        leaves = region.forward(phase, tensors)
        region.output_leaves = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        outputs = tuple(leaf.detach() for leaf in given)
        ctx.mark_non_differentiable(*(out for out, leaf in zip(outputs, given, strict=True) if not leaf.requires_grad))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        region: _Region = ctx.region
        if not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
            raise MismatchError(
                message(
                    f"layer {region.slot.label!r}: use_reentrant=True works with backward() only, not with "
                    "torch.autograd.grad or backward(inputs=...).",
                    [],
                    "use the default engine (use_reentrant=False).",
                )
            )
        if region.parcel is not None:
            region.parcel.arrive()
        tensors = tuple(t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors)
        leaves = region.replay(tensors)
        outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if len(outputs) != len(grads):
            raise MismatchError(
                message(
                    f"layer {region.slot.label!r}: the forward gave {len(grads)} tensors, the recompute "
                    f"{len(outputs)}.",
                    [],
                    "return the same structure in both phases.",
                )
            )
        with_grad = [
            (out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None and out.requires_grad
        ]
        if with_grad:
            torch.autograd.backward([out for out, _ in with_grad], [grad for _, grad in with_grad])
        if region.outermost and not _retains():
            release(region.slot)
        return (None, None, None, *(tensor.grad for tensor in tensors))


def _drop(slot: Slot, witnesses: tuple[Trace, ...], tensor: torch.Tensor) -> Slot:
    for trace in witnesses:
        trace.witness(tensor)
    return slot


def _note(slot: Slot, trace: Trace, tensor: torch.Tensor) -> Any:
    trace.witness(tensor)
    return pack_plainly(slot, tensor)


def _refuse(slot: Slot) -> torch.Tensor:
    raise MismatchError(
        message(
            f"layer {slot.label!r}: use_reentrant=True keeps no graph of the forward, and a gradient through it was "
            "asked for.",
            [],
            "return from the layer every tensor that the loss uses (a router's logits recorded on the side too), do "
            "not differentiate inside the layer other than in recompute_once(...), or use the default engine "
            "(use_reentrant=False).",
        )
    )
