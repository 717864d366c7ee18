"""The public names, pinned."""

import roundpipe_core
import roundpipe_jax

OWN = {
    "Explanation",
    "LayerCost",
    "Offload",
    "checkpoint",
    "exchange",
    "explain",
    "from_dlpack",
    "remat",
    "remat_layers",
    "save_dots",
    "save_either",
    "save_policy",
}


def test_public_names() -> None:
    assert set(roundpipe_jax.__all__) == OWN | {"__version__"} | set(roundpipe_core.__all__)
    assert roundpipe_jax.checkpoint is roundpipe_jax.remat
    for name in roundpipe_core.__all__:
        assert getattr(roundpipe_jax, name) is getattr(roundpipe_core, name)
