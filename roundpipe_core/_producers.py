"""Arrays that can be handed over: how each framework's are recognised, and what they offer (R13).

A framework is looked up in `sys.modules`: an array of it exists only if it was imported.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["DTYPES", "Fault", "Offer", "Producer", "dtype_name", "overlaps", "producer_of", "said", "under_trace"]

Fault = tuple[str, str]
"""What is in the way, and the way out."""

DTYPES = frozenset(
    {"bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"}
    | {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
    | {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"}
)
"""What torch and JAX both have, with the same bytes for the same values."""


@dataclass(frozen=True)
class Offer:
    """One array, ready to be taken. `strides` are in bytes; `pointer` is None where there is no single address."""

    framework: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    device: str
    pointer: int | None
    obstacle: Callable[[], Fault | None]
    """Why nobody may use the memory itself. Called only if somebody wants to."""
    view: Callable[[], Any]
    """An array of the same framework on the same memory, that an importer may read through DLPack."""
    host: Callable[[], Any]
    """A numpy array of the values: a view if the memory is the host's. Types that numpy lacks come as unsigned."""
    clone: Callable[[], Any]
    """A copy in new memory of the same framework and device, row-major."""
    hold: Callable[[], None] = lambda: None
    """Make the owner refuse to give the memory away while somebody shares it, as far as that can be done."""
    locked: bool = False
    """Whether the array says of itself that nobody may write to it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the values, without gaps."""
        return math.prod(self.shape) * self.itemsize

    @property
    def row_major(self) -> bool:
        """Whether the elements follow each other as the indices count, without gaps."""
        expected = self.itemsize
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True


class Producer(Protocol):
    """The arrays of one framework, as something to take values from."""

    name: str

    def owns(self, value: Any) -> bool:
        """Whether `value` is an array of this framework."""

    def noun(self, value: Any) -> str:
        """What to call `value`: ``torch tensor float32[2, 3]``."""

    def fault(self, value: Any) -> Fault | None:
        """Why there are no values to take."""

    def dtype_way_out(self, dtype: str) -> str:
        """What to do about a dtype that nobody else has."""

    def offer(self, value: Any) -> Offer:
        """`value`, which has no fault."""


class TorchTensors:
    """Tensors of torch."""

    name = "torch"

    def owns(self, value: Any) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(value, torch.Tensor)

    def noun(self, value: Any) -> str:
        return "torch tensor"

    def fault(self, value: Any) -> Fault | None:
        torch = sys.modules["torch"]
        lazy = isinstance(value, torch.nn.parameter.UninitializedTensorMixin)
        if lazy:
            return "it is not initialised", "run the module once, so that its parameters get their shapes."
        return (
            under_trace(torch)
            or _wrapped(torch, value)
            or _without_strides(torch, value)
            or _differentiated(torch, value)
        )

    def dtype_way_out(self, dtype: str) -> str:
        if dtype.startswith(("int", "uint", "float4", "bits")):
            return "view its bytes, .view(torch.uint8), or convert it to a type of 8 bits or more, .to(torch.int8)."
        return "convert it first, for instance .to(torch.float32)."

    def offer(self, value: Any) -> Offer:
        torch = sys.modules["torch"]
        with torch._C.DisableTorchFunctionSubclass():
            plain = value.as_subclass(torch.Tensor)  # stays right if `value` is given other memory
        itemsize = plain.element_size()
        lazy = plain.is_conj() or plain.is_neg()

        def obstacle() -> Fault | None:
            if lazy:
                return "its values still have to be conjugated or negated", ".resolve_conj().resolve_neg() does it."
            if plain.dtype is torch.bool and plain.numel() and int(plain.view(torch.uint8).max()) > 1:
                return _ODD_BOOLS
            return None

        def clone() -> Any:
            if plain.dtype is torch.bool:
                return torch.ne(plain.view(torch.uint8), 0).contiguous()
            return torch.empty(plain.shape, dtype=plain.dtype, device=plain.device).copy_(plain)

        def host() -> Any:
            here = plain.resolve_conj().resolve_neg().cpu()
            return sys.modules["numpy"].from_dlpack(_known_to_numpy(torch, here))

        def hold() -> None:
            if plain.device.type == "cpu":
                _known_to_numpy(torch, plain).numpy()  # from here on torch refuses to resize this storage

        return Offer(
            framework="torch",
            dtype=str(plain.dtype).removeprefix("torch."),
            shape=tuple(plain.shape),
            strides=tuple(stride * itemsize for stride in plain.stride()),
            itemsize=itemsize,
            device=str(plain.device),
            pointer=plain.data_ptr(),
            obstacle=obstacle,
            view=lambda: plain,
            host=host,
            clone=clone,
            hold=hold,
        )


