"""Taking an array of one framework into another: when memory is shared, when it is copied, what is refused.

The rules and the words are here, the same for every frontend. `_producers` tells what an array is; a frontend
brings an `Importer`, which makes arrays of its own framework.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from ._errors import ExchangeError, OptionError, message
from ._producers import Fault, Offer, Producer, producer_of, said

__all__ = ["CopyPolicy", "ExchangeReport", "Importer", "exchange", "is_foreign"]

CopyPolicy = Literal["snapshot", "share", "auto"]
_POLICIES = get_args(CopyPolicy)


@dataclass(frozen=True)
class ExchangeReport:
    """What became of one array: shared or copied, and why. `print` it for one line.

    ``nbytes`` is the size of the result, ``reason`` says why the memory is shared, or why it is not.

    >>> from roundpipe_core import ExchangeReport
    >>> print(ExchangeReport("torch", "jax", True, "both have the same address", 24, "int32", "int32", (2, 3)))
    torch int32[2, 3] to jax: 24 bytes shared, both have the same address
    """

    source: str
    """The framework, or the library, that the array came from."""
    target: str
    """The framework that it is in now."""
    shared: bool
    """Whether both sides have the same memory, by its address."""
    reason: str
    nbytes: int
    dtype: str
    """What the source held."""
    new_dtype: str
    """What the result holds; another one only where JAX narrowed 64 bits."""
    shape: tuple[int, ...]

    def __str__(self) -> str:
        changed = "" if self.new_dtype == self.dtype else f" as {self.new_dtype}"
        verb = "shared" if self.shared else "copied"
        return (
            f"{self.source} {self.dtype}{list(self.shape)} to {self.target}{changed}: "
            f"{self.nbytes} bytes {verb}, {self.reason}"
        )


class Importer(Protocol):
    """The framework that takes arrays in."""

    name: str
    spoken: str

    def open(self, value: Any) -> tuple[Any, Fault | None]:
        """An array of an unknown library in a framework that `producer_of` knows, and why it has other memory."""

    def fault(self) -> Fault | None:
        """Why nothing can be taken in here and now."""

    def dtype_for(self, offer: Offer) -> str | None:
        """The dtype that the result has; None if there is none for it."""

    def obstacle(self, offer: Offer) -> Fault | None:
        """Why this framework cannot use the memory of `offer`."""

    def share(self, offer: Offer) -> Any:
        """An array on the memory of `offer`, unless the framework copies after all."""

    def copy(self, offer: Offer, dtype: str, refuse: Callable[[Fault], ExchangeError]) -> Any:
        """An array with the values of `offer` in memory of its own; `refuse` says why there is none."""

    def describe(self, array: Any) -> tuple[str, tuple[int, ...], int | None]:
        """dtype, shape and address of the result."""


def exchange(importer: Importer, value: Any, copy: CopyPolicy) -> tuple[Any, ExchangeReport]:
    """An array of the importer's framework with the values of `value`, and what happened to the memory."""
    if copy not in _POLICIES:
        raise OptionError(
            message(
                f"from_dlpack: copy={copy!r} does not exist.",
                [],
                f"choose one of {', '.join(map(repr, _POLICIES))}.",
            )
        )
    producer, source, value, moved = _recognised(importer, value)
    refuse = _refusal(importer, lambda: said(producer, source, value))
    fault = importer.fault() or producer.fault(value)
    if fault:
        raise refuse(fault)
    offer = producer.offer(value)
    dtype = importer.dtype_for(offer)
    if dtype is None:
        raise refuse((f"{importer.spoken} has no dtype {offer.dtype}", producer.dtype_way_out(offer.dtype)))
    array, shared, reason = _taken(importer, offer, dtype, copy, refuse, moved)
    new_dtype, shape, _ = importer.describe(array)
    if (new_dtype, shape) != (dtype, offer.shape):
        raise refuse(
            (f"{importer.spoken} made {new_dtype}{list(shape)} of it", "leave the mode that changes new arrays.")
        )
    size = offer.nbytes if dtype == offer.dtype else offer.nbytes // 2
    return array, ExchangeReport(source, importer.name, shared, reason, size, offer.dtype, dtype, offer.shape)


def is_foreign(importer: Importer, value: Any) -> bool:
    """Whether `value` is an array, and not one of the importer's framework."""
    producer = producer_of(value)
    if producer is None:
        return _speaks_dlpack(value)
    return producer.name != importer.name


def _taken(
    importer: Importer,
    offer: Offer,
    dtype: str,
    copy: CopyPolicy,
    refuse: Callable[[Fault], ExchangeError],
    moved: Fault | None,
) -> tuple[Any, bool, str]:
    if copy == "snapshot":
        return importer.copy(offer, dtype, refuse), False, "a snapshot was asked for"
    obstacle = moved or _obstacle(importer, offer, dtype)
    if obstacle is None:
        array = importer.share(offer)
        if offer.nbytes == 0:
            return array, True, "there are no bytes"
        if importer.describe(array)[2] == offer.pointer:
            return array, True, "both have the same address"
        obstacle = f"{importer.spoken} made a copy of it", "use the copy."
    if copy == "auto":
        return importer.copy(offer, dtype, refuse), False, obstacle[0]
    raise refuse(
        (
            f"its memory cannot be shared: {obstacle[0]}",
            f'{obstacle[1]} copy="auto" copies when it must, copy="snapshot" always.',
        )
    )


def _obstacle(importer: Importer, offer: Offer, dtype: str) -> Fault | None:
    if offer.framework == importer.name:
        return None
    if dtype != offer.dtype:
        return f"{importer.spoken} holds {offer.dtype} as {dtype}", "convert it first."
    return importer.obstacle(offer) or offer.obstacle()


def _recognised(importer: Importer, value: Any) -> tuple[Producer, str, Any, Fault | None]:
    producer = producer_of(value)
    if producer is not None:
        return producer, producer.name, value, None
    library = type(value).__module__.partition(".")[0]
    if not _speaks_dlpack(value):
        raise _refusal(importer, lambda: _article(_full_name(type(value))))(
            (
                "it is not an array",
                "pass the array itself, of torch, JAX, numpy or another library with __dlpack__; a capsule or a "
                "storage does not tell enough. Of a number or a list, numpy.asarray makes one.",
            )
        )
    try:
        view, moved = importer.open(value)
    except MemoryError:
        raise
    except Exception as error:  # whatever a foreign library raises
        raise _refusal(importer, lambda: f"{_article(type(value).__name__)} of {library}")(
            (
                f"its __dlpack__ failed: {str(error).rstrip('.') or type(error).__name__}",
                "convert it to numpy or torch first.",
            )
        ) from error
    known = producer_of(view)
    if known is None:
        raise TypeError(f"{importer.name} opened {type(value).__name__} as {type(view).__name__}")
    return known, library, view, moved


def _speaks_dlpack(value: Any) -> bool:
    return hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__") and not isinstance(value, type)


def _refusal(importer: Importer, what: Callable[[], str]) -> Callable[[Fault], ExchangeError]:
    def refuse(fault: Fault) -> ExchangeError:
        headline = f"{what()} cannot be taken into {importer.spoken}: {fault[0]}."
        return ExchangeError(message(headline, [], fault[1]))

    return refuse


def _full_name(kind: type) -> str:
    return kind.__name__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__name__}"


def _article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
