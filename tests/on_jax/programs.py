"""Random programs of layers: a small language, how hypothesis draws it, and how it runs.

A program is a tuple of `Op`s that a value x [2, 3] goes through, with weights w [3, 3]. `at` is an integer array that
counts the turns of the loops and the calls around, so that every decision has a number of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

from roundpipe_jax import (
    doing_recompute,
    get_recompute_data,
    keep,
    layer_scope,
    recompute_once,
    remat,
    remat_layers,
    save_for_recompute,
    save_policy,
)
from tests.on_jax.oracle import STYLES, Router, W, X

__all__ = [
    "INNER",
    "SITE",
    "TRACED",
    "X1",
    "BoomError",
    "Interrupt",
    "Op",
    "Runner",
    "W",
    "X",
    "everything",
    "kinds",
    "programs",
]

INNER = ("scan", "cond", "switch", "vmap", "jit", "slope")  # what runs its body in a trace of its own
TRACED = {*INNER, "stock", "layers"}
X1 = jnp.cos(X)
SITE = 100  # decisions of one site have numbers from SITE times that of the site

# The ways to call a region.
CALLS = ("plain", "keywords", "static", "containers", "closure", "constant", "told", "policy")


class BoomError(Exception):
    """A failure of the user's code."""


class Interrupt(KeyboardInterrupt):
    """What no `except Exception` catches."""


@dataclass(frozen=True)
class Op:
    """One step. `style` says how it saves or how it is called; its bodies are programs."""

    kind: str
    style: str = ""
    bodies: tuple[tuple[Op, ...], ...] = ()
    site: int = 0

    def __repr__(self) -> str:
        inner = "; ".join(", ".join(map(repr, body)) for body in self.bodies)
        return f"{self.kind}{self.style and '.' + self.style}" + (f"({inner})" if self.bodies else "")


def numbered(ops: tuple[Op, ...], numbers: Iterator[int]) -> tuple[Op, ...]:
    """The same with the number of its site in every op."""
    return tuple(Op(op.kind, op.style, tuple(numbered(b, numbers) for b in op.bodies), next(numbers)) for op in ops)


def everything(ops: tuple[Op, ...]) -> list[Op]:
    """All ops, those in bodies too."""
    return [one for op in ops for one in (op, *(inner for body in op.bodies for inner in everything(body)))]


def kinds(ops: tuple[Op, ...]) -> set[str]:
    """Which kinds of ops there are."""
    return {op.kind for op in everything(ops)}


# ------------------------------------------------------------------------------------------------ drawing


DECISIONS = ("scale", "scale", "pick", "table", "tree", "key", "host")
PLAIN = ("sine", "dense", "dropout", "keep", "while")
OUTER = ("region", "region", "shared", "layers", "attempt", "stock", "scope", *INNER)
BODIES = {"cond": 2, "switch": 3}


@st.composite
def bodies(draw: Any, depth: int, rows: bool, outer: tuple[str, ...]) -> tuple[Op, ...]:
    """`rows`: x has rows yet."""
    return tuple(draw(ops(depth, rows, outer)) for _ in range(draw(st.integers(1, 2))))


@st.composite
def ops(draw: Any, depth: int, rows: bool, outer: tuple[str, ...]) -> Op:
    kind = draw(st.sampled_from(DECISIONS + PLAIN + (outer if depth else ())))
    if kind == "vmap" and not rows:
        kind = "jit"
    if kind in OUTER:
        inside = tuple(draw(bodies(depth - 1, rows and kind != "vmap", outer)) for _ in range(BODIES.get(kind, 1)))
    else:
        inside = ()
    return Op(kind, draw(styles(kind)), inside)


def styles(kind: str) -> st.SearchStrategy[str]:
    if kind in (*DECISIONS, "cond", "switch"):
        return st.sampled_from(STYLES)
    if kind == "region":
        return st.sampled_from(CALLS)
    if kind == "layers":
        return st.sampled_from(("flat", "nested", "aux"))
    return st.just("")


