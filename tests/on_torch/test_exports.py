"""The public names, pinned."""

import roundpipe_core
import roundpipe_torch

OWN = {
    "CheckpointMismatchError",
    "CompileError",
    "LayerUsage",
    "Offload",
    "Usage",
    "checkpoint",
    "checkpoint_sequential",
    "exchange",
    "from_dlpack",
    "recompute_contexts",
    "remat",
    "usage",
}


def test_public_names() -> None:
    assert set(roundpipe_torch.__all__) == OWN | {"__version__"} | set(roundpipe_core.__all__)
    for name in roundpipe_core.__all__:
        assert getattr(roundpipe_torch, name) is getattr(roundpipe_core, name)
