"""Saves inside a scan, cond, vmap, while or jitted function of a layer, and under other people's checkpoints."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from roundpipe_jax import (
    MismatchError,
    OptionError,
    doing_recompute,
    get_recompute_data,
    keep,
    recompute_once,
    remat,
    remat_layers,
    save_for_recompute,
    save_policy,
)

T, D = 5, 4
W = jax.random.normal(jax.random.key(0), (3, D, D))
X = jax.random.normal(jax.random.key(1), (T, D))


class Draws:
    """Decides on the host, never the same way twice, and keeps a log."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def __call__(self, *_: Any) -> Any:
        self.log.append(np.random.default_rng(len(self.log)).integers(0, D, (T, 1)).astype(np.int32))
        return self.log[-1]

    def traced(self, like: Any) -> Any:
        shape = jax.ShapeDtypeStruct((T, 1), jnp.int32)
        return jax.pure_callback(self, shape, jax.lax.stop_gradient(like), vmap_method="sequential")


def use(x_TD: Any, w_DD: Any, idx_T1: Any) -> Any:
    return jnp.tanh(x_TD @ w_DD) + jnp.take_along_axis(jax.nn.softmax(x_TD @ w_DD), idx_T1, 1)


def by_once(draws: Draws, x: Any, w: Any) -> Any:
    return use(x, w, recompute_once(draws.traced, x))


def by_branch(draws: Draws, x: Any, w: Any) -> Any:
    """The seed's if/else."""
    if doing_recompute():
        (idx,) = get_recompute_data()
    else:
        idx = draws.traced(x)
        save_for_recompute(idx)
    return use(x, w, idx)


def by_own(draws: Draws, x: Any, w: Any) -> Any:
    """Goes on with the value that it gave to the save."""
    idx = draws.traced(x)
    save_for_recompute(idx)
    return use(x, w, idx)


def by_barrier(draws: Draws, x: Any, w: Any) -> Any:
    """Saves behind a point that the compiler moves nothing across, and goes on with what is before it."""
    idx = draws.traced(x)
    behind, w = jax.lax.optimization_barrier((idx, w))
    save_for_recompute(jax.lax.optimization_barrier(behind))
    return use(x, w, idx)


def by_order(draws: Draws, x: Any, w: Any) -> Any:
    """In an order that JAX enforces by such points."""
    overlap: Any = pytest.importorskip("jax.experimental.overlap", reason="since jax 0.11")
    ordered = overlap.program_order(lambda x, w: by_branch(draws, x, w), enforce=True)
    return ordered(x, w)


def by_value(draws: Draws, x: Any, w: Any) -> Any:
    """One line for both phases."""
    (idx,) = save_for_recompute(draws.traced(x))
    return use(x, w, idx)


def in_scan(body: Any, x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda x, w: (body(x, w), None), x, w)[0]


def in_scan_of_scans(body: Any, x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda x, w: (in_scan(body, x, w[None]), None), x, w)[0]


def in_jit(body: Any, x: Any, w: Any) -> Any:
    inner = jax.jit(body)
    for n in range(3):
        x = inner(x, w[n])
    return x


def in_cond(body: Any, x: Any, w: Any) -> Any:
    for n in range(3):
        x = jax.lax.cond(x[0, 0] < 1e9, body, lambda x, w: x, x, w[n])
    return x


def in_custom_checkpoint(body: Any, x: Any, w: Any) -> Any:
    inner = jax.checkpoint(body, policy=save_policy())
    for n in range(3):
        x = inner(x, w[n])
    return x


PLACES = [in_scan, in_scan_of_scans, in_jit, in_cond, in_custom_checkpoint]


