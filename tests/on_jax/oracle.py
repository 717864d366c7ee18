"""The oracle of these tests: the same program without remat, in which every decision is what it was the first time.

Decisions come from a `Router`, a host callback that never answers twice alike: the first answer at a site is a function
of the site, and each further one differs. A recompute that decides again has another gradient, and is counted.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from roundpipe_jax import doing_recompute, get_recompute_data, recompute_once, remat, save_for_recompute

LANES: tuple[Any, ...] = ("checkpoint", "custom_vjp")
WAYS: dict[str, Callable[[Any], Any]] = {"eager": lambda f: f, "jit": jax.jit}
STYLES = ("seed", "returned", "once")

X = jnp.array([[0.3, -1.2, 0.7], [1.5, 0.2, -0.4]])
W = jnp.array([[0.5, 0.1, -0.3], [0.2, -0.7, 0.4], [0.9, 0.3, 0.2]])


class Router:
    """Decides, and never the same twice at one site."""

    def __init__(self) -> None:
        self.counts: collections.Counter[int] = collections.Counter()

    def answer(self, site: Any, _: Any) -> Any:
        site = int(site)
        self.counts[site] += 1
        return np.int32(1 + (site * 7 + self.counts[site] * 3) % 5)

    def decide(self, site: Any, x: Any) -> Any:
        """An integer from 1 to 5 that depends on `site` and on how often it was asked there, and not on `x`."""
        x = jax.lax.stop_gradient(jnp.ravel(x)[0])
        shape = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.pure_callback(self.answer, shape, site, x, vmap_method="sequential")

    def saved(self, style: str, site: Any, x: Any, name: str | None = None) -> Any:
        """The same decision, kept for the recompute in one of the ways that layers use."""
        if style == "plain":
            return self.decide(site, x)
        if style == "once":
            return recompute_once(self.decide, site, x)
        if style == "returned":  # never asks for the phase
            (index,) = save_for_recompute(self.decide(site, x), name=name)
            return index
        if doing_recompute():
            (index,) = get_recompute_data(name)
            return index
        index = self.decide(site, x)
        save_for_recompute(index, name=name)
        return index


Wrap = Callable[..., Any]
"""What a program calls on its layers: `remat` with some options, or nothing."""


def bare(layer: Any, **_: Any) -> Any:
    """`layer` without remat."""
    return layer


def in_lane(mode: Any) -> Wrap:
    """`remat` in one lane."""
    return lambda layer, **options: remat(layer, mode=mode, **options)


def same(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    """Structures, dtypes, weak types and values agree; XLA may fuse the two otherwise."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jax.typeof(one) == jax.typeof(two)
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, two = jax.random.key_data(one), jax.random.key_data(two)
        if one.dtype == jax.dtypes.float0:
            continue
        kind = np.complex128 if jnp.issubdtype(one.dtype, np.complexfloating) else np.float64
        left, right = np.asarray(one, kind), np.asarray(two, kind)
        scale = max(1.0, float(np.abs(right).max(initial=0)))
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance * scale)


def total(value: Any) -> Any:
    """The sum of all floats in a pytree."""
    leaves = [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, jax.Array)]
    return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating))


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Value and gradient, by every argument, of the sum of what `f` returns."""
    return lambda *args: jax.value_and_grad(lambda *args: total(f(*args)), tuple(range(len(args))))(*args)


def decided_once(run: Callable[[Router, Wrap], Any], wrap: Wrap, tolerance: float = 2e-5) -> None:
    """`run` gives the same in `wrap` as without, and asks the router as often."""
    plain, ours = Router(), Router()
    want = jax.block_until_ready(run(plain, bare))
    got = jax.block_until_ready(run(ours, wrap))
    same(got, want, tolerance)
    assert ours.counts == plain.counts
    assert plain.counts
