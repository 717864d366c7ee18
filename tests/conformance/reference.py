"""A third frontend, in numpy, as small as one can be: proof that the core favours no framework.

Its arrays that are differentiated are `Dual` numbers: values, and a derivative along every input. A region is not
differentiated in the forward. `gradient` runs the program again from the inputs' derivatives, and there the regions
are recomputes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from roundpipe_core import _backend
from roundpipe_core._phase import Phase, Run, open_slot, thread
from roundpipe_core._slots import Slot

draws = np.random.default_rng(0)  # what a layer's dropout draws from


class Dual(np.lib.mixins.NDArrayOperatorsMixin):
    """Values (of any shape), and their derivatives (one more axis: the inputs)."""

    def __init__(self, value: Any, slope: Any = None) -> None:
        self.value = np.asarray(value, np.float64)
        self.slope = np.zeros((*self.value.shape, 1)) if slope is None else slope

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any) -> Any:
        one, *others = [part if isinstance(part, Dual) else Dual(part) for part in inputs]
        value = ufunc(one.value, *(other.value for other in others))
        if not others:
            return Dual(value, _SLOPES[ufunc](one.value, value)[..., None] * one.slope)
        left, right = _SLOPES[ufunc](one.value, others[0].value)
        return Dual(value, _times(left, one.slope) + _times(right, others[0].slope))

    def __getitem__(self, index: Any) -> Dual:
        return Dual(self.value[index], self.slope[index])

    def sum(self) -> Dual:
        return Dual(self.value.sum(), self.slope.reshape(-1, self.slope.shape[-1]).sum(0))


def _times(factor: Any, slope: Any) -> Any:
    return np.asarray(factor)[..., None] * slope


_SLOPES: dict[Any, Callable[..., Any]] = {
    np.add: lambda a, b: (np.ones_like(a), np.ones_like(b)),
    np.subtract: lambda a, b: (np.ones_like(a), -np.ones_like(b)),
    np.multiply: lambda a, b: (b, a),
    np.exp: lambda a, out: out,
    np.sin: lambda a, out: np.cos(a),
}


class _Duals:
    """What the core asks about `Dual`."""

    name = "reference"

    def owns(self, value: Any) -> bool:
        return isinstance(value, Dual)

    def expand(self, value: Any) -> None:
        return None

    def gradient_fault(self, array: Dual) -> tuple[str, str]:
        return "is being differentiated", "save .value"

    def without_gradient(self, function: Callable[[], Any]) -> Any:
        return function()


class _Run(Run):
    __slots__ = ()

    def state(self) -> Any:
        return draws.bit_generator.state

    def restore_state(self, state: Any) -> None:
        if state is not None:
            draws.bit_generator.state = state

    def arguments(self, values: Any) -> Any:
        args, kwargs = values
        return tuple(arg.value if isinstance(arg, Dual) else arg for arg in args), kwargs

    def adopt(self, leaf: Any, like: Any) -> Any:
        return _backend.numpys.adopt(leaf, like if isinstance(like, np.ndarray) else None)


_calls: list[tuple[Slot, Any]] = []  # the outermost regions of this program, with the generator's state at their start
_again: Iterator[tuple[Slot, Any]] | None = None


def region(function: Callable[..., Any], *args: Any, label: str | None = None) -> Any:
    outer = thread.run
    if _again is None or isinstance(outer, _Run):
        phase, slot = open_slot(label or function)
        if slot.rows is not None:
            slot.line_up([np.shape(getattr(arg, "value", arg)) for arg in args], None)
        if not isinstance(outer, _Run):
            _calls.append((slot, draws.bit_generator.state))
    else:
        phase, (slot, draws.bit_generator.state) = Phase.RECOMPUTE, next(_again)
    thread.run = _Run(phase, slot)
    try:
        return function(*args)
    finally:
        thread.run = outer


def gradient(program: Callable[[Any], Any], x: Any, *, times: int = 1) -> tuple[Any, Any]:
    """Value and gradient of a program from an array to a number; the gradient is taken `times` times."""
    global _again
    _calls.clear()
    value = program(Dual(x)).value
    slopes = np.eye(x.size).reshape(*x.shape, x.size)
    again = Dual(x)
    after = draws.bit_generator.state
    outer, thread.run = thread.run, None
    try:
        for _ in range(times):
            _again = iter(list(_calls))
            again = program(Dual(x, slopes))
    finally:
        _again, thread.run = None, outer
        _calls.clear()
        draws.bit_generator.state = after
    return value, again.slope.reshape(x.shape)


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """While this frontend is known to the core."""
    _backend._frontends.append(_Duals())  # type: ignore[arg-type]
    _backend._by_type.clear()
    try:
        yield
    finally:
        del _backend._frontends[-1]
        _backend._by_type.clear()
