"""What is known of objects, while they live."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Generic, TypeVar

__all__ = ["Notes"]

K = TypeVar("K")


class Notes(Generic[K]):
    """What is known of each object, while it lives. By identity: objects may be equal, or not comparable."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[Any], dict[K, bool]]] = {}

    def of(self, known: Any) -> dict[K, bool]:
        """To be read and written."""
        key = id(known)
        held = self._held.get(key)
        if held is None:
            found = weakref.ref(known, partial(self._held.pop, key))  # no line of Python, where an error would be lost
            held = self._held.setdefault(key, (found, {}))  # another thread may have been here meanwhile
        return held[1]
