"""python -m roundpipe_core doctor."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from roundpipe_core import _doctor
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
    monkeypatch.setattr(_doctor, "_FRONTENDS", (("json", "no_such_package"), ("no_such_framework", "x")))
    assert main(["doctor"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("no_such_package") and line.endswith("FAILS") for line in lines)
    assert any(line.split() == ["no_such_framework", "not", "installed"] for line in lines)


def test_a_trial_that_gives_something_else() -> None:
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
