"""R2 to R6 and R8 in the core alone: plain values and numpy arrays, runs made by hand."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import threading

import numpy as np
import pytest

import roundpipe_core
from roundpipe_core import (
    OptionError,
    PhaseError,
    RoundPipeError,
    SlotError,
    _phase,
    doing_recompute,
    get_recompute_data,
    keep,
    layer_scope,
    recompute_once,
    record,
    replay,
    save_for_recompute,
    update_once,
)
from roundpipe_core._phase import Phase, Run, open_slot, thread
from roundpipe_core._slots import Slot, label_of
from roundpipe_core._tape import taken_from
from tests.said import said


def run(phase: Phase, slot: Slot, function):
    before = thread.run
    thread.run = Run(phase, slot)
    try:
        return function()
    finally:
        thread.run = before


def both(function, label: str = "layer"):
    """What a function gives in forward and in a recompute."""
    slot = Slot(label)
    return run(Phase.FORWARD, slot, function), run(Phase.RECOMPUTE, slot, function)


def test_public_names() -> None:
    assert sorted(roundpipe_core.__all__) == [
        "Difference",
        "ExchangeError",
        "ExchangeReport",
        "Flip",
        "GradientError",
        "MismatchError",
        "MutationError",
        "OptionError",
        "ParityError",
        "PhaseError",
        "RoundPipeError",
        "SlotError",
        "Tape",
        "TapeDiff",
        "TapeEntry",
        "TapeError",
        "VerifyError",
        "VerifyWarning",
        "diff",
        "doing_recompute",
        "get_recompute_data",
        "keep",
        "layer_scope",
        "recompute_once",
        "record",
        "replay",
        "save_for_recompute",
        "update_once",
    ]


def test_save_gives_the_forwards_data_in_both_phases() -> None:
    values = iter([1, 2])
    assert both(lambda: save_for_recompute(next(values), "a")) == ((1, "a"), (1, "a"))


def test_outside_a_region_nothing_is_kept_or_checked() -> None:
    data = ([1], {"a": 2})
    assert save_for_recompute(*data) == data
    assert save_for_recompute(*data)[0] is data[0]
    assert save_for_recompute() == ()
    assert recompute_once(lambda: 3) == 3
    assert doing_recompute() is False


def test_get_gives_the_same_each_time_and_can_be_changed_freely() -> None:
    def layer():
        if not doing_recompute():
            save_for_recompute([1], np.arange(3))
            return None
        first = get_recompute_data()
        first[0].append(2)
        first[1][:] = 9
        return get_recompute_data()

    _, (items, array) = both(layer)
    assert items == [1]
    assert array.tolist() == [0, 1, 2]


def test_what_is_saved_is_of_that_moment() -> None:
    items, array, table = [1], np.arange(3), {"k": [1]}

    def layer():
        data = save_for_recompute(items, array, table)
        if not doing_recompute():
            items.append(2)
            array[:] = 7
            table["k"].append(3)
            table["new"] = 1
        return data

    _, (one, two, three) = both(layer)
    assert one == [1]
    assert two.tolist() == [0, 1, 2]
    assert three == {"k": [1]}


def test_opaque_objects_are_kept_by_reference() -> None:
    handle = object()
    _, again = both(lambda: save_for_recompute(handle, len, threading.Lock))
    assert again == (handle, len, threading.Lock)


def test_named_and_unnamed_saves_are_apart() -> None:
    def layer():
        if not doing_recompute():
            save_for_recompute(1)
            save_for_recompute(2, name="mask")
            save_for_recompute(3, 4, name="order")
            return None
        return get_recompute_data("order"), get_recompute_data(), get_recompute_data("mask")

    assert both(layer)[1] == ((3, 4), (1,), (2,))


def test_scopes_are_layers_of_their_own() -> None:
    def layer():
        found = []
        for name in ("attention", "moe", "attention"):
            with layer_scope(name):
                found.append(save_for_recompute(name if not doing_recompute() else "?"))
                with layer_scope("inner"):
                    found.append(save_for_recompute(len(found)))
        found.append(save_for_recompute("own"))
        return found

    forward, again = both(layer)
    assert forward == again == [("attention",), (1,), ("moe",), (3,), ("attention",), (5,), ("own",)]


def test_once_runs_once_and_its_inside_is_its_own_affair() -> None:
    calls = []

    def decide(n):
        assert doing_recompute() is False
        assert save_for_recompute(n) == (n,)  # stores nothing
        calls.append(n)
        return {"n": [n]}

    def layer():
        return [recompute_once(decide, 1), recompute_once(decide, n=2), recompute_once(lambda: 3)]

    forward, again = both(layer)
    assert forward == again == [{"n": [1]}, {"n": [2]}, 3]
    assert calls == [1, 2]


def test_inner_regions_read_what_they_decided_at_any_depth() -> None:
    drawn = iter(range(100))

    def region(depth):
        phase, slot = open_slot(f"depth {depth}")
        return run(phase, slot, lambda: layer(depth))

    def layer(depth):
        own = save_for_recompute(next(drawn) if not doing_recompute() else None)
        inner = [region(depth - 1), region(depth - 1)] if depth else []
        return [own, *inner]

    slot = Slot("top")
    forward = run(Phase.FORWARD, slot, lambda: layer(3))
    assert next(drawn) == 15
    assert run(Phase.RECOMPUTE, slot, lambda: layer(3)) == forward
    assert run(Phase.RECOMPUTE, slot, lambda: layer(3)) == forward


def test_a_region_that_only_the_forward_ran_does_not_shift_the_others() -> None:
    def region(label, value):
        phase, slot = open_slot(label)
        return run(phase, slot, lambda: save_for_recompute(value if not doing_recompute() else None))

    def layer():
        if not doing_recompute():
            region("router", 1)
        save_for_recompute(0)
        return [region("expert", 2), region("expert", 3)]

    assert both(layer) == ([(2,), (3,)], [(2,), (3,)])


def test_regions_of_one_label_around_a_save_are_not_guessed() -> None:
    def region(value):
        phase, slot = open_slot("expert")
        return run(phase, slot, lambda: save_for_recompute(value))

    def layer():
        if not doing_recompute():
            region(1)
        save_for_recompute(0)
        return region(2)

    def scoped():
        if not doing_recompute():
            with layer_scope("expert"):
                pass
        save_for_recompute(0)
        with layer_scope("expert"):
            pass

    def read_in_another_order():
        if doing_recompute():
            get_recompute_data("second")
            get_recompute_data("first")
        else:
            save_for_recompute(1, name="first")
            region(1)
            save_for_recompute(2, name="second")
        return region(2)

    for function in (layer, scoped, read_in_another_order):
        with pytest.raises(SlotError) as caught:
            both(function)
        assert said(caught.value, __file__) == [
            "layer 'layer': 'expert' runs before and after a save that the recompute read at another point, so which "
            "of the forward's decisions belongs here cannot be told.",
            "  way out: give the calls different labels, wrap them in layer_scope, or read the data where it was "
            "saved.",
        ]


def here(offset: int = 0) -> str:
    frame = sys._getframe(1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno + offset}"


def lines(error: BaseException) -> list[str]:
    return str(error).splitlines()


def test_get_outside_a_recompute() -> None:
    with pytest.raises(PhaseError) as caught:
        place = here(1)
        get_recompute_data()
    assert lines(caught.value) == [
        "get_recompute_data() was called outside a recompute.",
        f"  called at: {place}",
        "  way out: call it only where doing_recompute() is True, or use `(data,) = save_for_recompute(data)`, which "
        "works in both phases.",
    ]
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, RoundPipeError)


def test_get_in_the_forward_names_the_layer() -> None:
    with pytest.raises(PhaseError) as caught:
        run(Phase.FORWARD, Slot("moe"), get_recompute_data)
    assert lines(caught.value)[:2] == ["get_recompute_data() was called in the forward.", "  layer: 'moe'"]


def test_nothing_saved() -> None:
    with pytest.raises(SlotError) as caught:
        run(Phase.RECOMPUTE, Slot("moe"), lambda: get_recompute_data())
    text = lines(caught.value)
    assert text[0] == "layer 'moe', the unnamed slot: the forward saved nothing there."
    assert text[1].startswith(f"  asked for at: {__file__}:")
    assert text[2] == (
        "  way out: call save_for_recompute in the forward branch, under the same name and in the same scope."
    )
    assert isinstance(caught.value, LookupError)


def test_an_unknown_name_lists_what_was_saved() -> None:
    slot = Slot("moe")
    place = here(1)
    run(Phase.FORWARD, slot, lambda: save_for_recompute(1, name="mask"))
    with pytest.raises(SlotError) as caught:
        run(Phase.RECOMPUTE, slot, lambda: get_recompute_data("mark"))
    text = lines(caught.value)
    assert text[0] == "layer 'moe', slot 'mark': the forward saved nothing there."
    assert text[2] == f"  saved slot 'mask': {place}"


def test_a_second_save_shows_both_places() -> None:
    def layer():
        save_for_recompute(1)
        save_for_recompute(2)

    first = layer.__code__.co_firstlineno + 1
    with pytest.raises(SlotError) as caught:
        both(layer, "moe")
    assert lines(caught.value) == [
        "layer 'moe', the unnamed slot: saved twice in one forward.",
        f"  first: {__file__}:{first}",
        f"  again: {__file__}:{first + 1}",
        "  way out: save everything in one call, give each save its own name=, or mark the parts of the layer by "
        '`with layer_scope("..."):`.',
    ]


def test_a_second_save_in_a_scope_names_it() -> None:
    def layer():
        with layer_scope("attention"):
            save_for_recompute(1, name="mask")
            save_for_recompute(2, name="mask")

    with pytest.raises(SlotError, match=r"layer 'moe', slot 'mask' in scope 'attention': saved twice"):
        both(layer, "moe")
    with pytest.raises(SlotError, match=r"layer 'moe', slot 'mask' in scope 'block/attention': saved twice"), record():
        phase, slot = open_slot("moe")

        def inside():
            with layer_scope("block"):
                layer()

        run(phase, slot, inside)


def test_a_region_of_the_recompute_alone() -> None:
    def region():
        phase, slot = open_slot("extra")
        return run(phase, slot, lambda: get_recompute_data())

    with pytest.raises(SlotError) as caught:
        run(Phase.RECOMPUTE, Slot("top"), region)
    headline = "layer 'extra', the unnamed slot: this region was not run by the forward, only by the recompute."
    assert lines(caught.value)[0] == headline


def test_data_that_contains_itself() -> None:
    ring: list = [1]
    ring.append(ring)
    place = here(2)
    with pytest.raises(SlotError) as caught:
        run(Phase.FORWARD, Slot("moe"), lambda: save_for_recompute(ring))
    assert lines(caught.value) == [
        "layer 'moe', the unnamed slot: the data contains itself, or is nested too deep.",
        f"  saved at: {place}",
        "  way out: save the parts that the recompute needs, not the object that links them.",
    ]


@pytest.mark.parametrize(
    "iterator",
    [(n for n in "ab"), zip("ab", "cd", strict=True), map(str, [1]), iter([1]), iter((1,)), enumerate("a"), iter({})],
    ids=lambda iterator: type(iterator).__name__,
)
def test_what_can_be_gone_through_once(iterator) -> None:
    """The forward would leave nothing of it to the recompute."""
    place = here(2)
    with pytest.raises(SlotError) as caught:
        run(Phase.FORWARD, Slot("moe"), lambda: save_for_recompute(1, {"plan": iterator}))
    assert lines(caught.value) == [
        f"layer 'moe', the unnamed slot: data[1]['plan'] is a {type(iterator).__name__}, which can be gone through "
        "once; the recompute would find it at its end.",
        f"  saved at: {place}",
        "  way out: save what it gives, as a list or a tuple: list(...).",
    ]


@pytest.mark.parametrize("name", [["mask"], 3, b"mask"])
def test_names_are_strings(name) -> None:
    place = here(2)
    with pytest.raises(OptionError) as caught:
        save_for_recompute(1, name=name)
    assert lines(caught.value) == [
        f"save_for_recompute: name must be a string, not {name!r}.",
        f"  called at: {place}",
        '  way out: name the slot by a string, as in name="mask".',
    ]
    with pytest.raises(OptionError, match=r"get_recompute_data: name must be a string"):
        get_recompute_data(name)
    place = here(2)
    with pytest.raises(OptionError) as told:
        layer_scope(name)
    assert lines(told.value) == [
        f"layer_scope takes a name, not {name!r}.",
        f"  called at: {place}",
        '  way out: pass a string: `with layer_scope("attention"):`.',
    ]
    assert isinstance(caught.value, (TypeError, ValueError))


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.RECOMPUTE])
def test_a_scope_left_by_an_exception_is_closed(phase: Phase) -> None:
    def layer():
        with pytest.raises(KeyError), layer_scope("a"), layer_scope("b"):
            raise KeyError
        return save_for_recompute(1)

    slot = Slot("layer")
    run(Phase.FORWARD, slot, layer)
    assert run(phase, slot if phase is Phase.RECOMPUTE else Slot("layer"), layer) == (1,)


def test_a_scope_left_open_by_a_generator_does_no_harm_later() -> None:
    def parts():
        with layer_scope("late"):
            yield 1

    held = []

    def layer():
        generator = parts()
        next(generator)
        held.append(generator)

    run(Phase.FORWARD, Slot("a"), layer)

    def other():
        held.pop().close()  # ends the scope of a run that is over, inside another run
        return save_for_recompute(5)

    assert both(lambda: save_for_recompute(1))[1] == (1,)
    assert run(Phase.FORWARD, Slot("b"), other) == (5,)


def test_other_threads_are_outside() -> None:
    seen = []

    def layer():
        worker = threading.Thread(target=lambda: seen.append((doing_recompute(), save_for_recompute(1))))
        worker.start()
        worker.join()
        return doing_recompute()

    assert both(layer) == (False, True)
    assert seen == [(False, (1,)), (False, (1,))]


def test_bytes_are_counted_inner_regions_included() -> None:
    def layer():
        save_for_recompute(np.zeros(10, np.int64), 3, "x", [np.zeros(2, np.int8)])
        phase, slot = open_slot("inner")
        run(phase, slot, lambda: save_for_recompute(np.zeros(5, np.int32)))
        save_for_recompute(np.zeros(1, np.int8), name="more")

    slot = Slot("layer")
    run(Phase.FORWARD, slot, layer)
    assert slot.nbytes() == 80 + 2 + 20 + 1
    assert slot.places() == {"cpu": 103}
    assert [entry.nbytes() for entry in slot.entries.values()] == [82, 1]


class Block:
    class Part:
        pass

    def forward(self):
        pass

    def attend(self):
        pass

    def __call__(self):
        pass


def test_labels() -> None:
    block = Block()
    assert label_of("mine") == "mine"
    assert label_of(block) == label_of(block.forward) == label_of(block.__call__) == "Block"
    assert label_of(block.attend) == "Block.attend"
    assert label_of(functools.partial(block.attend)) == "Block.attend"
    assert label_of(functools.partial(functools.partial(here), 1)).startswith(f"here ({__file__}:")
    assert label_of(len) == "len"
    assert label_of([].append) == "append"
    assert label_of(Block.Part) == label_of(Block.Part()) == "Block.Part"

    @functools.wraps(here)
    def wrapped(offset: int) -> str:
        return here(offset)

    assert label_of(wrapped) == label_of(here)


# ------------------------------------------------------------------------ state, parts kept, compilers


def test_state_is_moved_on_by_the_forward_alone() -> None:
    slot, calls = Slot("layer"), []

    def layer() -> None:
        update_once(calls.append, 1)
        if not doing_recompute():
            recompute_once(lambda: update_once(calls.append, 2))  # inside of a decision it is a call like others
        else:
            update_once(calls.append, 3)  # which the forward did not reach: nothing is to be moved on

    run(Phase.FORWARD, slot, layer)
    run(Phase.RECOMPUTE, slot, layer)
    run(Phase.AUDIT, slot, lambda: update_once(calls.append, 1))

    assert calls == [1, 2]
    assert slot.places() == {}


def test_outside_of_layers_state_moves_each_time() -> None:
    calls: list[int] = []
    update_once(calls.append, 1)
    with record() as tape:
        update_once(calls.append, 2)
    with replay(tape):
        update_once(calls.append, 3)
    assert calls == [1, 2, 3]


def test_keep_calls_the_function_where_nothing_will_be_recomputed() -> None:
    calls: list[int] = []

    def double(x: int, *, by: int = 2) -> int:
        calls.append(x)
        return x * by

    assert keep(double, 1) == 2
    assert run_alone(Phase.FORWARD, lambda: recompute_once(lambda: keep(double, 2, by=3))) == 6
    with record() as tape:
        assert keep(double, 3) == 6
    with replay(tape):
        assert keep(double, 3) == 6
    assert calls == [1, 2, 3, 3]
    assert tape.entries() == []


def run_alone(phase: Phase, function):
    return run(phase, Slot("layer"), function)


class Compiler:
    """What a compiler that reads the code is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def __getattr__(self, name: str):
        return lambda *args: self.told.append((name, *args)) or name


