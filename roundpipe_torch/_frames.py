"""One call of a region, as its autograd graph holds it: inputs, slot, and one holder per saved tensor.

Ownership (R9): autograd's saved variables own holders, holders own their frame, the frame owns inputs and slot. The
frame knows its holders weakly. So a frame dies with the last tensor that backward could ask for, and nothing here
makes a reference cycle.
"""

from __future__ import annotations

import contextlib
import gc
from _thread import RLock
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from roundpipe_core import RoundPipeError, SlotError
from roundpipe_core._backend import expand
from roundpipe_core._phase import AUDIT, FORWARD, RECOMPUTE, Phase, thread
from roundpipe_core._replay import TapedSlot
from roundpipe_core._slots import Slot
from roundpipe_core._trees import flatten

from ._before import Before
from ._buffers import Buffers, copies, not_misled, settle, states_of
from ._decisions import Decisions
from ._errors import (
    context_swallowed,
    drawn_in_a_crowd,
    drawn_in_another_layout,
    no_partner,
    not_yet,
    other_node,
    other_parameter,
    started_inside,
    tensor_changed,
)
from ._hooks import Hooked, Resting, left_since, now, take_off
from ._inputs import Inputs, restored
from ._keep import forget_with
from ._matching import Leaf, Pairs, Trace, cheap_tail, match, match_aligned, node_count, node_names, region_codes
from ._modes import Modes
from ._offload import Offload, Parcel
from ._outside import Outside, Stale
from ._ranks import collectives, keeps_graph, recompute_on_arrival, tell_rank
from ._run import TorchRun, is_inside, is_told
from ._selective import count_by_line
from ._state import Ambient, DrawWatch, Generators, Met, Visit, generators_of, replayed
from ._torchs import before_hooks, innermost, leave, unseen
from ._transforms import Batches, batched, in_transform
from ._usage import held
from ._verify import Audit

__all__ = ["Frame", "Options"]

T = TypeVar("T")

_NO_CONTEXT = contextlib.nullcontext()
_NOTHING = object()
_Attempt = Callable[["DrawWatch | None"], "tuple[_Recompute, Met]"]


class Options(NamedTuple):
    """How a region is to be run."""

    label: str | None = None
    preserve_rng_state: bool = True
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] | None = None
    compare: bool = True  # metadata of matched tensors
    early_stop: bool = True
    debug: bool = False
    verify: str = "off"
    auto: Decisions | None = None
    offload: Offload | None = None
    respects_hooks: bool = False  # what a selective policy keeps goes through those around


class Holder:
    """What autograd keeps instead of a tensor: its place in a frame, and its value between recompute and use."""

    __slots__ = ("__weakref__", "doubt", "frame", "index", "value", "version")
    frame: Frame
    index: int
    value: torch.Tensor | None
    version: int  # of the value
    doubt: RoundPipeError | Leaf | str | None
    """What speaks against the value; or the kind of node that saved it, of a partner found by order alone."""


class _Recomputed:
    """What the recompute's own graph keeps: the tensor itself."""

    __slots__ = ("__weakref__", "recompute", "value", "version")
    recompute: _Recompute
    value: torch.Tensor
    version: int


_new: Callable[[type[T]], T] = object.__new__
"""A holder, to be filled. Two are made for each tensor saved, and a call of `__init__` takes as long as the rest."""


class _Stop(BaseException):
    """Ends a recompute that has all it was started for. A layer's `except Exception` does not catch it (R11)."""

    def __init__(self, recompute: _Recompute) -> None:
        self.recompute = recompute


