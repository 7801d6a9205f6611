"""The tcp relay's way to one peer: a PUSH socket that is opened when a put is expected or made, and closed at rest.

Any thread, under the route's lock. Not here: what is sent (`relay`), and what arrives (`arrivals`).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Final

import zmq

from stage_runtime.errors import RelayFailed

PORT: Final = re.compile("[0-9]{1,5}")  # Python makes no number of thousands of digits, and libzmq of foreign ones


class TcpRoute:
    """Connected while it is in use. ``token`` goes with all that is sent, so that the peer accepts it."""

    def __init__(self, endpoint: str, token: bytes, make: Callable[[str], zmq.Socket[bytes]]) -> None:
        """make: a socket that is connected to the endpoint."""
        self.endpoint = endpoint
        self.token = token
        self.lock = threading.Lock()  #: ZMQ sockets may change threads, but not be used by two at once.
        self.closed = False
        self._make = make
        self._socket: zmq.Socket[bytes] | None = None
        self._used_at = 0.0

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def socket(self) -> zmq.Socket[bytes]:
        """The socket, opened if need be; the lock is held. Raises: RelayFailed: no socket can be opened."""
        self._used_at = time.monotonic()
        if self._socket is None:
            try:
                self._socket = self._make(self.endpoint)
            except zmq.ZMQError as error:
                raise RelayFailed(f"the tcp relay cannot connect to {self.endpoint}: {error}") from error
        return self._socket

    def send(self, header: bytes, body: memoryview | bytes) -> None:
        """Have libzmq send a message later; the lock is held.

        libzmq lets go of a peer for good when the end at its address speaks another protocol, as that of another
        pipeline does whose pod has the address now. A send would wait for ever then; a new socket connects again.
        Raises: RelayFailed: no socket can be opened, or the new one is let go of as well.
        """
        for _ in range(2):
            try:
                self.socket().send(header, zmq.SNDMORE | zmq.NOBLOCK)
                self.socket().send(body, zmq.NOBLOCK, copy=False)
                return
            except zmq.Again:
                self._close()
        raise RelayFailed(f"the end at {self.endpoint} speaks another protocol")

    def rest(self, idle_s: float, in_use: Callable[[], bool]) -> bool:
        """Close the socket if it was not used for so long and nothing that it sent is unreleased. True when it did."""
        with self.lock:
            if self._socket is None or time.monotonic() - self._used_at < idle_s or in_use():
                return False
            self._close()
            return True

    def close(self) -> None:
        """Closes the route for good."""
        with self.lock:
            self.closed = True
            self._close()

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None


def is_endpoint(endpoint: str) -> bool:
    """Whether libzmq could connect to it."""
    if endpoint.startswith("ipc://"):
        return len(endpoint) > len("ipc://")
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    is_port = PORT.fullmatch(port) is not None and 0 < int(port) < 65536
    return endpoint.startswith("tcp://") and bool(host) and is_port
