"""The bytes that each edge has sent, by the relay that carried them: for /metrics. The lock of `sending.SendQueues`
guards them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

Carried: TypeAlias = tuple[str, str, str]  #: source stage, target stage, relay


class EdgeNumbers(msgspec.Struct):
    """One edge by one relay, to all instances of its target."""

    nbytes: int = 0  #: Sent, ever.
    copied_nbytes: int = 0  #: Those of them that were copied into memory that the relay reads.
    failovers: int = 0  #: Times that an instance was first sent to by this relay because another one had failed.
    in_flight: int = 0
    oldest_s: float = 0.0  #: Age of the oldest transfer in flight.
    quarantined: int = 0  #: Puts in flight whose requests were aborted.
    retries: int = 0  #: Payloads sent for a second or later attempt of their request.


class InFlightTransfer(msgspec.Struct, frozen=True):
    """A transfer in flight, as far as it counts here."""

    edge: Carried
    begun_s: float  #: A time of `time.monotonic`.
    aborted: bool


class Accounts:
    """Counters that only grow; what is in flight is passed to `numbers`."""

    def __init__(self) -> None:
        self._totals: dict[Carried, EdgeNumbers] = {}
        self._last: dict[tuple[str, str, str], str] = {}  #: (source, target, peer) -> relay

    def sent(
        self, edge: tuple[str, str, str], relay: str, nbytes: int, copied_nbytes: int, *, retried: bool = False
    ) -> None:
        """edge: source, target, peer. retried: its request was tried before."""
        source, target, _ = edge
        totals = self._totals.get((source, target, relay))
        if totals is None:
            totals = self._totals[source, target, relay] = EdgeNumbers()
        totals.nbytes += nbytes
        totals.copied_nbytes += copied_nbytes
        totals.retries += retried
        last = self._last.get(edge)
        if last != relay:
            self._last[edge] = relay
            totals.failovers += last is not None

    def has_sent(self, source: str, target: str) -> bool:
        """Whether anything went on this edge by a relay."""
        return any(edge[:2] == (source, target) for edge in self._totals)

    def forget(self, edges: Iterable[tuple[str, str, str]]) -> None:
        """Those peers are gone."""
        for edge in edges:
            self._last.pop(edge, None)

    def numbers(self, in_flight: Iterable[InFlightTransfer]) -> dict[Carried, EdgeNumbers]:
        found = {edge: msgspec.structs.replace(totals) for edge, totals in self._totals.items()}
        now = time.monotonic()
        for sent in in_flight:
            numbers = found.setdefault(sent.edge, EdgeNumbers())
            numbers.in_flight += 1
            numbers.oldest_s = max(numbers.oldest_s, now - sent.begun_s)
            numbers.quarantined += sent.aborted
        return found
