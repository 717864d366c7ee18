"""The public functions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from roundpipe_core import OptionError, layer_scope
from roundpipe_core._errors import shown
from roundpipe_core._phase import AUDIT, OFF, RECOMPUTE, Phase, open_slot, thread
from roundpipe_core._slots import Slot, label_of

from . import _compile
from ._auto import watching
from ._before import Before
from ._contexts import region_of
from ._decisions import as_decisions
from ._errors import given_no_function, no_option_of_checkpoint, run_lazily, wrong_option
from ._frames import Frame, Options
from ._inputs import line_up, opened
from ._matching import REGION
from ._modes import own_generators
from ._offload import Offload
from ._reentrant import reentrant
from ._run import TorchRun
from ._state import Generators, generators_of
from ._torchs import innermost
from ._transforms import batches_around, transformed

__all__ = ["checkpoint", "checkpoint_sequential", "options_from", "refuse_no_flags", "run_region"]

_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
_PLAIN, _WITHOUT_RNG = Options(), Options(preserve_rng_state=False)
_TO_HOST = Offload()


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = False,
    context_fn: Callable[[], _Contexts] = torch_checkpoint.noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Call `function` without keeping what it computes inside; backward runs it again, with the decisions it saved.

    >>> import torch
    >>> from roundpipe_torch import checkpoint, save_for_recompute
    >>> def layer(x):
    ...     top, = save_for_recompute(x.detach().argmax(-1, keepdim=True))
    ...     return x.exp().gather(-1, top)
    >>> x = torch.tensor([[1.0, 3.0], [2.0, 0.0]], requires_grad=True)
    >>> checkpoint(layer, x).sum().backward()
    >>> x.grad.count_nonzero().item()
    2

    Takes the place of `torch.utils.checkpoint.checkpoint` wherever that can be passed; the keywords are the same.

    Args:
        function: a function or module. Saves decisions by `save_for_recompute` and its kin. Left out, what is returned
            is a decorator, as of torch 2.14: `@checkpoint(preserve_rng_state=False)`.
        *args: its arguments, as are all other keywords. Tensors in lists, tuples and dicts are treated like any others.
        use_reentrant: True for the second engine, which runs the forward without a graph and takes the gradient from
            the recompute's own. Any difference between the phases is then legal, but second derivatives are not; nor
            is `torch.autograd.grad` if a closure gives the layer a tensor that is no leaf. None means False.
        context_fn: gives two context managers, for the forward and for each recompute.
        determinism_check: "default" compares shape, dtype and device of what is matched; "none" does not.
        debug: error messages give the line where each tensor was saved.
        early_stop: end the recompute when everything needed is there.
        preserve_rng_state: let the recompute draw the random numbers of the forward, on all devices of the arguments
            and of the module's parameters.
        respect_saved_tensors_hooks: what a selective policy of `context_fn` keeps goes through the hooks for saved
            tensors that are around the call. True needs torch 2.14. None means False.

    Returns:
        What `function` returns.

    Raises:
        OptionError: an option has a value it does not take.
        CheckpointMismatchError: from backward, if the phases saved different tensors (R10).
        MutationError: from backward, if an input was changed in place after the forward.

    Implements R1, R7 to R11.
    """
    if function is None:
        options = {
            "use_reentrant": use_reentrant,
            "context_fn": context_fn,
            "determinism_check": determinism_check,
            "debug": debug,
            "early_stop": early_stop,
            "preserve_rng_state": preserve_rng_state,
            "respect_saved_tensors_hooks": respect_saved_tensors_hooks,
        }
        return _decorator(options, kwargs)
    if torch.compiler.is_dynamo_compiling():  # pragma: no cover - read by the compiler, which runs it itself
        given = {"context_fn": context_fn, "determinism_check": determinism_check}
        return _compile.region(function, args, kwargs, given)
    if (
        context_fn is torch_checkpoint.noop_context_fn
        and determinism_check == "default"
        and early_stop
        and not debug
        and torch_checkpoint._enable_checkpoint_early_stop is None
        and torch_checkpoint._checkpoint_debug_enabled is None
    ):
        chosen = _PLAIN if preserve_rng_state else _WITHOUT_RNG
        if use_reentrant and use_reentrant is not True:
            refuse_no_flags(function, {"use_reentrant": use_reentrant})  # type: ignore[unreachable]
        return run_region(function, args, kwargs, chosen, use_reentrant or False)
    given = {"use_reentrant": use_reentrant, "debug": debug, "early_stop": early_stop, "context_fn": context_fn}
    refuse_no_flags(function, given)
    chosen = options_from(
        function,
        context_fn=context_fn,
        determinism_check=determinism_check,
        debug=debug,
        early_stop=early_stop,
        preserve_rng_state=preserve_rng_state,
    )
    if chosen.contexts is not None and respect_saved_tensors_hooks is not None:
        chosen = _respecting(function, chosen, respect_saved_tensors_hooks)
    return run_region(function, args, kwargs, chosen, bool(use_reentrant))


