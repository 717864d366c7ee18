"""Every error of the project, in one tree.

    RoundPipeError
    ├── PhaseError      (also AssertionError)  the call belongs to another phase            R3
    ├── SlotError       (also LookupError)     nothing saved, saved twice, unknown name     R3 R4
    ├── GradientError   (also ValueError)      a saved value carries gradient               R5
    ├── MutationError   (also RuntimeError)    an input changed between the phases          R6
    ├── MismatchError   (also RuntimeError)    the phases differ in what backward needs     R10
    ├── TapeError       (also ValueError)      a tape does not fit the model, or is none        R13
    ├── ParityError     (also AssertionError)  a port differs from its original
    ├── OptionError     (also TypeError and ValueError)  an option that does not exist or cannot be
    ├── ExchangeError   (also ValueError and BufferError)  an array cannot be taken in as asked
    └── VerifyError     (also RuntimeError)    `verify="raise"` found a changed decision

    UserWarning
    └── VerifyWarning                          the same under `verify="warn"`

Each is also the builtin exception that a careful caller would already catch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ._places import is_passed_over, place_outside, where

__all__ = [
    "ExchangeError",
    "Flip",
    "GradientError",
    "MismatchError",
    "MutationError",
    "OptionError",
    "ParityError",
    "PhaseError",
    "RoundPipeError",
    "SlotError",
    "TapeError",
    "VerifyError",
    "VerifyWarning",
    "called_here",
    "message",
    "shown",
    "text_of",
]


class RoundPipeError(Exception):
    """Base of every error that this project raises on purpose."""


class PhaseError(RoundPipeError, AssertionError):
    """A function was called in a phase it does not belong to (R3)."""


class SlotError(RoundPipeError, LookupError):
    """The slot does not hold what was asked for, or already holds it (R3, R4)."""


class GradientError(RoundPipeError, ValueError):
    """A value handed to a slot carries gradient, which the recompute would lose (R5)."""


class MutationError(RoundPipeError, RuntimeError):
    """A tensor that the recompute starts from was changed in place after the forward (R6)."""


class MismatchError(RoundPipeError, RuntimeError):
    """Backward needs something that the two phases did not both produce (R10)."""


class TapeError(RoundPipeError, ValueError):
    """A tape does not fit what it is replayed with, or a file is not a tape (R13)."""


class ParityError(RoundPipeError, AssertionError):
    """A model and its port are further apart than they may be."""


class OptionError(RoundPipeError, TypeError, ValueError):
    """An option does not exist, or its value is not one it takes."""


class ExchangeError(RoundPipeError, ValueError, BufferError):
    """An array of another framework has no values to take, or cannot be taken as asked."""


@dataclass(frozen=True)
class Flip:
    """One saved item, or one output, that a plain recompute would have made differently.

    ``rows`` of ``total`` rows (first axis) differ, the first of them at index ``first``. An item
    whose shape or type changed has all its rows counted and ``first`` 0.

    >>> from roundpipe_core import Flip
    >>> print(Flip("moe 3", "output", 2, 64, 8))
    layer 'moe 3', output: 2 of 64 rows flipped, first row 8
    """

    layer: str
    item: str
    rows: int
    total: int
    first: int

    def __str__(self) -> str:
        return f"layer {self.layer!r}, {self.item}: {self.rows} of {self.total} rows flipped, first row {self.first}"


class VerifyError(RoundPipeError, RuntimeError):
    """``verify="raise"``: a plain recompute would not have repeated the forward.

    ``flips`` lists what differed, one :class:`Flip` an item.
    """

    def __init__(self, text: str, flips: tuple[Flip, ...] = ()) -> None:
        super().__init__(text)
        self.flips = flips


class VerifyWarning(UserWarning):
    """``verify="warn"``: as :class:`VerifyError`, without stopping backward."""

    def __init__(self, text: str, flips: tuple[Flip, ...] = ()) -> None:
        super().__init__(text)
        self.flips = flips


def message(headline: str, facts: Iterable[tuple[str, str]], way_out: str) -> str:
    """The text of an error: `text_of`, which names a line of the user's in any case."""
    facts = list(facts)
    if not any(_LINE.search(fact) for _, fact in facts):
        facts += called_here()
    return text_of(headline, facts, way_out)


def text_of(headline: str, facts: Iterable[tuple[str, str]], way_out: str) -> str:
    """What went wrong, what is known, what to do."""
    lines = [headline, *(f"  {name}: {fact}" for name, fact in facts), f"  way out: {way_out}"]
    return "\n".join(lines)


def shown(value: object) -> str:
    """What was given instead of what was asked for: itself if it is short, or what it is."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    text = repr(value)
    return text if len(text) <= 60 and text.isprintable() else f"a {type(value).__qualname__}"


_LINE = re.compile(r":\d+$")


def called_here() -> list[tuple[str, str]]:
    """The user's line that runs now, for a message; nothing where there is none."""
    place = place_outside()
    return [] if is_passed_over(place[0]) else [("called at", where(place))]
