"""`auto=`: decisions of layers that nobody can edit, saved in forward and repeated in a recompute.

No mode runs, and operations that decide nothing cost nothing: the deciding ones have a kernel under a dispatch key that
torch reserves for tests of its own. It stands above autograd and torch.func, and it is switched on only while the code
of such a region runs on this thread.

A decision is kept in the region's slot like any other save, under a reserved name that holds its number in the order
of the run and the operation: `auto 3 topk`. A recompute must meet the same operations in the same order (R10), unless
the layer asks for its phase; then its own saves say where it is.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_core import Flip
from roundpipe_core._phase import Phase, Run, thread
from roundpipe_core._places import Place, place_outside, where
from roundpipe_core._replay import TapedSlot
from roundpipe_core._slots import AUTO, Key

from ._decisions import Decisions, Kind, argument, built_in, is_composite, mutated, name_of, watcher
from ._errors import decided_in_compiled_code, decided_under_a_transform, other_decision, other_shape
from ._run import DECIDED, TorchRun, is_told
from ._state import default_generators

__all__ = ["watching"]

_KEY = torch._C._dispatch_key_parse("TESTING_ONLY_GenericMode")
_include: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_included
_included: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included
_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_BELOW = torch._C._dispatch_key_parse("ADInplaceOrView")  # excluded inside kernels: what those do is not the layer's


def watching(function: Callable[..., Any], decisions: Decisions | None, outer: Run | None) -> Callable[..., Any]:
    """`function`, watched if `decisions` says so or the run around it is. Both phases call it."""
    if decisions is None and outer is not None:
        around = outer.watch
        decisions = around.decisions if isinstance(around, _Watch) else around
    if decisions is None:
        return function
    _install(decisions)
    return functools.partial(_watched, decisions, function)  # a partial, through which its modules are found


def _watched(decisions: Decisions, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    run = thread.run
    if run is None:
        return function(*args, **kwargs)
    run.watch = decisions  # a _Watch from the first decision on
    if len(_higher_order) > len(_let_through):
        _let_through_all()
    before = _included(_KEY)
    try:
        try:
            _include(_KEY, True)
            result = function(*args, **kwargs)
            if run.phase is Phase.RECOMPUTE:
                _watch_of(run).ended(run)
            return result
        finally:
            run.watch = None
            _include(_KEY, before)
    finally:
        _include(_KEY, before)  # once more: an interrupt may have cut the first short (R11)


def _watch_of(run: Run) -> _Watch:
    if not isinstance(run.watch, _Watch):
        run.watch = _Watch(run, run.watch)
    watch: _Watch = run.watch
    return watch


class _Watch:
    """The decisions of one run."""

    __slots__ = ("_met", "_saved", "decisions", "run")

    def __init__(self, run: Run, decisions: Decisions) -> None:
        self.run = run
        self.decisions = decisions
        self._met: set[Key] = set()
        self._saved: list[Key] | None = None

    # Which decision

    @property
    def _number(self) -> int:
        """Of the next decision. The run counts them with all else, so that those are counted too that it leaves out."""
        return self.run._counts.get(DECIDED, 0)

    @_number.setter
    def _number(self, number: int) -> None:
        self.run._counts[DECIDED] = number

    def _decisions(self, run: Run) -> list[Key]:
        """Those of the forward, in its order."""
        if self._saved is None:
            self._saved = [key for key in run.slot.entries if key[1] is not None and key[1].startswith(AUTO)]
        return self._saved

    def _find(self, run: Run, what: str, place: Place) -> Key | None:
        """The decision of the forward that stands for one met now; None for one of the recompute's own."""
        saved, at = self._decisions(run), self._number
        if _asks(run):
            order = itertools.chain(range(at, len(saved)), range(at))
            fits = (n for n in order if saved[n] not in self._met and self._fits(run, saved[n], what, place))
            at = next(fits, -1)
            if at < 0:
                return None
        elif at >= len(saved) or not self._fits(run, saved[at], what, place):
            if run.phase is not Phase.AUDIT:
                before = _spoken(run, saved[at]) if at < len(saved) else None
                raise other_decision(run.slot.label, at, before, (what, place))
            if at <= len(saved):  # once: what follows has no counterpart
                run.flips.append(Flip(run.slot.label, f"decision {at} is a {what} at {where(place)} now", 1, 1, 0))
                self._number = len(saved) + 1
            return None
        self._number = at + 1
        return saved[at]

    @staticmethod
    def _fits(run: Run, key: Key, what: str, place: Place) -> bool:
        if _operation(key) != what:
            return False
        return isinstance(run.slot, TapedSlot) or run.slot.entries[key].place == place  # a tape may come from elsewhere

    def ended(self, run: Run) -> None:
        """A recompute is over; it must have met what the forward met."""
        if _asks(run):
            return
        saved = self._decisions(run)
        if self._number < len(saved):
            raise other_decision(run.slot.label, self._number, _spoken(run, saved[self._number]), None)

    # What to do with it

    def repeat(
        self,
        what: str,
        decide: Callable[[], Any],
        kept: Callable[[Any], Any],
        give: Callable[[Any], Any],
        draws: bool = False,
    ) -> Any:
        """One decision: `decide` makes it, `kept` tells what of it is saved, `give` makes it again from that."""
        run, place = self.run, place_outside()
        if run.phase is Phase.FORWARD:
            made = decide()
            self._save(run, what, kept(made), place, draws)
            return made
        key = self._find(run, what, place)
        if key is None:
            return decide()
        if run.phase is Phase.RECOMPUTE:
            saved = run.fetch(key, place)
            self._met.add(key)
            return give(saved)
        made = decide()
        run.flips += run.slot.entries[key].differences(run.slot.label, key, kept(made))
        return made

    def _save(self, run: Run, what: str, data: Any, place: Place, draws: bool) -> None:
        name = f"{AUTO}{self._number} {what}"
        self._number += 1
        run.put((run.scope, name), data, place, draws)


