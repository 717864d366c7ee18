"""update_once: what a layer does to state outside of itself, counted."""

import collections
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

from roundpipe_jax import (
    MismatchError,
    doing_recompute,
    keep,
    record,
    remat,
    remat_layers,
    replay,
    save_for_recompute,
    update_once,
)
from tests.on_jax.oracle import LANES, WAYS, same

X = jnp.array([0.3, -1.2, 0.7])


class Seen:
    """Counts what a layer tells it, from inside of a program."""

    def __init__(self) -> None:
        self.values: list[int] = []

    def tell(self, value: Any) -> None:
        self.values.append(int(value))

    def layer(self, x: Any) -> Any:
        (best,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x)))
        update_once(jax.debug.callback, self.tell, best)
        return jnp.sin(x) * x[best]

    def bare(self, x: Any) -> Any:
        return jnp.sin(x) * x[2]

    def after(self, step: Any) -> list[int]:
        jax.block_until_ready(step(X))
        jax.effects_barrier()
        return self.values


def slope(f: Any) -> Any:
    return jax.grad(lambda x: f(x).sum())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lane", LANES)
def test_a_callback_is_made_once(lane: Any, way: str) -> None:
    for wrap in (lambda f: remat(f, mode=lane), lambda f: remat(lambda x: remat(f)(x), mode=lane)):
        seen = Seen()
        assert seen.after(WAYS[way](slope(wrap(seen.layer)))) == [2]


def test_in_a_scan_of_layers_it_is_made_once_each() -> None:
    seen = Seen()
    stack = lambda x: jax.lax.scan(lambda x, _: (remat(seen.layer)(x), None), x, None, length=3)[0]  # noqa: E731
    assert len(seen.after(jax.jit(slope(stack)))) == 3


def test_a_callback_in_what_is_kept_is_made_once() -> None:
    seen = Seen()
    assert seen.after(jax.jit(slope(remat(lambda x: keep(seen.layer, x))))) == [2]


def stack(f: Any) -> Any:
    return lambda x: remat_layers(lambda _, x: f(x), jnp.zeros(1), x)


FORMS: dict[str, Any] = {
    "layer": lambda f: remat(f, label="layer"),
    "custom_vjp": lambda f: remat(f, label="layer", mode="custom_vjp"),
    "layer in a layer": lambda f: remat(lambda x: remat(f)(x)),
    "stack": stack,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_replay_makes_it_once(form: str) -> None:
    seen = Seen()
    f = FORMS[form](seen.layer)
    with record() as tape:
        f(X)

    def replayed(tape: Any, x: Any) -> Any:
        with replay(tape):
            return slope(f)(x)

    for way in WAYS.values():
        jax.effects_barrier()
        seen.values.clear()
        assert seen.after(functools.partial(way(replayed), tape)) == [2]
        same(way(replayed)(tape, X), slope(seen.bare)(X))


def scanned(x: Any) -> Any:
    def body(x: Any, _: Any) -> Any:
        (best,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x)))
        return jnp.sin(x) * x[best], None

    return jax.lax.scan(body, x, None, length=2)[0]


def asking(x: Any) -> Any:
    (best,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x)))
    return jax.jit(lambda x: jnp.cos(x) * (1 + 0 * doing_recompute()))(x) * x[best]


@pytest.mark.parametrize("rest", [scanned, asking, lambda x: jax.jit(lambda x: x * save_for_recompute(3)[0])(x)])
def test_what_python_does_is_done_once_though_the_layer_starts_over(rest: Any) -> None:
    seen: list[int] = []

    def layer(x: Any) -> Any:
        update_once(seen.append, 1)
        return rest(x)

    def replayed(f: Any, tape: Any) -> Any:
        with replay(tape):
            return f(X)

    with record() as tape:
        remat(layer)(X)
    steps: dict[str, Any] = {
        "recorded": lambda: None,
        "replayed": lambda: replayed(remat(layer), tape),
        "replayed again": lambda: replayed(slope(remat(layer)), tape),
        "forward": lambda: remat(layer)(X),
        "gradient": lambda: slope(remat(layer))(X),
    }
    made = {}
    for name, step in steps.items():
        step()
        made[name] = len(seen)
        seen.clear()
    assert made == dict.fromkeys(steps, 1)


L = 4
WEIGHTS = jnp.linspace(0.5, 1.5, L)


