"""Paired timings against `jax.checkpoint`: trace and lower 24 equal layers, and an eager step of 8 layers.

The two run in turn, and the figure is the median of the ratios of neighbours, so that a busy machine moves both.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
from jax_costs import X, params, unrolled

from roundpipe_jax import remat


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def paired(one: Callable[[], Any], other: Callable[[], Any], pairs: int) -> tuple[float, float, float]:
    """Median seconds of both, and the median ratio of `one` to `other`."""
    one(), other()
    times = [(seconds(one), seconds(other)) for _ in range(pairs)]
    return (
        statistics.median(a for a, _ in times),
        statistics.median(b for _, b in times),
        statistics.median(a / b for a, b in times),
    )


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


if __name__ == "__main__":
    print(f"{'':26} {'remat':>9} {'stock':>9} {'ratio':>6}")
    for name, make, layers, pairs in (
        ("trace + lower, 24 layers", trace_and_lower, 24, 9),
        ("eager step, 8 layers", eager_step, 8, 15),
    ):
        ours, stock, ratio = paired(make(remat, layers), make(jax.checkpoint, layers), pairs)
        print(f"{name:26} {ours * 1e3:6.0f} ms {stock * 1e3:6.0f} ms {ratio:6.2f}", flush=True)
