"""Work and memory, counted: decisions, matrix products, residuals, Python calls, live arrays."""

import functools
import gc
import sys
import types
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

from benchmarks import jax_moe_flips
from roundpipe_jax import (
    GradientError,
    doing_recompute,
    get_recompute_data,
    layer_scope,
    recompute_once,
    remat,
    save_for_recompute,
)
from roundpipe_jax._explain import flops_of
from roundpipe_jax._tags import subprograms

T, D, L = 8, 4, 3
W, X = jnp.ones((L, D, D)) / 3, jnp.linspace(-1, 1, T * D).reshape(T, D)


def layer(w: Any, x: Any, saves: bool = True) -> Any:
    logits = x @ w
    if saves and doing_recompute():
        (idx,) = get_recompute_data()
    else:
        idx = jax.lax.top_k(jax.lax.stop_gradient(logits), 2)[1]
        if saves:
            save_for_recompute(idx)
    gate = jnp.take_along_axis(jax.nn.softmax(logits), idx, 1).sum(1, keepdims=True)
    return jnp.sin(jnp.sin(x @ w) @ w) * gate


def stack(f: Any) -> Any:
    def loss(w: Any, x: Any) -> Any:
        for n in range(L):
            x = f(w[n], x)
        return x.sum()

    return loss


def step(f: Any) -> Any:
    return jax.grad(stack(f), (0, 1))


def count(jaxpr: Any, primitive: str) -> int:
    """How often an operation runs in a program without scans."""
    inner = sum(count(program, primitive) for eqn in jaxpr.eqns for program in subprograms(eqn))
    return inner + sum(eqn.primitive.name == primitive for eqn in jaxpr.eqns)


LANES = {"checkpoint": remat, "custom_vjp": lambda f: remat(f, mode="custom_vjp")}


@pytest.mark.parametrize("lane", LANES)
def test_decisions_run_once_and_products_as_often_as_under_jax_checkpoint(lane: str) -> None:
    def live(f: Any) -> Any:
        jaxpr = jax.make_jaxpr(jax.value_and_grad(stack(f), (0, 1)))(W, X).jaxpr
        return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]

    stock = live(jax.checkpoint(functools.partial(layer, saves=False)))
    ours, none = live(LANES[lane](layer)), live(layer)
    assert count(ours, "top_k") == count(live(jax.checkpoint(layer)), "top_k") == L
    assert count(stock, "top_k") == 2 * L
    assert flops_of(ours) == flops_of(stock)
    assert flops_of(stock) * 3 == flops_of(none) * 4


@pytest.mark.parametrize("lane", LANES)
def test_nested_decisions_run_once(lane: str) -> None:
    wrap = LANES[lane]
    loss = wrap(lambda w, x: wrap(layer)(w[1], wrap(layer)(w[0], x)).sum())
    jaxpr = jax.make_jaxpr(jax.grad(loss))(W, X).jaxpr
    live = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]
    assert count(live, "top_k") == 2


