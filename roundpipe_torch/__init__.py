"""Activation checkpointing for PyTorch that remembers its decisions."""

from roundpipe_core import _installed

_installed.need("torch", "2.11", by="roundpipe_torch")

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
from roundpipe_core._backend import frontend_listeners

from . import _backend as _backend  # makes tensors known to the core
from ._checkpoint import checkpoint, checkpoint_sequential
from ._contexts import recompute_contexts
from ._errors import CheckpointMismatchError, CompileError
from ._exchange import exchange, from_dlpack
from ._functions import let_functions_read_weights_back
from ._modules import remat
from ._offload import Offload
from ._transforms import let_transforms_lift_hooks
from ._uncompiled import run_others_uncompiled, run_uncompiled
from ._usage import LayerUsage, Usage, usage

__all__ = [
    "CheckpointMismatchError",
    "CompileError",
    "Difference",
    "ExchangeError",
    "ExchangeReport",
    "Flip",
    "GradientError",
    "LayerUsage",
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
    "Usage",
    "VerifyError",
    "VerifyWarning",
    "__version__",
    "checkpoint",
    "checkpoint_sequential",
    "diff",
    "doing_recompute",
    "exchange",
    "from_dlpack",
    "get_recompute_data",
    "keep",
    "layer_scope",
    "recompute_contexts",
    "recompute_once",
    "record",
    "remat",
    "replay",
    "save_for_recompute",
    "update_once",
    "usage",
]

let_transforms_lift_hooks()
let_functions_read_weights_back()
run_uncompiled("roundpipe_core", "roundpipe_torch")
run_others_uncompiled("jax")  # if it is imported already
frontend_listeners.append(run_others_uncompiled)
