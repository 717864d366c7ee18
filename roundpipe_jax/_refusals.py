"""What the residual lane cannot do, and how it says so."""

from __future__ import annotations

from typing import Any, NamedTuple

from roundpipe_core._errors import OptionError, message
from roundpipe_core._places import where
from roundpipe_core._slots import label_of

from ._identity import codes

__all__ = ["Refusals"]

_DEFAULT = 'use mode="checkpoint", the default'


class Refusals(NamedTuple):
    """The refusals of one layer."""

    layer: str
    place: str | None
    """The file and line of the layer's code, if it has any."""

    @classmethod
    def of(cls, fun: Any, label: Any) -> Refusals:
        """Those of the layer `fun`, called `label`."""
        code = codes(fun)[0]
        return cls(label_of(label), where((code.co_filename, code.co_firstlineno)) if code is not None else None)

    @property
    def at(self) -> list[tuple[str, str]]:
        """Where the layer is, for a message."""
        return [("layer at", self.place)] if self.place else []

    def policy(self, policy: Any) -> OptionError:
        """It was given a policy."""
        return self._error(
            "takes no policy: it keeps exactly the inputs and the slot.",
            f"leave the policy out, or {_DEFAULT}.",
            ("policy", repr(policy)),
        )

    def forward_mode(self) -> OptionError:
        """Its derivative is to be computed forward."""
        return self._error("has no forward-mode derivative (jvp, linearize, jacfwd).", f"{_DEFAULT}.")

    def inner_save(self) -> OptionError:
        """It saves where a value belongs to an inner trace."""
        return self._error(
            "cannot keep what is saved inside a scan, cond, vmap, while or jitted function of the layer.",
            f"{_DEFAULT}, or save outside the inner function.",
        )

    def collective(self, error: Exception) -> OptionError:
        """Its backward runs outside of the `vmap` whose axis it reduces over."""
        return self._error(
            "cannot reduce over the axis of a vmap around the layer: backward runs after that vmap.",
            f"{_DEFAULT}, or take the derivative inside the vmap.",
            ("JAX says", str(error).partition("\n")[0]),
        )

    def _error(self, what: str, way_out: str, *facts: tuple[str, str]) -> OptionError:
        return OptionError(message(f'layer {self.layer!r}: mode="custom_vjp" {what}', [*self.at, *facts], way_out))
