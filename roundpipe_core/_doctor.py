"""What is installed on this machine, and whether it works: for bug reports, and before a long run."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

__all__ = ["Finding", "examine", "trial"]

_FRONTENDS = (("torch", "roundpipe_torch"), ("jax", "roundpipe_jax"))


class Finding(NamedTuple):
    """One line of the report. `works` is None for what is neither right nor wrong."""

    about: str
    found: str
    works: bool | None = None


def examine() -> Iterator[Finding]:
    """Versions, devices, and a trial of every frontend whose framework is installed."""
    from . import __version__

    yield Finding("roundpipe", __version__)
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    for framework, package in _FRONTENDS:
        if importlib.util.find_spec(framework) is None:
            yield Finding(framework, "not installed")
            continue
        yield Finding(framework, _version(framework))
        yield from _frontend(package)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(distribution), "__version__", "of unknown version"))


def _frontend(package: str) -> Iterator[Finding]:
    try:
        examined: Iterator[Finding] = importlib.import_module(f"{package}._doctor").examine()
    except Exception as error:
        yield Finding(package, f"cannot be imported: {_in_a_line(error)}", works=False)
        return
    yield from examined


def trial(about: str, attempt: Callable[[], object]) -> Finding:
    """Whether `attempt` runs and gives something true."""
    try:
        right = bool(attempt())
    except Exception as error:
        return Finding(about, _in_a_line(error), works=False)
    return Finding(about, "works" if right else "wrong result", works=right)


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
