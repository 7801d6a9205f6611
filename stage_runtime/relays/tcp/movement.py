"""Whether bytes still come from a peer, as the kernel counts them: slow is not dead, and what is queued is not late.

libzmq hands a frame over when all of it is here; a frame of 32 MiB over a slow link causes no event for a long time. So
the bytes are counted per connection by the kernel (TCP_INFO). It counts none of Unix sockets: there, messages count.
Used by `tcp`; its thread reports what comes, the loop reads it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Collection
from typing import Final

from stage_runtime.relays.base import Peer

TCP_INFO_NBYTES: Final = 136
BYTES_RECEIVED: Final = 128  # offset of tcpi_bytes_received in Linux's struct tcp_info


class Movement:
    """The bytes that have come, by peer."""

    def __init__(self) -> None:
        #: Descriptors of accepted connections -> the address of the other end; libzmq owns and closes them.
        self._connections: dict[int, str] = {}
        self._of: dict[Peer, int] = {}  #: The connection by which a peer's last message came, while it is open.
        self._owners: dict[int, Peer] = {}  #: The same by connection: each is of one peer.
        self._hosts: dict[Peer, str] = {}  #: The address from which it came.
        self._messages: dict[Peer, int] = {}
        self._seen: dict[Peer, tuple[int, float]] = {}  #: The count at the last look, and when it was first seen.

    def accepted(self, descriptor: int) -> None:
        self._connections[descriptor] = _other_end(descriptor)

    def disconnected(self, descriptor: int) -> list[Peer]:
        """Returns: whose connection it was."""
        self._connections.pop(descriptor, None)
        peer = self._owners.pop(descriptor, None)
        if peer is None:
            return []
        self._of.pop(peer, None)  # the next connection of another peer may have the same descriptor
        return [peer]

    def message(self, peer: Peer, descriptor: int) -> None:
        """A message of ``peer`` is complete."""
        self._messages[peer] = self._messages.get(peer, 0) + 1
        if self._of.get(peer) != descriptor and descriptor in self._connections:
            self._owners.pop(self._of.get(peer, -1), None)
            before = self._owners.get(descriptor)
            if before is not None:
                self._of.pop(before, None)
            self._of[peer], self._owners[descriptor] = descriptor, peer
            self._hosts[peer] = self._connections[descriptor]

    def last(self, peer: Peer) -> float:
        """When something last came from ``peer``, on `time.monotonic`, as far as it was read before."""
        count, now = self._count(peer), time.monotonic()
        seen = self._seen.get(peer)
        if seen is None or seen[0] != count:
            seen = self._seen[peer] = (count, now)
        return seen[1]

    def forget(self, peer: Peer) -> None:
        self._owners.pop(self._of.pop(peer, -1), None)
        for table in (self._hosts, self._messages, self._seen):
            table.pop(peer, None)

    def keep(self, peers: Collection[Peer]) -> None:
        """Forget all others: they have sent something, and were never introduced."""
        for peer in [peer for peer in list(self._messages) if peer not in peers]:
            self.forget(peer)

    def __len__(self) -> int:
        return len(self._messages)

    def _count(self, peer: Peer) -> int:
        known = self._of.get(peer)
        if known is None:
            # Its connection is unknown until its first message by it is complete: any from its address may be.
            host = self._hosts.get(peer)
            descriptors = [
                descriptor
                for descriptor, other_end in list(self._connections.items())
                if descriptor not in self._owners and host in (None, other_end)
            ]
        else:
            descriptors = [known]
        return self._messages.get(peer, 0) + sum(map(_received, descriptors))


def _other_end(descriptor: int) -> str:
    """The address at the other end of a TCP connection; empty: of anything else, and of what was closed meanwhile."""
    with contextlib.suppress(OSError):
        borrowed = socket.socket(fileno=descriptor)
        try:
            found = borrowed.getpeername()
            return str(found[0]) if isinstance(found, tuple) else ""
        finally:
            borrowed.detach()  # libzmq closes it
    return ""


def _received(descriptor: int) -> int:
    """Bytes that have come over a TCP connection; 0 of anything else, and of what was closed meanwhile."""
    with contextlib.suppress(OSError):
        borrowed = socket.socket(fileno=descriptor)
        try:
            info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_NBYTES)
            return int(struct.unpack_from("=Q", info, BYTES_RECEIVED)[0]) if len(info) >= TCP_INFO_NBYTES else 0
        finally:
            borrowed.detach()  # libzmq closes it
    return 0