@pytest.mark.parametrize(
    ("place", "style", "jit"),
    [(place, style, True) for place in PLACES for style in (by_branch, by_value)]
    + [(in_scan, by_branch, False), (in_jit, by_value, False)]
    + [(place, style, False) for place in (in_scan, in_custom_checkpoint) for style in (by_barrier, by_order)],
)
def test_each_decision_is_made_once_and_kept_in_its_place(place: Any, style: Any, jit: bool) -> None:  # R8
    draws = Draws()
    layer = remat(lambda x, w: place(lambda x, w: style(draws, x, w), x, w))
    gradient = jax.grad(lambda x, w: (layer(x, w) ** 2).sum(), (0, 1))
    got = jax.block_until_ready((jax.jit(gradient) if jit else gradient)(X, W))
    decided = list(draws.log)
    assert len(decided) == 3

    def oracle(x: Any, w: Any) -> Any:
        for n in range(3):
            x = use(x, w[n], decided[n])
        return (x**2).sum()

    for one, two in zip(got, jax.grad(oracle, (0, 1))(X, W), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


def test_saves_under_vmap_of_the_layer_are_kept_per_example() -> None:
    draws = Draws()
    layer = remat(lambda x, w: jax.vmap(lambda x, w: by_branch(draws, x, w))(jnp.stack([x] * 3), w))
    got = jax.block_until_ready(jax.jit(jax.grad(lambda x: (layer(x, W) ** 2).sum()))(X))
    decided = list(draws.log)
    assert len(decided) == 3
    want = jax.grad(lambda x: sum((use(x, W[n], decided[n]) ** 2).sum() for n in range(3)))(X)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_saves_at_home_and_inside_in_one_layer() -> None:
    draws = Draws()

    def layer(x: Any, w: Any) -> Any:
        (first,) = save_for_recompute(draws.traced(x), name="first")
        x = use(x, w[0], first)
        return in_scan(lambda x, w: by_value(draws, x, w), x, w[1:])

    got = jax.block_until_ready(jax.jit(jax.grad(lambda x: (remat(layer)(x, W) ** 2).sum()))(X))
    a, b, c = list(draws.log)
    want = jax.grad(lambda x: (use(use(use(x, W[0], a), W[1], b), W[2], c) ** 2).sum())(X)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_value_saved_inside_but_made_and_used_outside() -> None:
    draws = Draws()

    def layer(x: Any) -> Any:
        idx = draws.traced(x)
        y = jax.jit(lambda x, idx: (save_for_recompute(idx), jnp.tanh(use(x, W[0], idx)))[1])(x, idx)
        return use(jnp.sin(y), W[1], idx)

    got = jax.block_until_ready(jax.jit(jax.grad(lambda x: (remat(layer)(x) ** 2).sum()))(X))
    [idx] = draws.log
    want = jax.grad(lambda x: (use(jnp.sin(jnp.tanh(use(x, W[0], idx))), W[1], idx) ** 2).sum())(X)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_constants_and_inputs_can_be_saved_and_saved_again() -> None:
    def layer(x: Any, ids: Any) -> Any:
        half, ids, key = save_for_recompute(jnp.bfloat16(0.5), ids, jax.random.key(3))
        (again,) = save_for_recompute(ids, name="again")
        noise = jax.random.normal(key, x.shape)
        return (jnp.sin(x) * half.astype(x.dtype) * noise * (ids + again)[:, None]).sum()

    want = jax.grad(layer)(X, jnp.arange(T))
    for f in (layer, jax.jit(layer)):
        np.testing.assert_allclose(jax.jit(jax.grad(remat(f)))(X, jnp.arange(T)), want, rtol=1e-5)


def test_second_derivatives_and_forward_mode_through_tags() -> None:
    def body(x: Any, w: Any) -> Any:
        if doing_recompute():
            (idx,) = get_recompute_data()
        else:
            idx = jnp.argmax(jax.lax.stop_gradient(x @ w), -1)[:, None]
            save_for_recompute(idx)
        return use(x, w, idx)

    def loss(f: Any) -> Any:
        return lambda s: (f(X * s, W) ** 2).sum()

    plain, ours = (lambda x, w: in_scan(body, x, w)), remat(lambda x, w: in_scan(body, x, w))
    for transform in (jax.hessian, lambda f: lambda s: jax.jvp(f, (s,), (s,))):
        one, two = (jax.jit(transform(loss(f)))(1.0) for f in (ours, plain))
        np.testing.assert_allclose(one, two, rtol=1e-4)


def test_while_in_forward_mode() -> None:
    def layer(x: Any) -> Any:
        return jax.lax.fori_loop(0, jnp.int32(2), lambda _, x: x * save_for_recompute(jnp.int32(2))[0], x)

    _, tangent = jax.jvp(remat(layer), (1.0,), (1.0,))
    assert tangent == 4


def test_jitted_functions_in_a_layer_are_traced_per_phase() -> None:  # R1
    seen = []

    @jax.jit
    def inner(x: Any) -> Any:
        seen.append(doing_recompute())
        return jnp.sin(x)

    inner(X)  # cached by JAX before any region
    layer = remat(lambda x: inner(x).sum())
    for _ in range(2):
        jax.jit(jax.grad(lambda x: layer(x)))(X)
    assert seen[0] is False
    assert True in seen


def test_slots_read_inside_a_jitted_function_belong_to_their_call() -> None:  # R9
    @jax.jit
    def inner(x: Any) -> Any:
        return x * (get_recompute_data()[0] if doing_recompute() else 0.0)

    def layer(x: Any, n: Any) -> Any:
        save_for_recompute(n)
        return inner(x) + 0 * x if doing_recompute() else x * n

    f = remat(layer)
    got = jax.jit(jax.grad(lambda x: f(f(x, jnp.float32(3)), jnp.float32(5))))(1.0)
    assert got == 15


def test_a_jitted_function_that_saves_a_number_saves_it_in_every_call() -> None:  # R9
    @jax.jit
    def decide(x: Any) -> Any:
        save_for_recompute(3)
        return x * 3

    f = remat(lambda x: x * get_recompute_data()[0] if doing_recompute() else decide(x))
    assert jax.jit(jax.grad(lambda x: f(f(x))))(1.0) == 9
    assert jax.grad(lambda x: f(f(x)))(1.0) == 9


def with_rule(kind: str, draws: Draws, style: Any) -> Any:
    """A layer by a function with a derivative of its own, which decides in the function and in its rule."""

    def decided(x: Any, w: Any) -> Any:
        return style(draws, x, w)

    if kind == "custom_jvp":
        inner: Any = jax.custom_jvp(decided)
        inner.defjvp(lambda primals, tangents: jax.jvp(decided, primals, tangents))
    else:
        inner = jax.custom_vjp(decided)
        inner.defvjp(lambda x, w: jax.vjp(decided, x, w), lambda pull, slope: pull(slope))
    return lambda x, w: jnp.sin(inner(x, w))


@pytest.mark.parametrize("kind", ["custom_jvp", "custom_vjp"])
@pytest.mark.parametrize("wrap", ["remat", "remat in remat", "stock", "stock of remat"])
def test_a_function_with_its_own_derivative_decides_once(kind: str, wrap: str) -> None:  # R8
    wraps = WRAPS | {"stock": jax.checkpoint, "stock of remat": lambda f: jax.checkpoint(remat(f))}
    for style in (by_value, by_branch):
        for way in (jax.jit, lambda f: f):
            draws = Draws()
            layer = with_rule(kind, draws, style)
            step = way(jax.grad(lambda x, layer=layer: wraps[wrap](layer)(x, W[0]).sum()))
            for _ in range(2):  # the first eager call of a layer may start over
                draws.log.clear()
                got = jax.block_until_ready(step(X))
            [only] = draws.log
            want = jax.grad(lambda x, only=only: jnp.sin(use(x, W[0], only)).sum())(X)
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", [jax.jit, lambda f: f])
def test_a_decision_in_a_rule_that_is_not_used_for_the_gradient_is_made_once(way: Any) -> None:
    """The rule calls its own function, which JAX then runs as a whole, in the recompute too."""
    draws = Draws()

    @jax.custom_vjp
    def routed(x: Any) -> Any:
        idx = draws.traced(x)
        save_for_recompute(idx)
        return jnp.take_along_axis(x, idx, 1)

    routed.defvjp(lambda x: (routed(x), x), lambda x, slope: (slope * jnp.cos(x),))
    got = way(jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(routed(x)) * x)(x).sum()))(X)
    [only] = draws.log
    picked = jnp.take_along_axis(X, only, 1)
    want = (jnp.cos(picked) * X).sum(1, keepdims=True) * jnp.cos(X) + jnp.sin(picked)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["custom_jvp", "custom_vjp"])
