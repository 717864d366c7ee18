"""Tracing a function into a program, once where that is safe.

A trace may be used again only if the function cannot have changed: functions with closure cells, bound methods and
callable objects hold state that may be replaced between two calls, so they are traced afresh each time.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval

__all__ = ["Program", "keep", "recall", "stage"]


class Program(NamedTuple):
    """A traced function: `jaxpr` maps its constants and its arguments to the leaves of `out`."""

    jaxpr: ClosedJaxpr
    out: Any  # the function's result, with `jax.ShapeDtypeStruct` for arrays
    cached: bool = False  # whether equal calls get the same program

    @property
    def consts(self) -> list[Any]:
        """What the function closed over, tracers included."""
        return list(self.jaxpr.consts)

    def pruned(self) -> Program:
        """Without what no output needs, such as a decision whose saved value is used instead."""
        jaxpr = self.jaxpr.jaxpr
        kept, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
        return self._replace(jaxpr=ClosedJaxpr(kept, self.jaxpr.consts))

    def run(self, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Execute, or trace into another program."""
        results: list[Any] = jax.core.eval_jaxpr(self.jaxpr.jaxpr, consts, *args)
        return results


def stage(function: Callable[..., Any], args: Sequence[Any], jitted: Any = None) -> Program:
    """The program of `function(*args)`.

    `jitted` is `jax.jit(function)`, kept by a caller who wants JAX's cache of traces.
    """
    if jitted is not None:
        traced = jitted.trace(*args)
        if len(traced.jaxpr.in_avals) == len(args):  # otherwise it closes over tracers of one call
            return Program(traced.jaxpr, traced.out_info, cached=True)
    jaxpr, out = jax.make_jaxpr(lambda *values: function(*values), return_shape=True)(*args)
    return Program(jaxpr, out)


# What is known about a function lives as long as the function does.
_known: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def recall(function: Any, key: Hashable) -> Any:
    """What `keep` stored under `key` for `function`, or None."""
    return _known.get(function, {}).get(key) if isinstance(function, types.FunctionType) else None


def keep(function: Any, key: Hashable, value: Any) -> bool:
    """Store `value`, which must not hold `function`, if `function` cannot change. Says whether it did."""
    if key is None or not isinstance(function, types.FunctionType) or function.__closure__:
        return False
    _known.setdefault(function, {})[key] = value
    return True
