"""Tapes: what a run decided, kept apart from the graph that decided it (R13).

A tape is a tree of regions, in the order in which they ran, each with its decisions in the order in which they were
saved. It shares the arrays of the slots it was recorded from, and copies nothing.
"""

from __future__ import annotations

import copy
import json
import operator
import os
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ._backend import backend_of, described
from ._errors import OptionError, TapeError, called_here, message
from ._host import kind_of
from ._places import Place, where
from ._slots import ONCE, Entry, Key, Slot, spoken
from ._trees import Node, Spec, paths

__all__ = [
    "Decision",
    "Region",
    "Skeleton",
    "Tape",
    "TapeEntry",
    "at_layer",
    "check_range",
    "not_a_tape",
    "portable",
    "saved_at",
    "taken_from",
]

OUTSIDE = "outside of layers"
Scope = tuple[str, ...]


class Decision:
    """One save."""

    __slots__ = ("axes", "below", "checked", "counts", "key", "leaves", "place", "spec")

    def __init__(
        self, key: Key, spec: Spec, leaves: list[Any], place: Place | None = None, below: int | None = None
    ) -> None:
        self.key, self.spec, self.leaves, self.place = key, spec, leaves, place
        self.counts: dict[Any, int] = {}  # what the region had met by then, see `Entry.counts`
        self.axes: tuple[int, ...] = ()  # of each array, how many leading axes count the iterations of loops
        self.below = below  # its integers are said to be at least 0 and below this
        self.checked = False  # and that was looked at


class Region:
    """One call of a checkpointed layer. `given` tells whether the user chose its label."""

    __slots__ = ("complete", "decisions", "given", "label", "regions", "rows", "scope")

    def __init__(self, label: str, *, given: bool, scope: Scope = (), rows: frozenset[int] = frozenset()) -> None:
        self.label, self.given, self.scope, self.rows = label, given, scope, rows
        self.complete = False  # of the outermost: layers of labels that it does not have decide nothing
        self.decisions: list[Decision] = []
        self.regions: list[Region] = []

    def walk(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Region]]:
        """This region and all inside it, outermost first, with the labels that lead there."""
        yield path, self
        for region in self.regions:
            yield from region.walk((*path, *region.scope, region.label))


class TapeEntry(NamedTuple):
    """One array or value of a tape.

    >>> from roundpipe_core import record, save_for_recompute
    >>> with record() as tape:
    ...     _ = save_for_recompute({"branch": True}, name="plan")
    >>> [entry] = tape.entries()
    >>> entry.name, entry.item, entry.dtype, entry.shape, entry.value
    ('plan', "[0]['branch']", 'bool', (), True)
    """

    layer: str
    """The labels of the regions around it, joined by ``/``."""
    order: int
    """Which region of the tape it belongs to, counted in the order they ran."""
    name: str | None
    """The save's `name`."""
    scope: str
    """The `layer_scope` it was saved in, joined by ``/``."""
    item: str
    """Where it sits in the saved data, such as ``[0]['index']``."""
    dtype: str
    """``int64``, ``bfloat16``; for other values the name of their type."""
    shape: tuple[int, ...]
    value: Any


