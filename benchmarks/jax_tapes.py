"""What a tape costs in JAX: `python benchmarks/jax_tapes.py`.

Operations in the optimised HLO of a step without a tape, one that records, one that replays, and one of the same layers
under `jax.checkpoint` with the routing as an argument. Then, with a clock, the host's work for each call: taking a tape
apart for `jit` and putting it together again.
"""

import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp

from roundpipe_jax import (
    Tape,
    doing_recompute,
    get_recompute_data,
    record,
    remat,
    remat_layers,
    replay,
    save_for_recompute,
)

L, T, D, H, E, K = 12, 2048, 32, 128, 8, 2


def moe(p: Any, x_TD: jax.Array, idx_TK: Any = None) -> jax.Array:
    logits_TE = x_TD @ p["gate"]
    if idx_TK is not None:
        pass
    elif doing_recompute():
        (idx_TK,) = get_recompute_data()
    else:
        idx_TK = jax.lax.top_k(jax.lax.stop_gradient(logits_TE), K)[1]
        save_for_recompute(idx_TK)
    weight_T1 = jnp.take_along_axis(jax.nn.softmax(logits_TE), idx_TK, 1).sum(1, keepdims=True)
    return x_TD + jnp.sin(jnp.sin(x_TD @ p["up"])) @ p["down"] * weight_T1


def params() -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"gate": (D, E), "up": (D, H), "down": (H, D)}
    return {n: jax.random.normal(k, (L, *s)) * 0.1 for (n, s), k in zip(shapes.items(), keys, strict=True)}


def loop(layer: Any) -> Any:
    def loss(p: Any, x: Any, *routing: Any) -> Any:
        for n in range(L):
            x = layer(jax.tree.map(lambda leaf: leaf[n], p), x, *(given[n] for given in routing))  # noqa: B023
        return (x**2).sum()

    return loss


def stack(p: Any, x: Any) -> Any:
    return (remat_layers(moe, p, x) ** 2).sum()


def pinned_scan(p: Any, x: Any, routing: Any) -> Any:
    layer = jax.checkpoint(moe, prevent_cse=False)
    return (jax.lax.scan(lambda x, own: (layer(own[0], x, own[1]), None), x, (p, jnp.stack(routing)))[0] ** 2).sum()


def recording(loss: Any) -> Any:
    def run(p: Any, x: Any) -> Any:
        with record() as tape:
            value = loss(p, x)
        return value, tape

    return run


def replaying(loss: Any) -> Any:
    def run(p: Any, x: Any, tape: Tape) -> Any:
        with replay(tape):
            return loss(p, x)

    return run


def counted(step: Any, *args: Any) -> dict[str, int]:
    text = jax.jit(step).lower(*args).compile().as_text()
    operations = re.findall(r"= \S+ ([a-z-]+)\(", text)
    work = [
        name for name in operations if name not in ("parameter", "constant", "get-tuple-element", "tuple", "bitcast")
    ]
    return {
        "operations": len(work),
        "dot": operations.count("dot"),
        "router": len(re.findall(r"TopK|\btopk\(|\bsort\(", text)),
    }


def main() -> None:
    p, x = params(), jax.random.normal(jax.random.key(1), (T, D))
    _, tape = jax.jit(recording(stack))(p, x)
    routing = [entry.value for entry in tape.entries()]
    for name, ours, plain in (("loop", loop(remat(moe)), loop(jax.checkpoint(moe))), ("stack", stack, pinned_scan)):
        for what, step, args in (
            ("no tape", jax.grad(ours), (p, x)),
            ("recording", jax.value_and_grad(recording(ours), has_aux=True), (p, x)),
            ("replaying", jax.grad(replaying(ours)), (p, x, tape)),
            ("jax.checkpoint, routing given", jax.grad(plain), (p, x, routing)),
        ):
            print(f"{name:6} {what:30} {counted(step, *args)}")
    leaves, structure = jax.tree.flatten(tape)
    for what, function in (
        ("taken apart", lambda: jax.tree.flatten(tape)),
        ("put together", lambda: jax.tree.unflatten(structure, leaves)),
    ):
        start = time.perf_counter()
        for _ in range(100):
            function()
        print(f"a tape of {L} layers {what}: {(time.perf_counter() - start) * 1e4:.0f} us")


if __name__ == "__main__":
    main()
