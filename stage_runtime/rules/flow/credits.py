"""Flow control of relays: how many unreleased transfers one edge may have. Queued payloads need no credit.

Transfers take no credit while they find room in a number of bytes that they share. A credit is made for what is large,
and two of them would leave an edge of small payloads waiting for releases most of the time.
"""

from __future__ import annotations

from enum import Enum


class Reservation(Enum):
    """The part of its edge's window that a transfer has taken, until it is released."""

    SHARED = "shared"  #: Its bytes.
    CREDIT = "credit"
    LAST_CREDIT = "last_credit"  #: It must be copied out on arrival.


class Window:
    """The transfers that one edge may have under way. The holder takes a reservation per transfer and gives it back
    with the release.

    Invariant: 0 <= credits <= limit, 0 <= shared <= shared_nbytes.

    A receiver holds slots while payloads wait: at a join, in a queue, at a stage that keeps views. If all could be
    held, two requests that wait for each other's slots would never go on. So whenever `take` refuses, all credits are
    taken, and the transfer that took the last one is copied out and released at once.
    """

    def __init__(self, limit: int, shared_nbytes: int = 0, *, small_nbytes: int | None = None) -> None:
        """shared_nbytes: what transfers without a credit may have in all, if none is larger than ``small_nbytes``: a
        larger one takes a share only within an eighth of it. None: all are small.
        """
        if limit < 1:
            raise ValueError(f"a window of {limit} would never let anything through")
        self._limit = limit
        self._shared_nbytes = shared_nbytes
        self._small_nbytes = shared_nbytes if small_nbytes is None else small_nbytes
        self.credits = 0  #: Taken.
        self.shared = 0  #: Bytes taken.

    @property
    def used(self) -> bool:
        """Whether any transfer is under way."""
        return bool(self.credits or self.shared)

    def take(self, nbytes: int) -> Reservation | None:
        """Reserve a transfer of so many bytes: a share of the bytes if there is room, else a credit.

        Returns: None: there is neither; queue the payload.
        """
        if self.shared + nbytes <= (self._shared_nbytes if nbytes <= self._small_nbytes else self._shared_nbytes // 8):
            self.shared += nbytes
            return Reservation.SHARED
        if self.credits >= self._limit:
            return None
        self.credits += 1
        return Reservation.LAST_CREDIT if self.credits == self._limit else Reservation.CREDIT

    def give(self, reservation: Reservation, nbytes: int) -> None:
        """Return what `take` gave for so many bytes. Once: the caller knows each transfer under way."""
        if reservation is Reservation.SHARED:
            self.shared -= nbytes
        else:
            self.credits -= 1
