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
import re
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
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
from roundpipe_core._files import read_at, read_exactly, write_all
from roundpipe_core._phase import Run, open_slot, thread
from roundpipe_core._safetensors import HEADER_LIMIT, FaultError, parsed_json
from tests.said import said

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


EACH_KIND = [
    *(0, 2**53, -(2**53), 2**53 + 1, -(2**53) - 1, 2**3000, -0.0, 1.5, math.inf, -math.inf, math.nan, True, None),
    *(1 + 2j, complex(math.nan, -0.0), "é", "\ud800 \udc00 a", "", b"", b"\xff", (), [], {}, set(), frozenset()),
    *({1, "a", (2, b"x")}, frozenset({frozenset({1})}), {(1, None, True): [1], b"x": 2, 1.5: 3, False: 4}),
    *(collections.deque([1, 2], 2), collections.deque(maxlen=0), np.float32(2.5), np.uint8(7)),
]


@pytest.mark.parametrize("value", EACH_KIND, ids=[f"{n} {type(one).__name__}" for n, one in enumerate(EACH_KIND)])
def test_each_kind_of_value_comes_back(tmp_path: Path, value: Any) -> None:
    assert alike(data_of(back(saved(value, [value]), tmp_path)), (value, [value]))


def test_integers_are_plain_as_long_as_all_readers_have_their_digits(tmp_path: Path) -> None:
    saved(2**53, -(2**53), 2**53 + 1, -(2**53) - 1).save(tmp_path / "a.tape")
    told = r"[9007199254740992,-9007199254740992,{\"int\":\"0x20000000000001\"},{\"int\":\"-0x20000000000001\"}]"
    assert told.encode() in (tmp_path / "a.tape").read_bytes()


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


def test_what_a_region_had_met_comes_back(tmp_path: Path) -> None:
    counts = [{("a",): 1, ("b",): 2}, {("b",): 3}, {("b",): 3}, {("a",): 1}, {}]
    with record() as tape:
        for n in range(len(counts)):
            save_for_recompute(n, name=str(n))
    for (_, _, decision), met in zip(tape.decisions(), counts, strict=True):
        decision.counts = met

    assert [decision.counts for _, _, decision in back(tape, tmp_path).decisions()] == counts


def test_places_of_any_file_name_come_back_as_text(tmp_path: Path) -> None:
    code = compile("save_for_recompute(1)", os.fsdecode(b"\xff.py"), "exec")
    with record() as tape:
        exec(code, {"save_for_recompute": save_for_recompute})

    assert [decision.place for _, _, decision in back(tape, tmp_path).decisions()] == [("\ufffd.py", 1)]


def test_arrays_of_a_shape_that_is_not_known_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tapefile, "described", lambda leaf: ("int64", ("n", 2)))
    with pytest.raises(TapeError) as caught:
        saved(np.zeros(2)).save(tmp_path / "a.tape")
    assert said(caught.value, __file__) == [
        "layer 'moe', the unnamed slot, item [0]: a ndarray of the shape ['n', 2], cannot be kept in a file.",
        "  way out: save arrays of a known shape.",
    ]


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
    (at,) = data_of(back(saved(time.gmtime(0)), tmp_path))
    assert type(at).__name__ == "struct_time"
    assert (at.tm_year, at.tm_isdst, len(at)) == (1970, 0, 9)


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
    with record() as tape, pytest.raises(TapeError) as caught:
        tape.save(tmp_path / "a.tape")
    assert said(caught.value, __file__) == [
        "the tape is still being recorded.",
        "  way out: use it after the block of `with record()`.",
    ]

    tape.save(tmp_path / "a.tape")


# ------------------------------------------------------------------------------------- other readers, writers


