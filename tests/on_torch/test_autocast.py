"""Casts of weights, which autocast keeps for all threads until the outermost autocast of any of them ends (R10).

A region may find the cast of a weight that its recompute makes, and the other way round.
"""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from roundpipe_torch import MutationError, doing_recompute, get_recompute_data, keep, recompute_once, save_for_recompute
from tests.on_torch.oracle import ENGINES, agree, decided, leaf, plain, reentrant, same

bfloat16 = partial(torch.autocast, "cpu", torch.bfloat16)


def product(way, w, x):
    return torch.tanh(x @ w) @ w


def gated(way, w, x):
    top = decided(lambda: (x @ w).softmax(-1).topk(2).indices)
    return torch.tanh(x @ w) * (x @ w).softmax(-1).gather(-1, top).sum(-1, keepdim=True)


def chosen(way, w, x):
    top = recompute_once(lambda: (x @ w).topk(2).indices)
    return torch.tanh(x @ w) * (x @ w).softmax(-1).gather(-1, top).sum(-1, keepdim=True)


def parted(way, w, x):
    h = torch.tanh(x @ w)
    if doing_recompute():
        get_recompute_data()
        y = h * h
    else:
        save_for_recompute("forward")
        y = h * h
    return y.sin()


def force(way, w, x):
    x = x.float()
    (slope,) = torch.autograd.grad(torch.tanh(x @ w).float().sum(), x, create_graph=True)
    return slope + torch.tanh(x @ w)


def nested(way, w, x):
    return way(gated, way, w, way(product, way, w, x)) + torch.tanh(x @ w)


def kept(way, w, x):
    return torch.tanh(keep(lambda a, w: torch.tanh(a @ w), x, w) @ w)


LAYERS = [product, gated, chosen, parted, nested, kept]


def step(layer, way, x, w, *, inside, pause=lambda: None):
    """Three calls in one autocast, the last of which finds casts, and a backward `inside` of it or not."""
    with bfloat16():
        for _ in range(3):
            pause()
            x = way(layer, way, w, x).float()
        pause()
        if inside:
            x.square().sum().backward()
        pause()
    if not inside:
        x.square().sum().backward()


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("layer", [*LAYERS, force])
def test_a_weight_that_is_cast_once_for_several_calls(layer, inside) -> None:
    def scenario(way):
        x, w = leaf(4, 6), leaf(6, 6, seed=1)
        step(layer, way, x, w, inside=inside)
        return x.grad, w.grad

    agree(scenario)


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("layer", [*LAYERS])
def test_the_second_engine_gives_such_a_weight_its_gradient_at_once(layer, inside) -> None:
    """It may be asked for by `torch.autograd.grad`, and hooks see it once."""
    seen = []
    x, w = leaf(4, 6), leaf(6, 6, seed=1)
    step(layer, plain, x, w, inside=inside)
    other, v = leaf(4, 6), leaf(6, 6, seed=1)
    v.register_hook(lambda gradient: seen.append(gradient.clone()))
    step(layer, reentrant, other, v, inside=inside)
    same([other.grad, v.grad], [x.grad, w.grad], within=0.05)  # adds up in another order, of bfloat16
    if layer is not kept:
        same(seen, [v.grad])
        with bfloat16():
            y = reentrant(layer, reentrant, v, reentrant(layer, reentrant, v, other))
        assert torch.autograd.grad(y.sum(), v)[0].any()


@pytest.mark.parametrize("way", ENGINES)
@pytest.mark.parametrize("layer", LAYERS)
def test_threads_that_share_a_weight(layer, way) -> None:
    """In turn: what one has cast the other finds, in each call."""

    def both(way):
        w, meeting, failed = leaf(6, 6, seed=1), threading.Barrier(2, timeout=20), []
        xs = [leaf(4, 6), leaf(4, 6, seed=2)]

        def work(x):
            try:
                step(layer, way, x, w, inside=False, pause=meeting.wait)
            except BaseException as error:
                failed.append(error)
                meeting.abort()
                raise

        threads = [threading.Thread(target=work, args=[x]) for x in xs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        return [x.grad for x in xs], w.grad

    # Whoever ends its autocast takes the casts from the other, and sums of bfloat16 part then
    same(both(way), both(plain), within=0.05)


@pytest.mark.parametrize("way", ENGINES)
def test_a_weight_that_is_stepped_before_backward(way) -> None:
    """The cast of then is gone, and the recompute's would be of another weight."""
    x, w = leaf(4, 6), leaf(6, 6, seed=1)
    with bfloat16():
        y = way(lambda x: torch.tanh(torch.nn.functional.linear(x, w)).sin(), x)
    with torch.no_grad():
        w.add_(1.0)
    with pytest.raises(MutationError, match="modified by an inplace operation"):
        y.sum().backward()
