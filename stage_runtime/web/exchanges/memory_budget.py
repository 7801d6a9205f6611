"""How much of what clients send is held at once: bodies on their way in, and the media that they name.

Bytes count from the moment they are read until their request is over. A request that would exceed the limit is refused
with 429, before its body is read if its length is known. Made by `app`, one for all routes; called by `exchange`,
`fetching` and `socket_connections`.
"""

from __future__ import annotations

from typing import Final

from stage_runtime.errors import RequestError

GRACE_S: Final = 30.0  # for a body, whatever its size
MIN_RATE: Final = 4 << 10  # bytes a second that each body must bring beyond that: a modem does


class MemoryBudget:
    """The bytes of all requests in flight. limit_nbytes: one request alone is taken whatever it brings."""

    def __init__(self, limit_nbytes: int, *, grace_s: float = GRACE_S) -> None:
        self.limit_nbytes = limit_nbytes
        self.grace_s = grace_s
        self.held_nbytes = 0


class MemoryReservation:
    """One request's share of a `MemoryBudget`; given back by `release`."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._nbytes = 0

    def expect(self, nbytes: int) -> None:
        """Raises: RequestError: rate_limited: so many bytes find no room. Nothing is held for them yet."""
        others, held = self._budget.held_nbytes - self._nbytes, self._budget.held_nbytes
        if others and held + nbytes > self._budget.limit_nbytes:
            problem = f"{others} bytes of other requests' bodies and media are in flight"
            raise RequestError("rate_limited", problem, retry_after_s=1.0)

    def add(self, nbytes: int) -> None:
        """Raises: RequestError: rate_limited: so many more are too many; they are not held."""
        self.expect(nbytes)
        self._budget.held_nbytes += nbytes
        self._nbytes += nbytes

    def keep(self, nbytes: int) -> None:
        """So much is held now, whatever was before: of a session, which lets go of what it has."""
        self._budget.held_nbytes += nbytes - self._nbytes
        self._nbytes = nbytes

    def hold(self, nbytes: int) -> None:
        """The same as `keep`. Raises: RequestError: rate_limited: it is more than before, and finds no room."""
        if nbytes > self._nbytes:
            self.expect(nbytes - self._nbytes)
        self.keep(nbytes)

    def beside(self) -> MemoryReservation:
        """Another share of the same budget."""
        return MemoryReservation(self._budget)

    def release(self) -> None:
        self._budget.held_nbytes -= self._nbytes
        self._nbytes = 0

    def body_timeout_s(self, nbytes: int) -> float:
        """How long a body may take that has brought ``nbytes`` so far."""
        return self._budget.grace_s + nbytes / MIN_RATE
