"""What a compiled graph cannot do: a named error under fullgraph=True; without, the graph is split and it is right."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.utils.checkpoint import checkpoint as torchs

from roundpipe_torch import (
    CompileError,
    GradientError,
    OptionError,
    PhaseError,
    RoundPipeError,
    SlotError,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    recompute_contexts,
    recompute_once,
    record,
    remat,
    replay,
    save_for_recompute,
)
from roundpipe_torch._decided import decided
from tests.on_torch.compiled import STYLES, D, agrees, branch, compiles, decide, experts, leaf, made, once, step_of

pytestmark = compiles
HERE = __file__


def whole(function: Any, backend: Any = "aot_eager") -> Any:
    return torch.compile(function, backend=backend, fullgraph=True)


def in_parts(function: Any, backend: Any = "aot_eager") -> Any:
    return torch.compile(function, backend=backend)


@pytest.mark.parametrize("layer", STYLES)
def test_a_whole_graph_inside_a_region(layer: Any) -> None:
    with pytest.raises(CompileError) as caught:
        checkpoint(whole(layer), leaf(5, D))

    assert isinstance(caught.value, RuntimeError)
    lines = str(caught.value).splitlines()
    asked = {"branch": "doing_recompute()", "returned": "save_for_recompute()", "once": "recompute_once()"}
    assert lines[0].startswith(
        f"{asked[layer.__name__]} is traced inside a region, or under a tape, that is not part of"
    )
    assert lines[1].startswith("  at: ")
    assert "compiled.py:" in lines[1]
    assert lines[2].startswith("  way out: compile without fullgraph=True")


def test_a_whole_graph_with_a_region_inside_a_region_or_under_a_tape() -> None:
    step = whole(lambda x: checkpoint(once, x))
    step(leaf(5, D))

    with pytest.raises(CompileError, match="a checkpointed layer is traced inside a region"):
        checkpoint(step, leaf(5, D))
    with record(), pytest.raises(CompileError, match="under a tape"):
        step(leaf(5, D))


def test_a_graph_of_a_new_thread_sees_a_tape_of_later() -> None:  # the phase of a thread that never had one
    step = in_parts(lambda x: checkpoint(branch, x))
    found: list[Any] = []

    def run() -> None:
        made.clear()
        step(leaf(5, D))
        with record() as tape:
            recorded = step(leaf(5, D))
        with replay(tape):
            replayed = step(leaf(5, D))
        found.extend((len(made), torch.equal(recorded, replayed)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert found == [2, True]


def twice(x: torch.Tensor) -> torch.Tensor:
    (idx,) = save_for_recompute(decide(x))
    save_for_recompute(idx)
    return experts(x, idx)


def with_gradient(x: torch.Tensor) -> torch.Tensor:
    save_for_recompute({"a": [decide(x), x * 2]})
    return x


def once_with_gradient(x: torch.Tensor) -> torch.Tensor:
    return recompute_once(lambda y: y, x)


def reads(x: torch.Tensor) -> torch.Tensor:
    return x + get_recompute_data()[0]


def misnamed(x: torch.Tensor) -> torch.Tensor:
    save_for_recompute(decide(x), name=3)  # type: ignore[arg-type]
    return x


@pytest.mark.parametrize(
    ("layer", "kind", "text"),
    [
        (twice, SlotError, "the unnamed slot: saved twice in one forward."),
        (with_gradient, GradientError, "the unnamed slot: data[0]['a'][1] requires grad"),
        (once_with_gradient, GradientError, "recompute_once: data[0] requires grad"),
        (reads, PhaseError, "get_recompute_data() was called in the forward."),
        (misnamed, OptionError, "name must be a string, not 3."),
    ],
)
@pytest.mark.parametrize("compiled", [whole, in_parts])
def test_mistakes_have_their_own_errors(layer: Any, kind: type[Exception], text: str, compiled: Any) -> None:
    with pytest.raises(kind) as caught:
        compiled(lambda x: checkpoint(layer, x))(leaf(5, D))

    assert isinstance(caught.value, RoundPipeError)
    if compiled is whole:
        assert text in str(caught.value).splitlines()[0]
    assert f"{HERE}:" in str(caught.value)


class Handle:
    def __init__(self, idx: torch.Tensor) -> None:
        self.idx = idx


def opaque(x: torch.Tensor) -> torch.Tensor:
    (handle,) = save_for_recompute(Handle(decide(x)))
    return experts(x, handle.idx)


def arrays(x: torch.Tensor) -> torch.Tensor:
    (idx,) = save_for_recompute(decide(x).numpy())
    return experts(x, torch.from_numpy(idx))


@pytest.mark.parametrize(("layer", "kind"), [(opaque, "Handle"), (arrays, "ndarray")])
def test_data_that_cannot_be_followed_into(layer: Any, kind: str) -> None:
    with pytest.raises(CompileError, match=rf"data\[0\] is {kind}, which cannot be followed into"):
        whole(lambda x: checkpoint(layer, x))(leaf(5, D))

    agrees(in_parts(lambda x: checkpoint(layer, x)), layer, 5, decisions=2)


def test_a_decision_inside_an_operator_that_is_kept_whole() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        def yes(x: torch.Tensor) -> torch.Tensor:
            return x * save_for_recompute(x.detach().argmax(-1, keepdim=True))[0]

        return torch.cond(x.sum() > 0, yes, torch.clone, (x,))

    with pytest.raises(CompileError, match=r"makes a decision inside .*cond"):
        whole(lambda x: checkpoint(layer, x))(leaf(5, D))
    with pytest.raises(RuntimeError, match="of a function given to scan, map or cond, save in front of that call"):
        checkpoint(layer, leaf(5, D).abs())  # not compiled: torch compiles the branches


@pytest.mark.parametrize("how", ["warn", "raise"])
def test_verify_runs_between_the_parts_of_a_graph(how: str) -> None:
    with pytest.raises(CompileError, match=f"the option verify='{how}' cannot be honoured in a compiled graph"):
        whole(remat(once, verify=how))(leaf(5, D))

    def repeats(x: torch.Tensor) -> torch.Tensor:
        return experts(x, recompute_once(lambda: x.argmax(-1, keepdim=True)))

    got, want = step_of(in_parts(remat(repeats, verify=how)), leaf(5, D)), step_of(repeats, leaf(5, D))
    assert all(torch.equal(ours, oracles) for ours, oracles in zip(got, want, strict=True))


def test_a_wrong_option() -> None:
    with pytest.raises(OptionError, match="determinism_check must be one of 'default', 'none'"):
        whole(lambda x: checkpoint(once, x, determinism_check="sometimes"))(leaf(5, D))


def test_a_backend_without_a_backward() -> None:
    with pytest.raises(CompileError, match="the backend 'eager' only traces the forward"):
        whole(lambda x: checkpoint(branch, x), "eager")(leaf(5, D))

    agrees(in_parts(lambda x: checkpoint(branch, x), "eager"), branch, 5)
    with pytest.raises(CompileError, match="traced for a backend that does not compile the backward"):
        whole(lambda x: checkpoint(branch, x), lambda graph, inputs: graph)(leaf(5, D))
    with pytest.raises(CompileError, match="traced for a backend that does not compile the backward"):
        whole(lambda x: torchs(branch, x, use_reentrant=False, context_fn=recompute_contexts), "eager")(leaf(5, D))


def test_an_exception_of_the_layer() -> None:  # R11
    def fails(x: torch.Tensor) -> torch.Tensor:
        save_for_recompute(decide(x))
        raise KeyError("the layer's own")

    with pytest.raises(KeyError, match="the layer's own"):
        in_parts(lambda x: checkpoint(fails, x))(leaf(5, D))

    def catches(x: torch.Tensor) -> torch.Tensor:
        (idx,) = save_for_recompute(decide(x))
        try:
            raise KeyError
        except KeyError:
            return experts(x, idx)

    agrees(whole(lambda x: checkpoint(catches, x)), catches, 5)
    assert not doing_recompute()


def test_draws_in_a_crowd_are_seen_in_compiled_layers_too() -> None:
    layer = in_parts(lambda x: torch.nn.functional.dropout((x @ x.T).tanh(), 0.5))
    layer(leaf(D, D))
    barrier, errors = threading.Barrier(2), []

    def waiting(x: torch.Tensor) -> torch.Tensor:
        barrier.wait(30)
        return layer(x)

    def run() -> None:
        with pytest.raises(RoundPipeError, match="draws random numbers while another thread is inside") as caught:
            checkpoint(waiting, leaf(D, D)).sum().backward()
        errors.append(caught)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(errors) == 2


def test_the_operator_itself_is_nothing_to_run() -> None:
    with torch.no_grad():
        assert decided([torch.ones(1)], [1]) is None
    with pytest.raises(CompileError):
        decided([torch.ones(1)], [1])
