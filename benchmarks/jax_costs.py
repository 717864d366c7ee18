"""What remat costs in work and memory, without a clock: `python benchmarks/jax_costs.py`.

Runs of `top_k` in the optimised HLO, also with two layers in one outer layer, FLOPs by a walk over the jaxpr, residual
bytes from shapes, Python calls of the layer, and XLA's temporary bytes (each in a process of its own, with a scheduler
that looks at memory; CPU XLA by default shows no saving from any remat).
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp

from roundpipe_jax import doing_recompute, get_recompute_data, remat, remat_layers, save_for_recompute
from roundpipe_jax._explain import flops_of

L, T, D, H, E = 12, 2048, 32, 128, 8
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def moe(p: dict[str, jax.Array], x_TD: jax.Array) -> jax.Array:
    logits_TE = x_TD @ p["gate"]
    if doing_recompute():
        (idx_TK,) = get_recompute_data()
    else:
        idx_TK = jax.lax.top_k(jax.lax.stop_gradient(logits_TE), 2)[1]
        save_for_recompute(idx_TK)
    weight_T1 = jnp.take_along_axis(jax.nn.softmax(logits_TE), idx_TK, 1).sum(1, keepdims=True)
    return x_TD + jnp.sin(jnp.sin(x_TD @ p["up"])) @ p["down"] * weight_T1


def params(layers: int = L) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"gate": (D, E), "up": (D, H), "down": (H, D)}
    return {n: jax.random.normal(k, (layers, *s)) * 0.1 for (n, s), k in zip(shapes.items(), keys, strict=True)}


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
    "jax.checkpoint": jax.checkpoint,
    "remat": remat,
    'remat "custom_vjp"': lambda f: remat(f, mode="custom_vjp"),
}


def flops(loss: Callable[..., Any]) -> int:
    from jax.interpreters import partial_eval

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(P, X).jaxpr
    return flops_of(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


def residuals(loss: Callable[..., Any]) -> int:
    pull = jax.eval_shape(lambda p, x: jax.vjp(loss, p, x)[1], P, X)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))


def compiled(kind: str, name: str) -> tuple[float, int]:
    """Temporary megabytes and runs of top-k or sort in the optimised step, from a process with the right flags."""
    flags = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
    if kind != "scanned":  # never with scan: it aborts
        flags += " --xla_disable_hlo_passes=cse_barrier_expander"
    run = subprocess.run(
        [sys.executable, __file__, kind, name],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=True,
    )
    size, runs = run.stdout.split()
    return int(size) / 1e6, int(runs)


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


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one(*sys.argv[1:])
        sys.exit()
    slot = L * T * 2 * 4
    print(f"{L} layers, {T} tokens, width {D}; slots hold {slot / 1e6:.3f} MB")
    print(f"{'':20} {'top-k runs':>10} {'nested 2':>9} {'MFLOPs':>9} {'kept MB':>8} {'calls/24':>8}", end="")
    print(f" {'temp MB unrolled':>17} {'scanned':>9}")
    for name, wrap in WRAPS.items():
        loss = unrolled(wrap)
        size, runs = compiled("unrolled", name)
        row = (
            f"{name:20} {runs:10} {compiled('nested', name)[1]:9} {flops(loss) / 1e6:9.1f} "
            f"{residuals(loss) / 1e6:8.2f} {calls(wrap):8} {size:17.2f} {compiled('scanned', name)[0]:9.2f}"
        )
        print(row, flush=True)
    print(f"{'remat_layers':20} {compiled('scanned', 'stack')[0]:87.2f}")
