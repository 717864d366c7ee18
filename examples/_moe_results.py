"""What a training run has shown, as numbers: each way against the oracle."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from _moe_text import Text
from _moe_training import ORACLE, Trainee

import roundpipe_core


@dataclass
class Way:
    """One way of training. Differences are to the oracle, largest over all steps or entries."""

    name: str
    losses: list[float]
    final_loss: float  # mean over the last tenth of the steps
    held_out_loss: float
    bitwise: bool  # every loss, every parameter and buffer, and the first step's whole gradient
    loss_differences: list[float]  # one a step
    loss_difference: float
    parameter_difference: float  # at the end
    gradient_error: float  # of the first step, |g - oracle's g| / |oracle's g| over all parameters
    decisions_forward: float  # times that a router ran, for each layer and step
    decisions_backward: float
    flipped: list[float] | None  # share of tokens that went elsewhere when the router ran again, one a step
    flipped_tokens: float | None  # mean, for each layer and step
    verify_agrees: bool | None  # VerifyWarning counted the same tokens in every layer and step
    bytes_held: list[int]  # for each layer
    bytes_saved: int  # of that the routing plan, for each layer; 0 where none is kept for the recompute
    seconds: float  # median of a step
    time_ratios: list[float]  # to the oracle's same step
    time_ratio: float  # their median


@dataclass
class Results:
    """All of it; `as_json` is what the file holds."""

    ways: list[Way]
    options: dict[str, Any]
    text: dict[str, Any]
    machine: dict[str, Any]
    tokens: int  # in a batch
    parameters: int

    def followed(self) -> bool:
        """Whether ours is the oracle, bit for bit."""
        return all(way.bitwise for way in self.ways if way.name in ("ours", "verify"))

    def way(self, name: str) -> Way | None:
        """The way of this name, if it was run."""
        return next((way for way in self.ways if way.name == name), None)

    def as_json(self) -> dict[str, Any]:
        return {"ours_followed_the_oracle": self.followed(), **asdict(self)}


def results(trained: list[Trainee], text: Text, options: dict[str, Any]) -> Results:
    """Compare each trainee with the oracle among them."""
    oracle = next(trainee for trainee in trained if trainee.way == ORACLE)
    tokens = options["batch"] * options["length"]
    return Results(
        ways=[_way(trainee, oracle, tokens) for trainee in trained],
        options={name: str(value) if isinstance(value, Path) else value for name, value in options.items()},
        text={"files": text.files, "bytes": len(text), "sha256": text.digest},
        machine={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "roundpipe": roundpipe_core.__version__,
            "system": f"{platform.system()} {platform.machine()}",
            "vector_instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        tokens=tokens,
        parameters=sum(parameter.numel() for parameter in oracle.model.parameters()),
    )


def _way(trainee: Trainee, oracle: Trainee, tokens: int) -> Way:
    steps, layers = trainee.steps, len(trainee.model.blocks)
    losses = [step.loss for step in steps]
    loss_differences = [abs(step.loss - its.loss) for step, its in zip(steps, oracle.steps, strict=True)]
    warm = min(3, len(steps) - 1)
    ratios = [step.seconds / its.seconds for step, its in zip(steps, oracle.steps, strict=True)][warm:]
    again = any(step.flipped for step in steps)
    return Way(
        name=trainee.way,
        losses=losses,
        final_loss=fmean(losses[-max(1, len(losses) // 10) :]),
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
