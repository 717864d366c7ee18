"""What a forward found of its modules besides buffers: modes, which weights are trained, attributes that are tensors.

Others set the modes of whole models: `eval()` for a validation, `requires_grad_(False)` for the other half of a GAN. A
backward that is still due has nothing to do with it, for autograd has noted what it needs. Hooks and callers set
tensors: a weight that is normed before each call, the mask of a batch. A recompute has to find all of it as its forward
did (R10).

Attributes that the forward itself sets are another matter. If it left nothing out, and does not know its phase, its
recompute does the same again, and so begins with what was there before. Else only the layer knows what it will need.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch.jit import ScriptModule

__all__ = ["Modes", "with_children"]

_ABSENT: Any = object()
_Attribute = tuple[torch.nn.Module, str, Any]


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
    """What was set of modules when a forward began."""

    __slots__ = ("_attributes", "_before", "_modules", "_trained", "_training", "_weights")

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self._modules = modules
        self._weights = [weight for module in modules for weight in module._parameters.values() if weight is not None]
        self._training, self._trained = [*map(_training, modules)], [*map(_trained, self._weights)]
        self._attributes: list[_Attribute] = [*_attributes(modules)]
        self._before: list[tuple[Any, str, Any]] = []  # what is to be put back

    def settle(self, repeats: bool, moved: Collection[torch.nn.Module]) -> None:
        """The forward is over.

        Args:
            repeats: its recompute does all that it did.
            moved: modules of which it changed buffers. What numbers they have may tell of what is in these.
        """
        if not repeats:
            self._attributes = [one for one in self._attributes if _found(*one[:2]) is one[2] and not _is_number(one)]
            return
        steered = {id(module) for module in moved}
        known = {(id(module), name) for module, name, _ in self._attributes}
        now = [*_attributes(self._modules)]
        begun = [*self._attributes, *(one for one in now if (id(one[0]), one[1]) not in known)]
        self._attributes = [
            (module, name, value if (id(module), name) in known else _ABSENT)
            for module, name, value in begun
            if not _is_number((module, name, value)) or (id(module) in steered and _found(module, name) != value)
        ]

    def restored(self) -> contextlib.AbstractContextManager[None] | None:
        """A context in which all is as it was then; None if it is so now."""
        if (
            [*map(_training, self._modules)] == self._training
            and [*map(_trained, self._weights)] == self._trained
            and not any(map(_has_changed, self._attributes))
        ):
            return None
        return self._swapped()

    @contextlib.contextmanager
    def _swapped(self) -> Iterator[None]:
        modes = zip(self._modules, self._training, strict=True)
        trained = zip(self._weights, self._trained, strict=True)
        wanted: list[tuple[Any, str, Any]] = [
            *((module, "training", then) for module, then in modes),
            *((weight, "requires_grad", then) for weight, then in trained if weight.is_leaf),
            *filter(_has_changed, self._attributes),
        ]
        try:
            for one, name, then in wanted:
                now = _found(one, name)
                if now is not then:
                    self._before.append((one, name, now))
                    _set(one, name, then)
            yield
        finally:
            self.put_back()

    def put_back(self) -> None:
        """Set what there was. May be called again: an interrupt may have cut it short."""
        while self._before:
            _set(*self._before[-1])
            self._before.pop()


_training: Callable[[torch.nn.Module], bool] = attrgetter("training")
_trained: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")


def _found(one: Any, name: str) -> Any:
    return one.requires_grad if isinstance(one, torch.Tensor) else vars(one).get(name, _ABSENT)


def _set(one: Any, name: str, value: Any) -> None:
    if isinstance(one, torch.Tensor):
        one.requires_grad_(value)
    elif value is _ABSENT:
        vars(one).pop(name, None)
    else:
        vars(one)[name] = value


def _has_changed(attribute: _Attribute) -> bool:
    """Whether it is another tensor, or a number of a buffer; what is None may become anything else, as FSDP's notes."""
    module, name, then = attribute
    now = _found(module, name)
    return now is not then and ((then is not None and then is not _ABSENT) or isinstance(now, torch.Tensor))


def _is_number(attribute: _Attribute) -> bool:
    return type(attribute[2]) in _NUMBERS


_NUMBERS = frozenset({bool, int, float})


def _attributes(modules: Iterable[torch.nn.Module]) -> Iterator[_Attribute]:
    """Tensors, what may become some, and numbers beside buffers."""
    for module in modules:
        if type(module).__module__.startswith("torch.nn.modules.") and not module._forward_pre_hooks:
            continue
        numbers = _NUMBERS if module._buffers else ()
        for name, value in [*vars(module).items()]:
            is_number = type(value) in numbers and not name.startswith(_OF_FRAMEWORKS)
            if value is None or is_number or (isinstance(value, torch.Tensor) and not _is_of_a_weight(value)):
                yield module, name, value


_OF_FRAMEWORKS = ("_", "ds_", "training")
"""Where they keep books that may not be turned back. DeepSpeed counts in `ds_...`."""


def _is_of_a_weight(tensor: torch.Tensor) -> bool:
    """Whether it is a view, as FSDP makes of weights and takes away again."""
    base = tensor._base
    return base is not None and base.is_leaf and base.requires_grad
