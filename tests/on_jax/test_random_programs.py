"""Random programs of layers, against the same programs without remat."""

from __future__ import annotations

import collections
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from roundpipe_core._phase import thread
from roundpipe_jax import GradientError, OptionError, TapeError, _staging, doing_recompute, record, replay
from tests.fuzz import examples
from tests.on_jax.interpreter import interpreted
from tests.on_jax.oracle import LANES, Router, gradient, same
from tests.on_jax.programs import SITE, TRACED, X1, BoomError, Interrupt, Op, Runner, W, X, kinds, programs

# ------------------------------------------------------------------------------- what is done with a program

Function = Callable[[Any, Any], Any]


class Form(NamedTuple):
    """From a program, run by a runner, to values and slopes."""

    run: Callable[[Runner, tuple[Op, ...]], tuple[Any, Any]]
    forward_mode: bool = False
    on_values: bool = False  # whether Python sees the values of x


def form(of: Callable[[Function], tuple[Any, Any]], **known: bool) -> Form:
    """What needs no more than the program's function."""
    return Form(lambda runner, program: of(runner.function(program)), **known)


def in_scan(f: Function) -> Function:
    return lambda x, w: lax.scan(lambda c, _: (f(c, w), None), x, None, length=2)[0]


def slopes_of_slopes(f: Function) -> tuple[Any, Any]:
    return (), jax.jit(gradient(lambda x, w: jax.grad(lambda x: (f(x, w) ** 2).sum())(x)))(X, W)


def linearized(f: Function) -> tuple[Any, Any]:
    y, push = jax.linearize(f, X, W)
    return y, (push(jnp.cos(X), W), push(X, jnp.sin(W)))


def in_other_order(f: Function) -> tuple[Any, Any]:
    (one, pull_one), (two, pull_two) = (jax.vjp(f, x, W) for x in (X, X1))
    return (one, two), (pull_two(one), pull_one(two), pull_two(two))


def jitted_twice(runner: Runner, program: tuple[Op, ...]) -> tuple[Any, Any]:
    """A step, and the same with other numbers, of which nothing is traced."""
    step = jax.jit(gradient(runner.function(program)))
    first = step(X, W)
    steps = runner.steps
    second = step(X1, W)
    assert runner.steps == steps
    return (first[0], second[0]), (first[1], second[1])


FORMS = {
    "eager": form(lambda f: gradient(f)(X, W), on_values=True),
    "jit": Form(jitted_twice),
    "grad(jit)": form(lambda f: gradient(jax.jit(f))(X, W)),
    "vmap(grad)": form(lambda f: jax.vmap(gradient(f), (0, None))(jnp.stack([X, X1]), W)),
    "grad of grad": form(slopes_of_slopes),
    "in scan": form(lambda f: gradient(in_scan(f))(X, W)),
    "forward": form(lambda f: jax.jvp(f, (X, W), (jnp.cos(X), jnp.sin(W))), forward_mode=True, on_values=True),
    "linearize": form(linearized, forward_mode=True),
    "vjp twice": form(in_other_order, on_values=True),
    "values": form(lambda f: (f(X, W), ()), on_values=True),
}
FORM = st.sampled_from(sorted(FORMS))
LANE = st.sampled_from(LANES)
OUTCOMES: collections.Counter[str] = collections.Counter()


class Case:
    """A program in one lane and one form. It is compared with itself without remat."""

    def __init__(self, program: tuple[Op, ...], lane: Any, form: Form) -> None:
        self.program, self.lane, self.form = program, lane, form
        traced = self.traced = bool(kinds(program) & TRACED)
        self.on_values = form.on_values and not traced
        # The residual lane has no forward mode, and keeps nothing that is saved in an inner trace.
        self.may_refuse = lane == "custom_vjp" and (form.forward_mode or traced)

    def runner(self, lane: Any = None, **options: Any) -> Runner:
        return Runner(lane, on_values=self.on_values, **options)

    def run(self, runner: Runner) -> Any:
        try:
            return self.form.run(runner, self.program)
        finally:
            check_phase()  # R11

    def call_first(self) -> None:
        """A first call in the residual lane may decide twice: if a Python value is saved in a jitted function."""
        if self.lane == "custom_vjp" and self.traced:
            with contextlib.suppress(OptionError):
                self.run(self.runner(self.lane))

    def check(self, ours: Runner | None = None) -> None:
        self.call_first()
        plain, ours = self.runner(), ours or self.runner(self.lane)
        want = self.run(plain)
        try:
            got = self.run(ours)
        except OptionError:
            OUTCOMES["refused"] += 1
            assert self.may_refuse
            return
        OUTCOMES["right"] += 1
        same_bits(got[0], want[0])  # the same operations in the same order
        same(got, want, 1e-4)  # slopes of what is used in several places are added in another order
        check_decisions(plain, ours)


def check_phase() -> None:
    assert doing_recompute() is False
    assert thread.run is None


