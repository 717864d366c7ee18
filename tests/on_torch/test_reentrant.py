"""The second engine: any difference between the phases is legal; its limits are errors."""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from roundpipe_torch import (
    CheckpointMismatchError,
    MismatchError,
    OptionError,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    remat,
    save_for_recompute,
)
from tests.on_torch.oracle import same


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


def plain(function, *args):
    return function(*args)


def nested(function, *args):
    return reentrant(lambda *inner: reentrant(function, *inner), *args)


def integers(seed: int) -> torch.Tensor:  # sums of whose products are exact in any order
    return torch.randint(-3, 4, (4, 4), generator=torch.Generator().manual_seed(seed)).double().requires_grad_()


def through_closures(way):
    """A loss of two layers that take `w` from their closure, the first one also as an argument."""
    w, x, v = integers(0), integers(1), integers(2)
    y = way(lambda x, again: (x @ w) * again + w @ x, x, w)
    return way(lambda y: ((y @ w) * v, w), y), w, x, v


WAYS = pytest.mark.parametrize("way", [reentrant, nested])


@WAYS
def test_a_leaf_of_the_closure_gets_its_gradient_at_once(way) -> None:
    def scenario(way):
        (y, again), w, x, v = through_closures(way)
        seen = []
        w.register_hook(lambda gradient: seen.append(gradient.clone()))
        w.register_hook(lambda gradient: gradient.abs().sqrt())  # part by part it would give something else
        w.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad.clone()))
        torch.autograd.graph.register_multi_grad_hook([w, x, v], lambda gradients: seen.append([*gradients]))
        node = w.view_as(w).grad_fn.next_functions[0][0]
        node.register_prehook(lambda gradients: seen.append(gradients[0].clone()))
        node.register_hook(lambda _, gradients: seen.append(gradients[0].clone()))
        (y.sum() + again.sum() + w.square().sum()).backward()
        return [x.grad, w.grad, v.grad, *seen]

    want, got = scenario(plain), scenario(way)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_so_does_one_beside_a_hooked_one_that_not_each_output_depends_on() -> None:
    """Told by the node that takes it, as DistributedDataParallel counts."""
    x, w, v, seen = leaf(), leaf(1), leaf(2), []
    w.register_hook(lambda gradient: gradient * 2)
    node = torch.autograd.graph.get_gradient_edge(v).node
    node.register_prehook(lambda gradients: seen.append(gradients[0]))
    for _ in range(2):
        x, _ = reentrant(lambda x: ((x @ v).sin(), x @ w + v), x)
    x.sum().backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], v.grad)


@WAYS
def test_gradients_by_leaves_of_the_closure(way) -> None:
    def scenario(way):
        (y, again), w, x, v = through_closures(way)
        w.register_hook(lambda gradient: gradient.abs().sqrt())
        loss = y.sum() + again.sum()
        first = torch.autograd.grad(loss, [v, w], retain_graph=True)
        loss.backward(inputs=[w, x])
        return [*first, w.grad, x.grad, v.grad]

    want, got = scenario(plain), scenario(way)
    assert want.pop() is got.pop() is None
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_hook_rests_for_the_backward_inside_alone() -> None:
    w, x, seen = integers(0), integers(1), []
    w.register_hook(lambda gradient: seen.append(gradient.clone()))

    def another_step(gradient):
        thread = threading.Thread(target=lambda: (w * 5).sum().backward())
        thread.start()
        thread.join()

    def layer(x):
        y = x @ w
        if doing_recompute():
            y.register_hook(another_step)
        return y * 1

    reentrant(layer, x).sum().backward()
    five, whole = torch.full((4, 4), 5.0, dtype=torch.float64), x.detach().T @ torch.ones(4, 4, dtype=torch.float64)
    torch.testing.assert_close(seen, [five, whole], rtol=0, atol=0)
    torch.testing.assert_close(w.grad, five + whole, rtol=0, atol=0)


def test_leaves_that_only_the_recompute_has() -> None:
    w, v, x = integers(0), integers(1), integers(2)
    y = reentrant(lambda x: x * (v if doing_recompute() else w), x)
    y.sum().backward(retain_graph=True)
    assert torch.equal(v.grad, x.detach())
    assert not w.grad
    with pytest.raises(MismatchError, match="or a leaf that the forward did not have"):
        torch.autograd.grad(y.sum(), x)


class Adapted(nn.Module):
    """Knows in a dict what is active: whatever else is in there is its own affair."""

    def __init__(self):
        super().__init__()
        self.first, self.other, self.settings = nn.Linear(4, 4), nn.Linear(4, 4), {"active": "first"}

    def forward(self, x):
        return getattr(self, self.settings["active"])(x).exp()


