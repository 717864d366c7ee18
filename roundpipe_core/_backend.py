"""What a frontend tells the core about its arrays, and how a value finds the frontend it belongs to."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ._errors import Flip
from ._host import DTYPES, HostArray, HostArrays

__all__ = [
    "Backend",
    "Frontend",
    "NoValuesError",
    "TapeGuard",
    "backend_of",
    "compare",
    "described",
    "expand",
    "frontend",
    "frontend_listeners",
    "host_of",
    "numpys",
    "only_frontend",
    "origin_of",
    "outside_keeps",
    "outside_saves",
    "register_backend",
    "tape_guards",
    "to_host",
    "without_gradient",
]


class NoValuesError(TypeError):
    """An array whose values are not known yet: it stands in a program that is being traced."""


class NotCopiedError(TypeError):
    """An array that its framework cannot copy, so that no slot can hold it."""

    def __init__(self, array: Any, reason: str) -> None:
        super().__init__(f"{type(array).__name__}: {reason}")
        self.array, self.reason = array, reason.partition("\n")[0]


class Backend(Protocol):
    """The arrays of one framework.

    A frontend registers one instance when it is imported. Nothing here runs for values of other
    frameworks, and the core never imports any of them.
    """

    name: str

    def owns(self, value: Any) -> bool:
        """Whether `value` is an array of this framework."""

    def gradient_fault(self, array: Any) -> tuple[str, str] | None:
        """Why `array` may not be saved (R5), and the way out; None if it may."""

    def snapshot(self, array: Any) -> Any:
        """What the slot keeps: the values of this moment (R6). `NotCopiedError` if it can have none."""

    def restore(self, stored: Any) -> Any:
        """An array with the values of `stored` that a layer may change without changing `stored` (R6)."""

    def nbytes(self, stored: Any) -> int:
        """Bytes that `stored` holds (R12)."""

    def place(self, stored: Any) -> str:
        """Where these bytes are (R12): a device, as its framework writes it."""

    def rows_differing(self, stored: Any, array: Any) -> tuple[int, int, int] | None:
        """(rows that differ, rows, first such row), NaN equal to NaN; None if all agree."""

    # For tapes (R13)

    def described(self, array: Any) -> tuple[str, tuple[int, ...]]:
        """dtype, as in ``int64`` or ``bfloat16``, and shape."""

    def extremes(self, array: Any) -> tuple[int, ...] | None:
        """Least and greatest element of an array of integers; () if it has none, None if its values are not known."""

    def to_host(self, array: Any) -> HostArray:
        """Its bytes, which may be those of the array itself: nobody writes to them.

        Raises NoValuesError if it is traced, another error if it has none for another reason.
        """

    def adopt(self, array: Any, like: Any) -> Any:
        """An array of this framework with the values of one of another, or of `HostArray`.

        With the dtype and on the device of `like`, if that is one of this framework's; without, integers have the
        framework's own index type. Raises ValueError where a value would change.
        """


class TapeGuard(Protocol):
    """What a framework minds while a recording or a replay runs. Made when it begins, for one block.

    A framework that traces must not let a traced function keep what it learned in the block, nor let the block keep
    values that exist in a trace inside it only.
    """

    def begin(self, replayed: Sequence[Any] | None) -> None:
        """The block begins; `replayed` are the arrays of its tape, None in a recording."""

    def end(self) -> None:
        """It ends, also by an exception, maybe one in `begin`. May be called again, if it raised."""

    def deciding(self) -> AbstractContextManager[None]:
        """For the time of a `recompute_once` outside of regions."""

    def check(self, doing: str) -> None:
        """Refuse that a layer meets the block here. `doing` is what it does, for the message."""

    def prepared(self, layer: str, key: Any, data: tuple[Any, ...], place: tuple[str, int]) -> tuple[Any, ...]:
        """`data` saved outside of regions, as the tape and the code after the save shall have it."""


class Frontend(Backend, Protocol):
    """The backend of a framework that differentiates."""

    def expand(self, value: Any) -> tuple[Sequence[Any], Callable[[list[Any]], Any]] | None:
        """The children of a container only this framework knows, and how to build it again."""

    def without_gradient(self, function: Callable[[], Any]) -> Any:
        """What `function` returns, cut off from differentiation."""

    def distance(self, one: Any, two: Any) -> float:
        """Norm of the difference over the norm of `one`, in float64; the former if `one` is zero."""

    def value_and_gradient(
        self, function: Callable[..., Any], weights: Any, inputs: Sequence[Any], tape: Any
    ) -> tuple[Any, Any, Any]:
        """Loss, outputs and gradient along `weights` of `function(weights, *inputs)`, replaying `tape` if it is one.

        `function` gives the loss and outputs. The gradient has the structure of `weights`.
        """


class _NumpyArrays:
    """numpy arrays. They have no version counter, so they are copied both ways (R6)."""

    name = "numpy"

    def owns(self, value: Any) -> bool:
        numpy = sys.modules.get("numpy")
        return numpy is not None and isinstance(value, numpy.ndarray)

    def gradient_fault(self, array: Any) -> None:
        return None

    def snapshot(self, array: Any) -> Any:
        return array.copy(order="K")

    def restore(self, stored: Any) -> Any:
        return stored.copy(order="K")

    def nbytes(self, stored: Any) -> int:
        return int(stored.nbytes)

    def place(self, stored: Any) -> str:
        return "cpu"

    def rows_differing(self, stored: Any, array: Any) -> tuple[int, int, int] | None:
        rows = len(stored) if stored.ndim else 1
        if stored.shape != array.shape or stored.dtype != array.dtype:
            return rows, rows, 0
        masked = sys.modules["numpy"].ma
        hidden, hides = masked.getmask(stored), masked.getmask(array)
        stored, array = masked.getdata(stored), masked.getdata(array)
        differs = (stored != array) & ~((stored != stored) & (array != array))
        if (hidden is not masked.nomask or hides is not masked.nomask) and stored.dtype.names is None:
            differs = differs & ~hidden | (hidden != hides)
        flags = [bool(row.any()) for row in differs] if stored.ndim else [bool(differs)]
        return (sum(flags), rows, flags.index(True)) if any(flags) else None

    def described(self, array: Any) -> tuple[str, tuple[int, ...]]:
        return array.dtype.name, array.shape

    def extremes(self, array: Any) -> tuple[int, ...]:
        return (int(array.min()), int(array.max())) if array.size else ()

    def to_host(self, array: Any) -> HostArray:
        numpy = sys.modules["numpy"]
        if isinstance(array, numpy.ma.MaskedArray):
            raise TypeError("a masked array; save its data and its mask")
        if array.dtype.name not in DTYPES:
            raise TypeError(f"arrays of dtype {array.dtype.name} have no form outside of their framework")
        plain = numpy.asarray(array).astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        return HostArray(array.dtype.name, array.shape, memoryview(plain.reshape(-1).view("uint8")), self.name)

    def adopt(self, array: Any, like: Any) -> Any:
        if not self.owns(array):
            host = to_host(array)
            array = importlib.import_module("numpy").frombuffer(host.data, host.dtype).reshape(host.shape)
        return array.copy() if like is None or like.dtype == array.dtype else _cast(array, like.dtype)


def _cast(array: Any, dtype: Any) -> Any:
    cast = array.astype(dtype)
    if dtype.kind in "iu" and ((cast.astype(array.dtype) != array) | ((cast < 0) != (array < 0))).any():
        raise ValueError(f"values that {dtype} cannot hold")
    return cast


_frontends: list[Frontend] = []
frontend_listeners: list[Callable[[str], None]] = []
"""Each gets the name of every frontend that is imported after it was put here."""
outside_saves: list[Callable[[Any], Any]] = []
"""What frontends make of data that is saved where no region runs: another checkpointing may want to know of it."""
outside_keeps: list[Callable[[Callable[..., Any]], Callable[..., Any]]] = []
"""The same for functions that are to be kept: each gives the function to call instead."""
tape_guards: list[Callable[[], TapeGuard]] = []
"""Makes one for each block, for each frontend that minds."""
numpys: Backend = _NumpyArrays()
_always: tuple[Backend, ...] = (numpys, HostArrays())
_by_type: dict[type, Backend | None] = {}


def register_backend(backend: Frontend) -> None:
    """Make the arrays of `backend` known. Called once, when its frontend is imported."""
    global _by_type
    _frontends.append(backend)
    for tell in frontend_listeners:
        tell(backend.name)
    _by_type = {}  # a new one: another thread may be about to note in the old one what it found before


def backend_of(value: Any) -> Backend | None:
    """The backend whose array `value` is; None for plain Python values and opaque objects."""
    kind, known_types = type(value), _by_type
    try:
        return known_types[kind]
    except KeyError:
        found = next((known for known in (*_frontends, *_always) if known.owns(value)), None)
        if found or "numpy" in sys.modules or kind.__module__ == "builtins":
            known_types[kind] = found
        return found


def described(leaf: Any) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of an array; the type of anything else."""
    backend = backend_of(leaf)
    return (type(leaf).__name__, ()) if backend is None else backend.described(leaf)


