"""Globals, and variables of functions around, that the code of a module's class names.

A method has them as any function has. Which they are is looked up once for each class; what they stand for, each time.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain, starmap
from types import CellType, CodeType, FunctionType
from typing import Any

import torch

from ._state import LEAD_NOWHERE, PLAIN_VALUES, is_beside

__all__ = ["named_by"]


def named_by(kinds: Iterable[type]) -> list[Any]:
    """The modules, tensors and generators that classes of modules name."""
    places = [*chain.from_iterable(map(_places_of, kinds))]
    return [*{id(value): value for value in starmap(_found_at, places) if isinstance(value, _WANTED)}.values()]


_WANTED = (torch.nn.Module, torch.Tensor, torch.Generator)


def _found_at(names: dict[str, Any] | CellType, name: str) -> Any:
    if isinstance(names, dict):
        return names.get(name)
    try:
        return names.cell_contents
    except ValueError:  # it is empty
        return None


@lru_cache(maxsize=1024)
def _places_of(kind: type) -> tuple[tuple[dict[str, Any] | CellType, str], ...]:
    """Where what the functions of a class name may be found, and those beside them that they call."""
    own = (base for base in kind.__mro__ if not base.__module__.startswith(("torch.", "builtins")))
    waiting = [value for base in own for value in vars(base).values()]
    seen: set[int] = set()
    found: dict[tuple[int, str], tuple[dict[str, Any] | CellType, str]] = {}
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        waiting.append(function.__dict__.get("__wrapped__"))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":  # of `super()`
                found[id(cell), name] = cell, name
        for name in _globals_in(function.__code__):
            value = function.__globals__.get(name)
            if is_beside(function, value):
                waiting.append(value)
            elif type(value) not in _NEVER:
                found[id(function.__globals__), name] = function.__globals__, name
    return (*found.values(),)


_NEVER = LEAD_NOWHERE | (PLAIN_VALUES - {torch.Tensor, torch.nn.Parameter}) | {FunctionType}
"""What a global has that is not going to be another thing."""


def _globals_in(code: CodeType) -> Iterator[str]:
    yield from (step.argval for step in dis.get_instructions(code) if step.opcode == _LOAD_GLOBAL)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_in(inner)


_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
