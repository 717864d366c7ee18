"""diff and the command line: what flipped, by numpy's account (R13)."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roundpipe_core import Tape, TapeDiff, __version__, diff, layer_scope, recompute_once, record, save_for_recompute
from roundpipe_core._command import main
from roundpipe_core._heatmap import BINS, draw, shares
from roundpipe_core._host import HostArray
from roundpipe_core._phase import Run, open_slot, thread

ROOT = Path(__file__).parents[2]
T, L, K, E = 50, 3, 2, 8


def layer(label: Any, function) -> Any:
    before = thread.run
    phase, slot = open_slot(label)
    thread.run = Run(phase, slot)
    try:
        return function()
    finally:
        thread.run = before


def tape(*layers: Any, names: list[str | None] | None = None) -> Tape:
    """A tape of one region a layer; a dict is a save a name."""
    with record() as made:
        for n, saves in enumerate(layers):
            named = saves if isinstance(saves, dict) else {None: saves}
            layer(
                names[n] if names else f"layer {n}",
                lambda named=named: [save_for_recompute(value, name=name) for name, value in named.items()],
            )
    return made


def two() -> tuple[np.ndarray, np.ndarray]:
    """Routing, and the same with flips and other orders in the second layer."""
    draw = np.random.default_rng(0)
    one = draw.permuted(np.tile(np.arange(E), (T, L, 1)), axis=-1)[..., :K].astype("int16")
    other = one.copy()
    other[7:9, 1] = other[7:9, 1, ::-1]
    other[12, 1, 0] = (set(range(E)) - set(one[12, 1])).pop()
    other[30, 1] = (other[30, 1] + 1) % E
    return one, other


def test_rows_flipped_and_reordered_are_counted_apart() -> None:
    one, other = two()
    assert len(set(one[30, 1]) - set(other[30, 1])) > 0

    found = diff(Tape.from_routing(one, experts=E), Tape.from_routing(other, experts=E))

    assert found
    assert [(d.layer, d.rows, d.flipped, d.reordered, d.first) for d in found] == [
        ("layer 0", T, 0, 0, None),
        ("layer 1", T, 2, 2, 7),
        ("layer 2", T, 0, 0, None),
    ]
    assert found[1].flipped_rows == (12, 30)
    assert found[1].reordered_rows == (7, 8)
    assert not diff(Tape.from_routing(one, experts=E), Tape.from_routing(one, experts=E))


def test_a_batch_counts_its_tokens() -> None:
    one, other = two()

    found = diff(*(Tape.from_routing(r.reshape(5, 10, L, K), experts=E) for r in (one, other)))

    assert [(d.rows, d.flipped, d.first) for d in found] == [(T, 0, None), (T, 2, 7), (T, 0, None)]


def test_widths_and_frameworks_do_not_count() -> None:
    one, other = (r[:, 1] for r in two())

    assert not diff(tape(one.astype("int64")), tape(one.astype("uint8")))
    assert diff(tape(one.astype("int64")), tape(other.astype("uint8")))[0].flipped_rows == (12, 30)
    host = HostArray("int16", one.shape, memoryview(one.tobytes()), "torch")
    assert not diff(tape(one.astype("int64")), tape(host))
    assert diff(tape(np.array([[2**64 - 1]], "uint64")), tape(np.array([[-1]])))  # the same bits, other numbers


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128", "bool"])
def test_floats_are_equal_where_numpy_says_so(dtype: str) -> None:
    one = np.array([[0.0, 1], [math.nan, 2], [3, 4], [5, 6], [math.nan, 0]]).astype(dtype)
    other = one.copy()
    other[0, 0] = -0.0
    other[3, 1] = 0
    other[4, 0] = 0

    for found in (diff(tape(one), tape(other))[0], diff(tape(other), tape(one))[0]):
        assert (found.flipped_rows, found.reordered) == ((3, 4), 0)


def test_bfloat16_is_equal_where_its_floats_are() -> None:
    def bf16(*values: float) -> HostArray:
        data = b"".join(struct.pack("<f", value)[2:] for value in values)
        return HostArray("bfloat16", (len(values),), memoryview(data), "torch")

    (found,) = diff(tape(bf16(0.0, math.nan, 1.5, 2)), tape(bf16(-0.0, math.nan, 1.5, 4)))
    assert found.flipped_rows == (3,)
    assert not diff(tape(bf16(0.0, 1.5)), tape(np.array([0, 1.5], "float32")))


@pytest.mark.parametrize(
    ("dtype", "one", "other", "flipped"),
    [
        ("float8_e4m3fn", (1, 2, 3, 0x7F, 0x80), (7, 2, 4, 0xFF, 0), (0, 2)),
        ("float8_e5m2", (0x7C, 0xFD, 0x80, 0x7C), (0x7C, 0x7E, 0, 0x7D), (3,)),  # infinity is none of the NaNs
        ("float8_e5m2fnuz", (0x80, 0xFF, 0), (0x80, 0x7F, 0x80), (1, 2)),  # whose only NaN is 0x80
        ("float8_e8m0fnu", (0x80, 0xFF), (0, 0xFF), (0,)),  # which has no sign
    ],
)
def test_floats_of_a_byte(dtype: str, one: tuple[int, ...], other: tuple[int, ...], flipped: tuple[int, ...]) -> None:
    ours, theirs = (HostArray(dtype, (len(values),), memoryview(bytes(values)), "torch") for values in (one, other))
    assert diff(tape(ours), tape(theirs))[0].flipped_rows == flipped


def test_masks_of_arrays_are_compared_and_what_they_hide_is_not() -> None:
    def tape(values: Any, mask: Any) -> Tape:
        with record() as made:
            save_for_recompute(np.ma.masked_array(values, mask))
        return made

    one = tape([1.0, 2.0, 3.0], [False, True, False])
    assert not diff(one, tape([1.0, 9.0, 3.0], [False, True, False]))
    assert diff(one, tape([1.0, 2.0, 3.0], [False, False, False]))
    assert diff(one, tape([1.0, 2.0, 3.0], [False, True, True]))
    assert diff(one, tape([0.0, 2.0, 3.0], [False, True, False]))
    assert not diff(tape(1.0, True), tape(2.0, True))
    assert diff(tape(1.0, True), tape(1.0, False))
    records = np.zeros(2, "i4,f4")
    assert not diff(tape(records, False), tape(records, False))
    with record() as plain:
        save_for_recompute(records)
    assert not diff(plain, plain)


def test_plain_values() -> None:
    found = diff(tape((1, "a", math.nan, None, True)), tape((1, "b", math.nan, None, 1)))

    assert [d.flipped for d in found] == [0, 1, 0, 0, 1]
    assert [d.item for d in found] == ["[0][0]", "[0][1]", "[0][2]", "[0][3]", "[0][4]"]
    assert [(d.rows, d.first) for d in found] == [(1, None), (1, 0), (1, None), (1, None), (1, 0)]


def test_what_cannot_be_compared_is_told() -> None:
    one = tape(np.zeros((2, 2), "i4"), np.zeros(2, "i4"), np.zeros(2), (1, 2), {"a": 1})
    other = tape(np.zeros((3, 2), "i4"), np.zeros(2, "f4"), 1, (1, 2, 3), {"b": 1})

    assert [(d.item, d.rows, d.fault) for d in diff(one, other)] == [
        ("[0]", 0, "shape [2, 2] and [3, 2]"),
        ("[0]", 0, "int32 and float32"),
        ("[0]", 0, "ndarray and int"),
        ("", 0, "2 values and 3"),
        ("", 0, "only in the first tape"),
        ("", 0, "only in the second tape"),
    ]


def test_arrays_that_no_file_holds_are_compared_where_they_are() -> None:
    texts, objects = np.array(["a", "b", "c"]), np.array([1, "x", None], object)
    one = tape(texts, texts, objects, objects, np.longdouble([1, 2]), texts)
    other = tape(texts.copy(), np.array(["a", "x", "y"]), objects.copy(), objects[::-1], np.longdouble([1, 3]), objects)

    assert [(d.rows, d.fault) for d in diff(one, other)] == [
        (0, None),
        (3, "2 of 3 rows of str32"),
        (0, None),
        (3, "2 of 3 rows of object"),
        (2, f"1 of 2 rows of {np.longdouble([1]).dtype}"),
        (3, "3 of 3 rows of str32"),
    ]
    assert [bool(d.differs) for d in diff(one, other)] == [False, True, False, True, True, True]


def test_layers_are_matched_by_chosen_labels_else_by_order() -> None:
    one, other = tape(1, 2, names=["a", "b"]), tape(2, 1, names=["b", "a"])
    assert not diff(one, other)
    assert [d.fault for d in diff(one, tape(1, 2, names=["a", "c"]))] == [
        None,
        "only in the first tape",
        "only in the second tape",
    ]

    def forward() -> None: ...
    def call() -> None: ...

    assert not diff(tape(1, 2, names=["a", "b"]), tape(1, 2, names=[forward, call]))
    assert not diff(tape(1, 2, names=[call, call]), tape(1, 2, names=[forward, forward]))


def test_a_tape_of_a_file_is_the_same_tape(tmp_path: Path) -> None:
    with record() as made, layer_scope("s"):
        save_for_recompute(np.arange(3), {"x": (1, None)})
        layer("inner", lambda: save_for_recompute(b"x", name="n"))
    made.save(tmp_path / "a.tape")

    assert not diff(made, Tape.load(tmp_path / "a.tape"))


# ------------------------------------------------------------------------------------------------ margins


@pytest.mark.parametrize("names", [("experts", "experts_scores"), (None, "scores"), ("experts", "scores")])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_the_margin_is_how_far_a_flip_was_from_a_tie(names: tuple[str | None, str], dtype: str) -> None:
    scores_TE = np.random.default_rng(1).random((T, E)).astype(dtype)
    noise_TE = (scores_TE + np.random.default_rng(2).normal(0, 0.02, (T, E))).astype(dtype)
    one, other = (np.argsort(-s, axis=-1)[:, :K] for s in (scores_TE, noise_TE))
    gaps = [
        min(scores_TE[t, list(a - b)]) - max(scores_TE[t, list(b - a)])
        for t in range(T)
        if (a := set(one[t])) != (b := set(other[t]))
    ]
    assert len(gaps) > 1

    (found,) = diff(tape({names[0]: one, names[1]: scores_TE}), tape({names[0]: other, names[1]: noise_TE}))

    assert found.flipped == len(gaps)
    assert found.margin == pytest.approx(float(max(gaps)), rel=1e-2 if dtype == "float16" else 1e-6)
    assert diff(tape({names[0]: one}), tape({names[0]: other}))[0].margin is None
    swapped = diff(tape({names[0]: other}), tape({names[0]: one, names[1]: scores_TE}))
    assert swapped[0].margin == found.margin  # the scores of the second tape serve, too


def test_scores_alone_are_compared() -> None:
    assert diff(tape({"scores": np.zeros(2)}), tape({"scores": np.ones(2)}))[0].flipped == 2


# ----------------------------------------------------------------------------------------- the command line


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    for name, routing in zip("ab", two(), strict=True):
        Tape.from_routing(routing, experts=E, name="experts").save(tmp_path / f"{name}.tape")
    return str(tmp_path / "a.tape"), str(tmp_path / "b.tape")


def test_the_status_says_whether_they_differ(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = files

    assert main(["diff", a, a]) == 0
    assert main(["diff", a, b]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5].split() == ["layer", "save", "item", "rows", "flipped", "reordered", "first", "margin"]
    assert lines[-3].split() == ["layer", "1", "experts", "[0]", "50", "2", "2", "7"]
    assert lines[-1] == "2 of 150 rows flipped, 2 reordered"


def test_json(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = files

    assert main(["diff", a, b, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert main(["show", a, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)

    assert found["differ"] is True
    assert found["entries"][1] == {
        "layer": "layer 1", "order": 1, "name": "experts", "scope": "", "item": "[0]", "rows": 50, "flipped": 2,
        "reordered": 2, "first": 7, "margin": None, "fault": None,
    }  # fmt: skip
    assert shown["bytes"] == T * L * K
    assert shown["entries"][1] == {
        "layer": "layer 1", "order": 1, "name": "experts", "scope": "", "item": "[0]", "dtype": "int8",
        "shape": [T, K], "range": [0, 7], "below": E, "value": None,
    }  # fmt: skip
    main(["diff", a, a, "--json"])
    text = capsys.readouterr().out
    assert text == json.dumps(json.loads(text), indent=1) + "\n"


def test_bad_input_is_status_2(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "bad").write_bytes(b"x" * 100)
    for arguments, fault in [
        (["show", str(tmp_path / "bad")], "is not a tape that can be read"),
        (["diff", files[0], str(tmp_path / "missing")], "No such file"),
        (["show", str(tmp_path)], "a folder, not a file"),
        (["diff", *files, "--plot", str(tmp_path / "x.nope")], "\n  way out: end its name in .png, .pdf or .svg.\n"),
        (["diff", *files, "--plot", str(tmp_path / "x.nope")], f"error: {tmp_path / 'x.nope'}: Format 'nope' is not "),
        (["diff", *files, "--plot", str(tmp_path / "nowhere" / "x.png")], "No such file"),
    ]:
        assert main(arguments) == 2
        assert fault in capsys.readouterr().err
    for arguments in (["diff", files[0]], []):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["diff", *files, "--plot", str(tmp_path / "x.png")]) == 2
    assert less_the_line(capsys) == "error: --plot needs matplotlib.\n  way out: pip install matplotlib\n"
    tape("text").save(tmp_path / "text.tape")
    assert main(["diff", str(tmp_path / "text.tape"), str(tmp_path / "text.tape"), "--plot", "x.png"]) == 2
    told = "error: nothing in these tapes has rows to draw.\n  way out: leave out --plot.\n"
    assert less_the_line(capsys) == told


def less_the_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What was written, less the line of a program that calls `main`, which a command does not have."""
    return re.sub(r"  called at: .*\n", "", capsys.readouterr().err)


