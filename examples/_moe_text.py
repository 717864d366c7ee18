"""Real text that every machine has: the sources of the Python standard library, as bytes.

Nothing is bundled and nothing is downloaded. Needs numpy only, so that a model in any framework can be fed the
same batches.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

VOCABULARY = 256  # a token is a byte
HELD_OUT = 0.05  # this part of the text, its end, is not trained on

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


class Text(NamedTuple):
    """The text in two parts, and where it came from."""

    train: np.ndarray
    held_out: np.ndarray
    files: int
    digest: str

    def __len__(self) -> int:
        return len(self.train) + len(self.held_out)


def read_text(limit: int = 16_000_000, folder: Path | None = None) -> Text:
    """Read `*.py` below the standard library's folder, in the order of their names, `limit` bytes at most."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    size = 0
    for path in sources(folder):
        if size >= limit:
            break
        try:
            part = path.read_bytes()
        except OSError:  # a dangling link, or no permission: the text is then a little shorter
            continue
        parts.append(part[: limit - size])
        size += len(parts[-1])
    joined = b"".join(parts)
    tokens = np.frombuffer(joined, dtype=np.uint8).astype(np.int64)
    cut = len(tokens) - int(len(tokens) * HELD_OUT)
    return Text(tokens[:cut], tokens[cut:], len(parts), hashlib.sha256(joined).hexdigest())


def sources(folder: Path) -> list[Path]:
    """Source files below `folder`, sorted, without tests and installed packages."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        found += [Path(place, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def batches(tokens: np.ndarray, batch: int, length: int, count: int, seed: int) -> Iterator[np.ndarray]:
    """`count` arrays of shape (batch, length + 1), cut out at random places: inputs and, shifted by one, targets."""
    random = np.random.default_rng([seed, len(tokens)])
    for _ in range(count):
        starts = random.integers(0, len(tokens) - length, size=batch)
        yield tokens[starts[:, None] + np.arange(length + 1)]
