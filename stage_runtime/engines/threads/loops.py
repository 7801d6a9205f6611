"""An event loop of the stage's own, on its scheduler thread: user coroutines never run on the I/O thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, Final

import uvloop

from stage_runtime.engines import events
from stage_runtime.engines.base import Gate, Inbox, Outbox, Work
from stage_runtime.engines.threads import blocking
from stage_runtime.engines.threads.blocking import TURN_S, LoopWatch
from stage_runtime.errors import describe
from stage_runtime.profiler.recording.recorder import active_stage, set_active_stage

log = logging.getLogger(__name__)

CANCEL_S: Final = 5.0  # a clean-up may await for a while; a coroutine that still runs then keeps its place


class LoopEngine:
    """Base of engines whose functions are coroutines: at most ``concurrency`` at once, the rest waits in order."""

    takes_chunks = False
    takes_admin = False
    outbox: Outbox
    #: A rank of a TP stage. All ranks begin what one begins, in the order of the events, and all end; else a collective
    #: would wait for ever. So nothing is cancelled, and what an aborted request gives is discarded.
    lockstep = False
    cancel_s = CANCEL_S  #: A coroutine that still runs so long after its cancellation is named in the log.

    def __init__(self, concurrency: int) -> None:
        self.concurrency = self.places = concurrency
        self.ticks = 0
        self._running: dict[Work, asyncio.Task[None]] = {}
        #: Begun when there is a place. Entries of aborted requests are taken out in other threads.
        self._waiting: OrderedDict[Work, Callable[[], Coroutine[Any, Any, None]]] = OrderedDict()
        self._cancelled: dict[Work, float] = {}  #: Running, and when they were cancelled; until they are named.
        self._aborted: set[Work] = set()  #: Works of an engine in lockstep: aborted at this engine, and not cancelled.
        self._arrived: asyncio.Event
        self._busy: asyncio.Event  #: A request runs.
        self._watch: LoopWatch

    def run(self, inbox: Inbox, outbox: Outbox, stop: Event) -> None:
        self.outbox = outbox
        self._watch = LoopWatch(threading.current_thread().name, busy=lambda: bool(self._running))
        with self._watch.watching(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self._bind_executor(runner.get_loop())
            self._run_on(runner.get_loop(), inbox, stop)

    def on_event(self, event: events.Incoming) -> None:
        """One event of the inbox, on the loop; `Abort` has been dealt with. Must not raise."""
        raise NotImplementedError

    def on_abort(self, work: Work) -> None:
        """A request was aborted. Its task is being cancelled; in lockstep, it goes on."""

    def on_forget(self, work: Work) -> None:
        """An aborted request has not begun: let go of what has come for it. Any thread may call this; `on_abort`
        follows.
        """

    def on_ended(self, work: Work) -> None:
        """A request's task has ended; another one may have begun in its place."""

    def launch(self, work: Work, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``make()`` for ``work`` as soon as there is a place."""
        if len(self._running) < self.concurrency:
            self._begin(work, make)
        else:
            self._waiting[work] = make

    async def wait(self, gate: Gate) -> None:
        with gate.waited():
            await asyncio.wrap_future(gate)

    def _bind_executor(self, loop: asyncio.AbstractEventLoop) -> None:
        """Functions that authors give to ``run_in_executor`` record events of this stage: asyncio copies no context
        there.
        """
        stage = active_stage()
        if stage is not None:
            executor = ThreadPoolExecutor(
                thread_name_prefix=f"{stage}-executor", initializer=set_active_stage, initargs=(stage,)
            )
            loop.set_default_executor(executor)

    def _run_on(self, loop: asyncio.AbstractEventLoop, inbox: Inbox, stop: Event) -> None:
        """Run the loop until the inbox is closed and empty, whatever authors' code does to it.

        A request's task has an error boundary; tasks that it starts (`asyncio.gather`) and callbacks have none.
        asyncio lets their SystemExit out of the loop; ``stop()`` ends it, and so does a cancelled main task. Each time
        it goes on.
        """
        main = loop.create_task(self._main(inbox, stop))
        while True:
            try:
                return loop.run_until_complete(main)
            except BaseException as error:
                if loop.is_closed() or (main.done() and not main.cancelled()):
                    raise
                log.error("a task or callback of a request would have ended the event loop: %s", describe(error))
            if main.cancelled():
                main = loop.create_task(self._main(inbox, stop))

    async def _main(self, inbox: Inbox, stop: Event) -> None:
        loop = asyncio.get_running_loop()
        self._arrived = arrived = asyncio.Event()
        self._busy = asyncio.Event()
        if self._running:  # author's code has ended the task before this one
            self._busy.set()
        signalled = False

        def pump() -> None:
            nonlocal signalled
            signalled = False
            arrived.set()

        def wake() -> None:
            nonlocal signalled
            if not signalled:  # one wake-up for any number of arrivals; a lost race costs a second one
                signalled = True
                with contextlib.suppress(RuntimeError):  # the loop has ended, and its inbox is not read any more
                    loop.call_soon_threadsafe(pump)

        ticking = asyncio.create_task(self._tick())
        inbox.on_abort(self._forget)
        inbox.on_arrival(wake)
        try:
            while not (inbox.closed and not self._running and not self._waiting):
                await arrived.wait()
                arrived.clear()
                while self._takes_next(stop) and (event := inbox.get_nowait()) is not None:
                    if isinstance(event, events.Abort):
                        self._abort(event.work)
                    else:
                        self.on_event(event)
                if self._aborted and stop.is_set():  # the other ranks end, too
                    for work in list(self._aborted):
                        self._cancel(work)
        finally:
            ticking.cancel()

    def _takes_next(self, stop: Event) -> bool:
        """Whether to take another event now. Ranks in lockstep leave it in the inbox while they compute: there an
        abort still drops it.
        """
        return not self.lockstep or self.takes_chunks or not self._running or stop.is_set()

    async def _tick(self) -> None:
        """Turn while requests run: an idle loop sleeps."""
        while True:
            await self._busy.wait()
            await asyncio.sleep(TURN_S)
            self.ticks += 1
            self._watch.turned()
            self._name_uncancelled()

    def _name_uncancelled(self) -> None:
        """Log coroutines that have swallowed their cancellation: each holds one of the stage's places."""
        now = time.monotonic()
        for work in [work for work, since in self._cancelled.items() if now - since > self.cancel_s]:
            del self._cancelled[work]
            log.warning(
                "stage %s: request %s was aborted %.0f s ago and its coroutine still runs, in %s: it has caught "
                "asyncio.CancelledError without raising it again, and holds one of %d places",
                threading.current_thread().name,
                work.request_id,
                self.cancel_s,
                blocking.suspended_at(self._running[work]) or "code that is not the author's",
                self.concurrency,
            )

    def _begin(self, work: Work, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.get_running_loop().create_task(self._bounded(work, make))
        self._running[work] = task
        self._busy.set()
        self._watch.begun()
        task.add_done_callback(lambda done: self._ended(work, done))

    async def _bounded(self, work: Work, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            self.outbox.began(work)
            await make()
            self.outbox.settle()
        except asyncio.CancelledError as error:
            if not work.cancelled:  # the user's own code cancelled it
                self.outbox.fail(work, error)
        except BaseException as error:  # SystemExit too: one request's code must not take the loop away
            self.outbox.fail(work, error)

    def _ended(self, work: Work, task: asyncio.Task[None]) -> None:
        self._running.pop(work, None)
        self._cancelled.pop(work, None)
        self._aborted.discard(work)
        if task.cancelled() and not work.cancelled:  # by another request's code, before its first step
            self.outbox.fail(work, asyncio.CancelledError())
        if not self._running:
            self._busy.clear()
        self._arrived.set()  # it may have been the last that a closed inbox waited for
        while len(self._running) < self.concurrency:
            try:
                waiting, make = self._waiting.popitem(last=False)
            except KeyError:
                break
            if not waiting.cancelled:
                self._begin(waiting, make)
        self.on_ended(work)

    def _forget(self, work: Work) -> None:
        """A request was aborted before it began: release what has arrived for it. Any thread may call this."""
        if work.cancelled and self._waiting.pop(work, None) is not None:
            self.on_forget(work)

    def _abort(self, work: Work) -> None:
        if self.lockstep:
            if work in self._running or work in self._waiting:
                self._aborted.add(work)
        else:
            self._cancel(work)
        self.on_abort(work)

    def _cancel(self, work: Work) -> None:
        self._aborted.discard(work)
        self._waiting.pop(work, None)
        task = self._running.get(work)
        if task is not None:
            task.cancel()
            self._cancelled[work] = time.monotonic()
