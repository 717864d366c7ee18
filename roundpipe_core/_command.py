"""The command line: look into tapes, compare them; examine the installation."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from ._backend import backend_of
from ._diff import Difference, TapeDiff, diff
from ._doctor import examine
from ._errors import TapeError
from ._heatmap import draw
from ._report import text_table
from ._tape import Tape, integer_extremes

__all__ = ["main"]

SAME, DIFFERENT, BAD = 0, 1, 2
_Row = TypeVar("_Row")
_PLACE = re.compile(r"(.*)\[(\d+)\]", re.DOTALL)  # of an item in a list
_WIDTH = 60  # of a value: more would be a page
_WHOLE = 10_000  # of a table: a narrow terminal goes on in the next line, and names stay in one piece


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 0, 1 if tapes differ, 2 if something is wrong with what was asked."""
    options = _parser().parse_args(arguments)
    sys.stdout = sys.stdout or io.StringIO()  # None where it was closed
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # as when piped into head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return BAD
    except (TapeError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return BAD
    return status


def _parser() -> argparse.ArgumentParser:
    from . import __version__ as version

    parser = argparse.ArgumentParser(
        prog="python -m roundpipe_core", description="Look into tapes; examine the installation."
    )
    parser.add_argument("--version", action="version", version=f"roundpipe {version}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="list what a tape holds")
    show.add_argument("tape", metavar="TAPE")
    show.add_argument("--json", action="store_true", help="as JSON")
    show.set_defaults(run=_show)
    compare = commands.add_parser(
        "diff", help="compare two tapes", epilog="exit status: 0 if they are the same, 1 if they differ, 2 on bad input"
    )
    compare.add_argument("a", metavar="A")
    compare.add_argument("b", metavar="B")
    compare.add_argument("--json", action="store_true", help="as JSON")
    compare.add_argument("--plot", metavar="FILE", help="draw which tokens flipped in which layer (needs matplotlib)")
    compare.set_defaults(run=_diff)
    doctor = commands.add_parser(
        "doctor",
        help="versions, devices, and whether everything works here",
        epilog="exit status: 2 if something does not",
    )
    doctor.add_argument("--json", action="store_true", help="as JSON")
    doctor.set_defaults(run=_doctor)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    found = list(examine())
    if options.json:
        _write_json([finding._asdict() for finding in found])
    else:
        marks = {True: "ok", False: "FAILS", None: ""}
        _write_table(("", "found", ""), [(finding.about, finding.found, marks[finding.works]) for finding in found])
    return BAD if any(finding.works is False for finding in found) else SAME


def _show(options: argparse.Namespace) -> int:
    tape = Tape.load(options.tape)
    below = [decision.below for _, _, decision in tape.decisions() for _ in decision.leaves]
    rows: list[dict[str, Any]] = [
        {
            "layer": entry.layer,
            "order": entry.order,
            "name": entry.name,
            "scope": entry.scope,
            "item": entry.item,
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "range": list(integer_extremes(entry.value) or ()),
            "below": limit,
            "value": None if backend_of(entry.value) else repr(entry.value)[:_WIDTH],
        }
        for entry, limit in zip(tape.entries(), below, strict=True)
    ]
    if options.json:
        _write_json({"bytes": tape.nbytes(), "entries": rows})
        return SAME
    _write_table(
        ("layer", "save", "item", "dtype", "shape", "range", "below", "value"),
        [_shown(run) for run in _runs(rows, _number)],
    )
    sys.stdout.write(f"{len(rows)} arrays and values, {tape.nbytes()} bytes of arrays\n")
    return SAME


def _number(row: dict[str, Any]) -> tuple[tuple[Any, ...], str] | None:
    """Which numbers it belongs to, and where it sits there, if it is one."""
    if row["dtype"] not in ("int", "float", "bool"):
        return None
    return (row["layer"], row["order"], row["name"], row["scope"], row["dtype"], row["below"]), row["item"]


def _shown(run: list[dict[str, Any]]) -> tuple[Any, ...]:
    """The line of an array or value, or of the numbers of a list."""
    first, values = run[0], [row["value"] for row in run]
    extremes = [number for row in run for number in row["range"]]
    value = values[0] if len(run) == 1 else ", ".join(map(str, values))
    if value is not None and len(value) > _WIDTH:
        value = f"{value[: _WIDTH - 3]}..."
    return (
        *(first["layer"] or "(outside)", _save(first["name"], first["scope"]), _item(run[0]["item"], run[-1]["item"])),
        *(first["dtype"], first["shape"] if len(run) == 1 else [len(run)]),
        *(f"{min(extremes)}..{max(extremes)}" if extremes else "", "" if first["below"] is None else first["below"]),
        value or "",
    )


def _runs(rows: Iterable[_Row], number: Callable[[_Row], tuple[tuple[Any, ...], str] | None]) -> list[list[_Row]]:
    """`rows`, those that are numbers beside one another in one list together: a plan may hold thousands."""
    runs: list[list[_Row]] = []
    next_one: Any = None
    for row in rows:
        found = number(row)
        place = None if found is None else _PLACE.fullmatch(found[1])
        here = None if found is None or place is None else (found[0], place[1], int(place[2]))
        if here is not None and here == next_one:
            runs[-1].append(row)
        else:
            runs.append([row])
        next_one = None if here is None else (*here[:2], here[2] + 1)
    return runs


def _item(first: str, last: str) -> str:
    """What the item from `first` to `last` is called."""
    return first if first == last else f"{first[:-1]}..{last[last.rindex('[') + 1 :]}"


def _diff(options: argparse.Namespace) -> int:
    found = diff(Tape.load(options.a), Tape.load(options.b))
    if options.plot:
        draw(found, options.plot)
    if options.json:
        _write_json({"differ": bool(found), "entries": [_as_json(entry) for entry in found]})
    else:
        _write_differences(found)
    return DIFFERENT if found else SAME


def _as_json(entry: Any) -> dict[str, Any]:
    whole = dataclasses.asdict(entry)
    told = {name: value for name, value in whole.items() if not name.endswith("_rows")}
    if told["margin"] in (math.inf, -math.inf):
        told["margin"] = str(told["margin"])  # JSON has no infinity
    return told


def _write_differences(found: TapeDiff) -> None:
    _write_table(
        ("layer", "save", "item", "rows", "flipped", "reordered", "first", "margin", ""),
        [_told(run) for run in _runs(found, _value)],
    )
    unlike = sum(entry.fault is not None for entry in found)
    flipped, reordered = sum(entry.flipped for entry in found), sum(entry.reordered for entry in found)
    total = sum(entry.rows for entry in found)
    unlike_too = f", {unlike} that cannot be compared" if unlike else ""
    sys.stdout.write(f"{flipped} of {total} rows flipped, {reordered} reordered{unlike_too}\n")


def _value(entry: Difference) -> tuple[tuple[Any, ...], str] | None:
    """As `_number`: what has one row and no margin."""
    if entry.rows != 1 or entry.margin is not None or entry.fault:
        return None
    return (entry.layer, entry.order, entry.name, entry.scope), entry.item


def _told(run: list[Difference]) -> tuple[Any, ...]:
    """The line of a difference, or of those of the numbers of a list."""
    entry = run[0]
    first = entry.first if len(run) == 1 else next((n for n, one in enumerate(run) if one.differs), None)
    return (
        *(entry.layer or "(outside)", _save(entry.name, entry.scope), _item(entry.item, run[-1].item)),
        *(sum(one.rows for one in run), sum(one.flipped for one in run), sum(one.reordered for one in run)),
        *("" if first is None else first, "" if entry.margin is None else f"{entry.margin:.3g}", entry.fault or ""),
    )


def _save(name: str | None, scope: str) -> str:
    return "/".join(part for part in (scope, name or "") if part) or "(unnamed)"


# --------------------------------------------------------------------------------------------------- writing


def _write_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=1, allow_nan=False)
    sys.stdout.write("\n")


def _write_table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    cells = [[_printable(str(cell)) for cell in row] for row in rows]
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        _write_rich(names, cells)
        return
    sys.stdout.write(f"{text_table(names, cells)}\n")


def _write_rich(names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    text = importlib.import_module("rich.text").Text  # no markup: a label may look like some
    table = importlib.import_module("rich.table").Table(box=importlib.import_module("rich.box").SIMPLE_HEAD)
    for name in names:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*map(text, row))
    importlib.import_module("rich.console").Console(width=_WHOLE, height=25).print(table)


def _printable(text: str) -> str:
    """`text` without what a terminal would obey: a tape may come from anyone."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
