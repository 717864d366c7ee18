"""A step of training in JAX in each of the ways, and what is measured on it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _moe_jax import WAYS, Model, Plan, Weights, moved
from _moe_settings import DivergedError, Settings
from _moe_weights import Sizes, initial_weights
from jax import Array


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
    model: Model
    gradient_of: Any  # compiled: weights, watch, biases, key, tokens, targets -> (loss, plans), gradients
    weights: Weights
    biases: list[Array]
    moments: tuple[Weights, Weights]
    steps: list[Step] = field(default_factory=list)
    decisions: int | None = None  # times that the compiled program runs a router, for each layer
    bytes_saved: int = 0  # for each layer, the routing plan
    compile_seconds: float = 0.0
    first_gradient: Weights = field(default_factory=dict)
    pinned_gradient: Weights = field(default_factory=dict)  # the same with the forward's plans as inputs
    unwatched_gradient: Weights = field(default_factory=dict)  # the same by a program without the probe
    held_out_loss: float = float("nan")


@dataclass
class Training:
    """Everything that the ways share."""

    sizes: Sizes
    settings: Settings
    batch: int
    trainees: list[Trainee]
    device: jax.Device
    evaluate_of: Any = None
    start_loss: float = float("nan")  # of the initial weights on held-out text, nothing dropped

    @property
    def tokens(self) -> int:
        return self.batch * self.sizes.L


def training(ways: list[str], sizes: Sizes, settings: Settings, batch: int) -> Training:
    """One trainee for each way, all from the same weights and the same random numbers."""
    device = jax.devices("cpu")[0]
    with jax.default_device(device):
        dtype = jnp.dtype(settings.precision)
        arrays = {name: jnp.asarray(value) for name, value in initial_weights(sizes, settings.seed).items()}
        biases = [arrays.pop(f"blocks.{n}.moe.bias_E") for n in range(sizes.layers)]
        zeros = {name: jnp.zeros_like(value) for name, value in arrays.items()}
        trainees = [
            Trainee(way, Model(sizes, dtype, WAYS[way]), None, arrays, biases, (zeros, zeros)) for way in ways
        ]
    return Training(sizes, settings, batch, trainees, device)


# Programs


def compile_programs(shared: Training) -> None:
    """Compile what every step runs."""
    with jax.default_device(shared.device):
        for trainee in shared.trainees:
            start = time.perf_counter()
            trainee.gradient_of = _gradient(trainee.model, watched=True).lower(*_example(shared, trainee)).compile()
            trainee.compile_seconds = time.perf_counter() - start
            trainee.decisions = _routers(trainee.gradient_of.as_text(), shared.sizes.layers)


def _gradient(model: Model, watched: bool) -> Any:
    return jax.jit(jax.value_and_grad(model.loss, argnums=(0, 1) if watched else 0, has_aux=True))


def _example(shared: Training, trainee: Trainee) -> tuple[Any, ...]:
    tokens_BL = jnp.zeros((shared.batch, shared.sizes.L), jnp.int32)
    return trainee.weights, _watch(shared), trainee.biases, _key(shared, 0), tokens_BL, tokens_BL


def _watch(shared: Training) -> list[Array]:
    return [jnp.zeros((shared.tokens, shared.sizes.K), jnp.float32)] * shared.sizes.layers


def _key(shared: Training, step: int) -> Array | None:
    if shared.sizes.dropout == 0:
        return None
    return jax.random.fold_in(jax.random.key(shared.settings.seed, impl="rbg"), step)


def _routers(program: str, layers: int) -> float | None:
    """`top_k` runs once in each router. How an optimised program spells it depends on the backend."""
    runs = program.count('custom_call_target="TopK"') or program.count(" topk(")
    return runs / layers if runs else None


# Steps


def train_step(shared: Training, trainee: Trainee, batch_BL: np.ndarray) -> Step:
    """Forward, backward, optimizer. The first step also looks at the gradient from other sides."""
    n = len(trainee.steps)
    with jax.default_device(shared.device):
        tokens_BL, targets_BL = jnp.asarray(batch_BL[:, :-1], jnp.int32), jnp.asarray(batch_BL[:, 1:], jnp.int32)
        watch, key = _watch(shared), _key(shared, n)
        before = trainee.weights, trainee.biases
        start = time.perf_counter()
        (loss, plans), (gradient, seen) = trainee.gradient_of(
            trainee.weights, watch, trainee.biases, key, tokens_BL, targets_BL
        )
        _update(shared, trainee, gradient, plans)
        jax.block_until_ready(trainee.weights)
        seconds = time.perf_counter() - start
        if n == 0:
            trainee.first_gradient = gradient
            trainee.bytes_saved = sum(array.nbytes for array in plans[0])
            _look_closer(shared, trainee, (*before, key, tokens_BL, targets_BL), plans)
    if not np.isfinite(loss):
        raise DivergedError(f"the loss is {float(loss)} in step {n + 1} of {trainee.way!r} in JAX")
    flipped = [
        int((np.asarray(seen_TK) != np.asarray(plan.chosen_TK)).any(-1).sum())
        for seen_TK, plan in zip(seen, plans, strict=True)
    ]
    step = Step(float(loss), seconds, None if trainee.way == "none" else flipped)
    trainee.steps.append(step)
    return step


def _look_closer(shared: Training, trainee: Trainee, inputs: tuple[Any, ...], plans: list[Plan]) -> None:
    """The gradient with this forward's plans pinned, and the gradient by the same program without the probe."""
    weights, biases, *rest = inputs
    _, trainee.pinned_gradient = _pinned(shared)(weights, None, biases, *rest, plans)
    if trainee.way == "jax":
        _, trainee.unwatched_gradient = _gradient(trainee.model, watched=False)(weights, None, biases, *rest)


