"""Flow control of relays: how many unreleased transfers one edge may have. Queued payloads need no credit."""

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
        """The last credit is taken. The transfer that took it must be copied out on arrival.

        A receiver holds slots while payloads wait: at a join, in a queue, at a stage that keeps views. If all could
        be held, two requests that wait for each other's slots would never go on; so one is always in motion.
        """
        return self.taken >= self._limit

    def give(self) -> bool:
        """Return one credit. False when none was taken: a repeated release changes nothing."""
        if self.taken == 0:
            return False
        self.taken -= 1
        return True
