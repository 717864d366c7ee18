"""Exchange between frameworks: sharing costs the same for 1 KB as for 1 GB, a snapshot what the raw copy costs.

Small and large, or ours and the raw way, run in turn; the ratio is the median of those of neighbours.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch

import roundpipe_jax
import roundpipe_torch

from ._rounds import timed
from ._rows import Row

SMALL, LARGE, SNAPSHOT = 1 << 10, 1 << 30, 1 << 28
"""Bytes."""


def tensor(size: int) -> torch.Tensor:
    return torch.ones(size // 4)


def tables(size: int) -> torch.Tensor:
    """Routing in int16, which JAX takes as it is."""
    return torch.ones(size // 2, dtype=torch.int16)


def array(size: int) -> jax.Array:
    return jax.block_until_ready(jnp.ones(size // 4))


def rows(quick: bool) -> Iterator[Row]:
    to_jax, to_torch = roundpipe_jax.from_dlpack, roundpipe_torch.from_dlpack
    large, snapshot, rounds = (1 << 24, 1 << 20, 5) if quick else (LARGE, SNAPSHOT, 101)

    def compared(table: str, what: str, ways: dict[str, Callable[[], Any]], base: str, ours: str, **more: Any) -> Any:
        return timed(table, what, ways, base, clock=time.perf_counter, ours=(ours,), **more)

    for what, take, make, plain in (
        ("torch to JAX", to_jax, tensor, jnp.from_dlpack),
        ("JAX to torch", to_torch, array, torch.utils.dlpack.from_dlpack),
    ):
        one, other = make(SMALL), make(large)
        ways = {
            "1 KB": lambda: take(one, "share"),  # noqa: B023 - called at once
            "1 GB": lambda: take(other, "share"),  # noqa: B023
            "1 KB, the framework's own": lambda: plain(one),  # noqa: B023
        }
        yield from compared("Sharing", what, ways, "1 KB", "1 GB", rounds=rounds, calls=10, bar=None)
    for what, take, make, raw in (
        ("torch to JAX", to_jax, tensor, torch.Tensor.clone),
        ("torch to JAX, int16", to_jax, tables, torch.Tensor.clone),
        ("JAX to torch", to_torch, array, lambda a: torch.utils.dlpack.from_dlpack(a).clone()),
    ):
        source = make(snapshot)
        ways = {
            "clone()": lambda: raw(source),  # noqa: B023
            "snapshot": lambda: jax.block_until_ready(take(source)),  # noqa: B023
        }
        table = "A snapshot of 256 MB"
        yield from compared(table, what, ways, "clone()", "snapshot", rounds=1 if quick else 9, tolerance=0.25)
