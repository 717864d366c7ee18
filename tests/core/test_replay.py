"""record and replay (R13), without any framework: what is saved outside of layers, and the errors."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roundpipe_core import (
    OptionError,
    PhaseError,
    SlotError,
    Tape,
    TapeError,
    _replay,
    doing_recompute,
    get_recompute_data,
    layer_scope,
    recompute_once,
    record,
    replay,
    save_for_recompute,
)
from roundpipe_core._phase import Run, open_slot, thread
from roundpipe_core._tape import portable
from tests.said import said


def region(function, *args, label=None):
    outer = thread.run
    phase, slot = open_slot(label or function)
    if slot.rows is not None:
        slot.line_up([np.shape(arg) for arg in args], None)
    thread.run = Run(phase, slot)
    try:
        return function(*args)
    finally:
        thread.run = outer


def pick(scores):
    (best,) = save_for_recompute(np.argmax(scores, -1))
    return best


def test_outside_of_layers_each_save_is_the_next() -> None:
    def plan(n):
        with layer_scope("plan"):
            (size,) = save_for_recompute(n, name="size")
        return size, recompute_once(lambda: n * 10)

    with record() as tape:
        assert [plan(1), plan(2)] == [(1, 10), (2, 20)]
    with replay(tape):
        assert [plan(8), plan(9)] == [(1, 10), (2, 20)]
    with replay(tape):
        assert doing_recompute()
        assert [plan(8), plan(9)] == [(1, 10), (2, 20)]
    assert not doing_recompute()


def test_get_takes_the_next_too() -> None:
    with record() as tape:
        save_for_recompute("a")
        save_for_recompute("b")
    with replay(tape):
        assert [get_recompute_data(), get_recompute_data()] == [("a",), ("b",)]


def test_what_is_replayed_may_be_changed() -> None:
    with record() as tape:
        save_for_recompute([1], np.zeros(2))
    for _ in range(2):
        with replay(tape):
            numbers, zeros = get_recompute_data()
            assert numbers == [1]
            assert not zeros.any()
            numbers.append(2)
            zeros += 1


def test_layers_called_otherwise_are_found_by_their_order() -> None:
    def attention(x):
        return region(lambda x: pick(x), x)

    def recorded(x):
        return [region(attention, x), region(pick, -x)]

    def attend(x):
        return region(lambda y: pick(y), x)

    def route(x):
        return pick(x)

    def replaying(x):
        return [region(attend, x), region(route, -x)]

    x = np.arange(6.0).reshape(2, 3)
    with record() as tape:
        decided = recorded(x)
    with replay(tape):
        again = replaying(x[:, ::-1])
    assert [list(row) for row in again] == [list(row) for row in decided]


def test_some_labels_alike_and_some_not() -> None:
    def moe(x):
        return pick(x)

    def attention(x):
        return pick(x)

    def attend(x):
        return pick(x)

    xs = [np.eye(4)[[n]] for n in range(4)]
    with record() as tape:
        for n, x in enumerate(xs):
            region(attention if n % 2 == 0 else moe, x)
    assert [entry.layer.rpartition(".")[2] for entry in tape.entries()] == ["attention", "moe"] * 2  # as they ran
    with replay(tape):
        again = [region(attend if n % 2 == 0 else moe, xs[0]) for n in range(4)]
    assert [int(row[0]) for row in again] == [0, 1, 2, 3]


def test_given_labels_must_agree_and_order_the_calls() -> None:
    xs = np.eye(3)
    with record() as tape:
        for n in range(3):
            region(pick, xs[[n]], label=f"block {n}")
    with replay(tape):
        assert [int(region(pick, xs[[0]], label=f"block {n}")[0]) for n in (2, 0, 1)] == [2, 0, 1]
    with pytest.raises(TapeError) as error, replay(tape):
        region(pick, xs[[0]], label="layer 0")
    assert said(error.value, __file__) == [
        "layer 'layer 0' runs where the tape has layer 'block 0'.",
        "  inside: 'outside of layers'",
        "  way out: label the layers alike in both models, or let neither be labelled: then their order counts.",
    ]


def test_a_layer_that_skips_an_inner_one_when_it_reads() -> None:
    def gate(x):
        return pick(x)

    def layer(x):
        if doing_recompute():
            (best,) = get_recompute_data("best")
        else:
            (best,) = save_for_recompute(region(gate, x), name="best")
        return best

    x = np.eye(3)
    with record() as tape:
        region(layer, x)
    with replay(tape):
        np.testing.assert_array_equal(region(layer, x[::-1]), [0, 1, 2])


STRUCTURE = "[0]['best']: another structure: the tape [0]['best'], [0]['n']"


class TestFit:
    @pytest.fixture
    def tape(self) -> Tape:
        with record() as tape:
            save_for_recompute({"best": np.array([[2], [0]]), "n": 3})
        return tape

    @pytest.mark.parametrize(
        ("data", "what"),
        [
            ({"best": np.zeros((2, 1), int), "m": 3}, f"{STRUCTURE}; the layer [0]['best'], [0]['m']"),
            ({"best": np.zeros((2, 1), int)}, f"{STRUCTURE}; the layer [0]['best']"),
            ((np.zeros((2, 1), int), 3), None),
            ({"best": np.zeros((3, 1), int), "n": 3}, "[0]['best']: shape [2, 1], where the layer decides [3, 1]"),
            ({"best": np.zeros((2, 1)), "n": 3}, "[0]['best']: int64, where the layer decides float64"),
            ({"best": np.zeros((2, 1), bool), "n": 3}, "[0]['best']: int64, where the layer decides bool"),
            ({"best": np.zeros((2, 1), int), "n": "3"}, "[0]['n']: int, where the layer decides str"),
        ],
    )
    def test_unfit_data(self, tape: Tape, data: object, what: str | None) -> None:
        if what is None:  # another container of the same parts
            with replay(tape):
                save_for_recompute(data)
            return
        with pytest.raises(TapeError) as error, replay(tape):
            save_for_recompute(data)
        headline, way_out = said(error.value, __file__, "saved at", "called at")
        assert headline == f"the tape does not fit layer 'outside of layers', the unnamed slot, item {what}."
        assert way_out == "  way out: replay it with the inputs and the model it was recorded from."

    def test_another_width_is_converted(self, tape: Tape) -> None:
        with replay(tape):
            (back,) = save_for_recompute({"best": np.zeros((2, 1), np.int8), "n": 0})
        assert back["best"].dtype == np.int8
        assert back["best"].tolist() == [[2], [0]]

    def test_a_value_that_the_width_cannot_hold(self) -> None:
        with record() as tape:
            save_for_recompute(np.array([300]))
        with pytest.raises(TapeError, match="values that int8 cannot hold"), replay(tape):
            save_for_recompute(np.array([0], np.int8))

    def test_left_over_and_missing(self, tape: Tape) -> None:
        with pytest.raises(TapeError, match="more than the model asked for: 1 left over"), replay(tape):
            pass
        missing = "the tape has nothing for layer 'outside of layers', slot 'mask'"
        with pytest.raises(TapeError, match=missing), replay(tape):
            get_recompute_data("mask")

    def test_the_users_own_error_is_not_hidden(self, tape: Tape) -> None:
        with pytest.raises(KeyError), replay(tape):
            raise KeyError

    def test_a_layer_that_runs_and_asks_for_nothing(self) -> None:
        with record() as tape:
            region(pick, np.eye(2))
        with pytest.raises(TapeError, match="ran, and asked for nothing: 'pick'"), replay(tape):
            region(lambda x: x, np.eye(2), label=None)

    def test_the_layer_never_sees_a_slot_error_of_the_recompute(self, tape: Tape) -> None:
        with pytest.raises(TapeError) as error, replay(tape):
            region(pick, np.eye(2))
        assert not isinstance(error.value, SlotError)


class TestRange:
    def tape(self) -> Tape:
        with record() as tape:
            region(lambda x: save_for_recompute(np.array([3, 0]), name="experts"), np.eye(2), label="moe")
        return tape

    def test_of_the_replay(self) -> None:
        with replay(self.tape(), below=4):
            region(lambda x: get_recompute_data("experts"), np.eye(2), label="moe")
        outside = r"layer 'moe', slot 'experts', item \[0\]: integers from 0 to 3"
        for below in (3, {"experts": 3}):
            with pytest.raises(TapeError, match=outside), replay(self.tape(), below=below):
                pass

    def test_declared(self) -> None:
        tape = self.tape().declare(below=4, name="experts", layer="moe")
        with pytest.raises(TapeError) as caught:
            tape.declare(below=2)
        assert said(caught.value, __file__, "called at", "saved at") == [
            "tape, layer 'moe', slot 'experts', item [0]: integers from 0 to 3, where 0 to 1 are in range.",
            "  way out: replay a tape of a model with as many experts, or mend the routing where it was made.",
        ]
        with pytest.raises(TapeError) as caught:
            tape.declare(below=4, name="expert")
        assert said(caught.value, __file__, "called at") == [
            "the tape has no decision named 'expert' in any layer.",
            "  it has: moe: slot 'experts'",
            "  way out: name one that it has; tape.entries() lists them.",
        ]
        with record() as tape:
            for n in range(9):
                save_for_recompute(n, name=str(n))
        with pytest.raises(TapeError) as caught:
            tape.declare(below=4, layer="moe")
        assert str(caught.value).splitlines()[:2] == [
            "the tape has no decision at all in moe.",
            "  it has: " + ", ".join(f": slot '{n}'" for n in range(8)),
        ]

    def test_a_label_may_be_told_without_those_around_it(self) -> None:
        with record() as tape:
            region(lambda: region(lambda: save_for_recompute(7), label="moe"), label="block")
        for layer in ("moe", "block/moe"):
            with pytest.raises(
                TapeError, match=r"^tape, layer 'block/moe', the unnamed slot, item \[0\]: integers from"
            ):
                tape.declare(below=7, layer=layer)

    def test_a_sentinel_is_named(self) -> None:
        with record() as tape:
            save_for_recompute(np.array([1, -1]))
        with pytest.raises(TapeError) as caught, replay(tape, below=8):
            pass
        assert str(caught.value).splitlines()[0] == (
            "tape, outside of layers, the unnamed slot, item [0]: integers from -1 to 1, where 0 to 7 are in range. "
            "-1 marks what was not routed, and would train the last expert."
        )


def test_only_this_thread() -> None:
    seen: list[object] = []

    def elsewhere() -> None:
        seen.append(doing_recompute())
        save_for_recompute(7)
        with record() as own:
            save_for_recompute(8)
        seen.extend(entry.value for entry in own.entries())

    with record() as tape:
        worker = threading.Thread(target=elsewhere)
        worker.start()
        worker.join()
        save_for_recompute(1)
    assert [entry.value for entry in tape.entries()] == [1]
    assert seen == [False, 8]


def test_not_inside_one_another_or_a_layer() -> None:
    with record() as tape:
        save_for_recompute(1)
        for block, where in ((record(), "a recording"), (replay(Tape()), "a recording")):
            with pytest.raises(PhaseError, match=f"was begun inside {where}"), block:
                pass
    with pytest.raises(PhaseError, match="inside a replay"), replay(tape), record():
        pass

    def layer():
        with record():
            pass

    with pytest.raises(PhaseError) as caught:
        region(layer, label="block")
    assert said(caught.value, __file__, "called at") == [
        "record() was begun inside layer 'block'.",
        "  way out: open it around the whole model's forward, outside of checkpointed layers and of another tape.",
    ]
    with pytest.raises(PhaseError, match=r"^replay\(\) was begun inside a recording"), record(), replay(Tape()):
        pass
    assert thread.run is None


def test_a_recording_that_failed_holds_what_came_before() -> None:
    with pytest.raises(KeyError), record() as tape:
        save_for_recompute(1)
        raise KeyError
    assert [entry.value for entry in tape.entries()] == [1]


def test_a_tape_without_its_arrays() -> None:
    with record() as tape:
        region(lambda x: save_for_recompute(np.arange(2), 3, name="a"), np.eye(2), label="moe")
    arrays, skeleton = tape.split()
    assert [array.tolist() for array in arrays] == [[0, 1]]
    with record() as other:
        region(lambda x: save_for_recompute(np.arange(5), 3, name="a"), np.eye(2), label="moe")
    assert other.split()[1] == skeleton
    assert hash(other.split()[1]) == hash(skeleton)
    with record() as third:
        region(lambda x: save_for_recompute(np.arange(2), 4, name="a"), np.eye(2), label="moe")
    assert third.split()[1] != skeleton
    assert skeleton.filled(["a mark"]).split() == (["a mark"], skeleton)  # what stands for an array
    filled = skeleton.filled([np.array([7, 8])])
    assert [entry.value for entry in filled.entries()][1] == 3
    with replay(filled):
        assert region(lambda x: get_recompute_data("a"), np.eye(2), label="moe")[0].tolist() == [7, 8]


def test_calls_named_otherwise_are_found_by_their_order() -> None:
    """A function of the other framework has another name."""
    with record() as tape, layer_scope("s"):
        recompute_once(lambda: "a")
        recompute_once(abs, -1)
        recompute_once(lambda: "c")
    with replay(tape), layer_scope("s"):
        assert [recompute_once(f) for f in (str, str, str)] == ["a", 1, "c"]
    missing = r"the tape has nothing for .* slot 'recompute_once\(\.\.\.\) #3' in scope 's'"
    with pytest.raises(TapeError, match=missing), replay(tape), layer_scope("s"):
        for _ in range(4):
            recompute_once(str)
    with pytest.raises(TapeError, match=r"the tape has nothing for .* slot 'recompute_once\(\.\.\.\)'"), replay(tape):
        recompute_once(str)


def test_functions_that_only_their_lines_tell_apart(tmp_path) -> None:
    """On a tape, lines are not told: it goes to other checkouts."""

    def layer(first: str, second: str) -> list[str]:
        found = []
        for n in range(2):
            found.append(recompute_once(lambda: f"{first} {n}"))  # noqa: B023
            found.append(recompute_once(lambda: f"{second} {n}"))  # noqa: B023
        return found

    want = ["a 0", "b 0", "a 1", "b 1"]
    with record() as tape:
        assert layer("a", "b") == want
        assert region(layer, "a", "b", label="moe") == want
    tape.save(tmp_path / "a.tape")
    for held in (tape, Tape.load(tmp_path / "a.tape")):
        with replay(held):
            assert layer("x", "y") == want
            assert region(layer, "x", "y", label="moe") == want


class Guard:
    """What a framework minds while a block runs."""

    fails: Exception | None = None

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def begin(self, replayed) -> None:
        if self.fails:
            raise self.fails
        self.seen.append("begin recording" if replayed is None else f"begin with {len(replayed)}")

    def end(self) -> None:
        self.seen.append("end")

    @contextlib.contextmanager
    def deciding(self):
        self.seen.append("deciding")
        yield
        self.seen.append("decided")

    def check(self, doing: str) -> None:
        self.seen.append(doing)

    def prepared(self, layer: str, key, data, place):
        self.seen.append(f"{layer}, {key[1]}")
        return *data, "prepared"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    monkeypatch.setattr(_replay, "tape_guards", [lambda: Guard(seen), lambda: Guard(seen)])
    return seen


def test_a_framework_is_told_what_happens_in_a_block(seen: list[str]) -> None:
    with record() as tape:
        assert save_for_recompute(1, name="a") == (1, "prepared", "prepared")
        recompute_once(lambda: 2)
        region(lambda: None, label="inner")
    assert seen == [
        *["begin recording"] * 2,
        *["data is saved"] * 2,
        *["outside of layers, a"] * 2,
        *["recompute_once() is called"] * 2,
        *["deciding"] * 2,
        *["decided"] * 2,
        *["layer 'inner' runs"] * 2,
        *["end"] * 2,
    ]
    seen.clear()
    with replay(tape):
        assert get_recompute_data("a") == (1, "prepared", "prepared")
        recompute_once(lambda: 2)
        region(lambda: None, label="inner")
    assert seen[:4] == [*["begin with 0"] * 2, *["get_recompute_data() is called"] * 2]
    assert "deciding" not in seen


def test_a_framework_that_refuses_the_block_leaves_nothing_open(seen: list[str], monkeypatch) -> None:
    refusing = Guard(seen)
    refusing.fails = RuntimeError("not here")
    monkeypatch.setattr(_replay, "tape_guards", [lambda: Guard(seen), lambda: refusing])
    with pytest.raises(RuntimeError, match="not here"), record():
        pass
    assert seen == ["begin recording", "end", "end"]  # the one that refused too: it may have done a part
    assert thread.run is None


def test_a_range_is_told_by_the_name_of_the_save() -> None:
    with record() as tape:
        save_for_recompute(np.array([7]))
        save_for_recompute(np.array([3]), name="experts")
    for below in ({"experts": 4}, {"experts": np.int64(4), "": 8}, 8):
        with replay(tape, below=below):
            get_recompute_data()
            get_recompute_data("experts")
    with pytest.raises(TapeError, match="integers from 7 to 7, where 0 to 6 are in range"), replay(tape, below={"": 7}):
        pass
    with pytest.raises(TapeError, match="no decision named 'expert' in any"), replay(tape, below={"expert": 9}):
        pass


@pytest.mark.parametrize("below", [math.nan, 3.5, np.float32(3), True, "3", [3], 0, -1])
def test_a_range_is_an_integer(below: Any, tmp_path: Path) -> None:
    with record() as tape:
        save_for_recompute(np.array([0, 1]), name="experts")
    for refused in (
        lambda: tape.declare(below=below),
        lambda: replay(tape, below=below),
        lambda: replay(tape, below={"experts": below}),
    ):
        with pytest.raises(OptionError) as caught:
            refused()
        assert said(caught.value, __file__, "called at") == [
            f"below={below!r} is no number of experts.",
            "  way out: give how many there are.",
        ]
    tape.declare(below=np.int8(2), name="experts").save(tmp_path / "a.tape")
    with pytest.raises(TapeError, match="0 to 0 are in range"):
        Tape.load(tmp_path / "a.tape").declare(below=1)


def test_unnamed_saves_outside_of_layers_are_numbered() -> None:
    with record() as tape:
        for n in range(3):
            save_for_recompute(n)
            save_for_recompute(n, name="a")
    names = [entry.name for entry in tape.entries()]
    assert names == [None, "a", "(unnamed) #1", "a #1", "(unnamed) #2", "a #2"]


def test_a_label_that_looks_like_a_place_is_the_users() -> None:
    def forward(*labels: str) -> list[str]:
        return [region(lambda n=n: save_for_recompute(n)[0], label=label) for n, label in enumerate(labels)]

    with record() as tape:
        forward("block (1)", "block (2)")
    with replay(tape):
        assert [*reversed(forward("block (2)", "block (1)"))] == [0, 1]


def test_what_is_left_over_is_counted_together(tmp_path) -> None:
    with record() as tape:
        region(pick, np.eye(2), label="deaf")
        region(pick, np.eye(2), label="left")
        save_for_recompute(1)
    with pytest.raises(TapeError, match="more than the model asked for: 3 left over") as caught, replay(tape):
        region(lambda x: x, np.eye(2), label="deaf")
    assert said(caught.value, __file__) == [
        "the tape holds more than the model asked for: 3 left over.",
        "  never run: 'left'",
        "  ran, and asked for nothing: 'deaf'",
        "  never read: the unnamed slot",
        "  way out: replay it with the model and the number of forwards it was recorded from, one tape a microbatch.",
    ]
    with record() as tape:
        for n in range(14):
            region(pick, np.eye(2), label=f"layer {n}")
            save_for_recompute(n, name=str(n))
    with pytest.raises(TapeError, match="28 left over") as caught, replay(tape):
        for n in range(7):
            region(lambda x: x, np.eye(2), label=f"layer {n}")
    told = said(caught.value, __file__)[1:-1]
    assert [line.partition(":")[0].strip() for line in told] == [
        *["never run"] * 6,
        *["ran, and asked for nothing"] * 6,
        *["never read"] * 6,
    ]


def test_layers_and_calls_of_the_same_names_are_found_in_any_order() -> None:
    def attention(x):
        return int(pick(x)[0])

    def moe(x):
        return int(pick(x)[0])

    with record() as tape:
        for n, layer in enumerate((attention, moe, attention, moe)):
            region(layer, np.eye(4)[[n]])
        region(lambda: (recompute_once(abs, -5), recompute_once(len, "abc")), label="calls")
    with replay(tape):
        assert [region(layer, np.eye(4)[[0]]) for layer in (moe, moe, attention, attention)] == [1, 3, 0, 2]
        assert region(lambda: recompute_once(len, ""), label="calls") == 3  # and not the first one's
    assert [entry.name for entry in tape.entries()][-2:] == ["recompute_once(abs)", "recompute_once(len)"]


def test_a_layer_that_met_its_inner_ones_before_the_save_is_not_guessed_in_a_replay() -> None:
    def layer(first):
        inner = [lambda: save_for_recompute(1), lambda: save_for_recompute(2)]
        if first:
            region(inner[0])
            region(inner[1])
        save_for_recompute(0, name="own")
        region(inner[0])

    with record() as tape:
        region(layer, True)
    with pytest.raises(SlotError, match="runs before and after a save"), replay(tape):
        region(layer, False)


def test_places_of_functions_are_not_on_a_tape() -> None:
    with record() as tape, layer_scope("a"), layer_scope("b"):
        recompute_once(lambda: 1)
        region(lambda: region(lambda: save_for_recompute(2), label="inner"), label="outer")
    name = "recompute_once(test_places_of_functions_are_not_on_a_tape.<locals>.<lambda>)"
    assert [(entry.layer, entry.name, entry.scope) for entry in tape.entries()] == [
        ("", name, "a/b"),
        ("a/b/outer/inner", None, ""),
    ]
    assert repr(tape) == "<Tape of 2 regions, 2 decisions, 0 bytes>"
    assert [portable(label) for label in ("f (a.py:3)", "block (a) b", "f)", "f")] == ["f", "block (a) b", "f)", "f"]


def test_what_a_tape_has_too_little_of_is_listed() -> None:
    with record() as tape:
        for n in range(7):
            region(pick, np.eye(2), label=f"layer {n}")
        for n in range(9):
            save_for_recompute(n, name=str(n))
    with pytest.raises(TapeError) as caught, replay(tape):
        region(pick, np.eye(2), label="layer 0")
        region(pick, np.eye(2), label="layer 0")
    assert said(caught.value, __file__) == [
        "the tape has no decisions left for layer 'layer 0'.",
        "  inside: 'outside of layers'",
        "  it holds: 7: 'layer 0', 'layer 1', 'layer 2', 'layer 3', 'layer 4', 'layer 5'",
        "  way out: replay it with the model it was recorded from, and one forward for one.",
    ]
    with pytest.raises(TapeError) as caught, replay(tape):
        get_recompute_data("x")
    headline, place, *held, way_out = str(caught.value).splitlines()
    assert headline == "the tape has nothing for layer 'outside of layers', slot 'x'."
    assert place.startswith(f"  asked for at: {__file__}:")
    assert held == [f"  the tape has: slot '{n}'" for n in range(8)]
    assert (
        way_out
        == "  way out: save under the same names and scopes in the model that is recorded and the one that replays."
    )


def test_rows_of_a_loop_over_layers_line_up_too() -> None:
    def loop(x, *others):
        return save_for_recompute(np.zeros((2, len(x)), int))

    with record() as tape:
        region(loop, np.zeros(5), label="loop")
    next(tape.decisions())[2].axes = (1,)
    with replay(tape):
        region(loop, np.zeros(5), label="loop")
    with pytest.raises(TapeError, match=r"item \[0\]: 5 rows, as an input had; now inputs have 6, 7\."), replay(tape):
        region(loop, np.zeros(6), np.zeros(7), label="loop")


def test_tapes_alike_but_for_their_arrays_are_one_key() -> None:
    def made(*data, scope="s", rows=2, below=None):
        with record() as tape, layer_scope(scope):
            region(lambda x: save_for_recompute(*data), np.zeros(rows), label="a")
        return tape if below is None else tape.declare(below=below)

    one = made(np.arange(2)).split()[1]
    assert made(np.arange(5)).split()[1] == one
    for other in (
        made(np.arange(2), scope="t"),
        made(np.arange(2), rows=3),
        made([np.arange(2)]),
        made(np.arange(2), below=2),
        made(np.arange(2), below=2).mapped(lambda leaf: leaf),  # whose range is to be looked at again
    ):
        assert other.split()[1] != one
    declared = made(np.arange(2), below=2)
    assert declared.mapped(lambda leaf: leaf, checked=True).split()[1] == declared.split()[1]
    assert declared.mapped(lambda leaf: leaf).split()[1] != declared.split()[1]


def test_what_is_converted_is_kept_with_the_tape() -> None:
    tape, leaves = Tape(), [object(), object()]
    made = [tape.converted(leaf, key, object) for leaf in leaves for key in "ab"]
    assert len(set(made)) == 4
    assert [tape.converted(leaf, key, object) for leaf in leaves for key in "ab"] == made


def test_nothing_of_a_block_outlives_it() -> None:
    class Handle:
        pass

    handle = Handle()
    gone = weakref.ref(handle)
    with record() as tape:
        save_for_recompute(handle)
    with replay(tape):
        save_for_recompute(handle)
    del handle, tape
    gc.collect()
    assert gone() is None


def test_another_task_of_the_thread_is_not_in_the_block() -> None:
    refused = []

    def ask(doing, function):
        with pytest.raises(PhaseError) as caught:
            function()
        headline, *place, way_out = str(caught.value).splitlines()
        assert headline == f"{doing} in another task of this thread (asyncio) than began record() or replay()."
        assert way_out == (
            "  way out: let no other task run model code while the block is open: await nothing in it but tasks begun "
            "in it, or run the others in threads of their own."
        )
        refused.append([line.partition(":")[0] for line in place])

    async def other():
        ask("doing_recompute() is asked", doing_recompute)
        ask("data is saved", lambda: save_for_recompute(1))
        ask("get_recompute_data() is called", get_recompute_data)
        ask("recompute_once() is called", lambda: recompute_once(int))
        ask("layer 'a' runs", lambda: region(int, label="a"))

    async def own():
        return save_for_recompute(2)

    async def main():
        waiting = asyncio.create_task(other())
        with record() as tape:
            await waiting
            assert await asyncio.create_task(own()) == (2,)
        return tape

    assert [entry.value for entry in asyncio.run(main()).entries()] == [2]
    assert refused == [["  called at"]] * 5


def test_a_framework_that_fails_to_end_is_asked_again(seen: list[str], monkeypatch) -> None:
    class Failing(Guard):
        def end(self) -> None:
            super().end()
            if len(self.seen) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(_replay, "tape_guards", [lambda: Failing(seen)])
    with pytest.raises(KeyboardInterrupt), record():
        pass
    assert seen == ["begin recording", "end", "end"]
    assert thread.run is None
