"""The results as a table in the terminal, as figures, and as one HTML file that needs no other."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path
from typing import Any, NamedTuple

import _moe_jax_report as in_jax
import _moe_side_report as beside
import numpy as np
from _moe_look import COLORS, TITLES, Drawn, Plot, Row, drawn, error, logarithmic, size, smooth
from _moe_results import Results, Way
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table


def write(found: Results, folder: Path) -> list[Path]:
    """Write report.html, report.json and the figures; return their paths."""
    figures = draw(found)
    written = [folder / "report.html", folder / "report.json"]
    written[0].write_text(page(found, figures), encoding="utf-8")
    written[1].write_text(json.dumps(found.as_json(), indent=1) + "\n", encoding="utf-8")
    for figure in figures:
        written.append(folder / f"{figure.name}.png")
        written[-1].write_bytes(figure.png)
    return written


# Rows, for the terminal and the page alike


def rows(found: Results) -> list[Row]:
    return [
        Row("training loss, last tenth of the steps", lambda way: f"{way.final_loss:.4f}"),
        Row("loss on held-out text", lambda way: f"{way.held_out_loss:.4f}"),
        Row("gradient of step 1, relative error", lambda way: _versus(way, way.gradient_error, percent=True)),
        Row("loss, largest deviation", lambda way: _versus(way, way.loss_difference)),
        Row("parameters and biases, largest deviation at the end", lambda way: _versus(way, way.parameter_difference)),
        Row("identical to the oracle, bit for bit", lambda way: _verdict(way)),
        Row("routing decisions per layer and step", _decisions),
        Row(f"of {found.tokens} tokens, routed differently in backward", _flips),
        Row("bytes held per layer after forward", lambda way: size(round(np.mean(way.bytes_held)))),
        Row("of these the saved decision", lambda way: size(way.bytes_saved)),
        Row("step time, relative", lambda way: f"{way.time_ratio:.2f}"),
        Row("step time", lambda way: f"{way.seconds * 1000:.0f} ms"),
    ]


def _versus(way: Way, difference: float, percent: bool = False) -> str:
    return "oracle" if way.name == "none" else error(difference, percent)


def _verdict(way: Way) -> str:
    if way.name == "none":
        return "oracle"
    return "yes" if way.bitwise else "no"


def _decisions(way: Way) -> str:
    forward, backward = f"{way.decisions_forward:g}", f"{way.decisions_backward:g}"
    if not way.decisions_backward:
        return forward
    return f"{forward} + {backward} audit" if way.name == "verify" else f"{forward} + {backward}"


def _flips(way: Way) -> str:
    if way.flipped_tokens is None:
        return "0"
    return f"0 ({way.flipped_tokens:.1f} averted)" if way.name == "verify" else f"{way.flipped_tokens:.1f}"


class Section(NamedTuple):
    """A part of the report: what was trained in it, and what there is to say of each way."""

    title: str
    figures: str  # what the names of its figures begin with
    lead: str
    ways: list[Any]
    rows: list[Row]


def sections(found: Results) -> list[Section]:
    """Those of the parts that were run."""
    shown = []
    if found.ways:
        shown.append(Section("PyTorch", "torch_", _torch_lead(found), found.ways, rows(found)))
    if found.jax:
        shown.append(Section("JAX", "jax_", in_jax.lead(found), found.jax.ways, in_jax.rows(found)))
    if found.side:
        shown.append(Section(beside.TITLE, "side_", beside.lead(found.side), found.side.ways, beside.rows(found)))
    return shown


def print_tables(found: Results, console: Console) -> None:
    """The tables, and what they come to."""
    for section in sections(found):
        title = f"{section.title}, {len(section.ways[0].losses)} steps each way"
        table = Table(title=title, title_justify="left", title_style="bold")
        table.add_column("")
        for way in section.ways:
            table.add_column(way.name, justify="right")
        for row in section.rows:
            table.add_row(row.name, *(_coloured(row.cell(way)) for way in section.ways))
        console.print(table)
    for sentence in verdict(found):
        console.print(sentence, highlight=False)


def _coloured(text: str) -> str:
    return {"yes": "[green]yes[/]", "no": "[red]no[/]"}.get(text, text)


def verdict(found: Results) -> list[str]:
    """What was seen, in sentences."""
    sentences = []
    torchs, verified = found.way("torch"), found.way("verify")
    compared = [way for way in found.ways if way.name in ("ours", "verify")]
    if compared and found.followed():
        sentences.append(
            f"In PyTorch, ours followed the un-checkpointed run bit for bit: all {len(found.ways[0].losses)} losses, "
            "every parameter and every bias are the same numbers."
        )
    sentences += [
        f"FAILED: {TITLES[way.name]} in PyTorch deviates from the un-checkpointed run, by {way.loss_difference:.1e} in "
        f"the loss and {way.parameter_difference:.1e} in the parameters."
        for way in compared
        if not way.bitwise
    ]
    if torchs and torchs.flipped_tokens is not None and not torchs.bitwise:
        sentences.append(
            "torch's checkpointing raised no error, and trained another model: its recompute sent "
            f"{torchs.flipped_tokens:.1f} of {found.tokens} tokens in each layer and step to other experts than "
            "the forward, and moved every bias a second time."
            + (f" The first step's gradient was {torchs.gradient_error:.1%} off." if torchs.gradient_error else "")
        )
    if verified and verified.flipped_tokens:
        sentences.append(
            f'verify="warn" reported {verified.flipped_tokens:.1f} tokens in each layer and step that a plain '
            "recompute would have sent elsewhere. The gradient is that of the forward's routing all the same."
        )
    return sentences + in_jax.verdict(found) + (beside.verdict(found) if found.side else [])


# Figures


def draw(found: Results) -> list[Drawn]:
    plots = (_plots() if found.ways else []) + (in_jax.plots() if found.jax else [])
    plots += beside.plots() if found.side else []
    return [drawn(plot, found) for plot in plots if plot.worthwhile(found)]


def _plots() -> list[Plot]:
    return [
        Plot(
            "torch_loss",
            "Training loss",
            "Running mean over the last steps. Ours and verify are dashed, so that what lies below them can be seen.",
            _loss_curves,
            wide=True,
        ),
        Plot(
            "torch_deviation",
            "Deviation from the un-checkpointed run",
            "Absolute difference of the loss, step by step, on a logarithmic scale. A run that never left the oracle "
            "has no place on it and is drawn along the bottom.",
            _deviations,
            wide=True,
            worthwhile=_compares,
        ),
        Plot(
            "torch_bytes",
            "Bytes held per layer after forward",
            "Everything that a layer's forward made and that is still held when the whole forward has returned, its "
            "output included. The dark foot is the saved routing plan.",
            _bytes_held,
        ),
        Plot(
            "torch_decisions",
            "Routing decisions per layer and step",
            "How often the router ran. Hatched: in backward. With torch the gradient is computed from that second run; "
            "with verify it is an audit, compared and thrown away.",
            _decisions_made,
        ),
        Plot(
            "torch_flips",
            "Tokens whose experts change when the router runs again",
            "Share of tokens in all layers, step by step, with its running mean. torch's checkpointing: its second "
            "routing of a step against its first. verify: what the audit found.",
            _flips_seen,
            worthwhile=lambda found: any(way.flipped for way in found.ways),
        ),
        Plot(
            "torch_time",
            "Step time relative to no checkpointing",
            "Each step in relation to the same step without checkpointing. Line: the median; box: the middle half; "
            "whiskers: 5 to 95 %.",
            _step_times,
            worthwhile=_compares,
        ),
    ]


def _compares(found: Results) -> bool:
    return len(found.ways) > 1


_STYLES: dict[str, dict[str, Any]] = {
    "none": {"linewidth": 5.0, "alpha": 0.45, "solid_capstyle": "round"},
    "torch": {"linewidth": 1.6},
    "ours": {"linewidth": 1.8, "dashes": (5, 4)},
    "verify": {"linewidth": 1.8, "dashes": (1.2, 3), "dash_capstyle": "round"},
}


def _loss_curves(axes: Axes, found: Results) -> None:
    for way in found.ways:
        axes.plot(*smooth(way.losses), color=COLORS[way.name], label=TITLES[way.name], **_STYLES[way.name])
    axes.set(xlabel="step", ylabel="nats per byte")
    axes.margins(x=0.01)
    axes.legend(frameon=False, fontsize=9.5)


def _deviations(axes: Axes, found: Results) -> None:
    compared = [way for way in found.ways if way.name != "none"]
    seen = [value for way in compared for value in way.loss_differences if value > 0]
    floor = 10.0 ** (np.floor(np.log10(min(seen, default=1e-6))) - 1)
    for way in compared:
        steps = np.arange(1, len(way.loss_differences) + 1)
        values = np.array(way.loss_differences)
        if values.any():
            logarithmic(axes, way.loss_differences, floor, COLORS[way.name], TITLES[way.name])
        else:
            style = _STYLES[way.name] | {"linewidth": 2.6}
            label = f"{TITLES[way.name]}: exactly 0 in every step"
            axes.plot(steps, np.full(len(steps), floor), color=COLORS[way.name], label=label, clip_on=False, **style)
    axes.set_yscale("log")
    axes.set_ylim(bottom=floor)
    ticks = [tick for tick in axes.get_yticks() if tick > floor * 1.5 and tick <= axes.get_ylim()[1]]
    axes.set_yticks([floor, *ticks], ["0", *(f"$10^{{{round(np.log10(tick))}}}$" for tick in ticks)])
    axes.minorticks_off()
    axes.set(xlabel="step", ylabel="|loss - oracle's loss|")
    axes.legend(frameon=False, fontsize=9.5, loc="lower right", bbox_to_anchor=(1, 0.04))
    axes.margins(x=0.01)


def _bytes_held(axes: Axes, found: Results) -> None:
    layers = np.arange(len(found.ways[0].bytes_held))
    width = 0.84 / len(found.ways)
    for n, way in enumerate(found.ways):
        at = layers + (n - (len(found.ways) - 1) / 2) * width
        held = np.array(way.bytes_held) / 1e6
        bars = axes.bar(at, held, width * 0.92, color=COLORS[way.name], label=TITLES[way.name])
        if way.bytes_saved:
            axes.bar(at, way.bytes_saved / 1e6, width * 0.92, color="#10213f")
        if len(layers) <= 4:
            axes.bar_label(bars, [f"{value:.2g}" for value in held], fontsize=7, padding=1.5, color="#3a3f47")
    axes.set_xticks(layers, [f"layer {n}" for n in layers] if len(layers) <= 6 else None)
    axes.set(ylabel="MB")
    axes.margins(y=0.22)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center")


def _decisions_made(axes: Axes, found: Results) -> None:
    names = [TITLES[way.name].replace(" ", "\n", 1) for way in found.ways]
    for n, way in enumerate(found.ways):
        color = COLORS[way.name]
        axes.bar(n, way.decisions_forward, 0.6, color=color)
        before, again = way.decisions_forward, way.decisions_backward
        if again:
            axes.bar(n, again, 0.57, bottom=before, color="white", edgecolor=color, hatch="///", linewidth=1.4)
        axes.text(n, before + again + 0.05, _decisions(way), ha="center", fontsize=9)
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks([0, 1, 2])
    axes.margins(y=0.15)


def _flips_seen(axes: Axes, found: Results) -> None:
    for way in found.ways:
        if way.flipped:
            share = [value * 100 for value in way.flipped]
            axes.plot(range(1, len(share) + 1), share, ".", color=COLORS[way.name], markersize=3, alpha=0.3)
            axes.plot(*smooth(share), color=COLORS[way.name], label=TITLES[way.name], linewidth=1.8)
    axes.set(xlabel="step", ylabel="% of tokens")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9)


def _step_times(axes: Axes, found: Results) -> None:
    compared = [way for way in found.ways if way.name != "none"][::-1]
    boxes = axes.boxplot(
        [way.time_ratios for way in compared],
        orientation="horizontal",
        whis=(5, 95),
        showfliers=False,
        widths=0.5,
        patch_artist=True,
        medianprops={"color": "#16191d", "linewidth": 1.6},
    )
    for box, way in zip(boxes["boxes"], compared, strict=True):
        box.set(facecolor=COLORS[way.name], alpha=0.75, edgecolor=COLORS[way.name])
    for n, way in enumerate(compared, 1):
        axes.text(way.time_ratio, n + 0.31, f"{way.time_ratio:.2f}", ha="center", va="bottom", fontsize=9)
    axes.axvline(1.0, color=COLORS["none"], linewidth=3, alpha=0.45)
    axes.set_yticks(range(1, len(compared) + 1), [TITLES[way.name].replace(" ", "\n", 1) for way in compared])
    axes.set_ylim(0.4, len(compared) + 0.75)
    axes.grid(axis="x", color="#e6e8eb", linewidth=0.8)
    axes.set(xlabel="relative to the same step without checkpointing")


# The page


def page(found: Results, figures: list[Drawn]) -> str:
    """One HTML file with everything inside."""
    state = "good" if found.passed() else "bad"
    parts = "".join(_section_html(section, figures) for section in sections(found))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Checkpointing a mixture of experts</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>Checkpointing a mixture of experts</h1>
<p class="lead">{_lead_html(found)}</p>
<ul class="verdict {state}">{"".join(f"<li>{html.escape(sentence)}</li>" for sentence in verdict(found))}</ul>
{parts}
<h2>How it was measured</h2>
{_notes_html(found)}
</main>
</body>
</html>
"""