class JaxArrays:
    """Arrays of JAX."""

    name = "jax"

    def owns(self, value: Any) -> bool:
        jax = sys.modules.get("jax")
        return jax is not None and isinstance(value, (jax.Array, jax.core.Tracer, jax.Ref))

    def noun(self, value: Any) -> str:
        return "JAX array"

    def fault(self, value: Any) -> Fault | None:
        jax = sys.modules["jax"]
        if isinstance(value, jax.core.Tracer):
            return (
                "it is a tracer, which stands for values that do not exist yet",
                "return it from the transformed function and take the result, or use jax.pure_callback.",
            )
        if isinstance(value, jax.Ref):
            return "it is a reference, whose content changes", "take its content, ref[...]."
        if value.is_deleted():
            return (
                "it was deleted",
                "hand it over before the call that it is donated to (donate_argnums), or before .delete().",
            )
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            return "it is a PRNG key", "hand over jax.random.key_data(key); jax.random.wrap_key_data makes a key of it."
        if not (value.is_fully_addressable or value.is_fully_replicated):
            return (
                "a part of it is on devices of other processes",
                "take one part, array.addressable_shards[0].data, or gather: multihost_utils.process_allgather.",
            )
        return None

    def dtype_way_out(self, dtype: str) -> str:
        return "convert it first, for instance .astype('float32') or, for small integers, .astype('int8')."

    def offer(self, value: Any) -> Offer:
        device, *others = value.devices()
        kind = value.sharding.memory_kind
        moved = device.platform != "cpu" and kind not in (None, "device")

        def obstacle() -> Fault | None:
            if others:
                return (
                    f"it is spread over {1 + len(others)} devices",
                    "take one part, array.addressable_shards[0].data, or gather it on one device with jax.device_put.",
                )
            if moved:
                return f"it is in the memory {kind!r}", "move it to the device with jax.device_put."
            if value.dtype == bool and value.size and device.platform == "cpu" and _odd_bools(host()):
                return _ODD_BOOLS
            return None

        def host() -> Any:
            numpy = sys.modules["numpy"]
            part = value.addressable_data(0) if value.is_fully_replicated else value
            return _as_bits(numpy.asarray(part))

        return Offer(
            framework="jax",
            dtype=dtype_name(value.dtype),
            shape=value.shape,
            strides=_row_major(value.shape, value.dtype.itemsize),
            itemsize=value.dtype.itemsize,
            device=_device_name(device),
            pointer=None if others or moved else value.unsafe_buffer_pointer(),
            obstacle=obstacle,
            view=lambda: value,  # its export waits until it is computed
            host=host,
            clone=lambda: sys.modules["jax"].numpy.array(value, copy=True),
        )


class NumpyArrays:
    """Arrays of numpy, with the types that JAX adds to it."""

    name = "numpy"

    def owns(self, value: Any) -> bool:
        numpy = sys.modules.get("numpy")
        return numpy is not None and isinstance(value, numpy.ndarray)

    def noun(self, value: Any) -> str:
        return "numpy array"

    def fault(self, value: Any) -> Fault | None:
        if isinstance(value, sys.modules["numpy"].ma.MaskedArray):
            return "it has a mask, which would be lost", "use .filled(...), or hand over .data and .mask."
        if value.dtype.names == ("float0",):
            return "it is a float0, JAX's gradient of what has none", "leave it out; torch has None in its place."
        return None

    def dtype_way_out(self, dtype: str) -> str:
        if dtype.startswith("void"):
            return "hand over a record field by field."
        if dtype.startswith(("float", "complex", "int", "uint")):
            return "convert it first, for instance .astype('float32')."
        return "hand over numbers; of texts and objects, their places in a list of them."

    def offer(self, value: Any) -> Offer:
        numpy = sys.modules["numpy"]
        value = numpy.asarray(value)  # a subclass may index otherwise
        native = value.dtype.isnative

        def host() -> Any:
            return _as_bits(value if native else value.astype(value.dtype.newbyteorder("=")))

        def obstacle() -> Fault | None:
            if not native:
                return "its bytes are in the other order", "convert it, .astype(array.dtype.newbyteorder('='))."
            if not value.flags.aligned:
                return "its elements lie across their boundaries", "copy it first, .copy()."
            if value.dtype == bool and value.size and _odd_bools(value):
                return _ODD_BOOLS
            return None

        return Offer(
            framework="numpy",
            dtype=dtype_name(value.dtype),
            shape=value.shape,
            strides=value.strides,
            itemsize=value.itemsize,
            device="cpu",
            pointer=value.__array_interface__["data"][0],
            obstacle=obstacle,
            view=host,
            host=host,
            clone=lambda: numpy.array(host(), order="C", copy=True),
            locked=not value.flags.writeable,
        )


