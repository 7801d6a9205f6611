"""The garbage collector of a coordinator's process. Called when it is ready to serve; by the benchmarks of one, too.

Not of stages: what an author's code leaves in cycles holds slots of its senders (`stage.observing.idle_trimming`).
"""

from __future__ import annotations

import gc
from typing import Final

#: Objects made and not freed again after which new ones are looked through. The interpreter's 700 are those of a few
#: requests, which are under way still.
YOUNG: Final = 2000


def settle() -> None:
    """Today's objects stay for as long as the process: look through what comes later alone, and less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
