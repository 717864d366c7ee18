"""What a recompute needs to find as the forward found it: random numbers, autocast, ambient settings (R7, R10)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from operator import call, eq, methodcaller, not_
from typing import Any, ClassVar, TypeVar

import torch
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_core._phase import thread
from roundpipe_core._trees import flatten

from ._views import PLAIN

__all__ = [
    "LEAD_NOWHERE",
    "PLAIN_VALUES",
    "Ambient",
    "DrawWatch",
    "Generators",
    "Met",
    "Visit",
    "Watch",
    "attributes_of",
    "default_generators",
    "equal",
    "generators_of",
    "generators_on",
    "generators_within",
    "is_beside",
    "modules_of",
    "once_for_a_class",
    "reached",
    "replayed",
    "tensors_of",
]

T = TypeVar("T")
Met = Collection[torch.Generator | None]
"""Generators by which another thread was inside a region meanwhile; None for the default ones."""

_ACCELERATOR = torch.accelerator.current_accelerator()
_AUTOCAST_DEVICES = ("cpu",) if _ACCELERATOR is None else ("cpu", _ACCELERATOR.type)
_CPU_ONLY: tuple[torch.Generator, ...] = (torch.default_generator,)


_COLLECTS_AT_ALLOCATIONS = sys.version_info < (3, 12)
_count, _threshold = gc.get_count, gc.get_threshold
_get_state, _set_state = methodcaller("get_state"), torch.Generator.set_state


class Generators:
    """Generators whose draws a region repeats, with their states when it began.

    The default ones come first, then those that the call itself can reach.
    """

    __slots__ = ("_generators", "own", "start")

    def __init__(self, generators: tuple[torch.Generator, ...], own: tuple[torch.Generator, ...] = ()) -> None:
        self._generators, self.own = generators + own, own
        self.start = self.now()

    def now(self) -> list[torch.Tensor]:
        """The states now. Kept on the host; reading them does not wait for a device."""
        # Torch holds a generator's lock while it makes the state a Python object. A callback of a collection in there
        # (JAX has one) can pass the interpreter to a thread that waits for that lock, and never gives the interpreter
        # back. So what is due soon is collected before. A lock of our own would have to be left by every interrupt.
        if _COLLECTS_AT_ALLOCATIONS and _count()[0] > 0.85 * _threshold()[0] and gc.isenabled():
            gc.collect(0)
        return [*map(_get_state, self._generators)]

    def set(self, states: Sequence[torch.Tensor]) -> None:
        """Continue from `states`."""
        for _ in map(_set_state, self._generators, states):  # as far as these go: a layer may have made one since
            pass

    def since_start(self) -> list[torch.Tensor]:
        """The states now; the very list `start` if nothing was drawn since."""
        now = self.now()
        return self.start if equal(now, self.start) else now

    def missed(self) -> bool:
        """Whether the accelerator was started since, so that its generators are not among these."""
        return (
            _ACCELERATOR is not None and len(self._generators) == 1 + len(self.own) and _started_backend() is not None
        )


def equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether states, which are on the host, are equal; not by a tensor operation, which modes would see.

    Of a region and one inside of it, as far as they have the same generators.
    """
    return all(map(eq, map(_bytes, some), map(_bytes, others)))


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.nbytes)


_this_thread = threading.get_ident


