"""Keeping a result in JAX: `keep` for attention by a `custom_vjp` kernel, counted from programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from roundpipe_jax import keep, remat, save_dots
from roundpipe_jax._explain import flops_of

from ._rows import Row, counts

T, D, BLOCKS = 512, 128, 4


@jax.custom_vjp
def attention(q_TD: Any, k_TD: Any, v_TD: Any) -> Any:
    return _forward(q_TD, k_TD, v_TD)[0]


def _forward(q_TD: Any, k_TD: Any, v_TD: Any) -> Any:
    """As fused kernels do: kept are the output and one number a row, and backward makes the weights again."""
    scores_TT = q_TD @ k_TD.T / D**0.5
    norm_T = jax.nn.logsumexp(scores_TT, axis=-1)
    out_TD = jnp.exp(scores_TT - norm_T[:, None]) @ v_TD
    return out_TD, (q_TD, k_TD, v_TD, out_TD, norm_T)


def _backward(residuals: Any, slope_TD: Any) -> Any:
    q_TD, k_TD, v_TD, out_TD, norm_T = residuals
    weights_TT = jnp.exp(q_TD @ k_TD.T / D**0.5 - norm_T[:, None])
    inner_T = (slope_TD * out_TD).sum(-1, keepdims=True)
    scores_TT = weights_TT * (slope_TD @ v_TD.T - inner_T) / D**0.5
    return scores_TT @ k_TD, scores_TT.T @ q_TD, weights_TT.T @ slope_TD


attention.defvjp(_forward, _backward)


def block(mix: Callable[..., Any]) -> Callable[..., Any]:
    def run(w_5DD: Any, x_TD: Any) -> Any:
        q_TD, k_TD, v_TD = (x_TD @ w_5DD[n] for n in range(3))
        h_TD = x_TD + mix(attention, q_TD, k_TD, v_TD) @ w_5DD[3]
        return h_TD + jnp.tanh(h_TD @ w_5DD[4])

    return run


def plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def rows(quick: bool) -> Iterator[Row]:
    w = jax.ShapeDtypeStruct((BLOCKS, 5, D, D), "float32")
    x = jax.ShapeDtypeStruct((T, D), "float32")
    forms: dict[str, Callable[..., Any]] = {
        "no remat": block(plainly),
        "all recomputed": remat(block(plainly)),
        "policy: products kept": jax.checkpoint(block(plainly), policy=save_dots()),
        "attention kept": remat(block(keep)),
        "attention kept, residual lane": remat(block(keep), mode="custom_vjp"),
    }
    ours = [name for name in forms if name.startswith(("all", "attention"))]
    for name, form in forms.items():

        def loss(w: Any, x: Any, form: Callable[..., Any] = form) -> Any:
            for n in range(BLOCKS):
                x = form(w[n], x)
            return (x**2).sum()

        step = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(w, x).jaxpr
        live = partial_eval.dce_jaxpr(step, [True] * len(step.outvars))[0]
        kept = jax.tree.leaves(jax.eval_shape(lambda w, x, loss=loss: jax.vjp(loss, w, x)[1], w, x))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in kept) - BLOCKS * 5 * D * D * 4
        found = {"bytes held": size, "FLOPs of a step": flops_of(live)}
        yield from counts(f"{BLOCKS} blocks of {T} tokens, width {D}", {name: found}, ours=ours)
