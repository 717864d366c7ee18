"""Buffers that other code changes between a layer's forward and its recompute. Oracle: the layer as it was, without."""

import contextlib
import inspect

import pytest
import torch

from roundpipe_core import MutationError
from roundpipe_torch import checkpoint, doing_recompute, get_recompute_data, recompute_once, save_for_recompute

SMALL, LARGE = 4, 1 << 17
engines = pytest.mark.parametrize("use_reentrant", [False, True])


def asks(x):
    if doing_recompute():
        return get_recompute_data()
    return save_for_recompute(x.detach().argmax())


WAYS = {
    "nothing": lambda x: None,
    "save": lambda x: save_for_recompute(x.detach().argmax()),
    "once": lambda x: recompute_once(lambda: x.detach().argmax()),
    "asks": asks,
}


class Scaled(torch.nn.Module):
    def __init__(self, size, decide):
        super().__init__()
        self.register_buffer("scale", torch.full((size,), 0.5))
        self.decide = decide

    def forward(self, x):
        self.decide(x)
        return (x * self.scale).exp()


def written(module):
    module.scale.mul_(2)


def replaced(module):
    module.scale = module.scale * 2


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(n for n, line in enumerate(lines) if text in line)


def step(module, change, use_reentrant=False, layer=None):
    """The gradient of a forward, with a change before its backward; and the one that it should have."""
    x = torch.ones_like(module.scale, requires_grad=True)
    expected = (module.scale * module.scale.exp()).clone()
    y = checkpoint(layer or module, x, use_reentrant=use_reentrant)
    change(module)
    now = module.scale
    try:
        y.sum().backward()
    finally:
        assert module.scale is now
    return x.grad, expected


@engines
@pytest.mark.parametrize("change", [written, replaced])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_the_recompute_reads_what_the_forward_read(size, way, change, use_reentrant) -> None:
    module = Scaled(size, WAYS[way])
    for _ in range(2 if (size, change) != (LARGE, written) else 1):
        torch.testing.assert_close(*step(module, change, use_reentrant), rtol=0, atol=0)


@engines
def test_several_forwards_of_a_layer_that_asks_and_one_change_after_each(use_reentrant) -> None:
    module = Scaled(SMALL, asks)
    steps = []
    for n in range(3):
        x = torch.ones(SMALL, requires_grad=True)
        steps.append((x, checkpoint(module, x, use_reentrant=use_reentrant), module.scale * module.scale.exp()))
        module.scale.add_(n)
    for n in (1, 2, 0):
        x, y, expected = steps[n]
        y.sum().backward()
        torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)


@engines
@pytest.mark.parametrize("catches", [False, True])
def test_a_large_buffer_that_is_gone_is_told_once_and_kept_from_then_on(catches, use_reentrant) -> None:
    module = Scaled(LARGE, WAYS["nothing"])

    def layer(x, module=module):
        with contextlib.suppress(Exception) if catches else contextlib.nullcontext():
            return module(x)
        return x * 0

    step(module, lambda module: None, use_reentrant, layer)  # a first forward copies it: it is not known yet

    with pytest.raises(MutationError) as told:
        step(module, written, use_reentrant, layer)
    layer_named, text = str(told.value).split("': ", 1)
    assert layer.__qualname__ in layer_named
    assert text == (
        "buffer 'scale' of Scaled was changed after the forward, and the recompute "
        "reads it. It is too large to be copied in each forward, so its old values are gone.\n"
        f"  read at: {__file__}:{line_of(Scaled.forward, 'exp')}\n"
        "  way out: change it after backward; or go on, for from the next forward on this one is copied; or pass it to "
        "the layer as an argument."
    )

    for change in (written, replaced, lambda module: None):
        torch.testing.assert_close(*step(module, change, use_reentrant, layer), rtol=0, atol=0)


@engines
def test_a_large_buffer_that_the_layer_does_not_read_may_change(use_reentrant) -> None:
    module = Scaled(LARGE, WAYS["nothing"])
    for _ in range(3):
        x = torch.ones(3, requires_grad=True)
        y = checkpoint(lambda x, module=module: x.exp() * len(module.scale), x, use_reentrant=use_reentrant)
        module.scale.add_(1)
        y.sum().backward()
        torch.testing.assert_close(x.grad, torch.ones(3).exp() * LARGE)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_another_sparse_buffer_is_not_taken_for_the_one_that_is_gone() -> None:
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            places = torch.arange(2 * LARGE).view(2, -1) % 4
            for name in ("seen", "mask"):
                self.register_buffer(name, torch.sparse_coo_tensor(places, torch.ones(LARGE)))

        def forward(self, x):
            return torch.sparse.mm(self.mask, x).sin()

    module, x = Masked(), torch.ones(4, 2, requires_grad=True)
    checkpoint(module, x).sum().backward()  # a first forward copies them
    y = checkpoint(module, x)
    module.seen.mul_(2)
    y.sum().backward()
    plain = x.detach().requires_grad_()
    module(plain).sum().backward()
    assert torch.equal(x.grad, 2 * plain.grad)
