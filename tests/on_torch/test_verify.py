"""verify: what a plain recompute would have done otherwise, told by layer, item and row."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from roundpipe_torch import (
    Flip,
    VerifyError,
    VerifyWarning,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    recompute_once,
    remat,
    save_for_recompute,
)
from tests.said import said

T, E = 8, 4


class Balanced(nn.Module):
    """A gate whose bias every forward moves, so that a plain recompute routes otherwise."""

    def __init__(self, style: str = "branch") -> None:
        super().__init__()
        self.style = style
        self.gate = nn.Linear(E, E, bias=False)
        nn.init.eye_(self.gate.weight)
        self.register_buffer("bias", torch.zeros(E))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def route(self, scores):
        top = (scores.detach() + self.bias).argmax(-1, keepdim=True)
        self.bias[0] += 10.0
        self.calls += 1
        return top

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        if self.style == "branch":
            if doing_recompute():
                _, (top,) = get_recompute_data()
            else:
                top = self.route(scores)
                save_for_recompute("plan", [top])
        elif self.style == "once":
            top = recompute_once(self.route, scores)
        else:
            (top,) = (
                get_recompute_data("top") if doing_recompute() else save_for_recompute(self.route(scores), name="top")
            )
        return torch.tanh(x).gather(1, top) * scores.gather(1, top)


ITEMS = {
    "branch": "the unnamed slot, item [1][0]",
    "once": "slot 'recompute_once(Balanced.route)', item ",
    "named": "slot 'top', item [0]",
}


def tokens() -> torch.Tensor:
    """Row n prefers expert n % E."""
    return (4 * torch.eye(E).repeat(T // E, 1)).requires_grad_()


@pytest.mark.parametrize("style", ITEMS)
def test_flips_are_told_and_nothing_else_changes(style) -> None:
    layer, x = Balanced(style), tokens()
    y = remat(layer, verify="warn", label="block 3")(x)
    with pytest.warns(VerifyWarning) as caught:
        y.sum().backward()
    assert len(caught) == 1
    flip = Flip("block 3", ITEMS[style], rows=6, total=8, first=1)  # those that did not choose expert 0
    assert caught[0].message.flips == (flip,)
    text = said(caught[0].message, __file__)
    assert text[0] == "layer 'block 3': a plain recompute would not repeat the forward."
    assert text[1] == f"  found: layer 'block 3', {ITEMS[style]}: 6 of 8 rows flipped, first row 1"
    assert text[2].startswith("  way out: for saved items nothing is wrong")
    assert layer.calls == 1
    assert layer.bias[0] == 10

    plain, again = Balanced(style), tokens()
    plain(again).sum().backward()
    assert torch.equal(x.grad, again.grad)
    assert torch.equal(layer.gate.weight.grad, plain.gate.weight.grad)


def test_raise_stops_backward_and_names_the_same() -> None:
    y = remat(Balanced(), verify="raise")(tokens())
    with pytest.raises(
        VerifyError, match=r"layer 'Balanced', the unnamed slot, item \[1\]\[0\]: 6 of 8 rows"
    ) as caught:
        y.sum().backward()
    assert caught.value.flips[0].rows == 6
    assert doing_recompute() is False


@pytest.mark.parametrize("verify", ["warn", "raise"])
def test_a_layer_that_repeats_itself_is_silent(verify) -> None:
    def layer(x):
        x = torch.dropout(x, 0.5, True)
        top = recompute_once(lambda: torch.dropout(x, 0.5, True).argmax(-1, keepdim=True))
        (noise,) = save_for_recompute(torch.rand(T, 1))
        return (torch.dropout(x, 0.5, True) * noise).gather(1, top), {"extra": x.sum(), "n": 3}

    torch.manual_seed(0)
    x = tokens()
    y, extra = remat(layer, verify=verify)(x)
    (y.sum() + extra["extra"]).backward(retain_graph=True)
    (y.sum() + extra["extra"]).backward()


def test_a_decision_that_was_not_saved_shows_in_the_output() -> None:
    draws = np.random.default_rng(0)  # nobody sets it back

    def layer(x):
        return x * torch.from_numpy(draws.random((T, E), "float32")), x.exp()

    y, _ = remat(layer, verify="warn", label="noisy")(tokens())
    with pytest.warns(VerifyWarning) as caught:
        y.sum().backward()
    assert caught[0].message.flips == (Flip("noisy", "output[0]", rows=8, total=8, first=0),)


def test_verify_happens_once_per_region_and_sees_inner_regions() -> None:
    layer = Balanced()
    outer = remat(lambda x: checkpoint(layer, x).exp(), verify="warn", label="outer")
    y = outer(tokens())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y.sum().backward(retain_graph=True)
        y.sum().backward()
    assert [w.message.flips[0].layer for w in caught] == ["Balanced"]
    assert layer.calls == 1


def test_a_flip_that_breaks_the_layer_is_told_too() -> None:
    sizes = iter([2, 9])

    def layer(x):
        n = recompute_once(lambda: next(sizes))
        return x.view(n, -1)

    y = remat(lambda x: layer(x).exp(), verify="warn", label="sizes")(torch.ones(4, 4, requires_grad=True)).sum()
    with pytest.warns(VerifyWarning) as caught:
        y.backward()
    failure = caught[0].message.flips[1]
    assert failure.item.startswith("a plain recompute fails")
    assert (failure.rows, failure.total, failure.first) == (1, 1, 0)


def test_structures_and_plain_values_are_compared() -> None:
    values = iter([(1, "a", [1.5, None]), (2, "a", [1.5, None]), (1, "a", [1.5]), (1, "a", [1.5])])

    def layer(x):
        save_for_recompute(*next(values)) if not doing_recompute() else get_recompute_data()
        return x.exp()

    flips = []
    for _ in range(2):
        y = remat(layer, verify="warn", label="layer")(tokens())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y.sum().backward()
        flips += [str(flip) for w in caught for flip in w.message.flips]
    assert flips == ["layer 'layer', the unnamed slot, item [0]: 1 of 1 rows flipped, first row 0"]


def test_outputs_of_another_form_are_told() -> None:
    """What a recompute gives back otherwise: fewer, of another shape or dtype, another number; NaN is equal to NaN."""
    x = tokens()
    forward = [(1.0, x.detach().new_full((2,), float("nan")), 3, "a")]
    cases = {
        "fewer": ((1.0, 3), ["output: 4 values, now 2"]),
        "shape": ((1.0, torch.zeros(3), 3, "a"), ["output[1] (shape or dtype)"]),
        "dtype": ((1.0, torch.zeros(2, dtype=torch.float64), 3, "a"), ["output[1] (shape or dtype)"]),
        "values": ((1.0, torch.full((2,), float("nan")), 4, "b"), ["output[2]", "output[3]"]),
        "alike": (forward[0], []),
    }
    for again, items in cases.values():
        outputs = itertools.chain(forward, itertools.repeat(again))

        def layer(x, outputs=outputs):
            first, *others = next(outputs)
            return x.exp() * first, *others

        y = remat(layer, verify="warn", label="layer")(x)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y[0].sum().backward()
        assert [flip.item for w in caught for flip in w.message.flips] == items


def test_a_saved_tensor_of_another_shape_or_dtype_is_a_flip_of_all_its_rows() -> None:
    saved = iter([torch.zeros(3, 2), torch.zeros(2, 2), torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.float64)])

    def layer(x):
        if doing_recompute():
            get_recompute_data()
        else:
            save_for_recompute(next(saved))
        return x.exp()

    for _ in range(2):
        y = remat(layer, verify="warn", label="layer")(tokens())
        with pytest.warns(VerifyWarning) as caught:
            y.sum().backward()
        assert caught[0].message.flips == (Flip("layer", "the unnamed slot, item [0]", rows=3, total=3, first=0),)
