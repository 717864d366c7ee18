"""Layer programs: a small language, hypothesis strategies that draw it, and a machine that runs it.

A program works on D x D tensors. Each step gives one more value from those before. The machine runs it with or without
checkpointing; decisions come from a generator of its own, so that a second decision would be another one.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from roundpipe_torch import (
    Offload,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    keep,
    layer_scope,
    recompute_once,
    remat,
    save_for_recompute,
    update_once,
)

D = 4

# What a step can do with the last value `a` and an earlier one `b`, of the same dtype


def overwritten(a, b):
    c = a.clone()
    c[1:] = b[:-1]
    return c


def scanned(a, b):
    a = a.clone()
    for n in range(1, D):
        a[n].mul_(0.5)
    return a.cumsum(0) * b


OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "tanh": lambda a, b: torch.tanh(a),
    "sin": lambda a, b: torch.sin(a),
    "square": lambda a, b: (a * a).clamp(max=2.0),
    "softmax": lambda a, b: a.softmax(-1),
    "transpose": lambda a, b: a.t(),
    "identity": lambda a, b: a,
    "add": lambda a, b: (a + b) / 2,
    "multiply": lambda a, b: a * b.sigmoid(),
    "product": lambda a, b: a @ b / D,
    "where": lambda a, b: torch.where(a.detach() > 0, a, b),
    "stack": lambda a, b: torch.stack([a, b]).mean(0),
    "in place": lambda a, b: (a + 0).add_(b).mul_(0.5),
    "overwrite": overwritten,
    "scan": scanned,
    "detach": lambda a, b: a.detach() * b,
}
DRAWS = {
    "dropout": lambda a, b: F.dropout(a, 0.3),
    "noise": lambda a, b: a + 0.1 * torch.randn_like(b),
    "mask": lambda a, b: a.masked_fill(torch.rand_like(a) > 0.7, 0),
}


# How regions get and give tensors: pairs of functions, there and back


class Named(NamedTuple):
    a: Any
    rest: Any


@dataclass
class Plan:
    a: Any
    rest: Any = field(default_factory=list)


ARGUMENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "positional": (lambda a, b: ((a, b), {}), lambda a, b: (a, b)),
    "keywords": (lambda a, b: ((), {"b": b, "a": a}), lambda a, b: (a, b)),
    "nested": (lambda a, b: (({"a": a}, "text"), {"rest": [None, (b, 3)]}), lambda d, _, rest: (d["a"], rest[1][0])),
    "named": (lambda a, b: ((Named(a, [b]),), {}), lambda named: (named.a, named.rest[0])),
}
RESULTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "tensor": (lambda a, b: a, lambda a: [a]),
    "pair": (lambda a, b: (b, a), list),
    "nested": (lambda a, b: {"a": [a, None], "rest": (b, "text", 3)}, lambda out: [out["rest"][0], out["a"][0]]),
    "named": (lambda a, b: Named(a, None), lambda out: [out.a]),
    "dataclass": (lambda a, b: Plan(a, [b, 0.5]), lambda out: [out.rest[0], out.a]),
}

TO_HOST = Offload(min_bytes=1, inputs=True, kept=True)
DEFAULT: dict[str, Callable[..., Any]] = {
    "checkpoint": checkpoint,
    "remat": lambda function, *args, **kwargs: remat(function)(*args, **kwargs),
    "labelled": lambda function, *args, **kwargs: remat(function, label="layer")(*args, **kwargs),
    "to the end": partial(checkpoint, early_stop=False, debug=True),
    "offload": lambda function, *args, **kwargs: remat(function, offload=TO_HOST)(*args, **kwargs),
}
REENTRANT: dict[str, Callable[..., Any]] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "reentrant offload": lambda function, *args, **kwargs: remat(function, use_reentrant=True, offload=TO_HOST)(
        *args, **kwargs
    ),
}
WAYS = DEFAULT | REENTRANT


# The language


class Env(NamedTuple):
    """What a step finds."""

    values: list[torch.Tensor]
    weights: list[torch.Tensor]
    path: str  # of the body in its region

    def at(self, n: int) -> str:
        return f"{self.path}{n}"


class OopsError(Exception):
    """What a program raises and catches."""


class FaultError(Exception):
    """What it does not catch."""


class HaltError(BaseException):
    """The same, and `except Exception` does not catch it either."""


Body = tuple[Any, ...]


@dataclass(frozen=True)
class Do:
    """An operation on the last value and on the one `back` before it."""

    name: str
    back: int

    def run(self, machine: Machine, env: Env, path: str) -> torch.Tensor:
        a = env.values[-1]
        b = env.values[-1 - self.back % len(env.values)].to(a.dtype)
        return (OPERATIONS | DRAWS)[self.name](a, b)


@dataclass(frozen=True)
class Linear:
    """A weight, which all that use it share. `anew`: a parameter that this step makes of it."""

    weight: int
    anew: bool = False

    def run(self, machine: Machine, env: Env, path: str) -> torch.Tensor:
        a = env.values[-1]
        weight = env.weights[self.weight % len(env.weights)]
        if self.anew:
            weight = torch.nn.Parameter(weight.detach() * 2)
        return F.linear(a, weight.to(a.dtype)) / 2


@dataclass(frozen=True)
class Hook:
    """A gradient's hook, which changes it and counts. `bare`: on the value itself, maybe from before the region."""

    bare: bool = False

    def run(self, machine: Machine, env: Env, path: str) -> torch.Tensor:
        a = env.values[-1] if self.bare else env.values[-1] * 1
        if a.requires_grad:
            a.register_hook(machine.hook)
        return a


