"""Whether a client takes what is there for it. Used by `connections` and `socket_connections`."""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios

from stage_runtime.web.listening.limits.connection_limits import ConnectionLimits


class StalledReader:
    """The reader of one connection."""

    def __init__(self, transport: asyncio.Transport, limits: ConnectionLimits) -> None:
        self._transport = transport
        self._limits = limits
        self._outstanding: int | None = None  #: Bytes that the client has not taken, when that was last looked at.
        self._since = 0.0

    def for_too_long(self, now: float, *, waits: bool) -> bool:
        """Whether it has taken too little of what was written. waits: more is written than fits."""
        if not waits:
            self._outstanding = None
            return False
        outstanding = self._untaken()
        if not outstanding:
            self._outstanding = None
        elif self._outstanding is None or self._outstanding - outstanding >= self._limits.write_nbytes:
            self._outstanding, self._since = outstanding, now
        else:
            return now - self._since > self._limits.write_s
        return False

    def _untaken(self) -> int:
        """Bytes written that the client's kernel has not acknowledged."""
        waiting = self._transport.get_write_buffer_size()
        sock = self._transport.get_extra_info("socket")
        if not waiting or sock is None:
            return int(waiting)
        unsent = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, struct.pack("i", 0))
        return int(waiting) + int(struct.unpack("i", unsent)[0])
