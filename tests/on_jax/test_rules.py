"""The numbered rules, in JAX. The oracle is the same layer without remat, given the same decisions."""

import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import roundpipe_core
import roundpipe_jax
from roundpipe_core._phase import thread
from roundpipe_jax import (
    GradientError,
    MismatchError,
    PhaseError,
    SlotError,
    doing_recompute,
    get_recompute_data,
    layer_scope,
    recompute_once,
    record,
    remat,
    replay,
    save_for_recompute,
)

from .oracle import LANES, Router

X = jnp.array([[0.3, -1.2, 0.7], [1.5, 0.2, -0.4]])


def both_ways(f: Any) -> list[Any]:
    """A gradient step with values, and the same under jit."""
    return [jax.grad(f), jax.jit(jax.grad(f))]


def test_same_objects_as_the_core() -> None:  # R14
    for name in ("save_for_recompute", "doing_recompute", "get_recompute_data", "recompute_once", "layer_scope"):
        assert getattr(roundpipe_jax, name) is getattr(roundpipe_core, name)


@pytest.mark.parametrize("way", [0, 1])
def test_each_phase_runs_once_and_knows_itself(way: int) -> None:  # R1
    seen = []

    def layer(x: Any) -> Any:
        seen.append(doing_recompute())
        inside: list[bool] = []
        other = threading.Thread(target=lambda: inside.append(doing_recompute()))
        other.start()
        other.join()
        assert inside == [False]
        return jnp.sin(x).sum()

    both_ways(remat(layer))[way](X)
    assert seen == [False, True]
    assert doing_recompute() is False


def test_the_phase_is_restored_after_errors() -> None:  # R11
    def fails(where: bool) -> Any:
        @remat
        def layer(x: Any) -> Any:
            if doing_recompute() is where:
                raise KeyboardInterrupt
            return x.sum()

        return layer

    for where in (False, True):
        with pytest.raises(KeyboardInterrupt):
            jax.grad(fails(where))(X)
        assert thread.run is None


@pytest.mark.parametrize("way", [0, 1])
def test_saved_data_of_every_kind_comes_back(way: int) -> None:  # R2
    data = (jnp.arange(3), np.arange(2), 3, True, "moe", None, {"a": [jnp.ones(2)], "b": (1.5,)})

    @remat
    def layer(x: Any) -> Any:
        got = save_for_recompute(*data)
        if doing_recompute():
            assert isinstance(got, tuple)
            assert get_recompute_data()[2:6] == (3, True, "moe", None)
            assert type(got[2]) is int
            assert type(got[3]) is bool
            assert type(got[1]) is np.ndarray
            assert list(got[6]) == ["a", "b"]
            assert got[6]["b"] == (1.5,)
        return (x[:, :2] * got[6]["a"][0] * got[2]).sum()

    np.testing.assert_array_equal(both_ways(layer)[way](X), jnp.full_like(X, 3).at[:, 2].set(0))


