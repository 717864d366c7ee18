"""What a training run in PyTorch has shown, as numbers: each way against the oracle."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

import torch
from _moe_results import Way, last_tenth
from _moe_settings import ORACLE, WARM
from _moe_training import Trainee


def torch_ways(trained: list[Trainee], tokens: int) -> list[Way]:
    """Compare each trainee with the oracle among them."""
    oracle = next(trainee for trainee in trained if trainee.way == ORACLE)
    return [_way(trainee, oracle, tokens) for trainee in trained]


def torch_machine() -> dict[str, Any]:
    """What computed."""
    return {
        "torch": torch.__version__,
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _way(trainee: Trainee, oracle: Trainee, tokens: int) -> Way:
    steps, layers = trainee.steps, len(trainee.model.blocks)
    losses = [step.loss for step in steps]
    loss_differences = [abs(step.loss - its.loss) for step, its in zip(steps, oracle.steps, strict=True)]
    warm = min(WARM, len(steps) - 1)
    ratios = [step.seconds / its.seconds for step, its in zip(steps, oracle.steps, strict=True)][warm:]
    again = any(step.flipped for step in steps)
    return Way(
        name=trainee.way,
        losses=losses,
        final_loss=last_tenth(losses),
        held_out_loss=trainee.held_out_loss,
        bitwise=_bitwise(trainee, oracle),
        loss_differences=loss_differences,
        loss_difference=max(loss_differences),
        parameter_difference=_largest_difference(trainee, oracle),
        gradient_error=_gradient_error(trainee, oracle),
        decisions_forward=fmean(step.decided_forward for step in steps) / layers,
        decisions_backward=fmean(step.decided_backward for step in steps) / layers,
        flipped=[sum(step.flipped) / (layers * tokens) for step in steps] if again else None,
        flipped_tokens=fmean(sum(step.flipped) for step in steps) / layers if again else None,
        verify_agrees=_verify_agrees(trainee) if trainee.way == "verify" else None,
        bytes_held=trainee.bytes_held,
        bytes_saved=max(trainee.bytes_saved) if trainee.way in ("ours", "verify") else 0,
        seconds=median(step.seconds for step in steps[warm:]),
        time_ratios=ratios,
        time_ratio=median(ratios),
    )


def _bitwise(trainee: Trainee, oracle: Trainee) -> bool:
    mine, its = trainee.model.state_dict(), oracle.model.state_dict()
    return (
        [step.loss for step in trainee.steps] == [step.loss for step in oracle.steps]
        and all(torch.equal(mine[name], its[name]) for name in its)
        and all(torch.equal(trainee.first_gradient[name], g) for name, g in oracle.first_gradient.items())
    )


def _largest_difference(trainee: Trainee, oracle: Trainee) -> float:
    mine = trainee.model.state_dict()
    return max(float((mine[name] - value).abs().max()) for name, value in oracle.model.state_dict().items())


def _gradient_error(trainee: Trainee, oracle: Trainee) -> float:
    wrong = sum(float((trainee.first_gradient[n] - g).square().sum()) for n, g in oracle.first_gradient.items())
    whole = sum(float(g.square().sum()) for g in oracle.first_gradient.values())
    return (wrong / whole) ** 0.5


def _verify_agrees(trainee: Trainee) -> bool:
    """The library's own count against the one made by listening to the router."""
    return all(
        step.reported == {f"block {layer}": tokens for layer, tokens in enumerate(step.flipped) if tokens}
        for step in trainee.steps
    )
