"""Arrays as the core sees them: those of numpy, and the bytes of a tape that belong to no framework (R6, R12, R13)."""

from __future__ import annotations

import importlib
import math
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roundpipe_core import (
    Flip,
    GradientError,
    Tape,
    TapeError,
    VerifyError,
    VerifyWarning,
    get_recompute_data,
    recompute_once,
    record,
    replay,
    save_for_recompute,
)
from roundpipe_core._backend import NoValuesError, backend_of, numpys, to_host
from roundpipe_core._host import HostArray, itemsize_of, kind_of
from roundpipe_core._phase import Phase, Run, thread
from roundpipe_core._slots import Slot
from roundpipe_core._tape import integer_extremes
from tests.said import said


def run(phase: Phase, slot: Slot, function) -> Run:
    before = thread.run
    thread.run = Run(phase, slot)
    try:
        function()
        return thread.run
    finally:
        thread.run = before


def flips(then: Any, now: Any) -> list[Flip]:
    """What an audit finds where a layer saved `then` and would save `now`."""
    slot = Slot("layer")
    run(Phase.FORWARD, slot, lambda: save_for_recompute(then))
    return run(Phase.AUDIT, slot, lambda: save_for_recompute(now)).flips


def host(values: Any, dtype: str = "int32", origin: str = "routing") -> HostArray:
    array = np.asarray(values, dtype)
    return HostArray(dtype, array.shape, memoryview(array.tobytes()), origin)


class Opaque:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("cannot be compared")

    __hash__ = object.__hash__


ROWS = np.arange(6).reshape(3, 2)


@pytest.mark.parametrize(
    ("then", "now", "found"),
    [
        (ROWS, ROWS.copy(), None),
        (ROWS, np.array([[0, 1], [2, 9], [9, 9]]), (2, 3, 1)),
        (ROWS, ROWS[:2], (3, 3, 0)),
        (ROWS, ROWS.astype("int32"), (3, 3, 0)),
        (np.ones(()), np.ones(()), None),
        (np.ones(()), np.zeros(()), (1, 1, 0)),
        (np.array([1, math.nan]), np.array([1, math.nan]), None),
        (np.array([1, math.nan]), np.array([1, 2.0]), (1, 2, 1)),
        (np.array([1, 2.0]), np.array([math.nan, 2.0]), (1, 2, 0)),
        (ROWS, [0, 1], (1, 1, 0)),
        (host([[0, 1], [2, 3]]), host([[0, 1], [2, 3]]), None),
        (host([[0, 1], [2, 3], [4, 5]]), host([[0, 1], [2, 9], [9, 5]]), (2, 3, 1)),
        (host([1, 2, 3]), host([1, 2]), (3, 3, 0)),
        (host([1, 2]), host([1, 2], "int64"), (2, 2, 0)),
        (host(1), host(2), (1, 1, 0)),
        (3, 3, None),
        (3, 4, (1, 1, 0)),
        (1, True, (1, 1, 0)),
        (1, 1.0, (1, 1, 0)),
        ("left right", " ".join(["left", "right"]), None),
        (math.nan, math.nan, None),
        (math.nan, 3.0, (1, 1, 0)),
        (3.0, math.nan, (1, 1, 0)),
        (Opaque(), Opaque(), None),
        (Opaque(), 3, (1, 1, 0)),
    ],
)
def test_an_audit_counts_the_rows_that_differ(then: Any, now: Any, found: tuple[int, int, int] | None) -> None:
    what = "the unnamed slot, item [0]" if not isinstance(now, list) else "the unnamed slot: 1 values, now 2"
    assert flips(then, now) == ([] if found is None else [Flip("layer", what, *found)])


def test_memory_that_is_short_is_no_answer_of_an_object() -> None:
    class Dear:
        def __eq__(self, other: object) -> bool:
            raise MemoryError

        __hash__ = object.__hash__

    with pytest.raises(MemoryError):
        flips(Dear(), Dear())


def test_all_that_an_audit_finds_is_kept() -> None:
    slot, draw = Slot("layer"), iter(range(9))

    def layer() -> None:
        save_for_recompute(next(draw), name="a")
        recompute_once(lambda: next(draw))
        recompute_once(lambda: next(draw))

    run(Phase.FORWARD, slot, layer)
    found = run(Phase.AUDIT, slot, layer).flips
    assert len(found) == 3
    assert VerifyError("text", tuple(found)).flips == tuple(found)
    assert VerifyWarning("text", tuple(found)).flips == tuple(found)
    assert VerifyError("text").flips == ()


