"""Two tapes side by side: which rows were decided otherwise."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._backend import backend_of, compare, described, to_host
from ._host import HostArray, integers_of, itemsize_of, kind_of
from ._slots import ONCE, Key
from ._tape import Decision, Region, Tape, not_a_tape
from ._trees import paths

__all__ = ["Difference", "TapeDiff", "diff"]

SCORES = "scores"


@dataclass(frozen=True)
class Difference:
    """How one saved array or value of a tape compares with its like in another.

    A row is what is decided for one token: all but the last axis counts rows, and an array of one axis has a row an
    element. A row of integers is flipped if it holds others, reordered if it holds the same in another order.

    >>> from roundpipe_core import Tape, diff
    >>> one, two = (Tape.from_routing(routing, experts=4) for routing in ([[[3, 1]], [[0, 2]]], [[[1, 3]], [[0, 3]]]))
    >>> [found] = diff(one, two)
    >>> found.rows, found.flipped, found.reordered, found.flipped_rows
    (2, 1, 1, (1,))
    """

    layer: str
    """The labels of the regions around it, joined by ``/``."""
    order: int
    """Which decision of the tapes it is, counted in the order they were made."""
    name: str | None
    """The save's `name`."""
    scope: str
    """The `layer_scope` it was saved in, joined by ``/``."""
    item: str
    """Where it sits in the saved data."""
    rows: int
    """How many rows there are."""
    flipped: int = 0
    """How many of them hold something else."""
    reordered: int = 0
    """How many hold the same integers in another order."""
    first: int | None = None
    """The first row that is flipped or reordered, counted from 0."""
    margin: float | None = None
    """The most by which a flipped row preferred what it chose, if the scores were kept."""
    fault: str | None = None
    """Why the two cannot be compared row by row: one is missing, or they have another shape."""
    flipped_rows: tuple[int, ...] = field(default=(), repr=False)
    """Which rows are flipped."""
    reordered_rows: tuple[int, ...] = field(default=(), repr=False)
    """Which rows are reordered."""

    @property
    def differs(self) -> bool:
        """Whether the two are not the same."""
        return bool(self.flipped or self.reordered or self.fault)


class TapeDiff(tuple[Difference, ...]):
    """What `diff` found, a `Difference` for each saved array or value, equal ones too. True if any differs."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return any(entry.differs for entry in self)

    def __repr__(self) -> str:
        counts = f"{sum(e.flipped for e in self)} flipped, {sum(e.reordered for e in self)} reordered"
        return f"<TapeDiff of {len(self)} entries: {counts}, {sum(e.fault is not None for e in self)} unlike>"


def diff(a: Tape, b: Tape) -> TapeDiff:
    """Compare what two runs decided, layer by layer.

    >>> from roundpipe_core import Tape, diff
    >>> one = Tape.from_routing([[[0, 1]], [[2, 3]], [[1, 2]]], experts=4)
    >>> other = Tape.from_routing([[[0, 1]], [[3, 2]], [[1, 3]]], experts=4)
    >>> difference, = diff(one, other)
    >>> difference.flipped, difference.reordered, difference.first
    (1, 1, 1)

    Layers are matched as `replay` does: by their labels, by their order where the labels are not chosen by the user.
    Integers are compared by value, whatever their width; NaN is equal to NaN.

    A save named ``scores``, or ``experts_scores`` next to one named ``experts``, in the same layer and scope, is not
    compared: it holds floats ``[*rows, experts]`` by which the layer chose, and gives the margin. That is, of a row
    that flipped, the least score in `a` among what only `a` chose, less the greatest among what only `b` chose. Close
    to 0, a tie was broken otherwise; far from it, the models differ.

    Returns:
        Each array and value of the tapes compared. The result is true if the tapes differ.

    Raises:
        OptionError: one of the two is no Tape.
    """
    for tape in (a, b):
        if not isinstance(tape, Tape):
            raise not_a_tape("diff", tape)
    return TapeDiff(
        entry
        for order, (path, key, one, other) in enumerate(_pairs(a.whole(), b.whole(), ()))
        for entry in _compared("/".join(path), order, key, one, other)
    )


@dataclass
class _Side:
    """A decision, with those of its layer that may hold its scores."""

    decision: Decision
    others: dict[Key, Decision]

    def scores(self) -> HostArray | None:
        scope, name = self.decision.key
        for wanted in (f"{name}_{SCORES}", SCORES) if name else (SCORES,):
            held = self.others.get((scope, wanted))
            if held is not None and len(held.leaves) == 1 and _kind(held.leaves[0]) == "float":
                return to_host(held.leaves[0])
        return None


def _kind(leaf: Any) -> str | None:
    backend = backend_of(leaf)
    return None if backend is None else kind_of(backend.described(leaf)[0])


# ------------------------------------------------------------------------------------- what belongs together

_Pair = tuple[tuple[str, ...], Key, _Side | None, _Side | None]


def _pairs(one: Region | None, other: Region | None, path: tuple[str, ...]) -> Iterator[_Pair]:
    ours, theirs = _sides(one), _sides(other)
    for mine, yours in _matched(list(ours), list(theirs), _same_key):
        key = mine if mine is not None else yours
        assert key is not None
        yield path, key, mine and ours[mine], yours and theirs[yours]
    for mine, yours in _matched(one.regions if one else [], other.regions if other else [], _same_layer):
        region = mine or yours
        assert region is not None
        yield from _pairs(mine, yours, (*path, *region.scope, region.label))


def _sides(region: Region | None) -> dict[Key, _Side]:
    held = {decision.key: decision for decision in region.decisions} if region else {}
    return {key: _Side(decision, held) for key, decision in held.items() if not _is_scores(key, held)}


def _is_scores(key: Key, held: dict[Key, Decision]) -> bool:
    scope, name = key
    if name == SCORES:
        return len(held) > 1
    return name is not None and name.endswith(f"_{SCORES}") and (scope, name.removesuffix(f"_{SCORES}")) in held


def _matched(ours: Sequence[Any], theirs: Sequence[Any], same: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs in our order: those alike first, then the rest as they come; None where there is none."""
    left = list(theirs)
    found: list[Any] = []
    for strictly in (True, False):
        for n, mine in enumerate(ours):
            if strictly:
                found.append(None)
            if found[n] is None:
                match = next((yours for yours in left if same(mine, yours, strictly)), None)
                if match is not None:
                    found[n] = match
                    left.remove(match)
    yield from zip(ours, found, strict=True)
    yield from ((None, yours) for yours in left)


