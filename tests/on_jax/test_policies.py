"""Policies: what they keep, how they compose, and that one which matches nothing says so."""

import contextlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from roundpipe_jax import (
    OptionError,
    record,
    remat,
    replay,
    save_dots,
    save_either,
    save_for_recompute,
    save_policy,
)
from tests.on_jax.oracle import LANES
from tests.said import said

W, X = jnp.ones((4, 4)), jnp.ones((3, 4))
POLICIES = jax.checkpoint_policies


def layer(w: Any, x: Any) -> Any:
    (idx,) = save_for_recompute(jnp.argmax(x, -1))
    h = checkpoint_name(jnp.sin(x @ w), "h")
    return jnp.cos(h @ w) * idx[:, None]


def plain(w: Any, x: Any) -> Any:
    h = checkpoint_name(jnp.sin(x @ w), "h")
    return jnp.cos(h @ w)


def kept(f: Any) -> int:
    pull = jax.eval_shape(lambda w, x: jax.vjp(f, w, x)[1], W, X)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))


INPUTS, IDX, H = 4 * (16 + 12), 4 * 3, 4 * 12


def test_names_keep_what_they_name_on_top_of_the_slot() -> None:
    assert kept(remat(layer)) == INPUTS + IDX
    assert kept(remat(layer, policy=save_policy("h"))) == INPUTS + IDX + H
    assert kept(remat(plain, policy=POLICIES.save_only_these_names("h"))) == INPUTS + H


def test_dots() -> None:
    assert kept(remat(layer, policy=save_dots())) == INPUTS + IDX + 2 * H
    assert kept(remat(plain, policy=save_dots())) == kept(jax.checkpoint(plain, policy=POLICIES.dots_saveable))


def test_policies_compose_as_data() -> None:
    assert save_either(save_policy("a"), save_policy("b")) == save_policy("b", "a")
    both = save_either(save_policy("h"), save_dots())
    assert both == save_either(save_policy("h"), save_dots())
    assert hash(both) is not None
    assert kept(remat(plain, policy=both)) == INPUTS + 3 * H
    assert kept(jax.checkpoint(plain, policy=both)) == INPUTS + 3 * H


def test_a_layer_that_knows_no_phase_is_exactly_a_checkpoint() -> None:
    for options in ({}, {"prevent_cse": False}, {"policy": save_dots()}, {"prevent_cse": (True, False)}):
        ours, stock = (
            str(jax.make_jaxpr(jax.grad(lambda w, x, f=f: f(w, x).sum(), (0, 1)))(W, X))
            for f in (remat(plain, **options), jax.checkpoint(plain, **options))
        )
        assert ours.count("checkpoint[") == stock.count("checkpoint[")
        assert ours.count("dot_general[") == stock.count("dot_general[")
        assert ours.count("prevent_cse=True") == stock.count("prevent_cse=True")
        assert ours.count("custom_jvp") == 0


@pytest.mark.parametrize("way", [lambda f: f, jax.jit])
def test_a_name_that_matches_nothing_is_an_error(way: Any) -> None:
    for f in (layer, plain):
        step = way(jax.grad(lambda w, x, f=f: remat(f, policy=save_policy("h", "q"), label="one")(w, x).sum()))
        with pytest.raises(OptionError) as caught:
            step(W, X)
        assert said(caught.value, __file__)[:3] == [
            "layer 'one': the policy names 'q', and nothing in the layer is called that.",
            "  names in the layer: 'h'",
            "  way out: name the value by jax.ad_checkpoint.checkpoint_name(value, name), and use what that returns.",
        ]


def test_a_policy_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(OptionError, match="the policy keeps matrix products, and matches nothing in the layer"):
        jax.jit(remat(jnp.sin, policy=save_dots()))(X)
    with pytest.raises(OptionError, match="'q'"):
        jax.jit(remat(plain, policy=POLICIES.save_any_names_but_these("q")))(W, X)
    with pytest.raises(OptionError, match="'q'"):
        jax.jit(remat(plain, policy=save_either(save_dots(), save_policy("q"))))(W, X)
    jax.jit(remat(jnp.sin, policy=POLICIES.nothing_saveable))(X)


