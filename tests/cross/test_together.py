"""Layers of one framework where the other is imported too."""

from __future__ import annotations

import pytest
import torch

import roundpipe_jax  # noqa: F401
from roundpipe_torch import OptionError, checkpoint


def test_jax_is_not_asked_about_an_iterator() -> None:
    """It would warn, before the error."""

    def gives(x):
        yield x.sin()

    with pytest.raises(OptionError, match="the layer gives a generator, which runs when"):
        checkpoint(gives, torch.ones(2, requires_grad=True), use_reentrant=True)
