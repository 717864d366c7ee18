"""A step of training in PyTorch in each of the ways, and what is measured on it."""

from __future__ import annotations

import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from _moe_model import Block, LanguageModel, Plan
from _moe_settings import DivergedError, Settings
from _moe_weights import Sizes, initial_weights
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

from roundpipe_torch import VerifyWarning, remat


def _as_it_is(block: Block, label: str) -> Callable[[Tensor], Tensor]:
    return block


def _torchs(block: Block, label: str) -> Callable[[Tensor], Tensor]:
    block.moe.remembers = False  # torch's checkpoint would remember for it, too
    return partial(torchs_checkpoint, block, use_reentrant=False)


def _ours(block: Block, label: str) -> Callable[[Tensor], Tensor]:
    return remat(block, label=label)


def _verified(block: Block, label: str) -> Callable[[Tensor], Tensor]:
    return remat(block, label=label, verify="warn")


WAYS: dict[str, Callable[[Block, str], Callable[[Tensor], Tensor]]] = {
    "none": _as_it_is,
    "torch": _torchs,
    "ours": _ours,
    "verify": _verified,
}


@dataclass
class Step:
    """What was seen in one step."""

    loss: float
    seconds: float
    decided_forward: int  # times a router ran
    decided_backward: int
    flipped: list[int]  # for each layer: tokens that the router sent elsewhere when it ran again
    reported: dict[str, int]  # the same as `verify` says it: layer label to tokens


@dataclass
class Trainee:
    """A model that is trained in one of the ways, and all state that another way must not touch."""

    way: str
    model: LanguageModel
    optimizer: torch.optim.Optimizer
    random: Tensor  # the state of torch's generator: every way draws the same numbers
    chosen: dict[str, list[tuple[int, np.ndarray]]] = field(default_factory=lambda: {"forward": [], "backward": []})
    steps: list[Step] = field(default_factory=list)
    bytes_held: list[int] = field(default_factory=list)  # for each layer, by all that its forward made
    bytes_saved: list[int] = field(default_factory=list)  # for each layer, the routing plan alone
    first_gradient: dict[str, Tensor] = field(default_factory=dict)
    held_out_loss: float = float("nan")


def trainees(ways: list[str], sizes: Sizes, settings: Settings) -> list[Trainee]:
    """One for each way, all from the same weights and the same random numbers."""
    weights = initial_weights(sizes, settings.seed)
    torch.manual_seed(settings.seed)
    random = torch.get_rng_state()
    return [_trainee(way, sizes, settings, weights, random.clone()) for way in ways]


def _trainee(way: str, sizes: Sizes, settings: Settings, weights: dict[str, np.ndarray], random: Tensor) -> Trainee:
    model = LanguageModel(sizes, WAYS[way])
    model.load(weights)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.decay,
        fused=True,
    )
    return Trainee(way, model, optimizer, random)


def train_step(trainee: Trainee, batch_BL: np.ndarray, settings: Settings) -> Step:
    """Forward, backward, optimizer. The first step also takes down the gradient and the bytes held."""
    model, optimizer = trainee.model, trainee.optimizer
    tokens = torch.from_numpy(batch_BL)
    first = not trainee.steps
    for group in optimizer.param_groups:
        group["lr"] = settings.rate(len(trainee.steps))

    with _random_numbers_of(trainee), _verify_warnings() as warned:
        start = time.perf_counter()
        with _listening(trainee, "forward"), _autocast(settings), _metered(model, first) as meters:
            loss = model(tokens[:, :-1], tokens[:, 1:])
        if first:
            trainee.bytes_held = [meter.bytes_alive() for meter in meters]
        with _listening(trainee, "backward"):
            loss.backward()
        if first:
            trainee.first_gradient = {
                name: parameter.grad.clone()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start

    if not loss.isfinite():
        raise DivergedError(f"the loss is {loss.item()} in step {len(trainee.steps) + 1} of {trainee.way!r}")
    step = Step(
        loss=loss.item(),
        seconds=seconds,
        decided_forward=len(trainee.chosen["forward"]),
        decided_backward=len(trainee.chosen["backward"]),
        flipped=_flipped(trainee),
        reported=_reported(warned),
    )
    trainee.steps.append(step)
    return step


@torch.no_grad()
def evaluate(trainee: Trainee, batches_BL: list[np.ndarray], settings: Settings) -> float:
    """The mean loss on text that was not trained on. The router does not move its bias here."""
    trainee.model.eval()
    with _autocast(settings):
        losses = [trainee.model(tokens[:, :-1], tokens[:, 1:]).item() for tokens in map(torch.from_numpy, batches_BL)]
    trainee.model.train()
    return sum(losses) / len(losses)


# What surrounds a step


def _autocast(settings: Settings) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=settings.precision == "bfloat16")


