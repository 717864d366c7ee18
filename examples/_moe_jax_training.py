"""A step of training in JAX in each of the ways, and what is measured on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _moe_jax import WAYS, Model, Plan, Weights, moved
from _moe_settings import ORACLE, DivergedError, Settings
from _moe_weights import Sizes, initial_weights
from jax import Array

STOCK = "jax"  # the way whose recompute routes again
COMPILER: dict[str, Any] = {}  # options of XLA's; what is shown is what its defaults do


class State(NamedTuple):
    """What a step changes."""

    weights: Weights
    biases: list[Array]
    moments: tuple[Weights, Weights]


@dataclass
class Step:
    """What was seen in one step."""

    loss: float
    seconds: float
    flipped: list[int] | None  # for each layer: tokens whose experts were others in backward than in forward


@dataclass
class Trainee:
    """A model that is trained in one of the ways."""

    way: str
    state: State
    steps: list[Step] = field(default_factory=list)
    bytes_saved: int = 0  # for each layer, the routing plan
    first_gradient: Weights = field(default_factory=dict)
    pinned_gradient: Weights = field(default_factory=dict)  # the same with the plans of the forward as inputs
    unprobed_gradient: Weights | None = None  # the same by a program without the probe
    held_out_loss: float = float("nan")


class Programs(NamedTuple):
    """Everything that is compiled."""

    gradient: dict[str, Any]  # of each way: (loss, plans), (gradient, what the recompute chose)
    pinned: Any  # by `jax.checkpoint` with every plan an input: what a right recompute must give
    unprobed: Any  # stock, without the probe
    update: Any
    evaluate: Any

    def routers(self, way: str, layers: int) -> float | None:
        """Times that a program runs a router, for each layer. None: not to be told on this backend."""
        text = self.gradient[way].as_text()
        runs = text.count('custom_call_target="TopK"') or text.count(" topk(")  # a router has one
        return runs / layers if runs else None


@dataclass
class Training:
    """The trainees, and what they share."""

    sizes: Sizes
    settings: Settings
    batch: int
    trainees: list[Trainee]
    programs: Programs
    seconds: float = 0.0  # all of it, the compiler's time included
    compile_seconds: float = 0.0


def training(ways: list[str], sizes: Sizes, settings: Settings, batch: int) -> Training:
    """One trainee for each way, all from the same weights and the same random numbers."""
    start = time.perf_counter()
    weights = {name: jnp.asarray(value) for name, value in initial_weights(sizes, settings.seed).items()}
    biases = [weights.pop(f"blocks.{n}.moe.bias_E") for n in range(sizes.layers)]
    zeros = {name: jnp.zeros_like(value) for name, value in weights.items()}
    state = State(weights, biases, (zeros, zeros))
    programs = compiled(ways, sizes, settings, batch, state)
    seconds = time.perf_counter() - start
    return Training(sizes, settings, batch, [Trainee(way, state) for way in ways], programs, compile_seconds=seconds)


# Programs


def compiled(ways: list[str], sizes: Sizes, settings: Settings, batch: int, state: State) -> Programs:
    """All programs, compiled side by side: the compiler takes longer than the training."""
    dtype = jnp.dtype(settings.precision)
    models = {way: Model(sizes, dtype, WAYS[way]) for way in {*ways, STOCK, ORACLE}}
    key, tokens_BL = random_key(sizes, settings, 0), jnp.zeros((batch, sizes.L), jnp.int32)
    watch, inputs = watches(sizes, batch), (state.biases, key, tokens_BL, tokens_BL)
    _, plans = jax.eval_shape(models[ORACLE].loss, state.weights, None, *inputs)
    number = jnp.zeros((), jnp.float32)

    def lowered(model: Model, probed: bool, *more: Any) -> Any:
        gradient = jax.value_and_grad(model.loss, argnums=(0, 1) if probed else 0, has_aux=True)
        return jax.jit(gradient).lower(state.weights, watch if probed else None, *inputs, *more)

    def loss(weights: Weights, biases: list[Array], tokens_BL: Array, targets_BL: Array) -> Array:
        return models[ORACLE].loss(weights, None, biases, None, tokens_BL, targets_BL)[0]

    def update(state: State, gradient: Weights, plans: list[Plan], rate: Array, count: Array) -> State:
        return updated(sizes, settings, state, gradient, plans, rate, count)

    all_lowered = [
        *(lowered(models[way], True) for way in ways),
        lowered(models[STOCK], False, plans),
        jax.jit(update).lower(state, state.weights, plans, number, number),
        jax.jit(loss).lower(state.weights, state.biases, tokens_BL, tokens_BL),
        *([lowered(models[STOCK], False)] if STOCK in ways else []),
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = list(pool.map(lambda one: one.compile(compiler_options=COMPILER), all_lowered))
    gradients = dict(zip(ways, done, strict=False))
    pinned, updating, evaluating, *unprobed = done[len(ways) :]
    return Programs(gradients, pinned, unprobed[0] if unprobed else None, updating, evaluating)


def watches(sizes: Sizes, batch: int) -> list[Array]:
    return [jnp.zeros((batch * sizes.L, sizes.K), jnp.float32)] * sizes.layers


def random_key(sizes: Sizes, settings: Settings, step: int) -> Array | None:
    if sizes.dropout == 0:
        return None
    return jax.random.fold_in(jax.random.key(settings.seed, impl="rbg"), step)


def updated(
    sizes: Sizes, settings: Settings, state: State, gradient: Weights, plans: list[Plan], rate: Array, count: Array
) -> State:
    """AdamW, with the arithmetic of torch's, and the balancing of the load."""
    (beta, beta2), each = settings.betas, jax.tree.map
    first = each(lambda m, g: beta * m + (1 - beta) * g, state.moments[0], gradient)
    second = each(lambda v, g: beta2 * v + (1 - beta2) * g * g, state.moments[1], gradient)
    scale, scale2 = 1 - beta**count, 1 - beta2**count

    def stepped(w: Array, m: Array, v: Array) -> Array:
        return w * (1 - rate * settings.decay) - rate / scale * m / (jnp.sqrt(v / scale2) + settings.epsilon)

    biases = [moved(sizes, bias_E, plan) for bias_E, plan in zip(state.biases, plans, strict=True)]
    return State(each(stepped, state.weights, first, second), biases, (first, second))


