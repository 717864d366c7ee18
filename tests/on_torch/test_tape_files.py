"""Tapes of torch in files, and routing from inference to training (R13)."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

from roundpipe_core._backend import to_host
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
from tests.core.test_arrays import UNFIT

ROOT = Path(__file__).parents[2]
D, E, K, LAYERS = 8, 6, 2, 3
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


class MoE(torch.nn.Module):
    """Top-k of a gate. `given` are routings to take instead, for the oracle."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.gate = torch.nn.Linear(D, E)
        self.experts = torch.nn.Parameter(torch.randn(E, D, D) / D)
        self.given: list[torch.Tensor] = []

    def route(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.gate(x_TD).topk(K).indices

    def choose(self, x_TD: torch.Tensor) -> torch.Tensor:
        if self.given:
            return self.given.pop(0)
        if self.style == "once":
            return recompute_once(self.route, x_TD)
        if self.style == "branch" and doing_recompute():
            return get_recompute_data()[0]
        return save_for_recompute(self.route(x_TD))[0]

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        idx_TK = self.choose(x_TD)
        weights_TK = self.gate(x_TD).softmax(-1).gather(-1, idx_TK)
        y_TKD = torch.einsum("...d,...kde->...ke", x_TD, self.experts[idx_TK])
        return x_TD + (weights_TK[..., None] * y_TKD).sum(-2)


def model(style: str) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(remat(MoE(style)) for _ in range(LAYERS)))


