"""What the code of a layer names, besides its arguments and attributes: globals, variables around a class and in it.

Where to look is found once for each class, and for each function; what is there, each time.
"""

from __future__ import annotations

import dis
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, starmap
from types import CodeType, FunctionType
from typing import Any

import torch

from ._state import LEAD_NOWHERE, generators_within, is_beside, once_for_a_class

__all__ = ["named_by", "names_nothing"]

_WANTED = (torch.nn.Module, torch.Tensor, torch.Generator)


def named_by(function: Any, kinds: Iterable[type]) -> list[Any]:
    """The modules, tensors and generators that classes name, and generators in what a function names."""
    values: list[Any] = [*starmap(_found_at, chain.from_iterable(map(_places_of, kinds)))]
    while isinstance(function, partial):
        function = function.func
    while type(function) is FunctionType:
        values += map(function.__globals__.get, _names_in(function))
        function = function.__dict__.get("__wrapped__") if function.__dict__ else None
    if not values:
        return values
    return [*{id(value): value for value in chain.from_iterable(map(_wanted_in, values))}.values()]


def names_nothing(function: Any) -> bool:
    """Whether it is known to be a function that names nothing of the kind."""
    return (
        type(function) is FunctionType
        and not function.__dict__
        and _by_code.get(id(function.__code__), _UNKNOWN)[0] == ()
    )


_Place = tuple[weakref.ref[Any], str, int]
"""A function, a name, and which of its outer variables that is: -1 for a global. Or a class, and an attribute."""


def _found_at(reference: weakref.ref[Any], name: str, outer: int) -> Any:
    owner = reference()
    if outer < 0:
        return (getattr(owner, "__globals__", None) or vars(owner)).get(name) if owner is not None else None
    try:
        return (getattr(owner, "__closure__", None) or ())[outer].cell_contents
    except (IndexError, ValueError):  # it is empty
        return None


def _wanted_in(value: Any) -> list[Any]:
    if isinstance(value, _WANTED):
        return [value]
    if isinstance(value, type):
        return [] if _is_of_libraries(value) else generators_within([*vars(value).values()])
    return [] if type(value) in LEAD_NOWHERE else generators_within([value])


def _is_of_libraries(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("builtins", "torch")


@once_for_a_class
def _places_of(kind: type) -> tuple[_Place, ...]:
    """Where there is something that a class, the functions of it and those beside them that they call may name."""
    own = [base for base in kind.__mro__ if not _is_of_libraries(base)]
    found: dict[tuple[int, str], _Place] = {}
    for base in own:
        for name, value in vars(base).items():
            if _wanted_in(value):
                found[id(base), name] = weakref.ref(base), name, -1
    for function in _reached_from(getattr(value, "__func__", value) for base in own for value in vars(base).values()):
        reference = weakref.ref(function)  # a class that was made in a function does not outlive it for this
        for n, cell in enumerate(function.__closure__ or ()):
            if function.__code__.co_freevars[n] != "__class__":  # of `super()`
                found[id(cell), ""] = reference, "", n
        for name in _globals_with_some(function):
            found[id(function.__globals__), name] = reference, name, -1
    return (*found.values(),)


_by_code: dict[int, tuple[tuple[str, ...], CodeType | None]] = {}
"""The code too, which else might die and leave its place to another. To hash it takes longer."""
_UNKNOWN: tuple[Any, None] = None, None
_MOST = 4096


def _names_in(function: FunctionType) -> tuple[str, ...]:
    """The globals with something in them that a function names, or those beside it that it calls. By its code."""
    code = function.__code__
    names: tuple[str, ...] | None = _by_code.get(id(code), _UNKNOWN)[0]
    if names is None:
        if len(_by_code) >= _MOST:
            _by_code.clear()
        beside = (one for one in _reached_from([function]) if one.__globals__ is function.__globals__)
        found = chain.from_iterable(map(_globals_with_some, beside))
        names = (*{*found},)
        _by_code[id(code)] = names, code
    return names


def _reached_from(functions: Iterable[Any]) -> Iterator[FunctionType]:
    """The functions among these, and those of the same file that they name."""
    waiting, seen = [*functions], set()
    while waiting:
        function = waiting.pop()
        if isinstance(function, FunctionType) and id(function) not in seen:
            seen.add(id(function))
            yield function
            waiting.append(function.__dict__.get("__wrapped__"))
            named = map(function.__globals__.get, _globals_in(function.__code__))
            waiting += (value for value in named if is_beside(function, value))


def _globals_with_some(function: FunctionType) -> Iterator[str]:
    return (name for name in _globals_in(function.__code__) if _wanted_in(function.__globals__.get(name)))


def _globals_in(code: CodeType) -> Iterator[str]:
    yield from (step.argval for step in dis.get_instructions(code) if step.opcode == _LOAD_GLOBAL)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_in(inner)


_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