# Steps


def train_step(shared: Training, trainee: Trainee, batch_BL: np.ndarray) -> Step:
    """Forward, backward, optimizer. The first step also looks at its gradient from other sides."""
    sizes, settings, programs = shared.sizes, shared.settings, shared.programs
    n, before = len(trainee.steps), trainee.state
    key, watch = random_key(sizes, settings, n), watches(sizes, shared.batch)
    inputs = before.biases, key, *split(batch_BL)
    rate, count = jnp.float32(settings.rate(n)), jnp.float32(n + 1)

    start = time.perf_counter()
    (loss, plans), (gradient, seen) = programs.gradient[trainee.way](before.weights, watch, *inputs)
    trainee.state = jax.block_until_ready(programs.update(before, gradient, plans, rate, count))
    seconds = time.perf_counter() - start

    if not np.isfinite(loss):
        raise DivergedError(f"the loss is {float(loss)} in step {n + 1} of {trainee.way!r} in JAX")
    if n == 0:
        trainee.bytes_saved = sum(array.nbytes for array in plans[0])
        trainee.first_gradient = gradient
        _, trainee.pinned_gradient = programs.pinned(before.weights, None, *inputs, plans)
        if trainee.way == STOCK:
            _, trainee.unprobed_gradient = programs.unprobed(before.weights, None, *inputs)
    step = Step(float(loss), seconds, None if trainee.way == ORACLE else flips(seen, plans))
    trainee.steps.append(step)
    return step


def flips(seen: list[Array], plans: list[Plan]) -> list[int]:
    """For each layer, the tokens whose experts were others in backward than in forward."""
    pairs = [(np.asarray(seen_TK), np.asarray(plan[0])) for seen_TK, plan in zip(seen, plans, strict=True)]
    return [int((seen_TK != chosen_TK).any(-1).sum()) for seen_TK, chosen_TK in pairs]


def evaluate(shared: Training, trainee: Trainee, batches_BL: list[np.ndarray]) -> float:
    """The mean loss on text that was not trained on: nothing is dropped, no bias moves."""
    run: Callable[..., Array] = shared.programs.evaluate
    losses = [float(run(trainee.state.weights, trainee.state.biases, *split(batch_BL))) for batch_BL in batches_BL]
    return sum(losses) / len(losses)


def split(batch_BL: np.ndarray) -> tuple[Array, Array]:
    """Inputs and targets."""
    return jnp.asarray(batch_BL[:, :-1], jnp.int32), jnp.asarray(batch_BL[:, 1:], jnp.int32)
