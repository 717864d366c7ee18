"""What the torch frontend says when something cannot be right.

    MismatchError
    └── CheckpointMismatchError   (also torch's CheckpointError)   R10
    RoundPipeError
    └── CompileError              (also RuntimeError)

The functions give errors to raise; `layer` is the label of the region.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointError

from roundpipe_core import GradientError, MismatchError, MutationError, OptionError, RoundPipeError, SlotError
from roundpipe_core._errors import called_here, message, shown
from roundpipe_core._places import Place, pass_over, place_outside, where
from roundpipe_core._slots import Key, label_of, spoken

__all__ = [
    "OUT_OF_MEMORY",
    "CheckpointMismatchError",
    "CompileError",
    "accumulates_only",
    "argument_written",
    "buffer_unknown",
    "captured",
    "context_swallowed",
    "decided_in_compiled_code",
    "decided_under_a_transform",
    "differentiated_inside",
    "differentiated_twice",
    "drawn_in_a_crowd",
    "drawn_in_another_layout",
    "given_no_function",
    "graph_saved",
    "hooked_inside",
    "input_changed",
    "kept_output_changed",
    "multi_hooked",
    "no_option_of_checkpoint",
    "no_partner",
    "no_second_derivative",
    "not_kept",
    "not_yet",
    "other_decision",
    "other_node",
    "other_parameter",
    "other_shape",
    "outside_changed",
    "ran_uncompiled",
    "run_lazily",
    "saved_in_vain",
    "saved_inside_torchs",
    "sharded_inside",
    "started_inside",
    "tensor_changed",
    "under_a_transform",
    "user_line",
    "wrong_option",
]


OUT_OF_MEMORY: tuple[type[BaseException], ...] = (torch.OutOfMemoryError, MemoryError)


class CheckpointMismatchError(MismatchError, CheckpointError):
    """Forward and recompute saved tensors that cannot be matched (R10).

    Also torch's own `CheckpointError`, so that code which catches that keeps working.
    """


class CompileError(RoundPipeError, RuntimeError):
    """torch.compile was asked for something that cannot be right in a compiled graph.

    Raised under `fullgraph=True`, and where splitting the graph would not help either.
    """


def ran_uncompiled() -> CompileError:
    """The traced forward runs without a backward made from it."""
    return CompileError(
        message(
            "a checkpointed layer was traced for a backend that does not compile the backward, so the recompute would "
            "decide again.",
            [],
            'use a backend that does, such as "inductor" or "aot_eager".',
        )
    )


def multi_hooked(error: str) -> MismatchError:
    """A hook for the gradients of several tensors, whose backwards differ under the second engine."""
    return MismatchError(
        message(
            "with use_reentrant=True a hook by register_multi_grad_hook cannot be for a leaf or an argument of the "
            "layer and for what the layer computes: their gradients come in two backwards.",
            [("torch says", error.splitlines()[0])],
            "register one hook for each of the two kinds, or use the default engine (use_reentrant=False).",
        )
    )


def no_partner(layer: str, wanted: str, forward: str, recompute: str) -> CheckpointMismatchError:
    """Backward asks for a tensor that nothing in the recompute stands for."""
    return CheckpointMismatchError(
        message(
            f"layer {layer!r}: backward needs {wanted}, and the recompute saved nothing that can stand for it.",
            [("forward saved", forward), ("recompute saved", recompute)],
            "make both phases run the same differentiable operations after the decision: put the decision under "
            "torch.no_grad() or detach it, and keep no differentiable statistic (such as self.aux = logits.sum()) "
            "of one phase only. checkpoint(..., debug=True) adds the lines; use_reentrant=True allows any difference.",
        )
    )


def not_yet(layer: str, asked: SlotError) -> CheckpointMismatchError:
    """The recompute got ahead of a forward that waits for it: it asks for what the forward has not saved yet."""
    headline, *facts, _ = (line.strip().partition(": ") for line in str(asked).splitlines())
    return CheckpointMismatchError(
        message(
            f"layer {layer!r}: the forward differentiates inside itself, and its recompute got past that point without "
            "what the forward waits for.",
            [("the recompute", "".join(headline)), *((name, fact) for name, _, fact in facts)],
            "differentiate in both phases, keep no differentiable statistic of one phase only, and put a decision that "
            "needs a gradient into recompute_once(...).",
        )
    )


def other_node(layer: str, wanted: str, asking: str, made_for: str) -> CheckpointMismatchError:
    """The tensor in the right place was saved by another kind of operation."""
    return CheckpointMismatchError(
        message(
            f"layer {layer!r}: backward of {asking} needs {wanted}; "
            f"in its place the recompute saved one for {made_for}.",
            [],
            "make both phases run the same differentiable operations, in the same order, after the decision; "
            "use_reentrant=True allows any difference.",
        )
    )


def other_parameter(layer: str, what: str) -> CheckpointMismatchError:
    """A parameter of the recompute is not the forward's."""
    return CheckpointMismatchError(
        message(
            f"layer {layer!r}: the recompute used another parameter than the forward: {what}.",
            [],
            "let what the layer chooses its parameters by (an adapter's name) be until backward is done. A parameter "
            "that the layer makes anew in each run may not be kept beyond the run.",
        )
    )


