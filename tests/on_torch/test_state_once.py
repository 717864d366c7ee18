"""State that a forward moves on: with checkpointing it is, after each step, what it is without."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundpipe_torch import (
    MutationError,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    keep,
    recompute_once,
    remat,
    save_for_recompute,
    update_once,
)
from tests.on_torch.oracle import ENGINES, WAYS, Counted, agree, leaf, plain, reentrant, same

D, E, T = 6, 4, 12

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm|.*spectral_norm:FutureWarning")


class Norms(nn.Module):
    """Batch norms that keep statistics, a cumulative one, and one that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.one = nn.Linear(D, D), nn.BatchNorm1d(D)
        self.two, self.three = nn.BatchNorm1d(D, momentum=None), nn.BatchNorm1d(D, track_running_stats=False)
        self.four, self.five = nn.InstanceNorm1d(D, track_running_stats=True), nn.SyncBatchNorm(D)

    def forward(self, x):
        x = self.three(self.two(torch.relu(self.one(self.linear(x)))))
        return self.five(self.four(x.t().unsqueeze(0))[0].t().sin())


class Parametrized(nn.Module):
    """The power iteration of spectral norm decides the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))
        self.two = nn.utils.spectral_norm(nn.Linear(D, D))

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


class Moving(nn.Module):
    """Divides by an average that the same forward has moved on, counts, and puts a new buffer in an old one's place."""

    def __init__(self, rows: int = 1) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))
        self.register_buffer("average", torch.ones(rows, D))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", None)
        self.register_buffer("sum", torch.zeros(D))

    def forward(self, x):
        if self.training:
            self.calls += 1
            with torch.no_grad():
                self.average.mul_(0.5).add_(x.square().mean(0))
                self.sum = self.sum + x.sum(0).detach()
        return torch.tanh(x * self.scale / self.average.clone().mean(0) + self.sum * self.calls)


class Balanced(nn.Module):
    """Routing by scores and a bias that the counts move; `style` says how the layer keeps its plan."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.gate, self.experts = nn.Linear(D, E), nn.Parameter(leaf(E, D, D, seed=5).detach() / 2)
        self.register_buffer("bias", torch.zeros(E))
        self.register_buffer("counts", torch.zeros(E))
        self.decided = 0

    def route(self, scores):
        self.decided += 1
        top = (scores + self.bias).topk(2, -1).indices
        self.counts += torch.bincount(top.flatten(), minlength=E)
        self.bias += 0.2 * torch.sign(self.counts.mean() - self.counts)
        return top

    def plan(self, scores):
        if self.style == "once":
            return recompute_once(self.route, scores)
        if self.style == "kept":
            return keep(lambda s: self.route(s.detach()), scores)
        if self.style == "returned":
            return save_for_recompute(None if doing_recompute() else self.route(scores.detach()))[0]
        if doing_recompute():
            return get_recompute_data()[0]
        return save_for_recompute(self.route(scores.detach()))[0]

    def forward(self, x):
        scores = torch.sigmoid(self.gate(x))
        top = self.plan(scores)
        weights = torch.zeros_like(scores).scatter(-1, top, scores.gather(-1, top))
        return torch.einsum("te,tei->ti", weights, torch.einsum("ti,eij->tej", x, self.experts))


class Cached(nn.Module):
    """Attends to keys that each forward appends, in a tensor and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(D, D)
        self.register_buffer("keys", torch.zeros(64, D))
        self.register_buffer("used", torch.zeros((), dtype=torch.long))
        self.log: list[int] = []

    def forward(self, x):
        k = self.proj(x)
        (start,) = save_for_recompute(int(self.used))
        update_once(self.append, k, start)
        past = self.keys[:start].clone()
        return torch.softmax(x @ torch.cat([past, k]).t(), -1) @ torch.cat([past, k])

    def append(self, k, start):
        self.keys[start : start + len(k)] = k
        self.used += len(k)
        self.log.append(start)


