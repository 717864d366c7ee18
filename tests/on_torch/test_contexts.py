"""context_fn: torch's own contexts under our engine, and our contexts under torch's."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref

import pytest
import torch
from torch.distributed._composable import checkpoint as composable
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from roundpipe_torch import (
    MismatchError,
    OptionError,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    recompute_contexts,
    recompute_once,
    record,
    replay,
    save_for_recompute,
    update_once,
    usage,
)


def leaf(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def torchs(function, *args):
    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=recompute_contexts)


second = functools.partial(checkpoint, use_reentrant=True)


class Counted:
    def __init__(self) -> None:
        self.decisions = 0
        self.draws = torch.Generator().manual_seed(0)

    def __call__(self, x):
        if doing_recompute():
            (index,) = get_recompute_data()
        else:
            index = torch.randint(0, 6, (6, 1), generator=self.draws)
            self.decisions += 1
            save_for_recompute(index)
        return torch.tanh(x).gather(1, index) * torch.ones(6)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_our_contexts_under_torchs_checkpoint(depth) -> None:
    def run(call):
        layer, x = Counted(), leaf()

        def level(x, n):
            return layer(x) if n == 1 else layer(x) + call(level, layer(x) if n == 0 else x, n - 1)

        y = call(level, x, depth)
        y.square().sum().backward(retain_graph=True)
        y.square().sum().backward()
        return x.grad, layer.decisions

    want, decisions = run(lambda f, *args: f(*args))
    got, made = run(torchs)
    assert torch.equal(got, want)
    assert made == decisions == depth


def test_an_exception_under_torchs_checkpoint_leaves_no_phase() -> None:
    def layer(x):
        if doing_recompute():
            raise ValueError("pretended")
        return x.exp()

    with pytest.raises(ValueError, match="pretended"):
        torchs(layer, leaf()).sum().backward()
    assert doing_recompute() is False


def test_what_torchs_matching_cannot_do() -> None:
    """The reason for our engine: a tracked gate in the forward alone."""

    def layer(x):
        if doing_recompute():
            (top,) = get_recompute_data()
        else:
            top = torch.softmax(x @ x, -1).topk(2).indices
            save_for_recompute(top)
        return torch.tanh(x).gather(1, top)

    with pytest.raises(CheckpointError):
        torchs(layer, leaf()).sum().backward()
    checkpoint(layer, leaf()).sum().backward()


def test_contexts_are_entered_around_every_run() -> None:
    entered = []

    @contextlib.contextmanager
    def note(name):
        entered.append(name)
        yield

    class Reusable(contextlib.AbstractContextManager):
        def __enter__(self):
            entered.append("recompute")

        def __exit__(self, *exc):
            return None

    y = checkpoint(torch.exp, leaf(), context_fn=lambda: (note("forward"), Reusable()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert entered == ["forward", "recompute", "recompute"]


def test_selective_checkpointing_keeps_what_its_policy_names() -> None:
    def keep_products(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(x, w):
        top = recompute_once(lambda: (x.detach() * 2).argmax(-1, keepdim=True))
        return torch.tanh(torch.tanh(x @ w) @ w).gather(1, top)

    def run(call):
        x, w = leaf(), leaf(1)
        with FlopCounterMode(display=False) as counter:
            call(layer, x, w).square().sum().backward()
        return [x.grad, w.grad], counter.get_total_flops()

    selective = functools.partial(create_selective_checkpoint_contexts, keep_products)
    want, plain = run(lambda f, *args: f(*args))
    got, kept = run(lambda f, *args: checkpoint(f, *args, context_fn=selective))
    _, recomputed = run(checkpoint)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert kept == plain < recomputed


def test_a_context_that_swallows_the_forwards_exception_is_told() -> None:
    def layer(x):
        raise KeyError("pretended")

    contexts = lambda: (contextlib.suppress(KeyError), contextlib.nullcontext())  # noqa: E731
    with pytest.raises(OptionError, match="the context that context_fn gave for it swallowed the exception"):
        checkpoint(layer, leaf(), context_fn=contexts)
    assert doing_recompute() is False


def test_checkpoint_takes_torchs_keywords_and_no_others() -> None:
    def keywords(function):
        found = inspect.signature(function).parameters.values()
        return {parameter.name for parameter in found if parameter.kind is parameter.KEYWORD_ONLY}

    assert keywords(checkpoint) == keywords(torch_checkpoint) | {"preserve_rng_state"}  # torch's hides in **kwargs

    def layer(x, *, label, verify, offload):
        assert (label, verify, offload) == ("a", "b", "c")  # words of `remat` are words of the layer here
        return x.exp()

    checkpoint(layer, leaf(), label="a", verify="b", offload="c").sum().backward()


@pytest.mark.parametrize("use_reentrant", [None, False])
def test_nothing_said_means_not_reentrant_and_no_warning(use_reentrant) -> None:
    x = leaf()
    y = checkpoint(torch.exp, x, use_reentrant=use_reentrant)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"determinism_check": "strict"}, "determinism_check must be one of 'default', 'none', not 'strict'."),
        ({"determinism_check": ["default"]}, "determinism_check must be one of 'default', 'none', not ['default']."),
    ],
)
def test_a_bad_option_of_a_call(options, line) -> None:
    with pytest.raises(OptionError) as caught:
        checkpoint(torch.exp, leaf(), **options)
    text = str(caught.value).splitlines()
    assert text[:2] == [line, "  layer: 'exp'"]
    assert text[2].startswith(f"  called at: {__file__}:")
    assert text[3:] == ["  way out: pass determinism_check='default'."]


def bare(function, *args, use_reentrant=False):
    return torch_checkpoint(function, *args, use_reentrant=use_reentrant)


def is_refused(run, loudly) -> None:
    with pytest.raises(MismatchError, match=r"a decision is saved inside torch\.utils\.checkpoint") as caught:
        run()
    assert loudly in str(caught.value)
    assert str(caught.value).splitlines()[-1] == (
        "  way out: use roundpipe_torch.checkpoint there too, or give torch's the options use_reentrant=False, "
        "context_fn=roundpipe_torch.recompute_contexts."
    )


def saved_under_others(value):
    with torch.autograd.graph.save_on_cpu():
        return save_for_recompute(value)[0]


DECISIONS = {
    "save": lambda: save_for_recompute(3)[0],
    "once": lambda: recompute_once(lambda: 3),
    "update": lambda: update_once(lambda: None) or 3,
    "in no_grad": torch.no_grad()(lambda: save_for_recompute(3)[0]),
    "under others": lambda: saved_under_others(3),
}


@pytest.mark.parametrize("engine", [checkpoint, second])
@pytest.mark.parametrize("torchs_own", [bare, functools.partial(bare, use_reentrant=True)])
@pytest.mark.parametrize("decide", DECISIONS.values(), ids=DECISIONS)
def test_a_decision_in_a_checkpoint_of_torchs_inside_ours_is_refused_with_the_way_out(
    decide, torchs_own, engine
) -> None:
    def outer(call, x):
        return call(lambda x: torch.sin(x * decide()), x.exp())

    is_refused(lambda: engine(outer, torchs_own, leaf()), "outer")
    for call in (torchs, checkpoint):
        x, y = leaf(), leaf()
        engine(outer, call, x).sum().backward()
        torch.sin(y.exp() * 3).sum().backward()
        assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("engine", [checkpoint, second])
@pytest.mark.parametrize("around", ["nothing", "ours"])
def test_a_region_inside_torchs_reentrant_checkpoint_is_refused_if_it_decides(around, engine) -> None:
    def part(x):
        return engine(lambda x: torch.sin(x * save_for_recompute(3)[0]), x).exp()

    def run():
        outer = engine if around == "ours" else lambda function, x: function(x)
        outer(lambda x: bare(part, x.exp(), use_reentrant=True).sin(), leaf()).sum().backward()

    is_refused(run, "saved at")
    x, y = leaf(), leaf()
    bare(lambda x: checkpoint(torch.tanh, x).exp(), x, use_reentrant=True).sum().backward()  # which decides nothing
    torch.tanh(y).exp().sum().backward()
    assert torch.equal(x.grad, y.grad)


def under_others(function, x):
    with torch.autograd.graph.save_on_cpu():
        return checkpoint(function, x)


@pytest.mark.parametrize("inner", [checkpoint, second, under_others])
@pytest.mark.parametrize("around", [lambda function, x: function(x), bare, torchs, checkpoint, second])
@pytest.mark.parametrize("early_stop", [True, False])
def test_regions_inside_torchs_checkpoint_decide_once(inner, around, early_stop) -> None:
    def run(torchs_own, inner, around):
        first, last, again = Counted(), Counted(), []
        x, noise = leaf(), torch.nn.Dropout()
        torch.manual_seed(3)

        def drawn(x):
            (index,) = save_for_recompute(torch.rand(6, 6).argsort(1))  # R7
            return noise(x).gather(1, index).sin()

        def deciding(x):
            update_once(again.append, 1)
            return inner(last, x) * 2

        def part(x):
            x = inner(first, x).exp()
            x = x * inner(first, x) + inner(deciding, x)
            return inner(drawn, noise(x)).exp()

        with set_checkpoint_early_stop(early_stop):
            y = around(lambda x: torchs_own(part, x.sin()).tanh(), x)
            y = torchs_own(part, y * x)
        y.square().sum().backward(retain_graph=True)
        y.square().sum().backward()
        return first.decisions, last.decisions, len(again), y.detach(), x.grad

    def call(function, x):
        return function(x)

    *counts, y, grad = run(bare, inner, around)
    *_, y_plain, grad_plain = run(call, call, call)
    assert counts == [4, 2, 2]
    assert torch.equal(y, y_plain)
    assert torch.equal(grad, grad_plain)


def part_with_a_region(counted, x):
    return (checkpoint(counted, x) * x).exp()


@pytest.mark.parametrize(
    "around", [bare, torchs, *(functools.partial(checkpoint, torchs_own) for torchs_own in (bare, torchs))]
)
def test_what_a_region_inside_torchs_checkpoint_holds_goes_with_the_graph(around) -> None:  # R9, R12
    held = []

    def deciding(x):
        (index,) = save_for_recompute(x.detach().argsort(1))
        held.append(weakref.ref(index))
        return x.gather(1, index).sin()

    with usage() as seen:
        y = around(functools.partial(part_with_a_region, deciding), leaf()).sum()
        assert [(row.calls, row.decisions) for row in seen.layers] == [(1, 1)]
        y.backward()
    assert [ref() for ref in held] == [None] * len(held)
    assert [(row.calls, row.alive) for row in seen.layers] == [(1, 0)]


def test_a_region_inside_torchs_checkpoint_is_on_a_tape_once() -> None:  # R13
    def layer(x):
        return bare(functools.partial(part_with_a_region, Counted()), x)

    with record() as tape:
        layer(leaf()).sum().backward()
    assert len([*tape.entries()]) == 1
    x, again = leaf(), leaf()
    with replay(tape):
        layer(x).sum().backward()
    with record():
        layer(again).sum().backward()
    assert torch.equal(x.grad, again.grad)


@pytest.mark.parametrize("inner", [checkpoint, second])
def test_a_forward_that_differentiates_inside_torchs_checkpoint(inner) -> None:
    def run(torchs_own, inner):
        counted, x = Counted(), leaf()

        def part(x):
            y = inner(counted, x) * x
            (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)  # torch's runs the part again for it
            return inner(counted, x) * y * slope

        torchs_own(part, x).sum().backward()
        return counted.decisions, x.grad

    decisions, grad = run(bare, inner)
    assert decisions == 2
    assert torch.equal(grad, run(lambda function, x: function(x), lambda function, x: function(x))[1])


def test_torchs_checkpoint_of_a_module_by_hooks() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counted = Counted()

        def forward(self, x):
            return part_with_a_region(self.counted, x)

    plain, wrapped = Layer(), composable(Layer())
    x, y = leaf(), leaf()
    wrapped(x).sum().backward()
    plain(y).sum().backward()
    assert wrapped.counted.decisions == 1
    assert torch.equal(x.grad, y.grad)


def test_an_error_inside_torchs_checkpoint_leaves_no_hooks_behind() -> None:  # R11
    def part(x):
        raise KeyError(x)

    with pytest.raises(KeyError) as caught:
        checkpoint(lambda x: bare(part, x), leaf())
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert caught.traceback
