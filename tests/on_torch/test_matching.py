"""R10: what the phases may do differently, what they may not, and how much of the layer is run again."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from roundpipe_torch import (
    CheckpointMismatchError,
    MismatchError,
    MutationError,
    _matching,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    layer_scope,
    recompute_once,
    save_for_recompute,
)
from tests.on_torch.oracle import ENGINES, agree, leaf, reentrant


def leaves(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 6, generator=generator).requires_grad_() for _ in range(4)]


def compare(layer, plain=None) -> None:
    """`layer` under checkpoint has bitwise the gradients of `plain` (default: itself) without."""
    want, got = leaves(), leaves()
    (plain or layer)(*want).square().sum().backward()
    checkpoint(layer, *got).square().sum().backward()
    for g, w in zip(got, want, strict=True):
        assert (g.grad is None) == (w.grad is None)
        assert g.grad is None or torch.equal(g.grad, w.grad)


class Box:
    aux = None


BOX = Box()


def gate_in_forward_only(x, gate, up, down):
    if doing_recompute():
        (top,) = get_recompute_data()
    else:
        top = torch.softmax(x @ gate, -1).topk(2).indices
        save_for_recompute(top)
    return torch.tanh(x @ up).gather(1, top) @ down[:2]


def topk_values_in_forward_gather_in_recompute(x, gate, up, down):
    scores = torch.softmax(x @ gate, -1)
    if doing_recompute():
        (top,) = get_recompute_data()
        weights = scores.gather(1, top)
    else:
        weights, top = scores.topk(2)
        save_for_recompute(top)
    return torch.tanh(x @ up) @ down * weights.sum(-1, keepdim=True)


def narrow_topk(x, gate, up, down):
    scores = torch.softmax(x @ gate, -1)
    if doing_recompute():
        (top,) = get_recompute_data()
        weights = scores.gather(1, top.long())
    else:
        weights, top = scores.topk(2)
        save_for_recompute(top.to(torch.int16))
    return torch.tanh(x @ up) @ down * weights.sum(-1, keepdim=True)


def sorted_in_forward(x, gate, up, down):
    h = x @ gate
    if doing_recompute():
        (order,) = get_recompute_data()
        ranked = h.gather(1, order)
    else:
        ranked, order = h.sort(-1)
        save_for_recompute(order)
    return torch.tanh(ranked @ up) @ down


def statistic_in_forward(x, gate, up, down):
    (scale,) = save_for_recompute(2.0)
    if not doing_recompute():
        seen = torch.sin(x).mean() + (x @ gate).exp().sum()
        del seen
    return torch.exp(torch.cos(x * scale) @ up) @ down


def statistic_in_recompute(x, gate, up, down):
    if doing_recompute():
        (scale,) = get_recompute_data()
        torch.sin(x).mean()
    else:
        scale = 2.0
        save_for_recompute(scale)
    return torch.exp(torch.cos(x * scale))


def statistic_in_a_local_of_the_recompute(x, gate, up, down):
    if doing_recompute():
        (scale,) = get_recompute_data()
        seen = torch.sin(x).mean()
    else:
        scale = seen = 2.0
        save_for_recompute(scale)
    y = torch.sin(torch.sin(torch.sin(x * scale)))
    del seen
    return y


def statistic_in_the_middle_of_the_recompute(x, gate, up, down):
    again = doing_recompute()
    (scale,) = save_for_recompute(2.0)
    h = torch.sin(x * scale)
    seen = torch.sin(h) if again else None
    h = torch.sin(h)
    h = torch.sin(h)
    assert seen is None or seen.shape == h.shape
    return h


def statistic_kept_by_both(x, gate, up, down):
    h = x @ gate
    BOX.aux = h.exp().sum()
    (top,) = save_for_recompute(h.detach().argmax(-1, keepdim=True))
    return torch.tanh(x @ up).gather(1, top) @ down[:1]


def statistic_kept_by_forward(x, gate, up, down):
    if doing_recompute():
        (top,) = get_recompute_data()
    else:
        h = x @ gate
        BOX.aux = h.exp().sum()
        (top,) = save_for_recompute(h.detach().argmax(-1, keepdim=True))
    return torch.tanh(x @ up).gather(1, top) @ down[:1]


def cycle_in_the_decision(x, gate, up, down):
    if doing_recompute():
        (top,) = get_recompute_data()
    else:
        ring: list = [torch.softmax(x @ gate, -1)]
        ring.append(ring)
        (top,) = save_for_recompute(ring[0].detach().argmax(-1, keepdim=True))
    return torch.tanh(torch.exp(x @ up).gather(1, top)) @ down[:1]


def cycle_in_the_recompute(x, gate, up, down):
    (top,) = save_for_recompute(x.detach().argmax(-1, keepdim=True))
    if doing_recompute():
        ring: list = [torch.softmax(x @ gate, -1)]
        ring.append(ring)
    return torch.tanh(torch.exp(x @ up).gather(1, top)) @ down[:1]


def cycle_beside_code_of_its_own(x, gate, up, down):
    if doing_recompute():
        (top,) = get_recompute_data()
        ring: list = [torch.exp(x @ gate)]
        ring.append(ring)
        h = torch.exp(x @ up)
    else:
        h = torch.exp(x @ up)
        (top,) = save_for_recompute(x.detach().argmax(-1, keepdim=True))
    return torch.tanh(h).gather(1, top) @ down[:1]


def two_decisions(x, gate, up, down):
    (first,) = save_for_recompute((x @ gate).argmax(-1, keepdim=True), name="first")
    h = torch.tanh(x @ up).gather(1, first)
    if doing_recompute():
        (second,) = get_recompute_data("second")
    else:
        second = torch.softmax(h @ down[:1], -1).topk(3).indices
        save_for_recompute(second, name="second")
    return (h @ down[:1]).gather(1, second).exp()


def once(x, gate, up, down):
    top = recompute_once(lambda: torch.softmax(x @ gate, -1).topk(2).indices)
    return torch.tanh(x @ up).gather(1, top) @ down[:2]


DIFFERENT = [
    gate_in_forward_only,
    topk_values_in_forward_gather_in_recompute,
    narrow_topk,
    sorted_in_forward,
    statistic_in_forward,
    statistic_in_recompute,
    statistic_in_a_local_of_the_recompute,
    statistic_in_the_middle_of_the_recompute,
    statistic_kept_by_both,
    statistic_kept_by_forward,
    cycle_in_the_decision,
    cycle_in_the_recompute,
    two_decisions,
    once,
]


@pytest.mark.parametrize("layer", DIFFERENT)
def test_phases_that_differ_around_the_decision(layer) -> None:
    compare(layer)


@pytest.mark.parametrize("layer", DIFFERENT)
def test_the_same_inside_another_region(layer) -> None:
    compare(lambda *args: torch.cos(checkpoint(layer, *args)), lambda *args: torch.cos(layer(*args)))


@pytest.mark.parametrize("layer", DIFFERENT)
def test_double_backward(layer) -> None:
    def second(call, args):
        y = call(*args)
        (g,) = torch.autograd.grad(y.square().sum(), args[0], create_graph=True)
        g.square().sum().backward()
        return [a.grad for a in args]

    want = second(layer, leaves())
    got = second(lambda *args: checkpoint(layer, *args), leaves())
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        assert g is None or torch.equal(g, w)


def test_a_cycle_kept_alive_does_no_harm_without_the_collector() -> None:
    gc.disable()
    try:
        compare(cycle_in_the_decision)
        compare(cycle_in_the_recompute)
        compare(cycle_beside_code_of_its_own)
    finally:
        gc.enable()


def test_nothing_is_collected_where_no_cycle_keeps_anything(monkeypatch) -> None:
    def collect(generation=2) -> int:
        assert generation == 0  # before a generator's state is read
        return 0

    monkeypatch.setattr(gc, "collect", collect)
    compare(sorted_in_forward)


def test_aux_of_both_phases_in_the_loss() -> None:
    def loss(call, args):
        (call(*args).square().sum() + BOX.aux).backward()
        return [a.grad for a in args]

    want = loss(statistic_kept_by_both, leaves())
    got = loss(lambda *args: checkpoint(statistic_kept_by_both, *args), leaves())
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_aux_of_the_forward_alone_in_the_loss_is_an_error_that_tells_both_sides() -> None:
    y = checkpoint(statistic_kept_by_forward, *leaves(), debug=True)
    with pytest.raises(CheckpointMismatchError) as caught:
        (y.square().sum() + BOX.aux).backward()
    text = str(caught.value)
    first, *rest = text.splitlines()
    assert first.startswith("layer 'statistic_kept_by_forward (")
    assert "backward needs float32[6, 6] on cpu, saved by the forward as number 2" in first
    assert any(line.strip().startswith("forward saved: 10 tensors") for line in rest)
    assert any(line.strip().startswith("recompute saved: 7 tensors") for line in rest)
    assert f"at {__file__}:" in text
    assert "way out:" in text
    assert "self.aux = logits.sum()" in text
    assert isinstance(caught.value, MismatchError)
    assert isinstance(caught.value, torch.utils.checkpoint.CheckpointError)
    assert doing_recompute() is False


@pytest.mark.parametrize("extra", ["start", "middle"])
def test_a_live_statistic_of_one_phase_is_told_from_the_rest_by_its_line(extra: str) -> None:
    """Same shapes everywhere: which tensor is the extra one cannot be told from metadata."""

    def layer(x, gate, up, down):
        again = doing_recompute()
        (scale,) = save_for_recompute(2.0)
        if again and extra == "start":
            BOX.aux = torch.sin(x)
        h = torch.sin(x * scale)
        if again and extra == "middle":
            BOX.aux = torch.sin(h)
        return torch.sin(torch.sin(h))

    compare(layer)


def test_different_shapes_are_an_error() -> None:
    def layer(x):
        return torch.exp(x[:2] if doing_recompute() else x).sum()

    y = checkpoint(layer, torch.ones(4, requires_grad=True))
    with pytest.raises(CheckpointMismatchError, match=r"backward needs float32\[4\] on cpu"):
        y.backward()


def test_determinism_check_none_takes_what_comes() -> None:
    def layer(x):
        return (x * (x.detach() if not doing_recompute() else x.detach().double())).sum()

    def step(**options):
        x = torch.ones(4, requires_grad=True)
        checkpoint(layer, x, **options).backward()
        return x.grad

    with pytest.raises(CheckpointMismatchError):
        step()
    assert torch.equal(step(determinism_check="none"), torch.ones(4))


# How much is run again


def flops(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def mlp(x, gate, up, down):
    return torch.tanh(x @ gate) @ up @ down


def moe(x, gate, up, down):
    if doing_recompute():
        (top,) = get_recompute_data()
    else:
        top = torch.softmax(x @ gate, -1).topk(2).indices
        save_for_recompute(top)
    return (torch.tanh(x @ up) * top.sum(-1, keepdim=True)) @ down


ONE = 2 * 6 * 6 * 6  # a product of two 6 x 6 matrices


def test_recompute_stops_before_the_last_product() -> None:
    def step(call):
        return lambda: call(mlp, *leaves()).sum().backward()

    plain = flops(step(lambda f, *a: f(*a)))
    torchs = flops(step(lambda f, *a: torch_checkpoint(f, *a, use_reentrant=False)))
    ours = flops(step(checkpoint))
    assert plain == 9 * ONE
    assert ours == torchs == plain + 2 * ONE  # not the third: nothing after it is saved
    assert flops(step(lambda f, *a: checkpoint(f, *a, early_stop=False))) == plain + 3 * ONE


TAILS = {
    "own result": (lambda x, w: torch.tanh(x @ w), True),
    "added after": (lambda x, w: torch.tanh(x @ w) + x, True),
    "two parts": (lambda x, w: x.sin() * 2 + (x @ w).sin().view(-1).view_as(x), True),
    "product": (lambda x, w: x @ w, False),
    "product, then added": (lambda x, w: torch.sin(x) + x @ w, False),
    "product beside": (lambda x, w: (torch.tanh(x), x @ w)[0], False),
    "two returned": (lambda x, w: (torch.tanh(x @ w), x)[:2], False),
    "long": (lambda x, w: x @ w + 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9, False),
}


@pytest.mark.parametrize("rows", [6, 4096])
@pytest.mark.parametrize(("layer", "cheap"), TAILS.values(), ids=TAILS)
def test_only_a_few_operations_on_few_elements_are_run_again_to_spare_the_exception(layer, cheap, rows) -> None:
    x, w = torch.randn(rows, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)
    ends = 0

    def to_its_end(x, w):
        nonlocal ends
        y = layer(x, w)
        ends += 1
        return y

    def run(call):
        with FlopCounterMode(display=False) as counter:
            y = call(to_its_end, x, w)
            (gradient,) = torch.autograd.grad((y if isinstance(y, torch.Tensor) else y[0]).square().sum(), x)
        return counter.get_total_flops(), gradient

    _, want = run(lambda f, *a: f(*a))
    torchs, _ = run(lambda f, *a: torch_checkpoint(f, *a, use_reentrant=False))
    ends = 0
    ours, got = run(checkpoint)
    assert torch.equal(got, want)
    assert ours == torchs
    assert ends == (2 if cheap and rows == 6 else 1)


def test_a_program_that_is_written_of_a_backward_has_nothing_in_vain() -> None:
    def gradient(x):
        y = checkpoint(lambda x: x.exp().sin().mul(2), x)
        return torch.autograd.grad(y.sum(), x)

    written = make_fx(gradient)(leaf(3))
    made = [node.target for node in written.graph.nodes if node.op == "call_function"]
    assert made.count(torch.ops.aten.exp.default) == 2
    assert made.count(torch.ops.aten.sin.default) == 1


def test_recompute_is_torchs_less_the_decision() -> None:
    def step(call):
        return lambda: call(moe, *leaves()).sum().backward()

    plain = flops(step(lambda f, *a: f(*a)))
    ours = flops(step(checkpoint))
    assert plain == 3 * ONE + 4 * ONE
    assert ours == plain + ONE  # neither the gate nor the last product


def test_torchs_switch_for_early_stop_is_honoured() -> None:
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        ours = flops(lambda: checkpoint(mlp, *leaves()).sum().backward())
    assert ours == 12 * ONE


def test_a_layer_that_catches_everything_gets_its_gradient() -> None:
    def layer(x, gate, up, down):
        try:
            h = torch.tanh(x @ gate)
        except Exception:  # as torch's early stop would be caught here
            h = x * 0
        try:
            return h.exp()
        except BaseException:
            return x * 0

    compare(layer)


# Branches with code of their own


def told(forward, recompute):
    """A layer whose phases run `forward` and `recompute`, which give the same values."""

    def layer(x, gate, up, down):
        if doing_recompute():
            get_recompute_data()
            return recompute(x, gate, up)
        save_for_recompute(1)
        return forward(x, gate, up)

    return layer


def test_the_same_code_written_twice_is_matched_by_order() -> None:
    compare(
        told(lambda x, g, u: torch.tanh(x @ g) * torch.sin(x @ u), lambda x, g, u: torch.tanh(x @ g) * torch.sin(x @ u))
    )


OTHER_CODE = {
    "another formula": (lambda x, g, u: torch.tanh(x @ g), lambda x, g, u: 2 * torch.sigmoid(2 * (x @ g)) - 1),
    "another order": (
        lambda x, g, u: torch.mul(*[torch.softmax(x @ g, -1), torch.tanh(x @ g)]),
        lambda x, g, u: torch.mul(*[torch.tanh(x @ g), torch.softmax(x @ g, -1)][::-1]),
    ),
    "swapped factors of one kind": (
        lambda x, g, u: torch.mul(*[torch.sin(x @ g), torch.sin(2 * (x @ g))]),
        lambda x, g, u: torch.mul(*[torch.sin(x @ g), torch.sin(2 * (x @ g))][::-1]),
    ),
    "swapped factors": (
        lambda x, g, u: torch.sin(x @ g) * torch.cos(x @ u),
        lambda x, g, u: torch.cos(x @ u) * torch.sin(x @ g),
    ),
}


@pytest.mark.parametrize("code", OTHER_CODE)
def test_other_code_that_saves_tensors_of_the_same_shapes_is_an_error(code) -> None:
    layer = told(*OTHER_CODE[code])
    with pytest.raises(CheckpointMismatchError, match="backward"):
        checkpoint(layer, *leaves()).square().sum().backward()
    x = leaves()
    checkpoint(layer, *x, use_reentrant=True).square().sum().backward()
    assert x[0].grad is not None


# Weights that are not those of the forward


def product(w):
    return lambda x: torch.sin(x @ w)


def test_a_weight_that_was_stepped_before_backward_is_an_error() -> None:
    x, w, *_ = leaves()
    y = checkpoint(product(w), x)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(MutationError) as caught:
        y.sum().backward()
    text = str(caught.value).splitlines()
    assert text[0].startswith("layer 'product.<locals>.<lambda> (")
    assert text[0].endswith(
        "a tensor from outside, float32[6, 6], has been modified by an inplace operation, or converted, after the "
        "forward, and backward needs what the recompute makes of it."
    )
    assert text[1].startswith(f"  read at: {__file__}:")


def test_a_parameter_that_another_object_gives_by_then_is_an_error() -> None:
    nets = [torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)]
    chosen = SimpleNamespace(net=nets[0])
    x, *_ = leaves()
    y = checkpoint(lambda x: torch.sin(chosen.net(x)), x)
    chosen.net = nets[1]
    with pytest.raises(CheckpointMismatchError, match="the recompute used another parameter than the forward"):
        y.sum().backward()


@pytest.mark.parametrize("way", ENGINES)
@pytest.mark.parametrize("who", ["the layer", "others"])
@pytest.mark.parametrize("how", ["positional", "keyword", "nested", "without gradient"])
def test_an_input_written_in_place_is_an_error_that_names_the_layer(how, who, way) -> None:
    x, w, *_ = leaves()
    h = x.detach() if how == "without gradient" else x * 1

    def layer(h):
        return torch.sin((h.add_(1) if who == "the layer" else h) @ w)

    calls = {
        "positional": lambda: way(layer, h),
        "keyword": lambda: way(layer, h=h),
        "nested": lambda: way(lambda d: layer(d["h"][0]), {"h": (h,)}),
        "without gradient": lambda: way(layer, h),
    }
    y = calls[how]()
    if who == "others":
        h.add_(1)
    with pytest.raises(MutationError, match=r"layer '.*': an input was changed in place after the forward") as caught:
        y.sum().backward()
    assert str(caught.value).splitlines()[-1] == (
        "  way out: pass a clone, or change the tensor out of place (x = x + 1 instead of x += 1)."
    )


def test_equal_turns_of_a_loop_are_not_taken_for_each_other():
    """The forward asks for its phase twice more than the recompute, and the last turn's tensors are not needed."""

    def layer(x, gate, up, down):
        for n in range(4):
            if n == 0 and not doing_recompute():
                assert not doing_recompute()
                assert not doing_recompute()
            with layer_scope(str(n)):
                if doing_recompute():
                    (needed,) = get_recompute_data()
                else:
                    needed = n < 3
                    save_for_recompute(needed)
            h = torch.sin(x @ gate)
            x = h * 1.5 if needed else x + 0 * h.detach()
        return x

    compare(layer)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_recompute_may_end_inside_of_torchscript() -> None:
    """The interpreter turns what is raised in it into a RuntimeError of its own."""
    layer = torch.jit.script(torch.nn.Linear(4, 4))

    def scenario(way):
        x = leaf(2, 4)
        way(lambda x: layer(x.sin()), x).sum().backward()
        gradient, layer.weight.grad = layer.weight.grad, None
        return x.grad, gradient

    agree(scenario)