def test_an_audit_of_recompute_once_runs_the_function_again() -> None:
    slot, plans = Slot("layer"), [np.array([1, 2]), np.array([1, 3]), np.array([1, 3])]
    plan = iter(plans)

    def layer() -> None:
        seen.append(recompute_once(lambda: next(plan)).tolist())

    seen: list[Any] = []
    run(Phase.FORWARD, slot, layer)
    found = run(Phase.AUDIT, slot, layer).flips
    run(Phase.RECOMPUTE, slot, layer)

    assert seen == [[1, 2], [1, 3], [1, 2]]
    (flip,) = found
    assert (flip.rows, flip.total, flip.first) == (1, 2, 1)
    assert flip.item.startswith("slot 'recompute_once(")
    assert str(flip) == f"layer 'layer', {flip.item}: 1 of 2 rows flipped, first row 1"


def test_host_arrays_are_bytes_of_a_known_dtype() -> None:
    array = host([[1, 2]])

    assert repr(array) == "HostArray(int32[1, 2])"
    assert array == host([[1, 2]])
    assert array != host([[1, 3]])
    assert array != host([1, 2])
    assert array != host([[1, 2]], "uint32")
    assert array != [[1, 2]]
    assert (array == [[1, 2]]) is False
    with pytest.raises(TypeError, match="unhashable"):
        hash(array)
    with pytest.raises(ValueError, match=r"^arrays of dtype str32 have no form outside of their framework$"):
        HostArray("str32", (1,), memoryview(b"abcd"), "numpy")
    with pytest.raises(ValueError, match=r"^int32\[2\] does not have 4 bytes$"):
        HostArray("int32", (2,), memoryview(b"abcd"), "numpy")


def test_kinds_of_dtypes() -> None:
    kinds = {"bool": "bool", "uint8": "integer", "bfloat16": "float", "complex64": "complex"}
    assert {dtype: kind_of(dtype) for dtype in kinds} == kinds
    assert [kind_of("float4_e2m1fn"), kind_of("complex32"), kind_of("str32")] == ["float", "complex", "str32"]
    assert [itemsize_of(dtype) for dtype in ("bool", "int16", "float8_e5m2", "complex128")] == [1, 2, 1, 16]


def test_what_is_no_array_has_no_bytes() -> None:
    with pytest.raises(TypeError, match=r"^list is no array$"):
        to_host([1])
    with pytest.raises(TypeError, match=r"^arrays of dtype object have no form outside of their framework$"):
        to_host(np.array([None]))
    with pytest.raises(TypeError, match=r"^a masked array; save its data and its mask$"):
        to_host(np.ma.masked_array([1], [1]))


@pytest.mark.parametrize("array", [ROWS.T, ROWS[::-1], ROWS.astype(">i4"), np.array(7), np.zeros((0, 2))])
def test_the_bytes_are_row_major_and_little_endian(array: Any) -> None:
    made = to_host(array)
    assert made.shape == array.shape
    assert bytes(made.data) == array.astype(array.dtype.newbyteorder("<")).tobytes("C")


