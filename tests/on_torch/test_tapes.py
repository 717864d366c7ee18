"""record and replay in torch (R13). The oracle is the layer without checkpointing, given the recorded decisions."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch

from roundpipe_torch import (
    Tape,
    TapeError,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    recompute_once,
    record,
    remat,
    replay,
    save_for_recompute,
)

T, D, E, K = 12, 8, 4, 2


class MoE(torch.nn.Module):
    """Top-k of a gate, in one of three styles. `given` are routings to take instead, for the oracle."""

    def __init__(self, style: str = "branch") -> None:
        super().__init__()
        self.style = style
        self.gate = torch.nn.Linear(D, E)
        self.experts = torch.nn.Parameter(torch.randn(E, D, D) / D)
        self.given: list[torch.Tensor] = []
        self.routed = 0

    def route(self, x_TD: torch.Tensor) -> torch.Tensor:
        self.routed += 1
        return self.gate(x_TD).topk(K).indices

    def choose(self, x_TD: torch.Tensor) -> torch.Tensor:
        if self.given:
            return self.given.pop(0)
        if self.style == "once":
            return recompute_once(self.route, x_TD)
        if self.style == "returned":
            return save_for_recompute(self.route(x_TD))[0]
        if doing_recompute():
            return get_recompute_data()[0]
        return save_for_recompute(self.route(x_TD))[0]

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        idx_TK = self.choose(x_TD)
        weights_TK = self.gate(x_TD).softmax(-1).gather(-1, idx_TK)
        y_TKD = torch.einsum("td,tkde->tke", x_TD, self.experts[idx_TK])
        return x_TD + (weights_TK[..., None] * y_TKD).sum(1)


def model(style: str = "branch", layers: int = 3, **options: Any) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(remat(MoE(style), **options) for _ in range(layers)))


def gradients(model: torch.nn.Module, x: torch.Tensor, tape: Tape | None = None, **how: Any) -> list[torch.Tensor]:
    model.zero_grad()
    if tape is None:
        y = model(x)
    else:
        with replay(tape, **how):
            y = model(x)
    y.sin().sum().backward()
    return [p.grad for p in model.parameters()]  # type: ignore[misc]


def oracle(model: torch.nn.Sequential, x: torch.Tensor, tape: Tape) -> list[torch.Tensor]:
    plain = torch.nn.Sequential(*(MoE() for _ in model))
    plain.load_state_dict(model.state_dict())
    for layer, entry in zip(plain, tape.entries(), strict=True):
        layer.given = [entry.value.clone()]
    return gradients(plain, x)


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, two))


@pytest.mark.parametrize("style", ["branch", "returned", "once"])
@pytest.mark.parametrize("engine", [False, True], ids=["default", "reentrant"])
@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
def test_gradient_of_the_recorded_routing(style: str, engine: bool, mode: str) -> None:
    net, x = model(style, use_reentrant=engine), torch.randn(T, D)
    context = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    with context(), record() as tape:
        net(x)
    assert [entry.shape for entry in tape.entries()] == [(T, K)] * 3
    for layer in net:
        layer.gate.weight.data += 0.3 * torch.randn(E, D)  # the gate has moved: it would route otherwise now
        layer.routed = 0
    expected = oracle(net, x, tape)
    assert same(gradients(net, x, tape), expected)
    assert not same(gradients(net, x), expected)
    if style != "returned":
        assert sum(layer.routed for layer in net) == 3  # all in the run without a tape


def test_again_and_again_and_backward_inside() -> None:
    net, x = model(), torch.randn(T, D)
    with record() as tape:
        expected = gradients(net, x)
    assert len(tape.entries()) == 3  # the recomputes of that backward are not recorded
    for _ in range(3):
        with replay(tape):
            net.zero_grad()
            net(x).sin().sum().backward()
        assert same([p.grad for p in net.parameters()], expected)


def test_two_backwards_of_one_graph() -> None:
    net, x = model(), torch.randn(T, D)
    with record() as tape:
        net(x)
    with replay(tape):
        y = net(x).sin().sum()
    y.backward(retain_graph=True)
    once = [p.grad.clone() for p in net.parameters()]
    y.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(net.parameters(), once, strict=True))


def test_nested_and_shared_layers() -> None:
    torch.manual_seed(0)
    moe = MoE("once")
    inner = remat(moe)
    net = remat(lambda x: inner(inner(x)) + checkpoint(inner, -x))
    x = torch.randn(T, D)
    with record() as tape:
        net(x)
    assert len(tape.root.regions) == 1
    assert len(tape.entries()) == 3
    moe.gate.weight.data *= -1

    def run(given: list[torch.Tensor]) -> list[torch.Tensor]:
        moe.zero_grad()
        if given:
            moe.given = list(given)
            y = moe(moe(x)) + moe(-x)
        else:
            with replay(tape):
                y = net(x)
        y.sin().sum().backward()
        return [p.grad.clone() for p in moe.parameters()]

    expected = run([entry.value for entry in tape.entries()])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(run([]), expected, strict=True))


def test_interleaved_microbatches() -> None:
    net, one, two = model(), torch.randn(T, D), torch.randn(T, D)
    with record() as first:
        y_one = net(one)
    with record() as second:
        y_two = net(two)
    with replay(second):
        again_two = net(two)
    with replay(first):
        again_one = net(one)
    assert torch.equal(again_one, y_one)
    assert torch.equal(again_two, y_two)
    with pytest.raises(TapeError, match="more than the model asked for"), replay(first):
        net[:2](one)


def test_dropout_draws_alike_in_both_phases_of_a_replay() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        keep = recompute_once(lambda: torch.rand(T) > 0.5)
        return torch.dropout(x.exp() * keep[:, None], 0.5, train=True)

    x = torch.randn(T, D, requires_grad=True)
    with record() as tape:
        checkpoint(layer, x)
    with replay(tape):
        y = checkpoint(layer, x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, y)  # as exp's derivative is exp, and a mask its own


def test_threads_keep_apart() -> None:
    net = model()
    xs = [torch.randn(T, D) for _ in range(4)]
    tapes: dict[int, Tape] = {}
    same: dict[int, bool] = {}
    together = threading.Barrier(4, timeout=20)

    def work(n: int) -> None:
        y = z = xs[n]
        with record() as tape:
            for layer in net:
                together.wait()
                y = layer(y)
        tapes[n] = tape
        with replay(tape):
            for layer in net:
                together.wait()
                z = layer(z)
        same[n] = torch.equal(y, z)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(tapes[n].entries()) for n in range(4)] == [3] * 4
    assert same == dict.fromkeys(range(4), True)


def test_a_tape_keeps_its_decisions_and_not_the_graph() -> None:
    net, x = model(), torch.randn(T, D)
    between: list[weakref.ref[torch.Tensor]] = []
    hook = net[0].register_forward_hook(lambda _, __, out: between.append(weakref.ref(out)))
    with record() as tape:
        y = net(x)
    hook.remove()
    kept = [entry.value.clone() for entry in tape.entries()]
    assert between[0]() is not None  # held by the graph, as an input of the next region
    del y
    assert between[0]() is None
    with replay(tape):
        net(x)
    assert all(torch.equal(entry.value, copy) for entry, copy in zip(tape.entries(), kept, strict=True))


def test_a_layer_that_spoils_what_it_reads() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        (idx,) = save_for_recompute(x.detach().argmax(-1))
        y = x.exp().gather(-1, idx[:, None].clone())
        idx.zero_()
        return y

    x = torch.randn(T, D, requires_grad=True)
    with record() as tape:
        checkpoint(layer, x)
    for _ in range(2):
        with replay(tape):
            y = checkpoint(layer, x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad.argmax(-1), x.argmax(-1))


def test_verify_has_nothing_to_say_in_a_replay() -> None:
    net, x = model("returned", verify="raise"), torch.randn(T, D)
    with record() as tape:
        net(x)
    for layer in net:
        layer.gate.weight.data *= -1
    gradients(net, x, tape)


def test_fewer_rows_are_refused_before_the_layer_runs() -> None:
    net, x = model("branch"), torch.randn(T, D)
    with record() as tape:
        net(x)
    with pytest.raises(TapeError, match="12 rows, as an input had; now inputs have 7, 56") as error, replay(tape):
        net(x[:7])
    assert "layer 'MoE'" in str(error.value)
    with pytest.raises(TapeError, match="integers from 0 to 3, where 0 to 1 are in range"), replay(tape, below=2):
        net(x)


def test_a_layer_without_arguments() -> None:
    w = torch.randn(D, requires_grad=True)

    def layer() -> torch.Tensor:
        (order,) = save_for_recompute(w.detach().argsort())
        return w.exp()[order[:K]]

    with record() as tape:
        want = checkpoint(layer)
    with torch.no_grad():
        w.neg_()
    with replay(tape):
        got = checkpoint(layer)
    (grad,) = torch.autograd.grad(got.sum(), w)
    assert torch.allclose(got, 1 / want)
    assert grad.count_nonzero() == K


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8])
def test_narrow_integers_of_another_maker_arrive_as_indices(dtype: torch.dtype) -> None:
    net, x = model("once"), torch.randn(T, D)
    with record() as tape:
        expected = gradients(net, x)
    narrow = {torch.int8: "int8", torch.int16: "int16", torch.int32: "int32", torch.uint8: "uint8"}[dtype]
    numpy = pytest.importorskip("numpy")
    from roundpipe_core._backend import to_host
    from roundpipe_core._host import HostArray

    def as_routing(leaf: Any) -> HostArray:
        host = to_host(leaf.to(dtype))
        return HostArray(narrow, host.shape, host.data, "routing")

    assert same(gradients(net, x, tape.mapped(as_routing)), expected)
    assert numpy


@pytest.mark.parametrize("devices", [("cpu", "meta"), ("meta", "cpu")])
def test_of_a_layers_devices_decisions_go_to_that_which_is_not_the_host(devices: tuple[str, str]) -> None:
    found = []

    def layer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        (idx,) = get_recompute_data() if doing_recompute() else save_for_recompute(torch.arange(2))
        found.append(idx.device.type)
        return x

    with record() as tape:
        checkpoint(layer, torch.ones(2), torch.ones(2))
    with replay(tape):
        checkpoint(layer, *(torch.ones(2, device=device) for device in devices))
    assert found == ["cpu", "meta"]


@pytest.mark.cuda
def test_a_tape_from_the_host_goes_to_the_device() -> None:
    net, x = model("once"), torch.randn(T, D)
    with record() as tape:
        net(x)
    net.cuda()
    assert all(grad.is_cuda for grad in gradients(net, x.cuda(), tape))
