"""Where in the user's code something happened, as facts for a message."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from roundpipe_core._places import Place, is_passed_over, pass_over, where

from ._jax import is_io, is_write
from ._programs import subprograms

__all__ = ["Facts", "of_error", "of_io", "of_operation", "of_writes"]

_JAX = str(Path(jax.__file__).parent)
pass_over(_JAX + os.sep, _JAX + "lib" + os.sep)

Facts = list[tuple[str, str]]


def of_error(name: str, error: BaseException) -> Facts:
    """The user's line that raised it, called `name`; nothing if there is none."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return _innermost(name, reversed(frames))


def of_operation(name: str, eqn: JaxprEqn) -> Facts:
    """The user's line that an operation of a program comes from."""
    made: Any = eqn.source_info.traceback
    return _innermost(name, [(frame.file_name, frame.line_num) for frame in made.frames] if made is not None else [])


def of_io(jaxpr: Jaxpr) -> Facts:
    """Those of the `io_callback`s in a program, at any depth."""
    found: Facts = []
    for eqn in jaxpr.eqns:
        if any(map(is_io, eqn.effects)):
            inner = subprograms(eqn)
            found += [fact for one in inner for fact in of_io(one)] or of_operation("called at", eqn)
    return found[:8]


def of_writes(jaxpr: Jaxpr) -> Facts:
    """Those of the writes to what a program closes over."""
    found: Facts = []
    outer = set(map(id, jaxpr.constvars)) if any(map(is_write, jaxpr.effects)) else set()
    for eqn in jaxpr.eqns:
        if any(id(var) in outer for var in eqn.invars) and any(map(is_write, eqn.effects)):
            found += of_operation("written at", eqn) or [("written by", str(eqn.primitive))]
    return found[:8]


def _innermost(name: str, places: Iterable[Place]) -> Facts:
    user = (place for place in places if not is_passed_over(place[0]))
    return [(name, where(place)) for place in user][:1]
