"""Faults from public reports on remat, each as a layer. The oracle is the layer with its decision forced."""

import collections
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from roundpipe_jax import doing_recompute, get_recompute_data, remat, save_for_recompute

WAYS = {"eager": lambda f: f, "jit": jax.jit}


def close(got: Any, want: Any) -> None:
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["checkpoint", "custom_vjp"])
def test_the_compiler_does_not_merge_the_recompute_and_the_router_runs_once(mode: Any) -> None:
    def layer(w: Any, v: Any) -> Any:
        if doing_recompute():
            (idx,) = get_recompute_data()
        else:
            idx = jax.lax.top_k(jax.lax.stop_gradient(v), 2)[1]
            save_for_recompute(idx)
        return v + jnp.sin(jnp.sin(v @ w)) * jnp.take_along_axis(jax.nn.softmax(v), idx, 1).sum(1, keepdims=True)

    def loss(ws: Any, x: Any) -> Any:
        for n in range(3):
            x = remat(lambda w, v: layer(w, v), mode=mode)(ws[n], x)
        return x.sum()

    text = jax.jit(jax.grad(loss)).lower(jnp.ones((3, 8, 8)), jnp.ones((4, 8))).as_text()
    assert len(re.findall(r"chlo\.top_k", text)) == 3
    assert len(re.findall(r"stablehlo\.sine", text)) >= 9  # two forward, one again
    assert text.count("optimization_barrier") >= 3


@pytest.mark.parametrize("way", WAYS)
def test_a_router_that_never_repeats_itself(way: str) -> None:
    draws: list[Any] = []

    def jitter(_: Any) -> Any:
        draws.append(np.random.default_rng(len(draws)).normal(size=(6, 4)).astype(np.float32) * 3)
        return draws[-1]

    def layer(x: Any, w: Any, forced: Any = None) -> Any:
        if forced is not None:
            idx = forced
        elif doing_recompute():
            (idx,) = get_recompute_data()
        else:
            noise = jax.pure_callback(jitter, jax.ShapeDtypeStruct((6, 4), jnp.float32), jax.lax.stop_gradient(x))
            idx = jax.lax.top_k(jax.lax.stop_gradient(x @ w) + noise, 2)[1]
            save_for_recompute(idx)
        return jnp.tanh(x) * jnp.take_along_axis(jax.nn.softmax(x @ w), idx, 1).sum(1, keepdims=True)

    x, w = jax.random.normal(jax.random.key(0), (6, 4)), jnp.eye(4)
    got = WAYS[way](jax.grad(lambda x, w: remat(layer)(x, w).sum(), (0, 1)))(x, w)
    jax.block_until_ready(got)
    [noise] = draws
    idx = jax.lax.top_k(x @ w + noise, 2)[1]
    close(got, jax.grad(lambda x, w: layer(x, w, idx).sum(), (0, 1))(x, w))


def test_python_branches_dynamic_shapes_and_empty_experts_in_eager_mode() -> None:
    def layer(x: Any, log: Any = None) -> Any:
        if doing_recompute():
            flip, groups = get_recompute_data()
            assert type(flip) is bool
        else:
            flip = bool(x.mean() > 0)
            choice = jnp.argmax(x, -1)
            groups = {e: jnp.nonzero(choice == e)[0] for e in range(3)}
            groups = {e: rows for e, rows in groups.items() if int(rows.shape[0])}
            save_for_recompute(flip, groups)
        y = jnp.zeros_like(x)
        for e, rows in groups.items():
            y = y.at[rows].add(jnp.tanh(x[rows]) * (e + 1))
        return jnp.sin(y) if flip else jnp.exp(y)

    for seed in range(2):
        x = jax.random.normal(jax.random.key(seed), (5, 3)) + (seed % 2 - 0.5)
        close(jax.grad(lambda x: remat(layer)(x).sum())(x), jax.grad(lambda x: layer(x).sum())(x))


def pick(h: Any) -> Any:
    if doing_recompute():
        (idx,) = get_recompute_data()
    else:
        idx = jnp.argmax(jax.lax.stop_gradient(h), -1)
        save_for_recompute(idx)
    return h * (idx[:, None] + 1)


class Module:
    def __init__(self, w: Any) -> None:
        self.w = w

    def __call__(self, x: Any) -> Any:
        return pick(jnp.tanh(x @ self.w))

    call = __call__


CLOSURES = {
    "direct": lambda w: lambda x: pick(jnp.tanh(x @ w)),
    "nested": lambda w: functools.partial(lambda inner, x: pick(inner(x)), lambda x: jnp.tanh(x @ w)),
    "method": lambda w: Module(w).call,
    "object": lambda w: Module(w),
    "cell": lambda w: (lambda box: lambda x: pick(jnp.tanh(x @ box["w"])))({"w": w}),
    "default": lambda w: lambda x, w=w: pick(jnp.tanh(x @ w)),
    "partial": lambda w: functools.partial(lambda w, x: pick(jnp.tanh(x @ w)), w),
}


@pytest.mark.parametrize("kind", CLOSURES)
@pytest.mark.parametrize("mode", ["checkpoint", "custom_vjp"])
def test_closures_over_values_being_differentiated(kind: str, mode: Any) -> None:
    w, x = jax.random.normal(jax.random.key(0), (3, 3)), jax.random.normal(jax.random.key(1), (2, 4, 3))

    def gradient(wrap: Any) -> Any:
        return jax.grad(lambda w, x: (wrap(CLOSURES[kind](w))(x) ** 2).sum(), (0, 1))

    ours, plain = gradient(lambda f: remat(f, mode=mode)), gradient(lambda f: f)
    want = jax.jit(plain)(w, x[0])
    close(jax.jit(ours)(w, x[0]), want)
    if mode == "custom_vjp":
        return
    close(ours(w, x[0]), want)
    close(jax.vmap(ours, (None, 0))(w, x), jax.vmap(plain, (None, 0))(w, x))


