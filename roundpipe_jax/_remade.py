"""Saved values that a recompute makes again, because the layer goes on with what it gave to the save.

`save_for_recompute(idx)` hands back the saved indices. A layer that does not take them would compute with its own,
which may be others in the recompute. So a save in a recompute marks the value that it was given, and once the
program is whole, every use of that value reads the saved one (R2). If the layer asked for its phase before, the value
may be a stand-in that the forward did not save; then a use besides is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, Var
from jax.interpreters import ad, batching, mlir

from ._jax import is_tracer, replaced
from ._programs import by_indices, chose, has_any, passed_on, subprograms, with_subprograms

__all__ = ["Doubt", "Reads", "in_place_of", "reading_saved"]

Doubt = Callable[[], Exception] | None
"""What to say if it is not known whether a value is the one that the forward saved, and the program uses it."""


class Reads:
    """How a run reads what its forward saved."""

    fault: Callable[[], Exception]  # if it reads nothing; since the first mark

    def __init__(self) -> None:
        self.marks = 0  # values that were handed back by a save
        self.sure = False  # something is read otherwise


def in_place_of(made: Sequence[Any], saved: Sequence[Any], reads: Reads, doubt: Doubt = None) -> list[Any]:
    """The arrays of `saved`, to be read in place of those that were `made` again."""
    pairs = list(zip(made, saved, strict=True)) if len(made) == len(saved) else []
    fits = [_stands_for(*pair) for pair in pairs]
    reads.marks += sum(fits)
    reads.sure = reads.sure or not pairs or not all(fits)
    if not pairs:
        return list(saved)
    return [
        _remade.bind(*pair, doubt=doubt, reads=reads) if fit else pair[1] for pair, fit in zip(pairs, fits, strict=True)
    ]


def _stands_for(made: Any, saved: Any) -> bool:
    if not is_tracer(made) or not is_tracer(saved):
        return False
    return bool(jax.typeof(made).strip_weak_type() == jax.typeof(saved).strip_weak_type())


_remade: Any = Primitive("roundpipe_remade")
_remade.def_impl(lambda made, saved, **_: saved)
_remade.def_abstract_eval(lambda made, saved, **_: saved)
mlir.register_lowering(_remade, lambda context, made, saved, **_: [saved])
ad.primitive_jvps[_remade] = lambda values, dots, **params: (_remade.bind(*values, **params), dots[1])
batching.primitive_batchers[_remade] = lambda values, axes, **_: (values[1], axes[1])


def reading_saved(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program, in which nothing reads what was made again of what was saved."""
    if not has_any(closed.jaxpr, _is_remade):
        return closed
    return ClosedJaxpr(_reading_saved(closed.jaxpr), closed.consts)


def _is_remade(eqn: JaxprEqn) -> bool:
    return eqn.primitive is _remade


def _reading_saved(jaxpr: Jaxpr) -> Jaxpr:
    marks = [eqn for eqn in jaxpr.eqns if _is_remade(eqn)]
    handed = {eqn.outvars[0]: eqn.invars[1] for eqn in marks}
    instead: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        while isinstance(atom, Var) and (atom in handed or atom in instead):
            atom = handed[atom] if atom in handed else instead[atom]
        return atom

    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    saved = {read(eqn.outvars[0]) for eqn in marks}
    doubts: dict[Any, Any] = {}
    for eqn in marks:
        made, doubt = read(eqn.invars[0]), eqn.params["doubt"]
        if not isinstance(made, Var) or made in saved:
            continue
        names = [made, *passed_on(made, made_by)]
        if doubt is None:
            instead |= dict.fromkeys(names, read(eqn.outvars[0]))
        else:
            doubts |= dict.fromkeys(names, doubt)
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if _is_remade(eqn):
            continue
        if any(has_any(inner, _is_remade) for inner in subprograms(eqn)):
            eqn = replaced(eqn, params=with_subprograms(eqn, _reading_saved))
        eqn = replaced(eqn, invars=list(map(read, eqn.invars)))
        eqns += by_indices(eqn, read(eqn.outvars[1])) if chose(eqn, instead) else [eqn]
    eqns = _made_first(eqns, {atom for atom in instead.values() if isinstance(atom, Var)})
    whole = replaced(jaxpr, eqns=eqns, outvars=list(map(read, jaxpr.outvars)))
    if marks:
        _check(whole, saved, doubts, [(eqn.invars[0], read(eqn.outvars[0]), eqn.params["reads"]) for eqn in marks])
    return whole


def _check(jaxpr: Jaxpr, saved: set[Any], doubts: dict[Any, Any], marks: Sequence[tuple[Any, Any, Reads]]) -> None:
    """Refuse a program that uses what it made of its inputs, besides giving it to a save."""
    varying = {*jaxpr.constvars, *jaxpr.invars} - saved
    given = varying.copy()
    for eqn in jaxpr.eqns:
        if any(isinstance(atom, Var) and atom in varying for atom in eqn.invars):
            varying.update(eqn.outvars)
    needed = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update(atom for atom in eqn.invars if isinstance(atom, Var))
    for made, doubt in doubts.items():
        if made in needed and made in varying and made not in given:
            raise doubt()
    _check_use(jaxpr, needed & (varying - given), needed, marks)


def _check_use(jaxpr: Jaxpr, again: set[Any], needed: set[Any], marks: Sequence[tuple[Any, Any, Reads]]) -> None:
    """Refuse a program that reads nothing of what was saved, and uses a decision that it makes `again` for the save."""
    for reads in {id(reads): reads for *_, reads in marks}.values():
        ours = [(made, kept) for made, kept, one in marks if one is reads]
        if reads.sure or len(ours) != reads.marks:
            continue
        if any(not isinstance(kept, Var) or kept in needed for _, kept in ours):
            continue
        behind = {made for made, _ in ours if isinstance(made, Var)}
        for eqn in reversed(jaxpr.eqns):
            if not behind.isdisjoint(eqn.outvars):
                behind.update(atom for atom in eqn.invars if isinstance(atom, Var))
        avals: list[Any] = [var.aval for var in behind & again]
        if any(not jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals):
            raise reads.fault()


def _made_first(eqns: Sequence[JaxprEqn], wanted: set[Var]) -> list[JaxprEqn]:
    """The operations, first those that make what is `wanted` before."""
    first: list[JaxprEqn] = []
    rest: list[JaxprEqn] = []
    for eqn in reversed(eqns):
        if wanted.isdisjoint(eqn.outvars):
            rest.append(eqn)
            continue
        first.append(eqn)
        wanted = wanted.union(atom for atom in eqn.invars if isinstance(atom, Var))
    return [*reversed(first), *reversed(rest)]
