"""Reads a process's sockets: frames are taken one after the other, and what cannot be taken is counted and logged.

Here: envelopes and refusals. Not here: links, order and delivery (`channels`). It runs on the process's I/O thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Final

import zmq

from stage_runtime.errors import OtherProtocol, ProtocolError
from stage_runtime.wire import codec
from stage_runtime.wire.frames import Envelope
from stage_runtime.wire.messages import Message

log = logging.getLogger(__name__)

READABLE: Final = int(zmq.POLLIN)  # an operation on the enumeration costs as much as the look itself
NOBLOCK: Final = int(zmq.NOBLOCK)
BURST: Final = 8  # frames of a wake-up after which more are likely
DRAIN_BUDGET: Final = 256  # frames per wake-up, before other work of the loop gets its turn
DRAIN_S: Final = 0.01  # as well: a Hello takes longer than an ack
CLOCK_EVERY: Final = 16  # frames
LOGGED_MOST: Final = 20  # reasons of a kind: strangers may make up as many as they like
NUMBERS: Final = re.compile(r"\d+")


class Reading:
    """The frames that a process reads and refuses."""

    def __init__(self, loop: asyncio.AbstractEventLoop, counters: Counter[str]) -> None:
        #: Monotonic time of the last frame of another protocol, or connection that ended at once.
        self.other_protocol_at = -math.inf
        self._loop = loop
        self.counters = counters
        self._logged: defaultdict[str, set[str]] = defaultdict(set)  #: Reasons by kind, without numbers.

    def drain(
        self,
        socket: zmq.Socket[bytes],
        receive: Callable[[int], bytes],
        take: Callable[[bytes], None],
        many: bool = False,
    ) -> int:
        """The descriptor is edge-triggered: read until nothing is left, or come back by ourselves.

        receive: the next frame of ``socket``. many: more than a few frames are likely. Returns: how many there were; 0
        where it comes back.
        """
        began = time.monotonic()
        for number in range(1, DRAIN_BUDGET + 1):
            try:
                data = receive(NOBLOCK)
            except zmq.ZMQError:
                return number - 1  # nothing is left to read, or it was closed under us
            try:
                take(data)
            except Exception:  # the outermost loop: one message must not leave the rest of the socket unread
                self.counters["handler_errors"] += 1
                log.exception("handling a message failed")
            # Costs less than `zmq.Again`, but it does so for each frame.
            if number < BURST and not many and not _readable(socket):
                return number
            if not number % CLOCK_EVERY and time.monotonic() - began > DRAIN_S:
                break
        self._loop.call_soon(self.drain, socket, receive, take, many)
        return 0

    def opened(self, data: bytes) -> Envelope | None:
        """Decode an envelope; None: it is malformed, or of another protocol."""
        try:
            return codec.opened(data)
        except OtherProtocol as error:
            self.other_protocol_at = time.monotonic()
            self.refuse("other_protocol", str(error))
        except ProtocolError as error:
            self.refuse("malformed", str(error))
        return None

    def message(self, frame: Envelope) -> Message | None:
        """Decode a message outside the order; None: it is malformed."""
        try:
            return codec.read(frame)
        except ProtocolError as error:
            self.refuse("malformed", str(error))
            return None

    def short_connection(self) -> None:
        """A peer connected and left at once, or has another key."""
        self.other_protocol_at = time.monotonic()

    def refuse(self, kind: str, why: str, *, peer: str = "") -> None:
        """Count it, and log each reason of a kind once, with the first peer; those that differ in numbers are one."""
        self.counters[kind] += 1
        logged, reason = self._logged[kind], NUMBERS.sub("", why)
        if reason in logged or len(logged) > LOGGED_MOST:
            return
        logged.add(reason)
        if len(logged) > LOGGED_MOST:
            log.warning("dropped (%s): further reasons are counted, not logged", kind)
        else:
            log.warning("dropped (%s): %s%s", kind, why, f"; peer: {peer!r}" if peer else "")


def _readable(socket: zmq.Socket[bytes]) -> bool:
    try:
        return bool(int(socket.getsockopt(zmq.EVENTS)) & READABLE)
    except zmq.ZMQError:  # closed under us
        return False
