"""keep: a part of a region whose outputs are held, so that the recompute leaves it out (R8, R10).

The function is traced into a program of arrays, those it closes over among them, and that program is linearized. What
the forward makes of it is *held*: the outputs, and the residuals of the linear map, other than the arguments. Both
phases then pass through one operation, which takes what is held and the arguments and returns the outputs. Its
derivative is the linear map, on residuals that the recompute finds held or made again, for they are its arguments.
A `custom_vjp` function comes out as its own backward, fed by its own residuals.

A second derivative has to know how the residuals depend on the arguments, and runs the function again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Literal

from roundpipe_core._errors import MismatchError, SlotError, TapeError, message
from roundpipe_core._places import Place, where
from roundpipe_core._slots import Slot, facts_of, label_of

from ._jax import is_float, is_running, is_tracer, named, replaced, zeros
from ._names import KEPT, SAVED
from ._packing import Held, Split, in_jax, split
from ._pins import is_pin
from ._programs import subprograms
from ._ruled import Ruling, each_its_own, ruled
from ._staging import Program, stage
from ._tags import calls_custom_vjp, lead_through_tags, name_of, names_in
from ._tangents import jvp, merged, no_tangent, zero_like

__all__ = ["Kept", "keep", "refuse_on_tape"]

_Arrays = Sequence[Any]


class _From(NamedTuple):
    """Where an array comes from: it is an input, or held, or a constant."""

    input: int | None = None
    held: int | None = None
    constant: Any = None

    def __call__(self, held: _Arrays, inputs: _Arrays) -> Any:
        if self.input is not None:
            return inputs[self.input]
        return self.constant if self.held is None else held[self.held]


@dataclass(frozen=True, eq=False)
class _Plan:
    """A function as programs. Its inputs are the arrays it closes over, then its arguments."""

    captured: tuple[str, ...]  # kinds of the arrays that it closes over
    floats: tuple[bool, ...]  # of the inputs
    forward: Program  # from the constants of the function's derivative and the inputs to what is held
    again: Program | None  # from the inputs, those constants and the function's decisions to the rest of what is held
    given: tuple[int, ...]  # the constants and the decisions among what is held
    linear: Program  # from tangents of floating inputs to those of floating outputs, or back; its constants: residuals
    residuals: tuple[_From, ...]
    back: bool  # whether it goes from cotangents to cotangents
    outputs: tuple[_From, ...]
    shape: Split  # of the outputs
    refusal: str  # what to say if it cannot be made again

    def made(self, constants: _Arrays, inputs: _Arrays) -> list[Any]:
        """What is to be held."""
        return self.forward.run((), [*constants, *inputs])

    def made_again(self, held: _Arrays, inputs: _Arrays) -> list[Any]:
        """The same, with the decisions that the function made."""
        if self.again is None:
            raise MismatchError(self.refusal)
        return self.again.run((), [*inputs, *(held[n] for n in self.given)])

    def out(self, held: _Arrays, inputs: _Arrays) -> list[Any]:
        """The outputs."""
        return [source(held, inputs) for source in self.outputs]

    def out_dots(self, held: _Arrays, inputs: _Arrays, dots: Sequence[Any]) -> list[Any]:
        """Tangents of the outputs, from those of the inputs, where None is zero."""
        residuals = [source(held, inputs) for source in self.residuals]
        given = [dot for dot, flag in zip(dots, self.floats, strict=True) if flag]
        moved = iter(_moved(self.linear, residuals, given))
        return [next(moved) if is_float(out) else no_tangent(out) for out in self.out(held, inputs)]

    def pulled_back(self, held: _Arrays, inputs: _Arrays, slopes: _Arrays) -> list[Any]:
        """Cotangents of the floating inputs, from those of the floating outputs."""
        return self.linear.run([source(held, inputs) for source in self.residuals], slopes)


class Kept:
    """What one call of `keep` holds."""

    __slots__ = ("_shared", "arrays", "plan", "saves")

    def __init__(self, plan: _Plan, arrays: _Arrays, saves: TapeError | None, shared: bool) -> None:
        self.plan, self.arrays = plan, list(arrays)
        self.saves = saves  # what to say if the function saves, and a tape is recorded
        self._shared = shared  # the plan is part of a trace, which serves other calls too

    def around(self, arrays: _Arrays) -> Kept:
        """The same, holding other arrays."""
        return Kept(self.plan, arrays, self.saves, self._shared)

    def key(self) -> Hashable:
        """Equal for what a recompute cannot tell apart; None if that cannot be known."""
        return self.plan if self._shared else None


def keep(run: Any, function: Callable[..., Any], args: Any, kwargs: Any, place: Place) -> Any:
    """`function(*args, **kwargs)`, run by the forward only. `run` is the `JaxRun` that asks for it."""
    key = run.numbered(f"keep({label_of(function)})")
    call = _Call(run, function, (args, kwargs), place, key[1])
    if run.repeats:
        kept = run.slot.kept.get(key)
        if not isinstance(kept, Kept):
            raise call.not_kept()
        plan, held, inputs = kept.plan, kept.arrays, call.inputs_again(kept.plan)
    else:
        program = call.program()
        inputs = [*program.consts, *call.arrays]
        plan, constants = _planned(program, inputs, call.saves_inside())
        held = plan.made(*run.arguments((constants, inputs)))
        if run.tags or run.names:
            held = [named(array, KEPT) if is_tracer(array) else array for array in held]
        saves = call.not_on_tape() if SAVED in names_in(program.jaxpr.jaxpr) else None
        if saves is not None and run.marks is not None:
            raise saves
        if not run.tags:  # there, names hold it
            run.slot.kept[key] = Kept(plan, held, saves, shared=not is_running())
    return plan.shape.join(_outputs(plan, held, inputs))


def refuse_on_tape(slot: Slot) -> None:
    """An error if a function that is kept makes decisions, which a tape that is recorded would lack (R13)."""
    for kept in slot.kept.values():
        if isinstance(kept, Kept) and kept.saves is not None:
            raise kept.saves
    for children in slot.children.values():
        for child in children:
            refuse_on_tape(child)


class _Call:
    """A function, and what it is called with."""

    def __init__(self, run: Any, function: Callable[..., Any], arguments: Any, place: Place, name: str) -> None:
        self._run, self._function, self._place, self._name = run, function, place, name
        self._saves: list[tuple[str, str]] = []  # of the function, in words
        arrays, self._arguments = split(arguments)
        self.arrays = [in_jax(array) for array in arrays]

    def program(self, again: bool = False) -> Program:
        """The function as a program; `again` if only for the arrays that it closes over."""

        def body(*arrays: Any) -> Any:
            args, kwargs = self._arguments.join(arrays)
            value, slot = self._run.aside(lambda: self._function(*args, **kwargs), again)
            self._saves = facts_of(slot.saves())
            outputs, shape = split(value)
            return outputs, Held(shape)

        try:
            program = stage(body, self.arrays)
        except jax.errors.ConcretizationTypeError as error:
            if not is_running():
                raise
            raise self._looks(error) from error
        return program._replace(jaxpr=lead_through_tags(program.jaxpr, self._run.slot.label))

    def inputs_again(self, plan: _Plan) -> list[Any]:
        """The inputs in a recompute, which has no use for what the function does with them."""
        if not plan.captured:
            return self.arrays
        captured = self.program(again=True).consts
        kinds = tuple(map(_kind, captured))
        if kinds != plan.captured:
            raise self._captures_others(plan.captured, kinds)
        return [*captured, *self.arrays]

    def not_kept(self) -> SlotError:
        """The recompute calls `keep` where the forward did not."""
        return SlotError(
            message(
                f"layer {self._run.slot.label!r}: the recompute calls {self._name}, and the forward did not.",
                [("called at", where(self._place))],
                "call keep with the same function, equally often, in both phases.",
            )
        )

    def not_on_tape(self) -> TapeError:
        """The function makes decisions, and a tape is recorded."""
        return TapeError(
            message(
                f"layer {self._run.slot.label!r}: {self._name} saves, which does not get on a tape.",
                [("called at", where(self._place)), *self._saves],
                "save outside of the function that is kept, and pass it the decision.",
            )
        )

    def saves_inside(self) -> str:
        """The function saves in an inner trace, and is to run again."""
        return message(
            f"layer {self._run.slot.label!r}: a second derivative runs {self._name} again, which saves in a scan, "
            "cond, vmap, while or jit.",
            [("called at", where(self._place)), *self._saves],
            "save at the function's own level, or outside of it, and pass it the decision.",
        )

    def _looks(self, error: Exception) -> MismatchError:
        return MismatchError(
            message(
                f"layer {self._run.slot.label!r}: {self._name} looks at a value, and is traced.",
                [("called at", where(self._place)), ("JAX says", str(error).partition("\n")[0])],
                "look at the value before, and pass what follows from it as an argument that is no array.",
            )
        )

    def _captures_others(self, forward: Sequence[str], recompute: Sequence[str]) -> MismatchError:
        return MismatchError(
            message(
                f"layer {self._run.slot.label!r}: {self._name} closes over other arrays in the recompute.",
                [
                    ("called at", where(self._place)),
                    ("forward", ", ".join(forward) or "none"),
                    ("recompute", ", ".join(recompute) or "none"),
                ],
                "pass the arrays as arguments: keep(function, x, w).",
            )
        )


def _kind(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _planned(program: Program, inputs: _Arrays, refusal: str) -> tuple[_Plan, _Arrays]:
    """How to run a program in parts: what it holds, and its derivative from that; and the derivative's constants."""
    floats = tuple(map(is_float, inputs))
    captured = len(program.consts)
    back = calls_custom_vjp(program.jaxpr.jaxpr)
    found: dict[str, Any] = {}

    def linearized(*inputs: Any) -> list[Any]:
        def of_the_floating(*chosen: Any) -> tuple[list[Any], list[Any]]:
            values = merged(inputs, floats, chosen)
            outs = program.run(values[:captured], values[captured:])
            return [out for out in outs if is_float(out)], [out for out in outs if not is_float(out)]

        chosen = [value for value, flag in zip(inputs, floats, strict=True) if flag]
        moving, linear, still = (jax.vjp if back else jax.linearize)(of_the_floating, *chosen, has_aux=True)
        closed = jax.make_jaxpr(linear)(moving) if back else jax.make_jaxpr(linear)(*chosen)
        sources = _Sources(inputs)
        given = iter(still), iter(moving)
        outs = [next(given[is_float(out)]) for out in program.out[0]]
        linearization = Program(closed, None).bare()  # the constants are tracers of this trace
        found.update(linear=linearization, outputs=sources.of(outs), residuals=sources.of(closed.consts))
        return sources.held

    whole = jax.make_jaxpr(linearized)(*inputs)
    forward, again, given = _with_decisions(whole)
    plan = _Plan(
        captured=tuple(map(_kind, program.consts)),
        floats=floats,
        back=back,
        forward=forward,
        again=again,
        given=given,
        shape=program.out[1].value,
        refusal=refusal,
        **found,
    )
    return plan, whole.consts


