"""What checkpointing holds and runs again, counted: bytes, floating-point operations, waits for the device.

    python benchmarks/torch_costs.py [--json FILE]

A mixture-of-experts block as many models have it: a loop over the experts that asks for each one's tokens. Bytes and
waits are seen by a dispatch mode (`_meter.py`), so they are the same on any machine.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _meter import Meter
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from roundpipe_torch import checkpoint, recompute_once

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
    "torch non-reentrant": functools.partial(torch_checkpoint, use_reentrant=False),
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
        "live bytes after forward": held,
        "peak bytes": meter.peak,
        "flops": flops.get_total_flops(),
        "waits in forward": forward_syncs,
        "waits in backward": meter.syncs - forward_syncs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {name: measure(way) for name, way in WAYS.items()}
    names = list(next(iter(results.values())))
    print(f"{LAYERS} layers, {TOKENS} tokens, {EXPERTS} experts, top {CHOSEN} (torch {torch.__version__})")
    print(f"  {'':22s}" + "".join(f"{name:>26s}" for name in names))
    for way, row in results.items():
        print(f"  {way:22s}" + "".join(f"{row[name]:26,d}" for name in names))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
