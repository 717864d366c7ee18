"""Routing of inference engines as tapes (R13): numpy says what each layer has to get."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_core import OptionError, Tape, TapeError, layer_scope, recompute_once, record, replay, save_for_recompute
from roundpipe_core._backend import numpys
from roundpipe_core._phase import Run, open_slot, thread
from roundpipe_core._slots import AutoLabel
from tests.said import said

ROOT = Path(__file__).parents[2]


class NumpyRun(Run):
    """What a frontend does for its arrays, for numpy's."""

    def adopt(self, leaf: Any, like: Any) -> Any:
        return numpys.adopt(leaf, like)


def layer(label: str, function) -> Any:
    before = thread.run
    phase, slot = open_slot(label)
    thread.run = NumpyRun(phase, slot)
    try:
        return function()
    finally:
        thread.run = before


def routing(tokens: int = 5, layers: int = 3, top_k: int = 2, experts: int = 8, dtype: str = "int16") -> np.ndarray:
    return np.random.default_rng(0).integers(0, experts, (tokens, layers, top_k)).astype(dtype)


def held(tape: Tape) -> list[np.ndarray]:
    """The array of each layer."""
    arrays = [entry.value for entry in tape.entries()]
    return [np.frombuffer(array.data, array.dtype).reshape(array.shape) for array in arrays]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", ">i2", "uint16", "int32", "uint32", "int64", "uint64"])
def test_each_layer_gets_its_own(dtype: str) -> None:
    given_TLK = routing(dtype=dtype)

    tape = Tape.from_routing(given_TLK, experts=8)

    assert [entry.layer for entry in tape.entries()] == ["layer 0", "layer 1", "layer 2"]
    assert [region.rows for region in tape.root.regions] == [{5}] * 3  # which the layer's input has to have
    for n, array_TK in enumerate(held(tape)):
        assert np.array_equal(array_TK, given_TLK[:, n])
        assert array_TK.dtype.itemsize == 1
    assert np.array_equal(tape.to_routing(), given_TLK)
    assert tape.to_routing().dtype == np.int16


@pytest.mark.parametrize(
    ("experts", "dtype"),
    [(1, "int8"), (128, "int8"), (129, "uint8"), (256, "uint8"), (257, "int16"), (40000, "uint16")],
)
def test_arrays_are_as_narrow_as_the_experts_allow(experts: int, dtype: str) -> None:
    given_TLK = np.full((2, 1, 1), experts - 1, "int64")

    tape = Tape.from_routing(given_TLK, experts=experts)

    assert [entry.dtype for entry in tape.entries()] == [dtype]
    assert tape.to_routing(dtype="int32").item(0) == experts - 1
    assert tape.to_routing(dtype=dtype).item(0) == experts - 1


@settings(max_examples=60, deadline=None)
@given(data=st.data(), batch=st.integers(1, 3), length=st.integers(1, 4), aligned=st.booleans())
def test_padding_follows_its_tokens(data: st.DataObject, batch: int, length: int, aligned: bool) -> None:
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=batch * length, max_size=batch * length)))
    mask = mask.reshape(batch, length)
    tokens = batch * length if aligned else int(mask.sum())
    given_TLK = np.random.default_rng(1).integers(0, 300, (tokens, 2, 3)).astype("int32")
    expected = np.empty((batch, length, 2, 3), "int32")
    expected[...] = [298, 299, 0]
    expected[mask] = given_TLK.reshape(batch, length, 2, 3)[mask] if aligned else given_TLK
    if aligned:
        given_TLK[~mask.reshape(-1)] = -1

    tape = Tape.from_routing(given_TLK, experts=300, mask=mask, padding=298)

    for n, array in enumerate(held(tape)):
        assert np.array_equal(array, expected[:, :, n])


def test_padding_may_go_to_the_last_of_more_experts_than_the_routing_has_bits_for() -> None:
    tape = Tape.from_routing(np.zeros((1, 1, 1), "int16"), experts=2**15 + 1, mask=[1, 0], padding=2**15)
    assert tape.to_routing(dtype="int32").ravel().tolist() == [0, 2**15]


def test_sequences_go_to_their_rows() -> None:
    one, two = routing(2), routing(4, dtype="int8")

    tape = Tape.from_routing([one, two], experts=8, mask=[[0, 0, 1, 1], [1, 1, 1, 1]], padding=[7, 6])

    array = tape.to_routing()
    assert array.shape == (2, 4, 3, 2)
    assert np.array_equal(array[0, 2:], one)
    assert np.array_equal(array[1], two)
    assert (array[0, :2] == [7, 6]).all()
    assert np.array_equal(Tape.from_routing([one, two], experts=8).to_routing(), np.concatenate([one, two]))


