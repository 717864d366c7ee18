"""Expert parallel layers on two ranks: the recompute exchanges what the forward exchanged, on every rank.

Shapes: T tokens, D width, E experts of which each rank has its share.
"""

from __future__ import annotations

import time
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from roundpipe_torch import (
    CheckpointMismatchError,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    recompute_once,
    remat,
    save_for_recompute,
)
from tests.on_torch.oracle import Counted, by_remat, leaf, plain, reentrant, same
from tests.on_torch.ranks import RANKS

T, D, E = 8, 6, 4
LOCAL = E // RANKS
WAYS = {"checkpoint": checkpoint, "remat": by_remat, "reentrant": reentrant}


class Exchange(torch.autograd.Function):
    """Rows to other ranks, and their gradients back. Saves no tensor."""

    @staticmethod
    def forward(ctx, x, take, give):
        ctx.sizes = give, take
        out = x.new_empty(sum(take), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), take, give)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, *ctx.sizes), None, None


def plan(expert_T):
    """Order of the tokens, rows given and taken by rank, rows for each local expert from each rank."""
    give_E = expert_T.bincount(minlength=E)
    take_RL = torch.empty_like(give_E)
    dist.all_to_all_single(take_RL, give_E)
    take_RL = take_RL.view(RANKS, LOCAL)
    return expert_T.argsort(stable=True), give_E.view(RANKS, LOCAL).sum(1).tolist(), take_RL.sum(1).tolist(), take_RL


def by_branch(make):
    if doing_recompute():
        return get_recompute_data()
    return save_for_recompute(*make())


def by_value(make):
    return save_for_recompute(*make()) if not doing_recompute() else save_for_recompute(None)


STYLES = {"branch": by_branch, "value": by_value, "once": recompute_once}


class Moe(torch.nn.Module):
    """Routes each token to one expert. Weighs at the expert's side of the exchange, so nothing is saved after it."""

    def __init__(self, style="branch", rank=None, seed=0):
        super().__init__()
        self.gate = torch.nn.Parameter(leaf(D, E, seed=seed).detach())
        self.experts = torch.nn.Parameter(leaf(E, D, D, seed=seed + 1).detach())
        self.style, self.rank = style, rank
        self.bias = torch.zeros(E)
        self.decided = 0

    def route(self, x):
        self.decided += 1
        with torch.no_grad():
            return (x @ self.gate + self.bias).argmax(-1)

    def forward(self, x):
        return self.alone(x) if self.rank is None else self.exchanging(x)

    def alone(self, x):
        """All experts in one process."""
        expert_T = self.route(x)
        weight_T1 = torch.softmax(x @ self.gate, -1).gather(1, expert_T[:, None])
        return x + (torch.tanh(x[:, None] @ self.experts[expert_T])[:, 0] * weight_T1)

    def exchanging(self, x):
        def make():
            expert_T = self.route(x)
            return expert_T, *plan(expert_T)

        expert_T, order_T, give, take, take_RL = STYLES[self.style](make)
        weight_T1 = torch.softmax(x @ self.gate, -1).gather(1, expert_T[:, None])
        rows = Exchange.apply(torch.cat([x, weight_T1], 1)[order_T], take, give)
        parts = list(rows.split(take_RL.flatten().tolist()))
        for n, part in enumerate(parts):
            if len(part):  # an expert without tokens does nothing, and saves nothing
                expert = self.experts[self.rank * LOCAL + n % LOCAL]
                parts[n] = torch.tanh(part[:, :D] @ expert) * part[:, D:]
            else:
                parts[n] = part[:, :D]
        back = Exchange.apply(torch.cat(parts), give, take)
        return x + torch.zeros_like(x).index_add(0, order_T, back)


