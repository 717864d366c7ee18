"""Run by test_devices.py, in a process with eight devices."""

import functools
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roundpipe_jax import (
    MismatchError,
    Offload,
    doing_recompute,
    get_recompute_data,
    keep,
    record,
    remat,
    replay,
    save_for_recompute,
)

REMAT3 = bool(getattr(jax.config, "jax_remat3", False))
X, W = (np.random.default_rng(rows).normal(size=(rows, 4)).astype("float32") for rows in (16, 4))
ONE = (X[:2], W)
Wrap = Callable[[Any], Any]


def layer(x: Any, w: Any) -> Any:
    if doing_recompute():
        (idx,) = get_recompute_data()
    else:
        idx = jnp.argmax(jax.lax.stop_gradient(x @ w), -1)
        save_for_recompute(idx)
    return jnp.tanh(x @ w) * jnp.take_along_axis(jax.nn.softmax(x @ w), idx[:, None], 1)


@jax.custom_vjp
def kernel(y: Any) -> Any:
    return jnp.tanh(y)


kernel.defvjp(lambda y: (jnp.tanh(y), jnp.tanh(y)), lambda out, slope: (slope * (1 - out**2),))


def keeping(x: Any, w: Any) -> Any:
    return keep(lambda x: kernel(x @ w), layer(x, w)) * keep(lambda x: jnp.sin(x @ w), x)


def experts(x: Any, w: Any) -> Any:
    """Expert parallel, one expert a device: rows are sent in buckets, and how many are in each is saved."""
    scores = x @ w
    place = jnp.argmax(jax.lax.stop_gradient(jnp.abs(scores) * jnp.arange(1, 5)), -1) * 2 + jax.lax.axis_index("i") % 2
    if doing_recompute():
        order, sizes, received = get_recompute_data()
    else:
        order = jnp.argsort(place)
        sizes = jnp.bincount(place, length=8)
        received = jax.lax.all_to_all(sizes, "i", 0, 0, tiled=True)
        save_for_recompute(order, sizes, received)
    rows = jnp.arange(x.shape[0])
    starts = jnp.cumsum(sizes) - sizes
    inside = (rows[None] < (starts + sizes)[:, None]) & (rows[None] >= starts[:, None])  # bucket by sorted row
    buckets = jnp.where(inside[:, :, None], x[order][None], 0)
    arrived = jax.lax.all_to_all(buckets, "i", 0, 0, tiled=True)
    scale = jax.lax.axis_index("i") + 1 + received.sum()
    done = jax.lax.all_to_all(jnp.tanh(arrived @ w) * scale, "i", 0, 0, tiled=True)
    sorted_back = jnp.zeros_like(x).at[order].set(jnp.where(inside[:, :, None], done, 0).sum(0))
    return sorted_back * jax.nn.softmax(scores)


def asked_for_sizes(f: Any) -> int:
    """How often a step exchanges integers, which is to say split sizes."""
    text = jax.jit(step(sharded(f))).lower(X, W).compile().as_text()
    return len(re.findall(r"= \(s32.* all-to-all\(", text))


def twice(f: Any) -> Any:
    return jax.jit(jax.grad(lambda x: (step(f)(x, W)[0] ** 2).sum()))(ONE[0])


def expert_parallel(wrap: Wrap) -> Any:
    assert asked_for_sizes(wrap(experts)) == 1
    assert asked_for_sizes(jax.checkpoint(experts)) == 1
    assert asked_for_sizes(lambda x, w: x + experts(x, w) * experts(x * 2, w)) == 2  # counted right
    return jax.jit(step(sharded(wrap(experts))))(X, W)


@functools.cache
def mesh() -> Any:
    return jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def squared(f: Any) -> Any:
    return lambda x, w: (f(x, w) ** 2).sum()


def sharded(f: Any) -> Any:
    return jax.shard_map(f, mesh=mesh(), in_specs=(P("i"), P()), out_specs=P("i"))  # w is replicated


def in_scan(f: Any) -> Any:
    return lambda x, w: jax.lax.scan(lambda x, _: (f(x, w), None), x, None, length=2)[0]


def step(f: Any) -> Any:
    return jax.grad(squared(f), (0, 1))


def same(got: Any, want: Any) -> None:
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-5, atol=1e-5)


def with_shardings(f: Any) -> Any:
    rows, whole = NamedSharding(mesh(), P("i")), NamedSharding(mesh(), P())
    got = jax.jit(step(f), out_shardings=(rows, whole))(jax.device_put(X, rows), jax.device_put(W, whole))
    assert got[0].sharding.is_equivalent_to(rows, 2)
    return got


def recorded(f: Any) -> Any:
    def run(x: Any, w: Any) -> Any:
        with record() as tape:
            f(x, w)
        return tape

    return run


def replayed(f: Any) -> Any:
    def run(x: Any, w: Any, tape: Any) -> Any:
        with replay(tape):
            return f(x, w)

    return run


def taped_with_shardings(f: Any) -> Any:
    rows, whole = NamedSharding(mesh(), P("i")), NamedSharding(mesh(), P())
    x, w = jax.device_put(X, rows), jax.device_put(W, whole)
    tape = jax.jit(recorded(f))(x, w)
    [entry] = tape.entries()
    assert entry.value.sharding.is_equivalent_to(rows, 1)
    loss = squared(lambda x, w: replayed(f)(x, w, tape)), (0, 1)
    eager = jax.grad(*loss)(x, w)
    got = jax.jit(jax.grad(lambda x, w, tape: (replayed(f)(x, w, tape) ** 2).sum(), (0, 1)))(x, w, tape)
    same(eager, got)
    return got


