"""What makes a trace safe to use again: a key for everything that a function can reach.

A trace of a layer shows the layer as it was. It may be used again only as long as nothing that the code reads has
changed: globals, what those name in turn, defaults, attributes. `token` gives a key that takes all of it by value,
and None where that cannot be done: closures, lists and dicts, objects of the user's classes, generators of random
numbers, files.
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
import types
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ._arguments import AsIs
from ._jax import is_tracer

__all__ = ["codes", "reach", "see_through", "token", "tree_token"]

_ATOMS = frozenset({int, bool, str, bytes, float, complex, type(None), type(Ellipsis)})
_FAR = 1000  # objects that one function reaches
_LONG = 64  # a container with more items costs more to compare than it is worth

# Packages whose functions give the same for the same arguments.
_STEADY = frozenset(
    [
        "jax",
        "jaxlib",
        "numpy",
        "ml_dtypes",
        "roundpipe_core",
        "roundpipe_jax",
        "math",
        "cmath",
        "operator",
        "functools",
        "itertools",
        "typing",
        "collections",
        "dataclasses",
        "numbers",
        "string",
        "types",
        "abc",
        "builtins",
    ]
)
_UNSTEADY_BUILTINS = frozenset(
    ("globals", "locals", "vars", "eval", "exec", "compile", "open", "input", "__import__", "breakpoint")
)


class _Same:
    """An object that does not change, compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _UnknownError(Exception):
    """Something that may change unseen."""


def token(value: Any) -> Hashable:
    """A key for a value and all it can reach; None if it may change behind our back."""
    try:
        return _Walk(arrays=False).token(value)
    except (_UnknownError, RecursionError, ValueError):  # a closure cell that is still empty
        return None


def reach(function: types.FunctionType, *, loosely: bool = False) -> Hashable:
    """The same for a function whose traces are kept; arrays in module variables may be part of it.

    `loosely`, for traces that are used within one outer trace only, also takes in objects as they are now: their
    attributes, and the items of dicts and of lists, but for integers in lists, which are mostly counts of calls.
    """
    if function.__closure__ and function.__code__ not in _transparent:
        return None
    try:
        return _Walk(arrays=True, loosely=loosely).function(function)
    except (_UnknownError, RecursionError, ValueError):  # a closure cell that is still empty
        return None


def tree_token(tree: Any) -> Hashable:
    """The same for the structure of a pytree, in which JAX takes 1 for True."""
    known = _plain_trees.get(tree)
    if known is None:
        try:
            known = _Walk(arrays=False).tree(tree)
        except (_UnknownError, RecursionError):
            return None
        if _is_plain(tree):
            if len(_plain_trees) > 1000:
                _plain_trees.clear()
            _plain_trees[tree] = known
    return known


_plain_trees: dict[Any, Hashable] = {}


def _is_plain(tree: Any) -> bool:
    node = tree.node_data()
    if node is None:
        return True
    kind, aux = node
    plain = kind in (tuple, list, type(None)) or (kind is dict and all(type(key) is str for key in aux))
    return plain and all(map(_is_plain, tree.children()))


_transparent: set[types.CodeType] = set()


def see_through(wrapper: Any) -> None:
    """Make it known that functions with this code do what the function `fun` in their closure does."""
    _transparent.add(wrapper.__code__)


