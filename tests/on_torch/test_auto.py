"""`auto=True`: decisions of code that nobody can edit are made once.

Scores are disturbed by numbers that no checkpoint repeats, so that a recompute would decide otherwise. The oracle is
the same code without checkpointing, with the disturbance of the forward.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint as torchs
from torch.utils.flop_counter import FlopCounterMode

from roundpipe_core import Tape, record, replay
from roundpipe_core._phase import Phase, thread
from roundpipe_torch import (
    CheckpointMismatchError,
    GradientError,
    OptionError,
    VerifyError,
    VerifyWarning,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    keep,
    layer_scope,
    recompute_once,
    remat,
    save_for_recompute,
    usage,
)
from tests.on_torch.hugging import Operations
from tests.on_torch.oracle import leaf, plain, same

ROWS, WIDTH = 6, 8


class Shaky:
    """Noise of the host, below what a gradient shows and above what a near tie stands. Recomputes reverse it."""

    def __init__(self):
        self.calls = collections.Counter()

    def __call__(self, x):
        again = thread.run is not None and thread.run.phase is Phase.RECOMPUTE
        self.calls[again] += 1
        return x + (-1e-9 if again else 1e-9) * noise(x, self.calls[again])


def noise(x, seed):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(tuple(x.shape)))


def ties():
    """Scores with ties in every row."""
    return (leaf(ROWS, WIDTH, dtype=torch.float64).detach() * 1.2).round().requires_grad_()


def weights():
    return leaf(ROWS, WIDTH, seed=5, dtype=torch.float64)


def auto(function, *args, **kwargs):
    return remat(function, auto=True)(*args, **kwargs)


def auto_reentrant(function, *args, **kwargs):
    return remat(function, auto=True, use_reentrant=True)(*args, **kwargs)


def stock(function, *args, **kwargs):
    return torchs(function, *args, use_reentrant=False, **kwargs)


FOREIGN = torch.Generator()


def scattered(out, rows, values):
    return out.index_add(0, rows, values)


def _into(z, w):
    values, places = torch.empty(0, dtype=z.dtype), torch.empty(0, dtype=torch.long)
    with torch.no_grad():
        torch.topk(z, 3, out=(values, places))
    return z.gather(1, places) * w[:, :3]


def _assigned(z, w):
    out = w * 1.0
    out[z > 0] = z[z > 0] * 2
    return out


def _branch(read):
    """A path by a number that the host reads."""
    return lambda z, w: w.sin() * z if read((z - z.round()).sum()) else (w * z).cos()


LAYERS = {
    "topk": (lambda z, w: z.topk(3)[0] * w[:, :3], "topk"),
    "topk, smallest, other axis": (lambda z, w: torch.topk(z, 2, 0, largest=False).values * w[:2], "topk"),
    "topk, changed in place": (lambda z, w: z.topk(3)[0].mul_(2).div_(3) * w[:, :3], "topk"),
    "topk, places": (lambda z, w: w.gather(1, z.topk(3).indices), "topk"),
    "topk, into": (_into, "topk"),
    "sort": (lambda z, w: z.sort(-1).values * w, "sort"),
    "sort, stable": (lambda z, w: torch.sort(z, dim=0, stable=True)[0] * w, "sort"),
    "argsort": (lambda z, w: w.gather(1, z.argsort(-1)), "sort"),
    "max": (lambda z, w: z.max(-1).values * w[:, 0], "max"),
    "max, kept": (lambda z, w: torch.max(z, 1, keepdim=True)[0] * w, "max"),
    "min": (lambda z, w: (-z).min(-1)[0] * w[:, 0], "min"),
    "median": (lambda z, w: z.median(-1).values * w[:, 0], "median"),
    "kthvalue": (lambda z, w: z.kthvalue(3).values * w[:, 0], "kthvalue"),
    "cummax": (lambda z, w: z.cummax(1).values * w, "cummax"),
    "mode": (lambda z, w: z.round(decimals=9).mode(-1)[0] * w[:, 0], "mode"),
    "argmax": (lambda z, w: w.gather(1, z.argmax(-1, keepdim=True)), "argmax"),
    "argmin": (lambda z, w: w.gather(1, (-z).argmin(-1, keepdim=True)), "argmin"),
    "nonzero": (lambda z, w: scattered(w, *(((z > 0).nonzero()[:, 0], z[(z > 0).nonzero()[:, 0]]))), "nonzero"),
    "where": (lambda z, w: scattered(w, torch.where(z > 0)[0], z[torch.where(z > 0)[0]]), "nonzero"),
    "mask": (lambda z, w: z[z > 0] * w[z > 0].sin(), "nonzero"),
    "mask, rows": (lambda z, w: z[z.sum(-1) > z.round().sum(-1)] * w.sum(), "nonzero"),
    "masked_select": (lambda z, w: z.masked_select(z > 0).cumsum(0) * w.sum(), None),
    "masked_scatter": (lambda z, w: w.masked_scatter(z > 0, z), None),
    "assigned": (_assigned, "nonzero"),
    "bincount": (lambda z, w: w * torch.bincount(z.flatten().clamp(0).ceil().long(), minlength=9)[:WIDTH], "bincount"),
    "histc": (lambda z, w: z * torch.histc(z.detach(), 4, -2, 2).sum() + w * torch.histc(z, WIDTH, 0, 4), "histc"),
    "unique": (lambda z, w: w[torch.unique((z > 0).sum(-1), return_inverse=True)[1]].exp(), "_unique2"),
    "searchsorted": (lambda z, w: w.gather(1, torch.searchsorted(torch.arange(7.0).double(), z)), "searchsorted"),
    "bucketize": (lambda z, w: w.gather(1, torch.bucketize(z, torch.arange(-2.0, 3).double())), "bucketize"),
    "repeat_interleave": (lambda z, w: w.repeat_interleave((z.sum(-1) > 0).long() + 1, 0).cumsum(0), "item"),
    "multinomial": (lambda z, w: w.gather(1, torch.multinomial(z.softmax(-1), 3, generator=FOREIGN)), "multinomial"),
    "bernoulli": (lambda z, w: torch.bernoulli(z.sigmoid(), generator=FOREIGN) * w, "bernoulli"),
    "noise": (lambda z, w: torch.randn(z.shape, generator=FOREIGN, dtype=z.dtype) * w, "randn"),
    "noise in place": (lambda z, w: torch.empty_like(z).uniform_(generator=FOREIGN) * w + z, "uniform_"),
    "coin": (lambda z, w: torch.empty_like(z).bernoulli_(0.5, generator=FOREIGN) * w + z, "bernoulli_"),
    "coin, then topk": (
        lambda z, w: torch.empty_like(z).bernoulli_(0.5, generator=FOREIGN) + z.topk(3)[0].sum() * w,
        "topk",
    ),
    "topk, after a region": (lambda z, w: checkpoint(torch.exp, z).topk(3)[0] * w[:, :3], "topk"),
    "item": (_branch(lambda s: s.item() > 0), "_local_scalar_dense"),
    "bool": (_branch(lambda s: bool(s > 0)), "_local_scalar_dense"),
    "int": (_branch(lambda s: int(s * 1e12) > 0), "_local_scalar_dense"),
    "float": (_branch(lambda s: float(s.detach()) > 0), "_local_scalar_dense"),
    "tolist": (_branch(lambda s: (s.detach()[None] > 0).tolist() == [True]), None),
    "equal": (_branch(lambda s: torch.equal(s.detach() > 0, torch.tensor(True))), "equal"),
}


def train(way, function):
    """Gradients of a step with disturbed scores, and the operations of backward."""
    x, w, shaky = ties(), weights(), Shaky()
    FOREIGN.manual_seed(3)
    out = way(lambda x, w: function(shaky(x), w), x, w)
    with Operations() as backward:
        (out.square().sum() + out.sum() + (x * w).sum()).backward()
    return [x.grad, w.grad], backward.counts, shaky.calls.total()


@pytest.mark.parametrize("way", [auto, auto_reentrant])
@pytest.mark.parametrize("name", LAYERS)
def test_each_operation_decides_once(name, way):
    function, operation = LAYERS[name]
    want, before, _ = train(plain, function)
    got, after, calls = train(way, function)

    assert calls == 2
    same(got, want, within=1e-6)
    if operation in ("nonzero", None, "item"):
        operation = operation or "_local_scalar_dense"
    if name not in ("mask", "mask, rows", "assigned"):  # whose backward looks at the mask, checkpointed or not
        assert after[operation] == before[operation]


@pytest.mark.parametrize("name", LAYERS)
def test_plain_checkpointing_decides_twice(name):
    """What makes the test above one that can fail."""
    function, _ = LAYERS[name]
    want, _, _ = train(plain, function)
    try:
        got, _, _ = train(stock, function)
    except (RuntimeError, ValueError):
        return
    assert not all(torch.allclose(*pair, rtol=1e-6, atol=1e-6) for pair in zip(got, want, strict=True))


# What stands around


def routed(x, w, shaky):
    """A router and its dispatch, as unedited code writes them."""
    scores = shaky(x).softmax(-1)
    value, idx = scores.topk(2, dim=-1)
    value /= value.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in torch.nn.functional.one_hot(idx, WIDTH).sum((0, 1)).nonzero().flatten().tolist():
        token, choice = torch.where(idx == expert)
        out = out.index_add(0, token, torch.tanh(x[token] * w[expert % ROWS]) * value[token, choice, None])
    return torch.nn.functional.dropout(out, 0.4)


def outcome(way, layer=routed, backward=None):
    x, w, shaky = ties(), weights(), Shaky()
    torch.manual_seed(1)
    loss = way(lambda x, w: layer(x, w, shaky), x, w).square().sum()
    (backward or (lambda loss, *_: loss.backward()))(loss, x, w)
    return [x.grad, w.grad]


def nested(inner, outer):
    """A layer in a checkpointed layer."""
    return lambda function, *args: outer(lambda *a: inner(function, *a).sin() * a[0].mean(), *args)


@pytest.mark.parametrize(
    ("inner", "outer"), [(auto, auto), (checkpoint, auto), (auto, checkpoint), (auto, auto_reentrant), (plain, auto)]
)
def test_nested(inner, outer):  # R8
    same(outcome(nested(inner, outer)), outcome(nested(plain, plain)), within=1e-6)


def test_three_deep_and_twice():
    def way(function, *args):
        return auto(lambda *a: nested(checkpoint, checkpoint)(function, *a) + auto(function, *a), *args)

    def without(function, *args):
        return nested(plain, plain)(function, *args) + plain(function, *args)

    same(outcome(way), outcome(without), within=1e-6)


def test_several_backwards():
    def backward(loss, x, w):
        loss.backward(retain_graph=True)
        loss.backward(inputs=[w], retain_graph=True)
        loss.backward()

    same(outcome(auto, backward=backward), outcome(plain, backward=backward), within=1e-6)


def test_double_backward():
    def backward(loss, x, w):
        first = torch.autograd.grad(loss, [x, w], create_graph=True)
        sum(g.square().sum() for g in first).backward()

    same(outcome(auto, backward=backward), outcome(plain, backward=backward), within=1e-6)


def test_a_force_inside():
    def layer(x, w, shaky):
        value = shaky(x).topk(3).values
        (force,) = torch.autograd.grad((value * w[:, :3]).square().sum(), w, create_graph=True)
        return force * x

    same(outcome(auto, layer), outcome(plain, layer), within=1e-6)


def test_random_numbers_line_up():  # R7
    def layer(x, w, shaky):
        x = torch.nn.functional.dropout(x, 0.3)
        picked = torch.multinomial(shaky(x).softmax(-1), 3)
        x = torch.nn.functional.dropout(x, 0.3)
        gated = torch.bernoulli(shaky(x).sigmoid())
        noise = torch.empty_like(x).exponential_()
        return torch.nn.functional.dropout(w.gather(1, picked).sum(-1, keepdim=True) * x * gated + noise * w, 0.5)

    same(outcome(auto, layer), outcome(plain, layer), within=1e-6)
    torch.manual_seed(5)
    outcome(plain, layer)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    outcome(auto, layer)
    assert torch.equal(torch.get_rng_state(), after)


def test_early_stop():
    """The recompute ends before the last product."""

    def layer(x, w, shaky):
        return (w.gather(1, shaky(x).topk(4).indices).tanh() @ w[:4]).contiguous()

    def flops(way):
        x, w, shaky = ties(), weights(), Shaky()
        out = way(lambda x, w: layer(x, w, shaky), x, w)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        return counter.get_total_flops()

    assert flops(auto) == flops(plain)


def test_threads():
    results = {}

    def work(n):
        results[n] = outcome(auto, lambda x, w, shaky: shaky(x).topk(3).values * w[:, :3] * n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for started in threads:
        started.start()
    for started in threads:
        started.join()
    for n, got in results.items():
        same(got, outcome(plain, lambda x, w, shaky: shaky(x).topk(3).values * w[:, :3] * n), within=1e-6)  # noqa: B023
    assert len(results) == 4


def test_a_thread_started_by_the_layer_is_not_watched():
    def layer(x, w, shaky):
        found = []
        other = threading.Thread(target=lambda: found.append(x.detach().sum().item()))
        other.start()
        other.join()
        return shaky(x).topk(3).values * w[:, :3] * found[0]

    same(outcome(auto, layer), outcome(plain, layer), within=1e-6)


@pytest.mark.parametrize("phase", ["forward", "recompute"])
def test_exceptions_leave_nothing_behind(phase):  # R11
    runs = []

    def layer(x, w, shaky):
        runs.append(None)
        value = shaky(x).topk(3).values
        if phase == ("forward" if len(runs) == 1 else "recompute"):
            raise KeyError(phase)
        return value * w[:, :3]

    with pytest.raises(KeyError):
        outcome(auto, layer)

    included = torch._C._dispatch_tls_is_dispatch_key_included
    assert not included(torch._C._dispatch_key_parse("TESTING_ONLY_GenericMode"))
    assert not doing_recompute()
    same(outcome(auto), outcome(plain), within=1e-6)


def test_a_layer_that_catches_everything():
    def layer(x, w, shaky):
        try:
            value = shaky(x).topk(3).values
            x[:, :99].sum().item()
            raise ZeroDivisionError
        except ZeroDivisionError:
            return value * w[:, :3]

    same(outcome(auto, layer), outcome(plain, layer), within=1e-6)


def test_evaluation_decides_as_ever():
    calls = []

    def layer(x):
        calls.append(x.topk(2).indices)
        return x * 2

    with torch.no_grad():
        remat(layer, auto=True)(ties().detach())
    assert len(calls) == 1


def test_low_precision():
    def layer(x, w, shaky):
        scores = (x.bfloat16() @ w[:, :ROWS].bfloat16().repeat(2, 1)[:WIDTH]).float()
        idx = (scores + (shaky(scores.double()) - scores) * 1e9).topk(2).indices
        return scores.gather(1, idx).double() * w.gather(1, idx)

    same(outcome(auto, layer), outcome(plain, layer))


def split_gate(x, w, flip):
    """A product in slices, added in the other order where `flip` says so, as a kernel may."""
    parts = [x[:, i : i + 2].bfloat16() @ w[i : i + 2].bfloat16() for i in range(0, x.shape[1], 2)]
    return sum(reversed(parts) if flip() else parts)


@pytest.mark.parametrize("dispatch", ["by expert", "dense"])
def test_a_gate_whose_sums_have_another_order(dispatch):
    rows, width, experts, calls = 400, 32, 6, []
    given = [leaf(rows, width), leaf(width, experts, seed=1), leaf(experts, width, width, seed=2)]

    def layer(x, gate, up):
        with torch.no_grad():
            idx = split_gate(x, gate, lambda: len(calls) > 0).topk(2).indices
        calls.append(idx)
        weight = torch.softmax(x @ gate, -1)
        if dispatch == "dense":
            hot = torch.zeros_like(weight).scatter(1, idx, 1.0) * weight
            return torch.einsum("te,ted->td", hot, torch.einsum("td,edf->tef", x, up).tanh())
        out = torch.zeros_like(x)
        for expert in range(experts):
            token, choice = torch.where(idx == expert)
            if len(token):
                out = out.index_add(0, token, (x[token] @ up[expert]).tanh() * weight[token, idx[token, choice], None])
        return out

    def run(way):
        calls.clear()
        for leaf_ in given:
            leaf_.grad = None
        way(layer, *given).square().sum().backward()
        return [tensor.grad for tensor in given]

    want = run(plain)
    same(run(auto), want)
    assert len(calls) == 2
    try:
        got = run(stock)
    except torch.utils.checkpoint.CheckpointError:
        got = None
    assert got is None or not all(map(torch.equal, got, want))


# With saves of the layer's own


def seeds_style(x, w, shaky):
    """The gate is in the forward's branch only."""
    x = x * x.sum().detach().item()
    if doing_recompute():
        (idx,) = get_recompute_data()
    else:
        idx = shaky(x).softmax(-1).topk(3).indices
        assert len(idx.unique()) > 1
        save_for_recompute(idx)
    return (w.gather(1, idx) * x.gather(1, idx)).sort(-1).values * w[:, :3]


