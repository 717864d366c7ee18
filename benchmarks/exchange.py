"""Time of one exchange, 1 KB against 1 GB: the same if memory is shared, that of the raw copy if not.

Small and large run in turn; the figure is the median of the ratios of neighbours, so that a busy machine moves both.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import torch
from jax_times import paired

import roundpipe_jax
import roundpipe_torch

SMALL, LARGE = 1 << 10, 1 << 30
"""Bytes."""


def calls(one: Callable[[], Any], other: Callable[[], Any], times: int = 10) -> None:
    ours, theirs, ratio = paired(repeated(other, times), repeated(one, times), 101)
    print(f"{theirs / times * 1e6:10.0f} us {ours / times * 1e6:10.0f} us {ratio:8.3f}")


def repeated(run: Callable[[], Any], times: int) -> Callable[[], None]:
    def many() -> None:
        for _ in range(times):
            run()

    return many


def tensor(size: int) -> torch.Tensor:
    return torch.ones(size // 4)


def array(size: int) -> jax.Array:
    return jax.block_until_ready(jnp.ones(size // 4))


def shared(take: Callable[..., Any], make: Callable[[int], Any]) -> None:
    small, large = make(SMALL), make(LARGE)
    calls(lambda: take(small, "share"), lambda: take(large, "share"))


def checked(take: Callable[..., Any], small: Any, plain: Callable[[Any], Any]) -> None:
    calls(lambda: plain(small), lambda: take(small, "share"))


def copied(take: Callable[..., Any], make: Callable[[int], Any], raw: Callable[[Any], Any]) -> None:
    large = make(LARGE // 4)
    ours, theirs, ratio = paired(lambda: jax.block_until_ready(take(large)), lambda: raw(large), 9)
    print(f"{theirs * 1e3:10.0f} ms {ours * 1e3:10.0f} ms {ratio:8.3f}")


def tables(size: int) -> torch.Tensor:
    """Routing of 48 layers: experts of int16, top 8 of 32k tokens."""
    return torch.ones(size // 2, dtype=torch.int16)


if __name__ == "__main__":
    to_jax, to_torch = roundpipe_jax.from_dlpack, roundpipe_torch.from_dlpack
    print(f"{'shared':34} {'1 KB':>13} {'1 GB':>13} {'ratio':>8}")
    for name, take, make in (("torch to JAX", to_jax, tensor), ("JAX to torch", to_torch, array)):
        print(f"{name:34}", end=" ", flush=True)
        shared(take, make)
    print(f"{'snapshot of 256 MB':34} {'raw copy':>13} {'ours':>13} {'ratio':>8}")
    for name, take, make, raw in (
        ("torch to JAX, against .clone()", to_jax, tensor, torch.Tensor.clone),
        ("int16, against .clone()", to_jax, tables, torch.Tensor.clone),
        ("JAX to torch, against .clone()", to_torch, array, lambda a: torch.utils.dlpack.from_dlpack(a).clone()),
    ):
        print(f"{name:34}", end=" ", flush=True)
        copied(take, make, raw)
    print(f"{'sharing 1 KB':34} {'framework':>13} {'ours':>13} {'ratio':>8}")
    for name, take, make, plain in (
        ("torch to JAX, jnp.from_dlpack", to_jax, tensor, jnp.from_dlpack),
        ("JAX to torch, torch.from_dlpack", to_torch, array, torch.utils.dlpack.from_dlpack),
    ):
        print(f"{name:34}", end=" ", flush=True)
        checked(take, make(SMALL), plain)
