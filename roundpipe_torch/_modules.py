"""remat: a function or module that checkpoints itself."""

from __future__ import annotations

import difflib
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from roundpipe_core._slots import AutoLabel

from ._checkpoint import options_from, run_region
from ._decisions import as_decisions
from ._errors import wrong_option

__all__ = ["call", "checked", "remat"]

T = TypeVar("T", bound=Callable[..., Any])
_OPTIONS = (*list(inspect.signature(options_from).parameters)[1:], "use_reentrant")


@overload
def remat(target: T, **options: Any) -> T: ...
@overload
def remat(target: None = None, **options: Any) -> Callable[[T], T]: ...
def remat(target: Any = None, **options: Any) -> Any:
    """Give a function or module that checkpoints every call of itself.

    >>> import torch
    >>> from roundpipe_torch import remat
    >>> block = remat(torch.nn.Linear(4, 4), label="block 0")
    >>> block(torch.ones(2, 4)).shape, sorted(block.state_dict())
    (torch.Size([2, 4]), ['bias', 'weight'])
    >>> @remat
    ... def layer(x):
    ...     return x.exp().sin()

    Args:
        target: a function, a module, or left out to decorate with options: ``@remat(label="moe")``. A module comes back
            as another object over the same parameters, buffers, submodules, hooks and attributes; `target` itself stays
            as it was. Its `state_dict`, names, attributes, copies and pickles are those of the original.
        **options: those of `checkpoint`, and
            ``label``: what messages and reports call the layer;
            ``verify``: "warn" or "raise" lets each first recompute decide once more and compares the result with what
            was saved, and the outputs of both phases; it costs a further run of the layer, a copy of its outputs, and
            on an accelerator a wait for it. "off" is the default;
            ``auto``: True saves and repeats the decisions of code that nobody can edit: the indices of `topk`, `sort`
            and their kin, `nonzero`, `multinomial`, `item`, masks that select rows, and so on. A collection names
            further operations (`torch.cumsum`, `torch.ops.mylib.route`) or functions that decide.

    Returns:
        A function of the same signature, or a module of a subclass of the same class.

    Raises:
        OptionError: unknown option, bad value, or `target` is not callable.
    """
    if target is None:
        return functools.partial(remat, **options)
    options = checked(target, options)
    if isinstance(target, torch.nn.Module):
        return _remat_module(target, options)

    @functools.wraps(target, updated=())
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return call(target, options, args, kwargs)

    return checkpointed


def call(function: Callable[..., Any], options: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `function` as a region, under options of remat."""
    rest = dict(options)
    use_reentrant = bool(rest.pop("use_reentrant", False))
    return run_region(function, args, kwargs, options_from(function, **rest), use_reentrant)


def checked(target: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options of remat, in the form that a call takes."""
    for name in options:
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, _OPTIONS, 1)
            raise wrong_option(
                target,
                f"remat has no option {name!r}.",
                f"did you mean {near[0]!r}?" if near else "leave it out.",
                ("options", ", ".join(sorted(_OPTIONS))),
            )
    if isinstance(target, type) or not callable(target):
        raise wrong_option(
            target,
            f"remat takes a function or a module object, not {target!r}.",
            "pass an instance: remat(Layer(...)).",
        )
    if "auto" in options:
        options = {**options, "auto": as_decisions(target, options["auto"])}
    options_from(
        target, **{name: value for name, value in options.items() if name not in ("use_reentrant", "context_fn")}
    )
    return options


class _Forward:
    """The `forward` of a checkpointing module: the original one, as a region.

    A data descriptor, so that a `forward` put on the instance (as Accelerate does) is checkpointed too.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            return _forward(module, *args, **kwargs)

        self._forward = forward

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return self._forward if module is None else types.MethodType(self._forward, module)

    def __set__(self, module: Any, forward: Callable[..., Any]) -> None:
        module.__dict__["forward"] = forward


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    cls = type(module)
    inner = module.__dict__.get("forward") or functools.partial(cls._remat_original.forward, module)
    return call(inner, {"label": AutoLabel(cls.__qualname__), **cls._remat_options}, args, kwargs)


def _remat_module(module: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
    remade = _make(_subclass(type(module), options))
    remade.__dict__ = module.__dict__  # one state: what is set on either shows on both
    return remade


def _make(cls: type[torch.nn.Module]) -> torch.nn.Module:
    return cls.__new__(cls)


def _rebuild(original: type[torch.nn.Module], options: dict[str, Any]) -> torch.nn.Module:
    return _make(_subclass(original, options))


def _subclass(original: type[torch.nn.Module], options: dict[str, Any]) -> type[torch.nn.Module]:
    original = getattr(original, "_remat_original", original)  # remat of a remat replaces the options

    def reduce(self: torch.nn.Module, protocol: Any) -> Any:
        return _rebuild, (original, options), self.__dict__

    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": reduce,
        "_remat_original": original,
        "_remat_options": options,
        "forward": _Forward(original.forward),
    }
    return type(original.__name__, (original,), names)
