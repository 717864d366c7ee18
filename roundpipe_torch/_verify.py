"""verify="warn" | "raise": decide again, and compare with what the forward decided and gave."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from roundpipe_core import Flip, VerifyError, VerifyWarning
from roundpipe_core._backend import compare, expand
from roundpipe_core._errors import message
from roundpipe_core._phase import Run, thread
from roundpipe_core._trees import flatten, paths

from ._backend import differing_rows
from ._matching import region_codes
from ._state import Generators
from ._usage import OUT_OF_MEMORY, found

__all__ = ["Audit"]

_TOLERANCES = {  # relative, absolute: what the same operations may differ by when kernels sum in another order
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
}


class Audit:
    """A run of the region as a plain recompute would be: it decides again, and its decisions are compared.

    `run` is in the phase for it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        run: Run,
        generators: Generators | None,
    ) -> None:
        slot = self._slot = run.slot
        if generators:
            generators.set(generators.start)
        outer = thread.run
        failed: list[Flip] = []
        try:
            with saved_tensors_hooks(_drop, _refuse):
                try:
                    thread.run = run
                    function(*args, **kwargs)
                finally:
                    thread.run = outer
        except OUT_OF_MEMORY:
            raise
        except Exception as error:  # the flipped decision may not even fit the code
            failed.append(Flip(slot.label, f"a plain recompute fails ({type(error).__name__}: {error})", 1, 1, 0))
        self.flips = [*run.flips, *failed]

    @staticmethod
    def copy(outputs: Any) -> list[Any]:
        """What to keep of the forward's outputs until the recompute gives its own."""
        leaves: list[Any] = []
        flatten(outputs, leaves, expand)
        return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def report(self, before: list[Any] | None, outputs: Any, how: str) -> None:
        """Say what differed, if anything."""
        flips = (*self.flips, *(self._outputs(before, outputs) if before is not None else ()))
        if not flips:
            return
        found(flips, self._slot.label)
        text = message(
            f"layer {self._slot.label!r}: a plain recompute would not repeat the forward.",
            [("found", str(flip)) for flip in flips],
            "for saved items nothing is wrong: the recompute used the forward's decision. An output that differs needs "
            "its decision or random draw saved too.",
        )
        if how == "raise":
            raise VerifyError(text, flips)
        warnings.warn(VerifyWarning(text, flips), stacklevel=2)

    def _outputs(self, before: list[Any], outputs: Any) -> Iterator[Flip]:
        leaves: list[Any] = []
        names = list(paths(flatten(outputs, leaves, expand), "output"))
        if len(leaves) != len(before):
            yield Flip(self._slot.label, f"output: {len(before)} values, now {len(leaves)}", 1, 1, 0)
            return
        for name, one, other in zip(names, before, leaves, strict=True):
            both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
            if both and one.shape == other.shape and one.dtype == other.dtype:
                rows = differing_rows(one, other.detach(), _TOLERANCES.get(one.dtype, (0.0, 0.0)))
                if rows:
                    yield Flip(self._slot.label, name, *rows)
            elif both:
                yield Flip(self._slot.label, f"{name} (shape or dtype)", 1, 1, 0)
            elif flip := compare(self._slot.label, name, None, one, other):
                yield flip


region_codes |= {Audit.__init__.__code__}


def _drop(tensor: torch.Tensor) -> None:
    return None


def _refuse(nothing: None) -> torch.Tensor:
    raise RuntimeError("a layer that differentiates inside itself cannot be run again to verify it")
