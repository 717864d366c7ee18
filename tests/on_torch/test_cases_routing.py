"""Routing decisions, from public reports: flips, asymmetric branches, nesting, repeated backward, reuse, microbatches.

Shapes: T tokens, D width, E experts, K chosen. The oracle is `agree`: the same scenario without checkpointing.
"""

from __future__ import annotations

import functools

import pytest
import torch

from roundpipe_torch import (
    CheckpointMismatchError,
    GradientError,
    SlotError,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    layer_scope,
    recompute_once,
    remat,
    save_for_recompute,
)
from tests.on_torch.oracle import ENGINES, WAYS, Source, agree, decided, leaf, plain, same

T, D, E, K = 32, 8, 6, 2


# A router that flips (NeMo Automodel PR 2635 and 3140, torchtitan issue 1117, pytorch issue 171355)


class UnsteadyGate:
    """A bfloat16 product summed in slices, every other call in the reverse order, as a split-K kernel may."""

    def __init__(self):
        self.calls = 0

    @torch.no_grad()
    def __call__(self, x_TD, gate_DE):
        self.calls += 1
        parts = [x_TD[:, [d]].bfloat16() @ gate_DE[[d]].bfloat16() for d in range(D)]
        return functools.reduce(torch.add, parts if self.calls % 2 else parts[::-1])


def each_expert(x_TD, weight_TK, idx_TK, experts_EDD):
    """A loop over the experts that got a token: their number is data, and so is every shape."""
    y_TD = torch.zeros_like(x_TD)
    for e in idx_TK.unique().tolist():
        token, k = (idx_TK == e).nonzero(as_tuple=True)
        y_TD = y_TD.index_add(0, token, torch.tanh(x_TD[token] @ experts_EDD[e]) * weight_TK[token, k, None])
    return y_TD


