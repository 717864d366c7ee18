"""Train the model in PyTorch and twice in JAX, side by side: once with PyTorch's routing replayed, once without.

All three start from the same weights and see the same text; in float32 and without dropout, rounding is all that tells
them apart. PyTorch records what its layers decide, as a tape, which goes through a file as it would to another program.
One run in JAX replays it under `jit`. The other decides itself, and records that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import _moe_jax_training as in_jax
import _moe_training as in_torch
import jax
import jax.numpy as jnp
import numpy as np
import torch
from _moe_jax import WAYS, Model, Plan, Weights
from _moe_results import DECIDES, REPLAYS, SideBySide, SideWay
from _moe_settings import DivergedError, Settings
from _moe_weights import Sizes
from jax import Array

from roundpipe_core import Tape, diff, parity, record, replay
from roundpipe_jax import from_dlpack

TAPES = "torch.tape", "jax.tape"  # of the last step, in the folder of the report


@dataclass
class Follower:
    """The model in JAX, trained beside PyTorch's."""

    state: in_jax.State
    found: SideWay


class SideTraining:
    """The model in PyTorch, its two followers, and what they run."""

    def __init__(self, sizes: Sizes, settings: Settings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        (self.original,) = in_torch.trainees(["ours"], sizes, settings)
        self.losses: list[float] = []

        weights = {name: from_dlpack(tensor) for name, tensor in self.original.model.state_dict().items()}
        biases = [weights.pop(f"blocks.{n}.moe.bias_E") for n in range(sizes.layers)]
        zeros = {name: jnp.zeros_like(value) for name, value in weights.items()}
        state = in_jax.State(weights, biases, (zeros, zeros))
        self.decides, self.replays = Follower(state, SideWay(DECIDES)), Follower(state, SideWay(REPLAYS))

        model = Model(sizes, jnp.dtype(settings.precision), WAYS["ours"])
        compiled = partial(jax.jit, compiler_options=in_jax.COMPILER)
        self.deciding = compiled(jax.value_and_grad(partial(deciding, model), has_aux=True))
        self.replaying = compiled(jax.value_and_grad(partial(replaying, model), has_aux=True))
        self.update = compiled(partial(in_jax.updated, sizes, settings))

    def step(self, batch_BL: np.ndarray) -> None:
        """One step of all three."""
        inputs = in_jax.split(batch_BL)
        gradient, tape = self.step_in_torch(batch_BL)
        tape.save(self.folder / TAPES[0])
        tape = Tape.load(self.folder / TAPES[0])

        state = self.decides.state
        (loss, (plans, its_tape)), its_gradient = self.deciding(state.weights, state.biases, *inputs)
        flipped = [list(entry.flipped_rows) for entry in diff(tape, its_tape) if entry.item == "[0]"]
        self.follow(self.decides, float(loss), plans, its_gradient, gradient, flipped)
        its_tape.save(self.folder / TAPES[1])

        state = self.replays.state
        (loss, plans), its_gradient = self.replaying(state.weights, state.biases, *inputs, tape)
        chosen_TNK = tape.to_routing(item="[0]")  # in each of N layers
        used_TNK = np.stack([plan[0] for plan in plans], axis=1)
        flipped = [np.flatnonzero(of_layer).tolist() for of_layer in (used_TNK != chosen_TNK).any(-1).T]
        self.follow(self.replays, float(loss), plans, its_gradient, gradient, flipped)

    def step_in_torch(self, batch_BL: np.ndarray) -> tuple[dict[str, Any], Tape]:
        """Its gradient, and what its layers decided."""
        model, optimizer = self.original.model, self.original.optimizer
        tokens = torch.from_numpy(batch_BL)
        for group in optimizer.param_groups:
            group["lr"] = self.settings.rate(len(self.losses))
        optimizer.zero_grad()
        with record() as tape:
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        self.losses.append(loss.item())
        return {name: parameter.grad for name, parameter in model.named_parameters()}, tape

    def follow(
        self,
        follower: Follower,
        loss: float,
        plans: list[Plan],
        gradient: Weights,
        torchs_gradient: dict[str, Any],
        flipped: list[list[int]],
    ) -> None:
        """Let the follower make its step, and take down how far it is from PyTorch's."""
        found = follower.found
        n = len(found.losses)
        if not np.isfinite(loss):
            raise DivergedError(f"the loss is {loss} in step {n + 1} of JAX beside PyTorch")
        rate, count = jnp.float32(self.settings.rate(n)), jnp.float32(n + 1)
        follower.state = self.update(follower.state, gradient, plans, rate, count)
        found.losses.append(loss)
        found.loss_differences.append(abs(loss - self.losses[-1]))
        found.gradient_distances.append(furthest(torchs_gradient, gradient))
        torchs = {name: parameter.detach() for name, parameter in self.original.model.named_parameters()}
        found.weight_distances.append(furthest(torchs, follower.state.weights))
        found.flipped.append([len(rows) for rows in flipped])
        found.flipped_last = flipped

    def results(self) -> SideBySide:
        """What was seen in all steps."""
        return SideBySide(
            losses=self.losses,
            ways=[self.decides.found, self.replays.found],
            tape_bytes=(self.folder / TAPES[0]).stat().st_size,
        )


# A tape is a pytree: it is returned from a jitted function, and passed to one


def deciding(
    model: Model, weights: Weights, biases: list[Array], tokens_BL: Array, targets_BL: Array
) -> tuple[Array, tuple[list[Plan], Tape]]:
    with record() as tape:
        loss, plans = model.loss(weights, None, biases, None, tokens_BL, targets_BL)
    return loss, (plans, tape)


def replaying(
    model: Model, weights: Weights, biases: list[Array], tokens_BL: Array, targets_BL: Array, tape: Tape
) -> tuple[Array, list[Plan]]:
    with replay(tape):
        return model.loss(weights, None, biases, None, tokens_BL, targets_BL)


# What is measured


def furthest(torchs: dict[str, Any], jaxs: Weights) -> float:
    """The relative distance of the array that is furthest from PyTorch's."""
    return max(row.distance for row in parity.compare(torchs, jaxs).rows)
