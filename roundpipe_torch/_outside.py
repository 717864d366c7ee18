"""Tensors that a layer reads though they are not its arguments: weights, masks, tables, what its closure has (R10).

Autograd has what a layer saved of them, as it was. A recompute reads them as they are now. So their versions are noted
when the forward is over, and where one was written to since, the recompute is watched: what it computes from that one
is not what the forward computed, and backward may not have it.

A layer may go on to write to such a tensor itself, or read it for what backward does not need, or have it within reach
and leave it alone, as an optimizer that steps in backward counts on. That is no fault.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from roundpipe_core import MutationError

from ._bindings import is_plain
from ._errors import outside_changed, user_line
from ._inputs import tensors_in
from ._state import Watch
from ._views import memory_of, version_of

__all__ = ["Outside", "Stale"]

_version, _dtype = attrgetter("_version"), attrgetter("dtype")
_KINDS = frozenset({torch.Tensor, torch.nn.Parameter})


class Outside:
    """The tensors within reach of a call, and their versions and dtypes when its forward was over."""

    __slots__ = ("_dtypes", "_tensors", "_versions")

    def __init__(self, roots: Sequence[Any]) -> None:
        tensors = _within(roots)
        self._tensors = [*map(weakref.ref, tensors)]
        self._versions, self._dtypes = _versions_of(tensors), [*map(_dtype, tensors)]

    def changed(self) -> list[torch.Tensor]:
        """Those that were written to since, or converted, which moves no version."""
        noted = zip(self._tensors, self._versions, self._dtypes, strict=True)
        found = ((reference(), version, dtype) for reference, version, dtype in noted)
        return [
            tensor
            for tensor, version, dtype in found
            if tensor is not None and (version_of(tensor) != version or _is_converted(tensor, dtype))
        ]

    def explain(self, layer: str) -> None:
        """Raise that a tensor was converted, if one was: a recompute has failed, or made others than the forward."""
        for reference, dtype in zip(self._tensors, self._dtypes, strict=True):
            tensor = reference()
            if tensor is not None and _is_converted(tensor, dtype):
                raise outside_changed(layer, tensor, "")


def _is_converted(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether it is of another dtype now. FSDP gives weights that it shards the dtype of mixed precision for a time."""
    return tensor.dtype != dtype and is_plain(tensor)


def _versions_of(tensors: list[torch.Tensor]) -> list[int]:
    try:
        return [*map(_version, tensors)]
    except RuntimeError:
        if not any(tensor.is_inference() for tensor in tensors):  # which have none
            raise
        return [*map(version_of, tensors)]


def _within(roots: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among `roots`, and in the modules among them; not their buffers, which are known otherwise."""
    tensors: dict[int, torch.Tensor] = {}
    for root in roots:
        if isinstance(root, torch.Tensor):
            tensors[id(root)] = root
            continue
        values = vars(root).values()
        if root._parameters:
            tensors.update((id(weight), weight) for weight in root._parameters.values() if weight is not None)
        if not _KINDS.isdisjoint(map(type, values)):
            tensors.update((id(value), value) for value in values if isinstance(value, torch.Tensor))
    return [*tensors.values()]


class Stale(Watch):  # type: ignore[no-untyped-call]
    """Follows what a recompute makes of tensors that were changed after the forward.

    A layer that `decides` may have a static cache, and read the part of it that was there. So there a part of what was
    changed counts as unchanged, other than of a weight.
    """

    def __init__(self, layer: str, changed: Sequence[torch.Tensor], decides: bool) -> None:
        super().__init__()
        self._layer = layer
        self._of = {memory_of(tensor): tensor for tensor in changed}
        """By the memory that has not what the forward had there, the changed tensor that this comes from."""
        self._partly = {memory for memory, tensor in self._of.items() if decides and not tensor.requires_grad}
        self._read: tuple[torch.Tensor, str] | None = None
        self._told = False
        """Whether Python has learned a value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tensors_in((args, kwargs))
        before = {*map(memory_of, given)}
        source = self._source(func, given)
        outputs = func(*args, **(kwargs or {}))
        made = {*map(memory_of, tensors_in(outputs))}
        if source is None:
            for memory in made - before:  # new, maybe where another has been
                self._of.pop(memory, None)
        elif self._overwrites(func, given):
            self._of.pop(memory_of(given[0]), None)
        elif func._schema.is_mutable or not made or made - before:  # more than a view
            self._read = self._read or (source, user_line())
            self._told = self._told or not (made or func._schema.is_mutable)
            self._of.update(dict.fromkeys(made - self._of.keys(), source))
        return outputs

    def _source(self, func: Any, given: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """A changed tensor that `func` reads, or reads what comes from it."""
        for n, tensor in enumerate(given):
            memory = memory_of(tensor)
            source = self._of.get(memory)
            if source is not None and not (memory in self._partly and _is_part(func, n, tensor, source)):
                return source
        return None

    def _overwrites(self, func: Any, given: Sequence[torch.Tensor]) -> bool:
        """Whether all of a tensor gets new values, none of which comes from a changed one."""
        if func not in _OVERWRITING or any(memory_of(tensor) in self._of for tensor in given[1:]):
            return False
        return given[0].layout is torch.strided and given[0].nbytes == given[0].untyped_storage().nbytes()

    def fault(self, tensor: torch.Tensor) -> MutationError | None:
        """What speaks against `tensor`, which the recompute has made for backward."""
        source = self._of.get(memory_of(tensor))
        if source is None and not self._told:
            return None
        read, line = self._read or (source, "")
        return None if read is None else outside_changed(self._layer, read, line)


def _is_part(func: Any, position: int, tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    return tensor.numel() < whole.numel() or (position == 0 and func in _PICKING)


_aten = torch.ops.aten
_PICKING = frozenset(
    {_aten.index.Tensor, _aten.index_select.default, _aten.gather.default, _aten.embedding.default, _aten.take.default}
)
_OVERWRITING = frozenset(
    {
        _aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default, _aten.normal_.default,
        _aten.uniform_.default, _aten.random_.default, _aten.bernoulli_.float, _aten.exponential_.default,
    }
)  # fmt: skip