@pytest.mark.parametrize("numpys", [True, False])
def test_extremes_with_numpy_and_without(numpys: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [host([3, -1, 2]), host([[250]], "uint8"), host([], "int16")]
    if not numpys:
        monkeypatch.delitem(sys.modules, "numpy")
    found = [integer_extremes(array) for array in arrays]
    assert found == [(-1, 3), (250, 250), ()]
    assert [integer_extremes(value) for value in (4, True, 0.5, host([1.5], "float32"))] == [(4, 4), (), (), ()]


def test_layers_may_save_what_a_tape_holds() -> None:
    """A host array of a file is an array like others: counted, given back, and only to be replaced by its like."""
    array = host([[1, 2], [3, 4]])
    slot = Slot("layer")
    run(Phase.FORWARD, slot, lambda: save_for_recompute(array))
    back: list[Any] = []
    run(Phase.RECOMPUTE, slot, lambda: back.extend(save_for_recompute(array)))

    assert back == [array]
    assert slot.places() == {"cpu": 16}
    assert slot.nbytes() == 16
    with record() as tape:
        save_for_recompute(array)
    with pytest.raises(TapeError, match=r"item \[0\]: no layer saves host arrays\."), replay(tape):
        save_for_recompute(array)


def test_a_tape_of_numbers_for_another_framework_needs_to_be_told_which() -> None:
    """Where nothing but a read tells who asks, and no frontend or more than one is there."""
    tape = Tape.from_routing([[[0, 1]]], experts=2, regions=False)
    backends = importlib.import_module("roundpipe_core._backend")
    before = backends._frontends[:]
    backends._frontends.clear()
    try:
        with pytest.raises(TapeError) as caught, replay(tape):
            get_recompute_data()
        fault = "bytes for torch or JAX: save_for_recompute(data), with data of your own, tells which"
        assert f"item [0]: {fault}.\n" in str(caught.value)
    finally:
        backends._frontends[:] = before


class Toy(type(numpys)):  # type: ignore[misc]
    """A framework whose arrays are numpy's, with a container of its own."""

    name = "toy"

    class Array(np.ndarray):
        pass

    class Box:
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

    def owns(self, value: Any) -> bool:
        return isinstance(value, Toy.Array)

    def expand(self, value: Any) -> Any:
        return (value.parts, lambda parts: Toy.Box(*parts)) if isinstance(value, (Toy.Box, Toy.Array)) else None

    def adopt(self, array: Any, like: Any) -> Any:
        held = to_host(array)
        return np.frombuffer(held.data, held.dtype).reshape(held.shape).view(Toy.Array)

    def without_gradient(self, function: Any) -> Any:
        return function()


class Other(Toy):
    name = "other"

    def owns(self, value: Any) -> bool:
        return False

    def expand(self, value: Any) -> Any:
        return None


class Traced(Toy):
    """Its arrays have no values now."""

    def extremes(self, array: Any) -> None:
        return None

    def adopt(self, array: Any, like: Any) -> Any:
        raise NoValuesError


@pytest.fixture
def frontends(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    backends = importlib.import_module("roundpipe_core._backend")
    loaded: list[Any] = []
    monkeypatch.setattr(backends, "_frontends", loaded)
    monkeypatch.setattr(backends, "_by_type", {})
    return loaded


def test_each_frontend_opens_its_own_containers(frontends: list[Any]) -> None:
    frontends += [Other(), Toy()]
    array = np.arange(2).view(Toy.Array)
    with record() as tape:
        save_for_recompute(Toy.Box(array, 3))  # whose array is one leaf, though it has parts too
    assert [(entry.item, entry.dtype, entry.shape) for entry in tape.entries()] == [
        ("[0][0]", "int64", (2,)),
        ("[0][1]", "int", ()),
    ]
    with replay(tape):
        (box,) = save_for_recompute(Toy.Box(array, 4))
    assert type(box) is Toy.Box
    assert box.parts[0].tolist() == [0, 1]
    assert box.parts[1] == 3


@pytest.mark.parametrize("origin", ["toy", "routing"])
def test_bytes_go_to_the_framework_that_made_them_else_to_the_only_one(frontends: list[Any], origin: str) -> None:
    frontends += [Toy()] if origin == "routing" else [Other(), Toy()]
    with record() as tape:
        save_for_recompute(host([3, 4], origin=origin), "text")
    with replay(tape):
        array, text = get_recompute_data()
    assert type(array) is Toy.Array
    assert array.tolist() == [3, 4]
    assert text == "text"


@pytest.mark.parametrize("others", [[], [Other()]])
def test_a_read_outside_of_layers_gives_what_was_saved_to_its_own_framework(
    frontends: list[Any], others: list[Any]
) -> None:
    frontends += [Toy(), *others]
    own, plain = np.arange(2).view(Toy.Array), np.arange(3)
    with record() as tape:
        save_for_recompute(own, plain)
    with replay(tape):
        first, second = get_recompute_data()
    assert (type(first), type(second)) == (Toy.Array, np.ndarray)
    first += 1
    second += 1
    assert (own.tolist(), plain.tolist()) == ([0, 1], [0, 1, 2])
    assert [entry.value.tolist() for entry in tape.entries()] == [[0, 1], [0, 1, 2]]


def test_an_array_that_is_traced_stays_what_it_is(frontends: list[Any]) -> None:
    frontends.append(Traced())
    with record() as tape:
        save_for_recompute(np.arange(3))
    with replay(tape):
        (back,) = save_for_recompute(np.arange(3).view(Toy.Array))
    assert type(back) is np.ndarray


def test_what_an_adoption_says_is_told_in_one_line(frontends: list[Any]) -> None:
    class Refusing(Toy):
        error: Exception

        def adopt(self, array: Any, like: Any) -> Any:
            raise self.error

    frontends.append(Refusing())
    for error, told in [
        (
            ValueError("first\nsecond"),
            "the tape does not fit layer 'outside of layers', the unnamed slot, item [0]: first.",
        ),
        (TapeError("as it is"), "as it is"),
    ]:
        frontends[0].error = error
        with record() as tape:
            save_for_recompute(np.arange(3))
        with pytest.raises(TapeError) as caught, replay(tape):
            save_for_recompute(np.arange(3).view(Toy.Array))
        assert str(caught.value).splitlines()[0] == told


def test_a_range_that_cannot_be_seen_has_to_be_vouched_for(frontends: list[Any]) -> None:
    frontends.append(Traced())
    with record() as plain:
        save_for_recompute(np.arange(4))
    hidden = plain.mapped(lambda leaf: leaf.view(Toy.Array))
    with pytest.raises(TapeError) as caught:
        hidden.declare(below=4)
    lines = str(caught.value).splitlines()
    assert [lines.pop(1).partition(f": {__file__}:")[0] for _ in range(2)] == ["  saved at", "  called at"]
    assert lines == [
        "tape, outside of layers, the unnamed slot: whether all integers are below 4 cannot be seen while this is "
        "traced.",
        "  way out: say so where the tape has values, outside of what is traced: tape.declare(below=...).",
    ]
    with pytest.raises(TapeError, match="below 4 cannot be seen"), replay(hidden, below=4):
        pass
    vouched = plain.declare(below=4).mapped(lambda leaf: leaf.view(Toy.Array), checked=True)
    for below in (4, 5):
        with replay(vouched, below=below):
            get_recompute_data()
    with pytest.raises(TapeError, match="below 3 cannot be seen"), replay(vouched, below=3):
        pass
    with (
        pytest.raises(TapeError, match="below 4 cannot be seen"),
        replay(plain.mapped(lambda leaf: leaf.view(Toy.Array))),
    ):
        pass


def test_a_container_that_only_a_framework_knows_is_in_no_file(frontends: list[Any], tmp_path: Path) -> None:
    frontends.append(Toy())
    with record() as tape:
        save_for_recompute(Toy.Box(1, 2))
    with pytest.raises(TapeError) as caught:
        tape.save(tmp_path / "a.tape")
    assert said(caught.value, __file__) == [
        "outside of layers, the unnamed slot: a container of type Toy.Box, cannot be kept in a file.",
        "  way out: save its parts as a tuple or a dict.",
    ]


def test_gradient_is_refused_with_its_place(frontends: list[Any]) -> None:
    class Grown(Toy):
        def gradient_fault(self, array: Any) -> Any:
            return ("requires grad", "save its .detach().") if array.any() else None

    frontends.append(Grown())
    data = {"a": np.zeros(2).view(Toy.Array), "b": np.ones(2).view(Toy.Array)}
    with pytest.raises(GradientError) as caught:
        run(Phase.FORWARD, Slot("moe"), lambda: save_for_recompute(data, name="plan"))
    headline, place, way_out = str(caught.value).splitlines()
    assert headline == "layer 'moe', slot 'plan': data[0]['b'] requires grad; a slot would cut its gradient."
    assert place.startswith(f"  saved at: {__file__}:")
    assert way_out == "  way out: save its .detach()."


def test_values_are_found_again_after_numpy_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class met before numpy was imported may turn out to be an array's; one of Python's own never does."""
    backends = importlib.import_module("roundpipe_core._backend")
    monkeypatch.setattr(backends, "_by_type", {})
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "numpy")
        assert backend_of(ROWS) is None
        assert backend_of(3) is None
        assert [*backends._by_type] == [int]
    assert backend_of(ROWS) is backends.numpys


def test_values_that_another_width_cannot_hold() -> None:
    with record() as tape:
        save_for_recompute(np.array([1.5, 2.0]))
    with replay(tape):
        (back,) = save_for_recompute(np.zeros(2, "float16"))  # floats may be rounded
    assert back.dtype == np.float16
    assert struct.unpack("<2e", back.tobytes()) == (1.5, 2.0)


UNFIT = [
    (-1, "int8", "uint8"),
    (200, "uint8", "int8"),
    (-1, "int64", "uint64"),
    (2**63, "uint64", "int64"),
    (300, "int16", "int8"),
]
"""A value, the dtype that holds it, and one that does not."""


@pytest.mark.parametrize(("value", "held", "asked"), UNFIT)
def test_integers_of_another_sign_are_not_taken_for_their_bits(value: int, held: str, asked: str) -> None:
    """They come back from a cast there and back as they were."""
    with record() as tape:
        save_for_recompute(np.array([value], held))
    with pytest.raises(TapeError, match=rf"item \[0\]: values that {asked} cannot hold\."), replay(tape):
        save_for_recompute(np.zeros(1, asked))
    with replay(tape):
        assert save_for_recompute(np.zeros(1, held))[0].tolist() == [value]
