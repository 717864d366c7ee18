"""On a GPU: a step of mixture-of-experts layers in bfloat16. Runs only where there is a CUDA device.

Time of a step, how often the host waited for the device (counted by torch's synchronisation debug mode), memory held
after the forward and at the peak, and how much of the copies to the host and back a step with `offload` hides.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn

from roundpipe_torch import checkpoint, recompute_once, remat

from ._rounds import in_turns, timed
from ._rows import Row
from ._ways import NONE, OURS, TORCH, torchs

TOKENS, WIDTH, HIDDEN, EXPERTS, CHOSEN, LAYERS = 8192, 1024, 4096, 16, 2, 8
SMALL = (64, 32, 64, 4, 2, 2)


class Experts(nn.Module):
    """T tokens, D width, H inner width, E experts, K chosen for each token."""

    def __init__(self, width: int, hidden: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)

    def route(self, scores_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        best_TK = scores_TE.topk(self.chosen).indices
        order = best_TK.flatten().argsort(stable=True)
        return best_TK, order, best_TK.flatten().bincount(minlength=scores_TE.shape[1]).tolist()

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        scores_TE = self.gate(x_TD).softmax(-1)
        best_TK, order, load = recompute_once(self.route, scores_TE)
        token = order // self.chosen
        parts = x_TD[token].split(load)
        done = [nn.functional.silu(part @ up) @ down for part, up, down in zip(parts, self.up, self.down, strict=True)]
        weight = scores_TE.gather(1, best_TK).flatten()[order, None]
        return x_TD.index_add(0, token, torch.cat(done) * weight)


def steps(device: str, sizes: tuple[int, ...]) -> dict[str, Callable[[], torch.Tensor]]:
    """The loss of a forward in each way; its backward is for the caller."""
    tokens, width, hidden, experts, chosen, count = sizes
    torch.manual_seed(0)
    layers = [Experts(width, hidden, experts, chosen).to(device, torch.bfloat16) for _ in range(count)]
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)

    def loss(run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        y = x
        for layer in layers:
            y = run(layer, y)
        return y.float().square().mean()

    return {
        NONE: lambda: loss(lambda layer, y: layer(y)),
        TORCH: lambda: loss(torchs),
        OURS: lambda: loss(checkpoint),
        "ours, offloaded": lambda: loss(lambda layer, y: remat(layer, offload="cpu")(y)),
    }


def waits(step: Callable[[], object]) -> int:
    """How often the host waits for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in seen)


def memory(forward: Callable[[], torch.Tensor]) -> dict[str, int]:
    forward().backward()  # gradients exist from here on
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = forward()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    torch.cuda.synchronize()
    return {"bytes held after forward": held, "bytes at the peak": torch.cuda.max_memory_allocated() - before}


def device_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def copies(sizes: tuple[int, ...]) -> Callable[[], None]:
    """The inputs of all layers to the host and back, and nothing else."""
    tokens, width, *_, count = sizes
    there = torch.zeros(tokens, width, device="cuda", dtype=torch.bfloat16)
    host = [torch.empty_like(there, device="cpu", pin_memory=True) for _ in range(count)]

    def run() -> None:
        for one in host:
            one.copy_(there, non_blocking=True)
        for one in host:
            there.copy_(one, non_blocking=True)

    return run


def measure(sizes: tuple[int, ...], rounds: int) -> Iterator[Row]:
    tokens, width, _, experts, chosen, count = sizes
    table = f"{count} layers, {tokens} tokens, width {width}, top {chosen} of {experts} experts, bfloat16"
    forwards = steps("cuda", sizes)
    whole = {name: lambda forward=forward: forward().backward() for name, forward in forwards.items()}
    for name, forward in forwards.items():
        for what, value in memory(forward).items():
            yield Row(table, name, what, value, "B", tolerance=0.02 if name == OURS else None)
        loss = [forward()]
        value = waits(lambda loss=loss: loss.pop().backward())
        yield Row(table, name, "waits in backward", value, tolerance=0.0 if name == OURS else None)
    yield from timed(table, "time of a step", whole, TORCH, rounds, ours=(OURS,), clock=device_clock)
    alone = in_turns(
        {"copies": copies(sizes), OURS: whole[OURS], "offloaded": whole["ours, offloaded"]}, rounds, 1, device_clock
    )
    took = statistics.median(alone["copies"])
    longer = statistics.median(b - a for a, b in zip(alone[OURS], alone["offloaded"], strict=True))
    yield Row(table, "ours, offloaded", "share of the copies that is not hidden", max(0.0, longer / took), "%")


def rows(quick: bool) -> Iterator[Row | str]:
    if not torch.cuda.is_available():
        yield "no CUDA device here: nothing was measured"
        return
    yield f"on {torch.cuda.get_device_name()}"
    yield from measure(SMALL if quick else (TOKENS, WIDTH, HIDDEN, EXPERTS, CHOSEN, LAYERS), 2 if quick else 15)
