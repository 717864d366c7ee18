"""A mixture of experts in PyTorch: what checkpointing holds and runs again, counted.

A block as many models have it, a loop over the experts that asks for each one's tokens. Bytes and waits for the device
are seen by a dispatch mode, so they are the same on any machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from roundpipe_torch import checkpoint, recompute_once

from ._meter import Meter
from ._rows import Row, counts
from ._ways import TORCH, torchs

TOKENS, WIDTH, EXPERTS, CHOSEN, LAYERS = 512, 64, 16, 2, 4


class Experts(nn.Module):
    """T tokens, D width, E experts, K chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 4 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 4 * WIDTH, WIDTH) / (2 * WIDTH**0.5))

    def route(self, scores_TE: torch.Tensor) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
        top_TK = scores_TE.topk(CHOSEN).indices
        hit_EKT = nn.functional.one_hot(top_TK, EXPERTS).permute(2, 1, 0)
        return top_TK, [torch.where(hit_KT) for hit_KT in hit_EKT]

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        scores_TE = self.gate(x_TD).softmax(-1)
        top_TK, plan = recompute_once(self.route, scores_TE)
        weights_TK = scores_TE.gather(1, top_TK)
        y_TD = torch.zeros_like(x_TD)
        for expert, (rank, token) in enumerate(plan):
            h = torch.tanh(x_TD[token] @ self.up[expert]) @ self.down[expert]
            y_TD = y_TD.index_add(0, token, h * weights_TK[token, rank, None])
        return x_TD + y_TD


WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "no checkpointing": lambda layer, x: layer(x),
    TORCH: torchs,
    "ours": checkpoint,
    "ours, reentrant": functools.partial(checkpoint, use_reentrant=True),
}


def run(way: Callable[..., torch.Tensor], layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = way(layer, x)
    return x


def measure(way: Callable[..., torch.Tensor]) -> dict[str, int]:
    torch.manual_seed(0)
    layers = nn.ModuleList(Experts() for _ in range(LAYERS))
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    with FlopCounterMode(display=False) as flops:
        run(way, layers, x).sum().backward()  # gradients exist from here on
    with Meter() as meter:
        y = run(way, layers, x)
        held, forward_syncs = meter.live, meter.syncs
        y.sum().backward()
    return {
        "bytes live after forward": held,
        "bytes at the peak": meter.peak,
        "FLOPs": flops.get_total_flops(),
        "waits in forward": forward_syncs,
        "waits in backward": meter.syncs - forward_syncs,
    }


def rows(quick: bool) -> list[Row]:
    title = f"{LAYERS} layers, {TOKENS} tokens, {EXPERTS} experts, top {CHOSEN}"
    return counts(title, {name: measure(way) for name, way in WAYS.items()}, ours=("ours", "ours, reentrant"))
