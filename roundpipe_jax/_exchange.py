"""Arrays of other frameworks as JAX arrays. The rules are those of the core.

On the host an array enters as a numpy view through `jax.device_put`, not through `jax.dlpack`. It is no slower, the
result is not committed to a device, XLA never writes into memory that it got this way even if it is donated, and
torch refuses to resize the storage underneath.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from roundpipe_core import ExchangeError, ExchangeReport
from roundpipe_core._exchange import CopyPolicy, is_foreign
from roundpipe_core._exchange import exchange as exchanged
from roundpipe_core._producers import DTYPES, Fault, Offer, dtype_name

from ._jax import default_platform, is_running, is_tracer

__all__ = ["adopt", "exchange", "from_dlpack"]

_OF_ML_DTYPES = frozenset({"int2", "uint2", "int4", "uint4", "float4_e2m1fn"}) | frozenset(
    f"float8_{kind}" for kind in ("e3m4", "e4m3", "e4m3b11fnuz")
)
"""What JAX and its additions to numpy have, and nobody else."""

_ALIGNMENT = 64
"""XLA's, in bytes. It copies what starts elsewhere."""


def from_dlpack(x: Any, copy: CopyPolicy = "snapshot", *, allow_rounding: bool = False) -> jax.Array:
    """Take a tensor of torch, or an array of numpy or any library with `__dlpack__`, as a JAX array.

    >>> import numpy, jax
    >>> from roundpipe_jax import from_dlpack
    >>> from_dlpack(numpy.arange(3)[::-1])
    Array([2, 1, 0], dtype=int32)

    Args:
        x: an array, dense and on one device, of any strides. It keeps its shape. Without `jax_enable_x64`, integers
            of 64 bits become 32 if all values fit.
        copy: `"snapshot"` copies always. `"share"` never copies: the result has the memory of `x`, so do not write to
            `x` while the result is in use. `"auto"` shares if it can.
        allow_rounding: without `jax_enable_x64`, let float64 become float32 and complex128 complex64.

    Returns:
        An array that is committed to no device, unless it is on another one than JAX's default.

    Raises:
        ExchangeError: there are no values to take (meta, fake, sparse, with gradient), 64 bits do not fit, the dtype
            does not exist in JAX, `copy="share"` and the memory cannot be used as it is, or the call is inside
            `jax.jit`, which would freeze the values.
        OptionError: another `copy`.

    `exchange` does the same and tells what it did. Implements R13.
    """
    return exchange(x, copy, allow_rounding=allow_rounding)[0]


def exchange(
    x: Any, copy: CopyPolicy = "snapshot", *, allow_rounding: bool = False
) -> tuple[jax.Array, ExchangeReport]:
    """As `from_dlpack`, together with a report: shared or copied, why, how many bytes, and the dtypes.

    >>> import numpy
    >>> from roundpipe_jax import exchange
    >>> array, report = exchange(numpy.arange(4))
    >>> print(report)
    numpy int64[4] to jax as int32: 16 bytes copied, a snapshot was asked for
    """
    return exchanged(_Jax(allow_rounding), x, copy)


def adopt(leaf: Any) -> Any:
    """An array of another framework as a JAX array, by snapshot; everything else as it is."""
    importer = _Jax(allow_rounding=False)
    return from_dlpack(leaf) if is_foreign(importer, leaf) else leaf


