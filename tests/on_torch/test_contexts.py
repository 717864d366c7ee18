"""context_fn: torch's own contexts under our engine, and our contexts under torch's."""

from __future__ import annotations

import contextlib
import functools
import inspect

import pytest
import torch
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, create_selective_checkpoint_contexts
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
    save_for_recompute,
)


def leaf(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def torchs(function, *args):
    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=recompute_contexts)


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


@pytest.mark.parametrize(
    "decide", [lambda: save_for_recompute(3)[0], lambda: recompute_once(lambda: 3)], ids=["save", "once"]
)
def test_a_decision_in_a_checkpoint_of_torchs_inside_ours_is_refused_with_the_way_out(decide) -> None:
    def outer(call, x):
        return call(lambda x: torch.sin(x * decide()), x.exp())

    def bare(function, *args):
        return torch_checkpoint(function, *args, use_reentrant=False)

    with pytest.raises(MismatchError, match=r"a decision is saved inside torch\.utils\.checkpoint") as caught:
        checkpoint(outer, bare, leaf())
    assert str(caught.value).splitlines()[-1] == (
        "  way out: use roundpipe_torch.checkpoint there too, or pass context_fn=roundpipe_torch.recompute_contexts."
    )
    for call in (torchs, checkpoint):
        x, y = leaf(), leaf()
        checkpoint(outer, call, x).sum().backward()
        torch.sin(y.exp() * 3).sum().backward()
        assert torch.equal(x.grad, y.grad)
