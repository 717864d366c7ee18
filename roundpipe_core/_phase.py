"""Phases, and the run that this thread is in (R1, R8, R11).

A *run* is one execution of a region's code: the forward, or a recompute of it. `thread.run` is the
innermost one on this thread. Whoever starts a run does it by hand::

    before = thread.run
    try:
        thread.run = run
        ...
    finally:
        thread.run = before

and not through a context manager, in whose own code a signal can arrive: a keyboard interrupt must not leave the
phase behind (R11). Between the last call of the block and the last statement Python delivers none.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Set
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

from ._backend import outside_keeps, outside_saves, without_gradient
from ._errors import Flip, OptionError, PhaseError, SlotError, message, shown
from ._places import Place, drops
from ._slots import AUTO, NOTHING, ONCE, Entry, Key, Slot, Taken, label_of, unread

__all__ = [
    "AUDIT",
    "FORWARD",
    "OFF",
    "RECOMPUTE",
    "Phase",
    "Run",
    "Traced",
    "doing_recompute",
    "get_recompute_data",
    "keep",
    "layer_scope",
    "open_slot",
    "recompute_once",
    "run_finders",
    "save_for_recompute",
    "thread",
    "traced_by",
    "update_once",
]

P = ParamSpec("P")
T = TypeVar("T")


class Phase(enum.Enum):
    """What a run of a region is for."""

    FORWARD = "forward"  # decides, and saves
    RECOMPUTE = "recompute"  # reads
    AUDIT = "audit"  # decides again, and compares (verify)
    OFF = "off"  # inside a decision that is saved as a whole: nothing is saved in there


FORWARD, RECOMPUTE, AUDIT, OFF = Phase.FORWARD, Phase.RECOMPUTE, Phase.AUDIT, Phase.OFF
"""As globals: to look up an attribute of an enum takes ten times as long, and a save asks often."""


class Run:
    """One execution of a region. Frontends derive from it.

    One is made for each call, so what most of them never use stands in the class.
    """

    scope: tuple[str, ...] = ()
    watch: Any = None
    """What a frontend notes of decisions that it makes this run keep."""
    _uncertain: Set[Any] = frozenset()
    _taken: Taken | None = None

    def __init__(self, phase: Phase, slot: Slot) -> None:
        self.phase = phase
        self.repeats = phase is RECOMPUTE or phase is AUDIT  # the same code ran before; a replay's forward does not
        self.slot = slot
        self.flips: list[Flip] = []  # found by an audit
        self._counts: dict[Any, int] = {}  # how often each scope, inner region and once-call was met
        self._seen: set[Key] = set()  # entries read by this run

    @property
    def taken(self) -> Taken:
        """The regions of a tape that this run has replayed."""
        if self._taken is None:
            self._taken = Taken()
        return self._taken

    # What a frontend may know better

    def consulted(self, point: Any = None) -> None:
        """A point that both phases pass, between which they may have run different code.

        `point` names it the same in both; None if the layer asks for its phase, as it may do in one of them alone.
        """

    def told(self) -> None:
        """The layer asked which phase it is in: from here on its code may depend on the answer."""

    def dropped(self, key: Key, data: tuple[Any, ...], saved: tuple[Any, ...], place: Place) -> None:
        """The layer, which decided `data` again, does not look at the `saved` data that it gets for it."""

    def state(self) -> Any:
        """The state of whatever later code draws from, right after a save (R7)."""

    def restore_state(self, state: Any) -> None:
        """Continue from what `state` gave in the forward (R7)."""

    def arguments(self, values: T) -> T:
        """What `recompute_once` hands to the function: `values`, or the same without gradient."""
        return values

    def stored(self, entry: Entry, offload: bool | None) -> None:
        """A save is in the slot. It may be moved to the host; `offload` is what the save itself says about that."""

    def adopt(self, leaf: Any, like: Any) -> Any:
        """`leaf` of a tape as an array of this frontend, like `like`, which the layer decided itself (R13).

        `like` is `NOTHING` where the layer only reads.
        """
        return leaf

    def without_gradient(self, function: Callable[[], T]) -> T:
        """`function` cut off from differentiation."""
        result: T = without_gradient(function)
        return result

    # What the public functions do

    def save(
        self, data: tuple[Any, ...], name: str | None, place: Place, offload: bool | None = None
    ) -> tuple[Any, ...]:
        key = (self.scope, name)
        if self.phase is FORWARD:
            self._written(key, self.slot.write(key, data, place), offload)
            return data
        if self.phase is RECOMPUTE:
            saved: tuple[Any, ...] = self._read(key, place, data)
            return saved
        self.flips += self.slot.read(key, place).differences(self.slot.label, key, data)
        return data

    def get(self, name: str | None, place: Place) -> tuple[Any, ...]:
        self.told()
        if self.phase is not RECOMPUTE:
            raise _not_recomputing(self.slot.label)
        data: tuple[Any, ...] = self._read((self.scope, name), place)
        return data

    def once(self, function: Callable[[], T], called: Any, place: Place) -> T:
        key = self.numbered(self.slot.once_name(self.scope, label_of(called)))
        if self.phase is RECOMPUTE:
            saved: T = self._read(key, place)
            return saved
        value = self._decide(function)
        if self.phase is FORWARD:
            self._written(key, self.slot.write(key, value, place))
        else:
            self.flips += self.slot.read(key, place).differences(self.slot.label, key, value)
        return value

    # For saves that a frontend makes in the layer's stead, where both phases run the same code

    def put(self, key: Key, data: Any, place: Place, draws: bool) -> None:
        """Store `data`; `draws` tells whether random numbers were drawn for it (R7)."""
        entry = self.slot.write(key, data, place)
        self.stored(entry, None)
        entry.state = self.state() if draws else None
        entry.counts = self._counts.copy()

    def fetch(self, key: Key, place: Place) -> Any:
        """What `put` stored."""
        entry = self.slot.read(key, place)
        if key not in self._seen:
            self._seen.add(key)
            self.restore_state(entry.state)
        return entry.value(self, NOTHING)

    def keep(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], place: Place) -> T:
        """`function` with its outputs kept. A run that nothing will recompute keeps nothing."""
        return _outside(function)(*args, **kwargs)

    def update(self, function: Callable[[], Any], called: Any, place: Place) -> None:
        """Call `function` for what it does to state, unless this run repeats one that did."""
        key = self.numbered(f"update_once({label_of(called)})")
        if not self.repeats:
            self._decide(lambda: _nothing(function()))
            self.slot.kept[key] = Update(self.state(), place)
            return
        done = self.slot.kept.get(key)
        if done is not None:
            self.restore_state(done.state)

    def numbered(self, name: str) -> Key:
        """The key of the next call of this name in the open scope."""
        count = self.count((self.scope, name))
        return self.scope, name if count == 0 else f"{name} #{count}"

    def met(self) -> dict[Any, int]:
        """How often everything was met so far."""
        return self._counts.copy()

    def skip(self, met: dict[Any, int], taken: set[Slot]) -> None:
        """Count what the forward met in a part that this run leaves out, and the regions of a tape that it took."""
        self.taken.update(taken)
        for key, times in met.items():
            self._counts[key] = self._counts.get(key, 0) + times

    def unread(self) -> str | None:
        """Where this recompute has run to its end: what to say if it read no decision that was saved (R10)."""
        if self._seen or any(not isinstance(kept, Update) for kept in self.slot.kept.values()):
            return None
        saves = [
            (key, entry.place)
            for key, entry in self.slot.entries.items()
            if not (key[1] or "").startswith((ONCE, AUTO)) and entry.decides()
        ]
        return unread(self.slot.label, saves) if saves else None

    def child(self, label: Any) -> Slot:
        """The slot of a region that starts inside this run: new in forward, the forward's later (R8)."""
        if self.phase is FORWARD:
            self.count((self.scope, label_of(label)))
            return self.slot.begun(self.scope, label)
        count = self.count((self.scope, self.slot.child_name(label_of(label))))
        return self.slot.met(self.scope, label, count, self.taken)

    def open_scope(self, name: str) -> Any:
        """Begin a scope. Returns what `close_scope` needs."""
        before = self.scope
        count = self.count((*before, name))
        self.scope = (*before, name if count == 0 else f"{name} #{count}")
        return before

    def close_scope(self, before: Any) -> None:
        """End the scope whose `open_scope` has returned `before`."""
        self.scope = before

    def count(self, key: tuple[Any, ...]) -> int:
        """How often this run met `key` before."""
        if key in self._uncertain:
            name = key[-1]
            raise SlotError(
                message(
                    f"layer {self.slot.label!r}: {name!r} runs before and after a save that the recompute read "
                    "at another point, so which of the forward's decisions belongs here cannot be told.",
                    [],
                    "give the calls different labels, wrap them in layer_scope, or read the data where it was saved.",
                )
            )
        count = self._counts.get(key, 0)
        self._counts[key] = count + 1
        return count

    def _written(self, key: Key, entry: Entry, offload: bool | None = None) -> None:
        self.stored(entry, offload)
        entry.state = self.state()
        entry.counts = self._counts.copy()
        self.consulted(key)

    def _read(self, key: Key, place: Place, data: Any = NOTHING) -> Any:
        entry = self.slot.read(key, place)
        if key not in self._seen:
            self._seen.add(key)
            self.restore_state(entry.state)
            self.consulted(key)
            if entry.counts != self._counts:  # the forward met something before this point that this run skipped
                self._uncertain |= {k for k, n in entry.counts.items() if n > self._counts.get(k, 0)}
        return entry.value(self, data)

    def _decide(self, function: Callable[[], T]) -> T:
        before = thread.run
        try:
            thread.run = _OFF
            return self.without_gradient(function)
        finally:
            thread.run = before