LAYERS = {
    "norms": Norms,
    "spectral": Parametrized,
    "moving": Moving,
    "large": lambda: Moving(4096),
    "once": lambda: Balanced("once"),
    "branch": lambda: Balanced("branch"),
    "returned": lambda: Balanced("returned"),
    "kept": lambda: Balanced("kept"),
    "cached": Cached,
}


def five_steps(make, way):
    """Outputs, gradients and state of five steps; the third is a forward only, the fourth in evaluation."""
    torch.manual_seed(0)
    layer, found = make(), []
    sgd = torch.optim.SGD(layer.parameters(), 0.1)
    for step in range(5):
        x = leaf(T, D, seed=step)
        layer.train(step != 3)
        y = way(layer, x)
        found += [y.detach(), *copy.deepcopy(list(layer.buffers()))]
        if step != 2:
            y.square().sum().backward()
            found += [x.grad, *(p.grad.clone() for p in layer.parameters())]
            sgd.step()
            sgd.zero_grad()
        found += [*copy.deepcopy(list(layer.buffers())), getattr(layer, "decided", 0), list(getattr(layer, "log", ()))]
    return found


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("way", [*WAYS, *ENGINES[1:]])
def test_five_steps(name, way) -> None:
    counted = Counted(way)
    same(five_steps(LAYERS[name], counted), five_steps(LAYERS[name], plain))
    assert counted.runs == counted.regions + 4


@pytest.mark.parametrize("way", ENGINES)
def test_microbatches_and_out_of_order_backward(way) -> None:
    """Each recompute starts from what its own forward found, whatever came after."""

    def scenario(way):
        torch.manual_seed(0)
        layer = nn.Sequential(Parametrized(), Moving(), Norms())
        xs = [leaf(T, D, seed=n) for n in range(3)]
        ys = [way(layer, x) for x in xs]
        for n in (1, 2, 0):
            ys[n].sum().backward(retain_graph=True)
        ys[0].sum().backward()
        return ys, [x.grad for x in xs], list(layer.buffers()), [p.grad for p in layer.parameters()]

    same(scenario(way), scenario(plain), within=1e-6 if way is reentrant else 0.0)


@pytest.mark.parametrize("outer", ENGINES)
@pytest.mark.parametrize("inner", ENGINES)
def test_nested(outer, inner) -> None:
    def scenario(outer, inner):
        torch.manual_seed(0)
        one, two = nn.Sequential(Norms(), Moving()), nn.Sequential(Parametrized(), Moving())

        def layer(x):
            return inner(two, inner(one, x).sin())

        x = leaf(T, D)
        y = outer(layer, outer(layer, x))
        y.sum().backward()
        return y, x.grad, [*one.buffers(), *two.buffers()], [p.grad for p in (*one.parameters(), *two.parameters())]

    same(scenario(outer, inner), scenario(plain, plain), within=1e-6 if reentrant in (outer, inner) else 0.0)


@pytest.mark.parametrize("way", ENGINES)
def test_where_modules_are_found(way) -> None:
    """In closures, lists, dicts, partials, arguments, methods and globals."""
    import functools

    global somewhere

    def scenario(way):
        global somewhere
        somewhere = Moving()
        held = [Moving() for _ in range(8)]
        blocks, named = held[:2], {"a": held[2]}
        partial = functools.partial(lambda module, x: module(x), held[3])

        def layer(x, module, modules):
            x = modules[2](modules[1](somewhere(partial(modules[0](module(x))))))
            return named["a"](blocks[1](blocks[0](x)))

        x = leaf(T, D)
        y = way(layer, x, held[4], modules=[held[5], held[6], held[7].forward])
        y.sum().backward()
        return y, x.grad, [list(module.buffers()) for module in (*held, somewhere)]

    same(scenario(way), scenario(plain))


NUMBERS, TABLE = torch.Generator(), torch.zeros(T, D)


def drawn_here(x):
    return torch.rand(x.shape, generator=NUMBERS)


