"""What a run found, as one JSON file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ._rows import Row

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "bench"


@dataclasses.dataclass(frozen=True)
class Found:
    """Of one benchmark."""

    title: str
    about: str
    date: str
    quick: bool
    seconds: float
    rows: list[Row]
    notes: list[str]
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"rows": [row.as_json() for row in self.rows]}


@dataclasses.dataclass(frozen=True)
class Results:
    machine: dict[str, Any]
    benchmarks: dict[str, Found]

    @property
    def rows(self) -> list[Row]:
        return [row for found in self.benchmarks.values() for row in found.rows]

    def of(self, benchmark: str, table: str = "") -> list[Row]:
        """Rows of a benchmark, of all its tables or of one."""
        found = self.benchmarks.get(benchmark)
        return [row for row in found.rows if table in ("", row.table)] if found else []

    def save(self, path: Path) -> None:
        content = {"machine": self.machine, "benchmarks": {n: found.as_json() for n, found in self.benchmarks.items()}}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Results:
    content = json.loads(path.read_text(encoding="utf-8"))
    return Results(content["machine"], {name: found(**entry) for name, entry in content["benchmarks"].items()})


def found(rows: list[dict[str, Any]], **entry: Any) -> Found:
    return Found(rows=[Row(**row) for row in rows], **entry)
