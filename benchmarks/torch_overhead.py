"""Call overhead in PyTorch: CPU time of a checkpointed call, forward and backward, against the other ways.

The layers are tiny, so that what is measured is the checkpointing. Every round runs every way 100 times, in turn; a
figure is the median over the rounds of the ratio to torch's own non-reentrant checkpoint in the same round. Both layers
draw nothing at random. In the deciding one ours saves the decision, and the others, which cannot, decide twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from roundpipe_torch import save_for_recompute

from ._rounds import timed
from ._rows import Row
from ._ways import NONE, OURS, TORCH, Layer, ours, peers

WHAT = "CPU time, forward and backward"


def tiny(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


def deciding(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = x @ w
    return torch.tanh(h).gather(-1, h.detach().argmax(-1, keepdim=True))


def saving(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = x @ w
    (top,) = save_for_recompute(h.detach().argmax(-1, keepdim=True))
    return torch.tanh(h).gather(-1, top)


def layers(plain: Layer, saves: Layer) -> tuple[dict[str, Layer], list[str]]:
    """The layer in every way, and what there is to say of the peers."""
    others, notes = peers()
    found = {NONE: plain} | {name: way(plain) for name, way in others.items()}
    return found | {name: way(saves) for name, way in ours().items()}, notes


def measure(table: str, plain: Layer, saves: Layer, quick: bool) -> Iterator[Row | str]:
    ways, notes = layers(plain, saves)
    yield from notes
    w, x = (torch.randn(*shape, requires_grad=True) for shape in ((8, 8), (4, 8)))
    steps = {name: lambda way=way: way(w, x).sum().backward() for name, way in ways.items()}
    rounds, calls = (3, 20) if quick else (25, 100)
    rows = timed(table, WHAT, steps, TORCH, rounds, calls, ours=ours())
    first = min(row.judged for row in rows if row.name != NONE and row.name not in ours())
    for row in rows:
        yield dataclasses.replace(row, bar=first) if row.name == OURS else row


def rows(quick: bool) -> Iterator[Row | str]:
    yield from measure("A tiny layer", tiny, tiny, quick)
    yield from measure("A tiny layer that decides", deciding, saving, quick)
