"""The programs inside the operations of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

__all__ = ["has_any", "subprograms", "with_subprograms"]


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
