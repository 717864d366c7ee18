"""offload: what a layer holds leaves the device, comes back in time, and nothing else changes.

Without a GPU the CPU plays the device. Its host memory is bytes, which no tensor shares, and its side stream lags: a
copy is done only when somebody waits for it, from whatever the memory holds by then.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from benchmarks._meter import Meter
from roundpipe_torch import (
    MutationError,
    Offload,
    OptionError,
    _offload,
    doing_recompute,
    get_recompute_data,
    keep,
    recompute_once,
    record,
    remat,
    replay,
    save_for_recompute,
)
from tests.on_torch.oracle import leaf, plain, same

D, T = 16, 64
EVERYTHING = {"min_bytes": 1, "inputs": True, "kept": True}


class LaggingDevice:
    """The CPU as a device with a side stream. `log` tells what was asked of it, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.queue: list = []
        self.number = 0
        self.on_host = 0

    def away(self, tensor):
        assert not tensor.requires_grad
        self.number += 1
        self.log.append(("away", self.number))
        copy = _Copy(self, self.number, tensor)
        self.queue.append(copy.leave)  # holds on to the tensor's memory until then
        return copy

    def back(self, copy):
        self.log.append(("back", copy.number))
        target = torch.empty_strided(copy.shape, copy.strides, dtype=copy.dtype)  # at once, as on a device
        self.queue.append(lambda: copy.fill(target))
        return copy.number, target

    def wait(self, back):
        number, target = back
        self.log.append(("wait", number))
        self.drain()
        return target

    def drain(self) -> None:
        while self.queue:
            self.queue.pop(0)()


class _Copy:
    def __init__(self, device, number, tensor) -> None:
        self.device, self.number, self.tensor = device, number, tensor
        self.shape, self.strides, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.nbytes = tensor.nbytes
        device.on_host += self.nbytes

    def leave(self) -> None:
        tensor, self.tensor = self.tensor, None
        self.bytes = bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    def fill(self, target) -> None:
        target.copy_(torch.frombuffer(self.bytes, dtype=self.dtype).view(self.shape))

    def __del__(self) -> None:
        self.device.on_host -= self.nbytes


@pytest.fixture
def device(monkeypatch):
    made = LaggingDevice()
    monkeypatch.setattr(_offload, "movers", lambda device: made if device.type == "cpu" else None)
    return made


class Block(nn.Module):
    """Saves a mask, and keeps the output of a kernel."""

    def __init__(self, seed: int = 0, **save) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.two, self.save = nn.Linear(D, D), nn.Linear(D, D), save

    def forward(self, x):
        h = keep(lambda h: torch.softmax(h, -1) * h, self.one(x))
        (mask,) = save_for_recompute(torch.rand_like(h) > 0.3, **self.save)
        return x + self.two(torch.tanh(h) * mask)


def run(offload, layers: int = 4, make=Block, **options):
    torch.manual_seed(7)
    blocks = [make(n) for n in range(layers)]
    x = leaf(T, D)
    y = x
    for block in blocks:
        y = remat(block, offload=offload, **options)(y)
    y.square().sum().backward()
    return y, x.grad, [p.grad for block in blocks for p in block.parameters()]


PLANS = {
    "cpu": "cpu",
    "small too": Offload(min_bytes=1),
    "inputs": Offload(inputs=True),
    "kept": Offload(kept=True, min_bytes=1),
    "everything": Offload(**EVERYTHING),
    "little": Offload(budget=3000, **EVERYTHING),
    "nothing": Offload(saves=False),
}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_the_gradient_is_the_same(device, plan, use_reentrant) -> None:
    same(run(PLANS[plan], use_reentrant=use_reentrant), run(None, use_reentrant=use_reentrant))
    assert device.on_host == 0
    assert bool(device.log) is (plan not in ("cpu", "inputs", "nothing"))  # these are below the least size here


def test_without_a_device_nothing_moves() -> None:
    assert _offload.movers(torch.device("cpu")) is None
    assert _offload.movers(torch.device("meta")) is None
    same(run(Offload(**EVERYTHING)), run(None))


def live_bytes(device, offload, layers: int = 4):
    torch.manual_seed(7)
    blocks = [remat(Block(n), offload=offload) for n in range(layers)]
    x = leaf(T, D)
    with Meter() as meter:
        y = x
        for block in blocks:
            y = block(y)
        device.drain()
        live, host = meter.live, device.on_host
        y.sum().backward()
    return live, host


