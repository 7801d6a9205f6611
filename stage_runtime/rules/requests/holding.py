"""Whether a request that no instance can take now waits for one. Pure: a table for new requests, one for waiting ones.

A request waits while an instance is on its way (`absences`), within its deadline and the pipeline's bounds. One that is
sent again waits whatever the bounds: it was admitted, and newcomers do not take its place.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from stage_runtime.rules.members.absences import Outlook

#: A retry waits so long for an instance that is not expected, or that a stage did not reach a moment ago.
RETRY_WAIT_S: Final = 5.0


class HoldLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of the requests that may wait at one coordinator."""

    requests: int
    nbytes: int  #: Bytes of the encoded requests.


class Verdict(Enum):
    """The decision on a new request. The values are the metric's reasons."""

    WAIT = "wait"
    GONE = "gone"  #: No instance is expected.
    REQUESTS = "requests"  #: The most requests that may wait do so.
    BYTES = "bytes"  #: This one's bytes do not fit beside those of the requests that wait.


def verdict(outlook: Outlook, nbytes: int, *, waiting: int, waiting_nbytes: int, limits: HoldLimits) -> Verdict:
    """waiting, waiting_nbytes: what waits already. nbytes: of this request.

    The only request that waits may be of any size: a group that starts on demand would never start for it otherwise.
    """
    if outlook is Outlook.GONE:
        return Verdict.GONE
    if waiting >= limits.requests:
        return Verdict.REQUESTS
    fits = waiting_nbytes + nbytes <= limits.nbytes or (limits.nbytes > 0 and not waiting)
    return Verdict.WAIT if fits else Verdict.BYTES


class Step(Enum):
    """The next step of a request that waits and cannot be bound."""

    WAIT = "wait"
    TAKE_ANY = "take any"  #: Bind it to an instance that was avoided: it may be reached again by now.
    GIVE_UP = "give up"


def step(outlook: Outlook, waited_s: float, *, again: bool) -> Step:
    """again: it was sent before."""
    if outlook is Outlook.HERE:
        return Step.TAKE_ANY if waited_s >= RETRY_WAIT_S else Step.WAIT
    if outlook is Outlook.COMING or (again and waited_s < RETRY_WAIT_S):
        return Step.WAIT
    return Step.GIVE_UP
