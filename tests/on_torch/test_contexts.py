"""context_fn: torch's own contexts under our engine, and our contexts under torch's."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import weakref

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed._composable import checkpoint as composable
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from roundpipe_torch import (
    GradientError,
    MismatchError,
    OptionError,
    PhaseError,
    SlotError,
    VerifyError,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    keep,
    layer_scope,
    recompute_contexts,
    recompute_once,
    record,
    remat,
    replay,
    save_for_recompute,
    update_once,
    usage,
)
from roundpipe_torch._torchs import leave  # torch 2.11 leaves its hooks behind where an error is kept


def leaf(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def torchs(function, *args, context_fn=recompute_contexts):
    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=context_fn)


second = functools.partial(checkpoint, use_reentrant=True)


class Counted:
    def __init__(self) -> None:
        self.decisions = 0
        self.draws = torch.Generator().manual_seed(0)

    def __call__(self, x):
        if doing_recompute():
            (index,) = get_recompute_data()
        else:
            index = torch.randint(0, 6, (6, 1), generator=self.draws)
            self.decisions += 1
            save_for_recompute(index)
        return torch.tanh(x).gather(1, index) * torch.ones(6)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_our_contexts_under_torchs_checkpoint(depth) -> None:
    def run(call):
        layer, x = Counted(), leaf()

        def level(x, n):
            return layer(x) if n == 1 else layer(x) + call(level, layer(x) if n == 0 else x, n - 1)

        y = call(level, x, depth)
        y.square().sum().backward(retain_graph=True)
        y.square().sum().backward()
        return x.grad, layer.decisions

    want, decisions = run(lambda f, *args: f(*args))
    got, made = run(torchs)
    assert torch.equal(got, want)
    assert made == decisions == depth


def test_an_exception_under_torchs_checkpoint_leaves_no_phase() -> None:
    def layer(x):
        if doing_recompute():
            raise ValueError("pretended")
        return x.exp()

    with pytest.raises(ValueError, match="pretended"):
        torchs(layer, leaf()).sum().backward()
    assert doing_recompute() is False


def test_what_torchs_matching_cannot_do() -> None:
    """The reason for our engine: a tracked gate in the forward alone."""

    def layer(x):
        if doing_recompute():
            (top,) = get_recompute_data()
        else:
            top = torch.softmax(x @ x, -1).topk(2).indices
            save_for_recompute(top)
        return torch.tanh(x).gather(1, top)

    with pytest.raises(CheckpointError):
        torchs(layer, leaf()).sum().backward()
    checkpoint(layer, leaf()).sum().backward()


def test_contexts_are_entered_around_every_run() -> None:
    entered = []

    @contextlib.contextmanager
    def note(name):
        entered.append(name)
        yield

    class Reusable(contextlib.AbstractContextManager):
        def __enter__(self):
            entered.append("recompute")

        def __exit__(self, *exc):
            return None

    y = checkpoint(torch.exp, leaf(), context_fn=lambda: (note("forward"), Reusable()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert entered == ["forward", "recompute", "recompute"]


def test_selective_checkpointing_keeps_what_its_policy_names() -> None:
    def keep_products(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(x, w):
        top = recompute_once(lambda: (x.detach() * 2).argmax(-1, keepdim=True))
        return torch.tanh(torch.tanh(x @ w) @ w).gather(1, top)

    def run(call):
        x, w = leaf(), leaf(1)
        with FlopCounterMode(display=False) as counter:
            call(layer, x, w).square().sum().backward()
        return [x.grad, w.grad], counter.get_total_flops()

    selective = functools.partial(create_selective_checkpoint_contexts, keep_products)
    want, plain = run(lambda f, *args: f(*args))
    got, kept = run(lambda f, *args: checkpoint(f, *args, context_fn=selective))
    _, recomputed = run(checkpoint)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert kept == plain < recomputed


@pytest.mark.parametrize("respect", [None, False, True])
def test_hooks_around_a_selective_policy(respect) -> None:
    """What the policy keeps goes through them if it is asked for (pytorch issue 173302)."""
    seen = []

    def layer(x):
        (top,) = save_for_recompute(x.detach().argmax(-1, keepdim=True))
        return (x @ x.T).tanh().gather(1, top)

    def run(call, **options):
        x = leaf()
        with saved_tensors_hooks(lambda t: seen.append(t.shape) or t.clone(), lambda t: t):
            y = call(layer, x, **options)
        y.square().sum().backward()
        return x.grad

    selective = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    options = {"context_fn": selective, "respect_saved_tensors_hooks": respect}
    want = run(lambda f, x: f(x))
    if respect and not SELECTIVE_RESPECTS:
        with pytest.raises(OptionError, match=r"needs torch 2\.14"):
            run(checkpoint, **options)
        return
    seen.clear()
    got = run(checkpoint, **options)
    assert torch.equal(got, want)
    assert len(seen) == (2 if respect else 1)  # the input, and the product


SELECTIVE_RESPECTS = hasattr(torch.utils.checkpoint, "_current_user_saved_tensors_hooks")


def test_a_decorator_of_functions_and_methods() -> None:
    class Net(torch.nn.Module):
        @checkpoint(preserve_rng_state=False)
        def forward(self, x, *, times=1.0):
            made.append(doing_recompute())
            (top,) = save_for_recompute(x.detach().argmax(-1, keepdim=True))
            return x.exp().gather(1, top) * times

    made: list[bool] = []
    for call in (Net(), checkpoint()(Net()), checkpoint(use_reentrant=True)(lambda x, times: Net()(x, times=times))):
        made.clear()
        x = leaf()
        call(x, times=2.0).sum().backward()
        assert True in made
        assert x.grad.count_nonzero() == len(x)
    with pytest.raises(OptionError, match="checkpoint has no function to call with times"):
        checkpoint(times=2.0)


class Routed:
    """Layers whose routing has products of its own, which a policy keeps too."""

    def __init__(self) -> None:
        self.routed = 0

    def route(self, x, gate):
        self.routed += 1
        return (x @ gate + self.routed * (torch.arange(6.0) % 3)).argsort(-1)[:, :3]

    def once(self, x, w, gate):
        h = torch.tanh(x @ w) @ w
        return h.gather(1, recompute_once(self.route, x, gate)).sin() * x.clone()[:, :3]

    def phases(self, x, w, gate):
        if doing_recompute():
            (index,) = get_recompute_data()
        else:
            with torch.no_grad():
                (index,) = save_for_recompute(self.route(x, gate))
        return (torch.tanh(x @ w) @ w).gather(1, index).sin()

    def read_early(self, x, w, gate):
        recomputing = doing_recompute()
        if recomputing:
            (index,) = get_recompute_data()
        h = torch.tanh(x @ w)
        if not recomputing:
            with torch.no_grad():
                (index,) = save_for_recompute(self.route(h, gate))
        return (h @ w).gather(1, index).sin()

    def loop(self, x, w, gate):
        for n in range(3):
            with layer_scope(f"layer {n}"):
                h = self.phases(x, w, gate) + self.read_inside(x, w, gate)
            x = x + torch.cat([h, h], 1) @ w
        return x

    def read_inside(self, x, w, gate):
        return checkpoint(self.phases, x @ w, w, gate).clone()

    def auto(self, x, w, gate):
        index = self.route(x, gate)
        values, _ = (x @ w).sort(1)
        return (torch.tanh(values @ w) @ w).gather(1, index).sin() * values.clone()[:, :3]


MM, CLONE, SORT = torch.ops.aten.mm.default, torch.ops.aten.clone.default, torch.ops.aten.sort.default
LAYERS = ["once", "phases", "read_early", "loop", "read_inside", "auto"]


@pytest.mark.parametrize("kept", [(MM,), (MM, CLONE, SORT), None], ids=["products", "more", "all"])
@pytest.mark.parametrize("torchs_own", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_policy_keeps_the_operations_of_each_line(name, torchs_own, kept) -> None:  # R10
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if kept is None or op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    if name == "auto" and torchs_own:
        return
    selective = functools.partial(create_selective_checkpoint_contexts, policy)

    def step(way):
        layers, (x, w, gate) = Routed(), map(leaf, range(3))
        with FlopCounterMode(display=False) as counter:
            y = way(getattr(layers, name), x, w, gate)
            y.square().sum().backward()
        return layers.routed, y.detach(), x.grad, w.grad, counter.get_total_flops()

    def ours(layer, *args):
        return remat(layer, context_fn=selective, auto=name == "auto")(*args)

    made, *want, flops = step(call)
    again, *got, total = step(functools.partial(torchs, context_fn=selective) if torchs_own else ours)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert again == made or name == "auto"  # which makes its decisions again but for those operations
    assert total == flops or name in ("loop", "read_inside")  # regions inside have no policy


def test_a_context_that_swallows_the_forwards_exception_is_told() -> None:
    def layer(x):
        raise KeyError("pretended")

    contexts = lambda: (contextlib.suppress(KeyError), contextlib.nullcontext())  # noqa: E731
    with pytest.raises(OptionError, match="the context that context_fn gave for it swallowed the exception"):
        checkpoint(layer, leaf(), context_fn=contexts)
    assert doing_recompute() is False


def test_checkpoint_takes_torchs_keywords_and_no_others() -> None:
    def keywords(function):
        found = inspect.signature(function).parameters.values()
        return {parameter.name for parameter in found if parameter.kind is parameter.KEYWORD_ONLY}

    newer = {"preserve_rng_state", "respect_saved_tensors_hooks"}  # the first hides in **kwargs before torch 2.14
    assert keywords(checkpoint) == keywords(torch_checkpoint) | newer

    def layer(x, *, label, verify, offload):
        assert (label, verify, offload) == ("a", "b", "c")  # words of `remat` are words of the layer here
        return x.exp()

    checkpoint(layer, leaf(), label="a", verify="b", offload="c").sum().backward()


@pytest.mark.parametrize("use_reentrant", [None, False])
def test_nothing_said_means_not_reentrant_and_no_warning(use_reentrant) -> None:
    x = leaf()
    y = checkpoint(torch.exp, x, use_reentrant=use_reentrant)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"determinism_check": "strict"}, "determinism_check must be one of 'default', 'none', not 'strict'."),
        ({"determinism_check": ["default"]}, "determinism_check must be one of 'default', 'none', not ['default']."),
        ({"use_reentrant": "False"}, "use_reentrant must be True or False, not 'False'."),
        ({"debug": "no"}, "debug must be True or False, not 'no'."),
        ({"context_fn": "no"}, "context_fn must be a function, not 'no'."),
        ({"context_fn": lambda: 3}, "context_fn gave 3, not two contexts."),
        ({"context_fn": lambda: (3, 4)}, "context_fn gave (3, 4), not two contexts."),
    ],
)
def test_a_bad_option_of_a_call(options, line) -> None:
    with pytest.raises(OptionError) as caught:
        checkpoint(torch.exp, leaf(), **options)
    text = str(caught.value).splitlines()
    assert text[:2] == [line, "  layer: 'exp'"]
    assert text[2].startswith(f"  called at: {__file__}:")
    assert text[3].startswith(("  way out: pass ", "  way out: return two"))


def bare(function, *args, use_reentrant=False):
    return torch_checkpoint(function, *args, use_reentrant=use_reentrant)


def is_refused(run, loudly) -> None:
    with pytest.raises(MismatchError, match="a decision is saved inside a reentrant checkpoint of others") as caught:
        run()
    leave(caught.value)
    assert loudly in str(caught.value)
    assert str(caught.value).splitlines()[-1] == (
        "  way out: use roundpipe_torch.checkpoint there, or torch.utils.checkpoint with use_reentrant=False."
    )


class Deciding:
    """Ways of a decision, which draws from the generator that torch sets back (R7)."""

    def __init__(self) -> None:
        self.made = 0

    def drawn(self):
        self.made += 1
        return torch.rand(6, 6).argsort(1)

    def save(self, x):
        return save_for_recompute(torch.ones(6, 6, dtype=torch.int64) if doing_recompute() else self.drawn())[0]

    def once(self, x):
        return recompute_once(self.drawn).gather(1, recompute_once(self.drawn))

    def read(self, x):
        if not doing_recompute():
            save_for_recompute(self.drawn())
            return self.scoped(x)
        get_recompute_data()
        return self.scoped(x)

    def scoped(self, x):
        found = []
        for name in ("first", "last", "last"):
            with layer_scope(name):
                if doing_recompute():
                    found += get_recompute_data("index")
                else:
                    found += save_for_recompute(self.drawn(), name="index")
        return found[0].gather(1, found[1]).gather(1, found[2])

    def update(self, x):
        update_once(lambda: self.drawn())
        return torch.ones(6, 6, dtype=torch.int64)

    def slope(self, x):
        @recompute_once
        def index():
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                (y.exp() * torch.rand(6, 6)).sum().backward()
            self.made += 1
            return y.grad.argsort(1)

        return index

    def without_gradient(self, x):
        with torch.no_grad():
            return self.save(x)

    def under_others(self, x):
        with torch.autograd.graph.save_on_cpu():
            return self.save(x)


WAYS = [name for name in vars(Deciding) if name not in ("drawn", "__init__") and callable(getattr(Deciding, name))]


def steps(way, torchs_own, around, tape=contextlib.nullcontext, **options):
    """What two calls give, of a part that decides in torch's checkpoint: calls, output, gradient of two backwards."""
    deciding, x, noise = Deciding(), leaf(), torch.nn.Dropout(0.3)

    def part(x):
        index = getattr(deciding, way)(x)
        return noise(x).gather(1, index).sin()

    torch.manual_seed(3)
    with tape() as kept:
        y = sum(around(lambda x: torchs_own(part, x.exp()) * x, x * n).sum() for n in (1, 2))
        y.backward(retain_graph=True)
    y.backward()
    return deciding.made, y.detach(), x.grad, kept


