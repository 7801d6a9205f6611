"""The bytes of a peer are those of its connection, also when that breaks and the peer comes by another one."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from stage_runtime.relays.base import Peer
from stage_runtime.relays.tcp.movement import Movement
from tests.patience import patience

ONE, OTHER = Peer("one"), Peer("other")


class Connection:
    """A TCP connection from ``host``: the end that libzmq would have accepted, and the peer's."""

    def __init__(self, listening: socket.socket, host: str) -> None:
        self.theirs = socket.create_connection(listening.getsockname(), source_address=(host, 0))
        self.ours, _ = listening.accept()
        self.descriptor = self.ours.fileno()

    def move(self) -> None:
        """Some bytes come; no message is complete."""
        self.theirs.sendall(b"x" * 100)
        assert select.select([self.ours], [], [], patience(60.0))[0]

    def close(self) -> None:
        self.theirs.close()
        self.ours.close()


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


class Made:
    """A movement, and the connections that it knows."""

    def __init__(self, listening: socket.socket, stack: ExitStack) -> None:
        self.movement = Movement()
        self._listening = listening
        self._stack = stack

    def accept(self, host: str = "127.0.0.1", peer: Peer | None = None) -> Connection:
        made = Connection(self._listening, host)
        self._stack.callback(made.close)
        self.movement.accepted(made.descriptor)
        if peer is not None:
            self.movement.message(peer, made.descriptor)
        return made

    def moves(self, peer: Peer, connection: Connection) -> bool:
        """Whether bytes on a connection count as the peer's."""
        before = self.movement.last(peer)
        while time.monotonic() <= before:
            pass
        connection.move()
        return self.movement.last(peer) > before


@pytest.fixture
def made(listening: socket.socket) -> Iterator[Made]:
    with ExitStack() as stack:
        yield Made(listening, stack)


def test_bytes_of_another_peer_s_connection_are_not_its_own(made: Made) -> None:
    one, other = made.accept(peer=ONE), made.accept(peer=OTHER)
    assert made.moves(ONE, one) and made.moves(OTHER, other)
    assert not made.moves(ONE, other) and not made.moves(OTHER, one)


def test_a_large_frame_that_comes_slowly_by_a_new_connection_is_seen_before_it_is_complete(made: Made) -> None:
    made.movement.disconnected(made.accept(peer=ONE).descriptor)
    assert made.moves(ONE, made.accept())


def test_what_was_lost_with_a_connection_does_not_move_with_the_next_one_of_its_descriptor(made: Made) -> None:
    lost = made.accept(peer=ONE)
    assert made.movement.disconnected(lost.descriptor) == [ONE]
    other = made.accept()
    made.movement.disconnected(other.descriptor)
    os.dup2(other.descriptor, lost.descriptor)
    made.movement.accepted(lost.descriptor)
    made.movement.message(OTHER, lost.descriptor)
    assert not made.moves(ONE, other) and made.moves(OTHER, other)


def test_what_was_lost_with_a_connection_does_not_move_with_those_of_other_addresses(made: Made) -> None:
    made.movement.disconnected(made.accept(peer=ONE).descriptor)
    assert not made.moves(ONE, made.accept(host="127.0.0.2"))


def test_a_message_of_a_connection_that_is_closed_names_no_connection(made: Made) -> None:
    """libzmq reports both by ways of their own."""
    closed = made.accept()
    made.movement.disconnected(closed.descriptor)
    made.movement.message(ONE, closed.descriptor)
    other = made.accept(peer=OTHER)
    assert not made.moves(ONE, other)
    made.movement.forget(ONE)
    assert len(made.movement) == 1