_PRODUCERS: tuple[Producer, ...] = (TorchTensors(), JaxArrays(), NumpyArrays())


def producer_of(value: Any) -> Producer | None:
    """The framework that `value` is an array of, if it is one of those known here."""
    return next((producer for producer in _PRODUCERS if producer.owns(value)), None)


def said(producer: Producer, source: str, value: Any) -> str:
    """The array in words: ``a torch tensor float32[2, 3]``. Nothing in it may touch values."""
    noun = producer.noun(value) if source == producer.name else f"{source} array"
    try:
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{noun} {dtype}{list(value.shape)}"
    except Exception:  # a lazy parameter has no shape yet
        return noun


@functools.lru_cache(256)
def dtype_name(dtype: Any) -> str:
    """The name of a dtype of numpy or JAX. They make it anew each time, slowly."""
    name: str = dtype.name
    return name


def overlaps(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether two elements may share bytes."""
    if 0 in shape:
        return False
    end = itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride < end:
            return True
        end = stride * (size - 1) + end
    return False


_ODD_BOOLS: Fault = "some of its booleans are neither 0 nor 1", "make them so, array != 0."


def _odd_bools(array: Any) -> bool:
    return int(array.view("uint8").max()) > 1


def _as_bits(array: Any) -> Any:
    """Types that were added to numpy cannot leave it by DLPack, so their bytes do."""
    return array.view(f"uint{8 * array.itemsize}") if array.dtype.isbuiltin == 2 else array


def _row_major(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[n + 1 :]) for n in range(len(shape)))


def _device_name(device: Any) -> str:
    return "cpu" if device.platform == "cpu" else f"cuda:{device.local_hardware_id}"


def _known_to_numpy(torch: Any, tensor: Any) -> Any:
    unknown = str(tensor.dtype).startswith(("torch.bfloat16", "torch.float8"))
    return tensor.view((torch.uint8, torch.uint16)[tensor.element_size() - 1]) if unknown else tensor


def under_trace(torch: Any) -> Fault | None:
    """No values are made now, only a record of what would be done."""
    modes = torch._C._TorchDispatchModeKey
    if all(torch._C._get_dispatch_mode(key) is None for key in (modes.FAKE, modes.PROXY, modes.FUNCTIONAL)):
        return None
    return "torch traces or fakes what it does now", "call from_dlpack outside of that, and pass the array in."


def _wrapped(torch: Any, value: Any) -> Fault | None:
    """Tensors that are not their own memory."""
    kind = type(value)
    if kind.__name__ == "DTensor":
        return "it is a DTensor, spread over ranks", "take this rank's part, .to_local(), or gather it, .full_tensor()."
    if kind.__name__ == "FakeTensor" or torch._is_functional_tensor(value):
        return "it has no values: it was made by a trace", "hand over the tensor that it stands for."
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return (
            "it is inside a torch.func transformation (grad, vmap, jvp)",
            "return it from the transformed function and take the result.",
        )
    if value.is_nested:
        return "it is a nested tensor", "pad it, .to_padded_tensor(0), or hand over .values() and .offsets()."
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"it is a {kind.__name__}, whose values are kept in other tensors", "hand those over."
    if value.is_meta:
        return "it is on the meta device and has no values", "materialise it first, module.to_empty(device=...)."
    return None


def _without_strides(torch: Any, value: Any) -> Fault | None:
    """Tensors whose memory is not an array of their elements, or is gone."""
    if value.is_quantized:
        return "it is quantised", ".dequantize() it, or hand over .int_repr() with its scale."
    if value.layout is not torch.strided:
        layout = str(value.layout).removeprefix("torch.").lstrip("_")
        return f"its layout is {layout}", ".to_dense() it, or hand over its indices and values."
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    needed = (value.storage_offset() + last + 1) * value.element_size()
    if value.numel() and value.untyped_storage().nbytes() < needed:
        return "its storage was freed or made smaller", "gather the parameter first (FSDP: unshard it)."
    return None


def _differentiated(torch: Any, value: Any) -> Fault | None:  # R5
    tangent = torch.autograd.forward_ad.unpack_dual(value).tangent
    if value.requires_grad or tangent is not None:
        return "it carries gradient, which would end here", "hand over .detach() if the value alone is meant."
    return None
