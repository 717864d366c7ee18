"""Hugging Face transformers: gradient checkpointing whose routers decide once."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from roundpipe_core._phase import thread
from roundpipe_core._replay import TapeRun
from roundpipe_core._slots import label_of
from roundpipe_torch._checkpoint import checkpoint as our_checkpoint
from roundpipe_torch._errors import wrong_option
from roundpipe_torch._modules import call, checked
from roundpipe_torch._uncompiled import run_uncompiled

__all__ = ["disable", "enable"]

M = TypeVar("M", bound=torch.nn.Module)
_OPTIONS = "_roundpipe_options"
_TORCHS = frozenset(inspect.signature(our_checkpoint).parameters) - {"function", "args", "kwargs"}


def enable(model: M, *, every_n_layers: int | None = None, **options: Any) -> M:
    """Checkpoint the layers of a Hugging Face model, with decisions made once: routers, `nonzero`, host syncs.

    >>> import transformers
    >>> from roundpipe_torch.integrations.transformers import enable
    >>> config = transformers.MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...     num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    >>> model = enable(transformers.MixtralForCausalLM(config)).train()
    >>> model.is_activation_checkpointing
    True

    Stays in force until `disable(model)`: a later `model.activation_checkpointing_enable()`, also one by `Trainer`,
    checkpoints in this way too, with the keywords that it was given. The model's code, configuration and weights are
    as they were, so saving, loading, copying and generating are too.

    Args:
        model: a `PreTrainedModel` that supports gradient checkpointing, or one that is wrapped (PEFT, DDP, compiled).
        every_n_layers: checkpoint one layer in so many. All by default.
        **options: those of `remat`. `auto` is True unless given: the decisions of the model's code are saved without a
            change to it. `label` is the name of each layer in the model.

    Returns:
        `model`.

    Raises:
        OptionError: no part of `model` supports gradient checkpointing, unknown option, bad value.

    Implements R8, R10.
    """
    if every_n_layers is not None and (type(every_n_layers) is not int or every_n_layers < 1):
        raise wrong_option(model, f"every_n_layers must be 1 or more, not {every_n_layers!r}.", "give an integer.")
    options = checked(model, {"auto": True, **options})
    owners = list(_owners(model))
    if not owners:
        raise wrong_option(
            model, "this is no Hugging Face model that supports gradient checkpointing.", "use remat on its layers."
        )
    _install()
    for owner in _everyone(model):
        owner.__dict__[_OPTIONS] = options
    for owner in owners:
        _switch_on(owner, {} if every_n_layers is None else {"every_n_layers": every_n_layers})
        if not _take_over(owner, options):
            raise wrong_option(
                owner,
                "this model checkpoints in a way of its own, not by the function that transformers gives its layers.",
                "use remat on its layers.",
            )
    return model


def disable(model: M) -> M:
    """End what `enable` began: no checkpointing, and a later one is torch's.

    >>> import torch
    >>> from roundpipe_torch.integrations.transformers import disable
    >>> disable(torch.nn.Linear(2, 2))  # nothing to do
    Linear(in_features=2, out_features=2, bias=True)

    Args:
        model: what `enable` got or gave.

    Returns:
        `model`.
    """
    for owner in _everyone(model):
        if owner.__dict__.pop(_OPTIONS, None) is not None and owner.supports_gradient_checkpointing:
            if hasattr(owner, "activation_checkpointing_disable"):
                owner.activation_checkpointing_disable()
            else:  # transformers 4
                owner.gradient_checkpointing_disable()
    return model


class LayerCheckpoint:
    """What a layer calls to be checkpointed, in place of torch's function. Copied and pickled with the layer."""

    def __init__(self, name: str, options: dict[str, Any], offload: str | None = None) -> None:
        self.name, self.options, self.offload = name, options, offload

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in _TORCHS & kwargs.keys()}
        options = {"label": self._label(function), **given, **self.options}
        if self.offload is None:
            return call(function, options, args, kwargs)
        with save_on_cpu(pin_memory=self.offload != "cpu", device_type=self.offload):
            return call(function, options, args, kwargs)

    def _label(self, function: Callable[..., Any]) -> str:
        layer = function.args[0] if isinstance(function, functools.partial) and function.args else None
        if isinstance(layer, torch.nn.Module) and layer.__dict__.get("_gradient_checkpointing_func") is self:
            return f"{self.name} ({type(layer).__name__})"
        return f"{self.name}: {label_of(function)}"

    def __reduce__(self) -> Any:
        return _layer_checkpoint, (self.name, self.options, self.offload)


