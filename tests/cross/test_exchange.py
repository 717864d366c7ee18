"""torch <-> JAX: what shares memory, what copies, and that no value changes on the way.

The oracle is bytes: those of the source, read by its own framework, against those of the result, read by the other.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import roundpipe_jax
import roundpipe_torch
from roundpipe_core import ExchangeError

BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32", "complex64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
SHAPES = [(5, 3), (64,), (), (0,), (0, 4), (1,), (1, 5, 1), (2, 1, 3)]


def tensor_of(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bytes: every value of the dtype may occur, NaN with any payload too."""
    torch_dtype = getattr(torch, dtype)
    if dtype == "bool":
        return torch.rand(shape) > 0.5
    size = torch.empty((), dtype=torch_dtype).element_size() * int(np.prod(shape))
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(torch_dtype).reshape(shape)


def torch_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def jax_bytes(array: jax.Array) -> bytes:
    return np.asarray(array).tobytes()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_to_jax(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = tensor_of(dtype, shape)
    for copy in ("share", "auto", "snapshot"):
        array, report = roundpipe_jax.exchange(tensor, copy)

        assert (array.dtype.name, array.shape) == (dtype, shape)
        assert jax_bytes(array) == torch_bytes(tensor)
        assert report.shared == (copy != "snapshot")
        assert (report.nbytes, report.dtype, report.new_dtype) == (tensor.nbytes, dtype, dtype)
        if tensor.numel():
            assert (array.unsafe_buffer_pointer() == tensor.data_ptr()) == report.shared


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_to_torch(dtype: str, shape: tuple[int, ...]) -> None:
    values = tensor_of(dtype, shape)
    array = jax.device_put(roundpipe_jax.from_dlpack(values))
    for copy in ("share", "auto", "snapshot"):
        tensor, report = roundpipe_torch.exchange(array, copy)

        assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, dtype), shape)
        assert torch_bytes(tensor) == jax_bytes(array) == torch_bytes(values)
        assert report.shared == (copy != "snapshot")
        if array.size:
            assert (tensor.data_ptr() == array.unsafe_buffer_pointer()) == report.shared


@pytest.mark.parametrize("copy", ["snapshot", "share", "auto"])
def test_computed_arrays_are_waited_for(copy: Any) -> None:
    array = jax.jit(lambda x: jnp.sort(x)[::-1])(jnp.arange(200_000, dtype=jnp.float32))

    assert roundpipe_torch.from_dlpack(array, copy).tolist() == list(range(199_999, -1, -1))


# ------------------------------------------------------------------------------------------- any strides


