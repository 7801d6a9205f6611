"""Asks the kernel of an endpoint whether anybody listens there: only a process that has ended refuses a connection.

Every process listens as long as it lives, at an endpoint that its next incarnation does not take before. So a refusal
proves a death without a wait; whatever else comes of it proves nothing. Called by `connecting`, on the I/O thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import Callable
from typing import Final

ANSWERED_S: Final = 0.3  # a host that has not answered by then is slow, or away


class Refusals:
    """The questions that are not answered yet. `close` when done."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._open: dict[socket.socket, asyncio.TimerHandle] = {}

    def ask(self, endpoint: str, refused: Callable[[], None]) -> None:
        """Call ``refused``, later, if no process listens there. An endpoint with a host name is not tried."""
        found = _address(endpoint)
        if found is None:
            return
        family, address = found
        try:
            asking = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:  # no descriptor is left
            return
        code = asking.connect_ex(address)
        if code == errno.EINPROGRESS:
            self._open[asking] = self._loop.call_later(ANSWERED_S, self._close, asking)
            self._loop.add_writer(asking, self._answered, asking, refused)
            return
        asking.close()
        if code == errno.ECONNREFUSED:
            self._loop.call_soon(refused)

    def close(self) -> None:
        for asking in list(self._open):
            self._close(asking)

    def _answered(self, asking: socket.socket, refused: Callable[[], None]) -> None:
        code = asking.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self._close(asking)
        if code == errno.ECONNREFUSED:
            refused()

    def _close(self, asking: socket.socket) -> None:
        self._open.pop(asking).cancel()
        self._loop.remove_writer(asking)
        asking.close()


def _address(endpoint: str) -> tuple[socket.AddressFamily, str | tuple[str, int]] | None:
    """None: its host is a name, which takes time to resolve."""
    if endpoint.startswith("ipc://"):
        return socket.AF_UNIX, endpoint.removeprefix("ipc://")
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with contextlib.suppress(ValueError):
        version = ipaddress.ip_address(host.strip("[]")).version
        return (socket.AF_INET6 if version == 6 else socket.AF_INET), (host.strip("[]"), int(port))
    return None