def test_what_is_offloaded_leaves_the_device(device) -> None:
    mask, act = T * D, T * D * 4
    plain_live, none = live_bytes(device, None)
    assert none == 0
    slots, host = live_bytes(device, Offload(min_bytes=1))
    assert plain_live - slots == host == 4 * mask
    everything, host = live_bytes(device, Offload(**EVERYTHING))
    # Of each block the mask, the softmax and the product; and the input of all blocks, the first's is the caller's.
    assert host == 4 * (mask + 2 * act + act)
    assert plain_live - everything == host - act
    budgeted, host = live_bytes(device, Offload(budget=mask + act, **EVERYTHING))
    assert host == act + mask  # first come, first served
    assert budgeted == plain_live - mask  # the input of the first block is the caller's


def test_size_and_what_the_save_says(device) -> None:
    def moved(plan, **save) -> int:
        device.log.clear()
        run(plan, layers=1, make=lambda n: Block(n, **save))
        return sum(what == "away" for what, _ in device.log)

    assert moved(None) == moved("cpu") == moved(Offload(min_bytes=T * D + 1)) == 0
    assert moved(Offload(min_bytes=T * D)) == 1
    assert moved(Offload(min_bytes=0)) == 1
    assert moved(Offload(min_bytes=1), offload=False) == 0
    assert moved(None, offload=True) == moved("cpu", offload=True) == moved(Offload(saves=False), offload=True) == 1
    assert moved(Offload(budget=1), offload=True) == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_all_that_a_region_has_on_the_host_sets_out_before_any_of_it_is_awaited(device, use_reentrant) -> None:
    def layer(x):
        for n in range(3):
            x = x + save_for_recompute(torch.ones(T, D), name=str(n))[0]
        return x.exp()

    remat(layer, offload=Offload(min_bytes=1), use_reentrant=use_reentrant)(leaf(T, D)).sum().backward()
    assert [what for what, _ in device.log] == ["away"] * 3 + ["back"] * 3 + ["wait"] * 3


def test_each_region_is_fetched_ahead_of_its_turn(device) -> None:
    seen = []

    class Watched(Block):
        def forward(self, x):
            if doing_recompute():
                seen.append((self.number, len(device.log)))
            return super().forward(x)

    def make(n):
        block = Watched(n)
        block.number = n
        return block

    run(Offload(min_bytes=1), make=make)
    log = device.log
    assert [number for number, _ in seen] == [3, 2, 1, 0]
    begun = dict(seen)
    mask_of = {block: block + 1 for block in range(4)}  # the only thing moved, in order
    for block in (2, 1, 0):
        assert log.index(("back", mask_of[block])) < begun[block + 1], (
            "not under way when the next one's recompute began"
        )
        assert log.index(("wait", mask_of[block])) >= begun[block]
    assert sum(what == "back" for what, _ in log) == 4


def test_retain_graph_fetches_again(device) -> None:
    def scenario(offload):
        torch.manual_seed(7)
        block, x = remat(Block(), offload=offload), leaf(T, D)
        y = block(x)
        for retain in (True, True, False):
            y.sum().backward(retain_graph=retain)
        return y, x.grad, [p.grad for p in block.parameters()]

    same(scenario(Offload(**EVERYTHING)), scenario(None))
    assert device.on_host == 0


@pytest.mark.parametrize("inner", [None, Offload(**EVERYTHING), Offload(saves=False)])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_nested(device, inner, use_reentrant) -> None:
    def scenario(outer, inner):
        torch.manual_seed(7)
        blocks, x = [remat(Block(n), offload=inner, use_reentrant=use_reentrant) for n in range(3)], leaf(T, D)

        def layer(x):
            for block in blocks:
                x = block(x)
            return x.sin()

        y = remat(remat(layer, offload=outer), offload=outer)(x)
        y.sum().backward()
        return y, x.grad, [p.grad for block in blocks for p in block.parameters()]

    same(scenario(Offload(**EVERYTHING), inner), scenario(None, None))
    away = [n for what, n in device.log if what == "away"]
    assert device.on_host == 0
    # The input of the outermost, and of each block the mask, the kept output and what softmax holds.
    assert len(away) == (1 if inner and not inner.saves else 10)