def parameter_left_out(layer: str, what: str) -> CheckpointMismatchError:
    """A parameter of the forward is none of the recompute."""
    return CheckpointMismatchError(
        message(
            f"layer {layer!r}: the outputs of the recompute do not depend on a parameter that those of the forward "
            f"depend on: {what}.",
            [],
            "let what the layer chooses its parameters by (the adapter in use, whether it is merged) be until backward "
            "is done. If it shall choose otherwise in the recompute, let it ask doing_recompute().",
        )
    )


def tensor_changed(layer: str, tensor: torch.Tensor) -> MutationError:
    """A saved tensor is not what it was when it was saved."""
    return MutationError(
        message(
            f"layer {layer!r}: a tensor needed for gradient computation has been modified by an inplace operation "
            f"after it was saved: {described(tensor)}.",
            [],
            "compute out of place what later operations need, and change weights and other tensors after backward; "
            "autograd without checkpointing refuses most of this too.",
        )
    )


def outside_changed(layer: str, tensor: torch.Tensor, line: str) -> MutationError:
    """A tensor that the layer takes from outside is not what it was, and backward needs what comes of it."""
    return MutationError(
        message(
            f"layer {layer!r}: a tensor from outside, {described(tensor)}, has been modified by an inplace operation, "
            "or converted, after the forward, and backward needs what the recompute makes of it.",
            [("read at", line)] if line else [],
            "change it after backward, or out of place; or pass it to the layer as an argument; or let the layer keep "
            "what it decides by it, by save_for_recompute(...) or recompute_once(...).",
        )
    )


def input_changed(layer: str, error: RuntimeError | None) -> MutationError:
    """An argument is not what it was when the forward began."""
    return MutationError(
        message(
            f"layer {layer!r}: an input was changed in place after the forward began, so the recompute cannot start "
            "from it.",
            [("torch says", str(error).splitlines()[0])] if error else [],
            "pass a clone, or change the tensor out of place (x = x + 1 instead of x += 1).",
        )
    )


def given_once(layer: str, error: RuntimeError) -> CheckpointMismatchError:
    """A second recompute in one backward, for what the first did not make, inside torch's checkpoint."""
    return CheckpointMismatchError(
        message(
            f"layer {layer!r}: backward needs a tensor that the recompute before did not make, or has given already; "
            "torch's checkpoint around the layer gives its inputs only once.",
            [("torch says", str(error).splitlines()[0])],
            "make both phases run the same differentiable operations, keep no differentiable statistic of one of them "
            "(as losses.append(...) under `if not doing_recompute():` does), and read ctx.saved_tensors once. With "
            "roundpipe_torch.checkpoint around it the message lists what both phases saved.",
        )
    )


def graph_saved(layer: str, item: str, saved_at: str) -> GradientError:
    """An object is saved of which a tensor requires gradient (R5)."""
    return GradientError(
        message(
            f"layer {layer!r}: data{item}, of an object that is saved, requires grad; a slot would cut its gradient.",
            [("saved at", saved_at)],
            "save what decides (indices, a mask, a sample), or an object that is made of detached tensors.",
        )
    )


