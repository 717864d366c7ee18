"""The effect of operations that may be anywhere in a program, and that JAX drops nowhere."""

from __future__ import annotations

from jax._src import effects  # the lists of effects that may be in a loop, a rule or a checkpoint have no public name

__all__ = ["Stays"]


class Stays(effects.Effect):
    """Of an operation that may be anywhere, and is dropped nowhere."""


for _kinds in (
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
    effects.lowerable_effects,
    effects.partial_eval_kept_effects,
):
    _kinds.add_type(Stays)
