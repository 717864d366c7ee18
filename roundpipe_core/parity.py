"""Is the model ported to another framework the same? Run both with one tape, and compare.

A port differs from its original in rounding, and a decision on a near tie differs with it: then everything after it
differs, and nothing is proven. With the original's decisions replayed in the port, what is left is arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

from ._backend import Frontend, backend_of, described, expand, frontend, origin_of
from ._errors import OptionError, ParityError, called_here, message
from ._host import kind_of
from ._replay import record
from ._report import text_table
from ._tape import Tape
from ._trees import flatten, paths, unflatten

__all__ = ["Comparison", "Row", "check", "compare", "converted"]


class Row(NamedTuple):
    """One array of both sides."""

    name: str
    shape: tuple[int, ...]
    distance: float
    """Norm of the difference over the norm of the first side's; infinite where the two cannot be compared."""
    limit: float

    @property
    def close(self) -> bool:
        """Whether the distance is within the limit; NaN is not."""
        return self.distance <= self.limit

    def cells(self) -> tuple[str, ...]:
        """As a line of the table."""
        mark = "" if self.close else "<-- apart"
        return self.name, str(list(self.shape)), f"{self.distance:.1e}", f"{self.limit:.0e}", mark


class Comparison(NamedTuple):
    """How far two sides are apart, array by array. Prints as a table."""

    sides: tuple[str, str]
    rows: tuple[Row, ...]
    tapes: tuple[Tape, Tape] | None = None
    """What each side decided, where each decided itself."""

    @property
    def close(self) -> bool:
        """Whether all arrays are within their limits."""
        return all(row.close for row in self.rows)

    def __str__(self) -> str:
        table = text_table(("array", "shape", "distance", "limit", ""), [row.cells() for row in self.rows])
        return f"{self.sides[1]} against {self.sides[0]}\n{table}"

    def raise_if_apart(self) -> Comparison:
        """`ParityError` with the table, unless all is within its limits."""
        if self.close:
            return self
        apart = [row for row in self.rows if not row.close]
        raise ParityError(
            message(
                f"{len(apart)} of {len(self.rows)} arrays are further apart than allowed, the first {apart[0].name!r}.",
                [("table", "\n" + str(self))],
                "look at the first of them in the order of the computation; raise the limits if it is rounding only.",
            )
        )


def converted(framework: str, values: Any) -> Any:
    """`values`, any containers, with every array in them as one of `framework`'s own.

    >>> import numpy as np, torch, roundpipe_torch
    >>> from roundpipe_core import parity
    >>> parity.converted("torch", {"w": np.ones(2, "float32"), "steps": 3})
    {'w': tensor([1., 1.]), 'steps': 3}

    Args:
        framework: "torch" or "jax"; its frontend has to be imported.
        values: of any framework. Arrays of another one are copied, and integers among them become the framework's
            index type.

    Raises:
        OptionError: no frontend of that name is imported.
        ValueError: an array's values would change.
    """
    return _converted(_frontend(framework), values)


def check(
    original: Callable[..., Any],
    port: Callable[..., Any],
    weights: Any,
    inputs: Sequence[Any] = (),
    *,
    frameworks: tuple[str, str] = ("torch", "jax"),
    replayed: bool = True,
    rtol: float = 1e-5,
    limits: Mapping[str, float] | None = None,
) -> Comparison:
    """Run a model and its port on the same weights and inputs, and compare loss, outputs and all gradients.

    >>> import torch, roundpipe_torch
    >>> from roundpipe_core import parity, save_for_recompute
    >>> def loss(weights, x):
    ...     best, = save_for_recompute((x @ weights["w"]).detach().argmax(-1))
    ...     return (x @ weights["w"]).gather(-1, best[:, None]).sum()
    >>> check = parity.check(loss, loss, {"w": torch.ones(4, 3)}, [torch.ones(2, 4)], frameworks=("torch", "torch"))
    >>> print(check)
    torch against torch
    array              shape   distance  limit
    loss               []      0.0e+00   1e-05
    gradient of ['w']  [4, 3]  0.0e+00   1e-05
    >>> check.raise_if_apart().close
    True

    Args:
        original: called as `original(weights, *inputs)`; gives the loss, or `(loss, outputs)`.
        port: the same, in the other framework.
        weights: containers of floating arrays, such as a dict or `dict(model.named_parameters())`; each side gets them
            as its own.
        inputs: more arguments, arrays or not.
        frameworks: of the two sides. The frontends have to be imported.
        replayed: the port takes the original's decisions; False: each decides itself, and `tapes` has both.
        rtol: how far loss, outputs and gradients may be apart, as norm over norm. Those of complex weights are compared
            as torch has them; JAX's are the conjugates.
        limits: others, per row of the table.

    Returns:
        A table, which is true to its word only through `raise_if_apart()` or `close`.

    Raises:
        OptionError: no frontend of that name is imported, or there are not two.
        TapeError: the original's decisions do not fit the port (R13).
    """
    names: Any = frameworks  # whatever was given
    if isinstance(names, str) or len(names) != 2:
        raise OptionError(
            message(
                f"parity: frameworks= is {frameworks!r}, where the two sides have one each.",
                called_here(),
                'frameworks=("torch", "jax"), the original first.',
            )
        )
    first, second = map(_frontend, frameworks)
    with record() as tape:
        one = _run(first, original, weights, inputs, None)
    tapes = None
    if replayed:
        two = _run(second, port, weights, inputs, tape)
    else:
        with record() as other:
            two = _run(second, port, weights, inputs, None)
        tapes = (tape, other)
    return compare(one, two, sides=frameworks, rtol=rtol, limits=limits)._replace(tapes=tapes)


