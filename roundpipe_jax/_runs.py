"""A run of a region in JAX: which trace it lives in, and what a save does there.

A value saved while a layer is traced is a tracer, and a tracer is good only in the trace that made it. A run
therefore knows its *home*, the trace the region was called in. Saving at home fills the slot. Saving inside an
inner trace (a scan body, a branch of a cond, a jitted function) raises `NeedsTags`, and the region starts over in
a form where a save is a named value of the program and not an entry in a Python slot. What was decided until then,
where there were values, goes along in a `Journal`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from roundpipe_core._backend import backend_of, expand
from roundpipe_core._errors import GradientError, MismatchError, message
from roundpipe_core._phase import Phase, Run, thread
from roundpipe_core._places import Place, where
from roundpipe_core._slots import NOTHING, Entry, Key, Slot, decides, spoken, unread
from roundpipe_core._trees import Spec, flatten, paths, unflatten

from ._cuts import cut_off
from ._jax import (
    behind,
    cannot_name,
    concrete_value,
    current_trace,
    is_float,
    is_remat3,
    is_running,
    is_tracer,
    let_go,
    named,
    open_traces,
    trace_state,
    user_context,
)
from ._keep import keep
from ._names import SAVED, UPDATE
from ._pins import pinned
from ._remade import Doubt, Reads, in_place_of

__all__ = [
    "JaxRun",
    "Journal",
    "NeedsFreshTraces",
    "NeedsTags",
    "NeedsTangents",
    "execute",
    "is_abstract",
    "kept_outside",
    "recorded_outside",
    "saved_outside",
    "traced_for",
    "updated",
]

if TYPE_CHECKING:
    from ._inner import Marks

T = TypeVar("T")

# Part of the key of every cache of traces that JAX has: a jitted function inside a layer is traced once per phase.
traced_for = user_context()

# Set where code is traced again that has made its updates, in a run that does not know it: what is kept, and replays.
updated = user_context()


class Journal:
    """What an attempt decided on values before it was given up. The next one decides none of it again (R8)."""

    def __init__(self) -> None:
        self.decided: dict[str, Any] = {}  # array by the name that the next attempt gives it in its program
        self._entries: list[tuple[Key, Entry]] = []
        self._read = 0

    def add(self, key: Key, entry: Entry) -> None:
        """The next decision."""
        self._entries.append((key, entry))

    def next(self, key: Key, place: Place | None) -> Entry | None:
        """What was decided at the point where the layer's code is again, if it went the same way."""
        if self._read >= len(self._entries):
            return None
        known, entry = self._entries[self._read]
        if (known, entry.place) != (key, place or _NO_PLACE):
            self._read = len(self._entries)
            return None
        self._read += 1
        return entry

    def named(self, value: Any, made: Any) -> Any:
        """`value` under a name by which it is found in the program, where `made` takes its place."""
        name = f"{SAVED} {len(self.decided)}"
        self.decided[name] = made
        return named(value, name)


_NO_PLACE: Place = ("", 0)


class StartOver(BaseException):
    """A run is given up, and its region begins again in another form."""

    def __init__(self) -> None:
        super().__init__()
        self._traces = open_traces()

    def has_left(self, trace: Any) -> None:
        """What ran in `trace` has ended, and with it all traces in there."""
        if any(one is trace for one in self._traces):
            while self._traces[0] is not trace:
                let_go(self._traces.pop(0))


class NeedsTags(StartOver):
    """A save inside an inner trace: the region has to be traced once, with tagged values.

    `or_fresh`: traces of its own would do too, for what was saved is static.
    """

    def __init__(self, journal: Journal | None, or_fresh: bool = False) -> None:
        super().__init__()
        self.journal, self.or_fresh = journal, or_fresh


class NeedsFreshTraces(StartOver):
    """The phase or the slot was asked for inside an inner trace, which no other run may then reuse."""


class NeedsTangents(StartOver):
    """A float was saved by a forward that runs without tangents, so that nobody can tell whether it carries one."""


