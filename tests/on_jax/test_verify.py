"""verify: decisions and draws that a plain recompute would make differently."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from roundpipe_jax import VerifyError, VerifyWarning, doing_recompute, get_recompute_data, remat, save_for_recompute

X = jnp.linspace(-1, 1, 6).reshape(2, 3)


def stateful(save: bool) -> Any:
    rng = np.random.default_rng(0)

    def layer(x: Any) -> Any:
        if save and doing_recompute():
            (mask,) = get_recompute_data()
        else:
            mask = jnp.asarray(rng.random(x.shape) > 0.5)
            if save:
                save_for_recompute(mask)
        return jnp.where(mask, jnp.sin(x), 0.0)

    return layer


def finish(step: Any) -> None:
    jax.block_until_ready(step(X))
    jax.effects_barrier()


@pytest.mark.parametrize("way", [lambda f: f, jax.jit])
def test_finds_stateful_numpy_randomness_in_the_output(way: Any) -> None:
    step = way(jax.grad(lambda x: remat(stateful(False), verify="warn", label="drop")(x).sum()))
    with pytest.warns(VerifyWarning, match=r"layer 'drop'.*\n.*output 0: \d of 2 rows flipped"):
        finish(step)


@pytest.mark.parametrize("way", [lambda f: f, jax.jit])
def test_finds_a_saved_decision_that_would_flip(way: Any) -> None:
    step = way(jax.grad(lambda x: remat(stateful(True), verify="warn", label="drop")(x).sum()))
    with pytest.warns(VerifyWarning) as caught:
        finish(step)
    [warning] = caught
    assert "layer 'drop', the unnamed slot, item [0]:" in str(warning.message)
    assert "output" not in str(warning.message).split("way out")[0]


def test_raises_with_the_flips_listed() -> None:
    with pytest.raises(VerifyError) as caught:
        jax.grad(lambda x: remat(stateful(True), verify="raise", label="drop")(x).sum())(X)
    [flip] = caught.value.flips
    assert (flip.layer, flip.total) == ("drop", 2)


def test_raises_from_a_compiled_step_as_jax_does() -> None:
    step = jax.jit(jax.grad(lambda x: remat(stateful(True), verify="raise", label="drop")(x).sum()))
    with pytest.raises(Exception, match="would not repeat the forward"):
        jax.block_until_ready(step(X))
        jax.effects_barrier()


def test_static_values_are_compared_too() -> None:
    count = iter(range(9))

    def layer(x: Any) -> Any:
        n = get_recompute_data()[0] if doing_recompute() else next(count)
        save_for_recompute(n)
        return x * n

    with pytest.raises(VerifyError, match=r"the unnamed slot, item \[0\]: 1 of 1 rows flipped"):
        jax.grad(lambda x: remat(layer, verify="raise")(x).sum())(X)


@pytest.mark.parametrize("way", [lambda f: f, jax.jit])
def test_says_nothing_where_nothing_differs(way: Any) -> None:
    def layer(x: Any) -> Any:
        (idx,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x), -1))
        return jnp.exp(x) * idx[:, None]

    for f in (layer, jnp.sin):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = jax.block_until_ready(way(jax.grad(lambda x, f=f: remat(f, verify="raise")(x).sum()))(X))
            jax.effects_barrier()
        np.testing.assert_allclose(got, jax.grad(lambda x, f=f: f(x).sum())(X), rtol=1e-6)


AGAIN = {
    "fails": r"a plain recompute fails \(ValueError: no room\)",
    "not saved": "slot 'plan': not saved again",
    "two rows": r"slot 'plan', item \[0\]: 2 of 2 rows flipped",
    "a structure": "the structure of the output: 1 of 1 rows flipped",
    "a word": "output: 1 of 1 rows flipped",
    "a number": "output 0: 1 of 3 rows flipped, first row 2",
    "a key": "slot 'key', item .*: 1 of 1 rows flipped",
    "inside": "layer 'inner', slot 'plan', item .*: 1 of 2 rows flipped",
}


@pytest.mark.parametrize("what", AGAIN)
def test_a_recompute_of_another_form_is_told(what: str) -> None:
    forwards = iter((False, *(True,) * 9))

    def layer(x: Any) -> Any:
        again = not doing_recompute() and next(forwards)
        if again and what == "fails":
            raise ValueError("no room")
        if doing_recompute():
            get_recompute_data("plan")
        elif not (again and what == "not saved"):
            save_for_recompute(jnp.arange(3 if again and what == "two rows" else 2), name="plan")
            save_for_recompute(jax.random.key(again and what == "a key"), name="key")
        remat(lambda: inner(again), label="inner")()
        # The recompute proper is the last of the three runs, in which nothing is made again.
        other = doing_recompute() and asked.append(1) is None and len(asked) == 2
        numbers = jnp.array([1, 2, 3 + (other and what == "a number")])
        words = "other" if other and what == "a word" else "word"
        out = {"y": jnp.sin(x), "n": numbers, "words": words}
        return [out] if other and what == "a structure" else out

    def inner(again: bool) -> None:
        if doing_recompute():
            get_recompute_data("plan")
        else:
            save_for_recompute(jnp.array([0, 1 + (again and what == "inside")]), name="plan")

    asked: list[int] = []
    with pytest.raises(VerifyError, match=AGAIN[what]):
        jax.grad(lambda x: remat(layer, verify="raise", label="form")(x)["y"].sum())(X)


def test_what_another_layer_with_the_same_code_needed_does_not_turn_it_off() -> None:
    rng = np.random.default_rng(0)

    def make(inside: bool) -> Any:
        def layer(x: Any) -> Any:
            if inside:
                x = jax.vmap(lambda row: row * (save_for_recompute(jnp.argmax(row))[0] + 1))(x)
            return jnp.where(rng.random(x.shape) > 0.5, jnp.sin(x), 0.0)

        return layer

    for _ in range(2):
        jax.grad(lambda x: remat(make(True))(x).sum())(X)
        with pytest.warns(VerifyWarning, match="output 0"):
            jax.grad(lambda x: remat(make(False), verify="warn")(x).sum())(X)
