"""The house rules that no single package can prove: who imports whom, types shipped, one version."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import roundpipe_core

ROOT = Path(__file__).parents[1]
PACKAGES = ["roundpipe_core", "roundpipe_torch", "roundpipe_jax"]


def loaded_by(module: str, *, path: Path = ROOT) -> set[str]:
    """The top-level modules in memory after a fresh interpreter imported `module` and nothing else."""
    lines = [
        "import sys",
        f"sys.path.insert(0, {str(path)!r})",
        f"import {module}",
        "print(*{name.partition('.')[0] for name in sys.modules})",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def need(package: str) -> None:
    """Skip where the package is not written yet, or the framework it is for is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} does not exist yet")
    framework = package.removeprefix("roundpipe_")
    if framework != "core" and importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("roundpipe_core", {"torch", "jax", "jaxlib", "numpy", "roundpipe_torch", "roundpipe_jax"}),
        ("roundpipe_torch", {"jax", "jaxlib", "roundpipe_jax", "transformers"}),
        ("roundpipe_jax", {"torch", "roundpipe_torch"}),
    ],
)
def test_imports_stay_in_their_own_house(package: str, forbidden: set[str]) -> None:
    need(package)

    assert loaded_by(package) & forbidden == set()


def test_the_core_loads_the_standard_library_and_itself() -> None:
    # What the interpreter brings up by itself (site hooks of the environment) is not the core's doing.
    brought = loaded_by("roundpipe_core") - loaded_by("sys")

    assert brought - sys.stdlib_module_names == {"roundpipe_core"}


def test_the_import_check_can_fail(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    (tmp_path / "culprit.py").write_text("def lazily():\n    import numpy\n\nlazily()\n", encoding="utf-8")

    assert "numpy" in loaded_by("culprit", path=tmp_path)


@pytest.mark.parametrize("package", PACKAGES)
def test_types_are_shipped(package: str) -> None:
    folder = ROOT / package
    if not folder.is_dir():
        pytest.skip(f"{package} does not exist yet")

    assert (folder / "py.typed").is_file()


@pytest.mark.parametrize("package", PACKAGES)
def test_versions_agree(package: str) -> None:
    need(package)

    assert importlib.import_module(package).__version__ == roundpipe_core.__version__


def test_the_distribution_has_the_version_of_the_core() -> None:
    try:
        installed = version("roundpipe-recompute")
    except PackageNotFoundError:
        pytest.skip("run from the source tree, not installed")

    assert installed == roundpipe_core.__version__
