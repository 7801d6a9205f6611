"""The socket that peers connect to: their frames, and answers on the connections that they came by.

A process with nothing to send to a peer acknowledges on the peer's connection and opens none of its own, which saves
half of a link's memory and descriptors. Not here: what is answered (`links`), connections of ours (`dialing`). It runs
on the process's I/O thread; `links` calls `answer` on that thread, too.
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
        """surplus: called for a part of a message that looks like a route and is not one, which only strangers send.

        Raises: ConfigurationError: the endpoint cannot be bound.
        """
        self._loop = loop
        self._surplus = surplus
        self._answered = False  #: An answer was sent since the socket was looked at.
        self._look: Callable[[], None]
        self.socket = sockets.make(zmq.ROUTER, accepts=True)
        self.socket.maxmsgsize = FRAME_LIMIT
        self.socket.router_mandatory = True  # an answer whose connection is gone, or full, is refused
        self.endpoint = sockets.bind(self.socket, endpoint)  #: The endpoint as bound.
        self.route = b""  #: The route of the connection that the last frame came by.

    def read(self, look: Callable[[], None]) -> None:
        """look: reads the socket, if there is something."""
        self._look = look

    def receive(self, flags: int) -> bytes:
        """The next frame. Raises: ZMQError: none waits.

        A message is a route and one or more frames. No frame looks like a route. A stranger may send a part that does;
        the route of the next message follows it. Asking libzmq where each message ends takes twice as long as receiving
        it.
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
            # A send consumes the descriptor's edge, which would report frames that came before it.
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