class Tape:
    """The decisions of a run, in the order of its regions. Made by `record`, read by `replay`.

    >>> from roundpipe_core import Tape, record, save_for_recompute
    >>> with record() as tape:
    ...     _ = save_for_recompute("left", 3)
    >>> [(entry.item, entry.value) for entry in tape.entries()]
    [('[0]', 'left'), ('[1]', 3)]

    In JAX a tape is a pytree whose leaves are its arrays: a jitted function may take and return one.

    Implements R13.
    """

    __slots__ = ("_owned", "recording", "root")

    def __init__(self, root: Region | None = None) -> None:
        if not isinstance(root, Region | None):
            raise not_a_tape("Tape", root)
        self.root = root or Region(OUTSIDE, given=False)
        self.recording = False  # what it will hold is known when the block ends
        self._owned: dict[Any, Any] = {}  # what frontends have made of it, such as copies of its arrays

    def __repr__(self) -> str:
        if self.recording:
            return "<Tape that is still being recorded>"
        regions = sum(1 for _ in self.root.walk()) - 1
        return f"<Tape of {regions} regions, {sum(1 for _ in self.decisions())} decisions, {self.nbytes()} bytes>"

    def __reduce__(self) -> Any:
        """For another process: what `save` writes, not the objects of this one."""
        from ._tapefile import dumped, loaded

        return loaded, (dumped(self),)

    def __copy__(self) -> Tape:
        return self.mapped(lambda leaf: leaf, checked=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tape:
        return self.mapped(lambda leaf: copy.deepcopy(leaf, memo), checked=True)

    def whole(self) -> Region:
        """All of it, which is known when the block of `record` has ended."""
        if self.recording:
            raise TapeError(
                message("the tape is still being recorded.", [], "use it after the block of `with record()`.")
            )
        return self.root

    def decisions(self) -> Iterator[tuple[str, int, Decision]]:
        """Each save with the labels around it and its region's number."""
        for order, (path, region) in enumerate(self.whole().walk()):
            for decision in region.decisions:
                yield "/".join(path), order - 1, decision

    def entries(self) -> list[TapeEntry]:
        """Each array and value."""
        return [
            TapeEntry(layer, order, decision.key[1], "/".join(decision.key[0]), item, *described(leaf), leaf)
            for layer, order, decision in self.decisions()
            for item, leaf in zip(paths(decision.spec), decision.leaves, strict=True)
        ]

    def nbytes(self) -> int:
        """Bytes of all arrays."""
        held = (leaf for _, _, decision in self.decisions() for leaf in decision.leaves)
        return sum(backend.nbytes(leaf) for leaf in held if (backend := backend_of(leaf)) is not None)

    def declare(self, *, below: int, name: str | None = None, layer: str | None = None) -> Tape:
        """Say that integers of this tape are indices from 0 to `below` - 1, and check those that are.

        >>> from roundpipe_core import record, save_for_recompute
        >>> import numpy as np
        >>> with record() as tape:
        ...     _ = save_for_recompute(np.array([[3, 1], [0, 2]]), name="experts")
        >>> tape.declare(below=4, name="experts")
        <Tape of 0 regions, 1 decisions, 32 bytes>

        Args:
            below: number of experts, say.
            name: of the save; None: of every save.
            layer: only in regions of this label; None: in all.

        Returns:
            The same tape.

        Raises:
            TapeError: an index is out of range, with its place; or nothing has that name and layer.
            OptionError: `below` is no integer of at least 1.
        """
        below = number_of_experts("below", below)
        found = False
        for path, _, decision in self.decisions():
            if name in (None, decision.key[1]) and layer in (None, path, path.rpartition("/")[2]):
                found = True
                decision.checked = refuse_outside(path, decision, below)
                if not decision.checked:
                    raise unseen(path, decision, below)
                decision.below = below
        if not found:
            raise no_decision(self, name, layer)
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tape to a file that any reader of safetensors can open.

        >>> import tempfile, pathlib
        >>> from roundpipe_core import Tape, record, save_for_recompute
        >>> with record() as tape:
        ...     _ = save_for_recompute("left", 3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tape.save(pathlib.Path(folder) / "run.tape")
        ...     [entry.value for entry in Tape.load(pathlib.Path(folder) / "run.tape").entries()]
        ['left', 3]

        The file is there once all of it is on the disk; until then, and after a crash, an older one is.

        Args:
            path: of a file, which is replaced if there is one.

        Raises:
            TapeError: the tape holds what no file can, such as an object of a class of yours or a traced array, with
                its place; or `path` is no regular file.
            OSError: the file cannot be written.

        Implements R13.
        """
        from ._tapefile import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, mmap: bool = False) -> Tape:
        """The tape that `save` wrote. Nothing in the file is run, and its bytes are checked before they are believed.

        Arrays of numpy are numpy arrays again, which cannot be written to; those of other frameworks are converted by
        the layer that replays them.

        Args:
            path: of the file. What its arrays hold is copied, so that the file may change or go.
            mmap: do not copy: the arrays are the file, mapped. Several times as fast, and the memory is the system's;
                the file must stay as it is while the tape is used. `save` never changes a file in place, and to delete
                or replace it is safe (except on Windows, which refuses); but what another program writes into it
                appears in the tape unchecked, and if the file is cut short the process dies.

        Raises:
            TapeError: it is not a tape, is damaged, or of another version, with what is wrong.
            OSError: the file cannot be read.

        Implements R13.
        """
        from ._tapefile import load

        return load(path, mapped=mmap)

    @classmethod
    def from_routing(
        cls,
        routing: Any,
        *,
        experts: int,
        layers: Sequence[str] | None = None,
        name: str | None = None,
        mask: Any = None,
        padding: int | Sequence[int] | None = None,
        regions: bool = True,
    ) -> Tape:
        """A tape of what an inference engine recorded: which experts each token went to, in each layer.

        >>> from roundpipe_core import Tape
        >>> routing = [[[3, 1], [0, 2]], [[1, 2], [2, 3]]]  # two tokens, two layers, two experts each
        >>> tape = Tape.from_routing(routing, experts=4, mask=[[False, True, True]], padding=0)
        >>> tape.entries()[1].shape, tape.to_routing().tolist()
        ((1, 3, 2), [[[[0, 1], [0, 1]], [[3, 1], [0, 2]], [[1, 2], [2, 3]]]])

        Args:
            routing: integers ``[tokens, layers, top_k]``, ``[batch, length, layers, top_k]``, or ``[tokens, layers]``
                for layers whose decision has no axis of choices: an array of any framework, or lists. A list of arrays
                is one a sequence; they are joined. Stack those of layers, ``numpy.stack(arrays, 1)``.
            experts: how many there are. Every index has to be from 0 to `experts` - 1.
            layers: the labels of the checkpointed layers that route, as `entries` of a recorded run shows them; others
                decide nothing. None: the layers are found by their order, and each checkpointed layer routes.
            name: under which the layers save their indices; ``"recompute_once(route)"`` where they are what
                `recompute_once` gave.
            mask: where the batch that is replayed has tokens, ``[batch, length]`` or ``[tokens]`` of bools or of 0
                and 1. The routing has the tokens that the mask marks, in their order, or one for each place, of which
                only those that are marked count. Padding on the left, on the right and packed rows are thus all the
                same. None: the batch is as the routing is.
            padding: the expert that padding goes to, and those after it for the other choices; or one for each choice.
                The loss shall leave padding out.
            regions: False where the layers are not checkpointed: their saves are found by order, or, with `layers`, by
                `layer_scope`.

        Returns:
            A tape whose arrays are as narrow as the number of experts allows. Each frontend casts them to an index type
            of its own when a layer asks for them.

        Raises:
            TapeError: a token that is real was not routed (-1, or zeros for all its choices), an expert does not exist,
                or the tokens are not those of the mask, with the place.
            OptionError: `experts` is no number, or `name` or what is in `layers` is no text.

        Implements R13.
        """
        from ._routing import from_routing

        return from_routing(
            routing, experts=experts, layers=layers, name=name, mask=mask, padding=padding, regions=regions
        )

    def to_routing(self, *, name: str | None = None, item: str | None = None, dtype: str = "int16") -> Any:
        """The routing of the tape's layers in one array, the way back from `from_routing`.

        >>> from roundpipe_core import Tape
        >>> Tape.from_routing([[[3, 1], [0, 2]]], experts=4).to_routing()
        array([[[3, 1],
                [0, 2]]], dtype=int16)

        Args:
            name: under which the layers save their indices. None: each layer's only array of integers.
            item: where the indices are in what was saved, as `entries` lists it, if there are more arrays of integers.
            dtype: of the result, as a text or as numpy has it.

        Returns:
            A numpy array ``[tokens, layers, top_k]``, or with more axes before the layers where a layer's decision has.

        Raises:
            TapeError: there is no such save, the layers' arrays are not of one shape, or `dtype` is too narrow.

        Implements R13.
        """
        from ._routing import to_routing

        return to_routing(self, name=name, item=item, dtype=dtype)

    def converted(self, leaf: Any, key: Any, make: Callable[[], Any]) -> Any:
        """`make()`, kept with the tape: what a frontend converts serves every recompute and replay."""
        key = (id(leaf), key)
        if key not in self._owned:
            self._owned[key] = make()
        return self._owned[key]

    def split(self, which: Callable[[Any], bool] | None = None) -> tuple[list[Any], Skeleton]:
        """The arrays, in order, and all that is not an array. `which` tells what counts as one."""
        arrays: list[Any] = []
        which = which or (lambda leaf: backend_of(leaf) is not None)
        return arrays, Skeleton(_mapped(self.whole(), lambda leaf: _taken(leaf, arrays, which), checked=True))

    def mapped(self, change: Callable[[Any], Any], *, checked: bool = False) -> Tape:
        """A tape with `change` of each array and value. `checked` tells that ranges checked in this one are kept."""
        return Tape(_mapped(self.whole(), change, checked))


class Skeleton:
    """A tape without its arrays. Equal, and hashed alike, where the tapes are alike but for those."""

    __slots__ = ("key", "root")

    def __init__(self, root: Region) -> None:
        self.root = root
        self.key = json.dumps(_summary(root), default=lambda value: [type(value).__qualname__, repr(value)])

    def filled(self, arrays: Sequence[Any], *, checked: bool = False) -> Tape:
        """The tape with these arrays, or with whatever stands for them.

        `checked` tells that they are those of the tape that was split, and that ranges checked there are kept.
        """
        given = (array if backend_of(array) is not None else _InPlace(array) for array in arrays)
        return Tape(_mapped(self.root, lambda leaf: next(given) if leaf is _ARRAY else leaf, checked))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Skeleton) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


class _Array:
    def __repr__(self) -> str:
        return "<array>"


_ARRAY = _Array()


class _InPlace:
    """What a transformation of trees put in the place of an array: a shape, None, a mark."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _taken(leaf: Any, arrays: list[Any], which: Callable[[Any], bool]) -> Any:
    if isinstance(leaf, _InPlace):
        leaf = leaf.value
    elif not which(leaf):
        return leaf
    arrays.append(leaf)
    return _ARRAY


def _mapped(region: Region, change: Callable[[Any], Any], checked: bool = False) -> Region:
    new = Region(region.label, given=region.given, scope=region.scope, rows=region.rows)
    new.complete = region.complete
    for old in region.decisions:
        decision = Decision(old.key, old.spec, [change(leaf) for leaf in old.leaves], old.place, old.below)
        decision.counts, decision.axes, decision.checked = old.counts, old.axes, old.checked and checked
        new.decisions.append(decision)
    new.regions = [_mapped(inner, change, checked) for inner in region.regions]
    return new


def _summary(region: Region) -> Any:
    return [
        region.label,
        region.given,
        region.complete,
        region.scope,
        sorted(region.rows),
        [
            [d.key, outline(d.spec), d.leaves, d.axes, d.below, d.checked, sorted(map(repr, d.counts.items()))]
            for d in region.decisions
        ],
        [_summary(inner) for inner in region.regions],
    ]


def outline(spec: Spec) -> Any:
    """The containers of a value, as JSON could have them."""
    if not isinstance(spec, Node):
        return None
    return [spec.kind.__qualname__, spec.keys, [outline(child) for child in spec.children], _static(spec.build)]


def _static(build: Any) -> str:
    """What a container that a frontend knows holds besides its children."""
    return repr(getattr(build, "__self__", "")) if isinstance(build, types.BuiltinMethodType) else ""


def portable(label: str) -> str:
    """A label without the place of the function: the same in another checkout, another process."""
    name, bracket, _ = label.partition(" (")
    return name if bracket and label.endswith(")") else label


def portable_name(name: str | None) -> str | None:
    """The name of a save, the same in another checkout."""
    if name is None or not name.startswith(ONCE):
        return name
    label, _, count = name[len(ONCE) :].rpartition(")")
    return f"{ONCE}{portable(label)}){count}"


def taken_from(slot: Slot, scope: Scope = ()) -> Region:
    """The region of a slot that a forward has filled."""
    label = slot.label if slot.given else portable(slot.label)
    region = Region(label, given=slot.given, scope=scope, rows=slot.rows or frozenset())
    region.decisions = list(map(_decision, _portable_keys(slot.entries), slot.entries.values()))
    inner = [(key[0], child) for key, children in slot.children.items() for child in children]
    inner.sort(key=lambda pair: pair[1].born)
    region.regions = [taken_from(child, scope) for scope, child in inner]
    return region


def _portable_keys(keys: Iterable[Key]) -> Iterator[Key]:
    """Keys for another checkout. Functions that only their places told apart are counted as one, in their order."""
    met: Counter[Key] = Counter()
    for scope, name in keys:
        once = portable_name(name)
        if once is None or not once.startswith(ONCE):
            yield scope, name
            continue
        once = once.rpartition(")")[0] + ")"
        count = met[scope, once]
        met[scope, once] += 1
        yield scope, once if count == 0 else f"{once} #{count}"


def _decision(key: Key, entry: Entry) -> Decision:
    decision = Decision(key, entry.spec, entry.leaves, entry.place)
    decision.axes = entry.axes
    for met, count in entry.counts.items():
        name = (*met[:-1], portable_name(portable(met[-1]))) if isinstance(met[-1], str) else met
        decision.counts[name] = decision.counts.get(name, 0) + count
    return decision


# ------------------------------------------------------------------------------------------- what is in it


def at_layer(layer: str) -> str:
    """The place of a decision, for a message."""
    return f"layer {layer!r}" if layer else OUTSIDE


def not_a_tape(asked: str, given: Any) -> OptionError:
    """Something else where a tape is meant, such as the path of one."""
    return OptionError(
        message(
            f"{asked} takes a Tape, not {type(given).__name__}.",
            [],
            "make one by `with record() as tape:`, Tape.load(path) or Tape.from_routing(routing, experts=...).",
        )
    )


def no_decision(tape: Tape, name: str | None, layer: str | None) -> TapeError:
    """A range was given for what the tape does not have."""
    return TapeError(
        message(
            f"the tape has no decision {f'named {name!r}' if name else 'at all'} in {layer or 'any layer'}.",
            [
                ("it has", ", ".join(sorted({f"{path}: {spoken(d.key)}" for path, _, d in tape.decisions()})[:8])),
                *called_here(),
            ],
            "name one that it has; tape.entries() lists them.",
        )
    )


def number_of_experts(option: str, given: Any) -> int:
    """What was `given` for `option`, an integer of Python, numpy or a framework."""
    try:
        number = operator.index(given)
    except TypeError:
        number = 0
    if isinstance(given, bool) or number < 1:
        headline = f"{option}={given!r} is no number of experts."
        raise OptionError(message(headline, called_here(), "give how many there are."))
    return number


def saved_at(decision: Decision) -> list[tuple[str, str]]:
    """Where it was recorded and where it is met now, for a message."""
    return [*([] if decision.place is None else [("saved at", where(decision.place))]), *called_here()]


def check_range(layer: str, decision: Decision) -> None:
    """Refuse integers outside of the range that `decision` is declared to keep."""
    if not decision.checked and decision.below is not None:
        decision.checked = refuse_outside(layer, decision, decision.below)


def refuse_outside(layer: str, decision: Decision, below: int) -> bool:
    """Refuse integers that are not from 0 to `below` - 1. Returns whether all are known."""
    known = True
    for item, leaf in zip(paths(decision.spec), decision.leaves, strict=True):
        extremes = integer_extremes(leaf)
        if extremes is None:
            known = False
        elif extremes and not 0 <= extremes[0] <= extremes[1] < below:
            raise out_of_range(layer, decision, item, extremes, below)
    return known


def unseen(layer: str, decision: Decision, below: int) -> TapeError:
    """A range that nobody can vouch for."""
    declared = [] if decision.below is None else [("the tape declares", str(decision.below))]
    return TapeError(
        message(
            f"tape, {at_layer(layer)}, {spoken(decision.key)}: whether all integers are below {below} cannot be seen "
            "while this is traced.",
            [*declared, *saved_at(decision)],
            "say so where the tape has values, outside of what is traced: tape.declare(below=...).",
        )
    )


def integer_extremes(leaf: Any) -> tuple[int, ...] | None:
    """Least and greatest integer of `leaf`; () if it holds none; None if they are not known yet."""
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        return leaf, leaf
    backend = backend_of(leaf)
    if backend is None or kind_of(backend.described(leaf)[0]) != "integer":
        return ()
    return backend.extremes(leaf)


def out_of_range(layer: str, decision: Decision, item: str, extremes: tuple[int, ...], below: int) -> TapeError:
    """An index that would reach outside."""
    low, high = extremes
    sentinel = " -1 marks what was not routed, and would train the last expert." if low == -1 else ""
    return TapeError(
        message(
            f"tape, {at_layer(layer)}, {spoken(decision.key)}, item {item}: integers from {low} to {high}, "
            f"where 0 to {below - 1} are in range.{sentinel}",
            saved_at(decision),
            "replay a tape of a model with as many experts, or mend the routing where it was made.",
        )
    )
