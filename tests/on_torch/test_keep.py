"""keep: gradients of the layer without checkpointing, and counts of what was run and held."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks._meter import Meter
from roundpipe_torch import (
    MismatchError,
    MutationError,
    SlotError,
    checkpoint,
    doing_recompute,
    keep,
    recompute_contexts,
    record,
    remat,
    replay,
    save_for_recompute,
    update_once,
)
from tests.on_torch.oracle import ENGINES, WAYS, Source, agree, decided, leaf, plain, reentrant, same

B, T, D, H = 2, 8, 16, 4


class Scaled(torch.autograd.Function):
    """A kernel written by hand: saves its input, its output and a residual of its own."""

    runs = 0

    @staticmethod
    def forward(ctx, x, w):
        Scaled.runs += 1
        residual = torch.sigmoid(x * w)
        y = x * residual
        ctx.save_for_backward(x, w, y, residual)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, w, y, residual = ctx.saved_tensors
        slope = residual * (1 - residual)
        return grad * (residual + x * slope * w), (grad * x * slope * x).sum(0) + 0 * y.sum(0)


class Attention(nn.Module):
    def __init__(self, kept: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.kept = nn.Linear(D, 3 * D), nn.Linear(D, D), kept

    @staticmethod
    def attend(q, k, v):
        q, k, v = (part.view(B, T, H, D // H).transpose(1, 2) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        mixed = keep(self.attend, q, k, v) if self.kept else self.attend(q, k, v)
        return x + self.out(torch.tanh(mixed))


def grads_of(module, y):
    y.square().sum().backward()
    return [y, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("way", [*WAYS, *ENGINES[1:]])
def test_attention(way) -> None:
    def scenario(way):
        layer, x = Attention(), leaf(B, T, D)
        return [*grads_of(layer, way(layer, x)), x.grad]

    agree(scenario, way)


@pytest.mark.parametrize("way", ENGINES)
def test_a_kernel_written_by_hand_runs_once(way) -> None:
    def scenario(way):
        x, w = leaf(6, 4, seed=1), leaf(4, seed=2)
        y = way(lambda x, w: torch.exp(keep(Scaled.apply, x.sin(), w)).cos(), x, w)
        y.sum().backward()
        return y, x.grad, w.grad

    agree(scenario, way)
    Scaled.runs = 0
    scenario(way)
    assert Scaled.runs == 1


@pytest.mark.parametrize("way", ENGINES)
def test_flops_recomputed_are_less_by_exactly_the_kept_part(way) -> None:
    def flops(kept: bool, way) -> int:
        layer, x = Attention(kept), leaf(B, T, D)
        with math(), FlopCounterMode(display=False) as counter:
            way(layer, x).sum().backward()
        return counter.get_total_flops()

    def math():  # whose products are counted
        return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)

    with math(), FlopCounterMode(display=False) as attention:
        Attention.attend(*(torch.ones(B, T, D) for _ in range(3)))
    assert attention.get_total_flops() == 4 * B * H * T * T * (D // H)
    assert flops(False, way) - flops(True, way) == attention.get_total_flops()
    assert flops(False, plain) == flops(True, plain)


def test_held_are_the_outputs_and_residuals_and_nothing_else() -> None:
    def held(kept: bool) -> int:
        x, w = leaf(64, 32, seed=1), leaf(32, seed=2)
        call = keep if kept else plain
        with Meter() as meter:
            y = checkpoint(lambda x, w: torch.exp(call(Scaled.apply, x.sin(), w)).sum(), x, w)
            live = meter.live
        y.backward()
        return live

    output = residual = 64 * 32 * 4
    assert held(True) - held(False) == output + residual


def test_the_slot_counts_outputs_and_residuals_until_they_are_gone() -> None:
    seen = SimpleNamespace(slot=None)

    def layer(x, w):
        from roundpipe_core._phase import thread

        y = torch.exp(keep(Scaled.apply, x.sin(), w))
        seen.slot = thread.run.slot
        return y

    y = checkpoint(layer, leaf(64, 32, seed=1), leaf(32, seed=2))
    assert seen.slot.nbytes() == 2 * 64 * 32 * 4
    y.sum().backward()
    assert seen.slot.nbytes() == 64 * 32 * 4  # the function's own graph is gone
    slot = weakref.ref(seen.slot)
    del seen.slot, y
    assert slot() is None


@pytest.mark.parametrize("way", ENGINES)
def test_views_of_arguments_are_recomputed_not_held(way) -> None:
    """A view of a view, a transposed part, a slice of a dense one, and a chunk with gaps."""

    def mixed(a, b):
        return (a.t() @ b[:, 1:6:2]).unsqueeze(0) * b.flatten()[3]

    def scenario(way):
        x = leaf(4, 12)

        def layer(x):
            a, b = (x * 2).chunk(2, 1)
            return keep(mixed, a, (b * 3).clone()).sin()

        y = way(layer, x)
        y.sum().backward()
        return y, x.grad

    agree(scenario, way)


@pytest.mark.parametrize("way", ENGINES)
@pytest.mark.parametrize(
    ("function", "made"),
    [
        (lambda a: a.t().exp().sum(), 256 * 200 * 4),  # exp holds what it made
        (lambda a: a.t().sin().sum(), 0),  # sin holds a view of the argument
        (lambda a: a.t().unsqueeze(0).sin().sum(), 0),
        (lambda a: a[1:, 3::2].view(5, 51, -1).sin().sum(), 0),
    ],
    ids=["made", "view", "view of a view", "part of one with gaps"],
)
def test_a_view_made_inside_does_not_hold_the_argument(way, function, made) -> None:
    def live(kept: bool) -> int:
        x = leaf(256, 512)
        with Meter() as meter:
            y = way(lambda x: (keep if kept else plain)(function, (x * 2)[:, :200]), x)
            live = meter.live
        y.backward()
        return live

    assert live(True) - live(False) == made


@pytest.mark.parametrize("way", ENGINES)
def test_what_has_the_memory_of_an_argument_but_other_values_is_held(way) -> None:
    """A conjugate, and numbers of another type."""

    def mixed(z):
        return torch.view_as_real(z.conj() * z.exp()) * z.imag.unsqueeze(-1)

    def scenario(way):
        x = leaf(4, 6)
        y = way(lambda x: keep(mixed, torch.complex(x.sin(), x.cos())).exp(), x)
        y.sum().backward()
        return y, x.grad

    agree(scenario, way)


def weighted(c, q, more=0.0):
    return (q * c).sum() + more


@pytest.mark.parametrize("way", ENGINES)
@pytest.mark.parametrize(
    "given",
    [
        lambda c: lambda q: (q * c).sum(),
        lambda c: partial(weighted, c),
        lambda c: partial(lambda q, c: (q * c).sum(), c=c),
        lambda c: partial(partial(weighted, c), more=1.0),
        lambda c: partial(lambda q, more: (q * c).sum() + more, more=torch.ones(())),
    ],
    ids=["closure", "partial", "keyword", "partial of a partial", "partial of a closure"],
)
def test_tensors_in_closures_and_partials_are_recomputed_not_held(way, given) -> None:
    def live(kept: bool) -> int:
        x = leaf(256, 512)

        def layer(x):
            return (keep if kept else plain)(given(x.detach().cos()), x)

        with Meter() as meter:
            y = way(layer, x)
            live = meter.live
        y.backward()
        return live

    assert live(True) == live(False)


@pytest.mark.parametrize("way", ENGINES)
def test_a_weight_that_is_an_output_is_the_weight(way) -> None:
    def scenario(way):
        torch.manual_seed(0)
        linear, x = nn.Linear(4, 4), leaf(3, 4)

        def layer(x):
            h, w = keep(lambda h: (h.sin(), linear.weight), x)
            assert w is linear.weight
            return (h @ w.exp()).tanh()

        y = way(layer, x)
        y.sum().backward()
        return y, x.grad, linear.weight.grad

    agree(scenario, way)


@pytest.mark.parametrize("way", ENGINES)
def test_a_tensor_in_the_gaps_of_an_argument_is_another(way) -> None:
    """Hidden in an object it is held, though it lies between the rows of the argument."""

    def scenario(way):
        x = leaf(4, 12)

        def layer(x):
            whole = (x * 2).sin().detach()
            q, hidden = whole[:3, :4], SimpleNamespace(k=whole[:2, 5:9], r=whole[1:3, 2:6])
            q = q.clone() if doing_recompute() else q
            return keep(
                lambda q, x: (q[:2, 1:] * x[:2, :3]).exp() * (hidden.k * x[:2, :4])[:, :3] * hidden.r[0, 0] * x[0, 0],
                q,
                x,
            )

        y = way(layer, x)
        y.sum().backward()
        return y, x.grad

    agree(scenario, way)


def test_parts_are_told_from_what_lies_between() -> None:
    from roundpipe_torch._views import Origins

    base = torch.arange(240.0).view(10, 24)
    wholes = [base[2:8, 4:12], base[:, ::2], base.t()[3:9], base.view(2, 5, 24)[:, 1:3], base[1], base]
    wholes += [base[3:4, 4:5], base[5, 5], base[2:2], base[4:6].expand(3, 2, 24)]
    parts = [
        base[a:b, c:d:e] for a in (0, 2, 3) for b in (4, 8, 10) for c in (0, 3, 4, 6) for d in (8, 12) for e in (1, 2)
    ]
    parts += [part.t() for part in parts] + [
        base[3:7, 4:12].unflatten(1, (2, 4)).transpose(0, 1),
        base[2:3, 5:6].expand(4, 3),
        *(base[n : n + 1, m : m + 1] for n in (3, 4, 5) for m in (3, 4, 5, 6)),
        base[4:4, 5:9],
    ]
    seen = {True: 0, False: 0}
    for whole in wholes:
        has = set(whole.flatten().tolist())
        for part in parts:
            found = Origins([whole]).of(part)
            inside = set(part.flatten().tolist()) <= has
            seen[found is not None] += 1
            if found is None:
                continue
            assert inside
            same(found.of(whole), part)
            same(found.of(whole.clone()), part)
            same(found.of(whole.contiguous()), part)
    assert min(seen.values()) > 100
    assert Origins([base.view(2, 120)]).of(base[7]) is not None


@pytest.mark.parametrize("way", ENGINES)
def test_arguments_made_with_other_strides_in_the_recompute(way) -> None:
    def scenario(way):
        x = leaf(6, 6)

        def layer(x):
            h = x.sin().t() if doing_recompute() else x.sin().t().contiguous()
            return keep(lambda h: h[1:4, 2:5] * h[0:3, 1:4], h).exp()

        y = way(layer, x)
        y.sum().backward()
        return y, x.grad

    agree(scenario, way)


@pytest.mark.parametrize("way", ENGINES)
def test_structures_several_outputs_and_other_values(way) -> None:
    def parts(x, *, scale, names):
        h = x * scale
        return {"wave": (h.sin(), h.cos()), "count": 3, "name": names[0], "none": None, "index": h.argmax(-1)}

    def scenario(way):
        x = leaf(3, 5)

        def layer(x):
            got = keep(parts, x.exp(), scale=x.sum(), names=["a"])
            assert (got["count"], got["name"], got["none"]) == (3, "a", None)
            assert not got["index"].requires_grad
            return (got["wave"][0] * got["wave"][1]).exp().gather(-1, got["index"][:, None])

        y = way(layer, x)
        y.sum().backward()
        return y, x.grad

    agree(scenario, way)


@pytest.mark.parametrize("way", ENGINES)
@pytest.mark.parametrize(
    "function",
    [lambda x: x, lambda x: x.view(-1), lambda x: x[1:].t(), lambda x: (x, x * 2, x)],
    ids=["itself", "flat", "part", "several"],
)
def test_functions_that_return_their_argument_or_a_view_of_it(way, function) -> None:
    def scenario(way):
        x = leaf(4, 3)

        def layer(x):
            got = keep(function, x.exp())
            got = got if isinstance(got, tuple) else (got,)
            return sum(part.sin().sum() * n for n, part in enumerate(got, 1))

        y = way(layer, x)
        y.backward()
        return y, x.grad

    agree(scenario, way)


def test_a_returned_argument_is_not_held() -> None:
    def live(call) -> int:
        x = leaf(256, 64)
        with Meter() as meter:
            y = checkpoint(lambda x: call(lambda h: (h, h[3:]), x.exp())[1].sin().sum(), x)
            live = meter.live
        y.backward()
        return live

    assert live(keep) == live(plain)


@pytest.mark.parametrize("outer", ENGINES)
@pytest.mark.parametrize("inner", ENGINES)
def test_nested(outer, inner) -> None:
    runs = []

    def scenario(way):
        x, w = leaf(4, 4), leaf(4, 4, seed=3)
        one, two = (plain, plain) if way is plain else (outer, inner)

        def kernel(h):
            runs.append(1)
            return torch.softmax(h @ w, -1) * h

        def inside(h):
            return keep(kernel, h.sin()).exp()

        def layer(x):
            h = two(inside, x * 2)
            h = keep(kernel, h)
            return two(inside, h).tanh()

        y = (one if way is plain else way)(layer, x)
        y.sum().backward()
        return y, x.grad, w.grad

    agree(scenario, outer)
    runs.clear()
    scenario(outer)
    assert len(runs) == 3


@pytest.mark.parametrize("outer", ENGINES)
@pytest.mark.parametrize("inner", ENGINES)
def test_regions_inside_of_what_is_kept(outer, inner) -> None:
    def scenario(way):
        x, source = leaf(4, 4), Source()
        two = plain if way is plain else inner

        def inside(h):
            mask = decided(lambda: source.integers(2, 4, 4))
            return (h.sin() * mask).exp()

        def layer(x):
            h = keep(lambda h: two(inside, h) * 2, x.cos())
            return two(inside, h).tanh() + two(inside, x)

        y = way(layer, x)
        y.sum().backward()
        return y, x.grad, source.asked

    agree(scenario, outer)


@pytest.mark.parametrize("way", ENGINES)
def test_retain_graph(way) -> None:
    def scenario(way):
        x, w = leaf(5, 4, seed=1), leaf(4, seed=2)
        y = way(lambda x: keep(Scaled.apply, x.sin(), w).exp(), x)
        for _ in range(3):
            y.sum().backward(retain_graph=True)
        y.sum().backward()
        return y, x.grad, w.grad

    agree(scenario, way)


def test_retained_below_a_region_of_the_second_engine() -> None:
    def scenario(way):
        x, w = leaf(5, 4, seed=1), leaf(4, seed=2)
        inner = plain if way is plain else reentrant
        y = way(lambda x: inner(lambda h: keep(Scaled.apply, h, w).exp(), x.sin()).cos(), x)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        return y, x.grad, w.grad

    agree(scenario, reentrant)
    agree(scenario, checkpoint)


def test_after_backward_the_second_engine_holds_nothing() -> None:
    x, held = leaf(5, 4), []

    def kernel(h):
        y = h.exp()
        held.append(weakref.ref(y.untyped_storage()))
        return y * 1

    y = checkpoint(lambda x: keep(kernel, x.sin()).cos(), x, use_reentrant=True)
    assert held[0]() is not None
    y.sum().backward()
    assert held[0]() is None


def test_second_derivatives() -> None:
    def scenario(way):
        layer, x = Attention(), leaf(B, T, D)
        (first,) = torch.autograd.grad(way(layer, x).sin().sum(), x, create_graph=True)
        first.square().sum().backward()
        return [first, x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        agree(scenario)


def test_a_second_derivative_of_a_kernel_that_has_none_is_torchs_error() -> None:
    class Once(Scaled):
        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return Scaled.backward(ctx, grad)

    x, w = leaf(5, 4), leaf(4)
    (first,) = torch.autograd.grad(
        checkpoint(lambda x: keep(Once.apply, x.sin(), w).exp(), x).sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("create_graph", [True, False])
def test_a_layer_that_differentiates_inside_itself(create_graph) -> None:
    def scenario(way):
        x, w = leaf(5, 4), leaf(4, 4, seed=2)

        def layer(x, w):
            h = x.sin()
            energy = keep(lambda h, w: torch.tanh(h @ w).square(), h, w).exp().sum()
            (force,) = torch.autograd.grad(energy, h, create_graph=create_graph)
            return force + h * w.sum()

        y = way(layer, x, w)
        y.sum().backward()
        return y, x.grad, w.grad

    agree(scenario)


def test_a_nested_layer_that_differentiates_through_what_an_inner_one_keeps() -> None:
    def scenario(way):
        x, w = leaf(5, 4), leaf(4, 4, seed=2)

        def layer(x, w):
            h = x.sin()
            energy = way(lambda h: keep(lambda h: torch.tanh(h @ w).square(), h).exp(), h).sum()
            (force,) = torch.autograd.grad(energy, h, create_graph=True)
            return force * 2

        y = way(layer, x, w)
        y.sum().backward()
        return y, x.grad, w.grad

    agree(scenario)


def test_differentiation_within_what_is_kept() -> None:
    def scenario(way):
        x = leaf(5, 4)

        def force(h):
            with torch.enable_grad():
                return torch.autograd.grad(torch.tanh(h).exp().sum(), h, create_graph=True)[0]

        y = way(lambda x: keep(force, x.sin()).exp(), x)
        y.sum().backward()
        return y, x.grad

    agree(scenario)
    agree(scenario, reentrant)


def test_a_gradient_through_what_saves_nothing_is_a_named_error() -> None:
    def layer(x):
        h = x.sin()
        return torch.autograd.grad(keep(lambda h: h + 1, h).sum(), h, create_graph=True)[0] * h

    with pytest.raises(MismatchError, match=r"layer '.*layer.*differentiates inside itself through keep\(.*lambda"):
        checkpoint(layer, leaf(3)).sum().backward()


def test_a_second_derivative_under_the_second_engine_is_a_named_error() -> None:
    def layer(x):
        h = x.sin()
        return torch.autograd.grad(keep(torch.exp, h).sum(), h, create_graph=True)[0] * h

    with pytest.raises(MismatchError, match=r"no second derivative through keep\(exp\)"):
        reentrant(layer, leaf(3)).sum().backward()


@pytest.mark.parametrize("hooked", ["before", "in the function"])
@pytest.mark.parametrize("inside", [lambda f, x: f(x), checkpoint, reentrant])
def test_a_weight_in_a_kept_function_and_elsewhere_has_one_gradient(hooked, inside) -> None:
    """Its hooks see all of that at once, and `torch.autograd.grad` gets it."""

    def scenario(way, ask=False):
        x, w, frozen, calls = leaf(3), leaf(3), leaf(3), []

        def clip(gradient):
            calls.append(gradient.clone())
            return gradient.clamp(max=0.5)

        def part(x):
            y = (x * w * frozen).sin()
            if hooked == "in the function":
                w.register_hook(clip)
            return y

        if hooked == "before":
            w.register_hook(clip)
        y = way(lambda x: keep(lambda x: inside(part, x), inside(part, x)), x)
        frozen.requires_grad_(inside is checkpoint)  # whose recompute would not save the same
        if ask:
            return [*torch.autograd.grad(y.sum(), [x, w]), calls]
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        return [y, x.grad, w.grad, frozen.grad, calls]

    for ask in False, True:
        same(scenario(reentrant, ask), scenario(plain, ask), within=1e-6)


def test_a_forward_that_fails_on_a_tape_leaves_nothing_of_what_it_kept() -> None:
    """The kept graph holds the region inside, that the tape, and the tape what holds the graph."""

    def layer(x):
        sentinel = Sentinel()
        freed.append(weakref.ref(sentinel))
        save_for_recompute(1, sentinel)
        keep(lambda x: checkpoint(torch.tanh, x), x.sin())
        return 1 / 0

    freed = []
    with record() as tape, pytest.raises(ZeroDivisionError):
        reentrant(layer, leaf(3))
    assert len(tape.entries()) == 2
    del tape
    gc.collect()
    assert freed[0]() is None


class Sentinel:
    """Dies with the slot that holds it."""


def test_early_stop_ends_before_the_work_behind_what_is_kept() -> None:
    runs = []

    def layer(x):
        h = keep(Scaled.apply, x.sin(), w)
        runs.append(1)
        return h + 1

    x, w = leaf(5, 4), leaf(4)
    checkpoint(layer, x).sum().backward()
    assert len(runs) == 1
    checkpoint(layer, x, early_stop=False).sum().backward()
    assert len(runs) == 3


def test_decisions_inside_do_not_hinder_early_stop() -> None:
    runs, source = [], Source()

    def layer(x):
        h = keep(lambda h: h * save_for_recompute(source.integers(2, 3))[0] + doing_recompute(), x.sin())
        y = h.exp()
        runs.append(1)
        return y.cumsum(0)

    checkpoint(layer, leaf(3)).sum().backward()
    assert len(runs) == source.asked == 1


@pytest.mark.parametrize("way", ENGINES)
def test_decisions_inside(way) -> None:
    def scenario(way):
        x, source = leaf(6, 4), Source()

        def expert(h):
            assert not doing_recompute()
            mask = decided(lambda: source.integers(2, 6, 4))
            return (h * mask).exp()

        def layer(x):
            h = keep(expert, x.sin())
            (shift,) = save_for_recompute(source.normal(6, 4), name="shift")
            return (h * shift).cos()

        y = way(layer, x)
        y.sum().backward()
        return y, x.grad, source.asked - (way is not plain)  # the argument of the save is made again

    agree(scenario, way)


@pytest.mark.parametrize("way", ENGINES)
def test_random_numbers_go_on_after_it(way) -> None:  # R7
    def scenario(way):
        torch.manual_seed(1)
        x = leaf(64, 4)

        def layer(x):
            h = F.dropout(keep(F.dropout, x.sin(), 0.5), 0.3)
            return F.dropout(keep(lambda h: F.dropout(h.exp(), 0.2), h), 0.4).cos()

        y = way(layer, x)
        y.sum().backward()
        return y, x.grad, torch.rand(2)

    agree(scenario, way)


@pytest.mark.parametrize("way", ENGINES)
def test_branches_around_and_after(way) -> None:
    """The kept output meets other lines in each phase, and a gate runs in the forward only."""

    def scenario(way):
        x, g, source = leaf(6, 4), leaf(4, 3, seed=4), Source()

        def layer(x, g):
            h = keep(lambda h: torch.softmax(h, -1) * h, x.sin())
            if doing_recompute():
                top = decided(None)
                weight = (x @ g).gather(-1, top)
                out = h * weight
            else:
                logits = x @ g
                top = decided(lambda: source.integers(3, 6, 1))
                weight = logits.gather(-1, top)
                out = h * weight
            return keep(torch.exp, out).sin() * h.tanh()

        y = way(layer, x, g)
        y.sum().backward()
        return y, x.grad, g.grad

    agree(scenario, way)


@pytest.mark.parametrize("way", ENGINES)
def test_weights_in_modules_closures_and_partials(way) -> None:
    def scenario(way):
        torch.manual_seed(3)
        linear, norm, x, w = nn.Linear(4, 4), nn.LayerNorm(4), leaf(5, 4), leaf(4, seed=5)

        def layer(x):
            h = keep(linear, x.sin())
            h = keep(partial(F.linear, weight=linear.weight), h)
            return keep(norm, h * w).exp()

        y = way(layer, x)
        y.sum().backward()
        return [y, x.grad, w.grad, *(p.grad for p in (*linear.parameters(), *norm.parameters()))]

    agree(scenario, way)


def test_a_tensor_of_the_region_in_a_closure() -> None:
    def scenario(way):
        x, w = leaf(5, 4), leaf(4, 4, seed=5)

        def layer(x):
            h = x.sin() @ w
            return keep(lambda: torch.softmax(h, -1) * h).exp()

        y = way(layer, x)
        y.sum().backward()
        return y, x.grad, w.grad

    agree(scenario)
    with pytest.raises(MismatchError, match="is not among its arguments"):
        scenario(reentrant)


@pytest.mark.parametrize("way", ENGINES)
def test_an_output_changed_in_place_is_an_error(way) -> None:  # R6
    def layer(x):
        h = keep(torch.sin, x * 2)
        y = h * 2
        with torch.no_grad():
            h += 1
        return y.exp()

    with pytest.raises((MutationError, RuntimeError), match=r"in place|inplace"):
        way(layer, leaf(3)).sum().backward()


def test_relu_in_place_after_a_kept_linear_says_what_to_do() -> None:
    linear = nn.Linear(4, 4)

    def layer(x):
        return keep(linear, x.sin()).relu_().exp()

    with pytest.raises(MutationError, match=r"an output of keep\(Linear\) was changed in place") as error:
        checkpoint(layer, leaf(3, 4)).sum().backward()
    assert "test_keep.py" in str(error.value)
    assert "inside the function that is kept" in str(error.value)


@pytest.mark.parametrize("way", ENGINES)
def test_an_argument_changed_in_place_by_the_function_is_an_error(way) -> None:
    def layer(x):
        h = x.sin().detach()
        y = keep(lambda h: h.add_(1).cos(), h) * x
        return (y * h).exp()

    with pytest.raises(MutationError, match="changed an argument in place"):
        way(layer, leaf(3)).sum().backward()


@pytest.mark.parametrize("way", ENGINES)
def test_state_that_outlives_the_layer_may_be_written_by_the_function(way) -> None:
    def scenario(way):
        x, cache = leaf(3, 4), torch.zeros(5, 4)

        def attend(h, rows):
            rows.copy_(h.detach() + rows)
            return h * rows.sum()

        y = way(lambda x: keep(attend, x.sin(), cache[:3]).exp(), x)
        y.sum().backward()
        return y, x.grad, cache

    agree(scenario, way)


@pytest.mark.parametrize("way", ENGINES)
def test_containers_that_the_function_fills_are_the_callers(way) -> None:
    def scenario(way):
        x, past, seen = leaf(3, 4), [torch.ones(2, 4)], {"calls": 0}

        def attend(h, past, *, seen):
            seen["calls"] += 1
            keys = torch.cat([*past, h])
            past.append(h.detach())
            return torch.softmax(h @ keys.t(), -1) @ keys

        y = way(lambda x: keep(attend, x.sin(), past, seen=seen).exp(), x)
        y.sum().backward()
        return y, x.grad, past, seen

    agree(scenario, way)


@pytest.mark.parametrize("way", ENGINES)
def test_without_gradient(way) -> None:
    runs = []

    def scenario(way):
        x = leaf(3, 4)

        def noisy(h):
            runs.append(1)
            return h + 3

        def layer(x):
            with torch.no_grad():
                shift = keep(noisy, x.sin())
            return (x * shift).exp()

        y = way(layer, x)
        y.sum().backward()
        return y, x.grad

    agree(scenario, way)
    runs.clear()
    scenario(way)
    assert len(runs) == 1
    with torch.no_grad():
        assert not way(lambda x: keep(torch.sin, x), leaf(3)).requires_grad
    assert keep(torch.sin, leaf(3)).requires_grad
    with torch.inference_mode():
        same(keep(torch.sin, torch.ones(2)), torch.ones(2).sin())


@pytest.mark.parametrize("way", ENGINES)
def test_inference_tensors_from_within(way) -> None:
    def scenario(way):
        x, w = leaf(3, 4), leaf(4, seed=1)

        def layer(x):
            with torch.inference_mode():
                shift = keep(torch.add, torch.ones(3, 4), w)  # a weight that carries gradient elsewhere
                shift.mul_(2)
            return (x * shift.clone()).exp()

        y = way(layer, x)
        y.sum().backward()
        return y, x.grad

    agree(scenario, way)


@pytest.mark.parametrize("way", ENGINES)
def test_a_function_that_fails_and_one_that_takes_its_place(way) -> None:
    def scenario(way):
        x = leaf(3, 4)

        def fails(h):
            h.exp()
            raise NotImplementedError

        def layer(x):
            h = x.sin()
            try:
                return keep(fails, h)
            except NotImplementedError:
                return keep(torch.exp, h).tanh()

        y = way(layer, x)
        y.sum().backward()
        return y, x.grad

    agree(scenario, way)


def test_kept_only_by_the_recompute_is_an_error() -> None:
    def layer(x):
        return keep(torch.exp, x).sin() if doing_recompute() else x.exp().sin()

    with pytest.raises(SlotError, match=r"the recompute calls keep\(exp\), and the forward did not"):
        checkpoint(layer, leaf(3)).sum().backward()


def test_torchs_own_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint as torchs

    def scenario(way):
        x, w = leaf(5, 4, seed=1), leaf(4, seed=2)

        def layer(x):
            return keep(Scaled.apply, x.sin(), w).exp().cos()

        y = layer(x) if way is plain else torchs(layer, x, use_reentrant=False, context_fn=recompute_contexts)
        y.sum().backward()
        return y, x.grad, w.grad

    same(scenario(checkpoint), scenario(plain))
    Scaled.runs = 0
    scenario(checkpoint)
    assert Scaled.runs == 1


@pytest.mark.parametrize("way", ENGINES)
def test_tapes(way) -> None:
    x, source = leaf(6, 4), Source()

    def expert(h):
        (mask,) = save_for_recompute(source.integers(2, 6, 4))
        return (h * mask).exp()

    def run():
        x.grad = None
        y = way(lambda x: keep(expert, x.sin()).cos(), x)
        y.sum().backward()
        return y.detach(), x.grad

    with record() as tape:
        want = run()
    with replay(tape):
        got = run()
    same(got, want)


@pytest.mark.parametrize("way", ENGINES)
def test_a_tape_does_not_hold_what_is_kept(way) -> None:  # R9
    held = []

    def kernel(h):
        y = h.exp()
        held.append(weakref.ref(y.untyped_storage()))
        return y

    def step():
        y = way(lambda x: checkpoint(lambda h: keep(kernel, h.sin()).cos(), keep(kernel, x)), leaf(4))
        y.sum().backward()
        del y
        assert [ref() for ref in held] == [None, None]
        held.clear()

    gc.disable()
    try:
        with record() as tape:
            step()
        with replay(tape):
            step()
    finally:
        gc.enable()


@pytest.mark.parametrize("verify", ["warn", "raise"])
def test_verify_finds_nothing(verify) -> None:
    def scenario(way):
        layer, x = Attention(), leaf(B, T, D)
        if way is not plain:
            layer = remat(layer, verify=verify)
        return [*grads_of(layer, layer(x)), x.grad]

    same(scenario(checkpoint), scenario(plain))


@pytest.mark.parametrize("way", ENGINES)
def test_hooks_around_a_region_still_see_its_inputs(way) -> None:
    seen = []
    x, w = leaf(5, 4), leaf(4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        y = way(lambda x: keep(Scaled.apply, x.sin(), w).exp(), x)
    assert seen == [x.shape]
    y.sum().backward()


@pytest.mark.parametrize("way", ENGINES)
def test_autocast_inside(way) -> None:
    def scenario(way):
        layer, x = Attention(), leaf(B, T, D)
        with torch.autocast("cpu", torch.bfloat16):
            y = way(layer, x)
        return [*grads_of(layer, y.float()), x.grad]

    agree(scenario, way)


def test_a_dropped_output_lets_go_of_everything() -> None:
    held = []

    def kernel(h):
        y = h.exp()
        held.append(weakref.ref(y.untyped_storage()))
        return y.sin()

    gc.disable()
    try:
        for way in (checkpoint, reentrant):
            y = way(lambda x: keep(kernel, x.sin()).cos(), leaf(4))
            assert held[-1]() is not None
            del y
            assert held[-1]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("way", ENGINES)
def test_same_kernel_many_times_and_microbatches_out_of_order(way) -> None:
    def scenario(way):
        xs, w = [leaf(5, 4, seed=n) for n in range(3)], leaf(4, seed=9)

        def layer(x):
            for _ in range(3):
                x = keep(Scaled.apply, x.sin(), w)
            return x.exp()

        ys = [way(layer, x) for x in xs]
        for n in (1, 0, 2):
            ys[n].sum().backward()
        return ys, [x.grad for x in xs], w.grad

    agree(scenario, way)


@pytest.mark.parametrize("way", ENGINES)
def test_update_once(way) -> None:
    def scenario(way):
        torch.manual_seed(1)
        x, counts = leaf(3, 4), torch.zeros(4)
        calls = []

        def count(h):
            calls.append(doing_recompute())
            counts.add_(h.sum(0) + torch.rand(4))
            return h

        def layer(x):
            update_once(count, x)
            return F.dropout(x.exp(), 0.5).sin()

        y = way(layer, x)
        y.sum().backward()
        with torch.no_grad():
            way(layer, x)
        return y, x.grad, counts, calls

    agree(scenario, way)


@pytest.mark.parametrize("way", ENGINES)
def test_arguments_that_are_one_object_stay_one(way) -> None:
    def scenario(way):
        torch.manual_seed(0)
        attention, x = nn.MultiheadAttention(8, 2, batch_first=True), leaf(2, 3, 8)

        def layer(x):
            h = x.sin()
            mixed, weights = keep(attention, h, h, h, need_weights=True)
            return mixed.exp(), weights.sum()

        mixed, weight = way(layer, x)
        (mixed.sum() + weight).backward()
        return mixed, weight, x.grad, [p.grad for p in attention.parameters()]

    agree(scenario, way)


@pytest.mark.parametrize("way", ENGINES)
@pytest.mark.parametrize("argument", [True, False])
def test_a_weight_stepped_before_backward_is_an_error(way, argument) -> None:
    w = leaf(4, 4)

    def layer(x):
        return (keep(torch.mm, x.sin(), w) if argument else keep(lambda h: h @ w.t(), x.sin())).exp()

    y = way(layer, leaf(3, 4))
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(MutationError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("way", ENGINES)
def test_a_replay_of_regions_in_a_part_and_after_it(way) -> None:
    """R13: the recompute leaves out the first region, and must not give its decision to the second."""
    source = Source()

    def decide(x):
        return x.exp() * decided(lambda: source.normal(3, 4))

    def layer(x):
        return way(decide, keep(partial(way, decide), x))

    def gradient():
        x = leaf(3, 4)
        y = way(layer, x)
        y.sum().backward()
        return y.detach(), x.grad

    with record() as tape:
        want = gradient()
    with replay(tape):
        same(gradient(), want)
    assert source.asked == 2


@pytest.mark.parametrize("outer", ENGINES)
@pytest.mark.parametrize("inner", ENGINES)
def test_regions_that_close_over_an_argument_all_add_to_its_gradient(outer, inner) -> None:
    def scenario(outer, inner):
        x, w = leaf(5, 4), leaf(4, 4)

        def part(h, w):
            for _ in range(2):
                h = inner(lambda h: torch.sin(h @ w), h)
            return h

        outer(lambda x, w: keep(part, torch.tanh(x), w) * 2, x, w).sum().backward()
        return x.grad, w.grad

    same(scenario(outer, inner), scenario(plain, plain), within=1e-5)
