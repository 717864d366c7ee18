"""JAX's part of the report: its rows, sentences, figures and notes."""

from __future__ import annotations

from typing import Any

import numpy as np
from _moe_look import COLORS, TITLES, Plot, Row, error, size, stacked
from _moe_results import JaxResults, JaxWay, Results
from _moe_settings import ORACLE
from matplotlib.axes import Axes


def rows(found: Results) -> list[Row]:
    return [
        Row("training loss, last tenth of the steps", lambda way: f"{way.final_loss:.4f}"),
        Row("loss on held-out text", lambda way: f"{way.held_out_loss:.4f}"),
        Row("gradient of step 1, relative error to pinned routing", lambda way: error(way.pinned_error, percent=True)),
        Row(
            "the same, to the un-checkpointed run",
            lambda way: "oracle" if way.name == ORACLE else error(way.gradient_error, percent=True),
        ),
        Row(
            "loss, largest deviation",
            lambda way: "oracle" if way.name == ORACLE else error(way.loss_difference),
        ),
        Row("routing decisions per layer and step", _decisions),
        Row(f"of {found.tokens} tokens, routed differently in backward", _flips),
        Row("most in one layer and step", lambda way: "0" if way.flipped is None else str(_most(way))),
        Row("steps in which that happened", lambda way: f"{way.flipped_steps or 0:.0%}"),
        Row("bytes of the saved decision, per layer", lambda way: size(way.bytes_saved)),
        Row("step time, relative", lambda way: f"{way.time_ratio:.2f}"),
        Row("step time", lambda way: f"{way.seconds * 1000:.0f} ms"),
    ]


def _decisions(way: JaxWay) -> str:
    if way.decisions is None:
        return "not counted"
    return f"{way.decisions:g}" if way.decisions <= 1 else f"1 + {way.decisions - 1:g}"


def _flips(way: JaxWay) -> str:
    return f"{way.flipped_tokens:.1f}" if way.flipped_tokens else "0"


def _most(way: JaxWay) -> int:
    return max(max(step) for step in way.flipped or [[0]])


def verdict(found: Results) -> list[str]:
    """What was seen, in sentences."""
    if found.jax is None:
        return []
    sentences = []
    stock, ours = found.jax.way("jax"), found.jax.way("ours")
    if ours and found.jax.kept_the_routing():
        sentences.append(
            "In JAX, ours routed every token in backward as in forward, in all layers and steps, and its gradient is "
            "bit for bit that of a program which is given the forward's routing."
        )
    elif ours:
        sentences.append(
            f"FAILED: ours in JAX routed {_flips(ours)} tokens in each layer and step otherwise in backward, and its "
            f"gradient is {error(ours.pinned_error)} off that of a program which is given the forward's routing."
        )
    if stock and stock.flipped_tokens:
        sentences.append(
            f"jax.checkpoint in {found.options['precision']} under jit sent {stock.flipped_tokens:.1f} of "
            f"{found.tokens} tokens in each layer and step to other experts in backward than in forward, in "
            f"{stock.flipped_steps:.0%} of the steps, though the biases were the same. No error was raised. "
            f"The first step's gradient was {error(stock.pinned_error, percent=True)} off."
        )
    elif stock:
        sentences.append(
            f"jax.checkpoint in {found.options['precision']} routed no token otherwise in backward in this run."
        )
    return sentences


def lead(found: Results) -> str:
    assert found.jax is not None
    steps = len(found.jax.ways[0].losses)
    cause = (
        "It can route differently all the same. XLA keeps more precision inside a fusion than the type asks for: the "
        "forward's router sees numbers that were not yet rounded to bfloat16, while the recompute starts from the "
        "layer's rounded input. Scores that almost tie then change places."
        if found.options["precision"] == "bfloat16"
        else "In bfloat16 it can route differently all the same; in float32 there is no rounding for XLA to leave out."
    )
    fewer = f" instead of {found.options['steps']}, since compiling takes much of the time" * (
        steps < found.options["steps"]
    )
    return (
        f"The same model from the same weights, {steps} steps each way{fewer}: compute in "
        f"{found.options['precision']}, weights in float32, each step under jit. Biases are passed in and handed back, "
        "so a layer that runs again finds those of the forward. "
        f"{cause} The layer's code is the same in all columns; only what is wrapped around it differs."
    )


