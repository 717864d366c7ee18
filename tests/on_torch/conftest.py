"""Every test that compiles starts without compiled code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