def test_another_adapter_before_backward_is_an_error() -> None:
    """As with the default engine (peft issue 2832)."""
    net = Adapted()
    y = reentrant(net, leaf())
    net.settings["active"] = "other"
    with pytest.raises(CheckpointMismatchError, match=r"do not depend on a parameter .*: float32\[4, 4\]"):
        y.sum().backward()


NOTHING = contextlib.nullcontext()


@pytest.mark.parametrize("part", [False, True], ids=["", "by one of its outputs"])
def test_an_adapter_that_is_merged_before_backward_is_an_error(part) -> None:
    """And one that is switched on says that the recompute has a parameter more."""

    class Merged(Adapted):
        def forward(self, x):
            y = self.first(x)
            return (y if self.settings["active"] == "merged" else y + self.other(x)).exp(), x * 2

    net, x = Merged(), leaf()
    y, z = reentrant(net, x)
    net.settings["active"] = "merged"
    with pytest.raises(CheckpointMismatchError, match="do not depend on a parameter that those of the forward depend"):
        (z if part else y + z).sum().backward()
    y, z = reentrant(net, x)
    net.settings["active"] = "first"
    with (
        pytest.raises(CheckpointMismatchError, match="used another parameter than the forward") if not part else NOTHING
    ):
        (z if part else y + z).sum().backward()


def test_what_a_region_was_given_goes_with_its_backward() -> None:
    """Though its output is still there (pytorch issue 84413, Megatron-LM PR 6339)."""

    class Batch:
        pass

    def given(batch, x):
        refs.append(weakref.ref(batch))
        return reentrant(lambda x, batch: x.exp(), x, batch), reentrant(lambda x: (batch, x.exp())[1], x)

    refs: list = []
    outputs = given(Batch(), leaf())
    sum(outputs).sum().backward(retain_graph=True)
    assert refs[0]() is not None
    sum(outputs).sum().backward()
    assert refs[0]() is None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        outputs[0].sum().backward()


def test_a_region_without_arguments_cannot_be_differentiated_twice() -> None:
    w = leaf()
    y = reentrant(lambda: w.exp())
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_a_parameter_made_by_the_layer_does_not_stay() -> None:
    seen = []

    def layer(x):
        made = nn.Parameter(x.detach() * 2)
        made.register_hook(lambda gradient: seen.append(gradient.clone()))
        made.register_post_accumulate_grad_hook(lambda made: seen.append(made.grad.clone()))
        refs.append(weakref.ref(made))
        return made * x

    refs, x = [], integers(0)
    y = reentrant(layer, x)
    assert refs[0]() is None
    assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], x * 2)
    seen.clear()
    y.sum().backward()
    assert torch.equal(x.grad, x * 2)
    torch.testing.assert_close(seen, [x.detach()] * 2, rtol=0, atol=0)


def on_tensor(w, seen, nodes):
    w.register_hook(lambda gradient: (seen.append(gradient.sum().item()), gradient / 2)[1])


def before_node(w, seen, nodes):
    nodes.append(get_gradient_edge(w).node)
    nodes[-1].register_prehook(lambda gradients: (seen.append(gradients[0].sum().item()), (gradients[0] / 2,))[1])


def after_node(w, seen, nodes):
    nodes.append(get_gradient_edge(w).node)
    nodes[-1].register_hook(lambda gradients, outputs: seen.append(outputs[0].sum().item()))


def on_sum(w, seen, nodes):
    if w.is_leaf:
        w.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad.sum().item()))


