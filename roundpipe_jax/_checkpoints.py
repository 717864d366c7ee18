"""Saves in other people's `jax.checkpoint`, where the code after a save goes on with the value that it gave to it.

A value that was saved is kept through the operation that hands it back, see `_pins`. Code that does not use what the
save returned would make its decision again in the recompute. So where JAX divides a checkpoint into forward and
recompute, every use of a saved value is led through that operation first: those of the derivative too, which are in the
program by then.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, primitives
from jax.interpreters import partial_eval

from ._jax import replaced
from ._tags import lead_through_tags

__all__ = ["lead_checkpoints"]

_led_programs: weakref.WeakKeyDictionary[Jaxpr, Jaxpr | None] = weakref.WeakKeyDictionary()
"""One for each, since JAX's caches know programs by identity. None where nothing is saved: it stays as it is."""


def lead_checkpoints() -> None:
    """From now on, in every checkpoint. Called once."""
    running: Any = partial_eval.custom_partial_eval_rules
    staged: Any = partial_eval.partial_eval_jaxpr_custom_rules
    divide, divide_inside = running[primitives.remat_p], staged[primitives.remat_p]

    def divided(trace: Any, *tracers: Any, jaxpr: Jaxpr, **params: Any) -> Any:
        return divide(trace, *tracers, jaxpr=_led(jaxpr), **params)

    def divided_inside(policy: Any, unknown: Sequence[bool], held: Sequence[bool], eqn: JaxprEqn) -> Any:
        led = _led(eqn.params["jaxpr"])
        return divide_inside(policy, unknown, held, replaced(eqn, params=eqn.params | {"jaxpr": led}))

    running[primitives.remat_p], staged[primitives.remat_p] = divided, divided_inside


def _led(jaxpr: Jaxpr) -> Jaxpr:
    if jaxpr not in _led_programs:
        led = lead_through_tags(ClosedJaxpr(jaxpr, []), "", divided=True).jaxpr
        _led_programs[jaxpr] = None if led is jaxpr else led
    return _led_programs[jaxpr] or jaxpr