def summed(model):
    """The gradients of both ranks together. A rank has gradients of its own experts only."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    for grad in grads:
        dist.all_reduce(grad)
    return grads


def moe(rank, name, style, bias, tokens, nested):
    way = Counted(WAYS[name])

    def run(layers, x, way, outer):
        def stack(x):
            for layer in layers:
                x = way(layer, x)
            return x

        return outer(stack, x)

    everything = [leaf(n, D, seed=r) for r, n in enumerate(tokens)]
    single = [Moe(seed=n) for n in (0, 10)]
    ours = torch.nn.ModuleList([Moe(style, rank, seed=n) for n in (0, 10)])
    for layer in (*single, *ours):
        layer.bias = torch.tensor(bias)
    want = run(single, torch.cat(everything), plain, plain)
    want.square().sum().backward()

    x = leaf(tokens[rank], D, seed=rank)
    got = run(ours, x, way, way if nested else plain)
    for _ in range(2):  # the same graph twice
        x.grad = None
        ours.zero_grad()
        got.square().sum().backward(retain_graph=name != "reentrant" and not _)
        if name == "reentrant":
            break
    same(got, want.split(tokens)[rank], "output", within=1e-5)
    same(x.grad, everything[rank].grad, "input", within=1e-5)
    same(summed(ours), [p.grad for layer in single for p in layer.parameters()], "weights", within=1e-5)
    assert [layer.decided for layer in ours] == [1, 1]
    assert way.runs > way.regions
    return way.runs


ROUTES = {
    "both ranks": [0.0] * E,
    "rank 0": [0.0, 0.0, -1e9, -1e9],
    "rank 1": [-1e9, -1e9, 0.0, 0.0],
    "one expert": [-1e9, -1e9, 0.0, -1e9],
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("name", WAYS)
def test_moe_gives_the_gradients_of_a_single_process(ranks, name, route, nested):
    one, other = ranks.run(moe, name, "branch", ROUTES[route], [T, T + 3], nested)
    assert one == other


@pytest.mark.parametrize("tokens", [[T, 0], [0, T], [1, 1]])
@pytest.mark.parametrize("style", STYLES)
def test_moe_of_each_style_with_a_rank_that_has_few_tokens(ranks, style, tokens):
    one, other = ranks.run(moe, "checkpoint", style, ROUTES["rank 1"], tokens, False)
    assert one == other


# A rank that saves nothing, or not where the other does


def starved(rank, name, to_rank, after):
    """All tokens go to one rank. The expert runs only where there are tokens, and so may what comes after."""

    def step(way):
        x, w, scale = leaf(T, D, seed=rank), leaf(D, D, seed=9), leaf(T, 1, seed=3)

        def layer(x):
            give = [T * (r == to_rank) for r in range(RANKS)]
            take = [T * (rank == to_rank)] * RANKS
            rows = Exchange.apply(x, take, give)
            if len(rows):
                rows = torch.tanh(rows @ w)
            x = Exchange.apply(rows, give, take)
            if after == "all" or (after == "busy" and len(rows)):
                x = x * scale
            return x + 0

        return way(layer, way(layer, x)).sum(), [x, scale, w]

    way = Counted(WAYS[name])
    results = []
    for each in (plain, way):
        loss, leaves = step(each)
        loss.backward()
        results.append([leaf.grad for leaf in leaves])
    same(*results[::-1])
    return way.runs, way.regions


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("to_rank", [0, 1])
@pytest.mark.parametrize("after", ["nothing", "all", "busy"])
def test_a_rank_without_tokens_recomputes_too(ranks, name, to_rank, after):
    assert ranks.run(starved, name, to_rank, after) == [(4, 2), (4, 2)]


def in_two_parts(rank, to_rank):
    """As zero-bubble pipelines do: first the gradient of the input, later that of the weights."""
    x, w = leaf(T, D, seed=rank), leaf(D, D, seed=9)

    def layer(x):
        give, take = [T * (r == to_rank) for r in range(RANKS)], [T * (rank == to_rank)] * RANKS
        rows = Exchange.apply(x, take, give)
        if len(rows):
            rows = torch.tanh(rows @ w) @ w
        return Exchange.apply(rows, give, take) * 2

    def run(way):
        x.grad = w.grad = None
        y = way(layer, x)
        grads, groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter([w]))
        if rank == to_rank:
            stage_backward_weight(iter([w]), groups)
        return [*grads, w.grad]

    way = Counted(checkpoint)
    want, got = run(plain), run(way)
    same(got, want)
    return way.runs


@pytest.mark.parametrize("to_rank", [0, 1])
def test_gradients_in_two_parts(ranks, to_rank):
    assert ranks.run(in_two_parts, to_rank) == [2, 2]


def asynchronous(rank, to_rank):
    """torch's functional collectives, whose results are waited for when they are used."""

    def run(way):
        x, w = leaf(T, D, seed=rank), leaf(D, D, seed=9)

        def layer(x):
            give, take = [T * (r == to_rank) for r in range(RANKS)], [T * (rank == to_rank)] * RANKS
            rows = functional.all_to_all_single_autograd(x, take, give, dist.group.WORLD)
            if rank == to_rank:
                rows = torch.tanh(rows @ w)
            return functional.all_to_all_single_autograd(rows, give, take, dist.group.WORLD)

        way(layer, way(layer, x)).sum().backward()
        return [x.grad, w.grad if rank == to_rank else None]

    way = Counted(checkpoint)
    want, got = run(plain), run(way)
    same(got, want)
    return way.runs


@pytest.mark.parametrize("to_rank", [0, 1])
def test_functional_collectives(ranks, to_rank):
    assert ranks.run(asynchronous, to_rank) == [4, 4]


