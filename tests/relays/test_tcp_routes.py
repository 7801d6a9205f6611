"""The tcp relay's sockets: opened by the first put, closed at rest, opened again."""

from __future__ import annotations

import errno

import pytest
import zmq

from stage_runtime.errors import RelayFailed
from stage_runtime.relays.tcp.routes import TcpRoute, is_endpoint


def test_a_socket_is_opened_when_it_is_used_and_closed_at_rest_unless_something_is_unreleased() -> None:
    context = zmq.Context()
    made = list[zmq.Socket[bytes]]()

    def make(endpoint: str) -> zmq.Socket[bytes]:
        made.append(context.socket(zmq.PUSH))
        made[-1].connect(endpoint)
        return made[-1]

    route = TcpRoute("tcp://127.0.0.1:1", b"token", make)
    assert made == []
    with route.lock:
        assert route.socket() is route.socket() is made[0]
    assert not route.rest(1000.0, lambda: False), "used just now"
    assert not route.rest(0.0, lambda: True), "its receiver has not released all"
    assert route.rest(0.0, lambda: False)
    assert made[0].closed and not route.is_open
    with route.lock:
        assert route.socket() is made[1]
    route.close()
    assert made[1].closed and route.closed
    context.term()


def test_a_process_without_room_for_a_socket_fails_the_transfer_alone() -> None:
    def make(endpoint: str) -> zmq.Socket[bytes]:
        raise zmq.ZMQError(errno.EMFILE)

    route = TcpRoute("tcp://127.0.0.1:1", b"token", make)
    with route.lock, pytest.raises(RelayFailed, match="Too many open files"):
        route.socket()


def test_a_message_that_no_new_socket_takes_either_fails_its_transfer() -> None:
    """The end at the address refuses each connection before anything is sent by it."""
    context = zmq.Context()
    made = list[zmq.Socket[bytes]]()

    def make(endpoint: str) -> zmq.Socket[bytes]:
        made.append(context.socket(zmq.PUSH))  # connected to nothing
        return made[-1]

    route = TcpRoute("tcp://127.0.0.1:1", b"token", make)
    with route.lock, pytest.raises(RelayFailed, match="speaks another protocol"):
        route.send(b"header", b"body")
    assert len(made) == 2 and all(socket.closed for socket in made) and not route.is_open
    context.term()


@pytest.mark.parametrize(
    ("endpoint", "good"),
    [
        ("tcp://10.0.0.7:5550", True),
        ("tcp://[::1]:5550", True),
        ("ipc:///run/x", True),
        ("ipc://", False),
        ("tcp://10.0.0.7", False),
        ("tcp://10.0.0.7:99999", False),
        ("tcp://10.0.0.7:" + "1" * 5000, False),
        ("tcp://10.0.0.7:\u0665\u0665", False),
        ("nonsense", False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_endpoint_that_nobody_could_connect_to_is_refused_at_once(endpoint: str, good: bool) -> None:
    assert is_endpoint(endpoint) == good
