"""Routing in the recompute against routing in the forward, in JAX: a bfloat16 mixture of experts under jit(grad).

XLA keeps more than bfloat16 inside a fusion, so the forward's router sees the unrounded layer input and the
recompute's router the rounded one. Which experts the recompute used is read off the gradient of a term that only
chosen experts have. The distance is to the gradient of `jax.checkpoint` with the forward's routing pinned, the
worst of four inputs. Swept is the number of experts that a token goes to.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from roundpipe_jax import doing_recompute, get_recompute_data, remat, save_for_recompute

from ._rows import Row

T, D, H, E = 4096, 32, 16, 64
Inputs = dict[str, jax.Array]


def moe(p: Inputs, x_TD: jax.Array, k: int, pinned_TK: jax.Array | None, saves: bool) -> tuple[jax.Array, jax.Array]:
    x_TD = x_TD * jax.lax.rsqrt((x_TD**2).mean(-1, keepdims=True) + 1e-6)
    logits_TE = jnp.einsum("td,de->te", x_TD, p["gate_DE"], preferred_element_type=jnp.float32)
    if pinned_TK is not None:
        idx_TK = pinned_TK
    elif saves and doing_recompute():
        (idx_TK,) = get_recompute_data()
    else:
        idx_TK = jax.lax.top_k(jax.lax.stop_gradient(logits_TE), k)[1]
        if saves:
            save_for_recompute(idx_TK)
    weight_TK = jnp.take_along_axis(jax.nn.softmax(logits_TE) + p["mark_TE"], idx_TK, 1).astype(x_TD.dtype)
    h_TKH = jax.nn.silu(jnp.einsum("td,tkdh->tkh", x_TD, p["up_EDH"][idx_TK]))
    return x_TD + jnp.einsum("tkh,tkhd,tk->td", h_TKH, p["down_EHD"][idx_TK], weight_TK), idx_TK


def data(seed: int) -> Inputs:
    keys = jax.random.split(jax.random.key(seed), 5)
    shapes = {"x_TD": (T, D), "gate_DE": (D, E), "up_EDH": (E, D, H), "down_EHD": (E, H, D), "scale_D": (D,)}
    p = {
        n: jax.random.normal(k, s, jnp.bfloat16) * s[-1] ** -0.5 for (n, s), k in zip(shapes.items(), keys, strict=True)
    }
    p["x_TD"] = p["x_TD"] * D**0.5
    return p | {"mark_TE": jnp.zeros((T, E))}


@functools.cache
def step(wrap: Callable[..., Any], k: int, *, pin: bool = False) -> Callable[..., Any]:
    saves = wrap is remat  # any checkpoint keeps what is saved
    layer = wrap(lambda p, x, pinned: moe(p, x, k, pinned if pin else None, saves))

    def loss(p: Inputs, pinned: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = p["x_TD"] + jnp.tanh(p["x_TD"]) * (1 + p["scale_D"])  # what the layer before adds
        y, idx = layer({n: v for n, v in p.items() if n not in ("x_TD", "scale_D")}, x, pinned)
        return (jnp.sin(y.astype(jnp.float32)) * jnp.cos(jnp.arange(D))).sum(), idx

    return jax.jit(jax.grad(loss, has_aux=True))


def measure(wrap: Callable[..., Any], k: int, seed: int = 0) -> tuple[int, float]:
    """Tokens routed differently in the recompute, and the distance to the gradient with pinned routing."""
    p, none = data(seed), jnp.zeros((T, k), jnp.int32)
    grads, idx = step(wrap, k)(p, none)
    pinned, _ = step(jax.checkpoint, k, pin=True)(p, idx)
    used = np.asarray(grads["mark_TE"], np.float32) != 0
    chosen = np.zeros_like(used)
    np.put_along_axis(chosen, np.asarray(idx), True, 1)
    flipped = int((used & ~chosen).any(1).sum())

    def distance(name: str) -> float:
        one, two = (np.asarray(g[name], np.float64) for g in (grads, pinned))
        return float(np.linalg.norm(one - two) / np.linalg.norm(two))

    return flipped, max(map(distance, ("x_TD", "gate_DE", "up_EDH", "down_EHD")))


def rows(quick: bool) -> Iterator[Row]:
    for k in (1,) if quick else (1, 2, 8):
        for name, wrap in (("jax.checkpoint", jax.checkpoint), ("remat", remat)):
            flipped, off = measure(wrap, k)
            exact = 0.0 if name == "remat" else None
            table = f"{T} tokens, {E} experts, one layer, bfloat16"
            yield Row(table, name, "tokens routed otherwise", flipped, at=k, bar=exact, tolerance=exact)
            yield Row(table, name, "gradient off by", off, "%", at=k, bar=exact, tolerance=exact)
