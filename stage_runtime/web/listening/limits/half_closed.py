"""A client that has closed its sending half: it waits for its answer, or it is gone. Only a write tells which.

Both ends look the same (a FIN). The kernel of a client that is gone answers what is written with a reset, which is
found in the state of the socket: nothing reads a connection that has ended. Called by `connections`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final

from stage_runtime.web.listening.connection_drain import unread_nbytes

#: An interim answer, which every client of HTTP/1.1 skips; before the answer has begun nothing else may be written.
PROBE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_EVERY_S: Final = 15.0  # a client that waits may go later, without another word
LOOKS_S: Final = (0.005, 0.05, 0.5)  # after a write: when the reset may be here; later ones are found by the sweep
_TCP_CLOSE: Final = 7  # include/net/tcp_states.h
_TCP_CLOSE_WAIT: Final = 8


def has_ended(transport: asyncio.Transport) -> bool:
    """Whether the client of a connection that is not read has closed its sending half, or is gone. False: something
    that it has sent is not read yet, or it is not known.
    """
    sock = transport.get_extra_info("socket")
    if sock is None or transport.is_closing():
        return False
    state = _tcp_state(sock)
    return state == _TCP_CLOSE or (state == _TCP_CLOSE_WAIT and not unread_nbytes(sock))


class HalfClosed:
    """One connection from its client's FIN on."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, lost: Callable[[], object]
    ) -> None:
        """lost: called when the client turns out to be gone."""
        self._transport = transport
        self._loop = loop
        self._lost = lost
        self._probe_at = 0.0
        self._keep_alive()

    def probe(self) -> None:
        """Find out by an interim answer."""
        self._probe_at = self._loop.time() + PROBE_EVERY_S
        self._transport.write(PROBE)
        self.look_soon()

    def look_soon(self) -> None:
        """Something was written a moment ago."""
        for after_s in LOOKS_S:
            self._loop.call_later(after_s, self.look)

    def look(self) -> None:
        if not self._transport.is_closing() and self._is_reset():
            self._lost()

    def sweep(self, now: float, *, may_probe: bool) -> None:
        """may_probe: an interim answer may be written."""
        self.look()
        if may_probe and now >= self._probe_at and not self._transport.is_closing():
            self.probe()

    def _is_reset(self) -> bool:
        sock = self._transport.get_extra_info("socket")
        return sock is not None and _tcp_state(sock) == _TCP_CLOSE

    def _keep_alive(self) -> None:
        """HTTP/1.0 has no interim answers: the kernel asks, and is answered until the other end forgets it."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)


def _tcp_state(sock: Any) -> int:
    return int(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0])
