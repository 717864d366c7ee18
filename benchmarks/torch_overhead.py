"""CPU time of a checkpointed call, forward and backward, against the other ways to checkpoint in PyTorch.

A tiny layer, so that what is measured is the checkpointing. Every round times every way once, in turn; the figures are
medians over the rounds of the ratio to torch's own non-reentrant checkpoint in the same round.

    python benchmarks/torch_overhead.py [--rounds 25] [--calls 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _rounds import ratios
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from roundpipe_torch import checkpoint, remat, save_for_recompute

Way = Callable[[torch.Tensor], torch.Tensor]
BASE = "torch non-reentrant"


def layer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


def deciding_layer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = x @ w
    (top,) = save_for_recompute(h.detach().argmax(-1, keepdim=True))
    return torch.tanh(h).gather(-1, top)


def ways(f: Callable[..., torch.Tensor], w: torch.Tensor) -> dict[str, Way]:
    policy = functools.partial(create_selective_checkpoint_contexts, lambda *a, **k: CheckpointPolicy.PREFER_RECOMPUTE)
    found: dict[str, Way] = {
        "no checkpointing": lambda x: f(w, x),
        BASE: lambda x: torch_checkpoint(f, w, x, use_reentrant=False),
        "torch reentrant": lambda x: torch_checkpoint(f, w, x, use_reentrant=True),
        "torch selective": lambda x: torch_checkpoint(f, w, x, use_reentrant=False, context_fn=policy),
        "ours": lambda x: checkpoint(f, w, x),
        "ours, no rng": lambda x: checkpoint(f, w, x, preserve_rng_state=False),
        "ours, reentrant": lambda x: checkpoint(f, w, x, use_reentrant=True),
        "ours, remat": functools.partial(remat(f), w),
    }
    try:
        import torch_remat
    except ImportError:
        return found
    found["torch-remat"] = lambda x: torch_remat.checkpoint(region_name="layer")(f)(w, x)
    return found


def measure(f: Callable[..., torch.Tensor], rounds: int, calls: int) -> dict[str, dict[str, float]]:
    w = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8, requires_grad=True)
    steps = {name: lambda way=way: way(x).sum().backward() for name, way in ways(f, w).items()}
    return ratios(steps, BASE, rounds, calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for title, f in (("tiny layer", layer), ("tiny layer that decides", deciding_layer)):
        results[title] = measure(f, options.rounds, options.calls)
        print(f"{title} (torch {torch.__version__}, median of {options.rounds})")
        for name, row in results[title].items():
            print(f"  {name:22s} {row['ratio']:6.2f} x {row['microseconds']:8.1f} us")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
