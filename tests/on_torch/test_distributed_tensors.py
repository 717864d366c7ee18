"""Tensor parallel layers on two ranks: DTensor weights, activations and decisions.

Shapes: B sequences, S positions, D width, E experts. The oracle is the same model in a single process.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from roundpipe_core._backend import backend_of
from roundpipe_torch import (
    GradientError,
    VerifyError,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    remat,
    save_for_recompute,
)
from tests.on_torch.oracle import Counted, by_remat, leaf, plain, reentrant, same
from tests.on_torch.ranks import RANKS

B, S, D, E = 2, 4, 8, 4
T = B * S
WAYS = {"checkpoint": checkpoint, "remat": by_remat, "reentrant": reentrant}


class Block(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.norm = torch.nn.LayerNorm(D)
        self.gate = torch.nn.Linear(D, E, bias=False)
        self.up = torch.nn.Linear(D, 4 * D)
        self.down = torch.nn.Linear(4 * D, D, bias=False)
        self.asked = 0
        for n, p in enumerate(self.parameters()):
            p.data = leaf(*p.shape, seed=seed + n).detach() * 0.3

    def decide(self, logits):
        self.asked += 1
        self.kind = type(logits)
        return logits.detach().argsort(dim=-1, descending=True)[..., :1]

    def forward(self, x):
        h = self.norm(x)
        logits = self.gate(h)
        if doing_recompute():
            (idx,) = get_recompute_data()
        else:
            idx = self.decide(logits)
            save_for_recompute(idx)
        weight = torch.softmax(logits, -1).gather(-1, idx)
        return x + self.down(torch.nn.functional.gelu(self.up(h))) * weight


class Net(torch.nn.Module):
    def __init__(self, way=plain, outer=plain):
        super().__init__()
        self.embed = torch.nn.Embedding(16, D)
        self.blocks = torch.nn.ModuleList(Block(10 * n + 1) for n in range(2))
        self.head = torch.nn.Linear(D, 16, bias=False)
        self.embed.weight.data = leaf(16, D, seed=91).detach()
        self.head.weight.data = leaf(16, D, seed=92).detach()
        self.way, self.outer = way, outer

    def stack(self, x):
        for block in self.blocks:
            x = self.way(block, x)
        return x

    def forward(self, tokens):
        return self.head(self.outer(self.stack, self.embed(tokens)))


def parallel(net, mesh, sequence):
    if not sequence:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in net.blocks:
            parallelize_module(block, mesh, plan)
        return parallelize_module(net, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    for block in net.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "norm": SequenceParallel(),
                "gate": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            },
        )
    return parallelize_module(
        net,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
            "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        },
    )


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tensor_parallel(rank, name, sequence, nested):
    mesh = init_device_mesh("cpu", (RANKS,))
    tokens = torch.randint(0, 16, (B, S), generator=torch.Generator().manual_seed(5))
    loss_of = torch.nn.functional.cross_entropy

    single = Net()
    want = loss_of(single(tokens).flatten(0, 1), tokens.flatten())
    want.backward()

    way = Counted(WAYS[name])
    net = parallel(Net(way, way if nested else plain), mesh, sequence)
    if sequence:
        with loss_parallel():
            loss = loss_of(net(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
    else:
        loss = loss_of(net(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
    same(full(loss.detach()), want.detach(), "loss", within=1e-5)
    for (key, p), q in zip(net.named_parameters(), single.parameters(), strict=True):
        same(full(p.grad), q.grad, key, within=1e-5)
    assert [block.asked for block in net.blocks] == [1, 1]
    assert {block.kind for block in net.blocks} == {DTensor if sequence else torch.Tensor}
    assert way.runs > way.regions


@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("name", WAYS)
def test_tensor_parallel(ranks, name, sequence, nested):
    if sequence and torch.__version__ < "2.12":
        pytest.skip("this torch has no linear layer of a sequence that is spread, checkpointed or not")
    ranks.run(tensor_parallel, name, sequence, nested)


# Decisions that are DTensors


def placements():
    return {"rows": Shard(0), "columns": Shard(1), "whole": Replicate(), "partial": Partial()}


def spread(mesh, where):
    whole = torch.arange(12, dtype=torch.int64).view(6, 2)
    if where == "partial":
        return DTensor.from_local(whole + dist.get_rank(), mesh, [Partial()])
    return distribute_tensor(whole, mesh, [placements()[where]])


def kept(rank, where):
    """A DTensor comes back with its placement and the values of the moment of saving."""
    mesh = init_device_mesh("cpu", (RANKS,))
    made = spread(mesh, where)
    got = []

    def layer(x):
        (index,) = save_for_recompute(made)
        if doing_recompute():
            got.append(index.to_local().clone())
            assert index.placements == made.placements
            index.to_local().zero_()
        return torch.tanh(x)

    x = leaf(T, D)
    loss = checkpoint(layer, x).sum()
    local = made.to_local().clone()
    made.to_local().zero_()
    for retain in (True, False):
        loss.backward(retain_graph=retain)
    assert len(got) == 2
    same(got, [local, local])


@pytest.mark.parametrize("where", ["rows", "columns", "whole", "partial"])
def test_a_dtensor_is_given_back_as_it_was_saved(ranks, where):
    ranks.run(kept, where)


def flipped(rank, where):
    """Rank 1 alone would decide otherwise, so it alone complains, and no rank waits for another."""
    mesh = init_device_mesh("cpu", (RANKS,))
    decided = []

    def layer(x):
        made = spread(mesh, where)
        if decided and rank == 1:
            made.to_local()[-1] += 1
        decided.append(1)
        save_for_recompute(made)
        return torch.tanh(x)

    loss = remat(layer, verify="raise")(leaf(T, D)).sum()
    try:
        loss.backward()
    except VerifyError as error:
        (flip,) = error.flips
        return flip.rows, flip.total, flip.first


@pytest.mark.parametrize(("where", "rows"), [("rows", 3), ("columns", 6), ("whole", 6), ("partial", 6)])
def test_verify_compares_what_the_rank_holds(ranks, where, rows):
    assert ranks.run(flipped, where) == [None, (1, rows, rows - 1)]


def counted(rank):
    mesh = init_device_mesh("cpu", (RANKS,))
    backend = backend_of(spread(mesh, "rows"))
    with pytest.raises(TypeError, match="a DTensor, which is made of other tensors"):
        backend.to_host(spread(mesh, "rows"))
    with pytest.raises(GradientError, match="requires grad"):
        checkpoint(lambda x: save_for_recompute(x)[0], distribute_tensor(leaf(T, D), mesh, [Shard(0)]))
    return [backend.nbytes(spread(mesh, where)) for where in placements()]


def test_bytes_are_those_of_the_rank(ranks):
    assert ranks.run(counted) == [[48, 48, 96, 96]] * 2
