"""Globals, and variables of functions around, that the code of a module's class names.

A method has them as any function has. Which they are is looked up once for each class; what they stand for, each time.
"""

from __future__ import annotations

import dis
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain, starmap
from types import CodeType, FunctionType
from typing import Any

import torch

from ._state import LEAD_NOWHERE, PLAIN_VALUES, is_beside

__all__ = ["named_by"]


def named_by(kinds: Iterable[type]) -> list[Any]:
    """The modules, tensors and generators that classes of modules name."""
    places = [*chain.from_iterable(map(_places_of, kinds))]
    return [*{id(value): value for value in starmap(_found_at, places) if isinstance(value, _WANTED)}.values()]


_WANTED = (torch.nn.Module, torch.Tensor, torch.Generator)
_Place = tuple[weakref.ref[FunctionType], str, int]
"""A function, a name, and which of its outer variables that is: -1 for a global."""
_known: dict[int, tuple[_Place, ...]] = {}


def _found_at(reference: weakref.ref[FunctionType], name: str, outer: int) -> Any:
    function = reference()
    if function is None:
        return None
    if outer < 0:
        return function.__globals__.get(name)
    try:
        return (function.__closure__ or ())[outer].cell_contents
    except (IndexError, ValueError):  # it is empty
        return None


def _places_of(kind: type) -> tuple[_Place, ...]:
    """Where what the functions of a class name may be found, and those beside them that they call."""
    known = _known.get(id(kind))
    if known is None:
        known = _known[id(kind)] = _searched(kind)
        weakref.finalize(kind, _known.pop, id(kind), None).atexit = False
    return known


def _searched(kind: type) -> tuple[_Place, ...]:
    own = (base for base in kind.__mro__ if not base.__module__.startswith(("torch.", "builtins")))
    waiting = [value for base in own for value in vars(base).values()]
    seen: set[int] = set()
    found: dict[tuple[int, str], _Place] = {}
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        waiting.append(function.__dict__.get("__wrapped__"))
        reference = weakref.ref(function)  # a class that was made in a function does not outlive it for this
        for n, cell in enumerate(function.__closure__ or ()):
            if function.__code__.co_freevars[n] != "__class__":  # of `super()`
                found[id(cell), ""] = reference, "", n
        for name in _globals_in(function.__code__):
            value = function.__globals__.get(name)
            if is_beside(function, value):
                waiting.append(value)
            elif type(value) not in _NEVER:
                found[id(function.__globals__), name] = reference, name, -1
    return (*found.values(),)


_NEVER = LEAD_NOWHERE | (PLAIN_VALUES - {torch.Tensor, torch.nn.Parameter}) | {FunctionType}
"""What a global has that is not going to be another thing."""


def _globals_in(code: CodeType) -> Iterator[str]:
    yield from (step.argval for step in dis.get_instructions(code) if step.opcode == _LOAD_GLOBAL)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_in(inner)


_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
