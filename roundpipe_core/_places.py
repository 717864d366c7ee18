"""Where in the user's code something happens."""

from __future__ import annotations

import opcode
import os
import sys
import types
from pathlib import Path

__all__ = ["Place", "drops", "is_ours", "is_passed_over", "pass_over", "place_outside", "where"]

Place = tuple[str, int]
"""A file and a line of the user's code."""

_OURS = tuple(str(Path(__file__).parents[1] / f"roundpipe_{name}") + os.sep for name in ("core", "torch", "jax"))
_PYTHONS = str(Path(os.__file__).parent) + os.sep
_INSTALLED = tuple(_PYTHONS + name for name in ("site-packages", "dist-packages"))
_passed_over: tuple[str, ...] = (*_OURS, "<frozen ")


def where(place: Place) -> str:
    """A place as editors open it."""
    return f"{place[0]}:{place[1]}"


def is_ours(filename: str) -> bool:
    """Whether a file belongs to this project."""
    return filename.startswith(_OURS)


def pass_over(*names: str) -> None:
    """Files whose names begin so are no user's: those of a framework."""
    global _passed_over
    _passed_over = (*_passed_over, *names)


def is_passed_over(filename: str) -> bool:
    """Whether a file is no user's: ours, a framework's, Python's own."""
    return filename.startswith(_passed_over) or (filename.startswith(_PYTHONS) and not filename.startswith(_INSTALLED))


def _file_of(frame: types.FrameType) -> str:
    name = frame.f_code.co_filename
    return frame.f_globals.get("__file__", name) if name == "<string>" else name  # what a dataclass has written


def place_outside() -> Place:
    """The innermost line of the user's; the outermost one of all if there is none."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_passed_over(_file_of(frame)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


_CACHE, _POP_TOP = opcode.opmap["CACHE"], opcode.opmap["POP_TOP"]


def drops(frame: types.FrameType) -> bool:
    """Whether what the call that `frame` is in gives is dropped: a statement of its own, in code that reads no slot."""
    code = frame.f_code
    instructions, at = code.co_code, frame.f_lasti + 2
    while instructions[at] == _CACHE:
        at += 2
    names = code.co_names, code.co_freevars, code.co_varnames
    return instructions[at] == _POP_TOP and not any("get_recompute_data" in group for group in names)
