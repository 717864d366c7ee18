"""Tapes in files: what comes back, what is refused, and that no damaged or hostile file is believed (R13)."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import errno
import json
import math
import os
import random
import signal
import stat
import struct
import subprocess
import sys
import tracemalloc
import zlib
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_core import (
    Tape,
    TapeError,
    _tapefile,
    get_recompute_data,
    layer_scope,
    record,
    replay,
    save_for_recompute,
)
from roundpipe_core._files import read_exactly, write_all
from roundpipe_core._phase import Run, open_slot, thread
from roundpipe_core._safetensors import HEADER_LIMIT, FaultError, parsed_json

ROOT = Path(__file__).parents[2]


class Plan(NamedTuple):
    token: Any
    count: Any


@dataclasses.dataclass
class Dispatch:
    index: Any
    label: str


class Colour(enum.IntEnum):
    RED = 1


def layer(label: str, function) -> Any:
    """A region, made by hand."""
    before = thread.run
    phase, slot = open_slot(label)
    thread.run = Run(phase, slot)
    try:
        return function()
    finally:
        thread.run = before


def saved(*data: Any, name: str | None = None) -> Tape:
    with record() as tape:
        layer("moe", lambda: save_for_recompute(*data, name=name))
    return tape


def back(tape: Tape, folder: Path) -> Tape:
    tape.save(folder / "a.tape")
    return Tape.load(folder / "a.tape")


def data_of(tape: Tape) -> Any:
    """What a layer gets of the tape."""
    with replay(tape):
        return layer("moe", get_recompute_data)


def alike(one: Any, other: Any) -> bool:
    """Equal values of equal types, NaN equal to NaN, -0.0 not to 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return alike(list(one.items()), list(other.items()))
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)
    return one == other


