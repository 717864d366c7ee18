"""The machinery of the benchmarks: the gate closes when it should, and tables say what the rows say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import _gate, _results, _run
from benchmarks._results import Found, Results
from benchmarks._rows import Row
from benchmarks._sheets import among_equals, goals, number, sheets

ROOT = Path(__file__).parents[1]


def planted(*rows: Row, quick: bool = False, error: str = "") -> Results:
    found = Found("title", "about", "today", quick, 1.0, list(rows), [], error)
    return Results({}, {"b": found})


def row(name: str = "ours", value: float = 1.0, **more: object) -> Row:
    return Row("t", name, "w", value, benchmark="b", **more)  # type: ignore[arg-type]


def verdict(results: Results, **baseline: list[float]) -> list[str]:
    return [one.why for one in _gate.judge(results, {f"b / t / {name} / w": entry for name, entry in baseline.items()})]


@pytest.mark.parametrize(
    ("now", "why"),
    [(1.0, ""), (1.1, ""), (1.11, "worse than allowed"), (0.5, "")],
    ids=["same", "limit", "worse", "better"],
)
def test_the_gate_holds_ratios_within_their_tolerance(now: float, why: str) -> None:
    assert verdict(planted(row(value=9.0, unit="s", ratio=now)), ours=[1.0, 0.1]) == [why]


def test_a_count_may_not_grow_by_one() -> None:
    assert verdict(planted(row(value=0)), ours=[0, 0.0]) == [""]
    assert verdict(planted(row(value=1)), ours=[0, 0.0]) == ["worse than allowed"]


def test_what_is_no_longer_measured_closes_the_gate_except_in_a_quick_run() -> None:
    assert verdict(planted(row()), ours=[1, 0.0], gone=[1, 0.0]) == ["not measured any more", ""]
    assert verdict(planted(row(), quick=True), ours=[1, 0.0], gone=[1, 0.0]) == [""]


def test_a_benchmark_that_failed_closes_the_gate_and_one_without_a_device_does_not() -> None:
    assert verdict(planted(error="boom"), ours=[1, 0.0]) == ["failed: boom"]
    assert verdict(planted(), ours=[1, 0.0]) == []


def test_the_baseline_takes_gated_rows_and_keeps_what_was_not_run() -> None:
    old = {"b / t / gone / w": [1.0, 0.0], "other / t / ours / w": [2.0, 0.1]}
    results = planted(row(value=3, tolerance=0.0), row("torch", 5), row("ratio", 9.0, ratio=1.25, tolerance=0.1))

    assert _gate.rebased(results, old) == {
        "b / t / ours / w": [3, 0.0],
        "b / t / ratio / w": [1.25, 0.1],
        "other / t / ours / w": [2.0, 0.1],
    }
    assert _gate.rebased(planted(row(tolerance=0.0), quick=True), old) == dict(sorted(old.items()))


def test_the_command_fails_with_a_table_where_a_planted_row_is_over_its_limit(tmp_path: Path) -> None:
    from benchmarks import __main__ as command

    allowed = dict(_gate.read())
    key, (before, tolerance) = next((key, entry) for key, entry in allowed.items() if entry[0] > 0 and " @ " not in key)
    benchmark, table, name, what = key.split(" / ")
    for value, code in ((before * (1 + tolerance), 0), (before * (1 + tolerance) * 1.01 + 1, 1)):
        found = Found("", "", "", True, 0.0, [Row(table, name, what, value, benchmark=benchmark)], [])
        Results({}, {benchmark: found}).save(tmp_path / "results.json")
        assert command.gate(tmp_path / "results.json") == code


def test_results_survive_the_file(tmp_path: Path) -> None:
    results = planted(row(ratio=0.5, baseline="torch", bar=1.0, at=10, tolerance=0.1), row("torch"))
    results.save(tmp_path / "results.json")

    assert _results.load(tmp_path / "results.json") == results


def test_tables_have_a_line_for_each_way_or_place() -> None:
    (plain,) = sheets([row("slow", 2e-3, unit="s", ratio=2.0), row("fast", 1e-3, unit="s", ratio=1.0)])
    assert plain.lines == [["fast", "1 ms, 1.00 ×"], ["slow", "2 ms, 2.00 ×"]]  # noqa: RUF001

    (swept,) = sheets([row(name, n, at=n) for n in (1, 1000) for name in ("ours", "torch")])
    assert swept.heads == ["", "ours", "torch"]
    assert swept.lines == [["1", "1", "1"], ["1,000", "1,000", "1,000"]]

    pairs = [Row("t", name, what, 1, at=1) for name in ("ours", "torch") for what in ("save", "read")]
    assert [(sheet.title, sheet.heads) for sheet in sheets(pairs)] == [
        ("t: save", ["", "ours", "torch"]),
        ("t: read", ["", "ours", "torch"]),
    ]


def test_goals_are_told_as_met_or_missed() -> None:
    met, missed = goals(planted(row(bar=1.0), row("second", 1.01, bar=1.0), row("torch", 7)))

    assert (len(met), len(missed)) == (1, 1)
    assert "second" in missed[0]


@pytest.mark.parametrize(("ours", "verdict"), [(0.9, "is first"), (1.1, "is not first")])
def test_a_peer_that_covers_less_is_no_equal(ours: float, verdict: str) -> None:
    timed = [Row("t", name, "w", 1.0, ratio=ratio) for name, ratio in (("ours", ours), ("full", 1.0), ("less", 0.5))]
    cases = [Row("c", name, "nested", name == "full") for name in ("full", "less")]
    of = {"torch_overhead": planted(*timed), "torch_coverage": planted(*cases)}
    told = among_equals(Results({}, {name: results.benchmarks["b"] for name, results in of.items()}))

    assert told == [f"t: ours {ours:.2f} {verdict}; full 1.00."]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (2.5e-7, "s", "250 ns"),
        (2.5e-5, "s", "25 µs"),
        (1.5, "s", "1.5 s"),
        (128, "B", "128 B"),
        (6.2e6, "B", "6.20 MB"),
    ],
)
def test_numbers_are_readable(value: float, unit: str, text: str) -> None:
    assert number(value, unit) == text


def test_every_module_is_run_and_documented() -> None:
    modules = {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")}
    blocks = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")

    assert modules == set(_run.ALL)
    assert {name for name in modules if f"<!-- begin: {name} -->" not in blocks} == set()


def test_a_benchmark_measures_what_the_baseline_has(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "found.json"
    _run.measure("torch_costs", path, quick=True)

    found = _results.found(**json.loads(path.read_text()))

    assert not found.error
    verdicts = _gate.judge(Results({}, {"torch_costs": found}), _gate.read())
    assert {one.why for one in verdicts} == {""}


def test_the_layers_of_the_cuda_benchmark_agree_on_a_cpu_too() -> None:
    pytest.importorskip("torch")
    from benchmarks import torch_cuda

    losses = [step() for step in torch_cuda.steps("cpu", torch_cuda.SMALL).values()]
    for loss in losses:
        loss.backward()

    assert len({loss.item() for loss in losses}) == 1


@pytest.mark.cuda
def test_the_cuda_benchmark_runs_on_a_device() -> None:
    from benchmarks import torch_cuda

    rows = [one for one in torch_cuda.rows(quick=True) if isinstance(one, Row)]

    assert {one.value for one in rows if one.name == "ours" and one.what == "waits in backward"} == {0}
    assert all(one.value > 0 for one in rows if one.name == "torch non-reentrant")
