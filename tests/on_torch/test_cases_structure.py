"""Shapes of programs, from public reports: exceptions, copies and pickles, hooks, threads, layers of every form.

Shapes: T tokens, D width. The oracle is `agree`: the same scenario without checkpointing.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import pickle
import threading

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from roundpipe_torch import (
    CheckpointMismatchError,
    MismatchError,
    MutationError,
    PhaseError,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    layer_scope,
    recompute_once,
    remat,
    save_for_recompute,
)
from tests.on_torch.oracle import ENGINES, WAYS, Source, agree, decided, leaf, plain, reentrant, same

T, D = 12, 6


# Exceptions (OLMo-core PR 720, Megatron-LM PR 7030, pytorch PR 102241)


class Fragile(torch.nn.Module):
    """Raises once, at the place it is told."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(leaf(D, D).detach())
        self.source, self.fail, self.error = Source(), None, None

    def at(self, place):
        if place == self.fail:
            self.fail = None
            raise self.error("pretended")

    def forward(self, x, way=plain):
        phase = "recompute" if doing_recompute() else "forward"
        idx = decided(lambda: (self.at("decision"), self.source.integers(4, len(x), 1))[1])
        h = torch.tanh(x @ self.w) * idx
        if h.requires_grad:
            h.register_hook(lambda g: self.at(f"hook of {phase}"))
        h = way(self.inner, h)
        self.at(phase)
        return torch.sin(h @ self.w)

    def inner(self, h):
        self.at("inner recompute" if doing_recompute() else "inner forward")
        for part in self.stream(h):
            h = h + torch.tanh(part)
        return h

    def stream(self, h):
        yield h @ self.w
        self.at("generator in recompute" if doing_recompute() else "generator")
        yield h