def _nothing(result: object) -> None:
    """Drop a result that is not asked for."""


class Update:
    """What a call of `update_once` leaves for the recompute: the state of random numbers right after it (R7)."""

    __slots__ = ("place", "state")

    def __init__(self, state: Any, place: Place) -> None:
        self.state, self.place = state, place

    def places(self) -> Counter[str]:
        """Bytes of arrays kept: none."""
        return Counter()


class _Thread(threading.local):
    def __init__(self) -> None:  # in each thread. Not a default of the class, which compilers would take for constant
        self.run: Run | None = None


thread = _Thread()
run_finders: list[Callable[[Run | None], Run | None]] = []
"""A frontend's look for a checkpoint of others that runs this code, inside of the run that it is given."""


def _run() -> Run | None:
    """The run that this code belongs to, one that a frontend has found for it included."""
    return thread.run if _is_traced() else _found()


def _found() -> Run | None:
    """The same for who knows that no compiler reads this."""
    run = thread.run
    for find in run_finders:
        run = find(run)
    return run


def _forked() -> None:
    """In the child of a fork. One that multiprocessing makes begins anew, outside of what its parent is in.

    One that a layer makes itself, by os.fork, goes on in the layer.
    """
    multiprocessing: Any = sys.modules.get("multiprocessing.util")
    if multiprocessing is not None:  # which runs this in its own children only
        multiprocessing.register_after_fork(thread, lambda thread: setattr(thread, "run", None))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