def uneven(rank, what):
    """Rank 0 saves nothing in the region. What backward does differs otherwise."""
    x, w = leaf(T, D, seed=rank), leaf(D, D, seed=9)

    def layer(x):
        y = Exchange.apply(x, [T // 2] * RANKS, [T // 2] * RANKS)
        z = Exchange.apply(torch.tanh(y @ w) if rank else y, [T // 2] * RANKS, [T // 2] * RANKS)
        return (z, y, x) if what == "outputs" else z

    def run(way):
        if what == "outputs":
            z, y, back = way(layer, x)
            assert back is x or way is not plain
            grads = torch.autograd.grad(z.sum(), x, retain_graph=True)
            return [*grads, *torch.autograd.grad(y.sum() + back.sum(), x)]
        y = way(layer, x)
        if what == "in place":
            y += 1
            y.mul_(2)
        if what == "partial":
            return torch.autograd.grad(y.sum(), [x])
        return torch.autograd.grad(y.sum(), x)

    want = run(plain)
    same(list(run(checkpoint)), list(want))


@pytest.mark.parametrize("what", ["outputs", "in place", "partial"])
def test_uneven_ranks(ranks, what):
    ranks.run(uneven, what)


def kept(rank):
    """Whether a region's input is alive while its loss is: before backward, after one that retains, after the last."""
    x = leaf(T, D)
    inner = x * 1
    watched = weakref.ref(inner)
    half = [T // 2] * RANKS
    loss = checkpoint(lambda x: Exchange.apply(x, half, half) + 0, inner).sum()
    del inner
    alive = [watched() is not None]
    for retain in (True, False):
        loss.backward(retain_graph=retain)
        for _ in range(0 if retain else 500):  # a thread of the process group lets go of what it sent a little later
            if watched() is None:
                break
            time.sleep(0.01)
        alive.append(watched() is not None)
    return alive


def test_a_region_lives_no_longer_than_its_graph(ranks):
    assert ranks.run(kept) == [[True, True, False]] * 2


def stopped(rank, talks):
    """How often a recompute runs what comes after the last tensor that is saved."""
    runs = []

    def layer(x):
        x = torch.tanh(x)
        if talks:
            dist.all_reduce(torch.ones(1))
        x = x.cumsum(0)
        runs.append(1)
        return x

    checkpoint(layer, leaf(T, D)).sum().backward()
    return len(runs)


def test_only_a_region_that_talks_runs_to_its_end(ranks):
    assert ranks.run(stopped, False) == [1, 1]
    assert ranks.run(stopped, True) == [2, 2]


def lacking(rank, cyclic):
    """A difference between the phases: an error on both ranks, after one recompute on each."""
    runs, kept = [], []

    def layer(x, w):
        runs.append(1)
        x = Exchange.apply(x, [T // 2] * RANKS, [T // 2] * RANKS)
        if doing_recompute():
            return x * w
        gate = torch.tanh(x * w)
        if cyclic:  # dead, but for a cycle
            cycle = [gate]
            cycle.append(cycle)
            return x * w
        kept.append(gate)
        return x * w * gate

    x, w = leaf(T, D), leaf(T, D)
    loss = checkpoint(layer, x, w).sum()
    if cyclic:
        loss.backward()
    else:
        with pytest.raises(
            CheckpointMismatchError, match="the recompute saved nothing that can stand for it"
        ) as caught:
            loss.backward()
        (note,) = caught.value.__notes__
        assert note.startswith(f"on rank {rank} of {RANKS}, in layer 'lacking.<locals>.layer")
    return len(runs)


@pytest.mark.parametrize("cyclic", [False, True])
def test_a_difference_between_phases_costs_no_second_recompute(ranks, cyclic):
    assert ranks.run(lacking, cyclic) == [2, 2]


def verified(rank):
    """All ranks decide again, also the one that saved nothing."""
    layer = Moe("branch", rank)
    layer.bias = torch.tensor(ROUTES["one expert"])
    checked = remat(layer, verify="raise")
    x = leaf(T, D, seed=rank)
    checked(x).square().sum().backward()
    return layer.decided


def test_verify_decides_again_on_every_rank(ranks):
    assert ranks.run(verified) == [2, 2]


def test_a_backend_that_counts_no_collectives_does_no_harm(monkeypatch):
    class Uncounted:
        def _get_sequence_number_for_group(self):
            raise RuntimeError("pretended")

    world = SimpleNamespace(pg_map={Uncounted(): None})
    monkeypatch.setattr("roundpipe_torch._ranks._c10d", SimpleNamespace(_world=world))
    x = leaf(2)
    checkpoint(torch.exp, x).sum().backward()
    same(x.grad, x.exp().detach())
