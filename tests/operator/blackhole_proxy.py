"""A TCP proxy before the API server that can drop all bytes without closing a connection, as a broken network does."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator


class Proxy:
    """Forwards to one address until `swallow` is set; bytes sent meanwhile are lost with their connection."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.swallow = threading.Event()
        self._over = threading.Event()
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def _accept(self) -> None:
        self._listener.settimeout(0.2)
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except OSError:  # no listener: close this side too
                    client.close()
                    continue
                self._sockets += [client, server]
                threading.Thread(target=self._carry, args=(client, server), daemon=True).start()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        peers = {client: server, server: client}
        with selectors.DefaultSelector() as selector, contextlib.suppress(OSError, ValueError):
            for end in peers:
                selector.register(end, selectors.EVENT_READ)
            holed = False
            while not self._over.is_set():
                for key, _ in selector.select(0.2):
                    one = key.fileobj
                    assert isinstance(one, socket.socket)
                    data = one.recv(1 << 16)
                    holed = holed or self.swallow.is_set()
                    if not data and holed:
                        selector.unregister(one)  # the end of the stream is dropped too
                    elif not data:
                        raise ConnectionResetError  # as suppressed above: on to closing both
                    elif not holed:
                        peers[one].sendall(data)
                if holed and not self.swallow.is_set():
                    break  # bytes are missing, so the connection cannot be used again
        for one in peers:
            with contextlib.suppress(OSError):
                one.close()

    @contextlib.contextmanager
    def running(self) -> Iterator[Proxy]:
        self._thread.start()
        try:
            yield self
        finally:
            self._over.set()
            self._thread.join(timeout=5)
            self._listener.close()
            for one in self._sockets:
                one.close()