# ------------------------------------------------------------------------------------------ what comes back

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**3000), max_value=2**3000),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=())),  # half surrogate pairs too
    st.binary(),
)
KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
ARRAYS = st.builds(
    lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype),
    st.sampled_from(["bool", "int8", "uint16", "int64", ">i4", "float16", "float64", "complex64", "complex128"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 9),
)
VALUES = st.recursive(
    st.one_of(SCALARS, ARRAYS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.builds(lambda items: collections.deque(items, 5), st.lists(inner, max_size=3)),
        st.sets(st.integers(), max_size=3),
        st.frozensets(st.text(), max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(VALUES, max_size=3).map(tuple))
def test_values_come_back(tmp_path_factory, values: tuple[Any, ...]) -> None:
    tape = saved(*values)

    loaded = back(tape, tmp_path_factory.getbasetemp())

    native = tuple(map(in_native_order, values))
    assert alike(data_of(loaded), native)
    assert repr(loaded) == repr(tape)


def in_native_order(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("="))
    if isinstance(value, dict):
        return {key: in_native_order(item) for key, item in value.items()}
    if isinstance(value, collections.deque):
        return collections.deque(map(in_native_order, value), value.maxlen)
    if type(value) in (list, tuple):
        return type(value)(map(in_native_order, value))
    return value


def test_regions_scopes_names_and_ranges_come_back(tmp_path: Path) -> None:
    def inner() -> None:
        with layer_scope("gate"):
            save_for_recompute(np.arange(6).reshape(2, 3), name="experts")
            layer("deep", lambda: save_for_recompute("left"))

    with record() as tape:
        save_for_recompute(1)
        save_for_recompute(2)
        layer("outer", inner)
        layer("outer", inner)
    tape.declare(below=6, name="experts")

    loaded = back(tape, tmp_path)

    assert [entry[:7] for entry in loaded.entries()] == [entry[:7] for entry in tape.entries()]
    assert [d.below for _, _, d in loaded.decisions()] == [d.below for _, _, d in tape.decisions()]
    assert [d.counts for _, _, d in loaded.decisions()] == [d.counts for _, _, d in tape.decisions()]
    assert [d.place for _, _, d in loaded.decisions()] == [d.place for _, _, d in tape.decisions()]
    loaded.declare(below=6, name="experts")  # a file's range is looked at when it is used
    assert loaded.split()[1] == tape.split()[1]  # all but the arrays, as one key
    with replay(loaded):
        assert save_for_recompute(5) == (1,)
        assert save_for_recompute(5) == (2,)
        for _ in range(2):
            layer("outer", inner)


def test_a_declared_range_is_checked_again_after_loading(tmp_path: Path) -> None:
    tape = saved(np.array([3]))
    next(tape.decisions())[2].below = 2  # declared by whoever made the file

    loaded = back(tape, tmp_path)

    with pytest.raises(TapeError, match="integers from 3 to 3, where 0 to 1"), replay(loaded):
        pass


def test_named_tuples_and_dataclasses_come_back_as_named_tuples(tmp_path: Path) -> None:
    plan, dispatch = data_of(back(saved(Plan(np.arange(3), 2), Dispatch((1,), "x")), tmp_path))

    assert type(plan).__name__ == "Plan"
    assert plan._fields == ("token", "count")
    assert plan.token.tolist() == [0, 1, 2]
    assert dispatch._fields == ("index", "label")
    assert dispatch == ((1,), "x")


def test_classes_of_containers_come_back_as_plain_ones(tmp_path: Path) -> None:
    class Mine(list):
        pass

    ordered = collections.OrderedDict(b=1, a=2)
    default = collections.defaultdict(list, {1: [2]})

    values = data_of(back(saved(ordered, default, Mine([1])), tmp_path))

    assert alike(values, ({"b": 1, "a": 2}, {1: [2]}, [1]))


def test_numbers_of_numpy_come_back(tmp_path: Path) -> None:
    values = (np.int64(-3), np.float32(2.5), np.bool_(True))

    loaded = data_of(back(saved(*values), tmp_path))

    assert loaded == values
    assert [type(value) for value in loaded] == [type(value) for value in values]


def test_arrays_come_back_read_only(tmp_path: Path) -> None:
    (entry,) = back(saved(np.arange(3)), tmp_path).entries()

    with pytest.raises(ValueError, match="read-only"):
        entry.value[0] = 7


def test_a_tape_of_nothing(tmp_path: Path) -> None:
    with record() as tape:
        pass

    assert back(tape, tmp_path).entries() == []


def test_a_recording_is_not_saved_before_it_ends(tmp_path: Path) -> None:
    with record() as tape, pytest.raises(TapeError, match="still being recorded"):
        tape.save(tmp_path / "a.tape")

    tape.save(tmp_path / "a.tape")


# ------------------------------------------------------------------------------------- other readers, writers


def test_safetensors_reads_the_arrays(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    arrays = [np.arange(3, dtype="u1"), np.arange(8.0).reshape(2, 2, 2), np.zeros((0, 4), "i2"), np.array(True)]
    saved(*arrays).save(tmp_path / "a.tape")

    read = numpy.load_file(tmp_path / "a.tape")

    assert sorted(name.split(" ", 1)[0] for name in read) == ["0", "1", "2", "3"]
    for name, array in read.items():
        assert name.endswith(f"layer 'moe', the unnamed slot, item [{name[0]}]")
        assert alike(array, arrays[int(name[0])])


def test_a_file_written_again_by_safetensors_is_the_same_tape(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors")
    from safetensors.numpy import save_file

    tape = saved(np.arange(3, dtype="u1"), {"b": np.arange(4.0), "a": np.array([1, 2], "i2")}, "text")
    tape.save(tmp_path / "a.tape")
    with library.safe_open(tmp_path / "a.tape", "numpy") as file:
        arrays, texts = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(arrays, tmp_path / "b.tape", texts)

    assert (tmp_path / "a.tape").read_bytes() != (tmp_path / "b.tape").read_bytes()  # the library has another order
    assert alike(data_of(Tape.load(tmp_path / "b.tape")), data_of(tape))


def test_other_files_of_safetensors_are_told(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({"weight": np.zeros(3)}, tmp_path / "model.safetensors")

    with pytest.raises(TapeError, match="a safetensors file, but no tape"):
        Tape.load(tmp_path / "model.safetensors")


# ---------------------------------------------------------------------------------------- what cannot be kept


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@dataclasses.dataclass
class Hidden:
    _x: int


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (object(), "an object of type builtins.object, which only this process knows"),
        (Colour.RED, "Colour, which only this process knows"),
        (len, "builtin_function_or_method"),
        (np.array([None]), "an array of dtype object"),
        (np.array(["a"]), "an array of dtype str32"),
        (np.array([1], "M8[s]"), "an array of dtype datetime64"),
        (np.ma.masked_array([1, 2], [0, 1]), "a masked array; save its data and its mask"),
        (Hidden(1), "a Hidden with the field '_x', which no named tuple can have"),
        ({Colour.RED: 1}, "Colour, which only this process knows"),
        (nested(40), "containers nested deeper than 32"),
        (nested(32), "containers nested deeper than 32"),
    ],
)
def test_what_no_file_holds_is_named(tmp_path: Path, value: Any, what: str) -> None:
    tape = saved(1, {"x": value}, name="plan")

    with pytest.raises(TapeError) as caught:
        tape.save(tmp_path / "a.tape")

    assert what in str(caught.value)
    assert "layer 'moe', slot 'plan'" in str(caught.value)
    assert "way out" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_layers_that_no_file_holds_are_named(tmp_path: Path) -> None:
    def inside(depth: int) -> Any:
        return layer(f"{depth}", lambda: inside(depth - 1) if depth else save_for_recompute(1))

    for label, fault in [("\ud800", "which is no Unicode text, cannot be kept in a file"), ("é", None)]:
        with record() as tape:
            layer(label, lambda: save_for_recompute(1))
        if fault is None:
            tape.save(tmp_path / "a.tape")
            continue
        with pytest.raises(TapeError, match=fault):
            tape.save(tmp_path / "a.tape")
    with record() as tape:
        inside(40)
    with pytest.raises(TapeError, match="layers nested deeper than 32, cannot be kept in a file"):
        tape.save(tmp_path / "a.tape")


def test_sets_of_tuples_and_of_sets_come_back(tmp_path: Path) -> None:
    value = {(1, "a"), (2, None)}, frozenset({frozenset({1}), frozenset({2, 3})}), {np.int64(3)}
    assert data_of(back(saved(value), tmp_path)) == (value,)
    forgery = forged(holding({"set": [{"tuple": [[1]]}]}))
    (tmp_path / "b.tape").write_bytes(forgery)
    with pytest.raises(TapeError, match="a set of what no set holds"):
        Tape.load(tmp_path / "b.tape")


def test_an_error_names_the_item(tmp_path: Path) -> None:
    with pytest.raises(TapeError, match=r"layer 'moe', the unnamed slot, item \[1\]\['x'\]: an object of type"):
        saved(1, {"x": object()}).save(tmp_path / "a.tape")


def test_too_many_counts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tapefile, "COUNTS_LIMIT", 1000)  # a file forged against the limit itself is below
    with record() as tape:
        for n in range(50):
            save_for_recompute(n, name=str(n))

    with pytest.raises(TapeError, match="save in checkpointed layers"):
        tape.save(tmp_path / "a.tape")


def test_too_much_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TapeError, match="save arrays, not lists of numbers"):
        saved("x" * HEADER_LIMIT).save(tmp_path / "a.tape")


# ------------------------------------------------------------------------------------------- damaged files


def example() -> Tape:
    with record() as tape:
        for n in range(3):
            layer(
                f"layer {n}",
                lambda n=n: save_for_recompute(
                    np.arange(24, dtype="i2").reshape(4, 6), {"plan": (n, 1.5, "é\n", None)}, Plan(np.ones(3), 2**70)
                ),
            )
    return tape


def damaged(good: bytes, draw: random.Random) -> bytes:
    """`good`, with a bit flipped, a byte changed, a part lost, doubled, moved or zeroed."""
    at, other = draw.randrange(len(good)), draw.randrange(len(good))
    low, high = sorted((at, other))
    kind = draw.randrange(8)
    if kind == 0:
        return good[:at] + bytes([good[at] ^ 1 << draw.randrange(8)]) + good[at + 1 :]
    if kind == 1:
        return good[:at] + bytes([draw.randrange(256)]) + good[at + 1 :]
    if kind == 2:
        return good[:at]
    if kind == 3:
        return good[:low] + good[high:]
    if kind == 4:
        return good[:high] + good[low:]
    if kind == 5:
        return good[:low] + bytes(high - low) + good[high:]
    if kind == 6:
        return good + draw.randbytes(draw.randrange(1, 40))
    head = int.from_bytes(good[:8], "little")
    return draw.choice([head + 8, head - 8, 2**63, 0, len(good) - 8]).to_bytes(8, "little") + good[8:]


def test_a_thousand_damaged_files_are_a_thousand_clear_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.tape"
    example().save(path)
    good = path.read_bytes()
    draw = random.Random(0)
    faults: collections.Counter[str] = collections.Counter()
    done = 0
    while done < 1000:
        bad = damaged(good, draw)
        if bad == good:
            continue
        done += 1
        path.write_bytes(bad)
        with pytest.raises(TapeError) as caught:
            Tape.load(path, mmap=done % 2 == 0)
        assert str(caught.value).startswith(f"{path} is not a tape that can be read: ")
        faults[str(caught.value).removeprefix(str(path)).split(":")[1][:12]] += 1
    assert len(faults) > 5  # they fail in different places, not all at the first check


def test_every_byte_is_guarded(tmp_path: Path) -> None:
    path = tmp_path / "a.tape"
    saved(np.arange(3, dtype="i2"), ("left", 1.5)).save(path)
    good = path.read_bytes()
    assert len(good) < 1500
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        for mmap in (False, True):
            with pytest.raises(TapeError):
                Tape.load(path, mmap=mmap)


# -------------------------------------------------------------------------------------------- hostile files


def raw(head: Any, data: bytes = b"", *, pad: str = " ") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    text += pad.encode() * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: int, end: int, dtype: str = "U8", shape: Any = None) -> Any:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


