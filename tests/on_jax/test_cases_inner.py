"""Saves inside scan, cond, switch, while, map, vmap and jit of a layer, and layers inside those."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental.scheduling_groups import scheduling_group
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from roundpipe_jax import (
    GradientError,
    _staging,
    doing_recompute,
    layer_scope,
    recompute_once,
    remat,
    save_for_recompute,
)
from tests.on_jax.oracle import LANES, STYLES, WAYS, W, X, bare, decided_once, gradient, in_lane, same

ways = pytest.mark.parametrize("way", WAYS)
Layer = Callable[[Any, Any], Any]


def best(x: Any) -> Any:
    return jnp.argmax(lax.stop_gradient(x))


# ------------------------------------------------------------------------- each place, each style, counted

Save = Callable[[Any, Any], Any]


def scan(save: Save, x: Any) -> Any:
    return lax.scan(lambda c, n: (jnp.tanh(c @ W) * save(n, c), None), x, jnp.arange(3))[0]


def scan_of_scan(save: Save, x: Any) -> Any:
    def outer(c: Any, m: Any) -> Any:
        return lax.scan(lambda c, n: (jnp.sin(c) * save(2 * m + n, c), None), c, jnp.arange(2))[0], None

    return lax.scan(outer, x, jnp.arange(2))[0]


def cond(save: Save, x: Any) -> Any:
    def one(x: Any) -> Any:
        return lax.cond(x.sum() > 0, lambda x: jnp.sin(x) * save(0, x), lambda x: jnp.cos(x), x)

    return one(jnp.abs(x)) + one(-jnp.abs(x))


def switch(save: Save, x: Any) -> Any:
    def branch(n: int) -> Callable[[Any], Any]:
        return lambda x: jnp.sin(x) * save(n, x)

    return lax.switch(jnp.int32(1) + (x[0, 0] > 9), [jnp.sin, branch(1), jnp.cos], x)


def mapped(save: Save, x: Any) -> Any:
    return lax.map(lambda row: jnp.sin(row) * save(0, row), x)


def vmapped(save: Save, x: Any) -> Any:
    return jax.vmap(lambda row: jnp.sin(row) * save(0, row), 1, 1)(x)


def jitted(save: Save, x: Any) -> Any:
    return jax.jit(lambda x: jnp.sin(x) * save(0, x))(x)


def bounded_loop(save: Save, x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda n, c: jnp.sin(c) * save(n, c), x)


def everything(save: Save, x: Any) -> Any:
    def step(c: Any, n: Any) -> Any:
        return lax.cond(n > 0, lambda c: jnp.sin(c) * save(n, c), lambda c: c * 2, c), None

    return jax.jit(jax.vmap(lambda row: lax.scan(step, row, jnp.arange(3))[0]))(x)


PLACES = [scan, scan_of_scan, cond, switch, mapped, vmapped, jitted, bounded_loop, everything]


@pytest.mark.parametrize(
    ("place", "way"),
    [(place, way) for place in PLACES for way in WAYS],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_a_decision_in_each_place(place: Any, way: str) -> None:  # R8
    style = STYLES[(PLACES.index(place) + len(way)) % 3]

    def program(router: Any, wrap: Any) -> Any:
        def layer(x: Any) -> Any:
            return place(lambda site, c: router.saved("plain" if wrap is bare else style, site, c), x)

        return WAYS[way](gradient(wrap(layer)))(X)

    decided_once(program, remat)


def jitted_twice(save: Save, x: Any) -> Any:
    return jax.jit(lambda x: jitted(save, x) * jnp.cos(x))(x)


def of_two_derivatives(save: Save, x: Any) -> Any:
    return jax.grad(lambda x: (switch(save, x) ** 3).sum())(x)


@pytest.mark.parametrize(
    "place",
    [scan, cond, switch, jitted, everything, jitted_twice, of_two_derivatives],
    ids=lambda place: place.__name__,
)
@pytest.mark.parametrize(("wrap", "way"), [(remat, "jit"), (jax.checkpoint, "eager")], ids=["ours", "stock"])
def test_a_saved_value_used_under_its_old_name_in_what_the_layer_differentiates(
    place: Any, wrap: Any, way: str
) -> None:  # R8
    """JAX takes it apart before the layer's program is whole, and drops what nobody reads."""

    def program(router: Any, wrap: Any) -> Any:
        def slope(x: Any) -> Any:
            style = "plain" if wrap is bare else "seed"
            return jax.grad(lambda x: (place(lambda site, c: router.saved(style, site, c), x) ** 2).sum())(x)

        return WAYS[way](gradient(wrap(slope)))(X)

    decided_once(program, wrap)


