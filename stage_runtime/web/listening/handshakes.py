"""The listener of a server with a certificate: accepts connections, and bounds their handshakes in time and number.

Here: accepting, and TLS up to the end of its handshake. Not here: the certificate (`certificates`), what follows
(`connections`). Made by `server`.

A listener of asyncio has one context for as long as it listens, and no bound for connections that never finish a
handshake. `start_tls` on an accepted connection would lose what uvloop has read of it before.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

from stage_runtime.web.listening.certificates import Certificates

_log = logging.getLogger(__name__)

SHUTDOWN_S: Final = 5.0  # for a client's part of the goodbye
RETRY_S: Final = 0.5  # without free descriptors


class SecuredListener:
    """The part of `asyncio.Server` that uvicorn uses, with a TLS handshake before a connection is passed on."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        certificates: Certificates,
        *,
        timeout_s: float,
        most: int,
    ) -> None:
        """protocol: takes over after a handshake. most: handshakes at once; a client beyond them is cut off."""
        self._listener = listener
        self._protocol = protocol
        self._certificates = certificates
        self._timeout_s = timeout_s
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = self._loop.create_task(self._accept())

    @property
    def busy(self) -> bool:
        """Connections are accepted that have no protocol yet."""
        return bool(self._handshakes)

    def close(self) -> None:
        """Accept no more; handshakes go on."""
        self._accepting.cancel()

    def end_handshakes(self) -> None:
        """Cut off those that are under way."""
        for task in self._handshakes:
            task.cancel()

    async def wait_closed(self) -> None:
        """End, with the handshakes that are under way."""
        self.close()
        self.end_handshakes()
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        try:
            while True:
                try:
                    accepted, _ = await self._loop.sock_accept(self._listener)
                except OSError as error:
                    _log.warning("no connection can be accepted: %s", error)
                    await asyncio.sleep(RETRY_S)
                    continue
                if len(self._handshakes) >= self._most:
                    accepted.close()
                    continue
                task = self._loop.create_task(self._shake(accepted))
                self._handshakes.add(task)
                task.add_done_callback(self._handshakes.discard)
        finally:
            self._listener.close()

    async def _shake(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(
                self._protocol,
                accepted,
                ssl=self._certificates.context,
                ssl_handshake_timeout=self._timeout_s,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError as error:  # anybody can fail: plain HTTP, a client that does not trust us, one that is gone
            _log.debug("a TLS handshake has failed: %s", error)