def given_no_function(target: Any) -> OptionError:
    """What is to be run is a result, mostly."""
    return wrong_option(
        target,
        f"checkpoint takes a function and its arguments, not {shown(target)}.",
        "pass the layer and what to call it with: checkpoint(layer, x) for layer(x).",
    )


def no_option_of_checkpoint(target: Any, name: str) -> OptionError:
    """An option of `remat`, which the layer got as an argument."""
    return wrong_option(
        target,
        f"{name!r} is no option of checkpoint, and no argument of the layer.",
        f"pass it to remat: remat(layer, {name}=...)(x).",
    )


def run_lazily(layer: str, outputs: Any) -> OptionError:
    """A layer gave what has not run yet."""
    kind = type(outputs).__name__.removeprefix("async_")
    return wrong_option(
        layer,
        f"the layer gives a {kind}, which runs when the layer is over: nothing in it is checkpointed or saved.",
        "return a list of results; of an async function, checkpoint the functions that it calls.",
    )


def drawn_in_a_crowd(layer: str, generator: str) -> CheckpointMismatchError:
    """Draws from a generator that another thread used meanwhile (R7)."""
    return CheckpointMismatchError(
        message(
            f"layer {layer!r}: draws random numbers while another thread is inside a checkpointed layer too. The "
            f"threads share one {generator}, so the recompute cannot draw what the forward drew.",
            [],
            "draw with recompute_once(...) or save the mask, give each thread a torch.Generator of its own, run the "
            "threads one after the other, or pass preserve_rng_state=False if the draws need not repeat.",
        )
    )


def drawn_in_another_layout(layer: str, what: str) -> CheckpointMismatchError:
    """Draws into a tensor whose memory is ordered otherwise than in the forward (R7)."""
    return CheckpointMismatchError(
        message(
            f"layer {layer!r}: the recompute has a tensor with other strides than the forward, and draws random "
            "numbers. They are drawn in the order of memory, so they would meet other elements.",
            [("tensor", what)],
            "give both branches of the decision the same layout, for example by .contiguous() on what they give.",
        )
    )


def other_decision(
    layer: str, number: int, forward: tuple[str, Place] | None, recompute: tuple[str, Place] | None
) -> CheckpointMismatchError:
    """The recompute of a region with `auto` meets other operations than the forward met."""

    def told(decision: tuple[str, Place] | None) -> str:
        return f"{decision[0]} at {where(decision[1])}" if decision else "none"

    return CheckpointMismatchError(
        message(
            f"layer {layer!r}: the phases do not decide in the same order; they part at decision {number}.",
            [("forward", told(forward)), ("recompute", told(recompute))],
            "something that `auto` does not see led the recompute another way (Python state, numpy, a cache that the "
            "forward filled): give it to recompute_once(function, ...) or save_for_recompute. In a replay of an "
            "engine's routing, leave auto out: enable(model, auto=False).",
        )
    )


def saved_in_vain(layer: str, key: Key, item: str, place: Place) -> CheckpointMismatchError:
    """A layer goes on with what it decided again, and drops what `save_for_recompute` gives it."""
    return CheckpointMismatchError(
        message(
            f"layer {layer!r}, {spoken(key)}: item {item} is decided otherwise now, and what save_for_recompute "
            "returns is not used.",
            [("saved again at", where(place))],
            "go on with what it returns: (data,) = save_for_recompute(data).",
        )
    )


def other_shape(
    layer: str, what: str, shape: tuple[int, ...], saved: tuple[int, ...], place: Place
) -> CheckpointMismatchError:
    """The recompute decides about a tensor of another shape."""
    return CheckpointMismatchError(
        message(
            f"layer {layer!r}: {what} of a tensor of shape {list(shape)} in the recompute; the forward chose "
            f"{list(saved)} of one of another shape.",
            [("at", where(place))],
            "save what decides about the shape by recompute_once(function, ...) or save_for_recompute.",
        )
    )


def decided_under_a_transform(layer: str, what: str) -> OptionError:
    """A decision inside torch.func.vmap and its kin cannot be kept: it belongs to no call alone."""
    return OptionError(
        message(
            f"layer {layer!r}: auto cannot keep what {what} decides inside a torch.func transform.",
            [("at", user_line())],
            "make the decision by recompute_once(function, ...) around the transform.",
        )
    )