class Frame:
    """One call of a region. What most of them never look at stands in the class."""

    _needed: Sequence[int] = ()
    _roots: Sequence[Any]
    """Modules, and tensors that are no arguments, while the forward runs."""
    _modes: Modes | None
    """Of the modules that the call can reach, if there are any."""
    _buffers: Buffers | None
    """Of these modules, if they have any."""
    outside: Outside | None = None
    _outputs: Any = None
    _crowded: Met = ()
    _arrived = -1
    """The last backward that recomputed this."""
    _vain: tuple[list[int], Trace] | None = None
    """Packs that this recompute had no partner for."""
    talks = False
    """To other ranks."""
    _underway: tuple[int, tuple[Any, ...], dict[str, Any]] | None = None
    """The number of the next hook when the forward began, and its arguments, while it runs."""
    returned = False
    stop_at = -1
    runs_out = False
    """A recompute that could stop goes on to the layer's end, which is near."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        slot: Slot,
        options: Options,
        batches: Batches | None,
    ) -> None:
        self._function = function
        self._options = options
        self._batches = batches
        self.slot = slot
        outer = thread.run
        self._parcel = None if options.offload is None else Parcel(options.offload)
        if self._parcel is None:
            self._inputs = Inputs(args, kwargs, innermost(False) is not None)
        else:
            with _NO_CONTEXT if isinstance(outer, TorchRun) else self._parcel.inputs():
                self._inputs = Inputs(args, kwargs, True)
        values = (*args, *kwargs.values())
        self._roots, own, self._modes, self._buffers = states_of(function, values)
        self._generators = Generators(generators_of(function, values), own) if options.preserve_rng_state else None
        self._ambient = Ambient()
        self._context = copy_context()
        self._lock = RLock()
        self._hooked: Sequence[Hooked] = ()  # tensors from before it that the forward has put hooks on
        self._verified = options.verify == "off" or isinstance(slot, TapedSlot)  # a replay repeats nothing
        self._located = outer is not None and is_told(outer)
        self.trace = Trace(options.debug, self._located)

    def forward(self, phase: Phase, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the region for the first time."""
        outer = thread.run
        run = TorchRun(phase, self.slot, self.trace, self._generators, outer)
        if self._buffers is not None:
            run.observe(self._buffers)
        if self._parcel is not None:
            run.plan, run.parcel = self._options.offload, self._parcel
        visit = Visit(self._generators.own) if self._generators else None
        first, before, mark = node_count(), collectives(), now()
        pack = unseen(partial(self._pack_seen, run.witnesses)) if run.witnesses else self._pack
        outputs: Any = _NOTHING
        self._underway = mark, args, kwargs
        try:
            if self._options.contexts is None:
                outputs = _call(run, pack, _unpack, self._function, args, kwargs)
            else:
                hooked = before_hooks(pack) if self._options.respects_hooks else contextlib.nullcontext(pack)
                with hooked as pack, self._options.contexts[0]:
                    if self._options.auto is not None:
                        count_by_line()
                    outputs = _call(run, pack, _unpack, self._function, args, kwargs)
        except Exception as error:
            tell_rank(error, self.slot.label)
            raise
        finally:
            self._underway = None
            if visit is not None:
                self._crowded = visit.end()
        if self._modes is not None:
            settle(self._modes, self._buffers, self.trace.told_at >= 0, run.leaves_out)
        if self._generators and self._generators.missed():
            raise started_inside(self.slot.label)
        if outputs is _NOTHING:
            raise context_swallowed(self.slot.label)
        if run.hooked or now() != mark:
            self._hooked = [*run.hooked, *left_since(mark, self._function, args, kwargs)]
        self._parcel = run.parcel
        outermost = not is_inside(outer)
        if outermost and self.slot.rows is not None:
            forget_with(self, self.slot)
        needed = self._needed = self.trace.alive()
        if self._roots:
            self.outside, self._roots = Outside(self._roots) if needed else None, ()
        self.talks = collectives() != before
        if self.talks:
            recompute_on_arrival(self, outputs, first)
        elif needed and self._options.early_stop and self._verified:
            stop_at = self.stop_at = needed[-1]
            self.runs_out = cheap_tail(self._function, outputs, self.trace.number(stop_at))
        if not self._verified and phase is FORWARD:
            self._outputs = Audit.copy(outputs)
        self.returned = True
        if outermost:
            held(self.slot, args, kwargs, self._parcel)
        return outputs

    def hooked(self) -> Sequence[Hooked]:
        """Tensors from before it that the forward has put hooks on, so far."""
        if self._underway is None:
            return self._hooked
        mark, args, kwargs = self._underway
        return left_since(mark, self._function, args, kwargs)

    @unseen
    def _pack(self, tensor: torch.Tensor) -> Holder:
        holder = _new(Holder)
        holder.frame, holder.value, holder.doubt = self, None, None
        holder.index = self.trace.add(holder, tensor)
        return holder

    def _pack_seen(self, witnesses: tuple[Trace, ...], tensor: torch.Tensor) -> Holder:
        holder = self._pack(tensor)
        for trace in witnesses:
            trace.witness(tensor)
        return holder

    def recover(self, holder: Holder) -> torch.Tensor:
        """The value of a holder that has none: recompute, once for all holders still alive."""
        with self._lock:
            if holder.value is None:
                again = self._tried(holder) or self._recompute(holder).trace
                if holder.value is None:
                    forward = self.trace
                    if self.outside is not None:
                        self.outside.explain(self.slot.label)
                    raise no_partner(
                        self.slot.label,
                        forward.told_of(holder.index),
                        forward.listed(self.needed()),
                        again.listed(again.live),
                    )
            return holder.value

    def arrive(self) -> None:
        """Recompute now, as every rank does, once in each backward."""
        try:
            with self._lock:
                if self._arrived != torch._C._current_graph_task_id():
                    self._recompute(None)
        except Exception as error:
            tell_rank(error, self.slot.label)
            raise

    def _tried(self, holder: Holder) -> Trace | None:
        """A recompute of this backward that could not fill `holder`, where one rank may not start another alone."""
        if self._vain is None or self._arrived != torch._C._current_graph_task_id():
            return None
        lacking, trace = self._vain
        return trace if holder.index in lacking else None

    def lacking(self) -> list[int]:
        """Packs that a backward may ask for and that have no value."""
        return [n for n in self.needed() if (holder := self.trace.refs[n]()) is not None and holder.value is None]

    def _recompute(self, asked: Holder | None) -> _Recompute:
        before = Before(self._generators, self._buffers, self._modes)
        attempt: _Attempt = partial(self._attempt, asked, before.numbers)
        if self._buffers is not None:
            attempt = partial(not_misled, self._buffers, attempt)
        if self.talks:
            self._arrived, self._vain = torch._C._current_graph_task_id(), None
        try:
            recompute, drew = replayed(attempt, self._generators, self._crowded)
            if drew:
                raise drawn_in_a_crowd(self.slot.label, drew)
            if recompute.relaid >= 0 and recompute.drew:
                raise drawn_in_another_layout(self.slot.label, self.trace.told_of(recompute.relaid))
        except BaseException as error:
            before.restore()
            self._empty()  # or a later backward, of the same graph, would take them
            if self.outside is not None and type(error) is RuntimeError:
                self.outside.explain(self.slot.label)
            raise
        for n, tensor in recompute.changed.items():
            holder = self.trace.refs[n]()
            if holder is not None and holder.value is tensor:  # else the recompute has another in its place
                holder.doubt = tensor_changed(self.slot.label, tensor)
        if recompute.stale is not None:
            self._doubt(recompute.stale)
        if self.talks and (lacking := self.lacking()):
            self._vain = lacking, recompute.trace
        return recompute

    def _doubt(self, stale: Stale) -> None:
        for ref in self.trace.refs:
            holder = ref()
            if holder is not None and holder.value is not None and not isinstance(holder.doubt, RoundPipeError):
                holder.doubt = stale.fault(holder.value) or holder.doubt

    def _attempt(
        self, asked: Holder | None, numbers: Sequence[torch.Tensor], watch: DrawWatch | None
    ) -> tuple[_Recompute, Met]:
        """A recompute, and by what another thread was inside a region meanwhile."""
        if watch is not None or self._buffers is not None:  # else there was no attempt before this one,
            self._empty()  # and what it found may not stand where this one finds nothing
        recompute = _Recompute(self, asked)
        return recompute, recompute.run(watch, numbers)

    def _empty(self) -> None:
        """Let the holders have no value."""
        for ref in self.trace.refs:
            holder = ref()
            if holder is not None:
                holder.value = None

    def fill(self, pairs: Pairs, recompute: Trace) -> None:
        """Give the holders still alive the values of their partners."""
        forward = self.trace
        holders, partners = forward.refs, recompute.refs
        weights, again = forward.leaves, recompute.leaves
        differ = weights != again or forward.layouts or recompute.layouts
        for ours, theirs in pairs.items():
            holder, partner = holders[ours](), partners[theirs]()
            if holder is None or partner is None:
                continue
            holder.value, holder.version, holder.doubt = partner.value, partner.version, None
            if ours != theirs or differ:
                then, now = weights.get(ours), again.get(theirs)
                if then != now:
                    holder.doubt = self._leaf_fault(ours, then, now, partner.value)
                if forward.layouts.get(ours) != recompute.layouts.get(theirs):
                    partner.recompute.relaid = ours

    def guess(self, guesses: Pairs, recompute: Trace, outputs: Any) -> None:
        """As `fill`, for pairs that hold only if the same kind of node saved both."""
        leaves: list[Any] = []
        flatten(outputs, leaves, expand)
        names = node_names(leaves, recompute, guesses.values())
        self.fill(guesses, recompute)
        for ours, theirs in guesses.items():
            holder = self.trace.refs[ours]()
            if holder is not None and holder.doubt is None:
                holder.doubt = names.get(recompute.number(theirs), "nothing that is returned")

    def _leaf_fault(
        self, ours: int, then: Leaf | None, now: Leaf | None, value: torch.Tensor
    ) -> RoundPipeError | Leaf | None:
        """What speaks against a weight: that it is not the forward's, or not as the forward had it.

        A parameter that the layer has made is gone when the recompute is; one that was swapped in is not.
        """
        before, again = then and then[2](), now and now[2]()
        if before is None or again is None:  # hooks around the region may give copies of its inputs
            return None
        if before is again:
            return tensor_changed(self.slot.label, value)
        known = type(again) is not torch.Tensor or any(again is leaf[2]() for leaf in self.trace.leaves.values())
        return now if known else None

    def check(self, holder: Holder, made_for: str) -> None:
        """Refuse a partner found by order if another kind of node saved it."""
        node: Any = torch._C._current_autograd_node()
        if node is None or node._sequence_nr() != self.trace.number(holder.index):
            return  # asked by an inner region for its input, which no node saved
        if node.name() != made_for:
            raise other_node(self.slot.label, self.trace.told_of(holder.index), node.name(), made_for)

    def needed(self) -> Sequence[int]:
        """The packs that a backward may ask for."""
        return self._needed if self.returned else self.trace.alive()

    def _audit(self, args: list[Any], kwargs: dict[str, Any]) -> Audit | None:
        if not self.returned:  # inside the forward there is not yet all to compare with
            return None
        self._verified = True
        run = TorchRun(AUDIT, self.slot, None, None)
        found = _NO_CONTEXT if self._buffers is None else self._buffers.copies_of_now()
        with found:  # as a plain recompute would find them
            return Audit(self._function, args, kwargs, run, self._generators)

    def learns(self) -> bool:
        """Whether the recompute has to be whole, to see what it changes."""
        return self._buffers is not None and self._buffers.unsure(self.trace.told_at >= 0)

    def _audited(self, audit: Audit, outputs: Any) -> None:
        if self._buffers is not None and self._buffers.misled:
            self._verified = False  # there will be another recompute
            return
        before, self._outputs = self._outputs, None
        audit.report(before, outputs, self._options.verify)

    def inputs(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments as the forward got them."""
        return restored(self.slot, self._inputs.restore)


class _Recompute:
    """One run of a frame's region during backward."""

    _tried = -1
    drew = False
    """Random numbers, after the last decision; known where `relaid` is."""
    stale: Stale | None = None
    _stop_segment = _stop_offset = -1
    """Where it may stop, if it may."""

    def __init__(self, frame: Frame, asked: Holder | None) -> None:
        self.frame = frame
        self._asked = asked  # the holder that backward waits for, if it has come to one
        # Known before it runs: what it writes itself it may write.
        self.changed = frame.trace.changed() if frame.trace.constants else {}
        self.relaid = -1  # a pack of the forward that the recompute has with other strides
        self.done = False
        if frame.stop_at >= 0 and not frame.learns():
            self._stop_segment, self._stop_offset = frame.trace.position(frame.stop_at)

    def run(self, watch: DrawWatch | None, numbers: Sequence[torch.Tensor]) -> Met:
        """Recompute, and fill the frame's holders. Returns by what another thread was inside a region meanwhile.

        Afterwards the generators go on from `numbers`.
        """
        frame = self.frame
        generators = frame._generators
        outer, nodes = thread.run, node_count()
        around = outer.trace if isinstance(outer, TorchRun) else None
        base = around.base if around else 0
        self._hooked = frame.hooked()
        if frame._parcel is not None:
            frame._parcel.arrive()
        args, kwargs = frame.inputs()
        visit, tracked = Visit(generators.own) if generators else None, torch.is_grad_enabled()
        mark = now()
        try:
            torch._C._set_grad_enabled(True)
            ambient = frame._ambient.restored()
            modes = None if frame._modes is None else frame._modes.restored()
            alone = frame._batches == () and not in_transform()
            if ambient is None and modes is None and alone and not self._hooked:
                outputs, audit = frame._context.copy().run(self._play, args, kwargs, watch)
            else:
                resting = Resting(self._hooked, frame._function, args, kwargs)
                inside = _NO_CONTEXT if alone else batched(frame.slot.label, frame._batches)
                with ambient or _NO_CONTEXT, modes or _NO_CONTEXT, resting, inside:
                    outputs, audit = frame._context.copy().run(self._play, args, kwargs, watch)
            if not self.done:
                self._finish(outputs)
            if audit is not None:
                frame._audited(audit, outputs)
        except _Stop as stop:
            if stop.recompute is not self:
                raise
        except SlotError as error:
            if frame.returned:
                raise
            raise not_yet(frame.slot.label, error) from error
        except RuntimeError as error:
            if not (self.done and "TorchScript interpreter" in str(error)):  # which makes this of all that is raised
                raise
        finally:
            torch._C._set_grad_enabled(tracked)
            crowded: Met = () if visit is None else visit.end()
            if not self._hooked and now() != mark:
                take_off(mark, frame._function, args, kwargs)
            self.drew = self.relaid >= 0 and self._run.drew()
            if generators:
                generators.set(numbers)
            if around is not None:  # the nodes of this recompute, and of one around it, are not its own
                around.skip(base + node_count() - nodes - around.base)
        return crowded

    def _play(self, args: list[Any], kwargs: dict[str, Any], watch: DrawWatch | None) -> tuple[Any, Audit | None]:
        """Run the layer again, audited before if that is due."""
        frame = self.frame
        options, buffers = frame._options, frame._buffers
        audit = None if frame._verified else frame._audit(args, kwargs)
        self.trace = Trace(options.debug, frame._located, frame.trace)
        run = self._run = TorchRun(RECOMPUTE, frame.slot, self.trace, frame._generators)
        run.hooked, run.knowing = self._hooked, frame.trace.told_at >= 0
        run.begin()
        if frame.outside is not None and (changed := frame.outside.changed()):
            self.stale = Stale(frame.slot.label, changed, run.knowing or any(True for _ in frame.slot.saves()))
        if options.contexts is None and buffers is None and watch is None and self.stale is None:
            return _call(run, self._pack, _unpack_recomputed, frame._function, args, kwargs), audit
        run.observe(buffers)
        with (
            options.contexts[1] if options.contexts else _NO_CONTEXT,
            copies(buffers, frame.slot, run.knowing),
            watch or _NO_CONTEXT,
            self.stale or _NO_CONTEXT,
        ):
            if options.auto is not None:
                count_by_line()
            outputs = _call(run, self._pack, _unpack_recomputed, frame._function, args, kwargs)
        return outputs, audit

    @unseen
    def _pack(self, tensor: torch.Tensor) -> _Recomputed:
        partner = _new(_Recomputed)
        partner.recompute = self
        partner.value = value = tensor.detach() if tensor.requires_grad else tensor
        partner.version = value._version
        if self.done:  # the layer runs on, for nothing
            return partner
        trace = self.trace
        if trace.add(partner, tensor) - trace.starts[-1] == self._stop_offset and self._complete():
            self.done = True
            if not ((self.frame.runs_out and _proxies(_PROXY) is None) or _draws_late()):
                raise _Stop(self)
        return partner

    def _complete(self) -> bool:
        """Fill the holders if all that are needed stand in aligned segments, the last of them unfinished."""
        frame, trace = self.frame, self.trace
        if len(trace.starts) != self._stop_segment + 1:
            return False
        pairs, complete = match_aligned(frame.trace, frame.needed(), trace)
        if complete:
            frame.fill(pairs, trace)
        return complete

    def answers(self) -> bool:
        """Whether the forward, waiting in a call of autograd of its own, can go on: the recompute has got there too."""
        frame, trace = self.frame, self.trace
        if frame.returned or self.done or self._tried == len(trace.packs):
            return False
        self._tried = len(trace.packs)
        # By alignment alone. What is alive now in either phase says little: the recompute may be further.
        pairs, _ = match_aligned(frame.trace, frame.needed(), trace)
        if self._asked is None or self._asked.index not in pairs:
            return False
        frame.fill(pairs, trace)
        self.done = True
        return True

    def _finish(self, outputs: Any) -> None:
        """The layer has returned: match what is alive now."""
        frame, trace = self.frame, self.trace
        compare = frame._options.compare
        if frame.returned:
            self._run.refuse_unread()
        trace.finished()
        self._match(frame.needed(), compare, outputs)
        if self._incomplete():  # a reference cycle may keep what a phase dropped
            gc.collect()
            trace.finished()
            for needed in (frame.needed(), frame.trace.alive()):
                if self._incomplete():
                    self._match(needed, compare, outputs)
        self.done = True

    def _incomplete(self) -> bool:
        """Whether what this was started for is missing; where other ranks take part, anything that may be asked for."""
        if self._asked is None or self.frame.talks:
            return bool(self.frame.lacking())
        return self._asked.value is None

    def _match(self, needed: Sequence[int], compare: bool, outputs: Any) -> None:
        frame, trace = self.frame, self.trace
        pairs, guesses = match(frame.trace, needed, trace, compare, frame.returned)
        frame.fill(pairs, trace)
        if guesses:
            frame.guess(guesses, trace, outputs)


def _call(
    run: TorchRun,
    pack: Callable[[torch.Tensor], Any],
    unpack: Callable[[Any], torch.Tensor],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Call a region's function in `run`. What an interrupt leaves of the hooks `Before` takes off."""
    outer = thread.run
    _push_hooks(pack, unpack)
    try:
        thread.run = run
        outputs = function(*args, **kwargs)
    except BaseException as error:
        thread.run = outer
        leave(error)
        _pop_hooks()
        raise
    thread.run = outer
    _pop_hooks()
    return outputs


_push_hooks: Callable[..., None] = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
region_codes |= {_call.__code__}


_proxies: Callable[[Any], Any] = torch._C._get_dispatch_mode
_PROXY = torch._C._TorchDispatchModeKey.PROXY
"""The mode that writes a program of what runs, which shall have nothing in vain."""


def _draws_late() -> bool:
    """Whether the operation whose backward asks has saved a tensor before it drew what goes there, as `rrelu` does."""
    node: Any = torch._C._current_autograd_node()
    return node is not None and node.name().startswith("RreluWithNoise")


def _unpack(holder: Holder) -> torch.Tensor:
    frame, value = holder.frame, holder.value
    try:
        if value is None:
            value = frame.recover(holder)
        if not (frame.talks and keeps_graph()):  # else a part of this backward may follow, on some ranks only
            holder.value = None  # a later backward recomputes again; until then nothing is held
        if holder.doubt is not None:
            _settle(holder, holder.doubt)
        if value._version != holder.version:
            raise tensor_changed(frame.slot.label, value)
    except Exception as error:
        tell_rank(error, frame.slot.label)
        raise
    return value


def _settle(holder: Holder, doubt: RoundPipeError | Leaf | str) -> None:
    if isinstance(doubt, str):
        holder.frame.check(holder, doubt)
        return
    holder.doubt = None
    if isinstance(doubt, RoundPipeError):
        raise doubt
    if doubt[2]() is not None:
        gc.collect()  # an optimizer inside the layer makes a reference cycle with what it optimizes
    if doubt[2]() is not None:
        raise other_parameter(holder.frame.slot.label, str(holder.frame.trace.saved(holder.index)))


def _unpack_recomputed(partner: _Recomputed) -> torch.Tensor:
    if partner.recompute.answers():
        raise _Stop(partner.recompute)
    if partner.value._version != partner.version:
        raise tensor_changed(partner.recompute.frame.slot.label, partner.value)
    return partner.value
