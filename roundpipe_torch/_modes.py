"""What a forward found of its modules besides buffers: modes, which weights are trained, attributes, bindings.

Others set the modes of whole models: `eval()` for a validation, `requires_grad_(False)` for the other half of a GAN. A
backward that is still due has nothing to do with it, for autograd has noted what it needs. Hooks and callers set
tensors, flags, names and numbers: a weight that is normed before each call, the mask of a batch, the active adapter, a
temperature. A recompute has to find all of it as its forward did (R10).

Attributes that the forward itself sets are another matter. If it left nothing out, and does not know its phase, its
recompute does the same again, and so begins with what was there before. Else only the layer knows what it will need.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, starmap
from operator import attrgetter, is_
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.jit import ScriptModule

from ._bindings import Bindings
from ._named import named_by, names_nothing
from ._state import attributes_of, generators_within, reached

__all__ = ["Modes", "generators_in", "own_generators", "taken_apart", "with_children"]

_ABSENT: Any = object()
_Attribute = tuple[Any, str, Any]


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


def taken_apart(
    function: Any, leaves: Collection[Any], closures: list[FunctionType], objects: list[Any]
) -> tuple[Sequence[Any], list[torch.nn.Module]]:
    """What a call can reach, see `reached`, and all modules in that."""
    roots = reached(function, leaves, closures, objects)
    if not roots and not objects and names_nothing(function):
        return (), []
    modules = with_children(root for root in roots if isinstance(root, torch.nn.Module)) if roots else []
    named = named_by(function, {type(function), *map(type, modules), *map(type, objects)} - _FUNCTIONS)
    if not named:
        return roots, modules
    return [*roots, *named], with_children([*modules, *(one for one in named if isinstance(one, torch.nn.Module))])


_FUNCTIONS = {FunctionType, MethodType}


def own_generators(function: Any, values: Collection[Any]) -> tuple[torch.Generator, ...]:
    """Those that a call can reach, and among the attributes of the modules there."""
    roots, modules = taken_apart(function, values, [], [])
    return generators_in(roots, [vars(module) for module in modules if _may_have_more(module)])


def generators_in(roots: Collection[Any], attributes: Sequence[dict[str, Any]]) -> tuple[torch.Generator, ...]:
    """Those among `roots`, and in the `attributes` of modules, each once."""
    found = [root for root in roots if type(root) is torch.Generator] if torch.Generator in map(type, roots) else []
    kinds = [*map(type, chain.from_iterable(map(dict.values, attributes)))] if attributes else []
    if not _LEAD_NOWHERE.issuperset(kinds) or kinds.count(dict) > _DICTS_OF_TORCH * len(attributes):
        own = ([then[name] for name in then.keys() - _OF_TORCH] for then in attributes)
        found += generators_within([*chain.from_iterable(own)])
    return tuple({id(generator): generator for generator in found}.values()) if found else ()


class Modes:
    """What was set of modules when a forward began."""

    __slots__ = (
        "_attributes", "_before", "_begun", "_bindings", "_configs", "_modules", "_trained", "_training", "_weights",
    )  # fmt: skip

    def __init__(
        self, modules: list[torch.nn.Module], closures: Sequence[FunctionType], objects: Sequence[Any]
    ) -> None:
        self._modules, self._bindings = modules, Bindings(modules, closures)
        self._weights = [weight for module in modules for weight in module._parameters.values() if weight is not None]
        self._training, self._trained = [*map(_training, modules)], [*map(_trained, self._weights)]
        self._begun: list[tuple[Any, dict[str, Any]]]
        self._begun = [(module, vars(module).copy()) for module in modules if _may_have_more(module)]
        self._begun += ((one, vars(one).copy()) for one in objects)
        self._configs = _configs_in([then for _, then in self._begun]) if self._begun else []
        self._attributes: list[_Attribute] = []
        self._before: list[tuple[Any, str, Any]] = []  # what is to be put back

    def attributes(self) -> list[dict[str, Any]]:
        """What modules had of their own when the forward began, as long as it runs."""
        return [then for _, then in self._begun]

    def settle(self, repeats: bool, moved: Iterable[torch.nn.Module]) -> None:
        """The forward is over.

        Args:
            repeats: its recompute does all that it did.
            moved: modules of which it changed buffers. What numbers they have may tell of what is in these.
        """
        steered = {id(module) for module in moved} if repeats else ()
        for module, then in self._begun:
            now, steers = vars(module), isinstance(module, torch.nn.Module)
            for name in (now if repeats else then).keys() - _OF_TORCH:
                before, after = then.get(name, _ABSENT), now.get(name, _ABSENT)
                if before is after:  # others may put another there
                    wanted = (steers and (type(before) in _STEERING or _are_names(before))) or _is_data(before)
                elif _is_data(before) or _is_data(after):
                    wanted = repeats
                else:
                    wanted = id(module) in steered and type(before) in _NUMBERS and not name.startswith(_OF_FRAMEWORKS)
                if wanted:
                    self._attributes.append((module, name, before))
        self._begun = []
        for n, (names, then) in enumerate(self._configs):
            if _differ(names, then):  # what the forward itself sets is left alone
                self._configs[n] = names, {name: value for name, value in then.items() if names.get(name) is value}
        self._bindings.settle()

    def restored(self) -> contextlib.AbstractContextManager[None] | None:
        """A context in which all is as it was then; None if it is so now."""
        if (
            [*map(_training, self._modules)] == self._training
            and [*map(_trained, self._weights)] == self._trained
            and not any(map(_has_changed, self._attributes))
            and not (self._configs and self._begun == [] and any(starmap(_differ, self._configs)))
            and not self._bindings.changed()
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
            *chain.from_iterable(starmap(_settings_changed, [] if self._begun else self._configs)),
        ]
        try:
            self._bindings.restore()
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
        self._bindings.put_back()


_training: Callable[[torch.nn.Module], bool] = attrgetter("training")
_trained: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")


def _found(one: Any, name: str) -> Any:
    return one.requires_grad if isinstance(one, torch.Tensor) else _names_of(one).get(name, _ABSENT)


def _set(one: Any, name: str, value: Any) -> None:
    if isinstance(one, torch.Tensor):
        one.requires_grad_(value)
    elif value is _ABSENT:
        _names_of(one).pop(name, None)
    else:
        _names_of(one)[name] = value


def _names_of(one: Any) -> dict[str, Any]:
    return one if type(one) is dict else vars(one)


def _configs_in(attributes: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The configurations that modules with these attributes share, each by the names in it and a copy of them.

    Those inside of others too (`config.moe`, `config["moe"]`).
    """
    found: dict[int, dict[str, Any]] = {}
    roots = (then[name] for then in attributes if not _CONFIGS.isdisjoint(then) for name in _CONFIGS & then.keys())
    waiting = [*{id(config): config for config in roots}.values()]
    while waiting and len(found) < _MOST_NAMES:
        config = waiting.pop()
        names = config if type(config) is dict else attributes_of(config)
        if not names or id(names) in found or isinstance(config, (torch.nn.Module, torch.Tensor, type)):
            continue
        found[id(names)] = names
        kinds = {*map(type, names.values())} - _IN_CONFIGS
        if type(config) is not dict:
            kinds.discard(dict)
        if kinds:
            waiting += [value for value in names.values() if type(value) in kinds]
    return [(names, names.copy()) for names in found.values()]


