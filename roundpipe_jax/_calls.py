"""One call of a region.

It goes one of four ways.

* *at once*: the inputs have values. The forward runs on them, so that Python may branch on them; the recompute is
  traced, fed by the slot.
* *staged*: the inputs are abstract (under jit, vmap, scan). The forward is traced as a program too, once for all
  calls alike.
* *tagged*: the layer saves inside an inner trace. It is traced once, and the saved values are named in the program.
* *inside another region*: the outer forward runs the code and fills the slot, the outer recompute reads it (R8).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from roundpipe_core._errors import GradientError, MismatchError, OptionError, TapeError, message
from roundpipe_core._phase import Phase, open_slot, thread
from roundpipe_core._places import where
from roundpipe_core._replay import TapedSlot, TapeRun
from roundpipe_core._slots import Slot, facts_of, label_of
from roundpipe_core._tape import Skeleton

from . import _arguments
from ._counters import Counters
from ._explain import note
from ._identity import codes
from ._inner import MarkedSlot, Marks, item, run_with
from ._jax import (
    is_about_effects,
    is_about_forward_mode,
    is_float,
    is_out_of_memory,
    is_reference,
    is_remat3,
    is_running,
    is_tracer,
    jax_checkpoint,
    replaced,
    trace_state,
)
from ._keep import refuse_on_tape
from ._offload import Offload, Offloading, check_memory, slot_flags
from ._packing import Held, Split, Template, alike, in_jax, split
from ._places import of_error, of_io
from ._policies import check_matches, with_tags
from ._refusals import Refusals
from ._regions import Away, CheckpointLane, ResidualLane
from ._runs import (
    JaxRun,
    Journal,
    NeedsFreshTraces,
    NeedsTags,
    NeedsTangents,
    execute,
    is_abstract,
    stop_gradients,
    updated,
)
from ._staging import Program, Traces, hint, hinted, memory, stage
from ._tags import lead_through_tags
from ._taped import Reads, Taped, reads, without_axes
from ._updates import unfit_updates, unfit_updates_in, updates_in
from ._verify import verified

__all__ = ["Call", "Mode", "Options", "Verify", "labelled"]

T = TypeVar("T")

Mode = Literal["checkpoint", "custom_vjp"]
Verify = Literal["off", "warn", "raise"]

_NOTHING_AWAY = Away()

# What JAX raises where Python looks at the value of a tracer.
_LOOKED = (jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError)


class Options(NamedTuple):
    """What `remat` was told."""

    policy: Any
    prevent_cse: bool | Sequence[Any]
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    mode: Mode
    verify: Verify
    label: str | None
    offload: Offload | None = None


class Forward:
    """What tracing a forward found out."""

    def __init__(self, shape: Split, template: Template, asked: bool) -> None:
        self.shape, self.template, self.asked = shape, template, asked
        self.marked: MarkedSlot | None = None  # what goes to a tape
        self.error: Exception | None = None  # with which the layer ended, after it saved that
        self.names: frozenset[str] = frozenset()  # of its marks
        self.offloads = False  # whether a save itself says where to be
        self.saves: list[tuple[str, str]] = []  # in words, as are those
        self.updates: list[tuple[str, str]] = []
        self.made: dict[Hashable, Any] = {}

    def told_of(self, slot: Slot) -> None:
        """Note what messages say of the slot, which does not last."""
        self.saves = facts_of(slot.saves())
        self.updates = [(str(name), where(update.place)) for (_, name), update in slot.kept.items()]


def _clear(slot: Slot) -> None:
    """Let nothing be in the slot, for another attempt to fill it."""
    slot.entries.clear()
    slot.children.clear()


def _lose(error: TapeError | None) -> None:
    """The tape that is recorded lacks a decision, for this reason: an error, should the program go on."""
    if isinstance(thread.run, TapeRun):
        thread.run.lost = thread.run.lost or error


class Failed:
    """What a layer had saved when it ended with an exception, in the trace of a recording."""

    def __init__(self, error: Exception, template: Template) -> None:
        self.error, self.template = error, template


class Recompute:
    """What tracing a recompute found out."""

    def __init__(self, shape: Split) -> None:
        self.shape = shape
        self.made: dict[Hashable, Any] = {}


class Replay(Recompute):
    """What tracing a replay found out."""

    def __init__(self, shape: Split, run: JaxRun, saved: Sequence[Any]) -> None:
        super().__init__(shape)
        assert isinstance(run.slot, TapedSlot)
        self.reads = reads(run.slot)
        numbers = {id(array): n for n, array in enumerate(saved)}
        self.narrowed = [(numbers[id(array)], dtype) for array, dtype in run.narrowed]


class ReplayFailed(BaseException):
    """A layer ended with an exception in the trace of a replay. What is around it may catch it, as it did before."""

    def __init__(self, error: Exception, found: Reads) -> None:
        super().__init__()
        self.error, self.reads = error, found


class Layer(NamedTuple):
    """A layer with the static part of its arguments: a function of arrays."""

    fun: Callable[[], Any]  # gives the function: some that are kept must not keep it alive
    arguments: Split
    label: Any
    kind: int  # the same for calls that likely need the same form
    counters: Counters  # as the call found them

    def apply(self, arrays: Sequence[Any]) -> Any:
        self.counters.put_back()
        args, kwargs = _arguments.without_static(*self.arguments.join(arrays))
        return self.fun()(*args, **kwargs)

    @property
    def fresh(self) -> bool:
        """Whether its inner traces have to be its own, as far as is known."""
        return hinted("fresh", self.kind)

    def begun(self, stage: Callable[[], T]) -> T:
        """`stage()`; again if it turns out that the inner traces have to be the layer's own.

        All that was traced is given up with it: in there is what was decided so far.
        """
        with contextlib.suppress(NeedsFreshTraces):
            return stage()
        hint("fresh", self.kind)
        return self.begun(stage)

    def forward(self, arrays: Sequence[Any], slot: Slot, *, fresh: bool, **options: Any) -> tuple[Any, JaxRun]:
        """The value of the forward, and the run it was."""
        run = JaxRun(Phase.FORWARD, slot, fresh=fresh, **options)
        return execute(run, lambda: self.apply(arrays)), run

    def new_slot(self) -> Slot:
        """The slot of a forward that is traced, maybe for a tape."""
        slot = Slot(self.label)
        slot.rows = frozenset()
        return slot

    def forward_program(self, *arrays: Any) -> tuple[list[Any], list[Any], Held]:
        """To be traced: outputs, saved arrays, `Forward`."""
        return self._forward_program(self.new_slot(), arrays)

    def recorded_program(self, *arrays: Any) -> tuple[list[Any], list[Any], Held]:
        """The same for a tape, which has what a layer saved before it failed: no outputs, saved arrays, `Failed`."""
        slot = self.new_slot()
        try:
            return self._forward_program(slot, arrays)
        except _LOOKED:
            raise
        except Exception as error:
            saved: list[Any] = []
            return [], saved, Held(Failed(error, Template(slot, saved)))

    def _forward_program(self, slot: Slot, arrays: Sequence[Any]) -> tuple[list[Any], list[Any], Held]:
        names = not is_remat3()  # which cannot name under vmap
        value, run = self.forward(arrays, slot, fresh=self.fresh, names=names)
        outputs, shape = split(value)
        saved: list[Any] = []
        template = Template(run.slot, saved)
        return outputs, saved, Held(Forward(shape, template, run.asked))

    def tagged_program(self, *arrays: Any, journal: Journal | None = None) -> tuple[list[Any], Held]:
        """To be traced: outputs, `Forward`; what is saved is named in the program."""
        value, run = self.forward(arrays, Slot(self.label), fresh=True, tags=True, journal=journal)
        outputs, shape = split(value)
        found = Forward(shape, Template(Slot(self.label), []), run.asked)
        found.offloads = any(entry.offload is not None for entry in run.slot.entries.values())
        found.told_of(run.slot)
        return outputs, Held(found)

    def taped_program(self, slot: Slot, marks: Marks, arrays: Sequence[Any], journal: Journal | None) -> Any:
        """The same for a tape: outputs, `Forward` with the slot as it was marked."""
        value, run = self.forward(arrays, slot, fresh=True, tags=True, journal=journal, marks=marks)
        outputs, shape = split(value)
        found = Forward(shape, Template(Slot(self.label), []), run.asked)
        found.marked = marks.taken_from(slot)
        found.told_of(run.slot)
        return outputs, Held(found)

    def whole_program(self, arrays: Sequence[Any], journal: Journal | None) -> Any:
        """The same of the outermost region, which may fail: outputs, `Forward`."""
        slot, marks = self.new_slot(), Marks()
        try:
            return self.taped_program(slot, marks, arrays, journal)
        except _LOOKED:
            raise
        except Exception as error:
            found = Forward(split(())[1], Template(Slot(self.label), []), asked=True)
            found.marked, found.error = marks.taken_from(slot), error
            return [], Held(found)

    def recompute_program(self, template: Template, saved: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """To be traced: outputs, `Recompute`."""
        slot = template.fill(Slot(self.label, orphan=template.orphan), saved)
        run = JaxRun(Phase.RECOMPUTE, slot, fresh=self.fresh)
        outputs, shape = split(execute(run, lambda: self.apply(arrays)))
        said = run.unread()
        if said is not None:
            raise MismatchError(said)
        return outputs, Held(Recompute(shape))

    def decided_again(self, template: Template, saved: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """To be traced, for verify: the recompute's outputs, what was decided again, and their structures."""
        _, decided, forward = self.forward_program(*arrays)
        outputs, recompute = self.recompute_program(template, saved, arrays)
        return outputs, decided, Held((forward.value.template, recompute.value.shape))

    def replayed_program(self, skeleton: Skeleton, saved: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """To be traced: outputs, `Replay`."""
        tape = without_axes(skeleton.filled(saved, checked=True))
        slot = TapedSlot(tape.root, tape)
        run = JaxRun(Phase.RECOMPUTE, slot, fresh=self.fresh, names=not is_remat3())
        run.repeats = False
        try:
            outputs, shape = split(execute(run, lambda: self.apply(arrays)))
        except _LOOKED:
            raise
        except Exception as error:
            raise ReplayFailed(error, reads(slot)) from error
        return outputs, Held(Replay(shape, run, saved))

    def replayed_inside(
        self, skeleton: Skeleton, axes: Sequence[int], saved: Sequence[Any], arrays: Sequence[Any]
    ) -> Any:
        """The same where some of what is saved is to be taken apart by scans of the layer, which stacked `axes`."""
        stacked = {n: (saved[n], count) for n, count in enumerate(axes) if count}

        def with_items(*values: Any) -> Any:
            handed = [item(array, count, n) for n, (array, count) in enumerate(zip(values, axes, strict=False))]
            return self.replayed_program(skeleton, handed, values[len(handed) :])

        program = stage(with_items, [*saved, *arrays])
        results, _ = run_with(program.jaxpr, program.consts, [*saved, *arrays], self.label, stacked=stacked)
        return results, program.out[1]


class Call:
    """One call of a region."""

    def __init__(self, fun: Any, options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.fun, self.options = fun, options
        self.label = options.label or labelled(fun)
        if options.static_argnums or options.static_argnames:
            args, kwargs = _arguments.with_static(
                label_of(self.label), fun, args, kwargs, options.static_argnums, options.static_argnames
            )
        arrays, self.arguments = split((args, kwargs))
        self.arrays = [in_jax(array) for array in arrays]
        self.counters = Counters()
        self.layer = Layer(lambda: fun, self.arguments, self.label, self._kind(), self.counters)
        self.away = self._away(args, kwargs)
        self.barrier = _arguments.barriers(options.prevent_cse, args, kwargs, self.arguments.array)

    def _away(self, args: Any, kwargs: Any) -> tuple[bool, ...]:
        """Which of the arrays go to the host until backward."""
        plan = self.options.offload
        if plan is None or not plan.inputs:
            return (False,) * len(self.arrays)
        wrong = () if isinstance(plan.inputs, bool) else [n for n in plan.inputs if not 0 <= n < len(args)]
        if wrong:
            raise OptionError(
                message(
                    f"layer {label_of(self.label)!r}: offload moves inputs {plan.inputs}, and the call has fewer.",
                    [("positional arguments", str(len(args)))],
                    "count from 0, or say inputs=True.",
                )
            )
        numbers: list[int | None] = [n for n, part in enumerate(args) for _ in jax.tree.leaves(part)]
        numbers += [None] * len(jax.tree.leaves(kwargs))
        return plan.takes_inputs(self.arrays, [n for n, one in zip(numbers, self.arguments.array, strict=True) if one])

    def _kind(self) -> int:
        alike = self.key if self.key is not None else (tuple(self.arguments.array), self.arguments.tree)
        try:
            return hash((codes(self.fun), alike))
        except TypeError:  # something in the structure of the arguments
            return hash(codes(self.fun))

    @functools.cached_property
    def key(self) -> Hashable:
        """Equal for calls whose arguments differ in their arrays only; None if that cannot be known."""
        return self.arguments.key()

    @functools.cached_property
    def memory(self) -> dict[Hashable, Any] | None:
        """What earlier calls found out about the layer, if it cannot have changed since."""
        if self.key is None or self.counters.anybody_draws:
            return None
        return memory(self.fun, trace_state() if any(map(is_abstract, self.arrays)) else None)

    @property
    def refusals(self) -> Refusals:
        """How this layer says what its mode cannot do."""
        return Refusals.of(labelled(self.fun), self.label)

    def result(self) -> Any:
        """What the layer returns."""
        outer = thread.run
        phase, slot = open_slot(self.label)
        if slot.rows is not None:
            slot.line_up([tuple(array.shape) for array in self.arrays], None)
        if isinstance(slot, TapedSlot):
            return self._replayed(slot)
        if phase is Phase.RECOMPUTE:
            return self._inside_recompute(slot)
        if not isinstance(outer, JaxRun) or outer.phase is Phase.OFF:
            return self._outermost(slot)
        if outer.tags:
            return self._tagged(slot, outer.journal, outer)
        run = outer.inside(slot)
        value = execute(run, lambda: self.layer.apply(self.arrays))
        outer.asked = outer.asked or run.asked
        return value

    # ------------------------------------------------------------------------------ the outermost region

    def _outermost(self, slot: Slot) -> Any:
        at_home = self.options.mode == "custom_vjp" or self.options.verify != "off"  # if that can be: no hint decides
        if not at_home and hinted("tags", self.layer.kind):
            try:
                return self._tagged(slot)
            except Exception as error:  # another function with the same code; if it is not, the error comes again
                if is_out_of_memory(error):
                    raise
                hint("tags", self.layer.kind, holds=False)
        try:
            return self._staged(slot) if any(map(is_abstract, self.arrays)) else self._at_once(slot)
        except NeedsTags as needs:
            given_up = needs
        try:
            hint("tags", self.layer.kind)
            return self._tagged(slot, given_up.journal)
        except (MismatchError, OptionError) as error:
            hint("tags", self.layer.kind, holds=False)
            if not given_up.or_fresh:
                raise
            refusal = error
        hint("fresh", self.layer.kind)
        with contextlib.suppress(NeedsTags):  # another save than the static one that was met first
            return self._at_once(slot)
        raise refusal

    def _at_once(self, slot: Slot) -> Any:
        # Tangents in the forward serve only the probes on saved floats (R5). A layer that saved none last time
        # runs without, which halves its arithmetic.
        key = ("saves no float", self.key)
        cut = self.memory is not None and bool(self.memory.get(key))
        try:
            value = self._forward_at_once(slot, cut)
        except NeedsTangents:
            cut = False
            value = self._forward_at_once(slot, cut)
        if slot.rows is not None:
            refuse_on_tape(slot)
        outputs, shape = split(value)
        if not any(map(is_tracer, self.arrays if cut else outputs)):
            return value  # nothing here is being differentiated
        saved: list[Any] = []
        template = Template(slot, saved)
        if self.memory is not None:
            self.memory[key] = not _saves_floats(template, saved)
        return self._differentiable(stop_gradients(outputs), shape, saved, template, None, {})

    def _forward_at_once(self, slot: Slot, cut: bool) -> Any:
        arrays = stop_gradients(self.arrays) if cut else self.arrays
        _clear(slot)
        names = not is_running() and not is_remat3()  # the program that is traced may be somebody's checkpoint
        options: dict[str, Any] = {"cut": cut, "names": names, "journal": Journal()}
        return self.layer.forward(arrays, slot, fresh=self.layer.fresh, **options)[0]

    def _staged(self, slot: Slot) -> Any:
        if slot.rows is None:
            program = self._program("forward", Layer.forward_program, self.arrays)
        else:
            program = self._program("recorded", Layer.recorded_program, self.arrays)
        found: Forward | Failed = program.out[2].value
        if isinstance(found, Failed):
            saved = stop_gradients(program.run(program.consts, self.arrays))
            refuse_on_tape(found.template.fill(self._emptied(slot, "recorded"), saved))
            raise found.error
        if self._is_plain(program, found):
            return self._plain(program, found)
        program = self._led(program, found)
        run = program.run
        if program.cached:  # one operation a layer, lowered once for all of them
            run = found.made.get("run") or found.made.setdefault("run", jax.jit(_named(program.run, self.fun)))
        ran = run(stop_gradients(program.consts), stop_gradients(self.arrays))
        count = len(program.out[0])
        if slot.rows is not None:
            refuse_on_tape(found.template.fill(slot, ran[count:]))  # the tape's
        known = found.made if program.cached else {}
        return self._differentiable(ran[:count], found.shape, ran[count:], found.template, program, known)

    def _differentiable(
        self,
        outputs: list[Any],
        shape: Split,
        saved: list[Any],
        template: Template,
        forward: Program | None,
        known: dict[Hashable, Any],
    ) -> Any:
        """The outputs of the forward, with the gradient of the recompute."""
        program: Program | None = known.get("recompute")
        if program is None:
            program = self._recomputed(shape, saved, template)
            again: Split = program.out[1].value.shape
            _check_agreement(self.refusals, outputs, shape, program.out[0], again)
            if program.cached:
                known["recompute"] = program
        found: Recompute = program.out[1].value
        program = program.without_references(found.made)
        check_matches(self.options.policy, program.jaxpr, label_of(self.label))
        forward = forward if _saves_floats(template, saved) else None
        flags = slot_flags(self.options.offload, saved, template.sorts)
        away = Away(flags, (*(False,) * len(program.consts), *self.away))
        if any((*away.slot, *away.inputs)):
            check_memory(label_of(self.label))
        lane = self._lane(program, found, forward, len(saved), away)
        inputs = [*program.consts, *self.arrays]
        host = (*away.slot, *away.inputs)
        note(label_of(self.label), lane.recompute, saved, inputs, self.options.policy, tags=False, host=host)
        if self.options.verify != "off":
            decide = functools.partial(self.layer.decided_again, template)
            label, how = label_of(self.label), self.options.verify
            with updated(True), self.counters.again():
                self.layer.begun(lambda: verified(label, how, decide, outputs, shape, saved, template, self.arrays))
        consts = forward.consts if forward is not None else []
        return shape.join(self._in_reverse(lambda: lane(outputs, saved, inputs, consts)))

    def _in_reverse(self, operation: Callable[[], list[Any]]) -> list[Any]:
        """What `operation` gives, or the refusal of a lane that knows reverse mode only."""
        try:
            return operation()
        except (TypeError, NotImplementedError) as error:  # by JAX, before our own refusal is computed
            if self.options.mode != "custom_vjp" or not is_about_forward_mode(error):
                raise
            raise self.refusals.forward_mode() from error

    def _recomputed(self, shape: Split, saved: list[Any], template: Template) -> Program:
        parts = (template.key(), shape.key())
        count = len(saved)  # alone: a trace that is kept must not keep what this call saved (R9)
        return self._looking(
            ("recompute", parts) if None not in parts else None,
            lambda layer, *values: layer.recompute_program(template, values[:count], values[count:]),
            [*saved, *self.arrays],
        )

    def _looking(self, key: Hashable, function: Callable[..., Any], arrays: Sequence[Any]) -> Program:
        """The program of a recompute, which may have looked at values."""
        try:
            with self.counters.again():
                return self._program(key, function, arrays)
        except _LOOKED as error:
            raise MismatchError(
                message(
                    f"layer {label_of(self.label)!r}: the recompute looks at a value that the forward did not save.",
                    [
                        *of_error("looks at", error),
                        ("forward", "ran on values"),
                        ("recompute", "is traced, and has only what was saved"),
                    ],
                    "save the decision, without looking again in the recompute: "
                    "`flag = recompute_once(lambda: bool(condition))`, and branch on that; or look only in the forward "
                    "branch of `if doing_recompute():`, and save there.",
                )
            ) from error

    def _lane(
        self, program: Program, found: Recompute, forward: Program | None, slots: int, away: Away = _NOTHING_AWAY
    ) -> Any:
        policy = self.options.policy
        before = id(forward and forward.jaxpr.eqns)  # which the lane holds
        key = (self.options.mode, id(policy), self.barrier, before, id(program.jaxpr), away)
        lane = found.made.get(key)
        if lane is None:
            forward, bare = forward and forward.bare(), program.bare()
            options = {"forward": forward, "slots": slots, "barrier": self.barrier, "policy": policy, "away": away}
            options["unfit"] = functools.partial(_calls_back, self.refusals, bare)
            options["not_linear"] = functools.partial(_not_linear, label_of(self.label), self.refusals.at)
            if self.options.mode == "custom_vjp":
                lane = ResidualLane(program.pruned().bare(), refusals=self.refusals, **options)
            else:
                lane = CheckpointLane(program.pruned().bare(), **options)
            found.made[key] = lane
        return lane

    def _emptied(self, slot: Slot, key: str) -> Slot:
        """The slot, for what the layer saved before it failed. The trace of that is not kept under `key`."""
        if self.memory is not None:
            self.memory.pop((key, self.key, self.options.label), None)
        _clear(slot)
        return slot

    def _is_plain(self, program: Program, found: Forward) -> bool:
        """Whether the layer knows nothing of phases, so that one program serves both."""
        if found.asked or not found.template.empty or unfit_updates_in(program.jaxpr.jaxpr):
            return False
        if any(map(is_reference, program.consts)):  # `jax.checkpoint` would read it as it is in backward
            return False
        return self.options.verify == "off" and not any(self.away)

    def _plain(self, program: Program, found: Forward) -> Any:
        """Exactly `jax.checkpoint`."""
        return found.shape.join(self._checkpointed(program, found, program, self.options.policy))

    def _tagged(self, slot: Slot, journal: Journal | None = None, outer: JaxRun | None = None) -> Any:
        if self.options.mode == "custom_vjp" and outer is None:  # inside another, the lane is that one's
            raise self.refusals.inner_save()
        try:
            program = self._tagged_program(slot, journal, outer)
            found: Forward = program.out[1].value
        except _LOOKED as error:
            if any(map(is_abstract, self.arrays)):
                raise  # nothing could have looked at these
            raise MismatchError(
                message(
                    f"layer {label_of(self.label)!r}: it saves inside a scan, cond, vmap, while or jitted function, "
                    "and looks at values. It can do one of the two: for the first it is traced as a whole.",
                    [*self.refusals.at, ("looked", str(error).partition("\n")[0]), *of_error("looked at", error)],
                    "wrap the function that saves in remat of its own, instead of the layer around it; or let the "
                    "inner function return the decisions and save them outside of it.",
                )
            ) from error
        if found.error is not None:
            self._fill_failed(slot, program, found, journal)
            raise found.error
        if unfit_updates_in(program.jaxpr.jaxpr):
            raise unfit_updates(label_of(self.label), [*self.refusals.at, *found.updates, *found.saves])
        led = self._led(program, found, journal, whole=outer is None).without_references(found.made)
        if led.writes:
            raise _writes(self.refusals, led, "return the state as a result; or wrap the function that saves in remat.")
        try:
            results = self._checkpointed(program, found, led, self._policy_for_tags(found, outer))
        except NotImplementedError as error:
            if not is_about_effects(error):
                raise
            raise _calls_back_inside(self.refusals, program.jaxpr.jaxpr) from error
        if found.marked is not None and outer is None:
            names = sorted(found.names)
            count = len(results) - len(names)
            found.marked.fill(slot, dict(zip(names, stop_gradients(results[count:]), strict=True)))
            results = results[:count]
        return found.shape.join(results)

    def _fill_failed(self, slot: Slot, program: Program, found: Forward, journal: Journal | None) -> None:
        """Put into the slot what the layer saved before it failed."""
        assert found.marked is not None
        filled = self._emptied(slot, "taped")
        try:
            led = self._led(program, found, journal, whole=True)
        except TapeError:  # the layer's own error goes first; this one comes if the program goes on
            return
        values = dict(zip(sorted(found.names), stop_gradients(led.run(led.consts, self.arrays)), strict=True))
        found.marked.fill(filled, values)
        _lose(found.marked.lost(values))

    def _policy_for_tags(self, found: Forward, outer: JaxRun | None) -> Any:
        plan, policy = self.options.offload, with_tags(self.options.policy)
        if outer is not None or (plan is None and not found.offloads):
            return policy
        if found.offloads or any(self.away) or is_remat3():
            raise OptionError(
                message(
                    f"layer {label_of(self.label)!r}: it saves inside a scan, cond, vmap, while or jit, where "
                    "offload is one for all saves, without inputs, and not under JAX_REMAT3.",
                    [*self.refusals.at, ("offload", repr(plan)), *found.saves],
                    'give the layer offload="cpu" only, or save outside of the inner function.',
                )
            )
        check_memory(label_of(self.label))
        return self.offloading

    @functools.cached_property
    def offloading(self) -> Any:
        """The policy that sends what is saved to the host."""
        return Offloading(with_tags(self.options.policy), self.options.offload or Offload())

    def _tagged_program(self, slot: Slot, journal: Journal | None, outer: JaxRun | None) -> Program:
        if outer is not None and outer.marks is not None:  # the slot is a part of the outer one's
            marks = outer.marks

            marks.region(slot)
            try:
                return stage(lambda *arrays: self.layer.taped_program(slot, marks, arrays, journal), self.arrays)
            except BaseException:
                marks.failed(slot)
                raise
        if outer is None and slot.rows is not None:

            def whole(layer: Layer, *arrays: Any) -> Any:
                return layer.whole_program(arrays, journal)

            if journal is None:
                return self._program("taped", whole, self.arrays)
            return stage(functools.partial(whole, self.layer), self.arrays)
        if journal is None:
            return self._program("tagged", Layer.tagged_program, self.arrays)
        return stage(functools.partial(self.layer.tagged_program, journal=journal), self.arrays)  # of this call alone

    def _led(self, program: Program, found: Forward, journal: Journal | None = None, whole: bool = False) -> Program:
        """The program in which every use of a saved value reads its name, or what was decided before."""
        led: Program | None = found.made.get("led")
        if led is None:
            decided = journal.decided if journal is not None else {}
            led = program._replace(jaxpr=lead_through_tags(program.jaxpr, label_of(self.label), decided))
            if found.marked is not None and whole:
                led = self._with_marks(led, found, found.marked)
            led = found.made["led"] = led.pruned() if decided and (found.marked is None or whole) else led
        return led

    def _with_marks(self, led: Program, found: Forward, marked: MarkedSlot) -> Program:
        """The program, with what is saved among its results."""
        count = len(led.consts)

        def with_marks(*values: Any) -> list[Any]:
            results, values_of = run_with(led.jaxpr, values[:count], values[count:], self.label, shapes=marked.shapes)
            found.names = frozenset(values_of)
            return [*results, *(values_of[name] for name in sorted(values_of))]

        try:
            marked.check(led.jaxpr.jaxpr)
            more = stage(with_marks, [*led.consts, *self.arrays]).jaxpr
        except TapeError as error:
            _lose(error)
            raise
        inputs = more.jaxpr.invars
        jaxpr = replaced(more.jaxpr, constvars=[*more.jaxpr.constvars, *inputs[:count]], invars=inputs[count:])
        return led._replace(jaxpr=ClosedJaxpr(jaxpr, [*more.consts, *led.consts]))

    def _checkpointed(self, program: Program, found: Forward, led: Program, policy: Any) -> list[Any]:
        check_matches(self.options.policy, program.jaxpr, label_of(self.label))
        key = (id(self.options.policy), self.barrier, self.options.offload if isinstance(policy, Offloading) else None)
        made = found.made.get(key)
        if made is None:
            barrier: Any = self.barrier
            if isinstance(barrier, tuple):
                barrier = (False, list(barrier))
            made = found.made[key] = jax_checkpoint(led.bare().run, policy=policy, prevent_cse=barrier)
        inputs = [*led.consts, *self.arrays]
        if not isinstance(thread.run, JaxRun):
            count, policy = len(led.consts), self.options.policy
            note(
                label_of(self.label),
                lambda _, values: led.run(values[:count], values[count:]),
                [],
                inputs,
                policy,
                tags=led is not program,
                plan=self.options.offload,
            )
        result: list[Any] = made(led.consts, self.arrays)
        return result

    # -------------------------------------------------------------------------------- the replay of a tape

    def _replayed(self, slot: TapedSlot) -> Any:
        """The recompute, in place of the forward too (R13)."""
        taped = Taped(slot)
        program = self._replay_program(taped)
        forward = program if updates_in(program.jaxpr.jaxpr) else None
        if forward is not None:
            with updated(True):
                program = self._replay_program(taped)
        found: Replay = program.out[1].value
        taped.mark(found.reads)
        for n, dtype in found.narrowed:
            taped.narrow(n, dtype)
        check_matches(self.options.policy, program.jaxpr, label_of(self.label))
        count = len(taped.arrays)
        inputs = [*program.consts, *self.arrays]
        lane = self._lane(program, found, None, count)
        if not isinstance(thread.run, JaxRun):
            note(label_of(self.label), lane.recompute, taped.arrays, inputs, self.options.policy, tags=False)
        if forward is None:
            return found.shape.join(self._in_reverse(lambda: lane.alone(taped.arrays, inputs)))
        outputs = forward.run(stop_gradients(forward.consts), stop_gradients([*taped.arrays, *self.arrays]))
        return found.shape.join(self._in_reverse(lambda: lane(outputs, taped.arrays, inputs)))

    def _replay_program(self, taped: Taped) -> Program:
        known = taped.key
        try:
            return self._looking(
                ("replay", known, updated.value) if known is not None else None,
                functools.partial(_replayed_in, taped.skeleton, taped.axes),
                [*taped.arrays, *self.arrays],
            )
        except ReplayFailed as raised:
            failed = raised
        taped.mark(failed.reads)
        raise failed.error  # and not above, where the user's error would get ours as its context

    # ------------------------------------------------------------------- inside the recompute of another

    def _inside_recompute(self, slot: Slot) -> Any:
        saved: list[Any] = []
        template = Template(slot, saved)
        checkpointed = jax_checkpoint(
            lambda saved, arrays: self.layer.recompute_program(template, saved, arrays),
            policy=self.options.policy,
            prevent_cse=self.barrier is not False,
        )
        outputs, found = self.layer.begun(lambda: checkpointed(saved, self.arrays))
        return found.value.shape.join(outputs)

    # ------------------------------------------------------------------------------------------- traces

    def _program(self, key: Hashable, function: Callable[..., Any], arrays: Sequence[Any]) -> Program:
        """The program of `function(layer, *arrays)`, from JAX's cache if the layer cannot have changed."""
        known: Traces | None = None
        if key is not None and self.memory is not None:
            key = (key, self.key, self.options.label)
            known = self.memory.get(key)
            if known is None:  # of threads that come here at once, one has its traces kept
                known = self.memory.setdefault(key, Traces.of(_named(_held_weakly(self, function), self.fun)))

        def run(*values: Any) -> Any:
            return function(self.layer, *values)

        run = run if known is not None else _named(run, self.fun)
        program: Program = self.layer.begun(lambda: stage(run, arrays, known))
        return program


def _replayed_in(skeleton: Skeleton, axes: Sequence[int], layer: Layer, *values: Any) -> Any:
    saved, arrays = values[: len(axes)], values[len(axes) :]
    if any(axes):
        return layer.replayed_inside(skeleton, axes, saved, arrays)
    return layer.replayed_program(skeleton, saved, arrays)


def _held_weakly(call: Call, function: Callable[..., Any]) -> Callable[..., Any]:
    fun: Any = weakref.ref(call.fun)
    label, arguments, kind = call.options.label, call.arguments, call.layer.kind
    return lambda *values: function(Layer(fun, arguments, label or labelled(fun()), kind, Counters()), *values)


def labelled(fun: Any) -> Any:
    """What to call a layer after: the user's function, also behind a transformation of JAX."""
    while hasattr(fun, "__wrapped__") and not isinstance(fun, types.MethodType):
        fun = fun.__wrapped__
    return fun


def _named(function: Callable[..., Any], like: Any) -> Callable[..., Any]:
    def named(*values: Any) -> Any:
        return function(*values)

    named.__name__ = getattr(like, "__name__", "layer")
    code = codes(like)[0]
    if code is not None:  # JAX looks there for the file and the line that it puts into messages
        named.__wrapped__ = types.SimpleNamespace(__code__=code, __name__=named.__name__)  # type: ignore[attr-defined]
        named.__signature__ = _VALUES  # type: ignore[attr-defined]
    return named


_VALUES = inspect.signature(lambda *values: values)


def _saves_floats(template: Template, saved: Sequence[Any]) -> bool:
    """Whether one of the arrays that the layer saved may carry a tangent (R5)."""
    return any(is_float(array) and not sort.kept for array, sort in zip(saved, template.sorts, strict=True))


def _writes(layer: Refusals, program: Program, way_out: str) -> MismatchError:
    what = f"layer {layer.layer!r}: the recompute would write to a jax.Ref again."
    return MismatchError(message(what, [*layer.at, *program.writes], way_out))


def _calls_back(layer: Refusals, program: Program) -> MismatchError:
    if program.writes:
        return _writes(layer, program, "write to it by update_once, or only if not doing_recompute().")
    return MismatchError(
        message(
            f"layer {layer.layer!r}: the recompute would run an io_callback again.",
            [*layer.at, *of_io(program.jaxpr.jaxpr)],
            "save what it returns; call one that returns nothing only if not doing_recompute().",
        )
    )


def _not_linear(layer: str, at: Sequence[tuple[str, str]]) -> GradientError:
    return GradientError(
        message(
            f"layer {layer!r}: what it saves depends on the argument of jax.linear_transpose, so it is not linear.",
            at,
            "let it decide by other arguments, or decide outside of it and pass in the decision.",
        )
    )


def _calls_back_inside(layer: Refusals, program: Jaxpr) -> MismatchError:
    return MismatchError(
        message(
            f"layer {layer.layer!r}: it saves inside a scan, cond, vmap, while or jitted function, and has an "
            "io_callback. It can do one of the two: for the first it is one jax.checkpoint, which would run the "
            "callback again.",
            [*layer.at, *of_io(program)],
            "wrap the function that saves in remat of its own, instead of the layer around it; or call back before "
            "the layer, and pass in the result.",
        )
    )


def _check_agreement(layer: Refusals, outputs: Sequence[Any], shape: Split, again: Sequence[Any], other: Split) -> None:
    """R10: both phases return the same kind of thing."""
    facts: list[tuple[str, str]] = []
    if not alike(shape.tree, other.tree) or list(shape.array) != list(other.array):
        facts = [("forward", f"returned {shape.tree}"), ("recompute", f"returned {other.tree}")]
    for n, (one, two) in enumerate(zip(outputs, again, strict=False)):
        if not facts and (one.shape != two.shape or one.dtype != two.dtype):
            facts = [
                ("forward", f"output {n} is {one.dtype}{list(one.shape)}"),
                ("recompute", f"output {n} is {two.dtype}{list(two.shape)}"),
            ]
    if facts:
        raise MismatchError(
            message(
                f"layer {layer.layer!r}: forward and recompute do not return the same.",
                [*layer.at, *facts],
                "let both branches of `if doing_recompute():` compute the same, and save what decides between them.",
            )
        )
