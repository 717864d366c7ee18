"""torch.compile inside and around a region: right in every style, decided once, no graph too many."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from roundpipe_torch import checkpoint, doing_recompute, get_recompute_data, recompute_once, save_for_recompute
from tests.on_torch.compiled import (
    STYLES,
    WEIGHTS,
    D,
    Graphs,
    K,
    agrees,
    branch,
    compiles,
    decide,
    experts,
    leaf,
    made,
    needs_a_compiler,
    returned,
    step_of,
)

pytestmark = compiles


def compiled(function: Any, backend: Any, **options: Any) -> Any:
    return torch.compile(function, backend=backend, **options)


def inside(layer: Any, backend: Any) -> Any:
    return functools.partial(checkpoint, compiled(layer, backend))


def around(layer: Any, backend: Any) -> Any:
    return compiled(lambda x: checkpoint(layer, x), backend, fullgraph=True)


def around_in_parts(layer: Any, backend: Any) -> Any:
    """The graph ends in the middle of the layer."""

    def parted(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        torch._dynamo.graph_break()
        return y @ WEIGHTS[0]

    return compiled(lambda x: checkpoint(parted, x), backend)


PLACES = [inside, around, around_in_parts]
CASES = [
    *(("aot_eager", layer, place) for layer in STYLES for place in PLACES),
    # One style shows it: after the same graphs, inductor takes long. All styles in one graph of its are below.
    *(pytest.param("inductor", branch, place, marks=needs_a_compiler) for place in PLACES),
]


@pytest.mark.parametrize(("backend", "layer", "place"), CASES)
def test_every_style_is_right_in_every_place(place: Any, layer: Any, backend: str) -> None:
    step = place(layer, backend)
    oracle = (lambda x: layer(x) @ WEIGHTS[0]) if place is around_in_parts else layer
    # What is handed to save_for_recompute is computed in both phases where both run this line (R2).
    decisions = 2 if layer is returned and place is not around else 1
    within = 0.0 if backend == "aot_eager" else 1e-4

    for tokens in (5, 5, 9):
        agrees(step, oracle, tokens, decisions=decisions, within=within)
    graphs = counters["stats"]["unique_graphs"]
    for tokens in (9, 5, 20):
        agrees(step, oracle, tokens, decisions=decisions, within=within)

    assert counters["stats"]["unique_graphs"] == graphs, "it is compiled again in later steps"
    assert place is not around or graphs == 2  # one for 5 tokens, one for any number


@pytest.mark.parametrize("layer", STYLES)
def test_no_decision_is_in_the_backward_graph(layer: Any) -> None:
    graphs = Graphs()

    agrees(graphs.compile(lambda x: checkpoint(layer, x), fullgraph=True), layer, 5)

    assert graphs.forward_ops().count("roundpipe_tests.decide") == 1
    assert "roundpipe_tests.decide" not in graphs.backward_ops()
    assert graphs.backward_ops().count("aten.mm") == 5, "four for the gradients and one that is computed again"
    assert not [name for name in graphs.forward_ops() if name.startswith("roundpipe.")]


def test_the_count_of_decisions_can_fail() -> None:
    def forgetful(x: torch.Tensor) -> torch.Tensor:
        return experts(x, decide(x))

    graphs = Graphs()
    made.clear()
    step_of(graphs.compile(lambda x: checkpoint(forgetful, x), fullgraph=True), leaf(5, D))

    assert len(made) == 2
    assert "roundpipe_tests.decide" in graphs.backward_ops()


def test_the_forward_keeps_its_inputs_and_the_decision_and_nothing_else() -> None:
    graphs = Graphs()
    step_of(graphs.compile(lambda x: checkpoint(branch, x), fullgraph=True), leaf(5, D))

    (results,) = graphs.forward[0].graph.find_nodes(op="output")[0].args
    kept = [node for node in results[1:] if node.op != "placeholder"]

    assert [(list(node.meta["val"].shape), node.meta["val"].dtype) for node in kept] == [([5, K], torch.int64)]


@needs_a_compiler
@pytest.mark.timeout(400)  # the C++ compiler's time, where its results are not cached
def test_generated_kernels_keep_the_decisions_too() -> None:
    """Three layers of fused softmax, top-k, gather and tanh in one graph."""
    weights = [leaf(D, 4, seed=3), leaf(D, D, seed=4)]

    def expert(x: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        gate = (x @ weights[0]).softmax(-1).gather(-1, idx)
        return (x @ weights[1]).tanh().sin() * gate.sum(-1, keepdim=True) * (1 + idx.sum(-1, keepdim=True))

    def route(x: torch.Tensor) -> torch.Tensor:
        return (x @ weights[0]).softmax(-1).topk(K).indices

    def seeds(x: torch.Tensor) -> torch.Tensor:
        if doing_recompute():
            (idx,) = get_recompute_data()
        else:
            idx = route(x)
            save_for_recompute(idx)
        return expert(x, idx)

    def model(way: Any, x: torch.Tensor) -> torch.Tensor:
        x = way(seeds, x)
        x = way(lambda x: expert(x, save_for_recompute(route(x))[0]), x)
        return way(lambda x: expert(x, recompute_once(route, x)), x)

    step = torch.compile(functools.partial(model, checkpoint), fullgraph=True, dynamic=True)

    for tokens in (5, 9):
        got = step_of(step, leaf(tokens, D), weights)
        want = step_of(functools.partial(model, lambda f, x: f(x)), leaf(tokens, D), weights)
        for ours, oracles in zip(got, want, strict=True):
            torch.testing.assert_close(ours, oracles, rtol=1e-3, atol=1e-4)


@pytest.mark.cuda
def test_cuda_graphs_replay_the_decisions() -> None:
    """`mode="reduce-overhead"` replays the same memory in each step: a decision must outlive its own step only."""
    weights = [leaf(D, 4, seed=3).detach().cuda().requires_grad_(), leaf(D, D, seed=4).detach().cuda().requires_grad_()]

    def routed(x: torch.Tensor) -> torch.Tensor:
        idx = recompute_once(lambda: (x @ weights[0]).topk(K).indices)
        gate = (x @ weights[0]).softmax(-1).gather(-1, idx)
        return (x @ weights[1]).tanh() * gate.sum(-1, keepdim=True)

    step = torch.compile(lambda x: checkpoint(routed, x), mode="reduce-overhead", fullgraph=True)
    for seed in range(5):
        x = leaf(64, D, seed=seed).detach().cuda().requires_grad_()
        want = step_of(routed, x, weights)
        torch.compiler.cudagraph_mark_step_begin()
        for ours, oracles in zip(step_of(step, x, weights), want, strict=True):
            torch.testing.assert_close(ours, oracles, rtol=1e-3, atol=1e-4)