def _with_decisions(closed: ClosedJaxpr) -> tuple[Program, Program | None, tuple[int, ...]]:
    """The program with its decisions among what is held, the same with decisions given, and where they are (R8).

    Its constants, of rules for derivatives, are inputs: held as decisions are, they need not be the same in each call.
    """
    bare = closed.jaxpr
    tags = [eqn for eqn in bare.eqns if name_of(eqn) == SAVED]
    given = [*bare.constvars, *dict.fromkeys(eqn.outvars[0] for eqn in tags)]
    forward = replaced(bare, constvars=[], invars=[*bare.constvars, *bare.invars], outvars=[*bare.outvars, *given])
    places = tuple(range(len(bare.outvars), len(forward.outvars)))
    whole = Program(ClosedJaxpr(forward, []), None)
    if any(SAVED in names_in(inner) for eqn in bare.eqns for inner in subprograms(eqn)):
        return whole, None, places
    eqns = [eqn for eqn in bare.eqns if name_of(eqn) != SAVED and not is_pin(eqn)]
    again = replaced(forward, eqns=eqns, invars=[*bare.invars, *given])
    return whole, Program(ClosedJaxpr(again, []), None).pruned(), places


class _Sources:
    """Sorts arrays by where a recompute has them from, and collects what has to be held."""

    def __init__(self, inputs: _Arrays) -> None:
        self.held: list[Any] = []
        self._known = {id(value): _From(input=n) for n, value in enumerate(inputs)}

    def of(self, arrays: _Arrays) -> tuple[_From, ...]:
        return tuple(map(self._one, arrays))

    def _one(self, array: Any) -> _From:
        if not is_tracer(array):
            return _From(constant=array)
        if id(array) not in self._known:
            self._known[id(array)] = _From(held=len(self.held))
            self.held.append(array)
        return self._known[id(array)]