class Visit:
    """Notices when two threads are inside regions at once, where one default generator serves both.

    So it does for each generator of the user's that regions of both reach.

    Threads are kept by identity, so that a visit which a keyboard interrupt cut short ends with the next one.
    """

    __slots__ = ("_met", "_nested", "_own")

    _inside: ClassVar[set[int]] = set()
    _meeting: ClassVar[object] = None  # the last one; each is new, so that threads which note one at once lose none

    def __init__(self, own: Collection[torch.Generator]) -> None:
        me, inside = _this_thread(), Visit._inside
        self._nested = me in inside and thread.run is not None
        self._met = Visit._meeting  # before this one
        inside.add(me)
        if len(inside) > 1:
            Visit._meeting = object()
        self._own: list[_Stay] | tuple[()] = [*map(_Stay, own)] if own else ()

    @staticmethod
    def inside() -> bool:
        """Whether this thread is inside now."""
        return _this_thread() in Visit._inside

    @staticmethod
    def leave() -> None:
        """This thread is inside no more."""
        for inside in Visit._everywhere():
            inside.discard(_this_thread())

    @staticmethod
    def others() -> bool:
        """Whether another thread is inside now."""
        return len(Visit._inside) > (_this_thread() in Visit._inside)

    def end(self) -> Met:
        """Leave; the generators by which another thread was inside meanwhile."""
        if not self._nested:
            Visit._inside.discard(_this_thread())
        met = [stay.generator for stay in self._own if stay.end()] if self._own else ()
        return () if self._met is Visit._meeting else (None, *met)

    @staticmethod
    def forked() -> None:
        """In the child of a fork, where the other threads are no more."""
        for inside in Visit._everywhere():
            inside.intersection_update({_this_thread()})

    @staticmethod
    def _everywhere() -> list[set[int]]:
        return [Visit._inside, *(room.inside for room in _rooms.values())]


class _Room:
    """Threads that are inside regions which reach one generator of the user's."""

    __slots__ = ("inside", "meeting")

    def __init__(self) -> None:
        self.inside: set[int] = set()
        self.meeting: object = None


_rooms: weakref.WeakKeyDictionary[torch.Generator, _Room] = weakref.WeakKeyDictionary()


class _Stay:
    """Of a visit, by one of these generators."""

    __slots__ = ("_met", "_nested", "_room", "generator")

    def __init__(self, generator: torch.Generator) -> None:
        me, room = _this_thread(), _rooms.setdefault(generator, _Room())
        self.generator, self._room = generator, room
        self._nested, self._met = me in room.inside, room.meeting
        room.inside.add(me)
        if len(room.inside) > 1:
            room.meeting = object()

    def end(self) -> bool:
        """Leave; whether another thread was inside meanwhile."""
        if not self._nested:
            self._room.inside.discard(_this_thread())
        return self._met is not self._room.meeting


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Visit.forked)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of a recompute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what skips it imports it first, for seconds, and keeps the frames that it was called from

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What a compiled layer runs is seen too; other modes keep a layer from being run compiled."""
        return True


class DrawWatch(Watch):  # type: ignore[no-untyped-call]
    """Notices draws, and from what."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: set[int] = set()
        """By what is the same in all Python objects of one; 0 for the default ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            if given.get("dropout_p") != 0.0:
                self.drawn.add(_identity(given.get("generator")))
        return func(*args, **kwargs)


def replayed(
    attempt: Callable[[DrawWatch | None], tuple[T, Met]], generators: Generators | None, crowded: Met
) -> tuple[T, str]:
    """Recompute by `attempt`, and tell from what it drew that another thread may have drawn from too.

    `attempt` gives its result and by what it met another thread; `crowded` tells that of the forward.
    """
    if generators is None:  # it need not draw what its forward drew
        return attempt(None)[0], ""
    watch = DrawWatch() if crowded or Visit.others() else None
    result, met = attempt(watch)
    if met and watch is None:  # another thread came in meanwhile: look again, more closely
        watch, before = DrawWatch(), met
        result, met = attempt(watch)
        met = {*met, *before}
    if watch is None:
        return result, ""
    if 0 in watch.drawn:
        return result, "default generator"
    return result, "" if watch.drawn.isdisjoint(map(_identity, {*crowded, *met})) else "torch.Generator"


def _identity(generator: torch.Generator | None) -> int:
    """Operations get another object than their caller has."""
    number, *defaults = map(_number, (generator, *default_generators()))
    return 0 if number in defaults else number


def _number(generator: Any) -> int:
    return 0 if generator is None else int(generator._cdata)


def _started_backend() -> Any:
    """The module of the accelerator, if there is one and this process has used it: asking it would start it."""
    if _ACCELERATOR is None:
        return None
    backend: Any = getattr(torch, _ACCELERATOR.type)
    started = backend.is_initialized() if hasattr(backend, "is_initialized") else backend.is_available()
    return backend if started else None


def _current_device() -> int:
    """The index of the device that "cuda" alone means. Threads of autograd have that of what they work on."""
    backend = _started_backend()
    return 0 if backend is None else int(backend.current_device())


def generators_of(function: Any, arguments: Any) -> tuple[torch.Generator, ...]:
    """The CPU's generator and those of every device of the tensors and of the modules' parameters and buffers.

    Tensors and modules may stand anywhere in `arguments`.
    """
    if _ACCELERATOR is None or (backend := _started_backend()) is None:
        return _CPU_ONLY
    if _ACCELERATOR.type == "mps":  # pragma: no cover - needs an Apple GPU
        return (*_CPU_ONLY, torch.mps._get_default_mps_generator())
    used = {backend.current_device()}
    if backend.device_count() > 1:
        leaves: list[Any] = []
        flatten(arguments, leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for module in modules_of(function, leaves):
            tensors += itertools.chain(module.parameters(), module.buffers())
        used |= {t.device.index for t in tensors if t.device.type == _ACCELERATOR.type}
    known = backend.default_generators
    return (*_CPU_ONLY, *(known[index] for index in sorted(used)))


def generators_on(devices: Iterable[int]) -> tuple[torch.Generator, ...]:
    """The CPU's generator and those of these devices of the accelerator."""
    known = default_generators()[1:]
    return (*_CPU_ONLY, *(known[0 if len(known) == 1 else index] for index in sorted(set(devices))))


