"""Which request is to blame when instances end again and again: one that was under way at more than one of them. Pure.

A request that ends its process takes its neighbours along, and all of them are sent again. Those go one at a time to an
instance, until they have streamed or run for longer than they had run before: so the next end has one suspect. What
ends a process a second time is not sent again, and its client is told not to repeat it. A neighbour is cleared.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

#: A suspect that runs for so many times as long as it had run at the death is cleared, within these bounds.
CLEARED_FACTOR: Final = 2.0
CLEARED_LEAST_S: Final = 1.0
CLEARED_MOST_S: Final = 10.0  # neighbours behind it wait so long at most
DEATHS_MOST: Final = 3  # of one stage, under one request, however many others were there


class Blame(Enum):
    """What the end of an instance means for a request that was under way there."""

    NONE = "none"  #: The first one: it is sent again as its retries allow.
    UNCLEAR = "unclear"  #: Another suspect was there: sent again at no cost, one at a time until it has ended.
    ITS_OWN = "its own"  #: It is not sent again.


def blame(deaths: int, *, other_suspects: int) -> Blame:
    """deaths: instances of the same stage that ended under this request before. other_suspects: at this instance, that
    were not cleared."""
    if not deaths:
        return Blame.NONE
    if deaths + 1 >= DEATHS_MOST or not other_suspects:
        return Blame.ITS_OWN
    return Blame.UNCLEAR


def cleared_after_s(ran_s: float, deaths: int) -> float | None:
    """How long a suspect must run to be cleared. ran_s: how long it had at the last death. None: until its end."""
    if deaths > 1:
        return None
    return min(max(CLEARED_LEAST_S, CLEARED_FACTOR * ran_s), CLEARED_MOST_S)
