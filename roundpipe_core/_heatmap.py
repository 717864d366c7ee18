"""A picture of two tapes: which tokens flipped, in which layer."""

from __future__ import annotations

import importlib
import os
from typing import Any

from ._diff import Difference, TapeDiff
from ._errors import TapeError, message

__all__ = ["draw", "shares"]

BINS = 800  # columns, at most: more would be lost between the pixels


def draw(found: TapeDiff, path: str) -> None:
    """Write a heat map, layers by tokens, to `path`."""
    kept = [entry for entry in found if entry.rows > 1 and entry.fault is None]
    if not kept:
        raise TapeError(message("nothing in these tapes has rows to draw.", [], "leave out --plot."))
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise TapeError(message("--plot needs matplotlib.", [], "pip install matplotlib")) from None
    grid = [[share or float("nan") for share in row] for row in shares(kept)]  # no flips: no colour
    most = max((share for row in grid for share in row if share == share), default=1.0)
    figure = figure_module.Figure(figsize=(10, min(1.6 + 0.22 * len(kept), 40)), layout="constrained")
    axes = figure.subplots()
    rows = max(entry.rows for entry in kept)
    image = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap="inferno_r", extent=(0, rows, len(kept), 0))
    image.set_clim(-0.3 * most, most)  # that one token in a stretch of many is seen
    axes.set_yticks([n + 0.5 for n in range(len(kept))], [_name(entry) for entry in kept], fontsize=7)
    axes.set_xlabel("token")
    axes.set_title(f"{sum(e.flipped for e in kept)} of {sum(e.rows for e in kept)} rows flipped")
    bar = figure.colorbar(image, ax=axes, label=f"share of flipped tokens in {-(-rows // BINS)}")
    bar.ax.set_ylim(0, most)
    _save(figure, path)


def _save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:  # a kind of picture that matplotlib does not know
        raise TapeError(
            message(f"{os.fspath(path)}: {str(error).partition(chr(10))[0]}", [], "end its name in .png, .pdf or .svg.")
        ) from None


def shares(kept: list[Difference]) -> list[list[float]]:
    """For each layer, the share of flipped tokens in each stretch of tokens; NaN beyond its last one."""
    rows = max(entry.rows for entry in kept)
    size = -(-rows // BINS)
    return [_share(entry, -(-rows // size), size) for entry in kept]


def _share(entry: Difference, bins: int, size: int) -> list[float]:
    counts = [0.0] * bins
    for row in entry.flipped_rows:
        counts[row // size] += 1
    held = [min(size, max(0, entry.rows - n * size)) for n in range(bins)]
    return [count / most if most else float("nan") for count, most in zip(counts, held, strict=True)]


def _name(entry: Difference) -> str:
    parts = [entry.layer or "(outside)", entry.scope, entry.name or "", entry.item if entry.item != "[0]" else ""]
    text = " ".join(part for part in parts if part)
    return text.replace("$", r"\$")  # no mathematics