def default_generators() -> tuple[torch.Generator, ...]:
    """Those of this process, which regions rewind."""
    backend = _started_backend()
    if backend is None or _ACCELERATOR is None:
        return _CPU_ONLY
    if _ACCELERATOR.type == "mps":  # pragma: no cover - needs an Apple GPU
        return (*_CPU_ONLY, torch.mps._get_default_mps_generator())
    return (*_CPU_ONLY, *backend.default_generators)


_MOST_SEARCHED = 256
"""Longer containers hold data, not layers."""


def modules_of(function: Any, leaves: Collection[Any]) -> Iterator[torch.nn.Module]:
    """The modules that a call can reach.

    They are itself, its bound object, its partial, its closure and defaults, modules among the globals that it names
    and what functions among these can reach, its arguments, and what of these is in a list, tuple or dict, or an
    attribute of an object that is called or bound.
    """
    if _PLAIN.issuperset(map(type, leaves)) and _reaches_nothing(function):
        return iter(())
    return _reached(function, leaves, torch.nn.Module)


def reached(
    function: Any, leaves: Collection[Any], closures: list[types.FunctionType], objects: list[Any]
) -> Sequence[Any]:
    """The modules that a call can reach in this way, the generators, and the tensors that are not its arguments.

    Args:
        function: what is called.
        leaves: of its arguments.
        closures: gets the functions among what is reached that have variables of others.
        objects: gets the objects that are called or bound, other than modules.
    """
    if _PLAIN.issuperset(map(type, leaves)) and _reaches_nothing(function):
        return ()
    others = [leaf for leaf in leaves if type(leaf) not in PLAIN]
    return [*_reached(function, others, (torch.nn.Module, torch.Tensor, torch.Generator), closures, objects)]


