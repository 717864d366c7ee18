"""The arguments of a region, kept as autograd keeps saved tensors."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, TypeVar
from weakref import ref

import torch
from torch._functorch.autograd_function import (  # type: ignore[attr-defined]
    enable_single_level_autograd_function as _of_one_level,
)

from roundpipe_core import RoundPipeError
from roundpipe_core._backend import numpys
from roundpipe_core._slots import Slot
from roundpipe_core._trees import LEAF, Spec, flatten, unflatten

from ._errors import given_once, input_changed
from ._views import PLAIN, dress_of, dressed, version_of

__all__ = [
    "Inputs",
    "Original",
    "SavedTensor",
    "as_it_was",
    "as_now",
    "line_up",
    "opened",
    "repeated",
    "restored",
    "save_tensor",
    "tensors_in",
]

T = TypeVar("T")


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in `tree`, such as the arguments of a call."""
    leaves: list[Any] = []
    flatten(tree, leaves)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def line_up(slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell a slot that is on its way to or from a tape what its region was called with (R13)."""
    tensors = tensors_in((args, kwargs))
    devices = [tensor.device for tensor in tensors]
    device = next((device for device in devices if device.type != "cpu"), devices[0] if devices else None)
    slot.line_up([tuple(tensor.shape) for tensor in tensors], device)


def restored(slot: Slot, restore: Callable[[], T]) -> T:
    """What `restore` gives of the arguments that autograd keeps for the layer of `slot`."""
    try:
        return restore()
    except RoundPipeError:
        raise
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            raise input_changed(slot.label, error) from error
        if "unpacked once" in str(error):
            raise given_once(slot.label, error) from error
        raise


class _Array:
    """The values of a numpy array. It has no version counter that could tell of a write."""

    __slots__ = ("_values",)

    def __init__(self, array: Any) -> None:
        self._values = numpys.snapshot(array)

    def copy(self) -> Any:
        return numpys.restore(self._values)


class _Cache:
    """What a cache of transformers held. Layers put more into it."""

    __slots__ = ("_cache",)

    def __init__(self, cache: Any) -> None:
        self._cache = _with_own_containers(cache)

    def copy(self) -> Any:
        return _with_own_containers(self._cache)


def _with_own_containers(value: Any) -> Any:
    kind = type(value)
    if kind is list:
        return [*map(_with_own_containers, value)]
    if kind is dict:
        return {key: _with_own_containers(one) for key, one in value.items()}
    if not _is_cache(kind):
        return value
    new = copy.copy(value)
    vars(new).update({name: _with_own_containers(one) for name, one in vars(value).items()})
    return new


def _is_cache(kind: type) -> bool:
    return _CACHES in sys.modules and any(base.__module__ == _CACHES for base in kind.__mro__)


_CACHES = "transformers.cache_utils"


def opened(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A call of a partial function, where what it has by keyword and a layer may fill is among the arguments.

    Transformers passes all keyword arguments of a layer so.
    """
    given: Any = function
    filled = {name: value for name, value in given.keywords.items() if _may_be_filled(value)}
    if not filled:
        return function, args, kwargs
    rest = {name: value for name, value in given.keywords.items() if name not in filled}
    return partial(given.func, *given.args, **rest), args, {**filled, **kwargs}


def _may_be_filled(value: Any) -> bool:
    """Whether it is a container, other than of weights, or a cache."""
    if type(value) in _FILLED:
        return not any(map(_is_weight, value.values() if isinstance(value, dict) else value))
    return type(value) not in PLAIN and _is_cache(type(value))


def _is_weight(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad


_FILLED = frozenset({list, dict, set, deque, OrderedDict, defaultdict})


def as_now(leaf: Any) -> Any:
    """What to keep of an argument that is no tensor."""
    if numpys.owns(leaf):
        return _Array(leaf) if leaf.flags.writeable else leaf
    return _Cache(leaf) if _is_cache(type(leaf)) else leaf


def as_it_was(kept: Any) -> Any:
    """The argument that `kept` was made of."""
    return kept.copy() if type(kept) is _Array or type(kept) is _Cache else kept


class Inputs:
    """The arguments of a region.

    Tensors, wherever they sit, are kept as autograd keeps saved tensors: their version is checked, saved-tensor hooks
    around the region see them, and an outer region does not keep them alive.
    """

    __slots__ = ("_kept", "_names", "_originals", "_plain", "_positional", "_repeated", "_specs", "_trained")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], hooked: bool) -> None:
        """`hooked`: hooks for saved tensors are around, so that others will come in the place of these."""
        self._specs: tuple[Spec, ...] | None = None
        self._originals: list[Original | None] | None = None
        self._repeated: dict[int, int] = {}
        self._names, self._positional = tuple(kwargs), len(args)
        leaves: Sequence[Any] = (*args, *kwargs.values())
        self._plain = PLAIN.issuperset(map(type, leaves))  # no containers, and no tensors that hold others
        if self._plain:
            self._kept = [*map(save_tensor, leaves, repeat(False))]
            self._trained = [*map(_trained, leaves)]
            if hooked:
                self._originals, self._repeated = [*map(Original, leaves)], repeated(leaves)
            return
        opened: list[Any] = []
        specs = tuple(flatten(value, opened) for value in leaves)
        if any(spec is not LEAF for spec in specs):
            self._specs = specs
        self._kept = [save_tensor(leaf, False) if isinstance(leaf, torch.Tensor) else as_now(leaf) for leaf in opened]
        self._trained = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in opened]
        if hooked:
            self._originals = [Original(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in opened]
            self._repeated = repeated(opened)

    def restore(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments, in new containers."""
        if self._plain:
            leaves: list[Any] = [*map(SavedTensor.unpack, self._kept)]
            if [*map(_trained, leaves)] != self._trained:  # others have frozen one since, or begun to train it
                leaves = [*map(_with_gradient, leaves, self._trained)]
        else:
            leaves = [
                _with_gradient(leaf.unpack(), trained) if isinstance(leaf, SavedTensor) else as_it_was(leaf)
                for leaf, trained in zip(self._kept, self._trained, strict=True)
            ]
        if self._originals is not None:
            both = zip(self._originals, leaves, strict=True)
            leaves = [leaf if original is None else original.or_else(leaf) for original, leaf in both]
            for n, before in self._repeated.items():
                leaves[n] = leaves[before]
        if self._specs is not None:
            rest = iter(leaves)
            leaves = [unflatten(spec, rest) for spec in self._specs]
        if not self._names:
            return leaves, {}
        return leaves[: self._positional], dict(zip(self._names, leaves[self._positional :], strict=True))


class Original:
    """An argument, in whose place hooks or the second engine have another tensor.

    A recompute gets the very one where that can be: a layer may know it by identity, and a node keeps its gradient for
    one tensor (`retain_grad`).
    """

    __slots__ = ("_dress", "_reference", "_then", "is_leaf")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference, self._then, self._dress = ref(tensor), _traits(tensor), dress_of(tensor)
        self.is_leaf = tensor.is_leaf

    def alive(self) -> torch.Tensor | None:
        """It, if it is as it was."""
        tensor = self._reference()
        return tensor if tensor is not None and _traits(tensor) == self._then else None

    def dressed(self, other: torch.Tensor) -> torch.Tensor:
        """`other`, which stands in for it."""
        return dressed(other, self._dress)

    def or_else(self, other: torch.Tensor) -> torch.Tensor:
        """It, or else `other`."""
        alive = self.alive()
        return self.dressed(other) if alive is None else alive


def repeated(leaves: Sequence[Any]) -> dict[int, int]:
    """Which of these are the same tensor as one before, and which that is."""
    if len({*map(id, leaves)}) == len(leaves):
        return {}
    first: dict[int, int] = {}
    places = ((n, first.setdefault(id(leaf), n)) for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    return {n: before for n, before in places if before < n}


def _traits(tensor: torch.Tensor) -> tuple[bool, int, int]:
    try:
        memory = tensor.data_ptr()
    except torch.OutOfMemoryError:  # a RuntimeError too
        raise
    except (NotImplementedError, RuntimeError):  # a sparse one, or one that wraps others
        memory = 0
    return tensor.requires_grad, version_of(tensor), memory


_trained: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")


def _with_gradient(tensor: torch.Tensor, trained: bool) -> torch.Tensor:
    return tensor if tensor.requires_grad is trained else tensor.detach().requires_grad_(trained)


class _KeptByNode:
    """A saved tensor for torch versions whose `SavedTensor` Python cannot make: a node that saves it."""

    __slots__ = ("_output",)

    def __init__(self, tensor: torch.Tensor, is_output: bool) -> None:
        with torch.enable_grad(), _of_one_level():
            # Not in sight of torch, which asks an argument for a size that some have not; nor of a transform, which
            # would have the node made by another function than this.
            base: Any = super(torch.autograd.Function, _SaveOne)
            self._output = base.apply(_ANCHOR, [tensor])

    def unpack(self) -> torch.Tensor:
        saved: torch.Tensor = self._output.grad_fn.saved_tensors[0]
        return saved


class _SaveOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(*tensor)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing flows through a kept input")


_ANCHOR = torch.empty(0, requires_grad=True)  # for a node that is made whatever is saved in it

SavedTensor: Any
save_tensor: Callable[[torch.Tensor, bool], Any]
"""Keeps a tensor as autograd does. The second argument: whether the node that keeps it has made it."""
_make_saved_tensor: Any = getattr(torch._C._autograd, "_make_saved_tensor", None)
if _make_saved_tensor is None:  # pragma: no cover - older torch
    SavedTensor, save_tensor = _KeptByNode, _KeptByNode
else:
    SavedTensor, save_tensor = torch._C._autograd.SavedTensor, _make_saved_tensor