def one_line(x, w, shaky):
    (idx,) = save_for_recompute(shaky(x).topk(3).indices)
    return w.gather(1, idx) * x.topk(3).values


def once(x, w, shaky):
    idx = recompute_once(lambda: shaky(x).topk(3).indices)
    return w.gather(1, idx) * shaky(x).topk(3).values


def scoped(x, w, shaky):
    with layer_scope("one"):
        value = shaky(x).topk(3).values
    with layer_scope("two"):
        value = value + shaky(w).topk(3).values
        (value2,) = save_for_recompute(value.detach())
    return value * value2


def read_late(x, w, shaky):
    """Both phases decide before and after the question; the save comes first, the reading last."""
    first = shaky(x).topk(3).indices
    if not doing_recompute():
        idx = shaky(w).argmax(-1, keepdim=True)
        save_for_recompute(idx)
    second = shaky(x).sort(-1).indices
    if doing_recompute():
        (idx,) = get_recompute_data()
    return w.gather(1, first) * w.gather(1, idx) + w.gather(1, second)[:, :1]


def save_first(x, w, shaky):
    (mask,) = save_for_recompute(shaky(w).detach() > 0)
    return shaky(x).topk(3).values * mask[:, :3] + shaky(w).sort(-1).values[:, :3]


def in_one_line(x, w, shaky):
    """The decision that the recompute leaves out is made where the one is that it repeats."""

    def pick(value):
        return shaky(value).topk(3).values

    if doing_recompute():
        (mask,) = get_recompute_data()
    else:
        mask = pick(w).detach() > 0
        save_for_recompute(mask)
    return pick(x) * mask


