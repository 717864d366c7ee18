"""remat: a function or module that checkpoints itself."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from roundpipe_core._errors import shown
from roundpipe_core._slots import AutoLabel

from . import _compile
from ._checkpoint import options_from, refuse_no_flags, run_region
from ._decisions import as_decisions
from ._errors import wrong_option

__all__ = ["call", "checked", "remat"]

T = TypeVar("T", bound=Callable[..., Any])
_NO_FORWARD = torch.nn.Module.forward
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
            ``offload``: "cpu" keeps what the layer saves in host memory until backward, an `Offload` says more.

    Returns:
        A function of the same signature, or a module of a subclass of the same class.

    Raises:
        OptionError: unknown option, bad value, or `target` is not callable.
    """
    if target is None:
        return functools.partial(remat, **options)
    options = checked(target, options)
    if isinstance(target, torch.nn.Module):
        if getattr(target.forward, "__func__", None) is _NO_FORWARD:
            raise wrong_option(
                target,
                f"remat takes a layer, and {type(target).__qualname__} has no forward.",
                "remat the modules in it: torch.nn.ModuleList(map(remat, modules)).",
            )
        return _remat_module(target, options)

    @functools.wraps(target, updated=())
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return call(target, options, args, kwargs)

    return checkpointed


def call(function: Callable[..., Any], options: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `function` as a region, under options of remat."""
    if torch.compiler.is_dynamo_compiling():  # pragma: no cover - read by the compiler, which runs it itself
        return _compile.region(function, args, kwargs, options)
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
            f"remat takes a function or a module object, not {shown(target)}.",
            "pass an instance: remat(Layer(...)), and call what that gives: remat(layer)(x).",
        )
    if "auto" in options:
        options = {**options, "auto": as_decisions(target, options["auto"])}
    refuse_no_flags(target, options)
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
            return _forward(module, functools.partial(original, module), args, kwargs)

        self._forward = forward

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self._forward
        replaced = module.__dict__.get("forward")
        if replaced is not None:
            return _Replaced(module, replaced)
        if torch.compiler.is_dynamo_compiling():
            return functools.partial(self._forward, module)
        return types.MethodType(self._forward, module)

    def __set__(self, module: Any, forward: Callable[..., Any]) -> None:
        module.__dict__["forward"] = forward

    def __delete__(self, module: Any) -> None:
        del module.__dict__["forward"]


class _Replaced:
    """A `forward` that was put on a module, as a region. Looks like a method, of the signature of that `forward`."""

    def __init__(self, module: Any, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self.__self__, self._forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _forward(self.__self__, self._forward, args, kwargs)

    @property
    def __func__(self) -> Callable[..., Any]:
        forward = self._forward
        return lambda module, *args, **kwargs: _forward(module, forward, args, kwargs)


def _forward(module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "forward" in module.__dict__:
        if id(module) in _inside.modules:  # called by the `forward` that took its place: a part of that region
            return forward(*args, **kwargs)
        forward = functools.partial(_run_inside, module, forward)
    cls = type(module)
    label = cls.__qualname__ if torch.compiler.is_dynamo_compiling() else AutoLabel(cls.__qualname__)
    return call(forward, {"label": label, **cls._remat_options}, args, kwargs)


class _Inside(threading.local):
    """The modules whose replaced `forward` this thread is running, by identity."""

    def __init__(self) -> None:
        self.modules: set[int] = set()


_inside = _Inside()


def _run_inside(module: Any, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    _inside.modules.add(id(module))
    try:
        return forward(*args, **kwargs)
    finally:
        _inside.modules.discard(id(module))


def _remat_module(module: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
    remade = _make(_subclass(type(module), options))
    remade.__dict__ = module.__dict__  # one state: what is set on either shows on both
    object.__setattr__(remade, "_remat_plain", module)  # some hooks know it, weakly
    states = sys.modules.get("torch.distributed._composable_state")
    state = states._get_module_state(module) if states is not None else None
    if states is not None and state is not None:  # fully_shard finds what it did to a module by the object
        states._insert_module_state(remade, state)
    return remade


def _make(cls: type[torch.nn.Module]) -> torch.nn.Module:
    return object.__new__(cls)  # a `__new__` of fully_shard's would make the class it was given


def _hooks_of(module: torch.nn.Module) -> dict[str, Any]:
    """The hooks that know their module, for a copy of `module`, whose copied hooks shall know the copy."""
    hooks: Any = module._load_state_dict_pre_hooks
    own = type(hooks)(hooks)
    for key, hook in hooks.items():
        if getattr(hook, "with_module", False):
            own[key] = type(hook)(hook.hook, module)
    return {"_load_state_dict_pre_hooks": own}


def _rebuild(base: type[torch.nn.Module], options: dict[str, Any]) -> torch.nn.Module:
    return _make(_subclass(base, options))


def _subclass(cls: type[torch.nn.Module], options: dict[str, Any]) -> type[torch.nn.Module]:
    base = cls.__dict__.get("_remat_base", cls)  # remat of a remat replaces the options
    original = getattr(base, "_remat_original", base)  # others, as fully_shard, derive classes from a remat's

    def reduce(self: torch.nn.Module, protocol: Any) -> Any:
        return _rebuild, (base, options), {**self.__dict__, **_hooks_of(self)}

    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": reduce,
        "__slots__": ("_remat_plain",),
        "_remat_base": base,
        "_remat_original": original,
        "_remat_options": options,
        "forward": _Forward(original.forward),
    }
    return type(base.__name__, (base,), names)
