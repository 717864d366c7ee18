"""Host memory for what a region holds until backward.

JAX knows two kinds of memory, and a type says in which an array is. A move is an operation of the program, which the
compiler lets run beside the work around it. What is moved goes to the host where the forward is differentiated, and
comes back at the beginning of the recompute, inside of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from roundpipe_core._errors import OptionError, message, shown

from ._backend import aval_bytes
from ._jax import memory_kinds, move_to_device, move_to_host
from ._names import KEPT, SAVED
from ._packing import Sort

__all__ = ["Offload", "Offloading", "back", "check_memory", "offload_option", "sent", "slot_flags"]


@dataclass(frozen=True)
class Offload:
    """What a layer keeps in host memory until backward, as an option: ``remat(layer, offload=Offload(kept=True))``.

    >>> from roundpipe_jax import Offload
    >>> Offload(inputs=True).min_bytes
    65536

    ``remat(layer, offload="cpu")`` stands for ``offload=Offload()``. The option of the outermost region counts.

    Args:
        min_bytes: leave smaller arrays where they are.
        saves: what the layer saves. A save can say otherwise: ``save_for_recompute(mask, offload=False)``.
        inputs: the layer's arguments: all of them, or the positions of some. Leave out those that live on anyway, such
            as parameters.
        kept: outputs of `keep`, and what the function's derivative needs.
    """

    min_bytes: int = 1 << 16
    saves: bool = True
    inputs: bool | tuple[int, ...] = False
    kept: bool = False

    def __post_init__(self) -> None:
        if type(self.min_bytes) is not int or self.min_bytes < 0:
            what = f"min_bytes must be a number of bytes, not {shown(self.min_bytes)}."
            raise OptionError(message(what, [], "pass min_bytes=1 << 20."))
        for name in ("saves", "kept"):
            value = getattr(self, name)
            if type(value) is not bool:
                what = f"{name} must be True or False, not {shown(value)}."
                raise OptionError(message(what, [], f"pass {name}=True: of all its arrays, or False."))
        given: Any = self.inputs
        if type(given) is not bool and not (isinstance(given, tuple) and all(type(n) is int for n in given)):
            what = f"inputs must be True, False or a tuple of positions, not {shown(self.inputs)}."
            raise OptionError(message(what, [], "pass inputs=True for all arguments, inputs=(0,) for the first."))

    def takes(self, array: Any, kept: bool) -> bool:
        """Whether an array of the slot goes to the host."""
        return (self.kept if kept else self.saves) and aval_bytes(array) >= self.min_bytes

    def takes_inputs(self, arrays: Sequence[Any], positions: Sequence[int | None]) -> tuple[bool, ...]:
        """Whether each argument goes to the host. `positions`: that of the argument, None if it has a name."""
        chosen = self.inputs
        return tuple(
            (chosen if isinstance(chosen, bool) else position in chosen) and aval_bytes(array) >= self.min_bytes
            for array, position in zip(arrays, positions, strict=True)
        )


def offload_option(given: Any, function: str) -> Offload | None:
    """What the option `offload` of `function` stands for."""
    if given is None or isinstance(given, Offload):
        return given
    if given == "cpu":
        return Offload()
    raise OptionError(
        message(
            f'{function}: offload must be "cpu", an Offload or None, not {given!r}.',
            [],
            'pass offload="cpu", or Offload(kept=True, ...) to say what goes to the host.',
        )
    )


def slot_flags(plan: Offload | None, arrays: Sequence[Any], sorts: Sequence[Sort]) -> tuple[bool, ...]:
    """Which arrays of a slot go to the host."""
    return tuple(map(functools.partial(_goes, plan), arrays, sorts))


def _goes(plan: Offload | None, array: Any, sort: Sort) -> bool:
    if not _movable(array):
        return False
    return sort.offload if sort.offload is not None else plan is not None and plan.takes(array, sort.kept)


def check_memory(layer: str) -> None:
    """An error where there is no host memory to move to."""
    kinds = memory_kinds()
    if "pinned_host" not in kinds:
        raise OptionError(
            message(
                f"layer {layer!r}: this backend has no host memory to offload to.",
                [("platform", jax.default_backend()), ("kinds of memory", ", ".join(sorted(kinds)) or "none")],
                "leave offload out here.",
            )
        )


def sent(arrays: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    """The arrays, the flagged ones in host memory."""
    if not any(flags):
        return list(arrays)
    return [move_to_host(array) if flag else array for array, flag in zip(arrays, flags, strict=True)]


def back(arrays: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    """The arrays, all of them on the device."""
    if not any(flags):
        return list(arrays)
    return [move_to_device(array) if flag else array for array, flag in zip(arrays, flags, strict=True)]


@dataclass(frozen=True)
class Offloading:
    """A policy of `jax.checkpoint`: what `policy` keeps, and what layers save in host memory."""

    policy: Any
    plan: Offload

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        name = params.get("name") if primitive.name == "name" else None
        if name in (SAVED, KEPT) and _movable(avals[0]) and self.plan.takes(avals[0], kept=name == KEPT):
            return TO_HOST(primitive, *avals, **params)
        return self.policy(primitive, *avals, **params)


TO_HOST = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[SAVED, KEPT],
    offload_src="device",
    offload_dst="pinned_host",
)


def _movable(array: Any) -> bool:
    return not jnp.issubdtype(array.dtype, jax.dtypes.extended)