def under_a_transform(layer: str, use_reentrant: bool) -> MismatchError:
    """A region inside of a transform of torch.func that it cannot be in."""
    if use_reentrant:
        what = "with use_reentrant=True a layer cannot be checkpointed inside a torch.func transform."
        way_out = "use the default engine (use_reentrant=False), which works inside torch.func.vmap."
    else:
        what = "a layer can be checkpointed inside torch.func.vmap, and inside no other torch.func transform."
        way_out = "differentiate by torch.autograd.grad or backward() instead, or transform inside of the layer."
    return MismatchError(message(f"layer {layer!r}: {what}", [("at", user_line())], way_out))


def decided_in_compiled_code(layer: str, what: str) -> OptionError:
    """The compiler may make one kernel of a decision and what is around it."""
    return OptionError(
        message(
            f"layer {layer!r}: auto cannot keep what {what} decides in compiled code.",
            [("at", user_line())],
            "keep it by save_for_recompute in that code and leave auto out, or do not compile the function.",
        )
    )


def started_inside(layer: str) -> CheckpointMismatchError:
    """The accelerator has random numbers now that were not there when the region began (R7)."""
    return CheckpointMismatchError(
        message(
            f"layer {layer!r}: the accelerator was used for the first time inside this layer, so the state of its "
            "random numbers before is not known.",
            [],
            "use the device before, for instance by moving the model or the input to it, or pass "
            "preserve_rng_state=False.",
        )
    )


def saved_inside_torchs(layer: str, place: Place) -> MismatchError:
    """A decision in a part that another checkpoint runs again by itself, where nobody can give it back."""
    return MismatchError(
        message(
            f"layer {layer!r}: a decision is saved inside a reentrant checkpoint of others, whose recompute would "
            "decide again.",
            [("saved at", where(place))],
            "use roundpipe_torch.checkpoint there, or torch.utils.checkpoint with use_reentrant=False.",
        )
    )


def no_second_derivative(layer: str) -> MismatchError:
    """A gradient that the second engine gave is to be differentiated."""
    return MismatchError(
        message(
            f"layer {layer!r}: no second derivative of a layer with use_reentrant=True, whose recompute has a graph of "
            "its own.",
            [("asked at", user_line())],
            "use the default engine (use_reentrant=False).",
        )
    )


def no_forward_mode(layer: str) -> MismatchError:
    """An argument of the second engine carries a tangent."""
    return MismatchError(
        message(
            f"layer {layer!r}: no derivative in forward mode of a layer with use_reentrant=True, whose forward has no "
            "graph.",
            [("asked at", user_line())],
            "use the default engine (use_reentrant=False).",
        )
    )


def sharded_inside(layer: str) -> CheckpointMismatchError:
    """A nested backward would add to gradients that fully_shard has reduced already."""
    return CheckpointMismatchError(
        message(
            f"layer {layer!r}: use_reentrant=True around a module of fully_shard that this backward has been through "
            "before. The nested backward of its first use ended its step, so the gradient would be wrong.",
            [],
            "use the default engine (use_reentrant=False), or checkpoint inside of what is sharded.",
        )
    )


def accumulates_only(layer: str) -> MismatchError:
    """Gradients that the second engine cannot hand to the backward around."""
    return MismatchError(
        message(
            f"layer {layer!r}: with use_reentrant=True this layer works with backward() only, not with "
            "torch.autograd.grad or backward(inputs=...): it takes from outside a tensor that is no leaf, or a leaf "
            "that the forward did not have, or holds a module of FSDP or a checkpoint that works so.",
            [("asked at", user_line())],
            "pass such tensors as arguments, or use the default engine (use_reentrant=False).",
        )
    )


def context_swallowed(layer: str) -> OptionError:
    """The forward failed, and nobody was told."""
    return OptionError(
        message(
            f"layer {layer!r}: the forward raised, and the context that context_fn gave for it swallowed the "
            "exception, so there is nothing to return.",
            [],
            "let the exception through: return a false value from __exit__.",
        )
    )


def not_kept(layer: str, name: str, place: Place) -> SlotError:
    """The recompute calls `keep` where the forward did not."""
    return SlotError(
        message(
            f"layer {layer!r}: the recompute calls {name}, and the forward did not.",
            [("called at", where(place))],
            "call keep with the same function, equally often, in both phases.",
        )
    )


