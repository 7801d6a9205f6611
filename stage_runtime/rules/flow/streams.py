"""The order of a stream edge at its consumer, and its flow-control window at its producer.

Chunks are numbered 0.. per request and edge. Transfers may end out of order, so the consumer puts them back in
order; ``done`` has their number and never overtakes a chunk.
"""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar

from stage_runtime.errors import ProtocolError

Item = TypeVar("Item")

STREAM_WINDOW: Final = 256  # what a consumer may lag behind its producer, per request and edge, in units of weight
UNIT_NBYTES: Final = 64 << 10  # one unit; a window is 16 MiB of large chunks, or 256 small ones
HEAVIEST: Final = STREAM_WINDOW // 4  # four chunks fit, however large: one is made while others are on their way


def weight(nbytes: int) -> int:
    """The part of its stream's window that a chunk of so many bytes takes."""
    return min(HEAVIEST, 1 + nbytes // UNIT_NBYTES)


class Inbound(Generic[Item]):
    """One request's chunks from one source."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, Item] = {}
        self._total: int | None = None

    def offer(self, index: int, item: Item) -> list[Item]:
        """Take chunk ``index``; returns all that can be delivered now, in order.

        Raises: ProtocolError: a second chunk of that index, or one after the announced end.
        """
        if index < self._next or index in self._early or (self._total is not None and index >= self._total):
            raise ProtocolError(f"chunk {index}: received twice, or after the end ({self._total})")
        self._early[index] = item
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready

    def end(self, total: int) -> None:
        """The producer has sent ``total`` chunks in all.

        Raises: ProtocolError: it reported another number before, or more have come.
        """
        least = max(self._early, default=self._next - 1) + 1  # with chunk 5 received there are at least six
        if (self._total is not None and self._total != total) or total < least:
            raise ProtocolError(f"a stream of {total} chunks, of which {self._total or least} were announced")
        self._total = total

    @property
    def closed(self) -> bool:
        """Everything has been delivered and nothing will follow."""
        return self._total is not None and self._next == self._total

    def pending(self) -> list[Item]:
        """Chunks that wait for an earlier one: to be freed when the request ends."""
        return list(self._early.values())


class Outbound:
    """One request's chunks to one target: numbers, and the weight of those that the consumer has not taken yet.

    The window bounds memory at any ratio of producer to consumer: a full one makes the producer wait.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self.count = 0  #: Chunks numbered so far.
        self._sent = 0  #: Their weight.
        self._consumed = 0  #: The weight of those that were taken.
        self.closed = False  #: The consumer takes nothing more: what is still numbered counts as taken.

    @property
    def full(self) -> bool:
        return not self.closed and self._sent - self._consumed >= self._window

    def close(self) -> bool:
        """The consumer has finished the request. True when that opened a full window."""
        was_full = self.full
        self.closed = True
        return was_full

    def number(self, weight: int = 1) -> int:
        self.count += 1
        self._sent += weight
        return self.count - 1

    def consumed(self, weight: int) -> bool:
        """The consumer took ``weight`` more. True when that opened a full window. Capped at what was sent."""
        was_full = self.full
        self._consumed = min(self._consumed + weight, self._sent)
        return was_full and not self.full


class Merge:
    """All stream sources of one request at one stage: order within each, one end for all."""

    def __init__(self, sources: tuple[str, ...]) -> None:
        self._inbound: dict[str, Inbound[Any]] = {source: Inbound() for source in sources}

    def of(self, source: str) -> Inbound[Any]:
        """Raises: ProtocolError: no such stream edge."""
        try:
            return self._inbound[source]
        except KeyError:
            raise ProtocolError(f"chunk from {source!r}, which does not stream here") from None

    @property
    def closed(self) -> bool:
        return all(inbound.closed for inbound in self._inbound.values())

    def pending(self) -> list[Any]:
        """Chunks of all sources that wait for an earlier one."""
        return [item for inbound in self._inbound.values() for item in inbound.pending()]
