"""A worker: takes one pipeline after the other from the queue and reconciles it.

Here: what a reconcile's outcome means for the queue. Not here: the reconcile (`reconciling`), how many workers run.
Called by `handlers.lifecycle`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

from omnipipeline_operator import errors
from omnipipeline_operator.cluster.store import PipelineKey, Store
from omnipipeline_operator.controller.work_queue import WorkQueue

log = logging.getLogger(__name__)


class Worker:
    """Reconciles pipelines, one at a time. A failure does not affect other pipelines.

    reconcile: returns the seconds until the next one is due, or None.
    timed:     a context around each reconcile, which measures it.
    failed:    called with the name of an error's class, ``Unexpected`` for a fault.
    """

    def __init__(
        self,
        queue: WorkQueue,
        store: Store,
        *,
        reconcile: Callable[[PipelineKey], Awaitable[float | None]],
        timed: Callable[[], AbstractContextManager[object]],
        failed: Callable[[str], None],
    ) -> None:
        self._queue, self._store = queue, store
        self._reconcile, self._timed, self._failed = reconcile, timed, failed

    async def run(self) -> None:
        """Work until it is cancelled."""
        while True:
            await self.turn()

    async def turn(self) -> None:
        """Wait for a pipeline that is due, and reconcile it."""
        key = await self._queue.take()
        name, changes, identity = "/".join(key), self._store.changes(key), self._store.spec_identity(key)
        try:
            try:
                with self._timed():
                    again_s = await self._reconcile(key)
            finally:
                # The answer to a write of ours may bring an edit. Its watch event has no newer version then, so it
                # queues nothing.
                if self._store.spec_identity(key) != identity:
                    self._queue.add(key, urgent=True)
        except errors.ClusterError as error:
            wait = self._queue.failed(key, least_s=error.retry_after_s)
            self._failed(type(error).__name__)
            log.warning("%s: %s; retry in %.1f s", name, error, wait)
        except Exception:
            wait = self._queue.failed(key, least_s=1.0)
            self._failed("Unexpected")
            log.exception("%s: unexpected error; retry in %.1f s", name, wait)
        else:
            # Our own writes cause no watch event with a newer version either: the count shows them.
            self._queue.done(key, again_s=again_s, changed=self._store.changes(key) != changes)
