"""Keeping torch.compile out of this library's own code, which runs between compiled parts.

Where a graph is split, Dynamo looks at every function that is called next and would compile it. Ours ask for the phase
of the moment, move it and hold hooks; they must be run. The layers that they call are still compiled.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

__all__ = ["run_as_it_is", "run_others_uncompiled", "run_uncompiled"]

F = TypeVar("F", bound=Callable[..., Any])


def run_as_it_is(function: F) -> F:
    """What `torch.compiler.disable` does to code that calls `function`, without loading the compiler.

    For what Dynamo would trace into: autograd calls it, and compiled autograd traces what autograd calls.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "a recompute is run, not traced"  # type: ignore[attr-defined]
    return function


def run_uncompiled(*packages: str) -> None:
    """Make Dynamo run the functions of `packages` as they are. Without loading it; by code object, so at no cost.

    It sees the modules that are loaded. One that is imported on demand calls it again.
    """
    for code in _codes_in(*packages):
        _skip(code, _dynamo._FrameAction.DEFAULT)


def run_others_uncompiled(frontend: str) -> None:
    """The same for another frontend, with what it calls: Dynamo trips over tensors in trees of JAX."""
    for code in _codes_in(f"roundpipe_{frontend}"):
        if code.co_name != "without_gradient":  # which calls a decision of the user's
            _skip(code, _dynamo._FrameAction.SKIP)


_dynamo: Any = torch._C._dynamo.eval_frame


def _skip(code: types.CodeType, called: Any) -> None:
    """Run a function as it is; `called`: what to do with those that it calls."""
    _dynamo.set_code_exec_strategy(code, _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, called))


def _codes_in(*packages: str) -> Iterator[types.CodeType]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages:
            yield from _codes_of(vars(module), name)


def _codes_of(names: Any, module: str) -> Iterator[types.CodeType]:
    for value in list(names.values()):
        if isinstance(value, type) and value.__module__ == module:
            yield from _codes_of(vars(value), module)
        for function in _functions_of(value):
            if function.__module__ == module:
                yield from _nested(function.__code__)


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)  # of static and class methods
    value = getattr(value, "__wrapped__", value)
    if isinstance(value, types.FunctionType):
        yield value


_COMPILED = ("remat.<locals>.checkpointed", "_Forward.__init__.<locals>.forward")
"""What a user may hand to torch.compile itself. These only call something of ours, which decides what is done."""


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    if code.co_qualname not in _COMPILED:
        yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)
