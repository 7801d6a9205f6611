"""The end of a server's connections, of which each is told by the answer to its last request. Used by `connections`.

Here: whether a server drains and how long its connections may rest. Not here: what one connection does then
(`connections`), the listener (`server`).

Closing a connection at rest costs its client a request, if one is on its way. A client reads ``Connection: close`` with
an answer and sends nothing more, so a connection that answers once more ends without a loss. One that stays at rest is
closed after a quiet time.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from typing import Any


class ConnectionDrain:
    """One object for all connections of a server."""

    def __init__(self) -> None:
        self.since: float | None = None  #: The loop's time at which it began; None: the server serves.
        self._quiet_s = 0.0
        self._gone = asyncio.Event()

    @property
    def begun(self) -> bool:
        return self.since is not None

    def begin(self, now: float, quiet_s: float) -> None:
        self.since, self._quiet_s = now, quiet_s

    def lost(self, left: int) -> None:
        """A connection has ended; ``left`` others have not."""
        if not left:
            self._gone.set()

    async def gone(self) -> None:
        """Wait until the last connection of those that are open now has ended."""
        self._gone.clear()
        await self._gone.wait()

    def over(self, now: float, since: float, transport: asyncio.Transport) -> bool:
        """Whether a connection at rest since ``since`` may be closed: nothing of a request is here."""
        if self.since is None or now - max(since, self.since) < self._quiet_s:
            return False
        return unread_nbytes(transport.get_extra_info("socket")) == 0


def unread_nbytes(sock: Any) -> int:
    """Bytes that the kernel has received and the loop has not read yet."""
    if sock is None or sock.fileno() < 0:
        return 0
    return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.FIONREAD, struct.pack("i", 0)))[0])
