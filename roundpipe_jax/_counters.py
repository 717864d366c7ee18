"""What module libraries count while a layer's code runs: random numbers that were drawn, names that were given.

Inside a module of flax.linen or a function transformed by haiku a layer draws its keys from a counter. If the
recompute, or another try at the forward, went on counting, it would draw others than the forward did (R7, R10).
`jax.checkpoint` runs the code once, and needs none of this. A library that is not imported has counted nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Counters"]


class Counters:
    """Where all the counters stand now."""

    def __init__(self) -> None:
        haiku = [*_of_haiku()]
        self.anybody_draws = bool(haiku)  # without a module that its code refers to
        self._restore = [*_of_linen(), *haiku]

    def put_back(self) -> None:
        """Let all stand there again."""
        for restore in self._restore:
            restore()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Count from there, and as if this had not been, afterwards."""
        if not self._restore:
            yield
            return
        now = Counters()
        self.put_back()
        try:
            yield
        finally:
            now.put_back()


def _of_linen() -> Iterator[Callable[[], None]]:
    context = getattr(sys.modules.get("flax.linen.module"), "_context", None)
    for module in getattr(context, "module_stack", ()):
        if module is None or module.scope is None:
            continue
        yield _as_now(module.scope.root.rng_counters)  # those of the scopes inside are in there
        yield _as_now(module.scope.reservations)
        yield _as_now(module._state.autoname_cursor)
        yield _as_now(module._state.children)


def _of_haiku() -> Iterator[Callable[[], None]]:
    base = sys.modules.get("haiku._src.base")
    if base is None or not base.frame_stack:
        return
    frame = base.current_frame()
    yield _as_now(frame.counter_stack.peek())
    yield _as_now(frame.used_names_stack.peek())
    keys = frame.rng_stack.peek()
    if keys is not None:
        state = keys.internal_state
        yield lambda: keys.replace_internal_state(state)


def _as_now(held: Any) -> Callable[[], None]:
    """What makes a dictionary or set hold what it holds now, at any depth, and stay the same object."""
    items = list(held.items()) if isinstance(held, dict) else list(held)
    inner = [_as_now(value) for _, value in items if isinstance(value, (dict, set))] if isinstance(held, dict) else []

    def restore() -> None:
        held.clear()
        held.update(items)
        for restore_inner in inner:
            restore_inner()

    return restore
