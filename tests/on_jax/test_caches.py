"""Traces that are kept: for whom, how long, and what is known of a layer from one call to the next."""

import functools
import gc
import itertools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from roundpipe_jax import (
    GradientError,
    _staging,
    doing_recompute,
    get_recompute_data,
    recompute_once,
    remat,
    remat_layers,
    save_for_recompute,
)
from roundpipe_jax._identity import reach, token, tree_token
from roundpipe_jax._packing import Held, is_array
from roundpipe_jax._staging import Traces, stage

X = jnp.linspace(-1, 1, 6).reshape(2, 3)


def best(x: Any) -> Any:
    return save_for_recompute(jnp.argmax(lax.stop_gradient(x)))[0] + 1


def gradient(f: Callable[..., Any], *args: Any) -> Any:
    return jax.grad(lambda x: f(x, *args).sum())(X)


# -------------------------------------------------------------------------------- what a function can reach

FACTOR: Any = 1.0
LINE = types.ModuleType("line")
LINE.slope = 1.0  # type: ignore[attr-defined]
RNG = np.random.default_rng(0)


def scaled(x: Any) -> Any:
    return jnp.sin(x) * best(x) * FACTOR


def along_a_line(x: Any) -> Any:
    return jnp.sin(x) * best(x) * LINE.slope


def by_keyword(x: Any, *, k: Any = 1.0) -> Any:
    return jnp.sin(x) * best(x) * k


def by_its_own(x: Any) -> Any:
    return jnp.sin(x) * best(x) * getattr(by_its_own, "k", 1.0)


def by_an_inner_layer(x: Any) -> Any:
    return inner(x) * best(x)


def by_an_inner_function(x: Any) -> Any:
    def f(x: Any) -> Any:
        return jnp.sin(x) * FACTOR

    return f(x) * best(x)


@remat
def inner(x: Any) -> Any:
    return jnp.sin(x) * FACTOR


def set_factor(k: Any) -> None:
    global FACTOR
    FACTOR = k


def set_slope(k: Any) -> None:
    LINE.slope = k  # type: ignore[attr-defined]


def set_keyword(k: Any) -> None:
    by_keyword.__kwdefaults__ = {"k": k}


def set_its_own(k: Any) -> None:
    by_its_own.k = k  # type: ignore[attr-defined]