def _asks(run: Run) -> bool:
    """Whether the layer may leave out decisions, or make others: it asked for its phase, if only in a part it keeps."""
    return is_told(run) or (isinstance(run, TorchRun) and run.asked)


def _operation(key: Key) -> str:
    return str(key[1]).split(" ", 2)[2]


def _spoken(run: Run, key: Key) -> tuple[str, Place]:
    return _operation(key), run.slot.entries[key].place


def _active() -> _Watch | None:
    """The watch of the run that this thread is in; None outside, and inside a decision that is saved as a whole."""
    run = thread.run
    return _watch_of(run) if run is not None and run.watch is not None else None


# Operations

_Operation = OpOverload[Any, Any]


class _Instead(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Below autograd, gives what `make` makes in place of one operation, once. Modes further out do not see it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what skips it imports it first, for seconds, and keeps the frames that it was called from

    def __init__(self, op: _Operation, make: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._packet = op.overloadpacket
        self._make: Callable[..., Any] | None = make

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._make is None or func.overloadpacket is not self._packet:
            return func(*args, **(kwargs or {}))
        make, self._make = self._make, None
        return make(args, kwargs or {})


def _written(op: _Operation, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> Any:
    """What the operation returns, given its results: it may have to write them to its arguments."""
    targets = mutated(op, args, kwargs)
    if not targets:
        return results
    for target, result in zip(targets, results if len(targets) > 1 else (results,), strict=True):
        if target.shape != result.shape:
            target.resize_(result.shape)
        target.copy_(result)
    return tuple(targets) if len(targets) > 1 else targets[0]


def _choice(watch: _Watch, op: _Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Values and their places. Autograd's node is the operation's own in both phases, only its places are given."""
    name = op.overloadpacket.__name__
    dim = argument(op, "dim", args, kwargs)

    def give(idx: torch.Tensor) -> Any:
        def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            values = _at(args[0], dim, idx)
            if values is None:
                raise other_shape(_label(watch), name, args[0].shape, idx.shape, place_outside())
            return _written(op, args, kwargs, (values, idx))

        if torch.is_grad_enabled() and args[0].requires_grad:
            with _Instead(op, make):
                return op(*args, **kwargs)
        return make(args, kwargs)

    return watch.repeat(name, lambda: op(*args, **kwargs), lambda made: made[1], give)


def _at(x: torch.Tensor, dim: int, idx: torch.Tensor) -> torch.Tensor | None:
    """The values of `x` at `idx`, whose axis `dim` may be reduced; None if the shapes do not fit."""
    if not x.dim():
        return x.clone().reshape(idx.shape) if idx.numel() == 1 else None
    reduced = idx.dim() < x.dim()
    places = idx.unsqueeze(dim) if reduced else idx
    others = [n for n in range(x.dim()) if n != dim % x.dim()]
    if places.dim() != x.dim() or any(places.shape[n] != x.shape[n] for n in others):
        return None
    values = x.gather(dim, places)
    return values.squeeze(dim) if reduced else values


def _result(watch: _Watch, op: _Operation, args: tuple[Any, ...], kwargs: dict[str, Any], draws: bool = False) -> Any:
    def give(results: Any) -> Any:
        if not (op._schema.is_mutable or any(map(_inexact, _each(results)))):  # no gradient reaches it
            return results
        with _Instead(op, lambda args, kwargs: _written(op, args, kwargs, results)):
            return op(*args, **kwargs)

    return watch.repeat(op.overloadpacket.__name__, lambda: op(*args, **kwargs), _detached, give, draws)


def _composite(watch: _Watch, op: _Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation that autograd does not see as one: its result may carry no gradient (R5)."""
    return watch.repeat(op.overloadpacket.__name__, lambda: op(*args, **kwargs), _same, _same, draws=True)


def _chance(watch: _Watch, op: _Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _result(watch, op, args, kwargs, draws=True)


def _draw(watch: _Watch, op: _Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    generator = argument(op, "generator", args, kwargs)
    if generator is None or any(generator is known for known in default_generators()):
        return op(*args, **kwargs)  # the recompute draws the same again (R7)
    return _result(watch, op, args, kwargs)


def _mask(watch: _Watch, op: _Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows taken by a mask. Autograd keeps the mask, so it is put in before."""
    place = next(n for n, given in enumerate(op._schema.arguments) if given.name in ("indices", "mask"))
    given = args[place]
    indices = list(given) if isinstance(given, (list, tuple)) else [given]
    which = [n for n, index in enumerate(indices) if index is not None and index.dtype in (torch.bool, torch.uint8)]
    if not which:
        return op(*args, **kwargs)
    _refuse_where_unseen(watch, op, args)
    masks = watch.repeat(op.overloadpacket.__name__, lambda: tuple(indices[n] for n in which), _same, _same)
    for n, mask in zip(which, masks, strict=True):
        indices[n] = mask
    replaced = indices if isinstance(given, (list, tuple)) else indices[0]
    return op(*args[:place], replaced, *args[place + 1 :], **kwargs)


_HOW = {Kind.CHOICE: _choice, Kind.RESULT: _result, Kind.CHANCE: _chance, Kind.DRAW: _draw, Kind.MASK: _mask}


def _kernel(op: _Operation, how: Callable[..., Any], built_in: bool) -> Callable[..., Any]:
    makes = not any("Tensor" in str(given.type) for given in op._schema.arguments)  # torch.randn: always below

    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            _include(_KEY, False)  # what is done in here is no decision of its own
            watch = _active() if makes or not _excluded(_BELOW) else None
            if watch is None or not (built_in or op._schema.name in watch.decisions.operations):
                return op(*args, **kwargs)
            if how is not _mask and how is not _draw:
                _refuse_where_unseen(watch, op, args)
            return how(watch, op, args, kwargs)
        finally:
            _include(_KEY, True)

    return kernel


def _refuse_where_unseen(watch: _Watch, op: _Operation, args: tuple[Any, ...]) -> None:
    if TracingContext.try_get() is not None:
        raise decided_in_compiled_code(_label(watch), op.overloadpacket.__name__)
    if any(map(_wrapped, args)):
        raise decided_under_a_transform(_label(watch), op.overloadpacket.__name__)


def _wrapped(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def _label(watch: _Watch) -> str:
    return watch.run.slot.label


def _same(value: Any) -> Any:
    return value


def _each(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _inexact(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)


def _detached(results: Any) -> Any:
    if isinstance(results, torch.Tensor):
        return results.detach()
    return tuple(map(_detached, results)) if isinstance(results, (tuple, list)) else results


# Functions


def _call(watched: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of a function that somebody named as a decision."""
    watch = _active()
    if watch is None or watched not in watch.decisions.functions:
        return function(*args, **kwargs)

    def decide() -> Any:
        try:
            _include(_KEY, False)
            return function(*args, **kwargs)
        finally:
            _include(_KEY, True)

    return watch.repeat(function.__qualname__, decide, _same, _same, draws=True)


_tolist: Any = torch.Tensor.tolist


@functools.wraps(_tolist, assigned=("__name__", "__qualname__"))
def _list(tensor: torch.Tensor) -> Any:
    """`tensor.tolist()`, which reads memory and passes no dispatcher."""
    watch = _active()
    if watch is None or _wrapped(tensor):
        return _tolist(tensor)
    return _tolist(watch.repeat("tolist", lambda: tensor.detach().cpu(), _same, _same))


_bernoulli_: Any = torch.Tensor.bernoulli_


@functools.wraps(_bernoulli_, assigned=("__name__", "__qualname__"))
def _toss(tensor: torch.Tensor, p: Any = 0.5, *, generator: torch.Generator | None = None) -> Any:
    """`tensor.bernoulli_(p)`. Dropout calls the operation under it, which must cost what it costs without `auto`."""
    watch = None if generator is None or isinstance(p, torch.Tensor) else _active()
    if watch is None:
        return _bernoulli_(tensor, p, generator=generator)
    try:
        _include(_KEY, False)
        return _draw(watch, torch.ops.aten.bernoulli_.float, (tensor, p), {"generator": generator})
    finally:
        _include(_KEY, True)


# Once for the process

_libraries: dict[str, torch.library.Library] = {}
_registered: set[str] = set()
_installed: set[frozenset[str]] = set()
_lock = threading.Lock()


def _install(decisions: Decisions) -> None:
    """Give the deciding operations their kernels."""
    if decisions.operations in _installed:
        return
    with _lock:
        if "_" not in _registered:
            _library("_").fallback(torch.library.fallthrough_kernel)  # type: ignore[no-untyped-call]
            _registered.add("_")
        if not watcher:
            for op, kind in built_in():
                _register(op, _HOW[kind], built_in=True)
            torch.Tensor.tolist = _list  # type: ignore[method-assign,assignment]
            torch.Tensor.bernoulli_ = _toss  # type: ignore[method-assign,assignment]
            watcher.append(_call)  # last: an interrupt before that leaves the rest to the next call
        for op in decisions.overloads():
            _register(op, _composite if is_composite(op) else _result, built_in=False)
        _installed.add(decisions.operations)


_higher_order: dict[str, Any] = torch._ops._higher_order_ops
_let_through: set[str] = set()


def _let_through_all() -> None:
    """Let operations of functions (`vmap` of an autograd.Function) pass the key. The branch of `torch.cond` is kept."""
    for name, operation in [*_higher_order.items()]:
        if name == "cond" and name not in _let_through:
            operation.py_impl(_KEY)(functools.partial(_branch, operation))
        elif name != "cond":
            operation.fallthrough(_KEY)
        _let_through.add(name)


def _branch(cond: Callable[..., Any], taken: Any, /, *rest: Any) -> Any:
    try:
        _include(_KEY, False)
        watch = None if TracingContext.try_get() is not None or _excluded(_BELOW) else _active()
        if watch is not None:
            taken = watch.repeat("cond", lambda: _detached(taken), _same, _same)
        return cond(taken, *rest)
    finally:
        _include(_KEY, True)


def _register(op: _Operation, how: Callable[..., Any], built_in: bool) -> None:
    name = name_of(op)
    if name not in _registered:
        _library(op.namespace).impl(op, _kernel(op, how, built_in))  # type: ignore[no-untyped-call]
        _registered.add(name)


def _library(namespace: str) -> torch.library.Library:
    if namespace not in _libraries:
        library = torch.library.Library(namespace, "IMPL", "TESTING_ONLY_GenericMode")  # type: ignore[no-untyped-call]
        _libraries[namespace] = library
    return _libraries[namespace]
