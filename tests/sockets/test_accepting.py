"""The socket that peers connect to, and peers that send messages of any number of parts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.sockets.connections.accepting import Accepting


class InprocSockets:
    """A stand-in for `sockets.endpoints.opening.Sockets`: messages can be read when ``send`` has returned."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def make(self, kind: int, *, accepts: bool) -> zmq.Socket[bytes]:
        return self.context.socket(kind)

    def bind(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        socket.bind(endpoint)
        return endpoint


class Ends:
    """An accepting socket, an honest peer and a stranger."""

    def __init__(self) -> None:
        self.sockets = InprocSockets()
        self.surplus = 0
        sockets: Any = self.sockets
        self._loop = asyncio.new_event_loop()
        self.accepting = Accepting(sockets, self._loop, "inproc://there", self._count)
        self.honest, self.stranger = (self.sockets.context.socket(zmq.DEALER) for _ in range(2))
        for one in (self.honest, self.stranger):
            one.connect("inproc://there")

    def _count(self) -> None:
        self.surplus += 1

    def read(self) -> list[tuple[bytes, bytes]]:
        """The messages that have come: (route, frame) of each."""
        found = list[tuple[bytes, bytes]]()
        while True:
            try:
                frame = self.accepting.receive(zmq.NOBLOCK)
            except zmq.Again:
                return found
            found.append((self.accepting.route, frame))

    def close(self) -> None:
        self.sockets.context.destroy(linger=0)
        self._loop.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_a_part_that_looks_like_a_route_costs_no_frame_of_others(ends: Ends) -> None:
    ends.honest.send(b"first")
    (route, _), *_ = ends.read()
    for forged in (route, b"\0mine"):
        ends.stranger.send_multipart([b"frame", forged])
        ends.honest.send(b"second")
        assert ends.read()[-1] == (route, b"second")
    assert ends.surplus == 2


def test_all_frames_of_a_message_are_read_by_its_route(ends: Ends) -> None:
    for peer in (ends.stranger, ends.honest):
        peer.send_multipart([b"first", b"second", b"third"])
    found = ends.read()
    routes = {route for route, _ in found}
    assert len(routes) == 2
    for route in routes:
        assert [frame for one, frame in found if one == route] == [b"first", b"second", b"third"]


PARTS = st.sampled_from([b"", b"x", b"\0", b"\0abcd", b"\0\0\0\0\1", b"\1abcd", b"\0abcde", b"x" * 300])


@given(st.lists(st.lists(PARTS, min_size=1, max_size=5), max_size=12))
def test_every_frame_of_an_honest_peer_is_read_by_its_own_route_whatever_others_send(
    messages: list[list[bytes]],
) -> None:
    ends = Ends()
    try:
        ends.honest.send(b"honest")
        ((route, _),) = ends.read()
        for parts in messages:
            ends.stranger.send_multipart(parts)
            ends.honest.send(b"honest")
        assert [one for one, frame in ends.read() if frame == b"honest"] == [route] * len(messages)
    finally:
        ends.close()