def codes(function: Any) -> tuple[types.CodeType | None, ...]:
    """The code of a function, bound method or partial, and that of functions it closes over."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    try:
        inner = [getattr(cell.cell_contents, "__code__", None) for cell in getattr(function, "__closure__", None) or ()]
    except ValueError:  # a cell that is still empty
        inner = []
    return (getattr(function, "__code__", None), *inner)


class _Walk:
    def __init__(self, arrays: bool, loosely: bool = False) -> None:
        self.arrays, self.loosely = arrays, loosely
        self.seen: dict[int, int] = {}  # numbers, in order, so that cycles end
        self.held: list[Any] = []

    def token(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _ATOMS:
            return kind, repr(value) if kind in (float, complex) else value  # -0.0 is not 0.0, and nan is nan
        if id(value) in self.seen:
            return "seen", self.seen[id(value)]
        if kind is AsIs:
            return AsIs, self.token(value.value)
        if kind in (tuple, frozenset):
            return self.container(value)
        if isinstance(value, np.dtype):
            return np.dtype, str(value)
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return kind, str(value.dtype), value.tobytes()
        if self.arrays and isinstance(value, jax.Array) and not is_tracer(value) and not isinstance(value, jax.Ref):
            return _Same(value)
        if _is_public(value):
            return _Same(value)
        if kind is types.FunctionType:
            return self.function(value)
        if kind is types.BuiltinFunctionType and isinstance(value.__self__, types.ModuleType):
            raise _UnknownError  # those that are steady were found above
        if isinstance(value, type):
            return self.record(value)
        if kind is _JITTED:
            return kind, self.token(value.__wrapped__)
        if self.loosely:
            return self.state(value)
        raise _UnknownError

    def state(self, value: Any) -> Hashable:
        if is_tracer(value):
            raise _UnknownError
        self.enter(value)
        if isinstance(value, types.BuiltinFunctionType):
            return value.__name__, self.token(value.__self__)
        if isinstance(value, types.MethodType):
            return self.token(value.__func__), self.token(value.__self__)
        if isinstance(value, (list, dict)) and len(value) <= _LONG:
            if isinstance(value, dict):
                return _Same(value), self.each([*value, *value.values()])
            return _Same(value), self.each(item for item in value if type(item) is not int)
        if type(value).__module__.partition(".")[0] in ("numpy", "random", "_random") or not hasattr(value, "__dict__"):
            raise _UnknownError
        return _Same(value), self.attributes(vars(value))

    def container(self, value: Any) -> Hashable:
        if len(value) > _LONG:
            raise _UnknownError
        self.enter(value)
        return type(value), self.each(value)

    def enter(self, value: Any) -> None:
        if len(self.held) > _FAR:
            raise _UnknownError
        self.seen[id(value)] = len(self.seen)
        self.held.append(value)  # so that its id stays its own

    def each(self, items: Iterable[Any]) -> Hashable:
        return tuple([self.token(item) for item in items])

    def function(self, function: types.FunctionType) -> Hashable:
        self.enter(function)
        code = function.__code__
        if code in _transparent:
            cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
            return "layer", self.token(cells["fun"].cell_contents), _Same(cells["options"].cell_contents)
        if function.__closure__ and not self.loosely:
            raise _UnknownError
        chains = _reads(code)
        if chains is None:
            raise _UnknownError
        return (
            code,
            self.each([cell.cell_contents for cell in function.__closure__ or ()]),
            self.each(function.__defaults__ or ()),
            self.attributes(function.__kwdefaults__ or {}),
            self.attributes({n: v for n, v in function.__dict__.items() if n != "__wrapped__"}),
            tuple([self.variable(function.__globals__, chain) for chain in chains]),
        )

    def attributes(self, values: Mapping[str, Any]) -> Hashable:
        return tuple([(name, self.token(value)) for name, value in values.items()])

    def variable(self, variables: Mapping[str, Any], chain: tuple[str, ...]) -> Hashable:
        name = chain[0]
        if name not in variables:
            if name in _UNSTEADY_BUILTINS:
                raise _UnknownError
            return name if hasattr(builtins, name) else ("missing", name)
        value = variables[name]
        for attribute in chain[1:]:
            if not isinstance(value, types.ModuleType) or not hasattr(value, attribute):
                break
            if _is_steady(value.__name__) and not isinstance(getattr(value, attribute), types.ModuleType):
                return chain
            value = getattr(value, attribute)
        return self.module(value) if isinstance(value, types.ModuleType) else self.token(value)

    def module(self, module: types.ModuleType) -> Hashable:
        if not _is_steady(module.__name__):
            raise _UnknownError
        return module.__name__

    def record(self, kind: type) -> Hashable:
        """A named tuple that only holds its items."""
        fields: Sequence[str] | None = getattr(kind, "_fields", None)
        if fields is None or not issubclass(kind, tuple) or not vars(kind).keys() <= _METHODS.union(fields):
            raise _UnknownError
        return kind

    def tree(self, tree: Any) -> Hashable:
        node = tree.node_data()
        if node is None:
            return "leaf"
        kind, aux = node
        children = tuple([self.tree(child) for child in tree.children()])
        if kind in (tuple, list, type(None)):
            return kind, children
        if kind is dict:
            return kind, self.each(aux), children
        return self.token(kind), self.token(aux), children


_JITTED = type(jax.jit(lambda: None))
_METHODS = frozenset(
    [
        "__new__",
        "__repr__",
        "__getnewargs__",
        "__slots__",
        "__doc__",
        "__module__",
        "__match_args__",
        "__annotations__",
        "__orig_bases__",
        "__annotate__",
        "__annotate_func__",
        "__annotations_cache__",
        "__static_attributes__",
        "__firstlineno__",
        "__replace__",
        "_make",
        "_replace",
        "_asdict",
        "_fields",
        "_field_defaults",
        "__dict__",
    ]
)


def _is_steady(module: str) -> bool:
    return module.partition(".")[0] in _STEADY and not module.startswith("numpy.random")


def _is_public(value: Any) -> bool:
    """Whether a steady package has this object under the name the object says."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or not _is_steady(module):
        return False
    if module == "builtins" and name in _UNSTEADY_BUILTINS:
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value


@functools.lru_cache(4096)
def _reads(code: types.CodeType) -> tuple[tuple[str, ...], ...] | None:
    """The module variables that code reads, with the attributes it takes of them; None if it does more than read."""
    chains: list[list[str]] = []
    open_chain: list[str] | None = None
    for step in dis.get_instructions(code):
        name = step.opname
        if name == "EXTENDED_ARG":
            continue
        if name in ("LOAD_ATTR", "LOAD_METHOD") and open_chain is not None:
            open_chain.append(step.argval)
            continue
        open_chain = None
        if name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            open_chain = [step.argval]
            chains.append(open_chain)
        foreign = name == "IMPORT_NAME" and step.argval.partition(".")[0] not in _STEADY - {"numpy"}
        if foreign or name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            return None
    found = dict.fromkeys(map(tuple, chains))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _reads(constant)
            if inner is None:
                return None
            found.update(dict.fromkeys(inner))
    return tuple(found)