class Callbacks:
    """Counts, by kind, the callbacks of a layer."""

    def __init__(self, saves: bool) -> None:
        self.saves = saves
        self.made: collections.Counter[str] = collections.Counter()

    def layer(self, w: Any, x: Any) -> Any:
        best = jnp.argmax(jax.lax.stop_gradient(x * w))
        if self.saves:
            (best,) = save_for_recompute(best)
        update_once(jax.debug.callback, lambda _: self.made.update(["debug"]), best)
        update_once(jax.debug.callback, lambda _: self.made.update(["ordered"]), best, ordered=True)
        update_once(jax.jit(lambda v: io_callback(lambda _: self.made.update(["io"]), None, v)), best)
        update_once(jax.debug.callback, lambda: self.made.update(["of no value"]))
        return jnp.sin(x * w) * x[best]

    def after(self, step: Any, *args: Any) -> tuple[dict[str, int], Any]:
        jax.effects_barrier()
        self.made.clear()
        result = jax.block_until_ready(step(*args))
        jax.effects_barrier()
        return dict(self.made), result


EACH = dict.fromkeys(("debug", "ordered", "io", "of no value"), L)

STACKS: dict[str, Any] = {
    "loop": lambda f: lambda w, x: functools.reduce(lambda x, n: remat(f)(w[n], x), range(L), x),
    "verified": lambda f: lambda w, x: functools.reduce(lambda x, n: remat(f, verify="raise")(w[n], x), range(L), x),
    "nested": lambda f: lambda w, x: remat_layers(f, w, x, nested=2),
    "scan in a layer": lambda f: remat(lambda w, x: jax.lax.scan(lambda x, w: (remat(f)(w, x), None), x, w)[0]),
    "stack in a layer": lambda f: remat(lambda w, x: remat_layers(f, w, x)),
}


def unwrapped(f: Any, w: Any, x: Any) -> Any:
    return functools.reduce(lambda x, n: f(w[n], x), range(L), x)


@pytest.mark.parametrize(
    ("form", "tape", "saves", "way"),
    [
        *((form, "no tape", True, "jit") for form in STACKS),
        *(("nested", tape, True, "jit") for tape in ("record", "replay")),
        *(("nested", tape, True, "eager") for tape in ("no tape", "record", "replay")),
        ("scan in a layer", "record", True, "jit"),
        ("scan in a layer", "replay", True, "jit"),
        ("loop", "no tape", False, "jit"),
        ("nested", "record", False, "jit"),
    ],
)
def test_each_layer_of_a_stack_makes_it_once(form: str, tape: str, saves: bool, way: str) -> None:
    layer = Callbacks(saves)
    stack = STACKS[form](layer.layer)
    slopes = jax.grad(lambda w, x: stack(w, x).sum())

    def recording(w: Any, x: Any) -> Any:
        with record() as tape:
            found = slopes(w, x)
        return found, tape

    def replaying(w: Any, x: Any, tape: Any) -> Any:
        with replay(tape):
            return slopes(w, x), None

    step = {"no tape": lambda w, x: (slopes(w, x), None), "record": recording, "replay": replaying}[tape]
    arguments: list[Any] = [WEIGHTS, X]
    if tape == "replay":
        with record() as recorded:
            stack(WEIGHTS, X)
        arguments.append(recorded)
    made, (found, _) = layer.after(WAYS[way](step), *arguments)
    assert made == EACH
    same(found, jax.jit(jax.grad(lambda w: unwrapped(bare_layer, w, X).sum()))(WEIGHTS))


def bare_layer(w: Any, x: Any) -> Any:
    return jnp.sin(x * w) * x[jnp.argmax(jax.lax.stop_gradient(x * w))]


def test_under_vmap_each_example_makes_it_once() -> None:
    layer = Callbacks(saves=True)
    layer.layer = functools.partial(_of_each, layer)  # type: ignore[method-assign]
    stack = STACKS["nested"](layer.layer)
    step = jax.jit(jax.vmap(jax.grad(lambda x: stack(WEIGHTS, x).sum())))
    assert layer.after(step, jnp.stack([X, 2 * X, 3 * X]))[0] == {"debug": 3 * L, "io": 3 * L}


def _of_each(layer: Callbacks, w: Any, x: Any) -> Any:
    (best,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x * w)))
    update_once(jax.debug.callback, lambda _: layer.made.update(["debug"]), best)
    update_once(io_callback, lambda _: layer.made.update(["io"]), None, best)
    return jnp.sin(x * w) * x[best]


