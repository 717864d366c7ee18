"""R1, R2, R5, R6, R11 with tensors and real backwards."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest
import torch

from roundpipe_torch import (
    CheckpointMismatchError,
    GradientError,
    MutationError,
    SlotError,
    _inputs,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    layer_scope,
    recompute_once,
    record,
    remat,
    replay,
    save_for_recompute,
)
from tests.said import said


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, requires_grad=True)


# R1


def test_the_phase_is_true_in_the_recompute_only() -> None:
    seen = []

    def layer(x):
        seen.append(doing_recompute())
        return x.exp()

    x = ones(2)
    y = checkpoint(layer, x)
    seen.append(doing_recompute())
    y.register_hook(lambda grad: seen.append(doing_recompute()))
    x.register_hook(lambda grad: seen.append(doing_recompute()))
    y.sum().backward()
    with torch.no_grad():
        checkpoint(layer, x)
    layer(x)
    assert seen == [False, False, False, True, False, False, False]


def test_the_phase_belongs_to_the_thread_that_recomputes() -> None:
    entered, leave, seen = threading.Event(), threading.Event(), {}

    def layer(x):
        if doing_recompute():
            entered.set()
            leave.wait(10)
        return x.exp()

    y = checkpoint(layer, ones(2)).sum()
    worker = threading.Thread(target=y.backward)
    worker.start()
    assert entered.wait(10)
    seen["main"] = doing_recompute()
    leave.set()
    worker.join()
    assert seen == {"main": False}


def test_backward_inside_a_forward_shows_each_its_phase() -> None:
    seen = []

    def inner(x):
        seen.append(("inner", doing_recompute()))
        return x.exp()

    pending = checkpoint(inner, ones(2)).sum()

    def outer(x):
        if not doing_recompute():
            pending.backward()
        seen.append(("outer", doing_recompute()))
        return x.exp()

    checkpoint(outer, ones(2)).sum().backward()
    assert seen == [("inner", False), ("inner", True), ("outer", False), ("outer", True)]


# R2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_with_gradients_off_nothing_is_stored_or_checked(mode) -> None:
    w = ones(2)

    def layer(x):
        assert save_for_recompute(w)[0] is w  # twice, and carrying gradient: nobody will read it
        save_for_recompute(w)
        return x * w

    with mode():
        checkpoint(layer, torch.ones(2))


def test_a_save_under_no_grad_inside_a_layer_that_trains_is_stored() -> None:
    def layer(x):
        with torch.no_grad():
            if doing_recompute():
                (index,) = get_recompute_data()
            else:
                index = (x * 2).argmax(-1, keepdim=True)
                save_for_recompute(index)
        return x.exp().gather(1, index)

    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    checkpoint(layer, x).sum().backward()
    assert x.grad[0, 0] == 0


def test_everything_comes_back_as_it_was() -> None:
    values = (
        torch.arange(3),
        torch.tensor(True),
        torch.zeros(0, 4, dtype=torch.float16),
        torch.randn(2, 3).t(),
        torch.tensor([1 + 2j]),
        torch.tensor([1.0, float("nan")]),
        np.arange(4, dtype=np.int8),
        None,
        3,
        2.5,
        "x",
        [torch.ones(1), (torch.zeros(2),)],
        {"a": torch.ones(2), "b": None},
        torch.randn(4, 2).topk(1),
        torch.Size([1, 2]),
    )
    seen = []

    def layer(x):
        seen.append(save_for_recompute(*values) if not doing_recompute() else get_recompute_data())
        return x.exp()

    checkpoint(layer, ones(2)).sum().backward()
    forward, again = seen
    assert forward == values

    def check(one, other):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            assert torch.equal(one.nan_to_num(), other.nan_to_num())
            assert one.data_ptr() != other.data_ptr() or one.numel() == 0
        elif isinstance(one, np.ndarray):
            assert one.dtype == other.dtype
            assert (one == other).all()
        elif isinstance(one, (tuple, list)):
            assert len(one) == len(other)
            for a, b in zip(one, other, strict=True):
                check(a, b)
        elif isinstance(one, dict):
            assert list(one) == list(other)
            for key in one:
                check(one[key], other[key])
        else:
            assert one == other

    check(forward, again)


def test_once_is_without_gradient_wherever_it_runs() -> None:
    def layer(x):
        (top,) = (recompute_once(lambda: (x * 2,)),)
        assert top[0].requires_grad is False
        return x.exp() * top[0]

    x = ones(2)
    layer(x)
    checkpoint(layer, x).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach().exp())


# R5


def saved_gradient(data, use_reentrant: bool):
    def layer(x):
        p = torch.softmax(x, -1)
        save_for_recompute(*data(p))
        return p

    checkpoint(layer, ones(2, 2), use_reentrant=use_reentrant).sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    ("place", "data"),
    [
        ("[0]", lambda p: (p,)),
        ("[1]", lambda p: (p.argmax(-1), p)),
        ("[0]['p']", lambda p: ({"idx": 1, "p": p},)),
        ("[0][1][0]", lambda p: ([0, (p,)],)),
    ],
)
def test_a_saved_gradient_is_refused_at_the_save(place, data, use_reentrant) -> None:
    with pytest.raises(GradientError) as caught:
        saved_gradient(data, use_reentrant)
    text = str(caught.value).splitlines()
    assert text[0].startswith("layer 'saved_gradient.<locals>.layer (")
    assert text[0].endswith(f")', the unnamed slot: data{place} requires grad; a slot would cut its gradient.")
    assert text[1] == f"  saved at: {__file__}:{saved_gradient.__code__.co_firstlineno + 3}"
    assert text[2] == (
        "  way out: save what decides (indices, a mask, a branch), or its .detach() and compute the differentiable "
        "part from it in both phases."
    )
    assert isinstance(caught.value, ValueError)
    assert doing_recompute() is False


def test_a_parameter_is_a_gradient_too_and_a_frozen_one_is_not() -> None:
    with pytest.raises(GradientError, match=r"data\[0\] requires grad"):
        checkpoint(lambda x, w: (save_for_recompute(w), x * w)[1], ones(2), torch.nn.Parameter(torch.ones(2)))
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    checkpoint(lambda x: save_for_recompute(frozen)[0] * x.exp(), ones(2)).sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_object_whose_tensors_have_a_graph_is_refused(use_reentrant) -> None:
    """It would never be freed: the graph holds the region, whose slot holds the object."""
    saved = []

    def layer(x, detached):
        logits = x.detach() if detached else x * 2
        saved.append(torch.distributions.Categorical(logits=logits))
        (choice,) = save_for_recompute(saved[-1])
        return x * choice.probs.detach()

    with pytest.raises(GradientError) as caught:
        checkpoint(layer, ones(2), False, use_reentrant=use_reentrant)
    text = str(caught.value).splitlines()
    assert text[0].endswith(
        ": data[0].logits, of an object that is saved, requires grad; a slot would cut its gradient."
    )
    assert text[1] == f"  saved at: {__file__}:{layer.__code__.co_firstlineno + 3}"
    assert "an object that is made of detached tensors" in text[2]
    checkpoint(layer, ones(2), True, use_reentrant=use_reentrant).sum().backward()
    weights = torch.nn.Linear(2, 2)  # a leaf leads nowhere
    weights.held = Held(weights.weight)
    checkpoint(lambda x: (save_for_recompute(weights, weights.held), x.sin())[1], ones(2)).sum().backward()


class Held:
    def __init__(self, weight):
        self.weight = weight


# R6


CHANGES = {
    "in place": lambda t: t.add_(1),
    "through a view": lambda t: t[0].add_(1),
    "through numpy": lambda t: np.add(t.numpy(), 1, out=t.numpy()),
    "through dlpack": lambda t: torch.from_dlpack(t).add_(1),
    "through .data": lambda t: t.data.add_(1),
    "its storage": lambda t: t.untyped_storage().fill_(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_saved_tensor_that_changes_later_is_still_what_was_saved(change) -> None:
    def layer(x):
        if doing_recompute():
            (index,) = get_recompute_data()
        else:
            index = torch.zeros(2, 1, dtype=torch.int64)
            save_for_recompute(index)
            index = index.clone() if change == "none" else index
            kept.append(index)
        return x.exp().gather(1, index.clone())

    kept: list[torch.Tensor] = []
    x = ones(2, 2)
    y = checkpoint(layer, x)
    CHANGES[change](kept[0])
    y.sum().backward()
    assert x.grad[:, 1].abs().max() == 0


def test_a_numpy_backed_tensor_is_copied() -> None:
    array = np.zeros((2, 1), dtype=np.int64)
    x = ones(2, 2)
    y = checkpoint(lambda x: x.exp().gather(1, save_for_recompute(torch.from_numpy(array))[0]), x)
    array[:] = 1
    y.sum().backward()
    assert x.grad[:, 1].abs().max() == 0


SQUARE = torch.arange(900).reshape(30, 30)
LAYOUTS = {
    "whole": SQUARE,
    "transposed": SQUARE.t(),
    "columns": SQUARE[:, :3],
    "steps": SQUARE[::2, ::3],
    "diagonal": SQUARE.diagonal(),
    "expanded": SQUARE[:, :1].expand(30, 4),
    "expanded rows": SQUARE[:1].expand(4, 30),
    "overlapping": torch.arange(9).unfold(0, 3, 1),
    "channels last": torch.rand(2, 5, 3, 3).contiguous(memory_format=torch.channels_last)[:, :2],
    "one row": SQUARE[:1, :3],
    "none": SQUARE[:0, :3],
    "scalar": torch.tensor(3),
    "conjugated": torch.ones(4, 4, dtype=torch.complex64)[:, :2].conj(),
}


@pytest.mark.parametrize("data", LAYOUTS.values(), ids=LAYOUTS)
def test_a_decision_comes_back_as_it_lay_in_memory(data) -> None:
    """What compiled code is compiled for, and in which order a sum is taken."""
    seen = []

    def layer(x):
        seen.append(save_for_recompute(data)[0])
        return x.exp()

    checkpoint(layer, torch.ones(1, requires_grad=True)).sum().backward()
    first, again = seen
    assert first is data
    assert again is not data
    assert torch.equal(first, again)
    assert first.stride() == again.stride()


def test_a_decision_that_lay_too_widely_comes_back_dense() -> None:
    diagonal, seen = torch.eye(300).diagonal(), []

    def layer(x):
        seen.append(save_for_recompute(diagonal)[0])
        return x.exp()

    checkpoint(layer, torch.ones(1, requires_grad=True)).sum().backward()
    assert torch.equal(*seen)
    assert seen[1].untyped_storage().nbytes() == diagonal.nbytes


def test_what_get_returns_can_be_changed_without_spoiling_the_next_recompute() -> None:
    def layer(x):
        (index,) = save_for_recompute(torch.zeros(2, 1, dtype=torch.int64))
        if doing_recompute():
            twice = get_recompute_data()[0]
            assert twice.sum() == 0
            twice.add_(1)
        y = x.exp().gather(1, index.clone())
        index.add_(1)
        return y

    x = ones(2, 2)
    y = checkpoint(layer, x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert x.grad[:, 1].abs().max() == 0


def test_an_inference_tensor_can_be_saved() -> None:
    with torch.inference_mode():
        index = torch.zeros(2, 1, dtype=torch.int64)
    x = ones(2, 2)
    checkpoint(lambda x: x.exp().gather(1, save_for_recompute(index)[0].clone()), x).sum().backward()
    assert x.grad[:, 1].abs().max() == 0


# R4


def test_scopes_name_the_layers_of_a_region() -> None:
    def layer(x):
        for name in ("attention", "moe"):
            with layer_scope(name):
                (index,) = save_for_recompute(x.detach().argmax(-1, keepdim=True))
            x = x.exp().gather(1, index) * torch.ones(2)
        return x

    x = torch.tensor([[1.0, 0.5]], requires_grad=True)
    checkpoint(layer, x).sum().backward()
    with pytest.raises(SlotError, match="slot 'a' in scope 'attention': saved twice"), layer_scope("outside"):
        checkpoint(remat(twice), x)


def twice(x):
    with layer_scope("attention"):
        save_for_recompute(1, name="a")
        save_for_recompute(1, name="a")
    return x


# R11


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("phase", ["forward", "recompute"])
def test_an_exception_leaves_nothing_behind_and_the_next_step_is_right(phase, kind, use_reentrant) -> None:
    fail = [True]

    def layer(x):
        (index,) = save_for_recompute(x.detach().argmax(-1, keepdim=True))
        if fail and doing_recompute() is (phase == "recompute"):
            fail.clear()
            raise kind("pretended")
        return x.exp().gather(1, index)

    def step():
        x = torch.tensor([[1.0, 2.0]], requires_grad=True)
        y = checkpoint(lambda x: checkpoint(layer, x).sin(), x, use_reentrant=use_reentrant)
        y.sum().backward()
        return x.grad

    with pytest.raises(kind):
        step()
    assert doing_recompute() is False
    state = torch.get_rng_state()
    assert step()[0, 0] == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_failed_recompute_can_be_tried_again() -> None:
    fail = [True]

    def layer(x):
        if doing_recompute() and fail:
            fail.clear()
            raise MemoryError("pretended")
        return x.exp()

    x = ones(2)
    y = checkpoint(layer, x)
    with pytest.raises(MemoryError):
        y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_a_layer_that_swallows_everything_does_not_keep_the_stop() -> None:
    after = []

    def layer(x):
        y = x.exp()
        try:
            z = y.sin()
        except BaseException:
            after.append(doing_recompute())
            z = y * 0
        return z

    x = ones(2)
    checkpoint(layer, x).sum().backward()
    assert after in ([], [True])
    assert torch.equal(x.grad, x.detach().exp().cos() * x.detach().exp())


class Ragged:
    """A container that torch's own trees know."""

    def __init__(self, parts, length):
        self.parts, self.length = parts, length