def call(function, *args):
    return function(*args)


def nested(function, *args):
    return bare(lambda *args: bare(function, *args) * 1, *args)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("around", [call, bare, torchs, checkpoint])
@pytest.mark.parametrize("torchs_own", [bare, nested])
@pytest.mark.parametrize("way", WAYS)
def test_a_decision_in_torchs_checkpoint_is_made_once(way, torchs_own, around, early_stop) -> None:  # R2, R7, R8
    want = steps(way, call, call)
    with set_checkpoint_early_stop(early_stop):
        got = steps(way, torchs_own, around)
    assert got[0] == want[0]
    assert all(torch.equal(g, w) for g, w in zip(got[1:3], want[1:3], strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_torchs_checkpoint_leaves_no_trace_on_a_tape(way) -> None:  # R13
    made, y, grad, plain = steps(way, call, call, record)
    for torchs_own in (bare, nested):
        *got, tape = steps(way, torchs_own, call, record)
        assert [got[0], *map(torch.equal, got[1:], (y, grad))] == [made, True, True]
        assert [*map(str, tape.entries())] == [*map(str, plain.entries())]
        for kept in (tape, plain):
            *again, _ = steps(way, torchs_own, call, functools.partial(replay, kept))
            *alone, _ = steps(way, call, call, functools.partial(replay, kept))
            assert again[0] == alone[0]  # updates are made in a replay, decisions are not
            assert all(torch.equal(g, w) for g, w in zip(again[1:], alone[1:], strict=True))


def test_regions_inside_torchs_checkpoint_are_on_a_tape_as_without_it() -> None:  # R13
    def model(torchs_own, x):
        return torchs_own(lambda x: checkpoint(Counted(), x) * recompute_once(lambda: 2), x.exp()).sum()

    with record() as inference, torch.no_grad():
        model(call, leaf())
    for torchs_own in (bare, nested):
        x, y = leaf(), leaf()
        for z, own in ((x, torchs_own), (y, call)):
            with replay(inference):
                model(own, z).backward()
        assert torch.equal(x.grad, y.grad)


def test_what_torchs_checkpoint_saves_is_not_repeated_where_it_repeats_no_random_numbers() -> None:
    x, draws = leaf(), []

    def part(x):
        (index,) = save_for_recompute(torch.rand(6, 6).argsort(1))
        return x.gather(1, index).sin()

    for again in (False, True):
        torch.manual_seed(4)
        y = torch_checkpoint(part, x, use_reentrant=False, preserve_rng_state=False).sum()
        torch.manual_seed(5)
        if again:
            y.backward()
            torch.rand(6, 6)
        else:
            torch.rand(6, 6)
            torch.rand(6, 6)
        draws.append(torch.rand(3))
    assert torch.equal(*draws)  # its recompute draws in vain, as it does without us, and sets nothing back


@pytest.mark.parametrize("inner", [call, checkpoint])
def test_verify_finds_what_flips_in_torchs_checkpoint(inner) -> None:  # R12
    seeds = itertools.count()

    def decide(x):
        return x * recompute_once(lambda: torch.rand(6, 6, generator=torch.Generator().manual_seed(next(seeds))))

    layer = remat(lambda x: bare(inner, decide, x.exp()).sin(), verify="raise")
    with pytest.raises(VerifyError, match=r"slot 'recompute_once.*6 of 6 rows flipped"):
        layer(leaf()).sum().backward()


def test_a_statistic_of_the_forward_alone_is_told_in_torchs_checkpoint() -> None:
    losses = []

    def decide(x):
        (top,) = save_for_recompute(x.detach().topk(2).indices)
        if not doing_recompute():
            losses.append(x.exp().mean(0).square().sum())
        return x.sin().gather(1, top)

    y = bare(checkpoint, decide, leaf().exp())
    with pytest.raises(MismatchError, match=r"decide .*around the layer gives its inputs only once"):
        (y.sum() + losses[0]).backward()


def test_one_unnamed_save_in_a_part_of_torchs() -> None:  # R4
    def part(x):
        save_for_recompute(1)
        save_for_recompute(2)
        return x.exp()

    with pytest.raises(SlotError, match="saved twice in one forward") as caught:
        bare(part, leaf())
    leave(caught.value)
    assert "test_one_unnamed_save_in_a_part_of_torchs.<locals>.part" in str(caught.value)


def test_gradient_through_a_save_in_torchs_checkpoint_is_refused() -> None:  # R5
    with pytest.raises(GradientError, match=r"data\[0\] requires grad") as caught:
        bare(lambda x: save_for_recompute(x.exp())[0], leaf())
    leave(caught.value)


def test_without_gradient_torchs_checkpoint_is_no_region() -> None:  # R2
    with torch.no_grad():
        x = leaf()
        assert bare(lambda x: save_for_recompute(x)[0], x) is x
        with pytest.raises(PhaseError, match="outside a recompute"):
            bare(lambda x: x * get_recompute_data()[0], x)
    with pytest.raises(PhaseError, match="in the forward") as caught:
        bare(lambda x: x * get_recompute_data()[0], x)
    leave(caught.value)


DECISIONS = {"save": lambda: save_for_recompute(3)[0], "once": lambda: recompute_once(lambda: 3)}


@pytest.mark.parametrize("decide", DECISIONS.values(), ids=DECISIONS)
@pytest.mark.parametrize("around", [call, bare, checkpoint, second])
def test_a_decision_in_a_reentrant_checkpoint_of_torchs_is_refused_with_the_way_out(decide, around) -> None:
    reentrant = functools.partial(bare, use_reentrant=True)
    is_refused(
        lambda: around(lambda x: reentrant(lambda x: torch.sin(x * decide()), x.exp()), leaf()).sum().backward(),
        f"saved at: {__file__}:",
    )
    assert not doing_recompute()


def test_a_reentrant_checkpoint_of_torchs_updates_once_and_knows_its_phase() -> None:  # R1, R8
    counted, phases = [], []

    def part(x):
        update_once(counted.append, 1)
        phases.append(doing_recompute())
        with layer_scope("noted"):
            return keep(torch.sin, x)

    bare(part, leaf(), use_reentrant=True).sum().backward()
    assert (counted, phases) == ([1], [False, True])
    with pytest.raises(MismatchError, match="inside a reentrant checkpoint of others"):
        bare(
            lambda x: x * (get_recompute_data()[0] if doing_recompute() else 1), leaf(), use_reentrant=True
        ).sum().backward()


@pytest.mark.parametrize("engine", [checkpoint, second])
@pytest.mark.parametrize("around", ["nothing", "ours"])
def test_a_region_inside_torchs_reentrant_checkpoint_is_refused_if_it_decides(around, engine) -> None:
    def part(x):
        return engine(lambda x: torch.sin(x * save_for_recompute(3)[0]), x).exp()

    def run():
        outer = engine if around == "ours" else lambda function, x: function(x)
        outer(lambda x: bare(part, x.exp(), use_reentrant=True).sin(), leaf()).sum().backward()

    is_refused(run, "saved at")
    x, y = leaf(), leaf()
    bare(lambda x: checkpoint(torch.tanh, x).exp(), x, use_reentrant=True).sum().backward()  # which decides nothing
    torch.tanh(y).exp().sum().backward()
    assert torch.equal(x.grad, y.grad)


def under_others(function, x):
    with torch.autograd.graph.save_on_cpu():
        return checkpoint(function, x)


@pytest.mark.parametrize("inner", [checkpoint, second, under_others])
@pytest.mark.parametrize("around", [lambda function, x: function(x), bare, torchs, checkpoint, second])
@pytest.mark.parametrize("early_stop", [True, False])
def test_regions_inside_torchs_checkpoint_decide_once(inner, around, early_stop) -> None:
    def run(torchs_own, inner, around):
        first, last, again = Counted(), Counted(), []
        x, noise = leaf(), torch.nn.Dropout()
        torch.manual_seed(3)

        def drawn(x):
            (index,) = save_for_recompute(torch.rand(6, 6).argsort(1))  # R7
            return noise(x).gather(1, index).sin()

        def deciding(x):
            update_once(again.append, 1)
            return inner(last, x) * 2

        def part(x):
            x = inner(first, x).exp()
            x = x * inner(first, x) + inner(deciding, x)
            return inner(drawn, noise(x)).exp()

        with set_checkpoint_early_stop(early_stop):
            y = around(lambda x: torchs_own(part, x.sin()).tanh(), x)
            y = torchs_own(part, y * x)
        y.square().sum().backward(retain_graph=True)
        y.square().sum().backward()
        return first.decisions, last.decisions, len(again), y.detach(), x.grad

    def call(function, x):
        return function(x)

    *counts, y, grad = run(bare, inner, around)
    *_, y_plain, grad_plain = run(call, call, call)
    assert counts == [4, 2, 2]
    assert torch.equal(y, y_plain)
    assert torch.equal(grad, grad_plain)


def part_with_a_region(counted, x):
    return (checkpoint(counted, x) * x).exp()


@pytest.mark.parametrize(
    "around", [bare, torchs, *(functools.partial(checkpoint, torchs_own) for torchs_own in (bare, torchs))]
)
def test_what_a_region_inside_torchs_checkpoint_holds_goes_with_the_graph(around) -> None:  # R9, R12
    held = []

    def deciding(x):
        (index,) = save_for_recompute(x.detach().argsort(1))
        held.append(weakref.ref(index))
        return x.gather(1, index).sin()

    with usage() as seen:
        y = around(functools.partial(part_with_a_region, deciding), leaf()).sum()
        assert [(row.calls, row.decisions) for row in seen.layers] == [(1, 1)]
        y.backward()
    assert [ref() for ref in held] == [None] * len(held)
    assert [(row.calls, row.alive) for row in seen.layers] == [(1, 0)]


def test_a_region_inside_torchs_checkpoint_is_on_a_tape_once() -> None:  # R13
    def layer(x):
        return bare(functools.partial(part_with_a_region, Counted()), x)

    with record() as tape:
        layer(leaf()).sum().backward()
    assert len([*tape.entries()]) == 1
    x, again = leaf(), leaf()
    with replay(tape):
        layer(x).sum().backward()
    with record():
        layer(again).sum().backward()
    assert torch.equal(x.grad, again.grad)


@pytest.mark.parametrize("inner", [checkpoint, second])
def test_a_forward_that_differentiates_inside_torchs_checkpoint(inner) -> None:
    def run(torchs_own, inner):
        counted, x = Counted(), leaf()

        def part(x):
            y = inner(counted, x) * x
            (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)  # torch's runs the part again for it
            return inner(counted, x) * y * slope

        torchs_own(part, x).sum().backward()
        return counted.decisions, x.grad

    decisions, grad = run(bare, inner)
    assert decisions == 2
    assert torch.equal(grad, run(lambda function, x: function(x), lambda function, x: function(x))[1])


@pytest.mark.parametrize("decides", ["in a region", "itself"])
@pytest.mark.parametrize("hooks", [contextlib.nullcontext, save_on_cpu], ids=["", "hooks of others"])
def test_torchs_checkpoint_of_a_module_by_hooks(hooks, decides) -> None:
    """No function of torch's is around its forward; under hooks of others nothing but the module itself knows of it."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counted = Counted()

        def forward(self, x):
            with hooks():
                inner = part_with_a_region(self.counted, x) if decides == "in a region" else self.counted(x)
            return inner.sin()

    plain, wrapped = Layer(), composable(Layer())
    x, y = leaf(), leaf()
    wrapped(x).sum().backward()
    plain(y).sum().backward()
    assert wrapped.counted.decisions == 1
    assert torch.equal(x.grad, y.grad)


def test_an_error_inside_torchs_checkpoint_leaves_no_hooks_behind() -> None:  # R11
    def part(x):
        raise KeyError(x)

    with pytest.raises(KeyError) as caught:
        checkpoint(lambda x: bare(part, x), leaf())
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert caught.traceback
