"""numpy into torch: any strides, no write to what is read-only, no crash."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from roundpipe_torch import ExchangeError, exchange, from_dlpack

DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]


@pytest.mark.parametrize("shape", [(4, 3), (), (0,), (0, 4), (1, 5, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shares_and_copies(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype)
    for copy in ("share", "auto", "snapshot"):
        tensor, report = exchange(array, copy)

        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{dtype}", shape)
        assert tensor.tolist() == array.tolist()
        assert report.shared == (copy != "snapshot")
        if array.size:
            assert (tensor.data_ptr() == array.ctypes.data) == report.shared


def read_only(array: Any) -> Any:
    array = array.copy()
    array.setflags(write=False)
    return array


B = np.arange(12, dtype=np.float32).reshape(3, 4)
RECORDS = np.zeros(3, dtype=[("a", "i1"), ("b", "f4")])
RECORDS["b"] = [1, 2, 3]
COPIED = {
    "negative stride": (B[::-1], "negative stride"),
    "negative stride inside": (B[:, ::-1], "negative stride"),
    "broadcast": (np.broadcast_to(B[0], (2, 4)), "the same memory"),
    "overlap": (np.lib.stride_tricks.as_strided(B, (2, 3), (4, 4)), "the same memory"),
    "read-only": (read_only(B), "read-only"),
    "other byte order": (B.astype(">f4"), "other order"),
    "off the boundary": (np.frombuffer(bytearray(b"\0" + B.tobytes()), np.uint8)[1:].view("f4"), "boundaries"),
    "a field of records": (RECORDS["b"], "whole elements"),
    "odd booleans": (np.array([0, 2, 255, 1], np.uint8).view(bool), "neither 0 nor 1"),
}


@pytest.mark.parametrize("name", COPIED)
def test_memory_that_torch_must_not_use_is_copied_or_refused(name: str) -> None:
    array, why = COPIED[name]
    before = array.tobytes()
    for copy in ("snapshot", "auto"):
        tensor, report = exchange(array, copy)

        assert tensor.tolist() == array.tolist()
        assert not report.shared
        assert (why in report.reason) == (copy == "auto")
        tensor.zero_()
        assert array.tobytes() == before
    with pytest.raises(ExchangeError, match=why):
        from_dlpack(array, "share")


def test_positive_strides_are_shared() -> None:
    tensor, report = exchange(B.T[::2], "share")

    assert report.shared
    assert tensor.tolist() == B.T[::2].tolist()


def test_subclasses_of_numpy() -> None:
    class Flat(np.ndarray):  # type: ignore[type-arg]
        """Indexes otherwise."""

        def __getitem__(self, key: Any) -> Any:
            raise AssertionError("the values are taken from memory")

    assert from_dlpack(np.arange(4).reshape(2, 2).view(Flat)).tolist() == [[0, 1], [2, 3]]
    with pytest.raises(ExchangeError, match="it has a mask, which would be lost"):
        from_dlpack(np.ma.masked_array([1, 2], [0, 1]))


@pytest.mark.parametrize(
    ("array", "way_out"),
    [
        (np.array(["a"]), "hand over numbers; of texts and objects"),
        (np.array([None]), "hand over numbers; of texts and objects"),
        (RECORDS, "hand over a record field by field"),
        (np.array(["2020-01-01"], "M8[D]"), "hand over numbers; of texts and objects"),
        (np.ones(2, np.longdouble), r"convert it first, .*\.astype\("),
    ],
    ids=lambda value: value.dtype.kind if isinstance(value, np.ndarray) else "",
)
def test_dtypes_of_numpy_alone(array: Any, way_out: str) -> None:
    with pytest.raises(ExchangeError, match=rf"torch has no dtype (.|\n)*way out: {way_out}"):
        from_dlpack(array)


class Foreign:
    """An array of a library that nobody here knows."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **how: Any) -> Any:
        return self._array.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("copy", ["snapshot", "auto"])
def test_libraries_that_nobody_knows(copy: Any) -> None:
    assert from_dlpack(Foreign(B[::-1]), copy).tolist() == B[::-1].tolist()  # torch.from_dlpack aborts the process
    assert from_dlpack(Foreign(torch.ones(3).bfloat16()), copy).dtype is torch.bfloat16  # numpy cannot


@pytest.mark.cuda
def test_cuda_tensors_stay_on_their_device() -> None:
    tensor = torch.arange(4.0, device="cuda")
    shared, apart = from_dlpack(tensor, "share"), from_dlpack(tensor)

    assert shared.data_ptr() == tensor.data_ptr() != apart.data_ptr()
    assert apart.tolist() == tensor.tolist()
    assert apart.device == tensor.device
