"""The ways to checkpoint a function of (w, x) in PyTorch: ours, torch's, and those of other libraries."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from roundpipe_torch import checkpoint, remat

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Way = Callable[[Layer], Layer]
"""Makes a layer that is checkpointed."""

NONE, TORCH, OURS = "no checkpointing", "torch non-reentrant", "ours"
torchs = functools.partial(torch_checkpoint, use_reentrant=False)


def ours() -> dict[str, Way]:
    return {
        OURS: lambda f: functools.partial(checkpoint, f),
        "ours, no rng": lambda f: functools.partial(checkpoint, f, preserve_rng_state=False),
        "ours, reentrant": lambda f: functools.partial(checkpoint, f, use_reentrant=True),
        "ours, remat": remat,
    }


def torch_ways() -> dict[str, Way]:
    recompute_all = functools.partial(
        create_selective_checkpoint_contexts, lambda *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE
    )
    return {
        TORCH: lambda f: functools.partial(torchs, f),
        "torch reentrant": lambda f: functools.partial(torch_checkpoint, f, use_reentrant=True),
        "torch selective": lambda f: functools.partial(torchs, f, context_fn=recompute_all),
    }


def _torch_remat() -> dict[str, Way]:
    import torch_remat

    return {"torch-remat": torch_remat.checkpoint(region_name="layer")}


def _fairscale() -> dict[str, Way]:
    from fairscale.nn.checkpoint import checkpoint_wrapper

    class Module(nn.Module):
        """What it wraps is a module."""

        def __init__(self, f: Layer) -> None:
            super().__init__()
            self.f = f

        def forward(self, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.f(w, x)

    return {"fairscale": lambda f: checkpoint_wrapper(Module(f))}


def _deepspeed() -> dict[str, Way]:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    return {
        "DeepSpeed": lambda f: functools.partial(checkpointing.checkpoint, f),
        "DeepSpeed non-reentrant": lambda f: functools.partial(checkpointing.non_reentrant_checkpoint, f),
    }


LIBRARIES: dict[str, Callable[[], dict[str, Way]]] = {
    "torch-remat": _torch_remat,
    "fairscale": _fairscale,
    "deepspeed": _deepspeed,
}


def peers() -> tuple[dict[str, Way], list[str]]:
    """Torch's ways and those of the libraries that are installed here and work; and why the others are left out."""
    found, notes = torch_ways(), []
    for library, load in LIBRARIES.items():
        try:
            version = importlib.metadata.version(library)
            candidates = load()
            for way in candidates.values():
                _try(way)
        except Exception as error:
            notes.append(f"{library} is left out: {type(error).__name__}: {error}")
        else:
            found |= candidates
            notes.append(f"{library} {version} takes part")
    return found, notes


def _try(way: Way) -> None:
    """Refuse one that does not give the gradient."""
    w, x = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
    way(lambda w, x: torch.tanh(x @ w))(w, x).sum().backward()
    expected: Any = (1 - torch.tanh(torch.tensor(2.0)) ** 2) * 2
    torch.testing.assert_close(x.grad, expected.expand(2, 2))
