"""record and replay (R13), without any framework: what is saved outside of layers, and the errors."""

from __future__ import annotations

import contextlib
import threading

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
    assert str(error.value).splitlines() == [
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


class TestFit:
    @pytest.fixture
    def tape(self) -> Tape:
        with record() as tape:
            save_for_recompute({"best": np.array([[2], [0]]), "n": 3})
        return tape

    @pytest.mark.parametrize(
        ("data", "what"),
        [
            ({"best": np.zeros((2, 1), int), "m": 3}, "another structure"),
            ({"best": np.zeros((2, 1), int)}, "another structure"),
            ((np.zeros((2, 1), int), 3), None),
            ({"best": np.zeros((3, 1), int), "n": 3}, r"shape \[2, 1\], where the layer decides \[3, 1\]"),
            ({"best": np.zeros((2, 1)), "n": 3}, "int64, where the layer decides float64"),
            ({"best": np.zeros((2, 1), bool), "n": 3}, "int64, where the layer decides bool"),
            ({"best": np.zeros((2, 1), int), "n": "3"}, "int, where the layer decides str"),
        ],
    )
    def test_unfit_data(self, tape: Tape, data: object, what: str | None) -> None:
        if what is None:  # another container of the same parts
            with replay(tape):
                save_for_recompute(data)
            return
        with pytest.raises(TapeError, match=what) as error, replay(tape):
            save_for_recompute(data)
        assert "the unnamed slot" in str(error.value)
        assert "test_replay.py:" in str(error.value)

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
        with pytest.raises(TapeError, match="where 0 to 1 are in range"):
            tape.declare(below=2)
        with pytest.raises(TapeError, match="no decision named 'expert' in any layer"):
            tape.declare(below=4, name="expert")

    def test_a_sentinel_is_named(self) -> None:
        with record() as tape:
            save_for_recompute(np.array([1, -1]))
        with pytest.raises(TapeError, match="-1 marks what was not routed"), replay(tape, below=8):
            pass


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

    with pytest.raises(PhaseError, match="inside layer 'block'"):
        region(layer, label="block")
    assert thread.run is None


def test_a_recording_that_failed_holds_what_came_before() -> None:
    with pytest.raises(KeyError), record() as tape:
        save_for_recompute(1)
        raise KeyError
    assert [entry.value for entry in tape.entries()] == [1]


def test_replay_takes_a_tape() -> None:
    with pytest.raises(OptionError, match="replay takes a Tape, not list"):
        replay([1, 2])  # type: ignore[arg-type]


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
    missing = r"the tape has nothing for .* slot 'recompute_once\( #3' in scope 's'"
    with pytest.raises(TapeError, match=missing), replay(tape), layer_scope("s"):
        for _ in range(4):
            recompute_once(str)
    with pytest.raises(TapeError, match=r"the tape has nothing for .* slot 'recompute_once\('"), replay(tape):
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

    def check(self, doing: str, place) -> None:
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
    for below in ({"experts": 4}, {"experts": 4, "": 8}, {"other": 1}, 8):
        with replay(tape, below=below):
            get_recompute_data()
            get_recompute_data("experts")
    with pytest.raises(TapeError, match="integers from 7 to 7, where 0 to 6 are in range"), replay(tape, below={"": 7}):
        pass


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
    assert str(caught.value).splitlines()[1:4] == [
        "  never run: 'left'",
        "  ran, and asked for nothing: 'deaf'",
        "  never read: the unnamed slot",
    ]
