"""What needs a process of its own: four devices and 64 bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
