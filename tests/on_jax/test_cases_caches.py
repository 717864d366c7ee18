"""What a layer reads may change between two calls, wherever it stands: traces that are kept must not be old ones."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from roundpipe_jax import recompute_once, remat, remat_layers, save_for_recompute
from tests.on_jax.oracle import LANES, W, X, gradient, same


def best(x: Any) -> Any:
    return jnp.argmax(lax.stop_gradient(x))


class Box:
    k: Any = 1.0


class Text(str):
    __slots__ = ("k",)


BOX, TABLE = Box(), {"k": 1.0}
BOX.k = 1.0


def reads_an_object(x: Any) -> Any:
    return jnp.sin(x) * (save_for_recompute(best(x))[0] + 1) * BOX.k


def saves_nothing(x: Any) -> Any:
    return jnp.sin(x) * BOX.k


def helper(x: Any) -> Any:
    return jnp.sin(x) * TABLE["k"]


def reads_through_a_function(x: Any) -> Any:
    return helper(x) * (save_for_recompute(best(x))[0] + 1)


def reads_a_default(x: Any, table: Any = TABLE) -> Any:
    return jnp.sin(x) * (save_for_recompute(best(x))[0] + 1) * table["k"]


def reads_in_a_scan(x: Any) -> Any:
    def body(c: Any, _: Any) -> Any:
        return jnp.sin(c) * (save_for_recompute(best(c))[0] + 1) * BOX.k, None

    return lax.scan(body, x, None, length=2)[0]


LAYERS = [reads_an_object, saves_nothing, reads_through_a_function, reads_a_default, reads_in_a_scan]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_module_level_state(layer: Any) -> None:
    ours, batched = remat(layer), jax.vmap(remat(layer))
    for k in (1.0, 2.0, 1.0):
        BOX.k = TABLE["k"] = k
        want = gradient(layer)(X)
        same(gradient(ours)(X), want)
        same(gradient(batched)(X[None]), (want[0], (want[1][0][None],)))


def with_argument(what: Any, x: Any) -> Any:
    save_for_recompute(1)
    return jnp.sin(x).sum() * (what(1.0) if callable(what) and not isinstance(what, type) else what.k)


def scaled(f: Any, table: Any) -> Any:
    @functools.wraps(f)
    def wrapper(x: Any) -> Any:
        return f(x) * table["k"]

    return wrapper


def one(x: Any) -> Any:
    return x


def defaulted(x: Any, table: Any = TABLE) -> Any:
    return x * table["k"]


@pytest.mark.parametrize("kind", ["wrapper", "default", "class", "object", "string"])
def test_an_argument_that_changes_inside(kind: str) -> None:
    layer = remat(with_argument)
    made = {"wrapper": scaled(one, TABLE), "default": defaulted, "class": Box, "object": BOX}
    for k in (1.0, 3.0, 1.0):
        BOX.k = TABLE["k"] = Box.k = k
        what = made.get(kind) or Text("a")
        if kind == "string":
            what.k = k
        same(jax.grad(layer, 1)(what, X), jnp.cos(X) * k)


class Module(eqx.Module):
    w: Any
    k: Any = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        (index,) = save_for_recompute(best(x))
        return jnp.tanh(x @ self.w) * (index + 1) * (10 if isinstance(self.k, bool) else self.k)


def call(module: Any, x: Any) -> Any:
    return module(x)


def test_static_fields_that_compare_equal() -> None:
    layer = remat(call)
    for k in (1, True, 1.0, 2, 1):
        same(
            jax.grad(lambda x, k=k: layer(Module(W, k), x).sum())(X), jax.grad(lambda x, k=k: Module(W, k)(x).sum())(X)
        )


def one_way_or_other(inner: bool, x: Any) -> Any:
    if inner:
        return lax.scan(lambda c, _: (jnp.sin(c) * (save_for_recompute(best(c))[0] + 1), None), x, None, length=2)[0]
    return jnp.sin(x) if recompute_once(lambda: bool(x.sum() > 0)) else jnp.cos(x)


def test_a_flag_that_decides_whether_a_layer_saves_inside() -> None:
    layer = remat(one_way_or_other)
    for inner in (True, False, True, False):
        same(
            jax.grad(lambda x, i=inner: layer(i, x).sum())(X),
            jax.grad(lambda x, i=inner: one_way_or_other(i, x).sum())(X),
        )


@pytest.mark.parametrize("lane", LANES)
def test_numpy_arguments(lane: Any) -> None:
    """They are those of the call though their owner fills them anew, and come back in JAX's types."""
    buffer, ids = np.linspace(-1, 1, 192, dtype=np.float32).reshape(64, 3), np.arange(3)

    def layer(w: Any, x: Any, ids: Any) -> Any:
        (index,) = save_for_recompute(best(x @ w))
        return jnp.sin(x @ w) * (index + 1), ids

    want = jax.vjp(lambda w: layer(w, jnp.array(buffer), ids)[0], W)
    value, pull, again = jax.vjp(lambda w: remat(layer, mode=lane)(w, buffer, ids), W, has_aux=True)
    buffer[:] = 0
    same(value, want[0])
    same(again, jnp.arange(3))
    same(pull(value), want[1](value))


def test_the_residual_lane_inside_others() -> None:
    def layer(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w) * (save_for_recompute(best(x @ w))[0] + 1)

    def plain(ws: Any, x: Any) -> Any:
        for w in ws:
            x = layer(w, x)
        return x

    ws = jnp.stack([W, W.T])
    step = jax.jit(gradient(lambda ws, x: remat_layers(layer, ws, x, mode="custom_vjp", nested=2)))
    same(step(ws, X), gradient(plain)(ws, X))
