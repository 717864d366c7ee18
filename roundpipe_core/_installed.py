"""Whether the framework of a frontend is there, and new enough."""

from __future__ import annotations

import importlib
import re

from ._errors import text_of

__all__ = ["need"]


def need(framework: str, least: str, *, by: str) -> None:
    """Import `framework`, or raise an ImportError that says what to install."""
    wanted, way_out = f"{by} needs {framework} {least} or newer", f"pip install '{framework}>={least}'"
    try:
        found = importlib.import_module(framework)
    except ModuleNotFoundError as error:
        if error.name != framework:  # it is there, and something that it needs is not
            raise
        raise ModuleNotFoundError(text_of(f"{wanted}, which is not installed.", [], way_out), name=framework) from None
    if found.__spec__ is not None and found.__spec__.origin is None:
        facts = [("folder", folder) for folder in found.__path__]
        way_out = f"{way_out}, and rename the folder or start Python elsewhere."
        headline = f"{wanted}, and all there is by that name is a folder."
        raise ModuleNotFoundError(text_of(headline, facts, way_out), name=framework)
    version = str(getattr(found, "__version__", "of unknown version"))
    if _numbers(version) < _numbers(least):
        facts = [("found in", str(found.__file__))]
        raise ImportError(text_of(f"{wanted}, and found {version}.", facts, way_out), name=framework)


def _numbers(version: str) -> tuple[int, ...]:
    """All its numbers: those of "2.13.0a0+git12", (2, 13, 0, 0, 12), are not less than (2, 13)."""
    return tuple(map(int, re.findall(r"\d+", version)))
