"""Several calls: which decision, which static value and which trace belongs to which."""

import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from roundpipe_core._phase import thread
from roundpipe_jax import (
    GradientError,
    PhaseError,
    SlotError,
    doing_recompute,
    get_recompute_data,
    recompute_once,
    remat,
    save_for_recompute,
)
from tests.on_jax.oracle import LANES, WAYS, W, X, bare, decided_once, gradient, in_lane, same

lanes = pytest.mark.parametrize("lane", LANES)
ways = pytest.mark.parametrize("way", WAYS)


def best(x: Any) -> Any:
    return jnp.argmax(jax.lax.stop_gradient(x))


def powers(x: Any, k: Any, name: str = "sin") -> Any:
    """No closure: its traces may be kept."""
    index, told = save_for_recompute(best(x), (k, name))
    assert told == (k, name)
    assert type(told[0]) is type(k)
    return getattr(jnp, name)(x).sum() * k * (index + 1) * (10 if isinstance(k, bool) else 1)


@lanes
def test_forwards_of_other_shapes_and_flags_before_their_backwards_in_any_order(lane: Any) -> None:
    layer = remat(powers, mode=lane)
    pulls, wanted = [], []
    for k, name, size in ((1, "sin", 3), (2, "cos", 3), (True, "sin", 5), (1.0, "tanh", 3), (1, "sin", 3)):
        x = jnp.arange(size) * 0.3
        pulls.append(jax.vjp(functools.partial(lambda k, name, x: layer(x, k, name=name), k, name), x)[1])
        wanted.append(jax.grad(functools.partial(powers, k=k, name=name))(x))
    for n in (4, 2, 0, 1, 3, 2, 4):
        same(pulls[n](jnp.float32(1))[0], wanted[n])


def test_one_function_with_flags_that_compare_equal() -> None:
    layer = remat(powers)
    for k in (True, False, 1, 0, 1.0, 0.0, True, 1):
        same(jax.grad(layer)(X, k), jax.grad(powers)(X, k))


def branches(x: Any) -> Any:
    flag = recompute_once(lambda: bool(x.sum() > 0))
    for _ in range(3 if flag else 2):
        x = jnp.sin(x) if flag else jnp.cos(x)
    rows = recompute_once(lambda: jnp.nonzero(x.ravel() > 0.5)[0])
    return x.ravel()[rows].sum() * len(rows)


def test_branches_loops_and_sizes_alternate() -> None:
    layer = remat(branches)
    for scale in (1.0, -1.0, 1.0, 3.0):
        same(jax.grad(layer)(jnp.abs(X) * scale), jax.grad(branches)(jnp.abs(X) * scale))


def test_a_graph_kept_while_its_function_runs_otherwise() -> None:
    layer = remat(branches, mode="custom_vjp")
    _, first = jax.vjp(layer, jnp.abs(X))
    _, second = jax.vjp(layer, -jnp.abs(X))
    for _ in range(2):
        same(second(jnp.float32(1)), (jax.grad(branches)(-jnp.abs(X)),))
        same(first(jnp.float32(1)), (jax.grad(branches)(jnp.abs(X)),))


class Model:
    def __init__(self) -> None:
        self.w, self.k = W, 1.0

    def apply(self, x: Any) -> Any:
        (index,) = save_for_recompute(best(x @ self.w))
        return jnp.tanh(x @ self.w) * (index + 1) * self.k

    __call__ = apply


@pytest.mark.parametrize("kind", ["bound method", "object", "function of self", "closure", "partial"])
def test_an_object_whose_arrays_are_replaced_between_calls(kind: str) -> None:
    model = Model()
    layer = {
        "bound method": lambda: remat(model.apply),
        "object": lambda: remat(model),
        "function of self": lambda: functools.partial(remat(Model.apply), model),
        "closure": lambda: remat(lambda x: model(x)),
        "partial": lambda: remat(functools.partial(Model.apply, model)),
    }[kind]()
    for k in (1, 2, 3):
        model.w, model.k = W * k, float(k)
        same(gradient(layer)(X), gradient(model.apply)(X))


@lanes
@ways
def test_an_object_changed_between_forward_and_backward(lane: Any, way: str) -> None:
    model = Model()
    want = jax.vjp(model.apply, X)[1](X)
    _, pull = WAYS[way](lambda x: jax.vjp(remat(lambda x: model(x), mode=lane), x))(X)
    model.w, model.k = W * 5, 9.0
    same(pull(X), want)


@lanes
@ways
def test_saved_containers_and_numpy_arrays_are_those_of_the_save(lane: Any, way: str) -> None:  # R6
    array, numbers, table = np.arange(3, dtype=np.float32), [1, 2], {"k": 3}

    def layer(x: Any) -> Any:
        a, n, t = save_for_recompute(array, numbers, table)
        out = jnp.sin(x).sum() * (a.sum() + sum(n) + t["k"])
        if doing_recompute():  # its own copies
            a[:] = 7
            n.append(1)
            t["k"] = 0
            again = get_recompute_data()
            assert (again[0].sum(), *again[1:]) == (3, [1, 2], {"k": 3})
        else:
            array[:] = 100
            numbers.append(9)
            table["k"] = 50
        return out

    _, pull = WAYS[way](lambda x: jax.vjp(remat(layer, mode=lane), x))(X)
    for _ in range(2):
        same(pull(jnp.float32(1))[0], jnp.cos(X) * 9)