B = torch.arange(48.0).view(6, 8)
LAYOUTS = {
    "columns": B[:, 1:3],
    "steps": B[::2],
    "stride 0": torch.arange(3.0)[None].expand(4, 3),
    "overlap": torch.as_strided(torch.arange(9.0), (4, 3), (2, 1)),
    "transposed": B.T,
    "permuted": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
    "unaligned": torch.arange(40.0)[1:],
    "conjugate": torch.arange(6.0).view(3, 2).view(torch.complex64).conj(),
    "negated": torch.complex(torch.arange(4.0), torch.arange(4.0)).conj().imag,
    "bool column": (B > 20)[:, 3],
}
WHY = {
    "columns": "row-major",
    "steps": "row-major",
    "stride 0": "row-major",
    "overlap": "row-major",
    "transposed": "row-major",
    "permuted": "row-major",
    "unaligned": "not a multiple of 64",
    "conjugate": "conjugated or negated",
    "negated": "row-major",
    "bool column": "row-major",
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_that_jax_cannot_use_is_copied_or_refused(name: str) -> None:
    tensor = LAYOUTS[name]
    for copy in ("snapshot", "auto"):
        array, report = roundpipe_jax.exchange(tensor, copy)

        assert array.tolist() == tensor.tolist()
        assert not report.shared
        assert (WHY[name] in report.reason) == (copy == "auto")
        assert jax.jit(lambda x: x + 0)(array).tolist() == tensor.tolist()  # no layout that a program refuses

    with pytest.raises(ExchangeError, match=WHY[name]):
        roundpipe_jax.from_dlpack(tensor, "share")


def test_strides_that_torch_knows_are_shared() -> None:
    array = jnp.from_dlpack(torch.arange(6.0).view(2, 3).T)  # JAX's own import keeps the order of memory
    tensor, report = roundpipe_torch.exchange(array, "share")

    assert report.shared
    assert tensor.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_odd_booleans_of_torch() -> None:
    odd = torch.tensor([0, 2, 255, 1] * 16, dtype=torch.uint8).view(torch.bool)
    for copy in ("snapshot", "auto"):
        assert np.asarray(roundpipe_jax.from_dlpack(odd, copy)).view(np.uint8).tolist() == [0, 1, 1, 1] * 16
    with pytest.raises(ExchangeError, match="neither 0 nor 1"):
        roundpipe_jax.from_dlpack(odd, "share")


def test_odd_booleans_of_jax() -> None:
    odd = torch.tensor([0, 2, 255, 1] * 16, dtype=torch.uint8).view(torch.bool)
    array = jnp.from_dlpack(odd)  # JAX does not look
    for copy in ("snapshot", "auto"):
        assert roundpipe_torch.from_dlpack(array, copy).view(torch.uint8).tolist() == [0, 1, 1, 1] * 16
    with pytest.raises(ExchangeError, match="neither 0 nor 1"):
        roundpipe_torch.from_dlpack(array, "share")


# ------------------------------------------------------------------------------------------- lifetimes and writes


def resized(tensor: torch.Tensor) -> None:
    tensor.resize_(1 << 18)


def freed(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def in_shared_memory(tensor: torch.Tensor) -> None:
    tensor.share_memory_()


def given_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros(3)


def set_elsewhere(tensor: torch.Tensor) -> None:
    tensor.set_(torch.zeros(3))


def module_moved(tensor: torch.Tensor) -> None:
    module = torch.nn.Module()
    module.register_buffer("held", tensor)
    module.to(torch.float64)


def written(tensor: torch.Tensor) -> None:
    tensor.zero_()


LATER = [resized, freed, in_shared_memory, given_data, set_elsewhere, module_moved, written]


def disturb_memory() -> None:
    gc.collect()
    for _ in range(4):
        torch.full((1 << 16,), 9.0)


@pytest.mark.parametrize("later", LATER)
def test_a_snapshot_does_not_see_what_happens_to_its_source(later: Callable[[torch.Tensor], None]) -> None:
    tensor = torch.arange(1 << 16, dtype=torch.float32)
    array = roundpipe_jax.from_dlpack(tensor)
    later(tensor)
    disturb_memory()

    assert np.array_equal(np.asarray(array), np.arange(1 << 16))


@pytest.mark.parametrize("later", [given_data, set_elsewhere, module_moved])
def test_a_shared_array_keeps_the_memory_that_its_tensor_leaves(later: Callable[[torch.Tensor], None]) -> None:
    tensor = torch.arange(1 << 16, dtype=torch.float32)
    array = roundpipe_jax.from_dlpack(tensor, "share")
    later(tensor)
    del tensor
    disturb_memory()

    assert np.array_equal(np.asarray(array), np.arange(1 << 16))


@pytest.mark.parametrize("later", [resized, freed])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_refuses_to_free_what_jax_shares(later: Callable[[torch.Tensor], None], dtype: torch.dtype) -> None:
    tensor = torch.ones(1 << 16, dtype=dtype)
    array = roundpipe_jax.from_dlpack(tensor, "share")

    with pytest.raises(RuntimeError, match="not resizable"):
        later(tensor)
    assert float(array.astype("float32").sum()) == 1 << 16


def test_shared_memory_is_shared_and_a_snapshot_is_not() -> None:
    tensor = torch.zeros(64)
    shared, apart = (roundpipe_jax.from_dlpack(tensor, copy) for copy in ("share", "snapshot"))
    tensor.add_(1)

    assert (float(shared[0]), float(apart[0])) == (1, 0)


def test_writing_to_a_tensor_leaves_the_jax_array_it_came_from() -> None:
    array = jnp.arange(4.0)
    roundpipe_torch.from_dlpack(array).add_(1)

    assert array.tolist() == [0, 1, 2, 3]


def test_a_tensor_from_jax_is_torchs_own() -> None:
    tensor = roundpipe_torch.from_dlpack(jnp.arange(4.0))
    tensor.resize_(1000).requires_grad_()

    assert tensor.is_leaf


@pytest.mark.parametrize("copy", ["snapshot", "share"])
def test_a_donated_import_never_writes_to_torch(copy: Any) -> None:
    tensor = torch.arange(1024.0)
    array = roundpipe_jax.from_dlpack(tensor, copy)
    after = jax.jit(lambda x: x + 1, donate_argnums=0)(array)

    assert after.tolist() == list(range(1, 1025))
    assert tensor.tolist() == list(range(1024))


def test_donating_a_shared_jax_array_leaves_the_tensor() -> None:
    array = jnp.arange(1024.0) + 0
    tensor = roundpipe_torch.from_dlpack(array, "share")
    jax.jit(lambda x: x + 1, donate_argnums=0)(array).block_until_ready()

    assert tensor.tolist() == list(range(1024))


@pytest.mark.parametrize("back", [False, True])
def test_shared_memory_outlives_its_source(back: bool) -> None:
    source: Any = torch.arange(1 << 16, dtype=torch.float32)
    if back:
        source = roundpipe_jax.from_dlpack(source)
    take = roundpipe_torch.from_dlpack if back else roundpipe_jax.from_dlpack
    taken = take(source, "share")
    del source
    disturb_memory()

    assert float(taken.sum()) == float(np.arange(1 << 16, dtype=np.float64).sum())


@pytest.mark.parametrize("copy", ["snapshot", "share", "auto"])
def test_imports_follow_the_computation(copy: Any) -> None:
    """Not committed to a device: it can be combined with arrays that are sharded over several."""
    assert not roundpipe_jax.from_dlpack(torch.ones(64), copy)._committed


def test_no_growth_over_many_exchanges() -> None:
    tensor = torch.ones(1 << 16)
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(200):
        for copy in ("share", "snapshot"):
            roundpipe_torch.from_dlpack(roundpipe_jax.from_dlpack(tensor, copy), copy)
    gc.collect()

    assert len(jax.live_arrays()) <= before


# ------------------------------------------------------------------------------------------- 64 bits


@pytest.mark.parametrize(
    ("dtype", "narrow", "fits", "beyond"),
    [
        ("int64", "int32", [-(2**31), 2**31 - 1], [[0, 2**31], [-(2**31) - 1], [2**32 + 7]]),
        ("uint64", "uint32", [0, 2**32 - 1], [[0, 2**32], [2**64 - 1]]),
    ],
)
def test_wide_integers_are_narrowed_if_they_fit(dtype: str, narrow: str, fits: list[int], beyond: list[Any]) -> None:
    for make in (lambda v: torch.tensor(v, dtype=getattr(torch, dtype)), lambda v: np.array(v, dtype)):
        array, report = roundpipe_jax.exchange(make(fits), "auto")

        assert array.tolist() == fits
        assert (report.dtype, report.new_dtype, report.shared, report.nbytes) == (dtype, narrow, False, 8)
        assert report.reason == f"JAX holds {dtype} as {narrow}"
        assert roundpipe_jax.from_dlpack(make([])).dtype == narrow
        for values in beyond:
            with pytest.raises(ExchangeError, match=rf"its values from .* do not fit {narrow}"):
                roundpipe_jax.from_dlpack(make(values))
        with pytest.raises(ExchangeError, match=f"JAX holds {dtype} as {narrow}"):
            roundpipe_jax.from_dlpack(make(fits), "share")


@pytest.mark.parametrize(("dtype", "narrow"), [("float64", "float32"), ("complex128", "complex64")])
def test_wide_floats_are_rounded_only_if_allowed(dtype: str, narrow: str) -> None:
    tensor = torch.tensor([1 / 3, float("inf"), float("nan")], dtype=getattr(torch, dtype))

    with pytest.raises(ExchangeError, match=f"would be rounded to {narrow}.*\n.*\n.*allow_rounding=True"):
        roundpipe_jax.from_dlpack(tensor)
    array = roundpipe_jax.from_dlpack(tensor, allow_rounding=True)
    np.testing.assert_array_equal(np.asarray(array), tensor.to(getattr(torch, narrow)).numpy())

    tensor[0] = 1e300
    with pytest.raises(ExchangeError, match=f"values beyond {narrow}"):
        roundpipe_jax.from_dlpack(tensor, allow_rounding=True)


# ------------------------------------------------------------------------------------------- within one framework


class Library:
    """A library whose arrays are torch's, of types that numpy does not take."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **how: Any) -> Any:
        return self.tensor.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_libraries_that_nobody_knows_have_all_types(dtype: str) -> None:
    made = tensor_of(dtype, (64, 4))  # new memory, aligned
    for tensor, why in [
        (made, None),
        (made[1:], "JAX copied it to read it"),  # not aligned
        (made.T, "its elements are not in row-major order without gaps"),
    ]:
        before = torch_bytes(tensor)
        array, report = roundpipe_jax.exchange(Library(tensor), "auto")
        assert (array.dtype, jax_bytes(array)) == (dtype, torch_bytes(tensor))
        assert (report.shared, report.source) == (why is None, __name__.partition(".")[0])
        assert (array.unsafe_buffer_pointer() == tensor.data_ptr()) == report.shared
        assert why in (None, report.reason)
        snapshot = roundpipe_jax.from_dlpack(Library(tensor))
        assert snapshot.unsafe_buffer_pointer() != tensor.data_ptr()
        for held in (array, snapshot):  # in a layout that compiled functions take, and not theirs to write to
            jax.jit(lambda x: x * 0, donate_argnums=0)(held).block_until_ready()
        assert torch_bytes(tensor) == before


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz"])
def test_types_that_jax_adds_to_numpy_come_back_to_it(dtype: str) -> None:
    room = np.zeros(192, "uint8")
    aligned = room[-room.ctypes.data % 64 :][:8].view(jnp.dtype(dtype))
    aligned[:] = np.array([0, 1, 1, 0, 1, 0, 0, 1])
    for source in (aligned, aligned[::2], aligned[1:]):
        for copy in ("snapshot", "auto"):
            got, report = roundpipe_jax.exchange(source, copy)
            assert (got.dtype, np.asarray(got).tolist()) == (dtype, source.tolist())
            assert report.nbytes == source.nbytes


def test_torch_to_torch() -> None:
    tensor = torch.arange(4.0)
    shared, apart = (roundpipe_torch.from_dlpack(tensor, copy) for copy in ("share", "snapshot"))

    assert shared.data_ptr() == tensor.data_ptr() != apart.data_ptr()
    version = tensor._version
    shared.add_(1)  # autograd sees it, as it does not through DLPack
    assert tensor._version > version
    assert (tensor[0].item(), apart[0].item()) == (1, 0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_torch_keeps_its_own_layouts(name: str) -> None:
    tensor = LAYOUTS[name]
    shared, report = roundpipe_torch.exchange(tensor, "share")
    apart = roundpipe_torch.from_dlpack(tensor)

    assert report.shared
    assert (shared.data_ptr(), shared.stride()) == (tensor.data_ptr(), tensor.stride())
    assert shared.tolist() == apart.tolist() == tensor.tolist()
    assert apart.is_contiguous()
    assert (apart.is_conj(), apart.is_neg()) == (False, False)


def test_jax_to_jax() -> None:
    array = jnp.arange(4).astype("int4")
    assert roundpipe_jax.from_dlpack(array, "share") is array
    apart = roundpipe_jax.from_dlpack(array)
    array.delete()
    assert apart.tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------- adopt


def test_adopt() -> None:
    from roundpipe_jax._exchange import adopt as jax_adopt
    from roundpipe_torch._exchange import adopt as torch_adopt

    tensor, array, plain = torch.arange(3), jnp.arange(3), np.arange(3)
    assert torch_adopt(tensor) is tensor
    assert jax_adopt(array) is array
    for leaf in (None, 3, 2.5, "name", object(), [1], torch.float32, torch.Tensor):
        assert torch_adopt(leaf) is leaf
        assert jax_adopt(leaf) is leaf
    for leaf in (array, plain):
        assert torch_adopt(leaf).tolist() == [0, 1, 2]
    for leaf in (tensor, plain):
        assert isinstance(jax_adopt(leaf), jax.Array)
        assert jax_adopt(leaf).dtype == "int32"

    mine = jax_adopt(tensor.int())
    tensor.zero_()
    assert mine.tolist() == [0, 1, 2]
    with pytest.raises(ExchangeError, match="do not fit int32"):
        jax_adopt(torch.tensor([2**40]))


# ------------------------------------------------------------------------------------------- CUDA


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_shares_on_one_device(dtype: str) -> None:
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("this JAX has no CUDA")
    tensor = tensor_of(dtype, (64, 3)).cuda()
    shared = roundpipe_jax.from_dlpack(tensor, "share")
    apart = roundpipe_jax.from_dlpack(tensor)
    back = roundpipe_torch.from_dlpack(shared, "share")

    assert shared.unsafe_buffer_pointer() == tensor.data_ptr() == back.data_ptr() != apart.unsafe_buffer_pointer()
    assert jax_bytes(apart) == torch_bytes(tensor.cpu()) == torch_bytes(roundpipe_torch.from_dlpack(apart).cpu())


@pytest.mark.cuda
def test_cuda_streams_are_ordered() -> None:
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("this JAX has no CUDA")
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor = torch.ones(1 << 24, device="cuda")
        for _ in range(50):
            tensor = tensor * 1.0
        tensor.fill_(3.0)
        total = roundpipe_jax.from_dlpack(tensor).sum()
        tensor.zero_()
    assert float(total) == 3 * (1 << 24)


@pytest.mark.cuda
def test_cuda_memory_that_jax_does_not_have_comes_to_the_host() -> None:
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("this JAX has CUDA")
    tensor = torch.arange(8.0, device="cuda")
    array, report = roundpipe_jax.exchange(tensor, "auto")

    assert array.tolist() == tensor.tolist()
    assert report.reason == "JAX has no device cuda:0 here"
    with pytest.raises(ExchangeError, match="JAX has no device cuda:0"):
        roundpipe_jax.from_dlpack(tensor, "share")
