"""What a region saves inside inner traces, on its way to a tape and back (R13).

A value that a scan body saves is a tracer of that body. Marked by a name, it is found in the region's program, which
is then run with one more result for each mark: stacked by the scans around it, zeros where a branch was not taken. On
the way back a stacked array enters the program as an *item*, a constant that stands for one iteration's slice; the scan
that reads the item gets the array among the things it iterates over.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from roundpipe_core._errors import TapeError, message
from roundpipe_core._places import where
from roundpipe_core._slots import Entry, Slot, label_of

from ._jax import jax_checkpoint, named, replaced, scan_sizes
from ._places import of_operation
from ._programs import subprograms
from ._tags import name_of

__all__ = ["MarkedSlot", "Marks", "item", "lost_with_its_trace", "run_with"]

_MARK = "roundpipe_tape "
_ITEM = "roundpipe_item "
_CALLS = ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr")  # since jax 0.11 the last for the two before
_serials = itertools.count()


class Marked(NamedTuple):
    """Stands in a slot for a value that is found in the program."""

    name: str
    shape: tuple[int, ...]


class Marks:
    """The marks that the forward of one region makes, regions inside included."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[Any, Marked]] = {}
        self._regions: dict[int, tuple[Slot, str]] = {}
        self._failed: set[int] = set()

    def mark(self, value: Any) -> Any:
        """`value`, to be found again."""
        name = f"{_MARK}{next(_serials)}"
        found = named(value, name)
        self._values[id(found)] = found, Marked(name, value.shape)
        return found

    def names(self, leaves: Sequence[Any]) -> list[Any]:
        """The same with names in place of the values that were marked, which need not be held any longer."""
        return [self._values.pop(id(leaf), (leaf, leaf))[1] for leaf in leaves]

    def region(self, slot: Slot) -> None:
        """A region that begins in the current trace, which JAX may give up and make again."""
        name = f"{_MARK}{next(_serials)}"
        named(jnp.int32(0), name)
        self._regions[id(slot)] = slot, name

    def failed(self, slot: Slot) -> None:
        """A region has ended with an exception, which the layer around it may catch, and so has its trace."""
        self._failed.add(id(slot))

    def taken_from(self, slot: Slot, failed: bool = False) -> MarkedSlot:
        """What `slot` holds, and the regions in it. `failed`: it is a part of one that did."""
        failed = failed or id(slot) in self._failed
        inner = [(key, child) for key, children in slot.children.items() for child in children]
        inner.sort(key=lambda pair: pair[1].born)
        return MarkedSlot(
            slot,
            self._regions.get(id(slot), (None, ""))[1],
            list(slot.entries.items()),
            [(key, self.taken_from(child, failed)) for key, child in inner],
            failed,
        )


