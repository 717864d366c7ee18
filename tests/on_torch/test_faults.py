"""Faults: memory that runs out, interrupts at any line, many threads, forks, depth, and users' code that fails.

Afterwards nothing is left of the step that failed, and the next one is right to the bit (R11).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from roundpipe_core._phase import thread
from roundpipe_core._slots import Slot
from roundpipe_torch import (
    Offload,
    PhaseError,
    SlotError,
    checkpoint,
    doing_recompute,
    keep,
    layer_scope,
    recompute_once,
    record,
    remat,
    replay,
    save_for_recompute,
    update_once,
    usage,
)
from roundpipe_torch._decisions import patch
from roundpipe_torch._frames import Frame
from roundpipe_torch._state import Visit
from tests.fuzz import TIMES
from tests.interrupts import At, lines, some
from tests.on_torch.oracle import ENGINES, Source, decided, leaf, plain, reentrant, same
from tests.on_torch.test_offload import EVERYTHING, LaggingDevice

T, D = 6, 4
ROOT = Path(__file__).parents[2]
_innermost_hooks = torch._C._autograd._top_saved_tensors_default_hooks


# Programs: each runs a step, and gives what must be the same every time


class Counting(nn.Module):
    """Moves a buffer of its own and those of a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x):
        self.count += 1
        return self.norm(x) * (1 + self.count[0])


class Step:
    """What a program needs, and what it finds when its backward begins."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = Counting()
        self.x, self.w = leaf(T, D), leaf(D, D, seed=1)
        self.found = None

    def back(self, y):
        buffers = [(part, dict(part._buffers)) for part in self.module.modules()]
        self.found = torch.get_rng_state(), buffers
        y.float().square().sum().backward()
        self.found = None
        return y.detach(), self.x.grad, self.w.grad, torch.rand(2)

    def is_as_found(self) -> bool:
        """A backward that was cut short has moved no random numbers on, and left no copies in modules."""
        if self.found is None:
            return True
        numbers, buffers = self.found
        swapped = any(part._buffers[name] is not b for part, held in buffers for name, b in held.items())
        return torch.equal(numbers, torch.get_rng_state()) and not swapped


def nested(step, way):
    def layer(x, w, depth=1):
        x = nn.functional.dropout(x, 0.3) * (decided(lambda: torch.softmax(x @ w, -1).argmax(-1, keepdim=True)) + 1)
        return torch.sin(way(layer, x, w, depth - 1) if depth else x @ w)

    return step.back(way(layer, step.x, step.w))


def stateful(step, way):
    """Buffers, a kept part, decisions by all three ways, scopes, autocast."""

    def layer(x, w):
        with layer_scope("one"):
            h = keep(lambda h: torch.softmax(h, -1) * h, step.module(x) @ w)
            n = recompute_once(lambda: torch.rand(D).argmax())
            update_once(lambda: None)
        with layer_scope("two"):
            (mask,) = save_for_recompute(torch.rand(T, D) > 0.3)
            return torch.sin(h * mask * (n + 1))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = way(layer, step.x, step.w)
    return step.back(y)


def taped(step, way):
    def layer(x, w):
        (idx,) = save_for_recompute(x.detach().argmax(-1, keepdim=True))
        return torch.sin((x @ w).gather(-1, idx))

    with record() as tape:
        way(layer, step.x, step.w)
    with replay(tape):
        y = way(layer, step.x, step.w)
    return step.back(y)


def watched(step, way):
    """Of a layer that nobody edited, with verify."""

    def layer(x, w):
        values, _ = (x @ w).topk(2, -1)
        return torch.sin(values) * torch.rand(2)

    options = {} if way is reentrant else {"verify": "raise"}
    return step.back(remat(layer, auto=True, use_reentrant=way is reentrant, **options)(step.x, step.w))


PROGRAMS = [nested, stateful, taped, watched]


def left_behind():
    """What a step could leave on its thread."""
    return (
        thread.run,
        doing_recompute(),
        torch.is_grad_enabled(),
        _innermost_hooks(False),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch.is_autocast_enabled("cpu"),
        (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),  # its casts are kept until that is 0
        torch._C._dispatch_tls_is_dispatch_key_included(torch._C._dispatch_key_parse("TESTING_ONLY_GenericMode")),
        Visit.inside(),
    )


@pytest.fixture
def live(monkeypatch):
    """How many slots and frames are alive of those made meanwhile, without help from the cycle collector."""
    made = weakref.WeakSet()
    for kind in (Slot, Frame):

        def noting(self, *args, build=kind.__init__, **kwargs):
            made.add(self)
            build(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", noting)
    gc.disable()
    yield lambda: len(made)
    gc.enable()


# Anything raised at any line


def out_of_memory():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    error.add_note("from the allocator")
    return error


class Stopped(asyncio.CancelledError):
    """Of the kind that `except Exception` does not catch."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, out_of_memory, Stopped])