def _section_html(section: Section, figures: list[Drawn]) -> str:
    mine = [figure for figure in figures if figure.name.startswith(section.figures)]
    wide = "".join(_figure_html(figure) for figure in mine if figure.wide)
    narrow = "".join(_figure_html(figure) for figure in mine if not figure.wide)
    return (
        f'<h2>{section.title}</h2><p class="lead">{html.escape(section.lead)}</p>'
        f'{_table_html(section.ways, section.rows)}{wide}<div class="pair">{narrow}</div>'
    )


def _lead_html(found: Results) -> str:
    options = found.options
    return html.escape(
        f"A language model with {options['layers']} layers of {options['experts']} experts was trained on the source "
        "text of the Python standard library: without activation checkpointing, and in other ways, each from the same "
        "weights, with the same text and the same random numbers. Its router balances the load as DeepSeek-V3's does, "
        "by a bias for each expert that moves with every step. Checkpointing runs a layer again in backward. If its "
        "router runs again too, it may send tokens to other experts than the forward did, and the gradient is then "
        "that of another function. Ours hands the recompute the routing that the forward chose."
    )


def _torch_lead(found: Results) -> str:
    return (
        f"{found.options['steps']} steps each way, under {found.options['precision']} autocast. The biases are buffers "
        "that every forward moves. A router that runs again finds other biases, sends some tokens to other experts, "
        "and moves the biases once more. The run without checkpointing is the oracle, and every other one is judged by "
        "how far it leaves it."
    )