def expand(value: Any) -> tuple[Sequence[Any], Callable[[list[Any]], Any]] | None:
    """Ask every frontend whether it knows the container `value`."""
    if backend_of(value) is None:
        for backend in _frontends:
            opened = backend.expand(value)
            if opened is not None:
                return opened
    return None


def to_host(array: Any) -> HostArray:
    """The bytes of any array."""
    backend = backend_of(array)
    if backend is None:
        raise TypeError(f"{type(array).__name__} is no array")
    return backend.to_host(array)


def host_of(array: Any, unreadable: Callable[[str, str], Exception]) -> HostArray:
    """The bytes of any array; where they cannot be read, the error made of why and of the way out, if one is known."""
    try:
        return to_host(array)
    except MemoryError:
        raise
    except Exception as error:  # whatever a framework raises
        fault, _, better = str(error).partition("\n")[0].partition("; ")
        raise unreadable(fault, better and f"{better}.") from error


def frontend(name: str) -> Frontend | None:
    """The frontend of that name, if it is loaded."""
    return next((known for known in _frontends if known.name == name), None)


def only_frontend() -> Backend | None:
    """The one that is loaded, if just one is."""
    return _frontends[0] if len(_frontends) == 1 else None


def origin_of(array: Any) -> str:
    """The name of the framework that made `array`."""
    backend = backend_of(array)
    return array.origin if isinstance(array, HostArray) else "" if backend is None else backend.name


def compare(layer: str, item: str, backend: Backend | None, stored: Any, value: Any) -> Flip | None:
    """The difference between what a slot holds and what was decided again, if there is one."""
    if backend is not None and backend.owns(value):
        rows = backend.rows_differing(stored, value)
        return Flip(layer, item, *rows) if rows else None
    if backend is None and (stored is value or _equal(stored, value)):
        return None
    return Flip(layer, item, 1, 1, 0)


def _equal(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and (bool(one == other) or (one != one and other != other))
    except MemoryError:
        raise
    except Exception:  # an opaque object that cannot be compared: nothing is known against it
        return True


def without_gradient(function: Callable[[], Any]) -> Any:
    """Run `function` cut off from differentiation in every framework that is loaded."""
    for backend in _frontends:
        function = _wrapped(backend, function)
    return function()


def _wrapped(backend: Frontend, function: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: backend.without_gradient(function)
