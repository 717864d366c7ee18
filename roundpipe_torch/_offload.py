"""Host memory for what a region holds until backward.

A copy to the host runs on a stream of its own, behind the work that made the tensor and beside what follows. Backward
begins the copy back one region ahead: when a region is recomputed, what the region before it has on the host sets out
too. The host waits for nothing; the stream that computes waits for what it is about to use.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from roundpipe_core._errors import shown

from ._backend import TorchBackend, laid_out, strides_of
from ._errors import wrong_option
from ._parts import bytes_of
from ._views import storage_of, version_of

__all__ = ["MOVED", "Here", "Mover", "Offload", "Parcel", "Shipped", "movers"]


class _Usage:
    """Bytes on the host under one plan. A copy of a plan starts with none."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0

    def __reduce__(self) -> tuple[type[_Usage], tuple[()]]:
        return _Usage, ()


@dataclass(frozen=True)
class Offload:
    """What a layer keeps in host memory until backward, as an option: ``remat(layer, offload=Offload(inputs=True))``.

    >>> from roundpipe_torch import Offload
    >>> Offload(budget=1 << 30).min_bytes
    65536

    ``remat(layer, offload="cpu")`` stands for ``offload=Offload()``. Tensors that are on the host already stay as they
    are. Regions inside the layer follow its plan, unless they have one.

    Args:
        min_bytes: leave smaller tensors where they are.
        budget: bytes on the host at one time, of all layers that share this object; what is beyond stays on the device.
        saves: what the layer saves. A save can say otherwise: ``save_for_recompute(mask, offload=False)``.
        inputs: the layer's tensor arguments, other than parameters.
        kept: outputs of `keep`, and what the function's backward needs.

    Raises:
        OptionError: `min_bytes` or `budget` is not a number of bytes.

    Implements R6, R9 and R12.
    """

    min_bytes: int = 1 << 16
    budget: int | None = None
    saves: bool = True
    inputs: bool = False
    kept: bool = False
    _usage: _Usage = field(default_factory=_Usage, repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("min_bytes", "budget"):
            value = getattr(self, name)
            if not (value is None and name == "budget") and not (type(value) is int and value >= 0):
                raise wrong_option(
                    Offload, f"{name} must be a number of bytes, not {value!r}.", f"pass {name}=1 << 20."
                )

        for name in ("saves", "inputs", "kept"):
            value = getattr(self, name)
            if type(value) is not bool:
                what = f"{name} must be True or False, not {shown(value)}."
                raise wrong_option(Offload, what, f"pass {name}=True: of all its tensors, or False.")

    def move(self, tensor: torch.Tensor, always: bool = False, private: bool = False) -> Shipped | None:
        """`tensor` on its way to the host; None if it stays. `private`: nobody else will write to it."""
        mover = movers(tensor.device)
        if mover is None or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return None
        if not tensor.numel() or (tensor.nbytes < self.min_bytes and not always) or _overlaps(tensor):
            return None
        if self.budget is not None and self._usage.bytes + tensor.nbytes > self.budget:
            return None
        return Shipped(tensor, mover, self._usage, private)


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


class Mover(Protocol):
    """Copies between one device and the host."""

    def away(self, tensor: torch.Tensor) -> Any:
        """Begin the copy to the host; gives what `back` takes. `tensor` may be dropped at once."""

    def back(self, away: Any) -> Any:
        """Begin the copy back; gives what `wait` takes."""

    def wait(self, back: Any) -> torch.Tensor:
        """The tensor, for the work that this thread starts from now on."""


class _Streams:  # pragma: no cover - needs a device with streams
    """Pinned memory, and one stream a device beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._side: Any = self._module.Stream(device=device)

    def away(self, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        self._side.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._side):
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._side)  # its memory is not given away before it is copied
        return host, tensor.stride()

    def back(self, away: tuple[torch.Tensor, tuple[int, ...]]) -> tuple[torch.Tensor, Any]:
        host, strides = away
        with self._module.stream(self._side):  # behind the copy to the host, which ran on it too
            tensor = torch.empty_strided(host.shape, strides, dtype=host.dtype, device=self._device)
            tensor.copy_(host, non_blocking=True)
            return tensor, self._side.record_event()

    def wait(self, back: tuple[torch.Tensor, Any]) -> torch.Tensor:
        tensor, arrived = back
        current = self._module.current_stream(self._device)
        current.wait_event(arrived)
        tensor.record_stream(current)
        return tensor


@functools.cache
def _streams(device: torch.device) -> _Streams:
    return _Streams(device)  # pragma: no cover - needs a device with streams


def movers(device: torch.device) -> Mover | None:
    """Who moves tensors of `device`; None where they are in host memory, or there are no streams."""
    return _streams(device) if device.type in ("cuda", "xpu") else None


class Here:
    """A tensor that stays where it is. Same words as `Shipped`."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = version_of(tensor)

    @property
    def memory(self) -> Any:
        """Names the memory that is held."""
        storage = storage_of(self._tensor)
        return id(self) if storage is None else storage

    @property
    def nbytes(self) -> int:
        """Bytes held, the rest of what the tensor is a view of included."""
        if storage_of(self._tensor) is None:
            return bytes_of(self._tensor)
        return self._tensor.untyped_storage().nbytes()

    @property
    def place(self) -> str:
        return str(self._tensor.device)

    @property
    def changed(self) -> bool:
        """Whether the tensor was written to since."""
        return version_of(self._tensor) != self._version

    def fetch(self) -> torch.Tensor:
        return self._tensor


class Shipped:
    """A tensor in host memory."""

    __slots__ = (
        "__weakref__",
        "_away",
        "_back",
        "_mover",
        "_probe",
        "_usage",
        "_version",
        "nbytes",
        "shape",
        "strides",
    )

    def __init__(self, tensor: torch.Tensor, mover: Mover, usage: _Usage, private: bool) -> None:
        self._mover, self._usage, self.nbytes = mover, usage, 0
        self.shape, size = tensor.shape, tensor.nbytes
        self.strides = strides_of(tensor)
        usage.bytes += size
        self.nbytes = size
        self._away = mover.away(tensor.detach())
        self._back: Any = None
        self._probe = None if private or tensor.is_inference() else _probe(tensor)
        self._version = 0 if self._probe is None else self._probe._version

    def __del__(self) -> None:
        if hasattr(self, "nbytes"):  # an interrupt may have come before there was any
            self._usage.bytes -= self.nbytes

    place = "cpu"

    @property
    def memory(self) -> Any:
        """Names the memory that is held."""
        return id(self)

    @property
    def changed(self) -> bool:
        """Whether the tensor was written to since: maybe while it was copied."""
        return self._probe is not None and self._probe._version != self._version

    def set_out(self) -> None:
        """Begin to come back."""
        if self._back is None:
            self._back = self._mover.back(self._away)

    def fetch(self) -> torch.Tensor:
        """A new tensor with the values."""
        self.set_out()
        back, self._back = self._back, None
        return self._mover.wait(back)


def _probe(tensor: torch.Tensor) -> torch.Tensor:
    """Shares the version counter of `tensor`, and not its memory."""
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe


class _MovedBackend(TorchBackend):
    """What slots have on the host."""

    def restore(self, stored: Any) -> torch.Tensor:
        tensor: torch.Tensor = stored.fetch()
        return tensor if stored.strides is None else laid_out(tensor, stored.strides)

    def nbytes(self, stored: Any) -> int:
        return int(stored.nbytes)

    def place(self, stored: Any) -> str:
        return "cpu"

    def rows_differing(self, stored: Any, array: torch.Tensor) -> tuple[int, int, int] | None:
        return super().rows_differing(stored.fetch(), array)


MOVED = _MovedBackend()


class _Last(threading.local):
    parcel: Callable[[], Parcel | None] = staticmethod(lambda: None)


_last = _Last()


class Parcel:
    """What one call of a region has on the host, and the parcel before it."""

    __slots__ = ("__weakref__", "_items", "_previous", "plan")

    def __init__(self, plan: Offload) -> None:
        self.plan = plan
        self._items: list[weakref.ref[Shipped]] = []
        self._previous = _last.parcel
        _last.parcel = weakref.ref(self)

    def take(self, tensor: torch.Tensor, always: bool = False, private: bool = False) -> Shipped | None:
        """`tensor`, moved; None if it stays."""
        moved = self.plan.move(tensor, always, private)
        if moved is not None:
            self._items.append(weakref.ref(moved))
        return moved

    def nbytes(self) -> int:
        """Bytes it has on the host."""
        return sum(moved.nbytes for item in self._items if (moved := item()) is not None)

    def arrive(self) -> None:
        """Its region is about to be recomputed. The one before will be next."""
        self._set_out()
        previous = self._previous()
        if previous is not None:
            previous._set_out()

    def _set_out(self) -> None:
        for item in self._items:
            moved = item()
            if moved is not None:
                moved.set_out()

    @contextlib.contextmanager
    def inputs(self) -> Iterator[None]:
        """Tensors that autograd saves in here are moved, except parameters."""
        if not self.plan.inputs:
            yield
            return
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> Shipped | Here:
        return self.take(tensor) or Here(tensor)


def _unpack(held: Shipped | Here) -> torch.Tensor:
    if held.changed:
        raise RuntimeError("an input that is kept in host memory has been modified by an inplace operation")
    return held.fetch()