HEADS = {
    "an empty file": (b"", "0 bytes are too few"),
    "no header": (b"\x08\0\0\0\0\0\0\0", "cut short"),
    "a huge header": (struct.pack("<Q", 2**64 - 1) + b"{}", "a header of 18446744073709551615 bytes"),
    "a header just too huge": (struct.pack("<Q", HEADER_LIMIT + 1) + b"{}", f"a header of {HEADER_LIMIT + 1} bytes"),
    "no JSON": (raw(b"pickle me"), "does not begin with a brace"),
    "a list": (raw(b"[]"), "does not begin with a brace"),
    "not UTF-8": (raw(b'{"\xff\xfe":1}'), "not UTF-8 at byte 2"),
    "half a surrogate pair": (raw(b'{"__metadata__":{"a":"\\ud800"}}'), "half a surrogate pair"),
    "two keys": (raw(b'{"a":1,"b":2,"a":3}'), "the key 'a' twice"),
    "deep nesting": (raw(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested deeper than"),
    "deep nesting that never ends": (raw(b'{"a":' + b'{"a":' * 100_000 + b"}"), "nested deeper than"),
    "a text that never ends": (raw(b'{"' + b'\\"' * 500_000 + b"}"), "does not parse"),
    "NaN": (raw(b'{"__metadata__":{},"a":NaN}'), "JSON with NaN"),
    "infinity by digits": (raw(b'{"a":1e999}'), "JSON with the number 1e999"),
    "too many digits": (raw(b'{"a":' + b"9" * 100_000 + b"}"), "a number that is none"),
    "other padding": (raw(b'{"a":1}', pad="\n") + b"", "does not end with a brace"),
    "metadata that is a number": (raw({"__metadata__": 3}), "the metadata is no mapping"),
    "metadata of numbers": (raw({"__metadata__": {"a": 3}}), "metadata that is no text"),
    "an unknown dtype": (raw({"a": entry(0, 4, "I4")}, b"1234"), "the unknown dtype 'I4'"),
    "a dtype that is a list": (raw({"a": entry(0, 4, ["U8"])}, b"1234"), "the unknown dtype"),
    "a field too many": (raw({"a": entry(0, 4) | {"x": 1}}, b"1234"), "has the fields"),
    "an array that is a list": (raw({"a": [1]}, b"1234"), "is no mapping"),
    "a negative size": (raw({"a": entry(0, 4, shape=[-4])}, b"1234"), "a shape that is none"),
    "two negative sizes": (raw({"a": entry(0, 4, shape=[-2, -2])}, b"1234"), "a shape that is none"),
    "a size that is a float": (raw({"a": entry(0, 4, shape=[4.0])}, b"1234"), "a shape that is none"),
    "a size that is a truth": (raw({"a": entry(0, 1, shape=[True])}, b"1"), "a shape that is none"),
    "a huge shape": (raw({"a": entry(0, 4, shape=[2**62, 2**62])}, b"1234"), "a shape beyond all memory"),
    "a huge shape of nothing": (raw({"a": entry(0, 0, shape=[0, 2**62, 2**62])}), "a shape beyond all memory"),
    "a product that wraps": (raw({"a": entry(0, 0, shape=[2**32, 2**32])}), "a shape beyond all memory"),
    "65 axes": (raw({"a": entry(0, 1, shape=[1] * 65)}, b"1"), "a shape that is none"),
    "wrong length": (raw({"a": entry(0, 3, shape=[4])}, b"123"), "needs 4 bytes and has 3"),
    "offsets turned round": (raw({"a": entry(4, 0, shape=[0])}, b"1234"), "offsets that are none"),
    "negative offsets": (raw({"a": entry(-4, 0, shape=[4])}, b"1234"), "offsets that are none"),
    "offsets beyond the file": (raw({"a": entry(0, 2**40)}, b"1234"), "cut short: 4 of 1099511627776 bytes"),
    "overlap": (raw({"a": entry(0, 4), "b": entry(2, 6)}, b"123456"), "overlaps the array before it"),
    "a hole": (raw({"a": entry(0, 2), "b": entry(4, 6)}, b"123456"), "leaves a hole"),
    "a hole at the start": (raw({"a": entry(2, 6)}, b"123456"), "leaves a hole"),
    "bytes too many": (raw({"a": entry(0, 4)}, b"123456"), "2 bytes belong to no array"),
}


@pytest.mark.parametrize("name", HEADS)
def test_hostile_heads(tmp_path: Path, name: str) -> None:
    content, fault = HEADS[name]
    path = tmp_path / "a.tape"
    path.write_bytes(content)
    with contextlib.suppress(TapeError):
        Tape.load(path)  # the first call imports
    tracemalloc.start()

    with pytest.raises(TapeError) as caught:
        Tape.load(path)

    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 40 * len(content) + 1_000_000
    assert fault in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def region(**changes: Any) -> Any:
    plain = {"label": "a", "given": True, "scope": [], "rows": [], "decisions": [], "regions": []}
    return plain | changes


def decision(data: Any, **changes: Any) -> Any:
    plain = {"scope": [], "name": None, "place": None, "below": None, "axes": [], "met": {"dict": []}, "data": data}
    return plain | changes


def holding(data: Any) -> Any:
    return region(decisions=[decision(data)])


def forged(root: Any, arrays: Any = (), data: bytes = b"", table: Any = None, **texts: str) -> bytes:
    """A file with right checksums."""
    tape = json.dumps({"arrays": list(arrays), "root": root})
    metadata = {"roundpipe_tape": "1", "tape": tape, "crc32": f"{zlib.crc32(tape.encode()):08x}"} | texts
    return raw({"__metadata__": metadata} | (table or {}), data)


def listed(data: bytes, **changes: Any) -> Any:
    plain = {"name": "x", "dtype": "uint8", "shape": [4], "origin": "numpy", "crc32": f"{zlib.crc32(data):08x}"}
    return plain | changes


def regions_nested(depth: int) -> Any:
    value = region()
    for _ in range(depth):
        value = region(regions=[value])
    return value


def lists_nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"tuple": [value]}
    return value


def counting(keys: int, decisions: int) -> Any:
    """The first decision met much, and each later one a little more: together the square of the file."""
    met = [[{"tuple": [str(n)]}, 1] for n in range(keys)]
    later = [decision(1, name=str(n), met={"dict": [[{"tuple": ["x"]}, n]]}) for n in range(decisions)]
    return region(decisions=[decision(1, met={"dict": met}), *later])


def half_letters() -> bytes:
    """The tape's text has half of a surrogate pair, which the JSON around it escapes."""
    return raw({"__metadata__": {"roundpipe_tape": "1", "tape": "\ud800", "crc32": "00000000"}}, b"")


TABLE = {"x": entry(0, 4)}
FORGED = {
    "another version": (forged(region(), roundpipe_tape="2"), "version '2' of the format"),
    "a wrong checksum": (forged(region(), crc32="00000000"), "its JSON is damaged"),
    "no root": (forged(None), "the tape whose root is of another kind"),
    "a region without rows": (forged({"label": "a"}), "a layer that does not have just"),
    "given as a number": (forged(region(given=1)), "whose given is of another kind"),
    "rows below zero": (forged(region(rows=[-1])), "rows that are none"),
    "a scope of numbers": (forged(region(scope=[1])), "a scope that is none"),
    "a decision twice": (forged(region(decisions=[decision(1), decision(2)])), "a decision twice"),
    "a negative range": (forged(region(decisions=[decision(1, below=-1)])), "a range that is none"),
    "a NaN range": (forged(region(decisions=[decision(1, below=1.5)])), "a range that is none"),
    "a place that is none": (forged(region(decisions=[decision(1, place=["a", "b"])])), "a place that is none"),
    "axes for nobody": (forged(region(decisions=[decision(1, axes=[0, 0])])), "axes that are none"),
    "axes of a number": (forged(region(decisions=[decision(1, axes=[1])])), "axes that are none"),
    "axes below zero": (forged(region(decisions=[decision(1, axes=[-1])])), "axes that are none"),
    "texts that were met": (forged(region(decisions=[decision(1, met={"dict": [["a", 1]]})])), "met what is none"),
    "an unknown kind": (forged(holding({"eval": "1"})), "the unknown kind 'eval'"),
    "two kinds at once": (forged(holding({"tuple": [], "list": []})), "the unknown kind"),
    "an empty kind": (forged(holding({})), "the unknown kind"),
    "a field of dunders": (
        forged(holding({"named": "A", "fields": ["__class__"], "values": [1]})),
        "a field that cannot be one",
    ),
    "a field that is code": (
        forged(holding({"named": "A", "fields": ["a=print(1)"], "values": [1]})),
        "a field that cannot be one",
    ),
    "a field that is a keyword": (
        forged(holding({"named": "A", "fields": ["lambda"], "values": [1]})),
        "a field that cannot be one",
    ),
    "fields that Python takes for one": (
        forged(holding({"named": "A", "fields": ["ﬁ", "fi"], "values": [1, 2]})),
        "a field that cannot be one",
    ),
    "a field twice": (forged(holding({"named": "A", "fields": ["a", "a"], "values": [1, 2]})), "not those of its"),
    "a field too few": (forged(holding({"named": "A", "fields": ["a"], "values": [1, 2]})), "not those of its"),
    "too many fields": (
        forged(holding({"named": "A", "fields": [f"a{n}" for n in range(1001)], "values": []})),
        "too many fields",
    ),
    "too many kinds": (
        forged(holding([{"named": f"A{n}", "fields": [], "values": []} for n in range(1001)])),
        "more than 1000 kinds",
    ),
    "a dict of unhashables": (forged(holding({"dict": [[[1], 2]]})), "a dict with a key"),
    "a dict with a key twice": (forged(holding({"dict": [[1, 2], [True, 3]]})), "a dict with a key"),
    "a set of lists": (forged(holding({"set": [[1]]})), "a set of what no set holds"),
    "a set with one twice": (forged(holding({"set": [1, 1]})), "holds a value twice"),
    "a deque too long": (forged(holding({"deque": [1, 2], "maxlen": 1})), "a wrong maxlen"),
    "an integer of letters": (forged(holding({"int": "0xzz"})), "an integer that is none"),
    "an integer in decimals": (forged(holding({"int": "9" * 9999})), "an integer that is none"),
    "a float of code": (forged(holding({"float": "__import__('os')"})), "a float that is none"),
    "a complex of three parts": (forged(holding({"complex": [1.0, 2.0, 3.0]})), "a complex number that is none"),
    "a tuple without parts": (forged(holding({"tuple": 3})), "a container without a list of its parts"),
    "a dict without pairs": (forged(holding({"dict": [[1, 2, 3]]})), "a dict without pairs"),
    "a tape that is no text": (half_letters(), "JSON with half a surrogate pair"),
    "a complex of texts": (forged(holding({"complex": ["a", "b"]})), "a complex number that is none"),
    "bytes that are none": (forged(holding({"bytes": "????"})), "not in base64"),
    "a text that is none": (forged(holding({"str": "zz"})), "a text that is none"),
    "a scalar of objects": (forged(holding({"scalar": "object", "bytes": "AAAAAAAAAAA="})), "a number of numpy"),
    "a scalar cut short": (forged(holding({"scalar": "int64", "bytes": "AAAA"})), "a number of numpy"),
    "deep regions": (forged(regions_nested(40)), "layers nested deeper than 32"),
    "deep values": (forged(holding(lists_nested(40))), "containers nested deeper than 32"),
    "counts without end": (forged(counting(2000, 2000)), "decisions that count more than 1000000 times"),
    "an array that is not there": (forged(holding({"array": 0})), "array 0 where array 0 of 0 is due"),
    "an array that is not listed": (forged(region(), [], b"1234", TABLE), "its arrays are not those"),
    "an array that is not used": (forged(region(), [listed(b"1234")], b"1234", TABLE), "1 arrays, of which"),
    "an array used twice": (
        forged(holding([{"array": 0}, {"array": 0}]), [listed(b"1234")], b"1234", TABLE),
        "array 0 where array 1 of 1 is due",
    ),
    "an array listed twice": (
        forged(holding([{"array": 0}, {"array": 1}]), [listed(b"1234")] * 2, b"1234", TABLE),
        "its arrays are not those",
    ),
    "an array of another dtype": (
        forged(holding({"array": 0}), [listed(b"1234", dtype="int8")], b"1234", TABLE),
        "is another than the tape says",
    ),
    "an array of objects": (
        forged(holding({"array": 0}), [listed(b"1234", dtype="object")], b"1234", TABLE),
        "which the file does not have",
    ),
    "an array of another shape": (
        forged(holding({"array": 0}), [listed(b"1234", shape=[2, 2])], b"1234", TABLE),
        "is another than the tape says",
    ),
    "an array with a shape of truths": (
        forged(holding({"array": 0}), [listed(b"1", shape=[True])], b"1", {"x": entry(0, 1)}),
        "is another than the tape says",
    ),
    "an array with other bytes": (
        forged(holding({"array": 0}), [listed(b"1234")], b"1235", TABLE),
        "array 'x' is damaged: the checksum differs",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_hostile_tapes_with_right_checksums(tmp_path: Path, name: str) -> None:
    content, fault = FORGED[name]
    path = tmp_path / "a.tape"
    path.write_bytes(content)

    with pytest.raises(TapeError) as caught:
        Tape.load(path)

    assert fault in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_forged_file_can_be_right(tmp_path: Path) -> None:
    """Or the tests above would see another fault than theirs."""
    path = tmp_path / "a.tape"
    path.write_bytes(forged(holding({"tuple": [{"array": 0}]}), [listed(b"1234")], b"1234", TABLE))

    assert Tape.load(path).entries()[0].value.tolist() == [49, 50, 51, 52]


# ------------------------------------------------------------------------------------- paths, crashes, modes


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_bytes(b"")
    for path, fault in [(tmp_path, "a folder, not a file"), (tmp_path / "pipe", "a pipe, not a file")]:
        with pytest.raises(TapeError, match=fault):  # a pipe without a writer would wait for ever
            Tape.load(path)
        with pytest.raises(TapeError, match=fault):
            saved(1).save(path)
    with pytest.raises(TapeError, match="a device, not a file"):
        Tape.load("/dev/zero")
    for function in (Tape.load, saved(1).save):
        with pytest.raises(OSError, match="loop"):
            function(tmp_path / "loop")
        with pytest.raises(NotADirectoryError):
            function(tmp_path / "file" / "a.tape")
        with pytest.raises(FileNotFoundError):
            function(tmp_path / "nowhere" / "a.tape")
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "loop", "file"}


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/a.tape")

    saved(1).save(tmp_path / "link")
    saved(2).save(tmp_path / "link")

    assert (tmp_path / "link").is_symlink()
    assert data_of(Tape.load(tmp_path / "there" / "a.tape")) == (2,)
    assert data_of(Tape.load(str(tmp_path / "link"))) == (2,)


def test_the_mode_of_an_old_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.tape"
    mask = os.umask(0o027)
    try:
        saved(1).save(path)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)

    saved(2).save(path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_a_protected_file_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tape"
    saved(1).save(path)
    path.chmod(0o400)
    if os.geteuid() == 0:  # who may write anything
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)

    with pytest.raises(PermissionError, match="the file may not be written"):
        saved(2).save(path)
    assert data_of(Tape.load(path)) == (1,)
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tape"
    saved(1).save(path)
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, full)
        with pytest.raises(OSError, match="No space left"):
            saved(np.arange(99)).save(path)
        monkeypatch.undo()
        assert list(tmp_path.iterdir()) == [path]
        assert data_of(Tape.load(path)) == (1,)