class MarkedSlot(NamedTuple):
    """A slot whose arrays are in a program."""

    slot: Slot
    name: str
    entries: list[tuple[Any, Entry]]
    children: list[tuple[Any, MarkedSlot]]
    failed: bool

    def check(self, program: Jaxpr) -> None:
        """Refuse a program in which what is saved cannot be told by its key."""
        marks = _marks_in(program)
        sites = collections.Counter(map(name_of, marks))
        known = {leaf.name for leaf in self._leaves()} | self._names()
        several = [mark for mark in marks if sites[name_of(mark)] > 1 or name_of(mark) not in known]
        if several:
            raise TapeError(
                message(
                    f"layer {self.slot.label!r}: it runs one line that saves at several points, in a function that JAX "
                    "traced once or in two branches, and a tape tells saves by their names.",
                    [fact for mark in several[:8] for fact in of_operation("saved at", mark)],
                    "give each its own name= or layer_scope, or wrap the function that saves in remat of its own.",
                )
            )
        lost = [part for part in self._parts() if part.failed and part.name in sites and part._own_leaves()]
        if lost:
            raise lost[0]._lost()

    def lost(self, values: Mapping[str, Any]) -> TapeError | None:
        """An error if one of the regions saved what is not among `values`: it failed, and an inner trace with it."""
        for part in self._parts():
            if any(leaf.name not in values for leaf in part._own_leaves()):
                return part._lost()
        return None

    def _lost(self) -> TapeError:
        saved = [entry for _, entry in self._entries() if any(isinstance(leaf, Marked) for leaf in entry.leaves)]
        return lost_with_its_trace(self.slot.label, [("saved at", where(entry.place)) for entry in saved[:8]])

    def fill(self, slot: Slot, values: Mapping[str, Any]) -> None:
        """Put what is saved into `slot`, with the `values` found."""
        for key, entry in self.entries:
            if any(isinstance(leaf, Marked) and leaf.name not in values for leaf in entry.leaves):
                continue  # of a trace that JAX has given up
            leaves = [values[leaf.name] if isinstance(leaf, Marked) else leaf for leaf in entry.leaves]
            new = slot.entries[key] = _with(entry, leaves)
            new.axes = tuple(
                value.ndim - len(leaf.shape) if isinstance(leaf, Marked) else 0
                for value, leaf in zip(leaves, entry.leaves, strict=True)
            )
        for key, child in self.children:
            if child.name and child.name not in values and not self.failed:
                continue  # of a trace that JAX has given up
            inner = Slot(child.slot._label)
            inner.rows = child.slot.rows
            slot.children.setdefault(key, []).append(inner)
            child.fill(inner, values)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the marked values, by their names."""
        return dict(self._leaves())

    def _parts(self) -> Iterator[MarkedSlot]:
        yield self
        for _, child in self.children:
            yield from child._parts()

    def _entries(self) -> Iterator[tuple[Any, Entry]]:
        return itertools.chain.from_iterable(part.entries for part in self._parts())

    def _own_leaves(self) -> list[Marked]:
        return [leaf for _, entry in self.entries for leaf in entry.leaves if isinstance(leaf, Marked)]

    def _leaves(self) -> list[Marked]:
        return [leaf for part in self._parts() for leaf in part._own_leaves()]

    def _names(self) -> set[str]:
        return {part.name for part in self._parts()}


def lost_with_its_trace(layer: str, facts: Sequence[tuple[str, str]]) -> TapeError:
    """What to say of a layer that fails where what it saved cannot be had."""
    return TapeError(
        message(
            f"layer {layer!r}: it saved, and then ended with an exception. It is traced, "
            "and a trace that failed gives a tape nothing.",
            facts,
            "raise before the layer saves, or outside of it; or save outside of it, and pass the decision in.",
        )
    )


def _with(entry: Entry, leaves: Any) -> Entry:
    new = Entry.__new__(Entry)
    for name in Entry.__slots__:
        setattr(new, name, getattr(entry, name))
    new.leaves = list(leaves)
    return new


def _marks_in(jaxpr: Jaxpr) -> list[JaxprEqn]:
    found = [eqn for eqn in jaxpr.eqns if (name_of(eqn) or "").startswith(_MARK)]
    for eqn in jaxpr.eqns:
        for inner in subprograms(eqn):
            found += _marks_in(inner)
    return found


def item(array: Any, axes: int, n: int) -> Any:
    """What stands in a program for one iteration's slice of the `n`th array of a tape, if scans have stacked it."""
    if not axes:
        return array
    return named(jnp.zeros(array.shape[axes:], array.dtype), f"{_ITEM}{n}")


# ------------------------------------------------------------------------------------- running programs


class _Stacked(NamedTuple):
    """An array of a tape, and how many scans are to take it apart."""

    array: Any
    axes: int


