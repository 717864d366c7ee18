"""Watching for decisions: CPU time of `remat(layer, auto=True)` against `remat(layer)`, and of other ways to watch.

Layers without decisions show what watching costs when there is nothing to see; the last one decides. Every round runs
every way, in turn; a figure is the median over the rounds of the ratio to `remat(layer)` in the same round.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_torch import remat

from ._rounds import timed
from ._rows import Row

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


LAYERS: dict[str, Layer] = {
    "A tiny layer, no decision": tiny,
    "A block, no decision": block,
    "A block with dropout, no decision": dropping,
    "A layer that decides": deciding,
}


def ways(layer: Layer) -> dict[str, Layer]:
    return {
        BASE: remat(layer),
        "auto": remat(layer, auto=True),
        "a function mode": remat(under(FunctionMode, layer)),
        "a dispatch mode": remat(under(DispatchMode, layer)),
        "replaced functions": remat(under(Replaced, layer)),
    }


def rows(quick: bool) -> Iterator[Row]:
    width = 16
    w = (torch.randn(width, width) / width).requires_grad_()
    x = torch.randn(2, 12, width, requires_grad=True)
    for title, layer in LAYERS.items():
        steps = {name: lambda way=way: way(x, w).sum().backward() for name, way in ways(layer).items()}
        rounds, calls = (3, 10) if quick else (15, 60)
        yield from timed(title, "CPU time, forward and backward", steps, BASE, rounds, calls, ours=("auto",))
