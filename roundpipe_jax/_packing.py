"""Separating arrays from everything else: in arguments, in outputs, in slots.

Arrays travel through JAX. Everything else (flags, strings, functions, None, the shape of containers, places in
the user's code) is static: it stays in Python objects that ride along in the structure of a pytree, so that two
forwards before one backward cannot mix them.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from roundpipe_core._slots import AutoLabel, Entry, Slot
from roundpipe_core._trees import Node, Spec, paths

from ._identity import token, tree_token
from ._jax import is_reference

__all__ = ["Held", "Parted", "Sort", "Split", "Template", "alike", "in_jax", "is_array", "signature", "split"]


@jax.tree_util.register_pytree_node_class
class Held:
    """Any Python object as a part of a pytree's structure. Equal only to itself.

    JAX has caches with structures of results as keys, which last longer than any program. What traces a program that
    gives such an object back therefore takes the value out of it.
    """

    def __init__(self, value: Any) -> None:
        self._held: Callable[[], Any] = lambda: value

    @property
    def value(self) -> Any:
        """The object."""
        return self._held()

    def again(self) -> Held:
        """Another one, with which the value lasts."""
        return Held(self.value)

    def taken(self) -> Held:
        """Another one with the value, and this is empty."""
        held, self._held = self._held, _nothing
        return Held(held())

    def left_to(self, keeper: list[Any]) -> None:
        """From now on the value lasts as long as `keeper` does."""
        if not isinstance(self._held, weakref.ref):
            value = self.value
            keeper.append(value)
            self._held = weakref.ref(value)

    def tree_flatten(self) -> tuple[tuple[()], Held]:
        return (), self

    @classmethod
    def tree_unflatten(cls, aux: Held, children: Sequence[Any]) -> Held:
        return aux


def _nothing() -> None:
    return None


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is what JAX computes with. Python scalars are not: a layer may branch on them.

    Nor is a `jax.Ref`, which is as if the layer closed over it.
    """
    if isinstance(leaf, (np.ndarray, np.generic)):
        return bool(jnp.issubdtype(leaf.dtype, np.number)) or leaf.dtype == np.bool_  # not strings, objects, dates
    return not is_reference(leaf) and (isinstance(leaf, jax.Array) or hasattr(leaf, "__jax_array__"))


def in_jax(array: Any) -> Any:
    """`array`, copied if it is numpy's: whoever made it may change it before backward (R10)."""
    return jnp.array(array) if isinstance(array, (np.ndarray, np.generic)) else array


class Split:
    """The structure of a pytree whose arrays were taken out."""

    __slots__ = ("array", "rest", "tree")

    def __init__(self, tree: Any, array: Sequence[bool], rest: Sequence[Any]) -> None:
        self.tree, self.array, self.rest = tree, array, rest

    def join(self, arrays: Sequence[Any]) -> Any:
        """The pytree again, around other arrays."""
        given, rest = iter(arrays), iter(self.rest)
        return self.tree.unflatten([next(given) if array else next(rest) for array in self.array])

    def key(self) -> Hashable:
        """Equal for splits that a function cannot tell apart; None if that cannot be known."""
        tokens = [tree_token(self.tree), *map(token, self.rest)]
        return None if None in tokens else (tuple(self.array), *tokens)


def split(value: Any) -> tuple[list[Any], Split]:
    """The arrays in the pytree `value`, and its structure.."""
    leaves, tree = jax.tree.flatten(value)
    array = [is_array(leaf) for leaf in leaves]
    arrays = [leaf for leaf, one in zip(leaves, array, strict=True) if one]
    return arrays, Split(tree, array, [leaf for leaf, one in zip(leaves, array, strict=True) if not one])


_ADDRESS = re.compile(r"\b0x[0-9a-f]+")


def alike(tree: Any, other: Any) -> bool:
    """Whether structures are the same, but for objects that each phase makes anew, such as a function."""
    return bool(tree == other) or _ADDRESS.sub("", str(tree)) == _ADDRESS.sub("", str(other))


@runtime_checkable
class Parted(Protocol):
    """What a slot has of a part that a recompute leaves out."""

    arrays: list[Any]

    def around(self, arrays: Sequence[Any]) -> Parted:
        """The same with other arrays."""

    def key(self) -> Hashable:
        """Equal for what a recompute cannot tell apart; None if that cannot be known."""