def tensors_of(function: Any, leaves: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors that a call can reach in the same way, and those of the modules."""
    for found in _reached(function, leaves, (torch.nn.Module, torch.Tensor)):
        if isinstance(found, torch.Tensor):
            yield found
            continue
        for module in found.modules():
            values = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
            yield from (value for value in values if isinstance(value, torch.Tensor))


def _reached(
    function: Any,
    leaves: Iterable[Any],
    kinds: type | tuple[type, ...],
    closures: list[types.FunctionType] | None = None,
    objects: list[Any] | None = None,
) -> Iterator[Any]:
    """What is of one of these kinds. `closures` and `objects`: see `reached`."""
    waiting, seen, bound = [function, *leaves], set(), set()
    while waiting:
        found = waiting.pop()
        if (type(found) is torch.Tensor and kinds is torch.nn.Module) or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, kinds):
            yield found
        elif type(found) is types.FunctionType:
            if found.__dict__:
                waiting.append(found.__dict__.get("__wrapped__"))
            if found.__defaults__:
                waiting += found.__defaults__
            if found.__kwdefaults__:
                waiting += found.__kwdefaults__.values()
            if found.__closure__ and closures is not None:
                closures.append(found)
            for cell in found.__closure__ or ():
                with contextlib.suppress(ValueError):  # a cell that is not filled yet
                    waiting.append(cell.cell_contents)
            for value in map(found.__globals__.get, found.__code__.co_names):
                if type(value) not in LEAD_NOWHERE and (isinstance(value, kinds) or is_beside(found, value)):
                    waiting.append(value)
        elif isinstance(found, partial):
            waiting += [found.func, *found.args, *found.keywords.values()]
        elif isinstance(found, types.MethodType):
            bound.add(id(found.__self__))
            waiting += [found.__self__, found.__func__]
        elif isinstance(found, (list, tuple, dict)) and len(found) <= _MOST_SEARCHED:
            waiting += found.values() if isinstance(found, dict) else found
        elif type(found) not in _PLAIN and type(found) not in LEAD_NOWHERE and not isinstance(found, type):
            attributes = attributes_of(found)
            if attributes and (callable(found) or id(found) in bound):
                waiting += attributes.values()
                if objects is not None:
                    objects.append(found)
            if isinstance(kinds, tuple) and torch.Generator in kinds:
                waiting += generators_within([found])


def attributes_of(value: Any) -> dict[str, Any]:
    """What an object has, if that is not too much to look through."""
    attributes = getattr(value, "__dict__", None)
    return attributes if type(attributes) is dict and len(attributes) <= _MOST_SEARCHED else {}


def once_for_a_class(search: Callable[[type], T]) -> Callable[[type], T]:
    """Call `search` once for each class, which is not held for it."""
    known: dict[int, T] = {}

    def found(kind: type) -> T:
        if id(kind) not in known:
            known[id(kind)] = search(kind)
            weakref.finalize(kind, known.pop, id(kind), None).atexit = False
        return known[id(kind)]

    return found


def generators_within(values: Collection[Any]) -> list[torch.Generator]:
    """Those among `values`, and in containers and attributes of objects there, a few levels deep."""
    found: list[torch.Generator] = []
    seen: dict[int, Any] = {}
    for _ in range(_LEVELS):
        may_have_some = map(not_, map(_HAVE_NO_GENERATOR.__contains__, map(type, values)))
        fresh = {id(value): value for value in itertools.compress(values, may_have_some) if id(value) not in seen}
        if not fresh:
            break
        seen |= fresh
        found += (value for value in fresh.values() if type(value) is torch.Generator)
        values = [*itertools.chain.from_iterable(map(_held_by, fresh.values()))]
    return found


def _held_by(value: Any) -> Collection[Any]:
    """What a container has, or an object as its attributes."""
    if isinstance(value, (torch.nn.Module, torch.Tensor, torch.Generator, type)):
        return ()
    if isinstance(value, (list, tuple, dict)):
        held: Collection[Any] = value.values() if isinstance(value, dict) else value
        return held if len(held) <= _MOST_SEARCHED else ()
    kind: type = type(value)
    names = _generators_of(kind)
    if not names:
        return attributes_of(value).values()
    return [*attributes_of(value).values(), *(getattr(value, name) for name in names)]


@once_for_a_class
def _generators_of(kind: type) -> tuple[str, ...]:
    """The attributes of a class that are generators."""
    return tuple(name for base in kind.__mro__ for name, value in vars(base).items() if type(value) is torch.Generator)


_LEVELS = 4
_HAVE_NO_GENERATOR = frozenset(
    {
        bool, int, float, str, type(None), set, types.FunctionType, types.MethodType, types.BuiltinFunctionType,
        torch.dtype, torch.device, torch.Tensor, torch.nn.Parameter, torch.Size,
    }
)  # fmt: skip
"""What most attributes are."""
LEAD_NOWHERE = frozenset({type(None), type, types.ModuleType, types.BuiltinFunctionType})
"""What most names of a function's globals stand for."""
PLAIN_VALUES = _PLAIN = frozenset({*PLAIN, type(None), bool, int, float, str, object})
"""What most arguments are."""


def _reaches_nothing(function: Any) -> bool:
    """Whether all that a function has leads nowhere, as of most of those that are no methods."""
    if type(function) is not types.FunctionType:
        return False
    if function.__closure__ or function.__defaults__ or function.__kwdefaults__ or function.__dict__:
        return False
    for value in map(function.__globals__.get, function.__code__.co_names):
        kind = type(value)
        if kind not in LEAD_NOWHERE and (kind is not types.FunctionType or is_beside(function, value)):
            return False
    return True


def is_beside(function: types.FunctionType, value: Any) -> bool:
    """Whether `value` is a function of the same file."""
    if not isinstance(value, types.FunctionType):
        return False
    original = value.__dict__.get("__wrapped__", value)  # of a decorated or compiled one
    return isinstance(original, types.FunctionType) and original.__globals__ is function.__globals__


_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]


