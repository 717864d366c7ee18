"""Values that every `jax.checkpoint` keeps, whatever its policy.

A decision that is made again in the recompute of somebody else's checkpoint is another decision, and the gradient is
wrong without an error. A policy knows names, and one that was given without ours in mind lets go of them. So a saved
value passes through an operation that says for itself, when a program is divided into forward and recompute, that the
recompute has it from the forward. Nothing is kept that the recompute does not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src.interpreters.partial_eval import EffectHandle  # has no public name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, Var, primitives
from jax.interpreters import ad, batching, mlir, partial_eval

from ._effects import Stays
from ._jax import fresh_var, replaced
from ._programs import has_any, subprograms, with_subprograms

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
_rules: Any = partial_eval.partial_eval_jaxpr_custom_rules
_rules[_pin] = _divided


def _stays(*what: Any) -> tuple[list[bool], JaxprEqn]:
    """Leave the operation in a program that JAX takes apart, though nothing reads it yet, see `_checkpoints`.

    It is the last of what the rule is given. Before that are its results in use and, since jax 0.12, its operands.
    """
    return [True], what[-1]


def _stays_unknown(trace: Any, value: Any) -> Any:
    """The same where it goes through the program operation by operation, for a part that depends on what is unknown."""
    out = trace.default_process_primitive(_pin, (value,), {})
    recipe = getattr(out, "recipe", None)
    if recipe is not None:
        trace.effect_handles.append(EffectHandle([value], recipe))
    return out


partial_eval.dce_rules[_pin] = _stays
partial_eval.custom_partial_eval_rules[_pin] = _stays_unknown


def _without_pins(jaxpr: Jaxpr) -> Jaxpr:
    pins = {eqn.outvars[0]: eqn.invars[0] for eqn in jaxpr.eqns if is_pin(eqn)}

    def read(atom: Any) -> Any:
        while isinstance(atom, Var) and atom in pins:
            atom = pins[atom]
        return atom

    eqns = [
        replaced(eqn, invars=list(map(read, eqn.invars)), params=with_subprograms(eqn, _without_pins))
        for eqn in jaxpr.eqns
        if not is_pin(eqn)
    ]
    return replaced(jaxpr, eqns=eqns, outvars=list(map(read, jaxpr.outvars)))


def _divided_loop(policy: Any, unknown: Sequence[bool], held: Sequence[bool], eqn: JaxprEqn) -> Any:
    """A while loop, of whose iterations nothing can be held: one that decides, or updates, is held as a whole.

    What it carries that has tangents is divided from them: in reverse mode nobody reads these, and the loop that makes
    them is dropped.
    """
    decides = any(has_any(inner, is_pin) for inner in subprograms(eqn))
    if not decides and not any(isinstance(effect, Stays) for effect in eqn.effects):
        return _of_loops(policy, unknown, held, eqn)
    bare = replaced(eqn, params=with_subprograms(eqn, _without_pins))
    divided = _of_loops(policy, unknown, held, bare)
    _, again, unknown_results, _, needs = divided
    if any(hasattr(effect, "input_index") for effect in eqn.effects):  # of a reference
        return divided
    known = _of_known(eqn, unknown, unknown_results)
    if known is None:
        return divided
    if not any(unknown_results):
        return known, None, unknown_results, unknown_results, []
    results = [var if flag else fresh_var(var) for var, flag in zip(eqn.outvars, unknown_results, strict=True)]
    return known, replaced(again, outvars=results), unknown_results, unknown_results, needs


def _of_known(eqn: JaxprEqn, unknown: Sequence[bool], unknown_results: Sequence[bool]) -> JaxprEqn | None:
    """The loop without what is unknown of it, or None if that decides about the rest."""
    params = dict(eqn.params)
    counts = [params["cond_nconsts"], params["body_nconsts"]]
    carried = [not flag for flag in unknown_results]
    kept: list[bool] = []
    for name, count in zip(("cond", "body"), counts, strict=True):
        closed = params[f"{name}_jaxpr"]
        consts = [not flag for flag in unknown[len(kept) : len(kept) + count]]
        wanted = carried if name == "body" else [True]
        jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, wanted, [*consts, *carried])
        if any(one and not known for one, known in zip(used, [*consts, *carried], strict=True)):
            return None
        params[f"{name}_jaxpr"] = ClosedJaxpr(jaxpr, closed.consts)
        params[f"{name}_nconsts"] = sum(consts)
        kept += consts
    kept += carried
    operands = [atom for atom, known in zip(eqn.invars, kept, strict=True) if known]
    results = [var for var, known in zip(eqn.outvars, carried, strict=True) if known]
    return replaced(eqn, params=params, invars=operands, outvars=results)


_of_loops = _rules[primitives.while_p]
_rules[primitives.while_p] = _divided_loop
