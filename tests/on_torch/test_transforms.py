"""torch.func: transforms inside of a layer and around one (pytorch issues 122729, 141845, 146036, 165880).

The oracle is `agree`: the same scenario without checkpointing.
"""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops import scan
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import dropout

from roundpipe_torch import MismatchError, checkpoint, keep, recompute_once, save_for_recompute
from tests.on_torch.oracle import ENGINES, agree, decided, leaf, reentrant

B, T, D = 3, 5, 4


def top(h):
    return h.detach().topk(2).indices


def learning_at_test_time(h, w):
    def loss(w, token):
        return (torch.tanh(token @ w) - token).square().sum()

    return h @ (w - 0.1 * vmap(grad(loss), in_dims=(None, 0))(w, h).mean(0))


def pulled_back(h, w):
    out, pull = vjp(lambda h: torch.tanh(h @ w), h)
    return pull(out)[0]


def curved(h, w):
    return h * jacrev(grad(lambda s: torch.tanh(h * s).sum()))(w[0, 0])


def decided_inside(h, w):
    def energy(w):
        best = recompute_once(top, h @ w)
        return torch.sin(h @ w).gather(-1, best).sum()

    return h @ grad(energy)(w)


def kept_inside(h, w):
    return vmap(lambda token: keep(lambda t: torch.tanh(t @ w), token).sin())(h)


def differentiated_inside_vmap(h, w):
    return vmap(jacrev(lambda token: torch.tanh(token @ w)))(h).sum(1)


INSIDE = [learning_at_test_time, pulled_back, curved, decided_inside, kept_inside, differentiated_inside_vmap]


@pytest.mark.parametrize("inside", INSIDE, ids=lambda inside: inside.__name__)
@pytest.mark.parametrize("way", ENGINES)
def test_inside_a_layer(way, inside):
    def scenario(way):
        x, w, v = leaf(T, D), leaf(D, D, seed=1), leaf(D, D, seed=2)

        def layer(x):
            best = decided(lambda: top(x))
            return torch.exp(inside(torch.sin(x @ v), w)).gather(-1, best)

        way(layer, x).sum().backward()
        return x.grad, w.grad, v.grad

    agree(scenario, way)


def scanned(h, w):
    total, sums = scan(lambda carry, row: ((carry + row @ w).tanh(), (carry * row).sin()), torch.zeros(D), h)
    return sums + total


def attended(h, w):
    query, key = (h @ w)[None, None], h[None, None]
    bias = w[0].exp()
    score = lambda score, b, h, i, j: (score + bias[j % D]).tanh()  # noqa: E731
    return flex.flex_attention(query, key, key, score_mod=score)[0, 0]


def traced(h, w):
    def slope(h, w):
        (found,) = torch.autograd.grad(torch.tanh(h @ w).exp().sum(), h)
        return found

    return h * make_fx(slope)(h.detach().requires_grad_(), w.detach())(h, w)


@pytest.mark.parametrize("inside", [scanned, attended, traced], ids=lambda inside: inside.__name__)
@pytest.mark.parametrize("way", ENGINES)
@pytest.mark.filterwarnings("ignore")  # of torch about itself
def test_torch_traces_and_differentiates_a_part_of_a_layer(way, inside, monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)  # on a CPU it refuses to be trained

    def scenario(way):
        x, w = leaf(T, D), leaf(D, D, seed=1)

        def layer(x):
            best = decided(lambda: top(x))
            return torch.exp(inside(torch.sin(x), w)).gather(-1, best)

        way(layer, x).sum().backward()
        return x.grad, w.grad

    agree(scenario, way)


