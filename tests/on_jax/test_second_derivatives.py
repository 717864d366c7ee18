"""Second derivatives where JAX takes programs apart: in the body of a scan, of a loop over layers, under vmap (R10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from roundpipe_jax import keep, remat, remat_layers, save_for_recompute, save_policy
from tests.on_jax.oracle import same

W = jnp.sin(jnp.arange(2 * 9.0)).reshape(2, 3, 3)
X = jnp.cos(jnp.arange(6.0)).reshape(2, 3)


def called(function: Any, *args: Any) -> Any:
    return function(*args)


def deciding(w: Any, x: Any, keep: Any = keep) -> Any:
    h = jnp.tanh(x @ w)
    (top,) = save_for_recompute(lax.stop_gradient(h).argmax(-1, keepdims=True))
    return h * jnp.take_along_axis(jnp.sin(h), top, -1) + x


def keeping(w: Any, x: Any, keep: Any = keep) -> Any:
    return jnp.cos(keep(lambda x, w: jnp.tanh(x @ w) * x, x, w))


def keeping_a_rule(w: Any, x: Any, keep: Any = keep) -> Any:
    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return jnp.sin(x @ w)

    product.defvjp(
        lambda x, w: (product(x, w), (x, w)),
        lambda known, g: jax.vjp(lambda x, w: jnp.sin(x @ w), *known)[1](g),
    )
    return jnp.cos(keep(product, x, w)) + x


Layer = Callable[..., Any]


def in_a_scan(layer: Layer, wrap: Callable[[Layer], Layer]) -> Layer:
    return lambda w, x: lax.scan(lambda x, w: (wrap(layer)(w, x), None), x, w)[0]


def around_a_scan(layer: Layer, wrap: Callable[[Layer], Layer]) -> Layer:
    return wrap(lambda w, x, *how: lax.scan(lambda x, w: (layer(w, x, *how), None), x, w)[0])


def both(layer: Layer, wrap: Callable[[Layer], Layer]) -> Layer:
    return around_a_scan(layer, wrap) if wrap is bare else around_a_scan(wrap(layer), wrap)


def over_layers(layer: Layer, wrap: Callable[[Layer], Layer]) -> Layer:
    return in_a_scan(layer, wrap) if wrap is bare else lambda w, x: remat_layers(layer, w, x)


def in_a_batch(layer: Layer, wrap: Callable[[Layer], Layer]) -> Layer:
    def run(w: Any, x: Any) -> Any:
        def turn(x: Any, w: Any) -> tuple[Any, None]:
            return jax.vmap(wrap(layer), (None, 0))(w, x[:, None])[:, 0], None

        return lax.scan(turn, x, w)[0]

    return run


def bare(layer: Layer) -> Layer:
    return lambda w, x: layer(w, x, called)


def stock(layer: Layer) -> Layer:
    return jax.checkpoint(layer, policy=save_policy())  # type: ignore[no-any-return]


PLACES = (in_a_scan, around_a_scan, both, over_layers, in_a_batch)
FORMS: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "grad of grad": lambda f: jax.grad(lambda w: (jax.grad(f)(w) ** 2).sum()),
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(f)),
    "hessian": jax.hessian,
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
}


def second(form: str, layer: Layer, place: Any, wrap: Callable[[Layer], Layer]) -> Any:
    return jax.jit(FORMS[form](lambda w: place(layer, wrap)(w, X).sum()))(W)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layer", [deciding, keeping, keeping_a_rule])
def test_of_layers_in_loops(layer: Layer, place: Any) -> None:
    want = second("grad of grad", layer, place, bare)
    same(second("grad of grad", layer, place, remat), want, 1e-4)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "grad of grad"])
def test_in_other_ways(form: str) -> None:
    def layer(w: Any, x: Any, keep: Any = keep) -> Any:
        return deciding(w, keeping(w, x, keep))

    same(second(form, layer, in_a_scan, remat), second(form, layer, in_a_scan, bare), 1e-4)


@pytest.mark.parametrize("layer", [deciding, keeping])
def test_in_other_peoples_checkpoint(layer: Layer) -> None:
    same(second("grad of grad", layer, in_a_scan, stock), second("grad of grad", layer, in_a_scan, bare), 1e-4)
