"""JAX arrays, as the core sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from roundpipe_core import Tape, replay
from roundpipe_core._backend import NoValuesError, origin_of, to_host
from roundpipe_core._host import HostArray

from ._exchange import from_dlpack
from ._jax import concrete_value, is_float, is_tracer, struct
from ._runs import stop_gradients

__all__ = ["JaxArrays", "adopted", "as_numpy", "aval_bytes", "check_holds", "largest", "smallest"]


class JaxArrays:
    """JAX arrays and tracers. They cannot be changed in place, so that a slot keeps them as they are (R6)."""

    name = "jax"

    def owns(self, value: Any) -> bool:
        return isinstance(value, jax.Array)

    def expand(self, value: Any) -> tuple[Sequence[Any], Callable[[list[Any]], Any]] | None:
        if isinstance(value, Iterator):  # JAX warns of one
            return None
        tree: Any = jax.tree.structure(value, is_leaf=lambda part: part is not value)
        if jax.tree_util.treedef_is_leaf(tree):
            return None
        return tree.flatten_up_to(value), tree.unflatten

    def gradient_fault(self, array: Any) -> None:
        return None  # told exactly, and maybe later, by the probe that a run puts on saved values

    def snapshot(self, array: Any) -> Any:
        return array

    def restore(self, stored: Any) -> Any:
        return stored

    def nbytes(self, stored: Any) -> int:
        return aval_bytes(stored)

    def place(self, stored: Any) -> str:
        value = concrete_value(stored)
        return "traced" if value is None else ", ".join(sorted(map(str, value.devices())))

    def rows_differing(self, stored: Any, array: Any) -> tuple[int, int, int] | None:
        rows = stored.shape[0] if stored.ndim else 1
        if stored.shape != array.shape or stored.dtype != array.dtype:
            return rows, rows, 0
        one, other = as_numpy(stored), as_numpy(array)
        differs = (one != other) & ~((one != one) & (other != other))
        flags = differs.reshape(max(rows, 1) if stored.ndim else 1, -1).any(axis=1) if differs.size else differs
        return (int(flags.sum()), rows, int(flags.argmax())) if flags.any() else None

    def without_gradient(self, function: Callable[[], Any]) -> Any:
        return stop_gradients(function())

    def described(self, array: Any) -> tuple[str, tuple[int, ...]]:
        return str(array.dtype), tuple(array.shape)

    def extremes(self, array: Any) -> tuple[int, ...] | None:
        if is_tracer(array):
            return None
        values = np.asarray(array)
        return (int(values.min()), int(values.max())) if values.size else ()

    def to_host(self, array: Any) -> HostArray:
        if is_tracer(array):
            raise NoValuesError("it is traced")
        host = to_host(np.asarray(array))
        return HostArray(host.dtype, host.shape, host.data, self.name)

    def adopt(self, array: Any, like: Any) -> Any:
        return adopted(array, None if like is None else like.dtype)

    def distance(self, one: Any, two: Any) -> float:
        a, b = as_numpy(one), as_numpy(two)
        wide = np.complex128 if np.iscomplexobj(a) or np.iscomplexobj(b) else np.float64
        a, b = a.astype(wide).reshape(-1), b.astype(wide).reshape(-1)
        gap = np.subtract(a, b, out=np.zeros_like(a), where=a != b)  # equal infinities are no distance
        return float(np.linalg.norm(gap)) / (float(np.linalg.norm(a[np.isfinite(a)])) or 1.0)

    def value_and_gradient(
        self, function: Callable[..., Any], weights: Any, inputs: Sequence[Any], tape: Tape | None
    ) -> tuple[Any, Any, Any]:
        leaves, tree = jax.tree.flatten(weights)
        trained = [isinstance(leaf, jax.Array) and is_float(leaf) for leaf in leaves]

        def loss_of(chosen: list[Any]) -> tuple[Any, Any]:
            given = iter(chosen)
            own = [next(given) if flag else leaf for leaf, flag in zip(leaves, trained, strict=True)]
            loss, outputs = function(jax.tree.unflatten(tree, own), *inputs)
            return loss, outputs

        chosen = [leaf for leaf, flag in zip(leaves, trained, strict=True) if flag]
        with replay(tape) if tape is not None else contextlib.nullcontext():
            (loss, outputs), slopes = jax.value_and_grad(loss_of, has_aux=True)(chosen)
        given = map(jnp.conj, slopes)  # as torch has those of complex weights: the way up, not the derivative
        return loss, outputs, jax.tree.unflatten(tree, [next(given) if flag else None for flag in trained])


def adopted(array: Any, dtype: Any = None) -> Any:
    """An array of JAX with the values of any array, see `Backend.adopt`."""
    if is_tracer(array):
        if dtype is not None and array.dtype != dtype:
            raise TypeError(f"is {array.dtype}, not {dtype}, and its values are not known while it is traced")
        return array
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):  # which no protocol knows
        return array
    foreign = origin_of(array) not in ("jax", "numpy")
    if isinstance(array, HostArray):
        array = np.frombuffer(array.data, jnp.dtype(array.dtype)).reshape(array.shape)
    values = from_dlpack(array, allow_rounding=dtype is not None)
    if dtype is None and foreign and jnp.issubdtype(values.dtype, jnp.integer):
        dtype = jax.dtypes.canonicalize_dtype(jnp.int_)
    if dtype is None or values.dtype == dtype:
        return values
    check_holds(values, dtype)
    return values.astype(dtype)


def smallest(dtype: Any) -> int:
    """The smallest integer of a dtype."""
    return int(_info(dtype).min)


def largest(dtype: Any) -> int:
    """The largest integer of a dtype."""
    return int(_info(dtype).max)


_info: Any = jnp.iinfo


def check_holds(array: Any, dtype: Any) -> None:
    """Refuse integers that `dtype` cannot hold. `array` has values."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return
    values = np.asarray(array)
    if values.size and not smallest(dtype) <= int(values.min()) <= int(values.max()) <= largest(dtype):
        raise ValueError(f"holds values that {dtype} cannot")


def as_numpy(array: Any) -> Any:
    """The values of an array, of a key, or of a tracer that stands for one."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if is_tracer(array):
        array = concrete_value(array)
    return np.asarray(array)


def aval_bytes(array: Any) -> int:
    """Bytes of an array, a tracer or a `jax.ShapeDtypeStruct`."""
    size = int(np.prod(array.shape))
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return size * aval_bytes(jax.eval_shape(jax.random.key_data, struct((), array.dtype)))
    return size * int(np.dtype(array.dtype).itemsize)
