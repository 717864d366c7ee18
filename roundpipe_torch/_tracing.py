"""What can be known while torch.compile traces a layer: the region, what it saved before, the user's line.

Dynamo, which traces, does not trace the functions marked here. It calls them, once wherever it meets them, and takes
what they return for a constant. So they may ask Dynamo itself, and raise its errors. Such an error ends the graph
before the region, which then runs as it does without a compiler, its layer compiled by itself; under `fullgraph=True`
the user gets it. A trace may be given up and begun anew: what is noted hangs on the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from roundpipe_core import GradientError, OptionError, PhaseError, RoundPipeError, SlotError
from roundpipe_core._errors import message
from roundpipe_core._places import Place, is_ours, where
from roundpipe_core._slots import Key, spoken

from ._decided import learn_to_trace
from ._errors import CompileError
from ._torchs import innermost, is_torchs

__all__ = [
    "begin",
    "deciding",
    "enter_scope",
    "exit_scope",
    "in_region",
    "in_torchs",
    "note_save",
    "refuse",
    "refuse_gradient",
    "refuse_object",
    "refuse_option",
    "refuse_read",
    "set_deciding",
    "split",
]

F = TypeVar("F", bound=Callable[..., Any])


def _at_trace_time(function: F) -> F:
    """What `torch.compiler.assume_constant_result` does, without loading the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class _Region:
    """What one trace of a region has met so far."""

    def __init__(self) -> None:
        self.label = "a checkpointed layer"
        self.scope: tuple[str, ...] = ()
        self.opened: dict[tuple[str, ...], int] = {}
        self.saved: dict[Key, Place] = {}
        self.deciding = 0


def _translator() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx()


def _region() -> _Region | None:
    """The innermost region being traced."""
    from torch._higher_order_ops.wrap import tag_activation_checkpoint

    tracer, between = _translator().output.current_tracer, None
    while tracer is not None and tracer.source_target is not tag_activation_checkpoint:
        between = between or tracer.source_target
        tracer = tracer.parent
    if tracer is None:
        return None
    if between is not None:
        text = f"a checkpointed layer makes a decision inside {between}, which torch.compile keeps as a whole."
        text = message(text, [_traced_at()], "save outside of it.")
        raise _ending_the_graph(CompileError, "UncapturedHigherOrderOpError")(text)
    region: _Region | None = vars(tracer).get("_roundpipe")
    if region is None:  # of ours, or of torch's own checkpoint
        learn_to_trace()
        region = vars(tracer)["_roundpipe"] = _Region()
    return region


def _this_region() -> _Region:
    region = _region()
    if region is None:
        raise RuntimeError("no region is traced")
    return region


@_at_trace_time
def in_region() -> bool:
    """Whether what is traced now belongs to a region of this graph."""
    return _region() is not None


@_at_trace_time
def begin(label: str) -> None:
    """A region begins: the first thing traced of it."""
    from torch._dynamo.eval_frame import innermost_backend

    _this_region().label = label
    compiler = innermost_backend(_translator().output.compiler_fn)
    backend = getattr(getattr(compiler, "compiler_fn", compiler), "__name__", "")
    if backend in _WITHOUT_AUTOGRAD:
        _stop(
            CompileError,
            f"layer {label!r}: the backend {backend!r} only traces the forward, so a recompute would decide again.",
            'use a backend that compiles the backward too, such as "inductor" or "aot_eager".',
        )


_WITHOUT_AUTOGRAD = ("eager", "eager_debug", "eager_noexcept", "pre_dispatch_eager")


@_at_trace_time
def note_save(name: str | None) -> None:
    """A save; the second under one key is an error (R4)."""
    region = _this_region()
    if name is not None and not isinstance(name, str):
        _stop(OptionError, f"name must be a string, not {name!r}.", 'name the slot by a string, as in name="mask".')
    key, place = (region.scope, name), _user_place()
    if key in region.saved:
        _stop(
            SlotError,
            f"layer {region.label!r}, {spoken(key)}: saved twice in one forward.",
            "save everything in one call, give each save its own name=, or mark the parts of the layer by layer_scope.",
            ("first", where(region.saved[key])),
        )
    region.saved[key] = place


