"""Slots: what one call of a region decided (R2-R4, R6, R9).

A slot is written once, by the forward, and read by every recompute. It belongs to whoever runs the region
(its autograd graph in torch, its trace in JAX) and dies with it; nothing here keeps a list of slots.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ._backend import Backend, NotCopiedError, backend_of, compare, described, expand
from ._errors import Flip, GradientError, SlotError, message
from ._host import kind_of
from ._places import Place, where
from ._trees import Spec, flatten, paths, unflatten

__all__ = [
    "NOTHING",
    "AutoLabel",
    "Entry",
    "Key",
    "Slot",
    "Taken",
    "decides",
    "facts_of",
    "label_of",
    "row_counts",
    "spoken",
    "unread",
]

Key = tuple[tuple[str, ...], str | None]
"""The scopes that were open, outermost first, and the name (None: the unnamed save)."""

ONCE = "recompute_once("  # names begin so where a frontend saved by itself, and not a tuple of arguments
AUTO = "auto "

NOTHING: Any = object()
"""Stands for data that a layer did not decide itself."""


class AutoLabel(str):
    """A label that nobody chose. Where a tape is replayed it does not have to agree."""

    __slots__ = ()


class Entry:
    """The data of one save, with the place it was made and the frontend's state right after it (R7)."""

    __slots__ = ("axes", "backends", "counts", "leaves", "offload", "place", "spec", "state")

    def __init__(self, label: Any, key: Key, data: Any, place: Place) -> None:
        leaves: list[Any] = []
        try:
            self.spec: Spec = flatten(data, leaves, expand)
        except RecursionError:
            raise SlotError(
                message(
                    f"layer {label_of(label)!r}, {spoken(key)}: the data contains itself, or is nested too deep.",
                    [("saved at", where(place))],
                    "save the parts that the recompute needs, not the object that links them.",
                )
            ) from None
        self.place = place
        self.backends: list[Backend | None] = [backend_of(leaf) for leaf in leaves]
        self._refuse(label, key, leaves)
        try:
            self.leaves: list[Any] = [
                leaf if backend is None else backend.snapshot(leaf)
                for backend, leaf in zip(self.backends, leaves, strict=True)
            ]
        except NotCopiedError as error:
            raise self._not_copied(label, key, leaves, error) from error.__cause__
        self.state: Any = None
        self.offload: bool | None = None  # what the save said, for a frontend that moves it later
        self.counts: dict[Any, int] = {}
        self.axes: tuple[int, ...] = ()  # of each array, how many leading axes count the iterations of loops

    def restore(self) -> Any:
        """The data, in new containers around new arrays (R6)."""
        return unflatten(
            self.spec,
            (
                stored if backend is None else backend.restore(stored)
                for backend, stored in zip(self.backends, self.leaves, strict=True)
            ),
        )

    def value(self, run: Any, data: Any) -> Any:
        """What `run` gets in place of `data`, which it has decided itself (or `NOTHING`)."""
        return self.restore()

    def decides(self) -> bool:
        """Whether it may lead the layer one way or the other."""
        leaves: list[Any] = []
        flatten(self.restore(), leaves, expand)
        return any(map(decides, leaves))

    def nbytes(self) -> int:
        """Bytes of the arrays kept."""
        return sum(self.places().values())

    def places(self) -> Counter[str]:
        """Bytes of the arrays kept, by where they are."""
        held: Counter[str] = Counter()
        for backend, leaf in zip(self.backends, self.leaves, strict=True):
            if backend is not None:
                held[backend.place(leaf)] += backend.nbytes(leaf)
        return held

    def differences(self, layer: str, key: Key, data: Any) -> Iterator[Flip]:
        """What `data`, decided again, has otherwise than this entry."""
        leaves: list[Any] = []
        flatten(data, leaves, expand)
        names = list(paths(self.spec))
        if len(leaves) != len(names):
            yield Flip(layer, f"{spoken(key)}: {len(names)} values, now {len(leaves)}", 1, 1, 0)
            return
        for name, backend, stored, leaf in zip(names, self.backends, self.leaves, leaves, strict=True):
            flip = compare(layer, f"{spoken(key)}, item {name}", backend, stored, leaf)
            if flip:
                yield flip

    def _not_copied(self, label: Any, key: Key, leaves: list[Any], error: NotCopiedError) -> SlotError:
        n = next(n for n, leaf in enumerate(leaves) if leaf is error.array)
        return SlotError(
            message(
                f"layer {label_of(label)!r}, {spoken(key)}: data{list(paths(self.spec))[n]} is a "
                f"{type(error.array).__name__} that cannot be copied: {error.reason}.",
                [("saved at", where(self.place))],
                "save the tensors that it is made of, or its full value.",
            )
        )

    def _refuse(self, label: Any, key: Key, leaves: list[Any]) -> None:
        for n, (backend, leaf) in enumerate(zip(self.backends, leaves, strict=True)):
            if backend is None:
                if type(leaf) in _ITERATORS:  # R6
                    raise SlotError(
                        message(
                            f"layer {label_of(label)!r}, {spoken(key)}: data{list(paths(self.spec))[n]} is a "
                            f"{type(leaf).__name__}, which can be gone through once; the recompute would find it at "
                            "its end.",
                            [("saved at", where(self.place))],
                            "save what it gives, as a list or a tuple: list(...).",
                        )
                    )
                continue
            fault = backend.gradient_fault(leaf)  # R5
            if fault:
                raise GradientError(
                    message(
                        f"layer {label_of(label)!r}, {spoken(key)}: data{list(paths(self.spec))[n]} {fault[0]}; "
                        "a slot would cut its gradient.",
                        [("saved at", where(self.place))],
                        fault[1],
                    )
                )


