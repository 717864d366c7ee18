"""The results in the terminal, as one HTML file that needs no other, and in `docs/benchmarks.md`."""

from __future__ import annotations

import base64
import html
import re
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ._gate import Verdict
from ._plots import Drawn, draw
from ._results import ROOT, Results
from ._sheets import Sheet, among_equals, goals, sheets

DOCS = ROOT / "docs"
_BLOCK = re.compile(r"(<!-- begin: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def machine(results: Results) -> str:
    """What was measured on, in a sentence."""
    about = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    quick = " Some were run quickly: their times say little." * any(f.quick for f in results.benchmarks.values())
    return (
        f"{about['date']}, Python {about['python']}, {about['system']}, {about['cores']} cores ({about['processor']}), "
        f"load before {about['load before']}, one compute thread. {versions}.{quick}"
    )


# In the terminal


def show(results: Results, console: Console) -> None:
    for name, found in results.benchmarks.items():
        console.rule(f"{name}, {found.seconds:.0f} s", align="left")
        for sheet in sheets(found.rows):
            table = Table(title=sheet.title, title_justify="left", title_style="bold")
            for n, head in enumerate(sheet.heads):
                table.add_column(head, justify="right" if n else "left")
            for line in sheet.lines:
                table.add_row(*line)
            console.print(table)
        for note in (*found.notes, *([f"FAILED: {found.error}"] if found.error else [])):
            console.print(note, highlight=False, markup=False)
    met, missed = goals(results)
    console.print(f"{len(met)} goals met, {len(missed)} missed.", style="bold")
    for sentence in missed:
        console.print(f"missed: {sentence}", highlight=False, markup=False)


def show_verdicts(verdicts: list[Verdict], console: Console) -> None:
    bad = [verdict for verdict in verdicts if verdict.why]
    console.print(f"{len(verdicts) - len(bad)} of {len(verdicts)} ratios and counts within their limits.")
    if not bad:
        return
    table = Table(title="The gate is closed", title_justify="left", title_style="bold red")
    for head in ("what", "baseline", "limit", "now", ""):
        table.add_column(head, overflow="fold")
    for key, before, limit, now, why in bad:
        table.add_row(key, f"{before:g}", f"{limit:.4g}", "" if now is None else f"{now:.4g}", why)
    console.print(table)


# In a browser


def write(results: Results, path: Path) -> None:
    figures = draw(results)
    met, missed = goals(results)
    sections = "".join(_section(results, name, figures) for name in results.benchmarks)
    listed = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in missed)
    path.write_text(
        f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Benchmarks</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>Benchmarks</h1>
<p>{html.escape(machine(results))}</p>
<p>{len(met)} goals met, {len(missed)} missed.</p><ul>{listed}</ul>
{sections}
</main>
</body>
</html>
""",
        encoding="utf-8",
    )


def _section(results: Results, name: str, figures: list[Drawn]) -> str:
    found = results.benchmarks[name]
    pictures = "".join(
        f'<img alt="{html.escape(figure.alt)}" src="data:image/svg+xml;base64,'
        f'{base64.b64encode(figure.svg.encode()).decode()}">'
        for figure in figures
        if figure.benchmark == name
    )
    notes = [*found.notes, *([f"FAILED: {found.error}"] if found.error else [])]
    listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    tables = "".join(map(_table, sheets(found.rows)))
    about = "".join(f"<p>{html.escape(part)}</p>" for part in (found.title, *found.about.split("\n\n")))
    return f"<h2>{html.escape(name)}</h2>{about}{pictures}{tables}<ul>{listed}</ul>"


def _table(sheet: Sheet) -> str:
    heads = "".join(f'<th scope="col">{html.escape(head)}</th>' for head in sheet.heads)
    lines = "".join(
        f'<tr><th scope="row">{html.escape(first)}</th>{"".join(f"<td>{html.escape(text)}</td>" for text in rest)}</tr>'
        for first, *rest in sheet.lines
    )
    return (
        f'<h3>{html.escape(sheet.title)}</h3><div class="scroll"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


# In the documentation


def publish(results: Results) -> list[Path]:
    """Write the figures to `docs/images`, fill the marked blocks of `docs/benchmarks.md`, and tell what was written."""
    figures, page = draw(results), DOCS / "benchmarks.md"
    written = [DOCS / "images" / f"{figure.name}.svg" for figure in figures]
    for path, figure in zip(written, figures, strict=True):
        path.parent.mkdir(exist_ok=True)
        path.write_text(figure.svg, encoding="utf-8")

    def fill(block: re.Match[str]) -> str:
        begin, name, end = block.groups()
        return f"{begin}{_block(results, name, figures)}\n{end}"

    page.write_text(_BLOCK.sub(fill, page.read_text(encoding="utf-8")), encoding="utf-8")
    return [page, *written]


def _block(results: Results, name: str, figures: list[Drawn]) -> str:
    if name == "machine":
        return machine(results)
    if name == "missed":
        return _standing(results)
    found = results.benchmarks.get(name)
    if found is None or not found.rows:
        return "\n".join(["Not measured.", *(found.notes if found else [])])
    mine = [f"![{figure.alt}](images/{figure.name}.svg)" for figure in figures if figure.benchmark == name]
    return "\n\n".join(
        [*mine, *map(_markdown, sheets(found.rows)), *([f"({'; '.join(found.notes)}.)"] if found.notes else [])]
    )


def _standing(results: Results) -> str:
    met, missed = goals(results)
    parts = [f"{len(met)} goals are met, {len(missed)} are missed:", _listed(missed)]
    if equals := among_equals(results):
        lead = (
            "Among the ways that cover every [case](#what-the-call-covers) but the kept decision, relative to the same:"
        )
        parts += [lead, _listed(equals)]
    return "\n\n".join(parts)


def _listed(sentences: list[str]) -> str:
    return "\n".join(f"* {sentence}" for sentence in sentences)


def _markdown(sheet: Sheet) -> str:
    head = f"| {' | '.join(sheet.heads)} |\n|---|{'--:|' * (len(sheet.heads) - 1)}"
    lines = [f"| {' | '.join(line)} |" for line in sheet.lines]
    return "\n".join([f"**{sheet.title}**", "", head, *lines])


_STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #f5f6f8; color: #16191d;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", sans-serif; }
main { max-width: 66rem; margin: 2rem auto; padding: 2rem 3rem; background: white; border-radius: 10px; }
h1 { margin: 0 0 1rem; } h2 { margin: 3rem 0 0.5rem; } h3 { margin: 1.5rem 0 0.3rem; font-size: 1rem; }
img { display: block; width: 100%; height: auto; margin: 1rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 0.7rem; border-bottom: 1px solid #e1e4e8; text-align: right; }
td { white-space: nowrap; }
thead th { border-bottom: 2px solid #16191d; } tbody th { text-align: left; font-weight: 400; white-space: nowrap; }
@media (max-width: 50rem) { main { margin: 0; padding: 1.2rem; } }
"""
