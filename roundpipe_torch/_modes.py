"""What a forward found of its modules besides buffers: training or evaluation, and which weights are trained (R10).

Others set both on a whole model: `eval()` for a validation, `requires_grad_(False)` for the other half of a GAN. A
backward that is still due has nothing to do with it, for autograd has noted what it needs. A recompute has to find
both as its forward did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

import torch
from torch.jit import ScriptModule

__all__ = ["Modes", "with_children"]


def with_children(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """These and all that are inside of them, but for scripted ones, of which nothing can be swapped."""
    waiting: list[torch.nn.Module | None] = [*modules]
    found, seen = [], set()
    while waiting:
        module = waiting.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        if not isinstance(module, ScriptModule):
            found.append(module)
            if module._modules:
                waiting += module._modules.values()
    return found


class Modes:
    """The modes of modules when a forward began."""

    __slots__ = ("_before", "_modules", "_trained", "_training", "_weights")

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self._modules = modules
        self._weights = [weight for module in modules for weight in module._parameters.values() if weight is not None]
        self._training, self._trained = [*map(_training, modules)], [*map(_trained, self._weights)]
        self._before: list[tuple[torch.nn.Module | torch.Tensor, bool]] = []  # modes of what is as it was then

    def restored(self) -> contextlib.AbstractContextManager[None] | None:
        """A context in which they are as they were then; None if they are so now."""
        training, trained = [*map(_training, self._modules)], [*map(_trained, self._weights)]
        return None if training == self._training and trained == self._trained else self._swapped()

    @contextlib.contextmanager
    def _swapped(self) -> Iterator[None]:
        try:
            both: list[torch.nn.Module | torch.Tensor] = [*self._modules, *self._weights]
            for one, wanted in zip(both, (*self._training, *self._trained), strict=True):
                now = one.training if isinstance(one, torch.nn.Module) else one.requires_grad
                if now != wanted:
                    self._before.append((one, now))
                    _set(one, wanted)
            yield
        finally:
            self.put_back()

    def put_back(self) -> None:
        """Give them the modes that they had. May be called again: an interrupt may have cut it short."""
        while self._before:
            _set(*self._before[-1])
            self._before.pop()


_training: Callable[[torch.nn.Module], bool] = attrgetter("training")
_trained: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")


def _set(one: torch.nn.Module | torch.Tensor, mode: bool) -> None:
    if isinstance(one, torch.nn.Module):
        one.training = mode
    elif one.is_leaf:  # else it has become part of a graph
        one.requires_grad_(mode)
