"""Every transformation of JAX over a layer that saves, against the same layer without remat, in both lanes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from roundpipe_jax import (
    GradientError,
    OptionError,
    doing_recompute,
    get_recompute_data,
    keep,
    recompute_once,
    remat,
    save_for_recompute,
)

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


def branches(x_D: Any, w_DD: Any) -> Any:
    return jax.lax.cond(x_D[0] > 0, lambda x, w: jnp.tanh(x @ w), lambda x, w: 2 * x, x_D, w_DD)


def best(x_D: Any) -> Any:
    (best,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x_D)))
    return best + 1


BY_EXAMPLE: dict[str, Layer] = {
    "saved": lambda x, w: branches(x, w) * best(x),
    "kept": lambda x, w: jnp.sin(keep(branches, x, jnp.sin(w))) * best(x),
}
OF_A_BATCH: dict[str, Callable[[Layer], Any]] = {
    "grad": lambda f: jax.grad(lambda x, w: jnp.sin(f(x, w)).sum(), (0, 1))(*data()),
    "hessian": lambda f: jax.jacrev(jax.grad(lambda w: jnp.sin(f(data()[0], w)).sum()))(data()[1]),
}


@pytest.mark.parametrize(("of", "name"), [("saved", "grad"), ("kept", "grad"), ("kept", "hessian")])
@pytest.mark.parametrize("mode", LANES)
def test_examples_of_a_batch_take_different_branches(mode: Any, of: str, name: str) -> None:
    batches = [jax.vmap(f, (0, None)) for f in (remat(BY_EXAMPLE[of], mode=mode), BY_EXAMPLE[of])]
    same(*map(OF_A_BATCH[name], batches))


def normed(x_D: Any, w_DD: Any) -> Any:
    """A result of each example, one by what they share, one from all of them."""
    mean = jax.lax.pmean(x_D @ w_DD, "rows")
    return jnp.tanh(x_D @ w_DD - mean) * best(x_D), (w_DD**2).sum(), mean


def kept_norm(x_D: Any, w_DD: Any) -> Any:
    return keep(lambda x, w: (jnp.sin(x) * best(x), (w**2).sum(), jax.lax.pmean(x @ w, "rows")), x_D, w_DD)


@pytest.mark.parametrize("of", [normed, kept_norm])
def test_a_result_that_a_batch_shares_stays_one(of: Any) -> None:
    batches = [jax.vmap(f, (0, None), (0, None, None), axis_name="rows") for f in (remat(of), of)]
    same(*(f(*data()) for f in batches))
    same(*(jax.grad(lambda x, w, f=f: sum(map(jnp.sum, f(x, w))), (0, 1))(*data()) for f in batches))


@jax.custom_vjp
def kernel(x_D: Any, w_DD: Any) -> Any:
    return jnp.tanh(x_D @ w_DD), (w_DD**2).sum()


kernel.defvjp(
    lambda x, w: (kernel(x, w), (x, w)),
    lambda held, slopes: jax.vjp(lambda x, w: (jnp.tanh(x @ w), (w**2).sum()), *held)[1](slopes),
)


@pytest.mark.parametrize("mode", LANES)
def test_the_slope_of_what_a_batch_shares_is_counted_once_for_each_example(mode: Any) -> None:
    def kept(x: Any, w: Any) -> Any:
        return keep(kernel, x, w)[1] * best(x)

    def saved(x: Any, w: Any) -> Any:
        return (w**2).sum(), jnp.sin(x @ w) * best(x)

    def total(f: Any) -> Any:
        values = jax.vmap(f, (0, None))
        return jax.grad(lambda x, w: sum(map(jnp.sum, jax.tree.leaves(values(x, w)))), (0, 1))(*data())

    same(total(remat(saved, mode=mode)), total(saved))
    same(total(remat(kept, mode=mode)), total(lambda x, w: (w**2).sum() * best(x)))


TRANSPOSED: dict[str, Callable[[Layer], Any]] = {
    "transpose": lambda f: jax.linear_transpose(lambda v: f(data()[1], v), data()[0][0])(data()[0][1]),
    "of a batch": lambda f: jax.linear_transpose(jax.vmap(lambda v: f(data()[1], v)), data()[0])(data()[0]),
    "in a scan": lambda f: jax.linear_transpose(
        lambda v: jax.lax.scan(lambda v, _: (f(data()[1], v), None), v, None, 2)[0], data()[0][0]
    )(data()[0][1]),
    "solve": lambda f: jax.grad(lambda w: solved(f, w, data()[0][0]).sum())(data()[1]),
}


def solved(f: Layer, w: Any, b: Any) -> Any:
    def solve(_: Any, b: Any) -> Any:
        return jnp.linalg.solve(jax.jacfwd(functools.partial(linear, w))(b), b)

    return jax.lax.custom_linear_solve(
        lambda v: f(w, v), b, solve, lambda _, b: jnp.linalg.solve(jax.jacfwd(functools.partial(linear, w))(b).T, b)
    )


def linear(w_DD: Any, v_D: Any) -> Any:
    return (w_DD + 4 * jnp.eye(D)) @ v_D * best(w_DD)


@pytest.mark.parametrize("name", TRANSPOSED)
def test_a_linear_layer_is_transposed(name: str) -> None:
    same(TRANSPOSED[name](remat(linear)), TRANSPOSED[name](linear))


def test_a_layer_that_decides_by_what_it_should_be_linear_in_is_not() -> None:
    with pytest.raises(GradientError, match=r"layer 'crooked'.*so it is not linear(?s:.*)layer at: .*\.py:\d+"):
        jax.linear_transpose(remat(lambda v: v * best(v), label="crooked"), data()[0])(data()[0])


@pytest.mark.parametrize("mode", LANES)
def test_functions_that_each_phase_makes_anew_in_a_result(mode: Any) -> None:
    def steps(x: Any) -> Any:
        scale = recompute_once(jnp.argmax, jax.lax.stop_gradient(x)) + 1
        value, pull = jax.vjp(lambda x: jnp.sin(x) * scale, x)
        return value, pull, jax.tree_util.Partial(lambda x, y: x * y, jnp.cos(x))

    def through(f: Any) -> Any:
        def used(x: Any) -> Any:
            value, pull, times = f(x)
            return times(pull(value)[0]).sum()

        return jax.grad(used)(data()[0])

    same(through(remat(steps, mode=mode, verify="raise")), through(steps))