def test_safetensors_reads_the_arrays(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    arrays = [np.arange(3, dtype="u1"), np.arange(8.0).reshape(2, 2, 2), np.zeros((0, 4), "i2"), np.array(True)]
    saved(*arrays).save(tmp_path / "a.tape")

    read = numpy.load_file(tmp_path / "a.tape")

    offsets = {name: (tmp_path / "a.tape").read_bytes().find(array.tobytes()) for name, array in read.items()}
    assert offsets[next(name for name in read if name[0] == "1")] % 8 == 0  # the wide ones first, so all are aligned
    assert sorted(name.split(" ", 1)[0] for name in read) == ["0", "1", "2", "3"]
    for name, array in read.items():
        assert name.endswith(f"layer 'moe', the unnamed slot, item [{name[0]}]")
        assert alike(array, arrays[int(name[0])])


def test_what_safetensors_has_no_word_for_is_kept_as_bytes(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    array = np.array([1 + 2j, 3 + 4j])
    saved(array).save(tmp_path / "a.tape")
    (read,) = numpy.load_file(tmp_path / "a.tape").values()
    assert (read.dtype, read.shape, read.tobytes()) == (np.uint8, (2, 16), array.tobytes())
    assert alike(data_of(Tape.load(tmp_path / "a.tape")), (array,))


def test_an_array_of_nothing_that_begins_where_another_does(tmp_path: Path) -> None:
    arrays = np.arange(3, dtype="i2"), np.zeros(0)
    assert alike(data_of(back(saved(*arrays), tmp_path)), arrays)


@pytest.mark.parametrize("group", [1, 30, 1000])
def test_arrays_are_checked_in_groups_of_any_size(tmp_path: Path, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tapefile, "_GROUP", group)
    arrays = tuple(np.arange(n, dtype="i2") for n in range(9))
    assert alike(data_of(back(saved(*arrays), tmp_path)), arrays)
    whole = bytearray((tmp_path / "a.tape").read_bytes())
    whole[-1] ^= 1
    (tmp_path / "a.tape").write_bytes(whole)
    with pytest.raises(TapeError, match="is damaged: the checksum differs"):
        Tape.load(tmp_path / "a.tape")


def test_a_head_is_short_and_can_be_read(tmp_path: Path) -> None:
    """By people, in their own letters; and without a space that nobody needs."""
    saved(np.zeros(2), "é").save(tmp_path / "a.tape")
    size, rest = np.split(np.fromfile(tmp_path / "a.tape", "u1"), [8])
    head = json.loads(rest[: size.view("<u8")[0]].tobytes())
    tape = head["__metadata__"]["tape"]
    assert "é" in tape
    assert "é".encode() in (tmp_path / "a.tape").read_bytes()
    assert tape == json.dumps(json.loads(tape), ensure_ascii=False, separators=(",", ":"))


def test_layers_and_values_as_deep_as_may_be(tmp_path: Path) -> None:
    def inside(depth: int) -> Any:
        return layer("deep", lambda: inside(depth - 1) if depth else save_for_recompute(7))

    assert data_of(back(saved(nested(31)), tmp_path)) == (nested(31),)
    with record() as tape:
        inside(31)
    with replay(back(tape, tmp_path)):
        assert inside(31) == (7,)
    assert parsed_json("[" * 256 + "]" * 256)


def test_memory_that_is_short_is_no_fault_of_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(array: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("roundpipe_core._backend.to_host", short)
    with pytest.raises(MemoryError):
        saved(np.zeros(2)).save(tmp_path / "a.tape")
    assert list(tmp_path.iterdir()) == []


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

    with pytest.raises(
        TapeError, match=": a safetensors file, but no tape: its metadata does not have roundpipe_tape\\."
    ):
        Tape.load(tmp_path / "model.safetensors")


# ---------------------------------------------------------------------------------------- what cannot be kept


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


class Hashable(np.ndarray):
    __hash__ = object.__hash__


@dataclasses.dataclass
class Hidden:
    _x: int


OBJECT = "save what it says as numbers, texts or arrays (of an enum, its .value) and make it again from those."
ARRAY = "save it as one of numbers, such as int32 or float32: of a key, its data."
PARTS = "save the parts that the recompute needs."
ENUM = f"{Colour.__module__}.Colour"


@pytest.mark.parametrize(
    ("value", "what", "better"),
    [
        (object(), "an object of type builtins.object, which only this process knows", OBJECT),
        (Colour.RED, f"an object of type {ENUM}, which only this process knows", OBJECT),
        (len, "an object of type builtins.builtin_function_or_method, which only this process knows", OBJECT),
        (np.array([None]), "an array of dtype object", ARRAY),
        (np.array(["a"]), "an array of dtype str32", ARRAY),
        (np.array([1], "M8[s]"), "an array of dtype datetime64[s]", ARRAY),
        (
            np.ma.masked_array([1, 2], [0, 1]),
            "an array whose values cannot be read: a masked array",
            "save its data and its mask.",
        ),
        (Hidden(1), "a Hidden with the field '_x', which no named tuple can have", "save its parts as a dict."),
        ({Colour.RED: 1}, f"an object of type {ENUM}, which only this process knows", OBJECT),
        ({1, np.int64}, "an object of type builtins.type, which only this process knows", OBJECT),
        (
            {np.zeros(1).view(Hashable)},
            "a set of arrays, which has no order",
            "save a list of them.",
        ),
        (nested(40), "containers nested deeper than 32", PARTS),
        (nested(31), "containers nested deeper than 32", PARTS),
    ],
)
def test_what_no_file_holds_is_named(tmp_path: Path, value: Any, what: str, better: str) -> None:
    tape = saved(1, {"x": value}, name="plan")

    with pytest.raises(TapeError) as caught:
        tape.save(tmp_path / "a.tape")

    headline, way_out = said(caught.value, __file__)
    assert re.fullmatch(
        rf"layer 'moe', slot 'plan'(, item \[1\]\['x'\]\S*)?: {re.escape(what)}, cannot be kept in a file\.", headline
    )
    assert way_out == f"  way out: {better}"
    assert list(tmp_path.iterdir()) == []


def test_layers_that_no_file_holds_are_named(tmp_path: Path) -> None:
    def inside(depth: int) -> Any:
        return layer(f"{depth}", lambda: inside(depth - 1) if depth else save_for_recompute(1))

    with record() as plain:
        layer("é", lambda: save_for_recompute(1))
    plain.save(tmp_path / "a.tape")
    with record() as label:
        layer("\ud800", lambda: save_for_recompute(1))
    with record() as name:
        layer("moe", lambda: save_for_recompute(1, name="\ud800"))
    with record() as deep:
        inside(40)
    labels = "/".join(str(depth) for depth in range(40, 7, -1))
    for tape, headline, way_out in [
        (label, "layer '\\ud800': the name '\\ud800', which is no Unicode text", "give it another name."),
        (
            name,
            "layer 'moe', slot '\\ud800': the name '\\ud800', which is no Unicode text",
            "give it another name.",
        ),
        (deep, f"layer '{labels}': layers nested deeper than 32", "record a part of the model."),
    ]:
        with pytest.raises(TapeError) as caught:
            tape.save(tmp_path / "a.tape")
        assert said(caught.value, __file__) == [f"{headline}, cannot be kept in a file.", f"  way out: {way_out}"]


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

    with pytest.raises(TapeError) as caught:
        tape.save(tmp_path / "a.tape")
    assert said(caught.value, __file__) == [
        "one layer makes too many decisions of too many names for a file.",
        "  way out: save in checkpointed layers, of which each has a few.",
    ]
    monkeypatch.setattr(_tapefile, "COUNTS_LIMIT", 50 * 51 // 2)
    tape.save(tmp_path / "a.tape")


def test_too_much_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TapeError) as caught:
        saved("x" * HEADER_LIMIT).save(tmp_path / "a.tape")
    headline, way_out = said(caught.value, __file__)
    assert re.fullmatch(
        rf"the tape's numbers, texts and structures need 83\d{{5}} bytes, where {HEADER_LIMIT} are allowed\.", headline
    )
    assert way_out == "  way out: save arrays, not lists of numbers."


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


LONG, NAMED = b"n" * 90, f"array {'n' * 80!r}"  # as much of a name as is told
HEADS = {
    "an empty file": (b"", "0 bytes are too few for any tape"),
    "no header": (b"\x08\0\0\0\0\0\0\0", "cut short: a header of 8 bytes in a file of 8"),
    "a huge header": (
        struct.pack("<Q", 2**64 - 1) + b"{}",
        "a header of 18446744073709551615 bytes, where 8388608 are allowed; not a tape, or a damaged one",
    ),
    "a header just too huge": (
        struct.pack("<Q", HEADER_LIMIT + 1) + b"{}",
        f"a header of {HEADER_LIMIT + 1} bytes, where 8388608 are allowed; not a tape, or a damaged one",
    ),
    "no JSON": (raw(b"pickle me"), "no safetensors file: its header does not begin with a brace"),
    "a list": (raw(b"[]"), "no safetensors file: its header does not begin with a brace"),
    "not UTF-8": (raw(b'{"\xff\xfe":1}'), "the header is not UTF-8 at byte 2"),
    "half a surrogate pair": (
        raw(b'{"__metadata__":{"a":"\\ud800"}}'),
        "JSON with half a surrogate pair, which is no text",
    ),
    "two keys": (raw(b'{"a":1,"b":2,"a":3}'), "JSON that has the key 'a' twice"),
    "deep nesting": (raw(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "JSON nested deeper than 256"),
    "deep nesting that never ends": (raw(b'{"a":' + b'{"a":' * 100_000 + b"}"), "JSON nested deeper than 256"),
    "a text that never ends": (raw(b'{"' + b'\\"' * 500_000 + b"}"), "JSON that does not parse: …"),
    "NaN": (raw(b'{"__metadata__":{},"a":NaN}'), "JSON with NaN"),
    "infinity by digits": (raw(b'{"a":1e999}'), "JSON with the number 1e999"),
    "too many digits": (raw(b'{"a":' + b"9" * 100_000 + b"}"), "JSON with a number that is none: …"),
    "other padding": (raw(b'{"a":1}', pad="\n") + b"", "the header does not end with a brace"),
    "metadata that is a number": (raw({"__metadata__": 3}), "the metadata is no mapping"),
    "metadata of numbers": (raw({"__metadata__": {"a": 3}}), "metadata that is no text"),
    "an unknown dtype": (raw({"a": entry(0, 4, "I4")}, b"1234"), "array 'a' has the unknown dtype 'I4'"),
    "a dtype that is a list": (raw({"a": entry(0, 4, ["U8"])}, b"1234"), "array 'a' has the unknown dtype \"['U8']\""),
    "a field too many": (
        raw({"a": entry(0, 4) | {"x": 1}}, b"1234"),
        "array 'a' has the fields data_offsets, dtype, shape, x",
    ),
    "an array that is a list": (raw({"a": [1]}, b"1234"), "array 'a' is no mapping"),
    "a negative size": (raw({"a": entry(0, 4, shape=[-4])}, b"1234"), "array 'a' has a shape that is none"),
    "two negative sizes": (raw({"a": entry(0, 4, shape=[-2, -2])}, b"1234"), "array 'a' has a shape that is none"),
    "a size that is a float": (raw({"a": entry(0, 4, shape=[4.0])}, b"1234"), "array 'a' has a shape that is none"),
    "a size that is a truth": (raw({"a": entry(0, 1, shape=[True])}, b"1"), "array 'a' has a shape that is none"),
    "a huge shape": (raw({"a": entry(0, 4, shape=[2**62, 2**62])}, b"1234"), "array 'a' has a shape beyond all memory"),
    "a huge shape of nothing": (
        raw({"a": entry(0, 0, shape=[0, 2**62, 2**62])}),
        "array 'a' has a shape beyond all memory",
    ),
    "a product that wraps": (raw({"a": entry(0, 0, shape=[2**32, 2**32])}), "array 'a' has a shape beyond all memory"),
    "65 axes": (raw({"a": entry(0, 1, shape=[1] * 65)}, b"1"), "array 'a' has a shape that is none"),
    "wrong length": (raw({"a": entry(0, 3, shape=[4])}, b"123"), "array 'a' needs 4 bytes and has 3"),
    "offsets turned round": (raw({"a": entry(4, 0, shape=[0])}, b"1234"), "array 'a' has offsets that are none"),
    "negative offsets": (raw({"a": entry(-4, 0, shape=[4])}, b"1234"), "array 'a' has offsets that are none"),
    "offsets beyond the file": (raw({"a": entry(0, 2**40)}, b"1234"), "cut short: 4 of 1099511627776 bytes of data"),
    "overlap": (raw({"a": entry(0, 4), "b": entry(2, 6)}, b"123456"), "array 'b' overlaps the array before it"),
    "a hole": (raw({"a": entry(0, 2), "b": entry(4, 6)}, b"123456"), "array 'b' leaves a hole before it"),
    "a hole at the start": (raw({"a": entry(2, 6)}, b"123456"), "array 'a' leaves a hole before it"),
    "a long key twice": (raw(b'{"%s":1,"%s":2}' % (LONG, LONG)), f"JSON that has the key {'n' * 80!r} twice"),
    "a long number": (raw(b'{"a":1%s.0}' % (b"0" * 400)), f"JSON with the number 1{'0' * 39}"),
    "a long dtype": (raw({LONG.decode(): entry(0, 1, "m" * 99)}, b"1"), f"{NAMED} has the unknown dtype {'m' * 40!r}"),
    "long fields": (
        raw({LONG.decode(): entry(0, 1) | {"x" * 300: 1}}, b"1"),
        f"{NAMED} has the fields data_offsets, dtype, shape, {'x' * 172}",
    ),
    "a long name that overlaps": (
        raw({"a": entry(0, 4), LONG.decode(): entry(2, 6)}, b"123456"),
        f"{NAMED} overlaps the array before it",
    ),
    "wrong length, later": (
        raw({"a": entry(0, 2), "b": entry(2, 5, shape=[4])}, b"12345"),
        "array 'b' needs 4 bytes and has 3",
    ),
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
    assert_told(caught.value, path, fault)


def assert_told(error: BaseException, path: Path, fault: str) -> None:
    """`fault` ends in … where Python goes on in its own words."""
    headline, way_out = said(error, __file__)
    wanted, dots, _ = f"{path} is not a tape that can be read: {fault}".partition("…")
    assert headline.startswith(wanted) if dots else headline == f"{wanted}."
    assert way_out == "  way out: " + (
        "read it with the release of this library that wrote it, or write it again with this one."
        if fault.startswith("version")
        else "write it again with Tape.save; if it was copied, copy it again."
    )
    assert len(headline) < 900


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
    "another version": (forged(region(), roundpipe_tape="2"), "version '2' of the format, where '1' is known here"),
    "a long version": (
        forged(region(), roundpipe_tape="2" * 50),
        f"version {'2' * 40!r} of the format, where '1' is known here",
    ),
    "a long label": (
        forged(region(label="n" * 90, decisions=[decision(1), decision(2)])),
        f"layer {'n' * 80!r} has a decision twice",
    ),
    "a long array": (
        forged(region(), [listed(b"1234", name="n" * 90, dtype="m" * 50)], b"1234", TABLE),
        f"{NAMED}, {'m' * 40}, which the file does not have",
    ),
    "a long array of another dtype": (
        forged(region(), [listed(b"1", name="n" * 90, dtype="int8", shape=[1])], b"1", {"n" * 90: entry(0, 1)}),
        f"{NAMED} is another than the tape says",
    ),
    "a long array that is damaged": (
        forged(region(), [listed(b"2", name="n" * 90, shape=[1])], b"1", {"n" * 90: entry(0, 1)}),
        f"{NAMED} is damaged: the checksum differs",
    ),
    "no texts": (raw({"__metadata__": {"roundpipe_tape": "1"}}), "its JSON is damaged: the checksum differs"),
    "a text alone": (
        raw({"__metadata__": {"roundpipe_tape": "1", "crc32": "00000000"}}),
        "JSON that does not parse: …",
    ),
    "an array that is no object": (
        forged(region(), [1]),
        "an array that does not have just name, dtype, shape, origin, crc32",
    ),
    "a decision that is no object": (
        forged(region(decisions=[1])),
        "a decision that does not have just scope, name, place, below, axes, met, data",
    ),
    "a wrong checksum": (forged(region(), crc32="00000000"), "its JSON is damaged: the checksum differs"),
    "no root": (forged(None), "the tape whose root is of another kind"),
    "a region without rows": (
        forged({"label": "a"}),
        "a layer that does not have just label, given, scope, rows, decisions, regions",
    ),
    "given as a number": (forged(region(given=1)), "a layer whose given is of another kind"),
    "rows below zero": (forged(region(rows=[-1])), "a layer with rows that are none"),
    "a scope of numbers": (forged(region(scope=[1])), "a scope that is none"),
    "a decision twice": (forged(region(decisions=[decision(1), decision(2)])), "layer 'a' has a decision twice"),
    "a negative range": (forged(region(decisions=[decision(1, below=-1)])), "a decision with a range that is none"),
    "a NaN range": (forged(region(decisions=[decision(1, below=1.5)])), "a decision with a range that is none"),
    "a place that is none": (
        forged(region(decisions=[decision(1, place=["a", "b"])])),
        "a decision with a place that is none",
    ),
    "axes for nobody": (forged(region(decisions=[decision(1, axes=[0, 0])])), "a decision with axes that are none"),
    "axes of a number": (forged(region(decisions=[decision(1, axes=[1])])), "a decision with axes that are none"),
    "axes below zero": (forged(region(decisions=[decision(1, axes=[-1])])), "a decision with axes that are none"),
    "texts that were met": (
        forged(region(decisions=[decision(1, met={"dict": [["a", 1]]})])),
        "a decision that met what is none",
    ),
    "an unknown kind": (forged(holding({"eval": "1"})), "a value of the unknown kind 'eval'"),
    "two kinds at once": (forged(holding({"tuple": [], "list": []})), "a value of the unknown kind 'tuple, list'"),
    "a long kind": (forged(holding({"k" * 90: 1, "a": 2})), f"a value of the unknown kind {'k' * 80!r}"),
    "an array of a long number": (forged(holding({"array": "n" * 200})), f"array '{'n' * 113}"),
    "a value one too deep": (forged(holding(lists_nested(33))), "containers nested deeper than 32"),
    "a region one too deep": (forged(regions_nested(33)), "layers nested deeper than 32"),
    "an empty kind": (forged(holding({})), "a value of the unknown kind ''"),
    "a field of dunders": (
        forged(holding({"named": "A", "fields": ["__class__"], "values": [1]})),
        "a named tuple with a field that cannot be one, among ['__class__']",
    ),
    "a field that is code": (
        forged(holding({"named": "A", "fields": ["a=print(1)"], "values": [1]})),
        "a named tuple with a field that cannot be one, among ['a=print(1)']",
    ),
    "a field that is a keyword": (
        forged(holding({"named": "A", "fields": ["lambda"], "values": [1]})),
        "a named tuple with a field that cannot be one, among ['lambda']",
    ),
    "fields that Python takes for one": (
        forged(holding({"named": "A", "fields": ["ﬁ", "fi"], "values": [1, 2]})),
        "a named tuple with a field that cannot be one, among ['ﬁ', 'fi']",
    ),
    "a field twice": (
        forged(holding({"named": "A", "fields": ["a", "a"], "values": [1, 2]})),
        "a named tuple whose fields are not those of its values",
    ),
    "a field too few": (
        forged(holding({"named": "A", "fields": ["a"], "values": [1, 2]})),
        "a named tuple whose fields are not those of its values",
    ),
    "too many fields": (
        forged(holding({"named": "A", "fields": [f"a{n}" for n in range(1001)], "values": []})),
        "a named tuple without a name, or with too many fields",
    ),
    "too many kinds": (
        forged(holding([{"named": f"A{n}", "fields": [], "values": []} for n in range(1001)])),
        "more than 1000 kinds of named tuples",
    ),
    "a dict of unhashables": (
        forged(holding({"dict": [[[1], 2]]})),
        "a dict with a key that it has already, or that is none",
    ),
    "a dict with a key twice": (
        forged(holding({"dict": [[1, 2], [True, 3]]})),
        "a dict with a key that it has already, or that is none",
    ),
    "a set of lists": (forged(holding({"set": [[1]]})), "a set of what no set holds"),
    "a set with one twice": (forged(holding({"set": [1, 1]})), "a set that holds a value twice"),
    "a deque too long": (forged(holding({"deque": [1, 2], "maxlen": 1})), "a deque with a wrong maxlen"),
    "an integer of letters": (forged(holding({"int": "0xzz"})), "an integer that is none"),
    "an integer in decimals": (forged(holding({"int": "9" * 9999})), "an integer that is none"),
    "a float of code": (forged(holding({"float": "__import__('os')"})), "a float that is none"),
    "a complex of three parts": (forged(holding({"complex": [1.0, 2.0, 3.0]})), "a complex number that is none"),
    "a tuple without parts": (forged(holding({"tuple": 3})), "a container without a list of its parts"),
    "a dict without pairs": (forged(holding({"dict": [[1, 2, 3]]})), "a dict without pairs"),
    "a tape that is no text": (half_letters(), "JSON with half a surrogate pair, which is no text"),
    "a complex of texts": (forged(holding({"complex": ["a", "b"]})), "a complex number that is none"),
    "bytes that are none": (forged(holding({"bytes": "????"})), "bytes that are not in base64"),
    "a text that is none": (forged(holding({"str": "zz"})), "a text that is none"),
    "a scalar of objects": (
        forged(holding({"scalar": "object", "bytes": "AAAAAAAAAAA="})),
        "a number of numpy that is none",
    ),
    "a scalar cut short": (forged(holding({"scalar": "int64", "bytes": "AAAA"})), "a number of numpy that is none"),
    "deep regions": (forged(regions_nested(40)), "layers nested deeper than 32"),
    "deep values": (forged(holding(lists_nested(40))), "containers nested deeper than 32"),
    "counts without end": (forged(counting(2000, 2000)), "decisions that count more than 1000000 times what they met"),
    "an array that is not there": (forged(holding({"array": 0})), "array 0 where array 0 of 0 is due"),
    "an array that is not listed": (
        forged(region(), [], b"1234", TABLE),
        "its arrays are not those that the tape lists",
    ),
    "an array that is not used": (
        forged(region(), [listed(b"1234")], b"1234", TABLE),
        "1 arrays, of which the tape uses 0",
    ),
    "an array used twice": (
        forged(holding([{"array": 0}, {"array": 0}]), [listed(b"1234")], b"1234", TABLE),
        "array 0 where array 1 of 1 is due",
    ),
    "an array listed twice": (
        forged(holding([{"array": 0}, {"array": 1}]), [listed(b"1234")] * 2, b"1234", TABLE),
        "its arrays are not those that the tape lists",
    ),
    "an array of another dtype": (
        forged(holding({"array": 0}), [listed(b"1234", dtype="int8")], b"1234", TABLE),
        "array 'x' is another than the tape says",
    ),
    "an array of objects": (
        forged(holding({"array": 0}), [listed(b"1234", dtype="object")], b"1234", TABLE),
        "array 'x', object, which the file does not have",
    ),
    "an array of another shape": (
        forged(holding({"array": 0}), [listed(b"1234", shape=[2, 2])], b"1234", TABLE),
        "array 'x' is another than the tape says",
    ),
    "an array with a shape of truths": (
        forged(holding({"array": 0}), [listed(b"1", shape=[True])], b"1", {"x": entry(0, 1)}),
        "array 'x' is another than the tape says",
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

    assert_told(caught.value, path, fault)


def test_a_forged_file_can_be_right(tmp_path: Path) -> None:
    """Or the tests above would see another fault than theirs."""
    path = tmp_path / "a.tape"
    path.write_bytes(forged(holding({"tuple": [{"array": 0}]}), [listed(b"1234")], b"1234", TABLE))

    assert Tape.load(path).entries()[0].value.tolist() == [49, 50, 51, 52]
    path.write_bytes(forged(holding({"named": "a b", "fields": ["x"], "values": [1]})))
    (decided,) = Tape.load(path).root.decisions
    assert (decided.spec.kind.__name__, decided.spec.kind._fields, decided.leaves) == ("Named", ("x",), [1])
    axes = [decision({"array": 0}, axes=[1])]
    path.write_bytes(forged(region(decisions=axes), [listed(b"1234")], b"1234", TABLE))
    assert Tape.load(path).root.decisions[0].axes == (1,)
    path.write_bytes(forged(region(scope=["s"], rows=[0, 3], decisions=[decision([1], below=1, axes=[0])])))
    root = Tape.load(path).root
    path.write_bytes(forged(regions_nested(32)))
    assert repr(Tape.load(path)) == "<Tape of 32 regions, 0 decisions, 0 bytes>"
    path.write_bytes(forged(holding(lists_nested(32))))
    assert len(Tape.load(path).entries()) == 1
    assert (root.scope, root.rows, root.decisions[0].below, root.decisions[0].axes) == (("s",), {0, 3}, 1, (0,))
    path.write_bytes(
        forged(holding({"array": 0}), [listed(b"1", shape=[1] * 64)], b"1", {"x": entry(0, 1, shape=[1] * 64)})
    )
    assert Tape.load(path).entries()[0].shape == (1,) * 64


# ------------------------------------------------------------------------------------- paths, crashes, modes


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_bytes(b"")
    os.mknod(tmp_path / "socket", stat.S_IFSOCK | 0o600)
    before = files_open()
    for path, function, kind in [
        (tmp_path, Tape.load, "a folder"),
        (tmp_path / "pipe", Tape.load, "a pipe"),  # without a writer it would wait for ever
        (Path("/dev/zero"), Tape.load, "a device"),
        (tmp_path, saved(1).save, "a folder"),
        (tmp_path / "pipe", saved(1).save, "a pipe"),
        (tmp_path / "socket", saved(1).save, "a socket"),
    ]:
        with pytest.raises(TapeError) as caught:
            function(path)
        assert said(caught.value, __file__) == [
            f"{path}: {kind}, not a file.",
            "  way out: give the path of a regular file.",
        ]
    assert files_open() == before
    (tmp_path / "socket").unlink()
    for function in (Tape.load, saved(1).save):
        with pytest.raises(OSError, match="loop"):
            function(tmp_path / "loop")
        with pytest.raises(NotADirectoryError):
            function(tmp_path / "file" / "a.tape")
        for path in (tmp_path / "nowhere" / "a.tape", ""):
            with pytest.raises(FileNotFoundError) as missing:
                function(path)
            assert missing.value.filename == (path and str(path))
    with pytest.raises(IsADirectoryError):
        saved(1).save(f"{tmp_path}/new/")
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "loop", "file"}


def files_open() -> set[str]:
    return set(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else set()


def test_a_path_may_be_bytes(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path / "a.tape")
    saved(1).save(path)
    assert data_of(Tape.load(path)) == (1,)


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
    if os.geteuid() == 0:  # who may give files away
        os.chown(path, 1234, 2345)
    before = path.stat()

    saved(2).save(path)

    after = path.stat()
    assert (stat.S_IMODE(after.st_mode), after.st_uid, after.st_gid) == (0o604, before.st_uid, before.st_gid)


def test_all_is_on_the_disk_before_it_takes_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "a.tape", []
    saved(1).save(path)
    old, sync = path.read_bytes(), os.fsync

    def note(descriptor: int) -> None:
        names = {name for name in os.listdir(tmp_path) if name != "a.tape"}
        seen.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), path.read_bytes() == old, names))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    saved(2).save(path)

    (folder, is_old, (temporary,)), last = seen
    assert (folder, is_old) == (False, True)
    assert re.fullmatch(r"\.tape-[0-9a-f]{16}\.tmp", temporary)
    assert last == (True, False, set())  # and the folder, which has the new name


def test_a_protected_file_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tape"
    saved(1).save(path)
    path.chmod(0o400)
    if os.geteuid() == 0:  # who may write anything
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)

    with pytest.raises(PermissionError, match=r"\] the file may not be written: "):
        saved(2).save(path)
    assert data_of(Tape.load(path)) == (1,)
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tape"
    saved(1).save(path)
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, full)
        with pytest.raises(OSError, match="No space left") as caught:
            saved(np.arange(99)).save(path)
        assert (caught.value.filename, caught.value.filename2) == (str(path), None)  # no other file is the user's
        monkeypatch.undo()
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


def test_a_program_that_ends_saves_and_loads(tmp_path: Path) -> None:
    lines = [
        "import atexit",
        "from roundpipe_core import Tape",
        "tape, path = Tape.from_routing([[[3, 1], [0, 2]]], experts=4), 'a.tape'",
        "atexit.register(lambda: print(Tape.load(path)))",
        "atexit.register(lambda: tape.save(path))",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("<Tape of 2 regions, 2 decisions, 4 bytes>\n", "")


@pytest.mark.parametrize("threads", [0, 1, 9])
def test_a_tape_needs_no_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(_tapefile, "_GROUP", 1)
    start, left = threading.Thread.start, [None] * threads

    def short_of_threads(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", short_of_threads)
    arrays = tuple(np.arange(n) for n in range(9))
    assert alike(data_of(back(saved(*arrays), tmp_path)), arrays)


def test_of_several_faults_the_first_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tapefile, "_GROUP", 1)
    path = tmp_path / "a.tape"
    saved(*(np.full(1, n) for n in range(1, 30))).save(path)
    whole = bytearray(path.read_bytes())
    for n in 11, 3, 7:
        whole[-8 * n] ^= 1
    path.write_bytes(whole)
    for _ in range(9):
        with pytest.raises(TapeError, match=r"array \"18 .* is damaged"):
            Tape.load(path)


def test_who_interrupts_a_load_waits_for_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tapefile, "_GROUP", 1)
    path = tmp_path / "a.tape"
    saved(*(np.full(1, n) for n in range(9))).save(path)
    main, read = threading.current_thread(), _tapefile.read_at

    def interrupted(*given: Any) -> memoryview:
        if threading.current_thread() is main:
            raise KeyboardInterrupt
        time.sleep(0.01)
        return read(*given)

    monkeypatch.setattr(_tapefile, "read_at", interrupted)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        Tape.load(path)
    assert threading.active_count() == before


def test_many_saves_and_loads_leave_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "a.tape"
    tape = example()
    tape.save(path)
    before = files_open()
    for _ in range(5):
        tape.save(path)
        Tape.load(path)
        path.with_suffix(".bad").write_bytes(path.read_bytes()[:-1])
        with pytest.raises(TapeError):
            Tape.load(path.with_suffix(".bad"))

    assert files_open() == before
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

    def cut(file: FileIO, size: int) -> Any:
        header = whole(file, size)
        os.truncate(path, path.stat().st_size - 1)
        return header

    monkeypatch.setattr(_tapefile, "read_header", cut)
    with pytest.raises(TapeError, match=r": it became shorter while it was read\."):
        Tape.load(path, mmap=mmap)


def test_a_mapped_tape_is_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tape"
    data = (np.arange(1 << 20), np.arange(5, dtype="i2"), np.zeros((0, 2)), "text", np.float32(2))
    saved(*data).save(path)

    tracemalloc.start()
    try:
        tape = Tape.load(path, mmap=True)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22  # of 8 MiB
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

    (tmp_path / "in parts").write_bytes(b"0123456789")
    with Slow(tmp_path / "in parts") as file:
        assert read_exactly(file, 10) == b"0123456789"
        file.seek(1)
        assert read_exactly(file, 99) == b"123456789"
        assert read_exactly(file, 5) == b""
        file.seek(2)
        assert read_exactly(file, 7) == b"2345678"


@pytest.mark.parametrize("system", ["posix", "windows"])
def test_writing_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    class Slow(FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:3])

    write = os.writev
    if system == "windows":
        monkeypatch.delattr(os, "writev")
    else:
        monkeypatch.setattr(os, "writev", lambda file, parts: write(file, [b"".join(parts)[:3]]))
    with Slow(tmp_path / "in parts", "wb") as file:
        write_all(file, [b"01", b"", memoryview(b"23").cast("H"), b"456789ab", b""])
        write_all(file, [])
    assert (tmp_path / "in parts").read_bytes() == b"0123456789ab"