def test_a_flat_batch(tmp_path: Path) -> None:
    given_TLK = routing(3)

    tape = Tape.from_routing(given_TLK, experts=8, mask=np.array([True, False, True, True]), padding=0)
    tape.save(tmp_path / "a.tape")

    assert np.array_equal(Tape.load(tmp_path / "a.tape").to_routing()[[0, 2, 3]], given_TLK)
    assert {entry.value.origin for entry in Tape.load(tmp_path / "a.tape").entries()} == {"routing"}


def test_one_choice_without_an_axis() -> None:
    given_TL = routing()[..., 0]

    tape = Tape.from_routing(given_TL, experts=8)

    assert [entry.shape for entry in tape.entries()] == [(5,)] * 3
    assert np.array_equal(tape.to_routing(), given_TL)


def test_no_tokens() -> None:
    assert Tape.from_routing(routing(0), experts=8).to_routing().shape == (0, 3, 2)
    padded = Tape.from_routing(routing(0), experts=8, mask=[[0, 0]], padding=1).to_routing()
    assert padded.tolist() == [[[[1, 2]] * 3] * 2]
    assert Tape.from_routing([routing(0), routing(0)], experts=8).to_routing().shape == (0, 3, 2)


# ---------------------------------------------------------------------------------------------- who gets it


def test_layers_find_theirs_by_label() -> None:
    given_TLK = routing(layers=2)
    tape = Tape.from_routing(given_TLK, experts=8, layers=["moe 1", "moe 0"], name="experts")

    with replay(tape):
        for label, n in [("moe 0", 1), ("moe 1", 0)]:
            (got,) = layer(label, lambda: save_for_recompute(np.zeros((5, 2), "int64"), name="experts"))
            assert np.array_equal(got, given_TLK[:, n])
            assert got.dtype == np.int64


def test_layers_that_do_not_route_have_nothing_where_those_that_do_are_named(tmp_path: Path) -> None:
    """The dense ones that many models begin with."""
    given_TLK = routing(layers=2)
    path = tmp_path / "a.tape"
    Tape.from_routing(given_TLK, experts=8, layers=["moe 1", "moe 2"], name="experts").save(path)

    with replay(Tape.load(path)):
        for label, n in [("dense", None), ("moe 1", 0), ("dense", None), ("moe 2", 1)]:
            if n is None:
                layer(label, lambda: None)
                continue
            (got,) = layer(label, lambda: save_for_recompute(np.zeros((5, 2), "int64"), name="experts"))
            assert np.array_equal(got, given_TLK[:, n])


@pytest.mark.parametrize("automatic", [False, True])
def test_a_label_that_no_layer_has_is_told(automatic: bool) -> None:
    """The order would give a layer the routing of another, in a list of labels that was sorted as texts."""
    names = ["layers.1", "layers.10", "layers.2"]
    tape = Tape.from_routing(routing(), experts=8, layers=names, name="experts")
    label = AutoLabel("Layer") if automatic else "model.layers.1"
    way_out = r"layers=\.$"
    with (
        pytest.raises(TapeError, match=rf"nothing for layer '{label}', slot 'experts'\.(?s:.)*{way_out}"),
        replay(tape),
    ):
        layer(label, lambda: save_for_recompute(np.zeros((5, 2), "int64"), name="experts"))
    with pytest.raises(TapeError, match="3 left over"), replay(tape):
        layer(label, lambda: None)


def test_layers_that_are_not_checkpointed_are_told_to_who_gives_routing_to_regions() -> None:
    way_out = r"for layers that this library does not checkpoint, give from_routing regions=False\.$"
    with pytest.raises(TapeError, match=way_out), replay(Tape.from_routing(routing(layers=1), experts=8)):
        save_for_recompute(np.zeros((5, 2), "int64"))


def test_who_decides_by_recompute_once_is_told_the_name() -> None:
    def route() -> np.ndarray:
        return np.zeros((5, 2), "int64")

    message = (
        r"slot 'recompute_once\(\.\.\.\)'\.(?s:.)*the tape has: the unnamed slot(?s:.)*"
        r'for recompute_once\(route, \.\.\.\) is "recompute_once\(route\)"\.$'
    )
    with pytest.raises(TapeError, match=message), replay(Tape.from_routing(routing(layers=1), experts=8)):
        layer("moe", lambda: recompute_once(route))


def test_who_names_no_layers_is_told_to_where_some_do_not_route() -> None:
    way_out = r"one forward for one; if some checkpointed layers do not route, from_routing has to be given layers=\.$"
    with pytest.raises(TapeError, match=way_out), replay(Tape.from_routing(routing(layers=1), experts=8)):
        layer("dense", lambda: None)
        layer("moe", lambda: None)