def _outputs(plan: _Plan, held: _Arrays, inputs: _Arrays) -> list[Any]:
    """The outputs, out of what is held. Their derivative is that of the function."""
    operate = _reverse_only if plan.back else _either_way
    return operate(plan, held, inputs)


def _either_way(plan: _Plan, held: _Arrays, inputs: _Arrays) -> list[Any]:
    def rule(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        _, held, inputs = primals
        dots = [None if isinstance(dot, SymbolicZero) else dot for dot in tangents[2]]
        return operation(*primals), plan.out_dots(_depending(plan, held, inputs), inputs, dots)

    def like(groups: list[list[Any]]) -> list[Any]:
        _, held, inputs = groups
        dots = [jnp.ones_like(value) if flag else None for value, flag in zip(inputs, plan.floats, strict=True)]
        return plan.out_dots(held, inputs, dots)

    operation = ruled(Ruling(rule, like))
    return operation(plan.out(held, inputs), held, inputs)


def _reverse_only(plan: _Plan, held: _Arrays, inputs: _Arrays) -> list[Any]:
    """The same for a function with a `custom_vjp` in it, which has no tangents."""
    count = len(held)  # flat arguments: under JAX_CUSTOM_VJP3 containers fail inside of a checkpoint

    def known_of(values: _Arrays) -> tuple[_Arrays, _Arrays]:
        return _depending(plan, values[:count], values[count:]), values[count:]

    operation = jax.custom_vjp(lambda *values: each_its_own(plan.out(*known_of(values)), values))

    def forward(*values: Any) -> tuple[Any, Any]:
        known = known_of(values)
        return each_its_own(plan.out(*known), values), known

    def backward(known: Any, cotangents: Any) -> tuple[Any, ...]:
        slopes = [slope for slope in cotangents if slope.dtype != jax.dtypes.float0]
        held, inputs = known
        moved = iter(plan.pulled_back(held, inputs, slopes))
        return *[None] * count, *(next(moved) if flag else None for flag in plan.floats)

    operation.defvjp(forward, backward)
    result: list[Any] = operation(*held, *inputs)
    return result


def _depending(plan: _Plan, held: _Arrays, inputs: _Arrays) -> list[Any]:
    """What is held. Its derivative runs the function again: a first derivative does not ask for it."""
    return ruled(_made_by(plan.made_again))(held, inputs)


def _made_by(function: Callable[[_Arrays, _Arrays], list[Any]]) -> Ruling:
    """The derivative of what is held, which `function` makes of it and the inputs."""

    def rule(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        held, inputs = primals
        flags = [not isinstance(dot, SymbolicZero) for dot in tangents[1]]
        dots = [dot for dot, flag in zip(tangents[1], flags, strict=True) if flag]
        moved = jvp(lambda values: function(held, values), inputs, flags, dots)[1] if dots else map(zero_like, held)
        return ruled(ruling)(held, inputs), list(moved)

    ruling = Ruling(rule, lambda groups: groups[0], lambda batch: _made_by(batch.over(function, (0, 1), batch.out)))
    return ruling


def _moved(program: Program, residuals: _Arrays, dots: Sequence[Any]) -> list[Any]:
    """A linear map of tangents. What follows from one that is None, zero, is not computed."""
    linear = program.jaxpr.jaxpr
    zero = {var for var, dot in zip(linear.invars, dots, strict=True) if dot is None}
    moving = {var for var, dot in zip(linear.invars, dots, strict=True) if dot is not None}
    eqns = []
    for eqn in linear.eqns:
        read = {atom for atom in eqn.invars if not isinstance(atom, Literal)}
        if not read & moving and read & zero:
            zero.update(eqn.outvars)
            continue
        if read & moving:
            moving.update(eqn.outvars)
        eqns.append(eqn)
    read_last = [atom for eqn in eqns for atom in eqn.invars] + linear.outvars
    nothing = list(dict.fromkeys(atom for atom in read_last if not isinstance(atom, Literal) and atom in zero))
    given = {var: dot for var, dot in zip(linear.invars, dots, strict=True) if dot is not None}
    pruned = replaced(linear, eqns=eqns, invars=[*given, *nothing])
    moved: list[Any] = jax.core.eval_jaxpr(pruned, residuals, *given.values(), *map(zeros, nothing))
    return moved