class JaxRun(Run):
    """One execution of a region's Python code in JAX."""

    __slots__ = ("asked", "aware", "cut", "fresh", "home", "journal", "marks", "names", "narrowed", "reads", "tags")

    def __init__(
        self,
        phase: Phase,
        slot: Slot,
        *,
        home: Any = None,
        fresh: bool = False,
        tags: bool = False,
        cut: bool = False,
        names: bool = False,
        journal: Journal | None = None,
        marks: Marks | None = None,
    ) -> None:
        super().__init__(phase, slot)
        self.home = trace_state() if home is None else home
        self.fresh = fresh or tags
        self.tags = tags
        self.cut = cut  # no tangents in this forward
        self.names = names  # saved values are named in the program, for a checkpoint around this region
        self.journal = journal  # written by a forward that runs on values, read by one with tags
        self.marks = marks  # what is saved is marked in the program, for a tape
        self.reads = Reads()
        self.asked = False  # whether the layer knows its phase: then its phases may differ
        self.aware: bool = isinstance(thread.run, JaxRun) and thread.run.aware  # the code so far knew its phase
        self.narrowed: list[tuple[Any, Any]] = []  # integers of a tape that the layer has in a narrower dtype

    @property
    def on_values(self) -> bool:
        """Whether this is a forward whose operations run at once."""
        return self.journal is not None and not self.tags

    def inside(self, slot: Slot) -> JaxRun:
        """The run of a region in the forward of this one."""
        options = {name: getattr(self, name) for name in ("home", "fresh", "tags", "cut", "names", "journal")}
        return JaxRun(self.phase, slot, **options)

    def consulted(self, point: Any = None) -> None:
        self.asked = True
        if self.fresh or trace_state() == self.home:
            return
        if self.phase is Phase.FORWARD and is_running():
            raise NeedsTags(self.journal)  # under vmap or grad in eager mode, before the decision is made there (R8)
        if not self.on_values:
            # An inner function that was traced knowing the phase is cached by JAX. What it learned, or the tracers
            # it closed over, must not reach another region.
            raise NeedsFreshTraces

    def count(self, key: tuple[Any, ...]) -> int:
        self._stays_in_python(static=True)
        return super().count(key)

    def keep(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], place: Place) -> T:
        if self.phase is Phase.FORWARD and not self.repeats:
            self._stays_in_python(static=False)  # a replay of a tape reads nothing of what its keep holds
        outputs: T = keep(self, function, args, kwargs, place)
        return outputs

    def aside(self, call: Callable[[], T], again: bool) -> tuple[T, Slot]:
        """`call()` as code that a recompute leaves out, and the slot that it filled. `again`: it ran before."""
        run = JaxRun(Phase.FORWARD, Slot(self.slot.label), tags=True)
        with updated(again or updated.value):
            return execute(run, call), run.slot

    def update(self, function: Callable[[], Any], called: Any, place: Place) -> None:
        if updated.value:
            return
        if not self.repeats and not self.on_values and not self.fresh:
            raise NeedsFreshTraces  # before it is made: a later save or question in an inner trace would come too late
        with jax.named_scope(UPDATE):
            super().update(function, called, place)

    def stored(self, entry: Entry, offload: bool | None) -> None:
        entry.offload = offload
        if self.tags:  # the program has the values. They may be of an inner trace, which this run outlasts
            entry.leaves = self.marks.names(entry.leaves) if self.marks is not None else []

    def save(
        self, data: tuple[Any, ...], name: str | None, place: Place, offload: bool | None = None
    ) -> tuple[Any, ...]:
        if self.phase is Phase.FORWARD:
            data = self._prepared(data, (self.scope, name), place)
        return super().save(data, name, place, offload)

    def _read(self, key: Key, place: Place, data: Any = NOTHING) -> Any:
        saved = super()._read(key, place, data)
        doubt = functools.partial(_doubtful, self.slot.label, key, place) if self.aware else None
        if data is NOTHING:
            self.reads.sure = True
        elif not self.reads.marks:
            self.reads.fault = functools.partial(_unread, self.slot.label, list(self.slot.saves()))
        return _in_place_of(saved if data is NOTHING else data, saved, self.reads, doubt)

    def told(self) -> None:
        self.aware = True

    def get(self, name: str | None, place: Place) -> tuple[Any, ...]:
        if self.phase is Phase.RECOMPUTE:
            self.consulted()
        return super().get(name, place)

    def arguments(self, values: T) -> T:
        return stop_gradients(values)

    def adopt(self, leaf: Any, like: Any) -> Any:  # R13
        if not isinstance(like, jax.Array):
            return leaf
        backend = backend_of(like)
        if not is_tracer(leaf):  # numpy's, or known to be the same in every call
            with jax.ensure_compile_time_eval():
                return leaf if backend is None else backend.adopt(leaf, like)
        if jnp.issubdtype(like.dtype, jnp.integer) and not _holds(like.dtype, leaf.dtype):
            self.narrowed.append((leaf, like.dtype))  # looked at where there are values
        return leaf.astype(like.dtype)

    def _decide(self, function: Callable[[], T]) -> T:
        key = (self.scope, None)
        made = self.journal.next(key, None) if self.journal is not None and self.tags else None
        if made is not None:
            earlier: T = made.restore()
            return earlier
        if self.phase is Phase.FORWARD:
            self._stays_in_python(static=False)  # asked before the decision is made, which happens once (R8)
        with traced_for(Phase.OFF):
            value: T = super()._decide(function)
        if self.phase is not Phase.FORWARD:
            return value
        prepared: T = self._prepared(value, key, None)
        return prepared

    def _stays_in_python(self, static: bool) -> None:
        """Start over if JAX's caches would keep what happens here from happening in every call."""
        if self.tags or trace_state() == self.home:
            return
        if not static or self._in_a_rule():
            raise NeedsTags(self.journal)
        if self.fresh:
            return
        if self.on_values:
            raise NeedsTags(self.journal, or_fresh=True)
        raise NeedsFreshTraces

    def _in_a_rule(self) -> bool:
        """Whether a derivative rule is running, on values. It does so in the forward alone, and in no recompute."""
        home = self.home._trace_ref()
        return self.on_values and is_running() and all(trace is not home for trace in open_traces())

    def _prepared(self, data: Any, key: Key, place: Place | None) -> Any:
        """`data` as the layer shall see it after the save: probed for tangents, and tagged where tags are used."""
        leaves: list[Any] = []
        try:
            spec = flatten(data, leaves, expand)
        except RecursionError:
            return data  # the core has the words for it
        if self.cut and place is not None and any(isinstance(leaf, jax.Array) and is_float(leaf) for leaf in leaves):
            raise NeedsTangents
        tracers = [n for n, leaf in enumerate(leaves) if is_tracer(leaf)]
        if self.tags and tracers and place is not None and trace_state() != self.home:
            self._forget_earlier_trace(key, place)
        for n in tracers:
            if place is not None and is_float(leaves[n]):
                leaves[n] = _probe(_Fault(self.slot.label, key, spec, n, place), leaves[n])
        if self.on_values:
            self._into_journal(key, place, spec, leaves)
        self._stays_in_python(static=not tracers)
        if self.tags and self.journal is not None:
            self._out_of_journal(key, place, leaves)
        if self.tags or self.names:
            for n in tracers:
                leaves[n] = named(pinned(leaves[n]), SAVED)
        if self.marks is not None:
            for n in tracers:
                leaves[n] = self.marks.mark(leaves[n])
        return unflatten(spec, iter(leaves)) if tracers else data

    def _into_journal(self, key: Key, place: Place | None, spec: Spec, leaves: list[Any]) -> None:
        assert self.journal is not None
        if trace_state() != self.home and not is_running():
            return  # only traced, and not decided yet
        data = unflatten(spec, (behind(leaf) if is_tracer(leaf) else leaf for leaf in leaves))
        self.journal.add(key, Entry(self.slot.label, key, data, place or _NO_PLACE))

    def _out_of_journal(self, key: Key, place: Place | None, leaves: list[Any]) -> None:
        assert self.journal is not None
        entry = self.journal.next(key, place)
        for n, made in enumerate(entry.leaves if entry is not None else ()):
            if n < len(leaves) and is_tracer(leaves[n]) and isinstance(made, jax.Array) and not is_tracer(made):
                leaves[n] = self.journal.named(leaves[n], made)

    def _forget_earlier_trace(self, key: Key, place: Place) -> None:
        # An inner function may be traced at several points of the layer, and whether it is depends on JAX's caches.
        # Each trace has its own tags, so that the same line saving again takes nothing from the first save (R4).
        before = self.slot.entries.get(key)
        if before is not None and before.place == place:
            del self.slot.entries[key]


