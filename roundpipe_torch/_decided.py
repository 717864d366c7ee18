"""The operator that keeps decisions out of a compiled backward.

torch.compile traces forward and backward into one graph and marks each node of a checkpointed region to be computed
again in backward. `decided` leaves no node there. When it is traced, it turns the mark of whatever made its arguments
into "keep". What only led to these values is then needed nowhere in backward, and is not there.
"""

from __future__ import annotations

import operator
import sys
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
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    if distributed is not None:
        distributed.DTensor._op_dispatcher._custom_op_handlers[decided] = _decided_shards


def _decided_shards(_: Any, args: tuple[Sequence[torch.Tensor], Sequence[Any]], kwargs: Any) -> None:
    """The same for what DTensors are made of."""
    tensors, numbers = args
    decided([getattr(tensor, "_local_tensor", tensor) for tensor in tensors], numbers)


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
    """Do not compute again what made this value, nor what the compiler will merge with it."""
    maker = _maker(node)
    if maker.op != "call_function":
        return  # an argument
    for one in (maker, *_twins(maker)):
        one.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for result in one.users:  # all results of one operator, or it would have to run for the others
            if result.target is operator.getitem:
                result.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _maker(node: torch.fx.Node) -> torch.fx.Node:
    """The operator that wrote the memory: views, which are free, are looked through."""
    while True:
        source = node.all_input_nodes[0] if node.target is operator.getitem else node
        if not (isinstance(source.target, torch._ops.OpOverload) and source.target.is_view):
            return source
        node = source.all_input_nodes[0]


def _twins(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Earlier nodes that compute the same: of these and `node`, only the first will be left, with its mark."""
    for other in node.graph.find_nodes(op="call_function", target=node.target, sort=False):
        if other is not node and _same(node, other):
            yield other


def _same(one: torch.fx.Node, other: torch.fx.Node) -> bool:
    pairs, seen = [(one, other)], set()
    while pairs:
        pair = pairs.pop()
        if pair[0] is pair[1] or pair in seen:
            continue
        seen.add(pair)
        if pair[0].op != "call_function" or pair[0].target is not pair[1].target or _draws(pair[0]):
            return False
        inputs = [node.all_input_nodes for node in pair]
        if len(inputs[0]) != len(inputs[1]) or _constants(pair[0]) != _constants(pair[1]):
            return False
        pairs += zip(*inputs, strict=True)
    return True


def _draws(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _constants(node: torch.fx.Node) -> Any:
    """The arguments, with all that nodes compute left out."""
    return torch.fx.map_arg((node.args, node.kwargs), lambda _: None)
