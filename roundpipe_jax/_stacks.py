"""The layers of a scanned stack on a tape: one region each, in order (R13).

Inside the scan there is one layer, whose decisions are tracers. Recorded, they leave the scan among its outputs and are
taken apart; replayed, the layers' regions are stacked and enter among its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from roundpipe_core._errors import TapeError, message
from roundpipe_core._phase import Phase, thread
from roundpipe_core._replay import TapedSlot, TapeRun
from roundpipe_core._slots import Slot, facts_of, label_of, spoken
from roundpipe_core._tape import OUTSIDE, Region, Tape
from roundpipe_core._trees import paths

from ._inner import lost_with_its_trace
from ._jax import named
from ._names import SAVED
from ._packing import Template
from ._runs import JaxRun
from ._taped import StackRun, Taped, reads

__all__ = ["Stack", "stack_of"]


class Stack:
    """A stack while no tape is recorded or replayed."""

    taped = False
    arrays: Sequence[Any] = ()
    """What each layer gets of the tape, stacked."""

    def layer(self, call: Callable[[], Any], arrays: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Inside the scan: what `call` returns, and the arrays to hand out."""
        return call(), []

    def finish(self, arrays: Sequence[Any]) -> None:
        """After it, with the arrays that were handed out, stacked."""


def stack_of(label: Any, count: int) -> Stack:
    """What a stack of `count` layers called `label` is to the run around it."""
    run = thread.run
    if isinstance(run, TapeRun) and run.phase is Phase.FORWARD:
        run.check(f"layer {label_of(label)!r} runs")
        return _Recorded(run, count)
    if isinstance(run, JaxRun) and run.marks is not None:
        return _Recorded(run, count)
    if isinstance(run, (TapeRun, JaxRun)) and isinstance(run.slot, TapedSlot):
        return _Replayed(run, label, count) if count else _Recorded(run, 0)  # traced all the same, and asks nothing
    return Stack()


class _Recorded(Stack):
    taped = True

    def __init__(self, run: TapeRun | JaxRun, count: int) -> None:
        self.run, self.count = run, count

    def layer(self, call: Callable[[], Any], arrays: Sequence[Any]) -> tuple[Any, list[Any]]:
        slot = Slot(OUTSIDE)
        slot.rows = frozenset()
        run = StackRun(Phase.FORWARD, slot)
        try:
            result = _inside(run, None, self.run.scope, call)
        except Exception:
            if isinstance(self.run, TapeRun):
                self.run.lost = self.run.lost or run.lost or _lost(slot)
            raise
        saved: list[Any] = []
        self.template = Template(slot, saved)
        return result, saved

    def finish(self, arrays: Sequence[Any]) -> None:
        for n in range(self.count):
            for key, _ in self.template.children:
                self.run.count(key)
            self.template.fill(self.run.slot, [self._kept(array[n]) for array in arrays])

    def _kept(self, array: Any) -> Any:
        if isinstance(self.run, JaxRun) and self.run.marks is not None:  # in a region, whose program is marked
            marks = self.run.marks
            return marks.names([marks.mark(named(array, SAVED))])[0]
        return array


class _Replayed(Stack):
    taped = True

    def __init__(self, run: TapeRun | JaxRun, label: Any, count: int) -> None:
        self.run = run
        slots = [run.child(label) for _ in range(count)]
        self.layers = [Taped(slot) for slot in slots if isinstance(slot, TapedSlot)]
        for n, layer in enumerate(self.layers):
            if not _alike(layer, self.layers[0]):
                raise _unlike(n, layer, self.layers[0])
        self.arrays = [jnp.stack(those) for those in zip(*(layer.arrays for layer in self.layers), strict=True)]

    def layer(self, call: Callable[[], Any], arrays: Sequence[Any]) -> tuple[Any, list[Any]]:
        region = self.layers[0].skeleton.filled(arrays, checked=True).root
        tape = Tape(Region(OUTSIDE, given=False))
        tape.root.regions = [region]
        region.scope = self.run.scope
        run = StackRun(Phase.RECOMPUTE, TapedSlot(tape.root, tape))
        result = _inside(run, arrays, self.run.scope, call)
        [slot] = run.slot.sequence  # type: ignore[attr-defined]
        self.reads = reads(slot)
        numbers = {id(array): n for n, array in enumerate(arrays)}
        self.narrowed = [(numbers[id(array)], dtype) for array, dtype in run.narrowed]
        return result, []

    def finish(self, arrays: Sequence[Any]) -> None:
        for layer in self.layers:
            layer.mark(self.reads)
            for n, dtype in self.narrowed:
                layer.narrow(n, dtype)


def _lost(slot: Slot) -> TapeError | None:
    """An error if a layer that has failed saved something, which is gone with the trace of the scan."""
    if Template(slot, []).empty:
        return None
    [layer] = [child for children in slot.children.values() for child in children]
    return lost_with_its_trace(layer.label, facts_of(layer.saves()))


def _inside(run: TapeRun, replayed: Sequence[Any] | None, scope: tuple[str, ...], call: Callable[[], Any]) -> Any:
    run.scope = scope
    before = thread.run
    try:
        run.begin(replayed)
        thread.run = run
        return call()
    finally:
        thread.run = before
        run.end()


def _alike(one: Taped, other: Taped) -> bool:
    """Whether one program serves both."""
    if one.key_of_any_label != other.key_of_any_label:
        return False
    return [jax.typeof(array) for array in one.arrays] == [jax.typeof(array) for array in other.arrays]


def _unlike(n: int, layer: Taped, first: Taped) -> TapeError:
    return TapeError(
        message(
            f"remat_layers runs its layers as one, and the tape has other decisions for layer {n} "
            f"({layer.slot.label!r}) than for layer 0 ({first.slot.label!r}).",
            [(f"layer {n}", _described(layer)), ("layer 0", _described(first))],
            "replay layers that decide differently in a Python loop of remat layers.",
        )
    )


def _described(layer: Taped) -> str:
    held = (
        f"{spoken(decision.key)}{item}: {getattr(leaf, 'dtype', type(leaf).__name__)}{list(getattr(leaf, 'shape', ()))}"
        f"{'' if isinstance(leaf, jax.Array) else f' {leaf!r}'}"
        for _, _, decision in Tape(layer.slot.region).decisions()
        for item, leaf in zip(paths(decision.spec), decision.leaves, strict=True)
    )
    return ", ".join(held) or "nothing"
