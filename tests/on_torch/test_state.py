"""R7 and the settings that a recompute must find as the forward found them."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import types

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

from roundpipe_torch import (
    CheckpointMismatchError,
    MismatchError,
    _state,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    recompute_once,
    save_for_recompute,
)
from roundpipe_torch._state import Generators, Visit, generators_of


def leaf(seed: int = 0) -> torch.Tensor:
    return torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def noisy(x, gate):
    """Dropout before, in and after the decision; the decision's own draws are skipped in the recompute."""
    x = F.dropout(x, 0.3)
    if doing_recompute():
        (top,) = get_recompute_data()
    else:
        top = (x @ gate + torch.randn(16, 16)).topk(2).indices
        save_for_recompute(top)
    h = F.dropout(torch.tanh(x), 0.5)
    if doing_recompute():
        (mask,) = get_recompute_data("mask")
    else:
        mask = torch.rand(16, 2) < 0.5
        save_for_recompute(mask, name="mask")
    return F.dropout(h.gather(1, top) * mask, 0.5)


def noisy_once(x, gate):
    top = recompute_once(lambda: (F.dropout(x, 0.2) @ gate + torch.randn(16, 16)).topk(2).indices)
    return F.dropout(torch.tanh(F.dropout(x, 0.5)).gather(1, top), 0.5)


def noisy_nested(x, gate):
    return F.dropout(checkpoint(noisy, F.dropout(x, 0.5), gate), 0.5)


def step(call, layer, seed: int = 1):
    torch.manual_seed(seed)
    x, gate = leaf(), leaf(1)
    y = call(layer, x, gate)
    after = torch.rand(3)
    (y.square().sum() + F.dropout(x, 0.5).sum()).backward()
    return [y.detach(), x.grad, after, torch.rand(3)]


def plain(layer, *args):
    return layer(*args)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("layer", [noisy, noisy_once, noisy_nested])
def test_random_numbers_line_up_and_the_streams_outside_do_not_notice(layer, use_reentrant, monkeypatch) -> None:
    got = step(lambda f, *args: checkpoint(f, *args, use_reentrant=use_reentrant), layer)
    monkeypatch.setitem(globals(), "checkpoint", plain)  # the inner one
    want = step(plain, layer)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def reentrant(layer, x):
    return checkpoint(layer, x, use_reentrant=True)


def nested(layer, x):
    return checkpoint(lambda x: checkpoint(layer, x), x)


def reentrant_in_default(layer, x):
    return checkpoint(lambda x: reentrant(layer, x), x)


def default_in_reentrant(layer, x):
    return reentrant(lambda x: checkpoint(layer, x), x)


class Jitters(torch.nn.Module):
    """A decision, and draws that both phases make, from a generator of its own or of its caller's."""

    def __init__(self, generator=None):
        super().__init__()
        self.generator = generator

    def forward(self, x, rngs=None):
        generator = self.generator or rngs["jitter"]
        x = x * torch.empty(16, 16).uniform_(0.9, 1.1, generator=generator)
        top = recompute_once(lambda: torch.randint(16, (16, 2), generator=generator))
        return (x.sin().gather(1, top) * torch.rand(16, 2, generator=generator)).exp()


def from_attribute(generator):
    return torch.nn.ModuleList([Jitters(generator)])[0]


def from_arguments(generator):
    return functools.partial(Jitters(), rngs={"jitter": generator})


def from_closure(generator):
    return lambda x: Jitters()(x, {"jitter": generator})


def without_gradient_inside(generator):
    inner = Jitters(generator)

    def layer(x):
        with torch.no_grad():
            scale = checkpoint(inner, x)
        return inner(x * scale.sum())

    return layer


class Noise:
    """No module."""

    def __init__(self, generator) -> None:
        self.generator, self.myself = generator, self

    def __call__(self, x):
        return (x * torch.rand(16, 16, generator=self.generator)).exp()


class Noisy(torch.nn.Module):
    def __init__(self, noise):
        super().__init__()
        self.noise = noise

    def forward(self, x):
        return self.noise(x)


def from_object(generator):
    return Noisy(Noise(generator))


class Drawing(torch.nn.Module):
    def __init__(self, generators):
        super().__init__()
        self.generators = generators

    def forward(self, x):
        return (x * torch.rand(16, 16, generator=self.generators[0])).exp()


def from_list(generator):
    return Drawing([generator])


def from_dict(generator):
    return Drawing({0: generator})


