"""When acknowledgements go out, and when frames that were not acknowledged are sent again. On the I/O thread.

Timers only: what is sent again is decided by `rules.links`, by which connection by `links`. Called by `channels`. The
work of a turn is in proportion to the links that are in use, not to all.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from stage_runtime.rules import ticks
from stage_runtime.rules.links import ACK_EVERY
from stage_runtime.sockets.links import Link

#: At rest an ack goes out on its own at the first tick after this; under load it rides on other frames. Far below
#: `RESEND_AFTER_S`, and long against a hop: an ack of its own wakes two threads at either end.
ACK_DELAY_S: Final = 0.02
ACK_TICK_S: Final = 0.04
STALL_RETRY_S: Final = 0.002
RESEND_AFTER_S: Final = 0.25  # without an acknowledgement; doubles up to RESEND_MOST_S, a busy receiver is no loss
RESEND_MOST_S: Final = 4.0


class Acknowledging:
    """What is owed to peers."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[Link], object]) -> None:
        """wake: open the connection of a link that sleeps, if there is room."""
        self._loop = loop
        self._wake = wake
        self._owing: set[Link] = set()
        self._timer: asyncio.TimerHandle | None = None

    def owe(self, link: Link) -> None:
        """A frame was delivered, or came again."""
        if link.incoming.owed >= ACK_EVERY and link.acknowledge():
            return
        self._owing.add(link)
        if self._timer is None:
            delay_s = ticks.delay_s(time.time(), ACK_DELAY_S, ACK_TICK_S)
            self._timer = self._loop.call_later(delay_s, self._settle)

    def now(self, link: Link, *, gap: bool = False) -> None:
        """Send an ack; when the link is connected, if it is not. A gap is seen again with the next frame."""
        if link.acknowledge(gap=gap):
            return
        self._owing.add(link)
        self._wake(link)

    def connected(self, link: Link) -> None:
        if link in self._owing:
            self._owing.discard(link)
            link.acknowledge()

    def forget(self, link: Link) -> None:
        self._owing.discard(link)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _settle(self) -> None:
        self._timer = None
        owing, self._owing = self._owing, set()
        for link in owing:
            if link.incoming.owed:
                self.now(link)


class Resending:
    """Frames that wait: for a connection with room, or for an acknowledgement."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        counters: Counter[str],
        turn: Callable[[], bool],
        *,
        flushed: Callable[[Link], None],
    ) -> None:
        """turn: called now and then, while open; whether it has read answers. flushed: the connection has all frames of
        a link that waited.
        """
        self._loop = loop
        self._counters = counters
        self._turn = turn
        self._flushed = flushed
        self._due: dict[Link, tuple[float, float]] = {}  #: When to send again, and the delay before that.
        self._fresh: deque[Link] = deque()  #: Links that have come to it since the last check.
        self._stalled: set[Link] = set()  #: With frames that their connections did not accept.
        self._stall_timer: asyncio.TimerHandle | None = None
        self._watch = loop.call_later(RESEND_AFTER_S / 2, self._check)
        self._looking: asyncio.TimerHandle | None = None
        self._closed = False

    def watch(self, link: Link) -> None:
        """It has frames that are not acknowledged, and was at rest before. Any thread; wakes no other."""
        self._fresh.append(link)

    def acknowledged(self, link: Link) -> None:
        """An acknowledgement freed frames: the delay starts again from its minimum."""
        if link in self._due:
            self._due[link] = (self._loop.time() + RESEND_AFTER_S, RESEND_AFTER_S)

    def flush(self, link: Link) -> None:
        """Send what waits, now and, where the connection has no room, again soon."""
        if not link.connected:
            return
        if not link.flush():
            self._flushed(link)
            return
        self._stalled.add(link)
        if self._stall_timer is None and not self._closed:
            self._stall_timer = self._loop.call_later(STALL_RETRY_S, self._retry)

    def again(self, link: Link) -> None:
        """Send all unacknowledged frames again."""
        self._counters["resent"] += link.rewind()
        self.flush(link)

    def forget(self, link: Link) -> None:
        self._due.pop(link, None)
        self._stalled.discard(link)

    def close(self) -> None:
        self._closed = True
        self._watch.cancel()
        if self._looking is not None:
            self._looking.cancel()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def _retry(self) -> None:
        self._stall_timer = None
        stalled, self._stalled = self._stalled, set()
        for link in stalled:  # one that is not connected is flushed when it is
            self.flush(link)

    def _look(self) -> None:
        """For acks that came as answers: sends take the edge that tells of them."""
        self._looking = None
        self._look_again(self._turn())

    def _look_again(self, answered: bool) -> None:
        if answered and self._due and self._looking is None:
            self._looking = self._loop.call_later(ACK_TICK_S, self._look)

    def _check(self) -> None:
        """Send frames again that were not acknowledged in time: lost with a connection, or sent before registration."""
        # Armed first: a check that raises does not stop the later ones.
        self._watch = self._loop.call_later(RESEND_AFTER_S / 2, self._check)
        answered = self._turn()
        now = self._loop.time()
        while self._fresh:
            self._due.setdefault(self._fresh.popleft(), (now + RESEND_AFTER_S, RESEND_AFTER_S))
        for link, (due, delay_s) in list(self._due.items()):
            if link.closed or link.at_rest():
                del self._due[link]
            elif now >= due and link.connected and link.unacked:
                delay_s = min(delay_s * 2, RESEND_MOST_S)
                self._due[link] = (now + delay_s, delay_s)
                self.again(link)
        self._look_again(answered)
