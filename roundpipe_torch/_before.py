"""What a region finds on its thread, and leaves as it was, whatever ends it (R11).

Contexts and `finally` do so on the way out. But a keyboard interrupt, or the error that another signal's handler
raises, can come in the midst of that: while a context is entered or left, nobody answers for it. One comes at a time.
So whoever runs a region looks once more where anything was raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from roundpipe_core._phase import thread

from ._buffers import Buffers
from ._modes import Modes
from ._state import Generators, Visit
from ._torchs import innermost, is_ours

__all__ = ["Before"]

_Hooks = tuple[Callable[..., Any], Callable[..., Any]]


class Before:
    """The run, the hooks for saved tensors and the visit of this thread; for a recompute what it swaps, too."""

    _generators: Generators | None = None
    _buffers: Buffers | None = None
    _modes: Modes | None = None
    _replaced = 0
    numbers: Sequence[torch.Tensor] = ()

    def __init__(
        self, generators: Generators | None = None, buffers: Buffers | None = None, modes: Modes | None = None
    ) -> None:
        self._run = thread.run
        self._inside = Visit.inside()
        self._hooks: _Hooks | None = innermost(False)
        if generators is not None:
            self._generators, self.numbers = generators, generators.now()
        if buffers is not None:
            self._buffers, self._replaced = buffers, len(buffers.replaced)
        self._modes = modes

    def restore(self) -> None:
        """Leave it so. What a layer itself has changed is the layer's affair."""
        thread.run = self._run
        if not self._inside:
            Visit.leave()
        while self._has_left(innermost(False)):
            torch._C._autograd._pop_saved_tensors_default_hooks()
        if self._generators:
            self._generators.set(self.numbers)
        if self._buffers is not None:
            self._buffers.put_back(self._replaced)
        if self._modes is not None:
            self._modes.put_back()

    def _has_left(self, hooks: _Hooks | None) -> bool:
        """Whether these are hooks of a region that is no more."""
        if hooks is None or (self._hooks is not None and hooks[0] is self._hooks[0]):
            return False
        return is_ours(hooks)
