"""Tensors of uncommon kinds as input, weight, buffer or decision of a layer: sparse, nested, masked, made of others."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from roundpipe_torch import SlotError, VerifyError, checkpoint, recompute_once, remat, save_for_recompute, usage
from tests.on_torch.oracle import Counted, agree, leaf, plain, reentrant, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(in prototype|in beta)"),  # what torch says of these kinds
    pytest.mark.filterwarnings("ignore:.*[Mm]asked"),
]


def verified(function, *args, **kwargs):
    return remat(function, verify="raise")(*args, **kwargs)


WAYS = [pytest.param(way, id=way.__name__) for way in (checkpoint, reentrant, verified)]


class Int8(torch.Tensor):
    """A weight in eight bits and its scale: each operation gets it in full."""

    @staticmethod
    def __new__(cls, q, scale):
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=torch.float32)

    def __init__(self, q, scale) -> None:
        self.q, self.scale = q, scale

    def __tensor_flatten__(self):
        return ["q", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return return_and_correct_aliasing(func, args, kwargs, cls(args[0].q, args[0].scale))
        if func is torch.ops.aten.clone.default:
            return cls(args[0].q.clone(), args[0].scale.clone())
        full = tree_map_only(cls, lambda whole: whole.q * whole.scale, (args, kwargs or {}))
        return func(*full[0], **full[1])


class Bare(torch.Tensor):
    """Of which no operation has an idea."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2, 2))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls()
        raise NotImplementedError(f"no {func}")


class Graph(nn.Module):
    """Adds up over neighbours."""

    def __init__(self, layout) -> None:
        super().__init__()
        self.weight = nn.Parameter(leaf(4, 4, seed=2, grad=False))
        self.register_buffer("near", leaf(6, 6, seed=3, grad=False).relu().to_sparse(layout=layout))

    def forward(self, x):
        near = recompute_once(lambda: (self.near.to_dense() > 0.5).float().to_sparse(layout=self.near.layout))
        return torch.tanh(near @ (self.near @ (x @ self.weight)))


def two(x):
    return TwoTensor(x, x.clone())


def jagged(x):
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 1, 6]))


def ragged(x):
    return torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.strided)


