"""keep against full and selective recompute: bytes held, operations run again, time of a step.

    python benchmarks/torch_keep.py [--json FILE] [--repeats N]

A transformer block whose attention is a kernel with a backward of its own: like the fused ones, it saves its inputs,
its output and one number a row. Bytes and floating-point operations are counted (`_meter.py`), so they are the same on
any machine; times are of this one, the best of N.

Torch's selective checkpointing chooses operators. It cannot name this kernel, only the products inside it, whose
results (the score matrix) it then holds; or all of it has to be registered as a custom operator first.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _meter import Meter
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from roundpipe_torch import checkpoint, keep

BATCH, TOKENS, WIDTH, HEADS, LAYERS = 2, 256, 128, 4, 4


class Fused(torch.autograd.Function):
    """Attention that keeps no scores: backward makes them again from the logarithm of each row's sum."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2)
        lse = scores.logsumexp(-1, keepdim=True)
        out = (scores - lse).exp() @ v
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        p = (q @ k.transpose(-1, -2) - lse).exp()
        slope = p * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
        return slope @ k, slope.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad


class Block(nn.Module):
    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.attend = functools.partial(keep, Fused.apply) if keeps else Fused.apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(BATCH, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = self.attend(q / q.shape[-1] ** 0.5, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH))
        return x + self.mlp(x)


def products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    chosen = op is torch.ops.aten.bmm.default
    return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE


torchs = functools.partial(torch_checkpoint, use_reentrant=False)
WAYS: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
    "no checkpointing": (lambda layer, x: layer(x), False),
    "torch, all recomputed": (torchs, False),
    "torch, selective (bmm)": (
        functools.partial(torchs, context_fn=functools.partial(create_selective_checkpoint_contexts, products)),
        False,
    ),
    "ours, all recomputed": (checkpoint, False),
    "ours, attention kept": (checkpoint, True),
    "ours, reentrant": (functools.partial(checkpoint, use_reentrant=True), False),
    "ours, reentrant, kept": (functools.partial(checkpoint, use_reentrant=True), True),
}


def measure(way: Callable[..., torch.Tensor], keeps: bool, repeats: int) -> dict[str, float]:
    torch.manual_seed(0)
    layers = [Block(keeps) for _ in range(LAYERS)]
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x
        for layer in layers:
            y = way(layer, y)
        return y

    with FlopCounterMode(display=False) as flops:
        forward().sum().backward()  # gradients exist from here on
    with Meter() as meter:
        y = forward()
        held = meter.live
        y.sum().backward()
    best = float("inf")
    for _ in range(repeats):
        begun = time.perf_counter()
        forward().sum().backward()
        best = min(best, time.perf_counter() - begun)
    return {
        "KiB held": held / 1024,
        "Mflop a step": flops.get_total_flops() / 1e6,
        "ms a step": best * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: measure(way, keeps, options.repeats) for name, (way, keeps) in WAYS.items()}
    names = list(next(iter(results.values())))
    print(f"{LAYERS} blocks, {BATCH} x {TOKENS} tokens, width {WIDTH}, {HEADS} heads (torch {torch.__version__})")
    print(f"  {'':24s}" + "".join(f"{name:>16s}" for name in names))
    for name, row in results.items():
        print(f"  {name:24s}" + "".join(f"{row[column]:16,.1f}" for column in names))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