_OFF = Run(OFF, Slot("a decision"))


class Traced(Protocol):
    """The functions below, in code that a compiler reads once to make both phases of it."""

    def doing_recompute(self) -> bool: ...
    def get_recompute_data(self, name: str | None) -> tuple[Any, ...]: ...
    def save_for_recompute(self, data: tuple[Any, ...], name: str | None) -> tuple[Any, ...]: ...
    def recompute_once(self, function: Callable[[], Any]) -> Any: ...
    def enter_scope(self, name: str) -> None: ...
    def exit_scope(self) -> None: ...


_is_traced: Callable[[], bool] = bool
_traced: Traced


def traced_by(is_traced: Callable[[], bool], functions: Traced) -> None:
    """Where `is_traced()`, let `functions` take over. Called once, by a frontend with such a compiler."""
    global _is_traced, _traced
    _traced, _is_traced = functions, is_traced  # in this order: another thread may call them in between


def open_slot(label: Any, outer: Run | None = None) -> tuple[Phase, Slot]:
    """The phase and the slot of a region that starts here: those of the run around it, if there is one (R8).

    `outer` is that run, if it is not the one that this thread is in.
    """
    outer = outer or thread.run
    if outer is None or outer.phase is OFF:
        return FORWARD, Slot(label)
    return outer.phase, outer.child(label)


