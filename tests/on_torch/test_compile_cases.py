"""Regions in one compiled graph: nesting, arguments, data, randomness, state."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
from typing import Any

import pytest
import torch
import torch._dynamo
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint as torchs
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from roundpipe_torch import (
    checkpoint,
    checkpoint_sequential,
    doing_recompute,
    get_recompute_data,
    layer_scope,
    recompute_contexts,
    recompute_once,
    record,
    remat,
    replay,
    save_for_recompute,
)
from roundpipe_torch._decided import decided
from tests.on_torch.compiled import (
    WEIGHTS,
    D,
    E,
    Graphs,
    K,
    agrees,
    branch,
    compiles,
    decide,
    experts,
    given,
    leaf,
    made,
    once,
    operators,
    returned,
    step_of,
)

pytestmark = compiles
DECISIONS = {
    "aten.topk", "aten.sort", "aten.nonzero", "aten.bincount", "aten.argmax", "aten._local_scalar_dense",
    "roundpipe_tests.decide",
}  # fmt: skip
GATE = leaf(D, E, seed=5)


def plain(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def decided_once(scenario: Any, *, weights: list[torch.Tensor] = WEIGHTS, tokens: tuple[int, ...] = (5,)) -> Graphs:
    """Assert that `scenario` is right as one compiled graph, to the bit, and decides in its forward only."""
    graphs = Graphs()
    step = graphs.compile(functools.partial(scenario, checkpoint), fullgraph=True)
    for count in tokens:
        made.clear()
        torch.manual_seed(0)
        got = step_of(step, leaf(count, D), weights)
        decisions = list(made)
        torch.manual_seed(0)
        want = given_decisions(
            decisions, lambda count=count: step_of(functools.partial(scenario, plain), leaf(count, D), weights)
        )
        for n, (ours, oracles) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(ours, oracles), f"{n} differs by up to {(ours - oracles).abs().max()}"
            assert oracles.any(), f"{n} is zero, which proves nothing"
    assert DECISIONS & set(graphs.forward_ops())
    assert not DECISIONS & set(graphs.backward_ops())
    return graphs


def given_decisions(decisions: list[torch.Tensor], run: Any) -> Any:
    given[:] = decisions
    result = run()
    assert not given, "the oracle did not use all decisions"
    return result


def route(x: torch.Tensor) -> torch.Tensor:
    return (x @ GATE).topk(K).indices


# Regions


def test_regions_in_regions_and_side_by_side() -> None:  # R8
    def outer(way: Any, x: torch.Tensor) -> torch.Tensor:
        y = branch(x)
        return way(returned, y) * way(once, x.cos())

    def scenario(way: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = way(functools.partial(outer, way), x).sin()
        return x

    graphs = decided_once(scenario)

    assert operators(graphs.forward[0]).count("roundpipe_tests.decide") == 6


def test_arguments_of_every_kind() -> None:
    def layer(
        x: torch.Tensor, *, more: dict[str, list[torch.Tensor]], scale: float = 1.0, flags: tuple[bool, ...]
    ) -> Any:
        (idx,) = save_for_recompute(decide(x))
        return experts(x, idx) * scale + more["a"][0].sin(), [more["a"][0].cos()] * len(flags)

    def scenario(way: Any, x: torch.Tensor) -> torch.Tensor:
        y, rest = way(layer, x, more={"a": [x * 2]}, scale=0.5, flags=(True, False))
        return y + sum(rest)

    decided_once(scenario)


def test_layers_of_every_kind() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Parameter(leaf(D, D, seed=6).detach())

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return experts(x @ self.up, recompute_once(decide, x)) * scale

        def bound(self, x: torch.Tensor) -> torch.Tensor:
            return self(x).sin()

    layer = Layer()
    rematted = remat(Layer(), label="a module")
    decorated = remat(label="a function")(branch)

    def scenario(way: Any, x: torch.Tensor) -> torch.Tensor:
        x = way(layer, x, scale=0.1)
        x = way(layer.bound, x.cos()) + way(functools.partial(layer, scale=2.0), x)
        if way is plain:
            return decorated.__wrapped__(Layer.forward(rematted, x).sin())
        return decorated(rematted(x).sin())

    decided_once(scenario, weights=[*WEIGHTS, layer.up, rematted.up])


@pytest.mark.parametrize(
    "whole", [remat(once), torch.nn.Sequential(remat(torch.nn.Linear(D, D)), remat(torch.nn.Tanh()))]
)
def test_what_remat_gives_can_be_compiled_itself(whole: Any) -> None:
    graphs = Graphs()
    step = graphs.compile(whole, fullgraph=True)
    made.clear()

    got = step_of(step, leaf(5, D), [])
    want = given_decisions(list(made), lambda: step_of(whole, leaf(5, D), []))

    assert all(torch.equal(ours, other) for ours, other in zip(got, want, strict=True))
    assert len(graphs.forward) == 1


def test_a_row_of_layers() -> None:
    def scenario(way: Any, x: torch.Tensor) -> torch.Tensor:
        layers = [branch, returned, once, branch]
        if way is plain:
            return functools.reduce(lambda value, layer: layer(value), layers, x)
        return checkpoint_sequential(layers, 2, x)

    decided_once(scenario)


@pytest.mark.parametrize(
    "options", [{"use_reentrant": True}, {"early_stop": False}, {"debug": True}, {"preserve_rng_state": False}]
)
def test_options_of_the_eager_engine_change_nothing(options: dict[str, Any]) -> None:
    agrees(Graphs().compile(lambda x: checkpoint(branch, x, **options), fullgraph=True), branch, 5)


def test_without_gradients_nothing_is_checkpointed() -> None:  # R2
    graphs = Graphs()
    step = graphs.compile(lambda x: checkpoint(once, x), fullgraph=True)

    with torch.no_grad():
        made.clear()
        got = step(leaf(5, D))
        assert torch.equal(got, given_decisions(list(made), lambda: once(leaf(5, D))))


def test_outside_a_region_the_functions_do_nothing() -> None:
    def all_three(x: torch.Tensor) -> torch.Tensor:
        return branch(x) + returned(x.sin()) + once(x.cos())

    agrees(Graphs().compile(all_three, fullgraph=True), all_three, 5, decisions=3, used=3)


# Data


@dataclasses.dataclass
class Plan:
    idx: torch.Tensor
    count: int
    kind: str


class Pair(collections.namedtuple("Pair", "first second")):
    __slots__ = ()


class Kind(enum.Enum):
    SPARSE = 1


def test_data_of_every_kind() -> None:  # R2
    def layer(x: torch.Tensor) -> torch.Tensor:
        plan = Plan(decide(x), 3, "a")
        pair = Pair(decide(x + 1), [x.shape[0], 2.5, True, None, torch.float32, Kind.SPARSE])
        rest = collections.deque([decide(x + 2)])
        save_for_recompute(plan, {"pair": pair, "rest": rest})
        (again,) = save_for_recompute(decide(x + 3), name="again")
        return experts(x, plan.idx) + experts(x, pair.first) + experts(x, again + rest[0]) * plan.count

    decided_once(lambda way, x: way(layer, x))


def test_views_are_kept_by_what_they_look_at() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        order = route(x).flatten().argsort(stable=True)
        first, second = order.view(-1, 2).split(1, -1)
        save_for_recompute(first, second.squeeze(-1)[:4])
        return (x.repeat_interleave(K, 0)[first.flatten()] @ WEIGHTS[0]).sin() @ WEIGHTS[1]

    decided_once(lambda way, x: way(layer, x))


def test_the_values_of_a_top_k_are_kept_with_its_indices() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        gates, idx = (x @ GATE).softmax(-1).topk(K)
        save_for_recompute(idx)
        return experts(x, idx) * gates.sum(-1, keepdim=True).sin()

    decided_once(lambda way, x: way(layer, x), weights=[*WEIGHTS, GATE])


def test_what_the_compiler_merges_with_a_decision_is_kept_too() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        looked_at = route(x).float().mean(-1, keepdim=True)
        unlike = (x.detach() * 3).exp().sin() * (x.detach() + 2).exp().sin()
        (scale,) = save_for_recompute((x.detach() * 2).exp())
        return experts(x, recompute_once(route, x)) * (1 + looked_at) + x * unlike * scale

    graphs = decided_once(lambda way, x: way(layer, x))
    assert graphs.backward_ops().count("aten.exp") == 2  # what is not the same is made again


def test_sizes_that_depend_on_values() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        idx = route(x)
        count, chosen = save_for_recompute((idx == 0).sum().item(), (idx == 0).any(-1).nonzero().flatten())
        return (x @ WEIGHTS[0]).sin()[chosen] @ WEIGHTS[1] * count

    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        decided_once(lambda way, x: way(layer, x), tokens=(6, 11))


def test_decisions_of_distributed_tensors() -> None:
    from torch import distributed
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        gate = distribute_tensor(GATE.detach(), mesh, [Replicate()]).requires_grad_()
        up = distribute_tensor(WEIGHTS[0].detach(), mesh, [Shard(1)]).requires_grad_()
        x = distribute_tensor(leaf(5, D).detach(), mesh, [Replicate()])

        def layer(x: torch.Tensor) -> torch.Tensor:
            (idx,) = save_for_recompute((x @ gate).topk(K).indices)
            return torch.tanh(x @ up) * (x @ gate).softmax(-1).gather(-1, idx).sum(-1, keepdim=True)

        graphs = Graphs()
        step = graphs.compile(lambda x: checkpoint(layer, x), fullgraph=True)
        got = torch.autograd.grad(step(x).square().sum(), [gate, up])
        want = torch.autograd.grad(layer(x).square().sum(), [gate, up])

        assert all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(got, want, strict=True))
        assert "aten.topk" in graphs.forward_ops()
        assert "aten.topk" not in graphs.backward_ops()
    finally:
        distributed.destroy_process_group()


def test_scopes_and_names() -> None:  # R4
    def layer(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            with layer_scope("part"):
                (idx,) = save_for_recompute(decide(x))
                x = experts(x, idx).sin()
        (idx,) = save_for_recompute(decide(x))
        return experts(x, idx)

    decided_once(lambda way, x: way(layer, x))


def test_a_decision_may_save_inside() -> None:  # R4
    def decision(x: torch.Tensor) -> torch.Tensor:
        save_for_recompute(1)
        save_for_recompute(2)
        return decide(x) + recompute_once(lambda: int(doing_recompute()))

    decided_once(lambda way, x: way(lambda x: experts(x, recompute_once(decision, x)), x))


# State


def test_changes_in_place_after_the_save() -> None:  # R6
    def layer(x: torch.Tensor) -> torch.Tensor:
        (idx,) = save_for_recompute(decide(x))
        idx.add_(1).remainder_(E)
        hidden = x @ WEIGHTS[0]
        hidden += 1
        return experts(hidden.sin_(), idx)

    decided_once(lambda way, x: way(layer, x))


def test_random_numbers_are_drawn_once() -> None:  # R7
    def layer(x: torch.Tensor) -> torch.Tensor:
        (idx,) = save_for_recompute((x @ GATE + torch.randn(x.shape[0], E)).topk(K).indices)
        return dropout(experts(x, idx), 0.5)

    decided_once(lambda way, x: way(layer, x))


def test_a_buffer_moves_once() -> None:
    counts = torch.zeros(E)

    def layer(x: torch.Tensor) -> torch.Tensor:
        (idx,) = save_for_recompute(decide(x))
        counts.add_(torch.ones_like(idx, dtype=torch.float32).sum(0).sum() * torch.ones(E))
        return experts(x, idx)

    step = Graphs().compile(lambda x: checkpoint(layer, x), fullgraph=True)
    step_of(step, leaf(5, D))

    assert counts.tolist() == [5 * K] * E


def test_an_attribute_is_set_once() -> None:
    class Layer(torch.nn.Module):
        steps = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (idx,) = save_for_recompute(decide(x))
            self.steps += 1
            return experts(x, idx)

    layer = Layer()
    step = Graphs().compile(lambda x: checkpoint(layer, x), fullgraph=True)
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        agrees(step, once, 5)

    assert layer.steps == 1


# Other checkpointing


def test_a_policy_of_the_user_and_decisions() -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    graphs = Graphs()

    agrees(graphs.compile(lambda x: checkpoint(branch, x, context_fn=contexts), fullgraph=True), branch, 5)

    assert "roundpipe_tests.decide" not in graphs.backward_ops()
    assert graphs.backward_ops().count("aten.mm") == 4, "the one that the policy keeps is computed again"


@pytest.fixture
def nothing_traced_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were the first region that the process compiles."""
    monkeypatch.delitem(decided.python_key_table, ProxyTorchDispatchMode, raising=False)
    decided._dispatch_cache.clear()


