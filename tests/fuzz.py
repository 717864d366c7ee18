"""How many random programs are tried: FUZZ times as many as the suite does, see `make fuzz`."""

from __future__ import annotations

import os

__all__ = ["TIMES", "seeds"]

TIMES = int(os.environ.get("FUZZ", "1"))


def seeds(count: int) -> range:
    """The seeds to try, where the suite tries `count`."""
    return range(count * TIMES)
