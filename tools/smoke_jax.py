"""What a user with JAX has: a layer that routes once, in both lanes. Writes a tape to the file it is given."""

import sys
from typing import Literal

import jax
import jax.numpy as jnp

from roundpipe_jax import Tape, recompute_once, record, remat, replay


def layer(x: jax.Array) -> jax.Array:
    chosen = recompute_once(lambda: jax.lax.top_k(jax.lax.stop_gradient(x), 2)[1])
    return jnp.take_along_axis(jnp.exp(x), chosen, axis=1)


x = jnp.arange(12.0).reshape(3, 4)
lanes: tuple[Literal["checkpoint", "custom_vjp"], ...] = ("checkpoint", "custom_vjp")
for mode in lanes:
    routed = remat(layer, mode=mode)
    for gradient in (jax.grad(lambda x: routed(x).sum()), jax.jit(jax.grad(lambda x: routed(x).sum()))):  # noqa: B023
        if jnp.count_nonzero(gradient(x)) != 6:
            sys.exit(f"a wrong gradient in the lane {mode}")

with record() as tape:
    expected = remat(layer)(x)
tape.save(sys.argv[1])
with replay(Tape.load(sys.argv[1])):
    if not jnp.array_equal(remat(layer)(x), expected):
        sys.exit("the replay differs")