class Naming(nn.Module):
    """What it uses stands in no attribute: globals, by a function beside it too."""

    def draw(self, x):
        return torch.rand(x.shape, generator=NUMBERS)

    def forward(self, x):
        return somewhere(x.exp() * self.draw(x)).sin() * drawn_here(x) + TABLE


class CalledNaming:
    def __call__(self, x):
        return somewhere(x.exp()).sin() * drawn_here(x) + TABLE


def naming_of_others():
    """A class whose methods have variables of the function around."""
    numbers, module = torch.Generator().manual_seed(3), Moving()

    class Inside(nn.Module):
        def forward(self, x):
            return module(x.exp() * torch.rand(x.shape, generator=numbers)).sin()

    return Inside(), module


@pytest.mark.parametrize("way", ENGINES)
def test_what_the_code_of_a_class_names(way) -> None:
    def scenario(way):
        global somewhere
        somewhere = Moving()
        NUMBERS.manual_seed(1)
        inside, module = naming_of_others()
        x = leaf(T, D)
        y = x
        for layer in (Naming(), nn.Sequential(nn.Tanh(), Naming()), CalledNaming(), inside):
            y = way(layer, y)
        y.sum().backward()
        return y, x.grad, [*somewhere.buffers(), *module.buffers()], NUMBERS.get_state()

    same(scenario(way), scenario(plain))


@pytest.mark.parametrize("way", ENGINES)
def test_a_class_that_was_made_in_a_function_dies_with_it(way) -> None:
    inside, module = naming_of_others()
    way(inside, leaf(T, D)).sum().backward()
    gone = weakref.ref(type(inside)), weakref.ref(module)
    del inside, module
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


@pytest.mark.parametrize("way", ENGINES)
def test_a_table_that_the_code_of_a_class_names_is_changed(way) -> None:
    global somewhere
    somewhere = nn.Identity()
    y = way(nn.Sequential(Naming(), nn.Tanh()), leaf(T, D))
    TABLE.add_(1)
    with pytest.raises(MutationError, match="a tensor from outside"):
        y.sum().backward()
    TABLE.zero_()


class Called:
    """No module, but a layer all the same."""

    def __init__(self) -> None:
        self.moving, self.rest = Moving(), {"drop": nn.Dropout(0.5)}
        self.w = leaf(D, D, seed=5)

    def run(self, x):
        return torch.tanh(self.rest["drop"](self.moving(x)) @ self.w)

    def __call__(self, x):
        return self.run(x)


@dataclasses.dataclass
class Wrapped:
    inner: Any

    def __call__(self, x):
        return self.inner(x)


@pytest.mark.parametrize("way", ENGINES)
@pytest.mark.parametrize(
    "taken",
    [lambda one: one, lambda one: one.run, lambda one: functools.partial(one), lambda one: lambda x: one(x), Wrapped],
    ids=["object", "method", "partial", "closure", "inside"],
)
def test_an_object_that_is_called_is_a_layer(taken, way) -> None:
    """Its modules, their modes and its weights are those of the forward; buffers move on once."""

    def scenario(way):
        torch.manual_seed(0)
        one, x = Called(), leaf(T, D)
        y = way(taken(one), x)
        before, one.w = one.w, leaf(D, D, seed=6)
        one.rest["drop"].eval()
        y.sum().backward()
        assert not one.rest["drop"].training
        return y, x.grad, before.grad, list(one.moving.buffers())

    agree(scenario, way)


def test_a_weight_of_an_object_that_is_stepped_before_backward_is_told() -> None:
    one, x = Called(), leaf(T, D)
    y = checkpoint(one, x)
    with torch.no_grad():
        one.w.add_(1)
    with pytest.raises(MutationError, match="has been modified by an inplace operation"):
        y.sum().backward()


def test_a_guarded_update_is_right_too() -> None:
    """A layer that knows its phase finds what its forward left, and what it does beside that is undone."""

    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(D)
            self.register_buffer("rows", torch.zeros(T, D))

        def forward(self, x):
            if not doing_recompute():
                self.rows.copy_(x.detach())
            return self.norm(x * self.rows.clone()).sin()

    same(five_steps(Guarded, checkpoint), five_steps(Guarded, plain))
    same(five_steps(Guarded, reentrant), five_steps(Guarded, plain))


