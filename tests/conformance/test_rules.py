"""R1 to R14, each stated once, for every frontend (R14)."""

from __future__ import annotations

import gc
import importlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import roundpipe_core
from roundpipe_core import (
    GradientError,
    PhaseError,
    SlotError,
    TapeError,
    doing_recompute,
    get_recompute_data,
    layer_scope,
    recompute_once,
    save_for_recompute,
)
from tests.conformance.frontends import FRONTENDS

X = np.array([0.5, -1.0, 2.0, 0.25], np.float32)
FLIPPED = np.array([3.0, 0.0, -2.0, 0.0], np.float32)  # added to X, it sorts otherwise


@pytest.fixture(params=FRONTENDS)
def fe(request: pytest.FixtureRequest) -> Iterator[Any]:
    frontend = FRONTENDS[request.param]()
    with frontend.ready():
        yield frontend


class Sorter:
    """A layer that weighs its input by rank. What it would decide in the recompute is another order."""

    def __init__(self, fe: Any, style: str) -> None:
        self.fe, self.style = fe, style
        self.decided = 0
        self.phases: list[bool] = []

    def decide(self, x: Any) -> Any:
        self.decided += 1
        return self.fe.order(self.fe.plain(x) + (self.fe.array(FLIPPED) if doing_recompute() else 0))

    def order(self, x: Any) -> Any:
        if self.style == "once":
            return recompute_once(lambda: self.decide(x))
        if self.style == "returned":
            return save_for_recompute(self.decide(x))[0]
        if doing_recompute():
            return get_recompute_data()[0]
        order = self.decide(x)
        save_for_recompute(order)
        return order

    def __call__(self, x: Any) -> Any:
        self.phases.append(doing_recompute())
        ranked = x[self.order(x)]
        weights = self.fe.array(np.array([4, 3, 2, 1], np.float32))
        return (self.fe.exp(ranked) * weights).sum()


def oracle(x: np.ndarray, order: np.ndarray | None = None) -> np.ndarray:
    """The gradient of `Sorter`, by hand, with the order of `x` or another."""
    order = np.argsort(-x, kind="stable") if order is None else order
    gradient = np.empty_like(x)
    gradient[order] = np.exp(x[order]) * np.array([4, 3, 2, 1], x.dtype)
    return gradient


styles = pytest.mark.parametrize("style", ["branch", "returned", "once"])


@styles
def test_r1_and_r10_phases_and_the_gradient_of_the_forward_s_decision(fe: Any, style: str) -> None:
    layer = Sorter(fe, style)
    _, gradient = fe.gradient(lambda x: fe.region(layer, x), X)
    np.testing.assert_allclose(gradient, oracle(X), rtol=1e-6)
    assert layer.phases[0] is False
    assert layer.phases[-1] is True
    assert doing_recompute() is False


@styles
def test_r2_forward_only_is_the_plain_layer(fe: Any, style: str) -> None:
    layer = Sorter(fe, style)
    value = fe.forward(lambda x: fe.region(layer, x), X)
    assert value == pytest.approx(float((np.exp(np.sort(X)[::-1]) * [4, 3, 2, 1]).sum()), rel=1e-6)
    assert not layer.phases[0]
    assert fe.traced or not any(layer.phases)  # a traced program has its recompute in it, to be differentiated or not


def test_r2_save_gives_back_its_arguments_outside_of_regions(fe: Any) -> None:
    data = fe.array([1, 2])
    back = save_for_recompute(data, "a", None)
    assert back[0] is data
    assert back[1:] == ("a", None)


def test_r2_any_pytree(fe: Any) -> None:
    seen: list[Any] = []

    def layer(x: Any) -> Any:
        data = {"order": fe.order(x), "n": 3, "what": ("left", None, True)}
        (back,) = save_for_recompute(data if not doing_recompute() else None)
        seen.append((back["n"], back["what"]))
        return x[back["order"]][0] * back["n"]

    _, gradient = fe.gradient(lambda x: fe.region(layer, x), X)
    np.testing.assert_array_equal(gradient, [0, 0, 3, 0])
    assert set(seen) == {(3, ("left", None, True))}


