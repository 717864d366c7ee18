"""State that a forward reads or moves, from public reports: buffers, randomness, ambient settings, caches, evaluation.

Shapes: T tokens, D width, E experts. The oracle is `agree`: the same scenario without checkpointing.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import random
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import batch_norm, dropout, one_hot, scaled_dot_product_attention

from roundpipe_torch import (
    MutationError,
    checkpoint,
    doing_recompute,
    recompute_once,
    remat,
    save_for_recompute,
)
from tests.on_torch.oracle import ENGINES, WAYS, Source, agree, decided, leaf, plain, same

T, D, E = 16, 6, 5

# Buffers that the forward moves (torchtitan PR 1114 and 3686, Megatron-LM issue 1330, pytorch issue 96136)


class Load(torch.nn.Module):
    """Tokens per expert, counted from the first call on."""

    total: torch.Tensor | None = None

    def forward(self, idx):
        count = torch.bincount(idx.flatten(), minlength=E).float()
        self.total = count if self.total is None else self.total + count


class Balanced(torch.nn.Module):
    """Routing by scores and a bias that the load moves, so that a second update would route otherwise."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(leaf(D, E, seed=1).detach())
        self.register_buffer("bias", torch.zeros(E))
        self.load = torch.nn.Sequential(Load())  # the counter sits deeper in the module

    @torch.no_grad()
    def route(self, score):
        idx = (score + self.bias).topk(2, -1).indices
        self.load(idx)
        self.bias += 0.2 * torch.sign(self.load[0].total.mean() - self.load[0].total)
        return idx

    def forward(self, x):
        score = torch.sigmoid(x @ self.w)
        idx = decided(lambda: self.route(score))
        return torch.tanh(x) * ((score.gather(1, idx)[..., None] * one_hot(idx, E)).sum(1) @ self.w.T)

    def state(self):
        return self.bias.clone(), self.load[0].total.clone()


class Normed(torch.nn.Module):
    """Batch norm whose author moves the statistics in the forward only."""

    def __init__(self, momentum):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(D, momentum=momentum)

    def forward(self, x):
        norm = self.norm
        if not doing_recompute():
            return torch.sigmoid(norm(x))
        mean, var = norm.running_mean.clone(), norm.running_var.clone()
        return torch.sigmoid(batch_norm(x, mean, var, norm.weight, norm.bias, True, 0.0, norm.eps))

    def state(self):
        return [buffer.clone() for buffer in self.norm.buffers()]


class Spectral(torch.nn.Module):
    """A weight divided by its norm, which one power iteration a forward estimates."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(leaf(D, D, seed=1).detach())
        self.u = None  # made by the first forward

    @torch.no_grad()
    def iterate(self):
        self.u = torch.ones(D) if self.u is None else self.u
        v = torch.nn.functional.normalize(self.w.T @ self.u, dim=0)
        self.u = torch.nn.functional.normalize(self.w @ v, dim=0)
        return self.u, v

    def forward(self, x):
        u, v = recompute_once(self.iterate)
        return torch.tanh(x @ self.w / (u @ self.w @ v))

    def state(self):
        return self.u.clone()


class Warming(torch.nn.Module):
    """A count of calls, a plain number, that sets a temperature and every third time skips the layer."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.w = torch.nn.Parameter(leaf(D, D, seed=1).detach())

    def forward(self, x):
        self.calls += not doing_recompute()
        call = decided(lambda: self.calls)
        return x if call % 3 == 0 else torch.softmax(x @ self.w * call, -1)

    def state(self):
        return self.calls


@pytest.mark.parametrize(
    "make",
    [Balanced, lambda: Normed(0.1), lambda: Normed(None), Spectral, Warming],
    ids=["balanced", "batch norm", "cumulative batch norm", "spectral norm", "call count"],
)
@pytest.mark.parametrize("way", [*WAYS, ENGINES[1]])
def test_state_moves_once_a_forward_whether_or_not_a_backward_follows(way, make):
    def scenario(way):
        module, seen = make(), []
        for step in range(4):
            x = leaf(T, D, seed=step)
            y = way(module, x)
            seen.append(module.state())
            if step != 1:
                y.square().sum().backward()
            seen += [module.state(), y.detach(), x.grad]
        return seen, [p.grad for p in module.parameters()]

    agree(scenario, way)


