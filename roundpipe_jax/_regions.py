"""The two lanes: how the output of the forward gets the gradient of the recompute (R10).

A region's operation takes the forward's output, the slot's arrays and the inputs, and returns the forward's
output. Only its derivative looks at the rest: it runs the recompute, a program that reads the slot. The output
comes in without tangents: whoever calls has cut them off.

In the checkpoint lane the derivative is a `custom_jvp` rule whose tangent is `jax.checkpoint` of the recompute's
tangent. Nothing of the recompute runs before backward asks for it. In the residual lane it is a `custom_vjp` rule
with the residuals (inputs, slot).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from ._jax import is_differentiated, is_float, is_remat3, jax_checkpoint, optimization_barrier, reverse_only, struct
from ._names import KEPT
from ._offload import back, sent
from ._policies import with_tags
from ._refusals import Refusals
from ._ruled import Batch, Ruling, each_its_own, ruled
from ._runs import stop_gradients
from ._staging import Program
from ._tags import calls_custom_vjp, names_in
from ._tangents import jvp, merged, zero_like

__all__ = ["Away", "CheckpointLane", "ResidualLane"]

_Arrays = Sequence[Any]


class Away(NamedTuple):
    """Which arrays are in host memory between forward and backward."""

    slot: tuple[bool, ...] = ()
    inputs: tuple[bool, ...] = ()

    def sent(self, slot: _Arrays, inputs: _Arrays) -> tuple[list[Any], list[Any]]:
        """On their way to the host."""
        return sent(slot, self.slot), sent(inputs, self.inputs)

    def back(self, slot: _Arrays, inputs: _Arrays) -> tuple[list[Any], list[Any]]:
        """On the device again."""
        return back(slot, self.slot), back(inputs, self.inputs)


_NOTHING_AWAY = Away()


class _Lane:
    """One way to differentiate a region.

    `program` is the recompute, from (its constants, slot, arguments) to the outputs. `forward` is the forward from
    (its constants, arguments), where what was saved may carry a tangent and that is not yet checked (R5).
    `unfit` is the error of a program that may not run a second time, `not_linear` that of a layer that decides by what
    it should be linear in.
    """

    def __init__(
        self,
        program: Program,
        *,
        forward: Program | None,
        slots: int,
        barrier: bool | tuple[bool, ...],
        policy: Any,
        unfit: Callable[[], Exception],
        not_linear: Callable[[], Exception],
        away: Away = _NOTHING_AWAY,
    ) -> None:
        self.program, self.forward, self.slots = program, forward, slots
        self.away = away
        self.barrier, self.policy, self.unfit, self.not_linear = barrier, policy, unfit, not_linear
        self.once_only = program.calls_back or bool(program.writes)
        self.jaxpr_consts = len(program.consts)
        self.opaque = calls_custom_vjp(program.jaxpr.jaxpr)  # then its tangents are good only for being transposed
        self._made: dict[tuple[bool, ...], Callable[..., Any]] = {}

    def recompute(self, slot: _Arrays, inputs: _Arrays) -> list[Any]:
        """The outputs again, from the slot."""
        consts, args = inputs[: self.jaxpr_consts], inputs[self.jaxpr_consts :]
        return self.program.run(consts, [*slot, *args])

    def _recompute_from(self, slot: _Arrays, inputs: _Arrays) -> list[Any]:
        return self.recompute(*self.away.back(slot, inputs))

    def alone(self, slot: _Arrays, inputs: _Arrays) -> list[Any]:
        """The recompute as the forward too: a slot that no forward has filled (R13)."""
        made = self._made.get(())
        if made is None:
            barrier = self.barrier
            if isinstance(barrier, tuple):
                barrier = (False, [*(False,) * self.jaxpr_consts, *barrier])  # type: ignore[assignment]
            policy = with_tags(self.policy) if KEPT in names_in(self.program.jaxpr.jaxpr) else self.policy
            made = self._made[()] = jax_checkpoint(self._recompute_from, policy=policy, prevent_cse=barrier)
        result: list[Any] = made(*self.away.sent(slot, inputs))
        return result

    def check(self, varying: Sequence[bool], inputs: _Arrays, forward_consts: _Arrays, more: Sequence[bool]) -> None:
        """Trace the tangent of the forward, so that the probes on saved values speak up (R5)."""
        if self.once_only and any(varying):
            raise self.unfit()
        if self.forward is None:
            return
        again, args = self.forward_again, inputs[self.jaxpr_consts :]
        everything = [*forward_consts, *args]
        flags = [*more, *varying[self.jaxpr_consts :]]
        if any(flags):
            first = len(forward_consts)
            jax.eval_shape(
                lambda values: _differentiate(lambda vs: again(vs[:first], vs[first:]), values, flags), everything
            )

    def forward_again(self, consts: _Arrays, args: _Arrays) -> list[Any]:
        """The outputs, and what the forward saves."""
        assert self.forward is not None
        return self.forward.run(consts, args)


def _differentiate(function: Callable[[list[Any]], list[Any]], values: _Arrays, flags: Sequence[bool]) -> None:
    jvp(function, values, flags, [jnp.ones_like(value) for value, flag in zip(values, flags, strict=True) if flag])


class CheckpointLane(_Lane):
    """`jax.checkpoint` fed by the slot."""

    def __call__(self, outputs: _Arrays, slot: _Arrays, inputs: _Arrays, forward_consts: _Arrays = ()) -> list[Any]:
        beside = is_remat3() or (self.opaque and not all(map(is_differentiated, inputs)))
        if beside and not self.once_only:  # otherwise it could only be refused
            return self._beside(outputs, slot, inputs, forward_consts)
        return ruled(self.ruling)(outputs, slot, inputs, forward_consts)

    @property
    def ruling(self) -> Ruling:
        """The derivative of the operation."""
        return Ruling(
            self._rule,
            lambda groups: self.recompute(*groups[1:3]),
            lambda batch: _InBatch(self, batch).ruling,
            self._pull,
        )

    def _rule(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        outputs, slot, inputs, consts = primals
        flags = [not isinstance(dot, SymbolicZero) for dot in tangents[2]]
        self.check(flags, inputs, consts, [not isinstance(dot, SymbolicZero) for dot in tangents[3]])
        dots = [dot for dot, flag in zip(tangents[2], flags, strict=True) if flag]
        given = iter(self.tangent(tuple(flags))(*self.away.sent(slot, inputs), dots)) if dots else None
        out_dots = [next(given) if given is not None and is_float(value) else zero_like(value) for value in outputs]
        # Not the bare outputs: their own derivative is the recompute's too.
        return self.differentiated(*primals), out_dots

    def _pull(self, slopes: _Arrays, groups: Sequence[_Arrays]) -> list[list[Any]]:
        outputs, slot, inputs, consts = groups
        if any(isinstance(value, ad.UndefinedPrimal) for value in slot):
            raise self.not_linear()
        missing = [isinstance(value, ad.UndefinedPrimal) for value in inputs]
        needed = [is_float(slope) for slope in slopes]

        def of_the_missing(*chosen: Any) -> list[Any]:
            outs = self.recompute(slot, merged(inputs, missing, chosen))
            return [out for out, flag in zip(outs, needed, strict=True) if flag]

        kinds = [
            struct(value.aval.shape, value.aval.dtype) for value in inputs if isinstance(value, ad.UndefinedPrimal)
        ]
        pull = jax.linear_transpose(of_the_missing, *kinds)
        pulled = iter(pull([slope for slope, flag in zip(slopes, needed, strict=True) if flag]))
        return [
            [None] * len(outputs),
            [None] * len(slot),
            [next(pulled) if flag else None for flag in missing],
            [None] * len(consts),
        ]

    @functools.cached_property
    def differentiated(self) -> CheckpointLane:
        """What this lane is in a program after a first differentiation."""
        return _WithRules(self) if self.opaque else self

    def tangent(self, flags: tuple[bool, ...]) -> Callable[..., list[Any]]:
        """From (slot, inputs, tangents of the flagged inputs) to the tangents of the floating outputs."""
        made = self._made.get(flags)
        if made is None:

            def tangents(slot: _Arrays, inputs: _Arrays, dots: _Arrays) -> list[Any]:
                slot, inputs = self.away.back(slot, inputs)
                outs, out_dots = jvp(lambda values: self.recompute(slot, values), inputs, flags, dots)
                return [dot for out, dot in zip(outs, out_dots, strict=True) if is_float(out)]

            barrier = self.barrier
            if isinstance(barrier, tuple):
                barrier = (True, [*(False,) * self.jaxpr_consts, *barrier], True)  # type: ignore[assignment]
            made = self._made[flags] = jax_checkpoint(tangents, policy=self.policy, prevent_cse=barrier)
        return made

    def _beside(self, outputs: _Arrays, slot: _Arrays, inputs: _Arrays, forward_consts: _Arrays) -> list[Any]:
        """The same where the recompute's tangent is no program of its own, and `jax.checkpoint` has to see the primal.

        Compiled, that costs nothing: nobody uses the primal.
        """
        return _left_values_right_tangents(outputs, self.alone(slot, self._checked(inputs, forward_consts)))

    def _checked(self, inputs: _Arrays, forward_consts: _Arrays) -> list[Any]:
        """The inputs; where they are differentiated, the probes on saved values speak up (R5)."""
        if self.forward is None:
            return list(inputs)

        def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
            flags = [[not isinstance(dot, SymbolicZero) for dot in group] for group in tangents]
            inputs, consts = primals
            self.check(flags[0], inputs, consts, flags[1])
            dots = [
                dot if flag else zero_like(value)
                for dot, flag, value in zip(tangents[0], flags[0], primals[0], strict=True)
            ]
            return operation(*primals), dots

        operation = ruled(Ruling(rule, lambda groups: groups[0]))
        return operation(inputs, forward_consts)


class _Over(CheckpointLane):
    """A lane that makes something of what another one recomputes."""

    def __init__(self, lane: CheckpointLane) -> None:
        vars(self).update(vars(lane))
        vars(self).pop("differentiated", None)
        self.lane, self._made = lane, {}


class _WithRules(_Over):
    """The lane of a recompute in which functions with a `custom_vjp` are replaced by their rules.

    That has forward-mode derivatives, as any program has after a first differentiation.
    """

    def __init__(self, lane: CheckpointLane) -> None:
        super().__init__(lane)
        self.opaque = False

    def recompute(self, slot: _Arrays, inputs: _Arrays) -> list[Any]:
        flags = [is_float(value) for value in inputs]
        chosen = [value for value, flag in zip(inputs, flags, strict=True) if flag]
        outs, _ = jax.vjp(lambda *chosen: self.lane.recompute(slot, merged(inputs, flags, chosen)), *chosen)
        return outs


class _InBatch(_Over):
    """The lane of a region that is batched before it is differentiated.

    In this order, as JAX does it for any program: the batch of a derivative need not have a transpose.
    """

    def __init__(self, lane: CheckpointLane, batch: Batch) -> None:
        super().__init__(lane)
        self.batch = batch

    def recompute(self, slot: _Arrays, inputs: _Arrays) -> list[Any]:
        outs: list[Any] = self.batch.over(self.lane.recompute, (1, 2), self.batch.out)(slot, inputs)
        return outs

    def forward_again(self, consts: _Arrays, args: _Arrays) -> list[Any]:
        _, _, inputs, captured = self.batch.axes
        axes = list(captured), list(inputs[self.jaxpr_consts :])
        outs: list[Any] = self.batch.vmap(self.lane.forward_again, axes, 0)(consts, args)
        return outs


def _left_values_right_tangents(left: _Arrays, right: _Arrays) -> list[Any]:
    pairs = zip(left, right, strict=True)
    return [_left_value_right_tangent([one], [two])[0] if is_float(one) else one for one, two in pairs]


def _tangent_of_the_right(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
    ((right,), (dot,)) = primals[1], tangents[1]
    return _left_value_right_tangent(*primals), [zero_like(right) if isinstance(dot, SymbolicZero) else dot]


_left_value_right_tangent = ruled(Ruling(_tangent_of_the_right, lambda groups: groups[1]))


class ResidualLane(_Lane):
    """Residual passing. The residuals are exactly (inputs, slot)."""

    def __init__(self, program: Program, *, refusals: Refusals, **options: Any) -> None:
        super().__init__(program, **options)
        self.refusals = refusals

    def alone(self, slot: _Arrays, inputs: _Arrays) -> list[Any]:
        return self(self.recompute(*stop_gradients((list(slot), list(inputs)))), slot, inputs)

    def __call__(self, outputs: _Arrays, slot: _Arrays, inputs: _Arrays, forward_consts: _Arrays = ()) -> list[Any]:
        needed = [is_float(value) for value in outputs]
        captured = len(forward_consts)
        twice = CheckpointLane(
            self.program,
            forward=self.forward,
            slots=self.slots,
            barrier=bool(self.barrier),
            policy=None,
            unfit=self.unfit,
            not_linear=self.not_linear,
        )

        def forward(outputs: Any, slot: Any, inputs: Any, consts: Any) -> tuple[Any, Any]:
            flags, primals = [value.perturbed for value in inputs], [value.value for value in inputs]
            self.check(flags, primals, [c.value for c in consts], [c.perturbed for c in consts])
            bare = [[part.value for part in group] for group in (outputs, slot, inputs, consts)]
            # Not the bare outputs: a second derivative goes through the recompute too, by the other lane.
            outs = each_its_own(twice.differentiated(*bare), [*bare[1], *primals])
            return outs, self.away.sent(bare[1], primals)

        def backward(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
            slot, inputs = residuals
            flags = [is_float(value) for value in inputs]
            dots = [_instantiated(dot) for dot, flag in zip(cotangents, needed, strict=True) if flag]
            if self.barrier:  # over the cotangents too: residuals alone leave CSE a way around
                slot, inputs, dots = optimization_barrier((slot, inputs, dots))
            slot, inputs = self.away.back(slot, inputs)

            def of_the_floating(*chosen: Any) -> list[Any]:
                outs = self.recompute(slot, merged(inputs, flags, chosen))
                return [out for out, flag in zip(outs, needed, strict=True) if flag]

            chosen = [value for value, flag in zip(inputs, flags, strict=True) if flag]
            try:
                _, pull = jax.vjp(of_the_floating, *chosen)
                given = iter(pull(dots))
            except NameError as error:
                raise self.refusals.collective(error) from error
            return (
                [None] * len(needed),
                [None] * len(slot),
                [next(given) if flag else None for flag in flags],
                [None] * captured,
            )

        operation = jax.custom_vjp(lambda outputs, slot, inputs, consts: outputs)
        operation.defvjp(forward, backward, symbolic_zeros=True)
        once = [reverse_only(self.refusals.forward_mode, value) if is_float(value) else value for value in inputs]
        result: list[Any] = operation(list(outputs), list(slot), once, list(forward_consts))
        return result


def _instantiated(dot: Any) -> Any:
    return jnp.zeros(dot.shape, dot.dtype) if isinstance(dot, SymbolicZero) else dot