class Sort(NamedTuple):
    """What an array of a slot is."""

    kept: bool  # by `keep`; otherwise it was saved
    offload: bool | None = None  # what the save itself said


class Template:
    """A slot, and those of the regions in it, without their arrays."""

    __slots__ = ("children", "entries", "kept", "label", "orphan", "rows", "sorts")

    def __init__(self, slot: Slot, arrays: list[Any]) -> None:
        self.label = slot.label if slot.given else AutoLabel(slot.label)
        self.orphan, self.rows = slot.orphan, slot.rows
        self.entries: list[tuple[Any, Entry, list[bool]]] = []
        self.sorts: list[Sort] = []  # of the arrays
        for key, entry in slot.entries.items():
            mask = [backend is not None and backend.name == "jax" for backend in entry.backends]
            arrays += [leaf for leaf, one in zip(entry.leaves, mask, strict=True) if one]
            self.sorts += [Sort(kept=False, offload=entry.offload)] * sum(mask)
            self.entries.append((key, _with_leaves(entry, mask, None), mask))
        self.kept: list[tuple[Any, Any, int]] = []
        for key, kept in slot.kept.items():
            if isinstance(kept, Parted):
                arrays += kept.arrays
                self.sorts += [Sort(kept=True)] * len(kept.arrays)
                self.kept.append((key, kept.around(()), len(kept.arrays)))
        inner = [(key, child) for key, children in slot.children.items() for child in children]
        inner.sort(key=lambda pair: pair[1].born)
        self.children = [(key, Template(child, arrays)) for key, child in inner]
        self.sorts += [sort for _, child in self.children for sort in child.sorts]

    def fill(self, slot: Slot, arrays: Sequence[Any]) -> Slot:
        """Put the entries into `slot`, around `arrays`."""
        self._fill(slot, iter(arrays))
        return slot

    def _fill(self, slot: Slot, arrays: Any) -> None:
        for key, entry, mask in self.entries:
            slot.entries[key] = _with_leaves(entry, mask, arrays)
        for key, kept, count in self.kept:
            slot.kept[key] = kept.around([next(arrays) for _ in range(count)])
        for key, child in self.children:
            inner = Slot(child.label, orphan=child.orphan)
            inner.rows = None if slot.rows is None else child.rows
            slot.children.setdefault(key, []).append(inner)
            child._fill(inner, arrays)

    @property
    def empty(self) -> bool:
        """Whether nothing was saved, not even in an inner region."""
        return not self.entries and not self.kept and all(child.empty for _, child in self.children)

    def key(self) -> Hashable:
        """Equal for slots that a recompute cannot tell apart; None if that cannot be known."""
        parts: list[Hashable] = []
        for key, entry, mask in self.entries:
            shape = signature(entry.spec)
            rest = [token(leaf) for leaf, one in zip(entry.leaves, mask, strict=True) if not one]
            if shape is None or None in rest:
                return None
            parts.append((key, shape, tuple(mask), tuple(rest), _counts(entry)))
        for key, kept, count in self.kept:
            parts.append((key, kept.key(), count))
            if kept.key() is None:
                return None
        for at, child in self.children:
            inner = child.key()
            if inner is None:
                return None
            parts.append((at, inner))
        return tuple(parts)


def _counts(entry: Entry) -> Hashable:
    return tuple(entry.counts.items())


def _with_leaves(entry: Entry, mask: Sequence[bool], arrays: Any) -> Entry:
    new = copy.copy(entry)
    new.leaves = [
        (next(arrays) if arrays is not None else None) if one else leaf
        for leaf, one in zip(entry.leaves, mask, strict=True)
    ]
    return new


def signature(spec: Spec) -> Hashable:
    """A key for the containers of a saved value; None where they may hold more than their items."""
    if not isinstance(spec, Node):
        return "leaf"
    plain = spec.kind in (tuple, list, dict, set, frozenset) or hasattr(spec.kind, "_fields")
    inner = [signature(child) for child in spec.children]
    if not plain or None in inner:
        return None
    return spec.kind, tuple(inner), tuple(paths(spec))