def notes(found: Results) -> list[str]:
    assert found.jax is not None
    harmless = {
        True: " It does not change what it looks at: a program without it gave jax.checkpoint's first gradient to the "
        "last bit.",
        False: " It disturbed what it looks at: a program without it gave jax.checkpoint another first gradient.",
        None: "",
    }[found.jax.probe_is_harmless]
    return [
        "JAX: what a recompute chose is read through the gradient. Each layer has an additional input of zeros, whose "
        "derivative rule returns the experts that backward is using; no callback is involved." + harmless,
        "JAX: pinned routing is jax.checkpoint around the layer with the forward's plan as an input. The "
        "un-checkpointed run differs from it too, by rounding alone: its backward reads what the forward computed, "
        "with more precision, and not a recompute.",
        "JAX: the cause can be tried. Start the demo with XLA_FLAGS=--xla_allow_excess_precision=false: XLA then "
        "rounds wherever the types say so, and the recompute of jax.checkpoint routes as the forward did.",
        "JAX: routing decisions are counted in the optimised program. "
        f"Compiling took {found.jax.compile_seconds:.0f} of {found.jax.seconds:.0f} seconds.",
    ]


# Figures


def plots() -> list[Plot]:
    return [
        Plot(
            "jax_loss",
            "Training loss in JAX and in PyTorch",
            "Step by step. All runs start from the same weights and see the same text, so that even the ups and downs "
            "of the batches are the same.",
            _loss_curves,
            wide=True,
        ),
        Plot(
            "jax_flips",
            "Tokens whose experts change in the recompute",
            "jax.checkpoint, step by step, the layers on top of each other; layers that are not named never flipped. "
            "Along the bottom, in blue: ours.",
            _flips_seen,
            worthwhile=lambda found: _ways(found, "jax") != [],
        ),
        Plot(
            "jax_gradient",
            "Error of the first gradient, by part",
            "Relative distance to the gradient with the forward's routing pinned. Without checkpointing, it is that of "
            "rounding.",
            _gradient_errors,
        ),
    ]


def _ways(found: Results, *names: str) -> list[JaxWay]:
    return [way for way in _results(found).ways if way.name in names]


def _results(found: Results) -> JaxResults:
    assert found.jax is not None
    return found.jax


_STYLES: dict[str, dict[str, Any]] = {
    "none": {"color": "#16191d", "linewidth": 1.4},
    "jax": {"color": COLORS["jax"], "linewidth": 1.8, "dashes": (1.2, 3), "dash_capstyle": "round"},
    "ours": {"color": COLORS["ours"], "linewidth": 1.8, "dashes": (5, 4)},
}


def _loss_curves(axes: Axes, found: Results) -> None:
    steps = range(1, len(_results(found).ways[0].losses) + 1)
    if found.ways:
        style = {"color": "#e0a030", "linewidth": 5, "alpha": 0.55, "solid_capstyle": "round"}
        axes.plot(steps, found.ways[0].losses[: len(steps)], label="PyTorch, no checkpointing", **style)
    for way in _results(found).ways:
        axes.plot(steps, way.losses, label=f"JAX, {TITLES[way.name]}", **_STYLES[way.name])
    axes.set(xlabel="step", ylabel="nats per byte")
    axes.margins(x=0.01)
    axes.legend(frameon=False, fontsize=9.5)


def _flips_seen(axes: Axes, found: Results) -> None:
    (stock,) = _ways(found, "jax")
    counts = np.array(stock.flipped)
    top = stacked(axes, counts, COLORS["jax"])
    for ours in _ways(found, "ours"):
        axes.axhline(0, color=COLORS["ours"], linewidth=3, label=f"ours: {sum(map(sum, ours.flipped or []))} in all")
    axes.set(xlabel="step", ylabel=f"tokens, of {counts.shape[1] * found.tokens}")
    axes.set_ylim(bottom=0, top=max(1.0, top) * 1.3)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.margins(x=0.01)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper right")


def _gradient_errors(axes: Axes, found: Results) -> None:
    ways = _results(found).ways
    parts = list(ways[0].pinned_errors)
    width = 0.84 / len(ways)
    for n, way in enumerate(ways):
        at = np.arange(len(parts)) + (n - (len(ways) - 1) / 2) * width
        errors = np.array([way.pinned_errors[part] for part in parts]) * 100
        label = TITLES[way.name] if errors.any() else f"{TITLES[way.name]}: exactly 0"
        axes.bar(at, errors, width * 0.92, color=COLORS[way.name], label=label)
        if not errors.any():
            axes.plot(at, errors, "_", color=COLORS[way.name], markersize=9, markeredgewidth=3, clip_on=False)
    axes.set_xticks(range(len(parts)), [part.replace(" ", "\n") for part in parts])
    axes.set(ylabel="%")
    axes.margins(y=0.3)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
