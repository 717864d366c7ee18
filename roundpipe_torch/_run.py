"""A run of a region under autograd: what is saved in it is traced, random numbers and buffers line up (R7, R10)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from roundpipe_core._backend import backend_of
from roundpipe_core._phase import Phase, Run
from roundpipe_core._places import Place, where
from roundpipe_core._replay import TapedSlot
from roundpipe_core._slots import NOTHING, Entry, Key, Slot
from roundpipe_core._trees import paths

from ._backend import adopted, first_other, without_gradient
from ._buffers import Buffers, Moved
from ._errors import CheckpointMismatchError, graph_saved, saved_in_vain, saved_inside_torchs, tensor_changed
from ._hooks import Hooked
from ._keep import keep
from ._matching import Trace, region_codes
from ._offload import MOVED, Offload, Parcel, Shipped
from ._state import PLAIN_VALUES, Generators, attributes_of, equal
from ._torchs import in_backward_of_others, in_forward_of_others, unseen
from ._transforms import transformed

__all__ = ["DECIDED", "TorchRun", "is_inside", "is_told", "pack_plainly", "unpack_plainly"]

_BACKEND = backend_of(torch.empty(0))
_DEFAULT_PLAN = Offload()
DECIDED = ("auto", None)
"""Among what a run counts: decisions of `auto`. No scope or region is counted under such a key."""


class _State(NamedTuple):
    """What later code depends on, besides its arguments, right after a save."""

    numbers: list[torch.Tensor] | None  # states of the generators
    buffers: list[Moved]


class TorchRun(Run):
    """A run whose saved tensors are traced and whose random numbers line up."""

    own_graph = False
    """The gradient is the recompute's own."""
    knowing = False
    """A recompute of a layer that asks for its phase."""
    watching = False
    """Buffers may change in here."""
    plan: Offload | None = None
    hooked: Sequence[Hooked] = ()
    """What rests while this recompute runs, and those of regions inside."""
    witnesses: tuple[Trace, ...] = ()
    """Traces of regions of the second engine around: see `other_layout`."""
    buffers: Buffers | None = None
    """Of its own region."""
    parcel: Parcel | None = None
    """What it has in host memory, once there is something."""
    torchs_recompute = False
    """Torch's own checkpoint runs its part again."""
    leaves_out = False
    """There are parts that the recompute does without."""
    keeping = False
    """Inside a function that the recompute leaves out."""
    asked = False
    """For its phase, in there."""
    _aligned: Sequence[torch.Tensor] = ()
    _drew = False

    def __init__(
        self, phase: Phase, slot: Slot, trace: Trace | None, generators: Generators | None, outer: Run | None = None
    ) -> None:
        super().__init__(phase, slot)
        self._outer = outer  # the run that this one is a part of
        self.trace = trace
        self.generators = generators
        if outer is not None:
            self.repeats = outer.repeats
            if isinstance(outer, TorchRun):
                self.own_graph, self.knowing = outer.own_graph, outer.knowing
                self.watching, self.plan, self.hooked = outer.watching, outer.plan, outer.hooked
                self.witnesses = () if outer.keeping else outer.witnesses

    def consulted(self, point: Any = None) -> None:
        if self.trace is not None and not self.keeping:
            self.trace.split(point)

    def told(self) -> None:
        if self.keeping:  # what is learned in there the recompute does not ask
            self.asked = True
            return
        if self.trace is not None:
            self.trace.told()
        if self._outer is not None:  # what the layer inside does with the answer may show in what it returns
            self._outer.told()

    def dropped(self, key: Key, data: tuple[Any, ...], saved: tuple[Any, ...], place: Place) -> None:
        if transformed() is None:
            item = self._decide(lambda: first_other(data, saved))
            if item is not None:
                raise saved_in_vain(self.slot.label, key, item, place)

    def refuse_unread(self) -> None:
        """The layer has returned: it should have read what was saved."""
        said = self.unread()
        if said is not None:
            raise CheckpointMismatchError(said)

    def keep(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], place: Place) -> Any:
        self._leave_out()
        if transformed() is not None:  # of no tensor in there can be told what it is a view of
            return function(*args, **kwargs)
        return keep(self, function, args, kwargs, place)

    def stored(self, entry: Entry, offload: bool | None) -> None:
        self._refuse_others(entry.place)
        if not PLAIN_VALUES.issuperset(map(type, entry.leaves)):
            refuse_graphs(self.slot.label, entry)
        wanted = self.plan is not None and self.plan.saves if offload is None else offload
        if not wanted or self.slot.rows is not None:  # a tape takes the arrays themselves
            return
        for n, backend in enumerate(entry.backends):
            if backend is _BACKEND:
                moved = self.load().take(entry.leaves[n], always=offload is True, private=True)
                if moved is not None:
                    entry.leaves[n], entry.backends[n] = moved, MOVED

    def update(self, function: Callable[[], Any], called: Any, place: Place) -> None:
        if not self.repeats:
            self._refuse_others(place)
        self._leave_out()
        super().update(function, called, place)

    def _leave_out(self) -> None:
        run: Run | None = self
        while isinstance(run, TorchRun):
            run.leaves_out = True
            run = run._outer

    def _refuse_others(self, place: Place) -> None:
        """Another checkpoint that is to run this part again would not know what is decided here."""
        if self.keeping:
            return
        if (not torch.is_grad_enabled() and in_forward_of_others(region_codes)) or (
            torch._C._current_graph_task_id() != -1 and in_backward_of_others()
        ):
            raise saved_inside_torchs(self.slot.label, place)

    def load(self) -> Parcel:
        """The parcel of this run's region."""
        if self.parcel is None:
            self.parcel = Parcel(self.plan or _DEFAULT_PLAN)
        return self.parcel

    def ship(self, tensor: torch.Tensor) -> Shipped | None:
        """`tensor`, which `keep` holds, on its way to the host; None if it stays."""
        if self.plan is None or not self.plan.kept or self.slot.rows is not None:
            return None
        return self.load().take(tensor)

    def outermost(self) -> TorchRun:
        """The run of a region that this one is inside of, itself if there is none."""
        return [self, *(run for run in self.around() if run.trace is not None)][-1]

    def traces(self) -> Iterator[Trace]:
        """The traces of this run and of those that it is a part of."""
        return (run.trace for run in self.around() if run.trace is not None)

    def around(self) -> Iterator[TorchRun]:
        """This run, and those that it is a part of."""
        run: Run | None = self
        while isinstance(run, TorchRun):
            yield run
            run = run._outer

    def observe(self, buffers: Buffers | None) -> None:
        """Its region's buffers, if it has any."""
        if buffers is not None:
            self.buffers, self.watching = buffers, True

    def state(self) -> _State | list[torch.Tensor] | None:  # R7
        self._leave_out()
        numbers = self.generators.since_start() if self.generators else None
        if not self.watching:
            return numbers
        buffers = (run.buffers for run in self.around() if run.buffers is not None)
        moved = {(id(one[0]), one[1]): one for own in buffers for one in own.moved()}
        return _State(numbers, [*moved.values()])

    def restore_state(self, state: _State | list[torch.Tensor] | None) -> None:  # R7
        if not isinstance(state, _State):
            self.draw_from(state)
            return
        self.draw_from(state.numbers)
        for run in self.around() if state.buffers else ():
            if run.buffers is not None:
                run.buffers.set(state.buffers, self.knowing)

    def _read(self, key: Key, place: Place, data: Any = NOTHING) -> Any:
        value = super()._read(key, place, data)
        if self.watch is None:  # no decisions of `auto`
            return value
        before = self.slot.read(key, place).counts.get(DECIDED, 0)
        if before > self._counts.get(DECIDED, 0):  # what precedes the save is skipped
            self._counts[DECIDED] = before
        return value

    def begin(self) -> None:
        """Let the generators go back to where the forward found them. For a run that is not a part of another one."""
        if self.generators is not None:
            self._aligned = self.generators.start
            self.generators.set(self._aligned)

    def draw_from(self, numbers: list[torch.Tensor] | None) -> None:
        """Let the generators go on from these states."""
        if self.generators and numbers is not None:
            if numbers is not self._aligned:  # else the forward has drawn nothing since
                now = self.generators.now()
                for run in self.around():
                    run._drew, run._aligned = run._drew or bool(run._aligned and not equal(run._aligned, now)), numbers
            self.generators.set(numbers)

    def drew(self) -> bool:
        """Whether this run drew random numbers, other than for a decision."""
        return self._drew or bool(self.generators and self._aligned and not equal(self._aligned, self.generators.now()))

    def adopt(self, leaf: Any, like: Any) -> Any:  # R13
        return adopted(self.slot, leaf, like) if isinstance(self.slot, TapedSlot) else leaf

    def without_gradient(self, function: Callable[[], Any]) -> Any:
        if transformed() is not None:  # one that refuses hooks has lifted the region's
            return without_gradient(function)
        # A decision may need a gradient of its own. No recompute would make what that asks for.
        with saved_tensors_hooks(unseen(partial(pack_plainly, self.slot)), unpack_plainly):
            return without_gradient(function)


