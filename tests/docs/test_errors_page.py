"""docs/errors.md has an entry for every public error, and a row for every message that the packages can raise."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import roundpipe_core

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
SAYS = re.compile(r"^\| `([^`]+)` \| .+ \| .+ \|$", re.MULTILINE)
HEADLINE_OF = {"message": 0, "wrong_option": 1, "_not_a_decision": 1, "_stop": 1, "refuse": 0}
"""Which argument of these functions is the first line of an error."""
BLANK = "\N{REPLACEMENT CHARACTER}"  # what is filled in


def texts(node: ast.expr | None) -> Iterator[str]:
    """What a headline can be, as far as it stands there."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        parts = [value.value if isinstance(value, ast.Constant) else BLANK for value in node.values]
        yield "".join(map(str, parts))


def headlines(source: str) -> Iterator[tuple[int, str]]:
    tree = ast.parse(source)
    named = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        at = HEADLINE_OF.get(called)
        if at is None or len(node.args) <= at:
            continue
        headline = node.args[at]
        if isinstance(headline, ast.Name):
            headline = named.get(headline.id, headline)
        for text in texts(headline):
            if len(re.findall("[a-z]{2,}", text.replace(BLANK, ""))) > 1:  # else all of it is filled in
                yield node.lineno, text


def is_listed(text: str, says: list[str]) -> bool:
    return any(re.search(".*".join(map(re.escape, said.split("…"))), text) for said in says)


SOURCES = sorted(path for package in ROOT.glob("roundpipe_*") for path in package.rglob("*.py"))


def test_every_message_has_a_row() -> None:
    says = SAYS.findall(PAGE)
    found = [(path, *found) for path in SOURCES for found in headlines(path.read_text(encoding="utf-8"))]
    missing = [f"{path.name}:{line}: {text}" for path, line, text in found if not is_listed(text, says)]

    assert len(found) > 100
    assert not missing, "docs/errors.md says nothing of:\n" + "\n".join(missing)


def test_every_row_stands_for_a_message() -> None:
    found = [text for path in SOURCES for text in all_texts(path)]

    assert [said for said in SAYS.findall(PAGE) if not is_listed("\n".join(found), [said])] == []


def all_texts(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.expr):
            yield from texts(node)


def test_every_public_error_has_a_heading() -> None:
    names = {name for name in roundpipe_core.__all__ if name.endswith(("Error", "Warning"))} - {"RoundPipeError"}
    names |= {"CompileError"}  # and CheckpointMismatchError, which the entry of MismatchError names
    headings = " ".join(re.findall(r"^## (.+)$", PAGE, re.MULTILINE)).split()

    assert names - set(headings) == set()
    assert "CheckpointMismatchError" in PAGE


def test_a_message_that_is_not_listed_is_found() -> None:
    source = 'raise SlotError(message(f"layer {x!r}: a new kind of fault.", [], "do this."))'

    [(_, text)] = headlines(source)
    assert not is_listed(text, SAYS.findall(PAGE))
