"""What needs a process of its own: eight devices, and the coming implementations of JAX's transformations."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "setting",
    [
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_REMAT3": "1"},
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_CUSTOM_VJP3": "1"},
    ],
    ids=["8 devices", "JAX_REMAT3", "JAX_CUSTOM_VJP3"],
)
def test_in_a_process_of_its_own(setting: dict[str, str]) -> None:
    run = subprocess.run(
        [sys.executable, str(HERE / "on_devices.py")],
        env={
            **os.environ,
            **setting,
            "PYTHONPATH": str(HERE.parents[1]),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert "all right" in run.stdout