KINDS: dict[str, Any] = {
    "two": (two, lambda y: y.a.sum() + y.b.sum()),
    "jagged": (jagged, lambda y: y.values().sum()),
    "ragged": (ragged, lambda y: y.to_padded_tensor(0.0).sum()),
    "sparse": (lambda x: x.relu().to_sparse(), lambda y: y.to_dense().sum()),
    "compressed": (lambda x: x.relu().to_sparse_csr(), lambda y: y.to_dense().sum()),
    "masked": (lambda x: masked_tensor(x, x > 0), lambda y: y.to_tensor(0.0).sum()),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
def test_a_sparse_buffer_and_decision(layout, way) -> None:
    def scenario(way):
        module, x = Graph(layout), leaf(6, 4)
        with usage() as held:
            y = way(module, way(module, x))
        y.sum().backward()
        assert not held.layers or all(row.slot > 0 for row in held.layers)
        return x.grad, module.weight.grad

    agree(scenario, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["two", "jagged", "ragged"])
def test_an_activation_and_a_decision_of_such_a_kind(kind, way) -> None:
    if kind == "ragged" and way is reentrant:
        pytest.skip("torch's autograd.Function returns none of these")
    made, _ = KINDS[kind]

    def scenario(way):
        w = leaf(4, 4, seed=1, grad=False)
        w = (two(w) if kind == "two" else w).requires_grad_()

        def layer(x):
            h = nn.functional.linear(x, w)
            (gate,) = save_for_recompute(h.detach())
            return h * h * gate

        y = way(layer, made(leaf(6, 4, grad=False)))
        y = way(layer, y)
        y.backward(torch.ones_like(y))
        return [getattr(w.grad, part) for part in ("a", "b")] if kind == "two" else w.grad

    counted = Counted(way)
    same(scenario(counted), scenario(plain), within=1e-6 if way is reentrant else 0.0)  # of two layers' gradients
    assert counted.runs > counted.regions == 2


@pytest.mark.parametrize("kind", list(KINDS))
def test_verify_tells_what_is_the_same_from_what_is_not(kind) -> None:
    made, total = KINDS[kind]
    runs = []

    def layer(x, drift):
        runs.append(x)
        again = x.detach() + (drift and len(runs) == 2)  # the first run in backward is the one that compares
        (kept,) = save_for_recompute(made(again))
        return x.sin() * total(kept)

    verified(layer, leaf(6, 4), drift=False).sum().backward()
    runs.clear()
    with pytest.raises(VerifyError, match="the unnamed slot, item"):
        verified(layer, leaf(6, 4), drift=True).sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_weight_that_wraps_others_beside_a_trained_one(way) -> None:
    def scenario(way):
        frozen = nn.Parameter(
            Int8(torch.arange(-8, 8, dtype=torch.int8).view(4, 4), torch.tensor(0.1)), requires_grad=False
        )
        low, x = leaf(4, 4, seed=1), leaf(6, 4)

        def layer(x):
            h = nn.functional.linear(x, frozen) + x @ low
            top = recompute_once(lambda: h.topk(2).indices)
            return torch.tanh(h) + h.gather(-1, top).sum(-1, keepdim=True)

        way(layer, x).sum().backward()
        return x.grad, low.grad

    agree(scenario, way)


def test_bytes_are_those_of_what_is_held() -> None:
    weight = Int8(torch.zeros(4, 4, dtype=torch.int8), torch.tensor(0.1))
    with usage() as held:
        checkpoint(lambda x: x.sin() * save_for_recompute(weight)[0], leaf(4, 4))
    assert held.layers[0].slot == 16 + 4


@pytest.mark.parametrize("save", [save_for_recompute, partial(save_for_recompute, name="odd")])
def test_what_cannot_be_copied_is_named(save) -> None:
    with pytest.raises(SlotError, match=r"data\[1\] is a Bare that cannot be copied: no aten.clone") as caught:
        checkpoint(lambda x: save(1, Bare()) and x.sin(), leaf(4))
    assert f"saved at: {__file__}:" in str(caught.value)
    assert isinstance(caught.value.__cause__, NotImplementedError)


class Tripled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 3 if func is torch.tanh else result


def noted(x):
    x.factor = 2.0
    return x


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("way", [checkpoint, reentrant])
@pytest.mark.parametrize("kind", ["attribute", "class", "parameter", "scale"])
def test_an_argument_has_the_class_and_the_attributes_that_it_had(kind, way, nested) -> None:
    def layer(x, w):
        trained = 5.0 if isinstance(w, nn.Parameter) else 1.0
        y = noted(torch.tanh(x * w * getattr(x, "factor", 1.0) * getattr(w, "factor", trained))).cos()
        return noted(y)

    def scenario(way):
        leaves = leaf(4, 8), leaf(4, 8, seed=1)
        x, w = leaves[0].sin(), leaves[1] * 1
        if kind == "attribute":
            noted(x)
        elif kind == "class":
            x = x.as_subclass(Tripled)
        else:
            w = nn.Parameter(leaf(4, 8, seed=1).detach())
            leaves = leaves[0], noted(w) if kind == "scale" else w
        if nested:
            y = way(lambda x, w: way(layer, x, w) + x, x, w)
        else:
            y = way(layer, x, w)
            y = y * y.factor
        y.square().sum().backward()  # of the class of `y`, which is off in there
        return [one.grad for one in leaves]

    agree(scenario, way)


def inside_another(way, function, *args):
    return way(lambda *args: way(function, *args), *args)


def put_elsewhere():
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda kept: kept)


def under_hooks(way, function, *args):
    with put_elsewhere():
        return way(function, *args)


@pytest.mark.parametrize("around", [plain, inside_another, under_hooks])
@pytest.mark.parametrize("way", [checkpoint, reentrant])
def test_an_argument_may_be_known_by_identity(way, around) -> None:
    """A leaf or a mask is the forward's own, and one tensor in two places is one."""

    def scenario(way):
        x, w, mask = leaf(4, 8), leaf(4, 8, seed=1), torch.ones(4, 8)
        factors = {w: 2.0, mask: 3.0}

        def layer(h, again, w, mask, given):
            y = torch.tanh(h * w * mask * factors.get(w, 1.0) * factors.get(mask, 1.0))
            y = torch.cos(y * given["scale"]) if given["scale"] is w else torch.sin(y)
            return y.exp() if again is h else y.sin()

        h = x.sin()
        y = around(way, layer, h, h, w, mask, {"scale": w})
        del h
        y.sum().backward()
        return x.grad, w.grad

    agree(scenario, way)


def test_what_an_argument_became_is_not_what_it_was() -> None:
    """Hooks have its values; the tensor itself may have none any more."""

    def scenario(way):
        x, w = leaf(4, 8), leaf(4, 8, seed=1)
        h = x * w
        with put_elsewhere():
            y = way(lambda h: h.sin().exp(), h)
        h.data = torch.empty(0)  # given back by who has put the values elsewhere
        y.sum().backward()
        return x.grad, w.grad

    agree(scenario)


@pytest.mark.parametrize("cut", [True, False])
def test_one_tensor_in_two_places_gets_its_gradient_once_where_the_backward_inside_accumulates(cut) -> None:
    def scenario(way):
        x, w = leaf(4, 8), leaf(4, 8, seed=1)
        h, held = x.sin() if cut else x, w * 2
        way(lambda a, b: torch.tanh(a * b * held), h, h).sum().backward()
        return x.grad, w.grad

    agree(scenario, reentrant)