@pytest.mark.parametrize("place", [scan, everything], ids=lambda place: place.__name__)
def test_second_derivatives(place: Any) -> None:
    def save(n: Any, c: Any) -> Any:
        return save_for_recompute(best(c) + n)[0] + 1

    def twice(wrap: Any) -> Any:
        f = wrap(lambda x: place(save, x))
        return jax.jit(jax.hessian(lambda x: (f(x) ** 2).sum()))(X)

    same(twice(remat), twice(bare))


# --------------------------------------------------------------------------------------- which value is kept


def both(layer: Layer, *args: Any) -> None:
    for way in WAYS.values():
        same(way(gradient(remat(layer)))(*args), way(gradient(layer))(*args))


def test_a_save_in_one_branch_only() -> None:
    def layer(x: Any) -> Any:
        return lax.cond(x.sum() > 0, lambda x: jnp.sin(x) * (save_for_recompute(best(x))[0] + 1), jnp.cos, x)

    both(layer, jnp.abs(X))
    both(layer, -jnp.abs(X))


def test_branches_that_save_under_one_name() -> None:
    def layer(k: Any, x: Any) -> Any:
        def branch(n: int) -> Any:
            return lambda x: jnp.sin(x) * (save_for_recompute(best(x) + n)[0] + 1)

        return lax.switch(k, [branch(n) for n in range(3)], x)

    for way in WAYS.values():
        for k in range(3):
            same(way(jax.grad(lambda k, x: remat(layer)(k, x).sum(), 1))(k, X), jnp.cos(X) * (best(X) + k + 1))


def test_saving_what_a_body_is_given() -> None:
    """The counter it carries, what it runs over, and what it closes over, all used again outside."""

    def layer(x: Any, k: Any) -> Any:
        def body(carry: Any, n: Any) -> Any:
            count, c = carry
            kept, over, outside = save_for_recompute(count, n, k)
            return (count + 1, jnp.sin(c) * (kept + 1) * over * outside), count

        (count, y), counts = lax.scan(body, (jnp.int32(0), x), jnp.arange(1, 3))
        return y * (count + k), counts

    for way in WAYS.values():
        got = way(jax.grad(lambda x, k: remat(layer)(x, k)[0].sum()))(X, jnp.int32(3))
        same(got, way(jax.grad(lambda x, k: layer(x, k)[0].sum()))(X, jnp.int32(3)))


