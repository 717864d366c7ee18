"""Layers for torch.compile, a backend that keeps the graphs it is given, and decisions that count themselves.

`decide` is an operator that answers otherwise each time it is asked, also in compiled code. So the number of decisions
is known whatever compiles the layer, and a backward that decides again has another gradient than the oracle: the same
layer, uncompiled, not checkpointed, and given the decisions that were made.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from roundpipe_torch import doing_recompute, get_recompute_data, recompute_once, save_for_recompute

D, K, E = 8, 2, 4  # width, chosen experts, experts

made: list[Tensor] = []
"""The decisions since `plain` or the test emptied it."""
given: list[Tensor] = []
"""What to answer instead of deciding."""


@torch.library.custom_op("roundpipe_tests::decide", mutates_args=())
def decide(x_TD: Tensor) -> Tensor:
    """K experts for each token: those of the largest features, moved on by one at each call."""
    if given:
        return given.pop(0).clone()
    made.append((x_TD[:, :E].topk(K).indices + len(made)) % E)
    return made[-1].clone()


@decide.register_fake
def _(x_TD: Tensor) -> Tensor:
    return x_TD.new_empty((x_TD.shape[0], K), dtype=torch.int64)


@torch.library.custom_op("roundpipe_tests::mix", mutates_args=())
def mix(x_TD: Tensor, idx_TK: Tensor) -> Tensor:
    """An activation that depends on the decision, and whose gradient needs `x_TD`. No C++ kernel under inductor."""
    return x_TD.sin() * (1 + idx_TK.sum(-1, keepdim=True))


@torch.library.custom_op("roundpipe_tests::mix_backward", mutates_args=())
def mix_backward(grad_TD: Tensor, x_TD: Tensor, idx_TK: Tensor) -> Tensor:
    return grad_TD * x_TD.cos() * (1 + idx_TK.sum(-1, keepdim=True))


mix.register_fake(lambda x_TD, idx_TK: torch.empty_like(x_TD))
mix_backward.register_fake(lambda grad_TD, x_TD, idx_TK: torch.empty_like(x_TD))
mix.register_autograd(
    lambda ctx, grad_TD: (mix_backward(grad_TD, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


WEIGHTS = [leaf(D, D, seed=1), leaf(D, D, seed=2)]


def experts(x_TD: Tensor, idx_TK: Tensor) -> Tensor:
    return mix(x_TD @ WEIGHTS[0], idx_TK) @ WEIGHTS[1]


def branch(x_TD: Tensor) -> Tensor:
    """The seed's style."""
    if doing_recompute():
        (idx_TK,) = get_recompute_data()
    else:
        idx_TK = decide(x_TD)
        save_for_recompute(idx_TK)
    return experts(x_TD, idx_TK)


def returned(x_TD: Tensor) -> Tensor:
    (idx_TK,) = save_for_recompute(decide(x_TD))
    return experts(x_TD, idx_TK)


def once(x_TD: Tensor) -> Tensor:
    return experts(x_TD, recompute_once(decide, x_TD))


STYLES = [branch, returned, once]


def step_of(function: Callable[..., Any], x_TD: Tensor, weights: list[Tensor] = WEIGHTS) -> list[Tensor]:
    """Output and gradients of one step."""
    out = function(x_TD)
    loss = out.square().sum() if isinstance(out, Tensor) else sum(part.square().sum() for part in out)
    return [*([out] if isinstance(out, Tensor) else out), *torch.autograd.grad(loss, [x_TD, *weights])]


def agrees(
    function: Callable[..., Any],
    uncompiled: Callable[..., Any],
    tokens: int,
    *,
    decisions: int = 1,
    used: int = 1,
    within: float = 0.0,
    weights: list[Tensor] = WEIGHTS,
) -> None:
    """Assert that a step by `function` decides so often, and gives what `uncompiled` does with the first `used`."""
    made.clear()
    got = step_of(function, leaf(tokens, D, seed=tokens), weights)
    assert len(made) == decisions, f"{len(made)} decisions were made in one step"
    given[:] = made[:used]
    want = step_of(uncompiled, leaf(tokens, D, seed=tokens), weights)
    assert not given, "the oracle did not use all decisions"
    for n, (ours, oracles) in enumerate(zip(got, want, strict=True)):
        same = torch.allclose(ours, oracles, rtol=within, atol=within) if within else torch.equal(ours, oracles)
        assert same, f"{n} differs by up to {(ours - oracles).abs().max()}"
        assert oracles.any(), f"{n} is zero, which proves nothing"


class Graphs:
    """A backend that compiles like "aot_eager" and keeps what it compiles."""

    def __init__(self) -> None:
        from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd

        self.forward: list[torch.fx.GraphModule] = []
        self.backward: list[torch.fx.GraphModule] = []

        def keep(graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
            return lambda graph, inputs: (graphs.append(graph), make_boxed_func(graph))[1]

        self.backend = aot_autograd(
            fw_compiler=keep(self.forward),
            bw_compiler=keep(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return torch.compile(function, backend=self.backend, **options)

    def forward_ops(self) -> list[str]:
        return [name for graph in self.forward for name in operators(graph)]

    def backward_ops(self) -> list[str]:
        return [name for graph in self.backward for name in operators(graph)]


def operators(graph: torch.fx.GraphModule) -> list[str]:
    """The operators of a graph, without their overloads."""
    return [str(node.target).rpartition(".")[0] for node in graph.graph.nodes if node.op == "call_function"]


compiles = [
    pytest.mark.usefixtures("fresh_compiler"),
    # torch warns about itself
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
needs_a_compiler = pytest.mark.skipif(
    (shutil.which("g++") is None and shutil.which("clang++") is None)
    or importlib.util.find_spec("torch._inductor") is None,
    reason="inductor needs a C++ compiler",
)
