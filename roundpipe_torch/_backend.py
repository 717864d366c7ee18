"""torch tensors, as the core sees them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from roundpipe_core import Tape, replay
from roundpipe_core._backend import NotCopiedError, backend_of, expand, numpys, origin_of, register_backend, to_host
from roundpipe_core._host import HostArray
from roundpipe_core._replay import TapedSlot
from roundpipe_core._trees import flatten, paths, register_leaf, unflatten

from ._errors import OUT_OF_MEMORY
from ._parts import bytes_of, held, parts_of, same_form

__all__ = ["TorchBackend", "adopted", "first_other", "laid_out", "strides_of", "without_gradient"]


def without_gradient(function: Callable[[], Any]) -> Any:
    """`function()` under no_grad; without that context, in whose own code an interrupt can come (R11)."""
    before = torch.is_grad_enabled()
    try:
        try:
            torch._C._set_grad_enabled(False)
            return function()
        finally:
            torch._C._set_grad_enabled(before)
    finally:
        torch._C._set_grad_enabled(before)  # once more: an interrupt may have cut the first short


def first_other(data: Any, saved: Any) -> str | None:
    """The first item of `data` that is another integer, bool or index than in `saved`, where that can be seen."""
    ours: list[Any] = []
    theirs: list[Any] = []
    flatten(data, ours, expand)
    spec = flatten(saved, theirs, expand)
    with _disable_current_modes():  # none of them is to meet an operation that the forward had not
        pairs = zip(paths(spec), ours, theirs, strict=False)
        return next((name for name, one, other in pairs if _decides_otherwise(one, other)), None)


def _decides_otherwise(one: Any, other: Any) -> bool:
    if isinstance(one, bool) and isinstance(other, bool):
        return one is not other
    if type(one) is not torch.Tensor or type(other) is not torch.Tensor:
        return False
    if one.layout is not torch.strided or one.is_meta or one.is_floating_point() or one.is_complex():
        return False
    if one.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return one.shape != other.shape or (one.device == other.device and not torch.equal(one, other))


class TorchBackend:
    """Tensors are cloned both ways (R6).

    A version counter would tell of most writes and save the copy, but not of one through an alias made by numpy
    or DLPack, and inference tensors have none.
    """

    name = "torch"

    def owns(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def expand(self, value: Any) -> tuple[Sequence[Any], Callable[[list[Any]], Any]] | None:
        node = _pytree.SUPPORTED_NODES.get(type(value))
        if node is None:
            return None
        children, context = node.flatten_fn(value)
        return list(children), lambda items: node.unflatten_fn(items, context)

    def gradient_fault(self, array: torch.Tensor) -> tuple[str, str] | None:
        if not array.requires_grad:
            return None
        return (
            "requires grad",
            "save what decides (indices, a mask, a branch), or its .detach() and compute the differentiable part "
            "from it in both phases.",
        )

    def snapshot(self, array: torch.Tensor) -> torch.Tensor:
        try:
            copy = _cloned(array)
        except OUT_OF_MEMORY:
            raise
        except (TypeError, ValueError, RuntimeError) as error:  # what a subclass raises that lacks this operation
            raise NotCopiedError(array, str(error)) from error
        lies = type(copy) is torch.Tensor and copy.layout is torch.strided and not copy.is_nested
        if lies and copy.stride() != array.stride():
            copy.__dict__[_STRIDES] = array.stride()  # of a part of a larger tensor
        return copy

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        strides = strides_of(stored)
        return _cloned(stored) if strides is None else laid_out(stored, strides)

    def nbytes(self, stored: torch.Tensor) -> int:
        return bytes_of(stored)

    def place(self, stored: torch.Tensor) -> str:
        return str(stored.device)

    def rows_differing(self, stored: torch.Tensor, array: torch.Tensor) -> tuple[int, int, int] | None:
        if not same_form(stored, array):
            rows = stored.size(0) if stored.ndim else 1
            return rows, rows, 0
        return differing_rows(stored, array)

    def without_gradient(self, function: Callable[[], Any]) -> Any:
        return without_gradient(function)

    def described(self, array: torch.Tensor) -> tuple[str, tuple[int, ...]]:
        dtype = str(array.dtype).removeprefix("torch.")
        if array.is_nested and array.layout is torch.strided:  # which has no shape
            return dtype, (array.size(0), *[None] * (array.dim() - 1))  # type: ignore[arg-type]
        return dtype, tuple(array.shape)

    def extremes(self, array: torch.Tensor) -> tuple[int, ...] | None:
        if array.is_meta or type(array) is FakeTensor:
            return None
        array = held(array)
        if not array.numel():
            return ()
        array = array.to(torch.int64) if array.dtype in _NO_EXTREMES else array
        low, high = torch.aminmax(array)
        return int(low), int(high)

    def to_host(self, array: torch.Tensor) -> HostArray:
        dtype, shape = self.described(array)
        fault = _no_bytes(array)
        if fault is not None:
            raise TypeError(fault)
        plain = array.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return HostArray(dtype, shape, _view(plain) if plain.numel() else memoryview(b""), self.name)

    def adopt(self, array: Any, like: Any) -> torch.Tensor:
        return _converted(array, *((None, None) if like is None else (like.dtype, like.device)))

    def distance(self, one: torch.Tensor, two: torch.Tensor) -> float:
        wide = torch.complex128 if one.is_complex() or two.is_complex() else torch.float64
        a, b = one.detach().cpu().to(wide), two.detach().cpu().to(wide)
        gap = torch.where(a == b, 0, a - b)  # equal infinities are no distance
        return float(torch.linalg.vector_norm(gap)) / (float(torch.linalg.vector_norm(a[a.isfinite()])) or 1.0)

    def value_and_gradient(
        self, function: Callable[..., Any], weights: Any, inputs: Sequence[Any], tape: Tape | None
    ) -> tuple[Any, Any, Any]:
        leaves: list[Any] = []
        spec = flatten(weights, leaves, expand)
        leaves = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        trained = [leaf for leaf in tensors if leaf.is_floating_point() or leaf.is_complex()]
        for leaf in trained:
            leaf.requires_grad_()
        with torch.enable_grad(), replay(tape) if tape is not None else contextlib.nullcontext():
            loss, outputs = function(unflatten(spec, iter(leaves)), *inputs)
        if loss.requires_grad:  # or all gradients are zero
            loss.backward()
        gradients = iter([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in trained])
        known = {id(leaf) for leaf in trained}
        tree = unflatten(spec, (next(gradients) if id(leaf) in known else None for leaf in leaves))
        return loss.detach(), outputs, tree


_NO_EXTREMES = (torch.uint16, torch.uint32, torch.uint64)


def _no_bytes(array: torch.Tensor) -> str | None:
    """Why the values of `array` cannot be read from memory."""
    if type(array) is torch.Tensor and array.is_meta:
        return "a tensor without values, on the meta device; record a run on a device that has values"
    if array.is_meta or isinstance(array, FakeTensor):
        return "a tensor without values (meta, fake, or traced)"
    if torch._C._functorch.is_functorch_wrapped_tensor(array):
        return "a tensor inside of a torch.func transform"
    if array.is_nested:
        return "a nested tensor; take it apart, tensor.unbind()"
    if array.layout is not torch.strided or array.is_quantized:
        return f"a tensor of layout {array.layout}; save its indices and values"
    if type(array).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(array).__name__}, which is made of other tensors; save those, or its full value"
    return None


def _view(plain: torch.Tensor) -> memoryview:
    try:
        return memoryview(plain.view(torch.uint8).numpy())  # type: ignore[arg-type]
    except RuntimeError:  # built or installed without numpy
        return memoryview(ctypes.string_at(plain.data_ptr(), plain.nbytes))


def from_host(host: HostArray) -> torch.Tensor:
    """A tensor of one's own with the bytes of `host`."""
    dtype = getattr(torch, host.dtype)
    if not host.data.nbytes:
        return torch.empty(host.shape, dtype=dtype)
    return torch.frombuffer(bytearray(host.data), dtype=dtype).reshape(host.shape)