def test_r3_get_outside_is_a_phase_error(fe: Any) -> None:
    with pytest.raises(PhaseError, match=r"get_recompute_data\(\) was called outside a recompute"):
        get_recompute_data()

    def layer(x: Any) -> Any:
        get_recompute_data()
        return x.sum()

    with pytest.raises(AssertionError, match="in the forward"):
        fe.gradient(lambda x: fe.region(layer, x), X)


def test_r3_nothing_saved_is_an_error_that_names_the_layer(fe: Any) -> None:
    def layer(x: Any) -> Any:
        if doing_recompute():
            get_recompute_data()
        return fe.exp(x).sum()

    with pytest.raises(SlotError, match=r"layer 'attention'.*saved nothing"):
        fe.gradient(lambda x: fe.region(layer, x, label="attention"), X)


def test_r3_get_may_be_called_again(fe: Any) -> None:
    def layer(x: Any) -> Any:
        if doing_recompute():
            one, two = get_recompute_data()[0], get_recompute_data()[0]
        else:
            one = two = save_for_recompute(fe.order(x))[0]
        return x[one][0] * x[two][0]

    _, gradient = fe.gradient(lambda x: fe.region(layer, x), X)
    np.testing.assert_array_equal(gradient, [0, 0, 4, 0])


def test_r4_one_unnamed_save(fe: Any) -> None:
    def layer(x: Any) -> Any:
        save_for_recompute(1)
        save_for_recompute(2)
        return x.sum()

    with pytest.raises(SlotError) as error:
        fe.gradient(lambda x: fe.region(layer, x), X)
    places = [line for line in str(error.value).splitlines() if "test_rules.py:" in line]
    assert len(places) >= 2


def test_r4_names_scopes_and_any_number_of_once(fe: Any) -> None:
    decided: list[int] = []

    def layer(x: Any) -> Any:
        (first,) = save_for_recompute(1 if not doing_recompute() else 0, name="a")
        (second,) = save_for_recompute(2 if not doing_recompute() else 0, name="b")
        with layer_scope("inner"):
            (third,) = save_for_recompute(3 if not doing_recompute() else 0, name="a")
        more = [recompute_once(lambda n=n: decided.append(n) or n) for n in (4, 5)]
        return x.sum() * (10000 * first + 1000 * second + 100 * third + 10 * more[0] + more[1])

    _, gradient = fe.gradient(lambda x: fe.region(layer, x), X)
    np.testing.assert_array_equal(gradient, [12345] * 4)
    assert decided == [4, 5]


def test_r5_no_gradient_through_a_slot(fe: Any) -> None:
    def layer(x: Any) -> Any:
        (scaled,) = save_for_recompute(x * 2.0)
        return scaled.sum()

    with pytest.raises(GradientError, match=r"data\[0\]"):
        fe.gradient(lambda x: fe.region(layer, x), X)


def test_r5_what_carries_none_may_be_saved(fe: Any) -> None:
    def layer(x: Any) -> Any:
        (scale,) = save_for_recompute(fe.plain(x) * (7.0 if doing_recompute() else 1.0))
        return (x * scale).sum()

    _, gradient = fe.gradient(lambda x: fe.region(layer, x), X)
    np.testing.assert_array_equal(gradient, X)


def test_r6_values_of_the_moment_of_saving(fe: Any) -> None:
    plan, host = [2], np.array([1, 0])

    def layer(x: Any) -> Any:
        plans, hosts = save_for_recompute(plan, host)
        taken = (plans[0], int(hosts[0]), len(plans))
        plans.append(7)
        hosts[0] = 3
        return x[taken[0]] * x[taken[1]] * taken[2]

    def program(x: Any) -> Any:
        value = fe.region(layer, x)
        plan[:] = [0, 0]
        host[:] = 2
        return value

    _, gradient = fe.gradient(program, X, times=2)
    np.testing.assert_array_equal(gradient, [0, 2, -1, 0])