@_at_trace_time
def enter_scope(name: str) -> None:
    """A `layer_scope` begins."""
    region = _this_region()
    full = (*region.scope, name)
    count = region.opened.get(full, 0)
    region.opened[full] = count + 1
    region.scope = full if count == 0 else (*region.scope, f"{name} #{count}")


@_at_trace_time
def exit_scope() -> None:
    """The innermost `layer_scope` ends."""
    region = _this_region()
    region.scope = region.scope[:-1]


@_at_trace_time
def set_deciding(step: int) -> None:
    """A decision that is saved as a whole begins (1) or ends (-1)."""
    _this_region().deciding += step


@_at_trace_time
def deciding() -> bool:
    """Whether the code traced now is a part of such a decision."""
    return _this_region().deciding > 0


@_at_trace_time
def refuse_gradient(item: str, key: str) -> None:
    """A value of a save carries gradient (R5)."""
    _stop(
        GradientError,
        f"layer {_this_region().label!r}, {key}: data{item} requires grad; a slot would cut its gradient.",
        "save what decides (indices, a mask, a branch), or its .detach() and compute the differentiable part from it "
        "in both phases.",
    )


@_at_trace_time
def refuse_object(item: str, kind: str) -> None:
    """A value of a save may hold tensors that nobody can find."""
    _stop(
        CompileError,
        f"layer {_this_region().label!r}: data{item} is {kind}, which cannot be followed into while it is traced.",
        "save the tensors and numbers in it, as tuples, lists, dicts or dataclasses of them.",
    )


@_at_trace_time
def refuse_read() -> None:
    """`get_recompute_data` in the forward, the only phase that is traced (R3)."""
    _stop(
        PhaseError,
        "get_recompute_data() was called in the forward.",
        "call it only where doing_recompute() is True, or use `(data,) = save_for_recompute(data)`, which works in "
        "both phases.",
    )


@_at_trace_time
def refuse(what: str, way_out: str) -> None:
    """Something that a compiled region cannot do."""
    _stop(CompileError, what, way_out)


@_at_trace_time
def refuse_option(what: str, way_out: str) -> None:
    """An option has a value that it does not take."""
    _stop(OptionError, what, way_out)


@_at_trace_time
def in_torchs() -> bool:
    """Whether torch's own checkpoint, outside of this graph, runs what is traced now. It is a graph for that case."""
    from torch._dynamo.guards import install_guard
    from torch._dynamo.source import GlobalStateSource

    install_guard(GlobalStateSource().make_guard(_as_now))
    return is_torchs(innermost(False))


def _as_now(builder: Any, guard: Any) -> None:
    found = is_torchs(innermost(False))
    told = f"torch.utils.checkpoint runs it: {found}"
    builder.guard_manager.root.add_lambda_guard(
        lambda scope: is_torchs(innermost(False)) == found, [told], guard.user_stack
    )


@_at_trace_time
def split(what: str) -> None:
    """`what` is met in a graph that a region, or a tape, outside of it runs: it must not become a part of the graph."""
    _stop(
        CompileError,
        f"{what} is traced inside a region, or under a tape, that is not part of the compiled graph.",
        "compile without fullgraph=True, which splits the graph here, or compile the code that calls checkpoint; of a "
        "function given to scan, map or cond, save in front of that call what it decides by.",
    )


def _stop(kind: type[RoundPipeError], what: str, way_out: str, *facts: tuple[str, str]) -> NoReturn:
    raise _ending_the_graph(kind)(message(what, [*facts, _traced_at()], way_out))


def _ending_the_graph(kind: type[RoundPipeError], dynamos: str = "Unsupported") -> type[RoundPipeError]:
    """`kind`, as one of Dynamo's errors: by default that on which it splits the graph or, if it may not, gives up."""
    from torch._dynamo import exc

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (getattr(exc, dynamos), kind), names)


def _traced_at() -> tuple[str, str]:
    return "at", where(_user_place())


def _user_place() -> Place:
    """The innermost line traced that is not ours."""
    from torch._guards import TracingContext

    for frame in reversed(TracingContext.extract_stack()):
        if not is_ours(frame.filename):
            return frame.filename, frame.lineno or 0
    return "<unknown>", 0
