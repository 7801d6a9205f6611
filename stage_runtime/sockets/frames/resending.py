"""When acknowledgements go out, and when frames that were not acknowledged are sent again. It runs on the I/O thread.

Timers only: what is sent again is decided by `rules.flow.links`, by which connection by `links`. Called by `channels`.
The work of a turn is in proportion to the links that are in use, not to all.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, NamedTuple

from stage_runtime.rules.flow import ticks
from stage_runtime.rules.flow.links import ACK_EVERY
from stage_runtime.sockets.connections.links import Link

#: An ack rides on a frame that goes out anyway; else it goes on its own, at the first tick after one of these times. It
#: wakes two threads at either end, which costs as much as a hop, so a peer that has had an ack before gets it late:
#: nothing is lost on a connection that stands. Soon: of its first frames, which may have come before it was introduced,
#: and of frames that come again, because their sender waits. Both are far below the times of `Resending`.
ACK_SOON_S: Final = 0.02
ACK_LATE_S: Final = 1.0
ACK_TICK_S: Final = 0.04
STALL_RETRY_S: Final = 0.002
#: Seconds without an acknowledgement; doubles up to RESEND_MOST_S, a busy receiver is not a loss.
RESEND_FIRST_S: Final = 0.25  # while the peer has acknowledged nothing
RESEND_LATER_S: Final = 3.0
RESEND_MOST_S: Final = 6.0


class ResendTimes(NamedTuple):
    """When a late ack goes out, and when frames without an ack are sent again."""

    ack_late_s: float = ACK_LATE_S
    first_s: float = RESEND_FIRST_S
    later_s: float = RESEND_LATER_S


DEFAULT_TIMES: Final = ResendTimes()


class Acknowledging:
    """The acknowledgements owed to peers."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, wake: Callable[[Link], object], times: ResendTimes = DEFAULT_TIMES
    ) -> None:
        """wake: open the connection of a link that sleeps, if there is room."""
        self._wake = wake
        self._unconnected: set[Link] = set()  #: Owing, without a way to send it.
        self._soon = _Later(loop, ACK_SOON_S, self._settle)
        self._late = _Later(loop, times.ack_late_s, self._settle)

    def owe(self, link: Link, *, again: bool = False) -> None:
        """A frame was delivered. again: it came a second time."""
        if link.incoming.owed >= ACK_EVERY and link.acknowledge():
            return
        (self._soon if again or not link.incoming.acknowledged else self._late).add(link)

    def now(self, link: Link, *, gap: bool = False) -> None:
        """Send an ack; when the link is connected, if it is not. A gap is seen again with the next frame."""
        if link.acknowledge(gap=gap):
            return
        self._unconnected.add(link)
        self._wake(link)

    def connected(self, link: Link) -> None:
        if link in self._unconnected:
            self._unconnected.discard(link)
            link.acknowledge()

    def forget(self, link: Link) -> None:
        self._unconnected.discard(link)
        self._soon.forget(link)
        self._late.forget(link)

    def close(self) -> None:
        self._soon.close()
        self._late.close()

    def _settle(self, link: Link) -> None:
        if link.incoming.owed:
            self.now(link)


class _Later:
    """Links that are settled at a tick a while after they were added; those of a tick in one turn of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, least_s: float, settle: Callable[[Link], None]) -> None:
        self._loop = loop
        self._least_s = least_s
        self._settle = settle
        self._due: dict[Link, float] = {}  #: Times of the loop's clock; the earliest first.
        self._timer: asyncio.TimerHandle | None = None

    def add(self, link: Link) -> None:
        if link in self._due:
            return
        due = self._loop.time() + ticks.delay_s(time.time(), self._least_s, ACK_TICK_S)
        self._due[link] = due
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._turn)

    def forget(self, link: Link) -> None:
        self._due.pop(link, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _turn(self) -> None:
        self._timer = None
        end = self._loop.time() + ACK_TICK_S / 2  # two clocks: those of one tick differ a little
        due = list(itertools.takewhile(lambda link: self._due[link] <= end, self._due))
        for link in due:
            del self._due[link]
        for at in itertools.islice(self._due.values(), 1):
            self._timer = self._loop.call_at(at, self._turn)
        for link in due:
            self._settle(link)


class Resending:
    """Frames that wait: for a connection with room, or for an acknowledgement."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        counters: Counter[str],
        turn: Callable[[], bool],
        *,
        flushed: Callable[[Link], None],
        times: ResendTimes = DEFAULT_TIMES,
    ) -> None:
        """turn: called now and then while frames are not acknowledged; whether it has read answers. flushed: the
        connection has all frames of a link that waited.
        """
        self._loop = loop
        self._counters = counters
        self._turn = turn
        self._flushed = flushed
        self._times = times
        self._due: dict[Link, tuple[float, float]] = {}  #: When to send again, and the delay before that.
        self._fresh: deque[Link] = deque()  #: Links that have come to it since the last check.
        self._stalled: set[Link] = set()  #: Links with frames that their connections did not accept.
        self._stall_timer: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = (
            None  #: The timer of the next check. None: nothing waits for an acknowledgement.
        )
        self._looking: asyncio.TimerHandle | None = None
        self._closed = False

    def watch(self, link: Link) -> None:
        """It has frames that are not acknowledged, and was at rest before. Any thread; wakes the loop if all were."""
        self._fresh.append(link)  # before the look at the timer: a check that ends meanwhile sees one or the other
        if self._timer is None and not self._closed:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._arm)

    def acknowledged(self, link: Link) -> None:
        """An acknowledgement freed frames: the delay starts again from its minimum."""
        link.is_known = True
        if link in self._due:
            self._due[link] = (self._loop.time() + self._times.later_s, self._times.later_s)

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
        if self._timer is not None:
            self._timer.cancel()
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
        """Looks for acks that came as answers: a send consumes the socket's edge that would tell of them."""
        self._looking = None
        self._look_again(self._turn())

    def _look_again(self, answered: bool) -> None:
        if answered and self._due and self._looking is None:
            self._looking = self._loop.call_later(ACK_TICK_S, self._look)

    def _check(self) -> None:
        """Send frames again that were not acknowledged in time: lost with a connection, or sent before registration."""
        # Armed first: a check that raises does not stop the later ones.
        self._timer = self._loop.call_later(self._times.first_s / 2, self._check)
        answered = self._turn()
        now = self._loop.time()
        while self._fresh:
            link = self._fresh.popleft()
            delay_s = self._times.later_s if link.is_known else self._times.first_s
            self._due.setdefault(link, (now + delay_s, delay_s))
        for link, (due, delay_s) in list(self._due.items()):
            if link.closed or link.at_rest():
                del self._due[link]
            elif now >= due and link.connected and link.unacked:
                delay_s = min(delay_s * 2, RESEND_MOST_S)
                self._due[link] = (now + delay_s, delay_s)
                self.again(link)
        self._look_again(answered)
        if not self._due:
            self._rest()

    def _rest(self) -> None:
        """Nothing waits: the next frame arms the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._fresh:  # it came since, and may have seen the timer
            self._arm()

    def _arm(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(self._times.first_s / 2, self._check)