def _same_key(mine: Key, yours: Key, strictly: bool) -> bool:
    once = all(name is not None and name.startswith(ONCE) for name in (mine[1], yours[1]))
    return mine == yours or (not strictly and once and mine[0] == yours[0])


def _same_layer(mine: Region, yours: Region, strictly: bool) -> bool:
    if mine.scope != yours.scope:
        return False
    return mine.label == yours.label or not (strictly or (mine.given and yours.given))


# --------------------------------------------------------------------------------------------- what differs


def _compared(layer: str, order: int, key: Key, one: _Side | None, other: _Side | None) -> Iterator[Difference]:
    def difference(item: str, rows: int, **found: Any) -> Difference:
        return Difference(layer, order, key[1], "/".join(key[0]), item, rows, **found)

    if one is None or other is None:
        yield difference("", 0, fault="only in the second tape" if one is None else "only in the first tape")
        return
    ours = dict(zip(paths(one.decision.spec), one.decision.leaves, strict=True))
    theirs = dict(zip(paths(other.decision.spec), other.decision.leaves, strict=True))
    if len(ours) != len(theirs):
        yield difference("", 0, fault=f"{len(ours)} values and {len(theirs)}")
        return
    if ours.keys() != theirs.keys():  # a dataclass comes from a file as a named tuple
        theirs = dict(zip(ours, theirs.values(), strict=True))
    for item, mine in ours.items():
        rows, found = _leaf(mine, theirs[item])
        if found.get("flipped_rows"):
            found["margin"] = _margin(one, other, mine, theirs[item], found["flipped_rows"])
        yield difference(item, rows, **found)


def _leaf(mine: Any, yours: Any) -> tuple[int, dict[str, Any]]:
    """How many rows there are, and what differs."""
    if backend_of(mine) is None and backend_of(yours) is None:
        return 1, _found([0] if compare("", "", None, mine, yours) else [], [])
    if backend_of(mine) is None or backend_of(yours) is None:
        return 0, {"fault": f"{type(mine).__name__} and {type(yours).__name__}"}
    try:
        one, other = to_host(mine), to_host(yours)
    except (TypeError, ValueError):
        return _without_bytes(mine, yours)
    if kind_of(one.dtype) != kind_of(other.dtype):
        return 0, {"fault": f"{one.dtype} and {other.dtype}"}
    if one.shape != other.shape:
        return 0, {"fault": f"shape {list(one.shape)} and {list(other.shape)}"}
    width = one.shape[-1] if len(one.shape) > 1 else 1
    rows = math.prod(one.shape[:-1]) if len(one.shape) > 1 else math.prod(one.shape)
    if not math.prod(one.shape):
        return rows, {}
    flipped: list[int] = []
    reordered: list[int] = []
    for row, held, instead in _changed(one, other, rows, width):
        same = kind_of(one.dtype) == "integer" and sorted(held) == sorted(instead)
        (reordered if same else flipped).append(row)
    return rows, _found(flipped, reordered)


