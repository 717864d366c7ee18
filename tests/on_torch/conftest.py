"""Fixtures of the torch tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """Two processes with a gloo process group between them, one pair for all tests of a worker."""
    from tests.on_torch.ranks import Ranks

    ranks = Ranks()
    yield ranks
    ranks.stop(patience=10)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """A test that compiles starts without compiled code."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