@pytest.mark.parametrize("early_stop", [False, True])
def test_a_buffer_moved_behind_all_that_backward_needs(early_stop) -> None:
    """Only a recompute that goes on to there shows that its first values were not the forward's."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(256))
            self.runs = 0

        def forward(self, x):
            self.runs += 1
            phase = doing_recompute()
            y = (x * self.scale.clone()).exp()
            self.scale += 0.5
            return y if phase else y.clone()

    def scenario(way):
        layer, result = Last(), []
        for _ in range(2):
            x = leaf(128, 256)
            y = way(layer, x)
            y.sum().backward()
            result += [y, x.grad, layer.scale.clone()]
            runs.append(layer.runs)
        return result

    runs: list[int] = []
    want = scenario(plain)
    for way in (functools.partial(checkpoint, early_stop=early_stop), reentrant):
        runs.clear()
        same(scenario(way), want)
        assert runs == [3, 5]  # the first step is recomputed twice, and from then on it is known


def test_a_layer_that_moves_its_buffers_in_the_forward_alone_is_recomputed_whole_once() -> None:
    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(()))

        def forward(self, x):
            if not doing_recompute():
                self.rows += 1
            y = x.exp()
            ends.append(doing_recompute())
            return y

    layer, ends = Guarded(), []
    for _ in range(3):
        checkpoint(layer, leaf(256, 256)).sum().backward()
    assert ends == [False, True, False, False]
    assert layer.rows == 3


@pytest.mark.parametrize("aside", [recompute_once, update_once, keep], ids=lambda word: word.__name__)
@pytest.mark.parametrize("way", ENGINES)
def test_what_a_part_left_out_wrote_is_there(aside, way) -> None:
    """The layer never asks for its phase, and reads what a part wrote that the recompute leaves out."""

    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(D))
            self.register_buffer("calls", torch.zeros(()))
            self.weight = nn.Parameter(torch.ones(D))
            self.beside = nn.Module()  # whose buffer has the same name
            self.beside.register_buffer("calls", torch.zeros(()))

        def move(self, x):
            self.scale.mul_(0.5).add_(x.abs().mean(0))
            self.calls = self.calls + 1
            self.beside.calls += 3

        def inner(self, x):
            x = x * self.scale.clone()
            aside(self.move, x.detach())
            self.scale.add_(0.1)
            return (x * self.weight * self.scale.clone() + self.calls - self.beside.calls.clone()).sin()

        def forward(self, x):
            return checkpoint(self.inner, self.inner(x) + self.calls).tanh()

    same(five_steps(Later, way), five_steps(Later, plain))


def test_nothing_stays_of_a_recompute_that_began_with_other_values() -> None:
    """The first recompute finds the buffer as it is now, and a partner for all. The second one finds one only later."""

    class Telling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(D))
            self.weight = nn.Parameter(torch.ones(D))
            self.aside = []

        def forward(self, x):
            self.aside = []
            for _ in range(2 if doing_recompute() else 1):
                self.aside.append(torch.sin(x * self.weight).exp())
            self.mean.mul_(0.9).add_(x.detach().mean(0))
            return x * self.weight * (1 + self.mean.clone())

    def step(way):
        layer = Telling()
        losses = [way(layer, leaf(T, D, seed=n)).sin().sum() for n in range(3)]
        for n in (0, 2, 1):
            losses[n].backward()
        return layer.mean, layer.weight.grad

    same(step(checkpoint), step(plain))


def test_the_modules_have_their_own_buffers_back() -> None:
    layer = nn.Sequential(Norms(), Moving(), Parametrized())
    before = list(layer.buffers())
    versions = [buffer._version for buffer in before]
    y = checkpoint(layer, leaf(T, D))
    now = [buffer._version for buffer in layer.buffers()]
    assert now != versions
    held = list(layer.buffers())
    y.sum().backward()
    assert all(a is b for a, b in zip(layer.buffers(), held, strict=True))
    assert [buffer._version for buffer in layer.buffers()] == now  # others may have saved them


def test_also_if_the_recompute_fails() -> None:
    layer, state = Moving(), {"fail": False}

    def fails(x):
        y = layer(x)
        if state["fail"]:
            raise KeyError
        return y.sin()

    y = checkpoint(fails, leaf(T, D))
    held, values = list(layer.buffers()), copy.deepcopy(list(layer.buffers()))
    state["fail"] = True
    with pytest.raises(KeyError):
        checkpoint(fails, y, early_stop=False).sum().backward()
    layer.average.zero_()
    held, values = list(layer.buffers()), copy.deepcopy(list(layer.buffers()))
    with pytest.raises(KeyError):
        y.sum().backward()
    assert all(a is b for a, b in zip(layer.buffers(), held, strict=True))
    same(list(layer.buffers()), values)


def test_a_large_buffer_that_stays_is_copied_once() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(T, 5000))

        def forward(self, x):
            return (x * self.mask.mean(1, keepdim=True)).exp().sin()

    from benchmarks._meter import Meter

    layer, clones = Masked(), []
    for _ in range(3):
        with Meter() as meter:
            checkpoint(layer, leaf(T, D)).sum().backward()
        clones.append(meter.operations["aten::clone"])
    assert clones == [1, 0, 0]


def test_a_large_buffer_changed_for_the_first_time_is_told() -> None:
    class Late(Moving):
        moves = False

        def forward(self, x):
            return super().forward(x) if self.moves else x.exp().sin()

    layer = Late(4096)
    checkpoint(layer, leaf(T, D)).sum().backward()
    layer.moves = True
    with pytest.raises(MutationError, match=r"layer '.*Late': .* changed buffer 'average' of .*Late, which earlier"):
        checkpoint(layer, leaf(T, D)).sum().backward()
    checkpoint(layer, leaf(T, D)).sum().backward()


class Changing(nn.Module):
    """Changes a large buffer, once it is let."""

    def __init__(self, change) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(T, 5000))
        self.change, self.changes = change, False

    def forward(self, x):
        y = (x * self.state.mean(1, keepdim=True)).exp().sin()
        if self.changes:
            self.change(self.state, x.detach().sum())
        return y


def in_place(state, total):
    state += total


def by_index(state, total):
    state[0] = total


def by_out(state, total):
    torch.add(state, total, out=state)


def among_others(state, total):
    torch._foreach_add_([torch.zeros(2), state], 1.0)


def through_a_view(state, total):
    state.view(-1).narrow(0, 0, 3).fill_(total)


@pytest.mark.parametrize("change", [in_place, by_index, by_out, among_others, through_a_view])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_line_that_changed_a_large_buffer_is_told(change, use_reentrant) -> None:
    layer = Changing(change)

    def step():
        return checkpoint(layer, leaf(T, D), use_reentrant=use_reentrant)

    step().sum().backward()
    layer.changes = True
    y = step()
    with pytest.raises(MutationError) as caught:
        y.sum().backward()
    assert str(caught.value).splitlines() == [
        "layer 'Changing': the forward changed buffer 'state' of Changing, which earlier forwards left as it was, so "
        "the recompute cannot start from its old values.",
        f"  called at: {__file__}:{step.__code__.co_firstlineno + 1}",
        f"  written at: {__file__}:{change.__code__.co_firstlineno + 1}",
        "  way out: change it with update_once(...), which the recompute leaves out, if the layer's output needs the "
        "new values only.",
    ]
    step().sum().backward()  # from now on it is copied in time


def test_where_the_layer_was_called_is_told_if_the_recompute_does_not_change_the_buffer() -> None:
    layer = Changing(in_place)
    checkpoint(layer, leaf(T, D)).sum().backward()
    layer.changes = 1
    y = checkpoint(layer, leaf(T, D))
    layer.changes = 0  # a flag would be for the recompute what it was
    with pytest.raises(MutationError, match=r"\n  called at: .*test_state_once.py:\d+\n  way out"):
        y.sum().backward()


def test_what_a_forward_holds_goes_with_its_graph() -> None:
    layer = Moving()
    before = weakref.ref(layer.sum)
    gc.disable()
    try:
        y = checkpoint(layer, leaf(T, D))
        assert before() is not None
        del y
        assert before() is None
    finally:
        gc.enable()


def test_what_is_known_of_a_module_goes_with_it() -> None:
    from roundpipe_torch._buffers import _changing, _repeating

    def known() -> list[int]:
        return [len(notes._held) for notes in (_changing, _repeating)]

    def asks(x, layer):
        return layer(x) if doing_recompute() else layer(x).clone()

    gc.collect()
    before, layer = known(), Moving(rows=1 << 14)
    checkpoint(asks, leaf(T, D), layer).sum().backward()
    assert known() == [n + 1 for n in before]
    del layer
    gc.collect()
    assert known() == before


def test_functional_call_with_other_buffers() -> None:
    def scenario(way):
        torch.manual_seed(0)
        layer = Moving()
        others = {name: buffer.clone() + 1 for name, buffer in layer.named_buffers()}

        def call(x):
            return torch.func.functional_call(layer, others, (x,))

        x = leaf(T, D)
        y = way(call, x)
        y.sum().backward()
        return y, x.grad, list(layer.buffers())

    # The dict is not the module's: `functional_call` reads it anew in the recompute.
    same(scenario(checkpoint)[0], scenario(plain)[0])


def test_update_once_in_every_phase() -> None:
    seen = []

    def layer(x):
        update_once(seen.append, len(seen))
        return x.exp().sin()

    checkpoint(layer, leaf(3)).sum().backward()
    assert seen == [0]
    with torch.no_grad():
        checkpoint(layer, leaf(3))
    layer(leaf(3))
    assert seen == [0, 1, 2]
    checkpoint(lambda x: checkpoint(layer, checkpoint(layer, x, use_reentrant=True)), leaf(3)).sum().backward()
    assert seen == [0, 1, 2, 3, 4]
    checkpoint(lambda x: recompute_once(lambda: update_once(seen.append, 9)) or x.exp(), leaf(3)).sum().backward()
    assert seen == [0, 1, 2, 3, 4, 9]


def test_update_once_under_a_tape() -> None:
    from roundpipe_torch import record, replay

    seen = []

    def layer(x):
        update_once(seen.append, 1)
        (scale,) = save_for_recompute(x.detach().max())
        return (x * scale).exp()

    with record() as tape:
        checkpoint(layer, leaf(3)).sum().backward()
    assert seen == [1]
    for way in (checkpoint, reentrant):
        with replay(tape):
            way(layer, leaf(3)).sum().backward()
    assert seen == [1, 1, 1]


def test_update_once_carries_no_gradient_and_draws_line_up() -> None:
    def scenario(way):
        torch.manual_seed(1)
        x, total = leaf(3, 4), torch.zeros(4)

        def layer(x):
            update_once(lambda h: total.add_(h.sum(0) * torch.rand(4)), x * 2)
            return F.dropout(x.exp(), 0.5).sin()

        y = way(layer, x)
        y.sum().backward()
        return y, x.grad, total, total.requires_grad

    for way in (checkpoint, reentrant, lambda f, x: remat(f, verify="raise")(x)):
        same(scenario(way), scenario(plain))


def test_verify_does_not_move_state() -> None:
    same(five_steps(Norms, lambda layer, x: remat(layer, verify="raise")(x)), five_steps(Norms, plain))


def test_lazy_modules() -> None:
    def scenario(way):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.LazyBatchNorm1d(), Moving())
        for _ in range(2):
            x = leaf(T, D)
            way(layer, x).sum().backward()
        return x.grad, list(layer.buffers())

    same(scenario(checkpoint), scenario(plain))


def test_writes_behind_the_version_counter() -> None:
    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.ones(D))
            self.scale = nn.Parameter(torch.ones(D))

        def forward(self, x):
            self.average.data.mul_(0.5).add_(x.detach().abs().mean(0))
            return (x * self.scale / self.average).sin()

    same(five_steps(Behind, checkpoint), five_steps(Behind, plain))


def test_compiled_modules_inside() -> None:
    def scenario(way):
        torch.manual_seed(0)
        torch._dynamo.reset()
        layer = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), Moving())
        compiled = torch.compile(layer, backend="aot_eager")
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(3):
                x = leaf(T, D)
                y = way(compiled, x)
                y.sum().backward()
        return y, x.grad, list(layer.buffers())

    same(scenario(checkpoint), scenario(plain))


def test_a_buffer_that_carries_gradient_is_part_of_the_graph() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", None)

        def forward(self, x):
            return (x * self.scale).exp() * self.scale

    def scenario(way):
        layer, x, w = Tied(), leaf(T, D), leaf(D, seed=3)
        layer.scale = w.sin()
        y = way(layer, x)
        y.sum().backward()
        return y, x.grad, w.grad

    same(scenario(checkpoint), scenario(plain))
    same(scenario(reentrant), scenario(plain))


def test_a_buffer_dropped_or_made_part_of_the_graph_before_a_decision() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(leaf(D, seed=3).detach())
            self.register_buffer("gone", torch.full((D,), 2.0))
            self.register_buffer("scale", torch.ones(D))

        def forward(self, x):
            h = x * self.gone * self.scale
            self.gone, self.scale = None, self.weight.sin()
            (shift,) = save_for_recompute(h.detach().max())
            return (h * self.scale + shift).exp()

    def scenario(way):
        layer, x = Replacing(), leaf(T, D)
        y = way(layer, x)
        y.sum().backward()
        return y, x.grad, layer.weight.grad, layer.gone is None

    same(scenario(checkpoint), scenario(plain))
    same(scenario(reentrant), scenario(plain))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_modules_run_and_do_not_hide_those_beside_them() -> None:
    def scenario(way):
        torch.manual_seed(0)
        scripted, x = torch.jit.script(nn.Sequential(nn.Linear(D, D), nn.Tanh())), leaf(T, D)
        layer = nn.Sequential(Moving(), scripted, Moving())
        y = way(layer, x)
        y.sum().backward()
        return y, x.grad, layer[0].calls, layer[2].calls

    same(scenario(reentrant), scenario(plain))  # whose optimizer changes the graph between runs


_counted = Moving()


def _move(x):
    return _counted(x)


def test_modules_that_a_function_of_the_file_uses() -> None:
    """The function that is checkpointed calls another one, wrapped by a third, which may have it from anywhere."""

    @functools.wraps(_move)
    def wrapped(x):
        return _move(x)

    hidden = SimpleNamespace(move=_move)

    @functools.wraps(_move)
    def looked_up(x):
        return hidden.move(x)

    def scenario(way, function):
        _counted.load_state_dict({**Moving().state_dict(), "sum": torch.zeros(D)}, strict=False)
        x = leaf(T, D)
        y = way(lambda x: function(x), x)
        y.sum().backward()
        return y, x.grad, _counted.calls.clone(), _counted.average.clone()

    for function in (_move, wrapped, looked_up, lambda x: _move(x)):
        same(scenario(checkpoint, function), scenario(plain, function))
        same(scenario(reentrant, function), scenario(plain, function))


def test_a_buffer_is_moved_in_inference_mode_and_outside_of_it() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.mul_(0.9).add_(x.detach().mean())
            return x * (1 + self.mean.clone())

    def step(call) -> list[torch.Tensor]:
        net, x = Counting(), torch.linspace(1, 2, 4).requires_grad_()

        def layer(x: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                scale = keep(net, x)
            return net(x * scale.clone()).sin()

        call(layer, x).sum().backward()
        net(x)
        return [x.grad, net.mean]

    for got, want in zip(step(checkpoint), step(lambda layer, x: layer(x)), strict=True):
        assert torch.equal(got, want)
