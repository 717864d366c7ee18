"""Tapes under JAX's transformations (R13).

A tape is a pytree, so that a jitted function takes and returns one. What it may not do is to collect tracers of a
trace inside the block that records, or to end up in a trace as a constant: each block knows the trace it was begun in.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from roundpipe_core._backend import backend_of
from roundpipe_core._errors import TapeError, message
from roundpipe_core._phase import Phase
from roundpipe_core._places import Place
from roundpipe_core._slots import Key, spoken
from roundpipe_core._tape import Skeleton, Tape, at_layer, check_range
from roundpipe_core._trees import paths

from ._backend import adopted
from ._jax import belongs_to, is_running, is_tracer, trace_state
from ._runs import recorded_outside, traced_for

__all__ = ["Guard", "flattened", "moved"]


def flattened(tape: Tape) -> tuple[list[Any], Skeleton]:
    """The arrays as JAX has them, and the rest. Ranges that were declared are checked where there are values."""
    for layer, _, decision in tape.decisions():
        check_range(layer, decision)
    arrays, skeleton = tape.split()
    return [moved(tape, leaf) for leaf in arrays], skeleton


def _unflattened(skeleton: Skeleton, arrays: Sequence[Any]) -> Tape:
    # Tracers stand for the arrays that were flattened, whose ranges were checked then. Values may be any others.
    return skeleton.filled(arrays, checked=all(map(is_tracer, arrays)))


jax.tree_util.register_pytree_node(Tape, flattened, _unflattened)


def moved(tape: Tape, leaf: Any) -> Any:
    """`leaf` of a tape as JAX has it; what is no array, as it is."""
    if isinstance(leaf, jax.Array) or backend_of(leaf) is None:
        return leaf
    key = ("jax", bool(jax.config.jax_enable_x64))  # type: ignore[attr-defined]
    try:
        with jax.ensure_compile_time_eval():  # what a traced layer decided in numpy is known
            return tape.converted(leaf, key, lambda: adopted(leaf))
    except (ValueError, TypeError, OverflowError) as error:
        raise _not_movable(tape, leaf, error) from error


def _not_movable(tape: Tape, wanted: Any, error: Exception) -> TapeError:
    place = ""
    for layer, _, decision in tape.decisions():
        for item, leaf in zip(paths(decision.spec), decision.leaves, strict=True):
            if leaf is wanted:
                place = f", {at_layer(layer)}, {spoken(decision.key)}, item {item}"
    return TapeError(
        message(
            f"tape{place}: JAX cannot hold it: {str(error).partition(chr(10))[0]}",
            [],
            "save it in a dtype that both frameworks have, or turn on jax_enable_x64.",
        )
    )


class Guard:
    """One recording or replay."""

    _outside: Any = None  # a context in which functions are traced as they were before

    def begin(self, replayed: Sequence[Any] | None) -> None:
        self.replaying = replayed is not None
        if replayed and not is_running() and not all(map(is_tracer, replayed)):
            raise _baked_in()
        self.home = trace_state()
        # A function that was jitted outside of the block is traced anew inside: then its layers are met here.
        self._outside = traced_for(traced_for.value)
        traced_for("replay" if self.replaying else "record").__enter__()

    def end(self) -> None:
        if self._outside is not None:
            self._outside.__enter__()

    def deciding(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = traced_for(Phase.OFF)
        return context

    def check(self, doing: str) -> None:
        if not belongs_to(trace_state(), self.home):
            raise _away(doing, self.replaying)

    def prepared(self, layer: str, key: Key, data: tuple[Any, ...], place: Place) -> tuple[Any, ...]:
        return recorded_outside(layer, key, data, place)


def _away(doing: str, replaying: bool) -> TapeError:
    way_out = "begin record() inside that function and return the tape from it: a tape is a pytree"
    if replaying:
        way_out = "pass the tape to that function as an argument and begin replay() inside: a tape is a pytree"
    return TapeError(
        message(
            f"{doing} inside a jitted function, a scan, a vmap or another trace, and "
            f"{'replay' if replaying else 'record'}() was begun outside of it.",
            [],
            f"{way_out}. For a stack of layers use remat_layers.",
        )
    )


def _baked_in() -> TapeError:
    return TapeError(
        message(
            "replay() was begun inside a jitted function, with a tape from outside: its arrays would be constants of "
            "the compiled function, whatever tape a later call means.",
            [],
            "pass the tape to the function as an argument: a tape is a pytree.",
        )
    )
