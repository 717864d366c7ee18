"""Random programs of layers: their gradient is the one without checkpointing, or a typed error, and nothing is left."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_core import RoundPipeError
from roundpipe_core._phase import thread
from roundpipe_torch import _auto, _offload, doing_recompute, record, replay
from roundpipe_torch._state import Visit
from tests.fuzz import TIMES, examples
from tests.on_torch.oracle import same
from tests.on_torch.programs import (
    DEFAULT,
    REENTRANT,
    Branch,
    Call,
    Decide,
    Do,
    FaultError,
    Force,
    HaltError,
    Hook,
    HookWeight,
    Keep,
    Kinds,
    Layer,
    Linear,
    Machine,
    Program,
    Region,
    Sort,
    Within,
    every,
    programs,
)
from tests.on_torch.test_offload import LaggingDevice

pytestmark = pytest.mark.timeout(600 * TIMES)  # a program that fails is made small, which takes minutes
log = logging.getLogger(__name__)

Flow = Callable[[Machine], list[Any]]

# What is done with a program. Each gives all that has to agree with the same without checkpointing.


def one_backward(machine: Machine) -> list[Any]:
    y = machine.start()[-1]
    y.sin().sum().backward()
    return [y.detach(), machine.take_gradients()]


def two_backwards(machine: Machine) -> list[Any]:
    y = machine.start()[-1]
    y.sin().sum().backward(retain_graph=True)
    first = machine.take_gradients()
    y.square().mean().backward()
    return [first, machine.take_gradients()]


def each_output(machine: Machine) -> list[Any]:
    gradients = []
    for y in reversed(machine.start()):
        if y.requires_grad:
            y.sin().sum().backward(retain_graph=True)
            gradients.append(machine.take_gradients())
    return gradients


def microbatches(machine: Machine, order: tuple[int, ...]) -> list[Any]:
    """Backward in any order; one that is missing in it never comes."""
    losses = {n: machine.start()[-1].sin().sum() for n in range(3)}
    for n in order:
        losses.pop(n).backward()
    return machine.take_gradients()


def backward_elsewhere(machine: Machine) -> list[Any]:
    loss = machine.start()[-1].sin().sum()
    elsewhere(lambda: (loss.backward(), assert_clean()))
    return machine.take_gradients()


def gradients_of_gradients(machine: Machine) -> list[Any]:
    loss = machine.start()[-1].sin().sum()
    first = torch.autograd.grad(loss, machine.leaves, create_graph=True, allow_unused=True)
    second = sum(gradient.sin().sum() for gradient in first if gradient is not None)
    if second.requires_grad:
        second.backward()
    return [[None if gradient is None else gradient.detach() for gradient in first], machine.take_gradients()]


def gradients_of_a_part(machine: Machine) -> list[Any]:
    loss = machine.start()[-1].sin().sum()
    return [
        torch.autograd.grad(loss, part, retain_graph=True, allow_unused=True)
        for part in (machine.leaves[::2], machine.leaves[1::2])
    ]


def failing_once(machine: Machine, error: type[BaseException]) -> list[Any]:
    """A failure in either phase, then the same again: in the recompute with the same graph."""
    loss = None
    machine.armed = error if machine.checkpointing else None
    with contextlib.suppress(error):
        loss = machine.start()[-1].sin().sum()
        loss.backward(retain_graph=True)
    assert_clean()
    machine.armed = None
    if loss is None:
        torch.manual_seed(machine.seed)
        machine.reset()
        loss = machine.start()[-1].sin().sum()
    machine.take_gradients()
    loss.backward()
    machine.count["hooks"] = 0
    return machine.take_gradients()


def recorded_and_replayed(machine: Machine) -> list[Any]:
    """A replay decides nothing, and draws the same if it begins with the same state."""
    plain = contextlib.nullcontext
    with record() if machine.checkpointing else plain() as tape:
        first = one_backward(machine)
    made = Counter(decisions=machine.count["decisions"], hooks=0)
    torch.manual_seed(machine.seed)
    machine.reset()
    with replay(tape) if machine.checkpointing else plain():
        second = one_backward(machine)
    assert not (machine.checkpointing and machine.count["decisions"])
    machine.count = made
    return [first, second]


def elsewhere(function: Callable[[], Any]) -> None:
    """Run it in another thread."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    other = threading.Thread(target=work)
    other.start()
    other.join()
    if errors:
        raise errors.pop()


# What holds then


