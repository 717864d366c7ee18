"""keep where parameters are sharded, and around an exchange between ranks. Two gloo processes on loopback."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from roundpipe_torch import checkpoint, keep
from tests.on_torch.oracle import Counted, Source, leaf, plain, reentrant, same
from tests.on_torch.ranks import RANKS

T, D = 16, 8
WAYS = {"default": checkpoint, "reentrant": reentrant}


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(D, 2 * D), torch.nn.Linear(2 * D, D)

    def forward(self, x):
        return x + keep(lambda h: self.down(torch.tanh(self.up(h))), x.sin()).exp()


def sharded(rank, name):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))

    def step(way):
        blocks = [Block() for _ in range(3)]
        parameters = [p for block in blocks for p in block.parameters()]
        for n, p in enumerate(parameters):
            p.data = leaf(*p.shape, seed=n).detach() / 4
        for block in blocks:
            fully_shard(block, mesh=mesh)
        x = y = leaf(T, D, seed=rank)
        for block in blocks:
            y = way(block, y)
        y.square().mean().backward()
        return x.grad, [p.grad.to_local() for block in blocks for p in block.parameters()]

    way = Counted(WAYS[name])
    want, got = step(plain), step(way)
    same(got, want)
    assert way.runs > way.regions


def exchanged(rank, name):
    from torch.distributed.nn.functional import all_to_all_single

    sent = []

    def step(way):
        x, w, source = leaf(T, D, seed=rank), leaf(D, D, seed=9), Source(rank)
        to = source.integers(RANKS, T)
        give = to.bincount(minlength=RANKS)
        take = torch.empty_like(give)
        dist.all_to_all_single(take, give)
        give, take = give.tolist(), take.tolist()

        def experts(rows, w):
            sent.append(1)
            there = all_to_all_single(rows.new_empty(sum(take), D), rows, take, give)
            return all_to_all_single(x.new_empty(T, D), torch.tanh(there @ w), give, take)

        def layer(x):
            order = to.argsort(stable=True)
            return torch.zeros_like(x).index_add(0, order, keep(experts, x.sin()[order], w)).exp()

        way(layer, way(layer, x)).sum().backward()
        return x.grad, w.grad

    want = step(plain)
    sent.clear()
    same(step(WAYS[name]), want)
    return len(sent)


@pytest.mark.parametrize("way", WAYS)
def test_fsdp2(ranks, way) -> None:
    ranks.run(sharded, way)


@pytest.mark.parametrize("way", WAYS)
def test_an_exchange_that_is_kept_is_made_once(ranks, way) -> None:
    assert ranks.run(exchanged, way) == [2, 2]