def programs(*, depth: int = 2, traced: bool = True) -> st.SearchStrategy[tuple[Op, ...]]:
    """Programs with at least one region that decides. `traced`: with loops, branches, jitted functions."""
    outer = tuple(kind for kind in OUTER if traced or kind not in TRACED)

    @st.composite
    def drawn(draw: Any) -> tuple[Op, ...]:
        decision = Op(draw(st.sampled_from(DECISIONS)), draw(st.sampled_from(STYLES)))
        before, after = draw(bodies(depth, True, outer)), draw(st.booleans())
        body = (decision, *before) if after else (*before, decision)
        region = Op("region", draw(styles("region")), (body,))
        more = draw(bodies(1, True, outer)) if draw(st.booleans()) else ()
        return numbered((region, *more), iter(range(1, 1000)))

    return drawn()


# ------------------------------------------------------------------------------------------------ running


@jax.tree_util.register_dataclass
@dataclass
class Pair:
    """A container of the user's."""

    one: Any
    two: Any


class Runner:
    """Runs programs, with its layers in remat of one lane, or, without a lane, bare.

    `on_values`: every layer runs where its inputs have values, so that Python may decide too. The op with number `fuse`
    of those that run or are traced fails with `failure`.
    """

    def __init__(
        self,
        lane: Any = None,
        *,
        on_values: bool = False,
        fuse: int | None = None,
        failure: type[BaseException] = BoomError,
    ) -> None:
        self.router, self.lane, self.on_values = Router(), lane, on_values
        self.fuse, self.failure = fuse, failure
        self.steps = 0
        self.closures: dict[int, Callable[[Any, Any, Any], Any]] = {}
        self.in_regions: set[int] = set()  # sites whose decisions a slot keeps
        self.in_vain: set[int] = set()  # sites that decide what nothing uses: compiled, they may be left out
        self.layers_told = {mode: remat(told, mode=mode) for mode in ("checkpoint", "custom_vjp")}

    def wrap(self, layer: Any, **options: Any) -> Any:
        if self.lane is None:
            return layer
        if self.lane == "custom_vjp":
            options.pop("policy", None)
        return remat(layer, mode=self.lane, **options)

    def run(self, program: tuple[Op, ...], x: Any, w: Any, at: Any, inside: str = "") -> Any:
        """`inside` what saves are kept by: a "region", a "policy", or nothing."""
        for op in program:
            self.steps += 1
            if self.steps == self.fuse:
                raise self.failure
            x = getattr(self, f"do_{op.kind}")(op, x, w, at, inside)
        return x

    def function(self, program: tuple[Op, ...]) -> Callable[[Any, Any], Any]:
        """The program as a function of x and w."""
        return lambda x, w: self.run(program, x, w, jnp.int32(0))

    # ------------------------------------------------------------------------------------------ decisions

    def number(self, op: Op, at: Any) -> Any:
        return op.site * SITE + at

    def decision(self, op: Op, x: Any, at: Any, inside: str) -> Any:
        """From 1 to 5."""
        return self.kept(op, lambda: self.router.decide(self.number(op, at), x), inside)

    def kept(self, op: Op, decide: Callable[[], Any], inside: str) -> Any:
        """What is decided, kept in one of the ways that layers use."""
        name = f"{op.kind} {op.site}"
        if inside == "region":
            self.in_regions.add(op.site)
        if self.lane is None:
            return decide()
        if op.style == "once" and inside:
            return recompute_once(decide)
        if op.style == "seed" and inside:
            if doing_recompute():
                (value,) = get_recompute_data(name)
            else:
                value = decide()
                save_for_recompute(value, name=name)
            return value
        (value,) = save_for_recompute(decide(), name=name)
        return value

    def do_scale(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        return x * (0.5 + 0.2 * self.decision(op, x, at, inside))

    def do_pick(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        row = lax.rem(self.decision(op, x, at, inside), jnp.int32(3))
        return jnp.sin(x + lax.dynamic_index_in_dim(w, row, keepdims=False))

    def do_table(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        def decide() -> Any:
            return lax.logistic(lax.stop_gradient(x)) * self.router.decide(self.number(op, at), x)

        return 0.3 * x * self.kept(op, decide, inside)

    def do_tree(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        def decide() -> Any:
            one = self.router.decide(self.number(op, at), x)
            return {"b": Pair((one, "text"), [None, 3, op.site]), "a": (0.5, np.arange(3.0, dtype=np.float32), True)}

        tree = self.kept(op, decide, inside)
        assert tree["b"].one[1] == "text"
        assert tree["b"].two == [None, 3, op.site]
        half, row, yes = tree["a"]
        assert yes is True
        assert half == 0.5
        return x * half + jnp.sin(x) * 0.1 * tree["b"].one[0] * jnp.asarray(row)

    def do_key(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        def decide() -> Any:
            return jax.random.fold_in(jax.random.key(7), self.router.decide(self.number(op, at), x))

        key = self.kept(op, decide, inside)
        return jnp.sin(x) * jax.random.bits(key, x.shape, jnp.uint8).astype(jnp.float32) / 128

    def do_host(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        """Values of Python and numpy. What is traced decides alike in every trace."""

        def decide() -> Any:
            k = int(self.router.answer(self.number(op, at), None)) if self.on_values else 1 + op.site % 5
            return k > 2, np.full((3,), k, np.float32), float(k), "sine" if k % 2 else "cosine"

        if inside != "region" and op.style != "once":
            return x * 0.9  # a save there belongs to no layer, and would decide twice in the recompute of another
        flag, row, k, name = self.kept(
            op if op.style != "returned" else Op(op.kind, "seed", (), op.site), decide, inside
        )
        y = x * row if flag else x + row
        return 0.2 * (jnp.sin(y) if name == "sine" else jnp.cos(y)) * k

    def do_leak(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        """Saves what carries a tangent."""
        (y,) = save_for_recompute(jnp.sin(x), name="leak")
        return x * y

    # ---------------------------------------------------------------------------------------- other steps

    def do_sine(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        return jnp.sin(x) + 0.5 * x

    def do_dense(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        return jnp.tanh(x @ w) + 0.1 * x

    def do_dropout(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        key = jax.random.fold_in(jax.random.key(op.site), at)
        return x * (jax.random.bits(key, x.shape, jnp.uint8) < 200) / 0.8

    def do_keep(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        def dear(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w)

        return x + (dear(x, w) if self.lane is None else keep(dear, x, w))

    def do_while(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        turns = lax.while_loop(lambda n: n < lax.rem(at, jnp.int32(2)) + 1, lambda n: n + 1, jnp.int32(0))
        return x * (1 + 0.1 * turns)

    # ---------------------------------------------------------------------------------------- what is around

    def do_region(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        (body,) = op.bodies
        y = None
        if op.style == "plain":
            y = self.wrap(lambda x, w, at: self.run(body, x, w, at, "region"))(x, w, at)
        if op.style == "keywords":
            layer = self.wrap(lambda w, *, x, at: (self.run(body, x, w, at, "region"), "told", op.site, None))
            y, *rest = layer(w, x=x, at=at)
            assert rest == ["told", op.site, None]
        if op.style == "static":
            options = {} if self.lane is None else {"static_argnums": 1, "static_argnames": "how"}
            layer = self.wrap(lambda x, told, w, at, how: self.run(body, x * told[0], w, at, how), **options)
            y = layer(x, [1.5, np.ones(2)], w, at, how="region")
        if op.style == "containers":

            def layer_of_containers(pair: Any, more: Any) -> Any:
                x, w = pair.one, pair.two["w"]
                return {"y": Pair(self.run(body, x, w, more[0], "region"), more), "n": [w * 2, "text"]}

            out = self.wrap(layer_of_containers, label=f"L{op.site}")(Pair(x, {"w": w}), (at, None, "s"))
            assert (out["n"][1], out["y"].two[1:]) == ("text", (None, "s"))
            y = out["y"].one + 0.1 * out["n"][0][0]
        if op.style in ("closure", "constant"):
            y = self.closure_of(op)(x, w, at)
        if op.style == "told":
            layer = told if self.lane is None else self.layers_told[self.lane]
            y = layer(x, w, at, self, op)
        if op.style == "policy":
            mark = jax.ad_checkpoint.checkpoint_name
            layer = self.wrap(
                lambda x, w, at: self.run(body, mark(jnp.sin(x), "mark"), w, at, "region"), policy=save_policy("mark")
            )
            y = layer(x, w, at)
        return y

    def closure_of(self, op: Op) -> Callable[[Any, Any, Any], Any]:
        """A layer made once, which closes over what is another in each call, with or without a tangent."""
        if op.site not in self.closures:
            cells: dict[str, Any] = {}

            def body(x: Any, w: Any) -> Any:
                return self.run(op.bodies[0], x * cells["k"], w, cells["at"], "region")

            layer = self.wrap(body if op.style == "constant" else lambda x: body(x, cells["w"]))

            def call(x: Any, w: Any, at: Any) -> Any:
                cells.update(w=w, at=at, k=1 + 0.5 * jnp.tanh(jnp.sum(lax.stop_gradient(x))))
                try:
                    return layer(x, w) if op.style == "constant" else layer(x)
                finally:
                    cells.clear()

            self.closures[op.site] = call
        return self.closures[op.site]

    def do_shared(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        layer = self.wrap(lambda x, w, at: self.run(op.bodies[0], x, w, at, "region"))
        return layer(layer(x, w, at * 3 + 1), w, at * 3 + 2)

    def do_attempt(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        self.in_vain |= {inner.site for inner in everything(op.bodies[0])}

        def fails(x: Any, w: Any, at: Any) -> Any:
            self.run(op.bodies[0], x, w, at, "region")
            raise ArithmeticError

        try:
            return self.wrap(fails)(x, w, at)
        except ArithmeticError:
            return jnp.sin(x)

    def do_layers(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        def layer(params: Any, x: Any, w: Any, at: Any) -> Any:
            y = self.run(op.bodies[0], x * params["k"], w, at * 3 + params["n"], "region")
            return (y, params["k"] * 2) if op.style == "aux" else y

        params = {"k": jnp.array([0.8, 1.2]), "n": jnp.arange(1, 3)}
        if self.lane is not None:
            options = {"nested": 1} if op.style == "nested" else {"has_aux": op.style == "aux"}
            out = remat_layers(layer, params, x, w, at, mode=self.lane, **options)
            return out[0] * jnp.sum(out[1]) if op.style == "aux" else out
        for n in range(2):
            x = layer(jax.tree.map(lambda leaf, n=n: leaf[n], params), x, w, at)
            x = x[0] if op.style == "aux" else x
        return x * jnp.sum(params["k"] * 2) if op.style == "aux" else x

    def do_stock(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        def layer(x: Any, w: Any, at: Any) -> Any:
            return self.run(op.bodies[0], x, w, at, inside or "policy")

        if self.lane is not None:
            layer = jax.checkpoint(layer)
        return layer(x, w, at)

    def do_scope(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        with layer_scope(f"scope {op.site}"):
            return self.run(op.bodies[0], x, w, at, inside)

    def do_scan(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        def step(x: Any, n: Any) -> Any:
            return self.run(op.bodies[0], x, w, at * 3 + n, inside), None

        return lax.scan(step, x, jnp.arange(1, 3, dtype=jnp.int32))[0]

    def branch(self, op: Op, n: int, inside: str) -> Callable[..., Any]:
        return lambda x, w, at: self.run(op.bodies[n], x, w, at, inside)

    def do_cond(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        branches = (self.branch(op, n, inside) for n in range(2))
        return lax.cond(self.decision(op, x, at, inside) > 2, *branches, x, w, at)

    def do_switch(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        branches = [self.branch(op, n, inside) for n in range(3)]
        return lax.switch(self.decision(op, x, at, inside) - 1, branches, x, w, at)

    def do_vmap(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        return jax.vmap(self.branch(op, 0, inside), (0, None, None))(x, w, at)

    def do_jit(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        return jax.jit(self.branch(op, 0, inside))(x, w, at)

    def do_slope(self, op: Op, x: Any, w: Any, at: Any, inside: str) -> Any:
        for inner in everything(op.bodies[0]):  # a second slope of what is linear does not depend on it
            if inner.kind == "slope":
                self.in_vain |= {one.site for one in everything(inner.bodies[0])}
        return x - 0.1 * jax.grad(lambda x: jnp.sum(self.run(op.bodies[0], x, w, at, inside)))(x)


def told(x: Any, w: Any, at: Any, runner: Runner, op: Op) -> Any:
    """A layer that is no closure, so that what is known of it lasts."""
    return runner.run(op.bodies[0], x, w, at, "region")