def check_decisions(plain: Runner, ours: Runner) -> None:
    """R8: each is made as often as without remat. Those that nothing uses are made or not, compiled or not."""
    in_vain = plain.in_vain | ours.in_vain
    wanted, made = (
        {number: count for number, count in runner.router.counts.items() if number // SITE not in in_vain}
        for runner in (plain, ours)
    )
    assert made == wanted


def same_bits(got: Any, want: Any) -> None:
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, two)


# ------------------------------------------------------------------------------------------- properties


@pytest.fixture(autouse=True)
def in_steps(request: pytest.FixtureRequest) -> Iterator[None]:
    """Programs are interpreted; those of a test called "compiled" are not."""
    with contextlib.nullcontext() if "compiled" in request.node.name else interpreted():
        yield


@pytest.mark.parametrize("form", FORMS)
@examples(2)
@given(program=programs(), lane=LANE, unknown=st.booleans())
def test_gradients_are_those_without_remat(form: str, program: Any, lane: Any, unknown: bool) -> None:  # R8, R10
    case = Case(program, lane, FORMS[form])
    if unknown:  # and so every layer begins as if it saved nothing in inner traces
        _staging._hints.clear()
    case.check()


@examples(7)
@given(programs(traced=False), LANE, FORM)
def test_gradients_of_nested_regions_on_values(program: Any, lane: Any, form: str) -> None:
    Case(program, lane, FORMS[form]).check()


@examples(2)
@given(programs(), LANE)
def test_gradients_of_compiled_programs(program: Any, lane: Any) -> None:
    """Compiled, sums may be fused otherwise, so that no bits are compared."""
    case = Case(program, lane, FORMS["jit"])
    case.call_first()
    plain, ours = case.runner(), case.runner(lane)
    want = case.run(plain)
    try:
        got = case.run(ours)
    except OptionError:
        assert case.may_refuse
        return
    same(got, want, 1e-4)
    check_decisions(plain, ours)


@examples(6)
@given(programs(), LANE, FORM, st.integers(1, 12), st.sampled_from([BoomError, Interrupt]))
def test_a_failure_anywhere_and_another_try(program: Any, lane: Any, form: str, fuse: int, failure: Any) -> None:
    case = Case(program, lane, FORMS[form])
    runner = case.runner(lane, fuse=fuse, failure=failure)
    with contextlib.suppress(failure, OptionError):
        case.run(runner)
    runner.fuse, runner.router = None, Router()
    case.check(runner)


@examples(5)
@given(programs(), LANE, FORM, st.integers(0, 3))
def test_a_value_with_a_tangent_is_refused(program: Any, lane: Any, form: str, place: int) -> None:  # R5
    (first, *rest) = program
    (body,) = first.bodies
    leaking = replace(first, bodies=((*body[:place], Op("leak", site=99), *body[place:]),))
    case = Case((leaking, *rest), lane, FORMS[form])
    if form == "values":
        case.check()
        return
    with pytest.raises((GradientError, OptionError) if case.may_refuse else GradientError):
        case.run(case.runner(lane))


@examples(2)
@given(programs(), LANE, FORM)
def test_two_threads(program: Any, lane: Any, form: str) -> None:
    case = Case(program, lane, FORMS[form])
    faults: list[BaseException] = []

    def run() -> None:
        try:
            case.check()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for fault in faults:
        raise fault


@examples(2)
@given(programs(), LANE, FORM)
def test_nothing_outlives_its_graph(program: Any, lane: Any, form: str) -> None:  # R9
    case = Case(program, lane, FORMS[form])
    case.check()  # JAX keeps constants of its own
    gc.collect()
    before = len(jax.live_arrays())
    case.check()
    gc.collect()
    assert len(jax.live_arrays()) <= before


@examples(2)
@given(programs(), LANE, st.sampled_from(["jit", "grad(jit)", "in scan"]))
def test_no_tracer_outlives_its_trace(program: Any, lane: Any, form: str) -> None:
    case = Case(program, lane, FORMS[form])
    with jax.checking_leaks(), contextlib.suppress(OptionError):
        case.run(case.runner(lane))


@examples(4)
@given(programs(), LANE, st.booleans())
def test_a_replay_decides_nothing(program: Any, lane: Any, jitted: bool) -> None:  # R13
    case = Case(program, lane, form(lambda f: gradient(f)(X, W), on_values=not jitted))
    case.call_first()
    plain, first, second = case.runner(), case.runner(lane), case.runner(lane)
    want = case.run(plain)

    def recorded(x: Any, w: Any) -> Any:
        with record() as tape:
            first.function(program)(x, w)
        return tape

    def replayed(tape: Any, x: Any, w: Any) -> Any:
        with replay(tape):
            return gradient(second.function(program))(x, w)

    wrap: Any = jax.jit if jitted else lambda f: f
    try:
        tape = wrap(recorded)(X, W)
        second.router.counts.update(first.router.counts)  # deciding again gives something else
        got = wrap(replayed)(tape, X, W)
    except (OptionError, TapeError):
        assert kinds(program) & TRACED or (jitted and "attempt" in kinds(program))
        return
    finally:
        check_phase()
    same(got, want, 1e-4)
    again = second.router.counts - first.router.counts
    assert not {number // SITE for number in again} & second.in_regions
