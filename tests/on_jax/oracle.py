"""The oracle of these tests: the same program without remat, in which every decision is what it was the first time.

Decisions come from a `Router`, a host callback that never answers twice alike: the first answer at a site is a function of
the site, and each further one differs. A recompute that decides again therefore has another gradient, and is counted.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from roundpipe_jax import doing_recompute, get_recompute_data, recompute_once, save_for_recompute

LANES: tuple[Any, ...] = ("checkpoint", "custom_vjp")
WAYS: dict[str, Callable[[Any], Any]] = {"eager": lambda f: f, "jit": jax.jit}

X = jnp.array([[0.3, -1.2, 0.7], [1.5, 0.2, -0.4]])
W = jnp.array([[0.5, 0.1, -0.3], [0.2, -0.7, 0.4], [0.9, 0.3, 0.2]])


class Router:
    """Decides, and never the same twice at one site."""

    def __init__(self) -> None:
        self.counts: collections.Counter[int] = collections.Counter()

    def _answer(self, site: Any, _: Any) -> Any:
        site = int(site)
        self.counts[site] += 1
        return np.int32(1 + (site * 7 + self.counts[site] * 3) % 5)

    def decide(self, site: Any, x: Any) -> Any:
        """An integer from 1 to 5 that depends on `site` and on how often it was asked there, and not on `x`."""
        x = jax.lax.stop_gradient(jnp.ravel(x)[0])
        shape = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.pure_callback(self._answer, shape, site, x, vmap_method="sequential")

    def saved(self, style: str, site: Any, x: Any, name: str | None = None) -> Any:
        """The same decision, kept for the recompute in one of the ways that layers use."""
        if style == "plain":
            return self.decide(site, x)
        if style == "once":
            return recompute_once(self.decide, site, x)
        if doing_recompute():
            (index,) = get_recompute_data(name)
            return index
        index = self.decide(site, x)
        if style == "returned":
            (index,) = save_for_recompute(index, name=name)
        else:
            save_for_recompute(index, name=name)
        return index


STYLES = ("seed", "returned", "once")


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


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Value and gradient, by every argument, of the sum of what `f` returns."""

    def total(*args: Any) -> Any:
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(f(*args)))

    return lambda *args: jax.value_and_grad(total, tuple(range(len(args))))(*args)


def decided_once(run: Callable[[Router, bool], Any], sites: int | None = None) -> None:
    """`run(router, remat?)` gives the same with remat as without, and asks the router once at each site."""
    plain, ours = Router(), Router()
    want = jax.block_until_ready(run(plain, False))
    got = jax.block_until_ready(run(ours, True))
    same(got, want)
    assert ours.counts == plain.counts
    if sites is not None:
        assert ours.total == sites if hasattr(ours, "total") else sum(ours.counts.values()) == sites
