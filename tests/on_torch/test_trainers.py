"""Training frameworks around checkpointed layers: the losses are those without checkpointing.

Shapes: T tokens, D width, E experts.
"""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

from roundpipe_torch import remat
from tests.on_torch.oracle import ENGINES, agree, leaf
from tests.on_torch.test_wrappers import D, Layer, Net, layers_of

T, STEPS = 5, 6


def batches():
    return [(leaf(T, D, seed=n, grad=False), leaf(T, D, seed=50 + n, grad=False)) for n in range(STEPS)]


def plain_losses(accumulate=1):
    net, losses = Net(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for n, (x, y) in enumerate(batches(), 1):
        loss = (net(x) - y).square().mean()
        (loss / accumulate).backward()
        if n % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def checkpointed():
    net = Net()
    for n, layer in enumerate(net.layers):
        net.layers[n] = remat(layer)
    return net


def phases(net):
    return {tuple(layer.phases) for layer in layers_of(net)}


# PyTorch Lightning


def lightning_losses(net, tmp_path, accumulate, **options):
    lightning = pytest.importorskip("pytorch_lightning")
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = net, []

        def training_step(self, batch):
            x, y = batch
            loss = (self.net(x) - y).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.net.parameters(), lr=0.05)

    task = Task()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=True, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=accumulate, default_root_dir=tmp_path, **options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the advice of a trainer
        trainer.fit(task, torch.utils.data.DataLoader(batches(), batch_size=None))
        trainer.save_checkpoint(tmp_path / "end.ckpt")
    return task.losses, torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning(tmp_path, accumulate):
    net = checkpointed()
    losses, state = lightning_losses(net, tmp_path, accumulate)

    assert losses == plain_losses(accumulate)
    assert phases(net) == {(False, True) * STEPS}
    assert list(state) == [f"net.{name}" for name in Net().state_dict()]


# Accelerate


@pytest.fixture
def accelerate():
    """Without the state that it keeps for the process: a Trainer of another test leaves some too."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_accelerate(accelerate, accumulate, tmp_path):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    try:
        net, losses = checkpointed(), []
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        model, optimizer, loader = accelerator.prepare(net, optimizer, batches())
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        assert losses == plain_losses(accumulate)
        assert phases(net) == {(False, True) * STEPS}
        assert list(accelerator.get_state_dict(model)) == list(Net().state_dict())
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_mixed_precision(accelerate):
    """Accelerate puts a forward of its own, with autocast, on the instance."""

    def run(net):
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        try:
            model = accelerator.prepare(net)
            accelerator.backward(model(leaf(T, D)).square().mean())
        finally:
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        return [p.grad for p in net.parameters()]

    for plain, wrapped in ((Net(), checkpointed()), (Layer(), remat(Layer()))):
        want, got = run(plain), run(wrapped)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
        assert phases(wrapped) == {(False, True)}


# Megatron


class Fused(torch.autograd.Function):
    """Adds the gradient of its weight to `main_grad` itself, and says so on the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        weight.main_grad += grad.t() @ x
        weight.grad_added_to_main_grad = True
        return grad @ weight, torch.full_like(weight, torch.nan)  # for the hooks of the weight


class FusedLinear(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.weight = torch.nn.Parameter(leaf(D, D, seed=seed).detach())
        self.weight.main_grad = torch.zeros(D, D)
        self.weight.grad_added_to_main_grad = False
        self.weight.register_post_accumulate_grad_hook(self.reduce)

    @staticmethod
    def reduce(weight):
        if not weight.grad_added_to_main_grad:
            weight.main_grad += weight.grad
        weight.grad, weight.grad_added_to_main_grad = None, False

    def forward(self, x):
        return torch.tanh(Fused.apply(x, self.weight))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("way", ENGINES)
def test_gradients_that_a_function_adds_to_its_weight(nested, way):
    def scenario(way):
        first, second = FusedLinear(1), FusedLinear(2)
        both = torch.nn.Sequential(first, second, first)
        x = leaf(T, D)
        for layer in (lambda x: way(both, x),) if nested else both:
            x = way(layer, x)
        x.square().sum().backward()
        return [layer.weight.main_grad for layer in (first, second)]

    agree(scenario, way)
