"""An event loop of the stage's own, on its scheduler thread: user coroutines never run on the I/O thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from threading import Event
from typing import Any

import uvloop

from stage_runtime.engines import events
from stage_runtime.engines.base import Gate, Inbox, Outbox, Work

log = logging.getLogger(__name__)


class LoopEngine:
    """Base of engines whose functions are coroutines: at most ``concurrency`` at once, the rest waits in order."""

    takes_chunks = False
    takes_admin = False
    outbox: Outbox

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.ticks = 0
        self._running: dict[Work, asyncio.Task[None]] = {}
        self._waiting: deque[tuple[Work, Callable[[], Coroutine[Any, Any, None]]]] = deque()
        self._arrived: asyncio.Event

    def run(self, inbox: Inbox, outbox: Outbox, stop: Event) -> None:
        self.outbox = outbox
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main(inbox))

    def on_event(self, event: events.Incoming) -> None:
        """One event of the inbox, on the loop; `Abort` has been dealt with. Must not raise."""
        raise NotImplementedError

    def on_abort(self, work: Work) -> None:
        """A request was aborted; its task is being cancelled."""

    def launch(self, work: Work, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``make()`` for ``work`` as soon as there is a place."""
        if len(self._running) < self.concurrency:
            self._begin(work, make)
        else:
            self._waiting.append((work, make))

    async def wait(self, gate: Gate) -> None:
        await asyncio.wrap_future(gate)

    async def _main(self, inbox: Inbox) -> None:
        loop = asyncio.get_running_loop()
        self._arrived = arrived = asyncio.Event()
        signalled = False

        def pump() -> None:
            nonlocal signalled
            signalled = False
            arrived.set()

        def wake() -> None:
            nonlocal signalled
            if not signalled:  # one wake-up for any number of arrivals; a lost race costs a second one
                signalled = True
                with contextlib.suppress(RuntimeError):  # the loop has ended: nobody reads any more
                    loop.call_soon_threadsafe(pump)

        ticking = asyncio.create_task(self._tick())
        inbox.on_arrival(wake)
        while True:
            await arrived.wait()
            arrived.clear()
            while (event := inbox.get_nowait()) is not None:
                if isinstance(event, events.Abort):
                    self._abort(event.work)
                else:
                    self.on_event(event)
            if inbox.closed and not self._running and not self._waiting:
                ticking.cancel()
                return

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.ticks += 1

    def _begin(self, work: Work, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.get_running_loop().create_task(self._bounded(work, make))
        self._running[work] = task
        task.add_done_callback(lambda _: self._ended(work))

    async def _bounded(self, work: Work, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.outbox.began(work)
        try:
            await make()
        except asyncio.CancelledError as error:
            if not work.cancelled:  # the user's own code cancelled it
                self.outbox.fail(work, error)
        except BaseException as error:  # SystemExit too: one request's code must not take the loop away
            self.outbox.fail(work, error)

    def _ended(self, work: Work) -> None:
        self._running.pop(work, None)
        self._arrived.set()  # it may have been the last that a closed inbox waited for
        while self._waiting and len(self._running) < self.concurrency:
            waiting, make = self._waiting.popleft()
            if not waiting.cancelled:
                self._begin(waiting, make)

    def _abort(self, work: Work) -> None:
        self.on_abort(work)
        task = self._running.get(work)
        if task is not None:
            task.cancel()
