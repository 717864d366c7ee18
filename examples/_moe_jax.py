"""The model of `_moe_model`, as functions of arrays in JAX.

It starts from the same weights and does the same arithmetic: matrix products and what passes between layers in
`dtype`, weights kept in float32. State is passed in and handed back, as JAX wants it: a layer returns the plan
that it followed, and the biases move once a step, outside of the layer. A layer that is run a second time thus
finds the biases of the first time. That it may still choose other experts has another cause, see `probe`.

Letters in names are axes, see `Sizes`; R = E * C are the rows of all experts together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _moe_weights import Sizes
from jax import Array

from roundpipe_jax import doing_recompute, get_recompute_data, remat, save_for_recompute

Weights = dict[str, Array]
Layer = Callable[..., Any]
Plan = tuple[Array, ...]  # the experts of each token, their rows, whether there was room, and the token of each row

WAYS: dict[str, Callable[[Layer, str], Layer]] = {
    "none": lambda layer, label: layer,
    "jax": lambda layer, label: jax.checkpoint(partial(layer, remembers=False)),  # else it would remember, too
    "ours": lambda layer, label: remat(layer, label=label),
}


class Model(NamedTuple):
    """What is the same in every step and every layer. `wrap` takes a layer and its label, as in torch."""

    sizes: Sizes
    dtype: Any
    wrap: Callable[[Layer, str], Layer]

    def loss(
        self,
        weights: Weights,
        watch: list[Array] | None,
        biases: list[Array],
        key: Array | None,
        tokens_BL: Array,
        targets_BL: Array,
        plans: list[Plan] | None = None,
    ) -> tuple[Array, list[Plan]]:
        """The loss of guessing the next byte, and the plan of each layer.

        The gradient for `watch` is what the layers chose when their gradient was computed, see `probe`. With `key`,
        things are dropped. With `plans`, the layers follow these.
        """
        layers = self.sizes.layers
        run = partial(block, self.sizes)
        x_BLD = (weights["embed_VD"][tokens_BL] + weights["position_LD"]).astype(self.dtype)
        followed, watched = [], jnp.zeros((), jnp.float32)
        for n in range(layers):
            x_BLD, plan, seen = self.wrap(run, f"block {n}")(
                weights_of_block(weights, n),
                watch[n] if watch is not None else None,
                biases[n],
                jax.random.fold_in(key, n) if key is not None else None,
                plans[n] if plans is not None else None,
                x_BLD,
            )
            followed.append(plan)
            watched += seen
        logits = product(norm(x_BLD, weights["norm_D"]), weights["head_DV"]).astype(jnp.float32)
        right = jnp.take_along_axis(jax.nn.log_softmax(logits), targets_BL[..., None], axis=-1)
        return watched - right.mean(), followed


def weights_of_block(weights: Weights, n: int) -> Weights:
    start = f"blocks.{n}."
    return {name.removeprefix(start): value for name, value in weights.items() if name.startswith(start)}


def block(
    sizes: Sizes,
    weights: Weights,
    watch_TK: Array | None,
    bias_E: Array,
    key: Array | None,
    plan: Plan | None,
    x_BLD: Array,
    remembers: bool = True,
) -> tuple[Array, Plan, Array]:
    """Causal attention, then experts. This is what gets checkpointed."""
    keys = jax.random.split(key) if key is not None else (None, None)
    mixed_BLD = attend(sizes, weights, norm(x_BLD, weights["attention_norm_D"]))
    x_BLD = x_BLD + drop(mixed_BLD, sizes.dropout, keys[0])
    y_BLD, plan, seen = moe(sizes, weights, watch_TK, bias_E, plan, norm(x_BLD, weights["moe_norm_D"]), remembers)
    return x_BLD + drop(y_BLD, sizes.dropout, keys[1]), plan, seen


def attend(sizes: Sizes, weights: Weights, x_BLD: Array) -> Array:
    B, L, D = x_BLD.shape
    qkv = product(x_BLD, weights["qkv_DF"]).reshape(B, L, 3, sizes.heads, -1)
    mixed = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
    return product(mixed.reshape(B, L, D), weights["out_DD"])


def moe(
    sizes: Sizes,
    weights: Weights,
    watch_TK: Array | None,
    bias_E: Array,
    plan: Plan | None,
    x_BLD: Array,
    remembers: bool,
) -> tuple[Array, Plan, Array]:
    """Sends each token to K of E experts and adds up what they return."""
    x_TD = x_BLD.reshape(-1, x_BLD.shape[-1])
    scores_TE = jax.nn.sigmoid(product(x_TD, weights["moe.gate_DE"]))
    if plan is None:
        if remembers and doing_recompute():
            plan = get_recompute_data()
        else:
            plan = route(sizes, bias_E, jax.lax.stop_gradient(scores_TE))
            if remembers:
                save_for_recompute(*plan)
    y_TD = run_experts(sizes, weights, x_TD, scores_TE, *plan)
    seen = probe(watch_TK, plan[0]) if watch_TK is not None else jnp.zeros((), jnp.float32)
    return y_TD.reshape(x_BLD.shape), plan, seen


def route(sizes: Sizes, bias_E: Array, scores_TE: Array) -> Plan:
    (T, E), K, C = scores_TE.shape, sizes.K, sizes.C(len(scores_TE))
    # Sorted, so that a token's line differs between two plans only if its experts do.
    chosen_TK = jnp.sort(jax.lax.top_k(scores_TE.astype(jnp.float32) + bias_E, K)[1], axis=-1)
    load_E = load(chosen_TK, E)

    order = jnp.argsort(chosen_TK.reshape(-1), stable=True)  # (token, choice) pairs by expert
    expert = chosen_TK.reshape(-1)[order]
    place = jnp.arange(T * K) - (jnp.cumsum(load_E) - load_E)[expert]  # in the queue of its expert
    row = jnp.where(place < C, expert * C + place, E * C)
    row_TK = jnp.zeros_like(row).at[order].set(row, unique_indices=True).reshape(T, K)
    token_R = jnp.zeros(E * C + 1, row.dtype).at[row].set(order // K)[:-1]
    kept_TK = row_TK < E * C
    return chosen_TK, row_TK * kept_TK, kept_TK, token_R


def load(chosen_TK: Array, E: int) -> Array:
    """How many tokens each expert got."""
    return jnp.zeros(E, jnp.int32).at[chosen_TK.reshape(-1)].add(1)


def run_experts(
    sizes: Sizes,
    weights: Weights,
    x_TD: Array,
    scores_TE: Array,
    chosen_TK: Array,
    row_TK: Array,
    kept_TK: Array,
    token_R: Array,
) -> Array:
    E, D = sizes.E, sizes.D
    weights_TK = jnp.take_along_axis(scores_TE, chosen_TK, axis=1)
    weights_TK = weights_TK / weights_TK.sum(-1, keepdims=True) * kept_TK.astype(x_TD.dtype)
    x_ECD = x_TD[token_R].reshape(E, -1, D)
    y_ECD = product(jax.nn.silu(product(x_ECD, weights["moe.up_EDH"])), weights["moe.down_EHD"])
    y_TKD = y_ECD.reshape(-1, D)[row_TK]
    return (y_TKD * weights_TK[..., None]).sum(1)


def moved(sizes: Sizes, bias_E: Array, plan: Plan) -> Array:
    """The bias after a forward: up if the expert got less than its share of the tokens, down if more."""
    load_E = load(plan[0], sizes.E).astype(jnp.float32)
    return bias_E + sizes.bias_rate * jnp.sign(load_E.mean() - load_E)


def norm(x: Array, gain_D: Array) -> Array:
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6) * gain_D).astype(x.dtype)


def product(x: Array, weights: Array) -> Array:
    return x @ weights.astype(x.dtype)


def drop(x: Array, rate: float, key: Array | None) -> Array:
    if key is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), jnp.zeros((), x.dtype))


# Looking into the recompute


@jax.custom_vjp
def probe(watch_TK: Array, chosen_TK: Array) -> Array:
    """Adds 0 to the loss. Its gradient for `watch_TK` is `chosen_TK`, as backward has it.

    Without checkpointing that is what the forward chose. With `jax.checkpoint` it is what the recompute chose. The two
    can differ, though both run the same operations on the same numbers: inside a fusion XLA may leave out the rounding
    to bfloat16, and the recompute starts from the layer's rounded input.
    """
    return jnp.zeros((), jnp.float32)


def _probe_forward(watch_TK: Array, chosen_TK: Array) -> tuple[Array, Array]:
    return jnp.zeros((), jnp.float32), chosen_TK


def _probe_backward(chosen_TK: Array, _: Array) -> tuple[Array, Any]:
    return chosen_TK.astype(jnp.float32), np.zeros(chosen_TK.shape, jax.dtypes.float0)


probe.defvjp(_probe_forward, _probe_backward)
