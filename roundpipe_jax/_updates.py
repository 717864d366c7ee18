"""Callbacks of `update_once` in a program, as operations that JAX never puts into a recompute.

`jax.checkpoint` makes a debug callback in both phases, and refuses an `io_callback`. An operation that has an effect,
and no rule of its own, is left to the forward. So it is in a scan too, where JAX loses an `io_callback` when it
differentiates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, Var
from jax.interpreters import ad, batching, mlir

from roundpipe_core._errors import MismatchError, message

from ._effects import Stays
from ._jax import is_callback, is_io, is_ordered, is_plain, replaced
from ._names import UPDATE
from ._programs import has_any, subprograms, with_subprograms

__all__ = ["unfit_updates", "unfit_updates_in", "updates_in", "with_updates"]


class _Updates(Stays):
    """Of an update."""


_UPDATES = _Updates()


def with_updates(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program, whose callbacks from `update_once` belong to the forward."""
    if not any(map(is_callback, closed.effects)):
        return closed
    return ClosedJaxpr(_of_the_forward(closed.jaxpr), closed.consts)


def _of_the_forward(jaxpr: Jaxpr) -> Jaxpr:
    eqns = [_changed(jaxpr, eqn) for eqn in jaxpr.eqns]
    return replaced(jaxpr, eqns=eqns, effects=_left(jaxpr.effects, [eqn.effects for eqn in eqns]))


def _changed(jaxpr: Jaxpr, eqn: JaxprEqn) -> JaxprEqn:
    if not any(map(is_callback, eqn.effects)):
        return eqn
    if _is_update(eqn) and all(map(is_callback, eqn.effects)):
        # The program's arrays besides, or a scan hoists an update of what does not vary, and makes one in all.
        varying = [var for var in jaxpr.invars if is_plain(var.aval)]
        operands = list(dict.fromkeys([*(atom for atom in eqn.invars if isinstance(atom, Var)), *varying]))
        one = replaced(jaxpr, constvars=[], invars=operands, outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects)
        effects = {_UPDATES, *filter(is_ordered, eqn.effects)}
        return replaced(eqn, primitive=_update, invars=operands, params={"jaxpr": one}, effects=effects)
    if not subprograms(eqn):  # somebody else's
        return eqn
    params = with_subprograms(eqn, _of_the_forward)
    new = replaced(eqn, params=params)
    return replaced(new, effects=_left(eqn.effects, [inner.effects for inner in subprograms(new)]))


def _left(before: Any, inside: Sequence[Any]) -> set[Any]:
    """The effects of what has `inside` now."""
    now = {effect for effects in inside for effect in effects}
    return {effect for effect in before if not is_callback(effect) or effect in now} | (now & {_UPDATES})


def _run(*values: Any, jaxpr: Jaxpr) -> list[Any]:
    results: list[Any] = jax.core.eval_jaxpr(jaxpr, (), *values)
    return results


def _differentiated(values: Sequence[Any], _: Any, *, jaxpr: Jaxpr) -> tuple[list[Any], list[Any]]:
    return _update.bind(*values, jaxpr=jaxpr), [ad.Zero(var.aval.to_tangent_aval()) for var in jaxpr.outvars]


def _batched(batch: Any, values: Sequence[Any], axes: Sequence[Any], *, jaxpr: Jaxpr) -> tuple[list[Any], list[int]]:
    name = None if type(batch.name) is object else batch.name  # JAX's mark for none
    vmap = partial(jax.vmap, axis_name=name, axis_size=batch.size, spmd_axis_name=batch.spmd_name)
    whole = jax.make_jaxpr(vmap(partial(_run, jaxpr=jaxpr), tuple(axes)))(*values)
    return _update.bind(*whole.consts, *values, jaxpr=_open(whole.jaxpr)), [0] * len(jaxpr.outvars)


def _open(jaxpr: Jaxpr) -> Jaxpr:
    return replaced(jaxpr, constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


_update: Any = Primitive("roundpipe_update")
_update.multiple_results = True
_update.def_impl(_run)
_update.def_effectful_abstract_eval(
    lambda *_, jaxpr: ([var.aval for var in jaxpr.outvars], {_UPDATES, *filter(is_ordered, jaxpr.effects)})
)
mlir.register_lowering(_update, mlir.lower_fun(_run), cacheable=False)
ad.primitive_jvps[_update] = _differentiated
batching.fancy_primitive_batchers[_update] = _batched


def updates_in(jaxpr: Jaxpr) -> bool:
    """Whether a program makes updates, at any depth."""
    return bool(jaxpr.effects) and has_any(jaxpr, _is_update)


def unfit_updates_in(jaxpr: Jaxpr) -> bool:
    """Whether a program makes updates that `jax.checkpoint` would make twice, or refuses."""
    return bool(jaxpr.effects) and any(map(_is_unfit, jaxpr.eqns))


def _is_unfit(eqn: JaxprEqn) -> bool:
    if eqn.primitive is _update:
        return any(map(is_io, eqn.effects))
    if _is_update(eqn):
        return True
    return any(map(unfit_updates_in, subprograms(eqn)))


def unfit_updates(layer: str, facts: Sequence[tuple[str, str]]) -> MismatchError:
    """What to say of a region that is one `jax.checkpoint`, and has such updates."""
    return MismatchError(
        message(
            f"layer {layer!r}: it saves or updates inside a scan, cond, vmap, while or jit, and has an update_once "
            "that the recompute too would make: an ordered io_callback, or a write to a jax.Ref.",
            facts,
            "wrap the function in there in remat, instead of the layer around it; or return the state as a result.",
        )
    )


def _is_update(eqn: JaxprEqn) -> bool:
    return bool(eqn.effects) and UPDATE in str(eqn.source_info.name_stack)