_PINNED: dict[tuple[Sizes, str], Any] = {}


def _pinned(shared: Training) -> Any:
    """Checkpointed by `jax.checkpoint`, with every decision an input: what a right recompute must give."""
    key = shared.sizes, shared.settings.precision
    if key not in _PINNED:
        model = Model(shared.sizes, jnp.dtype(shared.settings.precision), jax.checkpoint)
        _PINNED[key] = _gradient(model, watched=False)
    return _PINNED[key]


def _update(shared: Training, trainee: Trainee, gradient: Weights, plans: list[Plan]) -> None:
    n, settings = len(trainee.steps), shared.settings
    trainee.weights, trainee.moments, trainee.biases = _updated(
        shared.sizes,
        settings._replace(steps=0, learning_rate=0.0),
        trainee.weights,
        trainee.moments,
        trainee.biases,
        gradient,
        plans,
        np.float32(settings.rate(n)),
        np.float32(n + 1),
    )


@partial(jax.jit, static_argnums=(0, 1))
def _updated(
    sizes: Sizes,
    settings: Settings,
    weights: Weights,
    moments: tuple[Weights, Weights],
    biases: list[Array],
    gradient: Weights,
    plans: list[Plan],
    rate: Array,
    count: Array,
) -> tuple[Weights, tuple[Weights, Weights], list[Array]]:
    """AdamW as torch computes it, and the balancing of the load."""
    (beta, beta2), tree = settings.betas, jax.tree.map
    first = tree(lambda m, g: beta * m + (1 - beta) * g, moments[0], gradient)
    second = tree(lambda v, g: beta2 * v + (1 - beta2) * g * g, moments[1], gradient)
    scale, scale2 = 1 - beta**count, 1 - beta2**count

    def updated(w: Array, m: Array, v: Array) -> Array:
        return w * (1 - rate * settings.decay) - rate / scale * m / (jnp.sqrt(v / scale2) + settings.epsilon)

    biases = [moved(sizes, bias_E, plan) for bias_E, plan in zip(biases, plans, strict=True)]
    return tree(updated, weights, first, second), (first, second), biases


# Held-out text


def evaluate(shared: Training, trainee: Trainee, batches_BL: list[np.ndarray]) -> float:
    """The mean loss on text that was not trained on: nothing is dropped, no bias moves."""
    if shared.evaluate_of is None:
        model = Model(shared.sizes, trainee.model.dtype, WAYS["none"])
        shared.evaluate_of = jax.jit(lambda *inputs: model.loss(*inputs)[0])
    with jax.default_device(shared.device):
        losses = [
            float(shared.evaluate_of(trainee.weights, None, trainee.biases, None, tokens[:, :-1], tokens[:, 1:]))
            for tokens in (jnp.asarray(batch_BL, jnp.int32) for batch_BL in batches_BL)
        ]
    return sum(losses) / len(losses)