# Randomness that is not torch's default generator (pytorch PR 14253, issue 121212, transformers PR 11582)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", [*WAYS, ENGINES[1]])
def test_draws_from_python_numpy_and_private_generators(way, seed):
    def scenario(way):
        python, private, w = random.Random(seed), Source(seed), leaf(D, D)
        numpy = np.random.default_rng(seed)
        given = {"h": [leaf(T, D, seed=1), "tag"], "none": None}

        def draw(shape):
            return python.random() < 0.5, numpy.normal(size=shape), private.integers(2, *shape)

        def layer(given):
            x = given["h"][0]
            skip, noise, mask = decided(lambda: draw(x.shape))
            y = torch.tanh(x @ w + torch.as_tensor(noise, dtype=x.dtype)) * mask
            return {"h": [y.sin() if skip else y.exp(), given["h"][1]], "aux": None}

        out = way(layer, given)
        assert out["h"][1] == "tag"
        assert out["aux"] is None
        out["h"][0].square().sum().backward()
        return given["h"][0].grad, w.grad, python.random(), numpy.random(), private.asked

    agree(scenario, way)


@pytest.mark.parametrize("way", [*WAYS, ENGINES[1]])
def test_dropout_after_a_noisy_decision_drops_the_same(way):
    def scenario(way):
        x, w = leaf(T, D), leaf(D, D, seed=1)

        def layer(x):
            x = dropout(x, 0.3)
            idx = decided(lambda: (x + torch.randn(x.shape)).argmax(-1, keepdim=True))
            x = dropout(x @ w, 0.3) * (idx + 1)
            keep = recompute_once(lambda: torch.rand(x.shape) < 0.7)
            return dropout(torch.sin(x) * keep, 0.3)

        with torch.random.fork_rng():
            torch.manual_seed(3)
            y = way(layer, way(layer, x))
            torch.rand(5)
            y.square().sum().backward()
            return y.detach(), x.grad, w.grad, torch.rand(3)

    agree(scenario, way)


# What was in force at the forward (pytorch issues 84864, 71124 and 141896, NeMo Automodel PR 3513)


def autocast(dtype=torch.bfloat16, **options):
    return torch.autocast("cpu", dtype=dtype, **options)


@contextlib.contextmanager
def switched(read, write, value):
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def default_dtype(dtype):
    return switched(torch.get_default_dtype, torch.set_default_dtype, dtype)


def deterministic():
    return switched(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)


