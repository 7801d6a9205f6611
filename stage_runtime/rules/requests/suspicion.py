"""The requests that end instances again and again: one that was under way at more than one of them. Pure.

A request that ends its process takes its neighbours along, and all of them are sent again. Those go one at a time to an
instance (a few at a time where they are many), until they have streamed or run for longer than they had run before: so
the next end has one suspect. A request that ends a process a second time is not sent again, and its client is told not
to repeat it. A neighbour is cleared.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

#: A suspect that runs for so many times as long as it had run at the death is cleared, within these bounds.
CLEARED_FACTOR: Final = 2.0
CLEARED_LEAST_S: Final = 1.0
CLEARED_MOST_S: Final = 10.0  # neighbours behind it wait so long at most
ROUNDS: Final = 8  # in which all suspects have had their turn: of 128 neighbours 16 go at once
#: Two instances that end so soon after each other, with no request in common, have another cause (a machine, a switch).
COMMON_CAUSE_S: Final = 2.0
DEATHS_MOST: Final = 3  # of one stage, under one request, however many others were there


class Blame(Enum):
    """The meaning of an instance's end for a request that was under way there."""

    NONE = "none"  #: The first one: it is sent again as its retries allow.
    UNCLEAR = "unclear"  #: Another suspect was there: sent again at no cost, strictly one at a time.
    ITS_OWN = "its own"  #: It is not sent again.


def blame(deaths: int, *, other_suspects: int) -> Blame:
    """deaths: instances of the same stage that ended under this request before. other_suspects: at this instance, that
    were not cleared."""
    if not deaths:
        return Blame.NONE
    if deaths + 1 >= DEATHS_MOST or not other_suspects:
        return Blame.ITS_OWN
    return Blame.UNCLEAR


def cleared_after_s(ran_s: float) -> float:
    """How long a suspect must run to be cleared. ran_s: how long it had run at the last death."""
    return min(max(CLEARED_LEAST_S, CLEARED_FACTOR * ran_s), CLEARED_MOST_S)


def at_once(suspects: int, *, unclear: bool) -> int:
    """How many suspects of one stage may be at one of its instances. suspects: of that stage, in all.

    unclear: one of them was at two ends already.
    """
    return 1 if unclear else max(1, -(-suspects // ROUNDS))
