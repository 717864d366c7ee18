"""The second engine: any difference between the phases is legal; its limits are errors."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

from roundpipe_torch import MismatchError, OptionError, checkpoint, doing_recompute, remat, save_for_recompute


def leaf(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def reentrant(function, *args, **kwargs):
    return checkpoint(function, *args, use_reentrant=True, **kwargs)


def test_the_phases_may_do_anything() -> None:
    aux = []

    def layer(x, w):
        (scale,) = save_for_recompute(2.0)
        if doing_recompute():
            extra = [torch.sin(x) for _ in range(3)]
            return (x @ w * scale).exp() + 0 * len(extra)
        aux.append((x @ w).cos().sum())
        return torch.exp(scale * (x @ w))

    x, w = leaf(), leaf(1)
    reentrant(layer, x, w).sum().backward()
    y, v = leaf(), leaf(1)
    (y @ v * 2.0).exp().sum().backward()
    assert torch.allclose(x.grad, y.grad)
    assert torch.allclose(w.grad, v.grad)


def test_keywords_containers_and_any_output() -> None:
    Out = collections.namedtuple("Out", "y rest")

    def layer(inputs, *, w, flag, names):
        h = inputs["x"][0] @ w
        return Out(h.exp(), {"n": 3, "idx": h.argmax(-1), "flag": flag, "again": (h.sin(), None)})

    def run(call):
        x, w = leaf(), leaf(1)
        out = call(layer, {"x": [x], "tag": "a"}, w=w, flag=True, names=["a"])
        (out.y.sum() + out.rest["again"][0].sum()).backward()
        return [out.y.detach(), out.rest["idx"], x.grad, w.grad], out

    want, _ = run(lambda f, *args, **kwargs: f(*args, **kwargs))
    got, out = run(reentrant)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert type(out).__name__ == "Out"
    assert (out.rest["n"], out.rest["flag"], out.rest["again"][1]) == (3, True, None)
    assert out.rest["idx"].requires_grad is False


def test_weights_behind_frozen_inputs_are_trained() -> None:
    w = leaf()
    y = reentrant(lambda x: (x @ w).exp(), torch.ones(4, 4))
    y.sum().backward()
    assert w.grad is not None
    assert reentrant(lambda x: x * 2, torch.ones(2)).requires_grad is False


def test_an_output_without_gradient_says_so() -> None:
    y, mask = reentrant(lambda x: (x.exp(), (x.detach() * 2)), leaf())
    assert y.requires_grad
    assert not mask.requires_grad


def test_an_input_returned_as_it_came() -> None:
    x = leaf()
    h = x * 1
    same, y = reentrant(lambda h: (h, h.exp()), h)
    (same.sum() + y.sum()).backward()
    assert torch.equal(x.grad, 1 + x.detach().exp())


def lines(error) -> list[str]:
    return str(error.value).splitlines()


def test_autograd_grad_is_refused_with_the_way_out() -> None:
    x = leaf()
    y = remat(torch.exp, use_reentrant=True, label="block")(x)
    with pytest.raises(MismatchError) as caught:
        torch.autograd.grad(y.sum(), x)
    assert lines(caught)[0] == (
        "layer 'block': use_reentrant=True works with backward() only, not with torch.autograd.grad or "
        "backward(inputs=...)."
    )
    assert lines(caught)[-1] == "  way out: use the default engine (use_reentrant=False)."
    with pytest.raises(MismatchError, match="works with backward"):
        remat(torch.exp, use_reentrant=True)(x).sum().backward(inputs=[x])


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_double_backward_is_refused() -> None:
    x = leaf()
    reentrant(torch.exp, x).sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        x.grad.sum().backward()
    x.grad = None


def test_a_tensor_that_leaves_by_the_side_is_refused_when_it_is_needed() -> None:
    kept = []

    def layer(x):
        kept.append(x.sin())
        return x.cos()

    y = remat(layer, use_reentrant=True, label="router")(leaf())
    with pytest.raises(
        MismatchError, match="layer 'router': use_reentrant=True keeps no graph of the forward"
    ) as caught:
        (y.sum() + kept[0].sum()).backward()
    assert "return from the layer every tensor that the loss uses" in lines(caught)[-1]


def test_phases_that_return_other_structures() -> None:
    y = reentrant(lambda x: x.exp() if not doing_recompute() else (x.exp(), x), leaf())
    with pytest.raises(MismatchError) as caught:
        y.sum().backward()
    place = f"({__file__}:{test_phases_that_return_other_structures.__code__.co_firstlineno + 1})"
    layer = f"test_phases_that_return_other_structures.<locals>.<lambda> {place}"
    assert lines(caught)[0] == f"layer {layer!r}: the forward gave 1 tensors, the recompute 2."
    assert lines(caught)[-1].strip() == "way out: return the same structure in both phases."


@pytest.mark.parametrize("options", [{"debug": True}, {"context_fn": lambda: (None, None)}, {"verify": "warn"}])
def test_options_of_the_other_engine(options) -> None:
    with pytest.raises(OptionError, match="context_fn, debug and verify do not go with use_reentrant=True"):
        remat(torch.exp, use_reentrant=True, **options)(leaf())


def test_a_module_in_the_middle_of_a_net() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5)), nn.Linear(4, 1))

    def run(middle):
        torch.manual_seed(1)
        net.zero_grad()
        net[2](middle(net[0](leaf()))).sum().backward()
        return [p.grad.clone() for p in net.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(net[1]), run(remat(net[1], use_reentrant=True)), strict=True))
