"""Measure, and say what was found.

    python -m benchmarks [NAME ...] [--quick]   run, write build/bench/results.json and index.html, print tables
    python -m benchmarks gate                   compare the results with benchmarks/baseline.json; 1 if one is worse
    python -m benchmarks publish                the results as tables and figures of docs/benchmarks.md
    python -m benchmarks baseline               the results as the new baseline

Some NAMEs alone renew their own part of the results. `python -m benchmarks list` tells the NAMEs.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from rich.console import Console

from . import _gate, _run
from ._results import FOLDER, Found, load

RESULTS = FOLDER / "results.json"


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="few rounds and small sizes, to try the machinery")
    options = parser.parse_args(words)
    match options.what:
        case ["list"]:
            print(*_run.ALL)
            return 0
        case ["measure", name, path]:  # what the runner's processes are started with
            _run.measure(name, Path(path), options.quick)
            return 0
        case ["gate"]:
            return gate()
        case ["publish"]:
            from . import _page

            for path in _page.publish(load(RESULTS)):
                print(path)
            return 0
        case ["baseline"]:
            _gate.write(_gate.rebased(load(RESULTS), _gate.read()))
            return 0
    if unknown := [name for name in options.what if name not in _run.ALL]:
        parser.error(f"unknown: {', '.join(unknown)}. There are: {', '.join(_run.ALL)}.")
    return bench(options.what or _run.ALL, options.quick)


def bench(names: list[str] | tuple[str, ...], quick: bool) -> int:
    from . import _page

    def tell(name: str, found: Found) -> None:
        print(f"{name}: {found.seconds:.0f} s{', FAILED' if found.error else ''}", file=sys.stderr, flush=True)

    results = _run.run(names, quick, tell)
    if RESULTS.exists() and set(names) != set(_run.ALL):
        before = load(RESULTS).benchmarks
        merged = before | results.benchmarks
        results = dataclasses.replace(results, benchmarks={name: merged[name] for name in _run.ALL if name in merged})
    results.save(RESULTS)
    _page.write(results, FOLDER / "index.html")
    shown = dataclasses.replace(results, benchmarks={name: results.benchmarks[name] for name in names})
    _page.show(shown, Console(width=None if sys.stdout.isatty() else 200))
    print(f"{RESULTS}\n{FOLDER / 'index.html'}")
    return int(any(found.error for found in shown.benchmarks.values()))


def gate(path: Path = RESULTS) -> int:
    from . import _page

    if not path.exists():
        print(f"There is no {path}: run `make bench` first.", file=sys.stderr)
        return 2
    verdicts = _gate.judge(load(path), _gate.read())
    _page.show_verdicts(verdicts, Console(width=None if sys.stdout.isatty() else 160))
    return int(any(verdict.why for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