def test_a_compiler_takes_over_where_it_reads_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler()
    monkeypatch.setattr(_phase, "_is_traced", lambda: True)
    monkeypatch.setattr(_phase, "_traced", compiler, raising=False)

    assert save_for_recompute(1, 2, name="a") == "save_for_recompute"
    assert get_recompute_data("a") == "get_recompute_data"
    assert doing_recompute() == "doing_recompute"
    assert recompute_once(len, "abc") == "recompute_once"
    with layer_scope("attention"):
        pass

    *first, (once, function), enter, leave = compiler.told
    assert first == [("save_for_recompute", (1, 2), "a"), ("get_recompute_data", "a"), ("doing_recompute",)]
    assert (once, function()) == ("recompute_once", 3)
    assert [enter, leave] == [("enter_scope", "attention"), ("exit_scope",)]
    with pytest.raises(KeyError), layer_scope("attention"):
        raise KeyError


def test_what_a_frontend_saves_in_a_layers_stead_is_given_each_time() -> None:
    """And the state of random numbers goes back to the first time only (R7)."""
    restored = []

    class Drawing(Run):
        def state(self):
            return "drawn"

        def restore_state(self, state) -> None:
            restored.append(state)

    slot = Slot("layer")
    one, two = ((), "drawn"), ((), "plain")
    forward = Drawing(Phase.FORWARD, slot)
    forward.put(one, [1], ("file", 1), True)
    forward.put(two, [2], ("file", 2), False)
    again = Drawing(Phase.RECOMPUTE, slot)

    assert [again.fetch(key, ("file", 3)) for key in (one, one, two)] == [[1], [1], [2]]
    assert restored == ["drawn", None]
    assert [decision.key for decision in taken_from(slot).decisions] == [one, two]