def by_order(x_TD, weight_TK, idx_TK, experts_EDD):
    """Tokens sorted by expert and split by counts."""
    order = idx_TK.flatten().argsort(stable=True)
    parts = x_TD[order // K].split(idx_TK.flatten().bincount(minlength=E).tolist())
    y = torch.cat([torch.tanh(part @ w) for part, w in zip(parts, experts_EDD, strict=True)])
    return torch.zeros_like(x_TD).index_add(0, order // K, y * weight_TK.flatten()[order, None])


def one_hot(x_TD, weight_TK, idx_TK, experts_EDD):
    """Fixed shapes: no check of shapes can see a flip."""
    hot_TE = torch.zeros(len(x_TD), E).scatter(1, idx_TK, weight_TK)
    return torch.einsum("te,tef->tf", hot_TE, torch.tanh(torch.einsum("td,edf->tef", x_TD, experts_EDD)))


def with_capacity(x_TD, weight_TK, idx_TK, experts_EDD, capacity=8):
    """Tokens beyond an expert's capacity are dropped."""
    hot = torch.nn.functional.one_hot(idx_TK, E).flatten(0, 1)
    kept_TK = ((hot.cumsum(0) * hot).sum(-1) <= capacity).view_as(idx_TK)
    return one_hot(x_TD, weight_TK * kept_TK, idx_TK, experts_EDD)


@pytest.mark.parametrize("dispatch", [each_expert, by_order, one_hot, with_capacity])
@pytest.mark.parametrize("way", [*WAYS, ENGINES[1]])
def test_a_near_tie_that_flips_does_not_reach_the_recompute(way, dispatch):
    tokens = 512

    def scenario(way):
        x, gate, experts = leaf(tokens, D), leaf(D, E, seed=1), leaf(E, D, D, seed=2)
        unsteady, chosen = UnsteadyGate(), []

        def layer(x_TD):
            idx_TK = decided(lambda: unsteady(x_TD, gate).topk(K, -1).indices)
            chosen.append(idx_TK)
            return dispatch(x_TD, torch.softmax(x_TD @ gate, -1).gather(1, idx_TK), idx_TK, experts)

        y = way(layer, x)
        y.square().sum().backward()
        assert all(torch.equal(idx, chosen[0]) for idx in chosen)
        return y.detach(), x.grad, gate.grad, experts.grad, unsteady.calls, chosen[0]

    agree(scenario, way)
    x, gate, again = leaf(tokens, D), leaf(D, E, seed=1), UnsteadyGate()
    assert not torch.equal(*(again(x, gate).topk(K, -1).indices for _ in range(2))), "the gate is no longer unsteady"


@pytest.mark.parametrize("dispatch", [each_expert, one_hot])
def test_a_jittered_gate_with_its_gradient(dispatch):
    """The seed's example: gate, softmax and choice stand in the forward branch only."""

    def scenario(way):
        x, gate, experts, source = leaf(T, D), leaf(D, E, seed=1), leaf(E, D, D, seed=2), Source()

        def layer(x_TD):
            if doing_recompute():
                (idx_TK,) = get_recompute_data()
            else:
                score_TE = torch.softmax(x_TD @ gate, -1)
                idx_TK = (score_TE + source.normal(T, E)).topk(K, -1).indices
                save_for_recompute(idx_TK)
            return dispatch(x_TD, torch.softmax(x_TD @ gate, -1).gather(1, idx_TK), idx_TK, experts)

        way(layer, x).square().sum().backward()
        assert gate.grad.abs().sum() > 0
        return x.grad, gate.grad, experts.grad, source.asked

    agree(scenario)


# Branches that save different tensors (RoundPipe's user guide, pytorch issue 171355, NeMo RL issue 1203)


def gate_only_in_forward(x, gate, w, source):
    return torch.tanh(x @ w) * (decided(lambda: torch.softmax(x @ gate, -1).topk(1, -1).indices) + 1)


def topk_against_gather(x, gate, w, source):
    score = torch.softmax(x @ gate, -1)
    if doing_recompute():
        chosen = score.gather(1, get_recompute_data()[0])
    else:
        chosen, idx = score.topk(K, -1)
        save_for_recompute(idx)
    return torch.tanh(x @ w) * chosen.sum(-1, keepdim=True)


def statistic_only_in_recompute(x, gate, w, source):
    scale = decided(lambda: 2.0)
    if doing_recompute():
        torch.sin(x).mean()
    return torch.exp(torch.cos(x @ w * scale))


def statistic_only_in_forward(x, gate, w, source):
    scale = decided(lambda: float(torch.sin(x @ gate).exp().mean() > 0) + 1)
    return torch.exp(torch.cos(x @ w * scale))


def long_route_in_recompute(x, gate, w, source):
    h = x @ w
    scale = decided(lambda: source.integers(4, len(x), 1) + 1)
    if doing_recompute():
        for _ in range(5):
            torch.sigmoid(h) * scale
    return torch.tanh(h * scale) @ gate


def layer_in_either_branch(x, gate, w, source):
    h = x @ w
    if doing_recompute():
        (idx,) = get_recompute_data()
        torch.sigmoid(h).mean()
        y = torch.tanh(h) * idx
    else:
        idx = torch.softmax(x @ gate, -1).topk(1, -1).indices + 1
        save_for_recompute(idx)
        y = torch.tanh(h) * idx
    return y.exp()


def under_no_grad(x, gate, w, source):
    with torch.no_grad():
        idx = decided(lambda: torch.softmax(x @ gate, -1).topk(1, -1).indices)
    return torch.tanh(x @ w) * (idx + 1)


def two_decisions_between_layers(x, gate, w, source):
    h = x
    for name in ("first", "second"):
        h = torch.tanh(h @ w)
        with layer_scope(name):
            h = h * decided(lambda h=h: torch.softmax(h @ gate, -1).topk(1, -1).indices + 1)
    return h


def once(x, gate, w, source):
    for _ in range(3):
        idx = recompute_once(lambda x=x: torch.softmax(x @ gate, -1).topk(1, -1).indices)
        x = torch.tanh(x @ w) * (idx + 1)
    return x


BRANCHES = [
    gate_only_in_forward,
    topk_against_gather,
    statistic_only_in_recompute,
    statistic_only_in_forward,
    long_route_in_recompute,
    layer_in_either_branch,
    under_no_grad,
    two_decisions_between_layers,
    once,
]


@pytest.mark.parametrize("layer", BRANCHES)
@pytest.mark.parametrize("way", [*WAYS, ENGINES[1]])
def test_branches_may_differ_in_what_autograd_saves(way, layer):
    def scenario(way):
        x, gate, w, source = leaf(T, D), leaf(D, D, seed=1), leaf(D, D, seed=2), Source()
        way(lambda x: layer(x, gate, w, source), x).square().sum().backward()
        return x.grad, w.grad, gate.grad, source.asked

    agree(scenario, way)


def softmax_first(h, x):
    p, q = torch.softmax(h, -1), torch.tanh(h)
    return p * q


def tanh_first(h, x):
    q, p = torch.tanh(h), torch.softmax(h, -1)
    return p * q


EQUALS = {
    "swapped factors": (lambda h, x: h * torch.sin(x), lambda h, x: torch.sin(x) * h),
    "swapped operations": (softmax_first, tanh_first),
    "another formula": (lambda h, x: torch.tanh(h), lambda h, x: 2 * torch.sigmoid(2 * h) - 1),
    "fused": (lambda h, x: torch.nn.functional.softplus(h), lambda h, x: torch.log(1 + torch.exp(h))),
}


@pytest.mark.parametrize("branches", EQUALS)
@pytest.mark.parametrize("early_stop", [True, False])
def test_equal_values_by_other_operations_are_right_or_refused(branches, early_stop):
    """Shapes and numbers of saved tensors are the same, what they hold is not."""

    def layer(x, w):
        (scale,) = save_for_recompute(2.0)
        first, second = EQUALS[branches]
        y = second(x @ w, x) if doing_recompute() else first(x @ w, x)
        return torch.sin(y * scale)

    def gradients(way, **options):
        x, w = leaf(T, D), leaf(D, D, seed=1)
        way(layer, x, w, **options).square().sum().backward()
        return x.grad, w.grad

    try:
        got = gradients(checkpoint, early_stop=early_stop)
    except CheckpointMismatchError:
        return
    same(got, gradients(plain), within=1e-5)


def test_experts_in_another_order_are_refused():
    """The loop runs the same line as often, for other experts."""
    experts = torch.nn.ParameterList(leaf(D, D, seed=n).detach() for n in range(3))

    def layer(x):
        order = [2, 0, 1]
        if doing_recompute():
            order = sorted(get_recompute_data()[0])
        else:
            save_for_recompute(order)
        return sum(torch.tanh(x @ experts[e]) for e in order).exp()

    y = checkpoint(layer, leaf(T, D))

    with pytest.raises(CheckpointMismatchError, match="another parameter"):
        y.sum().backward()


def test_an_operation_needed_from_one_phase_only_is_an_error_not_a_gradient():
    """The recompute drops a factor that the forward's result hangs on."""

    def layer(x):
        save_for_recompute(0)
        if doing_recompute():
            return torch.sin(x)
        return torch.sin(x) * torch.exp(x[:, :1]) * torch.cos(x[:1])

    y = checkpoint(layer, leaf(T, D))

    with pytest.raises(CheckpointMismatchError, match="backward needs"):
        y.sum().backward()


# Nesting (pytorch PR 90105 and 96866, Megatron-LM PR 6311)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_every_level_decides_once(way, depth):
    def scenario(way):
        x, w, source = leaf(T, D), leaf(D, D, seed=1), Source()

        def level(x, n):
            before = decided(lambda: source.integers(4, T, 1) + 1)
            if n:
                x = way(level, torch.sin(x), n - 1)
                x = way(level, x @ w, n=n - 1)
            if doing_recompute():
                assert torch.equal(get_recompute_data()[0], before)  # still this level's, after the inner ones
            return torch.tanh(x @ w) * before

        way(level, x, depth).square().sum().backward()
        return x.grad, w.grad, source.asked

    agree(scenario, way)


def test_a_list_of_layers_in_a_stage_in_a_model():
    def scenario(way):
        source, x = Source(), leaf(T, D)
        ws = [leaf(D, D, seed=n) for n in range(6)]

        def block(w, x):
            return x + torch.tanh(x @ w) * decided(lambda: source.integers(3, T, 1))

        def stage(ws, x):
            for w in ws:
                x = way(block, w, x)
            return x

        def model(x):
            for n in (0, 2, 4):
                x = way(stage, ws[n : n + 2], x)
            return x

        way(model, x).sin().sum().backward()
        return x.grad, [w.grad for w in ws], source.asked

    agree(scenario)


def test_an_inner_region_under_no_grad_keeps_its_decision():
    def scenario(way):
        x, w, source = leaf(T, D), leaf(D, D, seed=1), Source()

        def teacher(x):
            return decided(lambda: source.integers(5, T, 1)) + (x @ w).argmax(-1, keepdim=True)

        def outer(x):
            with torch.no_grad():
                target = way(teacher, x)
            return torch.tanh(x @ w) * target

        way(outer, x).square().sum().backward()
        return x.grad, w.grad, source.asked

    agree(scenario)


# Repeated backward (pytorch issues 82156 and 82482, guided-diffusion PR 144)


def two_outputs(way, x, w, source):
    def layer(x):
        score = torch.softmax(x @ w, -1).gather(1, decided(lambda: source.integers(D, T, 1)))
        return torch.tanh(x @ w) * score, score.exp()

    return way(layer, x)


def backward_three_times(y, p, x, w):
    for _ in range(3):
        y.sum().backward(retain_graph=True)
    return x.grad, w.grad


def one_input_at_a_time(y, p, x, w):
    first = torch.autograd.grad(y.sum(), [x], retain_graph=True)
    return first, torch.autograd.grad(y.sum() + p.sum(), [w], retain_graph=True), torch.autograd.grad(p.sum(), [x, w])


def a_loss_per_output(y, p, x, w):
    p.sum().backward(retain_graph=True)
    y.square().sum().backward()
    return x.grad, w.grad


def into_one_leaf(y, p, x, w):
    y.sum().backward(inputs=[w], retain_graph=True)
    p.sum().backward(inputs=[x])
    return x.grad, w.grad


def gradient_penalty(y, p, x, w):
    (g,) = torch.autograd.grad(y.sin().sum() + p.sum(), [x], create_graph=True)
    (y.sum() + g.square().sum()).backward()
    return g.detach(), x.grad, w.grad


def hessian_rows(y, p, x, w):
    (g,) = torch.autograd.grad(y.sum(), [w], create_graph=True)
    return [torch.autograd.grad(g[n].sum(), [w, x], retain_graph=True) for n in range(3)]


def third_order(y, p, x, w):
    (g,) = torch.autograd.grad(p.sum(), [x], create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), [x], create_graph=True)
    return torch.autograd.grad(h.sum(), [x, w])


def batched(y, p, x, w):
    return torch.autograd.grad(y, [w], torch.eye(T)[:3, :, None].expand(3, T, D), is_grads_batched=True)


USES = [
    backward_three_times,
    one_input_at_a_time,
    a_loss_per_output,
    into_one_leaf,
    gradient_penalty,
    hessian_rows,
    third_order,
    batched,
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("way", WAYS)
def test_every_backward_uses_the_first_decision(way, use):
    def scenario(way):
        x, w, source = leaf(T, D), leaf(D, D, seed=1), Source()
        return use(*two_outputs(way, x, w, source), x, w), source.asked

    agree(scenario, way)


# A saved value with gradient, a second save (Megatron-LM fork PR 79)


@pytest.mark.parametrize("way", [*WAYS, ENGINES[1]])
@pytest.mark.parametrize(
    "wrap",
    [lambda p: p, lambda p: {"idx": 1, "p": [p]}, lambda p: (None, p.view(-1)[:3])],
    ids=["alone", "in a dict", "a view"],
)
def test_scores_with_gradient_are_refused_and_the_next_step_is_right(way, wrap):
    x, w = leaf(T, D), leaf(D, D, seed=1)

    with pytest.raises(GradientError, match=r"requires grad(.|\n)*detach"):
        way(lambda x: save_for_recompute(wrap(torch.softmax(x @ w, -1)))[0], x)
    with pytest.raises(SlotError, match="saved twice"):
        way(lambda x: (save_for_recompute(1), save_for_recompute(2), x)[2], x)

    def scenario(way):
        x, w = leaf(T, D), leaf(D, D, seed=1)
        way(lambda x: torch.tanh(x) * decided(lambda: torch.softmax(x @ w, -1).detach()), x).sum().backward()
        return x.grad

    agree(scenario, way)


# One layer, many calls (pytorch issue 81296, verl PR 7106 and 7340)


class Shared(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(leaf(D, D, seed=1).detach())
        self.source = Source()

    def forward(self, x):
        idx = decided(lambda: self.source.integers(D, T, 1))
        return torch.tanh(x @ self.w) + torch.softmax(x @ self.w, -1).gather(1, idx)


def test_one_layer_called_again_and_again():
    def scenario(way):
        layer, x, fired = Shared(), leaf(T, D), []
        layer.w.register_hook(fired.append)
        layer.w.register_post_accumulate_grad_hook(lambda w: fired.append(w.grad.clone()))
        y = way(layer, x)
        way(layer, y)  # dropped
        for _ in range(3):
            y = way(layer, y)
        y.square().sum().backward()
        return x.grad, fired, layer.source.asked

    agree(scenario)


def test_two_wrappers_of_one_layer_have_their_own_slots():
    layer, twin = Shared(), Shared()
    a, b = remat(layer), remat(layer, label="again")
    got, want = leaf(T, D), leaf(D * 4, D)
    a(b(a(got))).square().sum().backward()
    twin(twin(twin(want))).square().sum().backward()

    same((got.grad, layer.w.grad, layer.source.asked), (want.grad, twin.w.grad, 3))


# Microbatches (AReaL PR 1166, pytorch issue 139404, miles PR 3146)

SCHEDULES = {
    "1F1B": "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
    "out of order": "F0 F1 B1 F2 B0 F3 F4 B3 B2",
    "all forward, backward in reverse": "F0 F1 F2 F3 F4 B4 B3 B2 B1 B0",
    "interleaved and dropped": "F4 F0 X4 F1 B0 F3 F2 X3 B2 B1",
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sizes", [(8, 8, 8, 8, 8), (5, 8, 3, 7, 1)], ids=["equal", "unequal"])
@pytest.mark.parametrize("nested", [False, True])
def test_any_order_of_microbatches(schedule, sizes, nested):
    def scenario(way):
        source, ws = Source(), [leaf(D, D, seed=n) for n in range(2)]
        xs = [leaf(size, D, seed=10 + n) for n, size in enumerate(sizes)]
        out = {}

        def layer(w, x):
            idx = decided(lambda: source.integers(D, len(x), 1))
            return torch.tanh(x @ w) + torch.softmax(x @ w, -1).gather(1, idx)

        def stage(x):
            for w in ws:
                x = way(layer, w, x)
            return x

        for do, n in SCHEDULES[schedule].split():
            if do == "F":
                out[n] = (way if nested else plain)(stage, xs[int(n)])
            elif do == "B":
                out.pop(n).square().mean().backward()
            else:
                del out[n]
        return [x.grad for x in xs], [w.grad for w in ws], source.asked

    agree(scenario)
