"""How the report looks: names and colours of the ways, how a number is written, the frame of a figure."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from _moe_results import Results
from matplotlib.axes import Axes
from matplotlib.figure import Figure

TITLES = {
    "none": "no checkpointing",
    "torch": "torch's checkpointing",
    "jax": "jax.checkpoint",
    "ours": "ours",
    "verify": "ours, verify",
    "decides": "JAX, deciding itself",
    "replays": "JAX, replaying PyTorch's tapes",
}
COLORS = {
    "none": "#8a8f98",
    "torch": "#d1495b",
    "jax": "#d1495b",
    "ours": "#1f6feb",
    "verify": "#2a9d6f",
    "decides": "#d1495b",
    "replays": "#1f6feb",
}


class Row(NamedTuple):
    """One quantity, for all ways."""

    name: str
    cell: Callable[[Any], str]


def size(count: int) -> str:
    if count == 0:
        return "0"
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def error(difference: float, percent: bool = False) -> str:
    """0 only if it is exactly 0."""
    if difference == 0:
        return "0"
    return f"{difference:.1%}" if percent and difference >= 0.0005 else f"{difference:.1e}"


# Figures


class Drawn(NamedTuple):
    """A figure, ready to be put anywhere."""

    name: str
    title: str
    caption: str
    wide: bool
    png: bytes


class Plot(NamedTuple):
    """What a figure shows, and when there is something to show."""

    name: str
    title: str
    caption: str
    draw: Callable[[Axes, Results], None]
    wide: bool = False
    worthwhile: Callable[[Results], bool] = lambda found: True


def drawn(plot: Plot, found: Results) -> Drawn:
    figure = Figure(figsize=(10, 3.7) if plot.wide else (5.4, 3.5), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9aa0a8")
    axes.tick_params(color="#9aa0a8", labelcolor="#3a3f47", labelsize=9)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    plot.draw(axes, found)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(size=9.5, color="#3a3f47")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=170)
    return Drawn(plot.name, plot.title, plot.caption, plot.wide, png.getvalue())


def smooth(values: list[float], zero: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and the running mean of up to ten values. With `zero`, of logarithms, for a logarithmic axis."""
    window = max(1, min(10, len(values) // 4))
    kept = np.log(np.maximum(values, zero)) if zero is not None else np.array(values)
    total = np.cumsum(np.concatenate([[0.0], kept]))
    last = np.arange(1, len(values) + 1)
    first = np.maximum(last - window, 0)
    mean = (total[last] - total[first]) / (last - first)
    return last, np.exp(mean) if zero is not None else mean


def logarithmic(axes: Axes, values: list[float], floor: float, color: str, label: str) -> None:
    """Dots and their running mean, for a logarithmic axis that ends at `floor`; a 0 has no dot."""
    steps = np.arange(1, len(values) + 1)
    shown = np.where(np.array(values) > 0, values, np.nan)
    axes.plot(steps, shown, ".", color=color, markersize=3, alpha=0.35)
    axes.plot(*smooth(values, zero=floor), color=color, label=label, linewidth=1.8)


def stacked(axes: Axes, counts: np.ndarray, color: str) -> float:
    """Bars of [steps, layers] counts, the layers on top of each other; return the height of the highest."""
    steps, foot = np.arange(1, len(counts) + 1), np.zeros(len(counts))
    flipping = [layer for layer, of_layer in enumerate(counts.T) if of_layer.any()]
    for shade, layer in zip(np.linspace(1, 0.3, len(flipping)), flipping, strict=True):
        axes.bar(steps, counts[:, layer], 0.85, bottom=foot, color=color, alpha=shade, label=f"layer {layer}")
        foot += counts[:, layer]
    return float(foot.max())
