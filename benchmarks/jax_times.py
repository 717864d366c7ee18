"""Time in JAX, against `jax.checkpoint`: trace and lower 24 equal layers, and an eager step of 8 layers.

The two run in turn, and the ratio is the median of those of neighbours, so that a busy machine moves both.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from roundpipe_jax import remat

from ._rounds import timed
from ._rows import Row
from .jax_costs import WRAPS, X, params, unrolled


def trace_and_lower(wrap: Callable[..., Any], layers: int) -> Callable[[], Any]:
    shapes = jax.eval_shape(lambda: params(layers))

    def run() -> None:
        jax.clear_caches()
        jax.jit(jax.grad(unrolled(wrap, layers))).lower(shapes, X)

    return run


def eager_step(wrap: Callable[..., Any], layers: int) -> Callable[[], Any]:
    values, x = params(layers), jax.numpy.ones(X.shape)
    gradient = jax.grad(unrolled(wrap, layers), (0, 1))
    return lambda: jax.block_until_ready(gradient(values, x))


def rows(quick: bool) -> Iterator[Row]:
    wraps = {"jax.checkpoint": WRAPS["jax.checkpoint"], "remat": remat}
    for what, make, layers, rounds in (
        ("trace and lower, 24 layers", trace_and_lower, 24, 9),
        ("eager step, 8 layers", eager_step, 8, 15),
    ):
        ways = {name: make(wrap, layers) for name, wrap in wraps.items()}
        yield from timed("CPU time", what, ways, "jax.checkpoint", 1 if quick else rounds, ours=("remat",))
