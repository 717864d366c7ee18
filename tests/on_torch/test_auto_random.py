"""Random programs of deciding operations, dropout, saves and nested regions: gradients as without checkpointing."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_torch import (
    checkpoint,
    doing_recompute,
    get_recompute_data,
    recompute_once,
    remat,
    save_for_recompute,
)
from tests.fuzz import TIMES, examples
from tests.on_torch.oracle import same
from tests.on_torch.test_auto import LAYERS, ROWS, WIDTH, Shaky, ties, weights

# Their generator is shared.
FROM_THE_HOST = {"noise", "noise in place", "multinomial", "bernoulli", "coin", "coin, then topk"}
STEPS = st.one_of(
    *[st.tuples(st.just("operation"), st.sampled_from(sorted(LAYERS.keys() - FROM_THE_HOST)))] * 4,
    st.tuples(st.sampled_from(["dropout", "once"]), st.none()),
    st.tuples(st.just("save"), st.booleans()),
)
PROGRAMS = st.recursive(
    st.lists(STEPS, min_size=1, max_size=4),
    lambda inner: st.lists(
        STEPS | st.tuples(st.sampled_from(["watched", "plain", "reentrant"]), inner), min_size=1, max_size=4
    ),
    max_leaves=4,
)


def fit(values):
    """Any tensor, as rows of the program's width."""
    flat, size = values.reshape(-1), ROWS * WIDTH
    if not flat.numel():
        return torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    return flat.repeat(-(-size // flat.numel()))[:size].reshape(ROWS, WIDTH)


def run(steps, x, w, shaky, region):
    saved = False
    for kind, what in steps:
        z = (x * 1.2345).detach().round() + (x - x.detach())  # full of ties
        if kind == "operation":
            x = x + fit(LAYERS[what][0](shaky(z), w)).tanh()
        elif kind == "dropout":
            x = torch.nn.functional.dropout(x, 0.2)
        elif kind == "once":
            x = x + fit(w.gather(1, recompute_once(lambda z=z: shaky(z).topk(3).indices)))
        elif kind != "save":
            x = x + region(kind, lambda a, b, inner=what: run(inner, a, b, shaky, region), x, w).tanh()
        elif not saved:
            saved = True
            x = x + w.gather(1, order(z, shaky, branch=what))
    return x


def order(z, shaky, branch):
    if not branch:
        (idx,) = save_for_recompute(shaky(z).argsort(-1))
        return idx
    if doing_recompute():
        (idx,) = get_recompute_data()
        return idx
    idx = shaky(z).softmax(-1).argsort(-1)
    save_for_recompute(idx)
    return idx


def nothing(kind, function, *args):
    return function(*args)


def regions(kind, function, *args):
    if kind == "plain":
        return checkpoint(function, *args)
    return remat(function, auto=True, use_reentrant=kind == "reentrant")(*args)


def unwatched(kind, function, *args):
    return checkpoint(function, *args)


def gradients(steps, region, twice):
    torch.manual_seed(0)
    x, w, shaky = ties(), weights(), Shaky()
    loss = region("watched", lambda a, b: run(steps, a, b, shaky, region), x, w).square().sum()
    if twice:
        loss.backward(retain_graph=True)
    loss.backward()
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in (x, w)]


@pytest.mark.timeout(600 * TIMES)  # a program that fails is made small, which takes minutes
def test_random_programs():
    tried = Counter()

    @examples(40)
    @given(PROGRAMS, st.booleans())
    def attempt(steps, twice):
        want = gradients(steps, nothing, twice)
        same(gradients(steps, regions, twice), want, within=1e-5)
        tried["programs"] += 1
        try:
            again = gradients(steps, unwatched, twice)
            tried["wrong"] += not all(
                torch.allclose(*pair, rtol=1e-5, atol=1e-5) for pair in zip(again, want, strict=True)
            )
        except (RuntimeError, ValueError, IndexError):
            tried["wrong"] += 1

    attempt()
    assert tried["wrong"] > 0.3 * tried["programs"]  # the programs do decide otherwise when they are run again