def _differ(names: dict[str, Any], then: dict[str, Any]) -> bool:
    """Whether one of them has another value than it had."""
    return not all(map(is_, map(names.get, then), then.values()))


def _settings_changed(names: dict[str, Any], then: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for name, value in then.items():
        now = names.get(name, _ABSENT)
        if now is not value and type(value) in _SETTINGS and type(now) in _SETTINGS:
            yield names, name, value


def _has_changed(attribute: _Attribute) -> bool:
    """Whether it is another tensor now, or number. What may become anything else, as FSDP's notes, is left alone."""
    module, name, then = attribute
    now = _found(module, name)
    return now is not then and (
        type(then) is int or type(then) in _STEERING or _are_names(then) or _is_data(then) or _is_data(now)
    )


_NUMBERS = frozenset({bool, int, float})
_STEERING = frozenset({bool, float, str})
"""What an attribute has that others set. Integers count something, it may be recomputes."""
_CONFIGS = frozenset({"config", "cfg", "conf", "args", "hparams"})
"""What the attribute of a module is called that has its configuration. That counts nothing, and tells of no phase."""
_SETTINGS = frozenset({bool, int, float, str, type(None), torch.dtype})
_IN_CONFIGS = _SETTINGS | {list, tuple, set, torch.device, FunctionType, MethodType}
"""What else most of them have, and no others."""
_LEAD_NOWHERE = frozenset(
    {
        bool, int, float, str, type(None), dict, set, OrderedDict, FunctionType, MethodType, torch.dtype, torch.device,
        torch.Tensor, torch.nn.Parameter, torch.Size,
    }
)  # fmt: skip
"""What most attributes are."""
_MOST_NAMES = 64
_OF_TORCH = vars(torch.nn.Module()).keys()
_DICTS_OF_TORCH = [*map(type, vars(torch.nn.Module()).values())].count(dict)
_OF_FRAMEWORKS = ("_", "ds_")
"""Where they keep numbers that may not be turned back. DeepSpeed counts in `ds_...`."""


def _may_have_more(module: torch.nn.Module) -> bool:
    """Whether its class or a hook may set attributes of a tensor."""
    return bool(module._forward_pre_hooks) or not type(module).__module__.startswith("torch.nn.modules.")


def _are_names(value: Any) -> bool:
    if type(value) is not list and type(value) is not tuple:
        return False
    return 0 < len(value) <= _MOST_NAMES and {*map(type, value)} == {str}


def _is_data(value: Any) -> bool:
    """Whether it is a tensor, a generator, or a tuple of some.

    But for views of weights, which FSDP makes and takes away again.
    """
    if isinstance(value, torch.Tensor):
        base = value._base
        return base is None or not (base.is_leaf and base.requires_grad)
    return isinstance(value, torch.Generator) or (isinstance(value, tuple) and any(map(_is_data, value)))
