"""Training loops of the module libraries: their own remat with `save_policy()`, ours around it, and ours alone.

Each loop trains a mixture layer with batch-norm statistics, a counter of calls, a load-balance bias and a cache. Of its
five steps one runs forward only. All must be what they are without remat, with as many decisions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from roundpipe_jax import Offload, remat, save_for_recompute, save_policy
from tests.on_jax.oracle import Router, same

T, D, E, STEPS, FORWARD_ONLY = 4, 3, 6, 5, 2
KEY = jax.random.key(0)
BATCHES = jax.random.normal(jax.random.key(1), (STEPS, T, D))
ADAM = optax.adam(1e-2)


class Loop(NamedTuple):
    """A model as its library writes it, made functional."""

    params: Any
    state: Any
    apply: Callable[..., Any]  # (params, state, x, key) -> (y, state)


Build = Callable[[Router, str], Loop]
"""How to build the model with one of the remats."""

REMATS = {
    "linen": ("theirs", "ours"),
    "nnx": ("theirs", "both"),
    "equinox": ("theirs", "ours"),
    "haiku": ("theirs", "ours"),
}


def mixed(gates_TE: Any, up_TD: Any, choice: Any, bias_E: Any) -> tuple[Any, Any]:
    """What the chosen expert gives, and the new bias."""
    weights_TE = jax.nn.softmax(gates_TE + jax.lax.stop_gradient(bias_E))
    load_E = jax.nn.one_hot(choice, E).astype(bias_E.dtype)
    return jnp.tanh(up_TD) * weights_TE[:, choice][:, None], bias_E + 0.1 * (1 / E - load_E)


def around(f: Any, how: str) -> Any:
    """`f`, functional, in our remat or not."""
    return remat(f) if how in ("ours", "both") else f


# ------------------------------------------------------------------------------------------- flax.linen


class Linen(nn.Module):
    router: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        calls = self.variable("counts", "calls", lambda: jnp.int32(0))
        bias = self.variable("counts", "bias", lambda: jnp.zeros(E))
        cache = self.variable("cache", "means", lambda: jnp.zeros((STEPS + 1, D)))
        choice = self.router.saved("returned", 0, x)
        up = nn.BatchNorm(use_running_average=False)(nn.Dense(D)(x))
        y, new = mixed(nn.Dense(E)(x), nn.Dropout(0.5, deterministic=False)(up), choice, bias.value)
        if not self.is_initializing():
            cache.value = cache.value.at[calls.value].set(x.mean(0))
            calls.value, bias.value = calls.value + 1, new
        return x + y


def linen(router: Router, how: str) -> Loop:
    kind = nn.remat(Linen, policy=save_policy()) if how in ("theirs", "both") else Linen
    model = kind(router)
    variables = Linen(Router()).init({"params": KEY, "dropout": KEY}, BATCHES[0])

    state = {name: value for name, value in variables.items() if name != "params"}
    assert set(variables) == {"params", "batch_stats", "counts", "cache"}

    def apply(params: Any, state: Any, x: Any, key: Any) -> Any:
        return model.apply({"params": params, **state}, x, rngs={"dropout": key}, mutable=list(state))

    return Loop(variables["params"], state, around(apply, how))


# --------------------------------------------------------------------------------------------- flax.nnx


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, router: Router) -> None:
        self.gate, self.up = nnx.Linear(D, E, rngs=rngs), nnx.Linear(D, D, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(D, rngs=rngs), nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=1))
        self.calls, self.bias = nnx.Variable(jnp.int32(0)), nnx.Variable(jnp.zeros(E))
        self.cache = nnx.Variable(jnp.zeros((STEPS, D)))
        self.router = router

    def __call__(self, x: Any) -> Any:
        choice = self.router.saved("returned", 0, x)
        y, new = mixed(self.gate(x), self.dropout(self.norm(self.up(x))), choice, self.bias[...])
        self.cache[...] = self.cache[...].at[self.calls[...]].set(x.mean(0))
        self.calls[...], self.bias[...] = self.calls[...] + 1, new
        return x + y


def with_nnx(router: Router, how: str) -> Loop:
    graph, params, state = nnx.split(Nnx(nnx.Rngs(0), router), nnx.Param, ...)
    call = nnx.remat(Nnx.__call__, policy=save_policy()) if how in ("theirs", "both") else Nnx.__call__

    def apply(params: Any, state: Any, x: Any, key: Any) -> Any:
        model = nnx.merge(graph, params, state, copy=True)
        y = call(model, x)
        return y, nnx.state(model, nnx.Not(nnx.Param))

    return Loop(params, state, around(apply, how))


# ---------------------------------------------------------------------------------------------- equinox


class Eqx(eqx.Module):
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    counts: eqx.nn.StateIndex
    router: Any = eqx.field(static=True)

    def __init__(self, router: Router) -> None:
        self.gate, self.up = eqx.nn.Linear(D, E, key=KEY), eqx.nn.Linear(D, D, key=KEY)
        self.norm, self.dropout = eqx.nn.BatchNorm(D, "batch", mode="batch"), eqx.nn.Dropout(0.5)
        self.counts = eqx.nn.StateIndex((jnp.int32(0), jnp.zeros(E), jnp.zeros((STEPS, D))))
        self.router = router

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        choice = self.router.saved("returned", 0, x)
        normed, state = jax.vmap(self.norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            jax.vmap(self.up)(x), state
        )
        calls, bias, cache = state.get(self.counts)
        y, bias = mixed(jax.vmap(self.gate)(x), self.dropout(normed, key=key), choice, bias)
        return x + y, state.set(self.counts, (calls + 1, bias, cache.at[calls].set(x.mean(0))))


def equinox(router: Router, how: str) -> Loop:
    model, state = eqx.nn.make_with_state(Eqx)(router)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def apply(params: Any, state: Any, x: Any, key: Any) -> Any:
        layer = eqx.combine(params, static)
        call = eqx.filter_checkpoint(layer, policy=save_policy()) if how in ("theirs", "both") else layer
        return call(x, state, key)

    return Loop(params, state, around(apply, how))


# ------------------------------------------------------------------------------------------------ haiku


def haiku(router: Router, how: str) -> Loop:
    def layer(x: Any) -> Any:
        calls = hk.get_state("calls", (), jnp.int32, init=jnp.zeros)
        bias = hk.get_state("bias", (E,), init=jnp.zeros)
        cache = hk.get_state("cache", (STEPS, D), init=jnp.zeros)
        choice = router.saved("returned", 0, x)
        up = hk.BatchNorm(True, True, 0.9)(hk.Linear(D)(x), is_training=True)
        y, new = mixed(hk.Linear(E)(x), hk.dropout(hk.next_rng_key(), 0.5, up), choice, bias)
        if not hk.running_init():
            hk.set_state("cache", cache.at[calls].set(x.mean(0)))
            hk.set_state("calls", calls + 1)
            hk.set_state("bias", new)
        return x + y

    def model(x: Any) -> Any:
        theirs = how in ("theirs", "both") and not hk.running_init()
        return (hk.remat(layer, policy=save_policy()) if theirs else layer)(x)

    pair = hk.transform_with_state(model)
    counted, router.counts = router.counts, type(router.counts)()
    params, state = pair.init(KEY, BATCHES[0])
    router.counts = counted
    return Loop(params, state, around(lambda params, state, x, key: pair.apply(params, state, key, x), how))


# -------------------------------------------------------------------------------------------------- all


def trained(loop: Loop, first: int = 0, last: int = STEPS, held: Any = None) -> tuple[list[Any], Any]:
    """Losses, gradients and states of the steps, and what a checkpoint of the run holds."""

    def loss(params: Any, state: Any, x: Any, key: Any) -> Any:
        y, state = loop.apply(params, state, x, key)
        return (y**2).sum(), state

    @jax.jit
    def step(params: Any, state: Any, optimizer: Any, x: Any, key: Any) -> Any:
        (value, state), slopes = jax.value_and_grad(loss, has_aux=True)(params, state, x, key)
        updates, optimizer = ADAM.update(slopes, optimizer)
        return optax.apply_updates(params, updates), state, optimizer, (value, slopes)

    forward = jax.jit(loss)
    params, state, optimizer = held or (loop.params, loop.state, ADAM.init(loop.params))
    seen: list[Any] = []
    for n in range(first, last):
        key = jax.random.fold_in(KEY, n)
        if n == FORWARD_ONLY:
            out, state = forward(params, state, BATCHES[n], key)
        else:
            params, state, optimizer, out = step(params, state, optimizer, BATCHES[n], key)
        seen.append(jax.tree.leaves((out, state)))
    return seen, (params, state, optimizer)


LIBRARIES: dict[str, Build] = {"linen": linen, "nnx": with_nnx, "equinox": equinox, "haiku": haiku}


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_loop_trains_as_without_remat(library: str) -> None:
    build, plain = LIBRARIES[library], Router()
    want, _ = trained(build(plain, "none"))
    assert plain.counts == {0: STEPS}
    for how in REMATS[library]:
        router = Router()
        got, _ = trained(build(router, how))
        same(got, want)
        assert router.counts == plain.counts, how


def test_a_restored_run_goes_on_as_if_it_had_not_stopped(tmp_path: Any) -> None:
    want, _ = trained(linen(Router(), "ours"))
    router = Router()
    loop = linen(router, "ours")
    before, held = trained(loop, last=3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", held)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "step", jax.tree.map(ocp.utils.to_shape_dtype_struct, held))
    after, _ = trained(linen(router, "ours"), first=3, held=restored)
    same([*before, *after], want)


def test_offloading_saves_in_the_remat_of_a_library() -> None:
    variables = Linen(Router()).init({"params": KEY, "dropout": KEY}, BATCHES[0])
    policy = save_policy(offload=Offload(min_bytes=0))

    def slopes(kind: Any) -> Any:
        model = kind(Router())

        def loss(params: Any) -> Any:
            y, _ = model.apply({**variables, "params": params}, BATCHES[0], rngs={"dropout": KEY}, mutable=True)
            return (y**2).sum()

        traced = jax.jit(jax.grad(loss)).trace(variables["params"])
        return traced.lower().compile()(variables["params"]), "i32<host>[]" in str(traced.jaxpr)

    got, there = slopes(nn.remat(Linen, policy=policy))
    want, nowhere = slopes(Linen)
    same(got, want)
    assert there
    assert not nowhere


class Masked(nn.Module):
    """Layers inside a module, which draw from its counters and name their parts by them."""

    wrap: Any
    save: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        shared = nn.Dropout(0.5, deterministic=False)

        def layer(x: Any) -> Any:
            best = self.save(jnp.argmax(jax.lax.stop_gradient(x), -1))
            y = nn.Dropout(0.3, deterministic=False)(nn.Dense(D, kernel_init=nn.initializers.ones)(x))
            return shared(jnp.tanh(y)) * (best[..., None] + 1)

        return self.wrap(layer)(self.wrap(layer)(x))


def drawing(wrap: Any, save: Any) -> Any:
    """The same for a transformed function of haiku."""

    def layer(x: Any) -> Any:
        best = save(jnp.argmax(jax.lax.stop_gradient(x), -1))
        return hk.dropout(hk.next_rng_key(), 0.5, jnp.sin(hk.Linear(D, w_init=jnp.ones)(x))) * (best[..., None] + 1)

    return hk.transform(lambda x: wrap(layer)(x))


def saved(index: Any) -> Any:
    return save_for_recompute(index)[0]


def saved_in_a_scan(index: Any) -> Any:
    return jax.lax.scan(lambda _, i: (None, saved(i)), None, index)[1]


@pytest.mark.parametrize(
    ("options", "save", "way"),
    [
        ({}, saved, jax.jit),
        ({}, saved, lambda f: f),
        ({"mode": "custom_vjp"}, saved, jax.jit),
        ({}, saved_in_a_scan, lambda f: f),
        ({"verify": "raise"}, saved, lambda f: f),
    ],
    ids=["jit", "eager", "custom_vjp", "in a scan", "verify"],
)
@pytest.mark.parametrize("library", ["linen", "haiku"])
def test_a_layer_inside_draws_the_same_keys_in_both_phases(library: str, options: Any, save: Any, way: Any) -> None:
    x, key = jax.random.normal(jax.random.key(0), (T, D)), jax.random.key(1)

    def run(wrap: Any, save: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            if library == "linen":
                y = Masked(wrap, save).apply(params, x, rngs={"dropout": key})
            else:
                y = drawing(wrap, save).apply(params, key, x)
            return (y**2).sum()

        return way(jax.value_and_grad(loss, (0, 1)))(params, x)

    if library == "linen":
        params = Masked(lambda f: f, lambda i: i).init({"params": key, "dropout": key}, x)
    else:
        params = drawing(lambda f: f, lambda i: i).init(key, x)
    got, want = run(lambda f: remat(f, **options), save), run(lambda f: f, lambda i: i)
    same(got, want)
