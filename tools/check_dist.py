"""Build what users install, look into it, and try it in environments that hold nothing else.

    python tools/check_dist.py                      # what `make dist` runs: without a framework
    python tools/check_dist.py torch jax torch,jax  # and with these, each in an environment of its own

Leaves the wheel and the source archive in dist/. The commit is built, not the working tree. Needs build and twine.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools"
DIST = ROOT / "dist"
PACKAGES = ("roundpipe_core/", "roundpipe_torch/", "roundpipe_jax/")
NOT_SHIPPED = (".ci/",)
FLAGS = (["-I"], ["-I", "-W", "error"], ["-I", "-OO"])


def sh(*command: str | Path, cwd: Path = ROOT, **extra: str) -> str:
    """Run a command, and stop here if it fails."""
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=os.environ | extra, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(folder: Path, date: str, *what: str) -> list[Path]:
    """Build a fresh copy of the commit into `folder`."""
    with tempfile.TemporaryDirectory() as copy:
        sh("git", "clone", "--quiet", ROOT, copy)
        sh(sys.executable, "-m", "build", "--outdir", folder, *what, copy, SOURCE_DATE_EPOCH=date)
    return sorted(folder.iterdir())


def check_same_again(date: str) -> None:
    """Built again, the wheel directly and not from the source archive, everything is the same, byte for byte."""
    with tempfile.TemporaryDirectory() as again:
        for second in build(Path(again), date, "--sdist", "--wheel"):
            if not filecmp.cmp(second, DIST / second.name, shallow=False):
                sys.exit(f"{second.name} comes out otherwise when it is built again")


def check_contents(wheel: Path, sdist: Path) -> None:
    """Every tracked file, and no other."""
    tracked = {name for name in sh("git", "ls-files").splitlines() if not name.startswith(NOT_SHIPPED)}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        about = {name.partition(".dist-info/")[2] for name in archive.namelist()} - {""}
    differ("the wheel", found, {name for name in tracked if name.startswith(PACKAGES)})
    differ("the wheel's metadata", about, {"METADATA", "WHEEL", "RECORD", "licenses/LICENSE"})
    with tarfile.open(sdist) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    differ("the source archive", found, tracked | {"PKG-INFO"})


def differ(what: str, found: set[str], wanted: set[str]) -> None:
    """Stop if two sets of files are not the same."""
    if found != wanted:
        sys.exit(f"{what} has {sorted(found - wanted)} and lacks {sorted(wanted - found)}")


def attempt(wheel: Path, frameworks: list[str]) -> None:
    """Install the wheel with these frameworks and nothing more, and use it as a user would, away from the sources."""
    with tempfile.TemporaryDirectory() as folder:
        home, away = Path(folder, "env"), Path(folder, "away")
        away.mkdir()
        venv.create(home, with_pip=True)
        python = home / ("Scripts" if os.name == "nt" else "bin") / "python"
        wanted = f"{wheel}[{','.join(frameworks)}]" if frameworks else str(wheel)
        more = ["mypy", "-c", str(ROOT / "constraints.txt")] if frameworks else ["--no-index"]
        sh(python, "-m", "pip", "install", "--quiet", wanted, *more)
        sh(python, "-m", "pip", "check")
        for part in ["core", *frameworks]:
            for flags in FLAGS:
                if part == "torch" and "error" in flags and "jax" not in frameworks:
                    continue  # torch alone has no numpy, and warns of that
                sh(python, *flags, TOOLS / f"smoke_{part}.py", away / "a.tape", cwd=away)
            sh(python, "-I", "-m", "roundpipe_core", "show", "a.tape", cwd=away)
            if frameworks:
                sh(python, "-I", "-m", "mypy", "--strict", TOOLS / f"smoke_{part}.py", cwd=away)
        print(sh(python, "-I", "-m", "roundpipe_core", "doctor", cwd=away))
        for part in {"torch", "jax"} - set(frameworks):
            command = [python, "-I", "-c", f"import roundpipe_{part}"]
            error = subprocess.run(command, cwd=away, capture_output=True, text=True, check=False).stderr
            if f"way out: pip install '{part}>=" not in error:
                sys.exit(f"roundpipe_{part} without {part}:\n{error}")


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    date = sh("git", "log", "-1", "--format=%ct").strip()
    wheel, sdist = sorted(build(DIST, date), key=lambda path: path.suffix, reverse=True)
    check_same_again(date)
    check_contents(wheel, sdist)
    sh(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    for frameworks in ["", *sys.argv[1:]]:
        print(f"-- with {frameworks or 'nothing else'}", flush=True)
        attempt(wheel, frameworks.split(",") if frameworks else [])
    for path in (wheel, sdist):
        print(path.relative_to(ROOT), path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