# ------------------------------------------------------------------------------ what frontends are told


class Noting(Run):
    """A frontend that draws from a counter, and notes what it is told."""

    def __init__(self, phase: Phase, slot: Slot, noted: list) -> None:
        super().__init__(phase, slot)
        self.noted = noted

    def consulted(self, point=None) -> None:
        self.noted.append(("consulted", point))

    def told(self) -> None:
        self.noted.append("told")

    def state(self):
        self.noted.append("state")
        return len(self.noted)

    def restore_state(self, state) -> None:
        self.noted.append(("restored", state))

    def stored(self, entry, offload) -> None:
        self.noted.append(("stored", entry.leaves, offload))

    def keep(self, function, args, kwargs, place):
        self.noted.append(("keep", args, kwargs, place))
        return function(*args, **kwargs)


def noting(phase: Phase, slot: Slot, function) -> list:
    before, noted = thread.run, []
    thread.run = Noting(phase, slot, noted)
    try:
        function()
        return noted
    finally:
        thread.run = before


def test_a_frontend_is_told_of_each_point_that_both_phases_pass() -> None:
    def layer():
        save_for_recompute(1, name="a", offload=True)
        recompute_once(abs, -2)
        update_once(list)
        update_once(dict)

    slot, key, once = Slot("layer"), ((), "a"), ((), "recompute_once(abs)")
    assert noting(Phase.FORWARD, slot, layer) == [
        *[("stored", [1], True), "state", ("consulted", key)],
        *[("stored", [2], None), "state", ("consulted", once)],
        *["state", "state"],
    ]
    assert noting(Phase.RECOMPUTE, slot, layer) == [
        *[("restored", 2), ("consulted", key)],
        *[("restored", 5), ("consulted", once)],
        *[("restored", 7), ("restored", 8)],
    ]


