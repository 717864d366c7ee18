"""keep: FLOPs not done again, counted; gradients of the layer without remat; what is held, by shape."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

from roundpipe_jax import (
    MismatchError,
    SlotError,
    TapeError,
    doing_recompute,
    explain,
    get_recompute_data,
    keep,
    record,
    remat,
    remat_layers,
    replay,
    save_for_recompute,
    save_policy,
    update_once,
)
from tests.on_jax.oracle import LANES, WAYS, Router, same

T, D = 4, 2
W, X = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(((3, D, D), (T, D))))
ATTENTION = 2 * (2 * T * T * D)  # FLOPs of its two products


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.T) @ v


@jax.custom_vjp
def kernel(q: Any, k: Any, v: Any) -> Any:
    """The same, by hand."""
    return attention(q, k, v)


def forward(q: Any, k: Any, v: Any) -> Any:
    weights = jax.nn.softmax(q @ k.T)
    return weights @ v, (q, k, v, weights)


def backward(residuals: Any, slope: Any) -> Any:
    q, k, v, weights = residuals
    slopes = slope @ v.T
    scores = weights * (slopes - (slopes * weights).sum(-1, keepdims=True))
    return scores @ k, scores.T @ q, weights.T @ slope


kernel.defvjp(forward, backward)

FUNCTIONS: dict[str, Any] = {"attention": attention, "kernel": kernel}


def plainly(function: Any, *args: Any) -> Any:
    return function(*args)


def by_closure(function: Any, *args: Any) -> Any:
    return keep(lambda: function(*args))


def layer(function: Any, how: Any = keep) -> Any:
    def f(w: Any, x: Any) -> Any:
        q = jnp.tanh(x @ w[0])
        return jnp.tanh(how(function, q, jnp.sin(x @ w[1]), q * 2)) @ w[2]

    return f


def nested(f: Any) -> Any:
    return remat(lambda *args: remat(f)(*args))


REMATS: dict[str, Callable[[Any], Any]] = {
    "checkpoint": remat,
    "custom_vjp": lambda f: remat(f, mode="custom_vjp"),
    "stock": lambda f: jax.checkpoint(f, policy=save_policy()),
    "nested": nested,
}


def loss(f: Any) -> Any:
    return lambda w, x: (f(w, x) ** 2).sum()


def step(f: Any) -> Any:
    return jax.grad(loss(f), (0, 1))


def live(function: Any, *args: Any) -> Any:
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def flops(function: Any, *args: Any) -> int:
    """Of matrix products, by our own count of shapes: scans with their lengths."""

    def of(jaxpr: Any) -> int:
        total = 0
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                (contracted, _), _ = eqn.params["dimension_numbers"]
                left = eqn.invars[0].aval.shape
                total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[n] for n in contracted)
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value if hasattr(value, "eqns") else None)
                if hasattr(inner, "eqns"):
                    total += of(inner) * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        return total

    return of(live(function, *args))


def held(f: Any, *args: Any) -> list[Any]:
    """Shapes of what lives from forward to backward."""
    pull = jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], *args)
    return sorted(leaf.shape for leaf in jax.tree.leaves(pull))


# ------------------------------------------------------------------------------------------------ work


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("how", [keep, by_closure])
@pytest.mark.parametrize("wrap", REMATS)
def test_the_function_is_not_run_again(function: str, how: Any, wrap: str) -> None:
    fun = FUNCTIONS[function]
    bare = layer(fun, plainly)
    everything, kept = (flops(step(REMATS[wrap](f)), W, X) for f in (bare, layer(fun, how)))
    assert everything - kept == ATTENTION
    assert kept - flops(step(bare), W, X) == 2 * 2 * T * D * D  # the products that make q and k


@pytest.mark.parametrize(("function", "wrap"), [*(("kernel", wrap) for wrap in REMATS), ("attention", "checkpoint")])
def test_gradients_are_those_without_remat(function: str, wrap: str) -> None:
    fun = FUNCTIONS[function]
    want = jax.jit(step(layer(fun, plainly)))(W, X)
    same(jax.jit(step(REMATS[wrap](layer(fun, by_closure))))(W, X), want)
    if fun is kernel:
        same(step(REMATS[wrap](layer(fun)))(W, X), want)


def in_a_scan(f: Any) -> Any:
    return lambda w, x: jax.lax.scan(lambda x, _: (f(w, x), None), x, None, length=3)[0]


def in_a_vmap(f: Any) -> Any:
    return lambda w, x: jax.vmap(lambda x: f(w, x))(x.reshape(2, T // 2, D)).reshape(T, D)


@pytest.mark.parametrize(
    ("function", "inside", "saved"),
    [("kernel", in_a_scan, 3 * ATTENTION), ("attention", in_a_vmap, ATTENTION // 2)],
)
def test_inside_an_inner_trace(function: str, inside: Any, saved: int) -> None:
    fun = FUNCTIONS[function]
    bare, f = inside(layer(fun, plainly)), inside(layer(fun))
    assert flops(step(remat(bare)), W, X) - flops(step(remat(f)), W, X) == saved
    same(jax.jit(step(remat(f)))(W, X), jax.jit(step(bare))(W, X))
    if inside is in_a_scan and function == "kernel":
        same(step(remat(f))(W, X), step(bare)(W, X))


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "hessian": lambda f: jax.jit(jax.hessian(lambda x: loss(f)(W, x)))(X[:2]),
    "jvp of jit of grad": lambda f: jax.jvp(jax.jit(step(f)), (W, X), (W, X)),
    "grad of grad": lambda f: jax.jit(jax.grad(lambda x: (step(f)(W, x)[1] ** 2).sum()))(X),
    "vmap of grad": lambda f: jax.vmap(jax.jit(step(f)), (None, 0))(W, jnp.stack([X, 2 * X])),
    "grad of vmap": lambda f: jax.grad(lambda xs: jax.vmap(lambda x: loss(f)(W, x))(xs).sum())(jnp.stack([X, 2 * X])),
    "vjp twice": lambda f: [jax.vjp(f, W, X)[1](slope) for slope in (jnp.ones((T, D)), X)],
    "one argument": lambda f: jax.grad(lambda w0: loss(f)(jnp.stack([w0, W[1], W[2]]), X))(W[0]),
}


CASES = [*(("kernel", name) for name in TRANSFORMS), ("attention", "hessian"), ("attention", "one argument")]


@pytest.mark.parametrize(("function", "transform"), CASES)
def test_transformations(function: str, transform: str) -> None:
    fun, check = FUNCTIONS[function], TRANSFORMS[transform]
    want = check(layer(fun, plainly))
    lanes = ("checkpoint", "stock") if transform in ("hessian", "jvp of jit of grad") else ("checkpoint", "custom_vjp")
    for wrap in lanes:
        same(check(REMATS[wrap](layer(fun))), want, 2e-4)


SCALE = jnp.arange(1.0, D + 1)


def with_jvp_rule(scale: Any) -> Any:
    f: Any = jax.custom_jvp(jnp.sin)
    f.defjvp(lambda primals, dots: (f(*primals), dots[0] * scale * jnp.cos(*primals)))
    return f


def with_vjp_rule(scale: Any) -> Any:
    f: Any = jax.custom_vjp(jnp.sin)
    f.defvjp(lambda x: (jnp.sin(x), scale * jnp.cos(x)), lambda slope, dot: (slope * dot,))
    return f


@pytest.mark.parametrize("wrap", REMATS)
@pytest.mark.parametrize("made", [with_jvp_rule, with_vjp_rule])
@pytest.mark.parametrize("way", ["eager", "jit", "an argument of jit"])
def test_a_rule_for_the_derivative_with_a_constant_of_its_own(wrap: str, made: Any, way: str) -> None:
    def slope(how: Any, scale: Any) -> Any:
        f = REMATS[wrap] if how is keep else lambda f: f
        return jax.grad(lambda x: (f(lambda x: jnp.tanh(how(made(scale), 2 * x)))(x) ** 2).sum())

    def curve(how: Any, scale: Any) -> Any:
        return jax.grad(lambda x: (slope(how, scale)(x) ** 2).sum())

    for derivative in (slope, curve) if wrap == "checkpoint" else (slope,):
        want = derivative(plainly, SCALE)(X)
        if way == "an argument of jit":
            same(jax.jit(lambda x, scale, d=derivative: d(keep, scale)(x))(X, SCALE), want)
        else:
            same(WAYS[way](derivative(keep, SCALE))(X), want)


@pytest.mark.parametrize("wrap", ["checkpoint", "stock"])
def test_forward_mode_is_refused_where_the_function_has_none(wrap: str) -> None:
    def tangent(f: Any) -> Any:
        return jax.jvp(loss(f), (W, X), (W, X))

    same(tangent(REMATS[wrap](layer(attention))), tangent(layer(attention, plainly)))
    with pytest.raises(TypeError, match="custom_vjp"):
        tangent(REMATS[wrap](layer(kernel)))


@pytest.mark.parametrize("groups", [None, 2])
def test_stacks_of_layers(groups: int | None) -> None:
    stacked = jnp.stack([W, W / 2, W, W / 2])

    def stack(f: Any) -> Any:
        return lambda w: remat_layers(f, w, X, nested=groups).sum()

    bare = jax.grad(lambda w: jax.lax.scan(lambda x, w: (layer(kernel, plainly)(w, x), None), X, w)[0].sum())
    same(jax.jit(jax.grad(stack(layer(kernel))))(stacked), bare(stacked))
    plain, kept = (
        jax.jit(jax.grad(stack(layer(kernel, how)))).lower(stacked).compile().as_text().count(" dot(")
        for how in (plainly, keep)
    )
    products = plain - kept  # those of the attention, in the body of the backward's loop
    assert products == 2 if groups is None else products >= 2  # in groups each layer is run again more than once


def test_a_custom_vjp_in_a_layer_that_only_saves() -> None:
    def saving(w: Any, x: Any) -> Any:
        (order,) = save_for_recompute(jnp.argsort(jax.lax.stop_gradient(x[:, 0])))
        return layer(kernel, plainly)(w, x[order])

    def bare(w: Any, x: Any) -> Any:
        return layer(kernel, plainly)(w, x[jnp.argsort(jax.lax.stop_gradient(x[:, 0]))])

    for name in ("grad of vmap", "hessian"):
        same(TRANSFORMS[name](remat(saving)), TRANSFORMS[name](bare), 2e-4)


# ------------------------------------------------------------------------------------------------ bytes


@pytest.mark.parametrize("lane", LANES)
def test_what_is_held_is_what_the_function_made(lane: Any) -> None:
    def apart(function: Any) -> Any:
        f = layer(function)
        return lambda a, b, c, x: remat(lambda a, b, c, x: f((a, b, c), x), mode=lane)(a, b, c, x)

    inputs = [(T, D), (D, D), (D, D), (D, D)]
    assert held(apart(kernel), *W, X) == sorted([*inputs, (T, D), (T, T)])  # the output, and the weights
    product = remat(lambda w, x: jnp.sin(keep(jnp.matmul, jnp.cos(x), w)), mode=lane)
    assert held(product, W[0], X) == [(D, D), (T, D), (T, D)]  # the output: its derivative needs the arguments only


def test_the_report_counts_it() -> None:
    [cost] = explain(lambda w, x: remat(layer(kernel))(w, x).sum(), W, X).layers
    assert cost.slot == 4 * (T * D + T * T)
    assert cost.recomputed_flops == 2 * 2 * T * D * D
    [cost] = explain(lambda w, x: remat(in_a_scan(layer(kernel)))(w, x).sum(), W, X).layers
    assert cost.slot == 3 * 4 * (T * D + T * T)


# ----------------------------------------------------------------------------------- decisions and state


def deciding(router: Router) -> Any:
    def function(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v) * router.saved("returned", 0, q)

    return function


@pytest.mark.parametrize("wrap", ["checkpoint", "stock"])
@pytest.mark.parametrize("derivative", [step, lambda f: jax.grad(lambda w, x: (step(f)(w, x)[1] ** 2).sum())])
def test_a_function_that_decides_does_so_once(wrap: str, derivative: Any) -> None:  # R8
    router, once = Router(), Router()
    choice = once.answer(0, None)
    got = jax.jit(derivative(REMATS[wrap](layer(deciding(router)))))(W, X)
    want = derivative(layer(lambda *args: attention(*args) * choice, plainly))(W, X)
    same(got, want, 2e-4)
    assert router.counts == {0: 1}


def test_a_second_derivative_does_not_decide_again_in_a_scan() -> None:
    router = Router()

    def function(q: Any, k: Any, v: Any) -> Any:
        return jax.lax.scan(lambda x, _: (x * router.saved("returned", 0, x), None), q, None, length=1)[0]

    f = remat(layer(function))
    jax.jit(step(f))(W, X)
    says = (
        r"(?s)layer 'layer.*a second derivative runs keep\(.*function.* again.*called at: .*test_keep\.py:\d+"
        r".*saves the unnamed slot: .*oracle\.py:\d+"
    )
    with pytest.raises(MismatchError, match=says):
        jax.grad(lambda x: (step(f)(W, x)[1] ** 2).sum())(X)


@pytest.mark.parametrize("how", [keep, by_closure])
def test_state_in_it_is_updated_once(how: Any) -> None:
    seen: list[int] = []

    def function(q: Any, k: Any, v: Any) -> Any:
        update_once(seen.append, 1)
        return attention(q, k, v)

    step(remat(layer(function, how)))(W, X)
    assert seen == [1]


@pytest.mark.parametrize(("how", "wrap"), [(by_closure, "checkpoint"), (by_closure, "custom_vjp"), (keep, "stock")])
def test_one_inside_the_other(how: Any, wrap: str) -> None:
    def function(plain: Any, outer: Any) -> Any:
        return lambda q, k, v: outer(lambda q, k, v: plain(attention, q, k, v) * plain(jnp.sin, q), q, k, v)

    f, bare = layer(function(how, how), plainly), layer(function(plainly, plainly), plainly)
    same(jax.jit(step(REMATS[wrap](f)))(W, X), jax.jit(step(bare))(W, X))
    assert flops(step(REMATS[wrap](bare)), W, X) - flops(step(REMATS[wrap](f)), W, X) == ATTENTION


def test_a_layer_inside_it_is_a_layer() -> None:
    same(step(remat(layer(remat(attention))))(W, X), step(layer(attention, plainly))(W, X))


def test_arguments_and_results_of_any_kind() -> None:
    def function(x: Any, flag: bool, *, how: str) -> Any:
        return {"y": x * 2 if flag and how == "up" else x, "n": 3, "i": jnp.arange(2), "same": x}

    @remat
    def f(x: Any) -> Any:
        out = keep(function, x, True, how="up")
        assert out["n"] == 3
        return (out["y"][out["i"]] * out["same"][:2]).sum() * keep(lambda: 2)

    same(jax.grad(f)(X), jax.grad(lambda x: (x[:2] ** 2).sum() * 4)(X))


def test_outside_of_layers_it_is_a_call() -> None:
    assert keep(max, 3, 4) == 4
    same(jax.grad(lambda x: keep(jnp.sin, x).sum())(X), jnp.cos(X))


# -------------------------------------------------------------------------------------------- tapes, errors


def test_a_replay_keeps_too() -> None:
    def saving(how: Any) -> Any:
        def f(w: Any, x: Any) -> Any:
            (order,) = save_for_recompute(jnp.argsort(jax.lax.stop_gradient(x[:, 0])))
            return layer(kernel, how)(w, x[order])

        return remat(f, label="layer")

    with record() as tape:
        saving(keep)(W, X)

    def replayed(how: Any) -> Any:
        def run(tape: Any, w: Any, x: Any) -> Any:
            with replay(tape):
                return step(saving(how))(w, x)

        return run

    same(replayed(keep)(tape, W, X), step(saving(plainly))(W, X))
    assert flops(replayed(plainly), tape, W, X) - flops(replayed(keep), tape, W, X) == ATTENTION


@pytest.mark.parametrize("way", WAYS)
def test_a_replay_keeps_in_an_inner_trace_too(way: str) -> None:
    def f(x: Any) -> Any:
        (scale,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x[:, 0])) + 1)
        return jax.lax.scan(lambda x, w: (keep(jnp.tanh, x @ w) * scale, None), x, W)[0].sum()

    def run(tape: Any, x: Any) -> Any:
        with replay(tape):
            return jax.grad(remat(f, label="layer"))(x)

    with record() as tape:
        remat(f, label="layer")(X)
    same(WAYS[way](run)(tape, X), jax.grad(f)(X))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("inside", [lambda f: f, in_a_scan, nested])
def test_a_decision_inside_does_not_get_on_a_tape(way: str, inside: Any) -> None:
    f = remat(inside(layer(deciding(Router()))), label="layer")

    def run(w: Any, x: Any) -> Any:
        with record():
            return f(w, x)

    with pytest.raises(TapeError, match="saves, which does not get on a tape") as caught:
        WAYS[way](run)(W, X)
    assert re.match(r"layer 'layer.*': keep\(deciding", str(caught.value))


def test_a_recompute_that_keeps_something_else_is_an_error() -> None:
    def f(x: Any) -> Any:
        if doing_recompute():
            get_recompute_data()
            return keep(jnp.sin, x)
        save_for_recompute(1)
        return jnp.sin(x)

    with pytest.raises(
        SlotError,
        match=r"layer '.*f .*': the recompute calls keep\(sin.*, and the forward did not.\n  called at: .*_keep.py:\d+",
    ):
        jax.grad(lambda x: remat(f)(x).sum())(X)


def test_other_captures_are_an_error() -> None:
    def f(x: Any) -> Any:
        (n,) = save_for_recompute(1)
        w = W[0, :, :n] if doing_recompute() else W[0]
        return keep(lambda: x @ w).sum()

    with pytest.raises(MismatchError, match="closes over other arrays in the recompute") as caught:
        jax.grad(remat(f))(X)
    assert "forward: float32[4, 2], float32[2, 2]" in str(caught.value)
    assert "recompute: float32[4, 2], float32[2, 1]" in str(caught.value)
    assert "  called at: " in str(caught.value)


def test_a_look_at_a_value_inside_is_an_error() -> None:
    def f(x: Any) -> Any:
        return keep(lambda x: x * 2 if x.sum() > 0 else x, x).sum()

    with pytest.raises(MismatchError, match="looks at a value, and is traced") as caught:
        jax.grad(remat(f))(X)
    assert "test_keep.py:" in str(caught.value)


def test_numbers_line_up_after_it() -> None:
    def f(x: Any) -> Any:
        y = keep(np.float32(2).__mul__, 1.0) * x  # nothing of JAX in it
        return keep(jnp.sin, y).sum() + keep(jnp.sin, x).sum()

    same(jax.grad(remat(f))(X), 2 * jnp.cos(2 * X) + jnp.cos(X))
