"""Random programs of nested regions, scopes, loops and branches, against themselves without remat."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from roundpipe_jax import layer_scope, save_for_recompute
from tests.fuzz import TIMES, seeds
from tests.on_jax.oracle import LANES, STYLES, Router, W, Wrap, X, bare, decided_once, gradient, in_lane

INNER = ("scan", "cond", "jit", "vmap")
OUTER = ("region", "region", "scope", "keywords", *INNER)


@dataclass
class Op:
    """One step of a program. `site` tells its decision from all others; a body is a program of its own."""

    kind: str
    site: int
    style: str
    bodies: list[list[Op]] = field(default_factory=list)


class Writer:
    """Writes programs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.inner = self.random.random() < 0.5  # whether there are loops, branches and jitted functions
        self.sites = 0

    def program(self) -> list[Op]:
        return [Op("region", 0, "seed", [self.body(3)]), *self.body(1)]

    def body(self, depth: int, rows: bool = True) -> list[Op]:
        return [self.op(depth, rows) for _ in range(self.random.randint(1, 3))]

    def op(self, depth: int, rows: bool) -> Op:
        kind = self.random.choice(["dense", "scale", "scale", "roll", "table", *OUTER])
        if (kind in INNER and not self.inner) or (kind in OUTER and depth == 0) or (kind == "vmap" and not rows):
            kind = "scale"
        self.sites += 100
        op = Op(kind, self.sites, self.random.choice(STYLES))
        for _ in range({"cond": 2}.get(kind, 1) if kind in OUTER else 0):
            op.bodies.append(self.body(depth - 1, rows and kind != "vmap"))
        return op


class Runner:
    """Runs a program, with its layers in `wrap`."""

    def __init__(self, router: Router, wrap: Wrap) -> None:
        self.router, self.wrap = router, wrap

    def run(self, ops: list[Op], x: Any, w: Any, at: Any, inside: bool = False) -> Any:
        """`at` counts the turns of the loops around; `inside`: whether a region is around."""
        for op in ops:
            x = getattr(self, op.kind)(op, x, w, at, inside)
        return x

    def decision(self, op: Op, x: Any, at: Any, inside: bool) -> Any:
        style = op.style if inside and self.wrap is not bare else "plain"
        return self.router.saved(style, op.site + at, x, name=f"at {op.site}")

    def dense(self, op: Op, x: Any, w: Any, at: Any, inside: bool) -> Any:
        return jnp.tanh(x @ w)

    def scale(self, op: Op, x: Any, w: Any, at: Any, inside: bool) -> Any:
        return x * (0.5 + 0.2 * self.decision(op, x, at, inside))

    def roll(self, op: Op, x: Any, w: Any, at: Any, inside: bool) -> Any:
        return jnp.sin(jnp.roll(x, self.decision(op, x, at, inside), -1))

    def table(self, op: Op, x: Any, w: Any, at: Any, inside: bool) -> Any:
        table = lax.stop_gradient(jax.nn.sigmoid(x @ w))
        if inside and self.wrap is not bare:
            (table,) = save_for_recompute(table, name=f"table {op.site}")
        return x * table + 0.1 * x

    def region(self, op: Op, x: Any, w: Any, at: Any, inside: bool) -> Any:
        return self.wrap(lambda x, w: self.run(op.bodies[0], x, w, at, True))(x, w)

    def keywords(self, op: Op, x: Any, w: Any, at: Any, inside: bool) -> Any:
        layer = self.wrap(lambda w, x, at: (self.run(op.bodies[0], x, w, at, True), "told", op.site))
        return layer(w, x=x, at=at)[0]

    def scope(self, op: Op, x: Any, w: Any, at: Any, inside: bool) -> Any:
        with layer_scope(f"scope {op.site}"):
            return self.run(op.bodies[0], x, w, at, inside)

    def scan(self, op: Op, x: Any, w: Any, at: Any, inside: bool) -> Any:
        def step(x: Any, n: Any) -> Any:
            return self.run(op.bodies[0], x, w, at + n + 1, inside), None

        return lax.scan(step, x, jnp.arange(2))[0]

    def cond(self, op: Op, x: Any, w: Any, at: Any, inside: bool) -> Any:
        def branch(n: int) -> Callable[[Any, Any], Any]:
            return lambda x, w: self.run(op.bodies[n], x, w, at, inside)

        return lax.cond(self.decision(op, x, at, inside) > 2, branch(0), branch(1), x, w)

    def jit(self, op: Op, x: Any, w: Any, at: Any, inside: bool) -> Any:
        return jax.jit(lambda x, w, at: self.run(op.bodies[0], x, w, at, inside))(x, w, at)

    def vmap(self, op: Op, x: Any, w: Any, at: Any, inside: bool) -> Any:
        return jax.vmap(lambda x, w: self.run(op.bodies[0], x, w, at, inside), (0, None))(x, w)


Form = Callable[[Callable[[Any, Any], Any]], Callable[[Any, Any], Any]]
FORMS: dict[str, Form] = {
    "eager": gradient,
    "jit": lambda f: jax.jit(gradient(f)),
    "grad(jit)": lambda f: gradient(jax.jit(f)),
    "vmap(grad)": lambda f: lambda x, w: jax.vmap(gradient(f), (0, None))(x[None], w),
    "grad of grad": lambda f: jax.jit(gradient(lambda x, w: jax.grad(lambda x: (f(x, w) ** 2).sum())(x))),
    "in scan": lambda f: gradient(lambda x, w: lax.scan(lambda c, _: (f(c, w), None), x, None, length=1)[0]),
    "forward": lambda f: jax.jit(lambda x, w: jax.jvp(f, (x, w), (jnp.cos(x), jnp.sin(w)))),
}


def check(seed: int, form: str, lane: Any) -> None:
    program = Writer(seed).program()

    def run(router: Router, wrap: Wrap) -> Any:
        runner = Runner(router, wrap)
        return FORMS[form](lambda x, w: runner.run(program, x, w, jnp.int32(0)))(X, W)

    decided_once(run, in_lane(lane), 1e-4)


def count(ops: list[Op], kinds: tuple[str, ...]) -> int:
    return sum((op.kind in kinds) + sum(count(body, kinds) for body in op.bodies) for op in ops)


def worthwhile(seed: int) -> bool:
    """Programs with decisions in several regions, and not so long that compiling them takes all the time."""
    program = Writer(seed).program()
    decisions = count(program, ("scale", "roll", "cond"))
    return 3 <= decisions <= 9 and count(program, ("region", "keywords")) >= 3 and count(program, INNER) <= 3


def loops(seed: int) -> bool:
    return count(Writer(seed).program(), INNER) > 0


SEEDS = [seed for seed in seeds(400) if worthwhile(seed)]
FLAT = [seed for seed in SEEDS if not loops(seed)]
LOOPS = [seed for seed in SEEDS if loops(seed)]


@pytest.mark.parametrize("seed", FLAT[: 4 * TIMES])
def test_regions_and_scopes(seed: int) -> None:
    lane = LANES[seed % 2]
    check(seed, "jit", lane)
    form = [*FORMS][seed % len(FORMS)]
    check(seed, form, "checkpoint" if form == "forward" else lane)


@pytest.mark.parametrize("seed", LOOPS[: 6 * TIMES])
def test_loops_branches_and_jitted_functions(seed: int) -> None:
    check(seed, [*FORMS][seed % len(FORMS)], "checkpoint")


@pytest.mark.parametrize("seed", LOOPS[: 4 * TIMES])
def test_the_first_call_on_values(seed: int) -> None:  # R8
    check(seed, "eager", "checkpoint")
