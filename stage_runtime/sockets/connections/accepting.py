"""The socket that peers connect to: their frames, and answers on the connections that they came by.

A process that has nothing of its own to send to a peer acknowledges by the peer's connection, and opens none: half the
memory and descriptors of a link. Not here: what is answered (`links`), connections of ours (`dialing`). It runs on the
process's I/O thread, but for `answer`, which `links` calls there alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import zmq

from stage_runtime.sockets.endpoints.opening import Sockets
from stage_runtime.wire.frames import FRAME_LIMIT

NOBLOCK: Final = int(zmq.NOBLOCK)
MORE: Final = int(zmq.SNDMORE) | NOBLOCK
ROUTE_NBYTES: Final = 5  # as libzmq makes them: a zero and a number


class Accepting:
    """One ROUTER socket: it names the connection of each frame."""

    def __init__(
        self, sockets: Sockets, loop: asyncio.AbstractEventLoop, endpoint: str, surplus: Callable[[], None]
    ) -> None:
        """surplus: called for a part of a message that looks like a route and is not one, which no peer of ours sends.

        Raises: ConfigurationError: the endpoint cannot be bound.
        """
        self._loop = loop
        self._surplus = surplus
        self._answered = False  #: An answer was sent since the socket was looked at.
        self._look: Callable[[], None]
        self.socket = sockets.make(zmq.ROUTER, accepts=True)
        self.socket.maxmsgsize = FRAME_LIMIT
        self.socket.router_mandatory = True  # an answer for which there is no connection, or no room, is refused
        self.endpoint = sockets.bind(self.socket, endpoint)  #: The endpoint as bound.
        self.route = b""  #: The route of the connection that the last frame came by.

    def read(self, look: Callable[[], None]) -> None:
        """look: reads the socket, if there is something."""
        self._look = look

    def receive(self, flags: int) -> bytes:
        """The next frame. Raises: ZMQError: there is none.

        A message is a route and one or more frames. No frame looks like a route. A stranger may send a part that does:
        the next message's own route follows it. A question to libzmq about the end of each message would cost twice as
        much as to receive it.
        """
        receive = self.socket.recv
        part = receive(flags)
        if _is_route(part):
            route, part = part, receive(flags)
            while _is_route(part):
                self._surplus()
                route, part = part, receive(flags)
            self.route = route
        return part

    def answer(self, route: bytes, frame: bytes) -> bool:
        """False: its connection is gone, or has no room."""
        if not self._answered:
            # A send takes the edge of the descriptor, on which the socket is read, with what has come before it.
            self._answered = True
            self._loop.call_soon(self._look_again)
        try:
            self.socket.send(route, MORE)
            self.socket.send(frame, NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _look_again(self) -> None:
        self._answered = False
        if not self.socket.closed:
            self._look()


def _is_route(part: bytes) -> bool:
    return len(part) == ROUTE_NBYTES and not part[0]