@dataclass(frozen=True)
class _Jax:
    allow_rounding: bool
    name = "jax"
    spoken = "JAX"

    def open(self, value: Any) -> tuple[Any, Fault | None]:
        try:
            return np.from_dlpack(value), None
        except (BufferError, RuntimeError, TypeError, ValueError):
            return _opened(value)  # another device, or a type that numpy lacks

    def fault(self) -> Fault | None:
        if is_running() or not is_tracer(jnp.zeros(())):
            return None
        return (
            "a function is being traced, and the values would be frozen into it",
            "call from_dlpack outside of jax.jit, and pass the array as an argument.",
        )

    def dtype_for(self, offer: Offer) -> str | None:
        if offer.framework == self.name:
            return offer.dtype
        if offer.dtype not in DTYPES:
            return offer.dtype if offer.framework == "numpy" and offer.dtype in _OF_ML_DTYPES else None
        return dtype_name(jax.dtypes.canonicalize_dtype(jnp.dtype(offer.dtype)))

    def obstacle(self, offer: Offer) -> Fault | None:
        if offer.device != "cpu" and _cuda_device(offer) is None:
            return f"JAX has no device {offer.device} here", "copy it."  # pragma: no cover - needs a GPU
        if not offer.row_major:
            return (
                "its elements are not in row-major order without gaps",
                "make it so first, .contiguous() in torch, numpy.ascontiguousarray in numpy.",
            )
        if offer.device == "cpu" and offer.nbytes and (offer.pointer or 0) % _ALIGNMENT:
            return f"its address is not a multiple of {_ALIGNMENT}, as XLA needs it", "copy it."
        return None

    def share(self, offer: Offer) -> jax.Array:
        if offer.framework == self.name:
            array: jax.Array = offer.view()
            return array
        if offer.device != "cpu":
            return _imported(offer.view())  # pragma: no cover - needs a GPU
        offer.hold()
        return _put(_typed(offer), None if default_platform() == "cpu" else jax.local_devices(backend="cpu")[0])

    def copy(self, offer: Offer, dtype: str, refuse: Callable[[Fault], ExchangeError]) -> jax.Array:
        if offer.framework == self.name:
            array: jax.Array = offer.clone()
            return array
        if dtype == offer.dtype and _cuda_device(offer) is not None:
            return _imported(offer.clone())  # pragma: no cover - needs a GPU
        values = _typed(offer)
        if dtype != offer.dtype:
            self._refuse_loss(values, dtype, refuse)
        new = _aligned(values.shape, jnp.dtype(dtype))
        if dtype == "bool":
            np.not_equal(values.view(np.uint8), 0, out=new)
        else:
            with np.errstate(over="ignore"):
                np.copyto(new, values, casting="unsafe")
        if dtype != offer.dtype and (np.isinf(new) & np.isfinite(values)).any():
            raise refuse((f"it has values beyond {dtype}", _WAY_OUT_OF_64_BITS))
        return _put(new)

    def describe(self, array: jax.Array) -> tuple[str, tuple[int, ...], int | None]:
        pointer = array.unsafe_buffer_pointer() if len(array.devices()) == 1 else None
        return dtype_name(array.dtype), array.shape, pointer

    def _refuse_loss(self, values: Any, dtype: str, refuse: Callable[[Fault], ExchangeError]) -> None:
        if values.dtype.kind in "fc":
            if not self.allow_rounding:
                raise refuse(
                    (
                        f"without jax_enable_x64 it would be rounded to {dtype}",
                        f"{_WAY_OUT_OF_64_BITS} allow_rounding=True lets it happen.",
                    )
                )
            return
        if not values.size:
            return
        bounds, low, high = np.iinfo(dtype), values.min(), values.max()
        if low < bounds.min or high > bounds.max:
            raise refuse((f"its values from {low} to {high} do not fit {dtype}", _WAY_OUT_OF_64_BITS))


_WAY_OUT_OF_64_BITS = 'turn 64 bits on, jax.config.update("jax_enable_x64", True), or convert it first.'


def _cuda_device(offer: Offer) -> Any:
    """JAX's name for the device that the memory is on, or None. Torch says cuda for ROCm too."""
    kind, _, index = offer.device.partition(":")
    if kind != "cuda":
        return None
    try:  # pragma: no cover - needs a GPU
        devices = jax.local_devices(backend="gpu")
    except RuntimeError:  # pragma: no cover - torch has a GPU, and this JAX has no such backend
        return None
    return next((one for one in devices if one.local_hardware_id == int(index)), None)  # pragma: no cover - needs a GPU


def _opened(value: Any) -> tuple[Any, Fault | None]:
    """An array of an unknown library, by DLPack; in 64 bits, if it has them, for `dtype_for` to decide upon.

    On the host it goes on as a numpy view, like all others: what `jax.dlpack` gave could be donated.
    """
    moved = None
    with jax.enable_x64(True):
        try:
            array = jax.dlpack.from_dlpack(value, copy=False)
        except ValueError:
            array = jax.dlpack.from_dlpack(value)
            moved = "JAX copied it to read it", "copy it."
    if array.platform() == "cpu":
        return np.asarray(array), moved
    return _on_device(array, moved)  # pragma: no cover - needs a GPU


def _on_device(array: Any, moved: Fault | None) -> tuple[Any, Fault | None]:  # pragma: no cover - needs a GPU
    if array.dtype != jax.dtypes.canonicalize_dtype(array.dtype):
        return np.asarray(array), ("its 64 bits are to be narrowed", "convert it first.")
    if array.format.layout.major_to_minor != tuple(range(array.ndim)):
        return array, moved or ("its elements are not in row-major order", "copy it.")
    return array, moved


def _put(values: Any, device: Any = None) -> jax.Array:
    """A numpy array as a JAX array, on its memory where that is possible."""
    array: jax.Array = jax.device_put(values, device, may_alias=True)
    return array


def _imported(array: Any) -> jax.Array:  # pragma: no cover - needs a GPU
    """An array on a device, by DLPack, which waits for the work that its owner has queued."""
    imported: jax.Array = jax.dlpack.from_dlpack(array)
    return imported


def _typed(offer: Offer) -> Any:
    """The values as a numpy array of their own dtype."""
    values = offer.host()
    return values if dtype_name(values.dtype) == offer.dtype else values.view(jnp.dtype(offer.dtype))


def _aligned(shape: tuple[int, ...], dtype: Any) -> Any:
    """New memory that XLA takes as it is."""
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + size].view(dtype).reshape(shape)