def from_dict_in_object(generator):
    module = Drawing(None)
    module.state = types.SimpleNamespace(generators={0: generator})
    module.forward = lambda x: Drawing.forward(module.state, x)
    return module


def from_object_in_closure(generator):
    noise = Noise(generator)
    return lambda x: noise(x)


def from_further_away(generator):
    held = types.SimpleNamespace(rngs={"noise": [generator]})
    return lambda x: (x * torch.rand(16, 16, generator=held.rngs["noise"][0])).exp()


SHARED = torch.Generator()
LISTED, HELD = [SHARED], types.SimpleNamespace(by={"name": SHARED})


class Numbered:
    shared = SHARED

    @classmethod
    def draw(cls):
        return torch.rand(16, 16, generator=cls.shared)


class DrawsByClass(torch.nn.Module):
    shared = SHARED

    def forward(self, x):
        return (x * torch.rand(16, 16, generator=self.shared)).exp()


class DrawsByAnother(torch.nn.Module):
    def forward(self, x):
        return (x * Numbered.draw()).exp()


class DrawsByObject(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.drawing = Numbered()

    def forward(self, x):
        return (x * self.drawing.draw()).exp()


def draws_from_list(x):
    return (x * torch.rand(16, 16, generator=LISTED[0])).exp()


def draws_from_object(x):
    return (x * (lambda: torch.rand(16, 16, generator=HELD.by["name"]))()).exp()


def draws_by_class(x):
    return (x * Numbered.draw()).exp()


@pytest.mark.parametrize("how", [checkpoint, reentrant, nested])
@pytest.mark.parametrize(
    "layer",
    [DrawsByClass(), DrawsByAnother(), DrawsByObject(), draws_from_list, draws_from_object, draws_by_class],
    ids=lambda layer: getattr(layer, "__name__", type(layer).__name__),
)
def test_generators_of_classes_and_in_globals(layer, how) -> None:
    found = []
    for way in (lambda layer, x: layer(x), how):
        SHARED.manual_seed(3)
        x = leaf()
        first, second = way(layer, x), way(layer, x * 2)
        (first + second).sum().backward()
        found.append((first, second, x.grad, torch.rand(4, generator=SHARED)))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("how", [checkpoint, reentrant, nested, reentrant_in_default, default_in_reentrant])
@pytest.mark.parametrize(
    "make",
    [
        *(from_attribute, from_arguments, from_closure, without_gradient_inside),
        *(from_object, from_list, from_dict, from_dict_in_object, from_object_in_closure, from_further_away, Noise),
    ],
)
def test_generators_of_the_call_line_up_as_the_default_ones_do(make, how) -> None:
    found = []
    for way in (lambda layer, x: layer(x), how):
        generator, x = torch.Generator().manual_seed(3), leaf()
        layer = make(generator)
        first, second = way(layer, x), way(layer, x * 2)
        if isinstance(layer, Jitters):
            layer.generator = torch.Generator()  # by then somebody has given it another
        drawn = torch.rand(4, generator=generator)
        second.sum().backward()
        first.sum().backward()
        found.append((first, second, x.grad, drawn, torch.rand(4, generator=generator)))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("how", [checkpoint, reentrant, nested, reentrant_in_default, default_in_reentrant])
def test_a_generator_that_the_forward_makes_is_made_again(how) -> None:
    class Seeded(torch.nn.Module):
        generator = None

        def forward(self, x):
            if self.generator is None:
                self.generator = torch.Generator().manual_seed(5)
            return (x * torch.rand(16, 16, generator=self.generator)).exp()

    found = []
    for way in (lambda layer, x: layer(x), how):
        layer, x = Seeded(), leaf()
        first, second = way(layer, x), way(layer, x * 2)
        (first + second).sum().backward()
        found.append((first, second, x.grad, torch.rand(4, generator=layer.generator)))
    assert all(map(torch.equal, *found))


def test_without_preserving_the_draws_are_free() -> None:
    torch.manual_seed(0)
    x = leaf()
    seen = []

    def layer(x):
        seen.append(torch.rand(()).item())
        return x.exp()

    checkpoint(layer, x, preserve_rng_state=False).sum().backward()
    assert seen[0] != seen[1]
    checkpoint(layer, x).sum().backward()
    assert seen[2] == seen[3]


def fails(x):
    raise NotImplementedError


def fails_inside(x):
    with contextlib.suppress(NotImplementedError):
        checkpoint(fails, x)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    "before", [lambda x: None, lambda x: checkpoint(torch.sin, x), fails_inside], ids=["", "region", "failing region"]
)
@pytest.mark.parametrize("met", ["forward", "recompute"])
@pytest.mark.parametrize("source", ["default generator", "torch.Generator", "its own"])
def test_two_threads_that_draw_are_told_rather_than_given_other_masks(source, met, before, use_reentrant) -> None:
    """The default generator is one for all threads: what was drawn between two draws cannot be known."""

    def told() -> list[str]:
        came, inside, errors = threading.Condition(), set(), []
        shared = torch.Generator() if source == "torch.Generator" else None
        number = [1]  # of threads that meet

        def layer(x, generator, note):
            before(x)
            with came:
                inside.add(threading.get_ident())
                came.notify_all()
                assert came.wait_for(lambda: len(inside) >= number[0], 10)
            mask = torch.bernoulli(torch.full_like(x, 0.5), generator=generator)
            note(mask)
            return (x * mask).exp()

        def forward(masks):
            generator = torch.Generator() if source == "its own" else shared
            return checkpoint(layer, leaf(), generator, masks.append, use_reentrant=use_reentrant), masks

        def backward(y, masks):
            for _ in range(1 + (met == "forward")):  # what the first recompute made, a second backward may not take
                try:
                    y.sum().backward(retain_graph=True)
                except MismatchError as error:
                    errors.append(str(error))
            assert len(masks) > 1
            assert source != "its own" or all(mask.equal(masks[0]) for mask in masks)

        def twice(work, together):
            """Alone, or so that the first is inside, behind its inner region, when the second comes."""
            number[0] = 1 + together
            inside.clear()
            threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
            for thread in threads:
                thread.start()
                if together:
                    with came:
                        came.wait_for(lambda: inside, 10)
                else:
                    thread.join()
            for thread in threads:
                thread.join()

        regions = {}
        twice(lambda n: regions.update({n: forward([])}), met == "forward")
        twice(lambda n: backward(*regions[n]), met == "recompute")
        return errors

    for _ in range(2):  # also when it is not the first time
        errors = told()
        assert len(errors) == (0 if source == "its own" else 2 + 2 * (met == "forward"))
    if source == "its own":
        return
    first, _, way_out = errors[0].partition("\n")
    assert "draws random numbers while another thread is inside a checkpointed layer too" in first
    assert f"The threads share one {source}," in first
    assert "recompute_once" in way_out
    assert "preserve_rng_state=False" in way_out


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_draws_that_are_free_are_free_while_another_thread_is_inside(use_reentrant) -> None:
    came, done = threading.Event(), threading.Event()

    def waits(x):
        came.set()
        assert done.wait(10)
        return x.exp()

    x = leaf()
    y = checkpoint(F.dropout, x, preserve_rng_state=False, use_reentrant=use_reentrant)
    other = threading.Thread(target=checkpoint, args=(waits, leaf()))
    other.start()
    try:
        assert came.wait(10)
        y.sum().backward()
    finally:
        done.set()
        other.join()
    assert x.grad is not None


