"""What holds for every test: one compute thread, no CUDA test without CUDA, and no phase left behind."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator

import pytest

from roundpipe_core import doing_recompute
from roundpipe_core._phase import thread

if importlib.util.find_spec("torch"):
    import torch

    torch.set_num_threads(1)
    HAS_CUDA = torch.cuda.is_available()
else:
    HAS_CUDA = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def libraries_are_no_garbage() -> None:
    """Many a test collects what is garbage, and need not walk over all that is loaded by now."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_phase_left_behind() -> Iterator[None]:
    """R11: whatever a test did, the phase is afterwards what it was before."""
    yield
    left = doing_recompute()
    thread.run = None  # one test's fault is not the next one's
    assert left is False, "the test left its thread in a recompute"
