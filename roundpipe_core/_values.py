"""Saved data as JSON, and back: numbers, texts and the containers around them, never code.

Texts, truth values, None, lists and plain numbers are what they are in JSON. All else is an object whose first key
says what it is::

    {"array": 3}                                     the third array of the file
    {"tuple": [..]}  {"set": [..]}  {"frozenset": [..]}  {"deque": [..], "maxlen": 4}
    {"dict": [[key, value], ..]}                     keys are numbers, texts, bytes, None or tuples of them
    {"named": "Plan", "fields": ["token"], "values": [..]}     a named tuple or a dataclass
    {"int": "0x1f.."}  {"float": "nan"}  {"complex": [1.0, 2.0]}  {"bytes": "aGk="}  {"str": "ed a0 80"}
    {"scalar": "int64", "bytes": "AAAAAAAAAAA="}     a number of numpy

A named tuple and a dataclass come back as a named tuple with the same fields, a class of a dict, a list or a tuple as
a plain one.
"""

from __future__ import annotations

import base64
import binascii
import collections
import dataclasses
import functools
import importlib
import keyword
import math
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from ._host import DTYPES
from ._safetensors import FaultError
from ._trees import Node, Spec

__all__ = ["COUNTS_LIMIT", "NESTING_LIMIT", "NotHeldError", "Reader", "encoded"]

NESTING_LIMIT = 32
PLAIN_INT = 2**53  # beyond, other readers of JSON lose digits
CLASSES_LIMIT = 1000
FIELDS_LIMIT = 1000
COUNTS_LIMIT = 1_000_000
T = TypeVar("T")


class NotHeldError(TypeError):
    """A value that a file cannot hold: what it is, and what to save instead."""

    def __init__(self, what: str, way_out: str) -> None:
        super().__init__(what)
        self.what, self.way_out = what, way_out


# ------------------------------------------------------------------------------------------------ to JSON


def encoded(spec: Spec, leaves: Iterator[Any], depth: int = 0) -> Any:
    """JSON of what `spec` makes of `leaves`. A leaf that is a dict is JSON already."""
    if not isinstance(spec, Node):
        leaf = next(leaves)
        return leaf if type(leaf) is dict else plain(leaf)
    if depth >= NESTING_LIMIT:
        raise NotHeldError(f"containers nested deeper than {NESTING_LIMIT}", "save the parts that the recompute needs.")
    values = [encoded(child, leaves, depth + 1) for child in spec.children]
    return _container(spec, values)


def _container(node: Node, values: list[Any]) -> Any:
    kind = node.kind
    if issubclass(kind, dict):
        keys = list(node.build([None] * len(values)))
        return {"dict": [[_key(key), value] for key, value in zip(keys, values, strict=True)]}
    names = field_names(node)
    if names is not None:
        return {"named": kind.__name__, "fields": [_field(kind, name) for name in names], "values": values}
    if issubclass(kind, tuple):
        return {"tuple": values}
    if issubclass(kind, list):
        return values
    if issubclass(kind, (set, frozenset)):
        if any(type(value) is dict and "array" in value for value in values):
            raise NotHeldError("a set of arrays, which has no order", "save a list of them.")
        return {"frozenset" if issubclass(kind, frozenset) else "set": values}
    if issubclass(kind, collections.deque):
        return {"deque": values, "maxlen": node.build([None] * len(values)).maxlen}
    raise NotHeldError(f"a container of type {kind.__qualname__}", "save its parts as a tuple or a dict.")


def field_names(node: Node) -> list[str] | None:
    """The fields of a named tuple or of a dataclass."""
    if issubclass(node.kind, tuple):
        names = getattr(node.kind, "__match_args__", None)
        return list(names) if names and len(names) == len(node.children) else None
    if dataclasses.is_dataclass(node.kind) and not issubclass(node.kind, (list, set, frozenset, collections.deque)):
        return [key.removeprefix(".") for key in node.keys or ()]
    return None


def _field(kind: type, name: str) -> str:
    if not is_field(name):
        raise NotHeldError(
            f"a {kind.__qualname__} with the field {name!r}, which no named tuple can have", "save its parts as a dict."
        )
    return name


