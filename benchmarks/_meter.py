"""Counts instead of clocks: live bytes and operations, seen by a dispatch mode."""

from __future__ import annotations

import collections
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

HOST_SYNCS = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::nonzero",
        "aten::masked_select",
        "aten::_unique2",
        "aten::unique_dim",
        "aten::is_nonzero",
        "aten::equal",
        "aten::bincount",
    }
)
"""Operations that on an accelerator make the host wait for a value or a size."""


class Meter(TorchDispatchMode):
    """Follows every storage that an operation gives, from its birth to its death."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.operations: collections.Counter[str] = collections.Counter()
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_iter((args, kwargs)):
            if isinstance(given, torch.Tensor):
                self._known.setdefault(given.untyped_storage(), 0)  # it was there before, and so are views of it
        outputs = func(*args, **(kwargs or {}))
        self.operations[func._schema.name] += 1
        for output in tree_iter(outputs):
            if isinstance(output, torch.Tensor):
                self._follow(output.untyped_storage())
        self.peak = max(self.peak, self.live)
        return outputs

    def _follow(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known and storage.nbytes():
            size = self._known[storage] = storage.nbytes()
            self.live += size
            weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.live -= size

    @property
    def syncs(self) -> int:
        """Operations so far that wait for the device."""
        return sum(count for name, count in self.operations.items() if name in HOST_SYNCS)