@pytest.mark.parametrize("how", ["closure", "leaf", "argument"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("register", [on_tensor, before_node, after_node, on_sum])
def test_hooks_on_what_one_of_the_outputs_depends_on(register, when, how) -> None:
    """Called once with the whole gradient, and not where only the other output has one."""

    def scenario(way):
        results = []
        for use in (lambda a, b, w: a, lambda a, b, w: b, lambda a, b, w: a + b, lambda a, b, w: b + w, torch.addcmul):
            x, leaf_w, seen, nodes = leaf(0), leaf(1), [], []
            w = leaf_w.exp() if how == "argument" else leaf_w
            if when == "before":
                register(w, seen, nodes)
            if how == "closure":
                a, b = way(lambda x: ((x * w).sin(), x.cos()), x)  # noqa: B023
            else:
                a, b = way(lambda x, w: ((x * w).sin(), x.cos()), x, w)
            if when == "after":
                register(w, seen, nodes)
            for _ in range(2):  # what the first has added stays
                use(a, b, w).sum().backward(retain_graph=True)
            results.append([x.grad, leaf_w.grad, seen])
        return results

    same(scenario(reentrant), scenario(plain), within=1e-5)


def outside(h):
    return lambda x: x * h


def a_checkpoint_of_torch(h):
    return lambda x: torch.utils.checkpoint.checkpoint(torch.mul, x, x, use_reentrant=True)


def a_region_that_reaches_out(h):
    return lambda x: reentrant(outside(x.sin()), x)


@pytest.mark.parametrize("make", [outside, a_checkpoint_of_torch, a_region_that_reaches_out])
def test_autograd_grad_is_refused_with_the_way_out_where_a_backward_inside_accumulates(make) -> None:
    def scenario(way):
        x, w = integers(0), integers(1)
        y = way(make(w.cos()), x)
        y.sum().backward()
        return [x.grad, w.grad], way(make(w.cos()), x), x

    want, got = scenario(plain), scenario(remat_block)
    torch.testing.assert_close([g for g in got[0] if g is not None], [g for g in want[0] if g is not None])
    with pytest.raises(MismatchError) as caught:
        torch.autograd.grad(got[1].sum(), got[2])
    assert lines(caught)[0].startswith(
        "layer 'block': with use_reentrant=True this layer works with backward() only, not with torch.autograd.grad or "
        "backward(inputs=...): it takes from outside a tensor that is no leaf"
    )
    assert lines(caught)[1].startswith(f"  asked at: {__file__}:")
    assert lines(caught)[2] == (
        "  way out: pass such tensors as arguments, or use the default engine (use_reentrant=False)."
    )


def remat_block(function, *args):
    return remat(function, use_reentrant=True, label="block")(*args)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_double_backward_is_refused() -> None:
    x, w = leaf(), leaf()
    remat_block(torch.exp, x).sum().backward(create_graph=True)
    with pytest.raises(MismatchError, match="layer 'block': no second derivative") as caught:
        x.grad.sum().backward()
    assert lines(caught)[1].startswith(f"  asked at: {__file__}:")
    assert lines(caught)[-1] == "  way out: use the default engine (use_reentrant=False)."
    x.grad = None

    def penalized(engine):
        y = engine(lambda x, w: (x * w).exp(), x, w).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return y + slope.square().sum()

    for by in (x, w):
        with pytest.raises(MismatchError, match="no second derivative"):  # and not the gradient without the penalty
            penalized(remat_block).backward()
        with pytest.raises(MismatchError, match="no second derivative"):
            torch.autograd.grad(penalized(remat_block), by)
        with pytest.raises(MismatchError, match="no second derivative"):
            torch.autograd.grad(penalized(lambda layer, x, w: remat_block(lambda x: layer(x, w), x)), by)


def test_a_graph_of_gradients_of_which_some_are_none() -> None:
    def slopes(way):
        x, unused = leaf(), leaf(1)
        y = way(lambda x, unused: (x.exp(), unused.sin()), x, unused)[0].sum()
        return torch.autograd.grad(y, [x, unused], create_graph=True, allow_unused=True)

    got, want = slopes(remat_block), slopes(plain)
    assert torch.equal(got[0], want[0])
    assert got[1] is want[1] is None


def test_what_only_the_forward_read_may_be_written_to_before_backward() -> None:
    table = torch.ones(4, 4)

    def layer(x):
        if doing_recompute():
            return x * get_recompute_data()[0]
        save_for_recompute(table.clone())
        return x * table

    x = leaf()
    y = reentrant(layer, x)
    table.add_(1)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 4))


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


def test_phases_that_return_other_shapes() -> None:
    layer = remat(lambda x: x.exp() if not doing_recompute() else x[:1].exp(), use_reentrant=True, label="cut")
    y = layer(leaf())
    with pytest.raises(MismatchError) as caught:
        y.sum().backward()
    first, place, way_out = lines(caught)
    shape = list(leaf().shape)
    assert (
        first == f"layer 'cut': output 0 of the forward has the shape {shape}, that of the recompute {[1, *shape[1:]]}."
    )
    assert place.startswith(f"  called at: {__file__}:")
    assert way_out == "  way out: save what decides about the shape (indices, a mask, a length), whole."


@pytest.mark.parametrize(
    "options",
    [{"debug": True}, {"context_fn": lambda: (contextlib.nullcontext(), contextlib.nullcontext())}, {"verify": "warn"}],
)
def test_options_of_the_other_engine(options) -> None:
    with pytest.raises(OptionError, match="context_fn, debug and verify do not go with use_reentrant=True") as caught:
        remat(torch.exp, use_reentrant=True, **options)(leaf())
    assert lines(caught)[-1] == "  way out: leave them out, or use the default engine (use_reentrant=False)."


def test_an_error_of_the_backward_inside_comes_out_as_it_is() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise error

    error = RuntimeError("pretended")
    y = reentrant(Failing.apply, leaf())
    with pytest.raises(RuntimeError) as caught:
        y.sum().backward()
    assert caught.value is error


def test_a_module_in_the_middle_of_a_net() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5)), nn.Linear(4, 1))

    def run(middle):
        torch.manual_seed(1)
        net.zero_grad()
        net[2](middle(net[0](leaf()))).sum().backward()
        return [p.grad.clone() for p in net.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(net[1]), run(remat(net[1], use_reentrant=True)), strict=True))
