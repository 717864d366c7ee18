"""The demo at a size of seconds, in PyTorch: what its report says must be true, what it refuses it must say clearly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.examples.scripts import EXAMPLES, imported

SMALL = ["--layers", "2", "--dim", "32", "--heads", "2", "--experts", "8", "--batch", "4", "--length", "48"]
SMALL += ["--threads", "1", "--steps", "6", "--bias-rate", "0.01", "--frameworks", "torch"]

for needed in ("torch", "matplotlib", "rich", "tqdm", "numpy"):
    pytest.importorskip(needed)
moe_lm = imported("moe_lm")
weights = imported("_moe_weights")
text = imported("_moe_text")
training = imported("_moe_training")
imported("_moe_torch_results")  # the script imports it late


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A report of a small run of all four ways."""
    out = tmp_path_factory.mktemp("demo")
    assert moe_lm.main([*SMALL, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def ways(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {way["name"]: way for way in report["ways"]}


@pytest.mark.parametrize("name", ["ours", "verify"])
def test_ours_is_the_oracle_bit_for_bit(ways: dict[str, dict[str, Any]], name: str) -> None:
    assert ways[name]["losses"] == ways["none"]["losses"]
    assert ways[name]["parameter_difference"] == 0
    assert ways[name]["gradient_error"] == 0
    assert ways[name]["held_out_loss"] == ways["none"]["held_out_loss"]
    assert ways[name]["bitwise"] is True


def test_torchs_checkpointing_deviates_without_an_error(ways: dict[str, dict[str, Any]]) -> None:
    assert ways["torch"]["losses"][0] == ways["none"]["losses"][0]  # the first forward is still the same
    assert ways["torch"]["gradient_error"] > 1e-3
    assert ways["torch"]["loss_difference"] > 0
    assert ways["torch"]["bitwise"] is False


def test_ours_decides_once_and_torch_twice(ways: dict[str, dict[str, Any]]) -> None:
    decisions = {name: (way["decisions_forward"], way["decisions_backward"]) for name, way in ways.items()}

    assert decisions == {"none": (1, 0), "torch": (1, 1), "ours": (1, 0), "verify": (1, 1)}


def test_flips_are_seen_where_the_router_runs_again(ways: dict[str, dict[str, Any]]) -> None:
    assert ways["torch"]["flipped_tokens"] > 0
    assert ways["verify"]["flipped_tokens"] > 0
    assert ways["verify"]["verify_agrees"] is True
    assert ways["none"]["flipped"] is None
    assert ways["ours"]["flipped"] is None


def test_ours_holds_what_torchs_holds_the_decision_and_the_bias(ways: dict[str, dict[str, Any]]) -> None:
    biases = 3 * 8 * 4  # of 8 experts, before and after: a recompute finds a buffer as its forward found or left it
    ours = ways["ours"]["bytes_held"]
    assert [n - ways["ours"]["bytes_saved"] - biases for n in ours] == ways["torch"]["bytes_held"]
    assert max(ours) < min(ways["none"]["bytes_held"]) / 2


def test_everything_is_written_and_the_page_needs_nothing_else(folder: Path) -> None:
    figures = {f"torch_{name}" for name in ("loss", "deviation", "bytes", "decisions", "flips", "time")}
    assert {path.name for path in folder.iterdir()} == {
        "report.html",
        "report.json",
        *(f"{name}.png" for name in figures),
    }
    page = (folder / "report.html").read_text(encoding="utf-8")
    sources = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]{1,40})""", page)
    assert len(sources) == len(figures)
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "<script" not in page
    for name in figures:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_names_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        moe_lm.main([*SMALL, "--ways", "ours", "--steps", "1", "--precision", "float32", "--out", str(tmp_path)]) == 0
    )

    shown, progress = capsys.readouterr()
    assert [word for word in ("none", "torch", "ours", "verify") if f" {word} " in shown] == ["none", "ours"]
    assert "In PyTorch, ours followed the un-checkpointed run bit for bit" in shown
    assert "training in PyTorch: 1 of 1 steps" in progress


def test_the_oracle_alone_has_no_figures_that_compare(tmp_path: Path) -> None:
    assert moe_lm.main([*SMALL, "--ways", "none", "--steps", "2", "--out", str(tmp_path)]) == 0

    assert {path.stem for path in tmp_path.glob("*.png")} == {"torch_loss", "torch_bytes", "torch_decisions"}


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        moe_lm.main([*SMALL, "--learning-rate", "1e9", "--out", str(tmp_path)])

    assert "try a smaller --learning-rate than 1e+09" in capsys.readouterr().err


def test_a_way_that_leaves_the_oracle_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(training.WAYS, "ours", training.WAYS["torch"])

    assert moe_lm.main([*SMALL, "--ways", "ours", "--out", str(tmp_path)]) == 1
    assert "FAILED: ours in PyTorch deviates" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "0"], "argument --steps: 0 is less than 1"),
        (["--steps", "many"], "argument --steps: 'many' is not a whole number"),
        (["--seed", "-1"], "argument --seed: -1 is less than 0"),
        (["--dropout", "1"], "argument --dropout: 1 is not in the range from 0 to below 1"),
        (["--dropout", "nan"], "argument --dropout: nan is not in the range"),
        (["--learning-rate", "fast"], "argument --learning-rate: 'fast' is not a number"),
        (["--ways", "none,theirs"], "argument --ways: 'theirs' is not one of none, torch, jax, ours, verify"),
        (["--ways", ","], "argument --ways: name at least one of none, torch, jax, ours, verify"),
        (["--experts", "4", "--top-k", "5"], "--top-k 5 is more than --experts 4"),
        (["--dim", "30", "--heads", "4"], "--dim 30 is not a multiple of --heads 4"),
        (["--length", "100000000"], "are too short for --length 100000000"),
    ],
)
def test_a_wrong_option_is_a_clear_error(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        moe_lm.main(["--threads", "1", "--out", str(tmp_path), *options])

    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_a_file_in_the_place_of_the_folder_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("")

    with pytest.raises(SystemExit):
        moe_lm.main(["--out", str(tmp_path / "taken")])
    assert "taken: File exists" in capsys.readouterr().err


def test_help_is_shown_by_the_script_itself() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "moe_lm.py"), "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={"PYTHONPATH": str(EXAMPLES.parent), "PATH": "", "COLUMNS": "120"},
    )

    assert done.returncode == 0, done.stderr
    assert "--bias-rate R" in done.stdout
    assert "Exit status" in done.stdout


def test_text_and_batches_are_the_same_each_time(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "test/c.py", "pack/d.py", "note.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * 20)

    read = text.read_text(folder=tmp_path)

    assert read.files == 3
    assert bytes(read.train[:4].astype("uint8")) == b"a.py"
    assert len(text.read_text(limit=50, folder=tmp_path)) == 50
    one, other = (list(text.batches(read.train, 2, 8, count=3, seed=1)) for _ in range(2))
    assert [batch.tolist() for batch in one] == [batch.tolist() for batch in other]
    assert one[0].shape == (2, 9)


def test_the_weights_have_the_names_that_the_model_gives_them() -> None:
    sizes = weights.Sizes(layers=2, D=8, E=4, K=2, L=6, V=16, heads=2)
    model = imported("_moe_model").LanguageModel(sizes, training.WAYS["none"])
    arrays = weights.initial_weights(sizes, seed=0)

    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == {
        name: array.shape for name, array in arrays.items()
    }


def test_weights_and_text_need_no_framework() -> None:
    code = "import sys, _moe_settings, _moe_text, _moe_weights; sys.exit(bool({'torch', 'jax'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, check=False, timeout=100)

    assert done.returncode == 0