def save_for_recompute(*data: Any, name: str | None = None, offload: bool | None = None) -> tuple[Any, ...]:
    """Keep a decision of this layer for its recompute.

    In the forward of a checkpointed layer, stores `data` and returns it. In the recompute, stores nothing and
    returns **the stored data**, so that one line serves both phases:

    >>> from roundpipe_core import save_for_recompute
    >>> save_for_recompute("expert", 3)  # outside a checkpointed layer: gives back its arguments
    ('expert', 3)

    Args:
        *data: any values: arrays, numpy arrays, numbers, strings, None, and tuples, lists, dicts, dataclasses of
            them. Arrays and containers are copied; objects of other types are kept by reference. No array may
            carry gradient.
        name: under which to read it. A layer saves once without a name and once per name.
        offload: True keeps the arrays in host memory until backward, of any size; False keeps them where they are.
            None leaves it to the layer's own `offload` option.

    Returns:
        `data` as a tuple; in the recompute the tuple that the forward stored.

    Raises:
        SlotError: a second save under the same name, or, in the recompute, nothing stored by the forward.
        GradientError: an array in `data` carries gradient.
        OptionError: `name` is not a string, or `offload` not a bool.

    Implements R2, R4, R5, R6. Outside a region, or with gradients off, nothing is stored.
    """
    if _is_traced():
        return _traced.save_for_recompute(data, name)
    if name is not None and not isinstance(name, str):
        raise _not_a_name(name, "save_for_recompute")
    if offload is not None and not isinstance(offload, bool):
        raise OptionError(
            message(
                f"save_for_recompute: offload must be True, False or None, not {offload!r}.",
                [],
                "where to keep it is an option of the layer: remat(layer, offload=...).",
            )
        )
    run = _found()
    if run is None:
        return _handed_over(data)
    if run.phase is OFF:
        return data
    saved = run.save(data, name, _caller(), offload)
    if run.phase is RECOMPUTE and drops(sys._getframe(1)):
        run.dropped((run.scope, name), data, saved, _caller())
    return saved


def doing_recompute() -> bool:
    """Whether the innermost checkpointed layer is being recomputed, on this thread.

    >>> from roundpipe_core import doing_recompute
    >>> doing_recompute()
    False

    False in forward, outside any region, in evaluation and on other threads. Implements R1.
    """
    if _is_traced():
        return _traced.doing_recompute()
    run = _found()
    if run is None:
        return False
    run.told()
    run.consulted()
    return run.phase is RECOMPUTE


def get_recompute_data(name: str | None = None) -> tuple[Any, ...]:
    """What this layer's forward saved, as a tuple. Only in a recompute.

    >>> from roundpipe_core import PhaseError, get_recompute_data
    >>> try:
    ...     get_recompute_data()
    ... except PhaseError as error:
    ...     print(str(error).splitlines()[0])
    get_recompute_data() was called outside a recompute.

    Args:
        name: the `name` the data was saved under, if it had one.

    Returns:
        A tuple, also for a single value; new arrays and containers each time, so changing them spoils nothing.

    Raises:
        PhaseError: not in a recompute (also an `AssertionError`).
        SlotError: the forward saved nothing here, or nothing under this name.
        OptionError: `name` is not a string.

    Implements R3 and R7.
    """
    if _is_traced():
        return _traced.get_recompute_data(name)
    if name is not None and not isinstance(name, str):
        raise _not_a_name(name, "get_recompute_data")
    run = _found()
    if run is None:
        raise _not_recomputing(None)
    return run.get(name, _caller())


