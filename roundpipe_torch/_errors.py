"""Errors that only the torch frontend raises."""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointError

from roundpipe_core import MismatchError

__all__ = ["CheckpointMismatchError"]


class CheckpointMismatchError(MismatchError, CheckpointError):
    """Forward and recompute saved tensors that cannot be matched (R10).

    Also torch's own `CheckpointError`, so that code which catches that keeps working.
    """
