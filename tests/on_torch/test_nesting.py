"""R8: decide once at any depth; R9: nothing outlives its graph."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import weakref

import pytest
import torch
from torch.utils.checkpoint import GraphExecGroup

from roundpipe_core._slots import Slot
from roundpipe_torch import checkpoint, doing_recompute, get_recompute_data, save_for_recompute

D = 4


class Net:
    """A region of `depth` levels: each decides by an unsteady draw, runs two regions one level down, decides again."""

    def __init__(self, call, depth: int, style: str) -> None:
        self.call, self.depth, self.style = call, depth, style
        self.draws = torch.Generator().manual_seed(1)
        self.decisions = 0
        self.w = torch.randn(D, D, generator=torch.Generator().manual_seed(2)).requires_grad_()

    def decide(self) -> torch.Tensor:
        self.decisions += 1
        return torch.randint(0, D, (3, D), generator=self.draws)

    def pick(self, name: str) -> torch.Tensor:
        if self.style == "branch":
            if doing_recompute():
                return get_recompute_data(name)[0]
            index = self.decide()
            save_for_recompute(index, name=name)
            return index
        return save_for_recompute(self.decide() if not doing_recompute() else None, name=name)[0]

    def layer(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        x = torch.tanh(x @ self.w).gather(1, self.pick("before"))
        if depth > 1:
            x = x + self.call(self.layer, x, depth - 1)
            x = x * self.call(self.layer, x, depth - 1)
        return torch.sin(x).gather(1, self.pick("after"))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.layer, x, self.depth)


CALLS = {
    "default": lambda: checkpoint,
    "no early stop": lambda: lambda f, *args: checkpoint(f, *args, early_stop=False),
    "reentrant": lambda: lambda f, *args: checkpoint(f, *args, use_reentrant=True),
}


def gradients(call, depth: int, style: str, backwards: int):
    net = Net(call, depth, style)
    x = torch.randn(3, D, generator=torch.Generator().manual_seed(3)).requires_grad_()
    y = net(x)
    for n in range(backwards):
        y.square().sum().backward(retain_graph=n + 1 < backwards)
    return [y.detach(), x.grad, net.w.grad], net.decisions


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("style", ["branch", "returned"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_each_decision_is_made_once_and_the_gradient_is_exact(depth, call, style, backwards) -> None:
    want, decisions = gradients(lambda f, *args: f(*args), depth, style, backwards)
    got, made = gradients(CALLS[call](), depth, style, backwards)
    assert made == decisions == 2 * (2**depth - 1)
    if call == "reentrant":  # its weights' gradients add up in another order
        assert all(torch.allclose(g, w, rtol=1e-5, atol=1e-6) for g, w in zip(got, want, strict=True))
    else:
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("first", ["default", "reentrant"])
def test_the_engines_nest_in_each_other(first) -> None:
    want, decisions = gradients(lambda f, *args: f(*args), 3, "branch", 1)

    def call(f, x, depth):
        return checkpoint(f, x, depth, use_reentrant=(depth % 2 == 1) is (first == "reentrant"))

    got, made = gradients(call, 3, "branch", 1)
    assert made == decisions
    assert all(torch.allclose(g, w, rtol=1e-6, atol=1e-7) for g, w in zip(got, want, strict=True))


def test_an_inner_region_without_gradient_decides_once_too() -> None:
    made = []

    def teacher(x):
        if doing_recompute():
            (n,) = get_recompute_data()
        else:
            n = len(made) + 2
            made.append(n)
            save_for_recompute(n)
        return x * n

    def outer(x):
        with torch.no_grad():
            scale = checkpoint(teacher, x.detach())
        return torch.exp(x * scale)

    x = torch.ones(2, requires_grad=True)
    checkpoint(outer, x).sum().backward()
    assert made == [2]
    assert torch.equal(x.grad, torch.exp(torch.tensor([2.0, 2.0])) * 2)


def test_what_an_inner_region_without_gradient_draws_after_its_decision() -> None:  # R7
    def noise(x):
        if not doing_recompute():
            save_for_recompute(torch.rand(2))
        else:
            get_recompute_data()
        drawn.append(torch.rand(2))
        return x * drawn[-1]

    def outer(x):
        with torch.no_grad():
            scale = checkpoint(noise, x.detach())
        return torch.exp(x * scale)

    drawn: list[torch.Tensor] = []
    checkpoint(outer, torch.ones(2, requires_grad=True)).sum().backward()
    assert torch.equal(*drawn)


def test_recomputes_grow_with_depth_as_nested_checkpoints_do() -> None:
    runs = []

    def level(x, depth):
        runs.append(depth)
        return torch.sin(checkpoint(level, x, depth - 1)) if depth else torch.sin(x)

    checkpoint(level, torch.ones(2, requires_grad=True), 2).sum().backward()
    # Level 2 twice; level 1 in forward, in level 2's recompute, and in its own; level 0 once more.
    assert [runs.count(depth) for depth in (2, 1, 0)] == [2, 3, 4]


# R9


@pytest.fixture
def live(monkeypatch):
    """The slots made during the test that are still alive, without help from the cycle collector."""
    made: weakref.WeakSet[Slot] = weakref.WeakSet()
    build = Slot.__init__

    def noting(slot, *args, **kwargs):
        made.add(slot)
        build(slot, *args, **kwargs)

    monkeypatch.setattr(Slot, "__init__", noting)
    gc.disable()
    yield lambda: len(made)
    gc.enable()


def decide(x):
    (index,) = save_for_recompute(x.detach().argmax(-1, keepdim=True))
    return torch.exp(x).gather(1, index)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("end", ["dropped", "backward", "exception in forward", "exception in recompute"])
def test_nothing_outlives_its_graph(live, end, use_reentrant) -> None:
    fail = []

    def layer(x):
        y = decide(x)
        if fail and fail[0] == ("recompute" if doing_recompute() else "forward"):
            raise MemoryError("pretended")
        return y

    def step():
        x = torch.ones(2, 2, requires_grad=True)
        y = checkpoint(lambda v: checkpoint(layer, checkpoint(decide, v)), x, use_reentrant=use_reentrant)
        if end == "dropped":
            assert live() == 3
            return
        if end.startswith("exception"):
            fail.append(end.split()[-1])
        y.sum().backward()

    if end.startswith("exception"):
        if end == "exception in forward":
            fail.append("forward")
        with contextlib.suppress(MemoryError):
            step()
    else:
        step()
    assert live() == 0


def test_a_chain_longer_than_the_stack_is_dropped_without_backward(live) -> None:
    count = 2 * sys.getrecursionlimit()
    x = torch.ones(2, 2, requires_grad=True)
    y = x
    for _ in range(count):
        y = checkpoint(decide, y.expand(2, 2))
    assert live() == count
    del y
    assert live() == 0


def test_inputs_and_slots_die_during_backward(live) -> None:
    """The inputs of a region go when its own backward is done, not when the whole backward is."""
    alive = []
    x = torch.ones(2, 2, requires_grad=True)
    y, inputs = x, []
    for _ in range(3):
        y = y * 1.5
        inputs.append(weakref.ref(y))
        y = checkpoint(decide, y).expand(2, 2)
    y.register_hook(lambda grad: alive.append(live()))
    inputs[0]().register_hook(lambda grad: alive.append(live()))
    loss = y.sum()
    del y
    loss.backward()
    assert alive == [3, 0]
    assert live() == 0


def test_a_layer_used_many_times_has_as_many_slots_and_any_order_of_backward_is_right() -> None:
    draws = torch.Generator().manual_seed(0)
    w = torch.randn(D, D, generator=draws).requires_grad_()
    taken = []

    def layer(x):
        if doing_recompute():
            (index,) = get_recompute_data()
        else:
            index = torch.randint(0, D, (3, 1), generator=draws)
            save_for_recompute(index)
            taken.append(index)
        return torch.tanh(x @ w).gather(1, index) * torch.ones(D)

    for order in itertools.permutations(range(3)):
        taken.clear()
        w.grad = None
        xs = [torch.randn(3, D, generator=draws).requires_grad_() for _ in range(3)]
        ys = [checkpoint(layer, checkpoint(layer, x)) for x in xs]
        for n in order:
            ys[n].square().sum().backward()
        got, w.grad = w.grad, None
        for n in order:
            h = torch.tanh(xs[n].detach() @ w).gather(1, taken[2 * n]) * torch.ones(D)
            h = torch.tanh(h @ w).gather(1, taken[2 * n + 1]) * torch.ones(D)
            h.square().sum().backward()
        assert torch.equal(got, w.grad)


@pytest.mark.parametrize("grouped", [False, True])
def test_two_backwards_over_parts_of_a_region_share_one_recompute(grouped) -> None:
    calls = []

    def layer(x, y):
        calls.append(doing_recompute())
        return x.sin().exp(), y.cos().exp()

    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    expected = torch.autograd.grad([out.sum() for out in layer(x, y)], (x, y))
    del calls[:]
    first, second = checkpoint(layer, x, y)
    with GraphExecGroup() if grouped else contextlib.nullcontext():
        first.sum().backward(retain_graph=True)
        second.sum().backward()
    assert calls == [False, True]
    torch.testing.assert_close((x.grad, y.grad), expected, rtol=0, atol=0)