CHANGED: dict[Any, Callable[[Any], None]] = {
    scaled: set_factor,
    along_a_line: set_slope,
    by_keyword: set_keyword,
    by_its_own: set_its_own,
    by_an_inner_layer: set_factor,
    by_an_inner_function: set_factor,
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    for change in CHANGED.values():
        change(1.0)


@pytest.mark.parametrize("layer", CHANGED, ids=lambda layer: layer.__name__)
def test_what_changed_between_two_calls_is_seen(layer: Any) -> None:
    for k in (1.0, 2.0, jnp.float32(3), True, 1):
        CHANGED[layer](k)
        np.testing.assert_allclose(gradient(remat(layer)), gradient(layer), rtol=1e-6)


def test_what_changed_between_two_layers_of_one_program_is_seen() -> None:
    class Now:
        layer = 0

    now = Now()
    space: dict[str, Any] = {"now": now, "jnp": jnp, "best": best}
    exec("def f(x):\n    return jnp.sin(x) * best(x) * now.layer", space)

    def program(f: Any) -> Any:
        def loss(x: Any) -> Any:
            for now.layer in (1, 2, 3):
                x = f(x)
            return x

        return jax.jit(functools.partial(gradient, loss))()

    np.testing.assert_allclose(program(remat(space["f"])), program(space["f"]), rtol=1e-6)


def closed_over(k: Any) -> Any:
    return functools.wraps(scaled)(lambda x: scaled(x) * k)


def draws(x: Any) -> Any:
    return x * RNG.normal()


def draws_globally(x: Any) -> Any:
    return x * np.random.normal()


def counts(x: Any) -> Any:
    set_factor(2.0)
    return x


def imports(x: Any) -> Any:
    import random

    return x * random.random()


def imports_further_in(x: Any) -> Any:
    return (lambda y: imports(y))(x) if x is None else [__import__("random").random() for _ in x]


def calls_itself(x: Any, n: int = 2) -> Any:
    return calls_itself(jnp.sin(x), n - 1) if n else x


def uses_much_of_jax(x: Any) -> Any:
    idx = jax.lax.top_k(x, 2)[1].astype(jnp.int32)
    return lax.scan(lambda c, _: (jnp.tanh(c) * np.pi, None), x[idx], None, length=len(idx))[0] + jax.nn.relu(x)


class Text(str):
    __slots__ = ("k",)


def test_what_can_be_told() -> None:
    for steady in (scaled, by_keyword, by_an_inner_layer, calls_itself, uses_much_of_jax):
        assert reach(steady) is not None
    for unsteady in (closed_over(1), draws, draws_globally, counts, imports, imports_further_in):
        assert reach(unsteady) is None
        assert token(unsteady) is None
        assert token(jax.jit(unsteady)) is None
    assert token(jax.jit(calls_itself)) is not None
    for value in (jnp.sin, jax.nn.relu, lax.scan, jnp.float32, np.dtype("int8"), np.float32(1), len, ..., (1, (None,))):
        assert token(value) is not None, value
    long, far = tuple(range(100)), tuple(tuple((n, m) for m in range(30)) for n in range(60))
    for value in (
        Text("a"),
        Text,
        [1],
        {},
        object(),
        RNG.normal,
        [].append,
        (1, []),
        np.ones(1),
        globals,
        X,
        long,
        far,
    ):
        assert token(value) is None, value
    assert token(float("nan")) == token(float("nan"))
    told_apart = [token(value) for value in (1, True, 1.0, 0.0, -0.0, np.float32(1), np.int32(1), "1", None)]
    assert len(set(told_apart)) == len(told_apart)


class Line:
    slope = 1.0

    def at(self, x: Any) -> Any:
        return x * self.slope


def test_what_is_told_of_objects_within_one_program() -> None:
    line, bounds = Line(), [0.0, 1.0]
    space: dict[str, Any] = {"at": line.at, "bounds": bounds.index, "count": [1]}
    exec("def f(x):\n    return at(x) + bounds(0.0) + len(count)", space)
    keys = [reach(space["f"], loosely=True)]
    for change in (lambda: setattr(line, "slope", 2.0), lambda: bounds.append(2.0), lambda: space["count"].append(2)):
        change()
        keys.append(reach(space["f"], loosely=True))
    assert None not in keys
    assert [one == other for one, other in itertools.pairwise(keys)] == [False, False, True]
    assert reach(space["f"]) is None
    for unsteady in (RNG.normal, object(), jnp.ones(1).at):
        space["at"] = unsteady
        assert reach(space["f"], loosely=True) is None


def test_what_counts_as_an_array() -> None:
    ref = jax.new_ref(X)
    for array in (np.ones(2), np.float32(1), np.bool_(True), np.ones(1, bool), X, np.ones(1, complex)):
        assert is_array(array), array
    for other in (1.0, True, "a", None, np.array(["a"]), np.array([object()]), np.datetime64("2026-01-01"), [X], ref):
        assert not is_array(other), other


def test_structures_that_jax_takes_for_equal() -> None:
    one, other = (jax.tree.structure({key: [None, (1,)]}) for key in (1, True))
    assert one == other
    assert tree_token(one) != tree_token(other)
    assert tree_token(jax.tree.structure({"a": 0})) == tree_token(jax.tree.structure({"a": 0}))


def test_static_values_never_seen_before_do_not_pile_up() -> None:
    from roundpipe_jax import _staging

    for n in range(3):
        known = _staging.memory(calls_itself)
        assert known is not None
        known.update({(n, m): m for m in range(_staging._MANY)})
    assert len(_staging.memory(calls_itself) or ()) <= _staging._MANY + 1


# ------------------------------------------------------------------------------------- numpy, in and out


class Handle:
    """Something of the user's."""


def plain(f: Any) -> Any:
    return f


@pytest.mark.parametrize(("mode", "inner"), [("checkpoint", plain), ("checkpoint", jax.jit), ("custom_vjp", plain)])
@pytest.mark.parametrize("way", [plain, jax.grad])
def test_what_a_layer_closes_over_and_saves_goes_with_it(mode: Any, inner: Any, way: Any) -> None:  # R9
    def call() -> list[Any]:
        array, handle = jnp.arange(3.0) + 0.5, Handle()

        def layer(x: Any) -> Any:
            save_for_recompute(handle, name="handle")
            return inner(lambda x: x * best(x) * array)(x).sum()

        jax.block_until_ready(way(remat(layer, mode=mode))(X))
        return [weakref.ref(array), weakref.ref(handle)]

    left = call()
    gc.collect()
    assert [ref() for ref in left] == [None, None]


@pytest.mark.parametrize("mode", ["checkpoint", "custom_vjp"])
@pytest.mark.parametrize("how", ["argument", "closure"])
def test_a_numpy_array_that_changes_before_backward(mode: Any, how: str) -> None:  # R10
    data = np.ones((2, 3), np.float32)

    def layer(w: Any, x: Any) -> Any:
        return jnp.tanh(x * w) * best(w)

    f = remat(layer, mode=mode) if how == "argument" else remat(lambda w, _: layer(w, data), mode=mode)
    y, pull = jax.vjp(lambda w: f(w, data if how == "argument" else 0), X)
    data[:] = 0
    want = jax.vjp(lambda w: layer(w, jnp.ones((2, 3))), X)[1](y)
    np.testing.assert_allclose(pull(y), want, rtol=1e-6)


@pytest.mark.parametrize("value", [np.float64(2), np.arange(3), np.array(True), np.array(["a", "b", "c"])], ids=str)
def test_numpy_values_go_through(value: Any) -> None:
    def layer(x: Any, value: Any) -> Any:
        return jnp.sin(x) * best(x) * len(np.shape(value)), value

    got = jax.grad(lambda x: remat(layer)(x, value)[0].sum())(X)
    np.testing.assert_allclose(got, jax.grad(lambda x: layer(x, value)[0].sum())(X), rtol=1e-6)


# ------------------------------------------------------------------------- starting over, once and not at each call


def test_a_layer_made_anew_starts_in_the_form_it_needed() -> None:  # R8
    made: list[int] = []

    def step(inner: Any) -> None:
        def layer(x: Any) -> Any:
            if doing_recompute():
                (k,) = get_recompute_data("k")
            else:
                made.append(1)
                k = jnp.int32(len(made))
                save_for_recompute(k, name="k")
            return inner(x) * k

        jax.grad(lambda x: remat(layer)(x).sum())(X)

    for inner in (
        lambda x: lax.scan(lambda c, _: (jnp.sin(c) * best(c), None), x, None, length=2)[0],
        lambda x: jax.jit(lambda x: jnp.sin(x) if doing_recompute() else x * 0 + jnp.sin(x))(x),
    ):
        step(inner)
        made.clear()
        step(inner)
        assert len(made) == 1


def test_two_ways_to_call_one_layer() -> None:
    def layer(x: Any, inside: bool) -> Any:
        if inside:
            return lax.scan(lambda c, _: (jnp.sin(c) * best(c), None), x, None, length=2)[0]
        up = recompute_once(lambda: bool(x.sum() > 9))
        return jnp.sin(x) if up else jnp.cos(x)

    for inside in (True, False, True):
        np.testing.assert_allclose(gradient(remat(layer), inside), gradient(layer, inside), rtol=1e-5)


def test_a_form_that_no_longer_fits() -> None:
    def make(inside: bool) -> Any:
        def layer(x: Any) -> Any:
            if inside:
                return jax.vmap(lambda row: jnp.sin(row) * best(row))(x)
            return jnp.sin(x) if recompute_once(lambda: bool(x.sum() > 9)) else jnp.cos(x)

        return layer

    for inside in (True, False, True, False):  # the same code, and arguments of the same kind
        np.testing.assert_allclose(gradient(remat(make(inside))), gradient(make(inside)), rtol=1e-5)


def sometimes_a_table(x: Any) -> Any:
    if recompute_once(lambda: bool(x.sum() > 0)):
        (table,) = save_for_recompute(lax.stop_gradient(x) * 2, name="table")
        return jnp.sin(x) * table
    return jnp.cos(x) * best(x)


def sometimes_a_tangent(x: Any) -> Any:
    if recompute_once(lambda: bool(x.sum() > 0)):
        (x,) = save_for_recompute(x * 2, name="table")
    return jnp.cos(x) * best(x)


def test_a_float_that_a_layer_saves_only_now() -> None:  # R5
    for x in (-abs(X), abs(X), -abs(X), abs(X)):
        got = jax.grad(lambda x: remat(sometimes_a_table)(x).sum())(x)
        want = jnp.cos(x) * 2 * x if x.sum() > 0 else -jnp.sin(x) * best(x)
        np.testing.assert_allclose(got, want, rtol=1e-6)
    slope = jax.grad(lambda x: remat(sometimes_a_tangent)(x).sum())
    slope(-abs(X))
    with pytest.raises(GradientError, match="slot 'table'"):
        slope(abs(X))


def test_another_try_that_goes_another_way_decides_for_itself() -> None:
    _staging._hints.clear()
    tries: list[int] = []

    def layer(x: Any) -> Any:
        if not doing_recompute():
            tries.append(1)
        (k,) = save_for_recompute(jnp.argmax(x) * 0 + len(tries), name=f"try {len(tries)}")
        (m,) = save_for_recompute(jnp.argmax(x) + 5, name="m")
        return lax.scan(lambda c, _: (jnp.sin(c) * best(c), None), x * k * m, None, length=2)[0]

    def again(x: Any) -> Any:
        k, m = len(tries), jnp.argmax(X) + 5
        return lax.scan(lambda c, _: (jnp.sin(c) * best(c), None), x * k * m, None, length=2)[0]

    got = gradient(remat(layer))
    assert len(tries) > 1
    np.testing.assert_allclose(got, gradient(again), rtol=1e-5)


# --------------------------------------------------------------------------------------------- lanes inside


def test_the_residual_lane_inside_the_other() -> None:
    stacked = jnp.ones((4, 3)) / 2

    def layer(w: Any, x: Any) -> Any:
        return jnp.tanh(x * w) * best(x)

    def stack(ws: Any, **options: Any) -> Any:
        return remat_layers(layer, ws, X, **options).sum()

    want = jax.grad(stack)(stacked)
    np.testing.assert_allclose(
        jax.grad(functools.partial(stack, mode="custom_vjp", nested=2))(stacked), want, rtol=1e-5
    )
    one = remat(layer, mode="custom_vjp")
    scanned = remat(lambda ws: lax.scan(lambda x, w: (one(w, x), None), X, ws)[0].sum())
    np.testing.assert_allclose(jax.grad(scanned)(stacked), want, rtol=1e-5)


def test_functions_that_share_their_code() -> None:
    def inside(x: Any) -> Any:
        return jax.vmap(lambda row: jnp.sin(row) * best(row))(x)

    def at_home(x: Any) -> Any:
        return jnp.sin(x) * best(x)

    for mode in ("checkpoint", "custom_vjp"):
        for f in (inside, at_home):
            if (f, mode) != (inside, "custom_vjp"):
                got = gradient(remat(lambda x, f=f: f(x), mode=mode))  # type: ignore[call-overload, misc]
                np.testing.assert_allclose(got, gradient(f), rtol=1e-6)


def test_a_program_lasts_though_another_thread_gives_up_what_is_known_of_the_layer() -> None:
    """Two first calls at once, or a global that changes: then the layer's memory is made anew in between."""
    known = Traces.of(lambda x: (jnp.sin(x), Held({"found out"})))
    program = stage(lambda x: x, [X], known)
    known.found.clear()
    gc.collect()
    assert program.cached
    assert program.out[1].value == {"found out"}
