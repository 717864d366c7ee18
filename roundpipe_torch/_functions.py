"""Functions of autograd written in Python read back the weights that they saved as themselves.

Autograd gives them another tensor of the same memory where hooks for saved tensors are in force, as a region's are.
What a function puts on that, or looks for there (`weight.main_grad`, `weight.grad_added_to_main_grad`), is lost without
a word: the weight itself is what the optimizer and the reducer look at.
"""

from __future__ import annotations

from typing import Any

import torch

from ._views import PLAIN, storage_of

__all__ = ["let_functions_read_weights_back"]


def let_functions_read_weights_back() -> None:
    """Replace what gives their nodes `ctx.saved_tensors`, once."""
    nodes: Any = torch.autograd.function.BackwardCFunction
    read = nodes.saved_tensors.__get__

    def saved_tensors(ctx: Any) -> Any:
        found = read(ctx)
        if not any(map(_may_stand_in, found)):
            return found
        leaves = {id(node.variable): node.variable for node, _ in ctx.next_functions if hasattr(node, "variable")}
        return tuple(_itself(tensor, [*leaves.values()]) if _may_stand_in(tensor) else tensor for tensor in found)

    nodes.saved_tensors = property(saved_tensors)


def _may_stand_in(tensor: Any) -> bool:
    """Whether it may have been made by autograd in the place of a leaf. Those it makes are of no other class."""
    return type(tensor) is torch.Tensor and tensor.requires_grad and tensor.is_leaf and _has_memory(tensor)


def _has_memory(tensor: torch.Tensor) -> bool:
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not wrapped


def _itself(tensor: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
    """The one among `leaves` that `tensor` is."""
    found = [leaf for leaf in leaves if _has_memory(leaf) and _traits(leaf) == _traits(tensor)]
    return found[0] if len(found) == 1 else tensor


def _traits(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = storage_of(tensor), tensor.storage_offset(), tensor.stride(), tensor.shape
    return *place, tensor.dtype, tensor.device, tensor._version
