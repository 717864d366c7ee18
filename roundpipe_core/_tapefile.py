"""A tape as a file: safetensors, with the tape as JSON among its metadata (R13).

Metadata of a file, all texts::

    roundpipe_tape   version of what follows, "1"
    tape             JSON, see below
    crc32            of that JSON in UTF-8, eight hexadecimal digits

The JSON has ``arrays``, in the order in which the tape uses them, and ``root``, a region::

    array     {"name", "dtype", "shape", "origin", "crc32"}      name: of the array in the file
    region    {"label", "given", "scope", "rows", "decisions", "regions"}
    decision  {"scope", "name", "place", "below", "axes", "met", "data"}       data: as in `_values`

``axes`` has, for each value of the data, how many leading axes count the iterations of loops, or nothing for none.
``met`` tells what the region had met between the decision before and this one: a dict, as in `_values`, of how often
so far.

Arrays of dtypes that safetensors lacks are kept as bytes, U8, with an axis more.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO, FileIO
from typing import Any, NamedTuple, Protocol, TypeVar

from ._backend import backend_of, described, expand, host_of, origin_of
from ._errors import TapeError, message
from ._files import Path, opened, read_at, replacing, set_out, write_all
from ._host import DTYPES, HostArray, itemsize_of
from ._places import Place
from ._safetensors import HEADER_LIMIT, FaultError, Held, parsed_json, read_header, table
from ._slots import spoken
from ._tape import Decision, Region, Tape, at_layer
from ._threads import begun, each
from ._trees import flatten, paths
from ._values import COUNTS_LIMIT, NESTING_LIMIT, NotHeldError, Reader, encoded, plain

__all__ = ["VERSION", "dumped", "load", "loaded", "save"]

VERSION = "1"
FORMAT = "roundpipe_tape"
_READING = min(4, os.cpu_count() or 1)  # threads, which also take the checksums; more than cores are slower
_GROUP = 2 << 20  # bytes that are handed to a thread at a time, and that lie in one piece of memory when they are read
_WORD = 8  # bytes of the widest element that has to lie at a multiple of its size
_UNKNOWN = "0" * 8


# ---------------------------------------------------------------------------------------------- checksums


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


_Array = TypeVar("_Array", bound=_Sized)


def _groups(arrays: Iterable[_Array]) -> Iterator[list[_Array]]:
    """`arrays` in order, as many together as have `_GROUP` bytes."""
    group: list[_Array] = []
    size = 0
    for array in arrays:
        group.append(array)
        size += array.nbytes
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def _crc32(data: Any) -> str:
    return f"{zlib.crc32(data):08x}"


# --------------------------------------------------------------------------------------------------- save


class _Stored(NamedTuple):
    """An array on its way into a file."""

    name: str
    where: str
    leaf: Any
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return itemsize_of(self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.size

    @property
    def held(self) -> tuple[str, str, tuple[int, ...]]:
        """Name, code and shape in the file."""
        code = DTYPES[self.dtype][0]
        return self.name, code or "U8", self.shape if code else (*self.shape, self.size)


def save(tape: Tape, path: Path) -> None:
    """Write `tape` to `path`: wholly, or not at all."""
    with replacing(path) as file:
        _write(tape, file, set_out)


def dumped(tape: Tape) -> bytes:
    """What `save` would write."""
    file = BytesIO()
    _write(tape, file, lambda *_: None)
    return file.getvalue()


_File = TypeVar("_File", FileIO, BytesIO)


def _write(tape: Tape, file: _File, written: Callable[[_File, int, int], None]) -> None:
    if sum(len(decision.counts) for _, _, decision in tape.decisions()) > COUNTS_LIMIT:
        raise TapeError(
            message(
                "one layer makes too many decisions of too many names for a file.",
                [],
                "save in checkpointed layers, of which each has a few.",
            )
        )
    arrays: list[_Stored] = []
    root = _region(tape.root, (), arrays, 0)
    sums = dict.fromkeys((stored.name for stored in arrays), _UNKNOWN)
    ordered = sorted(arrays, key=lambda stored: -stored.size)  # so that each begins at a multiple of its own size
    head = _head(root, arrays, ordered, sums)
    begin = file.seek(len(head))
    waits: list[Callable[[], None]] = []
    try:
        for group in _groups(ordered):
            parts = {stored.name: _bytes_of(stored) for stored in group}
            waits.append(begun(functools.partial(_sum_up, parts, sums)))
            write_all(file, parts.values())
            end = file.tell()
            written(file, begin, end)
            begin = end
            if len(waits) > 1:  # else copies of arrays that do not lie in one piece would pile up
                waits.pop(0)()
    finally:
        for wait in waits:
            wait()
    head = _head(root, arrays, ordered, sums)
    file.seek(0)
    write_all(file, [head])


def _sum_up(parts: dict[str, memoryview], sums: dict[str, str]) -> None:
    """Take the checksums of `parts`, while they are written."""
    for name, data in parts.items():
        sums[name] = _crc32(data)


def _head(root: Any, arrays: list[_Stored], ordered: list[_Stored], sums: dict[str, str]) -> bytes:
    listed = [
        {
            "name": stored.name,
            "dtype": stored.dtype,
            "shape": stored.shape,
            "origin": origin_of(stored.leaf),
            "crc32": sums[stored.name],
        }
        for stored in arrays
    ]
    tape = _json({"arrays": listed, "root": root})
    texts = {FORMAT: VERSION, "tape": tape, "crc32": _crc32(tape.encode())}
    head = table(texts, (stored.held for stored in ordered))
    if len(head) > HEADER_LIMIT:
        raise TapeError(
            message(
                f"the tape's numbers, texts and structures need {len(head)} bytes, where {HEADER_LIMIT} are allowed.",
                [],
                "save arrays, not lists of numbers.",
            )
        )
    return head


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _bytes_of(stored: _Stored) -> memoryview:
    def unreadable(fault: str, better: str) -> TapeError:
        return _not_held(
            stored.where,
            f"an array whose values cannot be read: {fault}",
            better or "save the tape outside of jit and vmap: return it from the function, and save what comes back.",
        )

    return host_of(stored.leaf, unreadable).data


def _region(region: Region, path: tuple[str, ...], arrays: list[_Stored], depth: int) -> Any:
    layer = "/".join(path)
    if depth > NESTING_LIMIT:
        raise _not_held(f"layer {layer!r}", f"layers nested deeper than {NESTING_LIMIT}", "record a part of the model.")
    _refuse_half_letters(f"layer {layer!r}", [region.label, *region.scope])
    decisions: list[Any] = []
    before: dict[Any, int] = {}
    for decision in region.decisions:
        decisions.append(_decision(layer, decision, before, arrays))
        before = decision.counts
    return {
        "label": region.label,
        "given": region.given if depth else region.complete,
        "scope": region.scope,
        "rows": sorted(region.rows),
        "decisions": decisions,
        "regions": [_region(inner, (*path, *inner.scope, inner.label), arrays, depth + 1) for inner in region.regions],
    }


def _decision(layer: str, decision: Decision, before: dict[Any, int], arrays: list[_Stored]) -> Any:
    scope, name = decision.key
    where = f"{at_layer(layer)}, {spoken(decision.key)}"
    _refuse_half_letters(where, [*scope, name or ""])
    items = list(paths(decision.spec))
    leaves = [
        _leaf(f"{where}, item {item}" if item else where, leaf, arrays)
        for item, leaf in zip(items, decision.leaves, strict=True)
    ]
    try:
        data = encoded(decision.spec, iter(leaves))
        met = _encoded(_difference(before, decision.counts))
    except NotHeldError as fault:
        raise _not_held(where, fault.what, fault.way_out) from None
    place = decision.place and [os.fsencode(decision.place[0]).decode(errors="replace"), decision.place[1]]
    return {
        "scope": scope,
        "name": name,
        "place": place,
        "below": decision.below,
        "axes": decision.axes,
        "met": met,
        "data": data,
    }


def _encoded(value: Any) -> Any:
    leaves: list[Any] = []
    return encoded(flatten(value, leaves), iter(leaves))


def _difference(before: dict[Any, int], now: dict[Any, int]) -> dict[Any, int]:
    """What changed, 0 for what is gone. To say all of it each time would be as long as the square of a run."""
    if not before:
        return now
    changed = {key: count for key, count in now.items() if before.get(key) != count}
    return changed | dict.fromkeys(before.keys() - now.keys(), 0)


def _leaf(where: str, leaf: Any, arrays: list[_Stored]) -> Any:
    if backend_of(leaf) is None:
        return _plain(where, leaf)
    dtype, shape = described(leaf)
    if dtype not in DTYPES:
        raise _not_held(
            where,
            f"an array of dtype {dtype}",
            "save it as one of numbers, such as int32 or float32: of a key, its data.",
        )
    if not all(type(n) is int for n in shape):
        raise _not_held(where, f"a {type(leaf).__name__} of the shape {list(shape)}", "save arrays of a known shape.")
    arrays.append(_Stored(f"{len(arrays)} {where}", where, leaf, dtype, tuple(shape)))
    return {"array": len(arrays) - 1}


def _plain(where: str, leaf: Any) -> Any:
    try:
        return plain(leaf)
    except NotHeldError as fault:
        raise _not_held(where, fault.what, fault.way_out) from None


def _refuse_half_letters(where: str, names: Iterable[str]) -> None:
    for name in names:
        if not name.isascii() and name.encode(errors="ignore").decode() != name:
            raise _not_held(where, f"the name {name!r}, which is no Unicode text", "give it another name.")


def _not_held(where: str, what: str, way_out: str) -> TapeError:
    return TapeError(message(f"{where}: {what}, cannot be kept in a file.", [], way_out))


# --------------------------------------------------------------------------------------------------- load


def load(path: Path, *, mapped: bool) -> Tape:
    """The tape that `save` wrote to `path`. If `mapped`, its arrays are the file, which has to stay as it is."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        return _told(os.fsdecode(path), lambda: _load(file, size, lambda at: (_mapped if mapped else _read)(file, at)))