def refuse_graphs(layer: str, entry: Entry) -> None:
    """Refuse objects with tensors that have a graph behind them (R5).

    That graph may lead to what holds the slot, by ways which the garbage collector does not see.
    """
    for path, backend, leaf in zip(paths(entry.spec), entry.backends, entry.leaves, strict=True):
        if backend is not None or isinstance(leaf, (torch.nn.Module, type)):
            continue
        for name, value in attributes_of(leaf).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                raise graph_saved(layer, f"{path}.{name}", where(entry.place))


def is_inside(run: Run | None) -> bool:
    """Whether `run` is that of a region, or a part of one; or torch's own checkpoint runs a part again."""
    return isinstance(run, TorchRun) and any(one.trace is not None or one.torchs_recompute for one in run.around())


def is_told(run: Run | None) -> bool:
    """Whether `run` asked for its phase. What it learned may steer the regions inside."""
    return isinstance(run, TorchRun) and run.trace is not None and run.trace.told_at >= 0


_Packed = tuple[Slot, torch.Tensor, int]


def pack_plainly(slot: Slot, tensor: torch.Tensor) -> _Packed:
    """What autograd keeps where nothing stands in for a tensor; a node that held its own output would never die."""
    return slot, tensor.detach(), tensor._version


def unpack_plainly(packed: _Packed) -> torch.Tensor:
    """The tensor. Autograd's own check of its version rests where hooks are."""
    slot, tensor, version = packed
    if tensor._version != version:
        raise tensor_changed(slot.label, tensor)
    return tensor