@ways
def test_caches_cleared_between_forward_and_backward(way: str) -> None:
    layer = remat(powers)
    for _ in range(2):
        _, pull = jax.vjp(WAYS[way](lambda x: layer(x, 2)), X)
        jax.clear_caches()
        same(pull(jnp.float32(1))[0], jax.grad(powers)(X, 2))
        jax.clear_caches()


@pytest.mark.parametrize("where", [False, True], ids=["forward", "recompute"])
@pytest.mark.parametrize(("lane", "way"), [("checkpoint", "eager"), ("custom_vjp", "jit")])
def test_another_try_after_an_exception(where: bool, lane: Any, way: str) -> None:  # R11
    fails = [True]

    def layer(x: Any) -> Any:
        (index,) = save_for_recompute(best(x))
        if fails[0] and doing_recompute() is where:
            raise KeyError("not now")
        return jnp.sin(x).sum() * (index + 1)

    step = WAYS[way](jax.grad(remat(layer, mode=lane)))
    for _ in range(2):
        with pytest.raises(KeyError, match="not now"):
            step(X)
        assert thread.run is None
    fails[0] = False
    same(step(X), jax.grad(lambda x: jnp.sin(x).sum() * (best(x) + 1))(X))


def test_interrupts_and_generators_leave_no_phase() -> None:  # R11
    def interrupted(x: Any) -> Any:
        save_for_recompute(1)
        if doing_recompute():
            raise KeyboardInterrupt
        return x.sum()

    def lazily(x: Any) -> Any:
        def parts() -> Any:
            (index,) = save_for_recompute(best(x))
            yield jnp.sin(x) * index
            yield jnp.cos(x)

        return sum(parts()).sum()

    with pytest.raises(KeyboardInterrupt):
        jax.grad(remat(interrupted))(X)
    assert thread.run is None
    same(jax.grad(remat(lazily))(X), jax.grad(lazily)(X))


def test_a_layer_may_find_out_its_phase_by_the_error() -> None:  # R3
    def layer(x: Any) -> Any:
        try:
            (index,) = get_recompute_data()
        except PhaseError:
            index = best(x)
            save_for_recompute(index)
            with pytest.raises(SlotError, match="saved twice"):
                save_for_recompute(index)
        return jnp.sin(x).sum() * (index + 1)

    for way in WAYS.values():
        same(way(jax.grad(remat(layer)))(X), jnp.cos(X) * (best(X) + 1))


