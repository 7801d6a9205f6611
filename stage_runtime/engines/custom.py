"""An author's own engine: an object with ``run(inbox, outbox, stop)``, speaking requests by their id."""

from __future__ import annotations

from threading import Event
from typing import Any, Protocol

from stage_runtime.engines import events
from stage_runtime.engines.base import Gate, Inbox, Outbox, Work


class Runs(Protocol):
    def run(self, inbox: Any, outbox: Any, stop: Event) -> None: ...


class EngineCrashed(Exception):
    """The author's loop ended or raised while the stage was to go on: nothing can be computed here any more."""


class CustomEngine:
    """Gives the author's object an inbox and an outbox that know requests by id."""

    ticks = 0
    takes_chunks = True
    takes_admin = True
    concurrency = 1  # loops; how many requests it takes is its own business

    def __init__(self, engine: Runs) -> None:
        self._engine = engine

    def run(self, inbox: Inbox, outbox: Outbox, stop: Event) -> None:
        named = NamedInbox(inbox, outbox)
        self._engine.run(named, NamedOutbox(named, outbox), stop)
        if not stop.is_set() and not inbox.closed:
            raise EngineCrashed("run() returned before it was told to stop")


class NamedInbox:
    """``get(timeout=None)`` and ``get_nowait()`` give the next event or None; iterating ends when the stage stops."""

    def __init__(self, inbox: Inbox, outbox: Outbox) -> None:
        self._inbox = inbox
        self._outbox = outbox
        #: What the engine has been told of, by id. An id's next attempt replaces it when its first event is taken,
        #: so what the engine says before that still belongs to the old attempt and goes nowhere.
        self.known: dict[str, Work] = {}

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
        match event:
            case events.Start():
                self.known[event.request_id] = event.work
                self._outbox.began(event.work)
            case events.ChunkIn():
                self.known.setdefault(event.request_id, event.work)
                if self.known[event.request_id] is not event.work:
                    self.known[event.request_id] = event.work
                self._outbox.consumed(event.work, event.chunk.source, 1)
            case events.Abort():
                if self.known.get(event.request_id) is event.work:
                    del self.known[event.request_id]
        return event


class NamedOutbox:
    """``put(Emit | Done | Failed)``. What is said of a request that is over, or never was, goes nowhere.

    ``put`` of an `Emit` may give a gate, a ``concurrent.futures.Future``: that request's consumer lags a whole window
    behind, and the engine does well to compute nothing more for it until the gate is done. What cannot be sent fails
    its request, never the engine's loop.
    """

    def __init__(self, inbox: NamedInbox, outbox: Outbox) -> None:
        self._known = inbox.known
        self._outbox = outbox

    def put(self, said: events.Outgoing) -> Gate | None:
        work = self._known.get(said.request_id)
        if work is None:
            return None
        match said:
            case events.Emit():
                return self._emit(work, said)
            case events.Done():
                self._known.pop(said.request_id, None)
                self._outbox.done(work, said.data)
            case events.Failed():
                self._known.pop(said.request_id, None)
                error = said.error if isinstance(said.error, BaseException) else RuntimeError(said.error)
                self._outbox.fail(work, error)
        return None

    def _emit(self, work: Work, said: events.Emit) -> Gate | None:
        try:
            return self._outbox.emit(work, said.chunk)
        except Exception as error:
            self._known.pop(said.request_id, None)
            self._outbox.fail(work, error)
            return None
