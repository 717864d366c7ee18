"""Recompute that remembers its decisions, for JAX.

The functions that layers call are those of `roundpipe_core` (R14).
"""

from roundpipe_core import _installed

_installed.need("jax", "0.10", by="roundpipe_jax")

from roundpipe_core import (
    Difference,
    ExchangeError,
    ExchangeReport,
    Flip,
    GradientError,
    MismatchError,
    MutationError,
    OptionError,
    ParityError,
    PhaseError,
    RoundPipeError,
    SlotError,
    Tape,
    TapeDiff,
    TapeEntry,
    TapeError,
    VerifyError,
    VerifyWarning,
    __version__,
    diff,
    doing_recompute,
    get_recompute_data,
    keep,
    layer_scope,
    recompute_once,
    record,
    replay,
    save_for_recompute,
    update_once,
)
from roundpipe_core._backend import outside_keeps, outside_saves, register_backend, tape_guards

from ._backend import JaxArrays
from ._checkpoints import lead_checkpoints
from ._exchange import exchange, from_dlpack
from ._explain import Explanation, LayerCost, explain
from ._layers import remat_layers
from ._offload import Offload
from ._policies import save_dots, save_either, save_policy
from ._remat import checkpoint, remat
from ._runs import kept_outside, saved_outside
from ._tapes import Guard

__all__ = [
    "Difference",
    "ExchangeError",
    "ExchangeReport",
    "Explanation",
    "Flip",
    "GradientError",
    "LayerCost",
    "MismatchError",
    "MutationError",
    "Offload",
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
    "__version__",
    "checkpoint",
    "diff",
    "doing_recompute",
    "exchange",
    "explain",
    "from_dlpack",
    "get_recompute_data",
    "keep",
    "layer_scope",
    "recompute_once",
    "record",
    "remat",
    "remat_layers",
    "replay",
    "save_dots",
    "save_either",
    "save_for_recompute",
    "save_policy",
    "update_once",
]

register_backend(JaxArrays())
outside_saves.append(saved_outside)
outside_keeps.append(kept_outside)
tape_guards.append(Guard)
lead_checkpoints()