@dataclass(frozen=True)
class HookWeight:
    """A hook on a weight's gradient, by the tensor or by the node that takes it."""

    weight: int
    node: bool

    def run(self, machine: Machine, env: Env, path: str) -> torch.Tensor:
        weight = env.weights[self.weight % len(env.weights)]
        if torch.is_grad_enabled() and self.node:
            node = torch.autograd.graph.get_gradient_edge(weight).node
            machine.nodes.append(node)  # else its hooks may die with it, also without checkpointing
            node.register_prehook(lambda gradients: tuple(map(machine.hook, gradients)))
        elif torch.is_grad_enabled():
            weight.register_hook(machine.hook)
        return env.values[-1]


@dataclass(frozen=True)
class Decide:
    """A decision, in one of the styles that the library has."""

    style: str
    named: bool = False
    noisy: bool = False  # drawn from the generator that dropout draws from
    offload: bool | None = None
    tree: bool = False  # saved among other data

    def run(self, machine: Machine, env: Env, path: str) -> torch.Tensor:
        a = env.values[-1]
        if not self.tree:
            index = machine.decide(self, path, lambda draws: torch.randint(0, D, (D, D), generator=draws))
            out = a.gather(1, index.clone())
            index.zero_()  # R6: of no consequence
            return out
        data = machine.decide(self, path, self.data)
        out = a.gather(1, data["index"].clone()) * data["plan"].a + data["rest"][0][1] * data["plan"].rest
        data["index"].zero_()
        data["plan"].a, data["rest"][0][1] = 7.0, 7.0
        data["rest"].append(data)
        return out

    @staticmethod
    def data(draws: torch.Generator | None) -> Any:
        index, more = torch.randint(0, D, (2, D, D), generator=draws)
        return {"index": index, "plan": Plan(0.5, more / D), "rest": [np.array([1.0, 0.5]), None, "text", (True, 2)]}


@dataclass(frozen=True)
class Branch:
    """A decision between two bodies."""

    decide: Decide
    bodies: tuple[Body, Body]

    def run(self, machine: Machine, env: Env, path: str) -> torch.Tensor:
        n = machine.decide(self.decide, path, lambda draws: int(torch.randint(0, 2, (), generator=draws)))
        return machine.run(self.bodies[n], env._replace(path=f"{path}.{n}."))[-1]


@dataclass(frozen=True)
class Sort:
    """Values by `sort` in the forward, by `gather` in the recompute: with other strides, if not `contiguous`."""

    contiguous: bool

    def run(self, machine: Machine, env: Env, path: str) -> torch.Tensor:
        a = env.values[-1]
        with layer_scope(path):
            if doing_recompute():
                values = a.gather(1, get_recompute_data()[0])
            else:
                values, order = a.sort(-1)
                save_for_recompute(order, machine.sentinel())
        return values.contiguous() if self.contiguous else values


