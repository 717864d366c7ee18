"""The transforms of torch.func, inside of a layer and around one.

*Inside*, `grad`, `vjp` and their kin refuse hooks for saved tensors, for they would have to wrap what a hook gives.
Ours are lifted as long as one runs: what it keeps for a backward of the layer the graph of the forward keeps, as if
`keep` had been said of it. They are lifted too while torch makes a graph of a part, as `scan` and `flex_attention` do:
that differentiates a trace, which has no values, and which no backward asks for.

*Around*, `vmap` stands above autograd, which saves whole batches. The arguments of a region are of one call of `vmap`
though, and so is what it decides. A recompute in backward, where that call is over, begins it once more; one that a
transform of the backward asks for (`vmap` over gradients) runs outside of that. What `jvp` gives a region is dead by
then. `grad` would refuse the region's hooks.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._functorch.pyfunctorch import (
    GradInterpreter,
    VmapInterpreter,
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
)
from torch.fx.experimental import proxy_tensor

from ._errors import under_a_transform
from ._torchs import innermost, is_ours

__all__ = ["Batches", "batched", "batches_around", "let_transforms_lift_hooks", "transformed"]

Batches = tuple[tuple[int, str], ...]
"""For each `vmap`, the outermost first: how many calls it makes one of, and how these draw random numbers."""

_functorch: Any = torch._C._functorch
transformed: Callable[[], Any] = _functorch.peek_interpreter_stack
"""Something, if a transform runs on this thread."""


def in_transform() -> bool:
    """Whether one runs here, or a backward of whole batches of gradients (`is_grads_batched`), which is like `vmap`."""
    return transformed() is not None or _is_included(_BATCHED_GRADIENTS)


_is_included: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included
_BATCHED_GRADIENTS: Any = torch._C._parse_dispatch_key("VmapMode")


def batches_around(layer: str, use_reentrant: bool) -> Batches | None:
    """Those that a region begins in; None if there is more around it, so that no recompute can be."""
    around = retrieve_all_functorch_interpreters()
    if use_reentrant or any(isinstance(one, GradInterpreter) for one in around):
        raise under_a_transform(layer, use_reentrant)
    batches = tuple((one.batch_size(), one.randomness()) for one in around if isinstance(one, VmapInterpreter))
    return batches if len(batches) == len(around) else None


def batched(layer: str, batches: Batches | None) -> AbstractContextManager[None]:
    """Run in these, and in no others."""
    if batches is None:
        raise under_a_transform(layer, False)
    return _batched(batches)


def _without_batched_gradients() -> AbstractContextManager[None]:
    guard: Any = torch._C._ExcludeDispatchKeyGuard
    found: AbstractContextManager[None] = guard(torch._C.DispatchKeySet(_BATCHED_GRADIENTS))
    return found


@contextlib.contextmanager
def _batched(batches: Batches) -> Iterator[None]:
    begun = 0
    with temporarily_clear_interpreter_stack(), _without_batched_gradients():
        try:
            for size, randomness in batches:
                _functorch._vmap_increment_nesting(size, randomness)
                begun += 1
            yield
        finally:
            for _ in range(begun):
                _functorch._vmap_decrement_nesting()


def let_transforms_lift_hooks() -> None:
    """Replace the functions of torch that refuse hooks and that trace, once.

    Where no hooks of ours are in force they do what they did.
    """
    graph: Any = torch.autograd.graph
    refuse: Callable[[str], AbstractContextManager[None]] = graph.disable_saved_tensors_hooks
    trace: Callable[..., Any] = proxy_tensor.dispatch_trace

    @contextlib.contextmanager
    def disable_saved_tensors_hooks(error_message: str) -> Iterator[None]:
        with _lifted(), refuse(error_message):
            yield

    @functools.wraps(trace)
    def dispatch_trace(*args: Any, **kwargs: Any) -> Any:
        with _lifted():
            return trace(*args, **kwargs)

    graph.disable_saved_tensors_hooks = disable_saved_tensors_hooks
    tracer: Any = proxy_tensor
    tracer.dispatch_trace = dispatch_trace
    dynamo: Any = sys.modules.get("torch._dynamo.variables.torch")
    if dynamo is not None:  # else it will find this one when it is loaded
        dynamo.supported_ctx_manager_classes[disable_saved_tensors_hooks] = None


@contextlib.contextmanager
def _lifted() -> Iterator[None]:
    """Without hooks of a region, as far as they are the innermost."""
    lifted = []
    while is_ours(innermost(False)):
        lifted.append(innermost(False))
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(lifted):
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
