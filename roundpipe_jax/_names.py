"""The names that values carry in a program, see `jax.ad_checkpoint.checkpoint_name`, for `jax.checkpoint` to keep."""

from __future__ import annotations

__all__ = ["KEPT", "OURS", "SAVED", "UPDATE"]

SAVED = "roundpipe_saved"
"""What a layer saved."""

KEPT = "roundpipe_kept"
"""What `keep` holds: outputs of its function, and what the function's derivative needs."""

OURS = (SAVED, KEPT)

UPDATE = "roundpipe_update"
"""The scope of what `update_once` does, see `jax.named_scope`."""
