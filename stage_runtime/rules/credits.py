"""How many transfers one edge may have unreleased: a window of slots, never of queue places."""

from __future__ import annotations


class Window:
    """Credits of one edge. The holder takes one per transfer and gets it back with the release."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a window of {limit} would never let anything through")
        self._limit = limit
        self.taken = 0  #: 0..limit, always.

    def take(self) -> bool:
        """False when all are taken: queue the payload by reference, without a slot."""
        if self.exhausted:
            return False
        self.taken += 1
        return True

    @property
    def exhausted(self) -> bool:
        """The last credit is out. What took it must be copied out on arrival.

        A receiver holds slots while payloads wait: at a join, in a queue, at a stage that keeps views. If all could
        be held, two requests that wait for each other's slots would never go on; so one is always in motion.
        """
        return self.taken >= self._limit

    def give(self) -> bool:
        """One came back. False when none was out: a repeated release, which must open nothing."""
        if self.taken == 0:
            return False
        self.taken -= 1
        return True
