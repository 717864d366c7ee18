"""Values whose derivative is given by a rule, at any order and in any program.

`jax.custom_jvp` will not do where the value does not itself show the derivative: a value that was saved is cut off from
what it was made of. JAX drops such a rule when it takes a program apart into what a first derivative computes now and
what it needs later, as it does with the body of a scan. A second derivative then finds the bare value, and is wrong
without an error. An operation of one's own is taken apart as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ._cuts import transposable
from ._jax import is_float, is_mapped
from ._tangents import zero_like

__all__ = ["Batch", "Ruling", "each_its_own", "ruled"]

_Groups = list[list[Any]]
_Axes = tuple[int | None, ...]


class Batch(NamedTuple):
    """How an operation is batched."""

    axes: tuple[_Axes, ...]  # of the values, by groups
    out: _Axes  # of the first group; 0 where that has no derivative
    size: int
    name: Any
    spmd_name: Any

    def over(self, function: Callable[..., Any], groups: Sequence[int], out: Any = 0) -> Callable[..., Any]:
        """`function` of some of the groups, for a batch of them."""
        axes = tuple(list(self.axes[n]) for n in groups)
        return self.vmap(function, axes, list(out) if isinstance(out, tuple) else out)

    def vmap(self, function: Callable[..., Any], axes: Any, out: Any) -> Callable[..., Any]:
        """`jax.vmap` of this batch."""
        return jax.vmap(function, axes, out, axis_name=self.name, axis_size=self.size, spmd_axis_name=self.spmd_name)


class Ruling(NamedTuple):
    """What an operation on groups of values gives, which is the first group, and how it depends on the others."""

    rule: Callable[[_Groups, _Groups], tuple[list[Any], list[Any]]]
    """From groups of values and of their tangents (`SymbolicZero` is none) to the first group and its tangents."""
    like: Callable[[_Groups], Sequence[Any]] | None = None
    """What varies over a batch where the tangents of the first group do; by default they all do."""
    in_batch: Callable[[Batch], Ruling] | None = None
    """The same of batches; by default the rule of each example."""
    pull: Callable[[Sequence[Any], _Groups], _Groups] | None = None
    """From slopes of the first group, and groups in which values are missing, to slopes of those values."""


def ruled(ruling: Ruling) -> Callable[..., list[Any]]:
    """An operation on groups of arrays that gives the first group, with the derivative that `ruling` says."""

    def operation(*groups: Sequence[Any]) -> list[Any]:
        sizes = tuple(map(len, groups))
        values: list[Any] = _ruled.bind(*(value for group in groups for value in group), sizes=sizes, ruling=ruling)
        return values

    return operation


_ruled: Any = Primitive("roundpipe_ruled")
_ruled.multiple_results = True
_ruled.def_impl(lambda *values, sizes, ruling: list(values[: sizes[0]]))
_ruled.def_abstract_eval(lambda *avals, sizes, ruling: list(avals[: sizes[0]]))
mlir.register_lowering(_ruled, lambda context, *values, sizes, ruling: list(values[: sizes[0]]))


def _grouped(values: Sequence[Any], sizes: tuple[int, ...]) -> _Groups:
    return [list(values[begin:end]) for begin, end in pairwise(accumulate(sizes, initial=0))]


def _differentiated(values: Sequence[Any], dots: Sequence[Any], *, sizes: tuple[int, ...], ruling: Ruling) -> Any:
    marked = [_marked(value, None if type(dot) is ad.Zero else dot) for value, dot in zip(values, dots, strict=True)]
    outs, out_dots = ruling.rule(_grouped(values, sizes), _grouped(marked, sizes))
    return outs, [
        dot if is_float(out) else ad.Zero(jax.typeof(out).to_tangent_aval())
        for out, dot in zip(outs, out_dots, strict=True)
    ]


def _marked(value: Any, dot: Any) -> Any:
    return SymbolicZero(jax.typeof(value).to_tangent_aval()) if dot is None else dot


def _transposed(slopes: Sequence[Any], *values: Any, sizes: tuple[int, ...], ruling: Ruling) -> list[Any]:
    if ruling.pull is None:
        raise NotImplementedError("jax.linear_transpose of a function that is given to keep")
    instantiated: Any = ad.instantiate_zeros
    return [*chain(*ruling.pull(list(map(instantiated, slopes)), _grouped(values, sizes)))]


def _batched(axis: Any, values: Sequence[Any], axes: Sequence[Any], *, sizes: tuple[int, ...], ruling: Ruling) -> Any:
    values, axes, count = list(values), list(axes), sizes[0]
    if not any(axis is not None for axis in axes):
        return _ruled.bind(*values, sizes=sizes, ruling=ruling), [None] * count
    batch = Batch((), (), axis.size, None if type(axis.name) is object else axis.name, axis.spmd_name)  # JAX's mark
    for n in _tangents_vary(batch, values, axes, sizes, ruling):
        values[n], axes[n] = jnp.broadcast_to(values[n], (batch.size, *values[n].shape)), 0
    out = [axis if is_float(value) else 0 for axis, value in zip(axes[:count], values, strict=False)]
    batch = batch._replace(axes=tuple(map(tuple, _grouped(axes, sizes))), out=tuple(out))
    batched = ruling.in_batch(batch) if ruling.in_batch else _of_each(batch, ruling)
    return _ruled.bind(*values, sizes=sizes, ruling=batched), axes[:count]


def _tangents_vary(
    batch: Batch, values: Sequence[Any], axes: Sequence[Any], sizes: tuple[int, ...], ruling: Ruling
) -> list[int]:
    """Which results are the same for the whole batch, and have tangents that are not."""
    same = [n for n in range(sizes[0]) if axes[n] is None and is_float(values[n])]
    find_like, found = ruling.like, list[int]()
    if find_like is None or not same:
        return same

    def of_each(values: Sequence[Any]) -> tuple[()]:
        like = find_like(_grouped(values, sizes))
        found.extend(n for n in same if is_mapped(like[n]))
        return ()

    jax.eval_shape(batch.vmap(of_each, (axes,), 0), values)
    return found


def _of_each(batch: Batch, ruling: Ruling) -> Ruling:
    """The ruling of a batch, from that of its examples."""
    find_like = ruling.like

    def like(groups: _Groups) -> Sequence[Any]:
        assert find_like is not None

        def of_floats(*groups: list[Any]) -> list[Any]:
            return [one if is_float(out) else 0 for one, out in zip(find_like([*groups]), groups[0], strict=True)]

        varying: Sequence[Any] = batch.over(of_floats, range(len(groups)), batch.out)(*groups)
        return varying

    return Ruling(_rule_of_each(batch, ruling.rule), find_like and like)


def _rule_of_each(batch: Batch, rule: Callable[[_Groups, _Groups], Any]) -> Callable[[_Groups, _Groups], Any]:
    sizes = tuple(map(len, batch.axes))
    axes = [*chain(*batch.axes)]

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
        of_all = batch.vmap(one, (axes, moving_axes), (axes[: sizes[0]], dot_axes))
        outs, float_dots = transposable(of_all, flat, moving)
        rest = iter(float_dots)
        return outs, [next(rest) if is_float(out) else zero_like(out) for out in outs]

    return in_batch


def _own_dots(values: _Groups, dots: _Groups) -> tuple[list[Any], list[Any]]:
    outs = each_its_own(*values)
    return outs, [
        zero_like(out) if isinstance(dot, SymbolicZero) else dot for out, dot in zip(outs, dots[0], strict=True)
    ]


each_its_own = ruled(Ruling(_own_dots))
"""The first group. In a batch of any value here, each example has its own of all that has a derivative.

For results of a `jax.custom_vjp` function: JAX adds up the slope of one that the examples share once for each of them.
"""

ad.primitive_jvps[_ruled] = _differentiated
ad.primitive_transposes[_ruled] = _transposed
batching.fancy_primitive_batchers[_ruled] = _batched
