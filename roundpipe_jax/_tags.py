"""Saves inside inner traces: values named in the program, and every use led through the name.

A layer that saves inside a scan, a cond, a vmap or a jitted function is traced once, in its forward phase. Each
saved value passes through a *tag*, an identity operation with the name `SAVED`, and `jax.checkpoint` keeps values of
that name: per iteration in a scan, per branch in a cond, and batched under vmap, since JAX does the stacking.

The layer's code after the save may still use the untagged value, as the pattern `if doing_recompute(): ... else: ...`
does. `lead_through_tags` moves each tag to where its value is made and lets every use read the tag, so that the
recompute needs no second decision. What an earlier attempt decided already stands in the program as a constant.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from roundpipe_core._errors import MismatchError, message

from ._jax import fresh_var, is_custom_vjp, is_plain, is_remat3, named, replaced, scan_sizes, struct
from ._names import SAVED
from ._pins import is_pin, pinned
from ._places import of_operation
from ._programs import by_indices, chose, has_any, passed_on, subprograms, with_subprograms

__all__ = ["calls_custom_vjp", "lead_through_tags", "name_of", "names_in"]

_NOTHING: Mapping[str, Any] = {}
_NO_RULE = {
    "custom_jvp_call": "a function with a custom_jvp rule",
    "custom_vjp_call": "a function with a custom_vjp rule",
    "custom_vjp_call_jaxpr": "a function with a custom_vjp rule",
}


def name_of(eqn: JaxprEqn) -> str | None:
    """The name that an operation gives its value, if that is what it does."""
    if eqn.primitive.name == "name":
        return str(eqn.params["name"])
    held: Any = eqn.params.get("_prim")  # under JAX_REMAT3
    return str(held.name) if type(held).__name__ in ("CheckpointName", "CheckpointNameFwd") else None


def names_in(jaxpr: Jaxpr) -> set[str]:
    """Every name given in a program, at any depth."""
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        name = name_of(eqn)
        if name is not None:
            found.add(name)
        for inner in subprograms(eqn):
            found |= names_in(inner)
    return found


def _is_tag(eqn: JaxprEqn) -> bool:
    """Whether an operation marks what was saved. The name may be gone where JAX has taken a program apart."""
    return name_of(eqn) == SAVED or is_pin(eqn)


def calls_custom_vjp(jaxpr: Jaxpr) -> bool:
    """Whether a program calls a function with a `custom_vjp` rule, at any depth."""
    return has_any(jaxpr, is_custom_vjp)


def lead_through_tags(
    closed: ClosedJaxpr, layer: str, decided: Mapping[str, Any] = _NOTHING, divided: bool = False
) -> ClosedJaxpr:
    """The same program, in which every use of a saved value reads its tag.

    Or reads the array in `decided`, under the name that leads to the tag, if the value was made before. `divided`: it
    is differentiated already, and about to be divided into forward and recompute.
    """
    if not has_any(closed.jaxpr, _is_tag):
        return closed
    rewriter = _Rewriter(layer, decided, divided)
    jaxpr, _ = rewriter.program(closed.jaxpr, outermost=True)
    constvars = [*jaxpr.constvars, *rewriter.constants]
    return ClosedJaxpr(replaced(jaxpr, constvars=constvars), [*closed.consts, *rewriter.constants.values()])


class Inputs(NamedTuple):
    """Which of the inputs of a program it saves, and of which it makes what it saves."""

    saved: set[int]
    behind: set[int]

    @classmethod
    def of(cls, jaxpr: Jaxpr, saved: Container[Var], behind: Container[Var]) -> Inputs:
        """By variable."""
        inputs = [*enumerate(jaxpr.invars)]
        return cls({n for n, var in inputs if var in saved}, {n for n, var in inputs if var in behind})


class _Rewriter:
    def __init__(self, layer: str, decided: Mapping[str, Any], divided: bool) -> None:
        self.layer, self.decided, self.divided = layer, decided, divided
        self.constants: dict[Var, Any] = {}

    def program(self, jaxpr: Jaxpr, outermost: bool = False) -> tuple[Jaxpr, Inputs]:
        """The program rewritten, and which of its inputs are saved in it."""
        eqns, wanted, behind = self._inner_first(jaxpr)
        made_by = {var: eqn for eqn in eqns for var in eqn.outvars}
        roots = self._roots(eqns, made_by)  # saved variable -> the operations that lead from it to its tag
        first = {var: self._made_as(var, made_by) for var in roots}
        for var in wanted | set(first.values()):
            if not roots.get(var):
                roots[var] = _fresh_tag(var)
        for var, chain in roots.items():
            if all(name_of(eqn) != SAVED for eqn in chain):  # JAX has left the name out
                chain.append(_fresh_tag(var)[-1])
        decided, given = _made_of(behind, roots, made_by)
        needed = _needed(jaxpr, eqns, roots)
        roots |= {var: _fresh_tag(var) for var in decided & needed}
        if not roots:
            return replaced(jaxpr, eqns=eqns), Inputs.of(jaxpr, (), given)
        new: dict[Var, Any] = {}
        moved = {id(eqn) for chain in roots.values() for eqn in chain}
        if outermost:
            self._take_decided(roots, first, new)
        out: list[JaxprEqn] = []
        for var in (*jaxpr.constvars, *jaxpr.invars):
            self._tag(var, roots, new, out)
        for eqn in eqns:
            if id(eqn) in moved:
                continue
            now = replaced(eqn, invars=[_read(new, atom) for atom in eqn.invars])
            if eqn.outvars and eqn.outvars[0] in needed and chose(eqn, {*roots, *new}):
                values, indices = eqn.outvars
                out.append(replaced(now, outvars=[fresh_var(values), indices]))
                self._tag(indices, roots, new, out)
                out += by_indices(now, new[indices])
                self._tag(values, roots, new, out)
                continue
            out.append(now)
            for var in eqn.outvars:
                self._tag(var, roots, new, out)
        outvars = [_read(new, atom) for atom in jaxpr.outvars]
        return replaced(jaxpr, eqns=out, outvars=outvars), Inputs.of(jaxpr, roots, given)

    def _take_decided(self, roots: dict[Var, list[JaxprEqn]], first: Mapping[Var, Var], new: dict[Var, Any]) -> None:
        for var, chain in [*roots.items()]:
            arrays = [self.decided[name] for name in map(name_of, chain) if name is not None and name in self.decided]
            aval: Any = var.aval
            if not arrays or (arrays[0].shape, arrays[0].dtype) != (aval.shape, aval.dtype):
                continue
            constant = fresh_var(var)
            self.constants[constant] = arrays[0]
            new |= dict.fromkeys([first.get(var, var), var, *(eqn.outvars[0] for eqn in chain)], constant)
            roots.pop(first.get(var, var), None)
            roots.pop(var, None)

    def _inner_first(self, jaxpr: Jaxpr) -> tuple[list[JaxprEqn], set[Var], set[Var]]:
        """The operations with their inner programs rewritten, and the variables that those save from outside.

        And those of which they make what they save.
        """
        eqns: list[JaxprEqn] = []
        wanted: set[Var] = set()
        behind: set[Var] = set()
        for eqn in jaxpr.eqns:
            if not any(has_any(inner, _is_tag) for inner in subprograms(eqn)):
                eqns.append(eqn)
                continue
            if eqn.primitive.name in _NO_RULE:  # differentiation replaces it by its rule, whose saves count then
                if is_remat3():
                    raise self._refused(eqn)
                eqns.append(eqn)
                wanted |= set(eqn.outvars) if self.divided else set()  # not differentiated: it is kept as a whole
                continue
            params, inputs = self._params(eqn)
            wanted |= _operands(eqn, inputs.saved)
            behind |= _operands(eqn, inputs.behind)
            eqns.append(replaced(eqn, params=params))
        return eqns, wanted, behind

    def _params(self, eqn: JaxprEqn) -> tuple[dict[str, Any], Inputs]:
        found = Inputs(set(), set())

        def rewritten(jaxpr: Jaxpr) -> Jaxpr:
            new, inputs = self.program(jaxpr)
            found.saved.update(inputs.saved)
            found.behind.update(inputs.behind)
            return new

        return with_subprograms(eqn, rewritten), found

    def _roots(self, eqns: Sequence[JaxprEqn], made_by: Mapping[Any, JaxprEqn]) -> dict[Var, list[JaxprEqn]]:
        roots: dict[Var, list[JaxprEqn]] = {}
        for eqn in eqns:
            if not _is_tag(eqn) or isinstance(eqn.invars[0], Literal):
                continue
            chain, var = [eqn], eqn.invars[0]
            while (before := made_by.get(var)) is not None and self._passes_through(before):
                if isinstance(before.invars[0], Literal):
                    break  # a constant: what it passes through is where it is made
                if name_of(before) != SAVED:
                    chain.insert(0, before)
                var = before.invars[0]
            known = roots.setdefault(var, [])
            known += [step for step in chain if not any(step is other for other in known)]
        return roots

    def _made_as(self, var: Var, made_by: Mapping[Any, JaxprEqn]) -> Var:
        """What was saved under another name than it was made: it is used by the first name too."""
        while True:
            before = passed_on(var, made_by)
            if before:
                var = before[-1]
            eqn = made_by.get(var)
            if eqn is None or not self._passes_through(eqn) or isinstance(eqn.invars[0], Literal):
                return var
            var = eqn.invars[0]

    def _tag(self, var: Var, roots: dict[Var, list[JaxprEqn]], new: dict[Var, Any], out: list[JaxprEqn]) -> None:
        """Put the operations that tag `var` here, where it is made, and let its uses read the last of them."""
        chain = roots.get(var)
        if not chain:
            return
        last: Any = var
        for eqn in chain:
            out.append(replaced(eqn, invars=[last]))
            last = eqn.outvars[0]
        new[var] = last
        for eqn in chain[:-1]:
            new[eqn.outvars[0]] = last

    def _passes_through(self, eqn: JaxprEqn) -> bool:
        """Whether an operation only marks its operand: a tag, or the probe for tangents (R5)."""
        name = name_of(eqn)
        if name == SAVED or name in self.decided or is_pin(eqn):
            return True
        call = eqn.params.get("call_jaxpr") if eqn.primitive.name == "custom_jvp_call" else None
        return call is not None and not call.jaxpr.eqns and len(eqn.invars) == len(eqn.outvars) == 1

    def _refused(self, eqn: JaxprEqn) -> MismatchError:
        return MismatchError(
            message(
                f"layer {self.layer!r}: a save inside {_NO_RULE[eqn.primitive.name]} cannot be kept for the recompute, "
                "because differentiation replaces that function by its rule.",
                [("operation", eqn.primitive.name), *of_operation("called at", eqn)],
                "make the decision before calling that function, save it there, and pass it in.",
            )
        )


def _fresh_tag(var: Var) -> list[JaxprEqn]:
    aval: Any = var.aval
    eqns = jax.make_jaxpr(lambda value: named(pinned(value), SAVED))(struct(aval.shape, aval.dtype)).jaxpr.eqns
    return [replaced(eqn, outvars=[fresh_var(var)]) for eqn in eqns]


def _read(new: dict[Var, Any], atom: Any) -> Any:
    return atom if isinstance(atom, Literal) else new.get(atom, atom)


def _operands(eqn: JaxprEqn, inputs: set[int]) -> set[Var]:
    """The operands behind the inputs of an inner program: the value itself, or what it is a part of."""
    inner, chosen = subprograms(eqn), inputs
    if eqn.primitive.name == "cond":
        chosen = {n + 1 for n in inputs}
    elif eqn.primitive.name == "scan":
        consts, carry = scan_sizes(eqn.params)
        chosen = {n for n in inputs if not consts <= n < consts + carry}
    elif len(inner) != 1 or len(inner[0].invars) != len(eqn.invars):  # no call, of whatever kind: jit, shard_map
        chosen = set()
    return {atom for n, atom in enumerate(eqn.invars) if n in chosen and isinstance(atom, Var)}


def _made_of(behind: set[Var], saved: Collection[Var], made_by: Mapping[Any, JaxprEqn]) -> tuple[set[Var], set[Var]]:
    """The decisions that what is `saved` is another form of, or a part of, and the inputs that it is one of.

    Integers and booleans that are made of such are made alike again. So a decision is what is made of other values.
    """
    decided: set[Var] = set()
    given: set[Var] = set()
    seen: set[Var] = set()
    todo = [*behind, *(operand for var in saved for operand in _exact_operands(made_by.get(var)))]
    while todo:
        var = todo.pop()
        if var in seen or var in saved:
            continue
        seen.add(var)
        eqn = made_by.get(var)
        if eqn is None:
            given.add(var)
        elif _may_differ(eqn):
            decided.add(var)
        todo += _exact_operands(eqn)
    return decided, given


def _exact_operands(eqn: JaxprEqn | None) -> list[Var]:
    return [] if eqn is None else [var for var in eqn.invars if isinstance(var, Var) and _is_exact(var)]


def _is_exact(var: Var) -> bool:
    aval: Any = var.aval
    return is_plain(aval) and not jnp.issubdtype(aval.dtype, jnp.inexact)


def _may_differ(eqn: JaxprEqn) -> bool:
    """Whether an operation may give something else another time."""
    if any(isinstance(atom, Var) and not _is_exact(atom) for atom in eqn.invars):
        return True
    calls_back = "callback" in eqn.primitive.name
    return calls_back or any(has_any(inner, _may_differ) for inner in subprograms(eqn))


def _needed(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], roots: Mapping[Var, Sequence[JaxprEqn]]) -> set[Var]:
    """The variables that the program reads where it has what is saved."""
    moved = {id(eqn) for chain in roots.values() for eqn in chain}
    needed = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    for eqn in reversed(eqns):
        if id(eqn) not in moved and (eqn.effects or any(var in needed and var not in roots for var in eqn.outvars)):
            needed.update(atom for atom in eqn.invars if isinstance(atom, Var))
    return needed
