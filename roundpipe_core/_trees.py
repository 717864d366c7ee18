"""Taking containers apart and building them again (R2, R6).

A value is a tree of containers (tuples, lists, dicts, sets, deques, named tuples, dataclasses and what a
frontend registers) whose leaves are everything else. `flatten` gives the leaves and a spec;
`unflatten` makes new containers of the same types around new leaves, so that nothing a caller does to
the old containers shows in the new ones.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["LEAF", "Expand", "Node", "Spec", "flatten", "paths", "register_leaf", "unflatten"]

Expand = Callable[[Any], "tuple[Sequence[Any], Callable[[list[Any]], Any]] | None"]
"""Opens a container that only a frontend knows: its children and how to build it again, or None."""


class Node:
    """A container without its leaves. `kind` is its type."""

    __slots__ = ("build", "children", "keys", "kind")

    def __init__(
        self, kind: type, build: Callable[[list[Any]], Any], children: tuple[Spec, ...], keys: Sequence[str] | None
    ) -> None:
        self.kind, self.build, self.children = kind, build, children
        self.keys = keys  # how each child is reached; None: by its index


class _Leaf:
    __slots__ = ()


LEAF = _Leaf()
Spec = Node | _Leaf

_leaf_types: set[type] = {int, float, bool, str, bytes, complex, type(None)}
"""Known not to be containers, without a look at what they derive from."""


def register_leaf(kind: type) -> None:
    """Make known that a value of just this type, an array of a frontend, is a leaf."""
    _leaf_types.add(kind)


def flatten(value: Any, leaves: list[Any], expand: Expand | None = None) -> Spec:
    """Append the leaves of `value` to `leaves`, in order, and return its spec."""
    if type(value) in _leaf_types:
        leaves.append(value)
        return LEAF
    opened = _open(value, expand)
    if opened is None:
        leaves.append(value)
        return LEAF
    children, build, keys = opened
    return Node(type(value), build, tuple(flatten(child, leaves, expand) for child in children), keys)


def unflatten(spec: Spec, leaves: Iterator[Any]) -> Any:
    """Build the value of `spec` around the next leaves."""
    if isinstance(spec, Node):
        return spec.build([unflatten(child, leaves) for child in spec.children])
    return next(leaves)


def paths(spec: Spec, at: str = "") -> Iterator[str]:
    """Where each leaf sits, as an index expression: ``[0]['idx']``."""
    if isinstance(spec, Node):
        keys = spec.keys or [f"[{n}]" for n in range(len(spec.children))]
        for key, child in zip(keys, spec.children, strict=True):
            yield from paths(child, at + key)
    else:
        yield at


_Opened = tuple[Sequence[Any], Callable[[list[Any]], Any], Sequence[str] | None]


def _open(value: Any, expand: Expand | None) -> _Opened | None:
    kind = type(value)
    if kind is tuple:
        return value, tuple, None
    if kind is list:
        return value, _same, None
    if isinstance(value, dict):
        return _open_dict(value)
    if isinstance(value, tuple):
        return value, getattr(kind, "_make", None) or _refill_tuple(value), None
    if isinstance(value, list):
        return value, _refill_list(value), None
    if isinstance(value, (set, frozenset)):
        return list(value), kind, [f"{{{n}}}" for n in range(len(value))]
    if isinstance(value, collections.deque):
        return list(value), lambda items: kind(items, value.maxlen), None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _open_dataclass(value)
    opened = expand(value) if expand else None
    return opened and (*opened, None)


def _same(items: list[Any]) -> list[Any]:
    return items


def _open_dict(value: dict[Any, Any]) -> _Opened:
    keys = list(value)
    names = [f"[{key!r}]" for key in keys]
    if type(value) is dict:
        return list(value.values()), lambda items: dict(zip(keys, items, strict=True)), names
    shell = _emptied(value)
    if shell is None:
        return list(value.values()), _refill_locked(value), names

    def refill(items: list[Any]) -> Any:
        new = copy.copy(shell)
        for key, item in zip(keys, items, strict=True):
            new[key] = item
        return new

    return list(value.values()), refill, names


def _emptied(value: dict[Any, Any]) -> Any:
    """A copy with the default factory, the order and the attributes of its class, but none of the leaves."""
    try:
        shell = copy.copy(value)
        for key in list(value):
            shell[key] = None
        return shell
    except MemoryError:
        raise
    except Exception:  # a class that lets nobody write
        return None


def _refill_locked(value: dict[Any, Any]) -> Callable[[list[Any]], Any]:
    kind, keys, attributes = type(value), list(value), dict(getattr(value, "__dict__", {}))

    def refill(items: list[Any]) -> Any:
        new = kind.__new__(kind)
        dict.update(new, zip(keys, items, strict=True))
        return _with_attributes(new, attributes)

    return refill


def _refill_tuple(value: tuple[Any, ...]) -> Callable[[list[Any]], Any]:
    """Without the constructor of the class, which may ask for other arguments."""
    kind, attributes = type(value), dict(getattr(value, "__dict__", {}))
    try:
        tuple.__new__(kind)
    except TypeError:  # a class that is not written in Python, such as torch.Size
        return kind
    return lambda items: _with_attributes(tuple.__new__(kind, items), attributes)


def _with_attributes(new: Any, attributes: dict[str, Any]) -> Any:
    if attributes:
        vars(new).update(attributes)
    return new


def _refill_list(value: list[Any]) -> Callable[[list[Any]], Any]:
    shell = copy.copy(value)
    shell.clear()

    def refill(items: list[Any]) -> Any:
        new = copy.copy(shell)
        new[:] = items
        return new

    return refill


def _open_dataclass(value: Any) -> _Opened:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    shell = copy.copy(value)
    for name in names:
        object.__setattr__(shell, name, None)

    def refill(items: list[Any]) -> Any:
        new = copy.copy(shell)
        for name, item in zip(names, items, strict=True):
            object.__setattr__(new, name, item)  # frozen ones too
        return new

    return [getattr(value, name) for name in names], refill, [f".{name}" for name in names]