def loaded(data: bytes) -> Tape:
    """The tape that `dumped` gave. Its arrays are parts of `data`."""
    pages = memoryview(data)
    return _told("what was pickled", lambda: _load(BytesIO(data), len(data), lambda at: _of_pages(pages, at)))


def _told(what: str, read: Callable[[], Tape]) -> Tape:
    try:
        return read()
    except FaultError as fault:
        raise TapeError(message(f"{what} is not a tape that can be read: {fault}.", [], fault.way_out)) from None


def _load(file: FileIO | BytesIO, size: int, reading: Callable[[int], _Read]) -> Tape:
    texts, held, begin = read_header(file, size)
    version = texts.get(FORMAT)
    if version is None:
        raise FaultError("a safetensors file, but no tape: its metadata does not have roundpipe_tape")
    if version != VERSION:
        raise FaultError(
            f"version {version[:40]!r} of the format, where {VERSION!r} is known here",
            "read it with the release of this library that wrote it, or write it again with this one.",
        )
    text = texts.get("tape", "")
    if _crc32(text.encode()) != texts.get("crc32"):  # what `read_header` gives is Unicode
        raise FaultError("its JSON is damaged: the checksum differs")
    whole = _fields(parsed_json(text), "the tape", arrays=list, root=dict)
    listed = [_Listed.read(entry, held) for entry in whole["arrays"]]
    if len({entry.name for entry in listed}) != len(listed) or len(listed) != len(held):
        raise FaultError("its arrays are not those that the tape lists")
    reader = Reader(_arrays(reading(begin), listed, held))
    root = _read_region(whole["root"], reader, 0)
    reader.all_given()
    return Tape(root)