_ITERATORS = frozenset(
    {
        types.GeneratorType, zip, map, filter, enumerate, reversed, itertools.chain, itertools.islice, itertools.count,
        itertools.accumulate, itertools.starmap, itertools.groupby, itertools.zip_longest, itertools.product,
        *(type(iter(kind())) for kind in (tuple, list, dict, set, str, bytes)), type(iter(range(0))),
        type(iter({}.items())), type(iter({}.values())),
    }
)  # fmt: skip


class Slot:
    """The decisions of one call of a region, and the slots of the regions inside it (R8)."""

    __slots__ = ("__weakref__", "_label", "born", "children", "entries", "kept", "orphan", "rows")

    def __init__(self, label: Any, orphan: bool = False) -> None:
        self._label = label
        self.orphan = orphan
        self.born = next(_births)
        self.entries: dict[Key, Entry] = {}
        self.children: dict[Any, list[Slot]] = {}
        self.kept: dict[Key, Any] = {}  # what a frontend keeps of parts that a recompute leaves out
        self.rows: frozenset[int] | None = None  # on the way to or from a tape: see `line_up`

    @property
    def label(self) -> str:
        """The layer's name, for messages and reports."""
        return label_of(self._label)

    def let_go(self) -> None:
        """Hold the layer no more, only its name."""
        self._label = self.label

    def begun(self, scope: tuple[str, ...], label: Any) -> Slot:
        """The slot of a region that the forward starts inside this one."""
        name = label_of(label)
        slot = Slot(label if isinstance(label, str) else AutoLabel(name))  # a tape may outlive what the layer reads
        if self.rows is not None:
            slot.rows = _NO_ROWS
        self.children.setdefault((scope, name), []).append(slot)
        return slot

    def met(self, scope: tuple[str, ...], label: Any, count: int, taken: Taken) -> Slot:
        """The slot of a region that a later run starts inside this one, as the `count`th of its label."""
        known = self.children.get((scope, label_of(label)), ())
        return known[count] if count < len(known) else Slot(label, orphan=True)

    def child_name(self, label: str) -> str:
        """What a region labelled `label` is counted as."""
        return label

    def once_name(self, scope: tuple[str, ...], label: str) -> str:
        """What a call `recompute_once(label)` is kept as."""
        return f"recompute_once({label})"

    def line_up(self, shapes: Iterable[tuple[int, ...]], device: Any) -> None:
        """Note what the region was called with, for a tape (R13). Frontends call it where `rows` is not None."""
        self.rows = row_counts(shapes)

    @property
    def given(self) -> bool:
        """Whether the user chose the label."""
        return isinstance(self._label, str) and not isinstance(self._label, AutoLabel)

    def write(self, key: Key, data: Any, place: Place) -> Entry:
        """Store `data`. A second time under the same key is an error (R4)."""
        before = self.entries.get(key)
        if before is not None:
            raise SlotError(
                message(
                    f"layer {self.label!r}, {spoken(key)}: saved twice in one forward.",
                    [("first", where(before.place)), ("again", where(place))],
                    "save everything in one call, give each save its own name="
                    ', or mark the parts of the layer by `with layer_scope("..."):`.',
                )
            )
        entry = self.entries[key] = Entry(self._label, key, data, place)
        return entry

    def read(self, key: Key, place: Place) -> Entry:
        """The entry under `key`; an error that names the layer if the forward saved none (R3)."""
        entry = self.entries.get(key)
        if entry is None:
            held = [(f"saved {spoken(known)}", where(kept.place)) for known, kept in self.entries.items()]
            reason = (
                "this region was not run by the forward, only by the recompute."
                if self.orphan
                else "the forward saved nothing there."
            )
            raise SlotError(
                message(
                    f"layer {self.label!r}, {spoken(key)}: {reason}",
                    [("asked for at", where(place)), *held],
                    "call save_for_recompute in the forward branch, under the same name and in the same scope.",
                )
            )
        return entry

    def saves(self) -> Iterator[tuple[Key, Place]]:
        """The key and the place of every save, those of inner regions too."""
        yield from ((key, entry.place) for key, entry in self.entries.items())
        for slots in self.children.values():
            for slot in slots:
                yield from slot.saves()

    def nbytes(self) -> int:
        """Bytes of all arrays kept, inner regions included (R12)."""
        return sum(self.places().values())

    def places(self) -> Counter[str]:
        """The same by where they are: a device, or the host (R12)."""
        held: Counter[str] = Counter()
        for item in (*self.entries.values(), *self.kept.values()):
            held += item.places()
        for slots in self.children.values():
            for slot in slots:
                held += slot.places()
        return held


