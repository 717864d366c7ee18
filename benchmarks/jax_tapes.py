"""Tapes in JAX: operations of the optimised step, and the host's work for each call.

A step without a tape, one that records, one that replays, and one of the same layers under `jax.checkpoint` with the
routing as an argument. Then, with a clock, taking a tape apart for `jit` and putting it together again.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

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

from ._rounds import timed
from ._rows import Row, counts

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
        "products": operations.count("dot"),
        "routers": len(re.findall(r"TopK|\btopk\(|\bsort\(", text)),
    }


def rows(quick: bool) -> Iterator[Row]:
    p, x = params(), jax.random.normal(jax.random.key(1), (T, D))
    _, tape = jax.jit(recording(stack))(p, x)
    routing = [entry.value for entry in tape.entries()]
    lanes = {"a loop of remat": (loop(remat(moe)), loop(jax.checkpoint(moe))), "remat_layers": (stack, pinned_scan)}
    for name, (ours, plain) in [*lanes.items()][1:] if quick else lanes.items():
        steps = {
            "no tape": (jax.grad(ours), (p, x)),
            "recording": (jax.value_and_grad(recording(ours), has_aux=True), (p, x)),
            "replaying": (jax.grad(replaying(ours)), (p, x, tape)),
            "jax.checkpoint, routing given": (jax.grad(plain), (p, x, routing)),
        }
        found = {what: counted(step, *args) for what, (step, args) in steps.items()}
        yield from counts(f"The optimised step, {name}", found, ours=("no tape", "recording", "replaying"))
    leaves, structure = jax.tree.flatten(tape)
    host = {
        "a tape taken apart": lambda: jax.tree.flatten(tape),
        "a tape put together": lambda: jax.tree.unflatten(structure, leaves),
        "a dict of the same arrays taken apart": functools.partial(jax.tree.flatten, dict(enumerate(leaves))),
    }
    yield from timed("The host's work for a call", "CPU time", host, [*host][-1], 5, 3 if quick else 100, ours=())