def test_one_value_under_three_names_and_as_an_output() -> None:
    def layer(x: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            index = best(c)
            (a,) = save_for_recompute(index, name="a")
            (b,) = save_for_recompute(index, name="b")
            (c2,) = save_for_recompute(a, name="c")
            return jnp.sin(c) * (a + b + c2 + index), index

        y, indices = lax.scan(body, x, None, length=2)
        return y * indices.sum()

    both(layer, X)


MESH = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
OUTSIDE: dict[str, Callable[..., Any]] = {
    "jit": lambda f, x, k: jax.jit(f)(x, k),
    "traced": lambda f, x, k: jax.jit(f).trace(x, k)(x, k),
    "checkpoint": lambda f, x, k: jax.checkpoint(f)(x, k),
    "cond": lambda f, x, k: lax.cond(x.sum() < 99, f, lambda x, k: x, x, k),
    "scan": lambda f, x, k: lax.scan(lambda x, _: (f(x, k), None), x, None, length=2)[0],
    "shard_map": lambda f, x, k: jax.shard_map(f, mesh=MESH, in_specs=P(), out_specs=P())(x, k),
    "a call of another kind": lambda f, x, k: scheduling_group("one")(f)(x, k),
}


@pytest.mark.parametrize("inner", OUTSIDE)
@pytest.mark.parametrize("twice", [False, True], ids=["inside", "outside too"])
def test_a_decision_of_the_layer_that_is_saved_inside(inner: str, twice: bool) -> None:  # R8
    def program(router: Any, wrap: Any) -> Any:
        def saves(x: Any, k: Any) -> Any:
            return jnp.sin(x) * (k if wrap is bare else save_for_recompute(k)[0])

        def layer(x: Any) -> Any:
            k = router.decide(0, x)
            if twice and wrap is not bare:
                save_for_recompute(k, name="outside")
            return OUTSIDE[inner](saves, x, k) * k

        return jax.jit(gradient(wrap(layer)))(X)

    decided_once(program, remat)


HANDING_OUT: dict[str, Callable[..., Any]] = {
    "jit": lambda f, x: jax.jit(f)(x),
    "traced": lambda f, x: jax.jit(f).trace(x)(x),
    "cond": lambda f, x: lax.cond(x.sum() < 99, f, lambda x: (x, jnp.float32(0)), x),
    "scan": lambda f, x: lax.scan(lambda x, _: f(x), x, None, length=1),
    "vmap": lambda f, x: jax.vmap(f)(x[:1]),
}


@pytest.mark.parametrize("inner", HANDING_OUT)
def test_a_decision_that_is_saved_inside_and_used_outside(inner: str) -> None:  # R8
    def program(router: Any, wrap: Any) -> Any:
        def decides(x: Any) -> Any:
            k = router.decide(0, x) * 0.5
            return jnp.sin(x) * (k if wrap is bare else save_for_recompute(k)[0]), k

        def layer(x: Any) -> Any:
            y, k = HANDING_OUT[inner](decides, x)
            return jnp.sin(y) * k.sum()

        return jax.jit(gradient(wrap(layer)))(X)

    decided_once(program, remat)


@pytest.mark.parametrize(
    "constant",
    [lambda: jnp.ones(()), lambda: jnp.full((2,), 3.0), lambda: True],
    ids=["ones", "full", "bool"],
)
def test_constants_made_in_the_layer(constant: Any) -> None:
    def save(*_: Any) -> Any:
        return jnp.sum(jnp.asarray(save_for_recompute(constant())[0]))

    for layer in (lambda x: scan(save, x), lambda x: jnp.sin(x) * save()):
        same(jax.jit(gradient(remat(layer)))(X), jax.jit(gradient(layer))(X))


@pytest.mark.parametrize("inner", [jax.jit, lambda f: f], ids=["jitted", "plain"])
def test_two_scopes_around_one_function(inner: Any) -> None:
    @inner
    def half(x: Any, k: Any) -> Any:
        (k,) = save_for_recompute(k)
        return jnp.sin(x) * k

    def layer(x: Any) -> Any:
        with layer_scope("half"):
            y = half(x, jnp.int32(3))
        with layer_scope("half"):
            return y + half(2 * x, jnp.int32(4))

    both(layer, X)


def test_functions_with_their_own_derivatives_between_saves() -> None:
    @jax.custom_vjp
    def tripled(x: Any) -> Any:
        return jnp.sin(x)

    tripled.defvjp(lambda x: (jnp.sin(x), x), lambda x, dot: (3 * dot,))

    @jax.custom_jvp
    def kept(x: Any) -> Any:  # changes nothing but the derivative, as our own marks do
        return x

    kept.defjvp(lambda primals, dots: (kept(*primals), 5 * dots[0]))

    def body(c: Any, _: Any) -> Any:
        h = kept(jnp.sin(c))
        index, table = save_for_recompute(best(h), lax.stop_gradient(h))
        return tripled(c) * (index + 1) + h * kept(table), None

    def layer(x: Any) -> Any:
        return lax.scan(body, x, None, length=2)[0]

    both(layer, X)


def test_a_mark_of_the_users_is_not_moved() -> None:
    """A saved value that only passes through a function with another derivative keeps both values apart."""

    @jax.custom_jvp
    def ten_times(x: Any) -> Any:
        return x

    ten_times.defjvp(lambda primals, dots: (ten_times(*primals), 10 * dots[0]))

    def layer(x: Any, y: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            table = jnp.exp(y)
            (marked,) = save_for_recompute(ten_times(table))
            return jnp.sin(c) * marked * table, None

        return lax.scan(body, x, None, length=2)[0].sum()

    for way in WAYS.values():
        same(way(jax.grad(remat(layer)))(X, X), way(jax.grad(layer))(X, X))
        with pytest.raises(GradientError):
            way(jax.grad(remat(layer), 1))(X, X)


def test_while_in_forward_mode() -> None:
    def layer(x: Any) -> Any:
        def body(state: Any) -> Any:
            n, c = state
            return n + 1, jnp.sin(c) * (save_for_recompute(best(c))[0] + 1)

        return lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]

    for way in WAYS.values():
        same(way(lambda x: jax.jvp(remat(layer), (x,), (x,)))(X), way(lambda x: jax.jvp(layer, (x,), (x,)))(X))
    with pytest.raises(ValueError, match=r"while_loop"):
        jax.grad(lambda x: remat(layer)(x).sum())(X)


# ------------------------------------------------------------------------------------- layers in inner traces


def routed(x: Any, w: Any) -> Any:
    (index,) = save_for_recompute(best(x @ w))
    return jnp.tanh(x @ w) * (index + 1)


WS = jnp.stack([W, W * 0.5, W.T])


@ways
@pytest.mark.parametrize("lane", LANES)
def test_scan_of_regions_and_a_region_around_it(lane: Any, way: str) -> None:
    def net(layer: Layer, x: Any, ws: Any) -> Any:
        return lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]

    inner = remat(routed, mode=lane)
    step = WAYS[way](gradient(lambda x, ws: net(inner, x, ws)))
    want = WAYS[way](gradient(lambda x, ws: net(routed, x, ws)))(X, WS)
    same(step(X, WS), want)
    around = remat(lambda x, ws: net(remat(routed), x, ws))
    same(WAYS[way](gradient(around))(X, WS), want)


