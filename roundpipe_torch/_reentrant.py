"""The second engine: the forward leaves no graph, the gradient comes from the recompute's own (`use_reentrant=True`).

The two phases may do anything differently. Unlike torch's, this one takes keyword and nested tensors, gives any
structure back, trains weights behind inputs without gradient, and sees a saved value that carries gradient (R5).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from roundpipe_core import MismatchError, OptionError
from roundpipe_core._backend import expand
from roundpipe_core._errors import message
from roundpipe_core._phase import Phase, thread
from roundpipe_core._slots import Slot
from roundpipe_core._trees import Spec, flatten, unflatten

from ._frames import Options, TorchRun
from ._state import Ambient, Generators, generators_of

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
        raise OptionError(
            message(
                f"layer {slot.label!r}: context_fn, debug and verify do not go with use_reentrant=True.",
                [],
                "leave them out, or use the default engine (use_reentrant=False).",
            )
        )
    leaves: list[Any] = []
    spec = flatten((args, kwargs), leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    region = _Region(function, spec, leaves, slot, options)
    anchor = torch.empty(0, requires_grad=True)
    outputs = _Reentrant.apply(region, phase, anchor, *tensors)  # type: ignore[no-untyped-call]
    given = iter(outputs)
    return unflatten(region.output_spec, (next(given) if leaf is _TENSOR else leaf for leaf in region.output_leaves))


_TENSOR = object()


class _Region:
    """What both directions need, but for the tensors, which autograd keeps."""

    def __init__(
        self, function: Callable[..., Any], spec: Spec, leaves: list[Any], slot: Slot, options: Options
    ) -> None:
        self.function, self.spec, self.slot = function, spec, slot
        self.leaves = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.generators = Generators(generators_of(function, leaves)) if options.preserve_rng_state else None
        self.ambient = Ambient()
        self.output_spec: Spec
        self.output_leaves: list[Any] = []

    def run(self, phase: Phase, tensors: tuple[torch.Tensor, ...]) -> list[Any]:
        """The leaves of the function's outputs."""
        given = iter(tensors)
        args, kwargs = unflatten(self.spec, (next(given) if leaf is _TENSOR else leaf for leaf in self.leaves))
        run = TorchRun(phase, self.slot, None, self.generators)
        outer = thread.run
        thread.run = run
        try:
            outputs = self.function(*args, **kwargs)
        finally:
            thread.run = outer
        leaves: list[Any] = []
        self.output_spec = flatten(outputs, leaves, expand)
        return leaves


class _Reentrant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: _Region, phase: Phase, anchor: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.region = region
        ctx.save_for_backward(*tensors)
        # With a graph, so that a saved value's gradient shows (R5), but a graph that keeps nothing.
        with torch.enable_grad(), saved_tensors_hooks(partial(_drop, region.slot), _refuse):
            leaves = region.run(phase, tensors)
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
        tensors = tuple(t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors)
        generators = region.generators
        kept = generators.now() if generators else []
        try:
            with torch.enable_grad(), region.ambient.restored():
                if generators:
                    generators.set(generators.start)
                leaves = region.run(Phase.RECOMPUTE, tensors)
        finally:
            if generators:
                generators.set(kept)
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
        return (None, None, None, *(tensor.grad for tensor in tensors))


def _drop(slot: Slot, tensor: torch.Tensor) -> Slot:
    return slot


def _refuse(slot: Slot) -> torch.Tensor:
    raise MismatchError(
        message(
            f"layer {slot.label!r}: use_reentrant=True keeps no graph of the forward, and a gradient through it was "
            "asked for.",
            [],
            "return from the layer every tensor that the loss uses (a router's logits recorded on the side too), do "
            "not differentiate inside the layer, or use the default engine (use_reentrant=False).",
        )
    )