def run_with(
    closed: ClosedJaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    layer: Any,
    *,
    stacked: Mapping[int, Any] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[list[Any], dict[str, Any]]:
    """The results of a program, and the values of its marks.

    `stacked` gives, for the number of each item in the program, the array of the tape and its stacked axes; `shapes`
    those of the marked values, as the layer saw them.
    """
    items = {f"{_ITEM}{n}": _Stacked(*pair) for n, pair in (stacked or {}).items()}
    run = _Run(label_of(layer), items, shapes or {})
    results, found = run.program(closed.jaxpr, consts, args)
    return [run.plain(result) for result in results], found


class _Run:
    def __init__(self, layer: str, items: Mapping[str, _Stacked], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.layer, self.items, self.shapes = layer, items, shapes

    def program(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        known: dict[Var, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        found: dict[str, Any] = {}

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            name = name_of(eqn) or ""
            if name in self.items:
                results = [self.items[name]]
            elif name.startswith(_MARK):
                value = found[name] = read(eqn.invars[0])
                results = [value]
                if value.shape != self.shapes.get(name, ()):
                    raise self.unheld("vmap", eqn)
            else:
                operands = list(map(read, eqn.invars))
                results, inner = self.operation(jaxpr, eqn, operands)
                found |= inner
            known.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars)), found

    def operation(self, jaxpr: Jaxpr, eqn: JaxprEqn, operands: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        marked = any(_marks_in(inner) for inner in subprograms(eqn))
        if not marked and not any(isinstance(operand, _Stacked) for operand in operands):
            return _alone(jaxpr, eqn, operands), {}
        kind = eqn.primitive.name
        if kind == "scan":
            return self.scan(eqn, operands)
        if kind == "cond":
            return self.cond(eqn, operands)
        if kind in _CALLS:
            [inner] = subprograms(eqn)
            return self.program(inner, _consts(eqn), operands)
        if kind in ("remat2", "checkpoint"):
            return self.checkpoint(eqn, operands)
        if not subprograms(eqn):
            return _alone(jaxpr, eqn, list(map(self.plain, operands))), {}
        raise self.unheld(kind, eqn)

    def unheld(self, kind: str, eqn: JaxprEqn) -> TapeError:
        return TapeError(
            message(
                f"layer {self.layer!r}: what it saves inside {kind} cannot be taken to or from a tape.",
                of_operation("called at", eqn),
                "save it outside of that function, or begin record() or replay() inside.",
            )
        )

    def scan(self, eqn: JaxprEqn, operands: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        params = eqn.params
        n_consts, n_carry = scan_sizes(params)
        consts, carry, xs = operands[:n_consts], operands[n_consts : n_consts + n_carry], operands[n_consts + n_carry :]
        taken = {n: const for n, const in enumerate(consts) if isinstance(const, _Stacked)}
        carry, xs = list(map(self.plain, carry)), list(map(self.plain, xs))
        for const in taken.values():
            if const.array.shape[0] != params["length"]:
                raise self.unfit(f"{const.array.shape[0]} iterations, where the layer has {params['length']}", eqn)

        def body(carry: list[Any], inputs: Any) -> tuple[list[Any], Any]:
            slices, x = inputs
            known = list(consts)
            for n, part in slices.items():
                axes = taken[n].axes - 1
                known[n] = _Stacked(part, axes) if axes else part
            results, found = self.program(params["jaxpr"].jaxpr, params["jaxpr"].consts, [*known, *carry, *x])
            results = list(map(self.plain, results))
            return results[:n_carry], (results[n_carry:], found)

        arrays = {n: const.array for n, const in taken.items()}
        carry, (ys, found) = jax.lax.scan(
            body,
            carry,
            (arrays, xs),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *ys], found

    def cond(self, eqn: JaxprEqn, operands: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        index, *rest = operands
        branches = [
            lambda closed=closed: self.program(closed.jaxpr, closed.consts, rest) for closed in eqn.params["branches"]
        ]
        shapes: dict[str, Any] = {}
        for branch in branches:
            shapes |= jax.eval_shape(lambda branch=branch: branch()[1])

        def whole(branch: Any) -> Any:
            results, found = branch()
            missing = {name: jnp.zeros(like.shape, like.dtype) for name, like in shapes.items() if name not in found}
            return list(map(self.plain, results)), {**found, **missing}

        results, found = jax.lax.switch(index, [lambda branch=branch: whole(branch) for branch in branches])
        return results, found

    def checkpoint(self, eqn: JaxprEqn, operands: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        [inner] = subprograms(eqn)
        own = [n for n, operand in enumerate(operands) if not isinstance(operand, _Stacked)]

        def run(values: list[Any], arrays: dict[int, Any]) -> Any:
            known = list(operands)
            for n, value in zip(own, values, strict=True):
                known[n] = value
            for n, array in arrays.items():
                known[n] = _Stacked(array, operands[n].axes)
            results, found = self.program(inner, _consts(eqn), known)
            return list(map(self.plain, results)), found

        barrier = eqn.params["prevent_cse"]
        if isinstance(barrier, tuple):
            barrier = ([barrier[n] for n in own], False)
        arrays = {n: operand.array for n, operand in enumerate(operands) if isinstance(operand, _Stacked)}
        made = jax_checkpoint(run, policy=eqn.params["policy"], prevent_cse=barrier)
        results, found = made([operands[n] for n in own], arrays)
        return results, found

    def plain(self, value: Any) -> Any:
        if isinstance(value, _Stacked):
            raise self.unfit("it was saved in a scan, and is read outside of one")
        return value

    def unfit(self, what: str, eqn: JaxprEqn | None = None) -> TapeError:
        return TapeError(
            message(
                f"the tape does not fit layer {self.layer!r}: {what}.",
                of_operation("called at", eqn) if eqn is not None else [],
                "replay it with the inputs and the model it was recorded from.",
            )
        )


def _alone(jaxpr: Jaxpr, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    pairs = {atom: value for atom, value in zip(eqn.invars, operands, strict=True) if isinstance(atom, Var)}
    one = replaced(jaxpr, constvars=[], invars=list(pairs), outvars=list(eqn.outvars), eqns=[eqn])
    results: list[Any] = jax.core.eval_jaxpr(one, [], *pairs.values())
    return results


def _consts(eqn: JaxprEqn) -> list[Any]:
    for value in eqn.params.values():
        if isinstance(value, ClosedJaxpr):
            return list(value.consts)
    return []