@styles
@pytest.mark.parametrize("depth", [1, 3])  # at 3 there is a region that is inside of one and around one
def test_r8_decided_once_at_any_depth(fe: Any, style: str, depth: int) -> None:
    layer = Sorter(fe, style)

    def nested(x: Any, depth: int = depth) -> Any:
        return fe.region(layer if depth == 1 else (lambda x: nested(x, depth - 1)), x)

    _, gradient = fe.gradient(nested, X, times=2)
    np.testing.assert_allclose(gradient, oracle(X), rtol=1e-6)
    if style != "returned":  # which computes its argument in both phases
        assert layer.decided == 1


def test_r9_a_shared_layer_has_a_slot_per_call(fe: Any) -> None:
    layer = Sorter(fe, "branch")

    def program(x: Any) -> Any:
        return fe.region(layer, x) + fe.region(layer, x * -1.0) + fe.region(layer, x)

    _, gradient = fe.gradient(program, X)
    np.testing.assert_allclose(gradient, 2 * oracle(X) - oracle(-X), rtol=1e-6)


def test_r9_a_slot_dies_with_its_graph(fe: Any) -> None:
    class Plan:
        """An opaque object, kept by reference."""

    plans: list[weakref.ref[Plan]] = []

    def train() -> None:
        def layer(x: Any) -> Any:
            plan = Plan()
            plans.append(weakref.ref(plan))
            save_for_recompute(plan)
            return fe.exp(x).sum()

        fe.gradient(lambda x: fe.region(layer, x), X)

    train()
    fe.forget()
    gc.collect()
    assert plans
    assert not any(plan() for plan in plans)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_r11_exceptions_leave_no_phase_behind(fe: Any, fails_at: int) -> None:
    calls: list[int] = []

    def layer(x: Any) -> Any:
        calls.append(len(calls))
        save_for_recompute(1)
        if len(calls) == fails_at:
            raise KeyError("the layer's own")
        return fe.exp(x).sum()

    with pytest.raises(KeyError, match="the layer's own"):
        fe.gradient(lambda x: fe.region(layer, x), X)
    assert doing_recompute() is False
    with pytest.raises(PhaseError):
        get_recompute_data()


def test_r1_other_threads_are_in_no_phase(fe: Any) -> None:
    seen: list[bool] = []

    def layer(x: Any) -> Any:
        thread = threading.Thread(target=lambda: seen.append(doing_recompute()))
        thread.start()
        thread.join()
        doing_recompute()  # which tells JAX that the phases may differ
        return fe.exp(x).sum()

    fe.gradient(lambda x: fe.region(layer, x), X)
    assert len(seen) >= 2
    assert not any(seen)


@styles
def test_r13_what_was_recorded_is_replayed(fe: Any, style: str) -> None:
    layer = Sorter(fe, style)

    def program(x: Any) -> Any:
        return fe.region(layer, x) + fe.region(layer, x * 2.0)

    tape = fe.recorded(program, X)
    assert [(entry.layer, entry.order, entry.shape) for entry in tape.entries()] == [
        ("Sorter", 0, (4,)),
        ("Sorter", 1, (4,)),
    ]
    decided, layer.phases = layer.decided, []
    order, other = np.argsort(-X, kind="stable"), X + FLIPPED
    _, gradient = fe.replayed("gradient", program, other, tape)
    np.testing.assert_allclose(gradient, oracle(other, order) + 2 * oracle(2 * other, order), rtol=1e-5)
    assert all(layer.phases)
    if style != "returned":
        assert layer.decided == decided

    with pytest.raises(TapeError, match="more than the model asked for"):
        fe.replayed("forward", lambda x: fe.region(layer, x), X, tape)
    with pytest.raises(TapeError, match="no decisions left"):
        fe.replayed("forward", lambda x: program(x) + program(x), X, tape)
    with pytest.raises(TapeError, match="4 rows, as an input had; now inputs have 3"):
        fe.replayed("forward", program, X[:3], tape)
    assert doing_recompute() is False


def test_r14_the_same_functions(fe: Any) -> None:
    package = importlib.import_module(fe.package)
    for name in roundpipe_core.__all__:
        assert getattr(package, name) is getattr(roundpipe_core, name)
