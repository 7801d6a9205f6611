"""Paces reads: a socket on which nothing but beats comes, one soon after the other, is read after a pause.

A message that comes alone wakes this thread, which costs more than the message; network adapters hold their interrupts
back for the same reason. A beat is replaced by the next one, so it is in no hurry. Not here: what a message is
(`channels`), how a socket is emptied (`reading`). It runs on the process's I/O thread.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

import zmq

from stage_runtime.sockets.endpoints.opening import Sockets

PAUSE_S: Final = 0.005  # what a message waits at most; far below the time between two ticks of beats
DENSE_S: Final = 2 * PAUSE_S  # between two reads of beats; a beat that comes alone causes no pause, which has a timer


class ReadPacing:
    """The sockets on which beats may come."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sockets: Sockets) -> None:
        self.beats = 0  #: Beats in the present read.
        #: Whether all frames may wait so long, because no request is in flight.
        self.allowed: Callable[[], bool] = lambda: False
        self._loop = loop
        self._sockets = sockets
        self._last_s = -math.inf  #: When beats alone were read last.
        self._pauses: dict[zmq.Socket[bytes], asyncio.TimerHandle] = {}

    def read(self, socket: zmq.Socket[bytes], drain: Callable[[bool], int]) -> None:
        """Call ``drain`` when there may be something. Its argument: whether many frames are likely. It returns how many
        there were.
        """
        self._sockets.read(socket, lambda: self._read(socket, drain))

    def look(self, socket: zmq.Socket[bytes], drain: Callable[[bool], int]) -> None:
        """Read it now, as if it had something; not in a pause."""
        if socket not in self._pauses:
            self._read(socket, drain)

    def close(self) -> None:
        """Must be called before the sockets are closed."""
        for pause in self._pauses.values():
            pause.cancel()
        self._pauses.clear()

    def _read(self, socket: zmq.Socket[bytes], drain: Callable[[bool], int]) -> None:
        paused = self._pauses.pop(socket, None) is not None
        self.beats = 0
        frames = drain(paused)
        if not frames or frames != self.beats or not self.allowed():
            return
        now = self._loop.time()
        dense = now - self._last_s < DENSE_S
        self._last_s = now
        if dense and not socket.closed:
            self._sockets.stop_reading(socket)
            self._pauses[socket] = self._loop.call_later(PAUSE_S, self.read, socket, drain)