@dataclass(frozen=True)
class Extra:
    """Differentiable work of one phase alone, and what becomes of it."""

    recompute: bool
    life: str

    def run(self, machine: Machine, env: Env, path: str) -> torch.Tensor:
        a = env.values[-1]
        if doing_recompute() is self.recompute:
            extra = torch.sin(a @ a).exp()
            if self.life == "kept":
                machine.kept.append(extra)
            machine.local = extra if self.life == "local" else None
        return a * 1.0


@dataclass(frozen=True)
class Region:
    """A checkpointed layer."""

    way: str
    body: Body
    given: str = "positional"
    gives: str = "tensor"

    def run(self, machine: Machine, env: Env, path: str) -> list[torch.Tensor]:
        args, kwargs = ARGUMENTS[self.given][0](env.values[-1], env.values[-2 % len(env.values)])
        machine.watch(env.values[-1])
        layer = partial(self.layer, machine, machine.shared, env.weights)  # with the modules that it can reach
        return RESULTS[self.gives][1](machine.call(self.way, layer, *args, **kwargs))

    def layer(self, machine: Machine, shared: Any, weights: list[torch.Tensor], /, *args: Any, **kwargs: Any) -> Any:
        values = [*reversed(ARGUMENTS[self.given][1](*args, **kwargs))]
        values = machine.run(self.body, Env(values, weights, ""))
        return RESULTS[self.gives][0](values[-1], values[len(values) // 2])


@dataclass(frozen=True)
class Layer:
    """A module that the steps of a program share: see `Call`."""

    way: str
    body: Body
    state: str | None = None
    hook: bool = False


@dataclass(frozen=True)
class Call:
    """One use of a shared layer."""

    layer: int

    def run(self, machine: Machine, env: Env, path: str) -> torch.Tensor:
        a = env.values[-1]
        if not machine.shared:
            return a
        machine.watch(a)
        shared = machine.shared[self.layer % len(machine.shared)]
        out: torch.Tensor = machine.call(shared.layer.way, shared, a)
        return out


@dataclass(frozen=True)
class Keep:
    """A part that the recompute leaves out."""

    body: Body

    def run(self, machine: Machine, env: Env, path: str) -> torch.Tensor:
        return keep(partial(self.part, machine, f"{path}."), env.values[-1], weights=env.weights)

    def part(self, machine: Machine, path: str, a: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        return machine.run(self.body, Env([a], weights, path))[-1]


@dataclass(frozen=True)
class Within:
    """A part under a context."""

    context: str
    body: Body

    def run(self, machine: Machine, env: Env, path: str) -> torch.Tensor:
        a = env.values[-1]
        inner = env._replace(path=f"{path}.")
        if self.context == "scope":
            with layer_scope(path):
                return machine.run(self.body, inner)[-1]
        if self.context == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return machine.run(self.body, inner._replace(values=[a.float()]))[-1].to(a.dtype)
        with {"no_grad": torch.no_grad, "inference": torch.inference_mode}[self.context]():
            b = machine.run(self.body, inner)[-1]
        return a * b.clone()


@dataclass(frozen=True)
class Rescue:
    """A part that fails, in both phases, and code that goes on."""

    body: Body

    def run(self, machine: Machine, env: Env, path: str) -> torch.Tensor:
        try:
            machine.run((*self.body, Fail()), env._replace(path=f"{path}."))
        except OopsError:
            return env.values[-1] * 0.9
        raise AssertionError("nobody else caught it")


@dataclass(frozen=True)
class Fail:
    """The place where a program fails, always or in a phase while the machine is armed."""

    phase: str = "both"

    def run(self, machine: Machine, env: Env, path: str) -> torch.Tensor:
        if self.phase == "both":
            raise OopsError
        if machine.armed and doing_recompute() is (self.phase == "recompute"):
            raise machine.armed
        return env.values[-1]


@dataclass(frozen=True)
class Force:
    """A layer that differentiates inside itself."""

    body: Body

    def run(self, machine: Machine, env: Env, path: str) -> torch.Tensor:
        a = env.values[-1]
        if not (torch.is_grad_enabled() and a.requires_grad):
            return a
        energy = machine.run(self.body, env._replace(path=f"{path}."))[-1].square().sum()
        (force,) = torch.autograd.grad(energy, a, create_graph=True, allow_unused=True)
        return a if force is None else a + 0.1 * force


@dataclass(frozen=True)
class Program:
    """The outermost region, and the layers that are used in it."""

    region: Region | Within
    shared: tuple[Layer, ...] = ()


# The machine


class Shared(torch.nn.Module):
    """A layer with a weight and state of its own."""

    def __init__(self, machine: Machine, layer: Layer, seed: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(matrix(seed))
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.layer, self._machine = layer, weakref.ref(machine)
        if layer.hook:
            self.register_forward_hook(lambda module, args, out: out * 1.5)
            # Torch's own hook holds a gradient until a backward has passed the module. One that ends inside of it, as
            # that of a layer that differentiates inside itself does in a recompute, leaves a cycle through C++ then.
            if not any(isinstance(step, Force) for step in every((machine.program.region,))):
                self.register_full_backward_pre_hook(lambda module, grads: tuple(grad * 0.5 for grad in grads))

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        machine = self._machine()
        assert machine is not None
        out = machine.run(self.layer.body, Env([a], [self.weight], ""))[-1]
        if self.layer.state == "buffer":
            self.mean.mul_(0.9).add_(0.1 * a.detach().mean())
            return out * (1 + self.mean.clone())
        if self.layer.state == "update":
            update_once(self.mean.add_, 1.0)
        return out


class Sentinel:
    """Something that a slot holds by reference."""


def matrix(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(D, D, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Machine:
    """Runs a program; `checkpointing` or not."""

    def __init__(self, program: Program, checkpointing: bool, seed: int) -> None:
        self.program, self.checkpointing, self.seed = program, checkpointing, seed
        self.refs: list[weakref.ref[Any]] = []
        self.reset()

    def reset(self) -> None:
        """Everything as at the beginning."""
        self.draws = torch.Generator().manual_seed(self.seed)
        self.weights = [matrix(n, dtype).requires_grad_() for n, dtype in enumerate([torch.float64, torch.float32])]
        self.inputs: list[torch.Tensor] = []
        self.shared = [Shared(self, layer, seed) for seed, layer in enumerate(self.program.shared)]
        self.count = Counter(decisions=0, hooks=0)
        self.kept: list[torch.Tensor] = []
        self.nodes: list[Any] = []
        self.local: torch.Tensor | None = None
        self.armed: type[BaseException] | None = None

    def start(self) -> list[torch.Tensor]:
        """The outputs for one more input."""
        x = matrix(self.seed + len(self.inputs)).requires_grad_()
        self.inputs.append(x)
        out = self.program.region.run(self, Env([x * 1.0], self.weights, ""), "")
        return [y.double() for y in (out if isinstance(out, list) else [out])]

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [*self.inputs, *self.weights, *(module.weight for module in self.shared)]

    def take_gradients(self) -> list[torch.Tensor | None]:
        gradients = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        return gradients

    # For the steps

    def run(self, body: Body, env: Env) -> list[torch.Tensor]:
        """All values, after the steps of `body`."""
        for n, step in enumerate(body):
            out = step.run(self, env, env.at(n))
            env = env._replace(values=[*env.values, *(out if isinstance(out, list) else [out])])
        return env.values

    def call(self, way: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return WAYS[way](function, *args, **kwargs) if self.checkpointing else function(*args, **kwargs)

    def decide(self, how: Decide, path: str, make: Callable[[torch.Generator | None], Any]) -> Any:
        def decision() -> Any:
            if doing_recompute():  # what is decided again would be another decision, and is of no consequence
                return make(None if how.noisy else torch.Generator().manual_seed(self.seed + 1000))
            self.count["decisions"] += 1
            return make(None if how.noisy else self.draws)

        if how.style == "once":
            return recompute_once(decision)
        name = path if how.named else None
        with contextlib.nullcontext() if how.named or path == "0" else layer_scope(path):
            if how.style == "returned":
                return save_for_recompute(decision(), self.sentinel(), name=name, offload=how.offload)[0]
            if doing_recompute():
                get_recompute_data(name)
                return get_recompute_data(name)[0]
            data = decision()
            save_for_recompute(data, self.sentinel(), name=name, offload=how.offload)
            return data

    def hook(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:  # behind an argument that the second engine's node has none for, as torch's own has
            return None
        self.count["hooks"] += not doing_recompute()  # what a layer differentiates inside itself, it does again
        return gradient * 0.5

    def sentinel(self) -> Sentinel:
        """Dies with the slot that it is saved in."""
        sentinel = Sentinel()
        self.watch(sentinel)
        return sentinel

    def watch(self, what: Any) -> None:
        """`what` has to die with the graph."""
        if self.checkpointing:
            self.refs.append(weakref.ref(what))


# Drawing programs


class Kinds(NamedTuple):
    """Of what programs are made."""

    ways: tuple[str, ...] = tuple(DEFAULT)
    draws: bool = True  # from the default generator
    noisy: bool = True  # decisions that draw from it
    fails: bool = False
    calls: bool = True  # of shared layers
    contexts: tuple[str, ...] = ("scope", "no_grad", "inference", "autocast")


def steps(kinds: Kinds, depth: int) -> st.SearchStrategy[Any]:
    operations = [*OPERATIONS, *(DRAWS if kinds.draws else ())]
    simple = [
        st.builds(Do, st.sampled_from(operations), st.integers(0, 3)),
        st.builds(Linear, st.integers(0, 1), st.booleans()),
        st.builds(HookWeight, st.integers(0, 1), st.booleans()),
        decides(kinds),
        st.builds(Sort, st.booleans()),
        st.builds(Extra, st.booleans(), st.sampled_from(["dropped", "local", "kept"])),
        st.builds(Hook, st.booleans()),
    ]
    if kinds.calls:
        simple.append(st.builds(Call, st.integers(0, 1)))
    if kinds.fails:
        simple.append(st.builds(Fail, st.sampled_from(["forward", "recompute"])))
    if depth == 0:
        return st.one_of(simple)
    inner = bodies(kinds, depth - 1)
    return st.one_of(
        *simple,
        regions(kinds, inner),
        regions(kinds, inner),
        st.builds(Branch, decides(kinds), st.tuples(inner, inner)),
        st.builds(Keep, inner),
        st.builds(Keep, inner),
        st.builds(Within, st.sampled_from(kinds.contexts), inner),
        st.builds(Rescue, inner),
        *([] if set(kinds.ways) & set(REENTRANT) else [st.builds(Force, inner)]),
    )


def decides(kinds: Kinds) -> st.SearchStrategy[Decide]:
    return st.builds(
        Decide,
        st.sampled_from(["seed", "returned", "once"]),
        named=st.booleans(),
        noisy=st.booleans() if kinds.noisy else st.just(False),
        offload=st.sampled_from([None, True, False]),
        tree=st.booleans(),
    )


def regions(kinds: Kinds, inner: st.SearchStrategy[Body]) -> st.SearchStrategy[Region]:
    return st.builds(
        Region, st.sampled_from(kinds.ways), inner, st.sampled_from([*ARGUMENTS]), st.sampled_from([*RESULTS])
    )


@functools.cache
def bodies(kinds: Kinds, depth: int) -> st.SearchStrategy[Body]:
    return st.lists(steps(kinds, depth), max_size=4).map(tuple)


@functools.cache
def programs(kinds: Kinds) -> st.SearchStrategy[Program]:
    layer = st.builds(
        Layer,
        st.sampled_from(kinds.ways),
        bodies(kinds._replace(calls=False), 0),
        st.sampled_from([None, "buffer", "update"]),
        st.booleans(),
    )
    outermost: st.SearchStrategy[Any] = regions(kinds, bodies(kinds, 2))
    if "autocast" in kinds.contexts:
        outermost = st.one_of(outermost, outermost, outermost.map(lambda region: Within("autocast", (region,))))
    return st.builds(Program, outermost, st.lists(layer, max_size=2).map(tuple))


def every(body: Body) -> Iterator[Any]:
    """All steps of a program, at any depth."""
    for step in body:
        yield step
        for inner in (getattr(step, "body", ()), *getattr(step, "bodies", ())):
            yield from every(inner)
