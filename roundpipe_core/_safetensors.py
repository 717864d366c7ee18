"""The safetensors format: a JSON table of arrays, then their bytes.

Eight bytes, little-endian, give the length of the table; the table names each array with its dtype, its shape and
where its bytes begin and end after the table; under ``__metadata__`` it has texts. The bytes of all arrays follow each
other without gaps. Nothing in a file is believed before it was checked against the length of the file.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from io import BytesIO, FileIO
from typing import Any, NamedTuple

from ._files import read_exactly
from ._host import DTYPES

__all__ = ["HEADER_LIMIT", "FaultError", "Held", "parsed_json", "read_header", "table"]

HEADER_LIMIT = 8 << 20
"""Bytes that a table may have: parsing it then takes less than half a gigabyte, whatever it says."""

NESTING_LIMIT = 256
DIMENSIONS_LIMIT = 64
BYTES_LIMIT = 2**63 - 1
_LINE, _PAGE, _LARGE = 64, 4096, 1 << 20  # where bytes of large files begin: the system copies whole pages faster
METADATA = "__metadata__"
ITEMSIZE = {code: size for code, size, _, _ in DTYPES.values() if code}


class FaultError(ValueError):
    """What is wrong with a file, for a reader who knows its name, and the way out."""

    def __init__(
        self, fault: str, way_out: str = "write it again with Tape.save; if it was copied, copy it again."
    ) -> None:
        super().__init__(fault)
        self.way_out = way_out


class Held(NamedTuple):
    """An array of a file: its code for the dtype, its shape, its bytes after the table."""

    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


def table(texts: Mapping[str, str], arrays: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The head of a file with `arrays` (name, code, shape), whose bytes follow in this order."""
    whole: dict[str, Any] = {METADATA: dict(texts)}
    at = 0
    for name, code, shape in arrays:
        size = math.prod(shape) * ITEMSIZE[code]
        whole[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % (_PAGE if at > _LARGE else _LINE))
    return len(text).to_bytes(8, "little") + text


def read_header(file: FileIO | BytesIO, size: int) -> tuple[dict[str, str], dict[str, Held], int]:
    """The texts and the arrays of a file of `size` bytes, and where the bytes of the arrays begin."""
    start = read_exactly(file, 8)
    if len(start) < 8:
        raise FaultError(f"{size} bytes are too few for any tape")
    length = int.from_bytes(start, "little")
    if length > HEADER_LIMIT:
        raise FaultError(f"a header of {length} bytes, where {HEADER_LIMIT} are allowed; not a tape, or a damaged one")
    if length > size - 8:
        raise FaultError(f"cut short: a header of {length} bytes in a file of {size}")
    head = _mapping(parsed_json(_text(read_exactly(file, length))), "the header")
    texts = _mapping(head.pop(METADATA, {}), "the metadata")
    if not all(type(text) is str for text in texts.values()):
        raise FaultError("metadata that is no text")
    arrays = {name: _held(name, entry) for name, entry in head.items()}
    _refuse_gaps(arrays, size - 8 - length)
    return texts, arrays, 8 + length


def _text(head: bytes) -> str:
    if not head.startswith(b"{"):
        raise FaultError("no safetensors file: its header does not begin with a brace")
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        raise FaultError(f"the header is not UTF-8 at byte {error.start}") from None
    text = text.rstrip(" ")  # the only padding there is
    if not text.endswith("}"):
        raise FaultError("the header does not end with a brace")
    return text


_BETWEEN_BRACKETS = re.compile(r'(?:[^\[\]{}"]++|"(?:[^"\\]++|\\.?)*+"?)++', re.DOTALL)
_DEEPER = {"[": 1, "{": 1, "]": -1, "}": -1}


def parsed_json(text: str) -> Any:
    """JSON without what JSON leaves open: keys given twice, NaN, nesting without end."""
    brackets = _BETWEEN_BRACKETS.sub("", text)
    if max(itertools.accumulate(map(_DEEPER.__getitem__, brackets)), default=0) > NESTING_LIMIT:
        raise FaultError(f"JSON nested deeper than {NESTING_LIMIT}")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError:
        raise FaultError("JSON nested too deeply for the stack that is left") from None
    except UnicodeEncodeError:
        raise FaultError("JSON with half a surrogate pair, which is no text") from None
    except json.JSONDecodeError as error:
        raise FaultError(f"JSON that does not parse: {error}") from None
    except FaultError:
        raise
    except ValueError as error:  # more digits than Python reads
        raise FaultError(f"JSON with a number that is none: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    held = dict(pairs)
    if len(held) != len(pairs):
        twice, _ = collections.Counter(name for name, _ in pairs).most_common(1)[0]
        raise FaultError(f"JSON that has the key {twice[:80]!r} twice")
    return held


def _refuse_constant(name: str) -> Any:
    raise FaultError(f"JSON with {name}")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise FaultError(f"JSON with the number {text[:40]}")
    return value


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise FaultError(f"{what} is no mapping")
    return value


def _held(name: str, entry: Any) -> Held:
    what = f"array {name[:80]!r}"
    entry = _mapping(entry, what)
    if entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FaultError(f"{what} has the fields {', '.join(sorted(entry))[:200]}")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(code) is not str or code not in ITEMSIZE:
        raise FaultError(f"{what} has the unknown dtype {str(code)[:40]!r}")
    if type(shape) is not list or len(shape) > DIMENSIONS_LIMIT or not all(map(_is_size, shape)):
        raise FaultError(f"{what} has a shape that is none")
    if type(offsets) is not list or len(offsets) != 2 or not all(map(_is_size, offsets)) or offsets[0] > offsets[1]:
        raise FaultError(f"{what} has offsets that are none")
    if math.prod(max(n, 1) for n in shape) * ITEMSIZE[code] > BYTES_LIMIT:
        raise FaultError(f"{what} has a shape beyond all memory")
    needed = math.prod(shape) * ITEMSIZE[code]
    if offsets[1] - offsets[0] != needed:
        raise FaultError(f"{what} needs {needed} bytes and has {offsets[1] - offsets[0]}")
    return Held(code, tuple(shape), *offsets)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= BYTES_LIMIT


def _refuse_gaps(arrays: Mapping[str, Held], size: int) -> None:
    at = 0
    for name, held in sorted(arrays.items(), key=lambda pair: (pair[1].begin, pair[1].end)):
        if held.begin != at:
            fault = "overlaps the array before it" if held.begin < at else "leaves a hole before it"
            raise FaultError(f"array {name[:80]!r} {fault}")
        at = held.end
    if at != size:
        raise FaultError(
            f"cut short: {size} of {at} bytes of data" if size < at else f"{size - at} bytes belong to no array"
        )
