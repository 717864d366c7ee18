"""Policies: what they keep, how they compose, and that one which matches nothing says so."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from roundpipe_jax import OptionError, remat, save_dots, save_either, save_for_recompute, save_policy

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
        assert str(caught.value).splitlines()[:3] == [
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


def test_policies_reach_layers_that_save_in_inner_traces() -> None:
    def scanned(f: Any) -> Any:
        return lambda w, x: jax.lax.scan(lambda x, _: (f(w, x), None), x, None, length=2)[0]

    assert kept(remat(scanned(layer), policy=save_policy("h"))) == kept(remat(scanned(layer))) + 2 * H
