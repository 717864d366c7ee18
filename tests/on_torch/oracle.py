"""The oracle of these tests: one scenario, run with and without checkpointing.

A scenario takes the function to checkpoint with (`plain` does not) and returns everything that must agree:
gradients, outputs, buffers, numbers of decisions. Decisions come from private generators that no checkpoint
knows, so a recompute that decides again decides otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from roundpipe_torch import checkpoint, doing_recompute, get_recompute_data, remat, save_for_recompute


def plain(function, *args, **kwargs):
    """No checkpointing."""
    return function(*args, **kwargs)


def by_remat(function, *args, **kwargs):
    return remat(function)(*args, **kwargs)


def reentrant(function, *args, **kwargs):
    return checkpoint(function, *args, use_reentrant=True, **kwargs)


WAYS = [pytest.param(checkpoint, id="checkpoint"), pytest.param(by_remat, id="remat")]
ENGINES = [pytest.param(checkpoint, id="default"), pytest.param(reentrant, id="reentrant")]


class Counted:
    """A way to checkpoint that counts the regions and how often their code ran."""

    def __init__(self, way: Callable[..., Any]) -> None:
        self.way, self.regions, self.runs = way, 0, 0

    def __call__(self, function, *args, **kwargs):
        self.regions += 1

        def counted(*a, **k):
            self.runs += 1
            return function(*a, **k)

        return self.way(counted, *args, **kwargs)


class Source:
    """Random decisions from a generator of its own. `asked` counts them."""

    def __init__(self, seed: int = 7) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.asked = 0

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        self.asked += 1
        return torch.randint(0, high, shape, generator=self.generator)

    def normal(self, *shape: int) -> torch.Tensor:
        self.asked += 1
        return torch.randn(*shape, generator=self.generator)


def decided(make: Callable[[], Any]) -> Any:
    """A decision in the seed's style: made and saved by the forward, read by the recompute."""
    if doing_recompute():
        (value,) = get_recompute_data()
    else:
        value = make()
        save_for_recompute(value)
    return value


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
    """A normal tensor of its own seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_(grad)


def same(got: Any, want: Any, where: str = "result", within: float = 0.0) -> None:
    """Assert that two trees agree: tensors bit for bit (or `within` a relative error), the rest by ==."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{where}: {got!r} is no tensor"
        assert got.dtype == want.dtype, f"{where}: {got.dtype} instead of {want.dtype}"
        assert got.shape == want.shape, f"{where}: shape {list(got.shape)} instead of {list(want.shape)}"
        agrees = torch.equal(got, want) or (
            (within > 0 or want.isnan().any()) and torch.allclose(got, want, rtol=within, atol=within, equal_nan=True)
        )
        assert agrees, f"{where} differs by up to {(got - want).abs().max()}"
    elif isinstance(want, dict):
        assert list(got) == list(want), where
        for key, item in want.items():
            same(got[key], item, f"{where}[{key!r}]", within)
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), f"{where}: {len(got)} items instead of {len(want)}"
        for n, item in enumerate(want):
            same(got[n], item, f"{where}[{n}]", within)
    else:
        assert got == want, where


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in tuples, lists and dicts."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list, dict)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(item)


def agree(
    scenario: Callable[..., Any],
    way: Callable[..., Any] = checkpoint,
    *,
    recomputes: bool = True,
    vanishes: bool = False,
) -> Counted:
    """Assert that `scenario` gives the same with `way` as without checkpointing, and that it was recomputed."""
    counted = Counted(way)
    want, got = scenario(plain), scenario(counted)
    same(got, want)
    for n, tensor in enumerate(tensors(want)):
        assert tensor.any() or vanishes or not tensor.numel(), f"tensor {n} is zero, which proves nothing"
    assert (counted.runs > counted.regions) is recomputes, f"{counted.regions} regions ran {counted.runs} times"
    return counted