def test_a_frontend_is_told_when_the_layer_asks_for_its_phase() -> None:
    slot = Slot("layer")
    noted = noting(Phase.FORWARD, slot, lambda: (doing_recompute(), save_for_recompute(1, offload=False)))
    assert noted == ["told", ("consulted", None), ("stored", [1], False), "state", ("consulted", ((), None))]
    noted = noting(Phase.RECOMPUTE, slot, lambda: (get_recompute_data(), get_recompute_data()))
    assert noted == ["told", ("restored", 4), ("consulted", ((), None)), "told"]  # back to that state once


def test_a_frontend_keeps_what_a_layer_keeps() -> None:
    def layer():
        assert keep(max, 3, 4) == 4
        recompute_once(lambda: keep(max, 1, 2))  # inside of a decision it is a call like others

    place = (__file__, layer.__code__.co_firstlineno + 1)
    (kept, *_) = noting(Phase.FORWARD, Slot("layer"), layer)
    assert kept == ("keep", (3, 4), {}, place)


def test_another_checkpointing_may_take_what_is_outside_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_phase, "outside_saves", [lambda data: (*data, "a"), lambda data: (*data, "b")])
    monkeypatch.setattr(_phase, "outside_keeps", [lambda function: lambda *args: (function(*args), "taken")])
    assert save_for_recompute(1) == (1, "a", "b")
    assert keep(max, 3, 4) == (4, "taken")
    assert run_alone(Phase.FORWARD, lambda: keep(max, 3, 4)) == (4, "taken")
    assert run_alone(Phase.FORWARD, lambda: recompute_once(lambda: (save_for_recompute(1), keep(max, 3, 4)))) == (
        (1,),
        4,
    )