@pytest.mark.parametrize("draw", ["nothing", "once"])
def test_two_threads_that_draw_nothing_in_the_recompute_are_right(draw) -> None:
    barrier = threading.Barrier(2, timeout=10)
    results = {}

    def layer(x, mine):
        barrier.wait()
        mask = recompute_once(lambda: torch.rand(16, 16) < 0.5) if draw == "once" else torch.ones(16, 16)
        mine.append(mask)
        barrier.wait()
        return x.exp() * mask

    def train(n):
        mine: list[torch.Tensor] = []
        x = leaf()
        checkpoint(layer, x, mine).sum().backward()
        results[n] = torch.equal(x.grad, (x.detach().exp() * mine[0]))

    threads = [threading.Thread(target=train, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: True, 1: True}


# Ambient settings: `with setting: y = checkpoint(layer, x)`, then backward outside


@contextlib.contextmanager
def switched(read, write, value):
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


SETTINGS = {
    "nothing": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "autocast without cache": lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    "default dtype": lambda: switched(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default device": lambda: torch.device("meta"),
    "deterministic": lambda: switched(
        torch.are_deterministic_algorithms_enabled,
        lambda on: torch._C._set_deterministic_algorithms(on, warn_only=False),
        True,
    ),
    "matmul precision": lambda: switched(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "cudnn benchmark": lambda: torch.backends.cudnn.flags(benchmark=True, deterministic=True, allow_tf32=False),
    "new precision switch": lambda: switched(
        lambda: torch.backends.cuda.matmul.fp32_precision,
        lambda value: setattr(torch.backends.cuda.matmul, "fp32_precision", value),
        "tf32",
    ),
    "mkldnn off": lambda: switched(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
    "sdpa": lambda: sdpa_kernel([SDPBackend.MATH]),
}


def old_precision():
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # mixed with the new switches
        return "mixed"


def ambient():
    return {
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "cache": torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": [torch._C._get_fp32_precision_getter("cuda", op) for op in ("matmul", "conv", "rnn")],
        "old precision": old_precision(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32),
        "mkldnn": torch.backends.mkldnn.enabled,
        "sdpa": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()),
        "grad": torch.is_grad_enabled(),
    }


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("around_backward", ["nothing", "autocast float16", "default dtype", "sdpa", "default device"])
@pytest.mark.parametrize("around_forward", SETTINGS)
def test_the_recompute_finds_the_settings_of_the_forward(around_forward, around_backward, use_reentrant) -> None:
    seen = []

    def layer(x):
        seen.append(ambient())
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    with SETTINGS[around_forward]():
        y = checkpoint(layer, x, use_reentrant=use_reentrant)
    with SETTINGS[around_backward]():
        before = ambient()
        y.backward(torch.ones(2, device="cpu", dtype=torch.float32))
        assert ambient() == before
    if seen[0]["old precision"] == "mixed":  # cannot be read, so not be restored
        seen[1]["old precision"] = "mixed"
    assert seen[0] == seen[1]


@pytest.mark.parametrize("history", ["fresh", "used without grad", "used with grad"])
def test_autocast_whatever_its_cache_held(history) -> None:
    def run(call):
        torch.manual_seed(0)
        linear, x = torch.nn.Linear(16, 16), leaf()
        extra = 0.0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if history == "used without grad":
                with torch.no_grad():
                    linear(x)
            if history == "used with grad":
                extra = linear(x).float().sum()
            y = call(lambda x: torch.tanh(linear(torch.tanh(linear(x)))), x)
        (y.float().square().sum() + extra).backward()
        return [x.grad, linear.weight.grad]

    want, got = run(lambda f, x: f(x)), run(checkpoint)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.cuda
def test_every_devices_generator_lines_up() -> None:
    def layer(x):
        x = F.dropout(x, 0.3)
        if doing_recompute():
            (top,) = get_recompute_data()
        else:
            top = (x + torch.randn(16, 16, device="cuda")).topk(2).indices
            save_for_recompute(top)
        return F.dropout(torch.tanh(x).gather(1, top), 0.5) * torch.rand(()).item()

    def run(call):
        torch.manual_seed(0)
        x = leaf().detach().cuda().requires_grad_()
        call(layer, x).square().sum().backward()
        return x.grad, torch.rand(2, device="cuda")

    want, got = run(plain), run(checkpoint)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.cuda
def test_save_and_get_wait_for_no_device() -> None:
    def layer(x):
        (top,) = save_for_recompute(x.detach().topk(2).indices)
        return torch.tanh(x).gather(1, top)

    x = leaf().detach().cuda().requires_grad_()
    checkpoint(layer, x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        checkpoint(layer, x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_visit_cut_short_is_forgotten_by_the_next_step_of_its_thread() -> None:
    """A keyboard interrupt can keep a region from signing off; other threads' draws must not be refused for good."""
    Visit._inside.add(threading.get_ident())
    checkpoint(torch.exp, leaf()).sum().backward()
    assert threading.get_ident() not in Visit._inside


def ranked(x):
    """Values of a sort in forward, a gather in the recompute: the same numbers, in memory of another order."""
    if doing_recompute():
        values = x.gather(1, get_recompute_data()[0])
    else:
        values, order = x.sort(-1)
        save_for_recompute(order)
    return values


def ranked_first(x):
    """Asks for the phase before anything is saved."""
    assert doing_recompute() in (True, False)
    return ranked(x)


def noise_like(x):
    return x * torch.rand_like(x)


LAYOUTS = {
    "in the layer": lambda x: F.dropout(ranked(x.t() * 2), 0.5).exp(),
    "around a region": lambda x: F.dropout(checkpoint(ranked, x.t() * 2), 0.5).exp(),
    "before another save": lambda x: ranked(F.dropout(recompute_first(x.t() * 2), 0.5)).exp(),
    "of the only tensor": lambda x: noise_like(ranked_first(x.detach().t() * 2)) * x,
    "in a region inside": lambda x: checkpoint(lambda x: F.dropout(ranked(x), 0.5).exp(), x.t() * 2),
    "in a reentrant region inside": lambda x: checkpoint(
        lambda x: F.dropout(ranked(x), 0.5).exp(), x.t() * 2, use_reentrant=True
    ),
    "two levels further in": lambda x: checkpoint(LAYOUTS["in a region inside"], x, use_reentrant=True),
}


def recompute_first(x):
    if doing_recompute():
        return x.gather(1, get_recompute_data("first")[0])
    values, order = x.sort(-1)
    save_for_recompute(order, name="first")
    return values


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("where", LAYOUTS)
def test_random_numbers_for_memory_of_another_order_are_refused(where, use_reentrant) -> None:
    torch.manual_seed(0)
    y = checkpoint(LAYOUTS[where], leaf(), use_reentrant=use_reentrant)
    for _ in range(2):  # what the first recompute made, a second backward may not take
        with pytest.raises(CheckpointMismatchError, match="the recompute has a tensor with other strides") as caught:
            y.sum().backward(retain_graph=True)
    assert "by .contiguous() on what they give" in str(caught.value).splitlines()[-1]


@pytest.mark.parametrize("first", [False, True], ids=["later", "at once"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_layer_that_asks_for_its_phase_once_in_its_life(use_reentrant, first) -> None:
    """Its recompute does not ask, and does the same all the same."""

    def ask():
        if not told:
            told.append(doing_recompute())

    def layer(x):
        if first:
            ask()
        h = torch.tanh(x.t())
        ask()
        return F.dropout(h, 0.5).exp() @ x

    def gradient(call):
        torch.manual_seed(0)
        x = leaf()
        call(layer, x).sum().backward()
        return x.grad

    told: list[bool] = []
    want = gradient(lambda layer, x: layer(x))
    told.clear()
    assert torch.equal(gradient(lambda layer, x: checkpoint(layer, x, use_reentrant=use_reentrant)), want)
    assert told == [False]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_another_layout_alone_does_no_harm(use_reentrant) -> None:
    def layer(x):
        return torch.tanh(ranked(x.t() * 2)) @ x

    x, other = leaf(), leaf()
    checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    layer(other).sum().backward()
    assert torch.allclose(x.grad, other.grad, rtol=1e-5)
    torch.manual_seed(0)
    checkpoint(lambda x: F.dropout(ranked(x.t() * 2).contiguous(), 0.5).sin(), x, use_reentrant=use_reentrant).sum()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_stride_of_an_axis_of_one_is_no_layout(use_reentrant) -> None:
    def layer(x):
        column = x[:, 0][None].t() if doing_recompute() else x[:, :1]
        strides.append(column.stride())
        return F.dropout(column.sin(), 0.5)

    strides, x = [], leaf()
    y = checkpoint(layer, x, use_reentrant=use_reentrant)
    y.sum().backward()
    assert strides == [(16, 1), (16, 256)]
    assert torch.equal(x.grad[:, :1] != 0, y != 0)


def test_a_decision_that_draws_in_a_region_inside_is_no_draw_into_another_layout() -> None:
    def inner(x):
        return recompute_once(torch.rand_like, x) * ranked(x.t() * 2).tanh()

    x = leaf()
    checkpoint(lambda x: checkpoint(inner, x).exp(), x, use_reentrant=True).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_device_first_used_inside_a_layer_is_refused(monkeypatch, use_reentrant) -> None:
    """Simulated: this process has an accelerator that the layer starts."""
    started = []
    monkeypatch.setattr("roundpipe_torch._state._ACCELERATOR", torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: bool(started))

    def layer(x):
        started.append(True)
        return x.exp()

    with pytest.raises(CheckpointMismatchError, match="was used for the first time inside this layer") as caught:
        checkpoint(layer, leaf(), use_reentrant=use_reentrant)
    assert "moving the model or the input to it, or pass preserve_rng_state=False" in str(caught.value)
    started.clear()
    checkpoint(layer, leaf(), preserve_rng_state=False, use_reentrant=use_reentrant)


def test_every_device_that_a_call_can_reach_is_preserved(monkeypatch) -> None:
    """Simulated: two devices, of which the arguments and the module's weights use one each."""
    found = [torch.Generator() for _ in range(3)]
    monkeypatch.setattr("roundpipe_torch._state._ACCELERATOR", torch.device("cuda"))
    fake = types.SimpleNamespace(
        is_initialized=lambda: True, current_device=lambda: 0, device_count=lambda: 3, default_generators=found
    )
    monkeypatch.setattr(torch, "cuda", fake)
    module, other = torch.nn.Linear(2, 2), torch.ones(2).as_subclass(Elsewhere)
    module.register_buffer("table", torch.ones(2).as_subclass(Elsewhere))
    module.table.index, other.index = 1, 2
    cpu = torch.default_generator
    assert generators_of(module, ()) == (cpu, found[0], found[1])
    assert generators_of(lambda: module, ({"a": [other]},)) == (cpu, *found)
    assert generators_of(functools.partial(module.forward, other), ()) == (cpu, found[0], found[1])
    assert generators_of(torch.exp, ([module], 3)) == (cpu, found[0], found[1])
    assert generators_of(torch.exp, (torch.ones(2),)) == (cpu, found[0])


class Elsewhere(torch.Tensor):
    device = property(lambda self: torch.device("cuda", self.index))


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collections no longer start at allocations")
def test_no_collection_starts_while_torch_holds_the_lock_of_a_generator() -> None:
    """Its callback could pass the interpreter to a thread that waits for the lock, and both would wait for ever."""
    inside, starts = False, []

    class Generator:
        def get_state(self):
            nonlocal inside
            inside = True
            state = torch.default_generator.get_state()
            inside = False
            return state

    def note(phase, info) -> None:
        if phase == "start":
            starts.append(inside)

    generators, before = Generators((Generator(),)), gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(50)
    try:
        held = [[generators.now(), *([] for _ in range(n % 7))] for n in range(2000)]
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
    assert len(held) == 2000
    assert len(starts) > 100
    assert not any(starts)


def test_the_current_device_is_that_of_the_forward(monkeypatch):
    """Autograd runs on a thread that has the device of the tensors (pytorch PR 172802)."""
    current, made = [1], []
    monkeypatch.setattr(_state, "_ACCELERATOR", torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: current[0])
    monkeypatch.setattr("torch.cuda.set_device", lambda index: current.__setitem__(0, index))
    (setting,) = [setting for setting in _state._settings() if setting[0] is _state._current_device]
    monkeypatch.setattr(_state, "_ACCELERATOR", None)
    monkeypatch.setattr(_state, "_started_backend", lambda: torch.cuda)
    monkeypatch.setattr(_state, "_SETTINGS", (setting, *_state._SETTINGS))
    monkeypatch.setattr(_state, "_READERS", (setting[0], *_state._READERS))
    surroundings = _state._SURROUNDINGS
    monkeypatch.setattr(_state, "_SURROUNDINGS", (*surroundings[:3], setting[0], *surroundings[3:]))
    monkeypatch.setattr(_state, "generators_of", lambda *a: _state._CPU_ONLY)

    x = leaf()
    y = checkpoint(lambda x: (made.append(current[0]), x.exp())[1], x, preserve_rng_state=False)
    current[0] = 0
    y.sum().backward()
    assert made == [1, 1]
    assert current == [0]


@pytest.mark.parametrize("inside", [False, True], ids=["backward after the block", "backward in the block"])
@pytest.mark.parametrize("how", [checkpoint, reentrant, nested])
def test_weights_that_parametrize_keeps_for_a_block(how, inside) -> None:
    """Some are made by a layer, and found by its next call; some are there before."""

    def gradients(way):
        torch.manual_seed(0)
        first, second = (torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(16, 16)) for _ in range(2))
        x = leaf()
        with contextlib.ExitStack() as block:
            block.enter_context(parametrize.cached())
            assert second.weight.requires_grad
            y = way(lambda x: second(first(x).sin()).exp(), way(lambda x: first(x).cos(), x)).sum()
            if not inside:
                block.close()
            y.backward()
        return [x.grad, *(weight.grad for module in (first, second) for weight in module.parameters())]

    got, want = gradients(how), gradients(lambda layer, x: layer(x))
    within = 1e-5 if how is reentrant else 0.0  # it makes the first weight once more for each call
    assert all(torch.allclose(one, other, within, within) for one, other in zip(got, want, strict=True))
    assert parametrize._cache_enabled == 0
    assert parametrize._cache == {}
