"""Faults: errors at any line, memory that runs out, threads, depth. Nothing is left, and the next step is right."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from roundpipe_core._phase import thread
from roundpipe_core._slots import Slot
from roundpipe_jax import (
    OptionError,
    SlotError,
    _staging,
    doing_recompute,
    explain,
    layer_scope,
    recompute_once,
    record,
    remat,
    remat_layers,
    replay,
    save_for_recompute,
)
from roundpipe_jax._explain import _thread
from roundpipe_jax._runs import traced_for
from tests.fuzz import TIMES
from tests.interrupts import At, lines, raised_at, some
from tests.on_jax.oracle import LANES, WAYS, Router, W, X, bare, gradient, in_lane, same

stop = jax.lax.stop_gradient


def nested(wrap: Any) -> Any:
    router = Router()

    def inner(x: Any) -> Any:
        return jnp.sin(x * router.saved("seed", 1, x))

    def layer(x: Any, w: Any) -> Any:
        with layer_scope("gate"):
            x = x * router.saved("returned", 2, x)
        return wrap(inner)(x @ w) * (1 + recompute_once(jnp.argmax, stop(x)))

    return gradient(wrap(layer))(X, W)


def taped(wrap: Any) -> Any:
    def layer(x: Any) -> Any:
        (index,) = save_for_recompute(jnp.argmax(stop(x)))
        return jnp.sin(x * index)

    layer = wrap(layer)
    if wrap is bare:
        return gradient(layer)(X)
    with record() as tape:
        layer(X)
    with replay(tape):
        return gradient(layer)(X)


def left_behind() -> Any:
    """What a step could leave on its thread."""
    return thread.run, doing_recompute(), traced_for.value, jax.extend.core.get_opaque_trace_state()


def exhausted() -> Exception:
    """What XLA raises where memory runs out."""
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes.")
    error.add_note("from the allocator")
    return error


@pytest.mark.parametrize("error", [KeyboardInterrupt, exhausted])
@pytest.mark.parametrize("program", [nested, taped])
def test_an_error_at_any_line_comes_through_and_leaves_nothing(program: Any, error: Any) -> None:
    wrap, want = in_lane("checkpoint"), program(bare)
    program(wrap)
    count, clean = lines(lambda: program(wrap)), left_behind()
    for n in some(count, 5, start=TIMES):
        notes = getattr(raised_at(n, error, lambda: program(wrap)), "__notes__", [])
        assert error is not exhausted or notes[0] == "from the allocator"  # JAX adds a note of its own
        assert left_behind() == clean, f"line {n}"
        same(program(wrap), want)


@pytest.mark.parametrize("n", range(1, 30, 4))
def test_an_interrupt_while_a_block_begins_or_ends_leaves_nothing(n: int) -> None:
    def block() -> None:
        with record():
            pass

    count, clean = lines(block), left_behind()
    try:
        with At(1 + n % count, KeyboardInterrupt):
            block()
    except KeyboardInterrupt:
        pass
    assert left_behind() == clean


@pytest.mark.parametrize("mode", LANES)
@pytest.mark.parametrize("place", ["forward", "recompute"])
def test_memory_that_runs_out_in_a_layer(place: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: weakref.WeakSet[Slot] = weakref.WeakSet()
    build = Slot.__init__

    def noting(self: Slot, *args: Any, **kwargs: Any) -> None:
        made.add(self)
        build(self, *args, **kwargs)

    monkeypatch.setattr(Slot, "__init__", noting)
    fails = False

    def layer(x: Any) -> Any:
        (index,) = save_for_recompute(jnp.argmax(stop(x)))
        if fails and doing_recompute() is (place == "recompute"):
            raise exhausted()
        return jnp.sin(x * (index + 1))

    def step() -> Any:
        return jax.grad(lambda x: remat(layer, mode=mode)(x).sum())(X)

    want, clean = step(), left_behind()
    gc.collect()
    before, fails = len(made), True
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        step()
    assert raised.value.__notes__[0] == "from the allocator"
    del raised
    fails = False
    assert left_behind() == clean
    gc.collect()
    assert len(made) == before
    same(step(), want)


def test_a_decision_that_finds_no_memory_when_verify_makes_it_again_is_no_flip() -> None:
    asked = []

    @remat(verify="warn")
    def layer(x: Any) -> Any:
        asked.append(doing_recompute())
        if asked.count(False) == 2:
            raise exhausted()
        (index,) = save_for_recompute(jnp.argmax(stop(x)))
        return jnp.sin(x * index)

    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.grad(lambda x: layer(x).sum())(X)


@pytest.mark.parametrize("error", [exhausted, MemoryError])
def test_a_layer_known_to_save_in_a_scan_is_not_run_again_where_memory_runs_out(error: Any) -> None:
    runs, fails = [], False

    def layer(x: Any) -> Any:
        runs.append(1)
        if fails:
            raise error()

        def body(x: Any, _: Any) -> Any:
            (index,) = save_for_recompute(jnp.argmax(stop(x)))
            return jnp.sin(x * index), None

        return jax.lax.scan(body, x, None, length=2)[0]

    step = jax.grad(lambda x: remat(layer)(x).sum())
    step(X)
    runs.clear()
    fails = True
    with pytest.raises((jax.errors.JaxRuntimeError, MemoryError)):
        step(X)
    assert len(runs) == 1


def test_explain_counts_from_anew_whatever_an_interrupted_trace_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(w: Any, x: Any) -> Any:
        (index,) = save_for_recompute(jnp.argmax(stop(x)))
        return jnp.sin(x @ w) * index

    def told() -> str:
        return str(explain(lambda weights, x: remat_layers(layer, weights, x), jnp.stack([W, W]), X))

    want = told()
    monkeypatch.setattr(_thread, "repeats", [3])  # as if it had been cut short while it left a stack of three
    assert told() == want
    assert _thread.repeats == [3]


@pytest.mark.parametrize("how", WAYS)
def test_sixteen_threads_with_one_layer_decide_each_for_themselves(how: str) -> None:
    barrier, interval = threading.Barrier(16), sys.getswitchinterval()

    def layer(x: Any, w: Any) -> Any:
        (index,) = save_for_recompute(jnp.argmax(stop(x @ w), -1))
        return jnp.tanh(x @ w) * (index[:, None] + recompute_once(jnp.argmin, stop(x)) + 1)

    def step(layer: Any) -> Any:
        return WAYS[how](gradient(lambda x, w: layer(layer(x, w), w)))

    ours, plain = step(remat(layer)), step(layer)

    def work(n: int) -> Any:
        barrier.wait(timeout=60)
        return [ours(X * (n - 8) + n % 3, W) for _ in range(2 if how == "jit" else 1)], doing_recompute()

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(16) as pool:
            got = list(pool.map(work, range(16)))
    finally:
        sys.setswitchinterval(interval)
    for n, (results, phase) in enumerate(got):
        want = plain(X * (n - 8) + n % 3, W)
        assert phase is False
        for result in results:
            same(result, want)


def deep(wrap: Any, depth: int) -> Any:
    def level(x: Any, depth: int) -> Any:
        (index,) = save_for_recompute(jnp.argmax(stop(x)), name="index")
        x = x * (1 + index * 0.01)
        return jnp.sin(wrap(lambda x: level(x, depth - 1))(x)) if depth else x

    return gradient(wrap(lambda x: level(x, depth)))


def test_regions_in_each_other_up_to_the_limit_of_python() -> None:
    clean = left_behind()
    same(deep(remat, 6)(X), deep(bare, 6)(X))
    with pytest.raises(RecursionError):
        deep(remat, 2000)(X)
    assert left_behind() == clean
    same(deep(remat, 2)(X), deep(bare, 2)(X))


def in_a_loop(f: Any) -> Any:
    return lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]


def saves(x: Any) -> Any:
    return x * (1 + save_for_recompute(jnp.argmax(stop(x)))[0])


def asks(x: Any) -> Any:
    return x + (0 * x if doing_recompute() else 0)


def in_the_form_of_another(wrap: Any, x: Any) -> None:
    def layer(loops: bool) -> Any:
        def run(x: Any) -> Any:
            big = jnp.arange(1009.0)
            y = x * big.sum()
            return in_a_loop(saves)(y) if loops else y * recompute_once(lambda: bool(y.sum() > 0))

        return wrap(run)

    layer(True)(x)
    layer(False)(x)


def over(f: Any) -> Any:
    def start(wrap: Any, x: Any) -> None:
        def layer(x: Any) -> Any:
            big = jnp.arange(1009.0) * x.sum()
            return in_a_loop(lambda c: f(c * big.sum()))(x)

        wrap(layer)(x)

    return start


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("start", [over(saves), over(asks), in_the_form_of_another], ids=["saves", "asks", "form"])
def test_a_run_that_starts_over_leaves_no_array(start: Any, lane: Any) -> None:  # R9
    _staging._hints.clear()
    with contextlib.suppress(OptionError):
        jax.vjp(lambda x: start(in_lane(lane), x), X)
    gc.collect()
    assert not any(array.shape == (1009,) for array in jax.live_arrays())


def test_data_nested_a_thousand_deep_is_a_clear_error() -> None:
    data: Any = 1
    for _ in range(1000):
        data = [data]
    with pytest.raises(SlotError, match="nested too deep"):
        jax.grad(lambda x: remat(lambda x: [x.sum(), save_for_recompute(data)][0])(x))(X)
    assert thread.run is None
