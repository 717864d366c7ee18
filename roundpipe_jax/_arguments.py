"""How options that name arguments meet the arguments of a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from roundpipe_core._errors import OptionError, message, shown
from roundpipe_core._slots import label_of

__all__ = ["AsIs", "barriers", "check_names", "names", "numbers", "with_static", "without_static"]


class AsIs:
    """An argument that the layer takes as it is. A leaf, whatever it holds."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def numbers(given: int | Sequence[int]) -> tuple[int, ...]:
    """`static_argnums` as a tuple."""
    found = _listed(given, int)
    if not all(type(number) is int for number in found):
        what = f"remat: static_argnums={shown(given)} gives no positions."
        raise OptionError(message(what, [], "give positions: an int, or a tuple of ints."))
    return found


def names(given: str | Iterable[str]) -> tuple[str, ...]:
    """`static_argnames` as a tuple."""
    found = _listed(given, str)
    if not all(isinstance(name, str) for name in found):
        what = f"remat: static_argnames={shown(given)} gives no names."
        raise OptionError(message(what, [], "give names of arguments: a string, or a tuple of strings."))
    return found


def _listed(given: Any, one: type) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, one) else (given,)


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
    return {n for n, name in enumerate(_parameters(fun) if argnames else ()) if name in argnames}


def check_names(fun: Callable[..., Any], argnames: tuple[str, ...]) -> None:
    """An error for names that the layer has no argument of."""
    parameters = _parameters(fun) if argnames else {}
    unknown = [name for name in argnames if name not in parameters]
    if not unknown or not parameters or any(kind is inspect.Parameter.VAR_KEYWORD for kind in parameters.values()):
        return
    raise OptionError(
        message(
            f"layer {label_of(fun)!r}: static_argnames names {', '.join(map(repr, unknown))}, which it does not take.",
            [("it takes", ", ".join(parameters))],
            "give names of its arguments.",
        )
    )


def _parameters(fun: Callable[..., Any]) -> dict[str, Any]:
    """The names of what `fun` takes, and their kinds; none if it has no signature."""
    try:
        return {name: parameter.kind for name, parameter in inspect.signature(fun).parameters.items()}
    except (TypeError, ValueError):
        return {}


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
        raise OptionError(message(f"remat: prevent_cse={shown(given)} does not exist.", [], _BARRIERS))
    prefix = (tuple(given), kwargs and True) if kwargs else (tuple(given), {})
    try:
        flags = jax.tree.leaves(jax.tree.broadcast(prefix, (args, kwargs)))
    except ValueError as error:
        raise OptionError(
            message(
                f"remat: prevent_cse={shown(given)} does not fit the arguments of the call.",
                [("positional arguments", str(len(args))), ("JAX says", str(error).partition("\n")[0])],
                _BARRIERS,
            )
        ) from None
    return tuple(bool(flag) for flag, one in zip(flags, array, strict=True) if one)


_BARRIERS = "give True, False, None, or one of them per argument."