def _given(layer: Callbacks, best: Any, w: Any, x: Any) -> Any:
    jax.debug.callback(lambda _: layer.made.update(["debug"]), best)
    jax.jit(lambda v: io_callback(lambda _: layer.made.update(["io"]), None, v))(best)
    return jnp.sin(x * w) * x[best]


@pytest.mark.parametrize("axis", [0, None])
def test_under_vmap_a_replay_makes_what_the_layer_with_the_decisions_makes(axis: int | None) -> None:
    """One for each example that has a tape of its own. A decision that all examples share is told once, as JAX does."""
    layer = Callbacks(saves=True)
    f = remat(functools.partial(_of_each, layer))
    examples = jnp.stack([X, 2 * X, 3 * X])

    def recorded(x: Any) -> Any:
        with record() as tape:
            f(1.0, x)
        return tape

    def replayed(tape: Any, x: Any) -> Any:
        with replay(tape):
            return jax.grad(lambda x: f(1.0, x).sum())(x)

    tape = jax.vmap(recorded)(examples) if axis == 0 else recorded(X)
    decisions = jnp.full(3, 2) if axis == 0 else jnp.int32(2)
    given = jax.vmap(jax.grad(lambda x, best: _given(layer, best, 1.0, x).sum()), (0, axis))
    expected = layer.after(jax.jit(given), examples, decisions)
    for way in WAYS.values():
        made, slopes = layer.after(way(jax.vmap(replayed, (axis, 0))), tape, examples)
        assert made == expected[0]
        same(slopes, expected[1])


def test_in_a_branch_it_is_made_where_the_branch_is_taken() -> None:
    seen = Seen()

    def layer(w: Any, x: Any) -> Any:
        return jax.lax.cond(w > 0.9, seen.layer, jnp.sin, x)

    for way in WAYS.values():
        jax.effects_barrier()
        seen.values.clear()
        stacked = lambda x: remat_layers(layer, WEIGHTS, x, nested=2)  # noqa: E731
        assert len(seen.after(way(slope(stacked)))) == 2


def ordered(seen: Seen, x: Any) -> None:
    update_once(io_callback, seen.tell, None, jnp.argmax(x), ordered=True)


def test_what_a_recompute_would_make_again_is_an_error() -> None:
    seen = Seen()

    def layer(x: Any) -> Any:
        (best,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x)))
        ordered(seen, jax.lax.stop_gradient(x))
        return jnp.sin(x) * x[best]

    scanned = remat(lambda x: jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=3)[0], label="stack")
    for way in WAYS.values():
        with pytest.raises(MismatchError, match="an update_once that the recompute too would make") as caught:
            way(slope(scanned))(X)
    assert "layer 'stack'" in str(caught.value)
    assert re.search(r"layer at: .*once\.py:\d+\n", str(caught.value))
    assert re.search(r"\n  update_once\(.*callback.*: .*once\.py:\d+", str(caught.value))
    assert "wrap the function in there in remat" in str(caught.value)
    grouped = lambda x: remat_layers(lambda _, x: layer(x), WEIGHTS, x, nested=2, label="groups")  # noqa: E731
    with pytest.raises(MismatchError, match=r"recompute too would make") as caught, record():
        grouped(X)
    assert re.search(r"layer 'groups'.*\n  called at: .*once\.py:\d+\n", str(caught.value))
    assert seen.values == []


def test_a_layer_that_saves_nothing_makes_an_ordered_one_once() -> None:
    seen = Seen()

    def layer(x: Any) -> Any:
        ordered(seen, jax.lax.stop_gradient(x))
        return jnp.sin(x) * x[2]

    assert seen.after(jax.jit(slope(remat(layer)))) == [2]


def test_in_a_while_loop_it_is_made_once_an_iteration() -> None:
    seen = Seen()

    def again(state: Any) -> Any:
        update_once(jax.debug.callback, seen.tell, state)
        return state + 1

    def layer(x: Any) -> Any:
        count = jax.lax.while_loop(lambda n: n < 2, again, jnp.argmax(jax.lax.stop_gradient(x)) * 0)
        return jnp.sin(jnp.exp(x)) * count

    for way in WAYS.values():
        jax.effects_barrier()
        seen.values.clear()
        assert sorted(seen.after(way(slope(remat(layer))))) == [0, 1]


def test_a_reference_is_written_once() -> None:
    def counted(x: Any) -> Any:
        count = jax.new_ref(jnp.int32(0))

        def layer(x: Any) -> Any:
            update_once(lambda: count.__setitem__(..., count[...] + 1))
            return jnp.sin(x) * x[2]

        return slope(remat(layer))(x), count[...]

    assert [int(way(counted)(X)[1]) for way in WAYS.values()] == [1, 1]


