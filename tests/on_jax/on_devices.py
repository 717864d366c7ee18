"""Run by test_devices.py, in a process with eight devices."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roundpipe_jax import doing_recompute, get_recompute_data, remat, save_for_recompute

REMAT3 = bool(getattr(jax.config, "jax_remat3", False))
assert jax.device_count() == 8
MESH = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
X = jax.random.normal(jax.random.key(0), (16, 4))
W = jax.random.normal(jax.random.key(1), (4, 4))
ONE = (X[:2], W)


def layer(x: Any, w: Any) -> Any:
    if doing_recompute():
        (idx,) = get_recompute_data()
    else:
        idx = jnp.argmax(jax.lax.stop_gradient(x @ w), -1)
        save_for_recompute(idx)
    return jnp.tanh(x @ w) * jnp.take_along_axis(jax.nn.softmax(x @ w), idx[:, None], 1)


def squared(f: Any) -> Any:
    return lambda x, w: (f(x, w) ** 2).sum()


def sharded(f: Any) -> Any:
    return jax.shard_map(f, mesh=MESH, in_specs=(P("i"), P()), out_specs=P("i"))  # w is replicated


def in_scan(f: Any) -> Any:
    return lambda x, w: jax.lax.scan(lambda x, _: (f(x, w), None), x, None, length=2)[0]


def step(f: Any) -> Any:
    return jax.grad(squared(f), (0, 1))


def same(got: Any, want: Any) -> None:
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-5, atol=1e-5)


def with_shardings(f: Any) -> Any:
    rows, whole = NamedSharding(MESH, P("i")), NamedSharding(MESH, P())
    got = jax.jit(step(f), out_shardings=(rows, whole))(jax.device_put(X, rows), jax.device_put(W, whole))
    assert got[0].sharding.is_equivalent_to(rows, 2)
    return got


Wrap = Callable[[Any], Any]
CHECKS: dict[str, tuple[Wrap, Callable[[Wrap], Any]]] = {}
for name, wrap in {"checkpoint": remat, "custom_vjp": lambda f: remat(f, mode="custom_vjp")}.items():
    CHECKS |= {
        f"{name}: shard_map": (wrap, lambda wrap: step(sharded(wrap(layer)))(X, W)),
        f"{name}: jit of shard_map": (wrap, lambda wrap: jax.jit(step(sharded(wrap(layer))))(X, W)),
        f"{name}: jit with shardings": (wrap, lambda wrap: with_shardings(wrap(layer))),
        f"{name}: eager": (wrap, lambda wrap: step(wrap(layer))(*ONE)),
        f"{name}: jit": (wrap, lambda wrap: jax.jit(step(wrap(layer)))(*ONE)),
        f"{name}: scan": (wrap, lambda wrap: jax.jit(step(in_scan(wrap(layer))))(*ONE)),
        f"{name}: nested": (wrap, lambda wrap: jax.jit(step(wrap(lambda x, w: wrap(layer)(x, w) + 1)))(*ONE)),
        f"{name}: reverse over reverse": (
            wrap,
            lambda wrap: jax.jit(step(lambda x, w: step(wrap(layer))(x, w)[1]))(*ONE),
        ),
    }
CHECKS |= {
    "tags: scan": (remat, lambda wrap: jax.jit(step(wrap(in_scan(layer))))(*ONE)),
    "tags: scan in shard_map": (remat, lambda wrap: jax.jit(step(sharded(wrap(in_scan(layer)))))(X, W)),
    "shard_map in the layer": (remat, lambda wrap: jax.jit(step(wrap(sharded(layer))))(X, W)),
    "jvp": (remat, lambda wrap: jax.jvp(wrap(layer), ONE, ONE)),
    "hessian": (remat, lambda wrap: jax.jit(jax.hessian(lambda w: squared(wrap(layer))(ONE[0], w)))(W)),
}


def stock_fails(check: Callable[[Wrap], Any]) -> bool:
    """Whether `jax.checkpoint` itself cannot do it here."""
    try:
        check(jax.checkpoint)
    except Exception:
        return True
    return False


for name, (wrap, check) in CHECKS.items():
    try:
        got = check(wrap)
    except Exception:
        if "shard_map" in name and REMAT3 and stock_fails(check):
            print(f"{name}: as jax.checkpoint, not under JAX_REMAT3")
            continue
        raise
    same(got, check(lambda f: f))
    print(f"{name}: right")
print("all right")
