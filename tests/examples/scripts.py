"""The examples' modules, for tests: they are scripts in a folder, and no package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


def imported(name: str) -> ModuleType:
    """A module of the examples, found as Python finds it for the script: in the script's own folder."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))
