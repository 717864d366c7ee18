"""`record` and `replay`: a run around a whole model (R13).

Both are runs like a region's own, so that regions find them as they would find an outer region. A recording is a
forward whose slot becomes a tape; a replay is a recompute whose slot was made from one.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

from ._backend import (
    NoValuesError,
    TapeGuard,
    backend_of,
    described,
    expand,
    frontend,
    numpys,
    only_frontend,
    origin_of,
    tape_guards,
)
from ._errors import PhaseError, TapeError, message
from ._host import HostArray, kind_of
from ._phase import Phase, Run, thread
from ._places import Place, where
from ._slots import NOTHING, ONCE, AutoLabel, Entry, Slot, Taken, label_of, row_counts, spoken
from ._tape import (
    OUTSIDE,
    Decision,
    Region,
    Scope,
    Tape,
    check_range,
    no_decision,
    not_a_tape,
    number_of_experts,
    portable,
    refuse_outside,
    saved_at,
    taken_from,
    unseen,
)
from ._trees import Node, Spec, flatten, paths, unflatten

__all__ = ["TapeRun", "TapedEntry", "TapedSlot", "numbered", "record", "replay"]

T = TypeVar("T")


_block: contextvars.ContextVar[TapeRun | None] = contextvars.ContextVar("block", default=None)
"""The block that this task is in. A task inherits it from the one that began it."""


class TapeRun(Run):
    """A recording or a replay. Saved outside of regions, data is kept in order: each save is the next."""

    def __init__(self, phase: Phase, slot: Slot) -> None:
        super().__init__(phase, slot)
        self.repeats = False
        self.guards: list[TapeGuard] = []
        self.lost: TapeError | None = None  # why the recording lacks a decision, if the program goes on
        self.spans_tasks = True  # no block that a task could leave open while it waits

    def begin(self, replayed: Sequence[Any] | None) -> None:
        """The block begins; `replayed` are the arrays of its tape. Whoever calls this calls `end`, if it raises too."""
        for make in tape_guards:
            self.guards.append(make())
            self.guards[-1].begin(replayed)

    def end(self) -> None:
        """The block is over. May be called again: an interrupt may have cut it short (R11)."""
        if _block.get() is self:
            _block.set(None)
        while self.guards:
            self.guards[-1].end()
            self.guards.pop()

    def child(self, label: Any) -> Slot:
        self.check(f"layer {label_of(label)!r} runs")
        return super().child(label)

    def save(
        self, data: tuple[Any, ...], name: str | None, place: Place, offload: bool | None = None
    ) -> tuple[Any, ...]:
        self.check("data is saved")
        name = self._next(name)
        if self.phase is Phase.FORWARD:
            for guard in self.guards:
                data = guard.prepared(self.slot.label, (self.scope, name), data, place)
        return super().save(data, name, place)

    def get(self, name: str | None, place: Place) -> tuple[Any, ...]:
        self.check("get_recompute_data() is called")
        return super().get(self._next(name), place)

    def once(self, function: Callable[[], T], called: Any, place: Place) -> T:
        self.check("recompute_once() is called")
        return super().once(function, called, place)

    def _decide(self, function: Callable[[], T]) -> T:
        with contextlib.ExitStack() as stack:
            for guard in self.guards:
                stack.enter_context(guard.deciding())
            return super()._decide(function)

    def told(self) -> None:
        self._refuse_in_another_task("doing_recompute() is asked")

    def _refuse_in_another_task(self, doing: str) -> None:
        if self.spans_tasks or _block.get() is self:
            return
        raise PhaseError(
            message(
                f"{doing} in another task of this thread (asyncio) than began record() or replay().",
                [],
                "let no other task run model code while the block is open: await nothing in it but tasks begun in it, "
                "or run the others in threads of their own.",
            )
        )

    def check(self, doing: str) -> None:
        """Refuse that a layer meets the block here: in another task, or if a frontend has a reason."""
        self._refuse_in_another_task(doing)
        try:
            for guard in self.guards:
                guard.check(doing)
        except TapeError as error:
            self.lost = self.lost or error
            raise

    def adopt(self, leaf: Any, like: Any) -> Any:
        # Outside of regions nobody says which framework asks: that of the layer's own data, or the tape's.
        backend = backend_of(like)
        if backend is not None:
            try:
                return backend.adopt(leaf, like)
            except NoValuesError:  # a tape that is traced: what is in it stays what it is, as it does in regions
                return leaf
        if origin_of(leaf) == "numpy":
            return numpys.adopt(leaf, None)
        own = backend_of(leaf)
        home = frontend(origin_of(leaf)) or only_frontend()
        if home is None and isinstance(leaf, HostArray):
            raise ValueError("bytes for torch or JAX: save_for_recompute(data), with data of your own, tells which")
        return leaf if home is None or home is own else home.adopt(leaf, None)

    def _next(self, name: str | None) -> str | None:
        count = self.count(("saved outside of regions", *self.scope, name))
        return numbered(name, count)


_UNNAMED = "(unnamed)"


def numbered(name: str | None, count: int) -> str | None:
    """The name of the `count`th save of a name outside of regions."""
    return name if count == 0 else f"{name or _UNNAMED} #{count}"


class _Block:
    """What `record` and `replay` have in common: the run that this thread is in meanwhile."""

    __slots__ = ("_run", "_thread")

    def __init__(self) -> None:
        self._run: TapeRun | None = None
        self._thread = 0

    def _begin(self, tape: Tape, phase: Phase, slot: Slot, replayed: Sequence[Any] | None = None) -> Tape:
        self._run, self._thread = TapeRun(phase, slot), threading.get_ident()
        try:
            self._run.begin(replayed)
            _block.set(self._run)
            self._run.spans_tasks = False
            thread.run = self._run  # last: from here on the block is open
            return tape
        except BaseException:
            self._end()
            raise

    def _end(self) -> TapeRun:
        run = self._run
        assert run is not None
        try:
            thread.run = None
            run.end()
        except BaseException:  # an interrupt (R11)
            thread.run = None
            run.end()
            raise
        self._run = None
        return run

    def __del__(self) -> None:
        if getattr(self, "_run", None) is not None and self._thread == threading.get_ident():
            self._end()  # an interrupt came as __exit__ was entered (R11)


class record(_Block):  # noqa: N801 - used like a function
    """Keep the decisions of the layers that run in here.

    >>> from roundpipe_core import record, replay, save_for_recompute
    >>> def route(scores):
    ...     best, = save_for_recompute(max(scores))
    ...     return best
    >>> with record() as tape:
    ...     route([1, 5, 2])
    5
    >>> with replay(tape):
    ...     route([1, 5, 9])
    5

    The tape is complete when the block has ended. It takes what checkpointed layers save, gradients on or off, in the
    order in which they ran, and what is saved outside of them. Only this thread is recorded.

    Raises:
        PhaseError: begun inside a checkpointed layer, a recording or a replay.

    Implements R13.
    """

    __slots__ = ("_tape",)

    def __enter__(self) -> Tape:
        _refuse_inside("record")
        slot = Slot(AutoLabel(OUTSIDE))
        slot.rows = frozenset()
        self._tape = Tape()
        self._tape.recording = True
        return self._begin(self._tape, Phase.FORWARD, slot)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        thread.run = None  # before any call, in which an interrupt could come (R11)
        run = self._end()
        self._tape.root, self._tape.recording = taken_from(run.slot), False
        if kind is None and run.lost is not None:
            raise run.lost
        return False


class replay(_Block):  # noqa: N801 - used like a function
    """Run layers with the decisions of a tape: in here `doing_recompute()` is True in the forward already.

    >>> from roundpipe_core import record, recompute_once, replay
    >>> with record() as tape:
    ...     recompute_once(lambda: 4)
    4
    >>> with replay(tape):
    ...     recompute_once(lambda: 5)
    4

    Backward may run inside the block or after it. Only this thread replays. A layer finds its decisions by its label
    where the tape has that label, by its place in the order where the other framework calls its layers otherwise.
    Arrays of another framework are converted; integers arrive in the framework's own index type.

    Args:
        tape: made by `record`, `Tape.load` or `Tape.from_routing`, in this framework or the other. May be replayed
            again and again.
        below: the number of experts: all integers of the tape have to be indices from 0 to `below` - 1. A dict gives
            it per name of a save.

    Raises:
        TapeError: the tape does not fit: a decision is missing or left over, has another structure, shape or kind of
            dtype, is out of range, or was made for another number of rows.
        OptionError: `below` is no integer of at least 1, or `tape` is no Tape.
        PhaseError: begun inside a checkpointed layer, a recording or a replay.

    Implements R13.
    """

    __slots__ = ("_below", "_tape")

    def __init__(self, tape: Tape, *, below: int | dict[str, int] | None = None) -> None:
        super().__init__()
        if not isinstance(tape, Tape):
            raise not_a_tape("replay", tape)
        self._tape = tape
        self._below = _limits(below)

    def __enter__(self) -> Tape:
        _refuse_inside("replay")
        names = {decision.key[1] or "" for _, _, decision in self._tape.decisions()}
        for name in self._below.keys() - {None, *names}:
            raise no_decision(self._tape, name, None)
        for layer, _, decision in self._tape.decisions():
            check_range(layer, decision)
            if decision.below is not None and not decision.checked:
                raise unseen(layer, decision, decision.below)
            limit = self._below.get(decision.key[1] or "", self._below.get(None))
            if limit is not None:
                _check_below(layer, decision, limit)
        slot = TapedSlot(self._tape.root, self._tape)
        return self._begin(self._tape, Phase.RECOMPUTE, slot, self._tape.split()[0])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        thread.run = None  # before any call, in which an interrupt could come (R11)
        run = self._end()
        if kind is None:
            _check_all_replayed(run)
        return False


def _refuse_inside(name: str) -> None:
    outer = thread.run
    if outer is None:
        return
    inside = f"layer {outer.slot.label!r}"
    if isinstance(outer, TapeRun):
        inside = "a recording" if outer.phase is Phase.FORWARD else "a replay"
    raise PhaseError(
        message(
            f"{name}() was begun inside {inside}.",
            [],
            "open it around the whole model's forward, outside of checkpointed layers and of another tape.",
        )
    )


def _limits(below: int | dict[str, int] | None) -> dict[str | None, int]:
    """The numbers of experts by the name of the save; None for all names."""
    if isinstance(below, dict):
        return {name: number_of_experts("below", limit) for name, limit in below.items()}
    return {} if below is None else {None: number_of_experts("below", below)}


def _check_below(layer: str, decision: Decision, limit: int) -> None:
    known = refuse_outside(layer, decision, limit)
    vouched = decision.checked and decision.below is not None and decision.below <= limit
    if not known and not vouched:
        raise unseen(layer, decision, limit)


def _check_all_replayed(run: Run) -> None:
    left = [child for child in _taped(run.slot).sequence if child not in run.taken]
    deaf = [child for child in run.taken if not _is_read(_taped(child))]
    unread = [entry for entry in run.slot.entries.values() if isinstance(entry, TapedEntry) and not entry.was_read]
    if not left and not deaf and not unread:
        return
    facts = [("never run", repr(child.label)) for child in left[:6]]
    facts += [("ran, and asked for nothing", repr(child.label)) for child in deaf[:6]]
    facts += [("never read", spoken(entry.decision.key)) for entry in unread[:6]]
    raise TapeError(
        message(
            f"the tape holds more than the model asked for: {len(left) + len(deaf) + len(unread)} left over.",
            facts,
            "replay it with the model and the number of forwards it was recorded from, one tape a microbatch.",
        )
    )


def _is_read(slot: TapedSlot) -> bool:
    entries = list(_all_entries(slot))
    return not entries or any(entry.was_read for entry in entries)


def _all_entries(slot: TapedSlot) -> Iterator[TapedEntry]:
    yield from (entry for entry in slot.entries.values() if isinstance(entry, TapedEntry))
    for inner in slot.sequence:
        yield from _all_entries(inner)


def _taped(slot: Slot) -> TapedSlot:
    assert isinstance(slot, TapedSlot)
    return slot


# ------------------------------------------------------------------------------------- slots from a tape


class TapedSlot(Slot):
    """A slot that a tape has filled. Labels are those of another process, maybe of another framework."""

    __slots__ = ("_by_order", "_ordered", "device", "region", "sequence", "tape")

    def __init__(self, region: Region, tape: Tape) -> None:
        super().__init__(region.label if region.given else AutoLabel(region.label))
        self.region, self.tape = region, tape
        self.device: Any = None
        self.rows = region.rows
        self.sequence = [TapedSlot(inner, tape) for inner in region.regions]
        for inner, slot in zip(region.regions, self.sequence, strict=True):
            self.children.setdefault((inner.scope, inner.label), []).append(slot)
        for decision in region.decisions:
            self.entries[decision.key] = TapedEntry(self, decision)
        self._ordered: dict[Scope, list[Slot]] = {}
        self._by_order: dict[Scope, list[str]] = {}
        for scope, name in list(self.entries):
            if name is not None and name.startswith(ONCE):
                self._by_order.setdefault(scope, []).append(name)

    def met(self, scope: Scope, label: Any, count: int, taken: Taken) -> Slot:
        chosen_by_user = isinstance(label, str) and not isinstance(label, AutoLabel)
        name = label if chosen_by_user else portable(label_of(label))
        alike = self.children.get((scope, name))
        if alike is None and (self.region.complete or not self.sequence):
            return TapedSlot(Region(name, given=chosen_by_user, scope=scope), self.tape)
        which = (scope, name) if alike else (scope,)
        chosen = taken.first_left(which, alike or self._in(scope))
        if chosen is None:
            raise self._missing(scope, name)
        if alike is None and chosen_by_user and chosen.given:
            raise self._other_label(name, chosen.label)
        taken.add(chosen)
        return chosen

    def _in(self, scope: Scope) -> list[Slot]:
        """The regions of a scope, in the order they ran."""
        if scope not in self._ordered:
            held = itertools.chain.from_iterable(slots for (at, _), slots in self.children.items() if at == scope)
            self._ordered[scope] = sorted(held, key=lambda slot: slot.born)
        return self._ordered[scope]

    def child_name(self, label: str) -> str:
        return portable(label)

    def once_name(self, scope: Scope, label: str) -> str:
        name = f"{ONCE}{portable(label)})"
        return name if (scope, name) in self.entries else ONCE

    def read(self, key: Any, place: Place) -> Entry:
        scope, name = key
        if name is not None and name.startswith(ONCE) and key not in self.entries:  # called otherwise: by its order
            count = int(name.partition(" #")[2] or 0)
            names = self._by_order.get(scope, [])
            if count < len(names):
                key = (scope, names[count])
        if key not in self.entries:
            raise self._no_such(key, place)
        return self.entries[key]

    def line_up(self, shapes: Any, device: Any) -> None:
        self.device = device
        now, before = row_counts(shapes), self.rows or frozenset()
        for entry in self.entries.values():
            if isinstance(entry, TapedEntry):
                entry.line_up(before, now)

    def _missing(self, scope: Scope, name: str) -> TapeError:
        held = [slot.label for slot in self._in(scope)]
        holds = f"{len(held)}: {', '.join(map(repr, held[:6]))}" if held else "nothing"
        return TapeError(
            message(
                f"the tape has no decisions left for layer {name!r}.",
                [("inside", repr(self.label)), ("it holds", holds)],
                "replay it with the model it was recorded from, and one forward for one"
                + (
                    "; if some checkpointed layers do not route, from_routing has to be given layers=."
                    if self._is_made
                    else "."
                ),
            )
        )

    @property
    def _is_made(self) -> bool:
        """Whether the tape is of `Tape.from_routing`."""
        return any(origin_of(leaf) == "routing" for _, _, decision in self.tape.decisions() for leaf in decision.leaves)

    def _other_label(self, name: str, held: str) -> TapeError:
        return TapeError(
            message(
                f"layer {name!r} runs where the tape has layer {held!r}.",
                [("inside", repr(self.label))],
                "label the layers alike in both models, or let neither be labelled: then their order counts.",
            )
        )

    def _no_such(self, key: Any, place: Place) -> TapeError:
        held = [("the tape has", spoken(known)) for known in self.entries]
        scope, name = key
        if name is not None and name.partition(" #")[0] == ONCE:  # see `once_name`
            key = scope, name.replace(ONCE, f"{ONCE}...)")
        return TapeError(
            message(
                f"the tape has nothing for layer {self.label!r}, {spoken(key)}.",
                [("asked for at", where(place)), *held[:8]],
                "save under the same names and scopes in the model that is recorded and the one that replays"
                + (self._routing_is(bool(held)) if self._is_made else "."),
            )
        )

    def _routing_is(self, here: bool) -> str:
        """Where `Tape.from_routing` has put it, if it is `here` under another name or elsewhere."""
        if here:
            return (
                "; routing is under the name= that from_routing was given, which for recompute_once(route, ...) is "
                '"recompute_once(route)".'
            )
        if self.label == OUTSIDE:
            return "; for layers that this library does not checkpoint, give from_routing regions=False."
        return (
            "; from_routing has none for a layer inside of another checkpointed one, and for those outside by their "
            "order or by the labels in layers=."
        )


_SAME = "replay it with the inputs and the model it was recorded from."
_SHAPE = (
    "make the tape in the shape of the layer: for one that joins batch and length, from_routing takes the mask as "
    "mask.flatten(), the routing as [tokens, layers, top_k]."
)


class TapedEntry(Entry):
    """A decision of a tape, handed to layers of any framework."""

    __slots__ = ("_layer", "decision", "was_read")

    def __init__(self, slot: TapedSlot, decision: Decision) -> None:
        self.decision = decision
        self.was_read = False
        self._layer = slot.label
        self.spec, self.leaves, self.counts, self.state = decision.spec, decision.leaves, decision.counts, None
        self.axes = decision.axes
        self.place = decision.place or ("a tape", 0)
        self.backends = [backend_of(leaf) for leaf in self.leaves]

    def value(self, run: Run, data: Any) -> Any:
        own: list[Any] = []
        if data is not NOTHING:
            self._check_fit(data, own)
        self.was_read = True
        likes = own or [NOTHING] * len(self.leaves)
        return unflatten(self.spec, (self._adopted(run, n, like) for n, like in enumerate(likes)))

    def _adopted(self, run: Run, n: int, like: Any) -> Any:
        backend, leaf = self.backends[n], self.leaves[n]
        if backend is None:
            return leaf
        try:
            taken = run.adopt(leaf, like)
        except TapeError:
            raise
        except (ValueError, TypeError, OverflowError) as error:
            raise self._unfit(n, str(error).partition("\n")[0]) from error
        owner = backend_of(taken)
        return taken if owner is None else owner.restore(taken)

    def _check_fit(self, data: Any, own: list[Any]) -> None:
        spec = flatten(data, own, expand)
        if not _alike(spec, self.spec) or len(own) != len(self.leaves):
            names = ["the tape " + ", ".join(paths(self.spec)), "the layer " + ", ".join(paths(spec))]
            raise self._unfit(0, f"another structure: {'; '.join(names)}")
        for n, (leaf, mine) in enumerate(zip(self.leaves, own, strict=True)):
            (dtype, shape), (wanted, like) = described(leaf), described(mine)
            if shape != like:
                what = f"shape {list(shape)}, where the layer decides {list(like)}"
                raise self._unfit(n, what, _SHAPE if math.prod(shape) == math.prod(like) else _SAME)
            if kind_of(dtype) != kind_of(wanted):
                raise self._unfit(n, f"{dtype}, where the layer decides {wanted}")

    def line_up(self, before: frozenset[int], now: frozenset[int]) -> None:
        for n, leaf in enumerate(self.leaves):
            shape = described(leaf)[1][self.axes[n] if self.axes else 0 :]
            if now and shape and shape[0] in before and shape[0] not in now:
                rows = ", ".join(map(str, sorted(now)[:8]))
                raise self._unfit(n, f"{shape[0]} rows, as an input had; now inputs have {rows}")

    def _unfit(self, n: int, what: str, way_out: str = _SAME) -> TapeError:
        item = list(paths(self.spec))[n] if self.leaves else ""
        return TapeError(
            message(
                f"the tape does not fit layer {self._layer!r}, {spoken(self.decision.key)}, item {item}: {what}.",
                saved_at(self.decision),
                way_out,
            )
        )


def _alike(one: Spec, two: Spec) -> bool:
    """The same structure, whatever the containers are called."""
    if not isinstance(one, Node) or not isinstance(two, Node):
        return one is two
    if issubclass(one.kind, dict) and issubclass(two.kind, dict) and one.keys != two.keys:
        return False
    return len(one.children) == len(two.children) and all(map(_alike, one.children, two.children))