def test_a_save_is_a_snapshot(device) -> None:  # R6
    def scenario(offload):
        x, scales = leaf(T, D), []

        def layer(x):
            if not doing_recompute():
                scale = x.detach().abs()
                save_for_recompute(scale)
                y = (x * scale.clone()).sin()
                scales.append(scale)
                return y
            (scale,) = get_recompute_data()
            y = (x * scale.clone()).sin()
            scale.zero_()  # spoils nothing
            return y

        y = remat(layer, offload=offload)(x)
        scales[0].fill_(9)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        return y, x.grad

    same(scenario(Offload(min_bytes=1)), scenario(None))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("drained", [False, True])
def test_an_input_written_to_is_an_error(device, use_reentrant, drained) -> None:
    x = leaf(T, D) * 1
    y = remat(lambda x: x.exp().sin(), offload=Offload(**EVERYTHING), use_reentrant=use_reentrant)(x)
    if drained:
        device.drain()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises((MutationError, RuntimeError), match=r"in place|inplace"):
        y.sum().backward()


def test_a_small_input_written_to_is_an_error_too(device) -> None:
    x = leaf(2) * 1
    y = remat(lambda x: x.exp().sin(), offload=Offload(inputs=True))(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(MutationError, match="changed in place after the forward"):
        y.sum().backward()


def test_a_kept_output_written_to_is_an_error(device) -> None:
    def layer(x):
        y = keep(torch.sin, x * 2)
        return (y.mul_(2)).exp()

    with pytest.raises(MutationError, match=r"an output of keep\(sin\) was changed in place"):
        remat(layer, offload=Offload(**EVERYTHING))(leaf(T, D)).sum().backward()


def test_places_are_counted(device) -> None:  # R12
    from roundpipe_core._phase import thread

    slots = []

    def layer(x):
        slots.append(thread.run.slot)
        save_for_recompute(torch.ones(T), name="stays", offload=False)
        save_for_recompute(torch.ones(T, dtype=torch.int8))
        return keep(torch.exp, x.sin()).sin()

    y = remat(layer, offload=Offload(min_bytes=1))(leaf(T, D))
    device.drain()
    assert slots[0].nbytes() == T * 4 + T + T * D * 4
    (entry, other) = slots[0].entries.values()
    assert [list(one.places().values()) for one in (entry, other)] == [[T * 4], [T]]
    assert {type(leaf).__name__ for leaf in other.leaves} == {"Shipped"}
    assert set(slots[0].places()) == {"cpu"}
    y.sum().backward()


def test_the_budget_is_of_those_that_share_the_plan_and_is_given_back(device) -> None:
    plan = Offload(min_bytes=1, budget=2 * T * D)
    blocks = [remat(Block(n), offload=plan) for n in range(3)]
    for _ in range(2):
        device.log.clear()
        y = leaf(T, D)
        for block in blocks:
            y = block(y)
        assert [what for what, _ in device.log] == ["away", "away"]
        assert plan._usage.bytes == 2 * T * D
        del y
        assert plan._usage.bytes == 0
    other = copy.deepcopy(blocks[0])
    kept = pickle.loads(pickle.dumps(plan))
    y = blocks[0](leaf(T, D))
    assert kept == plan
    assert kept._usage.bytes == 0
    assert other(leaf(T, D)).requires_grad
    del y


def test_it_goes_with_the_graph(device) -> None:
    gc.disable()
    try:
        for use_reentrant in (False, True):
            y = remat(Block(), offload=Offload(**EVERYTHING), use_reentrant=use_reentrant)(leaf(T, D))
            device.drain()
            assert device.on_host > 0
            del y
            assert device.on_host == 0
    finally:
        gc.enable()


def test_verify_and_once_and_other_values(device) -> None:
    class Router(nn.Module):
        def forward(self, x):
            plan = recompute_once(lambda s: {"top": s.topk(3).indices, "n": 3, "mask": s > 0}, x)
            assert plan["n"] == 3
            return x.gather(-1, plan["top"]).exp().sum(-1, keepdim=True) * x * plan["mask"]

    def scenario(offload):
        x = leaf(T, D)
        y = remat(Router(), offload=offload, verify="raise")(x)
        y.sum().backward()
        return y, x.grad

    same(scenario(Offload(min_bytes=1)), scenario(None))
    assert sum(what == "away" for what, _ in device.log) == 2


def test_tapes_take_the_arrays_themselves(device) -> None:
    with record() as tape:
        want = run(Offload(**EVERYTHING), layers=2)
    with replay(tape):
        same(run(Offload(**EVERYTHING), layers=2), want)
    with replay(tape):
        same(run(None, layers=2), want)


def test_strides_dtypes_and_empty_ones(device) -> None:
    data = [
        torch.arange(24.0).view(4, 6).t(),
        torch.arange(24).view(4, 6)[:, ::2],
        torch.ones(3, 1, dtype=torch.bfloat16).expand(3, 5),
        torch.zeros(0, 4),
        torch.tensor(3),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(3, dtype=torch.bool),
    ]

    def layer(x):
        got = save_for_recompute(*data, offload=True)
        for one, want in zip(got, data, strict=True):
            same(one, want)
            if doing_recompute():
                assert one.stride() == want.stride()
        return x.exp().sin()

    remat(layer)(leaf(3)).sum().backward()
    assert sum(what == "away" for what, _ in device.log) == len(data) - 1


@pytest.mark.parametrize("offload", [True, "gpu", 3, Offload])
def test_other_options_are_errors(offload) -> None:
    with pytest.raises(OptionError, match='offload must be "cpu", an Offload or None'):
        remat(lambda x: x, offload=offload)


@pytest.mark.parametrize("options", [{"budget": -1}, {"min_bytes": "1 MB"}, {"min_bytes": None}, {"budget": 1e9}])
def test_bytes_are_numbers(options) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(options))} must be a number of bytes, not"):
        Offload(**options)


