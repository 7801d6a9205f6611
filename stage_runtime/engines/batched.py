"""`omni.Batched`: one function for several requests at once; one batch at a time."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Mapping
from threading import Event
from typing import Any

from stage_runtime.engines import events, running
from stage_runtime.engines.base import Inbox, Outbox
from stage_runtime.engines.simple import TakesNoChunks
from stage_runtime.metrics import catalog
from stage_runtime.wire.values import StagePayload

logger = logging.getLogger(__name__)


class BatchedEngine:
    """Takes what has come within ``max_wait_s`` of the first, up to ``max_batch``."""

    ticks = 0
    takes_chunks = False
    takes_admin = False
    concurrency = 1  # batches

    def __init__(
        self,
        fn: Callable[[list[StagePayload]], list[Any]],
        max_batch: int,
        max_wait_s: float,
        gauges: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        self._fn = fn
        self._gauges = gauges
        self._max_batch = self.places = max_batch
        self._max_wait_s = max_wait_s

    def run(self, inbox: Inbox, outbox: Outbox, stop: Event) -> None:
        while True:
            batch = self._gather(inbox, outbox)
            if batch:
                self._one(batch, outbox)
                self._report(inbox)
                outbox.letting_go()
                del batch  # or its payloads would be held until the next batch is gathered
                outbox.settle()
            elif inbox.closed:
                return

    def _gather(self, inbox: Inbox, outbox: Outbox) -> list[events.Start]:
        batch: list[events.Start] = []
        deadline: float | None = None
        while len(batch) < self._max_batch:
            event = inbox.get(None if deadline is None else max(0.0, deadline - time.monotonic()))
            match event:
                case None:
                    break
                case events.Start():
                    batch.append(event)
                    deadline = deadline or time.monotonic() + self._max_wait_s
                case events.ChunkIn():
                    outbox.fail(event.work, TakesNoChunks(event.chunk.source))
                case events.NoPayload():
                    outbox.fail(event.work, running.no_payload())
        return batch

    def _report(self, inbox: Inbox) -> None:
        """The author's numbers for `/metrics`. Ones that cannot be read are logged once, and asked for no more."""
        if self._gauges is None:
            return
        try:
            given = dict(self._gauges())
            inbox.gauges = {name: float(given[name]) for name in catalog.CACHE if name in given}
        except Exception:
            logger.exception("expected numbers by name from omni.Batched.gauges; it is asked no more")
            self._gauges = None

    def _one(self, batch: list[events.Start], outbox: Outbox) -> None:
        batch = [event for event in batch if not event.work.cancelled]
        if not batch:
            return
        try:
            for event in batch:
                outbox.began(event.work)
            returned = self._fn([event.payload for event in batch])
            if inspect.isawaitable(returned):
                running.never_awaited(returned)
                raise TypeError("returned a coroutine; the function of a batch is a plain one, without async")
            # Our own copy: a subclass may report any length, and another thread may still write into the list.
            results = list(returned) if isinstance(returned, list) else None
            if results is None or len(results) != len(batch):
                got = type(returned).__name__ if results is None else len(results)
                count = len(batch)
                raise TypeError(
                    f"returned {got} results for a batch of {count}; expected a list with one per payload, in order"
                )
        except BaseException as error:
            for event in batch:
                outbox.fail(event.work, error)
            return
        for event, result in zip(batch, results, strict=True):
            try:
                if isinstance(result, BaseException):
                    outbox.fail(event.work, result)
                else:
                    running.finish(event.work, outbox, result)
            except BaseException as error:
                outbox.fail(event.work, error)