def recompute_once(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in forward only; the recompute gets what it returned then.

    >>> from roundpipe_core import recompute_once
    >>> recompute_once(sorted, [3, 1, 2])
    [1, 2, 3]

    `function` runs without gradient, in any phase and outside regions too. It may be called any number of times in a
    layer. What it saves or asks inside concerns nobody: its result is the decision.

    Args:
        function: makes a decision: a routing, a `nonzero`, a host-side plan.
        *args: handed to `function`, as is `kwargs`.

    Returns:
        What `function` returned, in the recompute a copy of it.

    Raises:
        SlotError: the recompute calls it at a place where the forward did not.

    Implements R4 and R8.
    """
    if _is_traced():
        traced: T = _traced.recompute_once(lambda: function(*args, **kwargs))
        return traced
    run = _found()
    try:
        if run is None or run.phase is OFF:
            result: T = without_gradient(lambda: function(*args, **kwargs))
            return result if run is not None else _handed_over(result)
        args, kwargs = run.arguments((args, kwargs))
        return run.once(lambda: function(*args, **kwargs), function, _caller())
    except TypeError:
        _refuse_value("recompute_once", function, "of a value that is there, call save_for_recompute(value).")
        raise


def keep(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a differentiable `function` in forward only; the recompute gets its outputs.

    >>> from roundpipe_core import keep
    >>> keep(max, 3, 4)
    4

    For what is dear to compute and small to hold: attention, an expert, a kernel with a backward of its own. Gradients
    flow through as if it were called directly. Held until backward are its outputs and those tensors that its
    backward needs and it made itself. What backward needs of its arguments is recomputed, so pass tensors as arguments.

    Args:
        function: returns any structure of arrays and other values.
        *args: handed to `function`, as is `kwargs`.

    Returns:
        What `function` returns.

    Raises:
        SlotError: the recompute calls it at a place where the forward did not.
        MutationError: from backward, if an output or, by `function`, an argument was changed in place.

    Implements R6, R7, R8 and R10. Outside a checkpointed layer it just calls `function`.
    """
    run = _run()
    try:
        if run is None:
            return _outside(function)(*args, **kwargs)
        if run.phase is OFF:
            return function(*args, **kwargs)
        return run.keep(function, args, kwargs, _caller())
    except TypeError:
        _refuse_value("keep", function, "pass what makes the result, as in keep(attention, q, k, v).")
        raise


def _handed_over(data: T) -> T:
    """What was saved where no region runs: another checkpointing may want to know of it."""
    for hand_over in outside_saves:
        data = hand_over(data)
    return data


def _outside(function: Callable[P, T]) -> Callable[P, T]:
    """What to call where no region runs: another checkpointing may want to know of it."""
    for take in outside_keeps:
        function = take(function)
    return function


def update_once(function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call `function` for what it does to state: in forward, and not again in the recompute.

    >>> from roundpipe_core import update_once
    >>> cache = []
    >>> update_once(cache.append, "key")
    >>> cache
    ['key']

    For counters, load-balance biases, caches: whatever a layer moves on by one with each forward. `function` runs
    without gradient. Outside a checkpointed layer, in evaluation and in a replay of a tape it runs too.

    Args:
        function: changes state. What it returns is dropped.
        *args: handed to `function`, as is `kwargs`.

    Implements R7 and R8.
    """
    run = _run()
    try:
        if run is None or run.phase is OFF:
            without_gradient(lambda: function(*args, **kwargs))
            return
        args, kwargs = run.arguments((args, kwargs))
        run.update(lambda: function(*args, **kwargs), function, _caller())
    except TypeError:
        _refuse_value("update_once", function, "pass what changes the state, as in update_once(count.add_, 1).")
        raise


class layer_scope:  # noqa: N801 - used like a function
    """Marks a part of a region as a layer of its own, with its own slots (R4).

    >>> from roundpipe_core import layer_scope
    >>> with layer_scope("attention"):
    ...     pass

    Each scope has one unnamed save and one per name. Opened again under the same name it is another layer.

    Args:
        name: what messages and reports call it.

    Raises:
        OptionError: `name` is not a string.
    """

    __slots__ = ("_name", "_open")

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise OptionError(
                message(
                    f"layer_scope takes a name, not {name!r}.",
                    [],
                    'pass a string: `with layer_scope("attention"):`.',
                )
            )
        self._name = name
        self._open: list[tuple[Run | None, Any]] = []

    def __enter__(self) -> None:
        if _is_traced():
            _traced.enter_scope(self._name)
            return
        run = _found()
        if run is None or run.phase is OFF:
            self._open.append((None, ()))
            return
        self._open.append((run, run.open_scope(self._name)))

    def __exit__(self, *exc: object) -> Literal[False]:
        if _is_traced():
            _traced.exit_scope()
            return False
        run, before = self._open.pop()
        if run is not None:
            run.close_scope(before)
        return False


def _refuse_value(asked: str, given: Any, way_out: str) -> None:
    """Refuse what a function gave, in place of the function: it would be made in both phases."""
    if not callable(given):
        what = f"{asked} takes a function and its arguments, not {shown(given)}."
        raise OptionError(message(what, [], way_out)) from None


def _not_a_name(name: object, function: str) -> OptionError:
    return OptionError(
        message(
            f"{function}: name must be a string, not {name!r}.",
            [],
            'name the slot by a string, as in name="mask".',
        )
    )


def _not_recomputing(layer: str | None) -> PhaseError:
    inside = [] if layer is None else [("layer", repr(layer))]
    return PhaseError(
        message(
            f"get_recompute_data() was called {'in the forward' if layer else 'outside a recompute'}.",
            inside,
            "call it only where doing_recompute() is True, or use "
            "`(data,) = save_for_recompute(data)`, which works in both phases.",
        )
    )


def _caller() -> Place:
    frame = sys._getframe(2)
    return frame.f_code.co_filename, frame.f_lineno