def adopted(slot: TapedSlot, leaf: Any, like: Any) -> Any:
    """`leaf` of a tape, as the region that replays `slot` shall get it."""
    backend = backend_of(like)
    if backend is not None and backend.name != "torch":
        return backend.adopt(leaf, like)
    if backend is None and origin_of(leaf) == "numpy":  # is one in any framework
        return numpys.adopt(leaf, None)
    device = like.device if backend is not None else slot.device
    dtype = like.dtype if backend is not None else None
    return slot.tape.converted(leaf, (device, dtype), lambda: _converted(leaf, dtype, device))


def _converted(leaf: Any, dtype: torch.dtype | None, device: torch.device | None) -> torch.Tensor:
    foreign = origin_of(leaf) != "torch"
    tensor = leaf if isinstance(leaf, torch.Tensor) else from_host(to_host(leaf))
    if dtype is None and foreign and _is_integer(tensor.dtype):
        dtype = torch.int64  # indices in any other type are refused, or taken for a mask
    return _cast(tensor, dtype or tensor.dtype).to(device or tensor.device)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype is dtype:
        return tensor
    cast = tensor.to(dtype)
    if _is_integer(dtype) and not (torch.equal(cast.to(tensor.dtype), tensor) and _same_signs(cast, tensor)):
        raise ValueError(f"holds values that {dtype} cannot")
    return cast


