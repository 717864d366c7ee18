"""Examples in docstrings as code: an extension of griffe, which reads them for the API."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n).*)*", re.MULTILINE)
"""From a prompt to the next empty line, as doctest has it."""


def fenced(text: str) -> str:
    """`text` with its examples in fences."""
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)


class Doctests(griffe.Extension):
    """Applies it to all docstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """An object of a module was read."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