def test_a_constant_of_the_closure_that_others_change_before_backward_is_told() -> None:
    nested = lambda layer, x: checkpoint(lambda x: checkpoint(layer, x.sin()).cos(), x)  # noqa: E731
    for way in (checkpoint, nested, reentrant):
        for layer, constant in ((torch.mul, torch.ones(6)), (lambda x, at: x[at].exp(), torch.tensor([0, 2]))):
            (x, *_), module = leaves(), SimpleNamespace(constant=constant)
            y = way(lambda x, layer=layer, module=module: layer(x, module.constant), x)
            y.sum().backward(retain_graph=True)
            constant.add_(1)
            with pytest.raises(MutationError, match="has been modified by an inplace operation after it was saved"):
                y.sum().backward()


@pytest.mark.parametrize("way", ENGINES)
def test_a_scratch_tensor_that_the_layer_fills_in_each_run_may_be_saved(way) -> None:
    def scenario(way):
        (x, w, *_), scratch = leaves(), torch.empty(6, 6)

        def layer(x):
            scratch.copy_(x.detach().cos())
            return (x @ w).sin() * scratch

        way(layer, x).sum().backward()
        return x.grad, w.grad

    agree(scenario, way)


@pytest.mark.parametrize("way", ENGINES)
def test_a_weight_that_is_stepped_before_backward_is_told(way) -> None:
    x, w, *_ = leaves()
    y = way(lambda x: (x @ w).sin(), x)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(MutationError, match="has been modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("way", ENGINES)
def test_noise_that_is_saved_before_it_is_drawn(way) -> None:
    def scenario(way):
        torch.manual_seed(0)
        x, w, *_ = leaves()
        way(lambda x: nn.functional.rrelu(x @ w, training=True), x).square().sum().backward()
        return x.grad, w.grad

    agree(scenario, way)


# Parameters that the layer makes itself, anew in each run


def from_its_input(x, w):
    return (nn.Parameter(x.detach().clone()) * x).sin() @ w


def over_the_memory_of_a_weight(x, w):
    return nn.functional.linear(x, nn.Parameter(w.detach())) * (x @ w)


def in_a_call_of_a_module(x, w):
    net = nn.Linear(6, 6)
    return torch.func.functional_call(net, {"weight": nn.Parameter(w.detach() * 2)}, (x,)) * (x @ w)


def in_a_copy_of_a_module(x, w, net=nn.Linear(6, 6)):  # noqa: B008
    return copy.deepcopy(net)(x).sin() @ w


def by_steps_of_an_optimizer(x, w):
    fast = nn.Parameter(w.detach().clone())
    steps = torch.optim.SGD([fast], lr=0.1)
    for _ in range(2):
        steps.zero_grad()
        (x.detach() @ fast).square().mean().backward()
        steps.step()
    return (x @ fast).sin() @ w


def by_gradients(x, w):
    fast = nn.Parameter(w.detach().clone())
    for _ in range(2):
        (slope,) = torch.autograd.grad((x @ fast).sin().square().sum(), fast, create_graph=True)
        fast = fast - 0.1 * slope
    return (x @ fast).sin() @ w


@pytest.mark.parametrize("way", [checkpoint, lambda layer, *args: checkpoint(checkpoint, layer, *args)])
@pytest.mark.parametrize(
    "layer",
    [
        from_its_input,
        over_the_memory_of_a_weight,
        in_a_call_of_a_module,
        in_a_copy_of_a_module,
        by_steps_of_an_optimizer,
        by_gradients,
    ],
)
def test_a_parameter_made_anew_in_each_run(layer, way) -> None:
    def scenario(way):
        torch.manual_seed(0)
        x, w, *_ = leaves()
        way(layer, way(layer, x, w), w).square().sum().backward()
        return x.grad, w.grad

    agree(scenario, way)


def test_a_parameter_made_anew_that_stays_beyond_the_run_is_refused() -> None:
    kept, (x, w, *_) = [], leaves()

    def layer(x):
        kept.append(nn.Parameter(w.detach().clone()))
        return x @ kept[-1]

    with pytest.raises(CheckpointMismatchError, match="used another parameter than the forward") as caught:
        checkpoint(layer, x).sum().backward()
    assert "A parameter that the layer makes anew in each run may not be kept beyond the run." in str(caught.value)


def test_the_end_of_a_layer_is_looked_at_once(monkeypatch) -> None:
    """Torch 2.13 overflows the stack where it frees a long graph of which somebody has looked at each node."""
    looked, look = [], _matching._is_cheap
    monkeypatch.setattr(_matching, "_is_cheap", lambda *args: looked.append(args) or look(*args))
    w, x = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)

    def layer(x):
        return torch.tanh(x @ w) * 2

    for _ in range(5):
        x = checkpoint(layer, x)
    assert len(looked) == 1

    def ending_in(operation):
        return lambda x: operation(layer(x))

    for operation in (torch.tanh, torch.sin):  # functions of one code
        checkpoint(ending_in(operation), x)
    assert len(looked) == 3
    module = nn.Tanh()
    for _ in range(3):
        x = checkpoint(module.forward, x)  # another object each time
    assert len(looked) == 4

    class Slotted:
        __slots__ = ()

        def __call__(self, x):
            return layer(x)

    checkpoint(Slotted(), x)
    assert len(looked) == 5


@pytest.mark.parametrize("way", ENGINES)
def test_branches_of_their_own_lines_that_read_an_argument_with_a_graph(way) -> None:
    """As of every layer but the first. What made the argument is no part of the region, and the same in both phases."""

    def layer(x, other):
        if doing_recompute():
            get_recompute_data()
            y = x * x + other.exp()
        else:
            save_for_recompute("forward")
            y = x * x + other.exp()
        return y.sin()

    def scenario(way):
        x = leaf(4, 6)
        x.exp().sum().backward()  # shifts the numbers of nodes
        for _ in range(3):
            y = way(layer, x.exp(), other=x.cos())
            y = way(layer, y.tanh(), other=y)
        y.sum().backward()
        return [x.grad]

    agree(scenario, way)
