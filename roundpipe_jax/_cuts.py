"""Linear programs that were batched, and can still be transposed.

JAX batches a branch whose examples go different ways by running them all, each with `stop_gradient` around the examples
that do not go there. Around a tangent that has no transpose. Its slope is zero: nothing of what comes out is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from ._jax import replaced
from ._programs import has_any, with_subprograms

__all__ = ["cut_off", "transposable"]

_cut: Any = Primitive("roundpipe_cut")
_cut.def_impl(lambda value: value)
_cut.def_abstract_eval(lambda aval: aval)
mlir.register_lowering(_cut, lambda context, value: [value])
ad.primitive_jvps[_cut] = lambda values, dots: (_cut.bind(*values), ad.Zero(jax.typeof(values[0]).to_tangent_aval()))
ad.primitive_transposes[_cut] = lambda slope, value: [ad.Zero(value.aval)]
batching.primitive_batchers[_cut] = lambda values, axes: (_cut.bind(*values), *axes)


def cut_off(value: Any) -> Any:
    """`jax.lax.stop_gradient(value)`, for programs that are transposed too."""
    return _cut.bind(value)


def transposable(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, a batch of a function that is linear in some of its arguments."""
    closed, out = jax.make_jaxpr(function, return_shape=True)(*args)
    if not has_any(closed.jaxpr, _stops):
        return function(*args)
    cut = ClosedJaxpr(_with_cuts(closed.jaxpr), closed.consts)
    return jax.tree.unflatten(
        jax.tree.structure(out), jax.core.eval_jaxpr(cut.jaxpr, cut.consts, *jax.tree.leaves(args))
    )


def _stops(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "stop_gradient"


def _with_cuts(jaxpr: Jaxpr) -> Jaxpr:
    eqns = [
        replaced(eqn, primitive=_cut if _stops(eqn) else eqn.primitive, params=with_subprograms(eqn, _with_cuts))
        for eqn in jaxpr.eqns
    ]
    return replaced(jaxpr, eqns=eqns)
