"""Offload: what is in which memory, read off the types of a program and the arrays of an eager step; gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from roundpipe_jax import Offload, OptionError, explain, keep, remat, remat_layers, save_either, save_for_recompute
from roundpipe_jax import _offload as module
from tests.on_jax.oracle import LANES, same
from tests.said import said

T, D, L = 4, 2, 3
W, X = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(((D, D), (T, D))))
STACKED = jnp.stack([W] * L)
ALL = Offload(min_bytes=0, inputs=(1,), kept=True)
SLOT = Offload(min_bytes=0, kept=True)
MOVED = [f"float32[{T},{D}]", f"float32[{T},{D}]", f"int32[{T}]"]  # the input, the output of the product, the order


def ordered(x: Any) -> Any:
    return jnp.argsort(jax.lax.stop_gradient(x[:, 0]))


def layer(w: Any, x: Any) -> Any:
    (order,) = save_for_recompute(ordered(x))
    return jnp.sin(keep(jnp.matmul, jnp.cos(x)[order], w))


def bare(w: Any, x: Any) -> Any:
    return jnp.sin(jnp.cos(x)[ordered(x)] @ w)


def step(f: Any) -> Any:
    return jax.grad(lambda w, x: (f(w, x) ** 2).sum(), (0, 1))


def residuals(f: Any, *args: Any) -> tuple[list[str], list[str]]:
    """Types of what lives from forward to backward: on the host, on the device."""
    traced = jax.jit(lambda *args: jax.tree.leaves(jax.vjp(f, *args)[1])).trace(*args)
    kinds = sorted(str(aval) for aval in traced.jaxpr.out_avals)
    return [kind.replace("<host>", "") for kind in kinds if "<host>" in kind], [k for k in kinds if "<host>" not in k]


def moves(f: Any, *args: Any) -> tuple[int, int]:
    """Copies to the host and back in the program as it is compiled for a GPU."""
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return text.count('placement = "pinned_host"'), text.count('placement = "device"')


@pytest.mark.parametrize("lane", LANES)
def test_saves_inputs_and_kept_outputs_are_on_the_host(lane: Any) -> None:
    f = remat(layer, offload=ALL, mode=lane)
    assert residuals(f, W, X)[0] == MOVED
    assert moves(step(f), W, X) == (3, 3)
    want = step(bare)(W, X)
    same(jax.jit(step(f))(W, X), want)
    same(step(f)(W, X), want)


def test_an_eager_step_holds_them_there() -> None:
    _, pull = jax.vjp(remat(layer, offload=ALL), W, X)
    places = sorted((leaf.sharding.memory_kind, str(jax.typeof(leaf).shape)) for leaf in jax.tree.leaves(pull))
    assert places == [
        ("device", "(2, 2)"),
        *(("pinned_host", shape) for shape in ("(4, 2)", "(4, 2)", "(4,)")),
    ]
    same(pull(jnp.ones((T, D))), jax.vjp(bare, W, X)[1](jnp.ones((T, D))))


@pytest.mark.parametrize("lane", LANES)
def test_higher_derivatives_pass_through_the_moves(lane: Any) -> None:
    f = remat(layer, offload=ALL, mode=lane)

    def twice(f: Any) -> Any:
        return jax.jit(jax.grad(lambda x: (step(f)(W, x)[1] ** 2).sum()))(X)

    same(twice(f), twice(bare), 1e-4)
    if lane == "checkpoint":
        same(jax.jit(jax.jacfwd(f, 1))(W, X), jax.jacfwd(bare, 1)(W, X))
        per_row = (jax.vmap(step(g), (None, 0))(W, X.reshape(2, T // 2, D)) for g in (f, bare))
        same(*per_row)


@pytest.mark.parametrize("groups", [None, 1])
def test_in_a_stack_of_layers(groups: int | None) -> None:
    def stack(w: Any) -> Any:
        return remat_layers(layer, w, X, nested=groups, offload=SLOT).sum()

    there, _ = residuals(stack, STACKED)
    lead = f"{L}," if groups is None else f"1,{L},"
    assert there == [f"float32[{lead}{T},{D}]", f"int32[{lead}{T}]"]
    want = jax.grad(lambda w: jax.lax.scan(lambda x, w: (bare(w, x), None), X, w)[0].sum())(STACKED)
    same(jax.jit(jax.grad(stack))(STACKED), want)
    [cost] = explain(stack, STACKED).layers
    assert cost.host == L * 4 * (T * D + T)


def scanned(f: Any) -> Any:
    return lambda w, x: jax.lax.scan(lambda x, _: (f(w, x), None), x, None, length=L)[0]


def both_ways(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, _: (layer(w, x), None), x, None, length=L)[0]


def test_one_function_with_several_options() -> None:
    for plan, count in ((SLOT, 2), (None, 0), (Offload(min_bytes=0), 1), (None, 0), (SLOT, 2)):
        f = remat(both_ways, offload=plan)
        assert len(residuals(f, W, X)[0]) == count
        nested = remat(lambda w, x, f=f: f(w, x))
        assert residuals(nested, W, X)[0] == []


def test_where_the_layer_saves_in_a_scan() -> None:
    f = remat(scanned(layer), offload=SLOT)
    assert residuals(f, W, X)[0] == [f"float32[{L},{T},{D}]", f"int32[{L},{T}]"]
    same(step(f)(W, X), step(scanned(bare))(W, X))


def test_only_what_was_asked_for_and_is_large_enough() -> None:
    nbytes = 4 * T * D
    for plan, there in (
        ("cpu", []),
        (Offload(min_bytes=4 * T), [f"int32[{T}]"]),
        (Offload(min_bytes=nbytes, kept=True), [f"float32[{T},{D}]"]),
        (Offload(min_bytes=nbytes + 1, kept=True, inputs=True), []),
        (Offload(min_bytes=0, saves=False, inputs=True), [f"float32[{D},{D}]", f"float32[{T},{D}]"]),
    ):
        assert residuals(remat(layer, offload=plan), W, X)[0] == there, plan


def test_a_save_can_say_otherwise() -> None:
    def saving(offload: bool | None) -> Any:
        def f(w: Any, x: Any) -> Any:
            (order,) = save_for_recompute(ordered(x), offload=offload)
            return jnp.sin(x[order] @ w)

        return f

    assert residuals(remat(saving(True)), W, X)[0] == [f"int32[{T}]"]
    assert residuals(remat(saving(False), offload=SLOT), W, X)[0] == []
    says = r"(?s)offload is one for all saves.*layer at: .*saves the unnamed slot: .*offload\.py:\d+"
    with pytest.raises(OptionError, match=says):
        step(remat(scanned(saving(True))))(W, X)


def test_inputs_of_a_layer_that_saves_nothing() -> None:
    def plain(w: Any, x: Any) -> Any:
        return jnp.sin(jnp.sin(x @ w) @ w)

    f = remat(plain, offload=ALL)
    assert residuals(f, W, X) == ([f"float32[{T},{D}]"], [f"float32[{D},{D}]"])
    same(step(f)(W, X), step(plain)(W, X))


def test_the_report_says_what_is_where() -> None:
    [cost] = explain(lambda w, x: remat(layer, offload=ALL)(w, x).sum(), W, X).layers
    assert (cost.host, cost.kept) == (4 * (2 * T * D + T), 4 * (2 * T * D + T + D * D))
    report = explain(lambda w, x: remat(layer)(w, x).sum(), W, X)
    assert report.layers[0].host == 0
    assert "on the host" in str(report)


def test_other_policies_are_kept() -> None:
    dots = jax.checkpoint_policies.dots_saveable
    f = remat(scanned(layer), offload=SLOT, policy=save_either(dots))
    there, here = residuals(f, W, X)
    assert there == [f"float32[{L},{T},{D}]", f"int32[{L},{T}]"]
    same(step(f)(W, X), step(scanned(bare))(W, X))
    assert here


def test_no_host_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_kinds", lambda: {"device"})
    with pytest.raises(OptionError, match="this backend has no host memory to offload to") as caught:
        step(remat(layer, offload=SLOT, label="moe"))(W, X)
    assert "layer 'moe'" in str(caught.value)
    assert "kinds of memory: device" in str(caught.value)
    step(remat(layer, offload="cpu"))(W, X)  # nothing is large enough to move


def test_wrong_options_are_errors() -> None:
    with pytest.raises(OptionError, match='offload must be "cpu", an Offload or None'):
        remat(layer, offload="gpu")
    with pytest.raises(OptionError) as caught:
        step(remat(layer, offload=Offload(inputs=(2,)), label="one"))(W, X)
    assert said(caught.value, __file__)[:3] == [
        "layer 'one': offload moves inputs (2,), and the call has fewer.",
        "  positional arguments: 2",
        "  way out: count from 0, or say inputs=True.",
    ]
    with pytest.raises(OptionError, match="without inputs"):
        step(remat(scanned(layer), offload=ALL))(W, X)
