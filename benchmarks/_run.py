"""Runs benchmarks, each in a process of its own with one compute thread, so that none meets what another left."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import roundpipe_core

from ._results import ROOT, Found, Results, found
from ._rows import Row

ALL = (
    "torch_overhead", "torch_coverage", "torch_calls", "torch_regions", "torch_depth", "torch_decisions", "torch_costs",
    "torch_slots", "torch_auto", "torch_keep", "torch_cuda", "jax_costs", "jax_moe_flips", "jax_times", "jax_keep",
    "tape", "jax_tapes", "exchange",
)  # fmt: skip
"""In the order of the page."""
COUNTED = ("torch_calls", "torch_coverage", "torch_costs", "torch_depth", "jax_costs", "jax_keep", "jax_moe_flips")
"""No clock in them: they can run side by side."""
_VERSIONS = ("torch", "jax", "jaxlib", "numpy", "scipy", "torch-remat", "fairscale", "deepspeed")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}


def run(names: Iterable[str], quick: bool, tell: Callable[[str, Found], None]) -> Results:
    """Run benchmarks; the counted ones side by side, then the timed ones one by one."""
    chosen, machine = list(names), described()
    done: dict[str, Found] = {}

    def one(name: str) -> None:
        done[name] = _in_a_process(name, quick)
        tell(name, done[name])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, [name for name in chosen if name in COUNTED]))
    for name in chosen:
        if name not in COUNTED:
            one(name)
    return Results(machine, {name: done[name] for name in chosen})


def _in_a_process(name: str, quick: bool) -> Found:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks", "measure", name, str(path), *(["--quick"] if quick else [])]
        ended = subprocess.run(
            command, cwd=ROOT, env=os.environ | _ONE_THREAD, capture_output=True, text=True, check=False
        )
        if path.exists():
            return dataclasses.replace(found(**json.loads(path.read_text())), seconds=time.monotonic() - start)
    last = (ended.stderr.strip() or "no message").splitlines()[-1]
    error = f"the process ended with {ended.returncode}: {last}"
    return Found(name, "", _now(), quick, time.monotonic() - start, [], [], error)


def measure(name: str, path: Path, quick: bool) -> None:
    """What the process does."""
    rows: list[Row] = []
    notes: list[str] = []
    title, about, error = name, "", ""
    try:
        module = importlib.import_module(f"benchmarks.{name}")
        title, _, about = (module.__doc__ or name).strip().partition("\n\n")
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        for one in module.rows(quick):
            if isinstance(one, Row):
                rows.append(dataclasses.replace(one, benchmark=name))
            elif one not in notes:
                notes.append(one)
    except Exception as failure:
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    result = Found(title, about, _now(), quick, 0.0, rows, notes, error)
    path.write_text(json.dumps(result.as_json()), encoding="utf-8")


def described() -> dict[str, Any]:
    """The machine and the versions."""
    versions = {"roundpipe": roundpipe_core.__version__}
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "date": _now(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load before": None if busy is None else round(busy, 1),
        "versions": versions,
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
