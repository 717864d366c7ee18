"""The programs inside the operations of a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

__all__ = ["has_any", "passed_on", "subprograms", "with_subprograms"]


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
