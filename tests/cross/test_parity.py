"""Layers written once, run in torch and in JAX with one tape: loss, outputs and all gradients agree (R13).

T tokens, D features, E experts, K chosen experts, C capacity of an expert.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import roundpipe_jax
import roundpipe_torch
from roundpipe_core import OptionError, ParityError, Tape, parity
from roundpipe_core.parity import Comparison
from roundpipe_torch import recompute_once, record, replay, save_for_recompute

T, D, E, K, C = 24, 8, 6, 2, 5

TORCH = SimpleNamespace(
    remat=roundpipe_torch.remat,
    stop=lambda x: x.detach(),
    topk=lambda x, k: torch.topk(x, k).indices,
    nonzero=lambda x: torch.nonzero(x)[:, 0],
    softmax=lambda x: x.softmax(-1),
    sigmoid=torch.sigmoid,
    tanh=torch.tanh,
    einsum=torch.einsum,
    gather=lambda x, idx: x.gather(-1, idx),
    one_hot=lambda idx: torch.nn.functional.one_hot(idx, E),
    cumsum=lambda x: x.cumsum(0),
    total=lambda x, axis: x.sum(axis),
    uniform=lambda: torch.rand(T, D),
    cast=lambda x, like: x.to(like.dtype),
    branch=lambda flag, yes, no, x: yes(x) if flag else no(x),
)
JAX = SimpleNamespace(
    remat=roundpipe_jax.remat,
    stop=jax.lax.stop_gradient,
    topk=lambda x, k: jax.lax.top_k(x, k)[1],
    nonzero=lambda x: jnp.nonzero(x)[0],
    softmax=lambda x: jax.nn.softmax(x, -1),
    sigmoid=jax.nn.sigmoid,
    tanh=jnp.tanh,
    einsum=jnp.einsum,
    gather=lambda x, idx: jnp.take_along_axis(x, idx, -1),
    one_hot=lambda idx: jax.nn.one_hot(idx, E, dtype=jnp.int32),
    cumsum=lambda x: jnp.cumsum(x, 0),
    total=lambda x, axis: x.sum(axis),
    uniform=lambda: jax.random.uniform(jax.random.key(7), (T, D)),
    cast=lambda x, like: x.astype(like.dtype),
    branch=lambda flag, yes, no, x: yes(x) if flag else no(x),
)

Layer = Callable[[Any, dict[str, Any], Any], Any]


def mixed(ops: Any, w: dict[str, Any], x_TD: Any, idx_TK: Any, weights_TK: Any) -> Any:
    hidden_TKD = ops.tanh(ops.einsum("td,tkde->tke", x_TD, w["experts"][idx_TK]))
    return ops.total(weights_TK[..., None] * hidden_TKD, 1)


def top1(ops: Any, w: dict[str, Any], x_TD: Any) -> Any:
    probs_TE = ops.softmax(x_TD @ w["gate"])
    (idx_TK,) = save_for_recompute(ops.topk(ops.stop(probs_TE), 1))
    return x_TD + mixed(ops, w, x_TD, idx_TK, ops.gather(probs_TE, idx_TK))


def top2(ops: Any, w: dict[str, Any], x_TD: Any) -> Any:
    probs_TE = ops.softmax(x_TD @ w["gate"])
    idx_TK = recompute_once(lambda: ops.topk(ops.stop(probs_TE), K))
    weights_TK = ops.gather(probs_TE, idx_TK)
    return x_TD + mixed(ops, w, x_TD, idx_TK, weights_TK / ops.total(weights_TK, -1)[..., None])


def sigmoid_with_bias(ops: Any, w: dict[str, Any], x_TD: Any) -> Any:
    """The bias balances the load: it decides, and does not weigh."""
    scores_TE = ops.sigmoid(x_TD @ w["gate"])
    (idx_TK,) = save_for_recompute(ops.topk(ops.stop(scores_TE + w["bias"]), K), name="experts")
    weights_TK = ops.gather(scores_TE, idx_TK)
    return x_TD + mixed(ops, w, x_TD, idx_TK, weights_TK / ops.total(weights_TK, -1)[..., None])


def shared_expert(ops: Any, w: dict[str, Any], x_TD: Any) -> Any:
    return top2(ops, w, x_TD) + ops.tanh(x_TD @ w["shared"])


def capacity(ops: Any, w: dict[str, Any], x_TD: Any) -> Any:
    """What comes after an expert is full is dropped."""
    probs_TE = ops.softmax(x_TD @ w["gate"])
    idx_TK = ops.topk(ops.stop(probs_TE), 1)
    place_T = ops.total(ops.cumsum(ops.one_hot(idx_TK[:, 0])) * ops.one_hot(idx_TK[:, 0]), -1)
    plan = save_for_recompute({"idx": idx_TK, "kept": place_T <= C})[0]
    weights_TK = ops.gather(probs_TE, plan["idx"]) * ops.cast(plan["kept"], x_TD)[:, None]
    return x_TD + mixed(ops, w, x_TD, plan["idx"], weights_TK)


def sparse(ops: Any, w: dict[str, Any], x_TD: Any) -> Any:
    rows = recompute_once(lambda: ops.nonzero(ops.stop(ops.total(x_TD, -1)) > 0))
    return ops.total(ops.tanh(x_TD[rows] @ w["shared"]), 0) + x_TD


def conditional(ops: Any, w: dict[str, Any], x_TD: Any) -> Any:
    flag = recompute_once(lambda: bool(ops.stop(x_TD[0, 0]) > 0))
    return ops.branch(flag, lambda x: ops.tanh(x @ w["shared"]), lambda x: x @ w["shared"], x_TD)


def dropout(ops: Any, w: dict[str, Any], x_TD: Any) -> Any:
    keep_TD = recompute_once(lambda: ops.uniform() > 0.3)
    return ops.tanh(x_TD @ w["shared"]) * ops.cast(keep_TD, x_TD)


def nested(ops: Any, w: dict[str, Any], x_TD: Any) -> Any:
    inner = ops.remat(lambda w, x: top2(ops, w, x), label="inner")
    return inner(w, inner(w, x_TD))


TRACEABLE = [top1, top2, sigmoid_with_bias, shared_expert, capacity, dropout, nested]
LAYERS = [*TRACEABLE, sparse, conditional]


def loss(ops: Any, layer: Layer) -> Callable[..., Any]:
    def stack(w: dict[str, Any], x_TD: Any) -> Any:
        block = ops.remat(lambda w, x: layer(ops, w, x))
        out = block(w, block(w, x_TD))
        return ops.total((out * out).reshape(-1), 0), {"out": ops.stop(out)}

    return stack


def case(dtype: str, *, ties: bool = False) -> tuple[dict[str, Any], Any]:
    rng = np.random.default_rng(0)
    w = {
        "gate": rng.normal(size=(D, E)),
        "experts": rng.normal(size=(E, D, D)) / D,
        "shared": rng.normal(size=(D, D)) / D,
        "bias": rng.normal(size=E) / 10,
    }
    x = rng.normal(size=(T, D))
    if ties:  # pairs of experts with the same scores for every token
        w["gate"][:, ::2] = w["gate"][:, 1::2]
        w["bias"][::2] = w["bias"][1::2]
    kind = getattr(torch, dtype)
    return {name: torch.tensor(array).to(kind) for name, array in w.items()}, torch.tensor(x).to(kind)


def limits(dtype: str) -> dict[str, Any]:
    if dtype == "bfloat16":
        return {"rtol": 3e-2}
    return {"rtol": 1e-5, "limits": {"loss": 1e-6, "output ['out']": 1e-6}}


@pytest.mark.parametrize(
    ("frameworks", "dtype", "ties"),
    [(("torch", "jax"), "float32", True), (("jax", "torch"), "bfloat16", False)],
    ids=["torch-jax-float32", "jax-torch-bfloat16"],
)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_port(frameworks: tuple[str, str], layer: Layer, dtype: str, ties: bool) -> None:
    sides = {"torch": loss(TORCH, layer), "jax": loss(JAX, layer)}
    weights, x = case(dtype, ties=ties)
    parity.check(
        sides[frameworks[0]], sides[frameworks[1]], weights, [x], frameworks=frameworks, **limits(dtype)
    ).raise_if_apart()


def test_without_the_tape_ties_tell_the_frameworks_apart() -> None:
    weights, x = case("float32", ties=True)
    comparison = parity.check(loss(TORCH, top1), loss(JAX, top1), weights, [x], replayed=False)
    assert not comparison.close
    assert comparison.tapes is not None
    one, two = (tape.entries()[0].value for tape in comparison.tapes)
    assert (one.numpy() != np.asarray(two)).any()
    with pytest.raises(ParityError, match=r"arrays are further apart than allowed, the first 'loss'[\s\S]*<-- apart"):
        comparison.raise_if_apart()


# ------------------------------------------------------------------------------------- under jit


def in_torch(layer: Layer, weights: Any, x: Any, tape: Tape) -> dict[str, Any]:
    own = {name: array.clone().requires_grad_() for name, array in parity.converted("torch", weights).items()}
    with replay(tape):
        value, aux = loss(TORCH, layer)(own, parity.converted("torch", x))
    value.backward()
    return {"loss": value.detach(), **aux, **{name: array.grad for name, array in own.items()}}


def in_jit(layer: Layer, weights: Any, x: Any, tape: Tape | None) -> tuple[dict[str, Any], Tape]:
    @jax.jit
    def step(w: Any, x: Any, tape: Tape | None) -> Any:
        def value(w: Any) -> Any:
            with record() if tape is None else replay(tape) as used:
                value, aux = loss(JAX, layer)(w, x)
            return value, (aux, used)

        (result, (aux, used)), slopes = jax.value_and_grad(value, has_aux=True)(w)
        return result, aux, slopes, used

    result, aux, slopes, used = step(parity.converted("jax", weights), parity.converted("jax", x), tape)
    return {"loss": result, **aux, **slopes}, used


def near(one: dict[str, Any], two: dict[str, Any], dtype: str) -> Comparison:
    used = {name: grad for name, grad in one.items() if grad is not None}
    return parity.compare(used, {name: two[name] for name in used}, rtol=limits(dtype)["rtol"]).raise_if_apart()


@pytest.mark.parametrize(
    ("layer", "dtype"), [*((layer, "float32") for layer in TRACEABLE), (capacity, "bfloat16")]
)  # the one whose decision is cast to the dtype of the layer
def test_torch_replays_what_jit_recorded_and_the_other_way(layer: Layer, dtype: str) -> None:
    weights, x = case(dtype, ties=True)
    jitted, tape = in_jit(layer, weights, x, None)
    near(in_torch(layer, weights, x, tape), jitted, dtype)
    with torch.no_grad(), record() as tape:
        loss(TORCH, layer)(weights, x)
    again, _ = in_jit(layer, weights, x, tape)
    near(in_torch(layer, weights, x, tape), again, dtype)


def test_what_cannot_be_compared_is_infinitely_far() -> None:
    here = {"none": None, "shape": torch.ones(3), "other": torch.ones(2), "text": "a"}
    there = {"none": None, "shape": jnp.ones(4), "other": "b", "text": "a", "more": jnp.ones(1)}
    comparison = parity.compare(here, there, limits={"shape": float("inf")})

    assert {row.name: row.distance for row in comparison.rows} == {
        "none": 0.0, "shape": np.inf, "other": np.inf, "text": np.inf, "more": np.inf,
    }  # fmt: skip
    assert [row.name for row in comparison.rows if row.close] == ["none", "shape"]
    with pytest.raises(OptionError, match="no frontend 'numpy' is imported") as caught:
        parity.converted("numpy", [1])
    assert 'name "torch" or "jax"' in str(caught.value)


def test_arrays_of_numpy_and_numbers_are_compared_too() -> None:
    for one, two in itertools.product([torch.tensor, jnp.asarray, np.array, np.float32, float], repeat=2):
        same, apart = parity.compare({"a": one(2.0), "b": one(2.0)}, {"a": two(2.0), "b": two(3.0)}).rows
        assert (same.distance, apart.distance) == (0.0, 0.5)
    for one, two in (1, 10**400), (0.5, Decimal(1)):  # of kinds that cannot be subtracted, or beyond all floats
        assert parity.compare({"a": one}, {"a": two}).rows[0].distance == np.inf


def test_what_jax_cannot_hold_is_compared_in_torch() -> None:
    wide = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
    for one, two in [(jnp.ones(2), wide), (wide, jnp.ones(2)), (wide.numpy(), np.ones(2)), (wide, wide.tolist())]:
        (row,) = parity.compare({"x": one}, {"x": two}).rows
        assert row.distance == (np.inf if isinstance(two, list) else pytest.approx(1e-12 / np.sqrt(2), rel=1e-3))


def test_equal_infinities_are_no_distance() -> None:
    """Scores that a mask has put to minus infinity."""
    for one, two in itertools.product([torch.tensor, jnp.asarray, np.array], repeat=2):
        row = {"masked": [3.0, -np.inf, 4.0], "otherwise": [3.0, -np.inf], "nan": [np.nan, -np.inf]}
        there = {"masked": [3.0, -np.inf, 3.0], "otherwise": [-np.inf, 3.0], "nan": [np.nan, -np.inf]}
        rows = parity.compare({k: one(v) for k, v in row.items()}, {k: two(v) for k, v in there.items()}).rows
        assert [row.distance for row in rows[:2]] == [0.2, np.inf]
        assert np.isnan(rows[2].distance)
    assert parity.compare({"loss": -np.inf}, {"loss": -np.inf}).close


def test_a_limit_for_no_row_is_told() -> None:
    with pytest.raises(OptionError, match=r"limits= has 'los', which is no row(?s:.)*rows: 'loss', 'y'\n"):
        parity.compare({"loss": 1.0}, {"loss": 1.0, "y": 2.0}, limits={"los": 0.0, "y": 1.0})


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda x: x, r"float32\[3\]"),
        (lambda x: [x.sum(), x], "list"),
        (lambda x: (x.sum(), x, x), "tuple"),
        (lambda x: None, "NoneType"),
        (lambda x: 3.0, "float"),
        (lambda x: x.sum() > 0, r"bool\[\]"),
    ],
)
@pytest.mark.parametrize("frameworks", [("torch", "jax"), ("jax", "torch")])
def test_what_is_no_loss_is_told(frameworks: tuple[str, str], result: Any, said: str) -> None:
    for functions in (result, lambda x: x.sum()), (lambda x: x.sum(), result):
        first, second = (lambda w, x, f=f: f(w["a"]) for f in functions)
        with pytest.raises(OptionError, match=rf"the function of (torch|jax) gives {said} as its loss\."):
            parity.check(first, second, {"a": np.ones(3, "float32")}, [None], frameworks=frameworks)


@pytest.mark.parametrize("frameworks", ["torch", ("torch",), ("torch", "jax", "torch")])
def test_frameworks_are_two(frameworks: Any) -> None:
    with pytest.raises(OptionError, match=r"frameworks= is .*, where the two sides have one each") as caught:
        parity.check(torch.sum, jnp.sum, np.ones(2), frameworks=frameworks)
    assert str(caught.value).splitlines()[-1] == '  way out: frameworks=("torch", "jax"), the original first.'


@pytest.mark.parametrize("frameworks", [("torch", "jax"), ("jax", "torch")])
def test_gradients_of_complex_weights(frameworks: Any) -> None:
    """JAX's is the conjugate of torch's."""
    losses = {
        "torch": lambda w, x: ((w["w"] * x).abs() ** 3).sum() + w["w"].imag.sum(),
        "jax": lambda w, x: (jnp.abs(w["w"] * x) ** 3).sum() + w["w"].imag.sum(),
    }
    weights = {"w": np.array([1 + 2j, 3 - 1j, 0.5j], "complex64")}
    one, two = (losses[framework] for framework in frameworks)
    found = parity.check(one, two, weights, [np.full(3, 0.5j, "complex64")], frameworks=frameworks)
    assert [row.name for row in found.raise_if_apart().rows] == ["loss", "gradient of ['w']"]


def test_a_loss_without_gradient_has_a_gradient_of_zeros() -> None:
    check = parity.check(
        lambda w, x: torch.tensor(1.0), lambda w, x: jnp.asarray(1.0) + w["a"].sum(), {"a": np.ones(3, "float32")}, [0]
    )
    assert [(row.name, row.distance) for row in check.rows] == [("loss", 3.0), ("gradient of ['a']", np.sqrt(3))]


def test_parameters_of_a_model_are_weights() -> None:
    model = torch.nn.Linear(3, 2)

    check = parity.check(
        lambda w, x: (x @ w["weight"].T + w["bias"]).square().sum(),
        lambda w, x: jnp.square(x @ w["weight"].T + w["bias"]).sum(),
        dict(model.named_parameters()),
        [torch.ones(4, 3)],
    ).raise_if_apart()

    assert [row.name for row in check.rows] == ["loss", "gradient of ['weight']", "gradient of ['bias']"]
    assert model.weight.grad is None
