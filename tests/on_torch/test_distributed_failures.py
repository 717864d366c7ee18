"""A rank that fails: its error names it, and the others end with an error of their own within seconds."""

from __future__ import annotations

import datetime as dt
import os
import time

import pytest
import torch
import torch.distributed as dist

from roundpipe_torch import CheckpointMismatchError, SlotError, checkpoint, doing_recompute, save_for_recompute
from tests.on_torch.oracle import leaf
from tests.on_torch.ranks import NO_ANSWER, RANKS, SECONDS, Ranks

T, D = 8, 6
LIMIT = 1.5  # of a collective, where the failing rank lives on


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return Summed.apply(grad, ctx.group), None


def step(rank, where, group):
    """A step in which rank 1 fails: in the forward, in the recompute, or when the two do not agree."""

    def layer(x, w):
        x = torch.tanh(x @ w)
        if rank == 1 and where == "forward":
            save_for_recompute(1)
            save_for_recompute(2)
        if rank == 1 and where == "recompute" and doing_recompute():
            raise ArithmeticError("as told")
        x = Summed.apply(x, group)
        if rank == 1 and where == "mismatch" and not doing_recompute():
            x = torch.tanh(x)
        return Summed.apply(x * w[0], group)

    loss = checkpoint(layer, leaf(T, D, seed=rank), leaf(D, D)).sum()
    loss.backward()


ERRORS = {"forward": SlotError, "recompute": ArithmeticError, "mismatch": CheckpointMismatchError}


def failing(rank, where):
    """The error of each rank, and how long it took. Both processes live on, with their sockets open."""
    group = dist.new_group(timeout=dt.timedelta(seconds=LIMIT))
    began = time.monotonic()
    with pytest.raises((RuntimeError, ArithmeticError, SlotError)) as caught:
        step(rank, where, group)
    seconds = time.monotonic() - began
    dist.barrier()
    dist.destroy_process_group(group)
    return type(caught.value).__name__, getattr(caught.value, "__notes__", []), seconds


@pytest.mark.parametrize("where", ERRORS)
def test_the_others_end_when_the_time_of_the_group_is_up(ranks, where):
    (peer, _, seconds), (name, notes, _) = ranks.run(failing, where)

    assert name == ERRORS[where].__name__
    (note,) = notes
    assert note.startswith(f"on rank 1 of {RANKS}, in layer 'step.<locals>.layer (")
    assert note.endswith(
        "Other ranks may now wait for this one in a collective: end this process, so that they fail too."
    )
    assert peer == "RuntimeError"  # gloo's
    assert LIMIT * 0.9 < seconds < LIMIT + 5


def ending(rank):
    """As a training script would do it, under a group that waits for long."""
    began = time.monotonic()
    try:
        step(rank, "recompute", None)
    except ArithmeticError:
        os._exit(1)
    except RuntimeError as error:
        return str(error), time.monotonic() - began


def test_the_others_end_with_the_process_that_failed():
    ((error, seconds), fault), ended = Ranks().answers(ending)

    assert fault is None
    assert "gloo/transport" in error  # the connection closed, or was reset
    assert "Timed out" not in error
    assert seconds < SECONDS / 2
    assert ended == (None, NO_ANSWER)
