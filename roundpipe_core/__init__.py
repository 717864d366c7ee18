"""Recompute that remembers its decisions: phases, slots and errors, for any framework.

Layer code usually imports these names from the frontend it uses (`roundpipe_torch`, `roundpipe_jax`); they are the
same objects (R14).
"""

from ._diff import Difference, TapeDiff, diff
from ._errors import (
    ExchangeError,
    Flip,
    GradientError,
    MismatchError,
    MutationError,
    OptionError,
    ParityError,
    PhaseError,
    RoundPipeError,
    SlotError,
    TapeError,
    VerifyError,
    VerifyWarning,
)
from ._exchange import ExchangeReport
from ._phase import (
    doing_recompute,
    get_recompute_data,
    keep,
    layer_scope,
    recompute_once,
    save_for_recompute,
    update_once,
)
from ._replay import record, replay
from ._tape import Tape, TapeEntry

__version__ = "0.1.0.dev0"

__all__ = [
    "Difference",
    "ExchangeError",
    "ExchangeReport",
    "Flip",
    "GradientError",
    "MismatchError",
    "MutationError",
    "OptionError",
    "ParityError",
    "PhaseError",
    "RoundPipeError",
    "SlotError",
    "Tape",
    "TapeDiff",
    "TapeEntry",
    "TapeError",
    "VerifyError",
    "VerifyWarning",
    "diff",
    "doing_recompute",
    "get_recompute_data",
    "keep",
    "layer_scope",
    "recompute_once",
    "record",
    "replay",
    "save_for_recompute",
    "update_once",
]
