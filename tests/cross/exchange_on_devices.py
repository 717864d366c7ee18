"""Run by test_exchange_devices.py, in a process with four devices and 64 bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import roundpipe_jax
import roundpipe_torch
from roundpipe_core import ExchangeError


def wide_types() -> None:
    for dtype in ("int64", "uint64", "float64", "complex128"):
        for shape in ((5, 3), (), (0, 4), (1, 5, 1)):
            tensor = torch.rand(shape, dtype=torch.float64).mul(2**40).to(getattr(torch, dtype))
            for copy in ("share", "auto", "snapshot"):
                array, there = roundpipe_jax.exchange(tensor, copy)
                back, again = roundpipe_torch.exchange(array, copy)
                assert array.dtype.name == dtype
                assert array.tolist() == tensor.tolist() == back.tolist()
                assert there.shared == again.shared == (copy != "snapshot")
                if tensor.numel():
                    shared = array.unsafe_buffer_pointer() == tensor.data_ptr() == back.data_ptr()
                    assert shared == there.shared


def sharded() -> None:
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    for spec in (P("i"), P()):
        for dtype in ("float32", "bfloat16", "bool"):
            array = jax.device_put(jnp.arange(8).astype(dtype), NamedSharding(mesh, spec))
            for copy in ("snapshot", "auto"):
                tensor, report = roundpipe_torch.exchange(array, copy)
                assert tensor.float().tolist() == np.asarray(array).astype("float32").tolist()
                assert report.shared is False
            assert report.reason == "it is spread over 4 devices", report
            with pytest.raises(ExchangeError, match=r"addressable_shards\[0\].data"):
                roundpipe_torch.from_dlpack(array, "share")
            part, report = roundpipe_torch.exchange(array.addressable_shards[-1].data, "share")
            assert report.shared
            assert len(part) == (2 if spec else 8)
            assert roundpipe_jax.from_dlpack(array).sharding == array.sharding
            assert roundpipe_jax.from_dlpack(array, "share") is array


def placed() -> None:
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.device_put(jnp.ones(64), NamedSharding(mesh, P("i")))
    far = jax.device_put(jnp.ones(64), jax.devices()[3])
    for copy in ("share", "auto", "snapshot"):
        array: Any = roundpipe_jax.from_dlpack(torch.ones(64, dtype=torch.float64), copy)
        assert (array + rows).sharding == rows.sharding  # a committed array would fail here
        assert (array + far).devices() == far.devices()
    with jax.default_device(jax.devices()[2]):
        assert roundpipe_jax.exchange(torch.ones(64), "share")[0].devices() == {jax.devices()[2]}
    with jax.set_mesh(mesh):
        assert roundpipe_jax.exchange(torch.ones(64), "share")[1].shared


if __name__ == "__main__":
    wide_types()
    sharded()
    placed()
