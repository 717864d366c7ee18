"""What a kept function's backward needs: tensors that it made, which are held, and its arguments, which are not."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ._errors import tensor_changed
from ._offload import Here, Shipped
from ._torchs import unseen
from ._views import Origins, View, storage_of

__all__ = ["Argument", "Held", "Packer", "Site", "unpack", "whole_of"]


def _nobody() -> None:
    """What a site asks that has nobody to ship for it."""


class Site:
    """A call of `keep`, as the tensors that it holds know it: not with its outputs, whose graph holds the tensors."""

    __slots__ = ("_handles", "_moved", "forward", "label", "reruns", "running", "ship")

    def __init__(self, run: Any) -> None:
        self.label = run.slot.label
        self.forward = weakref.ref(run.outermost())  # alive while it runs
        self.running = True
        self.reruns = True  # until it has returned: what fails here fails in the recompute too
        self.ship: Callable[[], Callable[[torch.Tensor], Shipped | None] | None] = _nobody
        self._handles: list[RemovableHandle] = []
        self._moved: dict[Any, tuple[torch.Tensor, Shipped]] = {}

    def hold(self, tensor: torch.Tensor) -> Here | Shipped:
        """`tensor`, without its graph, here or in host memory; there only once."""
        ship, key = self.ship(), storage_of(tensor)
        if ship is None or key is None:
            return Here(tensor)
        view = (key, tensor.storage_offset(), tensor.shape, tensor.stride())
        if view not in self._moved:
            moved = ship(tensor)
            if moved is None:
                return Here(tensor)
            self._moved[view] = tensor.detach(), moved  # while its memory is held, no other tensor gets it
        return self._moved[view][1]

    def close(self) -> None:
        """Nothing more to hold."""
        self.ship = _nobody
        self._moved.clear()

    def asked(self) -> None:
        """Backward wants something. A layer that differentiates inside itself will do so in the recompute, too."""
        if not self.running and self.forward() is not None:
            self.reruns = True

    @property
    def watched(self) -> bool:
        """Whether the function has put hooks on what it was given or returns."""
        return bool(self._handles)

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notice when a gradient comes by, where what stands for the function would not have the function's hooks."""
        for tensor in tensors:
            if tensor.requires_grad:
                handle: RemovableHandle = tensor.register_hook(self._passed)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def _passed(self, gradient: torch.Tensor) -> None:
        self.asked()
        if self.forward() is None:
            for handle in self._handles:  # a weight would gather them
                handle.remove()


class Held:
    """A tensor that the function made for its backward."""

    __slots__ = ("__weakref__", "is_weight", "site", "value")

    def __init__(self, site: Site, tensor: torch.Tensor) -> None:
        self.site = site
        base = whole_of(tensor)
        self.is_weight = base.is_leaf and base.requires_grad
        self.value = Here(tensor) if self.is_weight else site.hold(tensor)

    def unpack(self) -> torch.Tensor:
        self.site.asked()
        value = self.value.fetch()
        if self.value.changed:
            raise tensor_changed(self.site.label, value)
        return value


class Argument:
    """A part of an argument that backward needs. `live` while the function runs, later `saved`."""

    __slots__ = ("__weakref__", "live", "part", "saved", "site")

    def __init__(self, site: Site, part: View, live: torch.Tensor) -> None:
        self.site, self.part = site, part
        self.live: torch.Tensor | None = live
        self.saved: Any = None

    def unpack(self) -> torch.Tensor:
        self.site.asked()
        return self.part.of(self.saved.unpack() if self.live is None else self.live)


def unpack(held: Held | Argument) -> torch.Tensor:
    """The tensor, for backward."""
    return held.unpack()


class Packer:
    """Tells what the function made from what it was given. Autograd holds on to it, so it has to be emptied."""

    __slots__ = ("asked", "given", "held", "origins", "site")

    def __init__(self, site: Site, given: list[torch.Tensor]) -> None:
        self.site = site
        self.given: list[torch.Tensor] | None = given
        self.origins: Origins | None = Origins(given)
        self.held: list[weakref.ref[Held]] = []
        self.asked: list[weakref.ref[Argument]] = []

    @unseen
    def pack(self, tensor: torch.Tensor) -> Held | Argument:
        part = None if self.origins is None else self.origins.of(tensor)
        if part is None or self.given is None:
            held = Held(self.site, tensor)
            self.held.append(weakref.ref(held))
            return held
        argument = Argument(self.site, part, self.given[part.whole])
        self.asked.append(weakref.ref(argument))
        return argument


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """What `tensor` is a view of; itself if it is none."""
    return tensor if tensor._base is None else tensor._base
