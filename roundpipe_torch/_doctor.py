"""What `python -m roundpipe_core doctor` says about torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial

import torch

from roundpipe_core import doing_recompute, record, replay, save_for_recompute
from roundpipe_core._doctor import Finding, trial

from ._checkpoint import checkpoint

__all__ = ["examine"]


def examine() -> Iterator[Finding]:
    """Devices, and a trial on each."""
    for device in _devices():
        name = "" if device.type == "cpu" else f" ({torch.cuda.get_device_name(device)})"
        yield trial(f"torch, {device}{name}: recompute remembers", partial(_remembers, device, False))
        yield trial(f"torch, {device}: second engine", partial(_remembers, device, True))
        yield trial(f"torch, {device}: record and replay", partial(_replays, device))
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("cl")
    yield Finding("torch.compile", f"C++ compiler {compiler}" if compiler else "no C++ compiler for the CPU")
    yield Finding("torch.distributed", "available" if torch.distributed.is_available() else "not built in")


def _devices() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", n) for n in range(torch.cuda.device_count()))]


def _layer(x: torch.Tensor) -> torch.Tensor:
    scores = x.detach() * (-1 if doing_recompute() else 1)  # decided again, it would be the other way
    (best,) = save_for_recompute(scores.argmax(-1, keepdim=True))
    return x.exp().gather(-1, best)


def _remembers(device: torch.device, use_reentrant: bool) -> bool:
    x = torch.arange(6.0, device=device).reshape(2, 3).requires_grad_()
    checkpoint(_layer, x, use_reentrant=use_reentrant).sum().backward()
    assert x.grad is not None
    return torch.equal(x.grad != 0, x == x.amax(-1, keepdim=True))


def _replays(device: torch.device) -> bool:
    x = torch.arange(6.0, device=device).reshape(2, 3)
    with record() as tape:
        expected = checkpoint(_layer, x)
    with replay(tape):
        return torch.equal(checkpoint(_layer, x), expected)
