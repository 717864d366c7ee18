"""What needs a process of its own: 64-bit types, and layers over eight devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from roundpipe_jax import remat, save_for_recompute
from tests.on_jax.oracle import LANES, WAYS, W, X, same

ROOT = Path(__file__).parents[2]
stop = lax.stop_gradient


def sixty_four_bits() -> None:
    """Decisions are int64, numbers do not widen what they meet, and nothing is narrowed."""
    jax.config.update("jax_enable_x64", True)

    def layer(x: Any, s: Any) -> Any:
        index, table = save_for_recompute(jnp.argmax(stop(x), -1), stop(x) * 1.5)
        assert index.dtype == jnp.int64
        assert table.dtype == x.dtype
        return jnp.tanh(x) * (index[:, None] + 1).astype(x.dtype) * s * table, index, jnp.arange(3), jnp.asarray(s)

    for dtype in (jnp.float32, jnp.float64):
        for s in (2, jnp.float64(2)):
            given = X.astype(dtype)

            def step(f: Any, s: Any = s) -> Any:
                def loss(x: Any) -> Any:
                    out = f(x, s)
                    return out[0].sum().astype(jnp.float64), out

                return jax.grad(loss, has_aux=True)

            for lane in LANES:
                for way in WAYS.values():
                    got, want = way(step(remat(layer, mode=lane)))(given), way(step(layer))(given)
                    same(got, want, 1e-6)


def alike(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    """The same, wherever it lies."""
    same(jax.device_get(got), jax.device_get(want), tolerance)


def eight_devices() -> None:
    """Layers inside and around shard_map, with a replicated argument, reductions over the mesh, and shardings."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    x = jax.random.normal(jax.random.key(0), (16, 3))

    def layer(x: Any, w: Any) -> Any:
        (index,) = save_for_recompute(jnp.argmax(stop(x @ w), -1))
        return jnp.tanh(x @ w) * (index[:, None] + 1)

    def reduced(x: Any, w: Any) -> Any:
        (index,) = save_for_recompute(jnp.argmax(lax.psum(stop((x @ w).sum(0)), "d")))
        return jnp.tanh(x @ w) * (index + 1) * lax.pmean(x.mean(), "d")

    def reduced_by_one(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w) * (jnp.argmax(stop((x @ w).sum(0))) + 1) * x.mean()

    def over_mesh(f: Any, *out: Any) -> Any:
        return jax.shard_map(f, mesh=mesh, in_specs=(P("d"), P()), out_specs=out or P("d"))

    def grad(f: Any) -> Any:
        return jax.grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1))

    def twice(f: Any) -> Any:
        return lambda x, w: jax.jvp(lambda w: grad(f)(x, w)[1], (w,), (w,))[1]

    def scanned(f: Any) -> Any:
        return lambda x, w: lax.scan(lambda c, _: (f(c, w), None), x, None, length=1)[0]

    want, second, by_one = grad(layer)(x, W), twice(layer)(x, W), grad(reduced_by_one)(x, W)
    laid = jax.device_put(x, NamedSharding(mesh, P("d"))), jax.device_put(W, NamedSharding(mesh, P()))
    for lane in LANES:
        ours, ours_reduced = remat(layer, mode=lane), remat(reduced, mode=lane)
        alike(grad(over_mesh(ours))(x, W), want)
        alike(jax.jit(grad(over_mesh(ours)))(x, W), want)
        alike(jax.jit(over_mesh(grad(ours), P("d"), P()))(x, W), want)
        alike(jax.jit(grad(over_mesh(scanned(ours))))(x, W), want)
        alike(jax.jit(twice(over_mesh(ours)))(x, W), second, 1e-4)
        alike(jax.jit(grad(over_mesh(ours_reduced)))(x, W), by_one, 1e-4)
        got = jax.jit(grad(ours), out_shardings=(NamedSharding(mesh, P("d")), NamedSharding(mesh, P())))(*laid)
        alike(got, want)
        assert got[0].sharding.spec == P("d")
    alike(jax.jit(grad(remat(over_mesh(layer))))(x, W), want)  # saves inside shard_map

    def chosen(x: Any, w: Any) -> Any:
        values, index = lax.top_k(x @ w, 1)
        save_for_recompute(index, index.astype(jnp.int8))
        return jnp.tanh(values) * (index + 1)

    want = grad(chosen)(x, W)
    for step in (jax.checkpoint(over_mesh(chosen)), remat(over_mesh(chosen)), over_mesh(remat(chosen))):
        alike(jax.jit(grad(step))(x, W), want)


SETTINGS: dict[Callable[[], None], dict[str, str]] = {
    sixty_four_bits: {},
    eight_devices: {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
}


@pytest.mark.parametrize("what", SETTINGS, ids=lambda what: what.__name__)
def test_in_a_process_of_its_own(what: Callable[[], None]) -> None:
    code = f"from tests.on_jax import test_cases_process as cases; cases.{what.__name__}(); print('all right')"
    more = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", **SETTINGS[what]}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **more}, capture_output=True, text=True, timeout=110
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert "all right" in run.stdout
