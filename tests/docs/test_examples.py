"""Every python block in the README and in docs/ runs, top to bottom, one namespace a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.document import Document
from sybil.parsers.markdown import PythonCodeBlockParser

ROOT = Path(__file__).parents[2]
FENCE = "```python"
PAGES = [
    page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))) if FENCE in page.read_text("utf-8")
]
SYBIL = Sybil(parsers=[PythonCodeBlockParser()], patterns=["*.md"], path=str(ROOT))


def run(page: Path) -> int:
    document: Document = SYBIL.parse(page)
    count = 0
    for example in document.examples():
        example.evaluate()
        count += 1
    return count


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_run(page: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    fences = page.read_text(encoding="utf-8").count(FENCE)

    assert run(page) == fences, "a python block of this page was not found by the parser"


def test_a_wrong_example_is_caught(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n", encoding="utf-8")

    with pytest.raises(AssertionError):
        run(page)


def test_the_site_builds(tmp_path: Path) -> None:
    """No dead link, no page outside the navigation, no name in the API page that does not exist."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # the theme's own advertisement
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False, timeout=100)

    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").is_file()
    api = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    assert "&gt;&gt;&gt; " in api
    assert "<blockquote>" not in api, "an example of a docstring is not shown as code"
