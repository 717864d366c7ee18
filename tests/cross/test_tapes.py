"""Decisions of one framework, replayed in the other (R13), both loaded in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import roundpipe_jax as rj
import roundpipe_torch as rt
from roundpipe_core import Tape, TapeError, record, replay, save_for_recompute
from roundpipe_core._backend import to_host
from roundpipe_core._host import HostArray

T, D, E, K, L = 16, 8, 6, 2, 3
RNG = np.random.default_rng(0)
GATES = [RNG.normal(size=(D, E)).astype("f4") for _ in range(L)]
EXPERTS = [(RNG.normal(size=(E, D, D)) / D).astype("f4") for _ in range(L)]
X = RNG.normal(size=(T, D)).astype("f4")
GATES[0][:, 1] = GATES[0][:, 0]  # two experts tie exactly, and the frameworks take another one


def torch_layer(gate: torch.Tensor, experts: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
    logits_TE = x_TD @ gate
    if rt.doing_recompute():
        (idx_TK,) = rt.get_recompute_data()
    else:
        idx_TK = logits_TE.detach().topk(K).indices
        rt.save_for_recompute(idx_TK)
    weights_TK = logits_TE.softmax(-1).gather(-1, idx_TK)
    return x_TD + (torch.einsum("td,tkde->tke", x_TD, experts[idx_TK]) * weights_TK[..., None]).sum(1)


def jax_layer(params: Any, x_TD: Any) -> Any:
    gate, experts = params
    logits_TE = x_TD @ gate
    if rj.doing_recompute():
        (idx_TK,) = rj.get_recompute_data()
    else:
        idx_TK = jax.lax.top_k(jax.lax.stop_gradient(logits_TE), K)[1]
        rj.save_for_recompute(idx_TK)
    weights_TK = jnp.take_along_axis(jax.nn.softmax(logits_TE), idx_TK, 1)
    return x_TD + (jnp.einsum("td,tkde->tke", x_TD, experts[idx_TK]) * weights_TK[..., None]).sum(1)


Result = tuple[Any, list[Any]]


def in_torch(tape: Tape | None = None) -> tuple[Result, Tape]:
    """Outputs and gradients, replaying `tape` or recording one."""
    params = [torch.tensor(w, requires_grad=True) for pair in zip(GATES, EXPERTS, strict=True) for w in pair]
    x = torch.tensor(X)
    with record() if tape is None else replay(tape) as tape:
        for gate, experts in zip(params[::2], params[1::2], strict=True):
            x = rt.checkpoint(torch_layer, gate, experts, x)
    x.sin().sum().backward()
    return (x.detach().numpy(), [p.grad.numpy() for p in params if p.grad is not None]), tape


def loop(params: Any, x: Any) -> Any:
    for pair in params:
        x = rj.remat(jax_layer)(pair, x)
    return x


def stack(params: Any, x: Any) -> Any:
    return rj.remat_layers(jax_layer, jax.tree.map(lambda *leaves: jnp.stack(leaves), *params), x)


def in_jax(model: Any, way: Any, tape: Tape | None = None) -> tuple[Result, Tape]:
    params = [(jnp.array(g), jnp.array(e)) for g, e in zip(GATES, EXPERTS, strict=True)]

    def loss(params: Any, x: Any, tape: Tape | None) -> Any:
        with record() if tape is None else replay(tape) as tape:
            y = model(params, x)
        return jnp.sin(y).sum(), (y, tape)

    (_, (y, tape)), slope = way(jax.value_and_grad(loss, has_aux=True))(params, jnp.array(X), tape)
    return (np.asarray(y), [np.asarray(leaf) for leaf in jax.tree.leaves(slope)]), tape


WAYS: dict[str, Callable[[Any], Any]] = {"eager": lambda f: f, "jit": jax.jit}


def agree(one: Result, two: Result) -> bool:
    distances = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(one[1], two[1], strict=True)]
    return bool(np.abs(one[0] - two[0]).max() < 1e-6 and max(distances) < 1e-5)


@pytest.mark.parametrize(("model", "way"), [(loop, jax.jit), (stack, jax.jit), (stack, lambda f: f)])
def test_a_mixture_of_experts_there_and_back(model: Any, way: Any) -> None:
    theirs, tape = in_torch()
    ours, other = in_jax(model, way)
    assert not agree(ours, theirs)  # the ties
    assert tape.entries()[0].shape == other.entries()[0].shape == (T, K)
    replayed, _ = in_jax(model, way, tape)
    assert agree(replayed, theirs)
    back, _ = in_torch(other)
    assert agree(back, ours)


def pick(values: Any) -> Any:
    """A JAX layer that only reads."""

    @rj.remat
    def layer(x: Any) -> Any:
        return x, *rj.get_recompute_data()

    return layer(values)


def replayed(tape: Tape, way: Any) -> Any:
    def run(x: Any, tape: Tape) -> Any:
        with replay(tape):
            return pick(x)

    return way(run)(jnp.ones(2), tape)[1]


def tape_of(tensor: Any) -> Tape:
    with record() as tape:
        rt.remat(lambda x: (save_for_recompute(tensor), x)[1])(torch.ones(2))
    return tape


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("held", ["tensors", "bytes"])
@pytest.mark.parametrize(
    ("dtype", "arrives"),
    [
        ("int64", "int32"),
        ("uint8", "int32"),
        ("int16", "int32"),
        ("bool", "bool"),
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
    ],
)
def test_dtypes_of_what_arrives(way: Any, held: str, dtype: str, arrives: str) -> None:
    tensor = torch.tensor([[0, 1], [3, 2]]).to(getattr(torch, dtype))
    tape = tape_of(tensor)
    if held == "bytes":  # as from a file
        tape = tape.mapped(to_host)
        assert isinstance(tape.entries()[0].value, HostArray)
    got = replayed(tape, way)
    assert got.dtype == arrives
    assert got.astype("float32").tolist() == tensor.float().tolist()


def test_integers_are_as_wide_as_jax_has_them() -> None:
    tape = tape_of(torch.tensor([2**32 + 7, 1]))
    for way in WAYS.values():
        with pytest.raises(TapeError, match="do not fit int32"):
            replayed(tape, way)
        with jax.enable_x64(True):
            got = replayed(tape, way)
            assert got.dtype == "int64"
            assert got.tolist() == [2**32 + 7, 1]


def test_what_the_layer_decides_itself_says_the_dtype() -> None:
    @rj.remat
    def layer(x: Any) -> Any:
        return x[rj.save_for_recompute(jnp.argsort(x).astype("uint8"))[0]]

    def run(x: Any, tape: Tape) -> Any:
        with replay(tape):
            return layer(x)

    x, tape = jnp.array([3.0, 1.0, 2.0]), tape_of(torch.tensor([0, 1, 2]))
    assert run(x, tape).tolist() == x.tolist()
    for values in ([0, 1, -1], [0, 1, 256]):
        with pytest.raises(TapeError, match="holds values that uint8 cannot"):
            run(x, tape_of(torch.tensor(values)))
    with pytest.raises(TapeError, match="cannot be seen while this is traced"):
        jax.jit(run)(x, tape)
    assert jax.jit(run)(x, tape.declare(below=3)).tolist() == x.tolist()


def test_conversion_is_kept_with_the_tape() -> None:
    tape = tape_of(torch.arange(5))
    [one], [two] = jax.tree.leaves(tape), jax.tree.leaves(tape)
    assert one is two
    tape.entries()[0].value.add_(1)  # a snapshot, not a view
    assert one.tolist() == [0, 1, 2, 3, 4]


def test_what_numpy_cannot_hold_is_refused_where_the_model_decides_in_numpy() -> None:
    with record() as tape:
        save_for_recompute(torch.ones(3).to_sparse())
    with pytest.raises(TapeError, match=r"the tape does not fit layer 'outside of layers'"), replay(tape):
        save_for_recompute(np.ones(3, np.float32))
