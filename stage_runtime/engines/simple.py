"""`omni.Simple`: one function per request. Sync ones on worker threads, async ones on the stage's event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, Callable
from threading import Event
from typing import Any

from stage_runtime.engines import events, running
from stage_runtime.engines.base import Inbox, Outbox
from stage_runtime.engines.threads import stage_threads
from stage_runtime.engines.threads.loops import LoopEngine
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
        self.concurrency = self.places = concurrency

    def run(self, inbox: Inbox, outbox: Outbox, stop: Event) -> None:
        others = [
            stage_threads.start(f"worker-{index}", self._work, inbox, outbox, crashed=outbox.crashed)
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
                raise TypeError(
                    "returned a coroutine from a sync function; declare it with async def, or mark what it calls by "
                    "functools.wraps"
                )
            else:
                running.finish(work, outbox, returned)
        except BaseException as error:  # SystemExit too: one request's code must not take a worker away
            outbox.fail(work, error)


class AsyncEngine(LoopEngine):
    """Coroutines and async generators on one event loop, ``concurrency`` requests at a time."""

    takes_chunks = False

    def __init__(self, fn: Callable[[StagePayload], Any], concurrency: int, *, decorated: bool = False) -> None:
        """decorated: as of `decorates_async`. The result is known only then, and its own part may block."""
        super().__init__(concurrency)
        self._fn = fn
        self._decorated = decorated

    def on_event(self, event: events.Incoming) -> None:
        match event:
            case events.Start():
                self.launch(event.work, lambda: self._one(event))
            case events.ChunkIn():
                self.outbox.fail(event.work, TakesNoChunks(event.chunk.source))
            case events.StreamDone():
                self.outbox.fail(event.work, TakesNoChunks(event.source))

    async def _one(self, event: events.Start) -> None:
        returned = await self._called_apart(event.payload) if self._decorated else self._fn(event.payload)
        if isinstance(returned, AsyncIterable):
            await running.drain_async(event.work, self.outbox, aiter(returned), self.wait)
        else:
            running.finish(event.work, self.outbox, await returned if inspect.isawaitable(returned) else returned)

    async def _called_apart(self, payload: StagePayload) -> Any:
        """Calls a decorated coroutine function in a thread, because the decorator may run the coroutine itself."""

        def call() -> tuple[Any, BaseException | None]:
            try:
                return self._fn(payload), None
            except BaseException as error:  # a future takes no StopIteration
                return None, error

        returned, error = await asyncio.to_thread(call)
        if error is not None:
            raise error
        return returned


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling ``fn`` gives a coroutine or an async generator; looks through objects with ``__call__``."""
    return any(inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one) for one in _behind(fn))


def is_coroutine_function(fn: Callable[..., Any]) -> bool:
    """Whether calling ``fn`` gives a coroutine."""
    return any(inspect.iscoroutinefunction(one) for one in _behind(fn))


def is_generator(fn: Callable[..., Any]) -> bool:
    """Whether calling ``fn`` gives a sync generator."""
    return any(inspect.isgeneratorfunction(one) for one in _behind(fn))


def decorates_async(fn: Callable[..., Any]) -> bool:
    """Whether ``fn`` is a plain function around an async one, which `functools.wraps` shows: a decorator that knows
    nothing of coroutines (``@torch.inference_mode()``) passes one on, another one may run it and give its result.
    """
    return not is_async(fn) and any(map(is_async, map(_innermost, _behind(fn))))


def _behind(fn: Callable[..., Any]) -> list[Any]:
    """The function behind ``fn``: itself, what is behind `functools.partial`, an object's ``__call__``."""
    return [one for one in (fn, getattr(fn, "func", None), getattr(fn, "__call__", None)) if one is not None]  # noqa: B004


def _innermost(fn: Any) -> Any:
    try:
        return inspect.unwrap(fn)
    except ValueError:  # it wraps itself
        return fn