def padded(sequences: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch and its mask, as a trainer makes them."""
    length = max(map(len, sequences))
    x, mask = torch.full((len(sequences), length, D), 3.0), torch.zeros(len(sequences), length, dtype=torch.int64)
    for n, sequence in enumerate(sequences):
        at = slice(length - len(sequence), None) if side == "left" else slice(len(sequence))
        x[n, at], mask[n, at] = sequence, 1
    return x, mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("style", ["branch", "returned", "once"])
def test_routing_of_inference_is_replayed_in_training(style: str, side: str, tmp_path: Path) -> None:
    engine, trainer = model(style), model(style)
    sequences = [torch.randn(length, D) for length in (3, 5, 2)]
    routings, outputs, name = [], [], None
    with torch.inference_mode():
        for sequence in sequences:
            with record() as tape:
                outputs.append(engine(sequence))
            routings.append(tape.to_routing())
            name = tape.entries()[0].name
    x, mask = padded(sequences, side)
    ours = Tape.from_routing(routings, experts=E, mask=mask, padding=0, name=name)
    ours.save(tmp_path / "routing.tape")
    tape = Tape.load(tmp_path / "routing.tape")

    with torch.no_grad(), replay(tape):  # the same weights: what the engine computed, at each token's own place
        again = trainer(x)
    torch.testing.assert_close(again[mask.bool()], torch.cat([y.clone() for y in outputs]))

    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)  # the trainer has moved on, its router would choose others
    grads = gradients(trainer, x, mask, tape)
    oracle = torch.nn.Sequential(*(MoE(style) for _ in range(LAYERS)))
    oracle.load_state_dict(trainer.state_dict())
    for n, layer in enumerate(oracle):
        pinned = torch.zeros(*mask.shape, K, dtype=torch.int64) + torch.arange(K)
        pinned[mask.bool()] = torch.cat([torch.from_numpy(r[:, n].astype("int64")) for r in routings])
        layer.given = [pinned]
    assert all(map(torch.equal, grads, gradients(oracle, x, mask)))
    assert not all(map(torch.equal, grads, gradients(trainer, x, mask)))  # its own choices give another gradient


def gradients(net: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor, tape: Tape | None = None) -> list[Any]:
    net.zero_grad()
    if tape is None:
        y = net(x)
    else:
        with replay(tape):
            y = net(x)
    (y.sin() * mask[..., None]).sum().backward()
    return [parameter.grad for parameter in net.parameters()]


def test_microbatches_each_have_their_tape() -> None:
    net, x = model("returned"), torch.randn(8, D)
    with record() as tape, torch.no_grad():
        net(x)
    routing = tape.to_routing()

    for begin in range(0, 8, 4):
        part = Tape.from_routing(routing[begin : begin + 4], experts=E)
        with replay(part):
            net(x[begin : begin + 4])
    with pytest.raises(TapeError, match="8 rows, as an input had; now inputs have 4"), replay(tape):
        net(x[:4])


def test_gradients_with_a_loaded_tape_are_those_of_the_recorded_one(tmp_path: Path) -> None:
    net, x, mask = model("branch"), torch.randn(9, D), torch.ones(9)
    with record() as tape, torch.no_grad():
        net(x)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    tape.save(tmp_path / "a.tape")

    expected = gradients(net, x, mask, tape)

    assert all(map(torch.equal, gradients(net, x, mask, Tape.load(tmp_path / "a.tape")), expected))


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    bits = torch.arange(64, dtype=torch.uint8)
    tensors = [(bits % 2).bool() if dtype is torch.bool else bits.view(dtype) for dtype in DTYPES]
    tensors += [torch.randn(3, 4).t(), torch.randn(2, dtype=torch.complex64).conj(), torch.tensor(3), torch.ones(0, 2)]

    def layer(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        got.append(get_recompute_data() if doing_recompute() else save_for_recompute(*given))
        return x * 2

    got: list[Any] = []
    with record() as tape:
        checkpoint(layer, torch.ones(1), *tensors)
    tape.save(tmp_path / "a.tape")
    with replay(Tape.load(tmp_path / "a.tape")):
        checkpoint(layer, torch.ones(1), *tensors)

    assert len(got[1]) == len(tensors)
    for tensor, back in zip(tensors, got[1], strict=True):
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert to_host(back).data == to_host(tensor).data


def test_named_tuples_of_torch_keep_their_fields(tmp_path: Path) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        best = recompute_once(torch.topk, x, 2)
        return x[best.indices] * 2

    x = torch.tensor([1.0, 3.0, 2.0])
    with record() as tape:
        checkpoint(layer, x)
    tape.save(tmp_path / "a.tape")

    with replay(Tape.load(tmp_path / "a.tape")):
        assert checkpoint(layer, -x).tolist() == [-6.0, -4.0]  # the tape's, not the greatest


def recorded(value: Any) -> Tape:
    with record() as tape:
        save_for_recompute(value)
    return tape


def nested(layout: torch.layout, *parts: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor(list(parts), layout=layout)


@pytest.mark.filterwarnings("ignore:.*in prototype")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_routing_and_its_mask_in_nested_tensors_are_to_be_taken_apart(layout: torch.layout) -> None:
    """Trainers keep a batch without padding so."""
    parts = torch.tensor([[[3, 1]]]), torch.tensor([[[0, 2]], [[1, 3]]])
    routing, mask = nested(layout, *parts), nested(layout, *(torch.ones(len(part), dtype=torch.bool) for part in parts))
    told = r"cannot be read: a nested tensor\.\n  called at: .*\n  way out: take it apart, tensor\.unbind\(\)\."
    with pytest.raises(TapeError, match=told):
        Tape.from_routing(routing, experts=4)
    with pytest.raises(TapeError, match=told):
        Tape.from_routing(parts, experts=4, mask=mask)
    assert Tape.from_routing(routing.unbind(), experts=4).to_routing().tolist() == torch.cat(parts).tolist()


@pytest.mark.filterwarnings("ignore:.*(in prototype|in beta|[Mm]asked)")
def test_tensors_without_values_are_refused(tmp_path: Path) -> None:
    with FakeTensorMode():
        fake = torch.ones(2, dtype=torch.int64)
    jagged, strided = (nested(layout, torch.ones(1), torch.ones(2)) for layout in (torch.jagged, torch.strided))
    for tensor, fault in [
        (fake, "without values"),
        (torch.ones(2, device="meta"), "without values, on the meta device(.|\n)* way out: record a run on a device"),
        (torch.ones(2, 2).to_sparse(), "a tensor of layout torch.sparse_coo"),
        (masked_tensor(torch.ones(2), torch.ones(2) > 0), "a MaskedTensor, which is made of other tensors"),
        (TwoTensor(torch.ones(2), torch.ones(2)), "a TwoTensor, which is made of other tensors"),
        (jagged, "a NestedTensor of the shape"),
        (strided, r"a Tensor of the shape \[2, None\]"),
    ]:
        with pytest.raises(TapeError, match=fault) as caught:
            recorded(tensor).save(tmp_path / "a.tape")
        assert r"item [0]" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_tape_recorded_under_vmap_is_refused(tmp_path: Path) -> None:
    tapes = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        tapes.append(recorded(x))
        with pytest.raises(TapeError, match=r"inside of a torch.func transform"):
            tapes[0].save(tmp_path / "a.tape")
        return x

    torch.func.vmap(layer)(torch.ones(2, 3))
    assert tapes


def test_to_host_of_a_tensor_copies_nothing() -> None:
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3)

    host = to_host(tensor)
    tensor[0, 0] = 7

    assert bytes(host.data[:4]) == b"\x07\0\0\0"
    del tensor
    gc.collect()
    assert bytes(host.data[4:8]) == b"\x01\0\0\0"  # it keeps the memory alive


def test_many_steps_leave_nothing_behind(tmp_path: Path) -> None:
    """200 steps of record, save, load and replay: no tensor, no memory, no open file more than after the first."""
    net, x, mask = remat(MoE("branch")), torch.randn(64, D), torch.ones(64)

    def step() -> None:
        with record() as tape, torch.no_grad():
            net(x)
        tape.save(tmp_path / "a.tape")
        gradients(net, x, mask, Tape.load(tmp_path / "a.tape"))

    def held() -> tuple[int, int, int]:
        gc.collect()
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
        return tensors, files, len(list(tmp_path.iterdir()))

    for _ in range(20):
        step()
    before, most = held(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(180):
        step()

    assert all(now <= then for now, then in zip(held(), before, strict=True))  # what other tests held may go
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 20_000  # KiB


def test_the_core_shows_a_tape_of_torch_without_torch(tmp_path: Path) -> None:
    recorded(torch.arange(3)).save(tmp_path / "a.tape")
    lines = [
        "import sys",
        "sys.modules['torch'] = None",
        "from roundpipe_core import Tape",
        f"entry, = Tape.load({str(tmp_path / 'a.tape')!r}).entries()",
        "print(entry.dtype, entry.shape, bytes(entry.value.data)[::8])",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)

    assert done.stdout == "int64 (3,) b'\\x00\\x01\\x02'\n", done.stderr


@pytest.mark.parametrize(("value", "held", "asked"), UNFIT)
def test_integers_of_another_sign_are_not_taken_for_their_bits(value, held, asked):
    """They come back from a cast there and back as they were."""
    tensor = torch.tensor([value], dtype=torch.uint64).view(torch.int64) if value >= 2**63 else torch.tensor([value])
    kinds = getattr(torch, held), getattr(torch, asked)
    with record() as tape:
        save_for_recompute(tensor.view(kinds[0]) if value >= 2**63 else tensor.to(kinds[0]))
    with pytest.raises(TapeError, match=f"holds values that torch.{asked} cannot"), replay(tape):
        save_for_recompute(torch.zeros(1, dtype=kinds[1]))