def test_inside_a_layer_of_second_derivatives():
    def scenario(way):
        x, w = leaf(T, D), leaf(D, D, seed=1)
        y = way(lambda x: learning_at_test_time(torch.sin(x), w).exp(), x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        first.square().sum().backward()
        return x.grad, w.grad

    agree(scenario)


def pulled(y, x):
    return lambda given: torch.autograd.grad(y, x, given, retain_graph=True)[0]


TRANSFORMED = {
    "batched": lambda y, x, several: torch.autograd.grad(y, x, several, is_grads_batched=True)[0],
    "vmap": lambda y, x, several: vmap(pulled(y, x))(several),
    "jvp": lambda y, x, several: jvp(pulled(y, x), (several[0],), (several[1],)),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", list(TRANSFORMED))
@pytest.mark.parametrize("way", ENGINES)
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # jvp uses it
def test_a_backward_inside_a_transform(way, kind, nested):
    """Its recompute is not of a batch, and may draw random numbers."""

    def scenario(way):
        torch.manual_seed(0)
        x, w = leaf(T, D), leaf(D, D, seed=1)

        def layer(x):
            best = decided(lambda: top(x))
            return dropout(torch.exp(torch.sin(x @ w)), 0.5).gather(-1, best)

        y = way(lambda x: way(layer, x.sin()).exp() if nested else layer(x), x.sin())
        several = leaf(B, *y.shape, seed=2).detach()
        return TRANSFORMED[kind](y, x, several)

    agree(scenario, way)


def test_forward_mode_through_the_second_engine_is_refused_by_name():
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(leaf(T, D), torch.ones(T, D))
        with pytest.raises(MismatchError, match="no derivative in forward mode of a layer with use_reentrant=True"):
            reentrant(lambda x: x.sin(), dual)


def test_hooks_of_others_are_refused_as_ever():
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"),
    ):
        checkpoint(lambda x: curved(x, x), leaf(D, D))


def route(x, w):
    h = torch.tanh(x @ w)
    (best,) = save_for_recompute(top(h))
    return dropout(h.exp(), 0.5).gather(-1, best)


def nested(way):
    return lambda x, w: torch.sin(way(route, torch.sin(x), w)) * decided(lambda: x.detach().amax())


@pytest.mark.parametrize("layer", [lambda way: route, nested], ids=["one", "nested"])
def test_vmap_around(layer):
    """Two deep, each call with arguments of its own, its own decision and its own random numbers."""

    def scenario(way):
        torch.manual_seed(3)
        x, w, v = leaf(B, 2, T, D), leaf(D, D, seed=1), leaf(2, D, D, seed=2)

        def call(x, v):
            return way(layer(way), x @ v, w)

        y = vmap(vmap(call, randomness="different"), in_dims=(0, None), randomness="different")(x, v)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (y.sum() + first.square().sum()).backward()
        return x.grad, w.grad, v.grad, y.detach()

    agree(scenario)


def test_an_ensemble():
    def scenario(way):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(D, D) for _ in range(B)]
        weights, _ = stack_module_state(layers)
        x, weights = leaf(T, D), {name: w.detach().requires_grad_() for name, w in weights.items()}
        y = vmap(lambda w: way(lambda w: functional_call(layers[0], w, (x,)).exp(), w))(weights)
        one_hot = torch.eye(D)
        return torch.autograd.grad(y.sum((0, 1)), [x, *weights.values()], one_hot, is_grads_batched=True)

    agree(scenario)


def test_what_is_refused_around():
    x = leaf(D).detach()

    def energy(way):
        return lambda x: way(lambda x: torch.sin(x) * x, x).sum()

    with pytest.raises(MismatchError, match=r"inside torch\.func\.vmap, and inside no other"):
        grad(energy(checkpoint))(x)
    with pytest.raises(MismatchError, match="with use_reentrant=True a layer cannot be checkpointed inside"):
        vmap(energy(reentrant))(x[None])


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # jvp uses it
def test_forward_mode_around():
    x, w = leaf(D).detach(), leaf(D, seed=1)

    def energy(way):
        return lambda x: way(lambda x: torch.sin(x * w) * x, x).sum()

    got, want = (jvp(energy(way), (x,), (x,))[1] for way in (checkpoint, lambda layer, x: layer(x)))
    assert torch.equal(got, want)
    with pytest.raises(MismatchError, match=r"inside torch\.func\.vmap, and inside no other"):
        got.backward()
