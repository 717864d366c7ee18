"""Which operations decide something, and what of each is kept to repeat it.

Five kinds:

* a *choice* gives values and where they stood (`topk`, `sort`, `max(dim)`): the places are kept, and a recompute takes
  the values from its own input, there;
* a *result* is kept whole (`nonzero`, `item`);
* a *chance*, a draw by chances that a tensor gives (`multinomial`), is kept whole, with the generator's state after it;
* a *draw* from a generator that the recompute does not rewind is kept whole;
* a *mask* says which rows an operation takes (`x[mask]`): the mask is kept.
"""

from __future__ import annotations

import enum
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from ._errors import wrong_option

__all__ = ["Decisions", "Kind", "argument", "as_decisions", "built_in", "is_composite", "mutated", "name_of", "watcher"]


class Kind(enum.Enum):
    """What is kept of an operation."""

    CHOICE = "choice"
    RESULT = "result"
    CHANCE = "chance"
    DRAW = "draw"
    MASK = "mask"


_CHOICES = "topk sort kthvalue mode median nanmedian max min cummax cummin"
_RESULTS = (
    "argmax argmin nonzero nonzero_static bincount histc histogram _unique _unique2 unique_dim unique_consecutive "
    "unique_dim_consecutive searchsorted bucketize repeat_interleave equal _local_scalar_dense"
)
_DRAWS = (
    "bernoulli bernoulli_ rand randn randint randperm rand_like randn_like randint_like normal normal_ "
    "uniform uniform_ random random_ exponential exponential_ geometric geometric_ cauchy cauchy_ log_normal "
    "log_normal_ _standard_gamma _sample_dirichlet"
)
_CHANCES = "multinomial bernoulli bernoulli_ poisson binomial"  # by a number, a bernoulli is a draw
_MASKS = "index _unsafe_index index_put index_put_ _index_put_impl_ masked_select masked_scatter masked_scatter_"


def built_in() -> Iterator[tuple[OpOverload[Any, Any], Kind]]:
    """The operations of torch that decide."""
    for names, kind in (
        (_CHOICES, Kind.CHOICE),
        (_RESULTS, Kind.RESULT),
        (_CHANCES, Kind.CHANCE),
        (_DRAWS, Kind.DRAW),
        (_MASKS, Kind.MASK),
    ):
        for name in names.split():
            for op in _overloads(getattr(torch.ops.aten, name, None)):
                if not is_composite(op) and _fits(op, kind):
                    yield op, kind


def _fits(op: OpOverload[Any, Any], kind: Kind) -> bool:
    names = {given.name for given in op._schema.arguments}
    if kind is Kind.CHOICE:  # not the maximum of everything, which has no place
        return len(op._schema.returns) == 2
    if kind is Kind.CHANCE:
        return "p" not in names or op._schema.arguments[1].type == op._schema.arguments[0].type
    # Dropout calls bernoulli_ by a number; `_auto` sees only what Python calls of it.
    return kind is not Kind.DRAW or ("generator" in names and name_of(op) != "aten::bernoulli_.float")


def _overloads(packet: OpOverloadPacket[Any, Any] | None) -> Iterator[OpOverload[Any, Any]]:
    for name in packet.overloads() if packet is not None else ():  # type: ignore[no-untyped-call]
        op = getattr(packet, name)
        if torch._C._dispatch_has_kernel(name_of(op)):  # some exist for TorchScript only
            yield op


def name_of(op: OpOverload[Any, Any]) -> str:
    """The dispatcher's name."""
    return str(op.name())  # type: ignore[no-untyped-call]


def is_composite(op: OpOverload[Any, Any]) -> bool:
    """Whether autograd sees, instead of the operation, those it is made of."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name_of(op), "CompositeImplicitAutograd"))


def argument(op: OpOverload[Any, Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call gives for an argument."""
    for n, given in enumerate(op._schema.arguments):
        if given.name == name:
            return kwargs[name] if name in kwargs else args[n] if n < len(args) else given.default_value
    return None


