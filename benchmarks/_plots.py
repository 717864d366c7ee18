"""The figures, as SVG. Colours are those of Okabe and Ito, which colour-blind readers can tell apart."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ._results import Results
from ._rows import Row

INK, GRID = "#3a3f47", "#e6e8eb"
COLORS = {"ours": "#0072B2", "torch": "#D55E00", "no": "#999999", "": "#CC79A7"}
_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "benchmarks",
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
}


class Drawn(NamedTuple):
    name: str
    benchmark: str
    alt: str
    svg: str


def color(name: str) -> str:
    """Ours blue, torch's own orange, none grey, others' pink."""
    if name.startswith(("ours", "remat")):
        return COLORS["ours"]
    if name.startswith(("torch ", "clone", "jax.")):
        return COLORS["torch"]
    return COLORS["no" if name.startswith("no ") else ""]


def draw(results: Results) -> list[Drawn]:
    """Those figures for which there are rows."""
    with mpl.rc_context(_SETTINGS):
        return [drawn for plot in _PLOTS for drawn in plot(results)]


def _axes(panels: int, height: float, share: bool = False) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(9, height), layout="constrained", facecolor="white")
    grid = figure.subplots(1, panels, squeeze=False, sharey=share)[0]
    for axes in grid:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#9aa0a8")
        axes.tick_params(color="#9aa0a8", labelcolor=INK)
        axes.set_axisbelow(True)
    return figure, list(grid)


def _finished(figure: Figure, name: str, benchmark: str, alt: str) -> Drawn:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return Drawn(name, benchmark, alt, file.getvalue())


def _tables(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row.table for row in rows))


def _bars(axes: Axes, rows: list[Row], title: str, label: str) -> None:
    """A horizontal bar for each way, the least on top, its number at its end."""
    ordered = sorted(rows, key=lambda row: -row.judged)
    bars = axes.barh(
        [row.name for row in ordered], [row.judged for row in ordered], 0.68, color=[color(row.name) for row in ordered]
    )
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # the line at 1 does not cross the numbers
    axes.bar_label(bars, [f"{row.judged:.2f}" for row in ordered], padding=3, color=INK, bbox=paper)
    axes.axvline(1.0, color="#6b7178", linewidth=1, linestyle=(0, (3, 3)), zorder=0)
    axes.margins(x=0.12)
    axes.set_title(title, loc="left", color=INK)
    axes.set_xlabel(label, color=INK)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)


def _compared(benchmark: str, what: str, name: str, label: str, alt: str) -> Callable[[Results], Iterator[Drawn]]:
    """Bars of the ratios of one quantity, a panel for each table."""

    def plot(results: Results) -> Iterator[Drawn]:
        rows = [row for row in results.of(benchmark) if row.what == what]
        if not rows:
            return
        tables = _tables(rows)
        figure, grid = _axes(len(tables), 3.8)
        for axes, table in zip(grid, tables, strict=True):
            _bars(axes, [row for row in rows if row.table == table], table, label)
        key = {"ours": "ours", "torch's": "torch", "other libraries": "", "none": "no"}
        patches = [Patch(color=COLORS[name], label=label) for label, name in key.items()]
        figure.legend(handles=patches, frameon=False, loc="outside lower center", ncols=len(key))
        yield _finished(figure, name, benchmark, alt)

    return plot


def _lines(axes: Axes, rows: list[Row], title: str, at: str, label: str, *, ratio: bool) -> None:
    """A line for each way over the places of a sweep."""
    markers = iter("osD^v")
    for name in dict.fromkeys(row.name for row in rows):
        places = [(row.at, row.ratio if ratio else row.value) for row in rows if row.name == name]
        style = "--" if "reentrant" in name and not name.startswith("torch non") else "-"
        axes.plot(
            *zip(*places, strict=True), style, marker=next(markers), markersize=4.5, color=color(name), label=name
        )
    axes.set_xscale("log")
    axes.xaxis.minorticks_off()
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_title(title, loc="left", color=INK)
    axes.set_xlabel(at, color=INK)
    axes.set_ylabel(label, color=INK)


def _regions(results: Results) -> Iterator[Drawn]:
    rows = [row for row in results.of("torch_regions") if row.what == "CPU time of a region"]
    if not rows:
        return
    tables = _tables(rows)
    figure, grid = _axes(len(tables), 3.2, share=True)
    for axes, table in zip(grid, tables, strict=True):
        axes.axhspan(0.9, 1.1, color="#eef2f6", zorder=0)
        label = "cost of a region / that of 100 regions"
        _lines(axes, [row for row in rows if row.table == table], table, "regions in one step", label, ratio=True)
    grid[0].set_ylim(bottom=0)
    grid[0].legend(frameon=False, loc="lower left")
    alt = "Cost of a region against the number of regions in a step; the grey band is 10 % up and down"
    yield _finished(figure, "bench_regions", "torch_regions", alt)


def _waits(results: Results) -> Iterator[Drawn]:
    rows = results.of("torch_decisions")
    if not rows:
        return
    whats = ("decisions", "waits in backward", "operations in backward")
    figure, grid = _axes(len(whats), 2.9)
    tables = _tables(rows)
    ways = ("torch non-reentrant", "ours")
    for axes, what in zip(grid, whats, strict=True):
        for n, way in enumerate(ways):
            values = [next(r.value for r in rows if (r.table, r.name, r.what) == (t, way, what)) for t in tables]
            bars = axes.barh([m + 0.4 * n for m in range(len(tables))], values, 0.36, color=color(way), label=way)
            axes.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3, color=INK)
        axes.set_yticks([m + 0.2 for m in range(len(tables))], tables if axes is grid[0] else [""] * len(tables))
        axes.invert_yaxis()
        axes.margins(x=0.18)
        axes.set_title(what, loc="left", color=INK)
        axes.tick_params(left=False)
    figure.legend(*grid[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=2)
    alt = "Decisions, waits for the device in backward, and operations in backward of four layers that decide"
    yield _finished(figure, "bench_decisions", "torch_decisions", alt)


def _depth(results: Results) -> Iterator[Drawn]:
    rows = results.of("torch_depth")
    if not rows:
        return
    figure, grid = _axes(2, 3.2)
    for axes, what, label in zip(
        grid,
        ("levels run", "decisions for each level"),
        ("times that a level was run", "times that each level decided"),
        strict=True,
    ):
        _lines(axes, [row for row in rows if row.what == what], "", "regions inside each other", label, ratio=False)
        axes.set_yscale("log")
        axes.yaxis.minorticks_off()
    grid[0].legend(frameon=False)
    alt = "How often levels run and decide in a step, against the depth of nesting"
    yield _finished(figure, "bench_depth", "torch_depth", alt)


def _slots(results: Results) -> Iterator[Drawn]:
    rows = [row for row in results.of("torch_slots") if row.what in ("save", "read")]
    if not rows:
        return
    figure, grid = _axes(2, 3.2, share=True)
    for axes, what in zip(grid, ("save", "read"), strict=True):
        mine = [row for row in rows if row.what == what]
        _lines(axes, mine, f"One {what}", "bytes", "seconds of CPU time", ratio=False)
        axes.set_yscale("log")
        axes.yaxis.minorticks_off()
    grid[0].legend(frameon=False)
    alt = "CPU time of saving and of reading a tensor against its size, beside a raw clone"
    yield _finished(figure, "bench_slots", "torch_slots", alt)


_PLOTS: tuple[Callable[[Results], Iterator[Drawn]], ...] = (
    _compared(
        "torch_overhead",
        "CPU time, forward and backward",
        "bench_overhead",
        "CPU time / torch non-reentrant",
        "CPU time of a checkpointed call in each way, relative to torch's non-reentrant checkpoint",
    ),
    _compared(
        "torch_calls",
        "instructions",
        "bench_calls",
        "bytecode instructions / torch non-reentrant",
        "Bytecode instructions of one region in each way, relative to torch's non-reentrant checkpoint",
    ),
    _regions,
    _waits,
    _depth,
    _slots,
)
