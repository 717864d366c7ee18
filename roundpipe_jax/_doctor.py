"""What `python -m roundpipe_core doctor` says about JAX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from roundpipe_core import doing_recompute, record, replay, save_for_recompute
from roundpipe_core._doctor import Finding, trial

from ._jax import is_remat3
from ._remat import remat

__all__ = ["examine"]


def examine() -> Iterator[Finding]:
    """Devices, and a trial in each way to call a layer."""
    kinds = sorted({f"{device.platform} ({device.device_kind})" for device in jax.devices()})
    yield Finding("jax devices", f"{len(jax.devices())}: {', '.join(kinds)}")
    yield Finding("jax memories", ", ".join(sorted({m.kind for m in jax.devices()[0].addressable_memories()})))
    yield Finding("jax settings", f"widest integer {jax.dtypes.canonicalize_dtype('int64')}, remat3 {is_remat3()}")
    yield trial("jax: recompute remembers", lambda: _remembers(jax.grad(_loss("checkpoint"))))
    yield trial("jax, jit: recompute remembers", lambda: _remembers(jax.jit(jax.grad(_loss("checkpoint")))))
    yield trial('jax, mode="custom_vjp"', lambda: _remembers(jax.jit(jax.grad(_loss("custom_vjp")))))
    yield trial("jax: record and replay", _replays)


def _layer(x: Any) -> Any:
    scores = jax.lax.stop_gradient(x) * (-1 if doing_recompute() else 1)  # decided again, it would be the other way
    (best,) = save_for_recompute(jnp.argmax(scores, -1, keepdims=True))
    return jnp.take_along_axis(jnp.exp(x), best, -1)


def _loss(mode: Any) -> Any:
    return lambda x: remat(_layer, mode=mode)(x).sum()


def _remembers(gradient: Any) -> bool:
    x = jnp.arange(6.0).reshape(2, 3)
    return bool(jnp.array_equal(gradient(x) != 0, x == x.max(-1, keepdims=True)))


def _replays() -> bool:
    x = jnp.arange(6.0).reshape(2, 3)
    with record() as tape:
        expected = remat(_layer)(x)
    with replay(tape):
        return bool(jnp.array_equal(remat(_layer)(x), expected))
