"""Tables (R12)."""

from __future__ import annotations

import dataclasses
import json

import pytest

from roundpipe_core._report import html_table, in_words, json_of, text_table


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        *[(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1536, "1.536 kB"), (999_999, "1000 kB"), (10**6, "1 MB")],
        *[(2_500_000, "2.5 MB"), (3 * 10**9, "3 GB"), (12_345_678_901_234, "1.235e+04 GB")],
    ],
)
def test_bytes_in_words(nbytes: int, words: str) -> None:
    assert in_words(nbytes) == words


def test_columns_are_as_wide_as_what_is_in_them() -> None:
    assert text_table(("a", "bc", ""), [("one", "2", ""), ("", "345", "x")]) == "a    bc\none  2\n     345  x"


def test_a_page_is_whole_and_runs_nothing() -> None:
    page = html_table("<t>", ["a", "&"], [["1", "<b>"], ["2", "3"]], ["<i>", "so"])
    assert page.startswith('<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>&lt;t&gt;</title>')
    assert page.partition("</style>")[2] == (
        "</head><body><h1>&lt;t&gt;</h1>\n"
        "<table><thead><tr><th>a</th><th>&amp;</th></tr></thead><tbody>\n"
        "<tr><td>1</td><td>&lt;b&gt;</td></tr>\n"
        "<tr><td>2</td><td>3</td></tr>\n"
        "</tbody></table><p>&lt;i&gt;</p><p>so</p></body></html>\n"
    )


def test_rows_as_json() -> None:
    @dataclasses.dataclass
    class Row:
        layer: str
        calls: int

    text = json_of([Row("moe", 2)], bytes=3)
    assert json.loads(text) == {"bytes": 3, "layers": [{"layer": "moe", "calls": 2}]}
    assert text.splitlines()[1] == '  "bytes": 3,'
