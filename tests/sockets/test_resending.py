"""Looking after frames that are not acknowledged: nothing wakes while all are acknowledged."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from stage_runtime.rules.flow.links import LinkReceiver
from stage_runtime.sockets.connections.links import Link
from stage_runtime.sockets.frames.resending import RESEND_FIRST_S, Resending
from stage_runtime.wire.messages import Deregister


class Loop:
    """The part of an event loop that is used. Calls what is due when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.soon: list[Callable[[], object]] = []
        self.timers: list[asyncio.TimerHandle] = []

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self.timers.remove(handle)

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> None:
        self.soon.append(lambda: callback(*args))

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        loop: Any = self
        self.timers.append(asyncio.TimerHandle(self.now + delay, callback, args, loop))
        return self.timers[-1]

    def turn(self) -> None:
        """One turn, after the time to the next check."""
        soon, self.soon = self.soon, []
        for call in soon:
            call()
        self.now += RESEND_FIRST_S / 2
        for timer in [timer for timer in self.timers if timer.when() <= self.now]:
            self.timers.remove(timer)
            timer._run()


class Interrupted(Link):
    """Calls something while the check looks at it, after all fresh links were taken."""

    meanwhile: Callable[[], None]

    def at_rest(self) -> bool:
        self.meanwhile()
        return super().at_rest()


def arguments(resending: Resending) -> dict[str, Any]:
    return {
        "me": "me",
        "endpoint": "ipc:///x",
        "incoming": LinkReceiver(1),
        "stalled": lambda link: None,
        "watch": resending.watch,
    }


def made() -> tuple[Loop, Resending, list[float]]:
    loop, turns = Loop(), list[float]()

    def turn() -> bool:
        turns.append(loop.now)
        return False

    its: Any = loop
    return loop, Resending(its, Counter(), turn, flushed=lambda link: None), turns


def test_nothing_wakes_while_no_frame_waits_for_its_acknowledgement() -> None:
    loop, resending, turns = made()
    a, b = Link(peer="a", **arguments(resending)), Link(peer="b", **arguments(resending))
    assert (loop.timers, loop.soon) == ([], [])
    for number in (1, 2):  # the second frame after a rest arms it again
        sending = threading.Thread(target=a.send, args=(Deregister("a"),))
        sending.start()
        sending.join()
        b.send(Deregister("b"))
        loop.turn()
        loop.turn()
        assert len(loop.timers) == 1
        a.acked(number)
        loop.turn()
        assert len(loop.timers) == 1  # b's frame waits
        b.acked(number)
        loop.turn()
        assert (loop.timers, loop.soon) == ([], [])
    assert len(turns) == 8
    a.send(Deregister("late"))
    resending.close()
    loop.turn()
    b.send(Deregister("late"))
    assert (loop.timers, loop.soon) == ([], [])


def test_a_frame_that_is_sent_while_a_check_finds_nothing_is_looked_after() -> None:
    loop, resending, _ = made()
    a, b = Interrupted(peer="a", **arguments(resending)), Link(peer="b", **arguments(resending))
    a.meanwhile = lambda: b.send(Deregister("b"))
    a.send(Deregister("a"))
    a.acked(1)
    loop.turn()
    assert b.undelivered == len(loop.timers) == 1