def _without_bytes(mine: Any, yours: Any) -> tuple[int, dict[str, Any]]:
    """The same for arrays that only their framework can read, such as texts."""
    backend = backend_of(mine)
    if backend is None or not backend.owns(yours):
        return 0, {"fault": f"{described(mine)[0]} and {described(yours)[0]}"}
    flip = compare("", "", backend, mine, yours)
    if flip is None:
        return 0, {}
    return flip.total, {"fault": f"{flip.rows} of {flip.total} rows of {described(mine)[0]}"}


def _found(flipped: list[int], reordered: list[int]) -> dict[str, Any]:
    return {
        "flipped": len(flipped),
        "reordered": len(reordered),
        "first": min(flipped[:1] + reordered[:1], default=None),
        "flipped_rows": tuple(flipped),
        "reordered_rows": tuple(reordered),
    }


def _changed(
    one: HostArray, other: HostArray, rows: int, width: int
) -> Iterator[tuple[int, Sequence[Any], Sequence[Any]]]:
    """Rows that are not the same, with both contents."""
    if one.dtype == other.dtype and bytes(one.data) == bytes(other.data):  # bytes compare faster than views
        return
    ours, theirs = _elements(one), _elements(other)
    for row, begin in enumerate(range(0, rows * width, width)):
        held, instead = ours[begin : begin + width], theirs[begin : begin + width]
        if held != instead and any(x != y and not (x != x and y != y) for x, y in zip(held, instead, strict=True)):
            yield row, held, instead


def _elements(array: HostArray) -> Sequence[Any]:
    """What to compare, in row-major order; the two parts of a complex number count as one."""
    if kind_of(array.dtype) == "integer":
        return integers_of(array).tolist()
    if array.dtype == "bfloat16":
        wide = bytearray(2 * array.data.nbytes)
        wide[2::4], wide[3::4] = bytes(array.data[::2]), bytes(array.data[1::2])
        return struct.unpack(f"<{len(wide) // 4}f", wide)
    if array.dtype in _FLOATS:
        return struct.unpack(f"<{math.prod(array.shape)}{_FLOATS[array.dtype]}", array.data)
    if array.dtype in _COMPLEX:
        code = _COMPLEX[array.dtype]
        return [complex(*pair) for pair in struct.iter_unpack(f"<2{code}", array.data)]
    size = itemsize_of(array.dtype)
    data = bytes(array.data).translate(_ALIKE.get(array.dtype))
    return [data[n : n + size] for n in range(0, len(data), size)]


def _row(array: HostArray, row: int, width: int) -> Sequence[Any]:
    size = width * itemsize_of(array.dtype)
    return _elements(HostArray(array.dtype, (width,), array.data[row * size : (row + 1) * size], array.origin))


_FLOATS = {"float16": "e", "float32": "f", "float64": "d"}
_COMPLEX = {"complex64": "f", "complex128": "d"}
_ALIKE = {  # of floats of a byte: every NaN as one, and -0 as 0 where there is one
    dtype: bytes(nan if byte in nans else 0 if byte == zero else byte for byte in range(256))
    for dtype, nans, nan, zero in (
        ("float8_e4m3fn", (0x7F, 0xFF), 0x7F, 0x80),
        ("float8_e5m2", (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), 0x7F, 0x80),
    )
}


def _margin(one: _Side, other: _Side, mine: Any, yours: Any, flipped: Sequence[int]) -> float | None:
    """The most by which a flipped row preferred what it chose."""
    if _kind(mine) != "integer":
        return None
    chosen, instead = to_host(mine), to_host(yours)
    scores = one.scores()
    if scores is None:
        scores, chosen, instead = other.scores(), instead, chosen
    lead = chosen.shape[:-1] if len(chosen.shape) > 1 else chosen.shape
    if scores is None or scores.shape[:-1] != lead or scores.dtype not in (*_FLOATS, "bfloat16"):
        return None
    width = chosen.shape[-1] if len(chosen.shape) > 1 else 1
    experts = scores.shape[-1]
    margins = []
    for row in flipped:
        ours, theirs = set(_row(chosen, row, width)), set(_row(instead, row, width))
        only, missed = ours - theirs, theirs - ours
        if only and missed and all(0 <= expert < experts for expert in only | missed):
            held = _row(scores, row, experts)
            margins.append(min(held[expert] for expert in only) - max(held[expert] for expert in missed))
    return max((margin for margin in margins if not math.isnan(margin)), default=None)
