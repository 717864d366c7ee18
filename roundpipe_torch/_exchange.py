"""Arrays of other frameworks as tensors. The rules are those of the core."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack

from roundpipe_core import ExchangeError, ExchangeReport
from roundpipe_core._exchange import CopyPolicy, is_foreign
from roundpipe_core._exchange import exchange as exchanged
from roundpipe_core._producers import DTYPES, Fault, Offer, overlaps, under_trace

__all__ = ["adopt", "exchange", "from_dlpack"]


def from_dlpack(x: Any, copy: CopyPolicy = "snapshot") -> torch.Tensor:
    """Take an array of JAX, numpy or any library with `__dlpack__` as a tensor.

    >>> import numpy, torch
    >>> from roundpipe_torch import from_dlpack
    >>> from_dlpack(numpy.arange(3)[::-1])
    tensor([2, 1, 0])

    Args:
        x: an array, dense and on one device. It keeps its shape, dtype and device; what is on a device that
            torch does not have arrives on the CPU.
        copy: `"snapshot"` copies always. `"share"` never copies: the tensor has the array's own memory, so write to
            neither while the other is in use; JAX arrays count on never being written. `"auto"` shares if it can.

    Returns:
        A tensor without gradient.

    Raises:
        ExchangeError: there are no values to take (a tracer, a deleted array), the dtype does not exist in torch, or
            `copy="share"` and the memory cannot be used as it is.
        OptionError: another `copy`.

    `exchange` does the same and tells what it did. Implements R13.
    """
    return exchange(x, copy)[0]


def exchange(x: Any, copy: CopyPolicy = "snapshot") -> tuple[torch.Tensor, ExchangeReport]:
    """As `from_dlpack`, together with a report: shared or copied, why, and how many bytes.

    >>> import numpy, torch
    >>> from roundpipe_torch import exchange
    >>> tensor, report = exchange(numpy.ones(4, "float32"), copy="share")
    >>> report.shared, report.nbytes
    (True, 16)
    """
    return exchanged(_TORCH, x, copy)


def adopt(leaf: Any) -> Any:
    """An array of another framework as a tensor, by snapshot; everything else as it is."""
    return from_dlpack(leaf) if is_foreign(_TORCH, leaf) else leaf


class _Torch:
    name = "torch"
    spoken = "torch"

    def open(self, value: Any) -> tuple[Any, Fault | None]:
        numpy = sys.modules.get("numpy")
        try:
            if numpy is not None:
                return numpy.from_dlpack(value), None  # it survives negative strides; torch would abort the process
        except (BufferError, RuntimeError, TypeError, ValueError):
            pass  # another device, or a type that numpy lacks
        return _imported(value), None

    def fault(self) -> Fault | None:
        return under_trace(torch)

    def dtype_for(self, offer: Offer) -> str | None:
        return offer.dtype if offer.framework == self.name or offer.dtype in DTYPES else None

    def obstacle(self, offer: Offer) -> Fault | None:
        if not _is_here(offer.device):
            return f"torch has no device {offer.device} here", "copy it."
        if any(stride < 0 for stride in offer.strides):
            return "it has a negative stride", "copy it first, .copy()."
        if any(stride % offer.itemsize for stride in offer.strides):
            return "its strides are not whole elements", "copy it first, .copy()."
        if overlaps(offer.shape, offer.strides, offer.itemsize):
            return "some of its elements have the same memory", "copy it first, .copy()."
        if offer.locked:
            return "it is read-only, and nothing keeps torch from writing", "copy it."
        return None

    def share(self, offer: Offer) -> torch.Tensor:
        if offer.framework == self.name:
            tensor: torch.Tensor = offer.view()
            return tensor
        return _typed(offer.view(), offer.dtype)

    def copy(self, offer: Offer, dtype: str, refuse: Callable[[Fault], ExchangeError]) -> torch.Tensor:
        if offer.framework == self.name:
            try:
                new: torch.Tensor = offer.clone()
            except NotImplementedError as error:
                raise refuse((f"torch cannot copy {dtype}", "view its bytes, .view(torch.uint8).")) from error
            return new
        if offer.device != "cpu" and offer.pointer is not None and _is_here(offer.device):
            return _copied_on_device(_typed(offer.view(), dtype))  # pragma: no cover - needs a GPU
        values = offer.host()
        plain = values.flags.c_contiguous and values.flags.aligned
        return _owned(_typed(values if plain else values.copy(), dtype))

    def describe(self, array: torch.Tensor) -> tuple[str, tuple[int, ...], int | None]:
        if type(array) is not torch.Tensor:
            return type(array).__name__, tuple(array.shape), None
        return str(array.dtype).removeprefix("torch."), tuple(array.shape), array.data_ptr()


_TORCH = _Torch()


def _is_here(device: str) -> bool:
    kind, _, index = device.partition(":")
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available() and int(index) < torch.cuda.device_count())


def _imported(array: Any) -> torch.Tensor:
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(array)
    return tensor


def _typed(array: Any, dtype: str) -> torch.Tensor:
    """`array` on its own memory; types that numpy lacks come as their bytes."""
    return _imported(array).view(getattr(torch, dtype))


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in torch's own memory, its booleans 0 or 1."""
    if tensor.dtype is torch.bool:
        return torch.ne(tensor.view(torch.uint8), 0)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _copied_on_device(tensor: torch.Tensor) -> torch.Tensor:  # pragma: no cover - needs a GPU
    new = _owned(tensor)
    torch.cuda.current_stream(tensor.device).synchronize()  # the owner may use the memory again once `tensor` is gone
    return new
