"""What remat costs and saves, told without running anything (R12)."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import Jaxpr

from roundpipe_core._report import html_table, in_words, json_of, text_table

from ._backend import aval_bytes
from ._jax import is_float, is_on_host, jax_checkpoint, struct
from ._offload import Offload, Offloading
from ._policies import save_policy, with_tags
from ._programs import subprograms

__all__ = ["Explanation", "LayerCost", "explain", "flops_of", "note", "repeated"]


@dataclass(frozen=True)
class LayerCost:
    """One layer of an explanation. Bytes and FLOPs are those of all its `calls` together."""

    label: str
    calls: int
    inputs: int
    """Bytes of the layer's inputs that backward needs."""
    slot: int
    """Bytes of what the layer saved, and of what `keep` holds."""
    policy: int
    """Bytes of what the policy keeps on top."""
    without_remat: int
    """Bytes that backward would need if the layer were not recomputed."""
    recomputed_flops: int
    """FLOPs of matrix products that backward does again."""
    host: int
    """Bytes of what is kept that are in host memory."""

    @property
    def kept(self) -> int:
        """All bytes kept between forward and backward."""
        return self.inputs + self.slot + self.policy

    def cells(self) -> tuple[str, ...]:
        """As a line of the table."""
        sizes = map(in_words, (self.inputs, self.slot, self.policy, self.kept, self.host, self.without_remat))
        flops = f"{self.recomputed_flops:.3g} FLOPs"
        return self.label.partition(" (")[0], str(self.calls), *sizes, flops, self.hint

    @property
    def hint(self) -> str:
        """What to do about a layer whose remat does not pay, or nothing."""
        if self.kept >= self.without_remat:
            return "remat saves nothing here: leave it out"
        if self.slot > self.inputs + self.policy and self.slot > self.without_remat // 4:
            return "the slot is most of what is kept: save indices instead of masks, or a narrower dtype, or keep less"
        return ""


@dataclass(frozen=True)
class Explanation:
    """What `explain` found, one entry for each layer in order of its first call."""

    layers: tuple[LayerCost, ...] = field(default_factory=tuple)

    def __str__(self) -> str:
        return text_table(_HEAD, [cost.cells() for cost in self.layers])

    def to_json(self) -> str:
        """The same for programs. Bytes are numbers."""
        return json_of(self.layers)

    def to_html(self) -> str:
        """The same as a page."""
        return html_table("What remat keeps and recomputes", _HEAD, [cost.cells() for cost in self.layers])


_HEAD = ("layer", "calls", "inputs", "slot", "policy", "kept", "on the host", "without remat", "recomputed", "")