def _decorator(options: dict[str, Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    if kwargs:
        what = f"checkpoint has no function to call with {', '.join(kwargs)}."
        raise wrong_option(checkpoint, what, "pass the function first: checkpoint(function, ...).")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(function, *args, **options, **kwargs)

        return checkpointed

    return decorate


def _respecting(target: Any, options: Options, respect: bool) -> Options:
    """`options` whose selective policy takes note of the hooks for saved tensors around the call, or does not."""
    selective: Any = options.contexts and options.contexts[0]
    if hasattr(selective, "respect_saved_tensors_hooks"):
        selective.respect_saved_tensors_hooks = respect
        return options._replace(respects_hooks=respect)
    if respect and isinstance(selective, torch_checkpoint._CachingTorchDispatchMode):
        what = "respect_saved_tensors_hooks=True needs torch 2.14 or newer."
        raise wrong_option(target, what, "leave it out: what the policy keeps stays on its device.")
    return options


def options_from(
    target: Any,
    *,
    context_fn: Callable[[], _Contexts] = torch_checkpoint.noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    label: str | None = None,
    verify: str = "off",
    auto: Any = False,
    offload: str | Offload | None = None,
) -> Options:
    """Options for one call, checked, with torch's own overrides (`set_checkpoint_early_stop`, ...) applied."""
    _one_of(target, "determinism_check", determinism_check, ("default", "none"))
    _one_of(target, "verify", verify, ("off", "warn", "raise"))
    if label is not None and not isinstance(label, str):
        raise wrong_option(target, f"label must be a string, not {label!r}.", 'name the layer, as in label="block 3".')
    if not (offload is None or offload == "cpu" or isinstance(offload, Offload)):
        raise wrong_option(
            target,
            f'offload must be "cpu", an Offload or None, not {offload!r}.',
            'pass offload="cpu", or Offload(inputs=True, ...) to say what goes to the host.',
        )
    stop, more = _overrides()
    contexts = None if context_fn is torch_checkpoint.noop_context_fn else _both(target, context_fn())
    return Options(
        label=label,
        preserve_rng_state=preserve_rng_state,
        contexts=contexts,
        compare=determinism_check == "default",
        early_stop=early_stop if stop is None else stop,
        debug=debug if more is None else more,
        verify=verify,
        auto=as_decisions(target, auto),
        offload=_TO_HOST if isinstance(offload, str) else offload,
    )


def refuse_no_flags(target: Any, options: Mapping[str, Any]) -> None:
    """Refuse a text or a list where True or False is meant: any would be true, "no" too."""
    for name in ("use_reentrant", "debug", "early_stop", "preserve_rng_state"):
        value = options.get(name)
        if not hasattr(value, "__bool__"):
            raise wrong_option(
                target, f"{name} must be True or False, not {shown(value)}.", f"pass {name}=True or {name}=False."
            )
    make = options.get("context_fn")
    if make is not None and not callable(make):
        raise wrong_option(
            target,
            f"context_fn must be a function, not {shown(make)}.",
            "pass one that gives two contexts, for the forward and for the recompute.",
        )


def _both(target: Any, given: Any) -> _Contexts:
    """What context_fn gave: two contexts."""
    if isinstance(given, (tuple, list)) and [hasattr(type(one), "__exit__") for one in given] == [True, True]:
        return given[0], given[1]
    raise wrong_option(
        target,
        f"context_fn gave {shown(given)}, not two contexts.",
        "return two from it, for the forward and for the recompute.",
    )


def _overrides() -> tuple[bool | None, bool | None]:
    stop: bool | None = torch_checkpoint._enable_checkpoint_early_stop
    debug: bool | None = torch_checkpoint._checkpoint_debug_enabled
    return stop, debug


def _one_of(target: Any, name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        what = f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}."
        raise wrong_option(target, what, _WAYS_OUT[name])


_WAYS_OUT = {
    "determinism_check": "pass determinism_check='none' to compare nothing, or leave it out.",
    "verify": "pass verify='warn' to be told of decisions that change, verify='raise' to have an error.",
}


def run_region(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, use_reentrant: bool
) -> Any:
    """Run `function` as a region under `options`."""
    outer = thread.run
    hooks = innermost(False)
    around = None if hooks is None else region_of(hooks, outer)
    if around is not None:
        try:
            thread.run = around
            return run_region(function, args, kwargs, options, use_reentrant)
        finally:
            thread.run = outer
    tracked = torch.is_grad_enabled()
    if not tracked and (outer is None or outer.phase is OFF):
        return function(*args, **kwargs)  # R2: no backward will come
    if torch.compiler._is_exporting_flag or torch._C._get_tracing_state() is not None:
        return function(*args, **kwargs)  # an exported or traced program has the layer alone
    if type(function) is functools.partial and function.keywords:
        function, args, kwargs = opened(function, args, kwargs)
    phase, slot = open_slot(options.label or function)
    batches = batches_around(slot.label, use_reentrant and tracked) if transformed() is not None else ()
    if outer is not None or options.auto is not None:
        function = watching(function, options.auto, outer)
    if slot.rows is not None:
        line_up(slot, args, kwargs)
    before = Before()
    try:
        if not tracked or phase is AUDIT:
            outputs = _run_untracked(function, args, kwargs, phase, slot, options)
        elif use_reentrant:
            outputs = reentrant(function, args, kwargs, phase, slot, options)
        else:
            outputs = Frame(function, args, kwargs, slot, options, batches).forward(phase, args, kwargs)
    except BaseException as error:
        before.restore()
        if isinstance(error, TypeError):
            _explain(function, kwargs, error)
        raise
    if type(outputs) in _LAZY:
        raise _never_run(slot.label, outputs)
    if outer is not None:
        outer.consulted(REGION)  # inside, the phases may have run different code
    return outputs


def _explain(function: Any, kwargs: dict[str, Any], error: TypeError) -> None:
    """Say what is wrong where a region's function could not be called as it was to be."""
    if not callable(function):
        raise given_no_function(function) from error
    for name in _OF_REMAT & kwargs.keys():
        if f"unexpected keyword argument {name!r}" in str(error):
            raise no_option_of_checkpoint(function, name) from error


def _never_run(layer: str, outputs: Any) -> OptionError:
    if isinstance(outputs, CoroutineType):
        outputs.close()  # nobody can wait for it now
    return run_lazily(layer, outputs)


_OF_REMAT = frozenset({"auto", "label", "offload", "verify"})
_LAZY = frozenset({GeneratorType, CoroutineType, AsyncGeneratorType})


def _run_untracked(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    phase: Phase,
    slot: Slot,
    options: Options,
) -> Any:
    """A region without a graph of its own inside one that will be recomputed (R8)."""
    generators = None
    if options.preserve_rng_state:
        values = (*args, *kwargs.values())
        generators = Generators(generators_of(function, values), own_generators(function, values))
    outer = thread.run
    run = TorchRun(phase, slot, None, generators, outer)
    try:
        thread.run = run
        with contextlib.nullcontext() if options.contexts is None else options.contexts[phase is RECOMPUTE]:
            return function(*args, **kwargs)
    finally:
        thread.run = outer
        if outer is not None:
            outer.flips += run.flips


def checkpoint_sequential(
    functions: torch.nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,  # noqa: A002 - torch's name
    use_reentrant: bool | None = False,
    *,
    preserve_rng_state: bool = True,
) -> Any:
    """Run layers one after another, in `segments` checkpointed parts. Each layer has slots of its own.

    >>> import torch
    >>> from roundpipe_torch import checkpoint_sequential
    >>> layers = [torch.nn.Linear(4, 4) for _ in range(6)]
    >>> checkpoint_sequential(layers, 3, torch.ones(2, 4)).shape
    torch.Size([2, 4])

    Args:
        functions: a `torch.nn.Sequential`, or functions and modules of one argument.
        segments: number of parts, 1 to `len(functions)`. As in torch the last one is not checkpointed.
        input: what the first layer gets.
        use_reentrant: see `checkpoint`.
        preserve_rng_state: see `checkpoint`.

    Raises:
        OptionError: `segments` is out of range.

    Implements R4: a layer here is one of `functions`.
    """
    layers: list[Any] = list(functions)
    number: Any = segments
    if not isinstance(number, int) or not 1 <= number <= max(len(layers), 1):
        raise wrong_option(
            functions,
            f"segments must be from 1 to the number of layers ({len(layers)}), not {segments!r}.",
            "pass fewer segments, or more layers.",
        )
    size = len(layers) // segments
    cut = size * (segments - 1)
    for start in range(0, cut, size or 1):
        input = checkpoint(  # noqa: A001
            _Chain(layers, start, start + size),
            input,
            use_reentrant=use_reentrant,
            preserve_rng_state=preserve_rng_state,
        )
    return _Chain(layers, cut, len(layers))(input)


class _Chain:
    """Some of the layers, in a row, each a scope."""

    __slots__ = ("_layers", "_start")
    __qualname__ = "checkpoint_sequential"

    def __init__(self, layers: list[Callable[..., Any]], start: int, end: int) -> None:
        self._layers, self._start = layers[start:end], start

    def __call__(self, value: Any) -> Any:
        for n, layer in enumerate(self._layers, self._start):
            with layer_scope(f"{n} {label_of(layer)}"):
                value = layer(value)
        return value