def _same_signs(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of integers with the same bits, as far as both have them."""
    if one.dtype.is_signed == other.dtype.is_signed:
        return True
    return not bool(((one if one.dtype.is_signed else other) < 0).any())


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy. Of a DTensor with the same placements: its own clone() would ask other ranks to add up partial values."""
    part = held(tensor)
    if part is tensor:
        return tensor.clone()
    whole: Any = tensor
    copy: torch.Tensor = type(whole).from_local(
        part.clone(), whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return copy


def strides_of(stored: torch.Tensor) -> tuple[int, ...] | None:
    """How the tensor lay in memory that `stored` is a copy of, if it was a part of a larger one."""
    return stored.__dict__.get(_STRIDES)


def laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A copy that lies in memory as the forward's did: compiled code, and the order of a sum, depend on it (R10).

    Not if that would take much more memory than the values: the forward had the rest in use.
    """
    plain, shape = tensor, tensor.shape
    for dim, (stride, size) in enumerate(zip(strides, shape, strict=True)):
        if stride == 0 and size > 1:
            plain = plain.narrow(dim, 0, 1)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(plain.shape, strides, strict=True))
    if extent > _SPREAD * plain.numel():
        return _cloned(tensor)
    return (
        torch.empty_strided(plain.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(plain).expand(shape)
    )


_STRIDES = "_roundpipe_strides"
_SPREAD = 128
"""Times the memory of the values: more than there are experts to one that is chosen."""


def differing_rows(
    one: torch.Tensor, other: torch.Tensor, tolerance: tuple[float, float] | None = None
) -> tuple[int, int, int] | None:
    """(rows that differ, rows, first such row) of two tensors of one form; None if all agree.

    With `tolerance` (relative, absolute) rows of floats may differ by that much. Reads the result back to the host.
    Of tensors spread over ranks, the rows of this rank are compared; of those made of others, the first that differ.
    """
    one, other = held(one), held(other)
    if one.layout is torch.sparse_coo:
        one, other = one.coalesce(), other.coalesce()
    for some, others in zip(parts_of(one), parts_of(other), strict=True):
        if some.shape != others.shape:
            return len(some), len(some), 0
        try:
            found = _differing(some, others, tolerance)
        except (NotImplementedError, TypeError):  # of a class that cannot be compared: nothing is known against it
            found = None
        if found is not None:
            return found
    return None


def _differing(
    one: torch.Tensor, other: torch.Tensor, tolerance: tuple[float, float] | None
) -> tuple[int, int, int] | None:
    if tolerance is None or not one.dtype.is_floating_point:
        differs = (one != other) & ~((one != one) & (other != other))
    else:
        differs = ~torch.isclose(one, other, *tolerance, equal_nan=True)
    rows = differs.reshape(one.shape[0], -1).any(1) if one.ndim and one.numel() else differs.reshape(-1)
    if not bool(rows.any()):
        return None
    return int(rows.sum()), len(rows), int(rows.int().argmax())


register_backend(TorchBackend())
register_leaf(torch.Tensor)
register_leaf(torch.nn.Parameter)
