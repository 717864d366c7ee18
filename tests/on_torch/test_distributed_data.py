"""Wrappers that train one model on several ranks' data, against a single process that has all the data.

Shapes: T tokens, D width, E experts.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from roundpipe_torch import CheckpointMismatchError, checkpoint, remat
from tests.on_torch.oracle import Source, by_remat, decided, leaf, plain, reentrant, same
from tests.on_torch.ranks import RANKS

T, D, E = 6, 6, 4
WAYS = {"checkpoint": checkpoint, "remat": by_remat, "reentrant": reentrant}


class Layer(torch.nn.Module):
    """Each rank uses other experts, of the first `high`; all of them if that is E."""

    def __init__(self, seed, high=E):
        super().__init__()
        self.gate = torch.nn.Linear(D, E, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(E))
        for n, p in enumerate(self.parameters()):
            p.data = leaf(*p.shape, seed=seed + n).detach() * 0.5
        self.high = high
        self.source = Source(seed)
        self.routes: list[torch.Tensor] = []
        self.given: list[torch.Tensor] | None = None

    def decide(self, rows):
        if self.given is not None:
            return self.given.pop(0)
        asked = self.source.integers(self.high, rows)
        if self.high == E:  # every expert gets tokens
            asked = torch.arange(rows).roll(int(asked[0])) % E
        self.routes.append(asked)
        return asked

    def forward(self, x):
        idx = decided(lambda: self.decide(len(x)))
        weight = torch.softmax(self.gate(x), -1).gather(-1, idx[:, None])
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            (rows,) = torch.where(idx == e)
            if len(rows):
                y = y.index_add(0, rows, torch.tanh(expert(x[rows])) * weight[rows])
        return x + y


class Net(torch.nn.Module):
    """Two layers, the second used twice."""

    def __init__(self, way=plain, outer=plain, high=E, seed=0):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(10, high), Layer(40, high)])
        self.way, self.outer = way, outer
        for layer in self.layers:
            layer.source = Source(seed)

    def forward(self, x):
        return self.outer(self.stack, x)

    def stack(self, x):
        for n in (0, 1, 1):
            x = self.way(self.layers[n], x)
        return x


def batches(rank, steps):
    return [leaf(T + rank, D, seed=100 * step + rank, grad=False) for step in range(steps)]


def routes_of_all(net, steps):
    """The routes of each layer, by rank, step and use."""
    layers = [module for module in net.modules() if isinstance(module, Layer)]
    per = [len(layer.routes) // steps for layer in layers]
    mine = [
        [layer.routes[step * n : (step + 1) * n] for step in range(steps)] for layer, n in zip(layers, per, strict=True)
    ]
    everything = [None] * RANKS
    torch.distributed.all_gather_object(everything, mine)
    assert per == [1, 2]
    return everything


def check(net, rank, steps, train):
    """`train(x)` leaves a step's gradients on `net`, or gives them. They are those of a single process."""
    got = []
    for x in batches(rank, steps):
        net.zero_grad()
        got.append(train(x) or [full(p.grad) for p in net.parameters()])
    everything = routes_of_all(net, steps)
    for step in range(steps):
        one = Net()
        for r in range(RANKS):
            for layer, given in zip(one.layers, everything[r], strict=True):
                layer.given = list(given[step])
            (one(batches(r, steps)[step]).square().sum() / RANKS).backward()
        for (key, p), grad in zip(one.named_parameters(), got[step], strict=True):
            want = torch.zeros_like(p) if p.grad is None else p.grad
            grad = torch.zeros_like(p) if grad is None else grad
            same(grad, want, f"step {step} {key}", within=1e-5)


def full(tensor):
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().cpu()
    return None if tensor is None else tensor.clone()


def ddp(rank, name, options, nested, high):
    way = WAYS[name]
    net = Net(way, way if nested else plain, high, seed=rank)
    model = DistributedDataParallel(net, **options)

    def train(x):
        model(x).square().sum().backward()

    check(net, rank, 3, train)


