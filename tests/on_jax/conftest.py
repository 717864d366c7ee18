"""Small programs, compiled often: the compiler's optimisations cost more here than they give."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def compile_quickly() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
