"""A region of a tape, taken apart for a trace: its arrays go in as arguments, all else is part of the program."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from typing import Any

import jax

from roundpipe_core._backend import backend_of, numpys, origin_of
from roundpipe_core._errors import TapeError, message
from roundpipe_core._phase import Phase, thread
from roundpipe_core._replay import TapedEntry, TapedSlot, TapeRun
from roundpipe_core._slots import Slot, spoken
from roundpipe_core._tape import Decision, Skeleton, Tape

from ._backend import check_holds, largest
from ._identity import token
from ._jax import is_tracer
from ._packing import signature
from ._runs import JaxRun
from ._tapes import moved

__all__ = ["Reads", "StackRun", "Taped", "reads", "without_axes"]

Reads = tuple[tuple[bool, ...], tuple[Any, ...]]
"""Which entries of a slot were read, and those of the slots in it."""


class StackRun(TapeRun):
    """A recording or a replay of the one layer that a scan traces."""

    __slots__ = ("narrowed",)

    def __init__(self, phase: Phase, slot: Slot) -> None:
        super().__init__(phase, slot)
        self.narrowed: list[tuple[Any, Any]] = []  # see `JaxRun`


class Taped:
    """What a slot of a tape holds."""

    def __init__(self, slot: TapedSlot) -> None:
        self.slot = slot
        held = Tape(slot.region).mapped(self._as_jax_has_it, checked=True)
        self.arrays, self.skeleton = held.split(lambda leaf: isinstance(leaf, jax.Array))
        found = [part for part in _leaves(held) if isinstance(part[3], jax.Array)]
        self.decisions = [("/".join(filter(None, (slot.label, layer))), decision) for layer, decision, _, _ in found]
        self.axes = [decision.axes[n] if decision.axes else 0 for _, decision, n, _ in found]

    def _as_jax_has_it(self, leaf: Any) -> Any:
        if origin_of(leaf) != "numpy":
            return moved(self.slot.tape, leaf)
        return leaf if numpys.owns(leaf) else numpys.adopt(leaf, None)  # numpy's in any framework

    @property
    def key(self) -> Hashable:
        """Equal for what a layer cannot tell apart; None if that cannot be known."""
        parts = self._parts(self.skeleton.key)
        return None if None in parts else tuple(parts)

    @property
    def key_of_any_label(self) -> Hashable:
        """The same, whatever the region is called. What cannot be known differs."""
        region = copy.copy(self.skeleton.root)
        region.label, region.given = "", False
        return tuple(object() if part is None else part for part in self._parts(Skeleton(region).key))

    def _parts(self, key: str) -> list[Hashable]:
        parts: list[Hashable] = [key]
        for _, _, decision in Tape(self.slot.region).decisions():
            parts.append(signature(decision.spec))
            parts += [token(leaf) for leaf in decision.leaves if backend_of(leaf) is None or origin_of(leaf) == "numpy"]
        return parts

    def mark(self, found: Reads) -> None:
        """Note on the tape's own slot what the program has read."""
        _mark(self.slot, found)

    def narrow(self, n: int, dtype: Any) -> None:
        """The layer has the `n`th array in `dtype`. Refuse it if that cannot hold it, or if nobody can tell."""
        array = self.arrays[n]
        if isinstance(thread.run, (JaxRun, StackRun)):  # who began that run knows more
            thread.run.narrowed.append((array, dtype))
            return
        layer, decision = self.decisions[n]
        below = decision.below
        if is_tracer(array) and below is not None and below - 1 <= largest(dtype):
            return
        what = f"whether {dtype}, which the layer decides, holds its {array.dtype} cannot be seen while this is traced"
        if not is_tracer(array):
            try:
                check_holds(array, dtype)
            except ValueError as error:
                what = str(error)
            else:
                return
        raise TapeError(
            message(
                f"the tape does not fit layer {layer!r}, {spoken(decision.key)}: {what}.",
                [("the tape declares", f"below {below}")],
                "decide in the dtype of the tape, or tell the range before it is traced: tape.declare(below=...).",
            )
        )


def _leaves(tape: Tape) -> Iterator[tuple[str, Decision, int, Any]]:
    for layer, _, decision in tape.decisions():
        for n, leaf in enumerate(decision.leaves):
            yield layer, decision, n, leaf


def without_axes(tape: Tape) -> Tape:
    """`tape`, whose stacked arrays have been replaced by items."""
    for _, _, decision in tape.decisions():
        decision.axes = ()
    return tape


def reads(slot: TapedSlot) -> Reads:
    """What of a slot was read."""
    own = tuple(isinstance(entry, TapedEntry) and entry.was_read for entry in slot.entries.values())
    return own, tuple(reads(inner) for inner in slot.sequence)


def _mark(slot: TapedSlot, found: Reads) -> None:
    for entry, read in zip(slot.entries.values(), found[0], strict=True):
        if isinstance(entry, TapedEntry):
            entry.was_read |= read
    for inner, those in zip(slot.sequence, found[1], strict=True):
        _mark(inner, those)
