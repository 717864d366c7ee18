"""Buffers of the modules in a region: what the forward moved on, the recompute must not move on again.

Running statistics, counters, power iterations: a forward changes them in place. The recompute runs the same code, so
it gets copies to change, with the values that the forward found. Where it leaves a part out (a decision, a kept part),
the copies get the values that the forward had after that part, as random numbers do (R7).

A layer that asks for its phase may leave out any part, and counts on finding what its forward left. There the copies
have the values at its end. Unless its recompute turns out to change one too: then no part was left out that did, and
the recompute begins anew, with the values of then.

What no forward changes is not copied if it is large. If others change it before the recompute, the old values are gone,
and the recompute may not read it.

A buffer is replaced for the time of the recompute, not written: others may have saved it for their backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch.nn.modules.batchnorm import _NormBase

from roundpipe_core import MutationError
from roundpipe_core._slots import Slot
from roundpipe_core._trees import flatten

from ._errors import buffer_changed, buffer_unknown, user_line
from ._modes import Modes, generators_in, taken_apart
from ._notes import Notes
from ._parts import bytes_of
from ._state import DrawWatch, Watch
from ._views import memory_of, version_of

__all__ = ["Buffers", "Moved", "copies", "not_misled", "settle", "states_of"]

K = TypeVar("K")
T = TypeVar("T")

_NO_CONTEXT = contextlib.nullcontext()
_ABSENT: Any = object()

_SMALL = 1 << 16
"""Bytes up to which a buffer is copied before each forward and for each recompute: not every write can be seen."""


_changing: Notes[tuple[str, bool]] = Notes()
"""Of larger buffers: whether a forward has ever changed them, in training (True) and in evaluation (False)."""

_repeating: Notes[str] = Notes()
"""Of buffers that a forward changed: whether a recompute of a layer that asks for its phase does so too."""

Moved = tuple[torch.nn.Module, str, torch.Tensor]
"""A buffer and its values at some point of the forward."""


def _is_small(tensor: torch.Tensor) -> bool:
    return (tensor.nbytes if tensor.layout is torch.strided else bytes_of(tensor)) <= _SMALL


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that code outside of inference mode may change too, in which a part of the region may be."""
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NO_CONTEXT:
        return tensor.detach().clone()


