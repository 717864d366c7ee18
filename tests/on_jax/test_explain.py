"""explain: exact bytes and FLOPs, nothing run."""

from typing import Any

import jax
import jax.numpy as jnp

from roundpipe_jax import explain, remat, remat_layers, save_dots, save_for_recompute

T, D, L = 16, 8, 5
W, X = jax.ShapeDtypeStruct((D, D), jnp.float32), jax.ShapeDtypeStruct((T, D), jnp.float32)
PRODUCT = 2 * T * D * D


def layer(w: Any, x: Any) -> Any:
    (idx,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x), -1))
    return jnp.tanh(jnp.tanh(x @ w) @ w) * idx[:, None]


def test_bytes_by_source_and_flops() -> None:
    f = remat(layer, policy=save_dots(), label="moe")
    [cost] = explain(lambda w, x: f(w, x).sum(), W, X).layers
    assert (cost.label, cost.calls) == ("moe", 1)
    assert cost.inputs == 4 * (D * D + T * D)
    assert cost.slot == 4 * T
    assert cost.policy == 2 * 4 * T * D
    assert cost.kept == cost.inputs + cost.slot + cost.policy
    assert cost.recomputed_flops == 0
    [cost] = explain(lambda w, x: remat(layer)(w, x).sum(), W, X).layers
    assert cost.policy == 0
    assert cost.recomputed_flops == 2 * PRODUCT
    assert cost.without_remat > cost.kept


def test_layers_in_a_scan_are_counted_and_tags_are_slots() -> None:
    stacked = jax.ShapeDtypeStruct((L, D, D), jnp.float32)
    [cost] = explain(lambda w, x: remat_layers(layer, w, x, label="moe").sum(), stacked, X).layers
    assert (cost.calls, cost.slot, cost.recomputed_flops) == (L, L * 4 * T, L * 2 * PRODUCT)
    jitted = remat(lambda w, x: jax.jit(layer)(w, x), label="tagged")
    [cost] = explain(lambda w, x: jitted(w, x).sum(), W, X).layers
    assert (cost.slot, cost.inputs) == (4 * T, 4 * (D * D + T * D))


def test_equal_layers_share_a_line_and_a_hint_says_where_remat_saves_nothing() -> None:
    add = remat(lambda x: x + 1, label="add")
    f = remat(layer, label="moe")
    found = explain(lambda w, x: add(f(w, add(f(w, x)))).sum(), W, X)
    assert [(cost.label, cost.calls) for cost in found.layers] == [("moe", 2), ("add", 2)]
    assert [cost.hint for cost in found.layers] == ["", "remat saves nothing here: leave it out"]
    table = str(found).splitlines()
    assert table[0].split()[:3] == ["layer", "calls", "inputs"]
    assert table[1].split()[:4] == ["moe", "2", "1.536", "kB"]
    assert table[2].endswith("leave it out")


def test_branches_keys_and_a_slot_that_is_too_large() -> None:
    def branching(w: Any, x: Any) -> Any:
        key, mask = save_for_recompute(jax.random.key(0), x > 0)
        x = x + 0 * jax.random.normal(key, x.shape)
        y = jax.lax.cond(x.sum() > 0, lambda x: jnp.sin(x @ w @ w), lambda x: jnp.cos(x @ w), x)
        return jnp.tanh(y) * mask

    [cost] = explain(lambda w, x: remat(branching)(w, x).sum(), W, X).layers
    assert (cost.slot, cost.recomputed_flops) == (8 + T * D, 2 * PRODUCT)
    assert cost.hint == ""

    def masks(x: Any) -> Any:
        (many,) = save_for_recompute(jax.lax.stop_gradient(x)[:, None] > jnp.zeros((12, 1)))
        for _ in range(3):
            x = jnp.sin(x) * many[:, 0]
        return x

    [cost] = explain(lambda x: remat(masks)(x).sum(), X).layers
    assert (cost.slot, cost.hint.partition(":")[0]) == (12 * T * D, "the slot is most of what is kept")


def test_nothing_is_run() -> None:
    def layer(x: Any) -> Any:
        return x * jax.pure_callback(lambda: 1 / 0, jax.ShapeDtypeStruct((), jnp.float32))

    assert len(explain(remat(layer), X).layers) == 1