PLACES = [
    "decision",
    "forward",
    "inner forward",
    "generator",
    "recompute",
    "inner recompute",
    "generator in recompute",
    "hook of forward",
    "hook of recompute",
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("way", [*WAYS, ENGINES[1]])
def test_after_an_exception_the_next_step_is_right(way, error, place):
    module = Fragile()

    def step(way, n):
        module.zero_grad()
        x, module.source = leaf(n, D, seed=n), Source()
        way(lambda x: module(x, way), x).square().sum().backward()
        return x.grad, module.w.grad.clone(), module.source.asked

    module.fail, module.error = place, error
    # Backward runs the hooks of the graph it goes through: the forward's, or with reentrant=True the recompute's.
    never = "hook of forward" if way is reentrant else "hook of recompute"
    with pytest.raises(error) if place != never else contextlib.nullcontext():
        step(way, T)
    module.fail = None

    assert doing_recompute() is False
    with pytest.raises(PhaseError):
        get_recompute_data()
    # Nested reentrant regions add to the weight's gradient in another order.
    same(step(way, 5), step(plain, 5), within=1e-5 if way is reentrant else 0.0)


@pytest.mark.parametrize("caught", [ValueError, Exception, BaseException])
def test_a_layer_that_catches_what_an_inner_region_raises(caught):
    def scenario(way):
        x, w, source = leaf(T, D), leaf(D, D, seed=1), Source()

        def risky(x):
            idx = decided(lambda: source.integers(4, T, 1))
            torch.exp(x @ w)
            if idx.sum() > 0:
                raise ValueError("too many")
            return x

        def layer(x):
            x = x * decided(lambda: source.integers(3, T, 1))
            try:
                x = way(risky, x)
            except caught:
                x = x @ w
            return way(lambda x: torch.tanh(x @ w) * decided(lambda: source.integers(9, T, 1)), x)

        way(layer, x).square().sum().backward()
        return x.grad, w.grad, source.asked

    agree(scenario)


@pytest.mark.parametrize("caught", [Exception, BaseException])
def test_a_layer_that_catches_everything_does_not_disturb_the_end_of_a_recompute(caught):
    errors = []

    def scenario(way):
        x, w, v = leaf(T, D), leaf(D, D, seed=1), leaf(D, D, seed=2)

        def layer(x):
            scale = decided(lambda: 3.0)
            try:
                return torch.tanh(x @ w * scale).exp() @ v  # all that backward needs is there before the last product
            except caught as error:
                errors.append(error)
                return torch.sin(x @ w) @ v

        way(layer, x).square().sum().backward()
        return x.grad, w.grad, v.grad

    agree(scenario)
    assert len(errors) == (caught is BaseException)


def test_an_error_in_a_pack_hook_of_the_caller_leaves_nothing_behind():
    def refuse(tensor):
        raise OSError("disk full")

    x = leaf(T, D)
    with pytest.raises(OSError, match="disk full"), saved_tensors_hooks(refuse, lambda t: t):
        checkpoint(torch.sin, x * 1)
    assert not doing_recompute()


# Copies (fairscale issue 816, pytorch issue 117399, torchtitan issue 2622)


class Moe(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(leaf(D, D).detach())
        self.inner = torch.nn.ModuleDict({"up": torch.nn.Linear(D, D)})
        self.inner["up"].load_state_dict({"weight": leaf(D, D, seed=1).detach(), "bias": leaf(D, seed=2).detach()})
        self.register_buffer("scale", torch.ones(1))
        self.tag = "moe"

    def forward(self, x):
        idx = decided(lambda: (x @ self.w).argmax(-1, keepdim=True))
        return torch.tanh(self.inner["up"](x)) * torch.softmax(x @ self.w, -1).gather(1, idx) * self.scale


def through_pickle(module):
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
@pytest.mark.parametrize("pending", [False, True])
def test_a_copy_is_independent_and_still_checkpoints(duplicate, pending):
    net = torch.nn.Sequential(remat(Moe(), label="moe"), torch.nn.Linear(D, D))
    x = leaf(T, D)
    y = net(x) if pending else None
    twin = duplicate(net)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    runs = []
    twin[0].inner["up"].register_forward_hook(lambda *a: runs.append(doing_recompute()))

    assert twin(x).abs().max() == 0
    twin(x).sum().backward()
    assert runs == [False, False, True]
    assert all(p.grad is None for p in net.parameters())
    assert net[0].w.abs().max() > 0
    if pending:
        y.sum().backward()
        assert net[0].w.grad.abs().max() > 0


def test_names_attributes_and_state_are_those_of_the_layer():
    layer = Moe()
    wrapped, other = remat(layer), Moe()

    assert list(wrapped.state_dict()) == list(layer.state_dict())
    assert [name for name, _ in wrapped.named_modules()] == [name for name, _ in layer.named_modules()]
    assert isinstance(wrapped, Moe)
    assert wrapped.tag == "moe"
    other.load_state_dict(wrapped.state_dict())
    wrapped.load_state_dict(other.state_dict())
    wrapped.tag = "changed"
    wrapped.scale.fill_(2.0)
    assert (layer.tag, layer.scale.item()) == ("changed", 2.0)


def test_hooks_of_the_wrapper_fire_once_a_forward_and_a_backward():
    def scenario(way):
        layer = remat(Moe()) if way is not plain else Moe()
        x, fired = leaf(T, D), []
        layer.register_forward_pre_hook(lambda *a: fired.append("before"))
        layer.register_forward_hook(lambda *a: fired.append("after"))
        layer.register_full_backward_hook(lambda *a: fired.append("backward"))
        y = layer(x)
        y.register_hook(lambda g: fired.append("y"))
        layer.w.register_hook(lambda g: fired.append("w"))
        y.sum().backward()
        return x.grad, layer.w.grad, fired

    same(scenario(remat), scenario(plain))


# What a layer may take and give


class Pair(tuple):
    __slots__ = ()


Named = collections.namedtuple("Named", "left right")


def forms(x, w):
    """Every output form a layer may have, from one graph."""
    h = torch.tanh(x @ w) * decided(lambda: (x @ w).argmax(-1, keepdim=True) + 1)
    return {
        "tuple": (h, None, 3, "text"),
        "dict": {"a": h, "b": {"c": [h.sin()]}},
        "named": Named(h, h.cos()),
        "view": h[1:, ::2],
        "transposed": h.T,
        "chunks": h.chunk(2),
        "unbind": h.unbind(0),
        "expanded": h.sum(0, keepdim=True).expand(4, D),
        "input": (x, h),
        "weight": (w, h),
        "same twice": (h, h),
        "detached": (h, h.detach(), h.argmax(-1), h > 0),
        "topk": h.topk(2),
        "scalar": h.sum(),
        "complex": torch.complex(h, h.sin()).abs(),
        "empty": (h[:0], h),
        "set of nothing": (set(), h),
        "inplace view": h.sin().view(-1).mul_(2).view(T, D),
    }


@pytest.mark.parametrize("form", forms(torch.ones(T, D), torch.ones(D, D)))
@pytest.mark.parametrize("way", [*WAYS, ENGINES[1]])
def test_output_of_any_form(way, form):
    def scenario(way):
        x, w = leaf(T, D), leaf(D, D, seed=1)
        out = way(lambda x, w: forms(x, w)[form], x * 1, w)
        total = sum((n + 1) * t.square().sum() for n, t in enumerate(tensors(out)) if t.requires_grad)
        total.backward()
        return [t.detach() if isinstance(t, torch.Tensor) else t for t in flat(out)], x.grad, w.grad

    agree(scenario, way)


def flat(tree):
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [leaf for item in tree for leaf in flat(item)] if isinstance(tree, (tuple, list, set)) else [tree]


def tensors(tree):
    return [item for item in flat(tree) if isinstance(item, torch.Tensor)]


INPUTS = {
    "complex": lambda: leaf(T, D, dtype=torch.complex64),
    "integers": lambda: torch.arange(T * D).view(T, D),
    "bools": lambda: torch.arange(T * D).view(T, D) % 3 == 0,
    "double": lambda: leaf(T, D, dtype=torch.float64),
    "no tokens": lambda: leaf(0, D),
    "one token": lambda: leaf(1, D),
    "transposed": lambda: leaf(D, T).T,
    "broadcast": lambda: leaf(1, D).expand(T, D),
}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("way", [*WAYS, ENGINES[1]])
def test_input_of_any_kind(way, kind):
    def scenario(way):
        w, given, source = leaf(D, D, seed=1), INPUTS[kind](), Source()

        def layer(x):
            h = x.to(w.dtype) if x.dtype in (torch.int64, torch.bool, torch.float64) else x
            h = torch.tanh(h @ w.to(h.dtype)) * (decided(lambda: source.integers(3, len(x), 1)) + 1)
            return h.abs() if h.is_complex() else h

        way(layer, given).square().sum().backward()
        return given.grad if given.is_leaf else None, w.grad, source.asked

    agree(scenario, way, vanishes=kind == "no tokens")


# Operations in place


def in_place_in_the_layer(x, w):
    h = x @ w
    h.mul_(2)[1::2] += x[1::2].detach()
    h = h.relu_().clone().masked_fill_(decided(lambda: h < 0.5), 0.0)
    h.view(-1)[:4].zero_()
    return torch.sin(h) @ w


def saved_then_changed(x, w):
    h = torch.exp(x @ w)
    y = torch.sin(h) * decided(lambda: 2.0)
    h.add_(1)
    return y.exp()


def view_changed(x, w):
    h = torch.tanh(x @ w)
    y = h * decided(lambda: 2.0) * h
    h[0].zero_()
    return y.exp()


def test_a_layer_may_work_in_place():
    def scenario(way):
        x, w = leaf(T, D), leaf(D, D, seed=1)
        way(in_place_in_the_layer, x, w).square().sum().backward()
        return x.grad, w.grad

    agree(scenario)


@pytest.mark.parametrize("layer", [saved_then_changed, view_changed])
@pytest.mark.parametrize("way", [plain, checkpoint, reentrant], ids=["plain", "default", "reentrant"])
def test_what_autograd_refuses_in_place_is_refused(way, layer):
    y = way(layer, leaf(T, D), leaf(D, D, seed=1))

    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        y.sum().backward()
    assert way is not checkpoint or isinstance(caught.value, MutationError)


@pytest.mark.parametrize("layer", [torch.exp, lambda x: torch.tanh(x)[0]], ids=["whole", "a view"])
@pytest.mark.parametrize("way", [*WAYS, ENGINES[1]])
def test_an_output_written_in_place_has_the_gradient_of_what_it_was(way, layer):
    """Plain autograd refuses where the output itself was saved; a recompute has its own."""
    got, want = leaf(T, D), leaf(T, D)
    way(layer, got).mul_(3).sum().backward()
    (layer(want) * 3).sum().backward()

    same(got.grad, want.grad)


def test_an_input_that_the_layer_itself_changes_is_refused_not_wrong():
    def layer(x):
        return torch.sin(x.mul_(2)) * decided(lambda: 2.0)

    y = checkpoint(layer, leaf(T, D) * 1)

    with pytest.raises(MutationError, match="input was changed in place"):
        y.sum().backward()


# Autograd inside a layer, and layers inside autograd


class Twice(torch.autograd.Function):
    """Reads its saved tensors again and again."""

    @staticmethod
    def forward(ctx, x, w):
        y = torch.exp(x @ w)
        ctx.save_for_backward(x, w, y, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (x, *_), (_, w, _, _), (*_, y) = ctx.saved_tensors, ctx.saved_tensors, ctx.saved_tensors
        return grad * y @ w.T, x.T @ (grad * y)


def force(x, w):
    """The derivative of an energy, itself to be differentiated."""
    if not x.requires_grad:
        x = x.detach().requires_grad_()
    energy = torch.sin(x @ w).square().sum() * decided(lambda: 2.0)
    (f,) = torch.autograd.grad(energy, x, create_graph=True)
    return torch.sin(f) @ w


def several_forces(x, w):
    f = force(x, w)
    for power in (2, 3):
        (g,) = torch.autograd.grad((f * decided_once(power)).pow(power).sum(), x, create_graph=True)
        f = torch.sin(g)
    return f


def decided_by_a_gradient(x, w):
    """Where the loss is steep."""

    @torch.enable_grad()
    def steepest(x):
        x = x.detach().requires_grad_()
        h = torch.tanh(x @ w.detach())
        (g,) = torch.autograd.grad(h.exp().sum(), x, create_graph=True)
        (g,) = torch.autograd.grad(g.sin().sum(), x)
        return g.argmax(-1, keepdim=True)

    return torch.sin(x @ w).gather(-1, recompute_once(steepest, x))


def decided_once(power):
    (kept,) = save_for_recompute(float(power), name=str(power))
    return kept


def inner_steps(x, w):
    """Two steps of an inner optimisation that the outer gradient goes through."""
    fast, rate = w, decided(lambda: 0.1)
    for _ in range(2):
        (g,) = torch.autograd.grad(torch.tanh(x @ fast).square().sum(), fast, create_graph=True)
        fast = fast - rate * g
    return torch.tanh(x @ fast)


def backward_on_the_side(x, w):
    """An inner optimisation, as in meta learning without a meta gradient."""
    scale = torch.ones(D, requires_grad=True)
    for _ in range(2):
        (torch.tanh(x.detach() @ w.detach()) * scale).square().sum().backward()
    return torch.sin(x @ w) * scale.grad * decided(lambda: 2.0)


def inner_saved_tensor_hooks(x, w):
    with saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
        y = torch.exp(x @ w)
    with torch.autograd.graph.save_on_cpu():
        y = torch.sin(y) * decided(lambda: 2.0)
    return torch.tanh(y @ w)


def torchs_checkpoint_inside(x, w):
    return torch.utils.checkpoint.checkpoint(
        lambda x: torch.tanh(x @ w).exp(), x * decided(lambda: 2), use_reentrant=False
    )


def twice(x, w):
    return Twice.apply(x, w) * decided(lambda: 2.0)


LAYERS = [
    twice,
    force,
    several_forces,
    decided_by_a_gradient,
    inner_steps,
    backward_on_the_side,
    inner_saved_tensor_hooks,
    torchs_checkpoint_inside,
]


MEETINGS = [
    pytest.param(layer, outer, id=f"{layer.__name__} {outer}")
    for layer in LAYERS
    for outer in ("alone", "nested", "inside torch's", "twice backward", "under hooks")
    if not (layer is twice and outer == "inside torch's")  # which lets saved tensors be read once only
]


def forces_of_what_was_chosen(x, w):
    """Energies of the best scores: by `topk` behind a gate in the forward, by `gather` in the recompute."""
    for n in range(2):
        scores = torch.sin(x @ w)
        with layer_scope("choice"):
            if doing_recompute():
                best = scores.gather(-1, get_recompute_data()[0])
            else:
                gate = scores.softmax(-1)
                best, idx = scores.topk(2)
                save_for_recompute(idx, gate.detach().mean())
        (f,) = torch.autograd.grad(best.square().sum(), scores, create_graph=True)
        x = torch.tanh(f) + x * decided_once(n)
    return torch.sin(x @ w)


def test_a_force_of_what_the_phases_compute_by_other_operations_is_refused():
    """While the forward waits in the midst of the layer, nothing tells which of the tensors alive it asks for."""
    x, w = leaf(T, D), leaf(D, D)
    with pytest.raises(MismatchError, match=r"layer '.*forces_of_what_was_chosen"):
        checkpoint(forces_of_what_was_chosen, x, w).sum().backward()
    assert not doing_recompute()


def test_a_recompute_that_gets_ahead_of_its_forward_names_what_it_asked_for():
    def layer(x):
        y = x.sin()
        if doing_recompute():
            get_recompute_data("late")
        (force,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        save_for_recompute(1, name="late")
        return force * y

    says = r"(?s)layer '.*got past that point.*the recompute: layer '.*slot 'late'.*asked for at: .*structure\.py:\d+"
    with pytest.raises(CheckpointMismatchError, match=says):
        checkpoint(layer, leaf(T, D))


@pytest.mark.parametrize(("layer", "outer"), MEETINGS)
def test_a_layer_that_meets_autograd_itself(outer, layer):
    def scenario(way):
        x, w = leaf(T, D), leaf(D, D, seed=1)
        hooks = saved_tensors_hooks(
            lambda t: t.double() if t.is_floating_point() else t, lambda t: t.float() if t.is_floating_point() else t
        )
        if outer == "nested":
            y = way(lambda x: torch.sin(way(layer, torch.cos(x), w)), x)
        elif outer == "inside torch's" and way is not plain:
            y = torch.utils.checkpoint.checkpoint(lambda x: torch.sin(way(layer, x, w)), x, use_reentrant=False)
        elif outer == "inside torch's":
            y = torch.sin(layer(x, w))
        else:
            with hooks if outer == "under hooks" else contextlib.nullcontext():
                y = way(layer, x, w)
        loss = y.square().sum()
        loss.backward(retain_graph=outer == "twice backward")
        if outer == "twice backward":
            loss.backward()
        return y.detach(), x.grad, w.grad

    agree(scenario)


@pytest.mark.parametrize(
    ("way", "message"), [(checkpoint, "the forward differentiates"), (reentrant, "keeps no graph")]
)
def test_a_gradient_in_the_forward_alone(way, message):
    def layer(x):
        if doing_recompute():
            (idx,) = get_recompute_data()
        else:
            (g,) = torch.autograd.grad(x.sin().sum(), x)
            idx = g.argsort(-1)
            save_for_recompute(idx)
        return x.gather(-1, idx)

    with pytest.raises(MismatchError, match=message) as caught:
        way(layer, leaf(T, D))
    assert "recompute_once(...)" in str(caught.value).splitlines()[-1]
    assert doing_recompute() is False


# Threads, depth


@pytest.mark.parametrize("way", WAYS)
def test_threads_that_step_models_of_their_own(way):
    def work(seed, way, meet):
        x, ws, source = leaf(T, D, seed=seed), [leaf(D, D, seed=n) for n in range(3)], Source(seed)

        def layer(x, w):
            meet()
            return torch.tanh(x @ w) * decided(lambda: source.integers(5, T, 1))

        for _ in range(3):
            y = x
            for w in ws:
                y = way(layer, y, w)
            y.square().sum().backward()
        return x.grad, [w.grad for w in ws], source.asked

    def together(seed):
        results[seed] = work(seed, way, lambda: barrier.wait(timeout=20))

    results, barrier = {}, threading.Barrier(4)
    threads = [threading.Thread(target=together, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same([results.get(n) for n in range(4)], [work(n, plain, lambda: None) for n in range(4)])


def test_backward_on_another_thread():
    def scenario(way):
        x, w, source = leaf(T, D), leaf(D, D, seed=1), Source()
        y = way(lambda x: torch.tanh(x @ w) * decided(lambda: source.integers(5, T, 1)), x).square().sum()
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
        return x.grad, w.grad, source.asked, doing_recompute()

    agree(scenario)


@pytest.mark.parametrize("way", ENGINES)
def test_backward_of_one_graph_on_many_threads_at_once(way):
    def scenario(way):
        x, w, source = leaf(T, D), leaf(D, D, seed=1), Source()
        y = way(lambda x: torch.tanh(x @ w) * decided(lambda: source.integers(5, T, 1)), x).square().sum()
        start, found = threading.Barrier(4), {}

        def ask(n):
            start.wait(timeout=20)
            found[n] = [torch.autograd.grad(y, (x, w), retain_graph=True) for _ in range(3)]

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found.get(n) for n in range(4)], source.asked

    agree(scenario, way)


def test_dropout_in_threads_is_right_or_refused():
    outcomes, barrier = [], threading.Barrier(2)

    def work():
        masks = []

        def layer(x):
            barrier.wait(timeout=20)
            masks.append(torch.rand(8))
            barrier.wait(timeout=20)
            return torch.sin(x * masks[-1])

        for _ in range(3):
            try:
                checkpoint(layer, leaf(8)).sum().backward()
            except CheckpointMismatchError as error:
                outcomes.append("another thread" in str(error))
            else:
                outcomes.append(torch.equal(*masks[-2:]))

    threads = [threading.Thread(target=work) for _ in range(2)]
    with torch.random.fork_rng():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert outcomes == [True] * 6


@pytest.mark.parametrize(("length", "depth"), [(400, 0), (3, 12)])
def test_long_chains_and_deep_nests(length, depth):
    def scenario(way):
        x, source = leaf(4, seed=1), Source()

        def layer(x, depth):
            factor = decided(lambda: source.integers(9, 4) * 0.01 + 1)
            return torch.sin(way(layer, x, depth - 1) * factor if depth else x * factor)

        y = x
        for _ in range(length):
            y = way(layer, y, depth)
        y.sum().backward()
        return x.grad, source.asked

    agree(scenario)
