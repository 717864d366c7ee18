"""torch.distributed.pipelining over two ranks: microbatches of several stages, backward in the schedule's own order.

Shapes: T tokens, D width, E experts. The oracle is the same model in a single process, all microbatches at once.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from roundpipe_torch import checkpoint, doing_recompute, get_recompute_data, remat, save_for_recompute
from tests.on_torch.oracle import leaf, plain, reentrant, same
from tests.on_torch.ranks import RANKS

T, D, E, MICROBATCHES = 4, 6, 3, 4
SINGLE = ["ScheduleGPipe", "Schedule1F1B"]
MULTI = [
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
]
WAYS = {"checkpoint": checkpoint, "reentrant": reentrant}


class Layer(torch.nn.Module):
    """Routes by its input plus noise that no checkpoint knows, so a recompute that decides again decides otherwise."""

    def __init__(self, seed):
        super().__init__()
        self.gate = torch.nn.Linear(D, E, bias=False)
        self.experts = torch.nn.Parameter(torch.empty(E, D, D))
        for n, p in enumerate(self.parameters()):
            p.data = leaf(*p.shape, seed=seed + n).detach() * 0.5
        self.routes: list[torch.Tensor] | None = None  # given, in the single process
        self.decided: list[torch.Tensor] = []
        self.generator = torch.Generator().manual_seed(seed)

    def decide(self, logits):
        if self.routes is not None:
            return torch.cat(self.routes)
        idx = (logits.detach() + torch.randn(logits.shape, generator=self.generator)).argmax(-1)
        self.decided.append(idx)
        return idx

    def forward(self, x):
        logits = self.gate(x)
        if doing_recompute():
            (idx,) = get_recompute_data()
        else:
            idx = self.decide(logits)
            save_for_recompute(idx)
        weight = torch.softmax(logits, -1).gather(-1, idx[:, None])
        return x + torch.tanh(torch.bmm(x[:, None], self.experts[idx]))[:, 0] * weight


class Stage(torch.nn.Module):
    def __init__(self, index, way):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(100 * index + 10 * n) for n in range(2))
        self.way = way

    def forward(self, x):
        for layer in self.layers:
            x = self.way(layer, x)
        return x


def loss_of(y, target):
    return (y - target).square().sum()


def pipeline(rank, name, kind, nested):
    way = WAYS[name]
    schedule = getattr(schedules, kind)
    multi = issubclass(schedule, schedules.PipelineScheduleMulti)
    count = RANKS * 2 if multi else RANKS
    v_shaped = kind in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    mine = [rank] if not multi else [rank, count - 1 - rank] if v_shaped else [rank, rank + RANKS]

    def around(stage):
        return remat(stage) if nested else stage

    stages = {n: Stage(n, way) for n in mine}
    # What goes in and out is given, or a further run of each stage would find it.
    given, made = torch.empty(T, D), torch.empty(T, D, requires_grad=True)
    pipes = [PipelineStage(around(stages[n]), n, count, torch.device("cpu"), made if n else given, made) for n in mine]
    x, target = leaf(T * MICROBATCHES, D, seed=1, grad=False), leaf(T * MICROBATCHES, D, seed=2, grad=False)
    run = schedule(pipes if multi else pipes[0], MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    first, last = 0 in mine, count - 1 in mine
    losses: list[torch.Tensor] = []
    args = (x,) if first else ()
    run.step(*args, **({"target": target, "losses": losses} if last else {}))

    # Every rank tells what it decided, in the order of its microbatches, and its gradients.
    told = {n: [layer.decided for layer in stage.layers] for n, stage in stages.items()}
    everything: list[dict[int, list[list[torch.Tensor]]]] = [{} for _ in range(RANKS)]
    dist.all_gather_object(everything, told)
    routes = {n: layers for part in everything for n, layers in part.items()}

    single = [Stage(n, plain) for n in range(count)]
    for n, stage in enumerate(single):
        for layer, given in zip(stage.layers, routes[n], strict=True):
            layer.routes = given
            assert len(given) == MICROBATCHES  # decided once each
    y = x
    for stage in single:
        y = stage(y)
    want = loss_of(y, target)
    want.backward()
    if last:
        same(torch.stack(losses).sum(), want.detach(), "loss", within=1e-5)
    for n, stage in stages.items():
        for (key, p), q in zip(stage.named_parameters(), single[n].parameters(), strict=True):
            same(p.grad, q.grad, f"stage {n} {key}", within=1e-4)


@pytest.mark.parametrize(
    ("kind", "nested"), [*((kind, False) for kind in SINGLE + MULTI), (SINGLE[1], True), (MULTI[0], True)]
)  # nested: the stages are regions too
def test_pipeline(ranks, kind, nested):
    if kind in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") and torch.__version__ < "2.12":
        pytest.skip("this torch sends from a rank to itself, which gloo cannot")
    ranks.run(pipeline, "checkpoint", kind, nested)


# The others take a stage's gradient in two parts, by torch.autograd.grad, which the second engine does not do.
@pytest.mark.parametrize("kind", ["ScheduleGPipe", "ScheduleInterleaved1F1B"])
def test_pipeline_with_the_second_engine(ranks, kind):
    ranks.run(pipeline, "reentrant", kind, False)