def test_a_save_takes_a_bool() -> None:
    with pytest.raises(OptionError, match="offload must be True, False or None, not 'cpu'"):
        save_for_recompute(1, offload="cpu")


def test_an_inner_layer_that_differentiates(device) -> None:
    def scenario(offload):
        x = leaf(T, D)

        def layer(x):
            h = x.sin()
            energy = keep(lambda h: torch.tanh(h).square(), h).exp().sum()
            return torch.autograd.grad(energy, h, create_graph=True)[0] * h

        y = (plain if offload is None else remat(layer, offload=offload))(*([layer, x] if offload is None else [x]))
        y.sum().backward()
        return y, x.grad

    same(scenario(Offload(**EVERYTHING)), scenario(None))


# ---------------------------------------------------------------------------------------------- on a device

cuda = pytest.mark.cuda


@contextlib.contextmanager
def no_sync():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_cuda(offload, size: int = 1024, layers: int = 6):
    torch.manual_seed(7)
    blocks = [nn.Sequential(nn.Linear(size, size), Saving()).cuda() for _ in range(layers)]
    layers_ = [remat(block, offload=offload) for block in blocks]
    x = torch.randn(size, size, device="cuda").requires_grad_()

    def step():
        y = x
        for layer in layers_:
            y = layer(y)
        y.square().sum().backward()
        return y

    return step, x, blocks


class Saving(nn.Module):
    def forward(self, x):
        (mask,) = save_for_recompute(torch.rand_like(x) > 0.3)
        return keep(torch.tanh, x * mask).sin()


@cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("plan", ["cpu", "everything"])
def test_cuda_gradients_without_a_sync(plan) -> None:
    def scenario(offload):
        step, x, blocks = on_cuda(offload)
        torch.cuda.manual_seed(3)
        with no_sync():
            for _ in range(3):
                y = step()
        return y.detach(), x.grad, [p.grad for block in blocks for p in block.parameters()]

    same(scenario(PLANS[plan]), scenario(None))


@cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_memory_after_the_forward() -> None:
    def held(offload) -> int:
        _, x, blocks = on_cuda(offload)
        layers = [remat(block, offload=offload) for block in blocks]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = x
        for layer in layers:
            y = layer(y)
        torch.cuda.synchronize()
        torch.empty(1, device="cuda")  # lets the allocator take back what the side stream is done with
        after = torch.cuda.memory_allocated()
        y.sum().backward()
        return after - before

    mask = 1024 * 1024
    assert held(None) - held("cpu") >= 6 * mask