def _table_html(ways: list[Any], rows: list[Row]) -> str:
    key = '<span class="key" style="background:{}"></span>'
    heads = "".join(
        f'<th scope="col">{key.format(COLORS[way.name])}{html.escape(TITLES[way.name])}</th>' for way in ways
    )
    lines = []
    for row in rows:
        cells = "".join(f"<td{_mark(row.cell(way))}>{html.escape(row.cell(way))}</td>" for way in ways)
        lines.append(f'<tr><th scope="row">{html.escape(row.name)}</th>{cells}</tr>')
    body = "\n".join(lines)
    return f'<div class="scroll"><table><thead><tr><td></td>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _mark(text: str) -> str:
    return f' class="{text}"' if text in ("yes", "no") else ""


def _figure_html(figure: Drawn) -> str:
    data = base64.b64encode(figure.png).decode("ascii")
    title, caption = html.escape(figure.title), html.escape(figure.caption)
    return (
        f'<figure><h3>{title}</h3><img alt="{title}" src="data:image/png;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _notes_html(found: Results) -> str:
    options, machine, text = found.options, found.machine, found.text
    frameworks = [f"{name} {machine[name]}" for name in ("torch", "jax") if name in machine]
    notes = [
        "All ways run in one process and take turns within each step, another one first each time, so that their step "
        "times are compared in pairs. The first three steps are left out of the times.",
        "Every way has its own weights, optimizer and random-number state. Dropout "
        f"({options['dropout']:g}) draws the same masks in all ways of a framework.",
        "The first step starts from the same numbers in all ways, so its gradient shows the error by itself. After "
        "that training drives any two runs apart that differ at all: the deviations say that they did, not how much "
        "worse one is.",
        *(_torch_notes(found) if found.ways else []),
        *(in_jax.notes(found) if found.jax else []),
        *(beside.notes(found.side) if found.side else []),
        f"Text: {text['bytes']:,} bytes from {text['files']} files, SHA-256 {text['sha256'][:16]}…; a token is a "
        "byte; the last 5 % are held out.",
        f"Model: {found.parameters:,} parameters, width {options['dim']}, {options['top_k']} of {options['experts']} "
        f"experts for each token, bias rate {options['bias_rate']:g}. Batches of {options['batch']} times "
        f"{options['length']} bytes. AdamW, learning rate {options['learning_rate']:g}, seed {options['seed']}.",
        f"Run with Python {machine['python']}, {', '.join(frameworks)}, roundpipe-recompute {machine['roundpipe']}, "
        f"{machine['threads']} compute thread{'s' * (machine['threads'] > 1)}, {machine['system']}"
        + (f" ({machine['vector_instructions']})." if "vector_instructions" in machine else "."),
    ]
    return f"<ul>{''.join(f'<li>{html.escape(note)}</li>' for note in notes)}</ul>"


def _torch_notes(found: Results) -> list[str]:
    return [
        "PyTorch: bytes are counted by noting the storage of every tensor made while a layer runs, and asking after "
        "the forward which of them are still alive. A checkpointed layer keeps its input, which is the output of the "
        "layer before. verify also keeps a copy of the output until the audit.",
        "PyTorch: experts take a fixed number of tokens and drop the rest, so that every shape is static. In a model "
        "whose shapes follow the routing, torch's recompute can stop with an error instead.",
    ]


_STYLE = """
:root { color-scheme: light; --ink: #16191d; --soft: #59606a; --line: #e1e4e8; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f6f8; color: var(--ink);
  font: 17px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", sans-serif; }
main { max-width: 66rem; margin: 2.5rem auto; padding: 2.5rem 3rem 2rem; background: white;
  border: 1px solid var(--line); border-radius: 10px; }
h1 { margin: 0 0 1rem; font-size: 2rem; line-height: 1.2; letter-spacing: -0.015em; }
h2 { margin: 2.5rem 0 0.5rem; font-size: 1.3rem; }
h3 { margin: 0 0 0.4rem; font-size: 1.05rem; }
.lead { max-width: 54rem; color: #30353c; }
.verdict { margin: 1.5rem 0 2rem; padding: 0.9rem 1.2rem 0.9rem 2.2rem; border-left: 5px solid #2a9d6f;
  background: #eef8f4; border-radius: 0 6px 6px 0; }
.verdict.bad { border-color: #d1495b; background: #fdf0f2; }
.verdict li + li { margin-top: 0.35rem; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.5rem 0.75rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
thead th { border-bottom: 2px solid var(--ink); font-weight: 600; }
tbody td { width: 15%; }
tbody th { text-align: left; font-weight: 400; color: #30353c; white-space: normal; }
tbody tr:nth-child(even) { background: #fafbfc; }
.key { display: inline-block; width: 0.75em; height: 0.75em; margin-right: 0.45em; border-radius: 2px; }
.yes { color: #1d7a55; font-weight: 600; }
.no { color: #b3293f; font-weight: 600; }
figure { margin: 2.5rem 0 0; }
img { display: block; width: 100%; height: auto; }
figcaption { max-width: 54rem; margin-top: 0.3rem; color: var(--soft); font-size: 0.88rem; line-height: 1.45; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); column-gap: 2.5rem; }
main > ul:last-child { padding-left: 1.2rem; color: #30353c; font-size: 0.92rem; }
@media (max-width: 50rem) {
  main { margin: 0; padding: 1.5rem 1.2rem; border: 0; }
  .pair { grid-template-columns: 1fr; }
}
@media print {
  body { background: white; }
  main { border: 0; margin: 0; max-width: none; }
  figure { break-inside: avoid; }
}
"""