def _settings() -> Iterator[_Setting]:
    """Reader and writer of every global switch that changes what a kernel computes."""
    yield torch.get_default_dtype, torch.set_default_dtype
    for device in _AUTOCAST_DEVICES:  # where it is off too: a layer may put it on
        yield partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)
    backend: Any = None if _ACCELERATOR is None else getattr(torch, _ACCELERATOR.type)
    if hasattr(backend, "set_device"):
        yield _current_device, backend.set_device
    c: Any = torch._C
    # Off inside of what a class of tensors gives to torch's own function, as the `backward` of a loss of that class.
    yield c._get_torch_function_state, c._set_torch_function_state
    for reader, writer in (
        ("_get_cudnn_enabled", "_set_cudnn_enabled"),
        ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
        ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
        ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
        ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
        ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
        ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
        ("_get_math_sdp_enabled", "_set_sdp_use_math"),
        ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
        ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
        ("_get_sdp_priority_order", "_set_sdp_priority_order"),
        ("_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
    ):
        if hasattr(c, reader) and hasattr(c, writer):
            yield getattr(c, reader), getattr(c, writer)
    for what in ("fp16", "bf16"):
        name = f"cublas_allow_{what}_reduced_precision_reduction"
        yield getattr(c, f"_get_{name}"), _spread(getattr(c, f"_set_{name}"))
    yield c._get_cublas_allow_fp16_accumulation, c._set_cublas_allow_fp16_accumulation
    deterministic, warns = c._get_deterministic_algorithms, c._get_deterministic_algorithms_warn_only
    yield deterministic, lambda value: c._set_deterministic_algorithms(value, warn_only=warns())
    yield warns, lambda value: c._set_deterministic_algorithms(deterministic(), warn_only=value)
    yield _cached_weights, _cache_weights


class _Weights:
    """What `torch.nn.utils.parametrize.cached()` keeps; `blocks` of it are open."""

    __slots__ = ("blocks", "tensors")

    def __init__(self, blocks: int, tensors: dict[Any, Any]) -> None:
        self.blocks, self.tensors = blocks, tensors

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Weights) or self.blocks != other.blocks:
            return False
        return self.tensors.keys() == other.tensors.keys() and all(
            tensor is other.tensors[key] for key, tensor in self.tensors.items()
        )

    __hash__ = None  # type: ignore[assignment]


_parametrize: Any = parametrize


def _cached_weights() -> _Weights | None:
    blocks = _parametrize._cache_enabled
    return _Weights(blocks, _parametrize._cache.copy()) if blocks else None


def _cache_weights(weights: _Weights | None) -> None:
    _parametrize._cache_enabled = weights.blocks if weights else 0
    _parametrize._cache = weights.tensors.copy() if weights else {}


def _spread(writer: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda value: writer(*value) if isinstance(value, tuple) else writer(value)


_FP32 = tuple(itertools.product(("cuda", "mkldnn"), ("matmul", "conv", "rnn")))
_SETTINGS: tuple[_Setting, ...] = (
    *_settings(),
    *(
        (partial(torch._C._get_fp32_precision_getter, *of), partial(torch._C._set_fp32_precision_setter, *of))
        for of in _FP32
    ),
)
_READERS = tuple(reader for reader, _ in _SETTINGS)
_dynamo: Any = torch._C._dynamo.eval_frame
_SURROUNDINGS: tuple[Callable[[], Any], ...] = (
    torch._C._is_any_autocast_enabled,
    torch._C._len_torch_function_stack,
    _dynamo.get_eval_frame_callback,
    *_READERS,
)
_CACHED = _SURROUNDINGS.index(_cached_weights)

# The older switches over the same float32 settings. Torch refuses to read them while they disagree with the new ones.
_OLD_FP32: tuple[tuple[Callable[[], Any], Callable[[Any], Any], tuple[Any, ...], tuple[int, ...]], ...] = (
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, ("highest", "high", "medium"), (-6, -3)),
    (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32, (True, False), (-5, -4)),
)


