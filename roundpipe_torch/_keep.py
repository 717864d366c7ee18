"""keep: a part of a region whose outputs are held, so that the recompute leaves it out (R8, R10).

The gradient passes through the nodes of the forward, as without checkpointing. What they need lies in two places: what
the function made itself is held, and its arguments are made again by the recompute, which passes through `keep` too and
goes on from the outputs that are held.

The second engine's forward leaves no graph. There the function runs on arguments cut off from theirs (*isolated*), its
graph is held with the outputs, and a node of the recompute (`_Stand`) leads into it.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from roundpipe_core._backend import Backend, backend_of, expand
from roundpipe_core._phase import Phase
from roundpipe_core._places import Place
from roundpipe_core._slots import Slot, label_of
from roundpipe_core._trees import LEAF, Spec, flatten, unflatten

from ._errors import (
    argument_written,
    captured,
    differentiated_inside,
    differentiated_twice,
    hooked_inside,
    kept_output_changed,
    not_kept,
    tensor_changed,
)
from ._hooks import Hooked, hooked_since, is_hooked, now
from ._inputs import save_tensor
from ._leaves import Heard, gradients, leaves_behind, silence
from ._matching import cast_of, node_count
from ._offload import Here, Shipped
from ._ranks import is_sharded
from ._residuals import Argument, Held, Packer, Site, unpack, whole_of
from ._state import modules_of
from ._views import Origins, View, version_of

__all__ = ["accumulates", "forget_with", "keep", "release"]

_Node = Any


class _Output:
    """One leaf of the outputs."""

    __slots__ = ("backend", "part", "tracked", "value")

    def __init__(self, leaf: Any, origins: Origins, site: Site) -> None:
        self.backend: Backend | None = None
        self.part: View | None = None
        self.tracked = False
        self.value: Any = None
        if not isinstance(leaf, torch.Tensor):
            self.backend = backend_of(leaf)
            self.value = leaf if self.backend is None else self.backend.snapshot(leaf)
            return
        self.part = origins.of(leaf)
        if self.part is None:
            is_weight = leaf.is_leaf and leaf.requires_grad
            self.value = leaf if is_weight else site.hold(leaf.clone() if leaf.is_inference() else leaf)
        whole = self.part is not None and self.part.geometry is None
        self.tracked = leaf.requires_grad and not whole and not leaf.is_leaf

    def again(self, kept: Kept, arguments: list[torch.Tensor]) -> Any:
        """The leaf, for a recompute with these arguments."""
        if self.part is not None:
            whole = arguments[self.part.whole]
            return whole if self.part.geometry is None else self.part.of(whole)
        if not isinstance(self.value, (Here, Shipped)):
            return self.value if self.backend is None else self.backend.restore(self.value)
        value = self.value.fetch()
        if self.value.changed:
            raise kept_output_changed(kept.layer, kept.name, kept.place, value)
        return value.clone() if value.is_inference() else value.detach()


class Kept:
    """What one call of `keep` leaves for the recomputes."""

    __slots__ = (
        "anchor", "behind", "grads", "graph", "layer", "linked", "makers", "met", "name", "needs", "nodes", "outputs",
        "place", "residuals", "site", "spec", "state", "taken", "waiting", "weights", "written",
    )  # fmt: skip

    def __init__(self, layer: str, name: str, place: Place, site: Site) -> None:
        self.layer, self.name, self.place, self.site = layer, name, place, site
        self.spec: Spec
        self.outputs: list[_Output] = []
        self.needs: list[int] = []  # arguments that backward needs, once for each time
        self.linked: list[int] = []  # arguments that a gradient can get to
        self.weights: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # among them, with their versions
        self.written: dict[int, weakref.ref[torch.Tensor]] = {}  # arguments that the function changed in place
        self.residuals: list[weakref.ref[Held]] = []
        self.met: dict[Any, int] = {}
        self.taken: set[Slot] = set()  # regions of a tape
        self.nodes = 0
        self.makers: list[tuple[str, int]] = []  # of the tracked outputs, as a trace knows them
        self.state: Any = None
        # If isolated:
        self.graph: list[Any] | None = None  # edges of the tracked outputs into the function's graph
        self.waiting: list[weakref.ref[Argument]] = []  # where that graph gets the arguments that it needs
        self.grads: dict[int, torch.Tensor] = {}  # what a backward through it gave for the arguments
        self.anchor: torch.Tensor  # what that backward asks for, so that it gets to the arguments
        self.behind: list[torch.Tensor] | None = None  # leaves of the closure; None if that backward has to add to them

    def places(self) -> Counter[str]:
        """Bytes held for the recompute and for the function's backward, each memory once, by where they are (R12)."""
        residuals = (ref() for ref in self.residuals)
        values = [held.value for held in residuals if held is not None and not held.is_weight]
        values += [out.value for out in self.outputs if isinstance(out.value, (Here, Shipped))]
        held = {value.memory: value for value in values}
        places: Counter[str] = Counter()
        for value in held.values():
            places[value.place] += value.nbytes
        return places

    def refuse_written(self, arguments: list[torch.Tensor]) -> None:
        """What the function wrote into an argument must be there, and nothing else into a weight (R6)."""
        for n, written in self.written.items():
            if written() is not whole_of(arguments[n]):
                raise argument_written(self.layer, self.name, self.place, arguments[n])
        for n, (weight, version) in self.weights.items():
            if weight() is arguments[n] and arguments[n]._version != version:
                raise tensor_changed(self.layer, arguments[n])

    def stand_ins(self, arguments: list[torch.Tensor], saved: list[Any]) -> list[Any]:
        """The leaves of the outputs, for a recompute with these arguments."""
        leaves = [out.again(self, arguments) for out in self.outputs]
        return self.tracked(leaves, arguments, saved)

    def tracked(self, leaves: list[Any], arguments: list[torch.Tensor], saved: list[Any]) -> list[Any]:
        """`leaves`, with those that carry gradient behind a node that holds on to the arguments."""
        places = [n for n, out in enumerate(self.outputs) if out.tracked]
        if places and torch.is_grad_enabled():
            values = [leaves[n].detach() for n in places]
            linked = [arguments[n] for n in self.linked]
            behind = [torch.empty(0, requires_grad=True)] if self.behind is None else self.behind
            stood: Any = _Stand.apply(self, saved, values, *linked, *behind)  # type: ignore[no-untyped-call]
            for n, leaf in zip(places, stood, strict=True):
                leaves[n] = leaf
        return leaves

    def refuse_inside(self, gradient: torch.Tensor) -> None:
        """Of a layer that differentiates inside itself: the function's own hooks are behind the stand-in."""
        if self.site.forward() is not None:
            raise differentiated_inside(self.layer, self.name, self.place)

    def through(self, grads: tuple[torch.Tensor | None, ...], saved: list[Any]) -> list[torch.Tensor | None]:
        """Gradients of the linked arguments and the leaves behind, by the function's own graph."""
        if self.graph is None:
            raise differentiated_inside(self.layer, self.name, self.place)
        if torch.is_grad_enabled():
            raise differentiated_twice(self.layer, self.name, self.place)
        asking = [(ref(), tensor) for ref, tensor in zip(self.waiting, saved, strict=True)]
        for argument, tensor in asking:
            if argument is not None:
                argument.live = tensor.unpack()
        asked = [grad is not None for grad in grads]
        roots, with_grad = [*compress(self.graph, asked)], [grad for grad in grads if grad is not None]
        try:
            if self.behind is None:
                torch.autograd.backward(roots, with_grad, retain_graph=True)
                return [*map(self.grads.get, self.linked), None]
            asked = [leaf.requires_grad for leaf in self.behind]  # what is frozen by now gets no gradient
            found = iter(gradients(roots, with_grad, [*compress(self.behind, asked), self.anchor], retain_graph=True))
            of_leaves = [next(found) if trained else None for trained in asked]
            return [*map(self.grads.get, self.linked), *of_leaves]
        finally:
            self.grads.clear()
            for argument, _ in asking:
                if argument is not None:
                    argument.live = None