def kept_output_changed(layer: str, name: str, place: Place, tensor: torch.Tensor) -> MutationError:
    """An output of `keep` was changed in place (R6)."""
    return MutationError(
        message(
            f"layer {layer!r}: an output of {name} was changed in place, so the recompute cannot start from it: "
            f"{described(tensor)}.",
            [("kept at", where(place))],
            "change it out of place (y = y.relu() instead of y.relu_()), or inside the function that is kept.",
        )
    )


def argument_written(layer: str, name: str, place: Place, tensor: torch.Tensor) -> MutationError:
    """The function of `keep` changed an argument that the recompute has made again (R6)."""
    return MutationError(
        message(
            f"layer {layer!r}: {name} changed an argument in place, and is not run again: {described(tensor)}.",
            [("kept at", where(place))],
            "let the function return the new tensor. State that outlives the layer (a buffer, a cache) may be changed.",
        )
    )


def buffer_unknown(layer: str, module: str, name: str, places: list[tuple[str, str]]) -> MutationError:
    """A forward changed a large buffer for the first time, whose values before nobody kept."""
    return MutationError(
        message(
            f"layer {layer!r}: the forward changed buffer {name!r} of {module}, which earlier forwards left as it was, "
            "so the recompute cannot start from its old values.",
            places,
            "change it with update_once(...), which the recompute leaves out, if the layer's output needs the new "
            "values only.",
        )
    )


def buffer_changed(layer: str, module: str, name: str) -> MutationError:
    """A large buffer is not what the forward found, and the recompute wants to read it."""
    return MutationError(
        message(
            f"layer {layer!r}: buffer {name!r} of {module} was changed after the forward, and the recompute reads it. "
            "It is too large to be copied in each forward, so its old values are gone.",
            [("read at", user_line())],
            "change it after backward; or go on, for from the next forward on this one is copied; or pass it to the "
            "layer as an argument.",
        )
    )


def captured(layer: str, name: str, place: Place) -> MismatchError:
    """A function kept under the second engine uses a tensor that it was not given."""
    return MismatchError(
        message(
            f"layer {layer!r}: {name} uses a tensor that carries gradient and is not among its arguments.",
            [("called at", where(place))],
            "pass it as an argument, keep(function, tensor), or use the default engine (use_reentrant=False).",
        )
    )


def hooked_inside(layer: str, name: str, place: Place) -> MismatchError:
    """A function kept under the second engine hooks a tensor of the layer, whose gradient it sees a part of only."""
    return MismatchError(
        message(
            f"layer {layer!r}: {name} registers a hook on the gradient of a tensor that it was given, and "
            "use_reentrant=True does not run it again.",
            [("kept at", where(place))],
            "register the hook outside of the function that is kept, or use the default engine (use_reentrant=False).",
        )
    )


def differentiated_inside(layer: str, name: str, place: Place) -> MismatchError:
    """The recompute asks for a gradient of what it did not run."""
    return MismatchError(
        message(
            f"layer {layer!r}: the layer differentiates inside itself through {name}, which its recompute does not "
            "run, or a backward came after the graph was freed.",
            [("kept at", where(place))],
            "call the function without keep, or put the differentiation into the function that is kept.",
        )
    )


def differentiated_twice(layer: str, name: str, place: Place) -> MismatchError:
    """A second derivative through a function that the second engine keeps."""
    return MismatchError(
        message(
            f"layer {layer!r}: use_reentrant=True has no second derivative through {name}.",
            [("kept at", where(place))],
            "use the default engine (use_reentrant=False).",
        )
    )


def described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def wrong_option(target: Any, what: str, way_out: str, *facts: tuple[str, str]) -> OptionError:
    """An option of a call that runs `target`."""
    return OptionError(message(what, [("layer", repr(label_of(target))), ("called at", user_line()), *facts], way_out))


pass_over(str(Path(torch.__file__).parent) + os.sep, "<eval_with_key>")  # the latter: code that torch has written


def user_line() -> str:
    """The innermost line that is neither torch's nor ours."""
    return where(place_outside())


user_line._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called, not traced, by torch.compile
called_here._dynamo_marked_constant = True  # type: ignore[attr-defined]