@contextmanager
def _random_numbers_of(trainee: Trainee) -> Iterator[None]:
    torch.set_rng_state(trainee.random)
    yield
    trainee.random = torch.get_rng_state()


@contextmanager
def _listening(trainee: Trainee, phase: str) -> Iterator[None]:
    """Take down every decision made meanwhile: which layer, and the experts of each token."""
    heard = trainee.chosen[phase] = []

    def hear(layer: int, plan: Plan) -> None:
        heard.append((layer, plan[0].numpy().copy()))
        if not trainee.steps and phase == "forward":
            trainee.bytes_saved.append(sum(tensor.nbytes for tensor in plan))

    for layer, router in enumerate(trainee.model.routers):
        router.on_decision = partial(hear, layer)
    yield


@contextmanager
def _verify_warnings() -> Iterator[list[VerifyWarning]]:
    """Collect what `verify="warn"` says. Other warnings go on to whoever listens to them."""
    found: list[VerifyWarning] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", VerifyWarning)
        yield found
    for warning in caught:
        if isinstance(warning.message, VerifyWarning):
            found.append(warning.message)
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


# What is measured


def _flipped(trainee: Trainee) -> list[int]:
    before = dict(trainee.chosen["forward"])
    again = sorted(trainee.chosen["backward"], key=lambda decided: decided[0])
    return [int((chosen_TK != before[layer]).any(-1).sum()) for layer, chosen_TK in again]


def _reported(warned: list[VerifyWarning]) -> dict[str, int]:
    """The rows of item [0] of each layer's slot: the experts of a token. The other items follow from it."""
    rows: Counter[str] = Counter()
    for warning in warned:
        for flip in warning.flips:
            if flip.item.endswith("item [0]"):
                rows[flip.layer] += flip.rows
    return dict(rows)


@contextmanager
def _metered(model: LanguageModel, wanted: bool) -> Iterator[list[Meter]]:
    """Run each block under a meter of its own."""
    if not wanted:
        yield []
        return
    plain = model.run_block
    meters = [Meter() for _ in plain]
    model.run_block = [partial(_run_under, meter, run) for meter, run in zip(meters, plain, strict=True)]
    yield meters
    model.run_block = plain


def _run_under(meter: Meter, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with meter:
        return run(x)


_Storages = dict[int, "weakref.ref[torch.UntypedStorage]"]


class Meter(TorchDispatchMode):
    """Notes the storage of every tensor made while it is on, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: _Storages = {}
        self._found: _Storages = {}  # made before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._note(tensor, self._found, unless=self._made)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._note(tensor, self._made, unless=self._found)
        return result

    @staticmethod
    def _note(tensor: Tensor, storages: _Storages, unless: _Storages) -> None:
        storage = tensor.untyped_storage()
        known = unless.get(storage._cdata)
        if known is None or known() is None:
            storages[storage._cdata] = weakref.ref(storage)

    def bytes_alive(self) -> int:
        """Bytes of the storages that something still holds."""
        alive = (made() for made in self._made.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