@pytest.mark.parametrize("layer", [seeds_style, one_line, once, scoped, read_late, save_first, in_one_line])
@pytest.mark.parametrize(
    "way",
    [auto, auto_reentrant, nested(auto, checkpoint), nested(checkpoint, auto)],
    ids=["auto", "reentrant", "auto inside", "auto outside"],
)
def test_explicit_saves_win(layer, way):
    without = plain if way in (auto, auto_reentrant) else nested(plain, plain)
    same(outcome(way, layer), outcome(without, layer), within=1e-6)


# Where the phases part


def test_a_part_that_fails_may_ask_for_its_phase_before():
    """The recompute runs it again, and what it leaves out there is nobody's loss."""

    def fails(x):
        if not doing_recompute():
            x.detach().topk(2)
        raise NotImplementedError

    def layer(x):
        with contextlib.suppress(NotImplementedError):
            keep(fails, x)
        return x.exp().topk(3).values

    x, other = ties(), ties()
    remat(layer, auto=True)(x).sum().backward()
    layer(other).sum().backward()
    same(x.grad, other.grad)


def test_another_order_is_an_error_that_names_both_lines():
    state = []

    def stateful(x):
        state.append(None)
        if len(state) == 1:
            return x.sort(-1).values
        return x.topk(WIDTH).values

    y = remat(stateful, auto=True, label="router")(ties())
    with pytest.raises(CheckpointMismatchError) as error:
        y.sum().backward()
    first = stateful.__code__.co_firstlineno
    lines = str(error.value).splitlines()
    assert lines[0] == "layer 'router': the phases do not decide in the same order; they part at decision 0."
    assert lines[1] == f"  forward: sort at {__file__}:{first + 3}"
    assert lines[2] == f"  recompute: topk at {__file__}:{first + 4}"
    assert lines[3].startswith("  way out: ")
    assert "recompute_once" in lines[3]


