"""The operator that keeps decisions out of a compiled backward.

torch.compile traces forward and backward into one graph and marks each node of a checkpointed region to be computed
again in backward. `decided` leaves no node there. When it is traced, it turns the mark of whatever made its arguments
into "keep". What only led to these values is then needed nowhere in backward, and is not there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from ._errors import ran_uncompiled

__all__ = ["decided", "learn_to_trace"]

_library: Any = torch.library.Library("roundpipe", "DEF")  # type: ignore[no-untyped-call]
_library.define("decided(Tensor[] tensors, Scalar[] numbers) -> ()")


def _run(tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> None:
    if torch.is_grad_enabled() and any(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors):
        raise ran_uncompiled()


_library.impl("decided", _run, "CompositeExplicitAutograd")

decided: Any = torch.ops.roundpipe.decided.default


def learn_to_trace() -> None:
    """Tell the operator what to do when it is traced. Not at import, which would load much of the compiler."""
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

    if ProxyTorchDispatchMode not in decided.python_key_table:
        decided.py_impl(ProxyTorchDispatchMode)(_keep_all)


def _keep_all(mode: Any, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> None:
    for value in (*tensors, *numbers):
        for node in _nodes_of(value, mode.tracer):
            _keep(node)


def _nodes_of(value: Any, tracer: Any) -> Iterator[torch.fx.Node]:
    """The node that made `value`; none for a constant."""
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat)):
        slot: Any = get_proxy_slot(value, tracer, None)
        if slot is not None:
            yield (slot.proxy if isinstance(value, torch.Tensor) else slot.force()).node


def _keep(node: torch.fx.Node) -> None:
    """Do not compute again what made this value."""
    maker = _maker(node)
    if maker.op != "call_function":
        return  # an argument
    maker.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for result in maker.users:  # all results of one operator, or it would have to run for the others
        if result.target is operator.getitem:
            result.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _maker(node: torch.fx.Node) -> torch.fx.Node:
    """The operator that wrote the memory: views, which are free, are looked through."""
    while True:
        source = node.all_input_nodes[0] if node.target is operator.getitem else node
        if not (isinstance(source.target, torch._ops.OpOverload) and source.target.is_view):
            return source
        node = source.all_input_nodes[0]