def is_field(name: Any) -> bool:
    """Whether a named tuple can have such a field."""
    if type(name) is not str or name.startswith("_") or not name.isidentifier() or keyword.iskeyword(name):
        return False
    return unicodedata.normalize("NFKC", name) == name  # or Python takes it for another one


def _key(key: Any) -> Any:
    if type(key) is tuple:
        return {"tuple": [_key(part) for part in key]}
    return plain(key)


def plain(value: Any) -> Any:
    """JSON of a value that is no container."""
    write = _WRITERS.get(type(value))
    if write is not None:
        return write(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.name in DTYPES:
        little = value.astype(value.dtype.newbyteorder("<"))
        return {"scalar": value.dtype.name, "bytes": _base64(little.tobytes())}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise NotHeldError(
        f"an object of type {kind}, which only this process knows",
        "save what it says as numbers, texts or arrays (of an enum, its .value) and make it again from those.",
    )


def _int(value: int) -> Any:
    return value if -PLAIN_INT <= value <= PLAIN_INT else {"int": hex(value)}


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {"float": repr(value)}


def _str(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return {"str": value.encode("utf-8", "surrogatepass").hex(" ")}
    return value


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


_WRITERS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _int,
    float: _float,
    complex: lambda value: {"complex": [_float(value.real), _float(value.imag)]},
    str: _str,
    bytes: lambda value: {"bytes": _base64(value)},
}


# ---------------------------------------------------------------------------------------------- from JSON


class Reader:
    """Makes values of JSON. `arrays` are handed out in order, each once."""

    def __init__(self, arrays: Iterable[Any]) -> None:
        self._arrays = list(arrays)
        self._given = 0
        self._classes: set[Any] = set()
        self._counts = 0

    def value(self, data: Any, depth: int = 0) -> Any:
        """The value that `data` stands for."""
        if depth > NESTING_LIMIT:
            raise FaultError(f"containers nested deeper than {NESTING_LIMIT}")
        if type(data) is list:
            return [self.value(part, depth + 1) for part in data]
        if type(data) is not dict:
            return data
        name = next(iter(data), None)
        read = _READERS.get(name or "")
        if read is None or data.keys() != read[1]:
            raise FaultError(f"a value of the unknown kind {', '.join(map(str, data))[:80]!r}")
        return read[0](self, data, depth + 1)

    def spend(self, counts: int) -> None:
        """Refuse decisions that together count more than memory has room for, though the file tells only changes."""
        self._counts += counts
        if self._counts > COUNTS_LIMIT:
            raise FaultError(f"decisions that count more than {COUNTS_LIMIT} times what they met")

    def all_given(self) -> None:
        """Refuse arrays that belong to no value."""
        if self._given != len(self._arrays):
            raise FaultError(f"{len(self._arrays)} arrays, of which the tape uses {self._given}")

    def _array(self, data: Any, depth: int) -> Any:
        n = data["array"]
        if type(n) is not int or n != self._given or n >= len(self._arrays):
            raise FaultError(f"array {n!r} where array {self._given} of {len(self._arrays)} is due"[:120])
        self._given += 1
        return self._arrays[n]

    def _items(self, data: Any, depth: int) -> list[Any]:
        if type(data) is not list:
            raise FaultError("a container without a list of its parts")
        return [self.value(part, depth) for part in data]

    def _tuple(self, data: Any, depth: int) -> Any:
        return tuple(self._items(data["tuple"], depth))

    def _set(self, data: Any, depth: int) -> Any:
        (name,) = data
        items = self._items(data[name], depth)
        if not all(map(_is_element, items)):
            raise FaultError("a set of what no set holds")
        made = set(items)
        if len(made) != len(items):
            raise FaultError("a set that holds a value twice")
        return made if name == "set" else frozenset(made)

    def _deque(self, data: Any, depth: int) -> Any:
        items, most = self._items(data["deque"], depth), data["maxlen"]
        if most is not None and (type(most) is not int or not len(items) <= most <= sys.maxsize):
            raise FaultError("a deque with a wrong maxlen")
        return collections.deque(items, most)

    def _dict(self, data: Any, depth: int) -> Any:
        pairs = data["dict"]
        if type(pairs) is not list or not all(type(pair) is list and len(pair) == 2 for pair in pairs):
            raise FaultError("a dict without pairs")
        made = {}
        for key, value in pairs:
            made_key = self.value(key, depth)
            if not _is_key(made_key) or made_key in made:
                raise FaultError("a dict with a key that it has already, or that is none")
            made[made_key] = self.value(value, depth)
        return made

    def _named(self, data: Any, depth: int) -> Any:
        kind, fields = data["named"], data["fields"]
        if type(kind) is not str or type(fields) is not list or len(fields) > FIELDS_LIMIT:
            raise FaultError("a named tuple without a name, or with too many fields")
        if not all(map(is_field, fields)):
            raise FaultError(f"a named tuple with a field that cannot be one, among {str(fields)[:200]}")
        values = self._items(data["values"], depth)
        if len(set(fields)) != len(fields) or len(fields) != len(values):
            raise FaultError("a named tuple whose fields are not those of its values")
        self._classes.add((kind, *fields))
        if len(self._classes) > CLASSES_LIMIT:
            raise FaultError(f"more than {CLASSES_LIMIT} kinds of named tuples")
        return named_tuple(kind if is_field(kind) else "Named", tuple(fields))(*values)

    def _int(self, data: Any, depth: int) -> int:
        text = data["int"]
        digits = text[text.startswith("-") :] if type(text) is str else ""
        if not digits.startswith("0x") or not digits[2:].isalnum() or not digits.isascii():
            raise FaultError("an integer that is none")
        return _told(lambda: int(text, 16), "an integer that is none")

    def _float(self, data: Any, depth: int) -> float:
        if data["float"] not in ("nan", "inf", "-inf"):
            raise FaultError("a float that is none")
        return float(data["float"])

    def _complex(self, data: Any, depth: int) -> complex:
        parts = self._items(data["complex"], depth)
        if len(parts) != 2 or not all(type(part) is float for part in parts):
            raise FaultError("a complex number that is none")
        return complex(*parts)

    def _bytes(self, data: Any, depth: int) -> bytes:
        return _unbase64(data["bytes"])

    def _str(self, data: Any, depth: int) -> str:
        return _told(lambda: bytes.fromhex(data["str"]).decode("utf-8", "surrogatepass"), "a text that is none")

    def _scalar(self, data: Any, depth: int) -> Any:
        name, held = data["scalar"], _unbase64(data["bytes"])
        if type(name) is not str or name not in DTYPES or len(held) != DTYPES[name][1]:
            raise FaultError("a number of numpy that is none")
        try:
            numpy = importlib.import_module("numpy")
            return numpy.frombuffer(held, numpy.dtype(name).newbyteorder("<"))[0]
        except (ImportError, TypeError) as error:
            raise FaultError(f"a number of numpy, {name}, and here is no numpy that knows it: {error}") from None


_READERS: dict[str, tuple[Callable[[Reader, Any, int], Any], set[str]]] = {
    "array": (Reader._array, {"array"}),
    "tuple": (Reader._tuple, {"tuple"}),
    "set": (Reader._set, {"set"}),
    "frozenset": (Reader._set, {"frozenset"}),
    "deque": (Reader._deque, {"deque", "maxlen"}),
    "dict": (Reader._dict, {"dict"}),
    "named": (Reader._named, {"named", "fields", "values"}),
    "int": (Reader._int, {"int"}),
    "float": (Reader._float, {"float"}),
    "complex": (Reader._complex, {"complex"}),
    "bytes": (Reader._bytes, {"bytes"}),
    "str": (Reader._str, {"str"}),
    "scalar": (Reader._scalar, {"scalar", "bytes"}),
}


@functools.lru_cache(CLASSES_LIMIT)
def named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    """The class of named tuples with these fields, which were checked."""
    return collections.namedtuple(name, fields)


def _told(make: Callable[[], T], fault: str) -> T:
    try:
        return make()
    except (ValueError, TypeError):
        raise FaultError(fault) from None


def _unbase64(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True) if type(text) is str else _no_bytes()
    except (binascii.Error, ValueError):
        return _no_bytes()


def _no_bytes() -> bytes:
    raise FaultError("bytes that are not in base64")


def _is_key(value: Any) -> bool:
    return all(map(_is_key, value)) if type(value) is tuple else type(value) in _WRITERS


def _is_element(value: Any) -> bool:
    """A set has what a dict has for keys, and sets and named tuples of that."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_element, value))
    return type(value) in _WRITERS or type(value).__module__ == "numpy"
