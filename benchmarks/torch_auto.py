"""CPU time of `remat(layer, auto=True)`, forward and backward, against `remat(layer)`, and of the other ways to watch.

Layers without decisions show what watching costs when there is nothing to see; the last one decides. Every round times
every way once, in turn; the figures are medians over the rounds of the ratio to `remat(layer)` in the same round.

    python benchmarks/torch_auto.py [--rounds 25] [--calls 200] [--json FILE]
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
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_torch import remat

BASE = "remat"
Layer = Callable[..., torch.Tensor]


class FunctionMode(TorchFunctionMode):
    """The least that a mode over torch's functions does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    """The least that a mode over operations does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


REPLACED = [
    "topk",
    "sort",
    "argsort",
    "argmax",
    "argmin",
    "max",
    "min",
    "nonzero",
    "where",
    "multinomial",
    "bernoulli",
    "bincount",
    "histc",
    "unique",
    "searchsorted",
    "bucketize",
    "kthvalue",
    "mode",
    "masked_select",
]


class Replaced:
    """Functions of torch replaced while a region runs, for every thread."""

    def __enter__(self) -> None:
        known = [(owner, name) for owner in (torch, torch.Tensor) for name in REPLACED if hasattr(owner, name)]
        self.kept = [(owner, name, getattr(owner, name)) for owner, name in known]
        for owner, name, function in self.kept:
            setattr(owner, name, functools.partial(function) if owner is torch else functools.partialmethod(function))

    def __exit__(self, *exc: object) -> None:
        for owner, name, function in self.kept:
            setattr(owner, name, function)


def under(mode: Callable[[], Any], layer: Layer) -> Layer:
    def watched(*args: torch.Tensor) -> torch.Tensor:
        with mode():
            return layer(*args)

    return watched


def tiny(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Attention of one head and two layers."""
    x = x + torch.nn.functional.scaled_dot_product_attention(x @ w, x @ w.T, x)
    x = torch.nn.functional.layer_norm(x, x.shape[-1:])
    return x + torch.nn.functional.gelu(x @ w) @ w.T


def dropping(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(block(x, w), 0.1)


def deciding(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    value, idx = (x @ w).topk(2, -1)
    return torch.tanh(x).gather(-1, idx) * value


def ways(layer: Layer) -> dict[str, Layer]:
    return {
        BASE: remat(layer),
        "auto": remat(layer, auto=True),
        "a function mode": remat(under(FunctionMode, layer)),
        "a dispatch mode": remat(under(DispatchMode, layer)),
        "replaced functions": remat(under(Replaced, layer)),
    }


def measure(layer: Layer, width: int, rounds: int, calls: int) -> dict[str, dict[str, float]]:
    w = (torch.randn(width, width) / width).requires_grad_()
    x = torch.randn(2, 12, width, requires_grad=True)
    steps = {name: lambda way=way: way(x, w).sum().backward() for name, way in ways(layer).items()}
    return ratios(steps, BASE, rounds, calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for title, layer in (
        ("tiny layer, no decision", tiny),
        ("block, no decision", block),
        ("block with dropout, no decision", dropping),
        ("layer that decides", deciding),
    ):
        results[title] = measure(layer, 16, options.rounds, options.calls)
        print(f"{title} (torch {torch.__version__}, median of {options.rounds})")
        for name, row in results[title].items():
            print(f"  {name:18s} {row['ratio']:6.3f} x {row['microseconds']:8.1f} us")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