def test_a_policy_holds_in_a_replay() -> None:
    for policy, more in ((None, 0), (save_dots(), 2 * H), (save_policy("h"), H)):
        f = remat(layer, policy=policy, label="one")
        with record() as tape:
            f(W, X)

        def pull(tape: Any, w: Any, x: Any, f: Any = f) -> Any:
            def run(w: Any, x: Any) -> Any:
                with replay(tape):
                    return f(w, x)

            return jax.vjp(run, w, x)[1]

        leaves = jax.tree.leaves(jax.eval_shape(pull, tape, W, X))
        assert sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) == INPUTS + IDX + more


@pytest.mark.parametrize("lane", LANES)
def test_the_barrier_is_where_prevent_cse_says(lane: Any) -> None:
    def barred(flags: Any, replayed: bool) -> set[str]:
        def loss(tape: Any, y: Any, w: Any, x: Any) -> Any:
            closing_over = remat(lambda w, x: layer(w, x * y), prevent_cse=flags, mode=lane, label="one")
            with replay(tape) if replayed else contextlib.nullcontext():
                return closing_over(w, x).sum()

        with record() as tape:
            remat(layer, label="one")(W, X)
        text = jax.jit(jax.grad(loss, (1, 2, 3)), keep_unused=True).lower(tape, X, W, X).as_text()
        lines = [line for line in text.splitlines() if "optimization_barrier" in line]
        return {"tywx"[int(n)] for line in lines for n in re.findall(r"%arg(\d)", line)}

    for replayed in (False, True):
        everything = set("tywx" if replayed else "ywx")
        assert barred(True, replayed) == everything
        assert barred(False, replayed) == set()
        assert barred((True, False), replayed) == (everything if lane == "custom_vjp" else {"w"})
        assert barred((False, True), replayed) == (everything if lane == "custom_vjp" else {"x"})


def test_a_function_with_a_rule_may_have_products_in_its_derivative() -> None:
    @jax.custom_jvp
    def f(x: Any) -> Any:
        return jnp.sin(x)

    f.defjvp(lambda primals, dots: (f(*primals), dots[0] @ W))
    jax.jit(remat(lambda x: f(x), policy=save_dots()))(X)
    with pytest.raises(OptionError):
        jax.jit(remat(jnp.sin, policy=save_dots()))(X)


def test_what_remat3_would_ignore_is_refused() -> None:
    jax.config.update("jax_remat3", True)
    try:
        with pytest.raises(OptionError, match="a policy that offloads is ignored under JAX_REMAT3"):
            save_policy(offload="cpu")
        with pytest.raises(OptionError, match="layer 'one': this policy is ignored under JAX_REMAT3"):
            jax.jit(remat(plain, policy=save_dots(), label="one"))(W, X)
        none = POLICIES.save_only_these_names(), POLICIES.save_any_names_but_these()
        for policy in (POLICIES.everything_saveable, POLICIES.nothing_saveable, save_policy("h"), *none):
            jax.make_jaxpr(remat(plain, policy=policy))(W, X)
    finally:
        jax.config.update("jax_remat3", False)


def test_names_under_remat3() -> None:
    jax.config.update("jax_remat3", True)
    try:
        for name_it in (checkpoint_name, getattr(jax.ad_checkpoint, "checkpoint_name_fwd", checkpoint_name)):
            f = remat(lambda x, name_it=name_it: jnp.sin(name_it(jnp.sin(x), "h")), policy=save_policy("h"))
            jax.make_jaxpr(f)(X)
    finally:
        jax.config.update("jax_remat3", False)


def test_policies_reach_layers_that_save_in_inner_traces() -> None:
    def scanned(f: Any) -> Any:
        return lambda w, x: jax.lax.scan(lambda x, _: (f(w, x), None), x, None, length=2)[0]

    assert kept(remat(scanned(layer), policy=save_policy("h"))) == kept(remat(scanned(layer))) + 2 * H
    everything = kept(remat(scanned(layer), policy=POLICIES.everything_saveable))
    assert everything > kept(remat(scanned(layer), policy=save_dots())) > kept(remat(scanned(layer)))
