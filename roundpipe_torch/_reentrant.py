"""The second engine: the forward leaves no graph, the gradient comes from the recompute's own (`use_reentrant=True`).

The two phases may do anything differently. Unlike torch's, this one takes keyword and nested tensors, gives any
structure back, trains weights behind inputs without gradient, gives each weight its gradient at once, and sees a saved
value that carries gradient (R5).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextvars import copy_context
from functools import partial
from itertools import compress, count, repeat
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from roundpipe_core import MismatchError
from roundpipe_core._backend import expand
from roundpipe_core._errors import message
from roundpipe_core._phase import Phase, thread
from roundpipe_core._slots import Slot
from roundpipe_core._trees import Spec, flatten, unflatten

from ._backend import without_gradient
from ._before import Before
from ._buffers import Buffers, copies, not_misled, settle, states_of
from ._errors import (
    accumulates_only,
    described,
    drawn_in_a_crowd,
    drawn_in_another_layout,
    input_changed,
    no_forward_mode,
    no_second_derivative,
    other_parameter,
    parameter_left_out,
    sharded_inside,
    started_inside,
    tensor_changed,
    wrong_option,
)
from ._frames import Options
from ._hooks import Hooked, Resting, gradient_nodes, left_since, now
from ._inputs import Original, as_it_was, as_now, repeated, restored
from ._keep import accumulates, forget_with, release
from ._leaves import Heard, gradients, leaves_behind, silence
from ._matching import Trace, node_count, other_layout, region_codes
from ._modes import Modes
from ._offload import Parcel
from ._outside import Outside, Stale
from ._ranks import is_sharded, step_is_over
from ._run import TorchRun, is_inside, is_told, pack_plainly, unpack_plainly
from ._state import Ambient, DrawWatch, Generators, Met, Visit, generators_of, modules_of, replayed
from ._torchs import leave, unseen
from ._transforms import batched, in_transform
from ._uncompiled import run_as_it_is
from ._usage import held
from ._views import dress_of, dressed, version_of

__all__ = ["reentrant"]


def reentrant(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    phase: Phase,
    slot: Slot,
    options: Options,
) -> Any:
    """Run `function` as a region of the second engine."""
    if options.contexts is not None or options.debug or options.verify != "off":
        raise wrong_option(
            slot.label,
            "context_fn, debug and verify do not go with use_reentrant=True.",
            "leave them out, or use the default engine (use_reentrant=False).",
        )
    leaves: list[Any] = []
    spec = flatten((args, kwargs), leaves)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    region = _Region(function, spec, leaves, slot, options)
    # `_hooked`: nodes with hooks, held until the region's node holds them
    given, taken, _hooked = region.forward(phase, tensors, args, kwargs)
    output_leaves, region.output_leaves = region.output_leaves, []  # else it would hold what it hands through
    if any(region.idle):  # a hook on them would be called with None
        tensors = tuple(t.detach() if idle else t for t, idle in zip(tensors, region.idle, strict=True))
    anchor = torch.empty(0, requires_grad=True)
    with _NO_CONTEXT if region.parcel is None or isinstance(thread.run, TorchRun) else region.parcel.inputs():
        outputs = _Reentrant.apply(region, given, anchor, len(tensors), *tensors, *taken)  # type: ignore[no-untyped-call]
    rest = iter(outputs)
    return unflatten(region.output_spec, (next(rest) if leaf is _TENSOR else leaf for leaf in output_leaves))


_TENSOR = object()
_retains: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_NO_CONTEXT = contextlib.nullcontext()


class _Region:
    """What both directions need, but for the tensors, which autograd keeps."""

    __slots__ = (
        "__weakref__", "accumulates", "ambient", "buffers", "closed", "context", "crowded", "expected", "function",
        "generators", "heard", "hooked", "idle", "known", "leaves", "located", "made", "modes", "originals",
        "outermost", "output_leaves", "output_spec", "outside", "parcel", "repeated", "roots", "slot", "spec", "trace",
        "weights", "wrote",
    )  # fmt: skip

    def __init__(
        self, function: Callable[..., Any], spec: Spec, leaves: list[Any], slot: Slot, options: Options
    ) -> None:
        self.function, self.spec, self.slot = function, spec, slot
        self.leaves = [_TENSOR if isinstance(leaf, torch.Tensor) else as_now(leaf) for leaf in leaves]
        self.ambient = Ambient()
        self.context = copy_context()
        self.modes: Modes | None
        self.buffers: Buffers | None
        self.outside: Outside | None = None
        self.roots: Sequence[Any]  # while the forward runs
        self.roots, own, self.modes, self.buffers = states_of(function, leaves)
        self.generators = Generators(generators_of(function, leaves), own) if options.preserve_rng_state else None
        self.parcel = None if options.offload is None else Parcel(options.offload)
        self.crowded: Met
        self.made: list[bool]  # which of the outputs that are tensors are no arguments
        self.originals: list[Original]  # the arguments
        self.repeated: dict[int, int]  # among them
        self.heard: list[Heard]  # the arguments
        self.hooked: list[Hooked] = []  # tensors from before it that the forward has put hooks on
        self.located = is_told(thread.run)
        self.outermost: bool  # of the regions of this engine
        self.accumulates: bool  # at once, in the backward inside
        self.expected: Sequence[weakref.ref[torch.Tensor]] = ()  # of the recompute
        self.wrote: bool  # into its arguments
        self.idle: list[bool] = []  # which arguments no gradient comes to; empty if that is not known
        self.known: list[weakref.ref[torch.Tensor]] = []  # leaves behind the outputs of the forward
        self.closed: list[weakref.ref[torch.Tensor]] = []  # those among them that are no arguments
        self.weights: list[tuple[weakref.ref[torch.Tensor], int]] = []  # leaves that the closure gave, with versions
        self.trace = Trace(False, self.located)
        self.output_spec: Spec
        self.output_leaves: list[Any] = []

    def forward(
        self, phase: Phase, tensors: tuple[torch.Tensor, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[torch.Tensor, bool]], list[torch.Tensor], list[Any]]:
        """What the region's node needs: see `_given`.

        The layer gets the caller's own arguments, which it may fill. `tensors`: those among them.

        With a graph, so that a saved value's gradient shows (R5), but one that keeps nothing.
        """
        visit, mark, begun = Visit(self.generators.own) if self.generators else None, now(), node_count()
        versions, self.originals = [*map(version_of, tensors)], [*map(Original, tensors)]
        self.heard = [*map(Heard.of, tensors)]
        self.repeated = repeated(tensors)
        ends = [(tensor.grad_fn, tensor.output_nr) for tensor in tensors]
        inside = is_inside(thread.run)
        if self.slot.rows is not None and not inside:
            forget_with(self, self.slot)
        try:
            run = TorchRun(phase, self.slot, self.trace, self.generators, thread.run)
            run.witnesses = (*run.witnesses, self.trace)
            with torch.enable_grad(), saved_tensors_hooks(unseen(partial(_drop, self.slot, run.witnesses)), _refuse):
                self.outermost, run.own_graph = not run.own_graph, True
                run.observe(self.buffers)
                if self.parcel is not None:
                    run.plan, run.parcel = self.parcel.plan, self.parcel
                leaves = self._run(run, args, kwargs)
        finally:
            self.ambient.forget_weights()
            self.crowded = () if visit is None else visit.end()
        self.wrote = versions != [*map(version_of, tensors)]
        if self.modes is not None:
            settle(self.modes, self.buffers, self.trace.told_at >= 0, run.leaves_out)
        self.hooked = [*run.hooked, *left_since(mark, self.function, (*tensors, *self.leaves), {})]
        self.parcel = run.parcel
        if self.roots:
            self.outside = Outside(self.roots)
        self.roots = ()
        if self.generators and self.generators.missed():
            raise started_inside(self.slot.label)
        if not inside:
            held(self.slot, tensors, {}, self.parcel)
        nodes = gradient_nodes(mark, self.function, (*tensors, *self.leaves))
        return *self._given(leaves, tensors, ends, begun), nodes

    def _given(
        self,
        leaves: list[Any],
        tensors: tuple[torch.Tensor, ...],
        ends: list[tuple[Any, int]],
        begun: int,
    ) -> tuple[list[tuple[torch.Tensor, bool]], list[torch.Tensor]]:
        """The tensors of the outputs, each with whether it carries gradient, and the leaves that the closure gave.

        Args:
            leaves: of the outputs. Emptied.
            tensors: the arguments.
            ends: node and output number of each, as they were when the forward began.
            begun: the number of the forward's first node.
        """
        own = {id(tensor) for tensor in tensors}
        through = () if self.wrote else own
        self.output_leaves = [_TENSOR if _is_made(leaf, through) else leaf for leaf in leaves]
        tensor_leaves = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.made = [_is_made(leaf, through) for leaf in tensor_leaves]
        outputs = [*compress(tensor_leaves, self.made)]
        del tensor_leaves
        reached = {end: False for end in ends if end[0] is not None}
        behind = None
        if not is_sharded(modules_of(self.function, self.leaves)):
            behind = leaves_behind(outputs, reached, begun, accumulates)
        self.accumulates = behind is None
        self.known = [weakref.ref(leaf) for leaf in behind or ()]
        self.closed = [weakref.ref(leaf) for leaf in behind or () if id(leaf) not in own]
        given = without_gradient(partial(_without_graph, outputs))
        if behind is not None and self.trace.told_at < 0:  # else the recompute may need more
            known = {id(leaf) for leaf in behind}
            self.idle = [
                tensor.requires_grad and not reached.get(end, id(tensor) in known)
                for tensor, end in zip(tensors, ends, strict=True)
            ]
        taken = [weakref.ref(leaf) for leaf in behind or () if id(leaf) not in own]
        del outputs, behind
        leaves.clear()  # and with them go the leaves that were made inside
        alive = [leaf for ref in taken if (leaf := ref()) is not None]
        self.weights = [(weakref.ref(leaf), leaf._version) for leaf in alive]
        return given, alive

    def arguments(self, ctx: Any) -> tuple[torch.Tensor, ...]:
        """The arguments as the forward got them."""
        if self.wrote:
            raise input_changed(self.slot.label, None)
        tensors: tuple[torch.Tensor, ...] = restored(self.slot, lambda: ctx.saved_tensors)
        weights = ((ref(), version) for ref, version in self.weights)
        changed = [weight for weight, version in weights if weight is not None and weight._version != version]
        if self.trace.told_at < 0:  # else the recompute may do without them
            changed += self.trace.changed().values()
        if changed:
            modules = modules_of(self.function, self.leaves)
            copied = {id(buffer) for module in modules for buffer in module.buffers()}
            for tensor in changed:
                if id(tensor) not in copied:
                    raise tensor_changed(self.slot.label, tensor)
        return tensors

    def cut(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], set[int]]:
        """What the recompute gets for the arguments `tensors`, and the identities of what is made for it.

        Leaves are the forward's own, for a layer may know one by identity. What has a graph behind it is cut off from
        that, once for all places where the layer has it.
        """
        given: list[torch.Tensor] = []
        made: set[int] = set()
        arguments = zip(tensors, self.originals, self.idle or repeat(False), strict=False)
        for n, (tensor, original, idles) in enumerate(arguments):
            if n in self.repeated:
                given.append(given[self.repeated[n]])
                continue
            own = original.alive() if original.is_leaf else None
            if own is None or (own.requires_grad and self.accumulates):
                own = original.dressed(tensor.detach().requires_grad_(tensor.requires_grad or idles))
                made.add(id(own))
            given.append(own)
        return tuple(given), made

    @run_as_it_is
    def replay(self, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """The tensors of the outputs of a recompute."""
        if step_is_over(modules_of(self.function, self.leaves)):
            raise sharded_inside(self.slot.label)
        before = Before(self.generators, self.buffers, self.modes)
        try:
            attempt = partial(self._replay, tensors, before.numbers)
            leaves, drew = replayed(partial(not_misled, self.buffers, attempt), self.generators, self.crowded)
        except BaseException as error:
            before.restore()
            if self.outside is not None and type(error) is RuntimeError:
                self.outside.explain(self.slot.label)
            raise
        if drew:
            raise drawn_in_a_crowd(self.slot.label, drew)
        outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        _check_number(self.slot, len(self.made), len(outputs))
        return [*compress(outputs, self.made)]

    def _replay(
        self, tensors: tuple[torch.Tensor, ...], numbers: Sequence[torch.Tensor], watch: DrawWatch | None
    ) -> tuple[list[Any], Met]:
        generators, trace = self.generators, Trace(False, self.located)
        visit = Visit(generators.own) if generators else None
        run = TorchRun(Phase.RECOMPUTE, self.slot, trace, generators)
        run.own_graph, run.witnesses = True, (trace,)
        changed: Sequence[torch.Tensor] = ()
        if self.outside is not None and self.trace.told_at < 0:  # else the recompute may do without what changed
            changed = self.outside.changed()
        stale = Stale(self.slot.label, changed, any(True for _ in self.slot.saves())) if changed else None
        hooks = (
            saved_tensors_hooks(unseen(partial(_note, self.slot, trace, stale)), unpack_plainly)
            if self.trace.told_at >= 0 or stale is not None
            else _NO_CONTEXT
        )
        try:
            run.observe(self.buffers)
            run.hooked = self.hooked
            run.knowing = self.trace.told_at >= 0
            buffers = copies(self.buffers, self.slot, run.knowing)
            modes = None if self.modes is None else self.modes.restored()
            ambient = self.ambient.restored()
            with (
                torch.enable_grad(),
                ambient or _NO_CONTEXT,
                modes or _NO_CONTEXT,
                buffers,
                hooks,
                watch or _NO_CONTEXT,
                stale or _NO_CONTEXT,
            ):
                run.begin()
                with Resting(self.hooked, self.function, (*tensors, *self.leaves), {}):
                    leaves = self.context.copy().run(self._run, run, *self._rebuilt(tensors))
                run.refuse_unread()
                self.expected = self._expected() if self.closed and self.trace.told_at < 0 else ()
            relaid = other_layout(self.trace, trace)
            if relaid is not None and run.drew():
                raise drawn_in_another_layout(self.slot.label, relaid)
        finally:
            crowded: Met = () if visit is None else visit.end()
            if generators:
                generators.set(numbers)
        return leaves, crowded

    def refuse_others(self, behind: Iterable[torch.Tensor] | None) -> None:
        """The recompute has to depend on the leaves that the forward did, if both run the same."""
        if not self.expected or behind is None:
            return
        found = {id(leaf) for leaf in behind}
        missing = next((leaf for ref in self.expected if (leaf := ref()) is not None and id(leaf) not in found), None)
        if missing is not None:
            raise parameter_left_out(self.slot.label, described(missing))

    def _expected(self) -> list[weakref.ref[torch.Tensor]]:
        """The leaves that the closure gave, as far as they are trained: the recompute has them too."""
        return [ref for ref in self.closed if (leaf := ref()) is not None and leaf.requires_grad]

    def forget(self) -> None:
        """Let go of what only a backward needs: the outputs hold this as long as they are there."""
        if self.outermost:
            release(self.slot)
        if self.slot.rows is None:  # else it may be on a tape
            self.slot.let_go()
        del self.function, self.leaves, self.buffers, self.modes
        self.originals, self.heard = [], []

    def _rebuilt(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, in new containers."""
        given = iter(tensors)
        rebuilt: tuple[tuple[Any, ...], dict[str, Any]]
        rebuilt = unflatten(self.spec, (next(given) if leaf is _TENSOR else as_it_was(leaf) for leaf in self.leaves))
        return rebuilt

    def _run(self, run: TorchRun, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        outer = thread.run
        try:
            thread.run = run
            outputs = self.function(*args, **kwargs)
        except BaseException as error:
            leave(error)
            raise
        finally:
            thread.run = outer
        leaves: list[Any] = []
        self.output_spec = flatten(outputs, leaves, expand)
        return leaves


region_codes |= {_Region._run.__code__}


class _Reentrant(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        region: _Region,
        given: list[tuple[torch.Tensor, bool]],
        anchor: torch.Tensor,
        tensors: int,
        *inputs: torch.Tensor,
    ) -> Any:
        """`inputs`: the arguments, `tensors` of them, and the leaves that the closure gave."""
        ctx.region = region
        ctx.save_for_backward(*inputs[:tensors])
        ctx.mark_non_differentiable(*(output for output, carries in given if not carries))
        ctx.set_materialize_grads(False)
        return tuple(output for output, _ in given)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise no_forward_mode(ctx.region.slot.label)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        with torch.no_grad():
            found = _Reentrant.gradients(ctx, grads)
        if torch.is_grad_enabled():  # of torch.autograd.grad(..., create_graph=True)
            leaves = (node.variable for node, _ in ctx.next_functions if hasattr(node, "variable"))
            sources = [*ctx.saved_tensors, *leaves, *grads]
            found = _Final.apply(ctx.region.slot, len(sources), *sources, *found)  # type: ignore[no-untyped-call]
        return (None, None, None, None, *found)

    @staticmethod
    def gradients(ctx: Any, grads: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        """For the arguments, and for the leaves that the closure gave."""
        region: _Region = ctx.region
        if region.accumulates and not _may_accumulate():
            raise accumulates_only(region.slot.label)
        if region.parcel is not None:
            region.parcel.arrive()
        with batched(region.slot.label, ()) if in_transform() else _NO_CONTEXT:
            tensors, made = region.cut(region.arguments(ctx))
            begun = node_count()
            outputs = region.replay(tensors)
        _check_shapes(region, grads, outputs)
        with_grad = [
            (out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None and out.requires_grad
        ]
        if region.expected and len(with_grad) < sum(out.requires_grad for out in outputs):  # else see _differentiated
            region.refuse_others(leaves_behind(outputs, {}, begun, accumulates))
            region.expected = ()
        del outputs
        nodes = [node for node, _ in ctx.next_functions[1:]]
        found: list[torch.Tensor | None] = [None] * len(nodes)
        if with_grad:
            found = _differentiated(region, with_grad, begun, tensors, made, nodes)
        for tensor, gradient in zip(tensors, found, strict=False):
            if id(tensor) in made:
                tensor.grad = gradient  # for a layer that keeps its argument, to look at its gradient
        silence(nodes, found, region.heard)
        if not _retains():
            region.forget()
        return found


def _check_number(slot: Slot, forward: int, recompute: int) -> None:
    """R10: both phases return as many tensors."""
    if recompute != forward:
        raise MismatchError(
            message(
                f"layer {slot.label!r}: the forward gave {forward} tensors, the recompute {recompute}.",
                [],
                "return the same structure in both phases.",
            )
        )


def _check_shapes(region: _Region, grads: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor]) -> None:
    """R10: tensors of the same shapes."""
    numbers = compress(count(), region.made)
    for n, output, grad in zip(numbers, outputs, grads, strict=False):
        if grad is not None and output.shape != grad.shape:
            raise MismatchError(
                message(
                    f"layer {region.slot.label!r}: output {n} of the forward has the shape {list(grad.shape)}, that of "
                    f"the recompute {list(output.shape)}.",
                    [],
                    "save what decides about the shape (indices, a mask, a length), whole.",
                )
            )


class _Final(torch.autograd.Function):
    """Gradients that nobody can differentiate by what they were made of.

    `once_differentiable` would take them for constants, if the gradients that came in are.
    """

    @staticmethod
    def forward(ctx: Any, slot: Slot, sources: int, *values: torch.Tensor | None) -> Any:
        """`values`: what the gradients were made of, so many, and they themselves."""
        ctx.slot = slot
        return tuple(gradient if gradient is None else gradient.clone() for gradient in values[sources:])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        raise no_second_derivative(ctx.slot.label)


def _differentiated(
    region: _Region,
    outputs: list[tuple[torch.Tensor, torch.Tensor]],
    begun: int,
    tensors: tuple[torch.Tensor, ...],
    made: set[int],
    nodes: list[Any],
) -> list[torch.Tensor | None]:
    """The gradients for `nodes`, which those of the arguments `tensors` come first of.

    Args:
        region: the region.
        outputs: of its recompute, each with its gradient. Emptied.
        begun: the number of the first node of the recompute.
        tensors: the arguments that it had.
        made: see `_Region.cut`.
        nodes: where the region's node hands its gradients on.
    """
    roots, grads = zip(*outputs, strict=True)
    outputs.clear()
    leaves = None if region.accumulates else leaves_behind(roots, {}, begun, accumulates)
    if leaves is None:
        if not _may_accumulate():
            raise accumulates_only(region.slot.label)
        torch.autograd.backward(roots, grads)
        own = [tensor.grad if id(tensor) in made else None for tensor in tensors]  # leaves have theirs already
        for again in region.repeated:
            own[again] = None
        return own + [None] * (len(nodes) - len(tensors))
    region.refuse_others(leaves)
    places = {id(node.variable): n for n, node in enumerate(nodes) if node is not None and hasattr(node, "variable")}
    places |= {id(tensor): n for n, tensor in enumerate(tensors)}
    found: list[torch.Tensor | None] = [None] * len(nodes)
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    leaves = [leaf for leaf in leaves if leaf.requires_grad]  # what is frozen by now gets no gradient
    if not leaves:
        return found
    for leaf, gradient in zip(leaves, gradients(roots, grads, leaves), strict=True):
        n = places.get(id(leaf))
        if n is None and gradient is not None:
            others.append((leaf, gradient))
        elif n is not None:
            before = found[n]
            found[n] = gradient if before is None or gradient is None else before + gradient
    del roots, leaves, leaf
    _add(region, others)
    return found


def _add(region: _Region, found: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Add to the gradients of leaves that the forward did not have: the recompute's own, or those of another branch."""
    if not found:
        return
    foreign: list[weakref.ref[torch.Tensor]] = []
    if region.trace.told_at < 0:  # both phases run the same code
        known = {id(ref()) for ref in region.known}
        foreign = [weakref.ref(leaf) for leaf, _ in found if id(leaf) not in known]
    refused = [] if _may_accumulate() else [weakref.ref(leaf) for leaf, _ in found]
    if not refused:
        leaves, grads = zip(*found, strict=True)
        torch.autograd.backward(leaves, grads)
        del leaves, grads
    found.clear()
    swapped_in = _alive(foreign)  # what the layer makes itself is gone by now
    if swapped_in is not None:
        raise other_parameter(region.slot.label, described(swapped_in))
    if _alive(refused) is not None:
        raise accumulates_only(region.slot.label)


def _alive(references: list[weakref.ref[torch.Tensor]]) -> torch.Tensor | None:
    return next((tensor for ref in references if (tensor := ref()) is not None), None)


_may_accumulate: Callable[[], bool] = torch.autograd._is_checkpoint_valid
"""Whether the backward that runs is one that accumulates, not torch.autograd.grad or backward(inputs=...)."""


def _is_made(leaf: Any, given: Collection[int]) -> bool:
    """Whether it is a tensor, and none of those with these identities, which the layer hands through as they are."""
    return isinstance(leaf, torch.Tensor) and id(leaf) not in given


def _without_graph(outputs: list[torch.Tensor]) -> list[tuple[torch.Tensor, bool]]:
    """Each, and whether it needs a gradient."""
    return [(_like(output), output.requires_grad) for output in outputs]


def _like(output: torch.Tensor) -> torch.Tensor:
    """The same without a graph. What stands for a parameter is none: others take that for a leaf."""
    detached = output.detach()
    return detached if type(output) is torch.nn.Parameter else dressed(detached, dress_of(output))


def _drop(slot: Slot, witnesses: tuple[Trace, ...], tensor: torch.Tensor) -> Slot:
    for trace in witnesses:
        trace.witness(tensor)
    return slot


def _note(slot: Slot, trace: Trace, stale: Stale | None, tensor: torch.Tensor) -> Any:
    trace.witness(tensor)
    fault = stale and stale.fault(tensor)
    if fault:
        raise fault
    return pack_plainly(slot, tensor)


def _refuse(slot: Slot) -> torch.Tensor:
    raise MismatchError(
        message(
            f"layer {slot.label!r}: use_reentrant=True keeps no graph of the forward, and a gradient through it was "
            "asked for.",
            [],
            "return from the layer every tensor that the loss uses (a router's logits recorded on the side too), do "
            "not differentiate inside the layer other than in recompute_once(...), or use the default engine "
            "(use_reentrant=False).",
        )
    )
