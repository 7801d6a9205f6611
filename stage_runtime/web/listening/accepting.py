"""The listener of the HTTP server: accepts connections, and bounds how many have no protocol yet.

Here: accepting, and TLS up to the end of its handshake. Not here: the certificate (`certificates`), what follows
(`connections`). Made by `server`.

uvloop's listener accepts all that wait in one turn, before a connection can be refused: a burst takes every descriptor
of the process, and libzmq, which accepts peers in its own thread, aborts the process at a Unix socket when none is left
(`sockets.endpoints.doors`). It has one TLS context for as long as it listens, and no bound for handshakes that never
end. `start_tls` on an accepted connection would lose what uvloop has read of it before.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

from stage_runtime.errors import NO_ROOM
from stage_runtime.web.listening.certificates import Certificates
from stage_runtime.web.listening.limits.connection_limits import ConnectionLimit

_log = logging.getLogger(__name__)

AT_ONCE: Final = 16  # connections without TLS; each has its protocol two turns of the loop later
SHUTDOWN_S: Final = 5.0  # for a client's part of the goodbye
RETRY_S: Final = 0.5  # without free descriptors
_NOT_NOW: Final = (BlockingIOError, InterruptedError, ConnectionAbortedError)


class Listener:
    """The part of `asyncio.Server` that uvicorn uses, with a TLS handshake first where there is a certificate."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        certificates: Certificates | None,
        *,
        timeout_s: float,
        limit: ConnectionLimit,
    ) -> None:
        """protocol: takes over the connection. timeout_s: for a handshake. limit: half as many clients may be in a
        handshake at once; one beyond them is cut off.
        """
        self._listener = listener
        self._protocol = protocol
        self._certificates = certificates
        self._timeout_s = timeout_s
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._begun: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
        self._listen()

    @property
    def busy(self) -> bool:
        """Connections are accepted that have no protocol yet."""
        return bool(self._begun)

    def close(self) -> None:
        """Accept no more; those that are accepted go on."""
        if self._retry is not None:
            self._retry.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    def end_handshakes(self) -> None:
        """Cut off those that are under way."""
        if self._certificates is not None:
            for task in self._begun:
                task.cancel()

    async def wait_closed(self) -> None:
        """End, with the handshakes that are under way. Any other accepted connection has its protocol then."""
        self.close()
        self.end_handshakes()
        await asyncio.gather(*self._begun, return_exceptions=True)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """A client connects. Those that find no place wait in the kernel's queue, until the loop's next turn."""
        for _ in range(AT_ONCE):
            if self._certificates is None and len(self._begun) >= AT_ONCE:
                return
            try:
                accepted, _ = self._listener.accept()
            except _NOT_NOW:
                return
            except OSError as error:
                self._wait(error)
                return
            if self._certificates is not None and len(self._begun) >= self._limit.most // 2:
                accepted.close()
                continue
            task = self._loop.create_task(self._begin(accepted))
            self._begun.add(task)
            task.add_done_callback(self._begun.discard)

    def _wait(self, error: OSError) -> None:
        if error.errno in NO_ROOM:
            _log.warning("no connection can be accepted: %s", error)
            self._loop.remove_reader(self._listener)
            self._retry = self._loop.call_later(RETRY_S, self._listen)
        else:  # the network's errors, which the kernel reports here: of a connection that is gone already
            _log.debug("a connection was lost as it began: %s", error)

    async def _begin(self, accepted: socket.socket) -> None:
        try:
            accepted.setblocking(False)
            if self._certificates is None:
                await self._loop.connect_accepted_socket(self._protocol, accepted)
            else:
                await self._loop.connect_accepted_socket(
                    self._protocol,
                    accepted,
                    ssl=self._certificates.context,
                    ssl_handshake_timeout=self._timeout_s,
                    ssl_shutdown_timeout=SHUTDOWN_S,
                )
        except OSError as error:  # anybody can fail: plain HTTP, a client that does not trust us, one that is gone
            _log.debug("a connection or its TLS handshake has failed: %s", error)
