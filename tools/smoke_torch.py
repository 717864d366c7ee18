"""What a user with torch has: a layer that routes once, checkpointed. Writes a tape to the file it is given."""

import sys

import torch

from roundpipe_torch import Tape, checkpoint, get_recompute_data, recompute_once, record, remat, replay

routed = 0


def route(x: torch.Tensor) -> torch.Tensor:
    global routed
    routed += 1
    return x.topk(2).indices


def layer(x: torch.Tensor) -> torch.Tensor:
    return x.exp().gather(1, recompute_once(route, x))


x = torch.arange(12.0).reshape(3, 4).requires_grad_()
for run in (checkpoint, lambda function, x: checkpoint(function, x, use_reentrant=True)):
    x.grad, routed = None, 0
    run(layer, x).sum().backward()
    if x.grad is None or x.grad.count_nonzero() != 6 or routed != 1:
        sys.exit(f"a wrong gradient, or {routed} decisions")

block = remat(torch.nn.Linear(4, 4), label="block")
with record() as tape:
    expected = remat(layer)(block(x))
tape.save(sys.argv[1])
with replay(Tape.load(sys.argv[1])):
    if not torch.equal(remat(layer)(block(x)), expected):
        sys.exit("the replay differs")
try:
    get_recompute_data()
except AssertionError:  # PhaseError is one, with and without -O
    pass
else:
    sys.exit("get_recompute_data gave something outside of a recompute")
