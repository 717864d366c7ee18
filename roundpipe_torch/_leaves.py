"""Leaves that a layer of the second engine, or a function that it keeps, takes from its closure: mostly weights.

A backward inside a backward would add to their gradients at once, a part in each region, and their hooks would see the
parts. So the leaves behind the forward's outputs become inputs of the region's node: the backward inside gives it their
gradients, and the one around adds them up with all others.

That cannot be where the graph inside leads out by a tensor that is no leaf, and where a node insists on a backward that
accumulates. There the parts remain.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from roundpipe_core import RoundPipeError

from ._errors import multi_hooked
from ._hooks import hooks_on
from ._matching import A_LEAF, cast_of

__all__ = ["Heard", "gradients", "leaves_behind", "silence"]


def leaves_behind(
    outputs: Iterable[torch.Tensor], inputs: dict[tuple[Any, int], bool], begun: int, whole: Callable[[Any], bool]
) -> list[torch.Tensor] | None:
    """The leaves that `outputs` depend on, those among the arguments too; None if there are other ways out.

    Args:
        outputs: of a region.
        inputs: node and output number of its arguments, as they were when it began. Those that are reached become True.
        begun: the number of the first node that it could make.
        whole: whether a node of a `torch.autograd.Function` needs a backward that accumulates.
    """
    seen = set()
    leaves: dict[int, torch.Tensor] = {}
    waiting: list[tuple[Any, int]] = []
    for output in outputs:
        if output.grad_fn is not None:
            waiting.append((output.grad_fn, output.output_nr))
        elif output.requires_grad:
            leaves[id(output)] = output
    while waiting:
        edge = waiting.pop()
        node = edge[0]
        if edge in inputs:
            inputs[edge] = True
            continue
        if node is None or node in seen:
            continue
        seen.add(node)
        number = node._sequence_nr()
        if number == A_LEAF:
            leaves[id(node.variable)] = node.variable
        elif (number < begun and cast_of(node) is None) or (
            isinstance(node, BackwardCFunction) and (whole(node) or _insists(node))
        ):
            return None
        else:
            waiting += node.next_functions
    return [*leaves.values()]


def _insists(node: Any) -> bool:
    """Whether it is a checkpoint of others, which refuses a backward that does not accumulate."""
    code = getattr(inspect.unwrap(node._forward_cls.backward), "__code__", None)
    return code is not None and "_is_checkpoint_valid" in code.co_names


class _Muted:
    """A hook on a leaf that hears nothing of some backwards, and nothing of a gradient that is not there."""

    __slots__ = ("_hook",)
    within: ClassVar[set[int]] = set()

    def __init__(self, hook: Callable[[torch.Tensor], Any]) -> None:
        self._hook = hook

    def __call__(self, gradient: torch.Tensor | None) -> Any:
        if gradient is None or torch._C._current_graph_task_id() in _Muted.within:
            return None
        return self._hook(gradient)


class _Deaf:
    """A hook on a node that hears nothing of gradients that are not there."""

    __slots__ = ("_hook",)

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *gradients: tuple[torch.Tensor | None, ...]) -> Any:
        return self._hook(*gradients) if any(gradient is not None for gradient in gradients[-1]) else None


class _Idle:
    """A hook for what a leaf has accumulated that hears nothing if nothing is added to what it had."""

    __slots__ = ("_had", "_hook", "_version")

    def __init__(self, hook: Callable[[torch.Tensor], Any], leaf: torch.Tensor) -> None:
        self._hook: Callable[[torch.Tensor], Any] = hook._hook if isinstance(hook, _Idle) else hook
        self._had = None if leaf.grad is None else weakref.ref(leaf.grad)
        self._version = -1 if leaf.grad is None else leaf.grad._version

    def __call__(self, leaf: torch.Tensor) -> Any:
        has = leaf.grad
        if has is None or (self._had is not None and self._had() is has and self._version == has._version):
            return None
        return self._hook(leaf)


class Heard(NamedTuple):
    """The hooks of a tensor that something may give no gradient to. They outlive the tensor, with its node."""

    tensor: weakref.ref[torch.Tensor]
    hooks: Any

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Heard:
        """Those that it has by now."""
        if tensor.is_leaf:  # which lives as long as its node
            return cls(weakref.ref(tensor), None)
        with torch._C.DisableTorchFunctionSubclass():
            return cls(weakref.ref(tensor), tensor._backward_hooks)

    def silence(self) -> None:
        """See `silence`."""
        tensor = self.tensor()
        if tensor is None:
            _mute(self.hooks)
            return
        _mute(tensor._backward_hooks)
        after: Any = tensor._post_accumulate_grad_hooks
        for key, hook in [*after.items()] if after else ():
            after[key] = _Idle(hook, tensor)


def silence(nodes: Sequence[Any], gradients: Sequence[torch.Tensor | None], heard: Sequence[Heard]) -> None:
    """Let no hook be called where there is no gradient: nothing would come there without checkpointing.

    Args:
        nodes: to which these gradients go.
        gradients: what is given.
        heard: the first of the tensors whose gradients they are; the others are leaves.
    """
    for n, (node, gradient) in enumerate(zip(nodes, gradients, strict=True)):
        if node is None or gradient is not None:
            continue
        for hooks in hooks_on(node):
            hooks.update((key, hook if isinstance(hook, _Deaf) else _Deaf(hook)) for key, hook in [*hooks.items()])
        (heard[n] if n < len(heard) else Heard.of(node.variable)).silence()


def gradients(
    outputs: Sequence[torch.Tensor] | Sequence[GradientEdge],
    grads: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    *,
    retain_graph: bool = False,
) -> Sequence[torch.Tensor | None]:
    """The gradients by `leaves`, whose hooks wait for those of the backward around."""
    hooked = [_mute(leaf._backward_hooks) for leaf in leaves]
    if not any(hooked):
        return _differentiated(outputs, grads, leaves, retain_graph)
    task: list[int] = []

    def begin(_: Any) -> None:
        task.append(torch._C._current_graph_task_id())
        _Muted.within.add(task[-1])

    with torch.enable_grad():  # an output that is a leaf has its own hooks
        roots: Any = [
            one.view_as(one) if isinstance(one, torch.Tensor) and one.grad_fn is None else one for one in outputs
        ]
    nodes: list[Any] = [one.grad_fn if isinstance(one, torch.Tensor) else one.node for one in roots]
    handles = [node.register_prehook(begin) for node in nodes]  # before any leaf is reached
    try:
        return _differentiated(roots, grads, leaves, retain_graph)
    finally:
        for handle in handles:
            handle.remove()
        _Muted.within.difference_update(task)


def _differentiated(
    outputs: Sequence[torch.Tensor] | Sequence[GradientEdge],
    grads: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    retain_graph: bool,
) -> Sequence[torch.Tensor | None]:
    try:
        return torch.autograd.grad(outputs, leaves, grads, allow_unused=True, retain_graph=retain_graph)
    except RoundPipeError:
        raise
    except RuntimeError as error:
        if "_will_engine_execute_node" in str(error):
            raise multi_hooked(str(error)) from error
        raise


def _mute(hooks: Any) -> bool:
    """Let the `hooks` of a tensor be ones that can be muted, and stay so. Tells if there are any."""
    for key, hook in [*hooks.items()] if hooks else ():
        if not isinstance(hook, _Muted):
            hooks[key] = _Muted(hook)
    return bool(hooks)
