"""What the call covers: which way to checkpoint gives the gradient of the layer without it, case by case.

Overhead is worth comparing among ways that do the same. Each case runs a small layer with a way and without; "yes"
means that the gradients are equal, or, where an input was changed before backward, that there was an error. All else is
"no": a wrong gradient, none, or an exception.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from roundpipe_torch import save_for_recompute

from ._rows import Row
from ._ways import Way, ours, peers

Tensors = tuple[torch.Tensor, ...]
Case = Callable[[Way], Tensors]


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)


def layer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w).square()


def gradients(loss: torch.Tensor, *of: torch.Tensor) -> Tensors:
    loss.backward()
    return tuple(one.grad if one.grad is not None else torch.zeros(()) for one in of)


def dropout(way: Way) -> Tensors:
    w, x = inputs()
    return gradients(way(lambda w, x: nn.functional.dropout(x @ w, 0.5))(w, x).square().sum(), w, x)


def autocast(way: Way) -> Tensors:
    w, x = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        loss = way(layer)(w, x).float().sum()
    return gradients(loss, w, x)


def closure(way: Way) -> Tensors:
    """Weights in a closure, and an input that needs no gradient, as embeddings give it."""
    w, x = inputs()
    return gradients(way(lambda _, x: layer(w, x))(x.detach(), x.detach()).sum(), w)


def keyword(way: Way) -> Tensors:
    w, x = inputs()
    run: Any = way(layer)
    return gradients(run(w=w, x=x).sum(), w, x)


def inputs_only(way: Way) -> Tensors:
    w, x = inputs()
    return torch.autograd.grad(way(layer)(w, x).sum(), (x,))


def twice(way: Way) -> Tensors:
    w, x = inputs()
    loss = way(layer)(w, x).sum()
    loss.backward(retain_graph=True)
    return gradients(loss, w, x)


def second_derivative(way: Way) -> Tensors:
    w, x = inputs()
    (slope,) = torch.autograd.grad(way(layer)(w, x).sum(), x, create_graph=True)
    return gradients(slope.square().sum(), w)


def nested(way: Way) -> Tensors:
    w, x = inputs()
    inner = way(layer)
    return gradients(way(lambda w, x: layer(w, inner(w, layer(w, x))))(w, x).sum(), w, x)


def changed_input(way: Way) -> Tensors:
    w, x = inputs()
    h = x + 0
    loss = way(layer)(w, h).sum()
    if way is not _plain:
        h.detach().zero_()
    return gradients(loss, w, x)


def branching(way: Way) -> Tensors:
    """A decision on data that changed since, as a router's bias does."""
    w, x = inputs()
    bias = torch.zeros(8)

    def routed(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = x @ w
        (best,) = save_for_recompute((h.detach() + bias).argmax(-1, keepdim=True))
        return torch.tanh(h).gather(-1, best)

    loss = way(routed)(w, x).sum()
    bias[3] = 100.0
    return gradients(loss, w, x)


CASES: dict[str, Case] = {
    "dropout": dropout,
    "autocast": autocast,
    "weights in a closure": closure,
    "keywords": keyword,
    "autograd.grad": inputs_only,
    "two backwards": twice,
    "second derivative": second_derivative,
    "nested": nested,
    "changed input noticed": changed_input,
    "decision kept": branching,
}


def _plain(f: Any) -> Any:
    return f


def covers(case: Case, way: Way) -> bool:
    expected = case(_plain)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = case(way)
    except Exception:
        return case is changed_input
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-5) for a, b in zip(found, expected, strict=True))


def rows(quick: bool) -> Iterator[Row | str]:
    others, notes = peers()
    yield from notes
    for name, way in (others | ours()).items():
        for title, case in CASES.items():
            yield Row("Cases", name, title, covers(case, way), "yes")
