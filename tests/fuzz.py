"""How many random programs are tried: FUZZ times as many as the suite does, see `make fuzz`."""

from __future__ import annotations

import os

import hypothesis
from hypothesis import Phase

__all__ = ["TIMES", "examples", "seeds"]

TIMES = int(os.environ.get("FUZZ", "1"))


def seeds(count: int) -> range:
    """The seeds to try, where the suite tries `count`."""
    return range(count * TIMES)


def examples(count: int) -> hypothesis.settings:
    """Settings for a property: `count` examples, the same in every run of the suite, or TIMES as many new ones."""
    return hypothesis.settings(
        max_examples=count * TIMES,
        derandomize=TIMES == 1,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
