"""What the site's builder does not see: links of the README, names missing from the API pages, programs for ranks."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(page: Path) -> list[str]:
    return LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """Those of its headings, as both GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        url = urlsplit(link)
        if url.scheme:
            assert url.scheme == "https", link
            assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", url.netloc), link
            continue
        target = (page.parent / url.path).resolve() if url.path else page
        assert target.is_file(), link
        assert not url.fragment or url.fragment in anchors(target), link


@pytest.mark.parametrize("link", ["gone.md", "#nowhere", "page.md#nowhere", "http://example.org", "https://local"])
def test_a_dead_link_is_found(tmp_path: Path, link: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Here\n\n[it]({link})\n", encoding="utf-8")

    with pytest.raises(AssertionError):
        test_links_lead_somewhere(page)


@pytest.mark.parametrize("package", ["roundpipe_core", "roundpipe_torch", "roundpipe_jax"])
def test_every_public_name_is_on_an_api_page(package: str) -> None:
    pytest.importorskip(package.partition("_")[2].replace("core", "sys"))
    shown = set()
    for page in sorted((ROOT / "docs").glob("api*.md")):
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            module, _, attribute = name.rpartition(".")
            shown.add(id(getattr(importlib.import_module(module), attribute)))
    module = importlib.import_module(package)

    assert [name for name in module.__all__ if name != "__version__" and id(getattr(module, name)) not in shown] == []


def blocks(page: str) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def test_expert_parallel_runs_on_two_ranks_and_on_two_devices(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    from tests.on_torch.ranks import free_port

    for name, block in zip(("torch", "jax"), blocks("guides/expert-parallel.md"), strict=True):
        (tmp_path / f"in_{name}.py").write_text(block, encoding="utf-8")
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    runs = [("in_torch.py", world | {"RANK": "0"}), ("in_torch.py", world | {"RANK": "1"})]
    runs.append(("in_jax.py", {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}))
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", tmp_path / script],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more,
            stderr=subprocess.PIPE,
            text=True,
        )
        for script, more in runs
    ]
    try:
        errors = [process.communicate(timeout=90)[1] for process in started]
    finally:
        for process in started:
            process.kill()

    assert [process.returncode for process in started] == [0, 0, 0], "\n".join(errors)
