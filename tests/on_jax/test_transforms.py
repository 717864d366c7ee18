"""Every transformation of JAX over a layer that saves, against the same layer without remat, in both lanes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from roundpipe_jax import OptionError, doing_recompute, get_recompute_data, remat, save_for_recompute

T, D = 6, 4
LANES = ["checkpoint", "custom_vjp"]


def layer(x_TD: Any, w_DD: Any) -> Any:
    """Routing saved in the forward; nothing else differs between the phases."""
    logits_TD = x_TD @ w_DD
    if doing_recompute():
        (idx_T,) = get_recompute_data()
    else:
        idx_T = jnp.argmax(jax.lax.stop_gradient(logits_TD), -1)
        save_for_recompute(idx_T)
    gate_T1 = jnp.take_along_axis(jax.nn.softmax(logits_TD), idx_T[:, None], 1)
    return jnp.tanh(x_TD @ w_DD) * gate_T1


def data() -> tuple[Any, Any]:
    x, w = jax.random.split(jax.random.key(0))
    return jax.random.normal(x, (T, D)), jax.random.normal(w, (D, D))


Layer = Callable[[Any, Any], Any]


def loss(f: Layer) -> Layer:
    return lambda x, w: (f(x, w) ** 2).sum()


def through_scan(f: Layer, x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda x, w: (f(x, w), None), x, jnp.stack([w, w * 0.9, w * 0.8]))[0]


def through_cond(f: Layer, x: Any, w: Any) -> Any:
    return jax.lax.cond(x.sum() > 0, f, lambda x, w: x @ w, x, w)


def through_while(f: Layer, x: Any, w: Any) -> Any:
    return jax.lax.fori_loop(0, jnp.int32(2), lambda _, x: f(x, w), x)


def closed_over(f: Layer, x: Any, w: Any) -> Any:
    return f(x, w)


def tangents(x: Any) -> Any:
    return jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)


REVERSE: dict[str, Callable[[Layer], Any]] = {
    "call": lambda f: f(*data()),
    "grad": lambda f: jax.grad(loss(f), (0, 1))(*data()),
    "jit(grad)": lambda f: jax.jit(jax.grad(loss(f), (0, 1)))(*data()),
    "grad(jit)": lambda f: jax.grad(jax.jit(loss(f)), (0, 1))(*data()),
    "vmap(grad)": lambda f: jax.vmap(jax.grad(loss(f), (0, 1)), (0, None))(
        jnp.stack([data()[0], -data()[0]]), data()[1]
    ),
    "grad(vmap)": lambda f: jax.grad(
        lambda x, w: (jax.vmap(f, (0, None), 1)(jnp.stack([x, -x]), w) ** 2).sum(), (0, 1)
    )(*data()),
    "scan": lambda f: jax.jit(jax.grad(loss(functools.partial(through_scan, f)), (0, 1)))(*data()),
    "cond": lambda f: jax.jit(jax.grad(loss(functools.partial(through_cond, f)), (0, 1)))(*data()),
    "jacrev": lambda f: jax.jacrev(f, 1)(*data()),
    "reverse over reverse": lambda f: jax.jit(jax.grad(lambda x, w: (jax.grad(loss(f), 1)(x, w) ** 2).sum(), (0, 1)))(
        *data()
    ),
    "jit(hessian)": lambda f: jax.jit(jax.hessian(lambda w: loss(f)(data()[0], w)))(data()[1]),
    "hvp": lambda f: jax.jvp(lambda w: jax.grad(loss(f), 1)(data()[0], w), (data()[1],), (tangents(data()[1]),)),
    "fwd_and_bwd": lambda f: fwd_and_bwd(f),
    "vjp twice": lambda f: vjp_twice(f),
    "checkify": lambda f: checkify.checkify(jax.jit(jax.grad(loss(f), (0, 1))), errors=checkify.nan_checks)(*data())[1],
    "export": lambda f: jax.export.export(jax.jit(jax.grad(loss(f), (0, 1))))(*data()).call(*data()),
}
FORWARD: dict[str, Callable[[Layer], Any]] = {
    "while": lambda f: jax.jvp(lambda w: through_while(f, data()[0], w), (data()[1],), (tangents(data()[1]),)),
    "jvp": lambda f: jax.jvp(f, data(), tuple(map(tangents, data()))),
    "jit(jvp)": lambda f: jax.jit(lambda x, w: jax.jvp(f, (x, w), (tangents(x), tangents(w))))(*data()),
    "linearize": lambda f: jax.linearize(f, *data())[1](*map(tangents, data())),
    "jacfwd": lambda f: jax.jacfwd(f, 1)(*data()),
}


def fwd_and_bwd(f: Layer) -> Any:
    forward, backward = jax.fwd_and_bwd(f, (0, 1))
    value, residuals = forward(*data())
    return backward(residuals, value)


def vjp_twice(f: Layer) -> Any:
    value, pull = jax.vjp(f, *data())
    return pull(value), pull(2 * value)


@functools.cache
def plain(name: str) -> Any:
    return {**REVERSE, **FORWARD}[name](layer)


def same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = max(1.0, float(np.abs(two).max()))
        np.testing.assert_allclose(one, two, rtol=2e-5, atol=2e-6 * scale)  # XLA fuses the two differently


@pytest.mark.parametrize("name", REVERSE)
@pytest.mark.parametrize("mode", LANES)
def test_reverse(name: str, mode: Any) -> None:
    same(REVERSE[name](remat(layer, mode=mode)), plain(name))


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name: str) -> None:
    same(FORWARD[name](remat(layer)), plain(name))


REFUSED: dict[str, Callable[[Layer], Any]] = {
    **FORWARD,
    "jvp(jit)": lambda f: jax.jvp(jax.jit(f), data(), tuple(map(tangents, data()))),
    "jit(jacfwd)": lambda f: jax.jit(jax.jacfwd(f, 1))(*data()),
    "jit(linearized)": lambda f: jax.jit(jax.linearize(f, *data())[1])(*map(tangents, data())),
    "scan": lambda f: jax.jvp(functools.partial(through_scan, f), data(), tuple(map(tangents, data()))),
    "cond": lambda f: jax.linearize(functools.partial(through_cond, f), *data())[1](*map(tangents, data())),
    "jax.checkpoint": lambda f: jax.jvp(jax.checkpoint(f), data(), tuple(map(tangents, data()))),
    "vmap in": lambda f: jax.vmap(lambda x: jax.jvp(lambda x: f(x, data()[1]), (x,), (data()[0],)))(data()[0][None]),
    "grad(jvp)": lambda f: jax.grad(lambda w: jax.jvp(lambda w: f(data()[0], w), (w,), (w,))[1].sum())(data()[1]),
    "jvp(jvp)": lambda f: jax.jacfwd(jax.jacfwd(f, 1), 1)(*data()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_residual_lane_refuses_forward_mode(name: str) -> None:
    with pytest.raises(
        OptionError, match=r"layer 'layer \((?s:.*)no forward-mode derivative(?s:.*)layer at: .*\.py:\d+"
    ):
        REFUSED[name](remat(layer, mode="custom_vjp"))


def test_the_residual_lane_reduces_over_a_vmap_only_where_backward_is_in_it() -> None:
    def reduced(x_D: Any) -> Any:
        (best,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x_D)))
        return jnp.sin(x_D) * (best + 1) * jax.lax.pmean(x_D.sum(), "rows")

    def gradient(f: Any) -> Any:
        return jax.vmap(jax.grad(lambda x: f(x).sum()), axis_name="rows")(data()[0])

    def outside(f: Any) -> Any:
        return jax.grad(lambda x: jax.vmap(f, axis_name="rows")(x).sum())(data()[0])

    ours = remat(reduced, mode="custom_vjp", label="reduced")
    same(gradient(ours), gradient(reduced))
    same(outside(remat(reduced)), outside(reduced))
    with pytest.raises(OptionError, match=r"layer 'reduced'.*cannot reduce over the axis of a vmap around the layer"):
        outside(ours)
