"""What names stood for in a forward: weights, parts and hooks of modules, and variables that a function has of others.

Between a forward and its backward they may be bound to something else: weights by a state that is loaded or by
pruning, parts by an adapter, hooks by who wanted them for one call, a variable by the next round of its loop. Autograd
has what the forward used, so a recompute has to find it again (R10).

What the forward itself binds is left as it has left it.
"""

from __future__ import annotations

import dis
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter, is_
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch.nn.utils.parametrize import _inject_property, is_parametrized

from ._views import PLAIN

__all__ = ["Bindings", "is_plain"]

_EMPTY: Any = object()
_Registry = dict[Any, Any]


class Bindings:
    """Of the modules and the functions that a call can reach."""

    __slots__ = ("_before", "_cells", "_classes", "_hooked", "_modules", "_registries", "_then")

    def __init__(self, modules: list[torch.nn.Module], closures: Sequence[FunctionType]) -> None:
        self._modules = modules
        self._cells = [(cell, _content(cell)) for cell in _read_only(closures)] if closures else []
        self._hooked: Collection[int] = ()
        self._registries: list[_Registry] | None = None
        self._then: list[_Registry] = []
        self._classes: list[type[torch.nn.Module]] = []
        self._before: list[tuple[Any, Any]] = []  # what is to be put back

    def settle(self) -> None:
        """The forward is over."""
        if self._cells:
            self._cells = [(cell, then) for cell, then in self._cells if _content(cell) is then]
        registries: list[_Registry] = [*chain.from_iterable(map(_weights_and_parts, self._modules))]
        if any(chain.from_iterable(map(_hooks, self._modules))):
            hooked = [*filter(_is_hooked, self._modules)]
            self._hooked = {*map(id, hooked)}
            registries += chain.from_iterable(map(_all_hooks, hooked))
        self._registries, self._then = registries, [*map(dict.copy, registries)]
        self._classes = [*map(type, self._modules)]

    def changed(self) -> bool:
        """Whether one of them is bound to something else now. Not while the forward, under way, may bind them."""
        if self._registries is None:
            return False
        now = [*chain.from_iterable(map(dict.values, self._registries))]
        then = [*chain.from_iterable(map(dict.values, self._then))]
        return (
            len(now) != len(then)
            or not all(map(is_, now, then))
            or [*map(type, self._modules)] != self._classes
            or (any(chain.from_iterable(map(_hooks, self._modules))) and self._newly_hooked() != [])
            or (self._cells != [] and any(_content(cell) is not then for cell, then in self._cells))
        )

    def restore(self) -> None:
        """Bind them as they were."""
        if self._registries is None:
            return
        for cell, content in self._cells:
            self._bind(cell, content)
        fresh = chain.from_iterable(map(_all_hooks, self._newly_hooked()))
        renamed: set[int] = set()
        for registry, then in [*zip(self._registries, self._then, strict=True), *((hooks, {}) for hooks in fresh)]:
            names = [name for name in {**then, **registry} if then.get(name, _EMPTY) is not registry.get(name, _EMPTY)]
            if names and all(is_plain(which.get(name)) for which in (then, registry) for name in names):
                if then.keys() != registry.keys():
                    renamed.add(id(registry))
                self._bind(registry, then)
        for module in self._modules:
            if id(module._parameters) in renamed:  # what goes by their names may be an attribute now, or become one
                attributes = vars(module).items()
                self._bind(vars(module), {name: one for name, one in attributes if name not in module._parameters})
        for module, cls in zip(self._modules, self._classes, strict=True):
            if type(module) is not cls:
                self._before.append((module, type(module)))
                module.__class__ = cls
            computed: Any = module._modules["parametrizations"] if is_parametrized(module) else ()
            lacking = {*computed} - {*dir(cls)}
            for name in lacking:  # it is gone from the class too when a parametrization is removed
                self._before.append((cls, name))
                _inject_property(module, name)

    def put_back(self) -> None:
        """Bind them as they were found. May be called again: an interrupt may have cut it short."""
        while self._before:
            _set(*self._before[-1])
            self._before.pop()

    def _bind(self, names: Any, content: Any) -> None:
        self._before.append((names, _content(names)))
        _set(names, content)

    def _newly_hooked(self) -> list[torch.nn.Module]:
        return [module for module in self._modules if _is_hooked(module) and id(module) not in self._hooked]


_weights_and_parts: Any = attrgetter("_parameters", "_modules")
_hooks: Any = attrgetter("_forward_hooks", "_forward_pre_hooks")
_all_hooks: Any = attrgetter(
    "_forward_hooks", "_forward_pre_hooks",
    "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip


def _is_hooked(module: torch.nn.Module) -> bool:
    return any(_hooks(module))


def is_plain(value: Any) -> bool:
    """Whether it is not a weight that is sharded: who does that puts others in the place of it, and must find them."""
    if not isinstance(value, torch.Tensor):
        return True
    if type(value) not in PLAIN or hasattr(value, _IN_ONE_OF_FSDPS):
        return False
    return value._base is None or not value._base.is_leaf


_IN_ONE_OF_FSDPS = "_fsdp_flattened"
"""What FullyShardedDataParallel marks weights by of which it has views in their place while they are used."""


def _content(names: Any) -> Any:
    """What a cell has, or a registry."""
    if isinstance(names, dict):
        return names.copy()
    try:
        return names.cell_contents
    except ValueError:
        return _EMPTY


def _set(names: Any, content: Any) -> None:
    if isinstance(names, torch.nn.Module):
        names.__class__ = content
    elif isinstance(names, type):
        if content in vars(names):
            delattr(names, content)
    elif isinstance(names, dict):
        gone = names.keys() - content.keys()
        names.update(content)
        for name in gone:
            del names[name]
        if [*names] != [*content]:  # hooks are called in order
            for name in content:
                names[name] = names.pop(name)
    elif content is _EMPTY:
        del names.cell_contents
    else:
        names.cell_contents = content


def _read_only(closures: Iterable[FunctionType]) -> list[CellType]:
    """The variables that these functions have of others, but for those that one of them binds."""
    cells: dict[int, CellType] = {}
    bound: set[int] = set()
    for function in closures:
        own = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        cells.update((id(cell), cell) for cell in own.values())
        bound.update(id(own[name]) for name in _bound_in(function.__code__))
    return [cell for key, cell in cells.items() if key not in bound]


@lru_cache(maxsize=1024)
def _bound_in(code: CodeType) -> frozenset[str]:
    """The variables of others that code binds, or functions in it do."""
    found: set[str] = set()
    if not _BINDING.isdisjoint(code.co_code[::2]):
        found.update(step.argval for step in dis.get_instructions(code) if step.opcode in _BINDING)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _bound_in(inner)
    return frozenset(found & {*code.co_freevars})


_BINDING = frozenset({dis.opmap["STORE_DEREF"], dis.opmap["DELETE_DEREF"]})