def compare(
    one: Mapping[str, Any],
    two: Mapping[str, Any],
    *,
    sides: tuple[str, str] = ("one", "two"),
    rtol: float = 1e-5,
    limits: Mapping[str, float] | None = None,
) -> Comparison:
    """Compare named arrays of two sides, of any frameworks.

    >>> import torch, roundpipe_torch
    >>> from roundpipe_core import parity
    >>> parity.compare({"y": torch.ones(3)}, {"y": torch.ones(3) * 1.5}).rows[0].distance
    0.5

    Args:
        one: arrays or numbers by name; the distances are relative to these.
        two: arrays or numbers by name.
        sides: what the table calls the two.
        rtol: see `check`.
        limits: see `check`.
    """
    unknown = (limits or {}).keys() - one.keys() - two.keys()
    if unknown:
        raise OptionError(
            message(
                f"limits= has {', '.join(map(repr, sorted(unknown)))}, which is no row of the comparison.",
                [("rows", ", ".join(map(repr, {**one, **two}))), *called_here()],
                "name rows as the table does.",
            )
        )
    rows = []
    for name in {**one, **two}:
        a, b = one.get(name), two.get(name)
        limit = (limits or {}).get(name, rtol)
        shape = described(a)[1]
        rows.append(Row(name, shape, _distance(a, b), limit))
    return Comparison(sides, tuple(rows))


def _distance(one: Any, two: Any) -> float:
    if one is None and two is None:
        return 0.0
    if described(one)[1] != described(two)[1]:
        return float("inf")
    if isinstance(one, Number) or isinstance(two, Number):
        return _of_numbers(one, two)
    if backend_of(one) is None or backend_of(two) is None:
        return float("inf")
    return _in_one_framework(one, two)


def _of_numbers(*sides: Any) -> float:
    """One of the two, at least, is a number of Python or numpy; the other may be an array without axes."""
    one, two = (value if backend_of(value) is None else value.item() for value in sides)
    if not all(isinstance(value, Number) for value in (one, two)):
        return float("inf")
    try:
        return 0.0 if one == two else float(abs(one - two) / (abs(one) or 1))
    except (OverflowError, TypeError):  # beyond all floats; of kinds that Python does not subtract
        return float("inf")


def _in_one_framework(one: Any, two: Any) -> float:
    """In that of either side; torch holds what JAX without 64 bits would have to round."""
    names = dict.fromkeys((origin_of(one), origin_of(two), "torch", "jax"))
    backends = [backend for name in names if (backend := frontend(name)) is not None]
    for backend in backends[:-1]:
        try:
            return backend.distance(backend.adopt(one, None), backend.adopt(two, None))
        except ValueError:  # a value would change
            continue
    return backends[-1].distance(backends[-1].adopt(one, None), backends[-1].adopt(two, None))


def _frontend(name: str) -> Frontend:
    found = frontend(name)
    if found is None:
        raise OptionError(
            message(
                f"no frontend {name!r} is imported.",
                [],
                f"import roundpipe_{name} first." if name in ("torch", "jax") else 'name "torch" or "jax".',
            )
        )
    return found


def _converted(backend: Frontend, values: Any, given: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    leaves: list[Any] = []
    spec = flatten(values, leaves, expand)
    return unflatten(spec, (leaf if backend_of(leaf) is None else backend.adopt(given(leaf), None) for leaf in leaves))


def _from_here_on(weight: Any) -> Any:
    """A weight is differentiated anew on both sides: a parameter of a model may be given as it is."""
    return weight.detach() if getattr(weight, "requires_grad", False) else weight


def _giving_a_loss(backend: Frontend, function: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    def called(*arguments: Any) -> tuple[Any, Any]:
        result = function(*arguments)
        loss, outputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        dtype, shape = described(loss)
        if backend_of(loss) is backend and kind_of(dtype) == "float" and not shape:
            return loss, outputs
        raise OptionError(
            message(
                f"parity: the function of {backend.name} gives {dtype}{list(shape) if backend_of(loss) else ''} as its "
                "loss.",
                called_here(),
                f"give a floating array of {backend.name} without axes, or a tuple of it and the outputs.",
            )
        )

    return called


def _run(
    backend: Frontend, function: Callable[..., Any], weights: Any, inputs: Sequence[Any], tape: Tape | None
) -> dict[str, Any]:
    own = _converted(backend, weights, _from_here_on)
    given = _converted(backend, list(inputs))
    loss, outputs, gradients = backend.value_and_gradient(_giving_a_loss(backend, function), own, given, tape)
    rows = {"loss": loss}
    for title, tree in (("output", outputs), ("gradient of", gradients)):
        leaves: list[Any] = []
        spec = flatten(tree, leaves, expand)
        rows |= {f"{title} {path}": leaf for path, leaf in zip(paths(spec), leaves, strict=True) if leaf is not None}
    return rows
