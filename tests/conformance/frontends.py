"""What the rules need of a frontend, and the frontends that they are put to.

`x` is always a float32 or float64 vector, `program` a function of it that gives a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from roundpipe_core import Tape, record, replay
from tests.conformance import reference

Program = Callable[[Any], Any]


class _Blocks:
    """Tapes around what runs at once."""

    def recorded(self, program: Program, x: Any) -> Tape:
        """The tape of a forward."""
        with record() as tape:
            self.forward(program, x)  # type: ignore[attr-defined]
        return tape

    def replayed(self, what: str, program: Program, x: Any, tape: Tape) -> Any:
        """`what` (forward or gradient) of a program that replays `tape`."""
        with replay(tape):
            return getattr(self, what)(program, x)


class Reference(_Blocks):
    """The numpy reference. What it saves are numpy arrays."""

    name = "reference"
    package = "roundpipe_core"
    traced = False
    saved_type: Any = np.ndarray

    @contextmanager
    def ready(self) -> Iterator[None]:
        reference.draws.bit_generator.state = np.random.default_rng(0).bit_generator.state
        with reference.registered():
            yield

    region = staticmethod(reference.region)

    def gradient(self, program: Program, x: Any, *, times: int = 1) -> tuple[Any, Any]:
        return reference.gradient(program, np.asarray(x, np.float64), times=times)

    def forward(self, program: Program, x: Any) -> Any:
        """Without gradient."""
        return np.asarray(getattr(program(reference.Dual(x)), "value", None))

    def forget(self) -> None:
        """Drop compiled programs, which are graphs too."""

    def plain(self, x: Any) -> Any:
        """The values of `x`, cut off from differentiation."""
        return x.value if isinstance(x, reference.Dual) else np.asarray(x)

    def array(self, values: Any) -> Any:
        return np.asarray(values)

    def order(self, x: Any) -> Any:
        """Indices that sort `x`, greatest first."""
        return np.argsort(-self.plain(x), kind="stable")

    def exp(self, x: Any) -> Any:
        return np.exp(x)

    def draw(self) -> Any:
        return reference.draws.random()


class Torch(_Blocks):
    name = "torch"
    package = "roundpipe_torch"
    traced = False

    def __init__(self, use_reentrant: bool = False) -> None:
        import torch

        self.saved_type: Any = torch.Tensor
        self.use_reentrant = use_reentrant
        self.name = "torch, second engine" if use_reentrant else "torch"

    @contextmanager
    def ready(self) -> Iterator[None]:
        import torch

        torch.manual_seed(0)
        yield

    def region(self, function: Callable[..., Any], *args: Any, label: str | None = None) -> Any:
        from roundpipe_torch import remat

        return remat(function, use_reentrant=self.use_reentrant, label=label)(*args)

    def gradient(self, program: Program, x: Any, *, times: int = 1) -> tuple[Any, Any]:
        import torch

        leaf = torch.tensor(x, requires_grad=True)
        value = program(leaf)
        for n in range(times):
            leaf.grad = None
            value.backward(retain_graph=n + 1 < times)
        return value.detach().numpy(), leaf.grad.numpy()

    def forward(self, program: Program, x: Any) -> Any:
        import torch

        with torch.no_grad():
            out = program(torch.tensor(x))
        return None if out is None else out.numpy()

    def forget(self) -> None:
        pass

    def plain(self, x: Any) -> Any:
        return x.detach()

    def array(self, values: Any) -> Any:
        import torch

        return torch.as_tensor(values)

    def order(self, x: Any) -> Any:
        import torch

        return torch.argsort(x.detach(), descending=True, stable=True)

    def exp(self, x: Any) -> Any:
        return x.exp()

    def draw(self) -> Any:
        import torch

        return torch.rand(())


class Jax(_Blocks):
    """In eager mode, or under `jit` as a whole."""

    package = "roundpipe_jax"

    def __init__(self, *, jit: bool = False, mode: str = "checkpoint") -> None:
        import jax

        self.jit, self.mode, self.traced = jit, mode, jit
        self.name = f"jax{', jit' if jit else ''}{', custom_vjp' if mode == 'custom_vjp' else ''}"
        self.saved_type: Any = jax.Array

    @contextmanager
    def ready(self) -> Iterator[None]:
        yield

    def region(self, function: Callable[..., Any], *args: Any, label: str | None = None) -> Any:
        from roundpipe_jax import remat

        return remat(function, mode=self.mode, label=label)(*args)

    def gradient(self, program: Program, x: Any, *, times: int = 1) -> tuple[Any, Any]:
        import jax

        def both(x: Any) -> Any:
            value, pull = jax.vjp(program, x)
            return value, [pull(jax.numpy.ones_like(value))[0] for _ in range(times)][-1]

        value, slope = (jax.jit(both) if self.jit else both)(jax.numpy.asarray(x))
        return np.asarray(value), np.asarray(slope)

    def forward(self, program: Program, x: Any) -> Any:
        import jax

        return (jax.jit(program) if self.jit else program)(jax.numpy.asarray(x))

    def recorded(self, program: Program, x: Any) -> Tape:
        import jax

        def run(x: Any) -> Tape:
            with record() as tape:
                program(x)
            return tape

        return jax.jit(run)(jax.numpy.asarray(x)) if self.jit else super().recorded(program, x)

    def replayed(self, what: str, program: Program, x: Any, tape: Tape) -> Any:
        import jax

        def run(x: Any, tape: Tape) -> Any:
            with replay(tape):
                return program(x)

        if not self.jit:
            return super().replayed(what, program, x, tape)
        return jax.jit(run if what == "forward" else jax.value_and_grad(run))(jax.numpy.asarray(x), tape)

    def forget(self) -> None:
        import jax

        if self.jit:
            jax.clear_caches()

    def plain(self, x: Any) -> Any:
        import jax

        return jax.lax.stop_gradient(x)

    def array(self, values: Any) -> Any:
        import jax

        return jax.numpy.asarray(values)

    def order(self, x: Any) -> Any:
        import jax

        return jax.numpy.argsort(jax.lax.stop_gradient(x), descending=True, stable=True)

    def exp(self, x: Any) -> Any:
        import jax

        return jax.numpy.exp(x)


FRONTENDS: dict[str, Callable[[], Any]] = {
    "reference": Reference,
    "torch": Torch,
    "torch-reentrant": lambda: Torch(use_reentrant=True),
    "jax": Jax,
    "jax-jit": lambda: Jax(jit=True),
    "jax-custom_vjp": lambda: Jax(mode="custom_vjp"),
}