def test_containers_that_torch_knows_are_taken_apart():  # R2, R5, R6
    torch.utils._pytree.register_pytree_node(
        Ragged, lambda r: (r.parts, r.length), lambda parts, length: Ragged(list(parts), length)
    )
    try:
        given = Ragged([torch.arange(3), "a"], 7)
        seen = []

        def layer(x):
            (plan,) = save_for_recompute(given)
            seen.append(plan)
            return x[plan.parts[0]].exp()

        x = torch.ones(3, requires_grad=True)
        y = checkpoint(layer, x)
        given.parts[0].zero_()  # R6
        y.sum().backward()
        assert (seen[1].length, seen[1].parts[1], seen[1].parts[0].tolist()) == (7, "a", [0, 1, 2])
        with pytest.raises(GradientError, match=r"data\[0\]\[0\] requires grad"):
            checkpoint(lambda x: save_for_recompute(Ragged([x], 1)), x)
    finally:
        torch.utils._pytree.SUPPORTED_NODES.pop(Ragged)


def test_inputs_kept_by_a_node_as_in_torch_before_saved_tensors(monkeypatch):
    """The second way to keep inputs: their versions are checked, and they go when their region goes."""
    monkeypatch.setattr(_inputs, "SavedTensor", _inputs._KeptByNode)
    monkeypatch.setattr(_inputs, "save_tensor", _inputs._KeptByNode)
    x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)

    def layer(x, w):
        return (x @ w).exp()

    want = torch.autograd.grad(layer(x, w).sum(), x)
    assert torch.equal(torch.autograd.grad(checkpoint(layer, x, w).sum(), x)[0], want[0])
    kept = weakref.ref(own := torch.randn(3, 3))
    y = checkpoint(layer, x, own)
    del own
    assert kept() is not None
    del y
    assert kept() is None
    y = checkpoint(layer, x, w)
    w.add_(1)
    with pytest.raises(MutationError, match="input was changed in place"):
        y.sum().backward()


