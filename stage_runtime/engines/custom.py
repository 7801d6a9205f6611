"""An author's own engine: an object with ``run(inbox, outbox, stop)``, which knows requests by an id."""

from __future__ import annotations

from collections import OrderedDict
from threading import Event
from typing import Any, Final, Protocol, TypeVar

import msgspec

from stage_runtime.engines import events
from stage_runtime.engines.base import Gate, Inbox, Outbox, Work

ABORTED_KEPT: Final = 4096  # ids of aborted requests that no other request gets: the engine may still be at them

AnyEvent = TypeVar(
    "AnyEvent",
    bound=events.Start | events.ChunkIn | events.StreamDone | events.StreamFailed | events.NoPayload | events.Abort,
)


class HasRun(Protocol):
    def run(self, inbox: Any, outbox: Any, stop: Event) -> None: ...


class EngineCrashed(Exception):
    """The author's loop ended or raised while the stage was to go on: nothing can be computed here any more."""


class CustomEngine:
    """Gives the author's object an inbox and an outbox that know requests by id."""

    ticks = 0
    takes_chunks = True
    takes_admin = True
    concurrency = 1  # loops; how many requests it takes is its own business
    places = 0

    def __init__(self, engine: HasRun) -> None:
        self._engine = engine

    def run(self, inbox: Inbox, outbox: Outbox, stop: Event) -> None:
        named = NamedInbox(inbox, outbox)
        self._engine.run(named, NamedOutbox(named, outbox), stop)
        if not stop.is_set() and not inbox.closed:
            raise EngineCrashed("run() returned before it was asked to stop")


class RequestIds:
    """The ids by which an engine knows its requests: each names one request as long as the engine may speak of it.

    Clients choose request ids, and two coordinators, or a client that does not wait for the end of an aborted request,
    may use one twice. The first request goes by its own id, and others of that id by ``id~2``, ``id~3``, ….
    """

    def __init__(self) -> None:
        self._works: dict[str, Work] = {}  #: id -> the request that the engine has received and not ended.
        self._ids: dict[Work, str] = {}  #: The same, the other way round.
        self._aborted: OrderedDict[str, None] = OrderedDict()  #: Oldest first. Disjoint from ``_works``.

    def of(self, work: Work) -> str:
        """The id of a request, chosen when the engine first receives it."""
        known = self._ids.get(work)
        if known is not None:
            return known
        chosen, count = work.request_id, 1
        while chosen in self._works or chosen in self._aborted:
            count += 1
            chosen = f"{work.request_id}~{count}"
        self._works[chosen] = work
        self._ids[work] = chosen
        return chosen

    def find(self, chosen: str) -> Work | None:
        return self._works.get(chosen)

    def end(self, chosen: str) -> None:
        """The engine has ended it: the id may be used again."""
        work = self._works.pop(chosen, None)
        if work is not None:
            del self._ids[work]

    def abort(self, work: Work) -> None:
        """It is over. Output of the engine for that id before it notices must reach no other request."""
        chosen = self._ids.get(work)
        if chosen is not None:
            self.end(chosen)
            self._aborted[chosen] = None
            if len(self._aborted) > ABORTED_KEPT:
                self._aborted.popitem(last=False)


class NamedInbox:
    """``get(timeout=None)`` and ``get_nowait()`` give the next event or None; iterating ends when the stage stops."""

    def __init__(self, inbox: Inbox, outbox: Outbox) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self.abort = inbox.abort
        self.ids = RequestIds()

    def get(self, timeout: float | None = None) -> events.Incoming | None:
        return self._note(self._inbox.get(timeout))

    def get_nowait(self) -> events.Incoming | None:
        return self._note(self._inbox.get_nowait())

    def __iter__(self) -> NamedInbox:
        return self

    def __next__(self) -> events.Incoming:
        event = self.get()
        if event is None:
            raise StopIteration
        return event

    def _note(self, event: events.Incoming | None) -> events.Incoming | None:
        if event is None or isinstance(event, events.Admin | events.Stalled):
            return event
        named = self._named(event)
        match event:
            case events.Start():
                self._outbox.began(event.work)
            case events.ChunkIn():
                self._outbox.consumed(event.work, event.chunk.source, 1)
            case events.Abort():
                self.ids.abort(event.work)
        return named

    def _named(self, event: AnyEvent) -> AnyEvent:
        """The event with the id that the engine knows the request by."""
        chosen = self.ids.of(event.work)
        return event if chosen == event.request_id else msgspec.structs.replace(event, request_id=chosen)


class NamedOutbox:
    """``put(Emit | Done | Failed)``. Output for a request that is over, or unknown, is discarded.

    ``put`` of an `Emit` may give a gate, a ``concurrent.futures.Future``: that request's consumer lags a whole window
    behind, and the engine does well to compute nothing more for it until the gate is done. A result that cannot be sent
    fails its request, never the engine's loop, which gets an `Abort` of it.
    """

    def __init__(self, inbox: NamedInbox, outbox: Outbox) -> None:
        self._ids = inbox.ids
        self._abort = inbox.abort
        self._outbox = outbox

    def put(self, output: events.Outgoing) -> Gate | None:
        """Raises: TypeError: something else, which names no request that could fail for it."""
        name = getattr(output, "request_id", None)
        work = self._ids.find(name) if isinstance(name, str) else None
        if not isinstance(output, events.Outgoing):
            error = TypeError(f"outbox.put takes Emit, Done or Failed, not {type(output).__name__}")
            if work is None:
                raise error
            self._fail(work, error)
            return None
        if work is None:
            return None
        match output:
            case events.Emit():
                return self._emit(work, output)
            case events.Done():
                self._ids.end(output.request_id)
                self._outbox.done(work, output.data)
                self._outbox.settle()
            case events.Failed():
                self._ids.end(output.request_id)
                error = output.error if isinstance(output.error, BaseException) else RuntimeError(output.error)
                self._outbox.fail(work, error)
        return None

    def _emit(self, work: Work, output: events.Emit) -> Gate | None:
        if work.over:
            return None
        try:
            gate = self._outbox.emit(work, output.chunk)
            self._outbox.settle()
            return gate
        except BaseException as error:
            self._fail(work, error)
            return None

    def _fail(self, work: Work, error: BaseException) -> None:
        """The request fails, and the engine, which does not know it, gets an `Abort`."""
        self._outbox.fail(work, error)
        self._abort(work)
