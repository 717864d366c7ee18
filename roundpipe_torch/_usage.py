"""What regions hold between forward and backward, told per layer (R12)."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal

import torch

from roundpipe_core import Flip
from roundpipe_core._report import html_table, in_words, json_of, text_table
from roundpipe_core._slots import Slot

from ._errors import OUT_OF_MEMORY
from ._inputs import tensors_in
from ._offload import Here, Parcel

__all__ = ["LayerUsage", "Usage", "found", "held", "usage"]

_HEAD = ("layer", "calls", "alive", "inputs", "slot", "kept", "on the host", "decisions", "flips")


@dataclass(frozen=True)
class LayerUsage:
    """One layer's regions. Bytes are those of all its `calls` together."""

    layer: str
    calls: int = 0
    alive: int = 0
    """Calls whose graph still holds what they kept."""
    inputs: int = 0
    """Bytes of tensors that the recompute starts from, parameters not counted."""
    slot: int = 0
    """Bytes of decisions."""
    kept: int = 0
    """Bytes of what `keep` holds."""
    host: int = 0
    """Bytes, of these three, in host memory by `offload`."""
    decisions: int = 0
    """Saves, of regions inside too."""
    flips: int = 0
    """Items that `verify` found a plain recompute would have made differently."""

    def cells(self) -> tuple[str, ...]:
        """As a line of the table."""
        sizes = map(in_words, (self.inputs, self.slot, self.kept, self.host))
        counts = map(str, (self.calls, self.alive))
        return self.layer, *counts, *sizes, str(self.decisions), str(self.flips)


class Usage:
    """What `usage` saw. Prints as a table, one line a layer in order of first call; is up to date whenever asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dead: deque[weakref.ref[Slot]] = deque()  # filled wherever the collector runs, maybe under the lock
        self._layers: dict[str, LayerUsage] = {}
        self._graphs: dict[weakref.ref[Slot], tuple[str, int]] = {}
        self._bytes = self._peak = 0

    @property
    def layers(self) -> tuple[LayerUsage, ...]:
        """One entry a label."""
        with self._lock:
            self._bury()
            return tuple(self._layers.values())

    @property
    def bytes(self) -> int:
        """Held at this moment."""
        with self._lock:
            self._bury()
            return self._bytes

    @property
    def peak(self) -> int:
        """Most held at one moment."""
        return self._peak

    def __str__(self) -> str:
        return f"{text_table(_HEAD, [layer.cells() for layer in self.layers])}\n{self._totals()}"

    def to_json(self) -> str:
        """The same for programs. Bytes are numbers."""
        return json_of(self.layers, bytes=self.bytes, peak=self.peak)

    def to_html(self) -> str:
        """The same as a page."""
        rows = [layer.cells() for layer in self.layers]
        return html_table("Held between forward and backward", _HEAD, rows, [self._totals()])

    def _totals(self) -> str:
        return f"held now: {in_words(self.bytes)}, at most: {in_words(self.peak)}"

    def _took(self, slot: Slot, inputs: int, host: int) -> None:
        slots, kept, decisions = _inside(slot)
        total = inputs + slots + kept
        layer = slot.label.partition(" (")[0]
        with self._lock:
            self._bury()
            row = self._layers.get(layer, LayerUsage(layer))
            self._layers[layer] = replace(
                row,
                calls=row.calls + 1,
                alive=row.alive + 1,
                inputs=row.inputs + inputs,
                slot=row.slot + slots,
                kept=row.kept + kept,
                host=row.host + host,
                decisions=row.decisions + decisions,
            )
            self._graphs[weakref.ref(slot, self._dead.append)] = layer, total
            self._bytes += total
            self._peak = max(self._peak, self._bytes)

    def _bury(self) -> None:
        """Take off what graphs held that are gone."""
        while self._dead:
            layer, total = self._graphs.pop(self._dead.popleft())
            self._bytes -= total
            self._layers[layer] = replace(self._layers[layer], alive=self._layers[layer].alive - 1)

    def _flipped(self, label: str, flips: int) -> None:
        layer = label.partition(" (")[0]
        with self._lock:
            row = self._layers.get(layer, LayerUsage(layer))
            self._layers[layer] = replace(row, flips=row.flips + flips)


def _inside(slot: Slot) -> tuple[int, int, int]:
    """Bytes of decisions, bytes of what is kept, and the number of saves, of inner regions too."""
    slots = sum(entry.nbytes() for entry in slot.entries.values())
    kept = sum(part.places().total() for part in slot.kept.values())
    decisions = len(slot.entries)
    for inner in (child for children in slot.children.values() for child in children):
        more = _inside(inner)
        slots, kept, decisions = slots + more[0], kept + more[1], decisions + more[2]
    return slots, kept, decisions


_watching: list[Usage] = []


class usage:  # noqa: N801 - used like a function
    """Watch what checkpointed layers hold from their forward to their backward.

    >>> import torch
    >>> from roundpipe_torch import remat, save_for_recompute, usage
    >>> @remat(label="router")
    ... def layer(x):
    ...     best, = save_for_recompute(x.detach().argmax(-1, keepdim=True))
    ...     return x.exp().gather(-1, best)
    >>> with usage() as held:
    ...     y = layer(torch.ones(4, 8, requires_grad=True))
    >>> [row] = held.layers
    >>> row.layer, row.inputs, row.slot, row.decisions
    ('router', 128, 32, 1)
    >>> print(held)
    layer   calls  alive  inputs  slot  kept  on the host  decisions  flips
    router  1      1      128 B   32 B  0 B   0 B          1          0
    held now: 160 B, at most: 160 B

    Regions of every thread are counted, outermost ones with all that is inside. If the device or the host runs out of
    memory in the block, the table is a note on the error, and tells which layers hold what.

    An input of two layers is counted with both. What lies in parameters is not counted.

    Implements R12.
    """

    def __enter__(self) -> Usage:
        self._usage = Usage()
        _watching.append(self._usage)
        return self._usage

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        _watching.remove(self._usage)
        if isinstance(error, OUT_OF_MEMORY):
            error.add_note(f"Held by checkpointed layers:\n{self._usage}")
        return False


def held(slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any], parcel: Parcel | None) -> None:
    """A region that is not inside another has run its forward. Free unless somebody watches."""
    if not _watching:
        return
    tensors = [tensor for tensor in tensors_in((args, kwargs)) if not isinstance(tensor, torch.nn.Parameter)]
    inputs = sum({here.memory: here.nbytes for here in map(Here, tensors)}.values())
    for watching in tuple(_watching):  # another thread may end one of them meanwhile
        watching._took(slot, inputs, 0 if parcel is None else parcel.nbytes())


def found(flips: Iterable[Flip], label: str) -> None:
    """`verify` found these in a region of this label."""
    if _watching:
        count = len(tuple(flips))
        for watching in tuple(_watching):
            watching._flipped(label, count)