class Taken(set[Slot]):
    """The inner slots of a tape that one run has met."""

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[Any, int] = {}

    def first_left(self, which: Any, slots: Sequence[Slot]) -> Slot | None:
        """The first of `slots` that is not among these. `which` names `slots`: they are not looked through again."""
        n = self._first.get(which, 0)
        while n < len(slots) and slots[n] in self:
            n += 1
        self._first[which] = n
        return slots[n] if n < len(slots) else None


_births = itertools.count()
_NO_ROWS: frozenset[int] = frozenset()


def row_counts(shapes: Iterable[tuple[int, ...]]) -> frozenset[int]:
    """How many rows arrays of these shapes have, however many leading axes are counted as rows."""
    return frozenset(n for shape in shapes for n in itertools.accumulate(shape, operator.mul))


def spoken(key: Key) -> str:
    """A key in words: ``slot 'mask' in scope 'attention'``."""
    scope, name = key
    slot = "the unnamed slot" if name is None else f"slot {name!r}"
    return f"{slot} in scope {'/'.join(scope)!r}" if scope else slot


def facts_of(saves: Iterable[tuple[Key, Place]]) -> list[tuple[str, str]]:
    """Saves, for a message: the first few."""
    return [(f"saves {spoken(key)}", where(place)) for key, place in itertools.islice(saves, 8)]


def decides(leaf: Any) -> bool:
    """Whether a saved value may lead a layer one way or the other. What is measured for a log is a float."""
    return kind_of(described(leaf)[0]) not in ("float", "complex")


def unread(layer: str, saves: Iterable[tuple[Key, Place]]) -> str:
    """What to say of a recompute that looks at none of the decisions of its forward (R10)."""
    return message(
        f"layer {layer!r}: the forward saves, and the recompute reads nothing of it. What it goes on with it has "
        "decided again.",
        facts_of(saves),
        "go on with what save_for_recompute returns, in both phases, (data,) = save_for_recompute(data), or read it in "
        "the recompute, (data,) = get_recompute_data().",
    )


def label_of(target: Any) -> str:
    """What to call a layer: its given label, its class, or its function with the place it stands."""
    if isinstance(target, str):
        return target
    if isinstance(target, functools.partial):
        return label_of(target.func)
    if isinstance(target, types.MethodType):
        owner = type(target.__self__).__qualname__
        return owner if target.__name__ in ("forward", "__call__") else f"{owner}.{target.__name__}"
    code = getattr(getattr(target, "__wrapped__", target), "__code__", None)  # of what a decorator has wrapped
    if code is not None:
        return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
    name = "__name__" if isinstance(target, types.BuiltinFunctionType) else "__qualname__"
    return str(getattr(target, name, None) or type(target).__qualname__)
