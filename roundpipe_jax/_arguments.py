"""How options that name arguments meet the arguments of a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from roundpipe_core._errors import OptionError, message

__all__ = ["AsIs", "barriers", "names", "numbers", "with_static", "without_static"]


class AsIs:
    """An argument that the layer takes as it is. A leaf, whatever it holds."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def numbers(given: int | Sequence[int]) -> tuple[int, ...]:
    """`static_argnums` as a tuple."""
    found = (given,) if isinstance(given, int) else tuple(given)
    if not all(type(number) is int for number in found):
        raise OptionError(
            message(
                f"remat: static_argnums={given!r} gives no positions.",
                [],
                "give positions: an int, or a tuple of ints.",
            )
        )
    return found


def names(given: str | Iterable[str]) -> tuple[str, ...]:
    """`static_argnames` as a tuple."""
    return (given,) if isinstance(given, str) else tuple(given)


def with_static(
    layer: str,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argnums: tuple[int, ...],
    argnames: tuple[str, ...],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, those named static wrapped."""
    wrong = [number for number in argnums if not -len(args) <= number < len(args)]
    if wrong:
        raise OptionError(
            message(
                f"layer {layer!r}: static_argnums={argnums} names an argument that this call does not have.",
                [("positional arguments", str(len(args)))],
                "count from 0, or use static_argnames for arguments passed by name.",
            )
        )
    static = {number % len(args) for number in argnums} | _positions(fun, argnames)
    return (
        tuple(AsIs(arg) if n in static else arg for n, arg in enumerate(args)),
        {name: AsIs(arg) if name in argnames else arg for name, arg in kwargs.items()},
    )


def _positions(fun: Callable[..., Any], argnames: tuple[str, ...]) -> set[int]:
    """Where arguments with these names stand when they are passed by position."""
    if not argnames:
        return set()
    try:
        parameters = list(inspect.signature(fun).parameters)
    except (TypeError, ValueError):  # a callable without a signature
        return set()
    return {n for n, name in enumerate(parameters) if name in argnames}


def without_static(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments again as the caller gave them."""
    return [_bare(arg) for arg in args], {name: _bare(arg) for name, arg in kwargs.items()}


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, AsIs) else value


def barriers(
    given: bool | Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], array: Sequence[bool]
) -> bool | tuple[bool, ...]:
    """`prevent_cse` for each array among the arguments."""
    if isinstance(given, bool):
        return given
    if not isinstance(given, (tuple, list)):
        raise OptionError(
            message(
                f"remat: prevent_cse={given!r} does not exist.",
                [],
                "give True, False, None, or one of them per argument.",
            )
        )
    prefix = (tuple(given), kwargs and True) if kwargs else (tuple(given), {})
    flags = jax.tree.leaves(jax.tree.broadcast(prefix, (args, kwargs)))
    return tuple(bool(flag) for flag, one in zip(flags, array, strict=True) if one)
