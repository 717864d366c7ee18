"""The house rules that no single package can prove: who imports whom, types shipped, one version."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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


def metadata() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_metadata() -> None:
    project = metadata()["project"]
    assert project["name"] == "roundpipe-recompute"
    assert project["dependencies"] == []
    assert project["dynamic"] == ["version"]
    assert project["readme"] == "README.md"
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert {"torch", "jax", "all", "test", "coverage", "bench"} == set(project["optional-dependencies"])
    assert project["optional-dependencies"]["all"] == ["roundpipe-recompute[torch,jax]"]


def test_the_oldest_python_is_the_one_that_is_checked() -> None:
    project, tool = metadata()["project"], metadata()["tool"]
    oldest = project["requires-python"].removeprefix(">=")
    versions = [line.rpartition(" ")[2] for line in project["classifiers"] if line[-1].isdigit() and "." in line]
    assert versions[0] == oldest == tool["mypy"]["python_version"]
    assert tool["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_oldest_framework_is_the_same_everywhere(framework: str) -> None:
    [wanted] = metadata()["project"]["optional-dependencies"][framework]
    least = wanted.removeprefix(f"{framework}>=")
    package = (ROOT / f"roundpipe_{framework}" / "__init__.py").read_text(encoding="utf-8")
    assert f'need("{framework}", "{least}", by="roundpipe_{framework}")' in package
    for page in ("README.md", "docs/install.md"):
        assert f"{framework} {least} or newer" in (ROOT / page).read_text(encoding="utf-8"), page


def test_the_source_archive_has_every_folder() -> None:
    included = metadata()["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert [name for name in included if not (ROOT / name[1:]).exists()] == []
    for package in (*PACKAGES, "tests", "docs", "examples", "benchmarks", "tools"):
        assert f"/{package}" in included