@pytest.mark.parametrize("lane", LANES)
def test_exactly_the_inputs_and_the_slot_are_kept(lane: str) -> None:
    pull = jax.eval_shape(lambda w, x: jax.vjp(LANES[lane](layer), w, x)[1], W[0], X)
    assert sorted((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(pull)) == [
        ((D, D), "float32"),
        ((T, 2), "int32"),
        ((T, D), "float32"),
    ]


def test_arrays_alive_at_the_end_of_an_eager_forward() -> None:
    def alive(f: Any) -> int:
        gc.collect()
        before = {id(array) for array in jax.live_arrays()}
        _, pull = jax.vjp(stack(f), W, X)
        gc.collect()
        size = sum(array.nbytes for array in jax.live_arrays() if id(array) not in before)
        del pull
        return size

    slots = L * T * 2 * 4
    assert alive(layer) > 2 * alive(remat(layer))
    assert alive(remat(layer)) <= alive(jax.checkpoint(layer)) + slots


# -------------------------------------------------------------------------------------------- caches


def counted(body: str) -> tuple[Any, list[int]]:
    """A layer without closure cells, and where its Python calls are counted."""
    ticks: list[int] = []
    space: dict[str, Any] = {"tick": lambda: ticks.append(1), "layer": layer, "jnp": jnp}
    exec(f"def f(w, x):\n    tick()\n    return {body}", space)
    return space["f"], ticks


def test_equal_layers_are_traced_once_a_phase() -> None:
    f, ticks = counted("layer(w, x)")
    many = jnp.ones((24, D, D))

    def loss(w: Any, x: Any) -> Any:
        for n in range(24):
            x = remat(f)(w[n], x)
        return x.sum()

    jax.jit(jax.grad(loss)).lower(many, X)
    assert len(ticks) == 2


def test_an_eager_step_traces_a_layer_once_for_all_steps() -> None:
    calls, fresh = 0, types.FunctionType(layer.__code__, globals(), argdefs=layer.__defaults__)

    def watch(frame: Any, event: str, _: Any) -> None:  # a count of its own would be state that the layer reads
        nonlocal calls
        calls += event == "call" and frame.f_code is layer.__code__

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        for n in range(1, 4):
            step(remat(fresh))(W, X)
            assert calls == n * L + 1  # each forward runs; the recompute is one trace
    finally:
        sys.setprofile(before)


def test_a_plain_layer_is_traced_once_like_under_jax_checkpoint() -> None:
    f, ticks = counted("jnp.sin(x @ w)")
    jax.jit(step(remat(f))).lower(W, X)
    assert len(ticks) == 1


def test_static_arguments_are_told_apart() -> None:
    def f(x: Any, flag: bool, n: int) -> Any:
        (m,) = save_for_recompute(n)
        return (jnp.sin(x) if flag else jnp.cos(x)) * m

    for way in (lambda f: f, jax.jit):
        got = [
            way(jax.grad(lambda x, a=a: remat(f)(x, *a)))(1.0) for a in ((True, 1), (False, 1), (True, 2), (True, 1))
        ]
        np.testing.assert_allclose(got, [np.cos(1), -np.sin(1), 2 * np.cos(1), np.cos(1)], rtol=1e-6)


def test_another_decision_is_another_recompute() -> None:
    def f(x: Any) -> Any:
        if doing_recompute():
            (up,) = get_recompute_data()
        else:
            up = bool(x > 0)
            save_for_recompute(up)
        return x * 2 if up else x * 3

    assert [jax.grad(remat(f))(x) for x in (1.0, -1.0, 2.0, -2.0)] == [2, 3, 2, 3]


@pytest.mark.parametrize("way", [lambda f: f, jax.jit])
def test_no_stale_closures(way: Any) -> None:
    class Module:
        def __init__(self) -> None:
            self.w = jnp.ones(())

        def __call__(self, x: Any) -> Any:
            (n,) = save_for_recompute(jnp.int32(1))
            return jnp.sin(x * self.w) * n

    module = Module()
    by_cell = remat(lambda x: module(x))
    by_method, by_object, by_argument = remat(module.__call__), remat(module), remat(lambda m, x: m(x))
    for value in (1.0, 2.0, 3.0):
        module.w = jnp.float32(value)
        for f in (by_cell, by_method, by_object, lambda x: by_argument(module, x)):
            np.testing.assert_allclose(way(jax.grad(lambda x, f=f: f(x)))(1.0), value * np.cos(value), rtol=1e-5)


def test_tracers_in_globals_do_not_leak() -> None:
    space: dict[str, Any] = {"jnp": jnp, "save": save_for_recompute}
    exec("def f(x):\n    save(1)\n    return jnp.sin(x * w)", space)

    def loss(w: Any) -> Any:
        space["w"] = w
        return remat(space["f"])(1.0)

    for way in (lambda f: f, jax.jit):
        for w in (1.0, 2.0):
            np.testing.assert_allclose(way(jax.grad(loss))(w), np.cos(w), rtol=1e-5)


def test_a_layer_that_begins_to_save_floats_is_still_checked() -> None:  # R5
    kind: dict[str, Any] = {"float": False}
    space: dict[str, Any] = {"kind": kind, "jnp": jnp, "save": save_for_recompute}
    exec("def f(x):\n    save(x * 2 if kind['float'] else 1)\n    return jnp.sin(x)", space)
    f = remat(space["f"])
    jax.grad(f)(1.0)
    jax.grad(f)(1.0)
    kind["float"] = True
    with pytest.raises(GradientError):
        jax.grad(f)(1.0)


def test_functions_are_not_kept_alive() -> None:
    f, _ = counted("layer(w, x)")
    jax.jit(step(remat(f))).lower(W, X)
    step(remat(f))(W, X)
    gone = weakref.ref(f)
    del f
    jax.clear_caches()
    gc.collect()
    assert gone() is None


def test_once_and_scopes_line_up_with_the_cache() -> None:
    def f(x: Any) -> Any:
        with layer_scope("a"):
            one = recompute_once(jnp.argmax, x)
        with layer_scope("b"):
            (two,) = save_for_recompute(jnp.argmin(x))
        return jnp.sin(x) * one + two

    for _ in range(2):
        for way in (lambda f: f, jax.jit):
            got = way(jax.grad(lambda x: remat(f)(x).sum()))(jnp.array([0.0, 1.0, 3.0]))
            np.testing.assert_allclose(got, 2 * np.cos([0.0, 1.0, 3.0]), rtol=1e-5)


# ------------------------------------------------------------------------------------ the measurements


def test_routing_flips_under_jax_checkpoint_in_bfloat16_and_never_under_remat() -> None:
    jax.config.update("jax_disable_most_optimizations", False)  # they are what moves the router's input
    stock, off = jax_moe_flips.measure(jax.checkpoint, 1)
    assert stock > 0
    assert off > 0.01
    assert jax_moe_flips.measure(remat, 1) == (0, 0.0)
