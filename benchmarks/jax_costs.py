"""remat in JAX: what it costs in work and memory, counted from programs.

Runs of `top_k` in the optimised HLO, also with two layers in one outer layer, FLOPs by a walk over the jaxpr, bytes
between forward and backward from shapes, Python calls of the layer, and XLA's temporary bytes (each in a process of its
own, with a scheduler that looks at memory; XLA for CPUs by default shows no saving from any remat).
"""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from roundpipe_jax import doing_recompute, get_recompute_data, remat, remat_layers, save_for_recompute
from roundpipe_jax._explain import flops_of

from ._rows import Row, counts

L, T, D, H, E = 12, 2048, 32, 128, 8
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def moe(p: dict[str, jax.Array], x_TD: jax.Array, saves: bool = True) -> jax.Array:
    logits_TE = x_TD @ p["gate"]
    if saves and doing_recompute():
        (idx_TK,) = get_recompute_data()
    else:
        idx_TK = jax.lax.top_k(jax.lax.stop_gradient(logits_TE), 2)[1]
        if saves:
            save_for_recompute(idx_TK)
    weight_T1 = jnp.take_along_axis(jax.nn.softmax(logits_TE), idx_TK, 1).sum(1, keepdims=True)
    return x_TD + jnp.sin(jnp.sin(x_TD @ p["up"])) @ p["down"] * weight_T1


def params(layers: int = L) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"gate": (D, E), "up": (D, H), "down": (H, D)}
    return {n: jax.random.normal(k, (layers, *s)) * 0.1 for (n, s), k in zip(shapes.items(), keys, strict=True)}


def without_saves(f: Callable[..., Any]) -> Callable[..., Any]:
    """What a checkpoint of others is measured with: it keeps what is saved."""
    return functools.partial(f, saves=False) if f is moe else f


def unrolled(wrap: Wrap, layers: int = L) -> Callable[..., Any]:
    layer = wrap(moe)

    def loss(p: Any, x: Any) -> Any:
        for n in range(layers):
            x = layer(jax.tree.map(lambda leaf: leaf[n], p), x)  # noqa: B023 - called at once
        return (x**2).sum()

    return loss


def scanned(wrap: Wrap | None) -> Callable[..., Any]:
    if wrap is None:
        return lambda p, x: (remat_layers(moe, p, x) ** 2).sum()
    layer = wrap(moe)
    return lambda p, x: (jax.lax.scan(lambda x, p: (layer(p, x), None), x, p)[0] ** 2).sum()


def nested(wrap: Wrap) -> Callable[..., Any]:
    inner = wrap(moe)
    outer = wrap(lambda p, q, x: inner(q, inner(p, x)))
    pick = lambda p, n: jax.tree.map(lambda leaf: leaf[n], p)  # noqa: E731
    return lambda p, x: (outer(pick(p, 0), pick(p, 1), x) ** 2).sum()


X = jax.ShapeDtypeStruct((T, D), jnp.float32)
P = jax.eval_shape(params)
WRAPS: dict[str, Wrap] = {
    "no remat": lambda f: f,
    "jax.checkpoint": lambda f: jax.checkpoint(without_saves(f)),
    "remat": remat,
    'remat "custom_vjp"': lambda f: remat(f, mode="custom_vjp"),
}
STACK = "remat_layers"
OURS = ("remat", 'remat "custom_vjp"', STACK)


def flops(loss: Callable[..., Any]) -> int:
    from jax.interpreters import partial_eval

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(P, X).jaxpr
    return flops_of(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


def residuals(loss: Callable[..., Any]) -> int:
    pull = jax.eval_shape(lambda p, x: jax.vjp(loss, p, x)[1], P, X)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))


def compiled(kind: str, name: str) -> tuple[int, int]:
    """Temporary bytes and runs of top-k or sort in the optimised step, from a process with the right flags."""
    flags = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
    if kind != "scanned":  # never with scan: it aborts
        flags += " --xla_disable_hlo_passes=cse_barrier_expander"
    run = subprocess.run(
        [sys.executable, "-m", __spec__.name, kind, name],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=True,
    )
    size, runs = run.stdout.split()
    return int(size), int(runs)


def one(kind: str, name: str) -> None:
    make: Any = {"unrolled": unrolled, "nested": nested, "scanned": scanned}[kind]
    step = jax.jit(jax.grad(make(WRAPS.get(name)), (0, 1))).lower(P, X).compile()
    runs = len(re.findall(r'(?:custom_call_target="TopK"|= [^=]* sort\()', step.as_text()))
    print(step.memory_analysis().temp_size_in_bytes, runs)


def calls(wrap: Wrap) -> int:
    """Python calls of one layer used 24 times. The layer is a plain function: a closure is traced at every call."""
    ticks: list[int] = []
    space: dict[str, Any] = {"tick": lambda: ticks.append(1), "moe": moe}
    exec("def layer(p, x):\n    tick()\n    return moe(p, x)", space)
    wrapped = wrap(space["layer"])

    def loss(p: Any, x: Any) -> Any:
        for n in range(24):
            x = wrapped(jax.tree.map(lambda leaf: leaf[n], p), x)  # noqa: B023 - called at once
        return (x**2).sum()

    jax.jit(jax.grad(loss)).lower(jax.eval_shape(lambda: params(24)), X)
    return len(ticks)


def rows(quick: bool) -> Iterator[Row]:
    title = f"{L} layers, {T} tokens, width {D}"
    for name, wrap in WRAPS.items():
        loss = unrolled(wrap)
        found: dict[str, float] = {
            "FLOPs of a step": flops(loss),
            "bytes kept": residuals(loss),
            "traces of a layer used 24 times": calls(wrap),
        }
        if not quick:
            size, runs = compiled("unrolled", name)
            found |= {
                "top-k runs": runs,
                "top-k runs, two layers in a layer": compiled("nested", name)[1],
                "temporary bytes, unrolled": size,
                "temporary bytes, scanned": compiled("scanned", name)[0],
            }
        yield from counts(title, {name: found}, ours=OURS)
    if not quick:
        yield from counts(title, {STACK: {"temporary bytes, scanned": compiled("scanned", STACK)[0]}}, ours=OURS)


if __name__ == "__main__":
    one(*sys.argv[1:])