DDP = {
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "views": {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
}


@pytest.mark.parametrize(("name", "nested"), [("checkpoint", False), ("remat", False), ("remat", True)])
@pytest.mark.parametrize("options", DDP)
def test_ddp(ranks, name, options, nested):
    high = E if options == "static" else E - 1  # a static graph uses the same experts every time
    ranks.run(ddp, name, DDP[options], nested, high)


@pytest.mark.parametrize("options", DDP)
def test_ddp_with_the_second_engine(ranks, options):
    ranks.run(ddp, "reentrant", DDP[options], False, E if options == "static" else E - 1)


# Fully sharded, the second generation


def fsdp(rank, name, order, reshard, offload, root):
    """`order`: what is around what. The layers are sharded one by one; each rank gathers them for its own experts."""
    mesh = init_device_mesh("cpu", (RANKS,))
    way = WAYS[name]
    inside = order == "fsdp(checkpoint)"
    net = Net(plain if inside else way, seed=rank)
    options = {"mesh": mesh, "reshard_after_forward": reshard}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for n, layer in enumerate(net.layers):
        if order.startswith("remat"):
            net.layers[n] = layer = remat(layer)
        elif order == "wrapper, fsdp":
            net.layers[n] = layer = checkpoint_wrapper(layer, checkpoint_fn=way)
        elif inside:
            layer.forward = functools.partial(way, layer.forward)
        fully_shard(layer, **options)
        if order == "fsdp, wrapper":
            net.layers[n] = checkpoint_wrapper(layer, checkpoint_fn=way)
        elif order.endswith("remat"):
            net.layers[n] = remat(remat(layer, label="once"), label="again")
    if "remat" in order or "wrapper" in order:
        net.way = plain
    if root:
        fully_shard(net, **options)

    def train(x):
        net(x).square().sum().backward()

    check(net, rank, 2, train)
    same(names_of(net), names_of(Net()))
    if "wrapper" not in order:
        assert all(isinstance(layer, FSDPModule) for layer in net.layers)


def names_of(net):
    """What a checkpoint on disk would have, the whole of each weight."""
    state = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return sorted(state) if torch.distributed.get_rank() == 0 else []


ORDERS = [
    "fsdp(checkpoint)",
    "checkpoint(fsdp)",
    "remat, fsdp",
    "fsdp, remat",
    "remat, fsdp, remat",
    "fsdp, wrapper",
    "wrapper, fsdp",
]


@pytest.mark.parametrize(
    ("order", "root"), [*((order, True) for order in ORDERS), *((order, False) for order in ORDERS[:2])]
)
def test_fsdp2(ranks, order, root):
    ranks.run(fsdp, "checkpoint", order, True, False, root)


@pytest.mark.parametrize("order", ORDERS[:2])
@pytest.mark.parametrize("reshard", [False, 1], ids=["kept", "resharded to one"])
def test_fsdp2_that_keeps_weights_after_forward(ranks, order, reshard):
    ranks.run(fsdp, "checkpoint", order, reshard, False, True)


@pytest.mark.parametrize("order", ORDERS[:2])
def test_fsdp2_with_weights_on_the_host(ranks, order):
    ranks.run(fsdp, "checkpoint", order, True, True, True)


@pytest.mark.parametrize(("order", "root"), [("fsdp(checkpoint)", True), ("checkpoint(fsdp)", False)])
def test_fsdp2_with_the_second_engine(ranks, order, root):
    ranks.run(fsdp, "reentrant", order, True, False, root)


def used_twice(rank):
    """Each layer once, which is right, then one of them twice."""
    mesh = init_device_mesh("cpu", (RANKS,))
    net = Net(reentrant)
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    x = leaf(T, D, seed=rank)
    net.outer = lambda stack, x: reentrant(net.layers[1], reentrant(net.layers[0], x))
    for _ in range(2):
        net(x).sum().backward()
    net.outer = plain
    loss = net(x).sum()
    with pytest.raises(CheckpointMismatchError, match="around a module of fully_shard that this backward has been"):
        loss.backward()


def test_the_second_engine_around_a_sharded_module_that_is_used_twice(ranks):
    ranks.run(used_twice)


# The class before it


def first_fsdp(rank, inside, nested):
    net = Net(plain if inside else checkpoint, checkpoint if nested else plain, seed=rank)
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    for n, layer in enumerate(net.layers):
        if inside:
            layer.forward = functools.partial(checkpoint, layer.forward)
        net.layers[n] = FullyShardedDataParallel(layer, **options)
    root = FullyShardedDataParallel(net, **options)

    def train(x):
        root(x).square().sum().backward()
        with FullyShardedDataParallel.summon_full_params(root, with_grads=True):
            return [None if p.grad is None else p.grad.clone() for p in net.parameters()]

    check(net, rank, 2, train)


@pytest.mark.parametrize("inside", [True, False], ids=["fsdp(checkpoint)", "checkpoint(fsdp)"])
@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
def test_fsdp1(ranks, inside, nested):
    ranks.run(first_fsdp, inside, nested)