class _Listed(NamedTuple):
    """An array that a tape lists."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    origin: str
    crc32: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize_of(self.dtype)

    @classmethod
    def read(cls, entry: Any, held: dict[str, Held]) -> _Listed:
        entry = _fields(entry, "an array", name=str, dtype=str, shape=list, origin=str, crc32=str)
        listed = cls(entry["name"], entry["dtype"], tuple(entry["shape"]), entry["origin"], entry["crc32"])
        if listed.name not in held or listed.dtype not in DTYPES:
            raise FaultError(f"array {listed.name[:80]!r}, {listed.dtype[:40]}, which the file does not have")
        kept = held[listed.name]
        expected = _Stored("", "", None, listed.dtype, listed.shape).held[1:]
        if (kept.code, kept.shape) != expected or not all(type(n) is int for n in listed.shape):
            raise FaultError(f"array {listed.name[:80]!r} is another than the tape says")
        return listed


_Read = Callable[[int, int], memoryview]
"""Gives the bytes of arrays, from a place to another."""


def _arrays(read: _Read, listed: list[_Listed], held: dict[str, Held]) -> list[Any]:
    """The arrays in the tape's order."""

    def checked(group: list[_Listed]) -> list[Any]:
        places = [held[entry.name] for entry in group]
        begin = places[0].begin
        data = read(begin, places[-1].end)
        return [
            _checked(entry, data[kept.begin - begin : kept.end - begin], kept.begin)
            for entry, kept in zip(group, places, strict=True)
        ]

    groups = list(_groups(sorted(listed, key=lambda entry: (held[entry.name].begin, held[entry.name].end))))
    arrays = [array for group in each(checked, groups, _READING) for array in group]
    of = dict(zip((entry.name for group in groups for entry in group), arrays, strict=True))
    return [of[entry.name] for entry in listed]


def _checked(entry: _Listed, data: memoryview, begin: int) -> Any:
    if _crc32(data) != entry.crc32:
        raise FaultError(f"array {entry.name[:80]!r} is damaged: the checksum differs")
    if begin % min(itemsize_of(entry.dtype), _WORD):  # after another program has put them in another order
        data = memoryview(bytes(data))
    return _array(entry, data)


