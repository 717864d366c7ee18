"""The seed document's three layers, as users write them: gradients bitwise those of the layer without checkpointing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe_torch import checkpoint, doing_recompute, get_recompute_data, remat, save_for_recompute


class MoELayer(nn.Module):
    def __init__(self, num_experts: int = 4, hidden_size: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, num_experts)
        self.experts = nn.ModuleList([nn.Linear(hidden_size, hidden_size) for _ in range(num_experts)])
        self.decisions = 0

    def forward(self, x):
        if doing_recompute():
            (selected_experts,) = get_recompute_data()
        else:
            gate_logits = self.gate(x)
            routing_weights = torch.softmax(gate_logits, dim=-1)
            selected_experts = torch.topk(routing_weights, k=2, dim=-1).indices
            save_for_recompute(selected_experts)
            self.decisions += 1
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, _ = torch.where(selected_experts == number)
            output = output.index_add(0, token, torch.tanh(expert(x[token])))
        return output


class WeightedMoELayer(MoELayer):
    """As above, and the gate is trained through the weights of the chosen experts."""

    def forward(self, x):
        scores = torch.softmax(self.gate(x), dim=-1)
        if doing_recompute():
            (selected_experts,) = get_recompute_data()
            weights = scores.gather(-1, selected_experts)
        else:
            weights, selected_experts = torch.topk(scores, k=2, dim=-1)
            save_for_recompute(selected_experts)
            self.decisions += 1
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, rank = torch.where(selected_experts == number)
            output = output.index_add(0, token, torch.tanh(expert(x[token])) * weights[token, rank, None])
        return output


class SparseLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.decisions = 0

    def forward(self, x):
        if doing_recompute():
            (mask,) = get_recompute_data()
        else:
            mask = torch.nonzero(x > 0.5)
            save_for_recompute(mask)
            self.decisions += 1
        return torch.sin(x * self.scale)[mask]


class ConditionalLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch_a = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.branch_b = nn.Linear(8, 8)
        self.decisions = 0

    def forward(self, x):
        if doing_recompute():
            (use_branch_a,) = get_recompute_data()
        else:
            use_branch_a = (x.mean() > 0).item()
            save_for_recompute(use_branch_a)
            self.decisions += 1
        return self.branch_a(x).exp() if use_branch_a else self.branch_b(x).exp()


LAYERS = {layer.__name__: layer for layer in (MoELayer, WeightedMoELayer, SparseLayer, ConditionalLayer)}
FORMS = {
    "module": lambda layer, x: checkpoint(layer, x),
    "function": lambda layer, x: checkpoint(lambda layer, x: layer(x), layer, x),
    "closure": lambda layer, x: checkpoint(lambda: layer(x)),
    "keyword": lambda layer, x: checkpoint(layer, x=x),
    "bound method": lambda layer, x: checkpoint(layer.forward, x),
    "remat": lambda layer, x: remat(layer)(x),
    "remat of a function": lambda layer, x: remat(lambda v: layer(v), label="layer")(x),
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
}


def run(name: str, call, backwards: int, sign: float = 1.0):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    x = (torch.randn(12, 8) + sign * 0.3).requires_grad_()
    y = call(layer, x)
    for n in range(backwards):
        y.square().sum().backward(retain_graph=n + 1 < backwards)
    return y.detach(), [x.grad, *(p.grad for p in layer.parameters())], layer.decisions


@pytest.mark.parametrize("backwards", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_gradient_is_that_of_the_layer_without_checkpointing(name: str, form: str, backwards: int) -> None:
    for sign in (1.0, -1.0):
        want_y, want, _ = run(name, lambda layer, x: layer(x), backwards, sign)
        if name == "MoELayer":
            # The plain layer's gate is tracked but decides only; so no gradient reaches it there either.
            assert want[1] is None
        y, got, decisions = run(name, FORMS[form], backwards, sign)
        assert torch.equal(y, want_y)
        for g, w in zip(got, want, strict=True):
            assert (g is None) == (w is None)
            assert g is None or torch.equal(g, w)
        assert decisions == 1


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_on_a_gpu(name: str, form: str) -> None:
    def on_device(call):
        torch.manual_seed(0)
        layer = LAYERS[name]().cuda()
        x = torch.randn(12, 8, device="cuda").requires_grad_()
        y = call(layer, x)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in layer.parameters())], layer.decisions

    want, _ = on_device(lambda layer, x: layer(x))
    got, decisions = on_device(FORMS[form])
    assert decisions == 1
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        assert g is None or torch.allclose(g, w, rtol=1e-5, atol=1e-6)  # index_add sums in any order there
