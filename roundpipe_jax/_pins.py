"""Values that every `jax.checkpoint` keeps, whatever its policy.

A decision that is made again in the recompute of somebody else's checkpoint is another decision, and the gradient is
wrong without an error. A policy knows names, and one that was given without ours in mind lets go of them. So a saved
value passes through an operation that says for itself, when a program is divided into forward and recompute, that the
recompute has it from the forward. Nothing is kept that the recompute does not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

__all__ = ["is_pin", "pinned"]


def pinned(value: Any) -> Any:
    """`value`, kept by any checkpoint that needs it in its recompute."""
    return _pin.bind(value)


def is_pin(eqn: JaxprEqn) -> bool:
    """Whether an operation is one of these."""
    return eqn.primitive is _pin


def _divided(_: Any, unknown: Sequence[bool], held: Sequence[bool], eqn: JaxprEqn) -> tuple[Any, ...]:
    """The operation in the forward and in the recompute, what is unknown or made again of it, and what it needs."""
    if unknown[0]:
        return None, eqn, [True], [True], [] if held[0] else eqn.invars
    return eqn, None, [False], [False], []


_pin: Any = Primitive("roundpipe_pin")
_pin.def_impl(lambda value: value)
_pin.def_abstract_eval(lambda aval: aval)
mlir.register_lowering(_pin, lambda context, value: [value])
ad.primitive_jvps[_pin] = lambda values, dots: (pinned(*values), *dots)
batching.primitive_batchers[_pin] = lambda values, axes: (pinned(*values), *axes)
partial_eval.partial_eval_jaxpr_custom_rules[_pin] = _divided
