"""What people wrap layers in: torch's checkpoint wrappers, offloading, averages of weights, exporters, trainers.

Shapes: T tokens, D width, E experts. The oracle is the same model without checkpointing, given the same decisions.
"""

from __future__ import annotations

import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from roundpipe_torch import (
    checkpoint,
    doing_recompute,
    remat,
    save_for_recompute,
)
from tests.on_torch.oracle import agree, decided, leaf, same

T, D, E = 5, 6, 3


class Layer(nn.Module):
    """Its routes come from a generator that no checkpoint knows."""

    def __init__(self, seed=0):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.Parameter(leaf(E, D, D, seed=seed + 1).detach() * 0.5)
        self.gate.weight.data = leaf(E, D, seed=seed).detach()
        self.generator = None
        self.phases = []

    def forward(self, x, scale=1.0):
        self.phases.append(doing_recompute())
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(0)
        idx = decided(lambda: torch.randint(0, E, (len(x),), generator=self.generator))
        weight = torch.softmax(self.gate(x), -1).gather(-1, idx[:, None])
        return x + torch.tanh(torch.bmm(x[:, None], self.experts[idx])[:, 0] * scale) * weight


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(D, D)
        self.embed.weight.data, self.embed.bias.data = leaf(D, D, seed=8).detach(), leaf(D, seed=9).detach()
        self.layers = nn.ModuleList(Layer(10 * n) for n in range(3))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


def by_wrapper(net):
    for n, layer in enumerate(net.layers):
        net.layers[n] = checkpoint_wrapper(layer, checkpoint_fn=checkpoint)
    return net


def by_apply(net):
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_fn=checkpoint, early_stop=False)
    apply_activation_checkpointing(net, wrapper, check_fn=lambda module: isinstance(module, Layer))
    return net


def by_remat(net):
    for n, layer in enumerate(net.layers):
        net.layers[n] = remat(layer)
    return net


def by_offload(net):
    for n, layer in enumerate(net.layers):
        net.layers[n] = offload_wrapper(checkpoint_wrapper(layer, checkpoint_fn=checkpoint))
    return net


def by_offload_inside(net):
    for n, layer in enumerate(net.layers):
        net.layers[n] = remat(offload_wrapper(layer))
    return net


HOWS = [by_wrapper, by_apply, by_remat, by_offload, by_offload_inside]


def grads_of(net, steps=2):
    seen = []
    for step in range(steps):
        net.zero_grad()
        x = leaf(T + step, D, seed=step)
        net(x).square().sum().backward()
        seen.append([x.grad, *(p.grad.clone() for p in net.parameters())])
    return seen


def layers_of(net):
    return [module for module in net.modules() if isinstance(module, Layer)]


@pytest.mark.parametrize("how", HOWS)
def test_wrapped_layers_train_alike(how):
    want = grads_of(Net())
    net = how(Net())
    same(grads_of(net), want)
    for layer in layers_of(net):  # what is offloaded inside is not computed again
        assert layer.phases == [False] * 2 if how is by_offload_inside else [False, True] * 2


@pytest.mark.parametrize("how", HOWS)
def test_names_and_state_dicts_stay(how):
    plain, net = Net(), how(Net())
    optimizers = []
    for model in (plain, net):
        optimizers.append(torch.optim.AdamW(model.parameters()))
        grads_of(model)
        optimizers[-1].step()
    model, state = get_model_state_dict(net), get_optimizer_state_dict(net, optimizers[1])
    same(model, get_model_state_dict(plain))
    assert list(state["state"]) == list(get_optimizer_state_dict(plain, optimizers[0])["state"])
    same(dict(net.state_dict()), dict(plain.state_dict()))
    if how is by_remat:
        assert [name for name, _ in net.named_modules()] == [name for name, _ in plain.named_modules()]

    other = how(Net())
    for p in other.parameters():
        p.data.zero_()
    optimizer = torch.optim.AdamW(other.parameters())
    set_model_state_dict(other, model)
    set_optimizer_state_dict(other, optimizer, state)
    same(dict(other.state_dict()), dict(net.state_dict()))
    plain.load_state_dict(other.state_dict())
    other.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("how", ["the original is gone", "the new one is gone", "deepcopy", "pickle"])