def test_threads_that_share_a_layer() -> None:
    layer = remat(powers)
    faults: list[Any] = []

    def steps(k: int) -> None:
        try:
            for f in (layer, remat(lambda x, k: powers(x, k)), layer):
                same(jax.grad(f)(X, k), jnp.cos(X) * k * 4)
        except BaseException as error:
            faults.append(error)

    workers = [threading.Thread(target=steps, args=(k,)) for k in range(1, 7)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert faults == []


@pytest.mark.parametrize(
    ("modes", "way"),
    [(LANES[:1] * 4, "eager"), (LANES[1:] * 4, "jit"), (LANES * 2, "jit"), (LANES[::-1] * 2, "eager")],
    ids=str,
)
def test_four_levels_of_regions_decide_once(modes: Any, way: str) -> None:  # R8
    def program(router: Any, wrap: Any) -> Any:
        def level(n: int, first: int) -> Any:
            def layer(x: Any) -> Any:
                style = "plain" if wrap is bare else "seed"
                x = jnp.sin(x) * router.saved(style, first, x)
                return level(n - 1, first + 1)(level(n - 1, first + 2**n)(x)) if n else x

            return layer if wrap is bare else in_lane(modes[n])(layer)

        return WAYS[way](gradient(level(3, 0)))(X)

    decided_once(program, in_lane("checkpoint"))


@lanes
@pytest.mark.parametrize("form", [gradient, lambda f: jax.hessian(lambda x: f(x).sum())], ids=["gradient", "hessian"])
def test_a_decision_made_in_the_argument_of_a_save_is_not_made_again(lane: Any, form: Any) -> None:  # R8
    def program(router: Any, wrap: Any) -> Any:
        return form(wrap(lambda x: jnp.sin(x) * router.saved("plain" if wrap is bare else "returned", 0, x)))(X)

    decided_once(program, in_lane(lane))


@lanes
@ways
def test_a_layer_called_many_times_in_one_trace(lane: Any, way: str) -> None:  # R9
    def program(router: Any, wrap: Any) -> Any:
        def shared(x: Any, site: Any) -> Any:
            return jnp.tanh(x @ W) * router.saved("plain" if wrap is bare else "returned", site, x)

        layer = wrap(shared)

        def net(x: Any) -> Any:
            for n in range(4):
                x = layer(x, jnp.int32(n))
            return x

        return WAYS[way](gradient(net))(X)

    decided_once(program, in_lane(lane))


def test_a_jitted_function_made_once_serves_both_phases_and_outside() -> None:  # R1
    phases = []

    @jax.jit
    def inner(x: Any) -> Any:
        phases.append(doing_recompute())
        return jnp.sin(x)

    @remat
    def layer(x: Any) -> Any:
        (index,) = save_for_recompute(best(x))
        return inner(x).sum() * (index + 1)

    for _ in range(2):
        same(jax.grad(layer)(X), jnp.cos(X) * (best(X) + 1))
        same(inner(X), jnp.sin(X))
    assert {False, True} == set(phases)
    assert phases.count(True) <= 2


def test_one_jit_around_a_layer_alone_and_inside_a_region() -> None:
    layer = jax.jit(remat(lambda x: jnp.sin(x) * (save_for_recompute(best(x))[0] + 1)))

    def outer(x: Any) -> Any:
        return layer(x) + layer(2 * x)

    want = jax.grad(lambda x: ((jnp.sin(x) + jnp.sin(2 * x)) * (best(X) + 1)).sum())(X)
    same(jax.grad(lambda x: outer(x).sum())(X), want)
    same(jax.grad(lambda x: remat(outer)(x).sum())(X), want)
    same(jax.grad(lambda x: outer(x).sum())(X), want)


# ------------------------------------------------------------------------------------- arguments of any kind


@jax.tree_util.register_pytree_node_class
class Labelled:
    """A container whose structure no cache can look up."""

    def __init__(self, array: Any, notes: list[str]) -> None:
        self.array, self.notes = array, notes

    def tree_flatten(self) -> Any:
        return (self.array,), self.notes

    @classmethod
    def tree_unflatten(cls, notes: list[str], children: Any) -> Any:
        return cls(children[0], notes)


def test_a_structure_without_a_hash() -> None:
    def layer(part: Any) -> Any:
        (saved,) = save_for_recompute(Labelled(jax.lax.stop_gradient(part.array) * 2, part.notes))
        return jnp.sin(part.array) * saved.array * len(saved.notes)

    got = jax.grad(lambda x: remat(layer)(Labelled(x, ["a", "b"])).sum())(X)
    same(got, jnp.cos(X) * 4 * X)
    with pytest.raises(GradientError, match=r"data\[0\].* depends on a value"):
        jax.grad(lambda x: remat(lambda x: save_for_recompute(Labelled(x, []))[0].array.sum())(x))(X)


@ways
def test_a_reference_that_a_layer_adds_to(way: str) -> None:
    def layer(x: Any, total: Any) -> Any:
        (index,) = save_for_recompute(best(x))
        total[...] += jax.lax.stop_gradient(x)
        return jnp.sin(x) * (index + 1)

    def step(f: Any) -> Any:
        def run(x: Any) -> Any:
            total = jax.new_ref(jnp.zeros_like(x))
            y = f(x, total)
            return y, total[...]

        return run

    same(WAYS[way](step(remat(layer)))(X), WAYS[way](step(layer))(X))


class Shy:
    # A module that lets nobody look at what it is for.

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        raise RuntimeError("not loaded yet")

    def __call__(self, x: Any) -> Any:
        return jnp.sin(x) * save_for_recompute(2)[0]


def test_callables_that_tell_little_of_themselves() -> None:
    same(jax.grad(lambda x: remat(Shy())(x).sum())(X), jnp.cos(X) * 2)
    array = np.ones(3)
    got = remat(dict, static_argnames=("k",))(x=X, k=array)  # no signature
    assert got["k"] is array
    same(got["x"], X)


@jax.custom_vjp
def by_hand(x: Any) -> Any:
    return jnp.sin(x)


by_hand.defvjp(lambda x: (jnp.sin(x), x), lambda x, dot: (dot * jnp.cos(x),))


def test_errors_of_jax_come_through_as_they_are() -> None:
    def looks(x: Any) -> Any:
        rows = jax.vmap(lambda row: row * (save_for_recompute(best(row))[0] + 1))(x)
        return rows.sum() if x.sum() > 0 else rows

    def undifferentiable(x: Any) -> Any:
        rows = jax.vmap(lambda row: row * (save_for_recompute(best(row))[0] + 1))(x)
        return jax.scipy.linalg.schur(rows @ W @ rows.T)[0].sum()

    def saves(x: Any) -> Any:
        return by_hand(x) * (save_for_recompute(best(x))[0] + 1)

    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(remat(looks))(X)
    with pytest.raises(NotImplementedError, match="schur"):
        jax.grad(remat(undifferentiable))(X)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(remat(saves), (X,), (X,))