def _read(file: FileIO, start: int) -> _Read:
    """Read the arrays, which begin at `start`, into memory."""

    def read(begin: int, end: int) -> memoryview:
        ahead = begin % _WORD  # elements lie across no boundaries in memory, if they do not in the file
        return _whole(read_at(file, start + begin - ahead, ahead + end - begin)[ahead:], end - begin)

    return read


def _mapped(file: FileIO, start: int) -> _Read:
    """Map the file: its pages are read when they are used, and belong to the system."""
    return _of_pages(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)), start)


def _of_pages(pages: memoryview, start: int) -> _Read:
    return lambda begin, end: _whole(pages[start + begin : start + end], end - begin)


def _whole(data: memoryview, size: int) -> memoryview:
    if len(data) != size:
        raise FaultError("it became shorter while it was read")
    return data


def _array(entry: _Listed, data: memoryview) -> Any:
    host = HostArray(entry.dtype, entry.shape, data, entry.origin)
    if entry.origin != "numpy":
        return host
    try:
        numpy = importlib.import_module("numpy")
        return numpy.frombuffer(data, numpy.dtype(entry.dtype)).reshape(entry.shape)
    except (ImportError, TypeError):  # no numpy here, or none that knows bfloat16
        return host


def _read_region(data: Any, reader: Reader, depth: int) -> Region:
    if depth > NESTING_LIMIT:
        raise FaultError(f"layers nested deeper than {NESTING_LIMIT}")
    data = _fields(data, "a layer", label=str, given=bool, scope=list, rows=list, decisions=list, regions=list)
    if not all(type(n) is int and n >= 0 for n in data["rows"]):
        raise FaultError("a layer with rows that are none")
    given = data["given"]
    region = Region(data["label"], given=given and depth > 0, scope=_scope(data), rows=frozenset(data["rows"]))
    region.complete = given and depth == 0
    met: dict[Any, int] = {}
    for entry in data["decisions"]:
        decision = _read_decision(entry, met, reader)
        region.decisions.append(decision)
        met = decision.counts
    if len({decision.key for decision in region.decisions}) != len(region.decisions):
        raise FaultError(f"layer {region.label[:80]!r} has a decision twice")
    region.regions = [_read_region(inner, reader, depth + 1) for inner in data["regions"]]
    return region


def _read_decision(data: Any, before: dict[Any, int], reader: Reader) -> Decision:
    optional = (type(None), str)
    data = _fields(
        data, "a decision", scope=list, name=optional, place=_ANY, below=_ANY, axes=list, met=dict, data=_ANY
    )
    leaves: list[Any] = []
    spec = flatten(reader.value(data["data"]), leaves, expand)
    below = data["below"]
    if below is not None and (type(below) is not int or below < 1):
        raise FaultError("a decision with a range that is none")
    decision = Decision((_scope(data), data["name"]), spec, leaves, _place(data["place"]), below)
    decision.axes = _axes(data["axes"], leaves)
    met = reader.value(data["met"])
    if type(met) is not dict or not all(type(key) is tuple and type(n) is int for key, n in met.items()):
        raise FaultError("a decision that met what is none")
    decision.counts = {key: count for key, count in (before | met).items() if count} if met else before
    reader.spend(len(decision.counts))
    return decision


def _axes(counts: list[Any], leaves: list[Any]) -> tuple[int, ...]:
    shapes = [described(leaf)[1] for leaf in leaves] if counts else []
    if len(counts) != len(shapes) or not all(
        type(n) is int and 0 <= n <= len(shape) for n, shape in zip(counts, shapes, strict=True)
    ):
        raise FaultError("a decision with axes that are none")
    return tuple(counts)


def _place(data: Any) -> Place | None:
    if data is None:
        return None
    if type(data) is not list or [type(part) for part in data] != [str, int]:
        raise FaultError("a decision with a place that is none")
    return data[0], data[1]


def _scope(data: Any) -> tuple[str, ...]:
    if not all(type(name) is str for name in data["scope"]):
        raise FaultError("a scope that is none")
    return tuple(data["scope"])


_ANY = (type(None), bool, int, float, str, list, dict)


def _fields(value: Any, what: str, /, **kinds: type | tuple[type, ...]) -> dict[str, Any]:
    """`value`, an object with just these fields."""
    if type(value) is not dict or value.keys() != kinds.keys():
        raise FaultError(f"{what} that does not have just {', '.join(kinds)}")
    for name, kind in kinds.items():
        if type(value[name]) not in (kind if isinstance(kind, tuple) else (kind,)):
            raise FaultError(f"{what} whose {name} is of another kind")
    return value