def mutated(op: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that a call writes its results to: those of in-place operations, and `out=`."""
    return [
        argument(op, given.name, args, kwargs)
        for given in op._schema.arguments
        if given.alias_info is not None and given.alias_info.is_write
    ]


# What users name


class Decisions:
    """What decides besides the operations built in: by name, for it is copied and pickled with a module."""

    __slots__ = ("functions", "operations")

    def __init__(self, operations: frozenset[str] = frozenset(), functions: tuple[Any, ...] = ()) -> None:
        self.operations = operations
        self.functions = tuple(patch(function) for function in functions)

    def __reduce__(self) -> Any:
        return Decisions, (self.operations, self.functions)

    def overloads(self) -> Iterator[OpOverload[Any, Any]]:
        """The operations."""
        for name in sorted(self.operations):
            space, operation = name.split("::")
            yield from _overloads(getattr(getattr(torch.ops, space), operation))


_NO_MORE = Decisions()


def as_decisions(target: Any, auto: Any) -> Decisions | None:
    """The option `auto`, checked."""
    if auto is False or auto is None:
        return None
    if isinstance(auto, Decisions):
        return auto
    if auto is True:
        return _NO_MORE
    if isinstance(auto, (str, bytes)) or not isinstance(auto, Iterable):
        raise _not_a_decision(target, f"auto must be True, False or a collection of operations, not {auto!r}.")
    operations: set[str] = set()
    functions: list[Any] = []
    for item in auto:
        name = _operation(item)
        if name is not None:
            operations.add(name)
        elif _home(item) is not None:
            functions.append(item)
        else:
            raise _not_a_decision(target, f"auto cannot watch {item!r}.")
    return Decisions(frozenset(operations), tuple(functions))


def _not_a_decision(target: Any, what: str) -> Exception:
    return wrong_option(
        target,
        what,
        "name operations (torch.cumsum, torch.ops.mylib.route) or functions of a module or class that others call by "
        "that module or class; for a local function call recompute_once(function, ...) in the layer.",
    )


def _operation(item: Any) -> str | None:
    """The dispatcher's name of what the user named."""
    if isinstance(item, OpOverload):
        return str(item._schema.name)
    if isinstance(item, OpOverloadPacket):
        return str(item._qualified_op_name)
    custom = getattr(item, "_opoverload", None)  # what torch.library.custom_op gives
    if isinstance(custom, OpOverload):
        return str(custom._schema.name)
    if isinstance(item, (types.BuiltinFunctionType, types.MethodDescriptorType)):
        packet = getattr(torch.ops.aten, item.__name__, None)
        return str(packet._qualified_op_name) if packet is not None else None
    return None


# Functions: replaced, wherever a module refers to them, by one that looks whether a region watches

_watched: dict[Any, Any] = {}
_placed: set[Any] = set()
_patching = threading.RLock()
watcher: list[Callable[..., Any]] = []
"""What a watched function calls, with itself, the function, and its arguments."""


def _home(function: Any) -> Any:
    """The module or class that `function` is an attribute of, if it is one."""
    if not isinstance(function, types.FunctionType):
        return None
    home: Any = sys.modules.get(function.__module__)
    *owners, name = function.__qualname__.split(".")
    for owner in owners:
        home = vars(home).get(owner) if home is not None else None
    found = vars(home).get(name) if home is not None else None
    stands = _watched.get(function, function)
    return home if found is not None and (found is stands or (found is function and stands not in _placed)) else None


def patch(function: Any) -> Any:
    """Let a function ask, each time it is called, whether a region watches it. Gives what stands in its place."""
    with _patching:
        watched = _watched.get(function)
        if watched is None:
            watched = _watching(function)
            _watched[function] = _watched[watched] = watched
        if watched not in _placed:  # if it is not new, an interrupt has cut that short
            _place(watched.__wrapped__, watched)
            _placed.add(watched)
        return watched


def _watching(function: Any) -> Any:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return watcher[0](watched, function, args, kwargs) if watcher else function(*args, **kwargs)

    return watched


def _place(function: Any, watched: Any) -> None:
    setattr(_home(function), function.__name__, watched)
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            for name in [name for name, value in list(vars(module).items()) if value is function]:
                setattr(module, name, watched)
