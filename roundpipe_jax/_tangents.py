"""Derivatives of programs by those of their inputs that have one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._jax import is_float

__all__ = ["jvp", "merged", "no_tangent", "zero_like"]


def jvp(
    function: Callable[[list[Any]], list[Any]], values: Sequence[Any], flags: Sequence[bool], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """What `function(values)` gives, and its tangents, from those of the flagged values."""

    def of_the_varying(*chosen: Any) -> list[Any]:
        return function(merged(values, flags, chosen))

    primals = tuple(value for value, flag in zip(values, flags, strict=True) if flag)
    outs, dots = jax.jvp(of_the_varying, primals, tuple(tangents))
    return outs, dots


def merged(values: Sequence[Any], flags: Sequence[bool], chosen: Sequence[Any]) -> list[Any]:
    """`values`, with `chosen` in the flagged places."""
    given = iter(chosen)
    return [next(given) if flag else value for value, flag in zip(values, flags, strict=True)]


def no_tangent(value: Any) -> Any:
    """The tangent of a value that has no derivative."""
    return np.zeros(np.shape(value), jax.dtypes.float0)


def zero_like(value: Any) -> Any:
    """The tangent of a value that does not vary."""
    return jnp.zeros_like(value) if is_float(value) else no_tangent(value)
