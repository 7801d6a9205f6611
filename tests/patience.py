"""How long tests wait before they fail: no test is measured by it.

Other programs go first under ``nice``, and a test gets a small part of the processors; so it waits longer there, with
its limit of time (``timeout``), too.
"""

from __future__ import annotations

import os
from typing import Final

PER_STEP: Final = 0.25  # of a step of niceness: under `nice -n 19` six times as long
_FACTOR: Final = 1 + PER_STEP * max(os.nice(0), 0)


def patience(seconds: float) -> float:
    """seconds: at the usual priority, on a machine that others use."""
    return _FACTOR * seconds
