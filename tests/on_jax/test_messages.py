"""Every error of the JAX frontend, line by line."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from roundpipe_jax import (
    GradientError,
    MismatchError,
    Offload,
    OptionError,
    PhaseError,
    SlotError,
    doing_recompute,
    get_recompute_data,
    remat,
    save_either,
    save_for_recompute,
    save_policy,
)
from tests.said import said

X = jnp.ones((2, 3))


def lines(error: BaseException) -> list[str]:
    """The message without the note that JAX may add, and with file names cut to their last part."""
    text = str(error).partition("\n--------------------")[0]
    return [line.replace(__file__, "test_messages.py") for line in text.splitlines()]


def raised(kind: type[Exception], run: Any) -> list[str]:
    with pytest.raises(kind) as caught:
        run()
    return lines(caught.value)


def test_a_saved_tangent() -> None:  # R5
    def layer(x: Any) -> Any:
        save_for_recompute({"w": [x * 2]})
        return x.sum()

    at = layer.__code__.co_firstlineno + 1
    assert raised(GradientError, lambda: jax.jit(jax.grad(remat(layer, label="experts")))(X)) == [
        "layer 'experts', the unnamed slot: data[0]['w'][0] depends on a value that is being differentiated; a slot "
        "would cut its gradient.",
        "  value: float32[2, 3]",
        f"  saved at: test_messages.py:{at}",
        "  way out: save jax.lax.stop_gradient(value) if it is a decision; if it is not, do not save it: the recompute "
        "makes it again.",
    ]


@pytest.mark.parametrize("saves", [False, True])
def test_what_jax_says_of_a_layer_names_its_line(saves: bool) -> None:
    def layer(x: Any) -> Any:
        if saves:
            save_for_recompute(1)
        return jnp.sin(x) if x.sum() > 0 else x

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        jax.jit(jax.grad(lambda x: remat(layer)(x).sum()))(X)
    assert f"function layer at {place(layer)} " in str(caught.value).replace(__file__, "test_messages.py")


def test_a_branch_that_was_not_saved() -> None:
    @remat(label="gate")
    def layer(x: Any) -> Any:
        return jnp.sin(x).sum() if x.sum() > 0 else x.sum()

    looks = layer.__wrapped__.__code__.co_firstlineno + 2
    assert raised(MismatchError, lambda: jax.grad(layer)(X)) == [
        "layer 'gate': the recompute looks at a value that the forward did not save.",
        f"  looks at: test_messages.py:{looks}",
        "  forward: ran on values",
        "  recompute: is traced, and has only what was saved",
        "  way out: save the decision, without looking again in the recompute: "
        "`flag = recompute_once(lambda: bool(condition))`, and branch on that; or look only in the forward "
        "branch of `if doing_recompute():`, and save there.",
    ]


@pytest.mark.parametrize("way", [lambda f: f, jax.jit])
def test_phases_that_return_different_shapes(way: Any) -> None:  # R10
    @remat(label="cut")
    def layer(x: Any) -> Any:
        return {"y": x[:1] if doing_recompute() else x}

    assert raised(MismatchError, lambda: way(jax.grad(lambda x: layer(x)["y"].sum()))(X)) == [
        "layer 'cut': forward and recompute do not return the same.",
        f"  layer at: {place(layer.__wrapped__)}",
        "  forward: output 0 is float32[2, 3]",
        "  recompute: output 0 is float32[1, 3]",
        "  way out: let both branches of `if doing_recompute():` compute the same, and save what decides between them.",
    ]


def test_phases_that_return_different_structures() -> None:  # R10
    layer = remat(lambda x: (x,) if doing_recompute() else x, label="cut")
    assert raised(MismatchError, lambda: jax.grad(lambda x: layer(x).sum())(X))[2:4] == [
        "  forward: returned PyTreeDef(*)",
        "  recompute: returned PyTreeDef((*,))",
    ]


def test_a_layer_that_only_the_recompute_runs() -> None:  # R8
    def inner(x: Any) -> Any:
        return x * get_recompute_data()[0]

    def layer(x: Any) -> Any:
        save_for_recompute(1)
        return remat(inner, label="inner")(x) if doing_recompute() else x

    at = inner.__code__.co_firstlineno + 1
    assert raised(SlotError, lambda: jax.grad(lambda x: remat(layer)(x).sum())(X))[:2] == [
        "layer 'inner', the unnamed slot: this region was not run by the forward, only by the recompute.",
        f"  asked for at: test_messages.py:{at}",
    ]


def place(layer: Any) -> str:
    code = layer.__code__
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def refusal(what: str, layer: Any, way_out: str) -> list[str]:
    return [
        f"layer 'wave': mode=\"custom_vjp\" {what}",
        f"  layer at: {place(layer)}",
        f'  way out: use mode="checkpoint", the default{way_out}',
    ]


def test_forward_mode_in_the_residual_lane() -> None:
    def layer(x: Any) -> Any:
        return x * save_for_recompute(2)[0]

    wave = remat(layer, mode="custom_vjp", label="wave")
    want = refusal("has no forward-mode derivative (jvp, linearize, jacfwd).", layer, ".")
    assert raised(OptionError, lambda: jax.jvp(wave, (X,), (X,))) == want
    assert raised(OptionError, lambda: jax.linearize(wave, X)[1](X)) == want


def test_saves_in_inner_traces_in_the_residual_lane() -> None:
    def layer(x: Any) -> Any:
        return jax.vmap(lambda x: save_for_recompute(x > 0)[0])(x)

    assert raised(OptionError, lambda: jax.jit(remat(layer, mode="custom_vjp", label="wave"))(X)) == refusal(
        "cannot keep what is saved inside a scan, cond, vmap, while or jitted function of the layer.",
        layer,
        ", or save outside the inner function.",
    )
    # the user's line, not that of JAX's wrapper around it
    wrapped = remat(jax.vmap(lambda x: layer(x)), mode="custom_vjp")
    found = raised(OptionError, lambda: jax.jit(wrapped)(jnp.ones((2, 3))))
    assert not any("traceback_util.py" in line for line in found if "layer at" in line)


def test_a_value_dependent_layer_that_saves_in_an_inner_trace() -> None:
    @remat(label="both")
    def layer(x: Any) -> Any:
        flag = bool(x.sum() > 0)
        return jax.vmap(lambda x: x * save_for_recompute(x > 0)[0])(x).sum() * flag

    found = raised(MismatchError, lambda: jax.grad(layer)(X))
    assert found[0] == (
        "layer 'both': it saves inside a scan, cond, vmap, while or jitted function, and looks at values. It can "
        "do one of the two: for the first it is traced as a whole."
    )
    assert found[1] == f"  layer at: {place(layer.__wrapped__)}"
    assert found[2].startswith("  looked: Attempted boolean conversion of traced array")
    assert found[3] == f"  looked at: test_messages.py:{layer.__wrapped__.__code__.co_firstlineno + 2}"
    assert found[4] == (
        "  way out: wrap the function that saves in remat of its own, instead of the layer around it; or let the inner "
        "function return the decisions and save them outside of it."
    )


def test_a_save_inside_a_custom_derivative() -> None:
    @jax.custom_vjp
    def inner(x: Any) -> Any:
        save_for_recompute(jnp.argmax(x))
        return x

    inner.defvjp(lambda x: (x, None), lambda _, t: (t,))
    layer = lambda x: inner(x)  # noqa: E731
    calls = layer.__code__.co_firstlineno
    jax.config.update("jax_remat3", True)
    try:
        found = raised(MismatchError, lambda: jax.jit(remat(layer, label="kernel"))(X))
    finally:
        jax.config.update("jax_remat3", False)
    assert found == [
        "layer 'kernel': a save inside a function with a custom_vjp rule cannot be kept for the recompute, because "
        "differentiation replaces that function by its rule.",
        "  operation: custom_vjp_call",
        f"  called at: test_messages.py:{calls}",
        "  way out: make the decision before calling that function, save it there, and pass it in.",
    ]


POLICIES = '  way out: give save_policy("name"), save_dots(), or one of jax.checkpoint_policies.'
OPTIONS = {
    "mode": (
        lambda: remat(jnp.sin, mode="magic"),  # type: ignore[call-overload]
        ["remat: mode='magic' does not exist.", "  way out: choose one of 'checkpoint', 'custom_vjp'."],
    ),
    "verify": (
        lambda: remat(jnp.sin, verify=True),  # type: ignore[call-overload]
        ["remat: verify=True does not exist.", "  way out: choose one of 'off', 'warn', 'raise'."],
    ),
    "fun": (lambda: remat(3), ["remat takes a function, not 3.", "  way out: pass the layer itself."]),
    "class": (
        lambda: remat(functools.partial),
        [
            "remat takes a function, and partial is a class: a call of it makes a layer, and runs none.",
            "  way out: pass an instance or a function; for a class of flax there is flax.linen.remat.",
        ],
    ),
    "argnums": (
        lambda: remat(jnp.sin, static_argnums="x"),  # type: ignore[arg-type]
        ["remat: static_argnums='x' gives no positions.", "  way out: give positions: an int, or a tuple of ints."],
    ),
    "argnums of a call": (
        lambda: remat(lambda x: x, static_argnums=2, label="one")(X),
        [
            "layer 'one': static_argnums=(2,) names an argument that this call does not have.",
            "  positional arguments: 1",
            "  way out: count from 0, or use static_argnames for arguments passed by name.",
        ],
    ),
    "argnums of one": (
        lambda: remat(jnp.sin, static_argnums=1.5),  # type: ignore[call-overload]
        ["remat: static_argnums=1.5 gives no positions.", "  way out: give positions: an int, or a tuple of ints."],
    ),
    "argnames": (
        lambda: remat(jnp.sin, static_argnames=3),  # type: ignore[call-overload]
        [
            "remat: static_argnames=3 gives no names.",
            "  way out: give names of arguments: a string, or a tuple of strings.",
        ],
    ),
    "argnames of another layer": (
        lambda: remat(iter, static_argnames="x") and remat(sorted, static_argnames=("key", "revers")),
        [
            "layer 'sorted': static_argnames names 'revers', which it does not take.",
            "  it takes: iterable, key, reverse",
            "  way out: give names of its arguments.",
        ],
    ),
    "label": (
        lambda: remat(jnp.sin, label=3),  # type: ignore[call-overload]
        ["remat: label must be a string, not 3.", '  way out: name the layer, as in label="block 3".'],
    ),
    "policy": (lambda: remat(jnp.sin, policy=["dots"]), ["remat: ['dots'] is no policy.", POLICIES]),
    "either policy": (lambda: save_either("dots"), ["save_either: 'dots' is no policy.", POLICIES]),
    "names": (
        lambda: save_policy(["a"]),  # type: ignore[arg-type]
        [
            "save_policy takes names, not ['a'].",
            '  way out: give each as a string: save_policy("attention", "mlp").',
        ],
    ),
    "min_bytes": (
        lambda: Offload(min_bytes="1 MB"),  # type: ignore[arg-type]
        ["min_bytes must be a number of bytes, not '1 MB'.", "  way out: pass min_bytes=1 << 20."],
    ),
    "saves": (
        lambda: Offload(saves="no"),  # type: ignore[arg-type]
        [
            "saves must be True or False, not 'no'.",
            "  way out: pass saves=True: of all its arrays, or False.",
        ],
    ),
    "inputs": (
        lambda: Offload(inputs=[0]),  # type: ignore[arg-type]
        [
            "inputs must be True, False or a tuple of positions, not [0].",
            "  way out: pass inputs=True for all arguments, inputs=(0,) for the first.",
        ],
    ),
    "prevent_cse of more arguments": (
        lambda: remat(lambda x: x, prevent_cse=(True, False))(X),
        [
            "remat: prevent_cse=(True, False) does not fit the arguments of the call.",
            "  positional arguments: 1",
            "  JAX says: pytree structure error: different lengths of tuple at key path",
            "  way out: give True, False, None, or one of them per argument.",
        ],
    ),
    "prevent_cse": (
        lambda: remat(jnp.sin, prevent_cse="no")(X),
        ["remat: prevent_cse='no' does not exist.", "  way out: give True, False, None, or one of them per argument."],
    ),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_options_that_do_not_exist(what: str) -> None:
    run, expected = OPTIONS[what]
    with pytest.raises(OptionError) as caught:
        run()
    assert said(caught.value, __file__) == expected


def test_a_policy_in_the_residual_lane() -> None:
    def layer(x: Any) -> Any:
        return jnp.sin(x)

    place = f"test_messages.py:{layer.__code__.co_firstlineno}"
    keep: Any = {"mode": "custom_vjp", "policy": jax.checkpoint_policies.dots_saveable}
    for make in (lambda: remat(layer, **keep), lambda: remat(**keep)(layer)):
        assert raised(OptionError, make) == [
            f"layer 'test_a_policy_in_the_residual_lane.<locals>.layer ({place})': "
            'mode="custom_vjp" takes no policy: it keeps exactly the inputs and the slot.',
            f"  layer at: {place}",
            f"  policy: {keep['policy']!r}",
            '  way out: leave the policy out, or use mode="checkpoint", the default.',
        ]


def test_a_layer_behind_a_transformation_is_called_after_the_users_function() -> None:
    def layer(x: Any) -> Any:
        return get_recompute_data()

    name = f"{layer.__qualname__} (test_messages.py:{layer.__code__.co_firstlineno})"
    for fun in (jax.jit(layer), jax.vmap(layer)):
        with pytest.raises(PhaseError) as caught:
            remat(fun)(X)
        assert lines(caught.value)[1] == f"  layer: {name!r}"