def ignoring(router: Router, x: Any, site: int = 0) -> Any:
    index = router.decide(site, x)
    save_for_recompute(index)
    return jnp.sin(x) * index


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("way", [0, 1])
def test_a_layer_that_ignores_what_the_save_returns_decides_once(way: int, lane: Any) -> None:  # R2
    for sites in ([0], [0, 2]):
        router = Router()
        inner = remat(functools.partial(ignoring, router), mode=lane)
        outer = remat(lambda x: inner(x) + ignoring(router, x + 2, 2), mode=lane)  # noqa: B023
        layer = inner if len(sites) == 1 else outer
        slope = both_ways(lambda x: layer(x).sum())[way](X)  # noqa: B023
        expected = sum(jnp.cos(X + site) * (4 - site // 2) for site in sites)
        assert router.counts == dict.fromkeys(sites, 1)
        np.testing.assert_array_equal(slope, expected)


def test_a_replay_reads_the_tape_where_the_layer_ignores_what_the_save_returns() -> None:  # R2, R13
    router = Router()
    layer = remat(functools.partial(ignoring, router))
    with record() as tape:
        layer(X)
    with replay(tape):
        slope = jax.grad(lambda x: layer(x).sum())(X)
    np.testing.assert_array_equal(slope, jnp.cos(X) * 4)


@pytest.mark.parametrize("lane", LANES)
def test_the_values_of_a_saved_top_k_are_at_the_saved_indices(lane: Any) -> None:  # R10
    def scores(router: Router, x: Any) -> Any:
        noise = jnp.where(jnp.arange(3) == router.decide(0, x) % 3, 1e-3, 0.0)
        return jnp.ones_like(x) * (x - jax.lax.stop_gradient(x) + 1) + noise  # all alike, but for the noise

    def layer(router: Router, x: Any, returned: bool) -> Any:
        values, index = jax.lax.top_k(scores(router, x), 1)
        (again,) = save_for_recompute(index)
        return jnp.exp(values) * ((again if returned else index) + 1)

    for returned in (True, False):
        router = Router()
        slope = jax.grad(lambda x: remat(functools.partial(layer, router), mode=lane)(x, returned).sum())(X)  # noqa: B023
        assert router.counts[0] == 2  # the scores' noise is not saved, and chooses otherwise in the recompute
        np.testing.assert_array_equal(np.nonzero(slope), np.nonzero(jax.nn.one_hot([1, 1], 3)))


def stand_in(router: Router, x: Any) -> Any:
    index = jnp.argmax(jax.lax.stop_gradient(x[0])) if doing_recompute() else router.decide(0, x)
    (index,) = save_for_recompute(index)
    return jnp.sin(x) * index


def knowing(router: Router, x: Any) -> Any:
    doing_recompute()
    return ignoring(router, x)


def read_before(router: Router, x: Any) -> Any:
    index = router.saved("seed", 0, x)
    save_for_recompute(2 * index, name="of the saved")
    return jnp.sin(x) * index


@pytest.mark.parametrize("way", [0, 1])
def test_a_layer_that_knows_its_phase_uses_what_the_save_returns(way: int) -> None:  # R2, R10
    for layer in (stand_in, read_before):
        with jax.checking_leaks():
            slope = both_ways(lambda x, layer=layer: remat(functools.partial(layer, Router()))(x).sum())[way](X)
        np.testing.assert_array_equal(slope, jnp.cos(X) * 4)
    with pytest.raises(MismatchError, match="not what it gets for it") as caught:
        both_ways(lambda x: remat(functools.partial(knowing, Router()))(x).sum())[way](X)
    assert "test_rules.py:" in str(caught.value).partition("saved at")[2]


ALIASES: dict[str, Any] = {
    "barrier": lambda index: jax.lax.optimization_barrier((index, index))[1],
    "copy": jnp.copy,
    "device_put": jax.device_put,
    "jit": jax.jit(lambda index: index),
    "name": lambda index: checkpoint_name(index, "mine"),
    "stop_gradient": lambda index: jax.lax.stop_gradient(jnp.copy(index)),
}


def saves_alias(router: Router, alias: Any, x: Any) -> Any:
    index = router.decide(0, x)
    save_for_recompute(alias(index))
    return jnp.sin(x) * index


@pytest.mark.parametrize("alias", ALIASES)
def test_a_decision_that_is_saved_by_another_name_is_made_once(alias: str) -> None:  # R2, R8
    def early(router: Router, alias: Any, x: Any) -> Any:
        y = saves_alias(router, alias, x)
        return jax.lax.scan(lambda c, _: (c * save_for_recompute(jnp.int32(1), name="inside")[0], None), y, None, 1)[0]

    for layer in (saves_alias, early):
        for wrap in (remat, jax.checkpoint):
            router = Router()
            slope = jax.grad(lambda x: wrap(functools.partial(layer, router, ALIASES[alias]))(x).sum())(X)  # noqa: B023
            assert router.counts[0] == 1
            np.testing.assert_array_equal(slope, jnp.cos(X) * 4)


def narrowed(router: Router, x: Any) -> Any:
    index = router.decide(0, x)
    save_for_recompute(index.astype(jnp.int8))
    return jnp.sin(x) * index


def a_part(router: Router, x: Any) -> Any:
    index = router.decide(jnp.int32(0), x) + jnp.zeros(2, jnp.int32)
    save_for_recompute(index[:1])
    return jnp.sin(x) * index[1]


def a_float(router: Router, x: Any) -> Any:
    index = router.decide(0, x)
    (weight,) = save_for_recompute(index.astype(jnp.float32))
    return jnp.sin(x) * (index + weight - 4)


def in_another_function(router: Router, x: Any) -> Any:
    index = router.decide(0, x)
    jax.jit(lambda index: save_for_recompute((index > 2).astype(jnp.int8)))(index)
    return jnp.sin(x) * index


@pytest.mark.parametrize("form", [narrowed, a_part, a_float, in_another_function])
def test_other_peoples_checkpoints_decide_once_if_another_form_is_saved(form: Any) -> None:  # R8
    def scanned(layer: Any) -> Any:
        return remat(lambda x: jax.lax.scan(lambda x, _: (layer(x), None), x, None, 1)[0])

    for wrap in (jax.checkpoint, scanned):
        router = Router()
        step = jax.value_and_grad(lambda x: wrap(functools.partial(form, router))(x).sum())  # noqa: B023
        _, slope = jax.jit(step)(X)
        assert router.counts[0] == 1
        np.testing.assert_allclose(slope, jnp.cos(X) * 4, rtol=1e-6)


def guarded(router: Router, x: Any) -> Any:
    index = router.decide(0, x)
    if not doing_recompute():
        save_for_recompute(index)
    return jnp.sin(x) * index


@pytest.mark.parametrize("way", [0, 1])
def test_a_recompute_that_reads_nothing_of_what_was_saved(way: int) -> None:  # R10
    for layer in (narrowed, guarded):
        for wrap in (remat, lambda f: remat(lambda x: remat(f)(x))):
            with pytest.raises(MismatchError, match="the recompute reads nothing of it") as caught:
                both_ways(lambda x: wrap(functools.partial(layer, Router()))(x).sum())[way](X)  # noqa: B023
            assert "test_rules.py:" in str(caught.value).partition("saves the unnamed slot")[2]


def measured(router: Router, x: Any) -> Any:
    save_for_recompute(jax.lax.stop_gradient(x.mean()), name="for a log")
    return ignoring(router, x)


def only_measured(router: Router, x: Any) -> Any:
    if not doing_recompute():
        save_for_recompute(jax.lax.stop_gradient(x.mean()), name="for a log")
    return 4 * jnp.sin(x)


def test_what_is_saved_for_a_log_need_not_be_read() -> None:
    for layer in (measured, only_measured):
        slope = jax.grad(lambda x: remat(functools.partial(layer, Router()))(x).sum())(X)  # noqa: B023
        np.testing.assert_allclose(slope, jnp.cos(X) * 4, rtol=1e-6)


def test_outside_a_region_a_save_returns_its_arguments() -> None:  # R2
    assert save_for_recompute(1, "a") == (1, "a")
    seen = []
    remat(lambda x: seen.append(doing_recompute()) or x)(X)  # no gradient: no recompute is even traced
    assert seen == [False]


def test_get_anywhere_else_is_a_phase_error() -> None:  # R3
    with pytest.raises(PhaseError, match="outside a recompute"):
        get_recompute_data()
    with pytest.raises(AssertionError, match="in the forward"):
        jax.grad(remat(lambda x: get_recompute_data()[0]))(1.0)


@pytest.mark.parametrize("way", [0, 1])
def test_get_without_a_save_names_the_layer(way: int) -> None:  # R3
    @remat(label="experts")
    def layer(x: Any) -> Any:
        if doing_recompute():
            get_recompute_data()
        return x.sum()

    with pytest.raises(SlotError, match="layer 'experts', the unnamed slot: the forward saved nothing there"):
        both_ways(layer)[way](X)


def test_a_second_unnamed_save_shows_both_places() -> None:  # R4
    @remat
    def layer(x: Any) -> Any:
        save_for_recompute(1)
        save_for_recompute(2)
        return x.sum()

    with pytest.raises(SlotError, match="saved twice") as caught:
        jax.grad(layer)(X)
    assert str(caught.value).count("test_rules.py:") == 2 + str(caught.value).splitlines()[0].count("test_rules.py:")


@pytest.mark.parametrize("way", [0, 1])
def test_names_scopes_and_once(way: int) -> None:  # R4
    calls = []

    def decide(n: int) -> Any:
        calls.append(n)
        return jnp.arange(n)

    @remat
    def layer(x: Any) -> Any:
        a = recompute_once(decide, 2)
        b = recompute_once(decide, 3)
        with layer_scope("attention"):
            if doing_recompute():
                assert get_recompute_data("mask") == ("m",)
            else:
                save_for_recompute("m", name="mask")
            (c,) = save_for_recompute(7)
        (d,) = save_for_recompute(8)
        return (x[:, a] * b[1] * c * d).sum()

    np.testing.assert_array_equal(both_ways(layer)[way](X)[:, :2], jnp.full((2, 2), 56.0))
    assert calls == [2, 3]


SAVES = {
    "value": lambda x: save_for_recompute(x * 2),
    "name": lambda x: save_for_recompute({"w": x}, name="w"),
    "reduction": lambda x: save_for_recompute(x.mean()),
}


@pytest.mark.parametrize("what", SAVES)
@pytest.mark.parametrize("how", ["eager", "jit(grad)", "grad(jit)", "scan", "vmap", "jvp", "custom_vjp", "inner scan"])
def test_a_value_that_carries_a_tangent_cannot_be_saved(what: str, how: str) -> None:  # R5
    def layer(x: Any) -> Any:
        SAVES[what](x)
        return (x**2).sum()

    def in_scan(x: Any) -> Any:
        return jax.lax.scan(lambda c, x: (c + layer(x), None), 0.0, x)[0]

    ways = {
        "eager": lambda: jax.grad(remat(layer))(X),
        "jit(grad)": lambda: jax.jit(jax.grad(remat(layer)))(X),
        "grad(jit)": lambda: jax.grad(jax.jit(remat(layer)))(X),
        "scan": lambda: jax.grad(lambda x: jax.lax.scan(lambda c, x: (c + remat(layer)(x), None), 0.0, x)[0])(X),
        "vmap": lambda: jax.vmap(jax.grad(remat(layer)))(X),
        "jvp": lambda: jax.jvp(remat(layer), (X,), (X,)),
        "custom_vjp": lambda: jax.jit(jax.grad(remat(layer, mode="custom_vjp")))(X),
        "inner scan": lambda: jax.jit(jax.grad(remat(in_scan)))(X),
    }
    with pytest.raises(GradientError, match="a slot would cut its gradient"):
        ways[how]()


@pytest.mark.parametrize("way", [0, 1])
def test_a_float_without_tangent_can_be_saved(way: int) -> None:  # R5
    def layer(x: Any, table: Any) -> Any:
        sums, angles, plain = save_for_recompute(
            jax.lax.stop_gradient(x.sum()), jnp.sin(table), jnp.linspace(0.0, 1.0, 3)
        )
        return (x * angles * plain).sum() * sums

    f = lambda x: remat(layer)(x, jnp.arange(3.0))  # noqa: E731
    np.testing.assert_array_equal(both_ways(f)[way](X), jax.grad(layer)(X, jnp.arange(3.0)))


def test_a_value_that_depends_on_no_differentiated_input_can_be_saved() -> None:  # R5
    def layer(x: Any, y: Any) -> Any:
        (kept,) = save_for_recompute(jnp.exp(y))
        return (x * kept).sum()

    jax.jit(jax.grad(remat(layer)))(X, X)
    with pytest.raises(GradientError):
        jax.jit(jax.grad(remat(layer), 1))(X, X)


def test_no_gradient_no_error() -> None:  # R2, R5
    jax.jit(remat(lambda x: save_for_recompute(x)[0]))(X)


def test_containers_are_copied_and_what_get_returns_is_the_layers_own() -> None:  # R6
    @remat
    def layer(x: Any) -> Any:
        if doing_recompute():
            (sizes,) = get_recompute_data()
            assert sizes == [1, 2]
            sizes.append(3)
            assert get_recompute_data() == ([1, 2],)
        else:
            sizes = [1, 2]
            save_for_recompute(sizes)
            sizes.append(9)
        return x.sum()

    jax.grad(layer)(X)


@pytest.mark.parametrize("way", [0, 1])
def test_nested_regions_decide_once(way: int) -> None:  # R8
    decided = []

    def inner(x: Any, name: str) -> Any:
        if doing_recompute():
            (n,) = get_recompute_data()
        else:
            decided.append(name)
            n = len(decided)
            save_for_recompute(n)
        return jnp.sin(x) * n

    def middle(x: Any) -> Any:
        return remat(inner)(remat(inner)(x, "a"), "b")

    def outer(x: Any) -> Any:
        (scale,) = save_for_recompute(10 + len(decided))
        return (remat(middle)(x) * scale).sum()

    def oracle(x: Any) -> Any:
        return (jnp.sin(jnp.sin(x) * 1) * 2 * 10).sum()

    got = both_ways(remat(outer))[way](X)
    assert decided == ["a", "b"]
    np.testing.assert_allclose(got, jax.grad(oracle)(X), rtol=1e-6)


def test_nested_regions_keep_the_remat_inside() -> None:  # R8
    def inner(x: Any) -> Any:
        save_for_recompute(1)
        return jnp.sin(jnp.sin(x))

    program = jax.make_jaxpr(jax.grad(remat(lambda x: remat(inner)(remat(inner)(x)).sum())))(X)
    assert str(program).count("checkpoint[") + str(program).count("remat2[") >= 3


def test_every_call_has_its_own_slot() -> None:  # R9
    count = iter(range(1, 9))

    @remat
    def layer(x: Any) -> Any:
        n = recompute_once(next, count)
        return x * n

    one, pull_one = jax.vjp(lambda x: layer(layer(x)), 1.0)
    two, pull_two = jax.vjp(layer, 1.0)
    assert (one, two) == (2, 3)
    assert pull_two(1.0)[0] == 3  # out of order
    assert pull_one(1.0)[0] == 2
    assert pull_one(1.0)[0] == 2  # again


def test_nothing_is_kept_after_the_graph_is_dropped() -> None:  # R9
    def layer(x: Any) -> Any:
        (idx,) = save_for_recompute(jnp.arange(1003))
        return jnp.sin(x).sum() * idx.sum()

    _, pull = jax.vjp(remat(lambda x: layer(x)), X)
    jax.clear_caches()
    assert any(array.shape == (1003,) for array in jax.live_arrays())
    del pull
    assert not any(array.shape == (1003,) for array in jax.live_arrays())


@pytest.mark.parametrize("lane", LANES)
def test_a_trace_that_is_kept_keeps_nothing_of_the_call_that_made_it(lane: Any) -> None:  # R9
    @functools.partial(remat, mode=lane)
    def layer(x: Any) -> Any:
        (idx,) = save_for_recompute(jnp.argsort(jax.lax.stop_gradient(x)))
        return jnp.sin(x)[idx]

    jax.grad(lambda x: layer(x).sum())(jnp.arange(1013.0))
    assert not any(array.shape == (1013,) for array in jax.live_arrays())
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda x: layer(x).sum()))(jnp.arange(1019.0))


