"""A test file of another project, as it is and with this library's functions in place of those it tests.

    python tools/upstream.py torch PATH/test/test_autograd.py -k "heckpoint or reentrant"
    python tools/upstream.py jax PATH/tests/api_test.py -k RematTest --mode custom_vjp

The file comes from a checkout of the other project, of the version that is installed. Both runs are processes of their
own; what comes out differently is listed with the last line of its error.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def swap_torch(mode: str) -> None:
    """Ours, for whoever asks torch for its checkpoint functions from now on."""
    import torch.utils.checkpoint

    import roundpipe_torch

    torch.utils.checkpoint.checkpoint = roundpipe_torch.checkpoint
    torch.utils.checkpoint.checkpoint_sequential = roundpipe_torch.checkpoint_sequential


def swap_jax(mode: str) -> None:
    """Ours, for whoever asks JAX for its checkpoint from now on."""
    import jax

    import roundpipe_jax

    def remat(fun: Any = None, **options: Any) -> Any:
        return roundpipe_jax.remat(fun, mode=mode, **options)

    jax.checkpoint = jax.remat = remat


SWAPS: dict[str, Callable[[str], None]] = {"torch": swap_torch, "jax": swap_jax}


class Outcomes:
    """What came of each test, gathered while pytest runs."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        _, _, name = report.nodeid.partition("::")
        if self.found.get(name, ("", ""))[0] == "failed":
            return  # a subtest of it has failed
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            self.found[name] = (report.outcome, crash.message if crash else "")


def run(arguments: argparse.Namespace) -> None:
    """One of the two runs, in this process."""
    if arguments.child == "ours":
        SWAPS[arguments.framework](arguments.mode)
    outcomes = Outcomes()
    options = ["-q", "--tb=short", "-c", os.devnull, "--rootdir", str(arguments.file.parent), "-W", "ignore"]
    plugins = ["-p", "no:randomly", "-p", "no:cacheprovider"]
    chosen = ["-k", arguments.k] if arguments.k else []
    pytest.main([*options, *plugins, *chosen, str(arguments.file)], plugins=[outcomes])
    arguments.result.write_text(json.dumps(outcomes.found))


def outcomes_of(which: str, arguments: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """One of the two runs, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, __file__, *sys.argv[1:], "--child", which, "--result", str(result)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        log = Path(arguments.log or folder, f"{which}.log")
        log.write_text(done.stdout + done.stderr)
        if not result.exists():
            sys.exit(f"the run with {which} functions ended early:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        found: dict[str, tuple[str, str]] = json.loads(result.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=SWAPS)
    parser.add_argument("file", type=Path)
    parser.add_argument("-k", help="which tests, as for pytest")
    parser.add_argument("--mode", default="checkpoint", help="the lane of roundpipe_jax.remat")
    parser.add_argument("--log", help="a folder for what pytest printed")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run(arguments)
        return
    theirs, ours = (outcomes_of(which, arguments) for which in ("theirs", "ours"))
    for which, found in (("theirs", theirs), ("ours", ours)):
        print(which, dict(collections.Counter(outcome for outcome, _ in found.values())))
    for name in sorted(theirs.keys() | ours.keys()):
        before, after = theirs.get(name, ("absent", "")), ours.get(name, ("absent", ""))
        if before[0] != after[0]:
            last = " / ".join((after[1] or before[1]).splitlines()[:3])
            print(f"{name}: {before[0]}, {after[0]}: {last[:300]}")


if __name__ == "__main__":
    main()
