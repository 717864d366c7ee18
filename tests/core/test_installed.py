"""A frontend without its framework, or with one that is too old, or with a folder of that name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from roundpipe_core._installed import need

ROOT = Path(__file__).parents[2]


def framework(folder: Path, text: str | None) -> None:
    """A package of our own, `nosuch`; without text a mere folder."""
    (folder / "nosuch").mkdir()
    if text is not None:
        (folder / "nosuch" / "__init__.py").write_text(text, encoding="utf-8")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nosuch", raising=False)
    return tmp_path


@pytest.mark.parametrize("version", ["2.11", "2.11.0+cu130", "2.12.0a0+git1", "3.0"])
def test_new_enough(path: Path, version: str) -> None:
    framework(path, f"__version__ = {version!r}")
    need("nosuch", "2.11", by="us")
    del sys.modules["nosuch"]


@pytest.mark.parametrize("version", ["2.9.1", "1.13", "0.2", None])
def test_too_old(path: Path, version: str | None) -> None:
    framework(path, "" if version is None else f"__version__ = {version!r}")
    with pytest.raises(ImportError) as caught:
        need("nosuch", "2.11", by="us")
    assert str(caught.value).splitlines() == [
        f"us needs nosuch 2.11 or newer, and found {version or 'of unknown version'}.",
        f"  found in: {path / 'nosuch' / '__init__.py'}",
        "  way out: pip install 'nosuch>=2.11'",
    ]
    assert caught.value.name == "nosuch"
    del sys.modules["nosuch"]


def test_only_a_folder(path: Path) -> None:
    framework(path, None)
    with pytest.raises(ModuleNotFoundError) as caught:
        need("nosuch", "2.11", by="us")
    assert str(caught.value).splitlines() == [
        "us needs nosuch 2.11 or newer, and all there is by that name is a folder.",
        f"  folder: {path / 'nosuch'}",
        "  way out: pip install 'nosuch>=2.11', and rename the folder or start Python elsewhere.",
    ]
    assert caught.value.name == "nosuch"
    del sys.modules["nosuch"]


def test_not_there() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        need("nosuch", "2.11", by="us")
    assert str(caught.value).splitlines() == [
        "us needs nosuch 2.11 or newer, which is not installed.",
        "  way out: pip install 'nosuch>=2.11'",
    ]
    assert caught.value.name == "nosuch"


def test_what_the_framework_itself_lacks_is_its_own_error(path: Path) -> None:
    framework(path, "import nosuch_either")
    with pytest.raises(ModuleNotFoundError, match="nosuch_either") as caught:
        need("nosuch", "2.11", by="us")
    assert caught.value.name == "nosuch_either"


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_frontend_alone(name: str) -> None:
    block = f"import sys; sys.modules[{name!r}] = None; import roundpipe_{name}"
    command = [sys.executable, "-OO", "-W", "error", "-c", block]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    *_, error, way_out = done.stderr.splitlines()
    assert error.startswith(f"ModuleNotFoundError: roundpipe_{name} needs {name} ")
    assert error.endswith("or newer, which is not installed.")
    assert way_out.startswith(f"  way out: pip install '{name}>=")