def test_the_residual_lane_refuses_saves_in_derivative_rules(kind: str) -> None:
    for style in (by_value, by_branch):
        layer = remat(with_rule(kind, Draws(), style), mode="custom_vjp")
        for way in (jax.jit, lambda f: f):
            with pytest.raises(OptionError, match="cannot keep what is saved inside a scan"):
                way(jax.grad(lambda x, layer=layer: layer(x, W[0]).sum()))(X)


def test_a_layer_that_branches_on_values_and_saves_inside_is_told_what_to_do() -> None:
    def layer(x: Any) -> Any:
        if x.sum() > 1e9:
            return x.sum()
        return in_scan(lambda x, w: x @ w * save_for_recompute(jnp.argmax(x))[0], x, W).sum()

    with pytest.raises(MismatchError, match="saves inside a scan, cond, vmap, while or jitted function, and looks at"):
        jax.grad(remat(layer, label="layer"))(X)


def test_the_residual_lane_refuses_saves_in_inner_traces() -> None:
    layer = remat(lambda x: in_scan(lambda x, w: by_value(Draws(), x, w), x, W).sum(), mode="custom_vjp")
    with pytest.raises(OptionError, match="cannot keep what is saved inside a scan"):
        jax.jit(jax.grad(layer))(X)


# --------------------------------------------------------------------- other people's checkpoints


