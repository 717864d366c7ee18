"""Random layers, run plainly and as regions: the gradient is the plain one's, or a typed error; never another number.

A program is a list of instructions over a growing list of 4 x 4 tensors. Decisions come from a generator of their own,
so that a second decision would differ. Beside the common instructions there is junk that one phase alone runs, kept
alive or not, regions inside, and parts that are kept.
"""

from __future__ import annotations

import random
import re

import pytest
import torch
import torch.nn.functional as F

from roundpipe_torch import (
    MismatchError,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    keep,
    layer_scope,
    recompute_once,
    remat,
    save_for_recompute,
)
from tests.fuzz import seeds

D = 4
UNARY = [torch.tanh, torch.exp, torch.sin, torch.sigmoid, lambda t: t * t, lambda t: t.softmax(-1), lambda t: t.t() * 2]
BINARY = [torch.add, torch.mul, lambda a, b: a @ b / 4, lambda a, b: torch.where(a.detach() > 0, a, b)]
KINDS = [
    "unary",
    "binary",
    "weight",
    "dropout",
    "in place",
    "decide",
    "region",
    "junk",
    "sort",
    "branch",
    "list",
    "keep",
]


def program(rng: random.Random, depth: int = 0) -> list:
    steps = []
    for _ in range(rng.randint(2, 7)):
        kind = rng.choice(KINDS)
        if kind == "region":
            if depth < 3:
                steps.append((kind, program(rng, depth + 1), rng.choice(["checkpoint", "remat", "reentrant"])))
            continue
        if kind == "keep":
            if depth < 3:
                steps.append((kind, program(rng, depth + 1), rng.randrange(100)))
            continue
        detail = {
            "decide": lambda: rng.choice(["branch", "returned", "once"]),
            "junk": lambda: (rng.choice(["forward", "recompute"]), rng.choice(["dropped", "local", "kept"])),
            "branch": lambda: rng.choice(["branch", "once"]),
        }.get(kind, rng.random)()
        steps.append((kind, rng.randrange(100), rng.randrange(100), detail))
    return steps


class Machine:
    """Runs a program; `call` runs a region."""

    def __init__(self, regions: bool, seed: int) -> None:
        self.regions = regions
        self.draws = torch.Generator().manual_seed(seed)
        self.weights = [
            torch.randn(D, D, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(3)
        ]
        self.decisions = 0
        self.kept: list = []
        self.local = None

    def call(self, how: str, steps: list, x: torch.Tensor) -> torch.Tensor:
        if not self.regions:
            return self.run(steps, x)
        if how == "remat":
            return remat(self.run, label=f"{len(steps)} steps")(steps, x)
        return checkpoint(self.run, steps, x=x, use_reentrant=how == "reentrant")

    def decide(self, style: str, make):
        def decision():
            self.decisions += 1
            return make()

        if style == "once":
            return recompute_once(decision)
        with layer_scope("decision"):
            if style == "returned":
                return save_for_recompute(None if doing_recompute() else decision())[0]
            if doing_recompute():
                return get_recompute_data()[0]
            made = decision()
            save_for_recompute(made)
            return made

    def run(self, steps: list, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for step in steps:
            values.append(self.step(values, *step))
        return values[-1] + values[len(values) // 2]

    def step(self, values: list, kind: str, one, other, detail=None):
        if kind == "region":
            return self.call(other, one, values[-1])
        if kind == "keep":
            return keep(self.run, one, values[other % len(values)])
        a, b = values[-1 - one % min(2, len(values))], values[other % len(values)]
        if kind == "unary":
            return UNARY[other % len(UNARY)](a)
        if kind == "binary":
            return BINARY[one % len(BINARY)](a, b)
        if kind == "weight":
            return a @ self.weights[other % 3] / 2
        if kind == "dropout":
            return F.dropout(a, 0.3)
        if kind == "in place":
            return (a + 0).add_(b).mul_(0.5)
        if kind == "list":
            return torch.stack([a, b], 0).mean(0)
        if kind == "decide":
            index = self.decide(detail, lambda: torch.randint(0, D, (D, D), generator=self.draws))
            return a.gather(1, index)
        if kind == "branch":
            n = self.decide(detail, lambda: int(torch.randint(0, 3, (), generator=self.draws)))
            return [torch.tanh, torch.exp, lambda t: t * 1.5][n](a.clamp(-2, 2))
        if kind == "sort":  # its values in forward, a gather in the recompute
            with layer_scope("sort"):
                if doing_recompute():
                    return a.gather(1, get_recompute_data()[0])
                ranked, order = a.sort(-1)
                save_for_recompute(order)
                return ranked
        phase, life = detail
        if (phase == "recompute") is doing_recompute():
            junk = torch.sin(a @ a).exp()
            if life == "kept":
                self.kept.append(junk)
            self.local = junk if life == "local" else None
        return a * 1.0


def gradients(steps: list, seed: int, regions: bool, how: str):
    torch.manual_seed(seed)
    machine = Machine(regions, seed)
    x = torch.randn(D, D, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    y = machine.call(how, steps, x * 1.0)
    y.sin().sum().backward(retain_graph=True)
    first = [t.grad for t in (x, *machine.weights)]
    for t in (x, *machine.weights):
        t.grad = None
    y.square().mean().backward()
    found = [y.detach(), *first, *(t.grad for t in (x, *machine.weights)), torch.rand(2)]
    return found, machine.decisions


@pytest.mark.parametrize("block", seeds(12))
def test_random_programs(block: int) -> None:
    refused = 0
    for seed in range(block * 25, block * 25 + 25):
        rng = random.Random(seed)
        steps = program(rng)
        how = rng.choice(["checkpoint", "remat", "reentrant"])
        want, decisions = gradients(steps, seed, False, how)
        try:
            got, made = gradients(steps, seed, True, how)
        except MismatchError:
            refused += 1
            assert doing_recompute() is False
            continue
        # Reentrant regions add up weights' gradients in another order, and `gather` gives another layout than `sort`.
        exact = not {"reentrant", "sort"} & set(re.findall(r"\w+", repr((steps, how))))
        for g, w in zip(got, want, strict=True):
            assert (g is None) == (w is None), seed
            if g is not None:
                assert torch.equal(g, w) if exact else torch.allclose(g, w, rtol=1e-4, atol=1e-5, equal_nan=True), seed
        assert made == decisions, seed
        assert doing_recompute() is False
    assert refused <= 5