# R10


class Moving:
    """Decides otherwise in each run. The ways of saving that let a recompute go on with its own decision."""

    def __init__(self, way: str) -> None:
        self.way, self.runs = way, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        rows = torch.arange(2) + self.runs
        if self.way == "guarded":
            if not doing_recompute():
                save_for_recompute(rows)
        else:
            save_for_recompute(rows, name="rows")
        return x[rows].exp()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recompute_that_reads_nothing_of_what_was_saved_is_an_error(use_reentrant) -> None:
    y = remat(Moving("guarded"), label="guarded", use_reentrant=use_reentrant)(ones(4, 2))
    with pytest.raises(CheckpointMismatchError) as caught:
        y.sum().backward()
    assert said(caught.value, __file__, "saves the unnamed slot") == [
        "layer 'guarded': the forward saves, and the recompute reads nothing of it. What it goes on with it has "
        "decided again.",
        "  way out: go on with what save_for_recompute returns, in both phases, (data,) = save_for_recompute(data), or "
        "read it in the recompute, (data,) = get_recompute_data().",
    ]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_save_whose_result_is_dropped_is_an_error_where_the_recompute_decides_otherwise(use_reentrant) -> None:
    y = remat(Moving("dropped"), label="dropped", use_reentrant=use_reentrant)(ones(4, 2))
    with pytest.raises(CheckpointMismatchError) as caught:
        y.sum().backward()
    assert said(caught.value, __file__, "saved again at") == [
        "layer 'dropped', slot 'rows': item [0] is decided otherwise now, and what save_for_recompute returns "
        "is not used.",
        "  way out: go on with what it returns: (data,) = save_for_recompute(data).",
    ]