@pytest.mark.parametrize("layers", [None, ["moe 0", "moe 1"]])
@pytest.mark.parametrize("file", [False, True])
def test_layers_in_layers_that_route_or_do_not(layers: list[str] | None, file: bool, tmp_path: Path) -> None:
    """Attention that is checkpointed by itself decides nothing. What routes in there cannot have its routing."""
    given_TLK = routing(layers=2)
    tape = Tape.from_routing(given_TLK, experts=8, layers=layers, name="experts")
    if file:
        tape.save(tmp_path / "a.tape")
        tape = Tape.load(tmp_path / "a.tape")

    def decide() -> Any:
        return save_for_recompute(np.zeros((5, 2), "int64"), name="experts")[0]

    def block() -> Any:
        layer("attention", lambda: layer("softmax", lambda: None))
        return decide()

    with replay(tape):
        if layers:
            layer("dense", lambda: layer("attention", lambda: None))
        for n in range(2):
            assert np.array_equal(layer(f"moe {n}", block), given_TLK[:, n])
    with pytest.raises(TapeError) as caught, replay(tape):
        layer("moe 0", lambda: layer("inner", decide))
    headline, place, way_out = str(caught.value).splitlines()
    assert headline == "the tape has nothing for layer 'inner', slot 'experts'."
    assert place.startswith(f"  asked for at: {__file__}:")
    assert way_out == (
        "  way out: save under the same names and scopes in the model that is recorded and the one that replays; "
        "from_routing has none for a layer inside of another checkpointed one, and for those outside by their order "
        "or by the labels in layers=."
    )


def test_checkpointed_layers_beside_those_that_route_without() -> None:
    given_TLK = routing(layers=1)
    with replay(Tape.from_routing(given_TLK, experts=8, regions=False)):
        layer("attention", lambda: None)
        assert np.array_equal(save_for_recompute(np.zeros((5, 2), "int64"))[0], given_TLK[:, 0])


def test_a_label_that_says_outside_is_one_like_another() -> None:
    tape = Tape.from_routing(routing(layers=2), experts=8, layers=["a", "b"])
    with record() as recorded:
        layer("outside of layers", lambda: [layer(name, lambda: save_for_recompute(1)) for name in "ab"])
    assert tape.root.complete
    assert not recorded.root.complete
    with pytest.raises(TapeError, match="layer 'c' runs where the tape has layer 'a'"), replay(recorded):
        layer("outside of layers", lambda: layer("c", lambda: None))


@pytest.mark.parametrize("name", [None, "experts"])
@pytest.mark.parametrize("layers", [None, ["one", "two"]])
def test_layers_that_are_not_checkpointed(name: str | None, layers: list[str] | None) -> None:
    given_TLK = routing(layers=2)

    def run(n: int) -> np.ndarray:
        with layer_scope(layers[n]) if layers else contextlib.nullcontext():
            return save_for_recompute(np.zeros((5, 2), "int64"), name=name)[0]

    with record() as recorded:
        run(0), run(1)
    tape = Tape.from_routing(given_TLK, experts=8, regions=False, name=name, layers=layers)

    assert [entry[:5] for entry in tape.entries()] == [entry[:5] for entry in recorded.entries()]
    with replay(tape):
        assert all(np.array_equal(run(n), given_TLK[:, n]) for n in range(2))


