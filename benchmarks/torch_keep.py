"""Keeping a result in PyTorch: `keep` against full and selective recompute.

A transformer block whose attention is a kernel with a backward of its own: like the fused ones, it saves its inputs,
its output and one number a row. Bytes and floating-point operations are counted, so they are the same on any machine.

Torch's selective checkpointing chooses operators. It cannot name this kernel, only the products inside it, whose
results (the score matrix) it then holds; or all of it has to be registered as a custom operator first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from roundpipe_torch import checkpoint, keep

from ._meter import Meter
from ._rounds import timed
from ._rows import Row, counts
from ._ways import torchs

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


def steps(way: Callable[..., torch.Tensor], keeps: bool) -> tuple[Callable[[], torch.Tensor], Callable[[], None]]:
    """The forward, and a whole step."""
    torch.manual_seed(0)
    layers = [Block(keeps) for _ in range(LAYERS)]
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x
        for layer in layers:
            y = way(layer, y)
        return y

    return forward, lambda: forward().sum().backward()


def measure(way: Callable[..., torch.Tensor], keeps: bool) -> dict[str, float]:
    forward, step = steps(way, keeps)
    with FlopCounterMode(display=False) as flops:
        step()  # gradients exist from here on
    with Meter() as meter:
        y = forward()
        held = meter.live
        y.sum().backward()
    return {"bytes held": held, "FLOPs of a step": flops.get_total_flops()}


def rows(quick: bool) -> Iterator[Row]:
    title = f"{LAYERS} blocks, {BATCH} x {TOKENS} tokens, width {WIDTH}, {HEADS} heads"
    ours = [name for name in WAYS if name.startswith("ours")]
    yield from counts(title, {name: measure(*way) for name, way in WAYS.items()}, ours=ours)
    timings = {name: steps(*way)[1] for name, way in WAYS.items()}
    yield from timed(title, "CPU time of a step", timings, "torch, all recomputed", 1 if quick else 9, ours=())
