"""torch tensors, as the core sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from roundpipe_core._backend import register_backend

__all__ = ["TorchBackend"]


class TorchBackend:
    """Tensors are cloned both ways (R6).

    A version counter would tell of most writes and save the copy, but not of one through an alias made by numpy
    or DLPack, and inference tensors have none.
    """

    name = "torch"

    def owns(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def expand(self, value: Any) -> tuple[Sequence[Any], Callable[[list[Any]], Any]] | None:
        node = _pytree.SUPPORTED_NODES.get(type(value))
        if node is None:
            return None
        children, context = node.flatten_fn(value)
        return list(children), lambda items: node.unflatten_fn(items, context)

    def gradient_fault(self, array: torch.Tensor) -> tuple[str, str] | None:
        if not array.requires_grad:
            return None
        return (
            "requires grad",
            "save what decides (indices, a mask, a branch), or its .detach() and compute the differentiable part "
            "from it in both phases.",
        )

    def snapshot(self, array: torch.Tensor) -> torch.Tensor:
        return array.clone()

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.clone()

    def nbytes(self, stored: torch.Tensor) -> int:
        return stored.nbytes

    def rows_differing(self, stored: torch.Tensor, array: torch.Tensor) -> tuple[int, int, int] | None:
        rows = stored.shape[0] if stored.ndim else 1
        if stored.shape != array.shape or stored.dtype != array.dtype:
            return rows, rows, 0
        return differing_rows(stored, array)

    def without_gradient(self, function: Callable[[], Any]) -> Any:
        with torch.no_grad():
            return function()


def differing_rows(
    one: torch.Tensor, other: torch.Tensor, tolerance: tuple[float, float] | None = None
) -> tuple[int, int, int] | None:
    """(rows that differ, rows, first such row) of two tensors of one shape; None if all agree.

    With `tolerance` (relative, absolute) rows of floats may differ by that much. Reads the result back to the host.
    """
    if tolerance is None or not one.dtype.is_floating_point:
        differs = (one != other) & ~((one != one) & (other != other))
    else:
        differs = ~torch.isclose(one, other, *tolerance, equal_nan=True)
    rows = differs.reshape(one.shape[0], -1).any(1) if one.ndim and one.numel() else differs.reshape(-1)
    if not bool(rows.any()):
        return None
    return int(rows.sum()), len(rows), int(rows.int().argmax())


register_backend(TorchBackend())
