"""verify="warn" | "raise": decide again, recompute, and compare with what the forward decided and gave."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from roundpipe_core._backend import compare
from roundpipe_core._errors import Flip, VerifyError, VerifyWarning, message
from roundpipe_core._slots import spoken
from roundpipe_core._trees import paths

from ._backend import JaxArrays, as_numpy
from ._jax import concrete_value, is_out_of_memory, is_tracer, optimization_barrier
from ._packing import Split, Template, alike
from ._runs import is_abstract, stop_gradients
from ._staging import stage

__all__ = ["Again", "verified"]

_TOLERANCES = {  # what the same operations may differ by when the compiler fuses them otherwise
    "float64": (1e-7, 1e-7),
    "float32": (1e-5, 1e-5),
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
}

Again = Callable[..., tuple[list[Any], list[Any], Any]]
"""From (saved, arrays) to the recompute's outputs, what was decided again, and a `Held` (its template, its shape)."""


def verified(
    layer: str,
    how: str,
    again: Again,
    outputs: Sequence[Any],
    shape: Split,
    saved: Sequence[Any],
    template: Template,
    arrays: Sequence[Any],
) -> None:
    """Compare now where there are values, or when the program runs where there are not."""
    values = stop_gradients([*saved, *arrays])
    function = functools.partial(_split_again, again, len(saved))
    try:
        if any(map(is_abstract, (*values, *outputs))):
            program = stage(function, values).without_references({})
            consts, values = optimization_barrier((stop_gradients(program.consts), values))
            results, held = program.run(consts, values), program.out[2].value
            count = len(program.out[0])
            others, decided = results[:count], results[count:]
        else:
            others, decided, held = function(*values)
            held = held.value
    except Exception as error:  # the flipped decision may not even fit the code
        if is_out_of_memory(error):
            raise
        _report(layer, how, [Flip(layer, f"a plain recompute fails ({type(error).__name__}: {error})", 1, 1, 0)])
        return
    names = [*_items(template), *(f"output {n}" for n in range(len(outputs)))]
    flips = _static_flips(layer, template, held[0], shape, held[1])
    before, after = stop_gradients([*saved, *outputs]), stop_gradients([*decided, *others])
    if len(before) != len(after):
        flips.append(Flip(layer, f"{len(before)} arrays, now {len(after)}", 1, 1, 0))
        before, after = [], []
    check = functools.partial(_compared, layer, how, names, len(saved), flips)
    if any(map(is_abstract, (*before, *after))):
        jax.debug.callback(check, before, after)
    else:
        check(*([concrete_value(v) if is_tracer(v) else v for v in side] for side in (before, after)))


def _split_again(again: Again, count: int, *values: Any) -> tuple[list[Any], list[Any], Any]:
    return again(values[:count], values[count:])


def _items(template: Template) -> list[str]:
    """What to call each saved array, in order."""
    names = [
        f"{spoken(key)}, item {path}"
        for key, entry, mask in template.entries
        for path, one in zip(paths(entry.spec), mask, strict=True)
        if one
    ]
    for _, child in template.children:
        names += [f"layer {child.label!r}, {name}" for name in _items(child)]
    return names


def _static_flips(layer: str, one: Template, other: Template, shape: Split, again: Split) -> list[Flip]:
    """Differences among values that are not arrays."""
    flips: list[Flip] = []
    decided = {key: entry for key, entry, _ in other.entries}
    for key, entry, mask in one.entries:
        if key not in decided:
            flips.append(Flip(layer, f"{spoken(key)}: not saved again", 1, 1, 0))
            continue
        rest = decided[key].leaves
        for path, backend, leaf, is_array, new in zip(
            paths(entry.spec), entry.backends, entry.leaves, mask, rest, strict=False
        ):
            flip = None if is_array else compare(layer, f"{spoken(key)}, item {path}", backend, leaf, new)
            if flip:
                flips.append(flip)
    if not alike(shape.tree, again.tree):
        flips.append(Flip(layer, "the structure of the output", 1, 1, 0))
        return flips
    for leaf, new in zip(shape.rest, again.rest, strict=False):
        flip = compare(layer, "output", None, leaf, new)
        if flip:
            flips.append(flip)
    return flips


def _compared(
    layer: str, how: str, names: Sequence[str], saved: int, known: Sequence[Flip], before: Any, after: Any
) -> None:
    flips = list(known)
    for n, (name, one, other) in enumerate(zip(names, before, after, strict=False)):
        rows = _exactly.rows_differing(one, other) if n < saved else _rows_far(one, other)
        if rows:
            flips.append(Flip(layer, name, *rows))
    _report(layer, how, flips)


_exactly = JaxArrays()


def _rows_far(one: Any, other: Any) -> tuple[int, int, int] | None:
    """Rows of an output that differ by more than another fusion explains."""
    tolerance = _TOLERANCES.get(str(one.dtype))
    if tolerance is None or one.shape != other.shape or one.dtype != other.dtype:
        return _exactly.rows_differing(one, other)
    left, right = (np.asarray(as_numpy(side), np.float64) for side in (one, other))
    far: Any = ~np.isclose(left, right, rtol=tolerance[0], atol=tolerance[1], equal_nan=True)
    if not far.any():
        return None
    flags: Any = np.reshape(far, (np.shape(far)[0] if np.ndim(far) else 1, -1)).any(axis=1)
    return int(flags.sum()), len(flags), int(flags.argmax())


def _report(layer: str, how: str, flips: Sequence[Flip]) -> None:
    if not flips:
        return
    text = message(
        f"layer {layer!r}: a plain recompute would not repeat the forward.",
        [("found", str(flip)) for flip in flips],
        "for saved items nothing is wrong: the recompute used the forward's decision. An output that differs needs "
        "its decision or random draw saved too.",
    )
    if how == "raise":
        raise VerifyError(text, tuple(flips))
    warnings.warn(VerifyWarning(text, tuple(flips)), stacklevel=2)
