"""record and replay in JAX (R13). The oracle is the layer without remat, given the recorded decisions."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from roundpipe_jax import (
    GradientError,
    MismatchError,
    OptionError,
    Tape,
    TapeError,
    doing_recompute,
    explain,
    get_recompute_data,
    layer_scope,
    recompute_once,
    record,
    remat,
    remat_layers,
    replay,
    save_for_recompute,
)

T, D, E, K, L = 6, 3, 4, 2, 3
STYLES = ("seed", "returned", "once")
WAYS: dict[str, Callable[[Any], Any]] = {"eager": lambda f: f, "jit": jax.jit}


def route(logits_TE: Any) -> Any:
    return jax.lax.top_k(jax.lax.stop_gradient(logits_TE), K)[1]


def chosen(style: str, logits_TE: Any) -> Any:
    if style == "once":
        return recompute_once(route, logits_TE)
    if style == "returned":
        return save_for_recompute(route(logits_TE))[0]
    if doing_recompute():
        return get_recompute_data()[0]
    return save_for_recompute(route(logits_TE))[0]


def moe(params: Any, x_TD: Any, idx_TK: Any = None, style: str = "seed") -> Any:
    logits_TE = x_TD @ params["gate"]
    if idx_TK is None:
        idx_TK = chosen(style, logits_TE)
    weights_TK = jnp.take_along_axis(jax.nn.softmax(logits_TE), idx_TK, 1)
    return x_TD + (jnp.einsum("td,tkdf->tkf", x_TD, params["experts"][idx_TK]) * weights_TK[..., None]).sum(1)


def weights(seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    normal = [(rng.normal(size=(D, E)), rng.normal(size=(E, D, D)) / D) for _ in range(L)]
    return [{"gate": jnp.array(gate, jnp.float32), "experts": jnp.array(w, jnp.float32)} for gate, w in normal]


X = jnp.array(np.random.default_rng(9).normal(size=(T, D)), jnp.float32)
PARAMS, MOVED = weights(), weights(1)  # with the second, the gate routes otherwise


def loop(style: str = "seed", **options: Any) -> Any:
    layer = remat(moe, **options)

    def model(params: Any, x: Any) -> Any:
        for layer_params in params:
            x = layer(layer_params, x, style=style)
        return jnp.sin(x).sum()

    return model


def stacked(**options: Any) -> Any:
    def model(params: Any, x: Any) -> Any:
        params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
        return jnp.sin(remat_layers(moe, params, x, **options)).sum()

    return model


def recording(model: Any) -> Any:
    def run(params: Any, x: Any) -> Any:
        with record() as tape:
            value = model(params, x)
        return value, tape

    return run


def replaying(model: Any) -> Any:
    def run(params: Any, x: Any, tape: Tape) -> Any:
        with replay(tape):
            return model(params, x)

    return run


def taped(model: Any, *args: Any) -> Tape:
    with record() as tape:
        model(*args)
    return tape


def routings(tape: Tape) -> list[Any]:
    return [entry.value for entry in tape.entries()]


def oracle(params: Any, x: Any, idx_LTK: Any) -> Any:
    for layer_params, idx_TK in zip(params, idx_LTK, strict=True):
        x = moe(layer_params, x, idx_TK)
    return jnp.sin(x).sum()


def equal(got: Any, want: Any) -> bool:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return all(np.array_equal(one, two) for one, two in pairs)


def close(got: Any, want: Any) -> None:
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def tape() -> Tape:
    return taped(loop(), PARAMS, X)


# ------------------------------------------------------------------------------------------------ both ways


@pytest.mark.parametrize("style", STYLES)
def test_gradient_is_that_of_the_recorded_routing(style: str) -> None:
    model = loop(style)
    tape = taped(model, PARAMS, X)
    assert [(entry.layer, entry.order, entry.shape, entry.dtype) for entry in tape.entries()] == [
        ("moe", n, (T, K), "int32") for n in range(L)
    ]
    want = jax.jit(jax.grad(oracle))(MOVED, X, routings(tape))
    assert equal(jax.jit(jax.grad(replaying(model)))(MOVED, X, tape), want)
    with replay(tape):  # around the gradient, in eager mode
        close(jax.grad(model)(MOVED, X), want)
    if style == "seed":
        close(jax.grad(replaying(model))(MOVED, X, tape), want)
        assert not equal(jax.jit(jax.grad(model))(MOVED, X), want)


@pytest.mark.parametrize(
    "model",
    [
        loop(mode="custom_vjp"),
        stacked(),
        stacked(nested=L),
        stacked(unroll=2, mode="custom_vjp"),
        remat(loop(), label="whole"),
        remat(stacked(), label="whole"),
    ],
    ids=["custom_vjp", "stack", "nested stack", "custom_vjp stack", "nested", "stack in a region"],
)
def test_every_form_records_and_replays_the_same(model: Any, tape: Tape) -> None:
    def fields(tape: Tape) -> Any:
        return [(entry.layer.removeprefix("whole/"), entry.shape) for entry in tape.entries()]

    eager = taped(model, PARAMS, X)
    (_, aux), slope = jax.jit(jax.value_and_grad(recording(model), has_aux=True))(PARAMS, X)
    for other in (eager, aux):
        assert fields(other) == fields(tape)
        assert equal(routings(other), routings(tape))
    assert jax.tree.structure(aux) == jax.tree.structure(eager)
    close(slope, jax.grad(oracle)(PARAMS, X, routings(tape)))
    want = jax.grad(oracle)(MOVED, X, routings(tape))
    close(jax.jit(jax.grad(replaying(model)))(MOVED, X, eager), want)


def test_a_loop_replays_what_a_stack_recorded_and_the_other_way(tape: Tape) -> None:
    other = taped(stacked(), PARAMS, X)
    want = jax.grad(oracle)(MOVED, X, routings(tape))
    close(jax.jit(jax.grad(replaying(loop())))(MOVED, X, other), want)
    close(jax.jit(jax.grad(replaying(stacked())))(MOVED, X, tape), want)


def test_a_stack_on_a_tape_returns_what_it_returns_without(tape: Tape) -> None:
    def layer(params: Any, x: Any) -> Any:
        return moe(params, x), x.sum()

    def model(params: Any, x: Any) -> Any:
        params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
        return remat_layers(layer, params, x, nested=L, has_aux=True)

    want = model(PARAMS, X)
    got, other = jax.jit(recording(model))(PARAMS, X)
    close(got, want)
    close(jax.jit(replaying(model))(PARAMS, X, other), want)

    none = jax.tree.map(lambda leaf: jnp.zeros((0, *leaf.shape), leaf.dtype), PARAMS[0])
    empty = taped(lambda p, x: remat_layers(moe, p, x), none, X)
    assert not empty.entries()
    assert equal(replaying(lambda p, x: remat_layers(moe, p, x))(none, X, empty), X)


def test_gradients_on_or_off_the_tape_is_the_same(tape: Tape) -> None:
    with record() as grad:
        jax.value_and_grad(loop())(PARAMS, X)
    with record() as tangent:
        jax.jvp(lambda x: loop()(PARAMS, x), (X,), (X,))
    for other in (grad, tangent):
        assert equal(routings(other), routings(tape))
        assert all(type(value) is type(X) for value in routings(other))  # and no tracer


def test_host_decisions_are_made_once_when_recorded_and_never_when_replayed() -> None:
    calls: list[int] = []

    def host(_: Any) -> Any:
        calls.append(1)
        return np.int32(len(calls))

    def layer(x: Any) -> Any:
        if doing_recompute():
            (n,) = get_recompute_data()
        else:
            n = jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.int32), jax.lax.stop_gradient(x))
            save_for_recompute(n)
        return jnp.sin(x) * n

    def scanned(x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=3)[0]

    for program, count in ((remat(layer), 1), (remat(scanned), 3)):
        for way in WAYS.values():
            calls.clear()
            (_, tape), _ = jax.block_until_ready(
                way(jax.value_and_grad(lambda x, f=program: recording(lambda _, x: f(x))(0, x), has_aux=True))(1.0)
            )
            assert len(calls) == count
            calls.clear()
            jax.block_until_ready(
                way(jax.grad(lambda x, t, f=program: replaying(lambda _, x: f(x))(0, x, t)))(1.0, tape)
            )
            assert not calls


def test_shared_layers_and_layers_inside_layers() -> None:
    inner = remat(moe, label="inner")

    def outer(params: Any, x: Any) -> Any:
        (shift,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x)).astype(jnp.float32))
        with layer_scope("twice"):
            return inner(params, inner(params, x)) + shift

    def model(params: Any, x: Any) -> Any:
        return jnp.sin(remat(outer, label="outer")(params[0], x)).sum()

    tape = taped(model, PARAMS, X)
    assert [(entry.layer, entry.dtype) for entry in tape.entries()] == [
        ("outer", "float32"),
        ("outer/twice/inner", "int32"),
        ("outer/twice/inner", "int32"),
    ]
    shift, one, two = routings(tape)

    def given(params: Any, x: Any) -> Any:
        return jnp.sin(moe(params[0], moe(params[0], x, one), two) + shift).sum()

    want = jax.grad(given)(MOVED, X)
    for way in WAYS.values():
        close(way(jax.grad(replaying(model)))(MOVED, X, tape), want)


def test_python_decisions_are_part_of_the_structure() -> None:
    traces: list[Any] = []

    @remat
    def layer(x: Any) -> Any:
        if doing_recompute():
            flag, times, name = get_recompute_data()
        else:
            flag, times, name = bool(x.sum() > 0), int(x.argmax()) + 1, "sin" if x[0] > 0 else "cos"
            save_for_recompute(flag, times, name)
        return times * getattr(jnp, name)(x) if flag else x**2

    @jax.jit
    def step(x: Any, tape: Tape) -> Any:
        traces.append(tape)
        with replay(tape):
            return layer(x)

    up, down = taped(layer, jnp.array([1.0, 3.0])), taped(layer, jnp.array([-1.0, -3.0]))
    x = jnp.array([0.5, 0.25])
    for _ in range(2):
        np.testing.assert_allclose(step(x, up), 2 * jnp.sin(x), rtol=1e-6)
        np.testing.assert_allclose(step(x, down), x**2, rtol=1e-6)
    assert len(traces) == 2  # one for each branch
    assert up.entries()[0].value is True
    assert jax.tree.structure(up) != jax.tree.structure(down)


def test_saved_outside_of_layers() -> None:
    def model(x: Any) -> Any:
        (order,) = save_for_recompute(jnp.argsort(jax.lax.stop_gradient(x)))
        (again,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x)))
        best = recompute_once(lambda x: x.max(), x)
        return jnp.sin(x[order]).sum() * best + again

    x, moved = jnp.array([3.0, 1.0, 2.0]), jnp.array([1.0, 2.0, 3.0])
    tape = taped(jax.grad(model), x)  # traced by grad, and no tracer stays
    _, jitted = jax.jit(lambda x: recording(lambda _, x: model(x))(0, x))(x)
    assert [np.asarray(value).tolist() for value in routings(tape)] == [[1, 2, 0], 0, 3.0]
    assert equal(routings(jitted), routings(tape))

    def given(x: Any) -> Any:
        return jnp.sin(x[jnp.array([1, 2, 0])]).sum() * 3.0 + 0

    for way in WAYS.values():
        close(
            way(jax.value_and_grad(lambda x, t: replaying(lambda _, x: model(x))(0, x, t)))(moved, tape),
            jax.value_and_grad(given)(moved),
        )


def test_inside_a_vmapped_function_and_a_scanned_one() -> None:
    xs = jnp.stack([X, X[::-1], X + 1])
    _, tapes = jax.vmap(recording(loop()), (None, 0))(PARAMS, xs)
    assert [entry.shape for entry in tapes.entries()] == [(3, T, K)] * L
    got = jax.vmap(jax.grad(replaying(loop())), (None, 0, 0))(MOVED, xs, tapes)
    for n, x in enumerate(xs):
        one = jax.tree.map(lambda leaf, n=n: leaf[n], tapes)
        assert equal(routings(one), routings(taped(loop(), PARAMS, x)))
        close(jax.tree.map(lambda leaf, n=n: leaf[n], got), jax.grad(oracle)(MOVED, x, routings(one)))
    _, (_, scanned) = jax.lax.scan(lambda _, x: (None, recording(loop())(PARAMS, x)), None, xs)
    assert equal(routings(scanned), routings(tapes))


# --------------------------------------------------------------------------------- where it would be silent


def jitted_model() -> Any:
    return jax.jit(loop())


@pytest.mark.parametrize(
    "around",
    [
        jax.jit,
        lambda f: lambda p, x: jax.vmap(f, (None, 0))(p, x[None]),
        lambda f: lambda p, x: jax.lax.scan(lambda c, _: (f(p, x), None), 0.0, None, length=2)[0],
        lambda f: lambda p, x: jax.lax.cond(True, f, f, p, x),
        lambda f: jax.checkpoint(f),
        lambda f: jax.jit(jax.grad(f)),
    ],
    ids=["jit", "vmap", "scan", "cond", "checkpoint", "jit of grad"],
)
def test_a_trace_inside_the_block_is_refused_each_time(around: Any, tape: Tape) -> None:
    model = around(loop())
    before = model(PARAMS, X)  # JAX keeps its trace
    for _ in range(2):
        with (
            pytest.raises(TapeError, match=r"layer 'moe \(.*\)' runs inside .* record\(\) was begun outside of it"),
            record(),
        ):
            model(PARAMS, X)
        with pytest.raises(TapeError, match="pass the tape to that function as an argument"), replay(tape):
            model(PARAMS, X)
    assert equal(model(PARAMS, X), before)


def test_a_save_outside_of_layers_in_a_trace_inside_the_block_is_refused() -> None:
    @jax.jit
    def decide(x: Any) -> Any:
        return save_for_recompute(jnp.argsort(x))[0]

    @jax.jit
    def once(x: Any) -> Any:
        return recompute_once(jnp.argsort, x)

    for function in (decide, once):
        function(X)
        with pytest.raises(TapeError, match="begin record\\(\\) inside that function and return the tape"), record():
            function(X)
    with record() as tape:  # a decision may do so
        recompute_once(decide, X)
    assert len(tape.entries()) == 1
    with pytest.raises(TapeError, match="record"), record():
        decide(X)


def test_a_tape_from_outside_is_no_constant_of_a_jitted_function(tape: Tape) -> None:
    def step(params: Any, x: Any) -> Any:
        with replay(tape):
            return loop()(params, x)

    with pytest.raises(TapeError, match="pass the tape to the function as an argument"):
        jax.jit(step)(PARAMS, X)
    step(PARAMS, X)
    jax.grad(step)(PARAMS, X)


def test_functions_traced_in_a_block_do_not_keep_what_they_learned(tape: Tape) -> None:
    asked = jax.jit(lambda x: x + doing_recompute())
    before = int(asked(1))
    with replay(tape):
        inside = int(asked(1))
        loop()(PARAMS, X)
    assert (before, inside, int(asked(1))) == (1, 2, 1)


def test_a_block_left_by_an_error_is_over(tape: Tape) -> None:
    traces: list[int] = []
    counted = jax.jit(lambda x: traces.append(1) or x)
    counted(1.0)
    for block in (record(), replay(tape)):
        with pytest.raises(KeyError), block:
            raise KeyError
    counted(1.0)
    assert len(traces) == 1
    assert not doing_recompute()


def test_a_float_that_carries_a_tangent_does_not_go_to_a_tape() -> None:  # R5
    def model(x: Any) -> Any:
        (scale,) = save_for_recompute(x.max())
        return (x * scale).sum()

    for function in (jax.grad(model), jax.jit(jax.grad(model))):
        with pytest.raises(GradientError, match=r"outside of layers.*depends on a value that is being differentiated"):
            jax.grad(lambda x: recording(lambda _, x: model(x))(0, x)[0])(X)
        with pytest.raises((GradientError, TapeError)), record():
            function(X)


# ----------------------------------------------------------------------------------------------- strictness


def changed(tape: Tape, change: Callable[[Any], Any]) -> Tape:
    return jax.tree.map(change, tape)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("model", [loop("returned"), stacked()], ids=["loop", "stack"])
def test_a_tape_that_does_not_fit(way: Any, model: Any, tape: Tape) -> None:
    run = way(jax.grad(replaying(model)))
    with pytest.raises(TapeError, match="no decisions left for layer"):
        run([*PARAMS, PARAMS[0]], X, tape)
    with pytest.raises(TapeError, match="holds more than the model asked for: 1 left over"):
        run(PARAMS[:-1], X, tape)
    with pytest.raises(TapeError, match=f"{T} rows, as an input had; now inputs have"):
        run(PARAMS, X[:-1], tape)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_another_shape_kind_or_structure_than_the_layer_decides(way: Any, tape: Tape) -> None:
    run = way(jax.grad(replaying(loop("returned"))))
    with pytest.raises(
        TapeError, match=r"layer 'moe', the unnamed slot, item \[0\]: shape \[6, 1\], where .* \[6, 2\]"
    ):
        run(PARAMS, X, changed(tape, lambda leaf: leaf[:, :1]))
    with pytest.raises(TapeError, match="float32, where the layer decides int32"):
        run(PARAMS, X, changed(tape, lambda leaf: leaf * 1.0))
    with pytest.raises(TapeError, match="the tape has nothing for layer 'moe'"):
        way(replaying(loop("once")))(PARAMS, X, tape)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_layers_of_a_stack_that_differ(way: Any) -> None:
    def few(params: Any, x: Any, k: int) -> Any:
        return moe(params, x, save_for_recompute(route(x @ params["gate"])[:, :k])[0])

    def uneven(params: Any, x: Any) -> Any:
        for layer_params, k in zip(params, (2, 2, 1), strict=True):
            x = remat(few)(layer_params, x, k)
        return x

    tape = taped(uneven, PARAMS, X)
    with pytest.raises(TapeError, match=r"(?s)other decisions for layer 2 .* than for layer 0.*int32\[6, 1\]"):
        way(replaying(stacked()))(PARAMS, X, tape)


def test_ranges() -> None:
    tape = taped(loop(), PARAMS, X)
    step = jax.jit(jax.grad(lambda p, x, t: replaying(loop())(p, x, t)))
    limited = jax.jit(lambda p, x, t: _limited(p, x, t))
    with pytest.raises(TapeError, match="cannot be seen while this is traced"):
        limited(PARAMS, X, tape)
    bad = changed(tape, lambda leaf: leaf - 1)
    with pytest.raises(TapeError, match="-1 marks what was not routed"):
        bad.declare(below=E)
    with pytest.raises(TapeError, match=r"integers from \d to 3, where 0 to 1"), replay(tape, below=2):
        pass
    assert tape.declare(below=E) is tape
    limited(PARAMS, X, tape)
    step(PARAMS, X, tape)
    worse = changed(tape, lambda leaf: leaf.at[0].set(E))  # declared, and changed since
    with pytest.raises(TapeError, match=f"to {E}, where 0 to {E - 1} are in range"):
        step(PARAMS, X, worse)
    with pytest.raises(TapeError, match="say so where the tape has values"):
        jax.jit(lambda t: t.declare(below=E))(tape)


def _limited(params: Any, x: Any, tape: Tape) -> Any:
    with replay(tape, below=E):
        return loop()(params, x)


def test_a_layer_that_decides_in_a_narrower_type() -> None:
    def layer(x: Any, dtype: Any = jnp.int8) -> Any:
        (index,) = save_for_recompute(jnp.argmax(x).astype(dtype))
        return jnp.sin(x) * x[index]

    with record() as tape:
        remat(layer, static_argnums=1)(X[0], jnp.int32)
    replayed = replaying(lambda _, x: remat(layer)(x))
    np.testing.assert_allclose(replayed(0, X[0], tape), layer(X[0]), rtol=1e-6)
    for value in (128, -200):
        with pytest.raises(TapeError, match=r"layer '.*layer', the unnamed slot: holds values that int8 cannot"):
            replayed(0, X[0], changed(tape, lambda leaf, value=value: leaf + value))
    with pytest.raises(TapeError, match=r"int8, which the layer decides, .* cannot be seen while this is traced"):
        jax.jit(replayed)(0, X[0], tape)
    jax.jit(replayed)(0, X[0], tape.declare(below=D))


@pytest.mark.parametrize("around", [lambda f: f, remat], ids=["alone", "in a region"])
def test_a_stack_that_decides_in_a_narrower_type(around: Any) -> None:
    def layer(dtype: Any, _: Any, x: Any) -> Any:
        (index,) = save_for_recompute(jnp.argmax(x).astype(dtype))
        return jnp.sin(x) * x[index]

    def stack(dtype: Any) -> Any:
        return around(lambda x: remat_layers(functools.partial(layer, dtype), jnp.zeros(2), x, label="one"))

    with record() as tape:
        stack(jnp.int32)(X[0])
    replayed = replaying(lambda _, x: stack(jnp.int8)(x))
    np.testing.assert_allclose(replayed(0, X[0], tape), stack(jnp.int8)(X[0]), rtol=1e-6)
    with pytest.raises(TapeError, match="holds values that int8 cannot"):
        replayed(0, X[0], changed(tape, lambda leaf: leaf + 128))


@pytest.mark.parametrize("values", [[0.1, 0.2, 0.3, 0.7], [2, 0, 1, 3]], ids=["floats", "integers"])
def test_what_numpy_decided_is_adopted_by_a_layer_that_decides_in_jax(values: Any) -> None:
    def layer(make: Any, x: Any) -> Any:
        (scale,) = save_for_recompute(make(values))
        return x[: len(values)] * scale, scale

    x = jnp.arange(4.0)
    with record() as tape:
        remat(functools.partial(layer, np.array), label="one")(x)
    got = replaying(lambda _, x: remat(functools.partial(layer, lambda v: jnp.array(v) * 0), label="one")(x))(
        0, x, tape
    )
    want = layer(jnp.array, x)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    assert (type(got[1]), got[1].dtype) == (type(want[1]), want[1].dtype)


def test_looking_at_a_value_that_is_not_on_the_tape() -> None:
    @remat
    def layer(x: Any) -> Any:
        (order,) = save_for_recompute(jnp.argsort(x))
        return x[order] if x[0] > 0 else x

    tape = taped(layer, jnp.arange(3.0))
    with pytest.raises(MismatchError, match="looks at a value that the forward did not save"), replay(tape):
        layer(jnp.arange(3.0))
    with pytest.raises(OptionError, match="replay takes a Tape, not list"):
        replay([])


# ----------------------------------------------------------------------------------- the rest of the library


def test_verify_and_explain(tape: Tape) -> None:
    model = loop(verify="raise")
    assert equal(routings(taped(jax.grad(model), PARAMS, X)), routings(tape))
    close(jax.grad(replaying(model))(MOVED, X, tape), jax.grad(oracle)(MOVED, X, routings(tape)))
    plain = explain(loop(), PARAMS, X)
    assert plain == explain(lambda p, x: recording(loop())(p, x)[0], PARAMS, X)
    for found in (explain(replaying(loop()), PARAMS, X, tape), explain(replaying(stacked()), PARAMS, X, tape)):
        assert sum(cost.slot for cost in found.layers) == tape.nbytes()
        assert [cost.calls for cost in found.layers] == [L]


def test_threads_keep_apart() -> None:
    tapes: dict[int, Any] = {}
    barrier = threading.Barrier(2)

    def work(n: int) -> None:
        barrier.wait()
        with record() as tape:
            loop()(PARAMS, X + n)
        barrier.wait()
        tapes[n] = tape, replaying(loop())(MOVED, X + n, tape)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    with record() as mine:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not mine.entries()
    for n, (tape, value) in tapes.items():
        assert equal(routings(tape), routings(taped(loop(), PARAMS, X + n)))
        close(value, oracle(MOVED, X + n, routings(tape)))


@pytest.mark.parametrize("way", ["eager", "jit"])
def test_many_steps_leave_nothing_behind_and_trace_nothing_again(way: str) -> None:
    events: list[str] = []
    model = loop()
    recorded = WAYS[way](jax.value_and_grad(recording(model), has_aux=True))
    replayed = WAYS[way](jax.grad(replaying(model)))

    def step(times: int) -> int:
        for _ in range(times):
            (_, tape), _ = recorded(PARAMS, X)
            replayed(PARAMS, X, tape)
        del tape
        gc.collect()
        return len(jax.live_arrays())

    live = step(2)
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    try:
        assert step(200 if way == "jit" else 10) <= live  # other tests' arrays may go
        assert not [name for name in events if "trace" in name or "compile" in name]
        jax.jit(lambda x: x + 1)(1)
        assert [name for name in events if "trace" in name]
    finally:
        jax.monitoring.clear_event_listeners()


@pytest.mark.parametrize("style", ["seed", "once"])
@pytest.mark.parametrize("build", [lambda style: loop(style), lambda style: stacked()], ids=["loop", "stack"])
def test_the_replayed_step_does_not_route(style: str, build: Any, tape: Tape) -> None:
    model = build(style)
    tape = taped(model, PARAMS, X)
    own = jax.jit(jax.grad(oracle)).lower(PARAMS, X, routings(tape)).as_text()
    text = jax.jit(jax.grad(replaying(model))).lower(PARAMS, X, tape).as_text()
    for operation in ("top_k", "stablehlo.sort"):
        assert text.count(operation) == own.count(operation) == 0
    assert "top_k" in jax.jit(jax.grad(model)).lower(PARAMS, X).as_text()


def test_a_key_that_is_decided_outside_of_layers() -> None:
    def decided(seed: int, impl: str | None = None) -> Any:
        (key,) = save_for_recompute(jax.random.key(seed, impl=impl))
        return jax.random.key_data(key)

    with record() as tape:
        want = decided(3)
    with replay(tape):
        assert (decided(4) == want).all()
    with pytest.raises(TapeError, match=r"key<fry>, where the layer decides key<rbg>"), replay(tape):
        decided(3, "rbg")


def test_numpy_and_key_decisions() -> None:
    @remat
    def layer(x: Any, key: Any) -> Any:
        if doing_recompute():
            order, seed = get_recompute_data()
        else:
            order, seed = np.random.default_rng().permutation(3), jax.random.fold_in(key, 7)
            save_for_recompute(order, seed)
        return x[order] * jax.random.uniform(seed, x.shape)

    x, key = jnp.arange(3.0), jax.random.key(0)
    tape = taped(layer, x, key)
    assert isinstance(tape.entries()[0].value, np.ndarray)
    order = tape.entries()[0].value
    want = x[order] * jax.random.uniform(jax.random.fold_in(key, 7), (3,))
    other = jax.random.key(1)
    for run in (lambda x, t: replaying(lambda _, x: layer(x, other))(0, x, t),):
        np.testing.assert_allclose(run(x, tape), want, rtol=1e-6)
        np.testing.assert_allclose(jax.jit(run)(x, tape), want, rtol=1e-6)


def test_numpy_decided_outside_of_layers_is_replayed_in_a_trace() -> None:
    def model(_: Any, x: Any) -> Any:
        (scale,) = save_for_recompute(np.random.default_rng().random(3).astype(np.float32))
        return (x * scale).sum()

    x = jnp.arange(3.0)
    tape = taped(lambda x: model(0, x), x)
    run = replaying(model)
    (entry,) = tape.entries()
    assert run(0, x, tape) == jax.jit(run)(0, x, tape) == (x * entry.value).sum()
    assert jnp.array_equal(jax.jit(jax.grad(run, 1))(jnp.float32(0), x, tape), entry.value)


def test_a_decision_in_numpy_leaves_a_jitted_function() -> None:
    def layer(x: Any) -> Any:
        (row,) = save_for_recompute(np.array([2, 0], np.int32))
        return jnp.sin(x)[row].sum()

    @jax.jit
    def recorded(x: Any) -> Any:
        with record() as tape:
            remat(layer, label="layer")(x)
        return tape

    x = jnp.arange(3.0)
    tape = recorded(x)
    np.testing.assert_array_equal(tape.entries()[0].value, [2, 0])
    want = jax.grad(layer)(x)
    with replay(tape):
        np.testing.assert_allclose(jax.grad(remat(layer, label="layer"))(x), want)