def test_a_disk_that_fails_while_the_rest_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is synced meanwhile. The system tells of a fault once: no later sync fails."""
    path = tmp_path / "a.tape"
    monkeypatch.setattr(_tapefile, "_GROUP", 400)
    saved(1).save(path)
    sync = os.fsync
    outcomes = iter([full])
    monkeypatch.setattr(os, "fsync", lambda file: next(outcomes, sync)(file))

    with pytest.raises(OSError, match="No space left"):
        saved(np.arange(50), np.arange(50)).save(path)

    assert next(outcomes, None) is None
    assert list(tmp_path.iterdir()) == [path]
    assert data_of(Tape.load(path)) == (1,)


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tape"
    saved("old").save(path)
    lines = [
        "import sys, roundpipe_core._files as files",
        "import numpy as np",
        "from roundpipe_core import record, save_for_recompute",
        "with record() as tape:",
        "    save_for_recompute(np.arange(10), np.arange(1000))",
        "write = files.write_all",
        "def slow(file, data):",
        "    write(file, data)",
        "    print('wrote', flush=True)",
        "    sys.stdin.read()",
        "import roundpipe_core._tapefile as tapefile",
        "tapefile.write_all = slow",
        f"tape.save({str(path)!r})",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "wrote\n"
        process.send_signal(signal.SIGKILL)

    assert data_of(Tape.load(path)) == ("old",)
    (left,) = set(tmp_path.iterdir()) - {path}  # what no program can tidy up after a kill
    assert left.name.startswith(".tape-")
    with pytest.raises(TapeError):
        Tape.load(left)


def test_many_saves_and_loads_leave_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "a.tape"
    tape = example()
    tape.save(path)
    before = set(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else set()
    for _ in range(50):
        tape.save(path)
        Tape.load(path)
        path.with_suffix(".bad").write_bytes(path.read_bytes()[:-1])
        with pytest.raises(TapeError):
            Tape.load(path.with_suffix(".bad"))

    assert len(set(os.listdir("/proc/self/fd")) if before else set()) <= len(before)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["a.bad", "a.tape"]


def test_reading_needs_no_numpy(tmp_path: Path) -> None:
    saved(np.arange(6, dtype="i4").reshape(2, 3), np.float64(2)).save(tmp_path / "scalar.tape")
    saved(np.arange(6, dtype="i4").reshape(2, 3), "text").save(tmp_path / "a.tape")
    lines = [
        "import sys",
        "sys.modules['numpy'] = None",
        "from roundpipe_core import Tape, TapeError",
        f"tape = Tape.load({str(tmp_path / 'a.tape')!r})",
        f"tape.save({str(tmp_path / 'b.tape')!r})",
        "try:",
        f"    Tape.load({str(tmp_path / 'scalar.tape')!r})",
        "except TapeError as error:",
        "    print(error)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "a number of numpy, float64, and here is no numpy" in done.stdout
    assert alike(data_of(Tape.load(tmp_path / "b.tape")), (np.arange(6, dtype="i4").reshape(2, 3), "text"))
    assert math.isclose(os.path.getsize(tmp_path / "a.tape"), os.path.getsize(tmp_path / "b.tape"), abs_tol=8)


@pytest.mark.parametrize("mmap", [False, True])
def test_a_file_that_grows_shorter_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mmap: bool) -> None:
    path = tmp_path / "a.tape"
    saved(np.arange(4)).save(path)
    whole = _tapefile.read_header

    def cut(file: FileIO) -> Any:
        header = whole(file)
        os.truncate(path, path.stat().st_size - 1)
        return header

    monkeypatch.setattr(_tapefile, "read_header", cut)
    with pytest.raises(TapeError, match="it became shorter while it was read"):
        Tape.load(path, mmap=mmap)


def test_a_mapped_tape_is_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tape"
    data = (np.arange(1 << 20), np.arange(5, dtype="i2"), np.zeros((0, 2)), "text", np.float32(2))
    saved(*data).save(path)

    tracemalloc.start()
    try:
        tape = Tape.load(path, mmap=True)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20  # of 8 MiB
    finally:
        tracemalloc.stop()

    assert alike(data_of(tape), data)
    assert not any(entry.value.flags.writeable for entry in tape.entries() if isinstance(entry.value, np.ndarray))
    saved("new").save(path)  # takes the place of the file: the tape's stays
    assert alike(data_of(tape), data)
    path.unlink()
    tape.save(tmp_path / "b.tape")
    assert alike(data_of(Tape.load(tmp_path / "b.tape")), data)


def test_systems_that_give_a_file_in_parts(tmp_path: Path) -> None:
    class Slow(FileIO):
        def read(self, size: int = -1) -> bytes:
            return super().read(min(size, 3))

        def write(self, data: Any) -> int:
            return super().write(data[:3])

    (tmp_path / "in parts").write_bytes(b"")
    with Slow(tmp_path / "in parts", "r+b") as file:
        write_all(file, b"0123456789")
        file.seek(0)
        assert read_exactly(file, 10) == b"0123456789"
        file.seek(1)
        assert read_exactly(file, 99) == b"123456789"
        assert read_exactly(file, 5) == b""


def test_a_stack_that_is_nearly_full() -> None:
    def room(frames: int = 0) -> int:
        try:
            return room(frames + 1)
        except RecursionError:
            return frames

    def deep(frames: int) -> Any:
        return deep(frames - 1) if frames else parsed_json("[" * 200 + "]" * 200)

    frames = room() - 100
    if sys.version_info >= (3, 12):  # whose C code has a stack of its own
        assert deep(frames)
        return
    with pytest.raises(FaultError, match="JSON nested too deeply for the stack that is left"):
        deep(frames)


@pytest.mark.parametrize(("rows", "page"), [(3, 64), (1 << 18, 4096)])
def test_bytes_begin_where_memory_is_copied_fast(tmp_path: Path, rows: int, page: int) -> None:
    saved(np.zeros(rows), name="é").save(tmp_path / "a.tape")
    head = int.from_bytes((tmp_path / "a.tape").read_bytes()[:8], "little")
    assert (8 + head) % page == 0
    assert (tmp_path / "a.tape").stat().st_size == 8 + head + 8 * rows
