"""What call overhead consists of: what the interpreter does for one region, counted, per engine.

Calls of Python functions, calls of built-in functions, and bytecode instructions, in the forward and in the backward of
one region over a tiny layer, after three warm-up steps. Work in C++ is not seen. The counts are those of one version of
Python and torch, so the gate holds the ratio to torch's non-reentrant checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ._interpreter import effort
from ._rows import Row
from ._ways import TORCH, Layer, ours
from .torch_overhead import deciding, layers, saving, tiny


def counted(layer: Layer) -> dict[str, int]:
    w, x = (torch.randn(*shape, requires_grad=True) for shape in ((8, 8), (4, 8)))
    for _ in range(3):
        layer(w, x).sum().backward()
    made = [torch.zeros(())]

    def forward() -> None:
        made[0] = layer(w, x)

    there = effort(forward)
    losses = [layer(w, x).sum() for _ in range(2)]
    back = effort(lambda: losses.pop().backward())
    found = {"forward": there, "backward": back}
    return {f"{field}, {phase}": getattr(e, field) for field in there._fields for phase, e in found.items()}


def measure(table: str, plain: Layer, saves: Layer) -> Iterator[Row | str]:
    ways, notes = layers(plain, saves)
    yield from notes
    found = {name: counted(layer) for name, layer in ways.items()}
    for name, seen in found.items():
        for what, value in seen.items():
            yield Row(table, name, what, value)
        total, base = (one["instructions, forward"] + one["instructions, backward"] for one in (seen, found[TORCH]))
        tolerance = 0.03 if name in ours() else None
        yield Row(table, name, "instructions", total, "", total / base, TORCH, tolerance=tolerance)


def rows(quick: bool) -> Iterator[Row | str]:
    yield from measure("A tiny layer", tiny, tiny)
    if not quick:
        yield from measure("A tiny layer that decides", deciding, saving)