def taped_in_shard_map(f: Any) -> Any:
    specs: Any = (P("i"), P())
    tape = jax.jit(jax.shard_map(recorded(f), mesh=mesh(), in_specs=specs, out_specs=P("i")))(X, W)
    again = jax.shard_map(replayed(f), mesh=mesh(), in_specs=(*specs, P("i")), out_specs=P("i"))
    return jax.jit(jax.grad(lambda x, w, tape: (again(x, w, tape) ** 2).sum(), (0, 1)))(X, W, tape)


Check = Callable[[Wrap], Any]
EVERYWHERE: dict[str, Check] = {
    "scan": lambda wrap: jax.jit(step(in_scan(wrap(layer))))(*ONE),
    "nested": lambda wrap: jax.jit(step(wrap(lambda x, w: wrap(layer)(x, w) + 1)))(*ONE),
    "shard_map": lambda wrap: jax.jit(step(sharded(wrap(layer))))(X, W),
    "keep": lambda wrap: jax.jit(step(wrap(keeping)))(*ONE),
}
FIRST_LANE: dict[str, Check] = {
    "eager": lambda wrap: step(wrap(layer))(*ONE),
    "keep in a scan, twice": lambda wrap: twice(in_scan(wrap(keeping))),
    "in another checkpoint, twice": lambda wrap: twice(jax.checkpoint(wrap(layer))),
    "save in a scan": lambda wrap: jax.jit(step(wrap(in_scan(layer))))(*ONE),
    "callback": lambda wrap: called_back(wrap),
    "hessian": lambda wrap: jax.jit(jax.hessian(lambda w: squared(wrap(layer))(ONE[0], w)))(W),
}
EIGHT_DEVICES: dict[str, Check] = {
    "save in a scan in shard_map": lambda wrap: jax.jit(step(sharded(wrap(in_scan(layer)))))(X, W),
    "shard_map in the layer": lambda wrap: jax.jit(step(wrap(sharded(layer))))(X, W),
    "jit with shardings": lambda wrap: with_shardings(wrap(layer)),
    "keep in shard_map": lambda wrap: jax.jit(step(sharded(wrap(keeping))))(X, W),
    "keep in a scan in shard_map": lambda wrap: jax.jit(step(sharded(wrap(in_scan(keeping)))))(X, W),
    "keep with shardings": lambda wrap: with_shardings(wrap(keeping)),
    "expert parallel": expert_parallel,
    "offload with shardings": lambda wrap: with_shardings(offloading(wrap)(keeping)),
    "tape with shardings": lambda wrap: taped_with_shardings(wrap(layer)),
    "tape in shard_map": lambda wrap: taped_in_shard_map(wrap(layer)),
}


def offloading(wrap: Wrap) -> Wrap:
    plan = Offload(min_bytes=0, kept=True, inputs=(0,))
    return wrap if wrap is as_given else lambda f: remat(f, offload=plan)


def called_back(wrap: Any) -> Any:
    """What the forward gives of a layer that calls back and does not save what it gets."""

    def calls_back(x: Any, w: Any) -> Any:
        return layer(x, w) * io_callback(lambda: calls.append(1) or np.float32(2), jax.ShapeDtypeStruct((), x.dtype))

    calls: list[Any] = []
    if wrap is remat:
        try:
            step(wrap(calls_back))(*ONE)
        except MismatchError:
            calls.clear()
        else:
            raise AssertionError("backward called back again")
    value = jax.block_until_ready(jax.jit(wrap(calls_back))(*ONE))
    jax.effects_barrier()
    assert len(calls) == 1
    return value


def as_given(f: Any) -> Any:
    return f


def in_the_residual_lane(f: Any) -> Any:
    return remat(f, mode="custom_vjp")


def stock_fails(check: Check) -> bool:
    """Whether `jax.checkpoint` itself cannot do it here."""
    try:
        check(jax.checkpoint)
    except Exception:
        return True
    return False


def lanes(name: str) -> tuple[Any, ...]:
    """The lanes of a check: each of those to come is about one of them."""
    if name not in EVERYWHERE or REMAT3:
        return (remat,)
    return (in_the_residual_lane,) if os.environ.get("JAX_CUSTOM_VJP3") else (remat, in_the_residual_lane)


def main() -> None:
    assert jax.device_count() == 8
    only_devices = not (REMAT3 or os.environ.get("JAX_CUSTOM_VJP3"))
    checks = EVERYWHERE | (EIGHT_DEVICES if only_devices else FIRST_LANE)
    for name, check in checks.items():
        want = check(as_given)
        for wrap in lanes(name):
            try:
                same(check(wrap), want)
            except Exception:
                if "shard_map" in name and REMAT3 and stock_fails(check):
                    sys.stdout.write(f"{name}: as jax.checkpoint, not under JAX_REMAT3\n")
                    continue
                raise
            sys.stdout.write(f"{name}: right\n")
    sys.stdout.write("all right\n")


if __name__ == "__main__":
    main()
