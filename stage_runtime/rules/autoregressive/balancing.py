"""The choice of the engine, of an instance's, that gets a request. Pure: counts in, a rank out.

The coordinator's bindings choose the instance (`rules.membership`); this chooses among the engines inside one.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Final

WAITING_WEIGHT: Final = 4  # as in the coordinator's bindings: rather a busy engine than one that queues


def check_only(rank: int | None) -> None:
    """Check the rank at a stage with one engine. Raises: ValueError: ``rank`` names another one."""
    if rank not in (None, 0):
        raise ValueError(f"data_parallel_rank is {rank}; the only engine is 0")


class Balancer:
    """Counts of every engine, as last reported, and what was sent since."""

    def __init__(self, engines: int, *, client_index: int = 0, client_count: int = 1) -> None:
        """client_count: clients that send to the same engines. Each expects the others to send as much as itself."""
        self._client_index, self._client_count = client_index, client_count
        self._counts = [[0, 0] for _ in range(engines)]  #: Waiting and running, by rank.
        self._closed: set[int] = set()

    @property
    def counts(self) -> list[tuple[int, int]]:
        """Waiting and running by rank, with the expected ones."""
        return [(waiting, running) for waiting, running in self._counts]

    @property
    def open(self) -> list[int]:
        """Ranks that get requests."""
        return [rank for rank in range(len(self._counts)) if rank not in self._closed]

    def choose(self, *, rank: int | None = None, pin: str | None = None) -> int:
        """The engine of a request: ``rank`` if given; else always the same one for the same ``pin``; else the least
        loaded one, the scan beginning at another engine for each client.

        Raises: ValueError: there is no such rank, or none is open.
        """
        open_ranks = self.open
        if rank is not None:
            if rank not in open_ranks:
                raise ValueError(f"data_parallel_rank is {rank}; engines: {', '.join(map(str, open_ranks)) or 'none'}")
            return rank
        if not open_ranks:
            raise ValueError("no engine is left")
        if pin is not None:
            return open_ranks[zlib.crc32(pin.encode(errors="surrogatepass")) % len(open_ranks)]
        start = self._client_index * len(open_ranks) // self._client_count
        rotated = open_ranks[start:] + open_ranks[:start]
        chosen = min(rotated, key=self._score)
        self._counts[chosen][0] += self._client_count  # until the next report
        return chosen

    def report(self, counts: Sequence[Iterable[int]]) -> None:
        """Take counts that were published; those of ranks that do not exist here are ignored."""
        for rank, count in enumerate(counts[: len(self._counts)]):
            self._counts[rank] = list(count)

    def resize(self, engines: int) -> None:
        """Engines were added, which are open, or the last ones removed."""
        kept = min(engines, len(self._counts))
        self._counts = (self._counts + [[0, 0] for _ in range(engines - len(self._counts))])[:engines]
        self._closed = {rank for rank in self._closed if rank < kept}

    def close(self, rank: int) -> None:
        """This one gets nothing more: it is dead, or being removed. One that was removed is ignored."""
        if rank < len(self._counts):
            self._closed.add(rank)

    def open_again(self, rank: int) -> None:
        """Another engine has the rank of one that was closed."""
        self._closed.discard(rank)
        self._counts[rank] = [0, 0]

    def _score(self, rank: int) -> int:
        waiting, running = self._counts[rank]
        return waiting * WAITING_WEIGHT + running