@pytest.mark.parametrize("more", ["forward", "recompute"])
def test_a_decision_of_one_phase_only(more):
    runs = []

    def layer(x):
        runs.append(None)
        if (len(runs) == 1) == (more == "forward"):
            x.detach().sum().item()
        return x.exp().sin()

    x = ties()
    y = remat(layer, auto=True, early_stop=False)(x)
    with pytest.raises(CheckpointMismatchError, match=r"(forward|recompute): none") as error:
        y.sum().backward()
    assert "_local_scalar_dense at " in str(error.value)


def test_another_shape_is_an_error():
    sizes = [WIDTH, WIDTH - 1]

    def layer(x):
        return x.narrow(0, 0, sizes.pop(0) - 2).topk(2).values.exp()

    x = leaf(WIDTH, WIDTH)
    y = remat(layer, auto=True, label="gate")(x)
    with pytest.raises(CheckpointMismatchError, match=r"'gate': topk of a tensor of shape \[5, 8\] in the recompute"):
        y.sum().backward()


def test_decisions_under_a_transform_are_an_error():
    def layer(x):
        return torch.func.vmap(lambda row: row.topk(2).values)(x)

    with pytest.raises(OptionError, match=r"topk decides inside a torch\.func transform"):
        remat(layer, auto=True)(leaf(3, 4))

    x = leaf(3, 4)
    remat(lambda x: torch.func.vmap(torch.sin)(x).topk(2).values, auto=True)(x).sum().backward()
    assert x.grad.count_nonzero() == 6


