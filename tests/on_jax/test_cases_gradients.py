"""Gradients that a slot must not cut (R5), higher derivatives, and values of every type."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from roundpipe_jax import (
    GradientError,
    MismatchError,
    SlotError,
    doing_recompute,
    get_recompute_data,
    keep,
    recompute_once,
    record,
    remat,
    remat_layers,
    save_for_recompute,
    save_policy,
)
from tests.on_jax.oracle import LANES, WAYS, Router, W, X, bare, gradient, in_lane, same

lanes = pytest.mark.parametrize("lane", LANES)
ways = pytest.mark.parametrize("way", WAYS)
stop = lax.stop_gradient


def best(x: Any) -> Any:
    return jnp.argmax(stop(x))


# ------------------------------------------------------------------------------------------------------ R5

CARRIES: dict[str, Callable[[Any, Any], Any]] = {
    "itself": lambda w, x: x,
    "times zero": lambda w, x: x * 0,
    "parameter": lambda w, x: w[0],
    "narrower": lambda w, x: x.astype(jnp.bfloat16),
    "selected": lambda w, x: jnp.where(x > 9, x, 0.0),
    "nested": lambda w, x: {"a": [1, (x.max(),)]},
    "half stopped": lambda w, x: x + stop(x),
    "complex": lambda w, x: x * 1j,
    "jitted": lambda w, x: jax.jit(jnp.sin)(x),
    "vmapped": lambda w, x: jax.vmap(jnp.sin)(x),
    "scanned": lambda w, x: lax.scan(lambda c, _: (c * 2, None), x, None, length=2)[0],
    "branch": lambda w, x: lax.cond(True, jnp.sin, jnp.cos, x),
    "own derivative": lambda w, x: jax.nn.relu(x),
    "sorted": lambda w, x: jnp.sort(x),
}
FREE: dict[str, Callable[[Any, Any], Any]] = {
    "stopped": lambda w, x: jnp.exp(stop(x)) * 2,
    "through an integer": lambda w, x: x.astype(int).astype(jnp.float32),
    "comparison": lambda w, x: (x > 0) * 1.0,
    "one-hot": lambda w, x: jax.nn.one_hot(jnp.argmax(x, -1), 3),
    "table": lambda w, x: jnp.sin(jnp.arange(3.0)),
    "numpy": lambda w, x: np.ones(3),
    "number": lambda w, x: 0.5,
    "made once": lambda w, x: recompute_once(jnp.exp, x),
}
STEPS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda f: jax.grad(f, (0, 1)),
    "jit(grad)": lambda f: jax.jit(jax.grad(f, (0, 1))),
    "grad(jit)": lambda f: jax.grad(jax.jit(f), (0, 1)),
    "vmap(grad)": lambda f: lambda w, x: jax.vmap(jax.grad(f, (0, 1)), (None, 0))(w, x[None]),
}


def home(save: Any, w: Any, x: Any) -> Any:
    save(w, x)
    return jnp.sin(x @ w).sum()


def in_scan(save: Any, w: Any, x: Any) -> Any:
    return lax.scan(lambda c, _: ((save(w, c), jnp.sin(c @ w))[1], None), x, None, length=2)[0].sum()


def in_jit(save: Any, w: Any, x: Any) -> Any:
    return jax.jit(lambda x: (save(w, x), jnp.sin(x @ w))[1])(x).sum()


def in_cond(save: Any, w: Any, x: Any) -> Any:
    return lax.cond(x.sum() > -99, lambda x: (save(w, x), jnp.sin(x @ w))[1], lambda x: x, x).sum()


@pytest.mark.parametrize(
    ("step", "lane"),
    [*((step, "checkpoint") for step in STEPS), ("eager", "custom_vjp"), ("jit(grad)", "custom_vjp")],
)
def test_a_tangent_is_found_behind_every_operation(step: str, lane: Any) -> None:
    for what in CARRIES.values():
        layer = remat(lambda w, x, what=what: home(lambda w, x: save_for_recompute(what(w, x)), w, x), mode=lane)
        with pytest.raises(GradientError, match=r"test_cases_gradients\.py:\d+"):
            STEPS[step](layer)(W, X)
    for what in FREE.values():
        layer = remat(lambda w, x, what=what: home(lambda w, x: save_for_recompute(what(w, x)), w, x), mode=lane)
        STEPS[step](layer)(W, X)


@pytest.mark.parametrize("place", [home, in_scan, in_jit, in_cond], ids=lambda place: place.__name__)
@pytest.mark.parametrize("step", ["eager", "jit(grad)"])
def test_a_tangent_of_a_closed_over_parameter_is_found_in_inner_traces(place: Any, step: str) -> None:
    for name in ("parameter", "times zero", "stopped", "one-hot"):
        what = {**CARRIES, **FREE}[name]

        def loss(w: Any, x: Any, what: Any = what) -> Any:
            return remat(lambda x: place(lambda w, x: save_for_recompute(what(w, x)), w, x))(x)

        if name in CARRIES:
            with pytest.raises(GradientError, match="depends on a value that is being differentiated"):
                STEPS[step](loss)(W, X)
        else:
            want = STEPS[step](lambda w, x: place(lambda w, x: None, w, x))(W, X)
            same(STEPS[step](loss)(W, X), want)


@lanes
@ways
def test_what_is_differentiated_decides(lane: Any, way: str) -> None:
    def layer(w: Any, x: Any) -> Any:
        (table,) = save_for_recompute(jnp.exp(x))
        return (jnp.sin(x @ w) * table).sum()

    f = remat(layer, mode=lane)
    for _ in range(2):
        same(WAYS[way](jax.grad(f))(W, X), WAYS[way](jax.grad(layer))(W, X))
        with pytest.raises(GradientError):
            WAYS[way](jax.grad(f, 1))(W, X)
    with pytest.raises(GradientError):
        WAYS[way](lambda x: jax.jvp(lambda x: jax.grad(f)(W, x), (x,), (x,)))(X)


# -------------------------------------------------------------------------------------- higher derivatives


def routed(x: Any) -> Any:
    index, table = save_for_recompute(best(x @ W), stop(jnp.exp(x)))
    return jnp.tanh(x @ W) * (index + 1) * table


HIGHER: dict[str, Callable[[Any], Any]] = {
    "hessian": lambda f: jax.jit(jax.hessian(f))(X),
    "jacrev of grad": lambda f: jax.jacrev(jax.grad(f))(X),
    "grad of hvp": lambda f: jax.grad(lambda x: jax.jvp(jax.grad(f), (x,), (X,))[1].sum())(X),
    "third": lambda f: jax.grad(lambda x: (jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum())(x) ** 2).sum())(X),
    "jit third": lambda f: jax.jit(jax.grad(lambda x: (jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum())(x) ** 2).sum()))(
        X
    ),
}


@pytest.mark.parametrize("what", HIGHER)
def test_higher_derivatives(what: str) -> None:
    want = HIGHER[what](lambda x: (routed(x) ** 2).sum())
    for lane in LANES:
        f = remat(routed, mode=lane)
        same(HIGHER[what](lambda x, f=f: (f(x) ** 2).sum()), want, 1e-4)


def test_forward_over_forward_and_grad_of_forward() -> None:
    def second(f: Any) -> Any:
        def dot(x: Any) -> Any:
            return jax.jvp(lambda x: (f(x) ** 2).sum(), (x,), (X,))[1]

        return jax.grad(dot)(X), jax.jvp(dot, (X,), (X,)), jax.linearize(dot, X)[1](X)

    same(second(remat(routed)), second(routed))


# --------------------------------------------------------------------------------------------------- types


@pytest.mark.parametrize(("lane", "way"), [("checkpoint", "eager"), ("custom_vjp", "jit")])
def test_types_weak_types_and_integers_come_back(lane: Any, way: str) -> None:
    def layer(x: Any, s: Any) -> Any:
        (index,) = save_for_recompute(best(x))
        return x * s, (x * 0 + 1).sum() * 2, jnp.asarray(2.0) * s, index, x > 0, x.astype(int), x[:0] * s

    for dtype in (jnp.float32, jnp.bfloat16):
        for s in (2.0, True, jnp.float32(2))[dtype == jnp.float32 :]:

            def step(f: Any, s: Any = s, dtype: Any = dtype) -> Any:
                def loss(x: Any) -> Any:
                    out = f(x, s)
                    return out[0].sum().astype(jnp.float32), out

                return WAYS[way](jax.value_and_grad(loss, has_aux=True))(X.astype(dtype))

            same(step(remat(layer, mode=lane)), step(layer), 2e-5 if dtype == jnp.float32 else 1e-2)


@pytest.mark.parametrize(("lane", "way"), [("checkpoint", "jit"), ("custom_vjp", "eager")])
def test_keys_complex_numbers_and_integer_arguments(lane: Any, way: str) -> None:
    def layer(x: Any, key: Any, n: Any) -> Any:
        one, two = jax.random.split(key)
        one, none = save_for_recompute(one, jnp.zeros((0, 3), jnp.bfloat16))
        wave = jnp.exp(1j * x) * n
        return jnp.abs(wave + jax.random.normal(one, x.shape)) * x + none.sum(), two, n

    def step(f: Any) -> Any:
        def loss(x: Any, n: Any) -> Any:
            out, key, m = f(x, jax.random.key(0), n)
            return (out * jax.random.normal(key)).sum(), (key, m)

        return WAYS[way](jax.grad(loss, (0, 1), has_aux=True, allow_int=True))(X, jnp.int32(3))

    same(step(remat(layer, mode=lane)), step(layer))


@lanes
def test_a_python_number_as_the_argument(lane: Any) -> None:
    def layer(s: Any) -> Any:
        (index,) = save_for_recompute(best(jnp.stack([s, 1.0])))
        return jnp.sin(s) * (index + 2)

    same(jax.grad(remat(layer, mode=lane))(2.0), jax.grad(layer)(2.0))


@pytest.mark.parametrize(("lane", "way"), [("checkpoint", "eager"), ("custom_vjp", "jit")])
def test_outputs_that_are_inputs_none_strings_and_objects(lane: Any, way: str) -> None:
    thing = object()

    def layer(x: Any, y: Any, what: Any) -> Any:
        (index,) = save_for_recompute(best(x))
        return {"x": x, "y": y, "again": x, "out": jnp.sin(x) * (index + 1), "none": None, "s": "a", "what": what}

    def step(f: Any) -> Any:
        def loss(x: Any, y: Any) -> Any:
            out = f(x, y, thing)
            assert out["none"] is None
            assert (out["s"], out["what"]) == ("a", thing)
            return (out["x"] * out["y"] + out["again"] + out["out"]).sum()

        return WAYS[way](jax.grad(loss, (0, 1)))(X, 2 * X)

    same(step(remat(layer, mode=lane)), step(layer))


@ways
def test_phases_that_return_otherwise(way: str) -> None:  # R10
    def differing(one: Any, two: Any) -> Any:
        def layer(x: Any) -> Any:
            return two(x) if doing_recompute() else one(x)

        return lambda x: jax.tree.leaves(remat(layer)(x))[0].sum()

    for one, two in (
        (lambda x: (x, None), lambda x: (x, x)),
        (lambda x: jnp.sin(x), lambda x: jnp.sin(x).astype(jnp.bfloat16)),
        (lambda x: (x, 1), lambda x: (x, jnp.int32(1))),
        (lambda x: x, lambda x: x[0]),
    ):
        with pytest.raises(MismatchError, match="do not return the same"):
            WAYS[way](jax.grad(differing(one, two)))(X)


@ways
def test_a_wrong_name_tells_what_was_saved_and_where(way: str) -> None:  # R3
    def misspelt(x: Any) -> Any:
        if doing_recompute():
            get_recompute_data("maks")
        else:
            save_for_recompute(1, name="mask")
        return x.sum()

    with pytest.raises(SlotError) as error:
        WAYS[way](jax.grad(remat(misspelt)))(X)
    head, asked, held, out = str(error.value).splitlines()
    assert "misspelt" in head
    assert "slot 'maks'" in head
    assert asked.startswith("  asked for at: ")
    assert "test_cases_gradients.py:" in asked
    assert held.startswith("  saved slot 'mask': ")
    assert out.startswith("  way out: ")


# ---------------------------------------------------------------------------------------------- with others


@lanes
def test_a_training_loop_with_donated_parameters(lane: Any) -> None:
    def train(wrap: Any) -> Any:
        def layer(w: Any, h: Any) -> Any:
            (index,) = save_for_recompute(best(h @ w))
            return jnp.tanh(h @ w) * (0.1 * index + 1)

        def loss(w: Any) -> Any:
            h = X
            for _ in range(3):
                h = wrap(layer)(w, h)
            return (h**2).sum()

        step = jax.jit(lambda w: w - 0.1 * jax.grad(loss)(w), donate_argnums=0)
        w = W + 0
        for _ in range(3):
            w = step(w)
        return w

    same(train(in_lane(lane)), train(bare))


@pytest.mark.parametrize("wrap", [bare, remat])
@ways
def test_the_users_own_checkpoint_keeps_what_a_layer_returns_from_a_save(wrap: Any, way: str) -> None:
    router = Router()

    def layer(x: Any) -> Any:
        (index,) = save_for_recompute(router.decide(0, x))
        return jnp.sin(x) * index

    got = WAYS[way](gradient(jax.checkpoint(wrap(layer), policy=save_policy())))(X)
    jax.block_until_ready(got)
    assert router.counts[0] == 1
    same(got, gradient(lambda x: jnp.sin(x) * 4)(X))


def test_layers_stacked_in_every_form() -> None:
    ws = jnp.stack([W, W * 0.5, W.T, W])

    def layer(w: Any, x: Any) -> Any:
        (index,) = save_for_recompute(best(x @ w))
        return jnp.tanh(x @ w) * (index + 1)

    def plain(ws: Any, x: Any) -> Any:
        for w in ws:
            x = layer(w, x)
        return x

    want = gradient(plain)(ws, X)
    for options in ({}, {"nested": 2}, {"mode": "custom_vjp"}, {"unroll": 2}):
        same(jax.jit(gradient(lambda ws, x, o=options: remat_layers(layer, ws, x, **o)))(ws, X), want)


@lanes
def test_tracers_that_a_layer_closes_over_do_not_leak(lane: Any) -> None:
    def loss(x: Any, w: Any) -> Any:
        @remat(mode=lane)
        def layer(x: Any) -> Any:
            h = keep(lambda h: jnp.sin(h @ w), jnp.tanh(x @ w))
            (top,) = save_for_recompute(lax.stop_gradient(h).argmax(-1))
            return jnp.take_along_axis(h, top[:, None], -1)

        return layer(x).sum()

    w = jnp.ones((X.shape[-1], X.shape[-1]))
    with jax.checking_leaks():
        jax.grad(jax.jit(loss), (0, 1))(X, w)


@lanes
def test_tracers_that_a_layer_closes_over_do_not_leak_where_it_saves_a_float(lane: Any) -> None:
    def loss(x: Any, w: Any) -> Any:
        @remat(mode=lane)
        def layer(x: Any) -> Any:
            return jnp.tanh(x @ w) * recompute_once(lambda: lax.stop_gradient(jnp.sin(x @ w)))

        return layer(x).sum()

    with jax.checking_leaks():
        jax.grad(jax.jit(loss), (0, 1))(X, jnp.ones((X.shape[-1], X.shape[-1])))


def test_tracers_that_a_layer_closes_over_do_not_stay_on_an_open_tape() -> None:
    def step(x: Any, w: Any) -> Any:
        with record():
            return jax.grad(lambda w: remat(lambda x: jnp.tanh(x @ w) * recompute_once(lambda: stop(x)))(x).sum())(w)

    with jax.checking_leaks():
        jax.jit(step)(X, jnp.ones((X.shape[-1], X.shape[-1])))


@pytest.mark.parametrize("tape", [contextlib.nullcontext, record])
@pytest.mark.parametrize("inner", [jax.jit, jax.checkpoint, lambda f: lambda x: lax.map(f, x[None])])
def test_tracers_that_are_saved_in_inner_traces_do_not_leak(inner: Any, tape: Any) -> None:
    def saving(x: Any) -> Any:
        top = recompute_once(lambda: stop(x).argmax(-1))
        (low,) = save_for_recompute(stop(x).argmin(-1))
        return x * (top + low)[:, None]

    def loss(x: Any) -> Any:
        with tape():
            return remat(lambda x: inner(saving)(x))(x).sum()

    with jax.checking_leaks():
        jax.jit(jax.grad(loss))(X)


@lanes
def test_tracer_leaks_and_no_jit(lane: Any) -> None:
    want = jax.grad(lambda x: routed(x).sum())(X)
    with jax.checking_leaks():
        same(jax.jit(jax.grad(lambda x: remat(lambda x: routed(x), mode=lane)(x).sum()))(X), want)
    with jax.disable_jit():
        same(jax.grad(lambda x: remat(routed, mode=lane)(x).sum())(X), want)