def test_a_loop_variable_that_is_rebound_before_backward() -> None:
    def loss(wrap: Any, x: Any) -> Any:
        for i in (1, 2, 3):
            x = wrap(lambda v: pick(jnp.sin(v) * i) * i)(x)  # noqa: B023
        return x.sum()

    x = jnp.ones((2, 3)) / 3
    for way in WAYS.values():
        close(way(jax.grad(lambda x: loss(remat, x)))(x), jax.grad(lambda x: loss(lambda f: f, x))(x))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["checkpoint", "custom_vjp"])
def test_data_without_tangents_comes_back_in_its_dtype(way: str, mode: Any) -> None:
    def layer(x: Any, ids: Any, key: Any) -> Any:
        one, two = jax.random.split(key)
        data = (
            jnp.argmax(jax.lax.stop_gradient(x), -1).astype(jnp.int8),
            jax.random.bernoulli(one, 0.5, x.shape),
            two,
            jax.random.key_data(one),
            jnp.bfloat16(1.5),
            jnp.zeros((0,)),
        )
        got = save_for_recompute(*data)
        assert [str(a.dtype) for a in got] == [str(a.dtype) for a in data]
        idx, mask, key, _, scale, empty = got
        assert empty.shape == (0,)
        y = jnp.where(mask, jnp.tanh(x), 0) * jax.random.normal(key, x.shape) * scale.astype(x.dtype)
        return (y * (idx[:, None] + ids[:, None])).sum()

    x = jax.random.normal(jax.random.key(0), (4, 3))
    args = (x, jnp.arange(4), jax.random.key(7))
    gradient = lambda f: jax.grad(f, (0, 1), allow_int=True)  # noqa: E731
    got, ids = WAYS[way](gradient(remat(layer, mode=mode)))(*args)
    close(got, gradient(layer)(*args)[0])
    assert ids.dtype == jax.dtypes.float0


Pair = collections.namedtuple("Pair", "x extra")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, {"static_argnums": (0,)}, {"static_argnames": ("flag", "config")}], ids=str)
def test_pytrees_flags_and_keywords(way: str, options: Any) -> None:
    def layer(flag: Any, pair: Any, *, scale: Any, config: Any, mask: Any = None) -> Any:
        assert type(flag) is bool
        assert config == {"k": 2, "act": "sin"}
        assert mask is None
        k, name, nothing, tree = save_for_recompute(config["k"], "moe", None, {"b": [pair.x > 0]})
        assert (type(k), name, nothing) == (int, "moe", None)
        y = jnp.where(tree["b"][0], jnp.tanh(pair.x), pair.x) * k * scale["s"] + pair.extra["bias"]
        return {"y": jnp.sin(y) if flag else jnp.exp(-y), "none": None, "name": "out", "aux": (k, tree["b"][0])}

    def loss(wrap: Any, p: Any) -> Any:
        x = p["x"]
        for flag in (True, False):
            out = wrap(layer)(flag, Pair(x, {"bias": p["b"], "n": None}), scale=p, config={"k": 2, "act": "sin"})
            assert out["none"] is None
            assert out["name"] == "out"
            assert out["aux"][0] == 2
            x = out["y"]
        return x.sum()

    p = {"x": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.ones(3), "s": jnp.float32(1.3)}
    got = WAYS[way](jax.grad(lambda p: loss(lambda f: remat(f, **options), p)))(p)
    close(got, jax.grad(lambda p: loss(lambda f: f, p))(p))


def test_batched_and_unbatched_saves_under_vmap() -> None:
    def layer(w: Any, x: Any, key: Any) -> Any:
        idx = jax.random.randint(key, (5, 1), 0, 4)
        got, table, n = save_for_recompute(idx, jnp.arange(3.0), 2)
        assert type(n) is int
        return jnp.take_along_axis(jax.nn.softmax(x @ w), got, 1) * table.sum() * n

    w, x, keys = jnp.eye(4), jax.random.normal(jax.random.key(0), (3, 5, 4)), jax.random.split(jax.random.key(1), 3)

    def per(f: Any) -> Any:
        return jax.vmap(jax.grad(lambda w, x, k: (f(w, x, k) ** 2).sum(), (0, 1)), (None, 0, 0))

    want = per(layer)(w, x, keys)
    close(jax.jit(per(remat(layer)))(w, x, keys), want)
    twice = jax.vmap(per(remat(layer)), (None, 0, 0))(w, x[None], keys[None])
    close(jax.tree.map(lambda leaf: leaf[0], twice), want)


def test_nnx_module_mutated_from_inside_is_an_error_or_right() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Counter(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(3))
            self.count = nnx.Variable(jnp.zeros(()))

        def __call__(self, x: Any) -> Any:
            (n,) = save_for_recompute(jnp.argmax(x))
            self.count[...] = self.count[...] + 1
            return jnp.sin(x * self.w[...]) * n

    model, x = Counter(), jnp.arange(3.0)
    with pytest.raises(Exception, match="different trace level"):
        nnx.grad(lambda m: remat(lambda v: m(v))(x).sum())(model)

    graph, params, rest = nnx.split(Counter(), nnx.Param, ...)

    def functional(params: Any, rest: Any, x: Any) -> Any:
        model = nnx.merge(graph, params, rest, copy=True)
        return model(x).sum(), nnx.state(model, nnx.Not(nnx.Param))

    gradient, state = jax.grad(remat(functional), has_aux=True)(params, rest, x)
    want, _ = jax.grad(functional, has_aux=True)(params, rest, x)
    close(gradient, want)
    assert jax.tree.leaves(state)[0] == 1
