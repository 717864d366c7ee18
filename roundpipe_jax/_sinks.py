"""Uses of a value that give nothing, so that JAX drops no saved value before the program it is in is whole.

A layer may go on with the value that it gave to a save, and not with what the save handed back. Then nothing reads the
tag until `lead_through_tags` lets every use read it. If the layer itself differentiates what the save is in, JAX takes
that apart before, and leaves out what is not read. An operation with an effect stays.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from jax._src import effects  # the lists of effects that may be in a loop, a rule or a checkpoint have no public name
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

__all__ = ["Stays", "is_sink", "sink", "without_sinks"]

Effects = Set[Any]


class Stays(effects.Effect):
    """Of an operation that may be anywhere, and is dropped nowhere."""


class _Used(Stays):
    """Of an operation that is there to use its operand."""


_USED = _Used()
for _kinds in (
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
    effects.lowerable_effects,
    effects.partial_eval_kept_effects,
):
    _kinds.add_type(Stays)


def sink(value: Any) -> None:
    """Use `value`."""
    _sink.bind(value)


_sink: Any = Primitive("roundpipe_sink")
_sink.multiple_results = True
_sink.def_impl(lambda value: [])
_sink.def_effectful_abstract_eval(lambda aval: ([], {_USED}))
mlir.register_lowering(_sink, lambda context, value: [])
ad.primitive_jvps[_sink] = lambda values, dots: (_sink.bind(*values), [])
batching.primitive_batchers[_sink] = lambda values, axes: (_sink.bind(*values), [])


def is_sink(eqn: JaxprEqn) -> bool:
    """Whether an operation is one of these."""
    return eqn.primitive is _sink


def without_sinks(held: Effects) -> Effects:
    """The effects of a program, or of an operation, that has no sinks any more."""
    return held - {_USED}
