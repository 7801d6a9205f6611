"""The operator's process: what is started, in which order, and how it ends.

Here: wiring. Not here: any of the parts. Called by `cli`. A standby keeps its store warm, so that taking over costs
no more than the lease. Whatever ends unexpectedly ends the process: the kubelet starts a clean one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections.abc import Mapping
from typing import Any, Final, cast

import kopf

from omnipipeline_operator import errors
from omnipipeline_operator.cluster.client import Client, WriteLimiter
from omnipipeline_operator.cluster.lease import Lease
from omnipipeline_operator.cluster.status_client import StatusClient
from omnipipeline_operator.cluster.store import Store
from omnipipeline_operator.controller.reconciling import Reconciler
from omnipipeline_operator.controller.work_queue import WorkQueue
from omnipipeline_operator.handlers import metrics, probes
from omnipipeline_operator.handlers.metrics import Metrics
from omnipipeline_operator.handlers.watching import Watcher
from omnipipeline_operator.settings import Settings

log = logging.getLogger(__name__)

STUCK_S: Final = 120.0  # a pipeline that is due and not looked at for so long
RELIST_RETRY_S: Final = 2.0


class Stopped(errors.OperatorError):
    """The process was told to end; this ends its other parts."""


class Operator:
    """One operator process."""

    def __init__(self, settings: Settings, client: Client, status_client: StatusClient, served: Metrics) -> None:
        self._settings = settings
        self._client = client
        self._store = Store()
        self._queue = WorkQueue()
        self._watcher = Watcher(self._store, self._queue)
        self._lease = Lease(client, settings.lease)
        self._metrics = served
        self._reconciler = Reconciler(client, self._store, status_client, settings, clock=time.time)
        self._listed_at: float | None = None  #: Monotonic time of the last complete list…
        self._listed_from = -math.inf  #: …and when it began: nothing that was so then is unknown.
        self._relist_now = asyncio.Event()
        self._leads = False
        self._serve_metrics()

    async def run(self) -> None:
        """Until SIGTERM.

        Raises: an exception group with what ended one of the parts: LeaseLost, a fault.
        """
        live, ready = self._why_not_live, self._why_not_ready
        async with probes.serving(self._settings.probe_port, live=live, ready=ready, registry=self._metrics.registry):
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._watch())
                    group.create_task(self._relist_forever())
                    group.create_task(self._lead(group))
            except* Stopped:
                log.info("told to stop")
            finally:
                self._leads = False
                await self._lease.release()

    async def _watch(self) -> None:
        """kopf's operator, once everything could be listed. It takes SIGTERM and SIGINT, and returns on them alone.

        It asks once which kinds there are, and an API server that has just begun refuses some of the answers: it would
        never watch those.
        """
        stop = asyncio.Event()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
        while self._listed_at is None and not stop.is_set():
            await asyncio.sleep(0.05)
        if stop.is_set():
            raise Stopped("told to stop")
        await kopf.operator(
            registry=self._watcher.registry(),
            standalone=True,
            # Of peering, which is off. Unset, kopf asks for its user's name, and a uid of OpenShift's choice has none.
            identity=cast(Any, self._settings.lease.identity),
            clusterwide=not self._settings.namespaces,
            namespaces=self._settings.namespaces,
            stop_flag=stop,
        )
        raise Stopped("told to stop")

    async def _relist_forever(self) -> None:
        while True:
            wait, began = self._settings.relist_s, time.monotonic()
            try:
                spread_s = self._settings.relist_s / 5 if self._leads else 0.0  # at once by one who takes over
                await self._watcher.relist(self._client, self._settings.namespaces, spread_s=spread_s)
                self._listed_at, self._listed_from = time.monotonic(), began
                self._metrics.relists.labels("success").inc()
            except errors.ClusterError as error:
                log.warning("list: %s", error)
                self._metrics.relists.labels("error").inc()
                wait = min(wait, RELIST_RETRY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._relist_now.wait()
            self._relist_now.clear()

    async def _lead(self, group: asyncio.TaskGroup) -> None:
        """Write, once everything is known and nobody else writes."""
        known_from = -math.inf
        if self._settings.lease.enabled:
            await self._lease.acquire()
            group.create_task(self._lease.keep())
            # A standby's watches may have broken off unseen: it would carry out a spec of yesterday. A list that began
            # while the last holder had the lease to lose is new enough.
            known_from = time.monotonic() - self._settings.lease.duration_s
            if self._listed_from < known_from:
                self._relist_now.set()
        while self._listed_at is None or self._listed_from < known_from:
            await asyncio.sleep(0.05)
        self._leads = True
        log.info("managing %d pipelines", sum(1 for _ in self._store.pipelines()))
        for _ in range(self._settings.workers):
            group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            key = await self._queue.take()
            with self._metrics.reconcile_time.time():
                await self._reconcile(key)

    async def _reconcile(self, key: tuple[str, str]) -> None:
        """The outermost boundary: whatever a pipeline does to us, the others are looked after."""
        name, changes = "/".join(key), self._store.changes(key)
        try:
            again_s = await self._reconciler.reconcile(key)
        except errors.ClusterError as error:
            wait = self._queue.failed(key, least_s=error.retry_after_s)
            self._metrics.reconcile_errors.labels(type(error).__name__).inc()
            log.warning("%s: %s; again in %.1f s", name, error, wait)
        except Exception:
            wait = self._queue.failed(key, least_s=1.0)
            self._metrics.reconcile_errors.labels("Unexpected").inc()
            log.exception("%s: a fault of the operator's; again in %.1f s", name, wait)
        else:
            # What it has written, and any edit that came in with an answer, is seen by one more look: no watch will
            # tell of it, for it is known already.
            self._queue.done(key, again_s=again_s, changed=self._store.changes(key) != changes)

    # --- health -------------------------------------------------------------------------------------------------

    def _why_not_ready(self) -> str | None:
        return None if self._listed_at is not None else "nothing has been listed yet"

    def _why_not_live(self) -> str | None:
        patience = 2 * self._settings.relist_s + STUCK_S
        if self._listed_at is not None and time.monotonic() - self._listed_at > patience:
            return f"no complete list for {patience:g} s"
        if self._leads and self._queue.oldest_wait_s() > STUCK_S:
            return f"a pipeline has been waiting for {STUCK_S:g} s"
        return None

    def _serve_metrics(self) -> None:
        read = self._metrics.read
        read(metrics.LEADER, lambda: float(self._leads))
        read(metrics.WORKQUEUE_DEPTH, lambda: float(len(self._queue)))
        read(metrics.WORKQUEUE_OLDEST, self._queue.oldest_wait_s)
        read(metrics.STORE_OBJECTS, lambda: float(len(self._store)))
        read(metrics.PIPELINES, lambda: float(sum(1 for _ in self._store.pipelines())))
        read(metrics.WATCH_EVENTS, lambda: float(self._watcher.events))
        self._metrics.read_status(self._pipelines)

    def _pipelines(self) -> list[Mapping[str, Any]]:
        found = map(self._store.pipeline, self._store.pipelines()) if self._leads else ()
        return [each for each in found if each is not None]


async def run(settings: Settings, writes: WriteLimiter) -> None:
    """Run one operator until SIGTERM. ``writes``: what every write passes."""
    async with contextlib.AsyncExitStack() as stack:
        served = Metrics()
        client = await stack.enter_async_context(await Client.connect(writes, served.count_request))
        status_client = await stack.enter_async_context(StatusClient())
        await Operator(settings, client, status_client, served).run()
