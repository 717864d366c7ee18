"""Rows as tables: one line for each way, or for each place in a sweep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ._results import Results
from ._rows import Row


class Sheet(NamedTuple):
    title: str
    heads: list[str]
    lines: list[list[str]]


def sheets(rows: Iterable[Row]) -> list[Sheet]:
    """A table for each title among the rows of a benchmark."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row.table, []).append(row)
    return [_sheet(title, group) for title, group in grouped.items()]


def _sheet(title: str, rows: list[Row]) -> Sheet:
    names, whats = (list(dict.fromkeys(getattr(row, part) for row in rows)) for part in ("name", "what"))
    swept = any(row.at is not None for row in rows)

    def line(row: Row) -> str:
        return f"{row.at:,.0f}" if swept and row.at is not None else row.name

    def column(row: Row) -> str:
        if not swept or len(names) == 1:
            return row.what
        return row.name if len(whats) == 1 else f"{row.name}: {row.what}"

    if not swept and len(whats) == 1:
        rows = sorted(rows, key=lambda row: row.judged)
    cells = {(line(row), column(row)): cell(row) for row in rows}
    lines, columns = (list(dict.fromkeys(key[part] for key in cells)) for part in (0, 1))
    if swept and len(whats) == 1:
        title = f"{title}: {whats[0]}"
    return Sheet(
        title, ["", *columns], [[place, *(cells.get((place, head), "") for head in columns)] for place in lines]
    )


def cell(row: Row) -> str:
    shown = number(row.value, row.unit)
    if row.ratio is None:
        return shown
    return f"{shown}, {row.ratio:.2f} ×"  # noqa: RUF001


def number(value: float, unit: str) -> str:
    if unit == "s":
        for size, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if value >= size:
                return f"{value / size:.3g} {name}" if value / size < 1000 else f"{value / size:,.0f} {name}"
        return f"{value * 1e9:.0f} ns"
    if unit == "B":
        return f"{value:,.0f} B" if value < 1e5 else f"{value / 1e6:,.2f} MB"
    if unit == "yes":
        return "yes" if value else "no"
    if unit == "%":
        return f"{value:.2%}"
    if value >= 1e8:
        return f"{value / 1e6:,.0f} M"
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:,.1f}"


def goals(results: Results) -> tuple[list[str], list[str]]:
    """Goals met and goals missed, a sentence each."""
    met, missed = [], []
    for row in results.rows:
        if row.bar is None:
            continue
        place = "" if row.at is None else f", {row.at:,.0f}"
        value = f"{row.ratio:.2f} × {row.baseline}" if row.ratio is not None else number(row.value, row.unit)  # noqa: RUF001
        bar = f"{row.bar:.2f}" if row.ratio is not None else number(row.bar, row.unit)
        sentence = f"{row.table}{place}: {row.name}, {row.what} {value}; goal {bar} or less."
        (missed if row.missed else met).append(sentence)
    return met, missed