def _holds(dtype: Any, other: Any) -> bool:
    """Whether integers of type `other` are all of type `dtype` too."""
    info: Any = jnp.iinfo
    wide, narrow = info(dtype), info(other)
    return bool(wide.min <= narrow.min and narrow.max <= wide.max)


def _in_place_of(made: Any, saved: T, reads: Reads, doubt: Doubt) -> T:
    """`saved`, of the same structure, to be read in place of what was `made` again."""
    before: list[Any] = []
    now: list[Any] = []
    flatten(made, before, expand)
    spec = flatten(saved, now, expand)
    reads.sure = reads.sure or not any(map(decides, now))
    handed_back: T = unflatten(spec, iter(in_place_of(before, now, reads, doubt)))
    return handed_back if any(map(is_tracer, now)) else saved


def _unread(layer: str, saves: Iterable[tuple[Key, Place]]) -> MismatchError:
    return MismatchError(unread(layer, saves))


def _doubtful(layer: str, key: Key, place: Place) -> MismatchError:
    return MismatchError(
        message(
            f"layer {layer!r}, {spoken(key)}: the recompute uses the value that it gives to save_for_recompute, and "
            "not what it gets for it. It asked for its phase, so that this may be another value than the "
            "forward saved.",
            [("saved at", where(place))],
            "go on with what save_for_recompute returns, everywhere: (idx,) = save_for_recompute(idx).",
        )
    )