def test_the_residual_lane_refuses_them_behind_a_number_saved_inside_too() -> None:
    def layer(x: Any) -> Any:
        y = jax.jit(lambda x: x * save_for_recompute(3)[0])(x)
        return jax.jit(lambda x: x * save_for_recompute(jnp.argmax(x[0]), name="best")[0])(y).sum()

    with pytest.raises(OptionError, match="cannot keep what is saved inside"):
        remat(layer, mode="custom_vjp")(X)


POLICIES = {
    "none": None,
    "ours": save_policy(),
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
}
WRAPS: dict[str, Callable[[Any], Any]] = {
    "remat": remat,
    "custom_vjp": lambda f: remat(f, mode="custom_vjp"),
    "remat in remat": lambda f: remat(lambda x, w: remat(f)(x, w)),
    "remat of scan": lambda f: remat(lambda x, w: jax.lax.scan(lambda x, _: (f(x, w), None), x, None, length=1)[0]),
    "stack": lambda f: lambda x, w: remat_layers(lambda w, x: f(x, w), w[None], x),
    "jit": lambda f: jax.jit(remat(f)),
    "nothing": lambda f: f,
}


INSIDE = [("dots", "jit"), ("ours", "jit")]


@pytest.mark.parametrize(
    ("wrap", "style", "policy", "way"),
    [
        *((wrap, "branch", "none", "eager") for wrap in WRAPS),
        *(("nothing", style, policy, way) for style in ("branch", "own") for policy, way in INSIDE),
        *((wrap, "value", "none", "eager") for wrap in ("remat", "stack", "nothing")),
        *((wrap, "once", "none", "eager") for wrap in ("remat", "nothing")),
        *(("remat", "branch", policy, "eager") for policy in ("ours", "nothing", "dots")),
        *(("stack", "branch", policy, "jit") for policy in ("none", "ours")),
    ],
)
def test_someone_elses_checkpoint_decides_once(wrap: str, style: str, policy: str, way: str) -> None:  # R8
    draws = Draws()
    styles: dict[str, Any] = {"branch": by_branch, "value": by_value, "once": by_once, "own": by_own}
    layer = WRAPS[wrap](lambda x, w: styles[style](draws, x, w))

    def block(x: Any) -> Any:
        for n in range(2):
            x = layer(x, W[n]) * x
        return jnp.sin(jnp.exp(x))

    step = jax.grad(lambda x: (jax.checkpoint(block, policy=POLICIES[policy])(x) ** 2).sum())
    got = jax.block_until_ready((jax.jit if way == "jit" else lambda f: f)(step)(X))
    one, two = draws.log

    def bare(x: Any) -> Any:
        y = use(x, W[0], one) * x
        return jnp.sin(jnp.exp(use(y, W[1], two) * y))

    np.testing.assert_allclose(got, jax.grad(lambda x: (bare(x) ** 2).sum())(X), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("wrap", [remat, jax.checkpoint, lambda f: jax.checkpoint(remat(f))])
def test_a_while_loop_decides_once(wrap: Any) -> None:
    draws = Draws()

    def layer(x: Any) -> Any:
        def body(state: Any) -> Any:
            n, before = state
            return n + 1, save_for_recompute(draws.traced(x + before))[0]

        _, idx = jax.lax.while_loop(lambda state: state[0] < 2, body, (0, jnp.zeros((T, 1), jnp.int32)))
        return jnp.exp(use(x, W[0], idx))

    got = jax.grad(lambda x: wrap(layer)(x).sum())(X)
    _, last = draws.log
    want = jax.grad(lambda x: jnp.exp(use(x, W[0], last)).sum())(X)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrap", [remat, jax.checkpoint, lambda f: jax.checkpoint(remat(f))])
def test_a_while_loop_that_carries_a_differentiated_float_decides_once(wrap: Any) -> None:
    draws = Draws()

    def layer(x: Any) -> Any:
        def body(state: Any) -> Any:
            n, y = state
            (idx,) = save_for_recompute(draws.traced(y))
            return n + 1, use(y, W[0], idx)

        _, scale = jax.lax.while_loop(lambda state: state[0] < 2, body, (0, x))
        return jnp.exp(x) * jax.lax.stop_gradient(scale)

    got = jax.grad(lambda x: wrap(layer)(x).sum())(X)
    first, second = draws.log
    want = jax.grad(lambda x: (jnp.exp(x) * jax.lax.stop_gradient(use(use(x, W[0], first), W[0], second))).sum())(X)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", ["scan", "jit", "cond", "checkpoint", "vmap", "grad"])
def test_an_if_and_else_inside_of_someone_elses_checkpoint_decides_once(place: str) -> None:
    draws = Draws()
    inside: dict[str, Callable[[Any, Any], Any]] = {
        "scan": lambda f, x: jax.lax.scan(lambda x, _: (f(x), None), x, None, length=1)[0],
        "jit": lambda f, x: jax.jit(f)(x),
        "cond": lambda f, x: jax.lax.cond(x[0, 0] < 1e9, f, lambda x: x, x),
        "checkpoint": lambda f, x: jax.checkpoint(f)(x),
        "vmap": lambda f, x: jax.vmap(f)(x[None])[0],
        "grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    }

    def block(f: Any, x: Any) -> Any:
        return jnp.sin(jnp.exp(inside[place](f, x)))

    step = jax.grad(lambda x: jax.checkpoint(lambda x: block(lambda x: by_branch(draws, x, W[0]), x))(x).sum())
    got = step(X)
    [only] = draws.log
    want = jax.grad(lambda x: block(lambda x: use(x, W[0], jnp.asarray(only.reshape(T, 1))), x).sum())(X)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def test_a_differentiated_choice_is_made_once_in_someone_elses_checkpoint() -> None:
    """The derivative of `top_k` reads the indices of the operation itself, and not those that the save handed back."""

    def layer(x: Any) -> Any:
        values, idx = jax.lax.top_k(x, 2)
        (idx,) = save_for_recompute(idx)
        return 3 * values.sum() + jnp.take_along_axis(jnp.cos(x), idx, 1).sum()

    for wrap in (jax.checkpoint, lambda f: remat(lambda x: jax.lax.map(f, x[None]).sum())):
        program = jax.jit(jax.grad(wrap(layer))).lower(X).as_text()
        assert program.count("top_k") == 1


FORMS: dict[str, Callable[[Any], Any]] = {
    "narrower": lambda idx: save_for_recompute(idx.astype(jnp.int8)),
    "a part": lambda idx: save_for_recompute(idx[:1]),
    "several": lambda idx: save_for_recompute({"a": idx.T, "sum": idx.sum()}),
    "floats": lambda idx: save_for_recompute(jax.nn.one_hot(idx, D)),
    "in a jit": jax.jit(lambda idx: save_for_recompute(idx.astype(jnp.int8))),
    "in a scan": lambda idx: jax.lax.scan(lambda _, i: (0, save_for_recompute(i > 1)), 0, idx),
}


@pytest.mark.parametrize("form", FORMS)
def test_another_form_of_a_decision_is_saved_in_someone_elses_checkpoint(form: str) -> None:  # R8
    """The layer goes on with the decision as it was made, besides what it saved or instead of it."""
    draws = Draws()

    def layer(x: Any) -> Any:
        idx = draws.traced(x)
        saved = jax.tree.leaves(FORMS[form](idx))
        return jnp.sin(use(x, W[0], idx)) * (1 + 0 * saved[-1].sum())

    value, got = jax.value_and_grad(lambda x: jax.checkpoint(layer)(x).sum())(X)
    [idx] = draws.log
    want = jax.value_and_grad(lambda x: jnp.sin(use(x, W[0], idx)).sum())(X)
    np.testing.assert_allclose(value, want[0], rtol=1e-5)
    np.testing.assert_allclose(got, want[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrap", [jax.checkpoint, lambda f: remat(lambda x: jax.lax.map(f, x[None])[0])])
def test_values_of_a_choice_are_at_the_indices_that_were_saved_inside(wrap: Any) -> None:
    draws = Draws()

    def layer(x: Any) -> Any:
        noise = jax.nn.one_hot(draws.traced(x)[:, 0], D)  # not saved: the recompute chooses otherwise
        values, idx = jax.lax.top_k(x * 0 + noise, 1)
        save_for_recompute(idx)
        return jnp.exp(values) * jnp.take_along_axis(jnp.exp(x), idx, 1)

    got = jax.grad(lambda x: wrap(layer)(x).sum())(X)
    first, second = draws.log
    want = jnp.exp(X) * jax.nn.one_hot(first[:, 0], D) * jnp.exp(first == second)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_decision_of_constants_is_made_once_in_someone_elses_checkpoint() -> None:
    draws = Draws()
    layer = remat(lambda x, w: by_value(draws, x, w))
    got = jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(layer(X, W[0]) * x))(x).sum())(X)
    [only] = draws.log
    want = jax.grad(lambda x: jnp.sin(use(X, W[0], only) * x).sum())(X)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_someone_elses_checkpoint_keeps_no_more_than_the_decision() -> None:
    def held(f: Any) -> int:
        kept = jax.eval_shape(lambda x: jax.vjp(jax.checkpoint(f), x)[1], X)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))

    def layer(x: Any) -> Any:
        (idx,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x), -1, keepdims=True))
        return jnp.sin(keep(jnp.tanh, x)) * jnp.take_along_axis(x, idx, 1)

    def ends(x: Any) -> Any:
        save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x)))
        return x * 2

    def beside(x: Any) -> Any:  # integers that do not depend on floats are the same in the recompute
        rows = jnp.arange(T) * 2
        (idx,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x), -1) + rows)
        return jnp.sin(x) * idx[:, None] * rows[:, None]

    assert held(lambda x: jnp.exp(beside(x))) == X.nbytes + T * 4
    assert held(lambda x: jnp.exp(remat(layer)(x))) == X.nbytes + T * 4
    assert held(lambda x: jnp.exp(remat(jnp.sin)(x))) == X.nbytes
    assert held(remat(ends)) <= X.nbytes  # nobody reads the decision


