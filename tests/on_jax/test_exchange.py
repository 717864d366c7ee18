"""numpy into JAX: XLA's 64 bytes, and 64 bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from roundpipe_jax import ExchangeError, exchange, from_dlpack
from roundpipe_jax._exchange import _aligned


def aligned(values: Any) -> Any:
    array = _aligned(values.shape, values.dtype)
    array[...] = values
    return array


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "float8_e5m2", "float32"])
def test_aligned_numpy_is_shared(dtype: str) -> None:
    array = aligned(np.ones((4, 3)).astype(jnp.dtype(dtype)))
    for copy in ("share", "auto", "snapshot"):
        got, report = exchange(array, copy)

        assert got.dtype == dtype
        assert np.asarray(got).tobytes() == array.tobytes()
        assert (got.unsafe_buffer_pointer() == array.ctypes.data) == report.shared == (copy != "snapshot")
        assert not got._committed


def test_read_only_numpy_is_shared() -> None:
    array = aligned(np.arange(4.0, dtype=np.float32))
    array.setflags(write=False)  # jax.dlpack refuses it
    assert exchange(array, "share")[1].shared


def test_unaligned_numpy_is_not() -> None:
    array = aligned(np.arange(40.0, dtype=np.float32))[1:]
    assert exchange(array, "auto")[1].reason == "its address is not a multiple of 64, as XLA needs it"
    with pytest.raises(ExchangeError, match="not a multiple of 64"):
        from_dlpack(array, "share")


B = np.arange(12.0, dtype=np.float32).reshape(3, 4)
STRIDED = {"reversed": B[::-1], "transposed": B.T, "columns": B[:, 1:], "other byte order": aligned(B).astype(">f4")}


@pytest.mark.parametrize("name", STRIDED)
def test_any_numpy_arrives(name: str) -> None:
    array = STRIDED[name]
    for copy in ("snapshot", "auto"):
        got, report = exchange(array, copy)
        assert got.tolist() == array.tolist()
        assert not report.shared
    with pytest.raises(ExchangeError, match="its memory cannot be shared"):
        from_dlpack(array, "share")


def test_a_snapshot_of_numpy_is_taken_at_once() -> None:
    array = aligned(np.arange(1 << 16, dtype=np.float32))
    got = from_dlpack(array)
    array[:] = -1
    assert np.array_equal(np.asarray(got), np.arange(1 << 16))


def test_64_bits_in_a_context() -> None:
    array = aligned(np.arange(4) + 2**40)
    with jax.enable_x64(True):
        got, report = exchange(array, "share")
        assert (got.dtype, report.shared) == ("int64", True)
    with pytest.raises(ExchangeError, match="do not fit int32"):
        from_dlpack(array)


def test_another_default_device() -> None:
    with jax.default_device("cpu"):
        assert exchange(aligned(np.ones(4, np.float32)), "share")[1].shared
    with jax.default_device(jax.devices()[0]):
        assert exchange(aligned(np.ones(4, np.float32)), "share")[1].shared


def test_an_object_that_speaks_nothing_but_dlpack() -> None:
    class Speaker:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    array = aligned(np.arange(6, dtype=np.float32).reshape(2, 3))
    for copy in ("share", "snapshot"):
        got, report = exchange(Speaker(array), copy)
        np.testing.assert_array_equal(got, array)
        assert (got.unsafe_buffer_pointer() == array.ctypes.data) == report.shared == (copy == "share")
