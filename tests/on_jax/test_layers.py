"""remat_layers against a Python loop over the same layers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from roundpipe_jax import (
    OptionError,
    VerifyWarning,
    doing_recompute,
    get_recompute_data,
    remat_layers,
    save_for_recompute,
    save_policy,
)
from tests.said import said

L, T, D = 6, 5, 4


class Draws:
    """A host-side router that never decides the same way twice."""

    def __init__(self) -> None:
        self.log: dict[int, list[Any]] = {}

    def __call__(self, n: Any) -> Any:
        seed = sum(map(len, self.log.values()))
        idx = np.random.default_rng(seed).integers(0, D, (T, 1)).astype(np.int32)
        self.log.setdefault(int(n), []).append(idx)
        return idx


def forced(params: Any, x_TD: Any, idx_T1: Any) -> Any:
    return jnp.tanh(x_TD @ params["w"]) + jnp.take_along_axis(jax.nn.softmax(x_TD @ params["w"]), idx_T1, 1)


def layer_with(draws: Draws) -> Any:
    def layer(params: Any, x_TD: Any) -> Any:
        if doing_recompute():
            (idx_T1,) = get_recompute_data()
        else:
            idx_T1 = jax.pure_callback(draws, jax.ShapeDtypeStruct((T, 1), jnp.int32), params["n"])
            save_for_recompute(idx_T1)
        return forced(params, x_TD, idx_T1)

    return layer


def data() -> tuple[Any, Any]:
    return {"w": jax.random.normal(jax.random.key(0), (L, D, D)), "n": jnp.arange(L)}, jnp.ones((T, D)) / 3


@pytest.mark.parametrize("options", [{}, {"nested": 3}, {"nested": 2, "unroll": 3}, {"mode": "custom_vjp"}], ids=str)
@pytest.mark.parametrize("jit", [False, True])
def test_each_layer_decides_once_and_gets_its_own_decision(options: Any, jit: bool) -> None:  # R8
    draws, (params, x) = Draws(), data()

    def loss(w: Any, x: Any) -> Any:
        return (remat_layers(layer_with(draws), {"w": w, "n": params["n"]}, x, **options) ** 2).sum()

    def oracle(w: Any, x: Any) -> Any:
        for n in range(L):
            x = forced({"w": w[n]}, x, draws.log[n][0])
        return (x**2).sum()

    gradient = jax.grad(loss, (0, 1))
    got = jax.block_until_ready((jax.jit(gradient) if jit else gradient)(params["w"], x))
    assert {n: len(log) for n, log in draws.log.items()} == dict.fromkeys(range(L), 1)
    for one, two in zip(got, jax.grad(oracle, (0, 1))(params["w"], x), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


def test_aux_is_stacked_in_order_with_groups_too() -> None:
    params, x = data()

    def layer(params: Any, x: Any, shift: Any) -> Any:
        (n,) = save_for_recompute(params["n"] + 0)
        return x + shift, n

    for nested in (None, 1, 3):
        last, order = remat_layers(layer, params, x, 2.0, nested=nested, has_aux=True)
        np.testing.assert_allclose(last, x + 2 * L, rtol=1e-6)
        np.testing.assert_array_equal(order, jnp.arange(L))


def finish(step: Any, x: Any) -> None:
    jax.block_until_ready(step(x))
    jax.effects_barrier()


def test_options_are_those_of_the_layers() -> None:
    params, x = data()
    rng = np.random.default_rng(0)

    def drops(params: Any, x: Any) -> Any:
        return jnp.where(rng.random(x.shape) > 0.5, x @ params["w"], 0)

    def saves(params: Any, x: Any) -> Any:
        return x * save_for_recompute(2)[0]

    for nested in (None, 2):
        step = jax.grad(lambda x, n=nested: remat_layers(drops, params, x, verify="warn", label="drop", nested=n).sum())
        with pytest.warns(VerifyWarning, match="layer 'drop"):
            finish(step, x)
    with pytest.raises(OptionError, match="layer 'drop': the policy names 'q'"):
        remat_layers(drops, params, x, policy=save_policy("q"), label="drop")
    with pytest.raises(OptionError, match="layer 'one': mode="):
        jax.jvp(lambda x: remat_layers(saves, params, x, mode="custom_vjp", label="one"), (x,), (x,))


def test_groups_keep_less() -> None:
    def layer(w: Any, x: Any) -> Any:
        return jnp.sin(jnp.sin(x * w))

    def kept(nested: int | None) -> int:
        w, x = jnp.ones((16, 1)), jnp.ones((4096,))
        pull = jax.eval_shape(lambda x: jax.vjp(lambda x: remat_layers(layer, w, x, nested=nested), x)[1], x)
        return sum(leaf.size for leaf in jax.tree.leaves(pull)) // 4096

    assert kept(None) == 16
    assert kept(4) == 4


def test_parameters_that_do_not_fit_are_named() -> None:
    def layer(p: Any, x: Any) -> Any:
        return x

    name = f"'{layer.__qualname__} ({__file__}:{layer.__code__.co_firstlineno})'"
    wanted: list[tuple[Any, dict[str, Any], list[str]]] = [
        (
            {"a": jnp.ones((2, 1)), "b": jnp.ones(3), "c": 1.0},
            {},
            ["['a']: shape (2, 1)", "['b']: shape (3,)", "['c']: shape ()"],
        ),
        ({}, {}, []),
        (2.0, {}, ["the parameters: shape ()"]),
    ]
    for params, options, shapes in wanted:
        with pytest.raises(OptionError) as caught:
            remat_layers(layer, params, jnp.ones(1), **options)
        assert said(caught.value, __file__) == [
            f"layer {name}: remat_layers needs parameters stacked along their first axis, one entry a layer.",
            *(f"  {shape}" for shape in shapes),
            "  way out: stack them: jax.tree.map(lambda *leaves: jnp.stack(leaves), *params_of_each_layer).",
        ]
    for groups in (4, 0, -2, "2", 1.5):
        with pytest.raises(OptionError) as caught:
            remat_layers(layer, jnp.ones((6, 1)), jnp.ones(1), nested=groups)
        assert said(caught.value, __file__) == [
            f"layer {name}: 6 layers do not divide into nested={groups!r} groups.",
            "  way out: choose one of 1, 2, 3, 6.",
        ]


def test_what_a_layer_returns_goes_into_the_next_one() -> None:
    x, w = jnp.ones(3), jnp.ones((2, 3))
    wanted: list[tuple[Any, Any, dict[str, Any], list[str]]] = [
        (lambda w, x: (x * w, x.sum()), x, {}, ["got: float32[3]", "returned: a tuple of 2 arrays", "has_aux=True"]),
        (lambda w, x: x * w, jnp.ones((2, 3)), {"has_aux": True}, ["returned: float32[2, 3]", "or leave out has_aux"]),
        (
            lambda w, x: list(x),
            (x, x),
            {},
            ["got: a tuple of 2", "returned: a list of 2", "an x of the same structure"],
        ),
        (lambda w, x: x * w, x.astype(jnp.bfloat16), {"nested": 2}, ["x of bfloat16[3]", "x of float32[3]", "cast it"]),
        (lambda w, x: {"h": x["h"][:2]}, {"h": x}, {}, ["x['h'] of float32[3]", "x['h'] of float32[2]", "same shape"]),
        (lambda w, x: x, {"h": x, "mode": "train"}, {}, ["x['mode']: 'train'", "alike, after x"]),
    ]
    for layer, first, options, facts in wanted:
        with pytest.raises(OptionError, match="remat_layers") as caught:
            remat_layers(layer, w, first, **options)
        lines = said(caught.value, __file__)
        assert len(lines) == len(facts) + 1
        assert all(fact in line for fact, line in zip(facts, lines[1:], strict=True)), lines
    with pytest.raises(OptionError, match=r"\['mode'\]: no array"):
        remat_layers(lambda p, x: x, {"w": w, "mode": "train"}, x)
    both = remat_layers(lambda w, hs: (hs[0] * w, hs[1] + hs[0].sum()), 2 * w, (x, 0))  # 0 becomes what is added to it
    np.testing.assert_array_equal(both[0], jnp.full(3, 4.0))
    assert both[1] == 9
