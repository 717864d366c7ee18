"""Features that meet: buffers, kept parts, decisions of `auto`, tapes, `verify`, and gradients inside a layer."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

from roundpipe_torch import (
    checkpoint,
    doing_recompute,
    get_recompute_data,
    keep,
    layer_scope,
    record,
    remat,
    replay,
    save_for_recompute,
)
from roundpipe_torch._state import DrawWatch
from tests.on_torch.oracle import ENGINES, Source, decided, leaf, plain, reentrant, same

D = 4


class Averaging(nn.Module):
    """Scales by an average that each forward moves on in place, and then replaces. Parts stand around it."""

    def __init__(self, part=None):
        super().__init__()
        self.part = part or (lambda x: x)
        self.register_buffer("average", torch.ones(D, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def move(self, x):
        with torch.no_grad():
            self.average.mul_(0.5).add_(x.abs().mean(0))
            self.average = self.average + 0.1
            self.calls += 1

    def forward(self, x):
        x = self.part(x)
        self.move(x)
        return self.part((x * self.average.clone() * self.calls.clone()).sin())


def trained(way, part=None, backwards=1, make=Averaging):
    layer, x = make(part), leaf(6, D, dtype=torch.float64)
    out = way(layer, x)
    for _ in range(backwards):
        out.square().sum().backward(retain_graph=True)
    return [out, x.grad, *layer.buffers()]


def differentiating(x):
    """A force: the layer takes a gradient inside itself."""
    y = x.sin()
    (force,) = torch.autograd.grad(y.square().sum(), x if x.requires_grad else y, create_graph=True)
    return force.cos() + x


def keeping(x):
    return keep(lambda x: x.exp().sin(), x)


def asking():
    source = Source()

    def part(x):
        with layer_scope("asks"):
            return x + x.gather(1, decided(lambda: source.integers(D, 6, D))).tanh()

    return part


@pytest.mark.parametrize("way", ENGINES)
def test_a_buffer_changed_in_place_and_then_replaced(way):
    same(trained(way), trained(plain))


def test_buffers_of_a_layer_that_differentiates_inside_itself():
    same(trained(checkpoint, differentiating), trained(plain, differentiating))


@pytest.mark.parametrize("outer", ENGINES)
@pytest.mark.parametrize("inner", ENGINES)
def test_buffers_and_kept_parts_in_nested_regions(inner, outer):
    def way(layer, x):
        return outer(lambda x: inner(layer, x).sin(), x)

    def without(layer, x):
        return layer(x).sin()

    same(trained(way, keeping, 2), trained(without, keeping, 2), within=1e-12)


@pytest.mark.parametrize("way", ENGINES)
@pytest.mark.parametrize("nested", [False, True])
def test_buffers_of_a_layer_that_asks_for_its_phase(way, nested):
    """They move in both phases, beside the branch, not in it."""

    def around(layer, x):
        return way(lambda x: way(layer, x).sin(), x) if nested else way(layer, x)

    def without(layer, x):
        return layer(x).sin() if nested else layer(x)

    for _ in range(2):  # the second time it is known
        same(trained(around, asking(), 2), trained(without, asking(), 2), within=1e-12)


def test_a_buffer_steers_the_shapes_of_a_layer_that_asks():
    """With the buffer of now the recompute would fail, and not only be wrong."""

    class Window(Averaging):
        def forward(self, x):
            x = self.part(x)
            rows = x[self.calls : self.calls + 2] * self.average.clone()
            self.move(x)
            self.calls += 4
            return rows.exp() * x[:2]

    same(trained(checkpoint, asking(), make=Window), trained(plain, asking(), make=Window))


def test_verify_of_buffers_that_a_layer_that_asks_moves():
    def way(layer, x):
        return remat(layer, verify="raise")(x)

    def part(x):
        if not x.is_leaf:  # the second part, whose numbers a plain recompute would not have again
            return x
        with layer_scope("asks"):
            if doing_recompute():
                (idx,) = get_recompute_data()
            else:
                (idx,) = save_for_recompute(x.detach().argsort(-1))
            return x.gather(1, idx)

    same(trained(way, part), trained(plain, part))


def test_verify_leaves_the_recompute_aligned():
    """The audit comes when the forward is over, and the autograd nodes that it makes do not count."""

    def layer(x):
        y = differentiating(x)
        (idx,) = save_for_recompute(y.detach().argsort(-1))
        return y.gather(1, idx).exp() * y

    def step(way):
        x = leaf(3, D)
        way(layer, x).sum().backward()
        return [x.grad]

    with pytest.warns(UserWarning, match="differentiates inside itself cannot be run again"):
        same(step(lambda function, x: remat(function, verify="warn")(x)), step(plain))


# Decisions of `auto`


def routed(x, w):
    return w.gather(1, x.topk(2).indices)


def replays_what_was_recorded(layer):
    """With other inputs, a replay takes the gradient that belongs to the decisions of the recording."""
    x, w = leaf(3, D, grad=False), leaf(3, D, seed=1)
    with record() as tape, torch.no_grad():
        remat(layer, auto=True)(x, w)
    plain(layer, x, w).sum().backward()
    want, w.grad = w.grad, None
    with replay(tape):
        out = remat(layer, auto=True)(leaf(3, D, seed=8, grad=False), w)
    out.sum().backward()
    same([w.grad], [want])


def test_a_replay_counts_the_decisions_of_kept_parts():
    def layer(x, w):
        kept = keep(routed, x, w) + keep(lambda x, w: routed(-x, w).sin(), x, w)
        return kept.exp() * routed(x * 2, w)

    replays_what_was_recorded(layer)


def test_a_replay_of_a_kept_part_that_asks_for_its_phase():
    def choose(x, w):
        idx = get_recompute_data()[0] if doing_recompute() else save_for_recompute(x.topk(2).indices)[0]
        return w.gather(1, idx)

    def layer(x, w):
        return keep(choose, x, w).exp() * routed(-x, w)

    replays_what_was_recorded(layer)


def test_a_scope_may_be_called_auto():
    def layer(x, w):
        first = routed(x, w)
        for _ in range(2):
            with layer_scope("auto"):
                first = first * keep(routed, -x, w)
        return first * routed(x * 2, w)

    x, w = leaf(3, D, grad=False), leaf(3, D, seed=1)
    plain(layer, x, w).sum().backward()
    want, w.grad = w.grad, None
    remat(layer, auto=True)(x, w).sum().backward()
    same([w.grad], [want])


# What is left behind


def test_the_second_engine_lets_go_of_what_a_recompute_dropped():
    """A node that saves its own output holds itself, if the hook keeps the output with its graph."""
    made = []

    def layer(x):
        (idx,) = save_for_recompute(None if doing_recompute() else x.detach().argmax(-1, keepdim=True))
        weights = (x @ x).exp()
        made.append(weakref.ref(weights))
        return x.sin().gather(-1, idx) * weights.detach()

    gc.disable()
    try:
        reentrant(layer, leaf(D, D)).sum().backward()
        assert [ref() for ref in made] == [None, None]
    finally:
        gc.enable()


def test_watching_draws_does_not_load_the_compiler():
    program = "import sys, roundpipe_torch._state as s, torch\nwith s.DrawWatch(): torch.ones(2) + 1\n"
    check = "assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", program + check], check=True, timeout=120)
    with DrawWatch() as watch:
        torch.rand(2)
    assert watch.drawn
