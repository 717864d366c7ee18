"""Rows as tables: one line for each way, or for each place in a sweep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ._results import Results
from ._rows import Row


class Sheet(NamedTuple):
    title: str
    heads: list[str]
    lines: list[list[str]]


def sheets(rows: Iterable[Row]) -> list[Sheet]:
    """The tables of a benchmark: one for each title, and in a sweep of several ways one for each quantity."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row.table, []).append(row)
    return [sheet for title, group in grouped.items() for sheet in _of_table(title, group)]


def _of_table(title: str, rows: list[Row]) -> Iterator[Sheet]:
    names, whats = (list(dict.fromkeys(getattr(row, part) for row in rows)) for part in ("name", "what"))
    if all(row.at is None for row in rows):
        ordered = rows if len(whats) > 1 else sorted(rows, key=lambda row: row.judged)
        yield _pivot(title, [(row.name, row.what, cell(row)) for row in ordered])
    elif len(names) == 1:
        yield _pivot(title, [(f"{row.at:,.0f}", row.what, cell(row)) for row in rows])
    else:
        for what in whats:
            cells = [(f"{row.at:,.0f}", row.name, cell(row)) for row in rows if row.what == what]
            yield _pivot(f"{title}: {what}", cells)


def _pivot(title: str, cells: list[tuple[str, str, str]]) -> Sheet:
    """From (line, column, text)."""
    found = {(line, column): text for line, column, text in cells}
    lines, columns = (list(dict.fromkeys(each[part] for each in cells)) for part in (0, 1))
    return Sheet(title, ["", *columns], [[line, *(found.get((line, head), "") for head in columns)] for line in lines])


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


def among_equals(results: Results) -> list[str]:
    """How ours stands among the peers that cover every case there is but the decision, a sentence for each layer."""
    lacking = {row.name for row in results.of("torch_coverage") if not row.value and row.what != "decision kept"}
    sentences = []
    for sheet in dict.fromkeys(row.table for row in results.of("torch_overhead")):
        ratio = {row.name: row.judged for row in results.of("torch_overhead", sheet)}
        equals = {
            name: f"{name} {value:.2f}"
            for name, value in ratio.items()
            if name not in lacking and not name.startswith(("ours", "no "))
        }
        if equals and lacking and "ours" in ratio:
            first = "first" if ratio["ours"] <= min(ratio[name] for name in equals) else "not first"
            sentences.append(f"{sheet}: ours {ratio['ours']:.2f} is {first}; {', '.join(equals.values())}.")
    return sentences
