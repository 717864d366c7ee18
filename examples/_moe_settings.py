"""How to train, in any framework, and the names of the ways."""

from __future__ import annotations

from typing import NamedTuple

ORACLE = "none"  # the way that the others are compared with
WAYS = ["none", "torch", "jax", "ours", "verify"]
WARM = 3  # steps left out of the times


class DivergedError(Exception):
    """The loss is no number any more; nothing can be compared from here on."""


class Settings(NamedTuple):
    """AdamW, with a rate that rises over the first steps."""

    steps: int
    learning_rate: float
    precision: str  # "bfloat16" or "float32"
    seed: int
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    decay: float = 0.01

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.learning_rate * min(1.0, (step + 1) / min(20, self.steps))
