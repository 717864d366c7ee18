"""The policy, with a framework that does what it is told, and one that copies behind one's back."""

from __future__ import annotations

import array
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from roundpipe_core import ExchangeError, ExchangeReport, OptionError
from roundpipe_core._exchange import exchange, is_foreign
from roundpipe_core._producers import Fault, NumpyArrays, Offer, overlaps


class Toy:
    """A framework whose arrays are numpy's."""

    name = "toy"
    spoken = "Toy"

    def __init__(self, obstacle: Fault | None = None, fault: Fault | None = None, copies: bool = False) -> None:
        self._obstacle, self._fault, self._copies = obstacle, fault, copies

    def open(self, value: Any) -> tuple[Any, Fault | None]:
        moved = ("the door was too narrow", "widen it.") if isinstance(value, Moved) else None
        return np.from_dlpack(value), moved

    def fault(self) -> Fault | None:
        return self._fault

    def dtype_for(self, offer: Offer) -> str | None:
        return {"int64": "int32", "object": None}.get(offer.dtype, offer.dtype)

    def obstacle(self, offer: Offer) -> Fault | None:
        return self._obstacle

    def share(self, offer: Offer) -> Any:
        return offer.host().copy() if self._copies else offer.host()

    def copy(self, offer: Offer, dtype: str, refuse: Callable[[Fault], ExchangeError]) -> Any:
        return offer.clone().astype(dtype)

    def describe(self, array: Any) -> tuple[str, tuple[int, ...], int | None]:
        return array.dtype.name, array.shape, array.__array_interface__["data"][0]


X = np.arange(6, dtype=np.int32).reshape(2, 3)
HERE = __file__


def test_snapshot_is_the_default_word_and_always_copies() -> None:
    array, report = exchange(Toy(), X, "snapshot")

    assert not np.shares_memory(array, X)
    assert report == ExchangeReport("numpy", "toy", False, "a snapshot was asked for", 24, "int32", "int32", (2, 3))
    assert str(report) == "numpy int32[2, 3] to toy: 24 bytes copied, a snapshot was asked for"


@pytest.mark.parametrize("copy", ["share", "auto"])
def test_shared_where_nothing_is_in_the_way(copy: Any) -> None:
    array, report = exchange(Toy(), X, copy)

    assert np.shares_memory(array, X)
    assert (report.shared, report.reason) == (True, "both have the same address")


@pytest.mark.parametrize(
    ("toy", "why"),
    [(Toy(("it is crooked", "straighten it.")), "it is crooked"), (Toy(copies=True), "Toy made a copy of it")],
    ids=["known before", "seen by the address"],
)
def test_a_copy_is_told_or_refused(toy: Toy, why: str) -> None:
    array, report = exchange(toy, X, "auto")
    assert not np.shares_memory(array, X)
    assert (report.shared, report.reason) == (False, why)

    with pytest.raises(ExchangeError, match=f"its memory cannot be shared: {why}"):
        exchange(toy, X, "share")


def test_the_whole_message() -> None:
    with pytest.raises(ExchangeError) as caught:
        exchange(Toy(("it is crooked", "straighten it.")), X, "share")
    headline, place, way_out = str(caught.value).splitlines()

    assert headline == "numpy array int32[2, 3] cannot be taken into Toy: its memory cannot be shared: it is crooked."
    assert place.startswith(f"  called at: {HERE}:")
    assert way_out == '  way out: straighten it. copy="auto" copies when it must, copy="snapshot" always.'
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, BufferError)


def test_a_narrower_dtype_is_a_copy() -> None:
    array, report = exchange(Toy(), X.astype(np.int64), "auto")

    assert array.dtype == np.int32
    assert str(report) == "numpy int64[2, 3] to toy as int32: 24 bytes copied, Toy holds int64 as int32"
    with pytest.raises(ExchangeError, match="Toy holds int64 as int32"):
        exchange(Toy(), X.astype(np.int64), "share")