def _apply(values: list[Any]) -> None:
    """Set whatever differs from `values`."""
    if [read() for read in _READERS[-len(_FP32) :]] != values[-len(_FP32) :]:
        for _, write, candidates, covered in _OLD_FP32:
            for candidate in candidates:
                write(candidate)
                if all(_plain(_READERS[n]()) == _plain(values[n]) for n in covered):
                    break
    for (read, write), value in zip(_SETTINGS, values, strict=True):
        if read() != value:
            write(value)


def _plain(precision: str) -> str:
    return "ieee" if precision == "none" else precision


def _autocast() -> tuple[Any, ...]:
    return tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
        for device in _AUTOCAST_DEVICES
    )


def _default_device() -> torch.device | None:
    for mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


class _Compiling:
    """Lets torch.compile see the functions that are called, or not, as it did at another moment.

    A layer whose forward was compiled, because the code around it is, must not run uncompiled in the recompute.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    def __enter__(self) -> None:
        self._before = _dynamo.set_eval_frame(self._callback)

    def __exit__(self, *exc: object) -> None:
        _dynamo.set_eval_frame(self._before)


_by_age = False


def _choose_by_age() -> None:
    """Let Dynamo try the graphs of a function from the oldest on, and not from the one that ran last.

    Otherwise the recompute may run a graph for any sizes where the forward ran an older one for its very sizes. What
    they save differs.
    """
    global _by_age
    _by_age = True
    _dynamo._set_lru_cache(False)  # process-wide; torch's checkpoint advises the same


class Ambient:
    """Autocast, the default device, global settings and the compiler at one moment."""

    _autocast: tuple[Any, ...] = ()
    _device: torch.device | None = None

    def __init__(self) -> None:
        if not _by_age and "torch._dynamo" in sys.modules:
            _choose_by_age()
        self._found = [*map(call, _SURROUNDINGS)]
        if self._found[0]:
            self._autocast = _autocast()
        if self._found[1]:
            self._device = _default_device()

    def restored(self) -> contextlib.AbstractContextManager[Any] | None:
        """A context in which all of it is as it was then; None if it is so now."""
        found = [*map(call, _SURROUNDINGS)]
        if found == self._found and not found[0] and not found[1]:
            return None
        return self._restored()

    def forget_weights(self) -> None:
        """Let `cached()` keep what it kept then: weights made in a forward without a graph are of no use to others."""
        weights: _Weights | None = self._found[_CACHED]
        if weights is not None:
            _cache_weights(weights)

    def _restored(self) -> contextlib.AbstractContextManager[Any] | None:
        now = Ambient()
        (_, _, compiler, *values), (_, _, compiler_now, *values_now) = self._found, now._found
        autocast = self._autocast or now._autocast
        if values == values_now and not autocast and self._device == now._device and compiler is compiler_now:
            return None
        # Entered by who uses it: an error before that would leave it open (R11).
        return self._after(now, bool(autocast))

    @contextlib.contextmanager
    def _after(self, now: Ambient, autocast: bool) -> Iterator[None]:
        (_, _, compiler, *values), (_, _, compiler_now, *values_now) = self._found, now._found
        stack = contextlib.ExitStack()
        try:
            try:
                if values != values_now:
                    stack.callback(_apply, values_now)
                    _apply(values)
                if autocast:
                    for device in _AUTOCAST_DEVICES:
                        stack.enter_context(torch.autocast(device, enabled=False))
                    for device, enabled, dtype, cache in self._autocast:
                        stack.enter_context(torch.autocast(device, enabled=enabled, dtype=dtype, cache_enabled=cache))
                if self._device != now._device:
                    stack.enter_context(self._device or torch.device("cpu"))
                if compiler is not compiler_now:
                    stack.enter_context(_Compiling(compiler))
                yield
            finally:
                stack.close()
        finally:
            stack.close()  # once more: an interrupt may have come before the first
