"""Hooks on gradients that a region registers on tensors from before it: its arguments, weights, what its closure has.

What the forward registers there stays, and backward meets it. A recompute registers it once more, and then it would act
twice. So what a recompute has registered there is taken off again, and while it runs the forward's own rest: a layer
that differentiates inside itself meets each hook once, as its forward did.

A hook's key is its number among all, which tells when it was registered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ._inputs import tensors_in
from ._state import tensors_of

__all__ = [
    "Hooked",
    "Resting",
    "gradient_nodes",
    "hooked_since",
    "hooks_on",
    "is_hooked",
    "left_since",
    "now",
    "take_off",
]

_Hooks = MutableMapping[int, Callable[..., Any]]


class Hooked(NamedTuple):
    """A tensor's hooks, and which of them are new."""

    tensor: torch.Tensor | None
    is_leaf: bool
    hooks: _Hooks
    new: list[int]


def now() -> int:
    """The number of the next hook."""
    return RemovableHandle.next_id


def hooked_since(
    mark: int, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[Hooked]:
    """Those tensors that a call can reach on which hooks were registered since `mark`."""
    if now() == mark:
        return
    seen = set()
    for tensor, hooks in _hooks_before(function, args, kwargs):
        new = [key for key in hooks if key >= mark]
        if new and id(hooks) not in seen:
            seen.add(id(hooks))
            yield Hooked(tensor, tensor.is_leaf, hooks, new)


def left_since(mark: int, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Hooked]:
    """The same for one who outlives the tensors."""
    if now() == mark:
        return []
    return [found._replace(tensor=None) for found in hooked_since(mark, function, args, kwargs)]


def gradient_nodes(mark: int, function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """The nodes that take the gradients of the leaves which a call can reach, if hooks were registered since `mark`."""
    if now() == mark:
        return []
    reached = (tensor for tensor in _reached(function, args, {}) if tensor.requires_grad and tensor.is_leaf)
    return [*map(_taker, reached)]


def take_off(mark: int, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Take off the hooks that were registered since `mark` on tensors that a call can reach."""
    _pop([*hooked_since(mark, function, args, kwargs)])


def _pop(added: Iterable[Hooked], but: Collection[int] = ()) -> None:
    for again in added:
        for key in again.new:
            if key not in but:
                again.hooks.pop(key, None)


def is_hooked(tensor: torch.Tensor) -> bool:
    """Whether someone sees the gradient of `tensor`."""
    return bool(tensor.retains_grad) or any(True for _ in _hooks_of(tensor))


def _hooks_before(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, _Hooks]]:
    for tensor in _reached(function, args, kwargs):
        for hooks in (*_hooks_of(tensor), *_hooks_of_node(tensor)):
            yield tensor, hooks


def _reached(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [*tensors_in((tuple(args), kwargs)), *tensors_of(function, (*args, *kwargs.values()))]


def _hooks_of(tensor: torch.Tensor) -> Iterator[_Hooks]:
    with torch._C.DisableTorchFunctionSubclass():
        found = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    yield from (hooks for hooks in found if hooks)


def _hooks_of_node(tensor: torch.Tensor) -> Iterator[_Hooks]:
    """Those on the node that made it, or that takes its gradient. Only a handle knows where they are."""
    if not tensor.requires_grad:
        return
    yield from hooks_on(tensor.grad_fn or _taker(tensor))


def hooks_on(node: Any) -> Iterator[_Hooks]:
    """Those before it and after it."""
    for register in (node.register_prehook, node.register_hook):
        handle: Any = register(_nothing)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            yield hooks


def _taker(leaf: torch.Tensor) -> Any:
    """The node that takes the gradient of a leaf."""
    with torch.inference_mode(False):
        return get_gradient_edge(leaf).node


def _nothing(*gradients: Any) -> None:
    """A hook."""


class Resting:
    """While a recompute runs `function` again, let the hooks of its forward rest; then take off those of its own.

    A leaf may come as an alias, on which a hook has no effect. Then the forward's have to stay.
    """

    __slots__ = ("_before", "_call", "_forwards", "_mark")

    def __init__(
        self, forwards: Sequence[Hooked], function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self._forwards, self._call = forwards, (function, args, kwargs)
        self._before: list[tuple[_Hooks, _Hooks]] = []

    def __enter__(self) -> None:
        self._mark = now()
        if self._forwards:
            known = {id(hooks) for _, hooks in _hooks_before(*self._call)}
            self._before = [(hooked.hooks, {**hooked.hooks}) for hooked in self._forwards]
            self._mark = now()
            try:
                for hooked in self._forwards:
                    if not hooked.is_leaf or id(hooked.hooks) in known:
                        hooked.hooks.update((key, _nothing) for key in hooked.new if key in hooked.hooks)
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        if not self._forwards and now() == self._mark:
            return
        added = [*hooked_since(self._mark, *self._call)]
        taken = {key for hooks, then in self._before for key in _put_back(hooks, then, self._mark)}
        _pop(added, taken)


def _put_back(hooks: _Hooks, then: _Hooks, mark: int) -> list[int]:
    """Let `hooks` be what they were. Gives those that the recompute has registered in the place of others.

    A layer that takes off the hook of its last call and registers another one knows only the last of these.
    """
    lost, new = [key for key in then if key not in hooks], [key for key in hooks if key >= mark]
    if lost and new:
        hooks.update((key, then[key]) for key in then if key in hooks)
        return new[-len(lost) :]
    hooks.clear()
    hooks.update(then)
    return []
