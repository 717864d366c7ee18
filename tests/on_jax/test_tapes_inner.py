"""Tapes of regions that save inside scan, cond and jit (R13)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from roundpipe_jax import (
    GradientError,
    TapeError,
    diff,
    doing_recompute,
    get_recompute_data,
    recompute_once,
    record,
    remat,
    remat_layers,
    replay,
    save_for_recompute,
)
from tests.on_jax.oracle import LANES

L, T, D = 3, 4, 3
W, MOVED = (jnp.array(np.random.default_rng(n).normal(size=(L, D, D)), jnp.float32) for n in (0, 1))
X = jnp.array(np.random.default_rng(2).normal(size=(T, D)), jnp.float32)


def route(x: Any) -> Any:
    return jnp.argmax(jax.lax.stop_gradient(x), -1)


def chosen(style: str, x: Any) -> Any:
    if style == "once":
        return recompute_once(route, x)
    if style == "returned":
        return save_for_recompute(route(x))[0]
    if doing_recompute():
        return get_recompute_data()[0]
    return save_for_recompute(route(x))[0]


def given(x: Any, w: Any, idx_T: Any) -> Any:
    return jnp.tanh(x @ w) * jnp.take_along_axis(jax.nn.softmax(x), idx_T[:, None], 1)


def layer(x: Any, w: Any, style: str = "seed") -> Any:
    return given(x, w, chosen(style, x @ w))


inner = remat(layer, label="inner")


def stack(x: Any, ws: Any) -> Any:
    return remat_layers(lambda w, x: layer(x, w), ws, x, label="inner")


def looping(x: Any, ws: Any) -> Any:
    return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, layer(c[1], ws[0])), (0, x))[1]


def in_both_branches(x: Any, ws: Any) -> Any:
    return jax.lax.cond(True, lambda x: layer(x, ws[0]), lambda x: layer(x, ws[1]), x)


def scanned(step: Any, x: Any, ws: Any, **options: Any) -> Any:
    return jax.lax.scan(lambda x, w: (step(x, w), None), x, ws, **options)[0]


FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Any]] = {
    # name: the region, the same given what a tape holds, the tape's layers and shapes
    "scan": (
        lambda x, w: scanned(layer, x, w),
        lambda x, w, idx: _each(x, w, idx),
        [("outer", (L, T))],
    ),
    "scan, returned": (
        lambda x, w: scanned(lambda x, w: layer(x, w, "returned"), x, w, unroll=2),
        lambda x, w, idx: _each(x, w, idx),
        [("outer", (L, T))],
    ),
    "scan, once": (
        lambda x, w: scanned(lambda x, w: layer(x, w, "once"), x, w),
        lambda x, w, idx: _each(x, w, idx),
        [("outer", (L, T))],
    ),
    "scan in a checkpoint": (
        lambda x, w: jax.checkpoint(lambda x, w: scanned(layer, x, w), prevent_cse=False)(x, w),
        lambda x, w, idx: _each(x, w, idx),
        [("outer", (L, T))],
    ),
    "scan in scan": (
        lambda x, w: jax.lax.scan(lambda x, _: (scanned(layer, x, w, reverse=True), None), x, None, length=2)[0],
        lambda x, w, idx: _each(_each(x, w[::-1], idx[0][::-1]), w[::-1], idx[1][::-1]),
        [("outer", (2, L, T))],
    ),
    "cond": (
        lambda x, w: jax.lax.cond(w[0, 0, 0] > -9, lambda x: layer(x, w[0]), lambda x: 2 * x, x),
        lambda x, w, idx: given(x, w[0], idx),
        [("outer", (T,))],
    ),
    "the other branch": (
        lambda x, w: jax.lax.cond(w[0, 0, 0] < -9, lambda x: layer(x, w[0]), lambda x: 2 * x, x),
        lambda x, w, idx: 2 * x + 0 * idx.sum(),
        [("outer", (T,))],
    ),
    "jit": (
        lambda x, w: jax.jit(layer)(x, w[0]),
        lambda x, w, idx: given(x, w[0], idx),
        [("outer", (T,))],
    ),
    "layers in a scan": (
        lambda x, w: scanned(inner, x, w),
        lambda x, w, idx: _each(x, w, idx),
        [("outer/inner", (L, T))],
    ),
    "layers in a jitted function": (
        lambda x, w: jax.jit(lambda x: inner(inner(x, w[0]), w[1]))(x),
        lambda x, w, one, two: given(given(x, w[0], one), w[1], two),
        [("outer/inner", (T,))] * 2,
    ),
    "a stack, and a save beside it": (
        lambda x, w: stack(x, w) * save_for_recompute(route(x))[0][:, None],
        lambda x, w, *idx: _each(x, w, idx[-L:]) * idx[0][:, None],
        [("outer", (T,))] + [("outer/inner", (T,))] * L,
    ),
}


def _each(x: Any, ws: Any, idx: Any) -> Any:
    for w, idx_T in zip(ws, idx, strict=True):
        x = given(x, w, idx_T)
    return x


def recording(region: Any) -> Any:
    def run(x: Any, w: Any) -> Any:
        with record() as tape:
            value = jnp.sin(region(x, w)).sum()
        return value, tape

    return run


def replaying(region: Any) -> Any:
    def run(x: Any, w: Any, tape: Any) -> Any:
        with replay(tape):
            return jnp.sin(region(x, w)).sum()

    return run


def close(got: Any, want: Any) -> None:
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_saves_in_inner_traces(form: str) -> None:
    function, oracle, layers = FORMS[form]
    region = remat(function, label="outer")
    run = jax.value_and_grad(recording(region), has_aux=True)
    (value, tape), slope = jax.jit(run)(X, W)
    assert [(entry.layer, entry.shape) for entry in tape.entries()] == layers
    decisions = [entry.value for entry in tape.entries()]

    def pinned(x: Any, w: Any) -> Any:
        return jnp.sin(oracle(x, w, *decisions)).sum()

    close((value, slope), jax.value_and_grad(pinned)(X, W))
    if form in ("scan", "layers in a scan", "a stack, and a save beside it"):
        (_, eager), _ = run(X, W)
        assert jax.tree.structure(eager) == jax.tree.structure(tape)
        close([entry.value for entry in eager.entries()], decisions)
    want = jax.value_and_grad(pinned, (0, 1))(X, MOVED)
    close(jax.jit(jax.value_and_grad(replaying(region), (0, 1)))(X, MOVED, tape), want)


def test_a_save_in_a_traced_function_that_is_called() -> None:
    region = remat(lambda x, w: jax.jit(layer).trace(x, w)(x, w), label="outer")
    (_, tape), slope = jax.jit(jax.value_and_grad(recording(region), has_aux=True))(X, W[0])
    idx_T = route(X @ W[0])
    close([entry.value for entry in tape.entries()], [idx_T])
    close(slope, jax.grad(lambda x: jnp.sin(given(x, W[0], idx_T)).sum())(X))


def test_a_constant_that_is_saved_with_a_decision() -> None:
    table = jnp.array([3.0, 1.0, 2.0, 5.0])

    def function(x: Any, w: Any) -> Any:
        def step(x: Any, w: Any) -> Any:
            idx_T, scale_T, n = save_for_recompute(route(x @ w), table, 2)
            return given(x, w, idx_T) * scale_T[:, None] * n

        return scanned(step, x, w)

    region = remat(function, label="outer")
    _, tape = jax.jit(recording(region))(X, W)
    assert [entry.shape for entry in tape.entries()] == [(L, T), (T,), ()]
    step = jax.jit(jax.grad(replaying(region)))
    close(step(X, W, tape), jax.grad(lambda x: jnp.sin(region(x, W)).sum())(X))


@pytest.mark.parametrize("way", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_tape_of_a_scan_that_does_not_fit(way: Any) -> None:
    region = remat(FORMS["scan, returned"][0], label="outer")
    with record() as tape:
        region(X, W)
    run = way(replaying(region))
    with pytest.raises(TapeError, match=f"layer 'outer': {L} iterations, where the layer has {L - 1}"):
        run(X, W[1:], tape)
    with pytest.raises(TapeError, match=f"{T} rows, as an input had; now inputs have"):
        run(X[1:], W, tape)
    other = jax.tree.map(lambda leaf: leaf[:, :2], tape)
    with pytest.raises(TapeError, match=r"shape \[2\], where the layer decides \[4\]"):
        run(X, W, other)
    outside = remat(lambda x, w: given(x, w[0], get_recompute_data()[0] if doing_recompute() else 0), label="outer")
    with pytest.raises(TapeError, match="it was saved in a scan, and is read outside of one"):
        way(replaying(outside))(X, W, tape)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, w: jax.vmap(lambda x: layer(x[None], w[0]))(x), r"inside vmap(?s:.*)called at: .*_inner.py:"),
        (looping, r"inside while(?s:.*)called at: .*_inner.py:"),
        (in_both_branches, r"saves at several points(?s:.*)saved at: .*_inner.py:"),
    ],
    ids=["vmap", "while", "both branches"],
)
def test_what_no_tape_can_hold(function: Any, message: str) -> None:
    region = remat(function, label="outer")
    for run in (recording(region), jax.jit(recording(region))):
        with pytest.raises(TapeError, match=message):
            run(X, W)


@pytest.mark.parametrize("decide", [lambda x: 3, route], ids=["static", "array"])
def test_a_region_that_fails_in_a_layer_that_is_traced(decide: Any) -> None:
    def fails(x: Any) -> Any:
        remat(jnp.sin, label="deep")(x)
        save_for_recompute(decide(x))
        raise ArithmeticError

    def function(x: Any, w: Any) -> Any:
        y = jax.jit(layer)(x, w[0])
        try:
            return remat(fails, label="fails")(y)
        except ArithmeticError:
            return 2 * y

    region = remat(function, label="outer")
    run = jax.jit(recording(region))
    if decide is route:
        with pytest.raises(TapeError, match=r"(?s)layer 'fails': it saved, and then.*saved at: .*_inner.py:"):
            run(X, W)
        return
    _, tape = run(X, W)
    idx = tape.entries()[0].value
    close(jax.jit(replaying(region))(X, MOVED, tape), jnp.sin(2 * given(X, MOVED[0], idx)).sum())


def fails_at_home(x: Any) -> None:
    save_for_recompute(3, name="static")
    recompute_once(route, x)
    remat(lambda x: save_for_recompute(route(x)), label="deep")(x)
    raise ArithmeticError


def fails_after_a_scan(x: Any) -> None:
    save_for_recompute(3, name="static")

    def body(x: Any, _: Any) -> Any:
        save_for_recompute(route(x))
        return x, None

    jax.lax.scan(body, x, None, length=2)
    raise ArithmeticError


def fails_in_a_scan(x: Any) -> None:
    def body(x: Any, _: Any) -> Any:
        save_for_recompute(route(x))
        raise ArithmeticError

    jax.lax.scan(body, x, None, length=2)


def fails_inside(x: Any) -> None:
    def body(x: Any, _: Any) -> Any:
        return x * save_for_recompute(route(x))[0].max(), None

    remat(lambda x: remat(fails_at_home, label="fails")(x), label="around")(jax.lax.scan(body, x, None, length=2)[0])


def otherwise(fails: Any, **options: Any) -> Any:
    """A program that goes another way when a layer fails."""

    def function(x: Any, w: Any) -> Any:
        try:
            remat(fails, label="fails", **options)(x)
        except ArithmeticError:
            x = 2 * x
        return remat(layer)(x, w[0])

    return function


@pytest.mark.parametrize("mode", LANES)
@pytest.mark.parametrize("fails", [fails_at_home, fails_after_a_scan])
def test_an_outermost_region_that_fails_is_on_the_tape(fails: Any, mode: Any) -> None:
    if fails is fails_after_a_scan and mode == "custom_vjp":
        return  # which has no saves in scans
    function = otherwise(fails, mode=mode)
    tapes = []
    for step in (recording(function), jax.jit(recording(function))):
        for _ in range(2):  # the second call may start in another form
            _, tape = step(X, W)
            tapes.append(tape)
    held = [[(entry.layer, entry.name, entry.shape) for entry in tape.entries()] for tape in tapes]
    assert all(one == held[0] for one in held)
    assert sum("fails" in label for label, _, _ in held[0]) == (3 if fails is fails_at_home else 2)
    idx = tapes[0].entries()[-1].value
    slope = jax.grad(lambda x: jnp.sin(given(2 * x, W[0], idx)).sum())(X)
    for step in (recording(function), jax.jit(recording(function))):
        gradient, tape = jax.grad(step, has_aux=True)(X, W)
        close(gradient, slope)
        tapes.append(tape)
    for tape in tapes:
        assert not diff(tapes[0], tape)
    for run in (replaying(function), jax.jit(replaying(function))):
        close(run(X, MOVED, tapes[-1]), jnp.sin(given(2 * X, MOVED[0], idx)).sum())


def test_a_region_that_fails_with_a_trace_inside_is_an_error_if_the_program_goes_on() -> None:
    def stacked(x: Any, w: Any) -> Any:
        try:
            remat_layers(lambda _, x: fails_at_home(x), w, x, label="fails")
        except ArithmeticError:
            return x

    inside = otherwise(fails_inside)
    for function in (otherwise(fails_in_a_scan), stacked, inside):
        for step in (recording(function), jax.jit(recording(function))):
            with pytest.raises(TapeError, match=r"(?s)layer 'fails': it saved, and then ended.*: .*_inner.py:"):
                step(X, W)
    for fails in (fails_in_a_scan, fails_inside):
        uncaught = recording(lambda x, _, fails=fails: remat(fails)(x))
        for step in (uncaught, jax.jit(uncaught)):
            with pytest.raises(ArithmeticError):
                step(X, W)


@pytest.mark.parametrize("fault", ["fails", "vmap", "jit"])
def test_what_a_tape_lacks_is_an_error_though_the_program_catches_it(fault: str) -> None:
    def caught(x: Any) -> Any:
        try:
            remat(fails_at_home, label="lacks")(x)
        except ArithmeticError:
            return x

    functions: dict[str, Any] = {
        "fails": remat(lambda x: caught(jax.lax.map(lambda x: save_for_recompute(x)[0], x)), label="around"),
        "vmap": remat(lambda x: jax.vmap(lambda x: save_for_recompute(x > 0)[0])(x), label="lacks"),
        "jit": jax.jit(remat(lambda x: save_for_recompute(x > 0)[0], label="lacks")),
    }
    with pytest.raises(TapeError, match="layer 'lacks'"), record(), contextlib.suppress(ValueError):
        functions[fault](X)


def test_a_failed_region_saves_no_float_that_is_differentiated() -> None:
    def fails(x: Any) -> None:
        save_for_recompute(jnp.sin(x))
        raise ArithmeticError

    step = jax.grad(recording(otherwise(fails)), has_aux=True)
    for run in (step, jax.jit(step)):
        with pytest.raises(GradientError, match="layer 'fails'"):
            run(X, W)


@pytest.mark.parametrize("outer", [lambda f: f, remat], ids=["outermost", "inside"])
def test_a_region_that_fails_in_a_replay_has_read_its_decisions(outer: Any) -> None:
    def fails(x: Any) -> Any:
        save_for_recompute(route(x))
        raise ArithmeticError

    def function(x: Any, w: Any) -> Any:
        with contextlib.suppress(ArithmeticError):
            remat(fails)(x)
        return remat(layer)(x, w[0])

    with record() as tape:
        outer(function)(X, W)
    idx = tape.entries()[1].value
    for run in (replaying(outer(function)), jax.jit(replaying(outer(function)))):
        close(run(X, MOVED, tape), jnp.sin(given(X, MOVED[0], idx)).sum())


def test_the_replayed_scan_does_not_route() -> None:
    region = remat(FORMS["scan"][0], label="outer")
    with record() as tape:
        region(X, W)
    step = jax.jit(jax.value_and_grad(replaying(region)))
    assert "argmax" not in str(step.trace(X, W, tape).jaxpr)
    assert "argmax" in str(jax.jit(jax.grad(lambda x, w: region(x, w).sum())).trace(X, W).jaxpr)
