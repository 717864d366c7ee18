"""Which tensor is a part of which: how to take the same part of a tensor that was made again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["PLAIN", "Dress", "Origins", "View", "dress_of", "dressed", "memory_of", "storage_of", "version_of"]


PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""The classes of tensors that are no containers of others."""


class View(NamedTuple):
    """A view of tensor number `whole`: all of it, or what `geometry` says."""

    whole: int
    geometry: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int] | None = None
    """Strides of the whole, then the view's sizes, strides, and offset from the whole's."""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The same view of `whole`, without gradient."""
        whole = whole.detach()
        if self.geometry is None:
            return whole
        expected, sizes, strides, offset = self.geometry
        if whole.stride() != expected:
            whole = torch.empty_strided(whole.shape, expected, dtype=whole.dtype, device=whole.device).copy_(whole)
        return whole.as_strided(sizes, strides, whole.storage_offset() + offset)


class Origins:
    """Tells of a tensor whether it is one of some known ones, or a view into it."""

    __slots__ = ("_by_identity", "_by_storage", "_known")

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        self._known = known
        self._by_identity: dict[int, int] = {}
        self._by_storage: dict[int, list[int]] = {}
        for n, tensor in enumerate(known):
            self._by_identity.setdefault(id(tensor), n)
            storage = storage_of(tensor)
            if storage is not None:
                self._by_storage.setdefault(storage, []).append(n)

    def itself(self, tensor: torch.Tensor) -> int | None:
        """The number of the known tensor that `tensor` is."""
        return self._by_identity.get(id(tensor))

    def of(self, tensor: torch.Tensor) -> View | None:
        """The part that `tensor` is, if it surely is one."""
        n = self.itself(tensor)
        if n is not None:
            return View(n)
        storage = storage_of(tensor)
        for n in () if storage is None else self._by_storage.get(storage, ()):
            whole = self._known[n]
            if _is_within(tensor, whole):
                offset = int(tensor.storage_offset() - whole.storage_offset())
                return View(n, (whole.stride(), tuple(tensor.shape), tensor.stride(), offset))
        return None


def _is_within(part: torch.Tensor, whole: torch.Tensor) -> bool:
    if part.dtype is not whole.dtype or part.is_conj() != whole.is_conj() or part.is_neg() != whole.is_neg():
        return False
    runs = _runs(whole)
    first = int(part.storage_offset() - whole.storage_offset())
    if runs is None or first < 0:
        return False
    last = []  # of each run, the place of the last element that the part has
    for stride, count in runs:
        place, first = divmod(first, stride)
        last.append((place, stride, count))
    if first:
        return False  # begins in a gap, where another tensor may be
    for stride, size in zip(part.stride(), part.shape, strict=True):
        if stride == 0 or size == 1:
            continue
        n = next((n for n, (_, step, _) in enumerate(last) if stride % step == 0), None)
        if n is None:
            return False
        place, step, count = last[n]
        last[n] = place + (size - 1) * (stride // step), step, count
    return all(place < count for place, _, count in last)


def _runs(tensor: torch.Tensor) -> list[tuple[int, int]] | None:
    """The elements of memory that a tensor has, whatever its shape: stride and count of each run, longest stride first.

    None if an element is there more than once.
    """
    runs: list[tuple[int, int]] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride < (runs[-1][0] * runs[-1][1] if runs else 1):
            return None
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = runs[-1][0], runs[-1][1] * size
        else:
            runs.append((stride, size))
    return runs[::-1] or [(1, 1)]


def storage_of(tensor: torch.Tensor) -> int | None:
    """Names the memory of a plain tensor; None for one that has no memory of its own."""
    if tensor.layout is not torch.strided or type(tensor) not in PLAIN:
        return None
    return int(tensor.untyped_storage()._cdata)


def memory_of(tensor: torch.Tensor) -> int:
    """Names the memory of any tensor; of one that has none to name, the tensor itself, as long as it lives."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except torch.OutOfMemoryError:  # a RuntimeError too
        raise
    except (NotImplementedError, RuntimeError):  # a sparse one, or one of a class that wraps others
        return id(tensor)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 where nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


Dress = tuple[type[torch.Tensor], dict[str, Any]]
"""The class of a tensor and its attributes, which autograd and `detach` leave out of what they make in its place."""


def dress_of(tensor: torch.Tensor) -> Dress | None:
    """What a tensor in the place of this one lacks."""
    kind = type(tensor)
    if kind.__torch_dispatch__ is not _NO_DISPATCH:  # it wraps others, and so do those that are made of it
        return None
    return (kind, vars(tensor)) if kind is not torch.Tensor or vars(tensor) else None


def dressed(tensor: torch.Tensor, dress: Dress | None) -> torch.Tensor:
    """`tensor`, of this class, its attributes one with those of the other."""
    if dress is not None:
        if type(tensor) is not dress[0]:
            tensor.__class__ = dress[0]
        tensor.__dict__ = dress[1]
    return tensor


_NO_DISPATCH = torch.Tensor.__torch_dispatch__