@pytest.mark.parametrize(
    "decide", [lambda x: x.topk(2).values, lambda x: x * x.argmax(-1, keepdim=True)], ids=["topk", "argmax"]
)
@pytest.mark.parametrize("known", [False, True])
def test_decisions_of_compiled_code_are_an_error(decide, known):
    torch.compiler.reset()
    compiled = torch.compile(decide, backend="aot_eager")
    if known:
        compiled(ties())
    with pytest.raises(Exception, match=r"auto cannot keep what (topk|argmax) decides in compiled code"):
        remat(compiled, auto=True)(ties())
    torch.compiler.reset()


def test_compiled_code_that_decides_nothing():
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x.exp().sin(), backend="aot_eager")
    x = ties()
    y = remat(lambda x: compiled(x).topk(2).values, auto=True)(x)
    y.sum().backward()
    assert x.grad.count_nonzero() == 2 * ROWS
    torch.compiler.reset()


# Verify, costs, tapes


def test_verify_tells_what_flipped():
    def run(verify):
        x, shaky = ties(), Shaky()
        y = remat(lambda x: shaky(x).topk(3).values, auto=True, verify=verify, label="gate")(x)
        y.square().sum().backward()

    with pytest.raises(VerifyError) as error:
        run("raise")
    (flip,) = error.value.flips
    assert flip.layer == "gate"
    assert "auto 0 topk" in flip.item
    assert 0 < flip.rows <= flip.total == ROWS
    with pytest.warns(VerifyWarning, match="rows flipped"):
        run("warn")


