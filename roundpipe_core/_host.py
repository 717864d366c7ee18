"""Arrays that belong to no framework: bytes with a dtype, as a file holds them."""

from __future__ import annotations

import math
import sys
from typing import Any

__all__ = ["DTYPES", "HostArray", "HostArrays", "integers_of", "itemsize_of", "kind_of"]

# name: (code in a safetensors file, which has none for some, bytes, kind, format of `memoryview.cast` for integers)
DTYPES: dict[str, tuple[str, int, str, str]] = {
    "bool": ("BOOL", 1, "bool", ""),
    "uint8": ("U8", 1, "integer", "B"),
    "int8": ("I8", 1, "integer", "b"),
    "uint16": ("U16", 2, "integer", "H"),
    "int16": ("I16", 2, "integer", "h"),
    "uint32": ("U32", 4, "integer", "I"),
    "int32": ("I32", 4, "integer", "i"),
    "uint64": ("U64", 8, "integer", "Q"),
    "int64": ("I64", 8, "integer", "q"),
    "float8_e4m3fn": ("F8_E4M3", 1, "float", ""),
    "float8_e5m2": ("F8_E5M2", 1, "float", ""),
    "float8_e8m0fnu": ("F8_E8M0", 1, "float", ""),
    "float8_e4m3fnuz": ("", 1, "float", ""),
    "float8_e5m2fnuz": ("", 1, "float", ""),
    "float16": ("F16", 2, "float", ""),
    "bfloat16": ("BF16", 2, "float", ""),
    "float32": ("F32", 4, "float", ""),
    "float64": ("F64", 8, "float", ""),
    "complex64": ("C64", 8, "complex", ""),
    "complex128": ("", 16, "complex", ""),
}


def kind_of(dtype: str) -> str:
    """bool, integer, float, complex; the name itself for what is none of them."""
    known = DTYPES.get(dtype)
    if known:
        return known[2]
    return next((kind for kind in ("float", "complex") if dtype.startswith(kind)), dtype)


def itemsize_of(dtype: str) -> int:
    """Bytes of one element."""
    return DTYPES[dtype][1]


class HostArray:
    """An array's bytes in memory of the host, row-major, little-endian.

    `origin` is the name of the backend that made it; "numpy" for what is a numpy array in any framework.
    """

    __slots__ = ("data", "dtype", "origin", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], data: memoryview, origin: str) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"arrays of dtype {dtype} have no form outside of their framework")
        self.dtype, self.shape, self.data, self.origin = dtype, shape, data, origin
        if data.nbytes != math.prod(shape) * itemsize_of(dtype):
            raise ValueError(f"{dtype}{list(shape)} does not have {data.nbytes} bytes")

    def __repr__(self) -> str:
        return f"HostArray({self.dtype}{list(self.shape)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostArray):
            return NotImplemented
        return (self.dtype, self.shape, self.data) == (other.dtype, other.shape, other.data)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return _of_bytes, (self.dtype, self.shape, bytes(self.data), self.origin)


def _of_bytes(dtype: str, shape: tuple[int, ...], data: bytes, origin: str) -> HostArray:
    return HostArray(dtype, shape, memoryview(data), origin)


def integers_of(array: HostArray) -> memoryview:
    """The elements of an array of integers, one after the other."""
    return array.data.cast("B").cast(DTYPES[array.dtype][3])  # type: ignore[call-overload, no-any-return]


class HostArrays:
    """Host arrays, as the core sees them. Nobody writes to them."""

    name = "host"

    def owns(self, value: Any) -> bool:
        return isinstance(value, HostArray)

    def gradient_fault(self, array: Any) -> None:
        return None

    def snapshot(self, array: HostArray) -> HostArray:
        return array

    def restore(self, stored: HostArray) -> HostArray:
        return stored

    def nbytes(self, stored: HostArray) -> int:
        return stored.data.nbytes

    def place(self, stored: HostArray) -> str:
        return "cpu"

    def rows_differing(self, stored: HostArray, array: HostArray) -> tuple[int, int, int] | None:
        rows = stored.shape[0] if stored.shape else 1
        if (stored.dtype, stored.shape) != (array.dtype, array.shape):
            return rows, rows, 0
        if stored.data == array.data:
            return None
        size = stored.data.nbytes // rows
        flags = [stored.data[n : n + size] != array.data[n : n + size] for n in range(0, rows * size, size)]
        return sum(flags), rows, flags.index(True)

    def described(self, array: HostArray) -> tuple[str, tuple[int, ...]]:
        return array.dtype, array.shape

    def extremes(self, array: HostArray) -> tuple[int, ...]:
        if not array.data.nbytes:
            return ()
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            values = numpy.frombuffer(array.data, array.dtype)
            return int(values.min()), int(values.max())
        whole = integers_of(array)
        return min(whole), max(whole)

    def to_host(self, array: HostArray) -> HostArray:
        return array

    def adopt(self, array: Any, like: Any) -> Any:
        raise TypeError("no layer saves host arrays")