def test_a_part_left_out_is_counted() -> None:
    """The regions after it are those that they were in the forward."""

    def region(value):
        phase, slot = open_slot("expert")
        return run(phase, slot, lambda: save_for_recompute(value))

    def forward():
        return [region(1), region(2), region(3)], thread.run.met()

    def again():
        thread.run.skip({((), "expert"): 1}, {first})
        thread.run.skip({((), "expert"): 1}, {second})
        return region(0), thread.run.met(), thread.run.taken

    slot, first, second = Slot("layer"), Slot("a"), Slot("b")
    assert run(Phase.FORWARD, slot, forward)[1] == {((), "expert"): 3}
    assert run(Phase.RECOMPUTE, slot, again) == ((3,), {((), "expert"): 3}, {first, second})


@pytest.mark.parametrize("offload", [1, "host", np.True_])
def test_offload_is_a_bool_or_nothing(offload) -> None:
    place = here(2)
    with pytest.raises(OptionError) as caught:
        save_for_recompute(1, offload=offload)
    assert lines(caught.value) == [
        f"save_for_recompute: offload must be True, False or None, not {offload!r}.",
        f"  called at: {place}",
        "  way out: where to keep it is an option of the layer: remat(layer, offload=...).",
    ]
    assert save_for_recompute(1, offload=True) == (1,)