def execute(run: JaxRun, call: Callable[[], T]) -> T:
    """`call()` as the code of `run` (R1, R11)."""
    # Code that ran on values may have asked for its phase in a jitted function and have an answer. A trace for later
    # has to learn that it was asked, and so does not share JAX's cache with it.
    before, outside, trace = thread.run, traced_for(traced_for.value), current_trace()
    try:
        with traced_for((run.phase, object() if run.fresh else run.on_values)):
            thread.run = run
            return call()
    except BaseException as error:  # an interrupt can come while the context is entered or left
        outside.__enter__()
        if isinstance(error, StartOver):
            error.has_left(trace)
        raise
    finally:
        thread.run = before


def is_abstract(value: Any) -> bool:
    """Whether `value` is a tracer without a value that Python could look at."""
    return is_tracer(value) and concrete_value(value) is None


def stop_gradients(values: T) -> T:
    """`values`, any pytree, with its floating arrays cut off from differentiation."""
    cut: T = jax.tree.map(_stopped, values)
    return cut


def _stopped(leaf: Any) -> Any:
    if is_tracer(leaf) and is_float(leaf):
        return jnp.asarray(cut_off(leaf))  # behind a tracer may be a Python float
    return leaf


def saved_outside(data: T) -> T:
    """A save outside our regions: any `jax.checkpoint` keeps it."""
    leaves: list[Any] = []
    try:
        spec = flatten(data, leaves, expand)
    except RecursionError:
        return data
    if not any(is_tracer(leaf) for leaf in leaves) or cannot_name():
        return data
    saved = (named(pinned(leaf), SAVED) if is_tracer(leaf) else leaf for leaf in leaves)
    handed_back: T = unflatten(spec, saved)
    return handed_back


def kept_outside(function: Callable[..., T]) -> Callable[..., T]:
    """The same for `keep`: what it holds is named. JAX_REMAT3 has no rule for `vmap` of names: there it is a call."""
    if is_running() or is_remat3():
        return function

    def kept(*args: Any, **kwargs: Any) -> T:
        run = JaxRun(Phase.FORWARD, Slot("outside of any layer"), tags=True)
        return run.keep(function, args, kwargs, _NO_PLACE)

    return kept


def recorded_outside(layer: str, key: Key, data: tuple[Any, ...], place: Place) -> tuple[Any, ...]:
    """The same while a tape is recorded, which holds no tangents (R5)."""
    leaves: list[Any] = []
    spec = flatten(data, leaves, expand)
    probed = (
        _probe(_Fault(layer, key, spec, n, place), leaf) if is_tracer(leaf) and is_float(leaf) else leaf
        for n, leaf in enumerate(leaves)
    )
    handed_back: tuple[Any, ...] = unflatten(spec, probed)
    return saved_outside(handed_back)


# ------------------------------------------------------------------------------------------- R5


class _Fault:
    """What to say if a saved value turns out to carry a tangent, which may be long after the save."""

    def __init__(self, layer: str, key: Key, spec: Spec, leaf: int, place: Place) -> None:
        self.layer, self.key, self.spec, self.leaf, self.place = layer, key, spec, leaf, place

    def error(self, value: Any) -> GradientError:
        path = list(paths(self.spec))[self.leaf]
        return GradientError(
            message(
                f"layer {self.layer!r}, {spoken(self.key)}: data{path} depends on a value that is being "
                "differentiated; a slot would cut its gradient.",
                [
                    ("value", f"{value.dtype}{list(value.shape)}"),
                    ("saved at", where(self.place)),
                ],
                "save jax.lax.stop_gradient(value) if it is a decision; if it is not, do not save it: "
                "the recompute makes it again.",
            )
        )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _probe(fault: _Fault, value: Any) -> Any:
    return value


@_probe.defjvp
def _probe_rule(fault: _Fault, primals: tuple[Any], tangents: tuple[Any]) -> Any:
    raise fault.error(primals[0])  # JAX asks for no rule where the tangent is zero
