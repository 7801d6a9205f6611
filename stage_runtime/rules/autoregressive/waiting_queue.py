"""The requests that wait to be begun, in the order of the policy. Pure. Owned by `scheduling.Scheduler`.

An entry has a request's id, so that a request that has ended while it waited is not kept. Its entry is then stale: it
is skipped, and stale ones are removed together, which is cheaper.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Final

from stage_runtime.rules.autoregressive.requests import QUEUED, Request
from stage_runtime.rules.autoregressive.steps import Policy

PriorityKey = tuple[int, int]

#: Tokens by which a prompt must be shorter for each request that came between, to be computed before another one: so
#: none waits for ever, and of some dozens that come together the shortest is the first.
OVERTAKING: Final = 8

ORDER: Final[dict[Policy, Callable[[Request], PriorityKey]]] = {
    "fcfs": lambda request: (0, request.arrival),
    "priority": lambda request: (request.priority, request.arrival),
    "shortest": lambda request: (request.length + OVERTAKING * request.arrival, request.arrival),
}

STALE_MOST: Final = 64  # entries beside twice as many as are alive


class WaitingQueue:
    """A heap of keys, tickets and ids."""

    def __init__(self, key: Callable[[Request], PriorityKey], requests: Mapping[str, Request]) -> None:
        """requests: the scheduler's, by id."""
        self._key = key
        self._requests = requests
        self._entries: list[tuple[PriorityKey, int, str]] = []
        self._waiting = 0
        self._tickets = 0

    def __len__(self) -> int:
        """Requests that wait, those that were `set_aside` included."""
        return self._waiting

    @property
    def entries(self) -> int:
        """Entries, stale ones included."""
        return len(self._entries)

    def live(self) -> list[Request]:
        """The requests of the entries that are not stale, in no order."""
        return [request for request in map(self._live, self._entries) if request is not None]

    def add(self, request: Request) -> None:
        """The request waits from now on."""
        self._tickets += 1
        request.ticket = self._tickets
        self._waiting += 1
        self.put_back(request)

    def first(self) -> Request | None:
        """The one to be begun next; it stays where it is."""
        while self._entries:
            request = self._live(self._entries[0])
            if request is not None:
                return request
            heapq.heappop(self._entries)
        return None

    def set_aside(self) -> None:
        """Leave out the one that `first` gave, until `put_back`."""
        heapq.heappop(self._entries)

    def put_back(self, request: Request) -> None:
        """Enter a request that was `set_aside` again, at its place."""
        heapq.heappush(self._entries, (self._key(request), request.ticket, request.id))

    def take(self) -> None:
        """The one that `first` gave is begun."""
        heapq.heappop(self._entries)
        self._waiting -= 1

    def ended(self) -> None:
        """A request has ended while it waited: its entry is stale."""
        self._waiting -= 1

    def prune(self) -> None:
        """Remove the stale entries, if they are many."""
        if len(self._entries) > STALE_MOST + 2 * self._waiting:
            self._entries = [entry for entry in self._entries if self._live(entry) is not None]
            heapq.heapify(self._entries)

    def _live(self, entry: tuple[PriorityKey, int, str]) -> Request | None:
        """The request of an entry; None: the entry is stale."""
        _key, ticket, request_id = entry
        request = self._requests.get(request_id)
        return request if request is not None and request.state in QUEUED and request.ticket == ticket else None