def test_refusals() -> None:
    with pytest.raises(ExchangeError, match="not now"):
        exchange(Toy(fault=("not now", "later.")), X, "auto")
    with pytest.raises(ExchangeError, match="Toy has no dtype object"):
        exchange(Toy(), np.array([None]), "auto")
    with pytest.raises(OptionError, match=r"copy=True does not exist(.|\n)*'snapshot', 'share', 'auto'"):
        exchange(Toy(), X, True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "a NoneType"),
        (3, "an int"),
        ([1, 2], "a list"),
        (np.float32(1), "a numpy.float32"),
        (np.ndarray, "a type"),
        (array.array("i", [1]), "an array.array"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_array(value: Any, said: str) -> None:
    with pytest.raises(ExchangeError, match=f"^{said} cannot be taken into Toy: it is not an array(.|\n)*asarray"):
        exchange(Toy(), value, "snapshot")
    assert not is_foreign(Toy(), value)


class Foreign:
    """An array of a library that nobody here knows."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **how: Any) -> Any:
        if self._array is None:
            raise BufferError("it is on the moon.")
        return self._array.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class Moved(Foreign):
    """An array that can be read only as a copy."""


class Silent(Foreign):
    def __dlpack__(self, **how: Any) -> Any:
        raise AttributeError


def test_any_library_with_dlpack() -> None:
    assert is_foreign(Toy(), Foreign(X))
    array, report = exchange(Toy(), Foreign(X), "share")

    assert np.shares_memory(array, X)
    assert report.source == __name__.partition(".")[0]


def test_a_library_whose_arrays_are_copied_to_be_read() -> None:
    report = exchange(Toy(), Moved(X), "auto")[1]
    assert (report.shared, report.reason) == (False, "the door was too narrow")
    with pytest.raises(ExchangeError, match=r"shared: the door was too narrow\.(.|\n)*way out: widen it"):
        exchange(Toy(), Moved(X), "share")


def test_a_library_that_fails() -> None:
    told = r"a \w+ of .* cannot be taken into Toy: its __dlpack__ failed: "
    with pytest.raises(ExchangeError, match=f"{told}it is on the moon"):
        exchange(Toy(), Foreign(None), "snapshot")
    with pytest.raises(ExchangeError, match=f"{told}AttributeError"):
        exchange(Toy(), Silent(X), "snapshot")


def test_overlaps_agrees_with_counting() -> None:
    dice = random.Random(0)
    seen = set()
    for _ in range(500):
        shape = [dice.randint(0, 3) for _ in range(dice.randint(0, 3))]
        strides = [dice.choice((1, -1)) * 4 * dice.randint(0, 9) for _ in shape]
        offsets = [
            sum(i * stride for i, stride in zip(index, strides, strict=True))
            for index in itertools.product(*map(range, shape))
        ]
        if len(set(offsets)) < len(offsets):
            assert overlaps(shape, strides, 4)  # never missed
        seen.add((len(set(offsets)) < len(offsets), overlaps(shape, strides, 4)))
    assert seen >= {(True, True), (False, False)}
    assert not overlaps((3, 4), (4, 12), 4)  # transposed
    assert not overlaps((3, 4), (64, 4), 4)  # gaps


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (1, 5, 1), (2, 1, 3)])
def test_row_major(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.float32)
    for view in (array, array.T, array[..., ::2] if shape else array, array[::-1] if shape else array):
        offer = NumpyArrays().offer(view)
        assert offer.row_major == view.flags.c_contiguous or view.size == 0


def test_a_framework_that_makes_something_else_is_found_out() -> None:
    class Widening(Toy):
        def copy(self, offer: Offer, dtype: str, refuse: Callable[[Fault], ExchangeError]) -> Any:
            return offer.clone().astype("float64")

    class Opening(Toy):
        def open(self, value: Any) -> Any:
            return [1, 2], None

    with pytest.raises(ExchangeError, match=r"Toy made float64\[2, 3\] of it(.|\n)*leave the mode that changes new"):
        exchange(Widening(), X, "snapshot")
    with pytest.raises(TypeError, match="toy opened Foreign as list"):
        exchange(Opening(), Foreign(X), "snapshot")
