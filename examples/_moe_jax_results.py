"""What a training run in JAX has shown, as numbers: each way against the oracle and against pinned routing."""

from __future__ import annotations

from statistics import fmean, median

import numpy as np
from _moe_jax import Weights
from _moe_jax_training import STOCK, Trainee, Training
from _moe_results import JaxResults, JaxWay, last_tenth
from _moe_settings import ORACLE, WARM


def jax_results(shared: Training) -> JaxResults:
    """Compare each trainee with the oracle among them."""
    oracle = next(trainee for trainee in shared.trainees if trainee.way == ORACLE)
    return JaxResults(
        ways=[_way(shared, trainee, oracle) for trainee in shared.trainees],
        probe_is_harmless=_probe_is_harmless(shared),
        seconds=shared.seconds,
        compile_seconds=shared.compile_seconds,
        parameters=sum(value.size for value in oracle.state.weights.values()),
    )


def _way(shared: Training, trainee: Trainee, oracle: Trainee) -> JaxWay:
    steps, layers = trainee.steps, shared.sizes.layers
    losses = [step.loss for step in steps]
    flipped = [step.flipped for step in steps if step.flipped is not None]
    warm = min(WARM, len(steps) - 1)
    ratios = [step.seconds / its.seconds for step, its in zip(steps, oracle.steps, strict=True)]
    pinned = trainee.pinned_gradient
    return JaxWay(
        name=trainee.way,
        losses=losses,
        final_loss=last_tenth(losses),
        held_out_loss=trainee.held_out_loss,
        loss_difference=max(abs(step.loss - its.loss) for step, its in zip(steps, oracle.steps, strict=True)),
        gradient_error=_distance(trainee.first_gradient, oracle.first_gradient, list(pinned)),
        pinned_error=_distance(trainee.first_gradient, pinned, list(pinned)),
        pinned_errors={
            part: _distance(trainee.first_gradient, pinned, names) for part, names in _parts(pinned, layers).items()
        },
        decisions=shared.programs.routers(trainee.way, layers),
        flipped=flipped or None,
        flipped_tokens=fmean(sum(step) for step in flipped) / layers if flipped else None,
        flipped_steps=fmean(any(step) for step in flipped) if flipped else None,
        bytes_saved=trainee.bytes_saved if trainee.way == "ours" else 0,
        seconds=median(step.seconds for step in steps[warm:]),
        time_ratio=median(ratios[warm:]),
    )


def _distance(one: Weights, two: Weights, names: list[str]) -> float:
    differences = [np.asarray(one[name], np.float64) - np.asarray(two[name], np.float64) for name in names]
    wrong = sum(float(np.square(difference).sum()) for difference in differences)
    whole = sum(float(np.square(np.asarray(two[name], np.float64)).sum()) for name in names)
    return (wrong / whole) ** 0.5 if wrong else 0.0


def _parts(weights: Weights, layers: int) -> dict[str, list[str]]:
    blocks = {f"layer {n}": [name for name in weights if name.startswith(f"blocks.{n}.")] for n in range(layers)}
    return {"embedding": ["embed_VD", "position_LD"], **blocks, "head": ["norm_D", "head_DV"]}


def _probe_is_harmless(shared: Training) -> bool | None:
    for trainee in shared.trainees:
        if trainee.way == STOCK and trainee.unprobed_gradient is not None:
            pairs = [(trainee.first_gradient[name], value) for name, value in trainee.unprobed_gradient.items()]
            return all(np.array_equal(one, two) for one, two in pairs)
    return None