class Tally:
    """How the examples of a property went."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    def assert_few_refused(self) -> None:
        """One draw into another layout makes hypothesis try several of its kind."""
        log.info("%s", dict(self.count))
        assert self.count["refused"] <= 0.04 * self.count["programs"], self.count
        others = self.count["programs"] - self.count["refused, for a force"]
        assert self.count["right"] >= 0.9 * others, self.count
        assert others >= 0.8 * self.count["programs"], self.count
        assert self.count["decisions"] >= 0.05 * self.count["programs"], self.count


def outcome(program: Program, flow: Flow, seed: int, checkpointing: bool, refs: list[Any]) -> list[Any]:
    torch.manual_seed(seed)
    machine = Machine(program, checkpointing, seed)
    try:
        result = flow(machine)
    finally:
        refs += machine.refs
        machine.kept.clear()  # these are tensors with their graph
        machine.local = None
    return [*result, [module.mean for module in machine.shared], machine.count, torch.get_rng_state()]


def check(program: Program, flow: Flow, seed: int, tally: Tally) -> None:
    try:
        want = outcome(program, flow, seed, False, [])
    except RuntimeError as error:  # autograd itself refuses
        log.debug("%s", error)
        tally.count["without an oracle"] += 1
        return
    tally.count["programs"] += 1
    HOST.device = LaggingDevice()
    refs: list[Any] = []
    try:
        got = outcome(program, flow, seed, True, refs)
    except RoundPipeError as error:
        # What the phases compute by other operations, a layer that differentiates inside itself may not depend on.
        force = any(isinstance(step, Force) for step in every((program.region, *program.shared)))
        tally.count["refused, for a force" if force else "refused"] += 1
        tally.count[type(error).__name__] += 1
        got = None
    assert_clean()
    assert_freed(refs, at_once=got is not None and not isinstance(flow, partial))
    if got is not None:
        same(got, want, within=tolerance(program))
        tally.count["right"] += 1
        tally.count["decisions"] += got[-2]["decisions"]


def tolerance(program: Program) -> float:
    """Zero where the same kernels run in the same order."""
    steps = [program.region, *program.shared, *every((program.region, *program.shared))]
    bare = any(isinstance(step, Sort) and not step.contiguous for step in steps)  # kernels add along memory
    reentrant = any(getattr(step, "way", None) in REENTRANT for step in steps)  # a weight's gradients in another order
    if not (bare or reentrant):
        return 0.0
    if any(isinstance(step, Within) and step.context == "autocast" for step in steps):
        return 0.05
    single = any(isinstance(step, Linear) and step.weight for step in steps)
    return 1e-5 if single else 1e-9


def assert_clean() -> None:
    """R11: nothing of the library is left on this thread."""
    left, thread.run = thread.run, None
    assert left is None
    assert doing_recompute() is False
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not torch._C._dispatch_tls_is_dispatch_key_included(_auto._KEY)
    assert threading.get_ident() not in Visit._inside


def assert_freed(refs: list[Any], at_once: bool) -> None:
    """R9: what a graph held is gone with it. Where something was raised, a traceback may wait for the collector."""
    HOST.device.drain()
    if not at_once and any(ref() is not None for ref in refs):
        gc.collect()
    assert [alive for ref in refs if (alive := ref()) is not None] == []
    assert HOST.device.on_host == 0


class _Host(threading.local):
    """The host of the device that each thread has."""

    def __init__(self) -> None:
        self.device = LaggingDevice()


HOST = _Host()


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[None]:
    """The CPU as a device, whose host is somewhere else."""
    gc.collect()
    gc.freeze()  # lets each collection look at little
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_offload, "movers", lambda device: HOST.device if device.type == "cpu" else None)
        yield
    gc.unfreeze()


SEEDS = st.integers(0, 1000)
ORDERS = st.lists(st.integers(0, 2), unique=True, max_size=3).map(tuple)
ANY_ENGINE = (one_backward, two_backwards, each_output, backward_elsewhere)
DEFAULT_ENGINE = (*ANY_ENGINE, gradients_of_gradients, gradients_of_a_part)
BOTH = Kinds(ways=(*DEFAULT, *REENTRANT))


def tried(count: int, kinds: Kinds, flows: st.SearchStrategy[Flow]) -> Tally:
    """Try `count` programs."""
    tally = Tally()

    @examples(count)
    @given(programs(kinds), flows, SEEDS)
    def attempt(program: Program, flow: Flow, seed: int) -> None:
        check(program, flow, seed, tally)

    attempt()
    return tally


def _layer(*steps: Any) -> Region:
    return Region("checkpoint", steps, "positional", "tensor")


def _reentrant(*steps: Any) -> Region:
    return Region("reentrant", steps, "positional", "tensor")


def _as_it_is(gives: str) -> Region:
    return Region("reentrant", (), "positional", gives)


WEIGHT = Layer("checkpoint", (Linear(1), HookWeight(1, False)), None, False)
BUFFER = Layer("checkpoint", (), "buffer", False)


@pytest.mark.parametrize(
    ("program", "flow", "refused"),
    [
        (Program(_layer(Within("inference", (Keep((Hook(bare=True),)),)))), one_backward, False),
        (Program(_layer(Hook(bare=True), Force(()), _layer(Force(())))), one_backward, False),
        (
            Program(_layer(Sort(True), Do("detach", 2), Force((Sort(True), _layer(), _layer(Sort(True)))))),
            one_backward,
            True,
        ),
        (
            Program(_layer(Branch(Decide("seed"), ((Call(0),),)), _layer(Call(0), Force(()))), (BUFFER,)),
            one_backward,
            False,
        ),
        (Program(Region("reentrant", (Call(0),), "positional", "dataclass"), (WEIGHT,)), each_output, False),
        (
            Program(_reentrant(Call(0), Keep((Call(0),))), (WEIGHT,)),
            one_backward,
            False,
        ),
        (
            Program(_reentrant(HookWeight(0, False), Keep((_reentrant(Linear(1)),)))),
            one_backward,
            False,
        ),
        (
            Program(_layer(Sort(False), Hook(), _reentrant(Do("tanh", 0), Do("tanh", 0), Do("detach", 3)))),
            two_backwards,
            False,
        ),
        (Program(_layer(_as_it_is("tensor"), Hook(bare=True), Do("add", 2))), one_backward, False),
        (Program(_layer(_as_it_is("pair"), Hook(bare=True), Do("detach", 2))), one_backward, False),
        (
            Program(Region("reentrant", (HookWeight(0, True), Linear(0, False)), "positional", "pair")),
            each_output,
            False,
        ),
    ],
    ids=[
        "a hook in inference mode",
        "hooks of a forward under way",
        "indices of a forward under way",
        "buffers that a region inside knows",
        "a hooked weight behind one output",
        "a hooked weight in and beside a kept part",
        "a hooked weight that a kept part gets and does not use",
        "a hooked argument that an inner layer does not use",
        "an argument handed through",
        "arguments handed through",
        "an argument beside what a hooked weight made",
    ],
)
def test_programs_that_were_wrong(program: Program, flow: Flow, refused: bool) -> None:
    tally = Tally()
    check(program, flow, 13, tally)
    assert tally.count["refused, for a force"] == refused
    assert tally.count["right"] == (not refused)


def test_the_default_engine() -> None:
    order = ORDERS.map(lambda order: partial(microbatches, order=order))
    tried(350, Kinds(), st.sampled_from(DEFAULT_ENGINE) | order).assert_few_refused()


def test_both_engines() -> None:
    order = ORDERS.map(lambda order: partial(microbatches, order=order))
    tried(250, BOTH, st.sampled_from(ANY_ENGINE) | order).assert_few_refused()


def test_failures() -> None:
    errors = st.sampled_from([FaultError, HaltError])
    tried(150, BOTH._replace(fails=True), errors.map(lambda error: partial(failing_once, error=error)))


def test_tapes() -> None:  # which keep no random numbers
    tried(100, BOTH._replace(draws=False, noisy=False), st.just(recorded_and_replayed)).assert_few_refused()


def test_threads() -> None:
    """Not under autocast: threads share its casts, which each forgets for all, so that plain gradients differ too."""
    tally = Tally()
    kinds = BOTH._replace(draws=False, noisy=False)
    kinds = kinds._replace(contexts=tuple(context for context in kinds.contexts if context != "autocast"))

    @examples(100)
    @given(st.lists(programs(kinds), min_size=2, max_size=2), SEEDS)
    def attempt(pair: list[Program], seed: int) -> None:
        meeting = threading.Barrier(2)

        def work(program: Program) -> None:
            meeting.wait()
            check(program, two_backwards, seed, tally)

        other = threading.Thread(target=work, args=pair[:1])
        other.start()
        work(pair[1])
        other.join()

    attempt()
    tally.assert_few_refused()
