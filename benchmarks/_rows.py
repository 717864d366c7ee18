"""A row: one measured quantity of one way to do something. Each benchmark module gives rows; all else reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """`value` in `unit`; `ratio` is to the way called `baseline`, measured beside it."""

    table: str
    name: str
    what: str
    value: float
    unit: str = ""  # "s", "B", or nothing for a count
    ratio: float | None = None
    baseline: str = ""
    bar: float | None = None  # what it should not exceed: a goal, shown as met or missed
    at: float | None = None  # its place in a sweep
    tolerance: float | None = None  # the share by which it may get worse before the gate closes; None: not gated
    benchmark: str = ""  # the module, filled in by the runner

    @property
    def key(self) -> str:
        place = "" if self.at is None else f" @ {self.at:g}"
        return f"{self.benchmark} / {self.table} / {self.name} / {self.what}{place}"

    @property
    def judged(self) -> float:
        """The ratio where there is one, else the value."""
        return self.value if self.ratio is None else self.ratio

    @property
    def missed(self) -> bool:
        return self.bar is not None and self.judged > self.bar

    def as_json(self) -> dict[str, Any]:
        empty = {field.name: field.default for field in dataclasses.fields(self)}
        return {name: value for name, value in dataclasses.asdict(self).items() if value != empty[name]}


def counts(
    table: str, ways: Mapping[str, Mapping[str, float]], *, ours: Collection[str], unit: str = "", **more: Any
) -> list[Row]:
    """Rows of exact counts, each way's by what is counted. Those of `ours` are gated: no tolerance."""
    return [
        Row(table, name, what, value, _unit(what, unit), tolerance=0.0 if name in ours else None, **more)
        for name, found in ways.items()
        for what, value in found.items()
    ]


def _unit(what: str, unit: str) -> str:
    return "B" if "bytes" in what else unit
