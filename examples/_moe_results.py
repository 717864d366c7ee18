"""What a training run has shown, as numbers: each way against the oracle."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

DECIDES, REPLAYS = "decides", "replays"  # the two runs in JAX beside PyTorch's


@dataclass
class Way:
    """One way of training in PyTorch. Differences are to the oracle, largest over all steps or entries."""

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
class JaxWay:
    """One way of training in JAX. Differences are to the oracle, largest over all steps, unless told otherwise."""

    name: str
    losses: list[float]
    final_loss: float  # mean over the last tenth of the steps
    held_out_loss: float
    loss_difference: float
    gradient_error: float  # of the first step, |g - oracle's g| / |oracle's g| over all parameters
    pinned_error: float  # the same, to jax.checkpoint with the forward's plans as inputs
    pinned_errors: dict[str, float]  # the same for each part of the model
    decisions: float | None  # times that the compiled step runs a router, for each layer
    flipped: list[list[int]] | None  # for each step and layer, tokens that went elsewhere in backward
    flipped_tokens: float | None  # mean, for each layer and step
    flipped_steps: float | None  # share of the steps with at least one
    bytes_saved: int  # the routing plan, for each layer; 0 where none is kept for the recompute
    seconds: float  # median of a step
    time_ratio: float  # median of the ratios to the oracle's same step


@dataclass
class JaxResults:
    """What the training in JAX has shown."""

    ways: list[JaxWay]
    probe_is_harmless: bool | None  # the first gradient of jax.checkpoint is the same numbers without the probe
    seconds: float  # all of it
    compile_seconds: float
    parameters: int

    def kept_the_routing(self) -> bool:
        """Whether ours routed every token in backward as in forward, and has the gradient of that, bit for bit."""
        ours = self.way("ours")
        return ours is None or (ours.flipped_tokens == 0 and ours.pinned_error == 0)

    def way(self, name: str) -> JaxWay | None:
        """The way of this name, if it was run."""
        return next((way for way in self.ways if way.name == name), None)


@dataclass
class SideWay:
    """A run in JAX beside that in PyTorch, step by step. Distances are relative, of the array that is furthest off."""

    name: str
    losses: list[float] = field(default_factory=list)
    loss_differences: list[float] = field(default_factory=list)
    gradient_distances: list[float] = field(default_factory=list)
    weight_distances: list[float] = field(default_factory=list)  # after the step
    flipped: list[list[int]] = field(default_factory=list)  # for each layer, tokens with other experts than in PyTorch
    flipped_last: list[list[int]] = field(default_factory=list)  # for each layer, which they were in the last step

    def departs(self) -> int | None:
        """The first step, counted from 1, with a token that went elsewhere than in PyTorch."""
        return next((n for n, of_layers in enumerate(self.flipped, 1) if any(of_layers)), None)


@dataclass
class SideBySide:
    """How closely JAX follows PyTorch, deciding itself and replaying PyTorch's tapes."""

    losses: list[float]  # PyTorch's
    ways: list[SideWay]
    tape_bytes: int  # of the file, for one step

    def followed(self) -> bool:
        """Whether the run that replays has routed every token as PyTorch did."""
        return self.way(REPLAYS).departs() is None

    def way(self, name: str) -> SideWay:
        return next(way for way in self.ways if way.name == name)


@dataclass
class Results:
    """All of it; `as_json` is what the file holds. Without a framework, its part is empty."""

    ways: list[Way]  # of PyTorch
    jax: JaxResults | None
    side: SideBySide | None
    options: dict[str, Any]
    text: dict[str, Any]
    machine: dict[str, Any]
    tokens: int  # in a batch
    parameters: int

    def followed(self) -> bool:
        """Whether ours is the oracle, bit for bit, in PyTorch."""
        return all(way.bitwise for way in self.ways if way.name in ("ours", "verify"))

    def passed(self) -> bool:
        """Whether ours did what it is for, in both frameworks and between them."""
        in_jax = self.jax is None or self.jax.kept_the_routing()
        return self.followed() and in_jax and (self.side is None or self.side.followed())

    def way(self, name: str) -> Way | None:
        """PyTorch's way of this name, if it was run."""
        return next((way for way in self.ways if way.name == name), None)

    def as_json(self) -> dict[str, Any]:
        return {
            "ours_followed_the_oracle": self.followed() if self.ways else None,
            "ours_kept_the_routing_in_jax": self.jax.kept_the_routing() if self.jax else None,
            "jax_followed_the_tapes": self.side.followed() if self.side else None,
            **asdict(self),
        }


def last_tenth(losses: list[float]) -> float:
    """Their mean over the last tenth of the steps."""
    return fmean(losses[-max(1, len(losses) // 10) :])
