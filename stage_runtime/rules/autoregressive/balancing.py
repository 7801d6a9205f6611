"""The choice of the engine, of an instance's, that gets a request. Pure: counts in, a rank out.

The coordinator's bindings choose the instance (`rules.binding.membership_state`); this chooses among the engines inside
one, by load and by the prefixes that they have met, with the coordinator's own rule (`rules.binding.prefixes`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from stage_runtime.rules.binding import balancing, prefixes
from stage_runtime.rules.binding.pools import Pool
from stage_runtime.rules.binding.prefixes import Hashes

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
        self._lives: dict[int, int] = {}  #: How many engines of a rank have ended, with their caches.
        self._prefixes = prefixes.Prefixes()

    @property
    def counts(self) -> list[tuple[int, int]]:
        """Waiting and running by rank, with the expected ones."""
        return [(waiting, running) for waiting, running in self._counts]

    @property
    def open(self) -> list[int]:
        """Ranks that get requests."""
        return [rank for rank in range(len(self._counts)) if rank not in self._closed]

    def choose(
        self,
        *,
        rank: int | None = None,
        pin: str | None = None,
        prompt: Hashes = (),
        caches: Mapping[int, float] | None = None,
    ) -> int:
        """The engine of a request: ``rank`` if given; else always the same one for the same ``pin``; else the one that
        has met most of ``prompt``, where load allows; else the least loaded one, the scan beginning at another engine
        for each client. It has met the prompt from now on.

        caches: of the engines whose prefix cache has anything, the part of their blocks that requests use.
        Raises: ValueError: the rank does not exist, or none is open.
        """
        chosen = self._choose(rank, pin, prompt, caches or {})
        if prompt:
            self._prefixes.note(prompt, [self._name(chosen)])
        return chosen

    def _choose(self, rank: int | None, pin: str | None, prompt: Hashes, caches: Mapping[int, float]) -> int:
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
        hints = self._prefixes.hints(prompt)
        if hints:
            chosen = self._kept(chosen, hints, caches)
        self._counts[chosen][0] += self._client_count  # until the next report
        return chosen

    def _kept(self, chosen: int, hints: prefixes.Hints, caches: Mapping[int, float]) -> int:
        """``chosen``, or an engine that has met the prompt and is not much more loaded."""
        pool = Pool[balancing.Load]()
        ranks = {self._name(rank): rank for rank in {chosen, *caches} if rank in self.open}
        for name, rank in ranks.items():
            pool.add(name, self._load(name, rank, caches.get(rank, 0.0)))
        least = pool.items[pool.position(self._name(chosen))]
        return ranks[prefixes.kept(pool, hints, (), least).incarnation]

    def _load(self, name: str, rank: int, used: float) -> balancing.Load:
        """An engine's load in requests, as the coordinator knows an instance's."""
        waiting, running = self._counts[rank]
        load = balancing.Load(incarnation=name, kv_used=used)
        load.score = waiting + running + balancing.WAITING_WEIGHT * waiting + load.crowding
        return load

    def _name(self, rank: int) -> str:
        """The name of a rank's present engine in the hints."""
        return f"{rank}.{self._lives.get(rank, 0)}"

    def withdraw(self, rank: int) -> None:
        """A request that was expected there since the last report has gone: perhaps no report will tell of it."""
        if rank < len(self._counts):
            self._counts[rank][0] = max(self._counts[rank][0] - self._client_count, 0)

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
        self._lives[rank] = self._lives.get(rank, 0) + 1

    def _score(self, rank: int) -> int:
        waiting, running = self._counts[rank]
        return waiting * WAITING_WEIGHT + running