def test_flax_linen() -> None:
    nn = pytest.importorskip("flax.linen")
    draws = Draws()

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            logits = nn.Dense(D)(x)
            (idx,) = save_for_recompute(draws.traced(logits))
            return jnp.tanh(nn.Dense(D)(x)) * jnp.take_along_axis(jax.nn.softmax(logits), idx, 1)

    params = Block().init(jax.random.key(0), X)
    for policy in (save_policy(), None):
        module = nn.remat(Block, policy=policy)()
        for way in (jax.jit, lambda f: f):
            draws.log.clear()
            jax.block_until_ready(way(jax.grad(lambda p, module=module: module.apply(p, X).sum()))(params))
            assert len(draws.log) == 1


def test_flax_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx")
    draws = Draws()

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.gate = nnx.Linear(D, D, rngs=nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            logits = self.gate(x)
            (idx,) = save_for_recompute(draws.traced(logits))
            return jnp.tanh(x) * jnp.take_along_axis(jax.nn.softmax(logits), idx, 1)

    block = Block()
    step = nnx.jit(nnx.grad(lambda m: nnx.remat(lambda m, x: m(x), policy=save_policy())(m, X).sum()))
    jax.block_until_ready(jax.tree.leaves(step(block)))
    assert len(draws.log) == 1


def test_equinox() -> None:
    eqx = pytest.importorskip("equinox")
    draws = Draws()

    class Block(eqx.Module):
        gate: Any
        act: Any = eqx.field(static=True)

        def __call__(self, x: Any) -> Any:
            logits = x @ self.gate
            (idx,) = save_for_recompute(draws.traced(logits))
            return self.act(x) * jnp.take_along_axis(jax.nn.softmax(logits), idx, 1)

    block = Block(W[0], jnp.tanh)
    for checkpointed in (
        lambda m, x: eqx.filter_checkpoint(lambda m, x: m(x), policy=save_policy())(m, x),
        lambda m, x: eqx.filter_checkpoint(lambda m, x: m(x))(m, x),
        lambda m, x: remat(m)(x),
        lambda m, x: remat(lambda m, x: m(x))(m, x),
    ):
        draws.log.clear()
        step = eqx.filter_jit(eqx.filter_grad(lambda m, f=checkpointed: f(m, X).sum()))
        jax.block_until_ready(jax.tree.leaves(step(block)))
        assert len(draws.log) == 1
