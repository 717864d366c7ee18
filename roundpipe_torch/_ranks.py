"""Regions that talk to other ranks: every rank recomputes them as a whole, and at the same point of backward.

What backward needs of a region differs between ranks. Where a rank's experts got no token, autograd may have saved
nothing at all. Whether to recompute, when to begin and where to stop must not follow from that, or one rank would wait
in a collective that another never joins.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import distributed as dist

from roundpipe_core._backend import expand
from roundpipe_core._trees import flatten

__all__ = ["collectives", "keeps_graph", "recompute_on_arrival", "step_is_over", "tell_rank"]


_c10d: Any = dist.distributed_c10d if dist.is_available() else None


def collectives() -> int:
    """How many collectives this process has begun, on all groups whose backend counts them."""
    groups = _c10d._world.pg_map if _c10d is not None else ()
    return sum(map(_begun, groups)) if groups else 0


def _begun(group: Any) -> int:
    try:
        begun: int = group._get_sequence_number_for_group()
        return begun
    except RuntimeError:  # a backend that does not count
        return 0


def keeps_graph() -> bool:
    """Whether the backward that runs leaves its graph for another one."""
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept


class _Awaited(Protocol):
    def arrive(self) -> None:
        """Backward has reached the region."""


class _Arrival:
    """Tells a region when backward reaches one of its outputs. Lets go of it once no further backward can."""

    __slots__ = ("_region",)

    def __init__(self, region: _Awaited) -> None:
        self._region: _Awaited | None = region

    def __call__(self, grads: Any) -> None:
        region = self._region
        if not keeps_graph():
            self._region = None
        if region is not None:
            region.arrive()


def recompute_on_arrival(region: _Awaited, outputs: Any, first: int) -> None:
    """Let backward tell `region` when it comes to `outputs`. `first` is the number of the region's first node."""
    leaves: list[Any] = []
    flatten(outputs, leaves, expand)
    nodes = {leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None}
    for node in nodes:
        if node._sequence_nr() >= first:  # else it is an input, given back
            node.register_prehook(_Arrival(region))


def step_is_over(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether fully_shard has reduced, in the backward that runs, the gradients of something in `modules`."""
    sharding: Any = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if sharding is None:
        return False
    states = (sharding._get_module_fsdp_state(part) for module in modules for part in module.modules())
    groups = (group for state in states if state is not None and not state._is_root for group in _groups(state))
    return any(group._training_state is sharding.TrainingState.POST_BACKWARD for group in groups)


def _groups(state: Any) -> list[Any]:
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # pragma: no cover - in older torch a state has one at most
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return groups


def tell_rank(error: BaseException, layer: str) -> None:
    """Note on `error` which rank it ended, and what that means for the others."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    if any(known.startswith("on rank ") for known in getattr(error, "__notes__", ())):
        return  # by the layer inside
    error.add_note(
        f"on rank {dist.get_rank()} of {dist.get_world_size()}, in layer {layer!r}. Other ranks may now wait for this "
        "one in a collective: end this process, so that they fail too."
    )