def _layer_checkpoint(name: str, options: dict[str, Any], offload: str | None) -> LayerCheckpoint:
    _install()  # in the process that reads the pickle too
    return LayerCheckpoint(name, options, offload)


def _everyone(model: torch.nn.Module) -> Iterator[Any]:
    """The Hugging Face models in `model`, itself included."""
    from transformers import PreTrainedModel

    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


def _owners(model: torch.nn.Module) -> Iterator[Any]:
    """The outermost of those that support gradient checkpointing."""
    inside: set[int] = set()
    for owner in _everyone(model):
        if owner.supports_gradient_checkpointing and id(owner) not in inside:
            inside |= {id(module) for module in owner.modules()}
            yield owner


def _switch_on(owner: Any, arguments: dict[str, Any]) -> None:
    hooked = bool(getattr(owner, "_require_grads_hooks", None) or getattr(owner, "_require_grads_hook", None))
    if hasattr(owner, "activation_checkpointing_enable"):
        owner.activation_checkpointing_enable(**arguments)
    else:  # transformers 4
        owner.gradient_checkpointing_enable({"use_reentrant": False}, **arguments)
    if not hooked and hasattr(owner, "_require_grads_hook"):
        # Regions here train weights behind inputs without gradient; the hooks only keep the model from being pickled.
        owner.disable_input_require_grads()


def _take_over(owner: torch.nn.Module, options: dict[str, Any]) -> bool:
    """Replace torch's function in every layer; whether there was one."""
    found = False
    for name, module in owner.named_modules():
        given = module.__dict__.get("_gradient_checkpointing_func")
        if given is None:
            continue
        found = True
        if not isinstance(given, LayerCheckpoint):
            module._gradient_checkpointing_func = _like(owner, given, name or type(owner).__name__, options)
    return found


def _like(owner: torch.nn.Module, given: Any, name: str, options: dict[str, Any]) -> LayerCheckpoint:
    """Our function for a layer that was given one of torch's, with the keywords of that."""
    keywords = given.keywords if isinstance(given, functools.partial) else {}
    function = given.func if isinstance(given, functools.partial) else given
    if function is torch_checkpoint:
        return LayerCheckpoint(name, {**keywords, **options})
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "device_type" in cells:  # transformers' `offload=True`: torch's function under save_on_cpu
        return LayerCheckpoint(name, {**keywords, **options}, cells["device_type"].cell_contents)
    raise wrong_option(
        owner,
        f"the layers are to be checkpointed by {label_of(function)}, which is not torch's function.",
        "leave that function out, or call disable(model).",
    )


@functools.cache
def _install() -> None:
    """Let models that are enabled stay so when checkpointing is switched on again, by `Trainer` for instance."""
    from transformers import PreTrainedModel

    original = PreTrainedModel._set_gradient_checkpointing

    @functools.wraps(original)
    def set_gradient_checkpointing(self: Any, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        original(self, enable, *args, **kwargs)
        options = self.__dict__.get(_OPTIONS)
        if enable and options is not None:
            _take_over(self, options)

    PreTrainedModel._set_gradient_checkpointing = set_gradient_checkpointing  # type: ignore[method-assign]
    _let_tapes_see_layers()


def _let_tapes_see_layers() -> None:
    """Let layers be regions in evaluation and without gradient too, where a tape is recorded or replayed (R13)."""
    layers: Any = importlib.import_module("transformers.modeling_layers").GradientCheckpointingLayer
    original = layers.__call__

    @functools.wraps(original)
    def call_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if thread.run is None or not isinstance(thread.run, TapeRun) or (self.training and torch.is_grad_enabled()):
            return original(self, *args, **kwargs)
        region = self.__dict__.get("_gradient_checkpointing_func")
        if not isinstance(region, LayerCheckpoint) or not self.gradient_checkpointing:
            return original(self, *args, **kwargs)
        return region(functools.partial(original, self, **kwargs), *args)

    layers.__call__ = call_layer


run_uncompiled(__name__.partition(".")[0])
