"""Layers that decide: what the recompute runs again in torch's checkpoint and in ours.

An expert loop that asks for each expert's tokens (`nonzero`, `tolist`, `item`), routing by Sinkhorn normalisation, a
graph of nearest neighbours, and an assignment by the Hungarian method (SciPy, on the host). Ours saves the decision by
`recompute_once`. Waits are operations that on an accelerator make the host wait for a value or a size; copies to the
host are counted with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment

from roundpipe_torch import recompute_once

from ._meter import Meter
from ._rounds import timed
from ._rows import Row, counts
from ._ways import OURS, TORCH, Way, ours, torch_ways

T, D, E, K = 256, 32, 8, 2  # tokens, width, experts or neighbours, choices


class Layer:
    """Decides by `decide(x)`, then computes with what was decided. Counts its decisions and its copies to the host."""

    def __init__(self, saves: bool) -> None:
        self.saves = saves
        self.decisions = self.copies = 0

    def __call__(self, w: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
        found = recompute_once(self._counted, w, x_TD) if self.saves else self._counted(w.detach(), x_TD.detach())
        return self.compute(w, x_TD, found)

    def _counted(self, w: torch.Tensor, x_TD: torch.Tensor) -> Any:
        self.decisions += 1
        with torch.no_grad():
            return self.decide(w, x_TD)

    def on_host(self, tensor: torch.Tensor) -> Any:
        self.copies += 1
        return tensor.cpu().numpy()

    def decide(self, w: torch.Tensor, x_TD: torch.Tensor) -> Any:
        raise NotImplementedError

    def compute(self, w: torch.Tensor, x_TD: torch.Tensor, found: Any) -> torch.Tensor:
        raise NotImplementedError


class ExpertLoop(Layer):
    """Each expert's tokens, by a question for each."""

    def decide(self, w: torch.Tensor, x_TD: torch.Tensor) -> Any:
        best_TK = (x_TD @ w)[:, :E].topk(K).indices
        used = self.on_host(best_TK.unique()).tolist()
        tokens = {expert: (best_TK == expert).any(-1).nonzero().squeeze(-1) for expert in used}
        load = max((best_TK == expert).sum().item() for expert in used)
        return tokens, load

    def compute(self, w: torch.Tensor, x_TD: torch.Tensor, found: Any) -> torch.Tensor:
        tokens, load = found
        y_TD = x_TD
        for expert, token in tokens.items():
            y_TD = y_TD.index_add(0, token, torch.tanh(x_TD[token] @ w) * ((expert + 1) / load))
        return y_TD


class Sinkhorn(Layer):
    """Balanced routing: rows and columns are normalised in turn until they no longer move."""

    def decide(self, w: torch.Tensor, x_TD: torch.Tensor) -> Any:
        plan_TE = (x_TD @ w)[:, :E].softmax(-1)
        for _ in range(30):
            before_TE = plan_TE
            plan_TE = plan_TE / plan_TE.sum(0) * (T / E)
            plan_TE = plan_TE / plan_TE.sum(1, keepdim=True)
            if (plan_TE - before_TE).abs().max().item() < 1e-4:
                break
        return plan_TE.argmax(-1)

    def compute(self, w: torch.Tensor, x_TD: torch.Tensor, found: Any) -> torch.Tensor:
        weight_T1 = (x_TD @ w).softmax(-1).gather(-1, found[:, None])
        return x_TD + torch.tanh(x_TD @ w) * weight_T1


class Neighbours(Layer):
    """A graph of nearest neighbours, and the mean over each one's edges."""

    def decide(self, w: torch.Tensor, x_TD: torch.Tensor) -> Any:
        near_TT = torch.cdist(x_TD, x_TD).fill_diagonal_(torch.inf)
        near_TK = near_TT.topk(E, largest=False).indices
        mutual_TT = torch.zeros(T, T, dtype=torch.bool).scatter_(1, near_TK, True)
        return (mutual_TT & mutual_TT.T).nonzero().T

    def compute(self, w: torch.Tensor, x_TD: torch.Tensor, found: Any) -> torch.Tensor:
        target, source = found
        return x_TD.index_add(0, target, torch.tanh((x_TD[source] - x_TD[target]) @ w))


class Hungarian(Layer):
    """Queries are matched to targets so that the total cost is least."""

    def decide(self, w: torch.Tensor, x_TD: torch.Tensor) -> Any:
        cost_TT = torch.cdist(x_TD @ w, x_TD.flip(0))
        rows, columns = linear_sum_assignment(self.on_host(cost_TT))
        return torch.from_numpy(rows), torch.from_numpy(columns)

    def compute(self, w: torch.Tensor, x_TD: torch.Tensor, found: Any) -> torch.Tensor:
        rows_T, columns_T = found
        return torch.tanh(x_TD @ w)[rows_T] + x_TD.flip(0)[columns_T]


LAYERS: dict[str, type[Layer]] = {
    "An expert loop": ExpertLoop,
    "Sinkhorn routing": Sinkhorn,
    "Nearest neighbours": Neighbours,
    "Hungarian assignment": Hungarian,
}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return (torch.randn(D, D) / D**0.5).requires_grad_(), torch.randn(T, D, requires_grad=True)


def counted(layer: Layer, way: Way) -> dict[str, float]:
    w, x = data()
    with Meter() as meter:
        y = way(layer)(w, x)
        before = meter.operations.total(), meter.syncs + layer.copies
        y.sum().backward()
    return {
        "decisions": layer.decisions,
        "waits in backward": meter.syncs + layer.copies - before[1],
        "operations in backward": meter.operations.total() - before[0],
    }


def step(layer: Callable[..., torch.Tensor], w: torch.Tensor, x: torch.Tensor) -> None:
    layer(w, x).sum().backward()


def rows(quick: bool) -> Iterator[Row]:
    everything = torch_ways() | ours()
    ways: dict[str, tuple[Callable[..., Any], bool]] = {
        "no checkpointing": (lambda layer: layer, False),
        TORCH: (everything[TORCH], False),
        "torch reentrant": (everything["torch reentrant"], False),
        OURS: (everything[OURS], True),
        "ours, reentrant": (everything["ours, reentrant"], True),
    }
    for title, kind in LAYERS.items():
        found = {name: counted(kind(saves), way) for name, (way, saves) in ways.items()}
        yield from counts(title, found, ours=(OURS, "ours, reentrant"))
        w, x = data()
        steps = {name: functools.partial(step, way(kind(saves)), w, x) for name, (way, saves) in ways.items()}
        rounds, calls = (2, 1) if quick else (9, 5)
        yield from timed(title, "CPU time of a step", steps, TORCH, rounds, calls, ours=(OURS, "ours, reentrant"))
