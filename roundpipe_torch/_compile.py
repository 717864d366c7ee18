"""Regions in code that torch.compile traces.

Only the forward is traced, once; the compiler itself makes the recompute of it. So there is one phase here, a save is
a mark on what was decided (`_decided`), and a slot is whatever the compiled forward hands to the compiled backward.

Where a region outside of the graph runs the traced code, the phase is not known before the graph runs. There the graph
is split, and these functions run between its parts as they always do.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils import checkpoint as torch_checkpoint

from roundpipe_core._phase import Phase, thread, traced_by
from roundpipe_core._slots import label_of

from . import _tracing
from ._decided import decided

__all__ = ["contexts", "region"]

T = TypeVar("T")


def region(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]) -> Any:
    """Run `function` as a region of the graph that is being traced."""
    if not _tracing.in_region():
        if _ruled_from_outside("a checkpointed layer"):
            return None  # not reached
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)  # R2: no backward will come
    for name, value in options.items():
        if name not in _WITHOUT_MEANING and value not in _NOT_ASKED_FOR:
            _tracing.refuse(f"the option {name}={value!r} cannot be honoured in a compiled graph.", _TURN_OFF)
    if options.get("determinism_check", "default") not in ("default", "none"):
        _tracing.refuse_option(
            "determinism_check must be one of 'default', 'none'.", "pass determinism_check='default'."
        )
    label = options.get("label") or label_of(function)

    def run() -> Any:
        _tracing.begin(label)
        return function(*args, **kwargs)

    context_fn = options.get("context_fn", torch_checkpoint.noop_context_fn)
    if context_fn is torch_checkpoint.noop_context_fn:
        return torch_checkpoint.checkpoint(run, use_reentrant=False)
    return torch_checkpoint.checkpoint(run, use_reentrant=False, context_fn=context_fn)


_WITHOUT_MEANING = (
    "label",
    "context_fn",
    "use_reentrant",
    "preserve_rng_state",
    "determinism_check",
    "debug",
    "early_stop",
)
_NOT_ASKED_FOR = (None, False, "off")
_TURN_OFF = "leave it out, or call the layer outside of what torch.compile compiles."


def contexts() -> tuple[Any, Any]:
    """What `recompute_contexts` gives to torch's own checkpoint where that is compiled."""
    return torch_checkpoint.create_selective_checkpoint_contexts(_all_again)  # type: ignore[no-untyped-call, no-any-return]


def _all_again(context: Any, operator: Any, *args: Any, **kwargs: Any) -> torch_checkpoint.CheckpointPolicy:
    return torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


def doing_recompute() -> bool:
    """R1: the forward is what is traced."""
    if not _tracing.in_region():
        _ruled_from_outside("doing_recompute()")
    return False


def get_recompute_data(name: str | None) -> tuple[Any, ...]:
    """R3."""
    if not _tracing.in_region():
        _ruled_from_outside("get_recompute_data()")
    _tracing.refuse_read()
    return ()  # not reached


def save_for_recompute(data: tuple[Any, ...], name: str | None) -> tuple[Any, ...]:
    """R2, R4, R5."""
    if not _tracing.in_region():
        _ruled_from_outside("save_for_recompute()")
    elif not _tracing.deciding():
        _tracing.note_save(name)
        _keep(data, "the unnamed slot" if name is None else f"slot {name!r}")
    return data


def recompute_once(function: Callable[[], T]) -> T:
    """R4."""
    if not _tracing.in_region():
        _ruled_from_outside("recompute_once()")
        with torch.no_grad():
            return function()
    _tracing.set_deciding(1)
    with torch.no_grad():
        value = function()
    _tracing.set_deciding(-1)
    if not _tracing.deciding():
        _keep((value,), "recompute_once")
    return value


def enter_scope(name: str) -> None:
    """R4."""
    if _tracing.in_region():
        _tracing.enter_scope(name)
    else:
        _ruled_from_outside("layer_scope()")


def exit_scope() -> None:
    """R4."""
    if _tracing.in_region():
        _tracing.exit_scope()


def _ruled_from_outside(what: str) -> bool:
    """Split the graph if a run outside of it has a say in what `what` does."""
    run = thread.run  # Dynamo guards on it
    if (run is None and _tracing.in_torchs()) or (run is not None and run.phase is not Phase.OFF):
        _tracing.split(what)
    return False


def _keep(data: tuple[Any, ...], key: str) -> None:
    tensors: list[torch.Tensor] = []
    numbers: list[Any] = []
    for n, item in enumerate(data):
        _collect(item, f"[{n}]", key, tensors, numbers)
    decided(tensors, numbers)


def _collect(value: Any, at: str, key: str, tensors: list[torch.Tensor], numbers: list[Any]) -> None:
    """Find the tensors and numbers in `value`."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            _tracing.refuse_gradient(at, key)
        tensors.append(value)
    elif isinstance(value, _CONSTANTS):
        pass
    elif isinstance(value, (int, float)):
        numbers.append(value)
    elif isinstance(value, dict):
        for name, item in value.items():
            _collect(item, f"{at}[{name!r}]", key, tensors, numbers)
    elif isinstance(value, (tuple, list, set, frozenset, collections.deque)):
        for n, item in enumerate(value):
            _collect(item, f"{at}[{n}]", key, tensors, numbers)
    elif type(value).__name__ != "ndarray" and dataclasses.is_dataclass(value):  # Dynamo cannot ask an ndarray
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name), f"{at}.{field.name}", key, tensors, numbers)
    else:
        _tracing.refuse_object(at, type(value).__name__)


_CONSTANTS = (bool, str, bytes, complex, type(None), range, enum.Enum, torch.dtype, torch.device, torch.layout)

traced_by(torch.compiler.is_dynamo_compiling, sys.modules[__name__])