def test_verify_tells_of_another_path_once():
    def layer(x, shaky):
        total = (shaky(x) - x.round()).sum()
        if total.item() > 0:
            x = x.sort(-1).values
        return x.topk(3).values * x.sum().item()

    class Reversed(Shaky):
        def __call__(self, x):  # the audit decides like a recompute
            self.calls[thread.run.phase] += 1
            return x + (1e-9 if thread.run.phase is Phase.FORWARD else -1e-9) * noise(x, 1).abs()

    x = ties()
    y = remat(lambda x: layer(x, Reversed()), auto=True, verify="raise")(x)
    with pytest.raises(VerifyError) as error:
        y.sum().backward()
    (found,) = [flip for flip in error.value.flips if flip.item.startswith("decision")]
    assert found.item.startswith(f"decision 1 is a topk at {__file__}")
    assert (found.rows, found.total, found.first) == (1, 1, 0)
    assert not any(flip.item.startswith("a plain recompute fails") for flip in error.value.flips)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_backward_waits_for_no_device():
    x, w = ties().detach().cuda().requires_grad_(), weights().detach().cuda().requires_grad_()
    want = outcome_on(x, w, plain)
    got = outcome_on(x, w, auto, waiting="error")
    same(got, want, within=1e-6)


def outcome_on(x, w, way, waiting="default"):
    x.grad = w.grad = None
    torch.manual_seed(1)
    loss = way(lambda x, w: routed(x, w, lambda x: x), x, w).square().sum()
    torch.cuda.set_sync_debug_mode(waiting)
    try:
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [x.grad, w.grad]


def test_verify_is_silent_where_nothing_flips():
    x = ties()
    y = remat(lambda x: x[x > 0].topk(3).values * x.sum().item(), auto=True, verify="raise")(x)
    y.sum().backward()
    assert x.grad.any()


def test_bytes_are_counted():  # R12
    def layer(x):
        value, idx = x.topk(2)
        return x[idx.flatten()[: int(idx.max())] % ROWS] * value.sum()

    with record() as tape:
        remat(layer, auto=True, label="gate")(ties())
    assert [(entry.name, entry.dtype) for entry in tape.entries()] == [
        ("auto 0 topk", "int64"),
        ("auto 1 _local_scalar_dense", "int"),
    ]
    assert tape.nbytes() == ROWS * 2 * 8


def test_a_tape_repeats_them():  # R13
    def forward(layer, x, w):
        return remat(lambda x, w: layer(x, w, shaky), auto=True, label="gate")(x, w)

    for layer in (routed, one_line):
        shaky, x, w = Shaky(), ties(), weights()
        torch.manual_seed(1)
        with record() as tape:
            want = forward(layer, x, w)
        torch.manual_seed(1)
        with replay(tape):
            got = forward(layer, x, w)
        same(got.detach(), want.detach(), within=1e-6)
        want.sum().backward()
        grads, x.grad, w.grad = [x.grad, w.grad], None, None
        got.sum().backward()
        same([x.grad, w.grad], grads, within=1e-6)


