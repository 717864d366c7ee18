"""Two gloo processes on loopback: DistributedDataParallel and FSDP2 around and inside checkpointed layers.

Shapes: T tokens, D width. The oracle is the same model without checkpointing, on the same ranks, with the same
decisions.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist

from tests.on_torch.oracle import Counted, Source, by_remat, decided, leaf, plain, same
from tests.on_torch.ranks import RANKS

T, D = 8, 6


def ways():
    from roundpipe_torch import checkpoint

    return {"checkpoint": checkpoint, "remat": by_remat}


# DistributedDataParallel (DALLE2-pytorch issue 225, trl issue 835, accelerate issue 3536, pytorch PR 55248)


class Twice(torch.nn.Module):
    """One layer, run twice a forward, of which each rank uses other experts."""

    def __init__(self, way, rank):
        super().__init__()
        self.w, self.gate = (torch.nn.Parameter(leaf(D, D, seed=n).detach()) for n in range(2))
        self.experts = torch.nn.Parameter(leaf(3, D, seed=3).detach())
        self.way, self.source = way, Source(50 + rank)

    def layer(self, x):
        idx = decided(lambda: self.source.integers(D, len(x), 1))
        return torch.tanh(x @ self.w) + torch.softmax(x @ self.gate, -1).gather(1, idx) * self.experts[idx[:, 0] % 3]

    def forward(self, x):
        return self.way(self.layer, self.way(self.layer, x))


def ddp(rank, name, static_graph):
    def steps(way):
        net = Twice(way, rank)
        model = torch.nn.parallel.DistributedDataParallel(net, static_graph=static_graph)
        seen = []
        for step in range(4):
            x = leaf(T + step, D, seed=10 * rank + step)
            late = step % 2 and not static_graph
            with model.no_sync() if late else contextlib.nullcontext():
                model(x).square().sum().backward()
            seen += [x.grad, *(p.grad.clone() for p in net.parameters())]
        return seen, net.source.asked

    way = Counted(ways()[name])
    want, got = steps(plain), steps(way)
    same(got, want)
    assert way.runs == 2 * way.regions
    return [grad.tolist() for grad in got[0][-3:]]


@pytest.mark.parametrize("way", ["checkpoint", "remat"])
@pytest.mark.parametrize("static_graph", [False, True])
def test_ddp_with_a_layer_used_twice_and_accumulation(ranks, way, static_graph):
    one, other = ranks.run(ddp, way, static_graph)

    assert (one == other) is static_graph  # the last step is under no_sync, but not with a static graph


# FSDP2 (pytorch PR 164009, 163391 and 171779, NeMo Automodel PR 3513, VeOmni issue 104, transformers issue 47254)


class Block(torch.nn.Module):
    """Checkpoints its body, or is to be checkpointed as a whole."""

    def __init__(self, way, source, inside):
        super().__init__()
        self.gate, self.up, self.down = (
            torch.nn.Linear(D, D),
            torch.nn.Linear(D, 2 * D),
            torch.nn.Linear(2 * D, D, bias=False),
        )
        self.way, self.source = way if inside else plain, source
        self.dtypes = set()

    def body(self, x):
        idx = decided(lambda: self.source.integers(D, len(x), 1))
        self.dtypes.add((x.dtype, self.up.weight.dtype))
        return x + self.down(torch.tanh(self.up(x))) * torch.softmax(self.gate(x), -1).gather(1, idx)

    def forward(self, x):
        return self.way(self.body, x)


def fsdp(rank, name, inside, dtype, nested):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()

    def step(way):
        source = Source(30 + rank)
        blocks = torch.nn.ModuleList([Block(way, source, inside) for _ in range(3)])
        for n, p in enumerate(blocks.parameters()):
            p.data = leaf(*p.shape, seed=n).detach()
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        around = plain if inside else way

        def stage(x):
            for block in blocks:
                x = around(block, x)
            return x

        # As in preference training: two forwards, then one backward.
        y = [(way if nested else plain)(stage, leaf(n, D, seed=100 * rank + n)) for n in (T, T + 3)]
        (y[0].float().square().mean() + y[1].float().sin().sum()).backward()
        assert blocks[0].dtypes == {(dtype or torch.float32,) * 2}
        return [p.grad.to_local() for p in blocks.parameters()], source.asked

    way = Counted(ways()[name])
    want, got = step(plain), step(way)
    same(got, want)
    assert way.runs > way.regions
    return got[1]


@pytest.mark.parametrize("way", ["checkpoint", "remat"])
@pytest.mark.parametrize("inside", [True, False], ids=["fsdp(checkpoint)", "checkpoint(fsdp)"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_fsdp2_in_either_nesting_order(ranks, way, inside, dtype):
    if dtype and not inside and torch.__version__ < "2.13":
        pytest.skip("FSDP2 of this torch does not cast inputs in a recompute, with torch's own checkpoint neither")
    assert ranks.run(fsdp, way, inside, dtype, False) == [6, 6]


@pytest.mark.parametrize("inside", [True, False], ids=["fsdp(checkpoint)", "checkpoint(fsdp)"])
def test_fsdp2_with_a_region_around_all(ranks, inside):
    assert ranks.run(fsdp, "checkpoint", inside, None, True) == [6, 6]


# Token exchange between ranks, whose sizes are the decision


def exchange(rank, name):
    from torch.distributed.nn.functional import all_to_all_single

    def step(way):
        x, w, source, sent = leaf(T, D, seed=rank), leaf(D, D, seed=9), Source(rank), []

        def plan(x):
            to = source.integers(RANKS, len(x))
            give = to.bincount(minlength=RANKS)
            take = torch.empty_like(give)
            dist.all_to_all_single(take, give)
            sent.append(1)
            return to.argsort(stable=True), give.tolist(), take.tolist()

        def layer(x):
            order, give, take = decided(lambda: plan(x))
            there = all_to_all_single(x.new_empty(sum(take), D), x[order], take, give)
            back = all_to_all_single(x.new_empty(len(x), D), torch.tanh(there @ w), give, take)
            return torch.zeros_like(x).index_add(0, order, back)

        way(layer, way(layer, x)).square().sum().backward()
        return x.grad, w.grad, sent

    way = Counted(ways()[name])
    want, got = step(plain), step(way)
    same(got, want)
    assert way.runs > way.regions
    return len(got[2])


@pytest.mark.parametrize("way", ["checkpoint", "remat"])
def test_expert_parallel_exchange_plans_once(ranks, way):
    assert ranks.run(exchange, way) == [2, 2]


def fails_on_one_rank(rank):
    if rank == 1:
        raise RuntimeError("as told")
    return rank


def test_a_failure_on_a_rank_is_a_failure_of_the_test(ranks):
    with pytest.raises(pytest.fail.Exception, match=r"rank 1: (.|\n)*as told"):
        ranks.run(fails_on_one_rank)
    assert ranks.run(rank_of) == [0, 1]


def rank_of(rank):
    return dist.get_rank()