def test_bytes_for_whom(tmp_path: Path) -> None:
    """Without data of its own, and outside of layers, nobody knows which framework asks."""
    Tape.from_routing([[[1]]], experts=2, regions=False).save(tmp_path / "a.tape")
    lines = [
        "from roundpipe_core import *",
        f"with replay(Tape.load({str(tmp_path / 'a.tape')!r})):",
        "    get_recompute_data()",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert "bytes for torch or JAX: save_for_recompute(data), with data of your own, tells which" in done.stderr


def test_what_recompute_once_gave() -> None:
    def route() -> np.ndarray:
        return np.zeros((5, 2), "int64")

    with record() as recorded:
        layer("moe", lambda: recompute_once(route))
    (entry,) = recorded.entries()
    tape = Tape.from_routing(routing(layers=1), experts=8, name=entry.name, layers=["moe"])

    assert [entry[:5] for entry in tape.entries()] == [entry[:5] for entry in recorded.entries()]
    assert np.array_equal(recorded.to_routing(), np.zeros((5, 1, 2)))


def test_the_wrong_batch_is_refused_before_a_number_is_computed() -> None:
    with (
        pytest.raises(
            TapeError,
            match=r"shape \[5, 2\], where the layer decides \[6, 2\]\.\n  called at: .*\n  way out: replay it with",
        ),
        replay(Tape.from_routing(routing(), experts=8)),
    ):
        layer("moe", lambda: save_for_recompute(np.zeros((6, 2), "int64")))
    with (
        pytest.raises(
            TapeError,
            match=r"decides \[6, 2\]\.\n  called at: .*\n  way out: make the tape .* mask\.flatten\(\), the routing",
        ),
        replay(Tape.from_routing(routing(6).reshape(2, 3, 3, 2), experts=8)),
    ):
        layer("moe", lambda: save_for_recompute(np.zeros((6, 2), "int64")))


# ------------------------------------------------------------------------------------------- what is refused


def with_value(value: int, dtype: str = "int16") -> np.ndarray:
    array = routing(dtype=dtype)
    array[3, 1, 0] = value
    return array


def without_record(*tokens: int) -> np.ndarray:
    array = routing()
    array[list(tokens)] = 0
    return array


def without_layer(fill: int) -> np.ndarray:
    array = routing()
    array[:, 1] = fill
    return array


def of_a_buffer(fill: Any, dtype: str = "uint8") -> np.ndarray:
    """Routing of all 256 experts that a byte can tell apart; in `fill` is what nobody wrote to."""
    array = np.arange(96).reshape(4, 3, 8).astype(dtype)
    array[fill] = 255
    return array


UNROUTED = (
    "mark the tokens that are real by mask=, and say by padding= what the others get; "
    "of a token that is real, ask the engine for its routing."
)
BLANK = (
    "a router chooses different experts. Mark the tokens that were routed by mask=, and say by padding= what the "
    "others get."
)
FEWER = (
    "a router chooses different experts: leave out the choices that it does not make, as in routing[..., :6], or take "
    "the routing in a wider type where it is made, such as int16."
)
EXPERTS = (
    "give the number of experts of the model, if it has more; where an engine counts shared experts among them, or the "
    "copies that it keeps of some, give the numbers that the model's router has."
)
DECODED = (
    "decode the text and give it a shape, as in numpy.frombuffer(base64.b64decode(text), 'int32').reshape(-1, layers, "
    "top_k); the engine says which type it has."
)
NO_EXPERTS = "leave out layers that have no experts, as in routing[:, 1:]; of others, ask the engine for their routing."
ONE_A_LAYER = (
    "stack those of layers, numpy.stack(routing, 1); join those of sequences whose layers make one choice, "
    "numpy.concatenate(routing), or give the mask of the batch, with a row for each."
)
LAST = (
    "an engine has no routing for the last token that it generated, which no layer of its has seen: leave that token "
    "out of the mask, and out of the loss."
)
WRONG = {
    "not routed": (
        {"routing": with_value(-1)},
        "-1 at token 3, layer 1: not routed, and as an index it would be the last expert",
        UNROUTED,
    ),
    "an expert too many": (
        {"routing": with_value(8)},
        "expert 8 of 8 at token 3, layer 1",
        EXPERTS,
    ),
    "an engine's 255": (
        {"routing": with_value(255, "uint8")},
        "255, which is -1 in uint8, at token 3, layer 1: not routed, and as an index it would be the last expert",
        UNROUTED,
    ),
    "beyond any width": (
        {"routing": with_value(2**63 + 1, "uint64")},
        "expert 9223372036854775809 of 8 at token 3, layer 1",
        EXPERTS,
    ),
    "wraps to a right one": (
        {"routing": with_value(2**32 + 1, "int64")},
        "expert 4294967297 of 8 at token 3, layer 1",
        EXPERTS,
    ),
    "not routed, in a batch": (
        {"routing": with_value(-1)[None]},
        "-1 at row 0, token 3, layer 1: not routed, and as an index it would be the last expert",
        UNROUTED,
    ),
    "not routed, though marked": (
        {"routing": with_value(-1), "mask": [1, 1, 1, 1, 0], "padding": 0},
        "-1 at token 3, layer 1: not routed, and as an index it would be the last expert",
        UNROUTED,
    ),
    "no padding": (
        {"routing": routing(), "mask": [1, 1, 1, 1, 0]},
        "nothing for 1 places of padding",
        "say which experts padding goes to, as in padding=0, and leave it out of the loss.",
    ),
    "other tokens": (
        {"routing": routing(), "mask": [[1, 1, 1], [1, 0, 0]]},
        "5 tokens, [5], where the mask [2, 3] has 4 of 6",
        "give the tokens that the mask marks, in their order, or one for each place of the mask.",
    ),
    "an engine's 65535, among others": (
        {"routing": with_value(2**16 - 1, "uint16"), "mask": [1, 1, 1, 1, 1]},
        "65535, which is -1 in uint16, at token 3, layer 1: not routed, and as an index it would be the last expert",
        UNROUTED,
    ),
    "cut to 8 bits": (
        {"routing": np.array([[[3, 200]]]).astype("int8")},
        "-56 at token 0, layer 0: a number too large for int8, which made a negative one of it",
        "take the routing in a wider type where it is made, such as int16.",
    ),
    "no record": (
        {"routing": without_record(3)},
        "nothing but expert 0 at token 3, in every layer: zeros where the engine has no record",
        BLANK,
    ),
    "no record, of a token that is real": (
        {"routing": without_record(1, 3)[None], "mask": [[1, 0, 1, 1, 1]], "padding": 0},
        "nothing but expert 0 at row 0, token 3, in every layer: zeros where the engine has no record",
        BLANK,
    ),
    "zeros for a layer without experts": (
        {"routing": without_layer(0)},
        "nothing but expert 0 in layer 1, for every token",
        NO_EXPERTS,
    ),
    "-1 for a layer without experts": (
        {"routing": without_layer(-1), "mask": [0, 1, 1, 1, 1], "padding": 3},
        "-1 in layer 1, for every token: not routed",
        NO_EXPERTS,
    ),
    "the last token": (
        {"routing": [routing(2), routing(4)], "mask": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], "padding": 0},
        "2 tokens in sequence 0, where row 0 of the mask has 3",
        LAST,
    ),
    "the last token of a flat batch": (
        {"routing": routing(4), "mask": [1, 1, 1, 1, 1]},
        "4 tokens, [4], where the mask [5] has 5 of 5",
        LAST,
    ),
    "the last tokens": (
        {"routing": routing(4), "mask": [[1, 1, 1], [1, 1, 1]]},
        "4 tokens, [4], where the mask [2, 3] has 6 of 6",
        LAST,
    ),
    "nothing for one sequence": (
        {"routing": [routing(2), None], "mask": [[1, 1], [1, 1]]},
        "NoneType in place of sequence 1",
        "give an array for each; a sequence that the engine has no routing of cannot be replayed.",
    ),
    "an array of arrays": (
        {"routing": np.array([routing(2), routing(3)], dtype=object)},
        "object, not integers",
        "give the indices of experts, of several sequences as a list of arrays.",
    ),
    "padding that is a half": (
        {"routing": routing(4), "mask": [1, 1, 1, 1, 0], "padding": 0.5},
        "padding=0.5, with 8 experts and 2 choices",
        "give the first of the experts that padding shall go to, or one for each choice.",
    ),
    "padding that is a flag": (
        {"routing": routing(4), "mask": [1, 1, 1, 1, 0], "padding": True},
        "padding=True, with 8 experts and 2 choices",
        "give the first of the experts that padding shall go to, or one for each choice.",
    ),
    "other rows": (
        {"routing": [routing(1), routing(2)], "mask": [[1, 1, 1], [1, 0, 0]], "padding": 0},
        "1 tokens in sequence 0, where row 0 of the mask has 3",
        "give the sequences in the order of the rows; those packed into fewer rows, joined into one array.",
    ),
    "other batch": (
        {"routing": routing(4).reshape(2, 2, 3, 2), "mask": [[1, 1, 1, 1]]},
        "4 tokens, [2, 2], where the mask [1, 4] has 4 of 4",
        "give the tokens that the mask marks, in their order, or one for each place of the mask.",
    ),
    "a mask of floats": (
        {"routing": routing(), "mask": np.ones(5)},
        "a mask of float64[5]",
        "give a mask [batch, length] or [tokens] that is True, or 1, where there is a token.",
    ),
    "a mask of lengths": (
        {"routing": routing(), "mask": [2, 3]},
        "a mask of int8[2]",
        "give a mask [batch, length] or [tokens] that is True, or 1, where there is a token.",
    ),
    "padding outside": (
        {"routing": routing(4), "mask": [1, 1, 1, 1, 0], "padding": 8},
        "padding=8, with 8 experts and 2 choices",
        "give the first of the experts that padding shall go to, or one for each choice.",
    ),
    "padding below": (
        {"routing": routing(4), "mask": [1, 1, 1, 1, 0], "padding": -1},
        "padding=-1, with 8 experts and 2 choices",
        "give the first of the experts that padding shall go to, or one for each choice.",
    ),
    "padding outside, one by one": (
        {"routing": routing(4), "mask": [1, 1, 1, 1, 0], "padding": [0, 8]},
        "padding=[0, 8], with 8 experts and 2 choices",
        "give the first of the experts that padding shall go to, or one for each choice.",
    ),
    "padding too short": (
        {"routing": routing(4), "mask": [1, 1, 1, 1, 0], "padding": [1]},
        "padding=[1], with 8 experts and 2 choices",
        "give the first of the experts that padding shall go to, or one for each choice.",
    ),
    "floats": ({"routing": routing().astype("float32")}, "float32, not integers", "give the indices of experts."),
    "bools": ({"routing": routing() > 3}, "bool, not integers", "give the indices of experts."),
    "one axis": (
        {"routing": np.arange(3)},
        "the shape [3]",
        "give [tokens, layers, top_k] or [batch, length, layers, top_k].",
    ),
    "five axes": (
        {"routing": routing()[None, None]},
        "the shape [1, 1, 5, 3, 2]",
        "give [tokens, layers, top_k] or [batch, length, layers, top_k].",
    ),
    "no layers": (
        {"routing": np.zeros((5, 0, 2), "int16")},
        "the shape [5, 0, 2]",
        "give at least one layer, and one choice.",
    ),
    "no choices": (
        {"routing": np.zeros((5, 3, 0), "int16")},
        "the shape [5, 3, 0]",
        "give at least one layer, and one choice.",
    ),
    "labels too few": (
        {"routing": routing(), "layers": ["a"]},
        "3 layers, and 1 labels",
        "label each layer that routes, and no other.",
    ),
    "ragged lists": (
        {"routing": [[[1]], [[1], [2]]]},
        "lists of several lengths",
        "give a list of arrays, one a sequence, with the mask of the batch.",
    ),
    "more than 64 bits": (
        {"routing": [[[2**70]]]},
        f"integers from {2**70} to {2**70}",
        "give the indices of experts.",
    ),
    "a text": ({"routing": "AAEC"}, "str among its numbers", DECODED),
    "bytes": ({"routing": b"AAEC"}, "bytes among its numbers", DECODED),
    "a float": (
        {"routing": [[0.5]]},
        "float among its numbers",
        "give an array of integers, or lists of integers.",
    ),
    "a masked array": (
        {"routing": np.ma.masked_equal(routing(), 3)},
        "an array whose values cannot be read: a masked array",
        "save its data and its mask.",
    ),
    "-1 of a byte, for a token": (
        {"routing": of_a_buffer(2), "experts": 256},
        "nothing but expert 255 at token 2, in every layer: -1 in uint8 where the engine has no record",
        BLANK,
    ),
    "-1 of a byte, for a token of a list": (
        {"routing": [of_a_buffer(2), of_a_buffer([])], "experts": 256},
        "nothing but expert 255 at token 2, in every layer: -1 in uint8 where the engine has no record",
        BLANK,
    ),
    "-1 of a byte, for a layer": (
        {"routing": of_a_buffer((slice(None), 1)), "experts": 300},
        "nothing but expert 255 in layer 1, for every token",
        NO_EXPERTS,
    ),
    "-1 of a byte, for a choice": (
        {"routing": of_a_buffer((..., 7)), "experts": 256},
        "nothing but expert 255 as choice 7 of every token, in every layer: -1 in uint8",
        FEWER,
    ),
    "one array a layer": (
        {"routing": list(routing().swapaxes(0, 1)), "layers": ["a", "b", "c"]},
        "3 arrays of the shape [5, 2], which may be one a layer or one a sequence",
        ONE_A_LAYER,
    ),
    "one array a layer, as many as choices": (
        {"routing": list(routing(layers=2).swapaxes(0, 1))},
        "2 arrays of the shape [5, 2], which may be one a layer or one a sequence",
        ONE_A_LAYER,
    ),
    "one array a layer, of a batch": (
        {"routing": list(routing(4).swapaxes(0, 1)), "mask": [[1, 1, 1], [1, 0, 0]], "padding": 0},
        "3 arrays of the shape [4, 2], which may be one a layer or one a sequence",
        ONE_A_LAYER,
    ),
    "sequences of other layers": (
        {"routing": [routing(2), routing(2, 4)]},
        "sequences of shapes [2, 3, 2], [2, 4, 2]",
        "give each as [tokens, layers, top_k].",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_routing_is_told(name: str) -> None:
    arguments, fault, way_out = WRONG[name]

    with pytest.raises(TapeError) as caught:
        Tape.from_routing(**{"experts": 8, **arguments})

    assert said(caught.value, __file__) == [f"the routing has {fault}.", f"  way out: {way_out}"]


def test_the_last_expert_may_be_a_choice() -> None:
    for given_TLK in (
        of_a_buffer((2, 1)),  # a router that draws with replacement
        of_a_buffer((slice(1, None), ..., 7)),
        of_a_buffer((..., 7), "int16"),  # where -1 is -1
        [of_a_buffer((..., 7), "int16")] * 2,
    ):
        assert Tape.from_routing(given_TLK, experts=256).entries()
    assert Tape.from_routing(of_a_buffer((..., 7))[:1, :1], experts=256).entries()  # one of 32 draws has that


def test_numbers_of_numpy_in_lists() -> None:
    assert Tape.from_routing(
        [[list(row) for row in token] for token in routing()], experts=8
    ).to_routing().tolist() == (routing().tolist())


def test_zeros_that_may_be_a_choice_are_taken() -> None:
    for given_TLK in (
        np.zeros((3, 2, 1), "int8"),  # of one choice nothing can be said
        without_layer(0)[:1, 1:],
        without_record(1)[:, :1],
        without_record(1),
    ):
        mask = [n != 1 for n in range(len(given_TLK))]
        assert Tape.from_routing(given_TLK, experts=8, mask=mask, padding=0).entries()
    assert Tape.from_routing(without_record(1)[:, :1], experts=8).entries()
    few_TLK = without_record(1) % 3  # which a draw has in one of 150
    assert Tape.from_routing(few_TLK, experts=3).entries()


def test_sequences_of_one_choice() -> None:
    one, two = routing(3)[..., 0], routing(3)[::-1, :, 0]
    for mask in ([[1, 1, 1], [1, 1, 1]], [[1, 1, 1, 0], [0, 1, 1, 1]]):
        array = np.stack(held(Tape.from_routing([one, two], experts=8, mask=mask, padding=0)), -1)
        assert np.array_equal(array[np.array(mask) == 1], np.concatenate([one, two]))
    for sequences in ([one, two[:2]], np.concatenate([one, two])):
        assert Tape.from_routing(sequences, experts=8).entries()


def test_sequences_that_the_engine_padded_to_the_width_of_the_batch() -> None:
    one, two = routing(3), routing(3)[::-1]
    mask = np.array([[0, 1, 1], [1, 1, 0]])

    array = Tape.from_routing([one, two], experts=8, mask=mask, padding=0).to_routing()

    assert np.array_equal(array[mask == 1], np.stack([one, two])[mask == 1])


def test_padding_of_any_integer_type_and_results_of_any_dtype() -> None:
    for padding in (np.int64(3), np.array(3), np.array([3, 4])):
        tape = Tape.from_routing(routing(4), experts=8, mask=[1, 1, 1, 1, 0], padding=padding)
        for dtype in ("int32", np.int32, np.dtype("int32")):
            assert tape.to_routing(dtype=dtype).dtype == np.int32
        assert tape.to_routing()[4].tolist() == [[3, 4]] * 3


@pytest.mark.parametrize("option", [{"name": 3}, {"layers": "abc"}, {"layers": ["a", None, "c"]}, {"layers": {"a"}}])
def test_labels_and_names_are_texts(option: Any) -> None:
    ((name, given),) = option.items()
    with pytest.raises(OptionError) as caught:
        Tape.from_routing(routing(), experts=8, **option)
    assert str(caught.value).startswith(f"{name}={given!r} is no ")


@pytest.mark.parametrize("given_TLK", [with_value(-1, "int8"), [routing(), with_value(-1, "int8")]])
def test_what_was_not_routed_stays_so_in_a_wider_type(given_TLK: Any) -> None:
    with pytest.raises(TapeError, match=r"-1 at token [38], layer 1: not routed"):
        Tape.from_routing(given_TLK, experts=300)


@pytest.mark.parametrize("experts", [0, -1, 1.5, True, "8"])
def test_experts_is_a_number(experts: Any) -> None:
    with pytest.raises(OptionError) as caught:
        Tape.from_routing(routing(), experts=experts)
    headline, line, way_out = str(caught.value).splitlines()
    assert headline == f"experts={experts!r} is no number of experts."
    assert line.startswith(f"  called at: {__file__}:")
    assert way_out == "  way out: give how many there are."


def test_the_way_back_takes_loops_over_layers_apart(tmp_path: Path) -> None:
    given_TLK = routing()
    with record() as tape:
        layer("loop", lambda: save_for_recompute(np.ascontiguousarray(given_TLK.transpose(1, 0, 2))))
    next(tape.decisions())[2].axes = (1,)
    tape.save(tmp_path / "a.tape")

    assert np.array_equal(Tape.load(tmp_path / "a.tape").to_routing(), given_TLK)


NAMED = (
    "give the name= under which the layers save their indices, and the item= that they are in it; tape.entries() lists "
    "all."
)


def test_the_way_back_names_what_is_missing() -> None:
    with record() as tape:
        layer("moe", lambda: save_for_recompute(np.arange(3), np.arange(4), name="plan"))
        layer("dense", lambda: save_for_recompute("left"))

    assert tape.to_routing(name="plan", item="[0]").tolist() == [[0], [1], [2]]
    for arguments, *told in [
        (
            {},
            "layer 'moe' has more than one array of integers.",
            "  such as: slot 'plan', item [0]",
            "  such as: slot 'plan', item [1]",
            "  way out: name the save by name= and the item by item=, as tape.entries() lists them.",
        ),
        (
            {"name": "x"},
            "the tape has no routing named 'x'.",
            "  it has: slot 'plan', the unnamed slot",
            f"  way out: {NAMED}",
        ),
        (
            {"name": "plan", "item": "[7]"},
            "the tape has no routing named 'plan', item '[7]'.",
            "  it has: slot 'plan', the unnamed slot",
            f"  way out: {NAMED}",
        ),
        (
            {"dtype": "float32"},
            "dtype='float32' is none for routing.",
            "  way out: one of int8, uint8, int16, uint16, int32, int64.",
        ),
    ]:
        with pytest.raises((TapeError, OptionError)) as caught:
            tape.to_routing(**arguments)
        assert said(caught.value, __file__) == told
    with pytest.raises(TapeError, match=r"^the tape has no routing\.\n  it has: nothing\n"):
        Tape().to_routing()


def test_the_way_back_refuses_layers_of_several_shapes_and_narrow_dtypes() -> None:
    with record() as tape:
        layer("a", lambda: save_for_recompute(np.array([[300]])))
    with record() as other:
        layer("a", lambda: save_for_recompute(np.zeros((2, 1), "int32")))
        layer("b", lambda: save_for_recompute(np.zeros((3, 1), "int32")))

    assert tape.to_routing().tolist() == [[[300]]]
    with pytest.raises(TapeError) as caught:
        tape.to_routing(dtype="int8")
    assert said(caught.value, __file__) == [
        "layer 'a': experts from 300 to 300, which int8 cannot hold.",
        '  way out: give a wider dtype, such as dtype="int32".',
    ]
    with pytest.raises(TapeError) as caught:
        other.to_routing()
    assert said(caught.value, __file__) == [
        "the layers of the tape do not route alike.",
        "  a: [2, 1]",
        "  b: [3, 1]",
        "  way out: record one forward a tape, and name the save that holds the indices.",
    ]


def test_arrays_of_a_framework_whose_frontend_is_not_imported_are_told() -> None:
    program = (
        "import torch\n"
        "from roundpipe_core import Tape\n"
        "for routing in (torch.zeros(1, 1, 2, dtype=torch.int64), [torch.zeros(1, 1, 2, dtype=torch.int64)]):\n"
        "    try:\n"
        "        Tape.from_routing(routing, experts=4)\n"
        "    except Exception as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.count("the routing has Tensor among its numbers.") == 2
    assert done.stdout.count("way out: import roundpipe_torch, which reads the arrays of torch, or give what") == 2


def test_lists_need_no_numpy() -> None:
    lines = [
        "import sys",
        "sys.modules['numpy'] = None",
        "from roundpipe_core import Tape",
        "tape = Tape.from_routing([[[300, 1], [2, 3]]], experts=301, mask=[0, 1], padding=299)",
        "print([bytes(entry.value.data) for entry in tape.entries()])",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, check=False
    )

    expected = [np.array(pair, "<i2").tobytes() for pair in ([[299, 300], [300, 1]], [[299, 300], [2, 3]])]
    assert done.stdout == f"{expected}\n", done.stderr


def test_the_way_back_of_a_number_and_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    with record() as tape:
        layer("a", lambda: save_for_recompute(np.array(3)))
    with pytest.raises(TapeError) as caught:
        tape.to_routing()
    assert said(caught.value, __file__) == [
        "the tape's routing is a single number.",
        "  way out: save the index of each token.",
    ]
    whole = Tape.from_routing([[[0, 1]]], experts=2)
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(TapeError) as caught:
        whole.to_routing()
    assert said(caught.value, __file__) == ["routing is given as a numpy array.", "  way out: install numpy."]


def test_the_way_back_leaves_out_saves_of_other_names() -> None:
    with record() as tape:
        layer("a", lambda: [save_for_recompute(np.array([[n]]), name=name) for n, name in enumerate(("x", "y", None))])
        layer("b", lambda: save_for_recompute(0.5, name="y"))  # which is no array of integers
    assert tape.to_routing(name="y").tolist() == [[[1]]]
    with record() as tape:
        layer("dense", lambda: save_for_recompute("left"))
        layer("moe", lambda: save_for_recompute(np.array([[3]])))
    assert tape.to_routing().tolist() == [[[3]]]
    with record() as tape:
        layer("moe", lambda: [save_for_recompute(np.array([[3]]), name=name) for name in "ab"])
    with pytest.raises(TapeError, match="layer 'moe' has more than one array of integers"):
        tape.to_routing()
