"""libzmq accepts as many connections as a listener is told to, and the others wait in the kernel."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from stage_runtime.sockets.endpoints import listeners
from stage_runtime.sockets.endpoints.listeners import Listener

PATIENCE_MS = 60_000


class Bound:
    """A socket of libzmq's that is bound, and what it accepts."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self._socket.bind(endpoint)
        self._endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._peers: list[socket.socket] = []

    def listener(self) -> Listener:
        while True:  # until libzmq's thread waits for connections
            found = listeners.find(self._endpoint)
            if found is not None:
                return found

    def connect(self) -> None:
        scheme, _, place = self._endpoint.partition("://")
        peer = socket.socket(socket.AF_UNIX if scheme == "ipc" else socket.AF_INET)
        self._peers.append(peer)
        peer.connect(place if scheme == "ipc" else ("127.0.0.1", int(place.rpartition(":")[2])))

    def accepts(self) -> None:
        """Fails if nothing is."""
        assert self._monitor.poll(PATIENCE_MS)
        self._monitor.recv_multipart()

    def has_accepted(self) -> bool:
        return bool(self._monitor.poll(0))

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    yield made
    made.term()


@pytest.mark.parametrize("endpoint", ["ipc://{folder}/hub", "tcp://127.0.0.1:*"])
def test_one_connection_is_accepted_at_a_time_or_none_or_all(
    endpoint: str, tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with (
        contextlib.closing(Bound(context, endpoint.format(folder=tmp_path))) as hub,
        contextlib.closing(Bound(context, f"ipc://{tmp_path}/other")) as other,
    ):

        def nothing_more() -> None:
            """libzmq's one thread has come by, since it has accepted at the other socket."""
            for _ in range(2):
                other.connect()
                other.accepts()
            assert not hub.has_accepted()

        listener = hub.listener()
        listener.accept_one()
        for _ in range(4):
            hub.connect()
        hub.accepts()
        nothing_more()
        listener.accept_one()
        hub.accepts()
        nothing_more()
        listener.accept_one()
        hub.accepts()
        listener.accept_none()
        nothing_more()
        hub.connect()
        nothing_more()
        listener.accept_all()
        hub.accepts()
        hub.accepts()


def test_what_this_process_does_not_listen_at_is_not_found(tmp_path: Path) -> None:
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        assert listeners.find(f"tcp://127.0.0.1:{foreign.getsockname()[1]}") is None
    assert listeners.find(f"ipc://{tmp_path}/nowhere") is None
