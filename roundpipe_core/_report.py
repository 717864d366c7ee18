"""Tables, as text, HTML and JSON (R12)."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["html_table", "in_words", "json_of", "text_table"]


def in_words(nbytes: float) -> str:
    """Bytes, as people read them: ``1.536 kB``."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns of equal width."""
    lines = [tuple(head), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color-scheme: light dark }}
table {{ border-collapse: collapse }}
th, td {{ padding: .3rem .8rem; border-bottom: 1px solid #8884; text-align: right }}
th:first-child, td:first-child, th:last-child, td:last-child {{ text-align: left }}
</style></head><body><h1>{title}</h1>
<table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table>{notes}</body></html>
"""


def html_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """A page with the table, that needs nothing else."""
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return _PAGE.format(
        title=html.escape(title),
        head="".join(f"<th>{html.escape(cell)}</th>" for cell in head),
        body=body,
        notes="".join(f"<p>{html.escape(note)}</p>" for note in notes),
    )


def json_of(rows: Iterable[Any], **more: Any) -> str:
    """Dataclasses as a list of objects under ``layers``."""
    return json.dumps({**more, "layers": [dataclasses.asdict(row) for row in rows]}, indent=2)
