"""update_once: what a layer does to state outside of itself, counted."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from roundpipe_jax import MismatchError, keep, record, remat, remat_layers, replay, save_for_recompute, update_once
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


@pytest.mark.parametrize("way", WAYS)
def test_in_a_scan_in_a_layer_it_is_an_error(way: str) -> None:
    seen = Seen()
    layer = remat(lambda x: jax.lax.scan(lambda x, _: (seen.layer(x), None), x, None, length=3)[0], label="stack")
    with pytest.raises(MismatchError, match="recompute too would make a callback from update_once") as caught:
        WAYS[way](slope(layer))(X)
    assert "layer 'stack'" in str(caught.value)
    assert re.search(r"layer at: .*once\.py:\d+\n  update_once\(.*debug_callback.*: .*once\.py:\d+", str(caught.value))
    assert "wrap the function in there in remat" in str(caught.value)
    assert seen.values == []


def test_other_callbacks_are_left_alone() -> None:
    def scanned(x: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            (best,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x)))
            jax.debug.callback(lambda _: None, best)
            return jnp.sin(x) * x[best], None

        return jax.lax.scan(body, x, None, length=2)[0]

    jax.jit(slope(remat(scanned)))(X)
