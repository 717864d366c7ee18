"""What torch.compile does to code of the other frontend, which torch's decisions pass through."""

from __future__ import annotations

import jax
import pytest
import torch

import roundpipe_jax  # noqa: F401
from roundpipe_torch import checkpoint, recompute_once, record, replay, save_for_recompute


@torch.compiler.disable
def drawn(x):
    return {"index": torch.randn_like(x).argsort(1)[:, :3]}


def once(x):
    found = recompute_once(drawn, x.detach())
    return x.gather(1, found["index"]).sin()


def saved(x):
    (found,) = save_for_recompute(drawn(x.detach()))
    return x.gather(1, found["index"]).sin()


@pytest.mark.parametrize("layer", [once, saved])
def test_a_decision_that_splits_a_compiled_graph(layer) -> None:
    compiled, x = torch.compile(layer, backend="aot_eager"), torch.rand(6, 6, requires_grad=True)
    for run in (compiled, lambda x: checkpoint(compiled, x)):
        y = run(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.allclose(grad, torch.where(torch.isin(x.sin(), y), x.cos(), 0))
        with record() as tape:
            y = run(x)
        with replay(tape):
            assert torch.equal(run(x), y)
    assert jax.numpy.arange(3).sum() == 3