def test_scopes_outside_of_layers_and_in_decisions_mark_nothing() -> None:
    def decide():
        with layer_scope("a"):
            return save_for_recompute(1)

    assert decide() == (1,)
    with record() as tape:
        recompute_once(decide)
        for _ in range(2):
            decide()
    assert [entry.scope for entry in tape.entries()] == ["", "a", "a #1"]


def test_no_tape_begins_inside_a_decision() -> None:
    def decide():
        with record():
            pass

    with pytest.raises(PhaseError, match=r"^record\(\) was begun inside layer 'a decision'\."):
        run_alone(Phase.FORWARD, lambda: recompute_once(decide))


@pytest.mark.filterwarnings("ignore")  # forks of processes with threads, as Python and JAX have them
def test_a_process_of_multiprocessing_begins_outside_of_layers() -> None:
    """One that the layer forks by itself goes on in the layer."""

    def leave():
        os._exit(3 if doing_recompute() else 4)

    def layer():
        child = os.fork()
        if child == 0:
            leave()
        worker = multiprocessing.get_context("fork").Process(target=leave)
        worker.start()
        worker.join()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), worker.exitcode

    assert run_alone(Phase.RECOMPUTE, layer) == (3, 4)


def test_a_function_of_ours_as_a_callback_tells_the_users_line() -> None:
    for call in (update_once, recompute_once):
        phase, slot = open_slot("layer")
        with pytest.raises(PhaseError) as caught:
            run(phase, slot, lambda call=call: call(get_recompute_data))
        assert f"  called at: {here(-1)}" in lines(caught.value)


@pytest.mark.parametrize("call", [recompute_once, keep, update_once])
def test_a_value_in_place_of_a_function_is_told(call) -> None:
    def inside():
        phase, slot = open_slot("layer")
        run(phase, slot, lambda: call([1, 2]))

    for where in (lambda: call([1, 2]), inside):
        with pytest.raises(OptionError) as caught:
            where()
        assert lines(caught.value)[0] == f"{call.__name__} takes a function and its arguments, not [1, 2]."
        assert said(caught.value, __file__)[-1].startswith("  way out: ")
    with pytest.raises(TypeError, match="object is not iterable"):
        call(lambda: sorted(3))
