"""Values whose derivative is given by a rule, at any order and in any program.

`jax.custom_jvp` will not do where the value does not itself show the derivative: a value that was saved is cut off from
what it was made of. JAX drops such a rule when it takes a program apart into what a first derivative computes now and
what it needs later, as it does with the body of a scan. A second derivative then finds the bare value, and is wrong
without an error. An operation of one's own is taken apart as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ._jax import is_float
from ._tangents import zero_like

__all__ = ["ruled"]

_Groups = list[list[Any]]
Rule = Callable[[_Groups, _Groups], tuple[list[Any], list[Any]]]
"""From groups of values and of their tangents, where `SymbolicZero` is none, to the first group and its tangents."""


def ruled(rule: Rule) -> Callable[..., list[Any]]:
    """An operation on groups of arrays that gives the first group, with the derivative that `rule` says."""

    def operation(*groups: Sequence[Any]) -> list[Any]:
        sizes = tuple(map(len, groups))
        values: list[Any] = _ruled.bind(*(value for group in groups for value in group), sizes=sizes, rule=rule)
        return values

    return operation


_ruled: Any = Primitive("roundpipe_ruled")
_ruled.multiple_results = True
_ruled.def_impl(lambda *values, sizes, rule: list(values[: sizes[0]]))
_ruled.def_abstract_eval(lambda *avals, sizes, rule: list(avals[: sizes[0]]))
mlir.register_lowering(_ruled, lambda context, *values, sizes, rule: list(values[: sizes[0]]))


def _grouped(values: Sequence[Any], sizes: tuple[int, ...]) -> _Groups:
    return [list(values[begin:end]) for begin, end in pairwise(accumulate(sizes, initial=0))]


def _differentiated(values: Sequence[Any], dots: Sequence[Any], *, sizes: tuple[int, ...], rule: Rule) -> Any:
    marked = [_marked(value, None if type(dot) is ad.Zero else dot) for value, dot in zip(values, dots, strict=True)]
    outs, out_dots = rule(_grouped(values, sizes), _grouped(marked, sizes))
    return outs, [
        dot if is_float(out) else ad.Zero(jax.typeof(out).to_tangent_aval())
        for out, dot in zip(outs, out_dots, strict=True)
    ]


def _marked(value: Any, dot: Any) -> Any:
    return SymbolicZero(jax.typeof(value).to_tangent_aval()) if dot is None else dot


def _batched(batch: Any, values: Sequence[Any], axes: Sequence[Any], *, sizes: tuple[int, ...], rule: Rule) -> Any:
    name = None if type(batch.name) is object else batch.name  # JAX's mark for none
    vmap = partial(jax.vmap, axis_name=name, axis_size=batch.size, spmd_axis_name=batch.spmd_name)
    values, axes = list(values), list(axes)
    for n in range(sizes[0] if any(axis is not None for axis in axes) else 0):
        if axes[n] is None and is_float(values[n]):  # its tangent may vary over the batch
            values[n], axes[n] = jnp.broadcast_to(values[n], (batch.size, *values[n].shape)), 0

    def in_batch(values: _Groups, dots: _Groups) -> tuple[list[Any], list[Any]]:
        flat, flat_dots = [*chain(*values)], [*chain(*dots)]
        varying = [not isinstance(dot, SymbolicZero) for dot in flat_dots]

        def one(values: Sequence[Any], given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            rest = iter(given)
            marked = [_marked(v, next(rest) if flag else None) for v, flag in zip(values, varying, strict=True)]
            outs, out_dots = rule(_grouped(values, sizes), _grouped(marked, sizes))
            return outs, [dot for out, dot in zip(outs, out_dots, strict=True) if is_float(out)]

        moving = [dot for dot, flag in zip(flat_dots, varying, strict=True) if flag]
        moving_axes = [axis for axis, flag in zip(axes, varying, strict=True) if flag]
        dot_axes = [axis for axis, out in zip(axes, values[0], strict=False) if is_float(out)]
        outs, float_dots = vmap(one, (axes, moving_axes), (axes[: sizes[0]], dot_axes))(flat, moving)
        rest = iter(float_dots)
        return outs, [next(rest) if is_float(out) else zero_like(out) for out in outs]

    return _ruled.bind(*values, sizes=sizes, rule=in_batch), axes[: sizes[0]]


ad.primitive_jvps[_ruled] = _differentiated
batching.fancy_primitive_batchers[_ruled] = _batched
