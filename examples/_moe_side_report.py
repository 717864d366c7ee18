"""The part of the report on both frameworks side by side: its rows, sentences, figures and notes."""

from __future__ import annotations

import numpy as np
from _moe_look import COLORS, TITLES, Plot, Row, error, logarithmic, size, stacked
from _moe_results import DECIDES, REPLAYS, Results, SideBySide, SideWay
from matplotlib.axes import Axes

TITLE = "PyTorch and JAX, side by side"


def rows(found: Results) -> list[Row]:
    return [
        Row("loss, difference to PyTorch's in step 1", lambda way: error(way.loss_differences[0])),
        Row("loss, largest difference", lambda way: error(max(way.loss_differences))),
        Row("gradient of step 1, relative distance", lambda way: error(way.gradient_distances[0])),
        Row("gradient, largest distance", lambda way: error(max(way.gradient_distances))),
        Row("weights after step 1, relative distance", lambda way: error(way.weight_distances[0])),
        Row("weights after the last step", lambda way: error(way.weight_distances[-1])),
        Row("first step with a token routed differently", lambda way: str(way.departs() or "none")),
        Row(f"of {found.tokens} tokens per layer, the most in a step", lambda way: str(np.max(way.flipped))),
        Row("in the last step, layer by layer", lambda way: " ".join(map(str, way.flipped[-1]))),
    ]


def verdict(found: Results) -> list[str]:
    """What was seen, in sentences."""
    side = _side(found)
    replays, decides = side.way(REPLAYS), side.way(DECIDES)
    steps = len(side.losses)
    if not side.followed():
        return [f"FAILED: JAX replaying PyTorch's tapes routed a token otherwise in step {replays.departs()}."]
    sentences = [
        f"Replaying PyTorch's tapes, JAX routed every token as PyTorch did in {steps} steps. The losses differ by "
        f"{error(max(replays.loss_differences))} at most, and at the end no array of weights by more than "
        f"{error(replays.weight_distances[-1])} of its size."
    ]
    if decides.departs():
        sentences.append(
            f"Deciding itself, with the same weights and the same text, it sent a token elsewhere in step "
            f"{decides.departs()}, and {sum(decides.flipped[-1])} of {found.tokens * len(decides.flipped[-1])} in the "
            f"last step. The losses differ by up to {error(max(decides.loss_differences))}, the weights by "
            f"{error(decides.weight_distances[-1])}."
        )
    else:
        sentences.append("Deciding itself, it sent no token elsewhere in this run.")
    return sentences


def lead(side: SideBySide) -> str:
    return (
        f"{len(side.losses)} steps in float32 without dropout: both frameworks do the same arithmetic and differ by "
        "rounding alone. JAX takes PyTorch's initial weights by DLPack and trains twice beside it. Once it decides "
        "itself, and once it replays, under jit, the tape of decisions that PyTorch has recorded in that step. "
        "Rounding stays rounding as long as both route alike. One score that almost ties is enough to end that: a "
        "token goes to another expert, the weights learn something else, and more tokens follow."
    )


def notes(side: SideBySide) -> list[str]:
    return [
        f"Side by side: the tape of a step ({size(side.tape_bytes)}) goes through a file, as to another program. Those "
        "of the last step are kept, and python -m roundpipe_core diff torch.tape jax.tape shows what flipped. A "
        "distance is that of the array that is furthest off: norm of the difference over norm of PyTorch's.",
    ]


def _side(found: Results) -> SideBySide:
    assert found.side is not None
    return found.side


# Figures


def plots() -> list[Plot]:
    return [
        Plot(
            "side_loss",
            "Difference of the loss to PyTorch's",
            "Step by step and as a running mean, on a logarithmic scale. In float32, neighbouring numbers of this size "
            "are 1e-7 to 5e-7 apart; a difference of exactly 0 has no dot.",
            _losses,
            wide=True,
        ),
        Plot(
            "side_map",
            "Tokens routed differently than in PyTorch, in the last step",
            "Each column is a token of the batch, each row a layer of the run that decides itself.",
            _map,
            wide=True,
            worthwhile=lambda found: any(_side(found).way(DECIDES).flipped_last),
        ),
        Plot(
            "side_distances",
            "Distance of gradients and weights",
            "Relative, of the array that is furthest off. Solid: weights; dotted: gradients.",
            _distances,
        ),
        Plot(
            "side_flips",
            "Tokens routed differently than in PyTorch",
            "Deciding itself, the layers on top of each other. Along the bottom, in blue: replaying.",
            _flips,
        ),
    ]


def _losses(axes: Axes, found: Results) -> None:
    ways = _side(found).ways
    seen = [value for way in ways for value in way.loss_differences if value > 0]
    floor = min(seen, default=1e-8) / 2
    for way in ways:
        logarithmic(axes, way.loss_differences, floor, COLORS[way.name], TITLES[way.name])
    axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="|loss - PyTorch's loss|")
    axes.margins(x=0.01)
    axes.legend(frameon=False, fontsize=9.5)


def _map(axes: Axes, found: Results) -> None:
    decides = _side(found).way(DECIDES)
    grid = np.zeros((len(decides.flipped_last), found.tokens))
    for layer, tokens in enumerate(decides.flipped_last):
        grid[layer, tokens] = 1
    axes.imshow(grid, aspect="auto", interpolation="nearest", cmap="Reds", vmin=0, vmax=1)
    axes.set_yticks(range(len(grid)), [f"layer {n}: {len(its)}" for n, its in enumerate(decides.flipped_last)])
    axes.grid(visible=False)
    for edge in range(1, len(grid)):
        axes.axhline(edge - 0.5, color="white", linewidth=3)
    axes.set(xlabel="token")


def _distances(axes: Axes, found: Results) -> None:
    for way in _side(found).ways:
        steps, color = range(1, len(way.losses) + 1), COLORS[way.name]
        axes.plot(steps, way.weight_distances, color=color, linewidth=1.8, label=_short(way))
        axes.plot(steps, way.gradient_distances, ":", color=color, linewidth=1.1)
    axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="relative distance")
    axes.legend(frameon=False, fontsize=9)


def _flips(axes: Axes, found: Results) -> None:
    side = _side(found)
    counts = np.array(side.way(DECIDES).flipped)
    top = stacked(axes, counts, COLORS[DECIDES])
    replays = side.way(REPLAYS)
    axes.axhline(0, color=COLORS[REPLAYS], linewidth=3, label=f"{_short(replays)}: {np.sum(replays.flipped)} in all")
    axes.set(xlabel="step", ylabel=f"tokens, of {counts.shape[1] * found.tokens}")
    axes.set_ylim(bottom=0, top=max(1.0, top) * 1.3)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.margins(x=0.01)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper left")


def _short(way: SideWay) -> str:
    return TITLES[way.name].removeprefix("JAX, ")
