"""What tensors of an uncommon kind are made of: sparse, nested, masked, quantised ones, and those that wrap others."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["bytes_of", "held", "parts_of", "same_form"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)


def held(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor this rank holds: of a DTensor its local part. Asks no other rank."""
    if type(tensor) is torch.Tensor:
        return tensor
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold all of its values; itself if that is one, or if nobody can tell."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return _of_nested(tensor)
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout is not torch.strided:
        by_rows = tensor.layout in _BY_ROWS
        compressed = tensor.crow_indices() if by_rows else tensor.ccol_indices()
        return [compressed, tensor.col_indices() if by_rows else tensor.row_indices(), tensor.values()]
    if type(tensor) in _PLAIN:
        return [tensor.int_repr()] if tensor.is_quantized else [tensor]
    whole: Any = tensor
    if hasattr(whole, "get_mask") and hasattr(whole, "get_data"):
        mask = whole.get_mask()
        return [mask, whole.get_data().masked_fill(~mask, 0)]  # what is masked out is of no account
    if hasattr(whole, "__tensor_flatten__"):
        return [part for name in whole.__tensor_flatten__()[0] for part in parts_of(getattr(whole, name))]
    return [tensor]


def _of_nested(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.jagged:
        jagged: Any = tensor
        return [part for part in (jagged.offsets(), jagged.lengths(), jagged.values()) if part is not None]
    rows = [row.reshape(-1) for row in tensor.unbind()]
    return [tensor._nested_tensor_size(), torch.cat(rows) if rows else torch.empty(0)]


def same_form(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors can be compared element by element."""
    forms = ([(part.shape, part.dtype) for part in parts_of(held(tensor))] for tensor in (one, other))
    return one.dtype == other.dtype and one.layout == other.layout and next(forms) == next(forms)


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes that hold its values on this rank."""
    return sum(part.nbytes for part in parts_of(held(tensor)))