@pytest.mark.parametrize("way", ENGINES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_an_error_at_any_line_comes_through_and_leaves_nothing(program, way, error, live):
    steps = []

    def step():
        steps[:] = [Step()]
        return program(steps[0], way)

    step()
    want, count, clean = step(), lines(step), left_behind()
    for n in some(count, 14, start=TIMES):
        at = At(n, error)
        try:
            with at:
                step()
            assert at.raised is None, f"line {n}: the error was swallowed"
        except BaseException as raised:
            notes = getattr(raised, "__notes__", [])
            assert notes == (["from the allocator"] if error is out_of_memory else [])
            if program is not taped:  # an interrupt in the first line of `__exit__` is seen to when the error is gone
                assert left_behind() == clean, f"line {n}"
            assert steps[0].is_as_found(), f"line {n}"
            at.came_through(raised)
        assert left_behind() == clean, f"line {n}"
        steps.clear()
        if program is watched and live():
            gc.collect()  # an error in the very line that breaks the cycle of a run and its watch
        assert live() == 0, f"line {n}: kept alive"
        same(step(), want, f"after line {n}")
        steps.clear()


class Hooking(nn.Module):
    """Hooks what it is given, draws, and counts in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        x.register_hook(torch.neg)
        self.calls.add_(1)
        return nn.functional.dropout(x, 0.5) * self.calls.clone()


OF_ONE_ENGINE = {"_call": checkpoint, "_Recompute.run": checkpoint, "_Region._given": reentrant}


@pytest.mark.parametrize("way", ENGINES)
@pytest.mark.parametrize(
    "function",
    [
        "Resting.__enter__", "Buffers.put_back", "Modes.put_back", "Modes._swapped", "Ambient._after",
        *OF_ONE_ENGINE,
    ],
)  # fmt: skip
def test_an_interrupt_where_something_is_put_in_or_taken_out_leaves_all_as_it_was(function, way):
    """At each line there, as the lines of a whole step are too many to try them all."""

    class Inside(At):
        def _called(self, frame, event, arg):
            return super()._called(frame, event, arg) if frame.f_code.co_qualname == function else None

    def step():
        found[:] = [torch.ones(8, requires_grad=True)]
        with torch.autocast("cpu", torch.bfloat16):
            y = way(net.train(), found[0])
        torch.rand(())
        found.extend([net.eval().calls, torch.get_rng_state()])
        y.sum().backward()

    net, found = Hooking(), []
    step()
    with Inside(-1) as every:
        step()
    assert (every.seen > 0) is (OF_ONE_ENGINE.get(function, way) is way)
    clean = left_behind()
    for n in range(1, every.seen + 1):
        with pytest.raises(KeyboardInterrupt), Inside(n):
            step()
        assert left_behind() == clean, f"line {n}"
        assert [*(found[0]._backward_hooks or {}).values()] in ([], [torch.neg]), f"line {n}"
        assert net.training is (found[1:] == []), f"line {n}"
        assert net.training or (net.calls is found[1] and torch.equal(torch.get_rng_state(), found[2])), f"line {n}"


def test_an_error_that_a_region_catches_leaves_the_thread_in_it():
    found = []

    def layer(x):
        with contextlib.suppress(TypeError):
            checkpoint(lambda x: x + None, x)
        found.append((doing_recompute(), Visit.inside()))
        return x.exp()

    checkpoint(layer, torch.ones(2, requires_grad=True)).sum().backward()
    assert found == [(False, True), (True, True)]


# Memory runs out where we ask for some

ON_DEVICE = Offload(**EVERYTHING)


class Short(LaggingDevice):
    """A device, and a host, of which memory can run out."""

    fails = ""

    def away(self, tensor):
        self._at("away")
        return super().away(tensor)

    def back(self, copy):
        self._at("back")
        return super().back(copy)

    def wait(self, back):
        self._at("wait")
        return super().wait(back)

    def _at(self, place):
        if self.fails == place:
            raise out_of_memory()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("place", ["away", "back", "wait"])
def test_memory_that_runs_out_in_offload(place, use_reentrant, live, monkeypatch):
    device = Short()
    monkeypatch.setattr("roundpipe_torch._offload.movers", lambda _: device)
    plan = Offload(**EVERYTHING)

    def step():
        torch.manual_seed(0)
        x, w = leaf(T, D), leaf(D, D, seed=1)

        def layer(x):
            h = keep(lambda h: torch.softmax(h, -1) * h, x @ w)
            (mask,) = save_for_recompute(torch.rand_like(h) > 0.3)
            return torch.sin(h * mask)

        y = x
        for _ in range(2):
            y = remat(layer, offload=plan, use_reentrant=use_reentrant)(y)
        y.square().sum().backward()
        return y.detach(), x.grad, w.grad

    want = step()
    device.fails = place
    with pytest.raises(torch.OutOfMemoryError) as raised:
        step()
    assert raised.value.__notes__ == ["from the allocator"]
    del raised
    device.fails = ""
    device.drain()
    assert left_behind()[:2] == (None, False)
    assert (live(), plan._usage.bytes, device.on_host) == (0, 0, 0)
    same(step(), want)


@pytest.mark.parametrize("way", ENGINES)
@pytest.mark.parametrize("phase", ["forward", "recompute"])
def test_random_numbers_go_on_as_without_checkpointing_where_memory_runs_out(phase, way):
    """In forward, what was drawn is drawn; a backward that fails has drawn nothing."""

    def state_after(way):
        torch.manual_seed(0)

        def layer(x):
            x = x * torch.rand(D)
            if doing_recompute() is (phase == "recompute"):
                raise out_of_memory()
            return torch.sin(x)

        with contextlib.suppress(torch.OutOfMemoryError):
            way(layer, leaf(T, D)).sum().backward()
        return torch.get_rng_state()

    same(state_after(way), state_after(plain))


def test_a_decision_that_finds_no_memory_when_verify_makes_it_again_is_no_flip():
    asked = []

    @remat(verify="warn")
    def layer(x):
        asked.append(1)
        if len(asked) == 2:
            raise out_of_memory()
        (idx,) = save_for_recompute(x.detach().argmax(-1, keepdim=True))
        return torch.sin(x.gather(-1, idx))

    y = layer(leaf(T, D)).sum()
    with pytest.raises(torch.OutOfMemoryError):
        y.backward()


def test_out_of_memory_tells_what_layers_hold_beside_the_notes_that_it_has():
    def layer(x):
        decided(lambda: 1)
        return torch.sin(x)

    with pytest.raises(torch.OutOfMemoryError) as raised, usage():
        y = remat(layer, label="block")(leaf(T, D))
        raise out_of_memory()
    assert raised.value.__notes__[0] == "from the allocator"
    assert "block" in raised.value.__notes__[1]
    assert y.requires_grad


# Threads


@pytest.fixture
def impatient():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work, count=16):
    """What `work(n)` gives in `count` threads that begin together."""
    barrier = threading.Barrier(count)

    def begin(n):
        barrier.wait(timeout=60)
        return work(n)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


@pytest.mark.parametrize("multithreaded", [True, False])
@pytest.mark.parametrize("way", ENGINES)
def test_sixteen_threads_with_one_layer_decide_each_for_themselves(way, multithreaded, impatient):
    weights = [leaf(D, D, seed=n) for n in range(3)]

    def work(n, way=way):
        x, source = leaf(T, D, seed=n), Source(n)

        def layer(x, w):
            with layer_scope("part"):
                idx = decided(lambda: source.integers(D, T, 1))
            return torch.sin((x @ w) * (idx + recompute_once(lambda: source.integers(5, T, 1))))

        with torch.autograd.set_multithreading_enabled(multithreaded):
            for _ in range(2):
                y = x
                for w in weights:
                    y = way(layer, y, w.detach())  # autograd adds to the leaves of all threads in any order
                y.sum().backward()
        return x.grad, source.asked, doing_recompute()

    same(at_once(work), [work(n, plain) for n in range(16)])


def test_replicas_share_weights_as_those_of_data_parallel_do(impatient):
    module = nn.Linear(D, D, dtype=torch.float64)

    def step(way, run):
        module.zero_grad()
        losses = []

        def work(n):
            replica, source = copy.copy(module), Source(n)  # other modules, the same parameters
            x = leaf(T, D, seed=n, dtype=torch.float64)
            losses.append(way(lambda x: replica(x) * decided(lambda: source.integers(5, T, 1)), x).sum())

        run(work)
        sum(losses).backward()  # one backward for the graphs of all threads
        return [p.grad.clone() for p in module.parameters()]

    same(step(checkpoint, at_once), step(plain, lambda work: [work(n) for n in range(16)]), within=1e-12)


def test_watching_functions_from_many_threads_patches_each_once(impatient):
    module = type(sys)("roundpipe_faults")
    sys.modules[module.__name__] = module
    try:
        exec("def choose(x):\n    return x + 1\n", module.__dict__)
        original = module.choose
        module.alias = original
        assert len(set(map(id, at_once(lambda _: patch(original))))) == 1
        assert module.choose is module.alias
        assert module.choose.__wrapped__ is original
        assert module.choose(1) == 2  # before any region has run, too
    finally:
        del sys.modules[module.__name__]


# Processes


FORKS = """
import multiprocessing, os, sys, threading, torch
from torch.utils.data import DataLoader, Dataset
from roundpipe_torch import *
from roundpipe_torch._state import Visit

def gradient(x, y):
    x.grad = None
    y.sum().backward()
    return x.grad.tolist()

def layer(x):
    if doing_recompute():
        idx, = get_recompute_data()
    else:
        idx = torch.randint(0, 4, (6, 1))
        save_for_recompute(idx)
    return torch.sin(x.gather(-1, idx) * torch.rand(6, 1))

def in_child(check):
    child = os.fork()
    if not child:
        try:
            check()
        except BaseException as error:
            print("child:", repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

def equal(a, b):
    assert a == b, (a, b)

class Asks(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, n):
        return [int(doing_recompute()), save_for_recompute(7)[0]]

def worker():
    assert not doing_recompute()
    with record() as tape:  # a tape of its own
        checkpoint(layer, torch.ones(6, 4))
    equal(len(tape.root.regions), 1)

if __name__ == "__main__":
    torch.set_num_threads(1)
    x = torch.arange(24.0).reshape(6, 4).requires_grad_()
    # A graph from before the fork, in the child and in the parent; inside a region the child is in it too.
    y = checkpoint(layer, x)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    readers, writers = os.pipe()
    def tell():
        os.write(writers, repr(gradient(x, y)).encode())
    in_child(tell)
    equal(os.read(readers, 10000).decode(), repr(gradient(x, y)))
    assert torch.equal(state, torch.get_rng_state())

    def forking(x):
        phase = doing_recompute()
        def goes_on():
            equal(doing_recompute(), phase)
            if phase:
                get_recompute_data()
        (n,) = save_for_recompute(3)
        in_child(goes_on)
        return torch.sin(x * n)
    checkpoint(forking, x).sum().backward()

    # The other threads of the parent are not in the child.
    other = threading.Event()
    inside = threading.Event()
    def stays(x):
        inside.set()
        other.wait(20)
        return x * 2
    beside = threading.Thread(target=checkpoint, args=(stays, x))
    beside.start()
    inside.wait(20)
    def alone():
        x.grad = None
        checkpoint(lambda x: torch.sin(x * torch.rand(4)), x).sum().backward()
        assert not Visit.others()
    in_child(alone)
    other.set()
    beside.join()

    # Workers of a loader, and processes, begin anew, whatever the parent is in.
    context = multiprocessing.get_context("fork")
    with record() as tape:
        checkpoint(layer, x)
        for batch in DataLoader(Asks(), num_workers=1, multiprocessing_context="fork"):
            equal([int(part) for part in batch], [0, 7])
    with replay(tape):
        assert doing_recompute()
        process = context.Process(target=worker)
        process.start()
        process.join()
        equal(process.exitcode, 0)
        for batch in DataLoader(Asks(), num_workers=1, multiprocessing_context="fork"):
            equal([int(part) for part in batch], [0, 7])
        checkpoint(layer, x)
    print("right")
"""


def in_process(script):
    """`script` in a Python of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", script]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)


def test_forks_and_workers_begin_anew_and_a_graph_serves_parent_and_child():
    done = in_process(FORKS)
    assert done.stdout.endswith("right\n"), done.stdout + done.stderr


# Depth


def deep(depth, way, backward=True):
    """`depth` regions, each inside the one before."""
    x, source = leaf(D, dtype=torch.float64), Source()

    def layer(x, depth):
        factor = decided(lambda: source.integers(9, D) * 0.001 + 1)
        return torch.sin(way(layer, x, depth - 1) * factor if depth else x * factor)

    y = layer(x, depth)
    if not backward:
        return y.detach()
    y.sum().backward()
    return x.grad, source.asked


@pytest.mark.parametrize("way", ENGINES)
def test_sixty_regions_in_each_other_under_the_default_limit_and_as_deep_as_the_limit_lets(way):
    same(deep(60, way), deep(60, plain))
    with pytest.raises(RecursionError):
        deep(2000, way)
    assert left_behind()[:2] == (None, False)
    assert left_behind()[3] is None
    same(deep(3, way), deep(3, plain))


@pytest.fixture
def high_limit():
    """As a user has to raise it."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        downwards(2_000)
    except RecursionError:
        pytest.skip("Python 3.12 limits calls that go through C, as all do once a torch.compile has failed")
    else:
        yield
    finally:
        sys.setrecursionlimit(before)


def downwards(depth):
    return depth and downwards(depth - 1)


def test_two_hundred_regions_in_each_other_and_a_backward_through_ninety(high_limit):
    same(deep(90, checkpoint), deep(90, plain))  # what is recomputed grows with the square
    with record() as tape:
        want = deep(200, checkpoint, backward=False)
    with replay(tape):
        same(deep(200, checkpoint, backward=False), want)
    assert left_behind()[:2] == (None, False)


def test_seventy_of_the_second_engine_where_autograd_goes_on_in_other_threads(high_limit):
    same(deep(70, reentrant), deep(70, plain))


def test_two_hundred_scopes_and_kept_parts_in_each_other(high_limit):
    def scopes(x, depth):
        if not depth:
            return x * decided(lambda: 3.0)
        with layer_scope("down"):
            return scopes(x, depth - 1)

    def kept(x, depth):
        return keep(kept, x, depth - 1) if depth else torch.sin(x)

    for layer, want in ((scopes, lambda x: torch.full((3,), 3.0)), (kept, torch.cos)):
        x = leaf(3)
        checkpoint(layer, x, 200).sum().backward()
        same(x.grad, want(x.detach()))


def test_data_nested_a_thousand_deep_is_a_clear_error():
    data = []
    for _ in range(1000):
        data = [data]
    with pytest.raises(SlotError, match="nested too deep"):
        checkpoint(lambda x: save_for_recompute(data) and x, leaf(D))
    assert left_behind()[:2] == (None, False)


# What users' code may do in the midst of ours


class Hostile:
    """Refuses to be compared or hashed."""

    def __eq__(self, other):
        raise OSError("compared")

    def __hash__(self):
        raise OSError("hashed")


@pytest.mark.parametrize("way", ENGINES)
def test_what_refuses_to_be_compared_or_hashed_is_saved_and_passed_on(way):
    thing, x = Hostile(), leaf(D)
    met = []

    def layer(x, given, *, named):
        met.append((save_for_recompute(thing, {"deep": [thing]}), given, named))
        return torch.sin(x)

    way(layer, x, thing, named=thing).sum().backward()
    assert len(met) == 2
    for (saved, nest), given, named in met:
        assert all(one is thing for one in (saved, nest["deep"][0], given, named))


def test_a_module_that_refuses_to_be_hashed_may_have_large_buffers():
    class Equal(Counting):
        def __init__(self):
            super().__init__()
            self.register_buffer("large", torch.zeros(1 << 15))

        def __eq__(self, other):
            raise OSError("compared")

        __hash__ = nn.Module.__hash__

        def forward(self, x):
            self.large += 1
            return super().forward(x) * decided(lambda: 2.0) * self.large[0]

    def scenario(way):
        module, x = Equal(), leaf(T, D)
        for _ in range(2):
            way(module, x).sum().backward()
        return x.grad, module.large, module.count

    same(scenario(checkpoint), scenario(plain))


@pytest.mark.parametrize("way", ENGINES)
@pytest.mark.parametrize("place", ["pack", "unpack", "tensor", "pre", "full"])
def test_an_error_in_a_hook_comes_through(place, way):
    def refuse(*_):
        raise OSError(place)

    def step(place):
        x, w = leaf(T, D), leaf(D, D, seed=1)
        layer = nn.Sequential(nn.Linear(D, D), nn.Tanh())

        def region(x):
            h = x @ (w * decided(lambda: 2.0))
            if place == "tensor" and h.requires_grad:
                h.register_hook(refuse)
            return layer(h)

        if place == "pre":
            layer.register_forward_pre_hook(refuse)
        if place == "full":
            layer.register_full_backward_hook(refuse)
        hooks = contextlib.nullcontext()
        if place in ("pack", "unpack"):
            same_tensor = lambda t: t  # noqa: E731
            pair = (refuse, same_tensor) if place == "pack" else (same_tensor, refuse)
            hooks = saved_tensors_hooks(*pair)
        with hooks:
            y = way(region, x * 1).sum()
        y.backward()

    clean = left_behind()
    with pytest.raises(OSError, match=place):
        step(place)
    assert left_behind() == clean
    step("")


def test_a_subclass_of_tensor_that_fails_in_torch_function():
    class Failing(torch.Tensor):
        fails = ""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func.__name__ == cls.fails:
                raise OSError(cls.fails)
            return super().__torch_function__(func, types, args, kwargs)

    x = leaf(T, D).detach().as_subclass(Failing).requires_grad_()

    def layer(x):
        (idx,) = save_for_recompute(x.detach().argmax(-1, keepdim=True))
        return torch.sin(x.gather(-1, idx)).sum()

    clean = left_behind()
    for name in ("clone", "detach", "gather", "sin"):
        Failing.fails = name
        with pytest.raises(OSError, match=name):
            checkpoint(layer, x).backward()
        assert left_behind() == clean
        Failing.fails = ""
        checkpoint(layer, x).backward()


def test_objects_that_die_in_a_recompute_may_run_regions_of_their_own():
    phases = []

    class Dying:
        def __del__(self):
            phases.append(checkpoint(lambda: (decided(lambda: 3.0), doing_recompute())))

    def layer(x):
        dying = Dying()
        scale = decided(lambda: 2.0)
        phase = doing_recompute()
        del dying  # inside this region, in forward and in recompute
        assert doing_recompute() is phase
        return torch.sin(x * scale)

    x = leaf(D)
    checkpoint(layer, x).sum().backward()
    same(x.grad, torch.cos(x.detach() * 2) * 2)
    assert phases == [(3.0, False), (3.0, True)]
    assert left_behind()[:2] == (None, False)


@pytest.fixture
def collecting():
    """The cycle collector runs at every allocation."""
    before = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("way", ENGINES)
@pytest.mark.parametrize("program", [nested, stateful, taped])
def test_the_collector_may_run_anywhere(program, way, collecting):
    gc.set_threshold(700)
    want = program(Step(), way)
    gc.set_threshold(1)
    same(program(Step(), way), want)


@pytest.mark.parametrize("way", ENGINES)
def test_a_warning_made_an_error_inside_a_layer(way):
    def layer(x, warns):
        scale = decided(lambda: 2.0)
        if warns == doing_recompute():
            warnings.warn("as you wish", UserWarning, stacklevel=1)
        return torch.sin(x * scale)

    clean = left_behind()
    for warns in (False, True):
        with pytest.raises(UserWarning):
            way(layer, leaf(D), warns).sum().backward()
        assert left_behind() == clean


def test_a_layer_that_is_a_generator_left_halfway():
    """Its scope is open until it is collected: in both phases alike, and never beyond the region."""

    def parts(x):
        with layer_scope("part"):
            yield x * decided(lambda: 2.0)
            yield x

    left = []

    def layer(x):
        stream = parts(x)
        left.append(stream)
        (three,) = save_for_recompute(3.0, name="three") if next(stream) is not None else ()
        return torch.sin(next(parts(x)) * three)

    x = leaf(D)
    y = checkpoint(layer, x).sum()
    assert left_behind()[:2] == (None, False)
    left.clear()
    y.backward()
    same(x.grad, torch.cos(x.detach() * 6) * 6)
    left.clear()
    assert left_behind()[:2] == (None, False)


# Tasks


def test_tasks_take_turns_between_regions():
    async def work(n, way):
        x, source = leaf(T, D, seed=n), Source(n)
        y = x
        for _ in range(3):
            y = way(lambda x: torch.sin(x * decided(lambda: source.integers(5, T, 1))), y)
            await asyncio.sleep(0)
        y.sum().backward()
        return x.grad, source.asked

    async def together(way):
        return await asyncio.gather(*(work(n, way) for n in range(8)))

    same(asyncio.run(together(checkpoint)), asyncio.run(together(plain)))


@pytest.mark.parametrize("use", ["region", "save", "phase", "tape"])
def test_a_task_does_not_slip_into_the_tape_of_another(use):
    def layer(x):
        (idx,) = save_for_recompute(x.detach().argmax(-1, keepdim=True))
        return x.gather(-1, idx)

    uses = {
        "region": lambda: checkpoint(layer, leaf(T, D)),
        "save": lambda: save_for_recompute(1),
        "phase": doing_recompute,
        "tape": lambda: record().__enter__(),
    }

    async def stranger(opened):
        await opened.wait()
        uses[use]()

    async def main():
        opened = asyncio.Event()
        other = asyncio.create_task(stranger(opened))
        with record() as tape:
            checkpoint(layer, leaf(T, D))
            opened.set()
            await asyncio.gather(other, return_exceptions=True)
            await asyncio.wait_for(asyncio.create_task(own()), 9)  # what the block begins is of the block
        return other.exception(), len(tape.root.regions)

    async def own():
        checkpoint(layer, leaf(T, D))

    error, regions = asyncio.run(main())
    assert regions == 2
    assert isinstance(error, PhaseError)
    assert ("another task" in str(error)) is (use != "tape")
    assert left_behind()[:2] == (None, False)