AMBIENT = {
    "autocast": lambda: autocast(),
    "autocast float16": lambda: autocast(torch.float16),
    "autocast without cache": lambda: autocast(cache_enabled=False),
    "default dtype": lambda: default_dtype(torch.float64),
    "default device": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "mkldnn off": lambda: switched(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
    "sdpa": lambda: sdpa_kernel([SDPBackend.MATH]),
    "nothing": contextlib.nullcontext,
}


def sensitive(x, w):
    """Computes otherwise under every setting of AMBIENT."""
    h = x @ w
    p = torch.arange(T) / 7
    scale = 2.0 if p.device.type == "meta" else 1.0
    scale += 4.0 * torch.are_deterministic_algorithms_enabled() + 8.0 * torch.backends.mkldnn.enabled
    scale += 16.0 * torch.backends.cuda.flash_sdp_enabled()
    h = torch.tanh(h.to(p.dtype) * scale) @ w.to(p.dtype)
    return scaled_dot_product_attention(*[h.float()[None, None]] * 3)


@pytest.mark.parametrize("inside", AMBIENT)
@pytest.mark.parametrize("outside", ["nothing", "autocast", "default dtype", "default device"])
def test_settings_of_the_forward_hold_in_the_recompute(inside, outside):
    def scenario(way):
        x, w = leaf(T, D, seed=1), leaf(D, D)
        with AMBIENT[inside]():
            y = way(sensitive, x, w)
        with AMBIENT[outside]():  # what happens to be in force at the backward
            y.backward(torch.ones(1, 1, T, D, device="cpu"))
            after = torch.get_default_dtype(), torch.empty(0).device.type, torch.is_autocast_enabled("cpu")
        return y.detach(), x.grad, w.grad, after

    agree(scenario)


SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


@pytest.mark.parametrize("place", ["here", "another thread"])
@pytest.mark.parametrize("way", ENGINES)
def test_variables_of_the_context_are_those_of_the_forward(way, place):
    """Autograd's own threads have none that was set (pytorch issue 186537)."""

    def scenario(way):
        x, w = leaf(T, D, seed=1), leaf(D, D)

        def layer(x):
            before = SCALE.set(SCALE.get() * 2)
            h = torch.tanh(x @ w * SCALE.get() * decided(lambda: 2.0))
            SCALE.reset(before)
            return torch.exp(h * SCALE.get())

        outside = SCALE.set(3.0)
        y = way(lambda x: way(layer, x).sin(), x)
        SCALE.reset(outside)
        backward = threading.Thread(target=y.sum().backward)
        if place == "here":
            backward.run()
        else:
            backward.start()
            backward.join()
        return x.grad, w.grad, SCALE.get()

    agree(scenario, way)


@pytest.mark.parametrize("setting", [name for name in AMBIENT if name not in ("nothing", "autocast without cache")])
def test_the_sensitive_layer_is_sensitive(setting):
    x, w = leaf(T, D, seed=1), leaf(D, D)
    before = sensitive(x, w)
    with AMBIENT[setting]():
        assert not torch.equal(sensitive(x, w), before)


@pytest.mark.parametrize("history", ["none", "no_grad", "grad"])
@pytest.mark.parametrize("way", WAYS)
def test_autocast_whatever_its_cache_holds(way, history):
    """The same under nested autocast of other dtypes, inside and outside the region."""

    def scenario(way):
        x, w, half, source, aux = leaf(T, D), leaf(D, D, seed=1), leaf(D, D, seed=2), Source(), 0.0

        def layer(x):
            y = x @ w * decided(lambda: source.integers(4, T, 1))
            with autocast(torch.float16):
                y = torch.tanh(y @ half)
            with autocast(enabled=False):
                return y.float() @ w

        with autocast(torch.float16), autocast():
            if history == "no_grad":
                with torch.no_grad():
                    x @ w
            if history == "grad":
                aux = (x @ w).float().sum()
            y = way(layer, x)
        (y.square().sum() + aux).backward()
        return x.grad, y.detach(), w.grad, half.grad

    agree(scenario, way)


# Modes that others set before the backward (TransformerEngine PR 3394, peft issue 2832)


class Moded(torch.nn.Module):
    """What it computes and keeps depends on its mode and on which weights are trained."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = torch.nn.BatchNorm1d(D), torch.nn.Linear(D, D)
        self.up.load_state_dict({"weight": leaf(D, D, seed=1).detach(), "bias": leaf(D, seed=2).detach()})

    def forward(self, x):
        h = dropout(torch.tanh(self.up(self.norm(x))), 0.3, self.training)
        return torch.exp(h * (0.5 if self.training else 2.0)) * decided(lambda: 2.0)


def half(net):
    net[0].requires_grad_(False)


MODES = {
    "eval": (lambda net: net.train(), lambda net: net.eval()),
    "train": (lambda net: net.eval(), lambda net: net.train()),
    "one part": (lambda net: net[1].norm.eval(), lambda net: net.train()),
    "frozen": (lambda net: net, lambda net: net.requires_grad_(False)),
    "trained": (lambda net: net.requires_grad_(False), lambda net: net.requires_grad_()),
    "half": (half, lambda net: net.requires_grad_()),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ENGINES)
def test_modes_set_by_others_before_the_backward(way, mode):
    first, then = MODES[mode]

    def modes(net):
        return [module.training for module in net.modules()], [p.requires_grad for p in net.parameters()]

    def scenario(way):
        torch.manual_seed(1)
        net, x = torch.nn.Sequential(Moded(), Moded()), leaf(T, D)
        first(net)
        y = way(net[1], way(net[0], x))
        then(net)
        now = modes(net)
        y.square().sum().backward()
        assert modes(net) == now
        return x.grad, [p.grad for p in net.parameters()], list(net.buffers())

    agree(scenario, way, vanishes=True)


def test_modes_are_put_back_after_an_error_in_the_recompute():
    def layer(x):
        if doing_recompute():
            assert net.training
            raise OSError
        return net(x).exp()

    net = Moded()
    y = checkpoint(layer, leaf(T, D))
    net.eval().requires_grad_(False)
    with pytest.raises(OSError):
        y.sum().backward()
    assert not net.norm.training
    assert not net.up.weight.requires_grad


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("way", ENGINES)
def test_an_argument_that_is_trained_from_now_on_or_no_more(way, nested, trained):
    """An input is made one to attack after the clean forward; noise is frozen again."""

    def scenario(way):
        w, x, noise = leaf(D, D, seed=1), leaf(T, D), leaf(T, D, seed=2, grad=trained)

        def layer(x, noise):
            return torch.tanh((x * (noise[0] if nested else noise)) @ w).exp() * decided(lambda: 2.0)

        y = way(layer, x, [noise] if nested else noise)
        noise.requires_grad_(not trained)
        y.sum().backward()
        return x.grad, w.grad, noise.grad

    agree(scenario, way)


# Attributes of modules: weights that hooks norm, hidden states, masks, rotary tables that grow


def normed_by_a_hook():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.nn.utils.spectral_norm(torch.nn.Linear(D, D))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_weight_that_a_hook_makes_before_each_call(reentrant):
    """A discriminator that sees two batches (pytorch PR 13350)."""

    def scenario(way):
        torch.manual_seed(1)
        net = normed_by_a_hook()
        judge = net if way is plain else remat(net, use_reentrant=reentrant)
        real, fake = leaf(T, D), leaf(T, D, seed=1)
        (judge(real).exp().sum() - judge(fake).sin().sum()).backward()
        return real.grad, fake.grad, [p.grad for p in net.parameters()], [*net.buffers()]

    same(scenario(remat), scenario(plain), within=1e-5 if reentrant else 0.0)


class Stateful(torch.nn.Module):
    """Goes on from what it was left with, as a hidden state, or a table that grows with its input."""

    def __init__(self):
        super().__init__()
        self.up, self.state, self.table, self.aux = torch.nn.Linear(D, D), None, None, 0.0
        self.up.load_state_dict({"weight": leaf(D, D, seed=1).detach(), "bias": leaf(D, seed=2).detach()})
        self.register_buffer("scale", torch.ones(D))
        self.longest = 0

    def forward(self, x, cut):
        if len(x) > self.longest:
            self.longest = len(x)
            self.scale = torch.full((D,), 1.0 / len(x))
            self.table = torch.arange(float(len(x) * D)).view(-1, D).cos()
        h = torch.tanh(self.up(x * self.table[: len(x)]) * self.scale)
        if self.state is not None:
            h = h * (self.state[0].detach() if cut else self.state[0])
        self.state = h.mean(0), len(x)
        self.aux = self.aux + h.square().mean()
        return h.exp()


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_state_that_goes_on_from_call_to_call(way, cut):
    def scenario(way):
        net, x = Stateful(), leaf(3 * T, D)
        y = [way(net, part, cut) for part in (x[:T], x[T : T + 4], x[: 2 * T])]
        left = net.state, net.longest
        (torch.cat(y).sum() + net.aux).backward()
        assert net.state is left[0]
        assert net.longest == left[1]
        return x.grad, [p.grad for p in net.parameters()]

    agree(scenario, way)


def test_what_a_module_notes_of_itself_is_not_turned_back():
    """FSDP sets itself up in its first forward, and must not do so again."""

    class Noting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.ready, self.helper, self.calls, self.table = None, None, 0, None

        def forward(self, x):
            if self.ready is None:
                self.ready, self.helper = True, object()
                made.append(self.helper)
            self.calls += 1
            self.table = x.detach().cos()
            return torch.sin(x * self.table)

    made, net, x = [], Noting(), leaf(T, D)
    checkpoint(net, x).sum().backward()
    assert made == [net.helper]
    assert (net.ready, net.calls) == (True, 2)


class Masked(torch.nn.Module):
    """What the caller sets for each batch; and a sum that the decision moves."""

    mask: torch.Tensor | None = None
    seen: torch.Tensor | None = None

    def route(self, x):
        self.seen = x.detach().sum(0) + (0 if self.seen is None else self.seen)
        return self.seen.argmax()

    def forward(self, x, told):
        best = decided(lambda: self.route(x)) if told else recompute_once(self.route, x)
        return torch.tanh(x * self.mask) * best * self.seen.cos()


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("way", ENGINES)
def test_a_tensor_that_the_caller_sets_for_each_call(way, told):
    def scenario(way):
        net, w, x = Masked(), leaf(T, D, seed=1), leaf(T, D)
        net.mask, net.seen = w * 2, torch.zeros(D)
        first = way(net, x, told)
        net.mask = w * 3
        first.sum().backward()
        left = net.seen
        net.mask = None
        assert net.seen is left
        return x.grad, w.grad, net.seen

    agree(scenario, way)


# Objects that the layer fills (transformers PR 46572, pytorch issue 155171)


def test_a_growing_cache_grows_once():
    def scenario(way):
        w, x, cache = leaf(D, D, seed=1), leaf(3 * T, D), collections.defaultdict(lambda: collections.deque(maxlen=2))

        def layer(name, x):
            key = x @ w
            if not doing_recompute():
                cache[name].append(key)
            (known,) = save_for_recompute(len(cache[name]) - 1)
            keys = torch.cat([*list(cache[name])[:known], key])
            return torch.softmax(x @ keys.T, -1) @ keys

        y = [way(layer, name, part) for name, part in zip("aab", x.split(T), strict=True)]
        torch.cat(y).square().sum().backward()
        return x.grad, w.grad, [len(cache[name]) for name in "ab"]

    agree(scenario)


@dataclasses.dataclass
class Batch:
    hidden: torch.Tensor
    seen: list[int]


@pytest.mark.parametrize("way", ENGINES)
def test_what_the_layer_puts_into_its_arguments_is_there_once(way):
    """Objects of graphs and batches that layer after layer fills (TabPFN PR 1138, transformers PR 46572)."""

    def scenario(way):
        w, x = leaf(D, D, seed=1), leaf(T, D)
        taken, keys, stats, tags = [x * 1], {}, np.zeros(2), {"a"}
        batch, queue = Batch(x * 2, []), collections.deque([3.0])

        def layer(taken, batch, queue, *, keys, stats, tags):
            h = torch.tanh(taken.pop() @ w) * batch.hidden * queue.popleft() * len(tags)
            batch.hidden = (h @ w).sin()
            batch.seen.append(len(h))
            keys["h"] = h.detach()
            stats += 1
            tags.add("b")
            return batch.hidden.exp() * torch.exp(h * stats[0].item()) * decided(lambda: 2.0)

        y = way(layer, taken, batch, queue, keys=keys, stats=stats, tags=tags)
        y.sum().backward()
        return x.grad, w.grad, keys["h"], batch.hidden.detach(), batch.seen, list(stats), sorted(tags), len(taken)

    agree(scenario, way)


def test_a_static_cache_written_in_place():
    def scenario(way):
        w, x, cache, end = leaf(D, D, seed=1), leaf(2 * T, D), torch.zeros(2 * T, D), [0]

        def layer(x):
            key = x @ w
            start = decided(lambda: end[0])
            if not doing_recompute():
                cache[start : start + T] = key.detach()
                end[0] = start + T
            keys = torch.cat([cache[:start].clone(), key])
            return torch.softmax(x @ keys.T, -1) @ keys

        torch.cat([way(layer, part) for part in x.split(T)]).square().sum().backward()
        return x.grad, w.grad, cache, end

    agree(scenario)


# Values that change between forward and backward (pytorch issues 166926 and 121212, anemoi-core issue 1330)


@pytest.mark.parametrize("way", [*WAYS, ENGINES[1]])
def test_containers_and_attributes_may_change_after_the_forward(way):
    def scenario(way):
        x, w, counts, limit = leaf(T, D), leaf(D, D, seed=1), np.arange(3), {"mean": -1e9, "k": 2}
        cfg, tags, hidden = {"temp": [1.0]}, ["a", "b"], [leaf(T, D, seed=2)]
        kept = hidden[0]

        def layer(x, cfg, *, tags, hidden):
            plan = decided(lambda: (limit["k"], bool(x.mean() > limit["mean"]), counts, tags, None))
            k, branch, saved_counts, saved_tags, nothing = plan
            assert (type(k), type(branch), nothing, saved_tags) == (int, bool, None, ["a", "b"])
            y = torch.softmax(x @ w / cfg["temp"][0], -1).topk(k, -1).values.sum(-1, keepdim=True)
            y = y * len(tags) * float(saved_counts.sum()) * hidden[0]
            return y.sin() if branch else y.exp()

        y = way(layer, x, cfg, tags=tags, hidden=hidden)
        limit |= {"mean": 1e9, "k": 3}
        cfg["temp"][0] = 5.0
        tags.clear()
        hidden.clear()
        counts *= 7
        y.square().sum().backward()
        return x.grad, w.grad, kept.grad

    agree(scenario, way)


@pytest.mark.parametrize("place", ["positional", "keyword", "nested", "deeper"])
@pytest.mark.parametrize("change", [lambda t: t.add_(1), lambda t: t[0].zero_(), lambda t: t.view(-1).mul_(2)],
                         ids=["whole", "a row", "through a view"])  # fmt: skip
def test_an_argument_written_in_place_is_an_error(place, change):
    def layer(x, other=None, **more):
        while isinstance(other, (list, dict)):
            other = other[0]
        return torch.exp(x * other)

    def scenario(way):
        x, other = leaf(T, D), leaf(T, D, seed=1, grad=False)
        calls = {
            "positional": lambda: way(layer, x, other),
            "keyword": lambda: way(layer, x, other=other),
            "nested": lambda: way(layer, x, [other]),
            "deeper": lambda: way(layer, x, other={0: [other]}, mask=None),
        }
        y = calls[place]()
        change(other)
        y.sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scenario(plain)
    with pytest.raises(MutationError, match="input was changed in place"):
        scenario(checkpoint)


# Weights that change


@pytest.mark.parametrize("change", [lambda w: w.add_(1), lambda w: w[0].clamp_(-0.1, 0.1)], ids=["a step", "clipping"])
@pytest.mark.parametrize("held", ["closure", "module", "argument"])
def test_a_weight_written_before_the_backward_is_an_error(held, change):
    def scenario(way):
        x, module = leaf(T, D), torch.nn.Linear(D, D)
        calls = {
            "closure": lambda: way(lambda x: torch.sin(x @ module.weight), x),
            "module": lambda: way(module, x),
            "argument": lambda: way(lambda x, w: torch.sin(x @ w), x, module.weight),
        }
        y = calls[held]()
        with torch.no_grad():
            change(module.weight)
        y.sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scenario(plain)
    with pytest.raises(MutationError):
        scenario(checkpoint)


@pytest.mark.parametrize("way", [*WAYS, ENGINES[1]])
def test_weights_may_be_stepped_as_soon_as_their_gradient_is_there(way):
    """An optimizer in the backward: each weight moves while earlier layers still wait for theirs."""

    def scenario(way):
        x, source, ws = leaf(T, D), Source(), [leaf(D, D, seed=n) for n in range(3)]

        def step(w):
            with torch.no_grad():
                w.sub_(0.1 * w.grad)
            w.grad = None

        for w in ws:
            w.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            y = x
            for w in (*ws, ws[1]):
                y = way(lambda y, w: torch.sin(y @ w) * decided(lambda: source.integers(3, T, 1) + 1), y, w)
            y.square().sum().backward()
        return x.grad, [w.detach() for w in ws], source.asked

    # The shared weight's two gradients are added in the same order only where the engine visits them alike.
    agree(scenario, way)


@pytest.mark.parametrize("way", ENGINES)
def test_parameters_swapped_for_a_call_are_those_of_the_recompute(way):
    class Around(torch.nn.Module):
        def __init__(self, way):
            super().__init__()
            self.inner, self.way = torch.nn.Linear(D, D, bias=False), way

        def forward(self, x):
            return self.way(lambda x: torch.sin(self.inner(x)), x)

    def inside(way):
        x, w, inner = leaf(T, D), leaf(D, D, seed=1), torch.nn.Linear(D, D, bias=False)
        way(lambda x: torch.func.functional_call(inner, {"weight": w}, (x,)).sin(), x).sum().backward()
        return x.grad, w.grad, inner.weight.grad

    def around(way):
        x, w, net = leaf(T, D), leaf(D, D, seed=1), Around(way)
        torch.func.functional_call(net, {"inner.weight": w}, (x,)).sum().backward()
        return x.grad, w.grad, net.inner.weight.grad

    agree(inside, way)
    agree(around, way)


# Evaluation between forward and backward (Megatron-LM PR 7030, trl PR 4636, pytorch PR 174327 and 161164)


@pytest.mark.parametrize("trained", ["both", "weights", "inputs", "neither"])
@pytest.mark.parametrize("way", [*WAYS, ENGINES[1]])
def test_evaluation_does_not_disturb_a_pending_backward(way, trained):
    def scenario(way):
        x = leaf(T, D, grad=trained in ("both", "inputs"))
        w = leaf(D, D, seed=1, grad=trained in ("both", "weights"))
        source, module = Source(), torch.nn.Dropout(0.5).eval()

        def layer(x):
            idx = decided(lambda: source.integers(D, len(x), 1))
            return module(torch.tanh(x @ w)) * torch.softmax(x @ w, -1).gather(1, idx)

        y = way(layer, x)
        with torch.no_grad():
            seen = [way(layer, torch.ones(4, D))]
        with torch.inference_mode():
            z = way(layer, torch.ones(3, D))
            seen.append(z + 0)
        assert z.is_inference()
        assert source.asked == 3
        if y.requires_grad:
            y.square().sum().backward()
        return y.detach(), x.grad, w.grad, seen, source.asked, y.requires_grad or trained == "neither"

    agree(scenario, way, recomputes=trained != "neither")


def test_inference_tensors_are_saved_and_given_back():
    def scenario(way):
        x, w = leaf(T, D), leaf(D, D, seed=1)
        with torch.inference_mode():
            table = torch.ones(D, 1) * 2

        def layer(x):
            with torch.inference_mode():
                idx = decided(lambda: (x @ w).argmax(-1, keepdim=True))
            return torch.tanh(x @ w) * (idx.clone() + table[0].item())

        way(layer, x).square().sum().backward()
        return x.grad, w.grad

    agree(scenario)


class Opaque:
    """Kept by reference, so that a weak reference tells who keeps it."""


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("way", [*WAYS, ENGINES[1]])
def test_nothing_stays_saved_without_gradient_or_when_the_output_is_dropped(way, mode):
    kept = []

    def layer(x):
        mark = Opaque()
        kept.append(weakref.ref(mark))
        assert save_for_recompute(mark, x.detach().argmax(-1))[0] is mark
        return torch.sin(x)

    with mode():
        y = way(layer, leaf(T, D))
    assert (kept[0]() is not None) is (mode is torch.enable_grad)
    del y
    assert kept[0]() is None


def test_saves_without_gradient_are_never_too_many():
    def layer(x):
        return [save_for_recompute(x, n)[1] for n in range(3)]

    with torch.no_grad():
        assert checkpoint(layer, leaf(T, D)) == [0, 1, 2]


def test_what_is_saved_may_be_written_to_afterwards():
    """In the forward, between the phases, and by the recompute that got it."""

    def scenario(way):
        x, w, source, plans = leaf(T, D), leaf(D, D, seed=1), Source(), []

        def layer(x):
            plan = {"idx": source.integers(D, T, 1), "scale": torch.full((1,), 2.0)} if not doing_recompute() else None
            (plan,) = save_for_recompute(plan)
            plans.append(plan)
            y = torch.tanh(x @ w) * plan["scale"].clone() * (x @ w).gather(1, plan["idx"].clone())
            plan["idx"].zero_()
            plan["scale"] = None
            return torch.sin(y)

        y = way(layer, x).square().sum()
        plans[0]["idx"].fill_(1)
        y.backward(retain_graph=True)
        y.backward()
        return x.grad, w.grad, source.asked

    agree(scenario)