def test_randomness_is_explicit_and_lines_up() -> None:  # R7
    def layer(x: Any, key: Any) -> Any:
        one, two = jax.random.split(key)
        (noise,) = save_for_recompute(jax.random.normal(one, x.shape))
        return (jnp.sin(x) * noise * jax.random.bernoulli(two, 0.5, x.shape)).sum()

    key = jax.random.key(1)
    np.testing.assert_allclose(jax.grad(remat(layer))(X, key), jax.grad(layer)(X, key), rtol=1e-6)


@pytest.mark.parametrize("mode", ["checkpoint", "custom_vjp"])
def test_a_decision_in_the_arguments_of_a_save_runs_once_in_eager_mode_too(mode: Any) -> None:  # R8
    calls = []

    def decide(x: Any) -> Any:
        calls.append(1)
        return np.int32(len(calls))

    def layer(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct((), jnp.int32)
        (n,) = save_for_recompute(jax.pure_callback(decide, shape, jax.lax.stop_gradient(x)))
        return jnp.sin(x).sum() * n

    jax.block_until_ready(jax.grad(remat(layer, mode=mode))(X))
    assert calls == [1]


def test_remat_in_the_place_of_jax_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    # for a library that calls jax.checkpoint and cannot be edited
    def layer(x: Any) -> Any:
        chosen = recompute_once(lambda: jax.lax.top_k(jax.lax.stop_gradient(x), 2)[1])
        return jnp.take_along_axis(jnp.exp(x), chosen, axis=1)

    def librarys(x: Any) -> Any:
        return jax.checkpoint(lambda x: jax.checkpoint(layer)(x))(jax.checkpoint(jnp.cos)(x)).sum()

    expected = jax.grad(librarys)(X)
    monkeypatch.setattr(jax, "checkpoint", remat)
    for gradient in both_ways(librarys):
        np.testing.assert_allclose(gradient(X), expected, rtol=1e-5)
