"""A tape as an object of Python: copied, pickled, looked at too early, taken for something else (R13)."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from roundpipe_core import OptionError, Tape, TapeError, diff, get_recompute_data, record, replay, save_for_recompute
from roundpipe_core._phase import Run, open_slot, thread
from tests.said import said


class Plan(NamedTuple):
    token: Any


@dataclasses.dataclass
class Dispatch:
    index: Any


def layer(function) -> Any:
    before = thread.run
    phase, slot = open_slot("moe")
    thread.run = Run(phase, slot)
    try:
        return function()
    finally:
        thread.run = before


def saved(*data: Any) -> Tape:
    with record() as tape:
        layer(lambda: save_for_recompute(*data, name="plan"))
    return tape


def data_of(tape: Tape) -> Any:
    with replay(tape):
        return layer(lambda: get_recompute_data("plan"))


def again(tape: Tape) -> Tape:
    return pickle.loads(pickle.dumps(tape))


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, again])
@pytest.mark.parametrize("mmap", [None, False, True])
def test_a_copy_is_replayed_like_the_tape(made, mmap: bool | None, tmp_path: Path) -> None:
    experts = np.array([[3, 1], [0, 2]])
    tape = saved({"experts": experts, "of": (Plan([1]), {2})})
    if mmap is not None:
        tape.save(tmp_path / "a.tape")
        tape = Tape.load(tmp_path / "a.tape", mmap=mmap)

    copied = made(tape)

    (got,) = data_of(copied)
    assert np.array_equal(got["experts"], experts)
    assert got["of"] == (([1],), {2})
    assert not diff(copied, tape)


@pytest.mark.parametrize("made", [copy.deepcopy, again])
def test_routing_is_copied_with_its_range(made) -> None:
    tape = made(Tape.from_routing([[[3, 1]], [[0, 2]]], experts=4))

    assert tape.to_routing().tolist() == [[[3, 1]], [[0, 2]]]
    assert [decision.below for _, _, decision in tape.decisions()] == [4]


def test_a_copy_has_the_arrays_and_a_deep_one_has_its_own() -> None:
    plan = Dispatch(np.zeros(3))
    tape = saved(plan)

    assert copy.copy(tape).entries()[0].value is tape.entries()[0].value
    assert copy.deepcopy(tape).entries()[0].value is not tape.entries()[0].value
    assert type(data_of(copy.deepcopy(tape))[0]) is Dispatch
    tape.entries()[0].value[:] = 1
    assert copy.copy(tape).entries()[0].value.all()
    assert copy.copy(tape).converted("leaf", "key", lambda: 1) == 1
    assert tape.converted("leaf", "key", lambda: 2) == 2  # what one was converted to is not the other's


def test_what_no_file_holds_is_not_pickled() -> None:
    with pytest.raises(TapeError, match=r"layer 'moe', slot 'plan', item \[0\]: an object of type builtins\.object"):
        pickle.dumps(saved(object()))


def test_what_was_pickled_is_checked() -> None:
    made, (data,) = saved(1).__reduce__()

    with pytest.raises(TapeError) as caught:
        made(data[:-1] + b"!")

    assert str(caught.value).startswith("what was pickled is not a tape that can be read: ")


def test_arrays_of_a_loaded_tape_are_pickled_too() -> None:
    (entry,) = Tape.from_routing([[3], [1]], experts=4).entries()

    assert pickle.loads(pickle.dumps(entry)) == entry


def test_a_tape_is_read_after_its_block() -> None:
    reads = {
        "entries": lambda tape: tape.entries(),
        "nbytes": lambda tape: tape.nbytes(),
        "declare": lambda tape: tape.declare(below=3),
        "to_routing": lambda tape: tape.to_routing(),
        "diff": lambda tape: diff(tape, Tape()),
        "diff, as the other": lambda tape: diff(Tape(), tape),
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "pickle": pickle.dumps,
        "split": lambda tape: tape.split(),
    }
    with record() as tape:
        save_for_recompute(1)
        for read in reads.values():
            with pytest.raises(TapeError) as caught:
                read(tape)
            assert said(caught.value, __file__) == [
                "the tape is still being recorded.",
                "  way out: use it after the block of `with record()`.",
            ]
        assert repr(tape) == "<Tape that is still being recorded>"
    assert repr(tape) == "<Tape of 0 regions, 1 decisions, 0 bytes>"


@pytest.mark.parametrize(
    ("asked", "function"),
    [
        ("replay", replay),
        ("diff", lambda given: diff(Tape(), given)),
        ("Tape", Tape),
    ],
)
@pytest.mark.parametrize("given", ["run.tape", [1, 2]])
def test_a_path_is_no_tape(asked: str, function, given: Any) -> None:
    with pytest.raises(OptionError) as caught:
        function(given)
    assert said(caught.value, __file__) == [
        f"{asked} takes a Tape, not {type(given).__name__}.",
        "  way out: make one by `with record() as tape:`, Tape.load(path) or Tape.from_routing(routing, experts=...).",
    ]
