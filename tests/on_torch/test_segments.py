"""R10: stretches of a layer in which the phases run other code, and what each tensor there may stand for."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from roundpipe_torch import (
    CheckpointMismatchError,
    MutationError,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    save_for_recompute,
)
from tests.on_torch.oracle import agree, leaf
from tests.said import said

D = 6


def gradients(layer, way, *inputs):
    y = way(layer, *inputs)
    y.square().sum().backward()
    return [y, *(x.grad for x in inputs)]


@pytest.mark.parametrize("extra", [False, True], ids=["in the forward", "in the recompute"])
@pytest.mark.parametrize("again", [1, 2, 3])
def test_work_of_one_phase_after_the_question_shifts_what_follows_and_no_more(extra, again) -> None:
    """The layer asks before it has done anything, and once more; then each phase has lines of its own."""

    def layer(x, w):
        phase = doing_recompute()
        if phase is extra:
            for _ in range(again):
                (x @ w).exp()
        h = x @ w
        if doing_recompute():
            return torch.sin(h)
        return torch.sin(h)

    agree(lambda way: gradients(layer, way, leaf(D, D), leaf(D, D, seed=1)))


def test_a_recompute_stops_before_work_that_the_forward_dropped() -> None:
    """After a decision too, where the stretch goes on behind the last tensor that backward needs."""

    def layer(x, up, down):
        h = torch.sin(x)
        (shift,) = save_for_recompute(h.detach().max())
        y = torch.exp(torch.tanh(h @ up) + shift)
        torch.sin(y @ down)
        return y

    def products(way) -> int:
        inputs = [leaf(D, D, seed=n) for n in range(3)]
        with FlopCounterMode(display=False) as counter:
            way(layer, *inputs).sum().backward()
        return counter.get_total_flops() // (2 * D**3)

    assert products(lambda layer, *inputs: layer(*inputs)) == 2 + 2
    assert products(checkpoint) == 2 + 1 + 2


def told(forward, recompute):
    def layer(*inputs):
        if doing_recompute():
            return recompute(*inputs, *get_recompute_data())
        y, *data = forward(*inputs)
        save_for_recompute(*data)
        return y

    return layer


def test_another_function_of_the_same_tensor_is_an_error() -> None:
    """Both save what they were given, and only the node that asks for it tells them apart."""
    layer = told(lambda x, w: (torch.sin(x @ w), 1), lambda x, w, _: torch.cos(x @ w))
    with pytest.raises(CheckpointMismatchError, match="SinBackward0") as caught:
        checkpoint(layer, leaf(D, D), leaf(D, D, seed=1)).sum().backward()
    assert "CosBackward0" in str(caught.value)


def test_another_function_after_common_work_is_an_error() -> None:
    def layer(x, w):
        h = torch.tanh(x @ w)
        save_for_recompute(1)
        return torch.cos(h) if doing_recompute() else torch.sin(h)

    with pytest.raises(CheckpointMismatchError, match=r"SinBackward0(.|\n)*saved one for CosBackward0"):
        checkpoint(layer, leaf(D, D), leaf(D, D, seed=1)).sum().backward()


def test_what_the_recompute_made_is_not_taken_for_an_input() -> None:
    layer = told(lambda x: (torch.sin(x), 1), lambda x, _: torch.sin(-x))
    with pytest.raises(CheckpointMismatchError):
        checkpoint(layer, leaf(D, D)).sum().backward()


def test_what_follows_code_of_each_phase_is_no_part_of_it() -> None:
    def layer(x, w):
        save_for_recompute(1)
        if doing_recompute():
            h = torch.sin(x @ w)
        else:
            h = torch.sin(x @ w)
        save_for_recompute(2, name="more")
        return torch.tanh(h)

    counted = agree(lambda way: gradients(layer, way, leaf(D, D), leaf(D, D, seed=1)))
    assert counted.runs == 2


def test_the_input_of_a_region_in_code_of_each_phase_is_what_that_phase_gave_it() -> None:
    def layer(x, w):
        if doing_recompute():
            return checkpoint(torch.sin, x @ w)
        return checkpoint(torch.sin, x @ w)

    agree(lambda way: gradients(layer, way, leaf(D, D), leaf(D, D, seed=1)))


def test_a_tensor_of_the_recompute_that_leads_to_no_output_is_an_error() -> None:
    kept = []
    layer = told(lambda x, w: (torch.sin(x @ w), 1), lambda x, w, _: kept.append(torch.cos(x @ w)) or x.detach())
    with pytest.raises(CheckpointMismatchError, match="recompute saved one for nothing that is returned\\."):
        checkpoint(layer, leaf(D, D), leaf(D, D, seed=1)).sum().backward()


def test_a_weight_stepped_before_backward_is_told_in_code_of_its_own_too() -> None:
    w = nn.Parameter(leaf(D, D, seed=1).detach())
    layer = told(lambda x: (torch.sin(x @ w), 1), lambda x, _: torch.sin(x @ w))
    y = checkpoint(layer, leaf(D, D))
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(MutationError):
        y.sum().backward()


def test_two_choices_that_the_recompute_makes_one_are_an_error_not_a_gradient() -> None:
    """Both save places of one shape; those of the recompute can stand for one of them at most."""

    def both(x):
        high, low = x.topk(1), (-x).topk(1)
        return high.values + low.values, high.indices, low.indices

    layer = told(both, lambda x, high, low: x.gather(1, high) * 2)
    with pytest.raises(CheckpointMismatchError):
        checkpoint(layer, leaf(D, D)).sum().backward()


def test_many_choices_that_fit_in_many_ways_are_an_error() -> None:
    def best(x):
        return [(x * n).topk(1) for n in range(1, 9)]

    layer = told(
        lambda x: (sum(one.values for one in best(x)), *(one.indices for one in best(x.detach()))),
        lambda x, *data: sum(x.gather(1, idx) * n for n, idx in enumerate((*data, data[0]), 1)),
    )
    with pytest.raises(CheckpointMismatchError, match="saved nothing that can stand for it"):
        checkpoint(layer, leaf(D, D)).sum().backward()


def test_a_stretch_that_the_recompute_lacks_is_an_error_that_lists_both() -> None:
    def layer(x):
        save_for_recompute(1)
        y = torch.tanh(x)
        if not doing_recompute():
            save_for_recompute(2, name="more")
            for _ in range(45):
                y = torch.sin(y)
        return y

    with pytest.raises(CheckpointMismatchError) as caught:
        checkpoint(layer, leaf(D, D)).sum().backward()
    one = "float32[6, 6] on cpu"
    first, *rest, way_out = said(caught.value, __file__)
    assert f"backward needs {one}, saved by the forward as number 45" in first
    assert rest == [
        "  forward saved: 46 tensors",
        *(f"    {n}: {one}" for n in range(40)),
        "    and 6 more",
        "  recompute saved: 1 tensors",
        f"    0: {one}",
    ]
    assert way_out.startswith("  way out: make both phases run the same differentiable operations after the decision")