def explain(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say what each layer under `remat` keeps for backward, and what it computes again. Nothing runs.

    >>> import jax, jax.numpy as jnp
    >>> from roundpipe_jax import explain, remat
    >>> layer = remat(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w), label="layer")
    >>> w, x = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((2, 8), "float32")
    >>> [cost] = explain(lambda w, x: layer(w, x).sum(), w, x).layers
    >>> cost.inputs, cost.slot, cost.recomputed_flops
    (320, 0, 512)

    Args:
        fun: calls the layers; it is traced once.
        *args: arrays, or `jax.ShapeDtypeStruct` in their place, as are `kwargs`.

    Returns:
        An `Explanation`; print it for a table.

    Raises:
        ConcretizationTypeError: `fun` looks at values; what it then keeps depends on them.

    Implements R12.
    """
    before = _thread.notes, _thread.repeats
    notes: list[_Note] = []
    try:
        _thread.notes, _thread.repeats = notes, []  # whatever an interrupted trace has left there
        jax.eval_shape(fun, *args, **kwargs)
    finally:
        _thread.notes, _thread.repeats = before
    costs: dict[Any, LayerCost] = {}
    for found in notes:
        cost = found.cost()
        key = (cost.label, found.key())
        costs[key] = _added(costs[key], cost) if key in costs else cost
    return Explanation(tuple(costs.values()))


def note(
    label: str,
    recompute: Callable[..., Sequence[Any]],
    slot: Sequence[Any],
    inputs: Sequence[Any],
    policy: Any,
    tags: bool,
    host: Sequence[bool] = (),
    plan: Offload | None = None,
) -> None:
    """Called by each outermost region: what backward starts from, for an `explain` that listens."""
    if _thread.notes is not None:
        shapes = [struct(value.shape, value.dtype) for value in (*slot, *inputs)]
        times = math.prod(_thread.repeats)
        _thread.notes.append(_Note(label, recompute, len(slot), shapes, policy, tags, times, tuple(host), plan))


@contextlib.contextmanager
def repeated(times: int) -> Iterator[None]:
    """What is traced in here runs `times` times."""
    _thread.repeats.append(times)
    try:
        yield
    finally:
        _thread.repeats.pop()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.notes: list[_Note] | None = None
        self.repeats: list[int] = []


_thread = _Thread()


@dataclass(frozen=True)
class _Note:
    label: str
    recompute: Callable[..., Sequence[Any]]
    slots: int
    shapes: list[Any]
    policy: Any
    tags: bool
    times: int
    host: tuple[bool, ...]  # of the slot's arrays and the inputs
    plan: Offload | None  # for what is in between

    def key(self) -> Any:
        return tuple((shape.shape, str(shape.dtype)) for shape in self.shapes)

    def cost(self) -> LayerCost:
        tagged = save_policy() if self.tags else None
        kept = with_tags(self.policy) if self.tags else self.policy
        inputs, slot, _ = self._kept(tagged)
        _, _, inner = self._kept(tagged)
        _, _, more = self._kept(kept)
        slot = slot + inner if self.tags else slot
        everything = jax.checkpoint_policies.everything_saveable
        flops = self._flops(kept) - self._flops(everything)
        sizes = (inputs, slot, more - inner, sum(self._kept(everything)), flops, self._on_host())
        return LayerCost(self.label, self.times, *(self.times * size for size in sizes))

    def _on_host(self) -> int:
        if self.tags:
            return 0 if self.plan is None else self._kept(Offloading(save_policy(), self.plan), only=is_on_host)[2]
        return sum(aval_bytes(shape) for shape, away in zip(self.shapes, self.host, strict=False) if away)

    def _differentiated(self, policy: Any) -> tuple[Callable[..., Any], list[Any]]:
        """The layer as a function of everything, differentiable by its floating inputs."""
        floats = [n >= self.slots and is_float(shape) for n, shape in enumerate(self.shapes)]

        def pull_back(*values: Any) -> Any:
            def of_the_floating(*chosen: Any) -> list[Any]:
                given = iter(chosen)
                merged = [next(given) if flag else value for value, flag in zip(values, floats, strict=True)]
                outs = jax_checkpoint(
                    lambda values: self.recompute(values[: self.slots], values[self.slots :]), policy=policy
                )(merged)
                return [out for out in outs if is_float(out)]

            return jax.vjp(of_the_floating, *(v for v, flag in zip(values, floats, strict=True) if flag))

        return pull_back, self.shapes

    def _kept(self, policy: Any, only: Callable[[Any], bool] = lambda _: True) -> tuple[int, int, int]:
        """Bytes kept, where `only` holds: of inputs, of the slot, of values in between."""
        function, shapes = self._differentiated(policy)
        jaxpr = jax.make_jaxpr(lambda *values: jax.tree.leaves(function(*values)[1]))(*shapes).jaxpr
        position = {var: n for n, var in enumerate(jaxpr.invars)}
        sizes = [0, 0, 0]
        for atom in {id(atom): atom for atom in jaxpr.outvars}.values():
            n = position.get(atom) if not hasattr(atom, "val") else None
            sizes[2 if n is None else 1 if n < self.slots else 0] += aval_bytes(atom.aval) * only(atom.aval)
        return sizes[0], sizes[1], sizes[2]

    def _flops(self, policy: Any) -> int:
        function, shapes = self._differentiated(policy)

        def both(*values: Any) -> Any:
            outs, pull = function(*values)
            return outs, pull(outs)

        return flops_of(jax.make_jaxpr(both)(*shapes).jaxpr)


def flops_of(jaxpr: Jaxpr) -> int:
    """FLOPs of the matrix products in a program, scans counted with their lengths."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            out: Any = eqn.outvars[0].aval
            left: Any = eqn.invars[0].aval
            total += 2 * math.prod(out.shape) * math.prod(left.shape[n] for n in contracted)
        inner = [flops_of(program) for program in subprograms(eqn)]
        if eqn.primitive.name == "cond":
            total += max(inner, default=0)
        else:
            total += sum(inner) * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
    return total


def _added(one: LayerCost, other: LayerCost) -> LayerCost:
    numbers = ("calls", "inputs", "slot", "policy", "without_remat", "recomputed_flops", "host")
    return LayerCost(one.label, *(getattr(one, name) + getattr(other, name) for name in numbers))