@pytest.mark.parametrize("lane", LANES)
def test_vmap_around_a_layer_whose_saves_are_not_all_batched(lane: Any) -> None:
    def layer(x: Any, t: Any) -> Any:
        index, table, number = save_for_recompute(best(x), lax.stop_gradient(t) * 2, 5)
        assert type(number) is int
        return jnp.sin(x).sum() * (index + 1) * table.sum() * number

    forms: list[Callable[[Any], Any]] = [
        lambda f: jax.vmap(jax.grad(f), (0, None))(X, X[0]),
        lambda f: jax.vmap(jax.grad(f, (0, 1)), (None, 0))(X, X),
        lambda f: jax.grad(lambda x: jax.vmap(f, (0, None))(x, X[0]).sum())(X),
        lambda f: jax.vmap(jax.vmap(jax.grad(f), (0, None)), (None, 0))(X, X),
        lambda f: jax.jit(jax.vmap(jax.grad(f), (1, None)))(X, X[0]),
    ]
    for form in forms:
        same(form(in_lane(lane)(layer)), form(layer))


@jax.custom_vjp
def doubled(x: Any, w: Any) -> Any:
    return x @ w


doubled.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, dot: (2 * dot @ kept[1].T, 2 * kept[0].T @ dot))


def test_vmap_around_a_layer_with_a_rule_of_its_own_that_saves_floats() -> None:
    def layer(w: Any, x: Any, cut: Any = lax.stop_gradient) -> Any:
        (table,) = save_for_recompute(cut(jnp.sin(x) @ w))
        return doubled(x, w) * table, w * 2

    def step(f: Any) -> Any:
        return jax.jit(gradient(lambda w, xs: jax.vmap(f, (None, 0))(w, xs)))(W, jnp.stack([X, X * 2]))

    same(step(remat(layer)), step(layer))
    with pytest.raises(GradientError):
        step(remat(lambda w, x: layer(w, x, lambda table: table)))


@ways
def test_a_gradient_taken_inside_a_layer(way: str) -> None:
    def outside(x: Any) -> Any:
        (index,) = save_for_recompute(best(x))
        return jax.grad(lambda x: (jnp.sin(x) ** 2).sum() * (index + 1))(x)

    def inside(x: Any) -> Any:
        return jax.grad(lambda x: (jnp.sin(x) ** 2).sum() * (save_for_recompute(best(x))[0] + 1))(x)

    want = WAYS[way](gradient(outside))(X)
    for layer in (outside, inside):
        same(WAYS[way](gradient(remat(layer)))(X), want)
    same(WAYS[way](gradient(remat(outside, mode="custom_vjp")))(X), want)