@pytest.mark.skipif(not hasattr(os, "writev"), reason="this system takes one piece at a time")
def test_many_arrays_are_written_in_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = tuple(np.full(n % 3, n) for n in range(1500))
    steps, write = [], os.writev
    monkeypatch.setattr(os, "writev", lambda file, parts: steps.append(1) or write(file, parts))
    assert alike(data_of(back(saved(*arrays), tmp_path)), arrays)
    assert len(steps) == 4  # three with as many as a system takes, and the head


@pytest.mark.parametrize("system", ["posix", "windows"])
def test_reading_from_a_place_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    (tmp_path / "whole").write_bytes(b"0123456789")
    give = os.pread
    if system == "windows":
        monkeypatch.delattr(os, "pread")
    else:
        monkeypatch.setattr(os, "pread", lambda file, size, begin: give(file, min(size, 3), begin))
    with FileIO(tmp_path / "whole") as file:
        for begin, size, read in (2, 7, b"2345678"), (6, 7, b"6789"), (10, 1, b""), (3, 0, b""):
            found = read_at(file, begin, size)
            assert (bytes(found), found.readonly) == (read, True)


def test_arrays_that_another_program_put_at_odd_places(tmp_path: Path) -> None:
    """They lie within the boundaries of memory all the same."""
    arrays = np.arange(3, dtype="i1"), np.arange(5.0), np.arange(2) + 1j, np.zeros((0, 3)), np.arange(7, dtype="i2")
    saved(*arrays).save(tmp_path / "a.tape")
    whole = (tmp_path / "a.tape").read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    header, data, moved = json.loads(whole[8:begin]), whole[begin:], b""
    texts = header.pop("__metadata__")
    for name in sorted(header):  # the three bytes come first
        first, last = header[name]["data_offsets"]
        header[name]["data_offsets"] = [len(moved), len(moved) + last - first]
        moved += data[first:last]
    (tmp_path / "a.tape").write_bytes(raw({"__metadata__": texts, **header}, moved))
    for mmap in False, True:
        found = tuple(entry.value for entry in Tape.load(tmp_path / "a.tape", mmap=mmap).entries())
        assert alike(found, arrays)
        assert [(array.flags.aligned, array.flags.writeable) for array in found] == [(True, False)] * 5


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