def test_a_replay_is_not_ignored_by_a_save_whose_result_is_dropped() -> None:
    layer = remat(Moving("dropped"), label="dropped")
    with torch.no_grad(), record() as tape:
        layer(ones(4, 2))
    with pytest.raises(CheckpointMismatchError, match="is not used"), replay(tape):
        layer(ones(4, 2))


def test_results_may_be_dropped_that_agree_or_are_read_later_or_are_no_decision() -> None:
    def layer(x):
        rows = torch.arange(2) + (2 if doing_recompute() else 0)
        save_for_recompute(torch.arange(3), name="agrees")
        save_for_recompute(x.detach() + rows.sum(), name="scores")
        save_for_recompute(rows)
        if doing_recompute():
            (rows,) = get_recompute_data()
        return x[rows].exp()

    x = ones(4, 2)
    remat(layer)(x).sum().backward()
    assert x.grad is not None
    assert x.grad[:, 0].nonzero().flatten().tolist() == [0, 1]


@pytest.mark.parametrize("offload", [False, True])
def test_what_is_saved_for_a_log_need_not_be_read(offload) -> None:
    def layer(x):
        if not doing_recompute():
            save_for_recompute(x.detach().mean(), 0.5, offload=offload)
        return x.exp().exp()

    remat(layer)(ones(4)).sum().backward()


def test_a_save_that_nothing_in_backward_depends_on_need_not_be_read() -> None:
    def layer(x):
        y = x.exp()
        if not doing_recompute():
            save_for_recompute(3)  # for a tape
        return y

    remat(layer)(ones(4)).sum().backward()
