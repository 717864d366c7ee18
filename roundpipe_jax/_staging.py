"""Tracing a function into a program, once where that is safe.

A trace may be used again only if the function cannot have changed, see `_identity`. Closures, bound methods and
callable objects hold state that may be replaced between two calls, so they are traced afresh each time.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters import partial_eval

from ._identity import reach
from ._jax import current_trace, is_io, is_numpy, is_reference, let_go, of_values, replaced
from ._packing import Held
from ._places import of_writes
from ._remade import reading_saved
from ._updates import with_updates

__all__ = ["Program", "Traces", "hint", "hinted", "memory", "stage"]


class Program(NamedTuple):
    """A traced function: `jaxpr` maps its constants and its arguments to the leaves of `out`."""

    jaxpr: ClosedJaxpr
    out: Any  # the function's result, with `jax.ShapeDtypeStruct` for arrays
    cached: bool = False  # whether equal calls get the same program
    writes: Sequence[
        tuple[str, str]
    ] = ()  # where it writes to a `jax.Ref` that it closes over, of a program without references

    @property
    def consts(self) -> list[Any]:
        """What the function closed over, tracers included."""
        return list(self.jaxpr.consts)

    def pruned(self) -> Program:
        """Without what no output needs, such as a decision whose saved value is used instead."""
        jaxpr = _without_idle_callbacks(self.bare().jaxpr.jaxpr)
        kept, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
        return self._replace(jaxpr=ClosedJaxpr(kept, self.jaxpr.consts))

    def bare(self) -> Program:
        """Without constants and results, for JAX to keep longer than the trace that the constants may be of."""
        return Program(ClosedJaxpr(self.jaxpr.jaxpr, [None] * len(self.jaxpr.consts)), None, writes=self.writes)

    def without_references(self, made: dict[Hashable, Any]) -> Program:
        """With what each `jax.Ref` that it closes over holds now, which may change before backward.

        `made` is where to keep the program of values.
        """
        consts = self.consts
        if not any(map(is_reference, consts)):
            return self
        if "values" not in made:
            made["values"] = of_values(self.jaxpr.jaxpr), of_writes(self.jaxpr.jaxpr)
        jaxpr, writes = made["values"]
        values = [const[...] if is_reference(const) else const for const in consts]
        return self._replace(jaxpr=ClosedJaxpr(jaxpr, values), writes=writes)

    @property
    def calls_back(self) -> bool:
        """Whether an `io_callback` is in it."""
        return any(map(is_io, self.jaxpr.effects))

    def run(self, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Execute, or trace into another program."""
        results: list[Any] = jax.core.eval_jaxpr(self.jaxpr.jaxpr, consts, *args)
        return results


def _without_idle_callbacks(jaxpr: Jaxpr) -> Jaxpr:
    """The program without each `io_callback` that has results, none of which is used: a decision that was made before.

    JAX keeps those for their effect.
    """
    if not any(map(is_io, jaxpr.effects)):
        return jaxpr
    used = set(map(id, jaxpr.outvars))
    eqns: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        idle = eqn.outvars and not any(id(var) in used for var in eqn.outvars)
        if idle and all(map(is_io, eqn.effects)):
            continue
        used |= set(map(id, eqn.invars))
        eqns.append(eqn)
    left = {effect for effect in jaxpr.effects if not is_io(effect) or any(effect in eqn.effects for eqn in eqns)}
    return replaced(jaxpr, eqns=eqns[::-1], effects=left)


class Traces(NamedTuple):
    """Where JAX's traces of a function are found again."""

    jitted: Any
    found: list[Any]  # what they found out
    programs: dict[int, tuple[ClosedJaxpr, ClosedJaxpr]]  # by the traced one's id: that, and the program made of it

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Traces:
        """None yet."""
        return cls(jax.jit(_traced(function)), [], {})

    def program(self, traced: ClosedJaxpr) -> ClosedJaxpr:
        """The program of a trace, the same for the same trace."""
        if id(traced) in self.programs:
            return self.programs[id(traced)][1]
        program = with_updates(reading_saved(traced))
        if program is not traced:
            self.programs[id(traced)] = traced, program
        return program


def stage(function: Callable[..., Any], args: Sequence[Any], known: Traces | None = None) -> Program:
    """The program of `function(*args)`, one of the `known` if there are any."""
    if known is not None:
        traced = known.jitted.trace(*args)
        lasts = len(traced.jaxpr.in_avals) == len(args)  # otherwise it closes over tracers of one call
        for part in filter(_is_held, jax.tree.leaves(traced.out_info, is_leaf=_is_held)):
            part.left_to(known.found if lasts else [])
        if lasts:
            return Program(known.program(traced.jaxpr), _changed(Held.again, traced.out_info), cached=True)
    jaxpr, out = jax.make_jaxpr(_traced(function), return_shape=True)(*args)
    return Program(with_updates(reading_saved(_on_its_own(jaxpr))), _changed(Held.taken, out))


def _traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, nothing of whose trace stays if it raises: a region that starts over does not end there."""

    @functools.wraps(function, assigned=["__name__"], updated=[])
    def traced(*values: Any) -> Any:
        try:
            return function(*values)
        except BaseException:
            let_go(current_trace())
            raise

    return traced


def _changed(change: Callable[[Held], Held], out: Any) -> Any:
    return jax.tree.map(lambda part: change(part) if _is_held(part) else part, out, is_leaf=_is_held)


def _is_held(part: Any) -> bool:
    return isinstance(part, Held)


def _on_its_own(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with copies of numpy arrays it closes over, which may change before backward (R10)."""
    if not any(map(is_numpy, closed.consts)):
        return closed
    return ClosedJaxpr(closed.jaxpr, [jnp.array(c) if is_numpy(c) else c for c in closed.consts])


# What is known about a function lives as long as the function does, and no longer than what the function reads.
_known: weakref.WeakKeyDictionary[Any, tuple[Hashable, dict[Hashable, Any]]] = weakref.WeakKeyDictionary()


def memory(function: Any, within: Any = None) -> dict[Hashable, Any] | None:
    """Where to keep what is known about `function`, none of which may hold it; None if it may change unseen.

    `within` is a trace, for what is used only in there: as under `jax.checkpoint`, more is then taken as lasting.
    """
    if not isinstance(function, types.FunctionType):
        return None
    key = reach(function)
    if key is None and within is not None:
        key = reach(function, loosely=True)
        key = None if key is None else (within, key)
    if key is None:
        _known.pop(function, None)
        return None
    before, known = _known.get(function, (None, {}))
    if before != key or len(known) > _MANY:
        known = {}
        _known[function] = key, known
    return known


_MANY = 500  # static arguments that are never the same twice


# Which form a layer needed the last time, so that it need not start over at each call: its decisions would be made
# again. Only the hash is kept, of the code and not of the function: a wrong hint costs time.
_hints: set[int] = set()


def hinted(*key: Hashable) -> bool:
    """Whether `hint` was called with this key."""
    return hash(key) in _hints


def hint(*key: Hashable, holds: bool = True) -> None:
    """Remember something, or forget it."""
    if len(_hints) > _MANY:
        _hints.clear()
    (_hints.add if holds else _hints.discard)(hash(key))