def test_routing_of_an_engine_is_what_topk_gives():  # R13
    x = ties()
    columns = x.shape[1]
    idx = torch.rand(ROWS, 1, columns).argsort(-1)[..., :2]  # two experts, never one twice
    tape = Tape.from_routing(idx.to(torch.int16), experts=columns, name="auto 0 topk")
    with replay(tape):
        y = remat(lambda x: x.exp().topk(2).values, auto=True)(x)
    assert torch.equal(y, x.exp().gather(-1, idx[:, 0]))
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().gather(-1, idx[:, 0]).sum(), x)[0])


def test_routing_alone_is_refused_by_a_layer_that_decides_more():  # R10
    tape = Tape.from_routing(torch.zeros(ROWS, 1, 2, dtype=torch.int16), experts=3, name="auto 0 topk")
    with pytest.raises(CheckpointMismatchError, match="part at decision 1"), replay(tape):
        remat(lambda x: x.topk(2).values * x.sum().item(), auto=True)(ties())


def test_decisions_hold_no_state_of_generators():
    """5 KB each would be more than most decisions."""
    slots = []

    def layer(x):
        slots.append(thread.run.slot)
        x = torch.nn.functional.dropout(x, 0.5)
        return x.topk(2).values * x.sum().item() + torch.multinomial(x.abs() + 1, 1)

    y = remat(layer, auto=True)(ties())
    states = [entry.state for entry in slots[0].entries.values()]
    assert [state is None for state in states] == [True, True, False]
    y.sum().backward()


def test_dispatch_modes_of_the_user_see_no_decision_in_backward():
    def decisions(way):
        x, w, shaky = ties(), weights(), Shaky()
        loss = way(lambda x, w: routed(x, w, shaky), x, w).sum()
        with Operations() as seen:
            loss.backward()
        return {
            name: seen.counts[name] for name in ("topk", "nonzero", "_local_scalar_dense", "item") if seen.counts[name]
        }

    assert decisions(stock_or_nothing) != {}
    assert decisions(auto) == decisions(plain) == {}


def stock_or_nothing(function, *args):
    """Torch's checkpointing of a layer that repeats itself."""
    return torchs(lambda x, w: routed(x, w, lambda x: x), *args, use_reentrant=False)


def test_no_mode_runs():
    """Operations that decide nothing take the path they take without `auto`."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    def layer(x):
        assert not _get_current_dispatch_mode_stack()
        assert not _get_current_function_mode_stack()
        return x.exp().topk(2).values

    remat(layer, auto=True)(ties()).sum().backward()


# What users add

library = torch.library.Library("roundpipe_test", "FRAGMENT")


@torch.library.custom_op("roundpipe_test::route", mutates_args=())
def route(x: torch.Tensor) -> torch.Tensor:
    CALLS.append("route")
    return (x + noise(x, len(CALLS))).argmax(-1)


CALLS: list[str] = []


def choose(x):
    """A function of somebody's module, which others call by its name."""
    CALLS.append("choose")
    return (x.detach() + noise(x, len(CALLS))).argmax(-1)


class Router:
    @staticmethod
    def unused():
        return None

    def choose(self, x):
        CALLS.append("method")
        return (x.detach() + noise(x, len(CALLS))).argmax(-1)


@pytest.mark.parametrize(
    ("named", "decide"),
    [
        (route, lambda x: route(x)),
        (torch.ops.roundpipe_test.route, lambda x: torch.ops.roundpipe_test.route(x)),
        (torch.ops.roundpipe_test.route.default, lambda x: torch.ops.roundpipe_test.route(x)),
        (choose, lambda x: choose(x)),
        (Router.choose, lambda x: Router().choose(x)),
    ],
    ids=["custom_op", "packet", "overload", "function", "method"],
)
def test_operations_and_functions_of_the_user(named, decide):
    def run(way):
        CALLS.clear()
        x, w = ties(), weights()
        y = way(lambda x, w: w.gather(1, decide(x)[:, None]) * x.topk(2).values, x, w).sum()
        with Operations() as backward:
            y.backward()
        assert not backward.counts["topk"]  # which is watched on
        return [x.grad, w.grad], len(CALLS)

    want, once = run(plain)
    got, calls = run(lambda function, *args: remat(function, auto=[named])(*args))
    assert calls == once == 1
    same(got, want)
    assert run(auto)[1] == 2  # for those who do not name it


def draw(x):
    return torch.rand(len(x), 1)


