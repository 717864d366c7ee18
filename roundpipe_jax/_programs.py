"""The programs inside the operations of a program."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from ._jax import replaced, trace_of

__all__ = ["by_indices", "chose", "has_any", "passed_on", "subprograms", "with_subprograms"]


def subprograms(eqn: JaxprEqn) -> list[Jaxpr]:
    """The programs inside an operation."""
    found: list[Jaxpr] = []
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    held = getattr(eqn.params.get("_prim"), "jaxpr", None)
    if isinstance(held, ClosedJaxpr):
        found.append(held.jaxpr)
    return found


def has_any(jaxpr: Jaxpr, test: Callable[[JaxprEqn], bool]) -> bool:
    """Whether an operation of a program passes `test`, at any depth."""
    return any(test(eqn) or any(has_any(inner, test) for inner in subprograms(eqn)) for eqn in jaxpr.eqns)


def with_subprograms(eqn: JaxprEqn, change: Callable[[Jaxpr], Jaxpr]) -> dict[str, Any]:
    """The parameters of an operation, its programs changed."""

    def changed(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return ClosedJaxpr(change(value.jaxpr), value.consts)
        if isinstance(value, Jaxpr):
            return change(value)
        if isinstance(value, (tuple, list)) and any(isinstance(v, (ClosedJaxpr, Jaxpr)) for v in value):
            return type(value)(changed(v) for v in value)
        return value

    return {name: changed(value) for name, value in eqn.params.items()}


def passed_on(var: Var, made_by: Mapping[Any, JaxprEqn]) -> list[Var]:
    """The variables that `var` is another name of, nearest first.

    What copies, marks or moves a value may stand between a decision and its save. Other uses then read it before that.
    """
    found: list[Var] = []
    while (eqn := made_by.get(var)) is not None:
        before = _operand_of(eqn, eqn.outvars.index(var))
        if not isinstance(before, Var) or _kind(before) != _kind(var):
            break
        found.append(var := before)
    return found


def _kind(var: Var) -> Any:
    aval: Any = var.aval
    return aval.strip_weak_type()


def _operand_of(eqn: JaxprEqn, result: int) -> Any:
    """The operand that an operation hands on as that result, if it does."""
    name = eqn.primitive.name
    if name == "stop_gradient" and jnp.issubdtype(_kind(eqn.outvars[0]).dtype, jnp.inexact):
        return None  # of what has a derivative it is another value than that
    if name in _HANDS_ON and not any(eqn.params.get("devices", ())):
        return eqn.invars[result]
    inner = subprograms(eqn) if name in ("jit", "pjit") else []
    if len(inner) != 1 or inner[0].outvars[result] not in inner[0].invars:
        return None
    return eqn.invars[inner[0].invars.index(inner[0].outvars[result])]  # type: ignore[arg-type]


_HANDS_ON = {
    "convert_element_type",
    "copy",
    "copy_p",
    "device_put",
    "layout_constraint",
    "name",
    "optimization_barrier",
    "sharding_constraint",
    "stop_gradient",
}


def chose(eqn: JaxprEqn, instead: Container[Any]) -> bool:
    """Whether an operation gives values together with their indices, which were saved."""
    return eqn.primitive.name in ("top_k", "approx_top_k") and eqn.outvars[1] in instead


def by_indices(eqn: JaxprEqn, indices: Any) -> list[JaxprEqn]:
    """The values at the saved indices. The operation's own derivative would have the indices that it finds again."""
    values = eqn.outvars[0]
    axis = eqn.params.get("axis", eqn.params.get("reduction_dimension", -1))
    operands: list[Any] = [eqn.invars[0], indices]
    taken = trace_of(lambda array, at: _taken(array, at, axis % array.ndim), operands)
    renamed: dict[Any, Any] = {**dict(zip(taken.invars, operands, strict=True)), taken.outvars[0]: values}

    def named(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else renamed.get(atom, atom)

    return [
        replaced(one, invars=list(map(named, one.invars)), outvars=list(map(named, one.outvars))) for one in taken.eqns
    ]


def _taken(array: Any, at: Any, axis: int) -> Any:
    """`jnp.take_along_axis` as bare operations, for any program to have them in it."""
    others = tuple(n for n in range(array.ndim) if n != axis)
    numbers = jax.lax.GatherDimensionNumbers((), (axis,), (axis,), others, others)
    each = (1,) * array.ndim
    return jax.lax.gather(array, jax.lax.expand_dims(at, [at.ndim]), numbers, each, mode="fill")
