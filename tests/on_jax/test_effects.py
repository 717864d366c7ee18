"""Decisions made by `io_callback`, an effect that `jax.checkpoint` does not take."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from roundpipe_jax import MismatchError, doing_recompute, get_recompute_data, recompute_once, remat, save_for_recompute
from tests.on_jax.oracle import LANES, WAYS

X = jnp.array([0.3, -1.2, 0.7])


class Host:
    """Decides otherwise each time it is asked."""

    def __init__(self, *, ordered: bool = False) -> None:
        self.calls, self.ordered = 0, ordered

    def _count(self) -> None:
        self.calls += 1

    def _answer(self) -> Any:
        self._count()
        return np.int32(1 + self.calls)

    def decide(self) -> Any:
        return io_callback(self._answer, jax.ShapeDtypeStruct((), jnp.int32), ordered=self.ordered)

    def log(self) -> None:
        io_callback(self._count, None)


def seed(host: Host) -> Any:
    if doing_recompute():
        (index,) = get_recompute_data()
        return index
    index = host.decide()
    save_for_recompute(index)
    return index


def returned(host: Host) -> Any:
    (index,) = save_for_recompute(host.decide())
    return index


def in_a_jitted_function(host: Host) -> Any:
    (index,) = save_for_recompute(jax.jit(lambda: host.decide() + 0)())
    return index


def once(host: Host) -> Any:
    return recompute_once(host.decide)


STYLES: list[Callable[[Host], Any]] = [seed, returned, in_a_jitted_function, once]


def gradient(layer: Any, way: str) -> Any:
    return WAYS[way](jax.grad(lambda x: layer(x).sum()))


def steps(x: Any) -> Any:
    """A save inside an inner trace."""

    def step(x: Any, _: Any) -> Any:
        (best,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x)), name="best")
        return jnp.sin(x) * (1 + best), None

    return jax.lax.scan(step, x, None, length=2)[0]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("mode", LANES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ordered", [False, True])
def test_an_effect_decides_once(style: Callable[[Host], Any], mode: Any, way: str, ordered: bool) -> None:
    host = Host(ordered=ordered)
    got = gradient(remat(lambda x: jnp.sin(x) * style(host), mode=mode), way)(X)
    np.testing.assert_allclose(got, 2 * jnp.cos(X), rtol=1e-6)
    jax.effects_barrier()
    assert host.calls == 1


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("ordered", [False, True])
def test_an_effect_before_a_restart_decides_once_in_every_call(style: Callable[[Host], Any], ordered: bool) -> None:
    host = Host(ordered=ordered)
    layer = gradient(remat(lambda x: steps(x * style(host))), "eager")
    for call in (1, 2):  # the second knows of the restart
        np.testing.assert_allclose(layer(X), jax.grad(lambda x, i=call + 1: steps(x * i).sum())(X), rtol=1e-5)
        jax.effects_barrier()
        assert host.calls == call


def test_under_jit_an_effect_does_not_go_with_a_save_inside() -> None:
    host = Host()
    with pytest.raises(MismatchError, match=r"layer 'both': it saves inside a scan.* and has an io_callback"):
        gradient(remat(lambda x: steps(x * seed(host)), label="both"), "jit")(X)
    got = gradient(lambda x: remat(steps)(x * host.decide()), "jit")(X)  # the way out
    np.testing.assert_allclose(got, jax.grad(lambda x: steps(x * 2).sum())(X), rtol=1e-5)


@pytest.mark.parametrize("mode", LANES)
@pytest.mark.parametrize("way", WAYS)
def test_an_effect_that_was_not_saved_is_refused_in_backward(mode: Any, way: str) -> None:
    host = Host()

    def layer(x: Any) -> Any:
        (best,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x)))
        return jnp.sin(x) * host.decide() + best

    ours = remat(layer, mode=mode, label="draws")
    np.testing.assert_allclose(WAYS[way](ours)(X), jnp.sin(X) * 2 + 2, rtol=1e-6)  # no gradient, no recompute
    with pytest.raises(MismatchError, match=r"layer 'draws': the recompute would run an io_.*again(?s:.*)called at: "):
        gradient(ours, way)(X)


@pytest.mark.parametrize("mode", LANES)
def test_a_log_is_for_one_phase(mode: Any) -> None:
    host = Host()

    def layer(x: Any, guarded: bool) -> Any:
        (best,) = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x)))
        if not guarded or not doing_recompute():
            host.log()
        return jnp.sin(x) * best

    ours = remat(layer, mode=mode)
    np.testing.assert_allclose(gradient(lambda x: ours(x, True), "jit")(X), 2 * jnp.cos(X), rtol=1e-6)
    jax.effects_barrier()
    assert host.calls == 1
    with pytest.raises(MismatchError, match=r"only if not doing_recompute"):
        gradient(lambda x: ours(x, False), "jit")(X)
