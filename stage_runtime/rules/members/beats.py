"""How often members report their load, and how often connections are checked, by how many there are. Pure."""

from __future__ import annotations

import math
from typing import Final

BEAT_COST_S: Final = 100e-6  # processor time of the coordinator for a beat that comes alone and wakes two threads
SHARE: Final = 0.01  # of a core, for all beats
SHORTEST_S: Final = 0.1  # below it, the plan's `heartbeatSeconds` alone decides
LONGEST_S: Final = 16.0  # a load that is older balances worse: 1.12 of the mean instead of 1.10


#: The number of connections above which a process checks the later ones less often: each check costs it 50 us.
CHECKED_OFTEN: Final = 64
RAREST: Final = 4.0  # times the interval of the first ones


def check_factor(connections: int) -> float:
    """The interval between heartbeats of the next connection, as a multiple of the first connections' interval."""
    return min(max(connections / CHECKED_OFTEN, 1.0), RAREST)


def interval_s(members: int, sent_s: float = 0.0) -> float:
    """The shortest time between two beats of a member; 0: that of its plan.

    It is a power of two, so that it changes seldom. sent_s: what was sent to members last; it is lowered only when a
    quarter of it would do.
    """
    wanted_s = members * BEAT_COST_S / SHARE
    step_s = 0.0 if wanted_s <= SHORTEST_S else min(2.0 ** math.ceil(math.log2(wanted_s)), LONGEST_S)
    return sent_s if step_s < sent_s <= 4 * wanted_s else step_s