def test_what_a_named_function_draws_the_recompute_goes_on_from():  # R7
    seen = []

    def layer(x):
        seen.append((draw(x), torch.rand(2)))
        return x.exp() * seen[-1][0]

    remat(layer, auto=[draw])(ties()).sum().backward()
    same(seen[1], seen[0])


def test_torch_functions_may_be_named():
    for named in (torch.round, torch.Tensor.round, torch.ops.aten.round):
        seen = []

        def layer(x):
            seen.append((x * len(seen)).round())  # noqa: B023
            return x.exp() * seen[-1]  # noqa: B023

        remat(layer, auto={named})(ties()).sum().backward()
        assert torch.equal(*seen)


def dropped(x):
    return x * torch.empty_like(x).bernoulli_(0.5, generator=FOREIGN)


def test_a_draw_in_place_that_is_named_is_one_decision():
    with usage() as report:
        y = remat(dropped, auto={torch.ops.aten.bernoulli_})(ties())
    assert report.layers[0].decisions == 1
    del y


def test_a_function_whose_result_has_gradient_is_refused():  # R5
    with pytest.raises(GradientError, match=r"auto 0 soft(.|\n)*detach"):
        remat(lambda x: soft(x), auto=[soft])(ties())


def soft(x):
    return x.softmax(-1)


@pytest.mark.parametrize("wrong", ["topk", 3, ["topk"], [lambda x: x], [torch.nn.Linear]])
def test_what_auto_does_not_take(wrong):
    with pytest.raises(OptionError) as error:
        remat(torch.sin, auto=wrong)
    what = (
        f"auto cannot watch {wrong[0]!r}."
        if isinstance(wrong, list)
        else f"auto must be True, False or a collection of operations, not {wrong!r}."
    )
    first, *_, last = str(error.value).splitlines()
    assert first == what
    assert last.strip() == (
        "way out: name operations (torch.cumsum, torch.ops.mylib.route) or functions of a module or class that others "
        "call by that module or class; for a local function call recompute_once(function, ...) in the layer."
    )
    assert __file__ in str(error.value)


# Modules


class Gate(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(weights().detach())
        self.shaky = Shaky()

    def forward(self, x):
        return self.shaky(x * self.w).topk(3).values


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_modules_and_their_copies(copied):
    want, module = Gate(), copied(remat(Gate(), auto=[choose]))
    for gate in (want, module):
        gate(ties()).square().sum().backward()
    same(module.w.grad, want.w.grad, within=1e-6)


def test_keywords_of_the_layer_reach_it():
    x = ties()
    layer = remat(lambda x, *, function, decisions: x.topk(2).values * function * decisions, auto=True)
    layer(x, function=2.0, decisions=3.0).sum().backward()
    assert x.grad.sum() == 6 * 2 * ROWS


def test_decisions_die_with_their_graph():  # R9
    found = []

    def layer(x):
        found.append(weakref.ref(thread.run.slot))
        return x.topk(2).values * x.sum().item()

    gc.collect()
    gc.disable()
    try:
        y = remat(layer, auto=True)(ties())
        assert found[0]() is not None
        y.sum().backward()
        del y
        assert found[0]() is None
        y = remat(layer, auto=True)(ties())
        del y
        assert found[-1]() is None
    finally:
        gc.enable()


def test_torch_checkpoints_keywords_stay_torchs():
    """`auto` is an option of remat: every other keyword of checkpoint belongs to the layer."""
    x = ties()
    checkpoint(lambda x, auto: x * auto, x, auto=3.0).sum().backward()
    assert (x.grad == 3).all()


class Tanh(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.tanh()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_operation_of_functions_passes(use_reentrant) -> None:
    def layer(x):
        return torch.func.vmap(Tanh.apply)(x.topk(2).values).exp()

    got, want = leaf(4, 8), leaf(4, 8)
    remat(layer, auto=True, use_reentrant=use_reentrant)(got).sum().backward()
    layer(want).sum().backward()
    same(got.grad, want.grad)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_branch_that_cond_takes_is_kept(use_reentrant) -> None:
    signs = [1.0, -1.0]

    def layer(x):
        positive = torch.tensor(signs.pop(0)) > 0
        return torch.cond(positive, lambda x: x.sin(), lambda x: x.cosh(), (x,))

    x = leaf(4, 8)
    with record() as tape:
        remat(layer, auto=True, use_reentrant=use_reentrant)(x).sum().backward()
    same(x.grad, x.detach().cos())
    assert not signs
    assert [entry.name for entry in tape.entries()] == ["auto 0 cond"]