def test_hooks_that_know_their_module(how):
    layer = nn.Linear(D, D)
    layer.register_load_state_dict_pre_hook(called_on)
    net = remat(layer)
    state = layer.state_dict()
    if how == "the new one is gone":
        net = layer
    del layer
    if how == "deepcopy":
        net = copy.deepcopy(net)
    elif how == "pickle":
        net = pickle.loads(pickle.dumps(net))
    CALLED.clear()
    net.load_state_dict(state)
    (on,) = CALLED
    assert on.weight is net.weight


CALLED: list[nn.Module] = []


def called_on(module, *args):
    CALLED.append(module)


# Weights that are not plain ones


@pytest.mark.parametrize("first", ["remat", "parametrize"])
@pytest.mark.parametrize("what", ["orthogonal", "weight norm", "own"])
def test_parametrized_weights(first, what):
    class Doubled(nn.Module):
        def forward(self, w):
            return w * 2

    def parametrized(layer):
        torch.manual_seed(0)
        if what == "orthogonal":
            nn.utils.parametrizations.orthogonal(layer.gate)
        elif what == "weight norm":
            nn.utils.parametrizations.weight_norm(layer, "experts")
        else:
            nn.utils.parametrize.register_parametrization(layer, "experts", Doubled())
        return layer

    want = parametrized(Layer())
    got = remat(parametrized(Layer())) if first == "parametrize" else parametrized(remat(Layer()))
    same(grads_of(got), grads_of(want))
    assert got.phases == [False, True] * 2
    if what == "own":
        twin = copy.deepcopy(got)
        twin.phases = []
        same(grads_of(twin), grads_of(copy.deepcopy(want)))
        assert twin.phases == [False, True] * 2


def test_functional_call_inside_and_around():
    plain, net = Layer(), remat(Layer())
    swapped = {name: leaf(*p.shape, seed=5) for name, p in plain.named_parameters()}

    def run(module, call):
        module.generator = None
        for p in swapped.values():
            p.grad = None
        call(module).square().sum().backward()
        return [p.grad for p in swapped.values()]

    x = leaf(T, D)
    around = functools.partial(torch.func.functional_call, parameter_and_buffer_dicts=swapped, args=(x,))
    want = run(plain, around)
    same(run(plain, lambda module: checkpoint(around, module)), want)
    same(run(net, around), want)


def test_averages_of_weights():
    plain, net = Net(), by_remat(Net())
    averaged = [torch.optim.swa_utils.AveragedModel(model) for model in (plain, net)]
    for model, average in zip((plain, net), averaged, strict=True):
        grads_of(model)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        average.update_parameters(model)
    same(dict(averaged[1].state_dict()), dict(averaged[0].state_dict()))
    for average in averaged:
        for layer in layers_of(average):
            layer.generator, layer.phases = None, []
    same(grads_of(averaged[1]), grads_of(averaged[0]))
    assert layers_of(averaged[1])[0].phases == [False, True] * 2


# Programs made of a model


class Routed(nn.Module):
    """Decides from its input alone, as a program can."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)

    def forward(self, x):
        scores = self.gate(x)
        (idx,) = save_for_recompute(scores.detach().argmax(-1))
        return scores.gather(-1, idx[:, None]) * x


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("how", ["export", "trace", "fx"])
def test_exported_and_traced_programs_are_those_of_the_layer(how, grad):
    plain = Routed()
    net = nn.Sequential(remat(plain), nn.Linear(D, D))
    x = leaf(T, D, grad=False)
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is old
        if how == "export":
            exported = torch.export.export(net, (x,))
            operations = [node.target for node in exported.graph.nodes if node.op == "call_function"]
            assert torch.ops.aten.clone.default not in operations  # no slot in there
            program = exported.module()
        elif how == "trace":
            program = torch.jit.trace(net, (x,))
        else:
            program = torch.fx.symbolic_trace(net)
    other = leaf(T, D, seed=3)
    same(program(other), net(other))
    same(*(torch.autograd.grad(model(other).sum(), other) for model in (program, net)))


def test_regions_in_regions_whose_gradients_come_in_a_batch() -> None:
    def scenario(way):
        w, x = leaf(4, 4), leaf(3, 4, seed=1)
        y = way(lambda x: way(lambda x: (x @ w).sin(), x).exp(), x)
        return torch.autograd.grad(y, (x, w), torch.eye(12).view(12, 3, 4), is_grads_batched=True)

    agree(scenario)
