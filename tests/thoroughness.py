"""How many examples a property test draws: a run of each change, or the nightly one.

``make nightly`` sets ``OMNI_THOROUGH=1``: ten times the examples of each property, and other ones every night. A run
of each change draws few, and in CI the same ones each time.
"""

from __future__ import annotations

import os

THOROUGH = os.environ.get("OMNI_THOROUGH") == "1"
NIGHTLY_FACTOR = 10


def examples(each_run: int) -> int:
    """``max_examples`` of a property."""
    return NIGHTLY_FACTOR * each_run if THOROUGH else each_run
