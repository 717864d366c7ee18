"""The gate: no ratio and no count gets worse than `baseline.json` allows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

from ._results import Results

BASELINE = Path(__file__).with_name("baseline.json")


class Verdict(NamedTuple):
    key: str
    before: float
    limit: float
    now: float | None  # None: it was not measured any more
    why: str  # it does not pass; empty if it does


def judge(results: Results, baseline: dict[str, list[float]]) -> list[Verdict]:
    """One verdict for each entry of the baseline that this run was to measure, the worst first."""
    measured = {row.key: row.judged for row in results.rows}
    verdicts = [
        Verdict(f"{name} / ", 0.0, 0.0, None, f"failed: {found.error}")
        for name, found in results.benchmarks.items()
        if found.error
    ]
    for key, (before, tolerance) in baseline.items():
        found = results.benchmarks.get(key.partition(" / ")[0])
        now = measured.get(key)
        if found is None or found.error or (now is None and (found.quick or not found.rows)):
            continue  # not a part of this run, told already, or not on this machine
        limit = before * (1 + tolerance)
        if now is None:
            why = "not measured any more"
        else:
            why = "" if now <= limit else "worse than allowed"
        verdicts.append(Verdict(key, before, limit, now, why))
    return sorted(verdicts, key=lambda verdict: not verdict.why)


def read(path: Path = BASELINE) -> dict[str, list[float]]:
    content: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8"))
    return content


def rebased(results: Results, before: dict[str, list[float]]) -> dict[str, list[float]]:
    """A baseline from these results. Benchmarks that were not run, or only quickly, keep what they had."""
    renewed = {n for n, found in results.benchmarks.items() if found.rows and not found.quick and not found.error}
    kept = {key: entry for key, entry in before.items() if key.partition(" / ")[0] not in renewed}
    measured = {
        row.key: [row.value if row.ratio is None else math.ceil(row.ratio * 1000) / 1000, row.tolerance]
        for row in results.rows
        if row.benchmark in renewed and row.tolerance is not None
    }
    return dict(sorted((kept | measured).items()))


def write(baseline: dict[str, list[float]], path: Path = BASELINE) -> None:
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(entry)}" for key, entry in baseline.items())
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