class _Stand(torch.autograd.Function):
    """Stands in the graph for the function that was not run."""

    @staticmethod
    def forward(ctx: Any, kept: Kept, saved: list[Any], values: list[torch.Tensor], *linked: torch.Tensor) -> Any:
        ctx.kept, ctx.saved, ctx.heard = kept, saved, [*map(Heard.of, linked)]
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        found = ctx.kept.through(grads, ctx.saved)
        silence([node for node, _ in ctx.next_functions], found, ctx.heard)
        return (None, None, None, *found)


class _Cut(torch.autograd.Function):
    """An argument cut off from its graph. Its gradient is left in `grads`. Unlike a leaf it holds no values."""

    @staticmethod
    def forward(ctx: Any, grads: dict[int, torch.Tensor], n: int, of: list[torch.Tensor], anchor: torch.Tensor) -> Any:
        ctx.grads, ctx.n = grads, n
        return of[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        before = ctx.grads.get(ctx.n)  # of another backward inside this one: that of a region which closes over it
        ctx.grads[ctx.n] = grads[0] if before is None else before + grads[0]
        return None, None, None, None


class _Call:
    """The function, and the tensors that it is called with, its closure's included."""

    __slots__ = ("_names", "_opened", "count", "function", "tensors", "values")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function, self._names = function, tuple(kwargs)
        self.values = (*args, *kwargs.values())
        self._opened = [_opened(value) for value in self.values]
        self.tensors = [leaf for leaves, _ in self._opened for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.count = len(self.tensors)  # of the arguments
        _add_captured(function, self.tensors)

    def given(self, isolated: bool, kept: Kept) -> list[torch.Tensor]:
        """The tensors to call with: these, or the same cut off from their graph."""
        if not isolated:
            return self.tensors
        kept.anchor = torch.empty(0, requires_grad=True)
        arguments = self.tensors[: self.count]
        first = {id(tensor): n for n, tensor in reversed(list(enumerate(arguments)))}
        cut = {n: _cut(kept, n, arguments[n]) for n in first.values()}
        return [cut[first[id(tensor)]] for tensor in arguments] + self.tensors[self.count :]

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        values = self.values if tensors is self.tensors else self._with(iter(tensors))
        positional = len(values) - len(self._names)
        return self.function(*values[:positional], **dict(zip(self._names, values[positional:], strict=True)))

    def hooked_since(self, mark: int, tensors: list[torch.Tensor]) -> Iterator[Hooked]:
        """The tensors from before the function on which it has put hooks."""
        return hooked_since(mark, self.function, [*tensors, *self.values], {})

    def _with(self, tensors: Iterator[torch.Tensor]) -> tuple[Any, ...]:
        """The arguments around other tensors. What holds none that is new stays the object that it is."""
        values = []
        for value, (leaves, spec) in zip(self.values, self._opened, strict=True):
            new = [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            same = all(a is b for a, b in zip(leaves, new, strict=True))
            values.append(value if same else unflatten(spec, iter(new)))
        return tuple(values)


def _opened(value: Any) -> tuple[list[Any], Spec]:
    if type(value) is torch.Tensor:  # as most are
        return [value], LEAF
    leaves: list[Any] = []
    spec = flatten(value, leaves, expand)
    return leaves, spec


def _add_captured(function: Any, tensors: list[torch.Tensor]) -> None:
    if isinstance(function, partial):
        leaves: list[Any] = []
        flatten((function.args, function.keywords), leaves, expand)
        tensors += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        _add_captured(function.func, tensors)
    elif isinstance(function, types.FunctionType):
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell that is not filled yet
                if isinstance(cell.cell_contents, torch.Tensor):
                    tensors.append(cell.cell_contents)


def _cut(kept: Kept, n: int, tensor: torch.Tensor) -> torch.Tensor:
    cut: torch.Tensor = tensor
    if tensor.requires_grad:
        cut = _Cut.apply(kept.grads, n, [tensor], kept.anchor)  # type: ignore[no-untyped-call]
    return cut


def keep(run: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], place: Place) -> Any:
    """`function(*args, **kwargs)`, run by the forward only. `run` is the `TorchRun` that asks for it."""
    if run.keeping or run.phase is Phase.AUDIT:
        return function(*args, **kwargs)
    key = run.numbered(f"keep({label_of(function)})")
    kept: Kept | None = run.slot.kept.get(key)
    nodes, call = node_count(), _Call(function, args, kwargs)
    waiting: list[Argument] = []
    outputs: Any = _LEFT_OUT
    isolated = False
    if not run.repeats:
        kept = run.slot.kept[key] = Kept(run.slot.label, key[1], place, Site(run))
        isolated = run.own_graph and torch.is_grad_enabled()
        outputs = _first(run, kept, call, isolated, waiting)
    elif kept is None:
        raise not_kept(run.slot.label, key[1], place)
    elif kept.site.reruns:
        outputs, _ = _ran(run, Site(run), call, call.tensors, waiting)
    run.consulted(key)
    needs = kept.needs if outputs is _LEFT_OUT else [argument.part.whole for argument in waiting]
    saved = [save_tensor(call.tensors[n], False) for n in needs]  # the same line in all phases
    if outputs is _LEFT_OUT:
        run.restore_state(kept.state)  # R7
        run.skip(kept.met, kept.taken)
        kept.refuse_written(call.tensors)
        leaves = kept.stand_ins(call.tensors, saved)
        outputs = unflatten(kept.spec, iter(leaves))
        _line_up(run, kept, leaves, node_count() - nodes)
    elif isolated:
        outputs = _isolated(kept, outputs, call, waiting, saved)
    else:
        for argument, tensor in zip(waiting, saved, strict=True):
            argument.saved, argument.live = tensor, None
    if not run.repeats:
        kept.nodes = node_count() - nodes
    run.consulted((key, "over"))
    return outputs


_LEFT_OUT = object()


def _first(run: Any, kept: Kept, call: _Call, isolated: bool, waiting: list[Argument]) -> Any:
    """Run the function, and note what the recomputes need to know."""
    given = call.given(isolated, kept)
    met, taken, begun, mark = run.met(), run.taken.copy(), node_count(), now()
    versions = [version_of(tensor) for tensor in given]
    kept.site.ship = weakref.WeakMethod(run.ship)  # the run holds the slot, and the slot the site
    try:
        outputs, kept.residuals = _ran(run, kept.site, call, given, waiting)
        kept.site.reruns = False
        leaves, kept.spec = _opened(outputs)
        origins = Origins(given)
        kept.outputs = [_Output(leaf, origins, kept.site) for leaf in leaves]
    finally:
        kept.site.close()
    kept.needs = [argument.part.whole for argument in waiting]
    weights = ((n, call.tensors[n]) for n in set(kept.needs))
    kept.weights = {n: (weakref.ref(t), t._version) for n, t in weights if t.is_leaf and t.requires_grad}
    kept.state = run.state()
    kept.met = {name: times - met.get(name, 0) for name, times in run.met().items() if times != met.get(name)}
    kept.taken = run.taken - taken
    kept.written = {
        n: weakref.ref(whole_of(tensor))
        for n, (tensor, version) in enumerate(zip(call.tensors, versions, strict=True))
        if version_of(tensor) != version
    }
    tracked = [leaf for leaf, out in zip(leaves, kept.outputs, strict=True) if out.tracked]
    before = [found.tensor for found in call.hooked_since(mark, given) if found.tensor is not None]
    if run.own_graph and not all(tensor.is_leaf for tensor in before):
        raise hooked_inside(kept.layer, kept.name, kept.place)
    kept.site.watch([*before, *filter(is_hooked, tracked)])
    kept.linked, foreign, sideways = _reached(tracked, given[: call.count] if isolated else given, begun)
    if isolated:
        if foreign:
            raise captured(kept.layer, kept.name, kept.place)
        ends = {(tensor.grad_fn, tensor.output_nr): False for tensor in given if tensor.grad_fn is not None}
        if not is_sharded(modules_of(call.function, call.values)):
            kept.behind = leaves_behind(tracked, ends, begun, accumulates)
        if sideways:
            kept.linked = [n for n, tensor in enumerate(call.tensors) if tensor.requires_grad]
        kept.graph = [get_gradient_edge(leaf) for leaf in tracked]
    elif run.trace is not None:
        kept.makers = [run.trace.maker(leaf) for leaf in tracked]
    return outputs


def _ran(
    run: Any, site: Site, call: _Call, given: list[torch.Tensor], waiting: list[Argument]
) -> tuple[Any, list[weakref.ref[Held]]]:
    """The outputs, and what the function's backward holds. `waiting` gets the arguments that backward needs."""
    packer = Packer(site, given)
    run.keeping = True
    try:
        with saved_tensors_hooks(packer.pack, unpack):
            outputs = call(given)
    finally:
        run.keeping = site.running = False
        packer.given = packer.origins = None
    waiting += [argument for ref in packer.asked if (argument := ref()) is not None]
    return outputs, packer.held


def _isolated(kept: Kept, outputs: Any, call: _Call, waiting: list[Argument], saved: list[Any]) -> Any:
    """The outputs of a function that ran on arguments cut off from their graph, joined to that graph."""
    kept.waiting = [weakref.ref(argument) for argument in waiting]
    for argument in waiting:
        argument.live = None
    leaves, _ = _opened(outputs)
    for n, out in enumerate(kept.outputs):
        if out.part is not None and out.part.geometry is None:
            leaves[n] = call.tensors[out.part.whole]
    leaves = kept.tracked(leaves, call.tensors, saved)
    if kept.site.watched:
        for leaf, out in zip(leaves, kept.outputs, strict=True):
            if out.tracked:
                leaf.register_hook(kept.refuse_inside)
    return unflatten(kept.spec, iter(leaves))


def accumulates(node: Any) -> bool:
    """Whether a region or a kept function adds to gradients at once."""
    kept = getattr(node, "kept", None)
    if isinstance(kept, Kept):
        return kept.graph is not None and kept.behind is None
    adds: bool = getattr(getattr(node, "region", None), "accumulates", False)
    return adds


def _line_up(run: Any, kept: Kept, leaves: list[Any], nodes: int) -> None:
    """Let traces count nodes from here as if the function had run."""
    for trace in run.traces():
        trace.skip(nodes - kept.nodes)
    if run.trace is not None:
        tracked = [leaf for leaf, out in zip(leaves, kept.outputs, strict=True) if out.tracked]
        run.trace.stand_in(tracked, kept.makers)


def _reached(
    outputs: Iterable[torch.Tensor], arguments: list[torch.Tensor], begun: int
) -> tuple[list[int], bool, bool]:
    """The arguments that a gradient of the outputs gets to, and whether it gets to other nodes from before.

    Also whether there is a region of the second engine, whose backward may get to arguments from the side.
    """
    waiting: list[_Node] = [out.grad_fn for out in outputs]
    if not waiting:  # in inference mode a weight could not even be asked for its edge
        return [], False, False
    edges: dict[tuple[_Node, int], int] = {}
    for n, tensor in enumerate(arguments):
        if tensor.requires_grad:
            edge: Any = get_gradient_edge(tensor)
            edges.setdefault((edge[0], edge[1]), n)
    seen, foreign, sideways = set(waiting), False, False
    reached: set[int] = set()
    while waiting:
        asked = waiting.pop()
        sideways = sideways or accumulates(asked)
        for edge in asked.next_functions:
            node = edge[0]
            if edge in edges:
                reached.add(edges[edge])
            elif node is None or hasattr(node, "variable"):
                continue
            elif node._sequence_nr() < begun and cast_of(node) is None:
                foreign = True
            elif node not in seen:
                seen.add(node)
                waiting.append(node)
    return sorted(reached), foreign, sideways


def release(slot: Slot) -> None:
    """Let go of the graphs that isolated functions left: no backward comes any more."""
    for kept in _held(slot):
        kept.graph = kept.behind = None


def forget_with(owner: object, slot: Slot) -> None:
    """Let go of what is kept when `owner` dies. For a slot that a tape holds longer (R9)."""
    weakref.finalize(owner, _forget, slot).atexit = False


def _forget(slot: Slot) -> None:
    for kept in _held(slot):
        kept.graph, kept.behind, kept.outputs = None, None, []


def _held(slot: Slot) -> Iterator[Kept]:
    yield from (kept for kept in slot.kept.values() if isinstance(kept, Kept))
    for children in slot.children.values():
        for child in children:
            yield from _held(child)