class _Buffer:
    """One buffer, when the forward began."""

    __slots__ = ("_noted", "after", "before", "called", "module", "name", "removed", "seen", "tensor", "version")

    def __init__(self, module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        self.module, self.name, self.tensor = module, name, tensor
        self.version = 0
        self.seen = False  # to have changed
        self.removed = False  # by the forward
        self.called = ""  # where the forward was that changed it though nobody had kept its values
        self._noted: tuple[int, int, torch.Tensor] | None = None  # the last value asked for, and what it was made of
        self.before: torch.Tensor | None = None
        self.after: torch.Tensor | None = None  # when the forward of a layer that asks for its phase was over
        if isinstance(module, _NormBase):
            return  # what it gives does not depend on them in training, and does not change them in evaluation
        self.version = version_of(tensor)
        if _is_small(tensor) or _changing.of(module).get((name, module.training), True):
            self.before = _copied(tensor)

    def moved(self) -> torch.Tensor | None:
        """A copy of its values, if the forward has changed it so far."""
        now = self.module._buffers.get(self.name)
        if now is None or isinstance(self.module, _NormBase) or now.requires_grad:
            return None
        version = version_of(now)
        if now is self.tensor and version == self.version:
            return None
        if self._noted is None or self._noted[:2] != (id(now), version):
            self._noted = id(now), version, _copied(now)
        return self._noted[2]

    def settle(self, told: bool) -> bool:
        """Whether the forward changed it, as far as that can be seen. `told`: the layer knows its phase."""
        changed = self._settled()
        if changed and self.is_lost():
            self.called = user_line()
        now = self.module._buffers.get(self.name)
        if changed and told and now is not None and not isinstance(self.module, _NormBase):
            self.after = _copied(now)
        return changed

    def _settled(self) -> bool:
        if self.module._buffers.get(self.name) is not self.tensor:  # another tensor took its place
            self.removed = self.name not in self.module._buffers
            if version_of(self.tensor) == self.version:
                self.before = self.tensor
            self.seen = not isinstance(self.module, _NormBase)
            return True
        if isinstance(self.module, _NormBase):  # some update them behind the version counter
            return self.module.training
        changed = self.seen = version_of(self.tensor) != self.version
        if _is_small(self.tensor):
            return True
        known, what = _changing.of(self.module), (self.name, self.module.training)
        known[what] = changed or known.get(what, False)
        return changed

    def is_lost(self) -> bool:
        """Whether its values before are gone: a write that nobody could foresee, to what is too large to be copied."""
        return self.before is None and not isinstance(self.module, _NormBase)

    def copy(self, as_before: bool) -> torch.Tensor:
        """What a recompute may change in its place."""
        if as_before and self.before is not None:
            return _copied(self.before)
        return self.of_now() if self.after is None else _copied(self.after)

    def of_now(self) -> torch.Tensor:
        """A copy of its values now."""
        now = self.module._buffers.get(self.name)
        return self.tensor if now is None else _copied(now)

    def changed_since(self) -> bool:
        """Whether others have changed what the forward left as it was."""
        now = self.module._buffers.get(self.name)
        return now is not self.tensor or version_of(now) != self.version

    def then(self) -> torch.Tensor | None:
        """A copy of its values when the forward began, if somebody still has them."""
        if self.before is not None:
            return _copied(self.before)
        return _copied(self.tensor) if version_of(self.tensor) == self.version else None


class Buffers:
    """The buffers that a region's forward can reach; once it is over, those that it may have changed."""

    __slots__ = ("_changed", "_same", "_watched", "misled", "replaced")

    def __init__(self, watched: list[_Buffer]) -> None:
        self._watched = watched
        self._changed: list[_Buffer] = []
        self._same: list[_Buffer] = []  # those that the forward left as they were, and that are not copied
        self.replaced: list[tuple[torch.nn.Module, str, Any]] = []  # what was where a copy is now
        self.misled = False  # whether the last recompute began with values that it should not have had

    @classmethod
    def of(cls, modules: list[torch.nn.Module]) -> Buffers | None:
        """Those of these modules, without what is inside of them; None if there are none."""
        watched = [_Buffer(*found) for found in _found(modules)]
        return cls(watched) if watched else None

    def settle(self, told: bool) -> None:
        """The forward is over. `told`: the layer knows its phase."""
        for buffer in self._watched:
            if buffer.settle(told):
                self._changed.append(buffer)
            elif not isinstance(buffer.module, _NormBase):
                self._same.append(buffer)
        self._watched = []

    def owners(self) -> list[torch.nn.Module]:
        """The modules of which the forward was seen to change one."""
        return [buffer.module for buffer in self._changed if buffer.seen]

    def moved(self) -> Iterator[Moved]:
        """What the forward has changed so far."""
        for buffer in self._watched:
            value = buffer.moved()
            if value is not None:
                yield buffer.module, buffer.name, value

    def set(self, moved: Iterable[Moved], told: bool) -> None:
        """Give the copies these values, as far as they began with those of then."""
        swapped = {(id(module), name) for module, name, _ in self.replaced}
        for module, name, value in moved:
            if (id(module), name) in swapped and _as_before(module, name, told):
                module._buffers[name] = _copied(value)

    def put_back(self, count: int) -> None:
        """Take out the copies but for the first `count`. May be called again: an interrupt may have cut it short."""
        while len(self.replaced) > count:
            module, name, before = self.replaced[-1]
            if before is _ABSENT:
                module._buffers.pop(name, None)
            else:
                module._buffers[name] = before
            self.replaced.pop()

    def unsure(self, told: bool) -> bool:
        """Whether a recompute has to show where one is changed, or if it is. `told`: the layer knows its phase."""
        return any(
            (told and buffer.seen and buffer.name not in _repeating.of(buffer.module))
            or (buffer.is_lost() and _as_before(buffer.module, buffer.name, told))
            for buffer in self._changed
        )

    @contextlib.contextmanager
    def copies(self, layer: str, told: bool) -> Iterator[None]:
        """Let the modules have copies. `told`: the layer knows its phase."""
        self.misled = False
        moving = [(buffer, _as_before(buffer.module, buffer.name, told)) for buffer in self._moving()]
        copies = [(buffer, buffer.copy(as_before)) for buffer, as_before in moving]
        unknown = [buffer for buffer, as_before in moving if as_before and buffer.is_lost()]
        begun = [(*copy, version_of(copy[1])) for copy, (_, before) in zip(copies, moving, strict=True) if not before]
        older = [(buffer, buffer.then()) for buffer in self._same if buffer.changed_since()]
        lost = [buffer for buffer, old in older if old is None]
        copies += [(buffer, old) for buffer, old in older if old is not None]
        unread = _Unread(layer, lost) if lost else _NO_CONTEXT
        with self._swap(copies), unread, _Unwritten(layer, unknown[0]) if unknown else _NO_CONTEXT:
            try:
                yield
            except BaseException:
                self._learn(begun, whole=False)
                raise
            self._learn(begun, whole=True)

    @contextlib.contextmanager
    def copies_of_now(self) -> Iterator[None]:
        """Let the modules have copies as they are now."""
        with self._swap([(buffer, buffer.of_now()) for buffer in self._moving()]):
            yield

    def _moving(self) -> list[_Buffer]:
        """Those that the forward may have changed, as far as it has got, and did not take out."""
        # A layer that differentiates inside itself is recomputed before its forward is over.
        changed = self._changed or [buffer for buffer in self._watched if buffer.settle(told=False)]
        return [buffer for buffer in changed if not buffer.removed or buffer.name in buffer.module._buffers]

    @contextlib.contextmanager
    def _swap(self, copies: Iterable[tuple[_Buffer, torch.Tensor]]) -> Iterator[None]:
        count = len(self.replaced)
        try:
            for buffer, copy in copies:
                before = buffer.module._buffers.get(buffer.name, _ABSENT)  # others may have taken it out
                self.replaced.append((buffer.module, buffer.name, before))
                buffer.module._buffers[buffer.name] = copy
            yield
        finally:
            self.put_back(count)

    def _learn(self, put_in: list[tuple[_Buffer, torch.Tensor, int]], whole: bool) -> None:
        """Note which buffers a recompute has changed that had values of now, a `whole` one or the begin of one."""
        for buffer, copy, version in put_in:
            if not buffer.seen:
                continue
            changes = buffer.module._buffers.get(buffer.name) is not copy or version_of(copy) != version
            if changes:
                self.misled = True
            if changes or whole:  # a region inside may have learned it first
                known = _repeating.of(buffer.module)
                known[buffer.name] = changes or known.get(buffer.name, False)


class _Unread(Watch):  # type: ignore[no-untyped-call]
    """Refuses to read buffers whose values when the forward began nobody has any more."""

    def __init__(self, layer: str, lost: list[_Buffer]) -> None:
        super().__init__()
        self._layer = layer
        self._lost = {_memory(buffer): buffer for buffer in lost}
        self._fault: MutationError | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves: list[Any] = []
        flatten((args, kwargs), leaves)
        for leaf in leaves:
            buffer = self._lost.get(memory_of(leaf)) if isinstance(leaf, torch.Tensor) else None
            if buffer is not None:
                module = buffer.module
                _changing.of(module)[buffer.name, module.training] = True  # from now on it is copied in time
                self._fault = buffer_changed(self._layer, type(module).__qualname__, buffer.name)
                raise self._fault
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._fault is not None and error[1] is not self._fault:  # the layer caught it
            raise self._fault


class _Unwritten(Watch):  # type: ignore[no-untyped-call]
    """Refuses a recompute that lacks the values of a buffer. It runs only to find the line that writes to it."""

    def __init__(self, layer: str, buffer: _Buffer) -> None:
        super().__init__()
        self._layer, self._buffer = layer, buffer
        self._memory = _memory(buffer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        leaves: list[Any] = []
        written = (argument.name for argument in func._schema.arguments if argument.is_write)
        flatten([given.get(name) for name in written], leaves)
        if any(isinstance(leaf, torch.Tensor) and memory_of(leaf) == self._memory for leaf in leaves):
            raise self._fault(("written at", user_line()))
        return func(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if not isinstance(error[1], MutationError):  # the recompute does not write to it, or ended before
            raise self._fault()

    def _fault(self, *places: tuple[str, str]) -> MutationError:
        buffer = self._buffer
        facts = [("called at", buffer.called), *places]
        return buffer_unknown(self._layer, type(buffer.module).__qualname__, buffer.name, facts)


def _memory(buffer: _Buffer) -> int:
    held: Any = buffer.module._buffers[buffer.name]
    return memory_of(held)


def _as_before(module: torch.nn.Module, name: str, told: bool) -> bool:
    """Whether a recompute changes this buffer as its forward did, so that it has to begin with the value of then."""
    return not told or _repeating.of(module).get(name, False)


def states_of(
    function: Any, leaves: Collection[Any]
) -> tuple[Sequence[Any], tuple[torch.Generator, ...], Modes | None, Buffers | None]:
    """What a call can reach, its state taken apart.

    Returns:
        The modules and those inside of them, and the tensors that are not its arguments; its generators; what is set of
        the modules and in closures; the buffers.
    """
    closures: list[FunctionType] = []
    objects: list[Any] = []
    roots, modules = taken_apart(function, leaves, closures, objects)
    if not roots and not closures and not objects:
        return (), (), None, None
    modes = Modes(modules, closures, objects) if modules or closures or objects else None
    generators = generators_in(roots, modes.attributes() if modes is not None else ())
    found: list[Any] = [*modules, *roots]
    if generators:
        found = [one for one in found if not isinstance(one, torch.Generator)]
    return found, generators, modes, Buffers.of(modules) if modules else None


def settle(modes: Modes, buffers: Buffers | None, told: bool, leaves_out: bool) -> None:
    """Note what the forward has changed of its modules.

    Args:
        modes: what was set of them when it began.
        buffers: theirs, if they have any.
        told: the layer knows its phase.
        leaves_out: its recompute does without parts of it.
    """
    owners: list[torch.nn.Module] = []
    if buffers is not None:
        buffers.settle(told)
        owners = buffers.owners()
    modes.settle(not (told or leaves_out), owners)


def copies(buffers: Buffers | None, slot: Slot, told: bool) -> contextlib.AbstractContextManager[None]:
    """`buffers.copies`, if there are any, for the layer of `slot`."""
    return _NO_CONTEXT if buffers is None else buffers.copies(slot.label, told)


def not_misled(buffers: Buffers | None, recompute: Callable[[DrawWatch | None], T], watch: DrawWatch | None) -> T:
    """`recompute(watch)`, a second time if it was for the first that a buffer was seen to change."""
    try:
        result = recompute(watch)
    except Exception:
        if buffers is None or not buffers.misled:
            raise
    else:
        if buffers is None or not buffers.misled:
            return result
    return recompute(watch)


def _found(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    for module in modules:
        buffers = module._buffers
        for name, buffer in buffers.items() if buffers else ():
            if buffer is None or buffer.requires_grad:  # one that carries gradient is part of the graph, not state
                continue
            if isinstance(module, _NormBase) or not torch.nn.parameter.is_lazy(buffer):
                yield module, name, buffer