def test_a_picture(files: tuple[str, str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    assert main(["diff", *files, "--plot", str(tmp_path / "map.png")]) == 1

    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_loses_no_flip() -> None:
    tokens = 10 * BINS + 3
    one = np.zeros((tokens, 2, 1), "int8")
    other = one.copy()
    other[[5, 6, tokens - 1], 0] = 1

    grid = shares(list(diff(Tape.from_routing(one, experts=2), Tape.from_routing(other, experts=2))))

    size = math.ceil(tokens / BINS)
    assert len(grid[0]) <= BINS
    assert grid[0][0] == 2 / size
    assert grid[0][-1] == 1 / (tokens - size * (len(grid[0]) - 1))
    assert sum(share > 0 for share in grid[0]) == 2
    assert set(grid[1]) == {0.0}


def test_show_lists_values_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tape("left", np.zeros((2, 3), "f4"), (3, None)).save(tmp_path / "a.tape")

    assert main(["show", str(tmp_path / "a.tape")]) == 0

    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["layer", "save", "item", "dtype", "shape", "range", "below", "value"],
        ["layer", "0", "(unnamed)", "[0]", "str", "[]", "'left'"],
        ["layer", "1", "(unnamed)", "[0]", "float32", "[2,", "3]"],
        ["layer", "2", "(unnamed)", "[0][0]", "int", "[]", "3..3", "3"],
        ["layer", "2", "(unnamed)", "[0][1]", "NoneType", "[]", "None"],
        ["4", "arrays", "and", "values,", "24", "bytes", "of", "arrays"],
    ]


def test_numbers_of_a_list_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan that was read into Python may hold thousands of them."""
    for name, last, text in ("a", 2, "x"), ("b", 5, "y"):
        with record() as tape:
            save_for_recompute({"counts": [7, 0, last], "pair": [(1, 0.5), (True, text)]}, 3, name="plan")
        tape.save(tmp_path / f"{name}.tape")
    assert main(["show", str(tmp_path / "a.tape")]) == 0
    lines = [re.split(" {2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        ["(outside)", "plan", "[0]['counts'][0..2]", "int", "[3]", "0..7", "7, 0, 2"],
        ["(outside)", "plan", "[0]['pair'][0][0]", "int", "[]", "1..1", "1"],
        ["(outside)", "plan", "[0]['pair'][0][1]", "float", "[]", "0.5"],
        ["(outside)", "plan", "[0]['pair'][1][0]", "bool", "[]", "True"],
        ["(outside)", "plan", "[0]['pair'][1][1]", "str", "[]", "'x'"],
        ["(outside)", "plan", "[1]", "int", "[]", "3..3", "3"],
        ["8 arrays and values, 0 bytes of arrays"],
    ]
    assert main(["diff", *(str(tmp_path / f"{name}.tape") for name in "ab")]) == 1
    lines = [re.split(" {2,}", line.rstrip()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        ["(outside)", "plan", "[0]['counts'][0..2]", "3", "1", "0", "2"],
        ["(outside)", "plan", "[0]['pair'][0][0..1]", "2", "0", "0"],
        ["(outside)", "plan", "[0]['pair'][1][0..1]", "2", "1", "0", "1"],
        ["(outside)", "plan", "[1]", "1", "0", "0"],
        ["2 of 8 rows flipped, 0 reordered"],
    ]


def hostile(path: Path) -> None:
    with record() as made:
        layer("\x1b[1m[b]\n", lambda: save_for_recompute(1))
    made.save(path)


def test_a_terminal_obeys_no_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile(tmp_path / "a.tape")

    assert main(["show", str(tmp_path / "a.tape")]) == 0

    assert r"\x1b[1m[b]\n" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_table_of_rich(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    with record() as made:
        layer("\x1b[b]\n" + "y" * 50, lambda: save_for_recompute("x" * 50))
    made.save(tmp_path / "a.tape")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdout", Terminal())

    assert main(["show", str(tmp_path / "a.tape")]) == 0

    head, rule, line, _, counted = sys.stdout.getvalue().strip().splitlines()  # type: ignore[attr-defined]
    assert head.split() == ["layer", "save", "item", "dtype", "shape", "range", "below", "value"]
    assert set(rule.strip()) == {"─"}
    assert line.split()[0] == r"\x1b[b]\n" + "y" * 50  # neither folded nor cut
    assert line.split()[-1] == repr("x" * 50)
    assert counted == "1 arrays and values, 0 bytes of arrays"


def test_without_standard_output_the_status_is_what_there_is(files: tuple[str, str], monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)

    assert main(["diff", *files]) == 1


def test_an_infinite_margin_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(tmp_path / f"{n}.tape") for n in range(2)]
    for n, name in enumerate(names):
        with record() as made:
            save_for_recompute(np.array([[n]]), name="experts")
            save_for_recompute(np.array([[0.0, -np.inf] if n == 0 else [-np.inf, 0.0]]), name="scores")
        made.save(name)

    assert main(["diff", *names, "--json"]) == 1
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["entries"][0]["margin"] == "inf"


def test_a_pipe_without_rich_gets_plain_text(files: tuple[str, str]) -> None:
    lines = [
        "import sys",
        "sys.modules['rich'] = sys.modules['matplotlib'] = sys.modules['numpy'] = None",
        f"sys.argv = ['x', 'diff', {files[0]!r}, {files[1]!r}]",
        "import runpy",
        "runpy.run_module('roundpipe_core', run_name='__main__')",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 1, done.stderr
    assert done.stdout.endswith("2 of 150 rows flipped, 2 reordered\n")


def test_a_reader_may_leave_early(files: tuple[str, str]) -> None:
    command = f"{sys.executable} -m roundpipe_core show {files[0]} | true"
    done = subprocess.run(command, cwd=ROOT, shell=True, capture_output=True, text=True, check=False)

    assert done.stderr == ""


@dataclasses.dataclass
class Plan:
    index: Any


def test_tapes_in_other_forms(tmp_path: Path) -> None:
    """A dataclass comes from a file as a named tuple; where nothing is decided, nothing differs."""
    made = tape(Plan(np.arange(3)))
    made.save(tmp_path / "a.tape")
    assert not diff(made, Tape.load(tmp_path / "a.tape"))
    (empty,) = diff(tape(np.zeros((4, 0))), tape(np.zeros((4, 0))))
    assert (empty.rows, empty.flipped, empty.first) == (4, 0, None)


def test_a_layer_in_another_scope_is_another() -> None:
    def scoped(scope: str) -> Tape:
        with record() as made, layer_scope(scope):
            layer("a", lambda: save_for_recompute(1))
        return made

    found = diff(scoped("s"), scoped("t"))
    assert [d.fault for d in found] == ["only in the first tape", "only in the second tape"]
    assert repr(found) == "<TapeDiff of 2 entries: 0 flipped, 0 reordered, 2 unlike>"

    def once(scope: str, function: Any) -> Tape:
        with record() as made, layer_scope(scope):
            recompute_once(function, -1)
        return made

    def twice(*functions: Any) -> Tape:
        with record() as made:
            for function in functions:
                recompute_once(function, -3)
        return made

    assert not diff(once("s", abs), once("s", lambda n: -n))  # matched by their order
    assert [d.flipped for d in diff(twice(abs, float), twice(float, str))] == [1, 0]  # of those alike, what is left
    assert len(diff(once("s", abs), once("t", lambda n: -n))) == 2


def test_a_margin_of_experts_that_both_ends_have() -> None:
    """The first and the last expert have scores like the others; an index outside has none."""
    scores = np.array([[0.75, 0.25, 0.5], [0.5, 0.0, 0.5]])

    def choice(*experts: int) -> Tape:
        return tape({"best": np.array([[e] for e in experts]), "scores": scores})

    assert diff(choice(0, 0), choice(2, 0))[0].margin == 0.25
    assert diff(choice(0, 0), choice(2, 2))[0].margin == 0.25  # the most of both rows: 0.25 and 0
    assert diff(choice(0, 0), choice(3, 0))[0].margin is None
    assert diff(choice(0, 0), choice(-1, 0))[0].margin is None


def test_margins_of_choices_without_an_axis_and_of_batches() -> None:
    scores_BTE = np.random.default_rng(3).random((2, 4, E)).astype("float32")
    best_BT = scores_BTE.argmax(-1)
    next_BT = np.argsort(-scores_BTE, axis=-1)[..., 1]
    gap = float((scores_BTE.max(-1) - np.take_along_axis(scores_BTE, next_BT[..., None], -1)[..., 0]).max())
    for one, other in [(best_BT[..., None], next_BT[..., None]), (best_BT.reshape(-1), next_BT.reshape(-1))]:
        scores = scores_BTE if one.ndim == 3 else scores_BTE.reshape(-1, E)
        (found,) = diff(tape({"best": one, "scores": scores}), tape({"best": other, "scores": scores}))
        assert found.flipped == 8
        assert found.margin == pytest.approx(gap)
    wide = struct.pack("<3f", 0.5, 0.25, 2.0)
    bits = memoryview(b"".join(wide[n + 2 : n + 4] for n in (0, 4, 8)))
    scores = HostArray("bfloat16", (1, 3), bits, "torch")
    assert diff(tape({"best": np.array([2]), "scores": scores}), tape({"best": np.array([1])}))[0].margin == 1.75


def test_the_whole_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with record() as one:
        save_for_recompute(1)
        layer("moe", lambda: save_for_recompute(np.array([[0], [1]]), name="best"))
    with record() as other:
        layer("moe", lambda: save_for_recompute(np.array([[0], [2]]), name="best"))
    one.declare(below=4, name="best").save(tmp_path / "a.tape")
    other.save(tmp_path / "b.tape")
    a, b = str(tmp_path / "a.tape"), str(tmp_path / "b.tape")

    assert main(["show", a]) == 0
    assert main(["diff", a, b]) == 1
    assert main(["diff", a, str(tmp_path / "c.tape")]) == 2

    shown = capsys.readouterr()
    assert shown.out == (
        "layer      save       item  dtype  shape   range  below  value\n"
        "(outside)  (unnamed)  [0]   int    []      1..1          1\n"
        "moe        best       [0]   int64  [2, 1]  0..1   4\n"
        "2 arrays and values, 16 bytes of arrays\n"
        "layer      save       item  rows  flipped  reordered  first  margin\n"
        "(outside)  (unnamed)        0     0        0                         only in the first tape\n"
        "moe        best       [0]   2     1        0          1\n"
        "1 of 2 rows flipped, 0 reordered, 1 that cannot be compared\n"
    )
    assert shown.err.startswith("error: [Errno 2] No such file or directory")


HELP = {
    "": "usage: python -m roundpipe_core [-h] [--version] COMMAND ... Look into tapes; examine the installation. "
    "positional arguments: COMMAND show list what a tape holds diff compare two tapes doctor versions, devices, "
    "and whether everything works here options: -h, --help show this help message and exit "
    "--version show program's version number and exit",
    "show": "usage: python -m roundpipe_core show [-h] [--json] TAPE positional arguments: TAPE options: "
    "-h, --help show this help message and exit --json as JSON",
    "diff": "usage: python -m roundpipe_core diff [-h] [--json] [--plot FILE] A B positional arguments: A B options: "
    "-h, --help show this help message and exit --json as JSON --plot FILE draw which tokens flipped in which layer "
    "(needs matplotlib) exit status: 0 if they are the same, 1 if they differ, 2 on bad input",
    "doctor": "usage: python -m roundpipe_core doctor [-h] [--json] options: -h, --help show this help message and "
    "exit --json as JSON exit status: 2 if something does not",
}


@pytest.mark.parametrize("command", HELP)
def test_help_says_what_there_is(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "-h"])
    assert caught.value.code == 0
    assert " ".join(capsys.readouterr().out.split()) == HELP[command]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"roundpipe {__version__}\n"


def test_labels_and_scopes_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def scoped(value: int) -> None:
        with layer_scope("gate"), layer_scope("top"):
            save_for_recompute(np.array([[value]]), name="best")
            save_for_recompute(np.array([[0.25, 0.5]]), name="scores")

    for name, value in (("a", 0), ("b", 1)):
        with record() as made:
            layer("outer", lambda value=value: layer("inner", lambda: scoped(value)))
        made.save(tmp_path / f"{name}.tape")

    main(["show", str(tmp_path / "a.tape")])
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["outer/inner", "gate/top/best"]
    (found,) = diff(Tape.load(tmp_path / "a.tape"), Tape.load(tmp_path / "b.tape"))
    assert (found.layer, found.scope, found.name) == ("outer/inner", "gate/top", "best")
    main(["diff", str(tmp_path / "a.tape"), str(tmp_path / "b.tape")])
    row = capsys.readouterr().out.splitlines()[1]
    assert row.split() == ["outer/inner", "gate/top/best", "[0]", "1", "1", "0", "0", "-0.25"]


def test_a_terminal_without_the_letters_gets_their_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with record() as made:
        layer("é", lambda: save_for_recompute(1))
    made.save(tmp_path / "a.tape")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))

    assert main(["show", str(tmp_path / "a.tape")]) == 0

    assert b"\n\\xe9  " in written.getvalue()


def drawn(found: TapeDiff, path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The figure that `draw` saves."""
    module = pytest.importorskip("matplotlib.figure")
    figures: list[Any] = []
    monkeypatch.setattr(module.Figure, "savefig", lambda figure, path, **how: figures.append(figure))
    draw(found, str(path))
    return figures[0]


def test_the_picture_tells_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(value: int) -> Tape:
        def saves() -> None:
            save_for_recompute(np.arange(4)[:, None], {"x": np.array([[0], [0], [value], [0]])}, name="a$b")
            save_for_recompute(value)

        with record() as tape:
            save_for_recompute(np.zeros((2, 1)), name="all")
            save_for_recompute(np.zeros((4 + value, 1)), name="unlike")
            layer("moe", saves)
        return tape

    axes, bar = drawn(diff(made(0), made(1)), tmp_path / "map.png", monkeypatch).axes
    (image,) = axes.images

    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "(outside) all",
        r"moe a\$b",
        r"moe a\$b [1]['x']",
    ]
    assert axes.get_yticks().tolist() == [0.5, 1.5, 2.5]  # in the middle of each
    assert image.get_extent() == [0, 4, 3, 0]
    assert (axes.get_xlabel(), axes.get_title()) == ("token", "1 of 10 rows flipped")
    assert bar.get_ylabel() == "share of flipped tokens in 1"
    shown = np.ma.filled(image.get_array(), np.nan)
    assert np.argwhere(shown == 1).tolist() == [[2, 2]]
    assert np.isnan(shown).sum() == 11
    low, high = image.get_clim()
    assert (high, bar.get_ylim()) == (1, (0, 1))
    assert low < 0  # so that one token in a stretch of many has a colour that is seen
    assert image.get_interpolation() == "nearest"
    assert axes.get_aspect() == "auto"


def test_a_picture_of_many_layers_and_of_no_flip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = tape(*[np.zeros((1700, 1))] * 3)
    figure = drawn(diff(zeros, zeros), tmp_path / "map.png", monkeypatch)
    axes, bar = figure.axes
    assert np.isnan(np.ma.filled(axes.images[0].get_array(), np.nan)).all()
    assert bar.get_ylabel() == "share of flipped tokens in 3"
    assert bar.get_ylim() == (0, 1)
    many = tape(*[np.zeros((2, 1))] * 30)
    wide, high = drawn(diff(many, many), tmp_path / "map.png", monkeypatch).get_size_inches()
    assert high > 2 * figure.get_size_inches()[1]
    assert wide == figure.get_size_inches()[0]
