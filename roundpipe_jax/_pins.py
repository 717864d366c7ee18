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
from ._jax import replaced
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

    It can be unless it is differentiated itself, which JAX can do in forward mode alone. That needs no division.
    """
    decides = any(has_any(inner, is_pin) for inner in subprograms(eqn))
    if not decides and not any(isinstance(effect, Stays) for effect in eqn.effects):
        return _of_loops(policy, unknown, held, eqn)
    bare = replaced(eqn, params=with_subprograms(eqn, _without_pins))
    divided = _of_loops(policy, unknown, held, bare)
    unknown_results = divided[2]
    if any(unknown_results) or any(hasattr(effect, "input_index") for effect in eqn.effects):  # of a reference
        return divided
    return _of_known(eqn, unknown), None, unknown_results, unknown_results, []


def _of_known(eqn: JaxprEqn, unknown: Sequence[bool]) -> JaxprEqn:
    """The loop without the unknown among its constants, on which none of its results depends."""
    params = dict(eqn.params)
    constants = iter(unknown)
    dropped = []
    for name in ("cond", "body"):
        closed, count = params[f"{name}_jaxpr"], params[f"{name}_nconsts"]
        ours = [next(constants) for _ in range(count)]
        carried = len(closed.jaxpr.invars) - count
        needed = [*(not flag for flag in ours), *[True] * carried]
        jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), needed)
        params[f"{name}_jaxpr"] = ClosedJaxpr(jaxpr, closed.consts)
        params[f"{name}_nconsts"] = sum(used[:count])
        dropped += [not flag for flag in used[:count]]
    operands = [atom for n, atom in enumerate(eqn.invars) if n >= len(dropped) or not dropped[n]]
    return replaced(eqn, params=params, invars=operands)


_of_loops = _rules[primitives.while_p]
_rules[primitives.while_p] = _divided_loop
