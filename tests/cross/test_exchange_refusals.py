"""What has no values to take says so, says what it is, and names the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import roundpipe_jax
import roundpipe_torch
from roundpipe_core import ExchangeError

quiet = pytest.mark.filterwarnings("ignore")  # torch calls some of these layouts experimental, or old


class Plain(torch.Tensor):
    """A subclass with memory of its own."""


class Wrapper(torch.Tensor):
    """A subclass without."""

    @staticmethod
    def __new__(cls, size: int) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, (size,))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def with_freed_storage() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    return tensor


def with_shrunk_storage(nbytes: int = 16) -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def functional() -> torch.Tensor:
    return torch._to_functional_tensor(torch.ones(3))


def nested(layout: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


TENSORS: dict[str, tuple[Callable[[], torch.Tensor], str, str]] = {
    "grad": (lambda: torch.ones(3, requires_grad=True), "it carries gradient", ".detach()"),
    "parameter": (lambda: torch.nn.Parameter(torch.ones(3)), "it carries gradient", ".detach()"),
    "interior": (lambda: torch.ones(3, requires_grad=True) * 2, "it carries gradient", ".detach()"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta device", "to_empty"),
    "fake": (fake, "made by a trace", "stands for"),
    "functional": (functional, "made by a trace", "stands for"),
    "lazy": (lambda: torch.nn.parameter.UninitializedParameter(), "not initialised", "run the module"),
    "coo": (lambda: torch.eye(3).to_sparse(), "layout is sparse_coo", "to_dense"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "layout is sparse_csr", "to_dense"),
    "mkldnn": (lambda: torch.ones(3, 3).to_mkldnn(), "layout is mkldnn", "to_dense"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "quantised", "dequantize"),
    "nested": (lambda: nested(torch.strided), "nested tensor", "to_padded_tensor"),
    "jagged": (lambda: nested(torch.jagged), "nested tensor", "to_padded_tensor"),
    "wrapper": (lambda: Wrapper(3), "it is a Wrapper, whose values are kept", "hand those over"),
    "freed": (with_freed_storage, "storage was freed", "unshard"),
    "shrunk": (with_shrunk_storage, "storage was freed or made smaller", "unshard"),
    "shrunk by a byte": (lambda: with_shrunk_storage(31), "storage was freed or made smaller", "unshard"),
}
TAKERS = {"to JAX": roundpipe_jax.from_dlpack, "to torch": roundpipe_torch.from_dlpack}


def refused(take: Callable[..., Any], source: Any, *facts: str) -> None:
    for copy in ("snapshot", "share", "auto"):
        with pytest.raises(ExchangeError) as caught:
            take(source, copy)
        headline, place, way_out = str(caught.value).splitlines()
        assert facts[0] in headline
        assert __file__ in place
        assert facts[1] in way_out


@quiet
@pytest.mark.parametrize("take", TAKERS)
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_without_values(name: str, take: str) -> None:
    make, *facts = TENSORS[name]
    refused(TAKERS[take], make(), *facts)


@quiet
@pytest.mark.parametrize(
    ("dtype", "way_out"),
    [
        *((name, ".view(torch.uint8)") for name in ("int4", "uint4", "int1", "uint7", "float4_e2m1fn_x2", "bits8")),
        ("complex32", ".to(torch.float32)"),
    ],
)
def test_dtypes_of_torch_alone(dtype: str, way_out: str) -> None:
    refused(
        roundpipe_jax.from_dlpack, torch.empty(4, dtype=getattr(torch, dtype)), f"JAX has no dtype {dtype}", way_out
    )


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz"])
def test_dtypes_of_jax_alone(dtype: str) -> None:
    refused(roundpipe_torch.from_dlpack, jnp.zeros(4, dtype), f"torch has no dtype {dtype}", ".astype(")


@quiet
def test_gradient_of_any_kind_is_not_lost() -> None:
    with forward_ad.dual_level():
        refused(roundpipe_jax.from_dlpack, forward_ad.make_dual(torch.ones(3), torch.ones(3)), "gradient", "detach")

    def seen(x: torch.Tensor) -> torch.Tensor:
        for take in TAKERS.values():
            refused(take, x, "inside a torch.func transformation", "return it")
        return x.sum()

    torch.func.grad(seen)(torch.ones(3))
    torch.func.vmap(seen)(torch.ones(2, 3))


def test_subclasses_with_memory_are_taken_as_tensors() -> None:
    tensor = torch.ones(64).as_subclass(Plain)
    array, report = roundpipe_jax.exchange(tensor, "share")

    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert report.source == "torch"
    assert type(roundpipe_torch.from_dlpack(tensor)) is torch.Tensor


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@quiet
@pytest.mark.usefixtures("one_rank")
def test_dtensor() -> None:
    from torch.distributed.tensor import DTensor, init_device_mesh

    tensor = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (1,)))
    refused(roundpipe_jax.from_dlpack, tensor, "DTensor, spread over ranks", ".full_tensor()")
    assert roundpipe_jax.from_dlpack(tensor.to_local()).tolist() == [1, 1, 1]


@pytest.mark.parametrize("source", [torch.ones(3), np.ones(3), jnp.ones(3)], ids=["torch", "numpy", "jax"])
def test_while_torch_traces(source: Any) -> None:
    with FakeTensorMode():
        refused(roundpipe_torch.from_dlpack, source, "torch traces or fakes", "outside")

    def traced(x: torch.Tensor) -> torch.Tensor:
        refused(roundpipe_torch.from_dlpack, source, "torch traces or fakes", "outside")
        return x

    make_fx(traced)(torch.ones(3))


def deleted() -> jax.Array:
    array = jnp.ones(3)
    array.delete()
    return array


def donated() -> jax.Array:
    array = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array).block_until_ready()
    return array


ARRAYS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "deleted": (deleted, "it was deleted", "before the call"),
    "donated": (donated, "it was deleted", "donate_argnums"),
    "key": (lambda: jax.random.key(0), "it is a PRNG key", "jax.random.key_data"),
    "keys": (lambda: jax.random.split(jax.random.key(0), 3), "it is a PRNG key", "jax.random.key_data"),
    "reference": (lambda: jax.new_ref(jnp.ones(3)), "it is a reference", "ref[...]"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_jax_arrays_without_values(name: str) -> None:
    make, *facts = ARRAYS[name]
    refused(roundpipe_torch.from_dlpack, make(), *facts)


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap", "scan", "checkpoint"])
def test_tracers(transform: str) -> None:
    def seen(x: Any) -> Any:
        for take in TAKERS.values():
            with pytest.raises(ExchangeError, match=r"is a tracer|would be frozen"):
                take(x)
        return x.sum()

    wrap: dict[str, Callable[[Any], Any]] = {
        "jit": jax.jit,
        "grad": jax.grad,
        "vmap": jax.vmap,
        "scan": lambda f: lambda xs: jax.lax.scan(lambda c, x: (c, f(x)), 0, xs),
        "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    }
    wrap[transform](seen)(jnp.ones(3))


@pytest.mark.parametrize("source", [torch.ones(3), np.ones(3, "float32")], ids=["torch", "numpy"])
def test_nothing_is_frozen_into_a_program(source: Any) -> None:
    def traced(x: Any) -> Any:
        refused(roundpipe_jax.from_dlpack, source, "would be frozen into it", "pass the array as an argument")
        with jax.ensure_compile_time_eval():  # a constant on purpose
            return x + roundpipe_jax.from_dlpack(source)

    assert jax.jit(traced)(jnp.ones(3)).tolist() == [2, 2, 2]
    jax.make_jaxpr(traced)(jnp.ones(3))


def test_eager_transformations_freeze_nothing() -> None:
    tensor = torch.ones(3)

    def f(x: Any) -> Any:
        return (x * roundpipe_jax.from_dlpack(tensor)).sum()

    assert jax.grad(f)(jnp.ones(3)).tolist() == [1, 1, 1]
    tensor.fill_(2)
    assert jax.grad(f)(jnp.ones(3)).tolist() == [2, 2, 2]
    assert jax.vmap(f)(jnp.ones((2, 3))).tolist() == [6, 6]


def test_a_capsule_says_what_to_pass() -> None:
    refused(roundpipe_jax.from_dlpack, torch.ones(3).__dlpack__(), "a PyCapsule", "pass the array itself")
    storage = torch.ones(3).untyped_storage()
    refused(roundpipe_torch.from_dlpack, storage, "a torch.storage.UntypedStorage", "pass the array itself")


def test_the_gradient_of_what_has_none_is_told() -> None:
    (float0,) = jax.grad(lambda x, n: x * n, argnums=(1,), allow_int=True)(1.0, 2)
    for take in TAKERS.values():
        refused(take, float0, "it is a float0", "leave it out")


def test_what_torch_itself_cannot_copy_is_told() -> None:
    with pytest.raises(ExchangeError, match=r"int4\[4\] cannot be taken into torch: torch cannot copy int4"):
        roundpipe_torch.from_dlpack(torch.empty(4, dtype=torch.int4))
