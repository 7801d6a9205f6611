"""`omni.Simple`: one function per request. Sync ones on worker threads, async ones on the stage's event loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from threading import Event
from typing import Any

from stage_runtime.engines import events, running, threads
from stage_runtime.engines.base import Inbox, Outbox
from stage_runtime.engines.loops import LoopEngine
from stage_runtime.wire.values import StagePayload


class TakesNoChunks(TypeError):
    """A stream ends at a stage whose function cannot take chunks."""

    def __init__(self, source: str) -> None:
        super().__init__(f"{source!r} streams to this stage, whose function takes no chunks: return omni.Streaming(fn)")


class SyncEngine:
    """``concurrency`` threads, each with one request at a time."""

    ticks = 0
    takes_chunks = False
    takes_admin = False

    def __init__(self, fn: Callable[[StagePayload], Any], concurrency: int) -> None:
        self._fn = fn
        self.concurrency = concurrency

    def run(self, inbox: Inbox, outbox: Outbox, stop: Event) -> None:
        others = [
            threads.start(f"worker-{index}", self._work, inbox, outbox, crashed=outbox.crashed)
            for index in range(1, self.concurrency)
        ]
        self._work(inbox, outbox)
        for thread in others:
            thread.join()

    def _work(self, inbox: Inbox, outbox: Outbox) -> None:
        while (event := inbox.get()) is not None:
            if type(event) is events.Start:
                self._one(event, outbox)
            elif isinstance(event, events.ChunkIn | events.StreamDone):
                source = event.chunk.source if isinstance(event, events.ChunkIn) else event.source
                outbox.fail(event.work, TakesNoChunks(source))
            outbox.letting_go()
            del event  # or the payload, and its sender's slot, would be held until the next request comes
            outbox.settle()

    def _one(self, event: events.Start, outbox: Outbox) -> None:
        work = event.work
        try:
            outbox.began(work)
            returned = self._fn(event.payload)
            if not running.may_be_lazy(returned):
                outbox.done(work, running.returned_data(returned))
            elif inspect.isgenerator(returned):
                running.drain(work, outbox, returned)
            elif inspect.isawaitable(returned) or inspect.isasyncgen(returned):
                running.never_awaited(returned)
                raise TypeError("returned a coroutine from a sync function; declare it with async def")
            else:
                running.finish(work, outbox, returned)
        except BaseException as error:  # SystemExit too: one request's code must not take a worker away
            outbox.fail(work, error)


class AsyncEngine(LoopEngine):
    """Coroutines and async generators on one event loop, ``concurrency`` requests at a time."""

    takes_chunks = False

    def __init__(self, fn: Callable[[StagePayload], Any], concurrency: int) -> None:
        super().__init__(concurrency)
        self._fn = fn

    def on_event(self, event: events.Incoming) -> None:
        match event:
            case events.Start():
                self.launch(event.work, lambda: self._one(event))
            case events.ChunkIn():
                self.outbox.fail(event.work, TakesNoChunks(event.chunk.source))
            case events.StreamDone():
                self.outbox.fail(event.work, TakesNoChunks(event.source))

    async def _one(self, event: events.Start) -> None:
        returned = self._fn(event.payload)
        if inspect.isasyncgen(returned):
            await running.drain_async(event.work, self.outbox, returned, self.wait)
        else:
            running.finish(event.work, self.outbox, await returned)


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling ``fn`` gives a coroutine or an async generator; looks through objects with ``__call__``."""
    targets = (fn, getattr(fn, "func", None), getattr(fn, "__call__", None))  # noqa: B004
    return any(inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one) for one in targets)