@ways
def test_a_closed_over_decision_function_sees_no_gradient(way: str) -> None:  # R5
    def net(wrap: Any, w: Any, x: Any) -> Any:
        def layer(x: Any) -> Any:
            return jnp.sin(x @ w) * lax.stop_gradient(recompute_once(lambda: jnp.exp(x @ w)))

        return wrap(layer)(x)

    for lane in LANES:
        got = WAYS[way](gradient(lambda w, x, lane=lane: net(in_lane(lane), w, x)))(W, X)
        same(got, WAYS[way](gradient(lambda w, x: net(bare, w, x)))(W, X))


# ------------------------------------------------------------------------ the first call of a layer, on values


def asks_in_a_jitted_function(save: Save, x: Any) -> Any:
    return jax.jit(lambda x: jnp.sin(x) if doing_recompute() else jnp.sin(x) * 1)(x)


def saves_a_number_in_a_jitted_function(save: Save, x: Any) -> Any:
    jax.jit(lambda: save_for_recompute(3, name="number"))()
    return jnp.sin(x)


def inner_layer(save: Save, x: Any) -> Any:
    return remat(lambda x: scan(save, 0.1 * x * save(50, x)))(x) * save(60, x)


def asks_in_a_scan(save: Save, x: Any) -> Any:
    return lax.scan(lambda c, _: (jnp.sin(c) if doing_recompute() else jnp.sin(c) * 1, None), x, None, length=2)[0]


@pytest.fixture
def unknown() -> None:
    """Layers begin as if nothing of them were known."""
    _staging._hints.clear()


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize(("style", "batched"), [*((style, False) for style in STYLES), ("once", True)])
@pytest.mark.parametrize(
    "place",
    [scan, vmapped, asks_in_a_scan, asks_in_a_jitted_function, saves_a_number_in_a_jitted_function, inner_layer],
    ids=lambda place: place.__name__,
)
def test_a_decision_before_the_place_that_makes_a_layer_start_over(place: Any, style: str, batched: bool) -> None:  # R8
    def program(router: Any, wrap: Any) -> Any:
        def layer(x: Any) -> Any:
            def save(site: Any, c: Any) -> Any:
                return 0.2 * router.saved("plain" if wrap is bare else style, site, c, name="inside")

            k = router.saved("plain" if wrap is bare else style, 100, x, name="before")
            return (place(save, x * k) if wrap is not bare or place is not inner_layer else flat(save, x * k)) * k

        slopes = gradient(wrap(layer))
        return jax.vmap(slopes)(jnp.stack([X, -X])) if batched else slopes(X)

    def flat(save: Save, x: Any) -> Any:
        return scan(save, 0.1 * x * save(50, x)) * save(60, x)

    decided_once(program, remat)


@pytest.mark.usefixtures("unknown")
def test_an_effect_before_that_place_happens_once_a_step() -> None:  # R8
    made: list[int] = []

    def answer() -> Any:
        made.append(1)
        return np.float32(len(made))

    def layer(x: Any) -> Any:
        k = recompute_once(lambda: io_callback(answer, jax.ShapeDtypeStruct((), jnp.float32), ordered=True))
        return asks_in_a_scan(lambda n, c: None, x * k)

    step = jax.jit(jax.grad(lambda x: remat(layer)(x).sum()))
    for n in (1, 2):
        got = step(X)
        assert made == [1] * n
        same(got, jax.grad(lambda x, n=n: jnp.sin(jnp.sin(x * n)).sum())(X))


def test_a_decision_of_the_host_is_made_once_in_recompute_once() -> None:  # R8
    made: list[int] = []

    def plan() -> Any:
        made.append(1)
        return {"rows": np.array([1, 0]), "scale": float(len(made))}

    def layer(x: Any) -> Any:
        chosen = recompute_once(plan)
        chosen["rows"] += 1
        return scan(lambda n, c: save_for_recompute(best(c))[0] + 1, x)[chosen["rows"] - 1] * chosen["scale"]

    got = jax.grad(lambda x: remat(layer)(x).sum())(X)
    assert made == [1]
    same(got, jax.grad(lambda x: scan(lambda n, c: best(c) + 1, x)[np.array([1, 0])].sum())(X))