SCALE = jax.new_ref(jnp.ones(3))


def scaled(x: Any) -> Any:
    # no closure: its traces may be kept
    (best,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x)))
    return jnp.sin(x * SCALE[...]) * x[best]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lane", LANES)
def test_a_reference_is_read_as_the_forward_read_it(lane: Any, way: str) -> None:
    def steps(f: Any) -> Any:
        def step(x: Any) -> Any:
            y, pull = jax.vjp(f, x)
            before = SCALE[...]
            SCALE[...] = before + 1  # by a later layer, say
            return y, pull(y)

        return step

    got = []
    for f in (scaled, remat(scaled, mode=lane), remat(scaled, mode=lane, verify="raise")):
        SCALE[...] = jnp.ones(3)
        run = WAYS[way](steps(f))
        got.append([run(X), run(X), SCALE[...]])
    same(got[1:], [got[0]] * 2)


def by_argument(scale: Any, x: Any) -> Any:
    (best,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x)))
    return jnp.sin(x * scale[...]) * x[best]


def without_a_save(scale: Any, x: Any) -> Any:
    return jnp.sin(x * scale[...])


def in_a_scan(scale: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, _: (by_argument(scale, x), None), x, None, length=2)[0]


def in_layers(f: Any) -> Any:
    return remat(lambda *args: remat(f)(*args))


def closing(f: Any) -> Any:
    return lambda scale, x: remat(lambda x: f(scale, x))(x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", [by_argument, without_a_save, in_a_scan])
def test_a_reference_that_a_step_makes_is_read_as_the_forward_read_it(layer: Any, way: str) -> None:
    def step(f: Any, x: Any) -> Any:
        scale = jax.new_ref(x / 2)  # what it holds has a derivative
        y = f(scale, x).sum()
        scale[...] = 5 * x
        return y * scale[...].sum()

    residual = [] if layer is in_a_scan else [functools.partial(remat, mode="custom_vjp")]
    got = [
        WAYS[way](jax.value_and_grad(functools.partial(step, wrap(layer))))(X)
        for wrap in (lambda f: f, remat, in_layers, closing, *residual)
    ]
    same(got[1:], [got[0]] * (len(got) - 1))


@pytest.mark.parametrize("way", WAYS)
def test_a_reference_among_the_arguments_is_written_to_once(way: str) -> None:
    def layer(count: Any, x: Any) -> Any:
        def write() -> None:
            count[...] += 1

        update_once(write)
        return without_a_save(count, x)

    def step(x: Any) -> Any:
        count = jax.new_ref(jnp.int32(1))
        slopes = jax.grad(lambda x: remat(layer)(count, x).sum())(x)
        return slopes, count[...]

    slopes, count = WAYS[way](step)(X)
    assert count == 2
    same(slopes, 2 * jnp.cos(2 * X))

    def written(count: Any, x: Any) -> Any:
        count[...] += 1
        return in_a_scan(count, x)

    with pytest.raises(MismatchError, match="would write to a jax\\.Ref again") as caught:
        WAYS[way](lambda x: remat(written)(jax.new_ref(x), x))(X)
    assert "return the state as a result" in str(caught.value)


@jax.custom_vjp
def squared(x: Any) -> Any:
    return x**2


squared.defvjp(lambda x: (x**2, x), lambda x, slope: (2 * x * slope,))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lane", LANES)
def test_a_reference_that_both_phases_would_write_to(lane: Any, way: str) -> None:
    count = jax.new_ref(jnp.int32(0))

    def layer(x: Any, scale: Any) -> Any:
        (best,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x)))
        count[...] += 1
        return jnp.sin(squared(x)) * x[best] * scale

    wrapped = remat(layer, mode=lane, label="counted")
    same(WAYS[way](wrapped)(X, X), layer(X, X))  # without a derivative there is no recompute
    assert count[...] == 2
    with pytest.raises(MismatchError, match="would write to a jax\\.Ref again") as caught:
        WAYS[way](slope(lambda x: wrapped(x, X)))(X)
    assert f"written at: {__file__}:{layer.__code__.co_firstlineno + 2}" in str(caught.value)


def test_other_callbacks_are_left_alone() -> None:
    def scanned(x: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            (best,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x)))
            jax.debug.callback(lambda _: None, best)
            return jnp.sin(x) * x[best], None

        return jax.lax.scan(body, x, None, length=2)[0]

    jax.jit(slope(remat(scanned)))(X)
