"""What needs a process of its own: four devices and 64 bits, and a framework alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_four_devices_and_64_bits() -> None:
    process = subprocess.run(
        [sys.executable, str(HERE / "exchange_on_devices.py")],
        env={
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            "JAX_ENABLE_X64": "1",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "PYTHONPATH": str(HERE.parents[1]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert process.returncode == 0, process.stdout + process.stderr[-3000:]


@pytest.mark.parametrize(("package", "other"), [("roundpipe_torch", "jax"), ("roundpipe_jax", "torch")])
def test_taking_an_array_loads_no_other_framework(package: str, other: str) -> None:
    lines = [
        f"import sys, numpy, {package}",
        f"from {package}._exchange import adopt",
        "for take in (",
        *(f"    lambda x: {package}.from_dlpack(x, {copy!r})," for copy in ("snapshot", "auto")),
        "    adopt,",
        "):",
        "    assert take(numpy.arange(3)).tolist() == [0, 1, 2]",
        f"assert {other!r} not in sys.modules",
    ]
    process = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert process.returncode == 0, process.stderr[-3000:]
