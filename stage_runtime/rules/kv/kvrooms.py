"""The open rooms of one stage: to whom, and whose leases are over. Pure: the caller passes the time.

A room is opened once and ends once. A prefill instance holds blocks for a room until it ends, so its rooms are under a
lease, which decode's beats renew: a decode instance that is stopped, or cut off in one direction, holds nothing for
ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from stage_runtime.wire.parts import Room

LEASE_S: Final = 30.0  # a stop of the world or a long garbage collection of decode is shorter
RENEW_S: Final = 5.0  # several beats may be lost before a lease ends
ENDED_KEPT: Final = 10_000  # a late ask of a room that has ended must not open it again


class Rooms:
    """Invariants: no room is open twice; one that has ended is not opened again, as long as it is remembered."""

    def __init__(self) -> None:
        self._peers: dict[Room, str] = {}  #: Open rooms; the instance at the other end.
        self._renewed: dict[Room, float] = {}  #: The same rooms.
        self._ended: dict[Room, None] = {}  #: The oldest first.

    def open(self, room: Room, peer: str, now: float) -> bool:
        """Open a room to a peer, under a lease. False: the room is open already, or has ended."""
        if room in self._peers or room in self._ended:
            return False
        self._peers[room] = peer
        self._renewed[room] = now
        return True

    def end(self, room: Room) -> str | None:
        """It is over. Returns: who is at the other end; None: it was not open."""
        peer = self._peers.pop(room, None)
        if peer is not None:
            del self._renewed[room]
            self._ended[room] = None
            if len(self._ended) > ENDED_KEPT:
                del self._ended[next(iter(self._ended))]
        return peer

    def peer(self, room: Room) -> str | None:
        """The peer at the other end; None: it is not open."""
        return self._peers.get(room)

    def renew(self, room: Room, peer: str, now: float) -> bool:
        """Its decode instance wants it still. False: it is not open to this peer."""
        if self._peers.get(room) != peer:
            return False
        self._renewed[room] = now
        return True

    def expired(self, now: float) -> list[Room]:
        """All whose lease is over."""
        return [room for room, renewed in self._renewed.items() if now - renewed > LEASE_S]

    def where(self, chosen: Callable[[Room, str], bool]) -> list[Room]:
        """The open rooms that are chosen by room and peer."""
        return [room for room, peer in self._peers.items() if chosen(room, peer)]

    def by_peer(self) -> dict[str, list[Room]]:
        """The open rooms of each peer."""
        found: dict[str, list[Room]] = {}
        for room, peer in self._peers.items():
            found.setdefault(peer, []).append(room)
        return found

    def __len__(self) -> int:
        return len(self._peers)