@pytest.mark.usefixtures("nothing_traced_yet")
def test_ours_in_the_place_of_torchs_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint)  # for a library that cannot be edited
    step = Graphs().compile(lambda x: torch.utils.checkpoint.checkpoint(branch, x, use_reentrant=False), fullgraph=True)

    agrees(step, branch, 5)


@pytest.mark.usefixtures("nothing_traced_yet")
@pytest.mark.parametrize("way", [torchs, checkpoint], ids=["torchs", "ours"])
def test_our_contexts_under_torchs_checkpoint(way: Any) -> None:
    step = Graphs().compile(
        lambda x: way(branch, x, use_reentrant=False, context_fn=recompute_contexts), fullgraph=True
    )

    agrees(step, branch, 5)


# What runs the graph


def test_a_tape_is_recorded_and_replayed_between_the_parts_of_a_graph() -> None:  # R13
    step = Graphs().compile(lambda x: checkpoint(branch, x))
    x = leaf(5, D)
    made.clear()
    before = step(x)

    with record() as tape:
        recorded = step(x)
    with replay(tape):
        replayed = step(x)

    assert len(made) == 2
    assert torch.equal(recorded, replayed)
    assert not torch.equal(recorded, before)


def test_interleaved_microbatches_run_the_graph_of_their_forward() -> None:
    """The first size has a graph of its own; later ones share one for any size. Each recompute must find its own."""
    graphs: list[torch.fx.GraphModule] = []
    ran: list[int] = []

    def numbered(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        number = len(graphs)
        graphs.append(graph)
        return make_boxed_func(lambda *args: (ran.append(number), graph(*args))[1])

    backend = aot_autograd(fw_compiler=numbered, bw_compiler=lambda graph, inputs: make_boxed_func(graph))
    layer = torch.compile(lambda x: (x @ WEIGHTS[0]).tanh().sin(), backend=backend)

    outputs = [checkpoint(layer, leaf(tokens, D)) for tokens in (8, 12, 8)]
    for output in outputs:
        output.sum().backward()

    assert ran == [0, 1, 0] * 2


def test_an_eager_region_around_a_compiled_one() -> None:  # R8
    def layer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(once, branch(x)).sin()

    step = Graphs().compile(layer)

    agrees(functools.partial(checkpoint, step), lambda x: once(branch(x)).sin(), 5, decisions=2, used=2)


def test_one_function_in_a_region_and_outside() -> None:
    step = Graphs().compile(branch)

    for _ in range(2):
        agrees(step, branch, 5)
        agrees(functools.partial(checkpoint, step), branch, 5)


def test_compiled_autograd() -> None:
    from torch._dynamo import compiled_autograd

    around = torch.compile(lambda x: checkpoint(once, x), backend="aot_eager", fullgraph=True)

    for step in (functools.partial(checkpoint, branch), around):
        made.clear()
        x = leaf(5, D)
        with compiled_autograd._enable(torch.compile(backend="eager")):
            step(x).square().sum().backward()
        assert len(made) == 1
        want = given_decisions(list(made), lambda: step_of(branch, leaf(5, D)))
        assert torch.equal(x.grad, want[1])


@pytest.mark.parametrize("style", ["save", "once", "if"])
@pytest.mark.parametrize("before", [False, True], ids=["", "compiled before"])
def test_a_compiled_layer_inside_torchs_checkpoint_decides_once(style, before) -> None:
    made = []

    @torch.compiler.disable
    def drawn(x):
        made.append(1)
        return torch.randn_like(x).argsort(1)[:, :3]

    def layer(x):
        if style == "once":
            index = recompute_once(drawn, x.detach())
        elif style == "save":
            (index,) = save_for_recompute(torch.randn_like(x.detach()).argsort(1)[:, :3])
        elif doing_recompute():
            (index,) = get_recompute_data()
        else:
            (index,) = save_for_recompute(torch.randn_like(x.detach()).argsort(1)[:, :3])
        return x.gather(1, index).sin()

    x = torch.arange(36.0).reshape(6, 6).div(36).requires_grad_()
    compiled = torch.compile(layer, backend="aot_eager")
    if before:
        compiled(x)
    made.clear()
    y = torchs(compiled, x, use_reentrant=False, preserve_rng_state=False)
    y.sum().backward()
    chosen = torch.isin(x.sin(), y)  # all values differ
    assert torch.allclose(x.grad, torch.where(chosen, x.cos(), 0))
    assert len(made) == (style == "once")
    if before:
        with torch.no_grad():
            compiled(x)
