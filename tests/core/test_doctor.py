"""python -m roundpipe_core doctor."""

from __future__ import annotations

import importlib
import json
import platform
import re
import sys
from pathlib import Path

import pytest

from roundpipe_core import __version__, _command, _doctor
from roundpipe_core._command import main


def test_everything_works_here(capsys: pytest.CaptureFixture[str]) -> None:
    for framework in ("torch", "jax"):
        pytest.importorskip(framework)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tried = [finding["about"] for finding in found if finding["works"] is not None]
    assert all(finding["works"] is not False for finding in found), found
    for framework in ("torch, cpu", "jax"):
        assert any(about.startswith(f"{framework}: record and replay") for about in tried), tried


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "_FRONTENDS", (("no_such_framework", "x"), ("json", "no_such_package")))
    assert main(["doctor"]) == 2
    assert [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()] == [
        ["found"],
        ["roundpipe", __version__],
        ["python", f"{platform.python_version()} on {platform.platform()}"],
        ["no_such_framework", "not installed"],
        ["json", getattr(json, "__version__", "of unknown version")],
        ["no_such_package", "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'  FAILS"],
    ]


def test_a_trial_that_gives_something_else() -> None:
    assert _doctor.trial("x", lambda: "something") == ("x", "works", True)
    assert _doctor.trial("x", lambda: False) == ("x", "wrong result", False)
    assert _doctor.trial("x", lambda: 1 / 0) == ("x", "ZeroDivisionError: division by zero", False)


def test_a_framework_that_is_too_old_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "from roundpipe_core import _installed\n_installed.need('json', '99', by='old_package')\n"
    (tmp_path / "old_package.py").write_text(lines, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_doctor, "_FRONTENDS", (("json", "old_package"),))
    assert main(["doctor"]) == 2
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(
        r"old_package +cannot be imported: ImportError: old_package needs json 99 or newer, and found \S+ +FAILS", last
    )


def test_a_framework_without_metadata_tells_its_version_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "grown_at_home.py").write_text("__version__ = '7'", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_doctor, "_FRONTENDS", (("grown_at_home", "no_such_package"),))
    versions = []
    for _ in range(2):
        main(["doctor", "--json"])
        versions += [f["found"] for f in json.loads(capsys.readouterr().out) if f["about"] == "grown_at_home"]
        importlib.import_module("grown_at_home")
    monkeypatch.delitem(sys.modules, "grown_at_home")
    assert versions == ["of unknown version", "7"]


def test_the_table_marks_what_works(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    finding = _doctor.Finding
    monkeypatch.setattr(
        _command, "examine", lambda: iter([finding("a", "7"), finding("b", "works", True), finding("c", "no", False)])
    )
    assert main(["doctor"]) == 2
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["found"], ["a", "7"], ["b", "works", "ok"], ["c", "no", "FAILS"],
    ]  # fmt: skip
    monkeypatch.setattr(_command, "examine", lambda: iter([finding("a", "7"), finding("b", "works", True)]))
    assert main(["doctor"]) == 0
