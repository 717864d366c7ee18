"""What checkpointing holds and runs: against torch's own, counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from benchmarks._meter import Meter
from roundpipe_torch import checkpoint, doing_recompute, get_recompute_data, save_for_recompute

T, D, E = 2048, 16, 4  # tokens, width, experts: so many that a recompute stops before the last sum


class Block(nn.Module):
    """Attention-free block with a top-2 mixture whose plan (8 bytes a choice) may be saved."""

    def __init__(self, saves: bool) -> None:
        super().__init__()
        self.saves = saves
        self.gate, self.up, self.down = nn.Linear(D, E), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        if self.saves and doing_recompute():
            (top,) = get_recompute_data()
        else:
            top = scores.detach().topk(2).indices
            if self.saves:
                save_for_recompute(top)
        return x + self.down(torch.tanh(self.up(x))) * scores.gather(-1, top).sum(-1, keepdim=True)


SLOT = T * 2 * 8


def measure(call, saves: bool, layers: int = 4):
    torch.manual_seed(0)
    blocks = [Block(saves) for _ in range(layers)]
    x = torch.randn(T, D, requires_grad=True)
    call(blocks[0], x).sum().backward()  # gradients exist from here on
    with Meter() as meter:
        y = x
        for block in blocks:
            y = call(block, y)
        held = meter.live
        y.sum().backward()
        del y
    return held, meter.peak, meter.operations


def torchs(layer, x):
    return torch_checkpoint(layer, x, use_reentrant=False)


def test_live_bytes_are_torchs_and_the_slots() -> None:
    want, want_peak, _ = measure(torchs, saves=False)
    plain, plain_peak, _ = measure(lambda layer, x: layer(x), saves=False)
    nothing, nothing_peak, _ = measure(checkpoint, saves=False)
    held, peak, _ = measure(checkpoint, saves=True)
    assert plain > 2 * want
    assert (nothing, nothing_peak) == (want, want_peak)
    assert held == want + 4 * SLOT
    assert want_peak <= peak <= want_peak + 4 * SLOT
    assert plain_peak > peak


def test_the_recompute_runs_the_forwards_operations_less_the_decision_and_nothing_else() -> None:
    *_, want = measure(torchs, saves=False)
    *_, got = measure(checkpoint, saves=True)
    assert want["aten::topk"] == 8
    assert got["aten::topk"] == 4
    extra = {name: got[name] - want[name] for name in got | want if got[name] != want[name]}
    assert extra.pop("aten::detach") <= 0
    assert extra.pop("aten::empty", 0) <= 0  # what a node of torch 2.11 that keeps an argument is made of
    assert extra == {"aten::topk": -4, "aten::clone": 8}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inputs_of_nested_regions_are_not_held_by_the_outer(use_reentrant) -> None:
    """During the forward an outer region keeps its own input only, whatever the regions inside keep."""

    def inner(x):
        return torch.tanh(x).exp()

    def outer(x):
        for _ in range(6):
            x = checkpoint(inner, x, use_reentrant=use_reentrant)
        return x

    x = torch.randn(T, D, requires_grad=True)
    with Meter() as meter:
        y = checkpoint(outer, x, use_reentrant=use_reentrant)
        assert meter.live == T * D * 4  # the output
        del y


def test_values_recomputed_for_a_retained_graph_are_not_kept() -> None:
    def layer(x):
        return torch.tanh(torch.exp(x)).sin()

    x = torch.randn(T, D, requires_grad=True)
    with Meter() as meter:
        y = checkpoint(layer, x)
        before = meter.live
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert meter.live == before


class Experts(nn.Module):
    """The loop over experts of many Hugging Face models: it asks the device for every expert's tokens."""

    def __init__(self, saves: bool) -> None:
        super().__init__()
        self.saves = saves
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        if self.saves and doing_recompute():
            top, plan = get_recompute_data()
        else:
            top = scores.detach().topk(2).indices
            hit = nn.functional.one_hot(top, E).permute(2, 1, 0)
            used = [e for e in range(E) if hit[e].any().item()]
            plan = [(e, *torch.where(hit[e])) for e in used]
            if self.saves:
                save_for_recompute(top, plan)
        y = torch.zeros_like(x)
        for e, rank, token in plan:
            weight = scores.gather(-1, top)[token, rank, None]
            y = y.index_add(0, token, self.experts[e](x[token]) * weight)
        return y


def test_backward_asks_the_device_nothing() -> None:
    def syncs(call, saves):
        torch.manual_seed(0)
        layer, x = Experts(saves), torch.randn(T, D, requires_grad=True)
        y = call(layer, x)
        with Meter() as meter:
            y.sum().backward()
        return meter.syncs

    assert syncs(torchs, False) == 2 * E + 2  # one_hot asks for the range too
    assert syncs(checkpoint, True) == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_hooks_around_a_region_see_every_tensor_argument_wherever_it_stands(use_reentrant) -> None:
    """Offloading by `save_on_cpu` and the like: a keyword in a closure would stay on the device."""
    seen = []

    def pack(tensor):
        seen.append(tensor.data_ptr())
        return tensor.clone()

    w, nested, x = (torch.randn(3, 3) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        h = x.requires_grad_() * 1.0
        y = checkpoint(
            lambda h, *, w, d: (h @ w + d["a"][0]).sin(), h, w=w, d={"a": [nested]}, use_reentrant=use_reentrant
        )
    assert sorted(seen) == sorted(tensor.data_ptr() for tensor in (h, w, nested))
    y.sum().backward()
    assert torch.equal(x.grad, (x.detach() @ w + nested).cos() @ w.t())
