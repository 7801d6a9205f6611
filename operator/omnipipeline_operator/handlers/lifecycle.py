"""The operator's process: what is started, in which order, and how it ends.

Here: wiring. Not here: any of the parts. Called by `cli`. A standby keeps its store up to date, so that
it takes over as soon as it has the Lease. If any part ends unexpectedly, the process ends and the kubelet restarts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, cast

import kopf

from omnipipeline_operator import errors
from omnipipeline_operator.cluster.client import Client, WriteLimiter
from omnipipeline_operator.cluster.lease import Lease
from omnipipeline_operator.cluster.status_client import StatusClient
from omnipipeline_operator.cluster.store import Store
from omnipipeline_operator.controller.reconciling import Reconciler
from omnipipeline_operator.controller.work_queue import WorkQueue
from omnipipeline_operator.controller.worker import Worker
from omnipipeline_operator.conversion import serving
from omnipipeline_operator.conversion.serving import Server
from omnipipeline_operator.handlers import free_memory, metrics, probes, watching
from omnipipeline_operator.handlers.metrics import OperatorMetrics
from omnipipeline_operator.handlers.watching import Watcher
from omnipipeline_operator.kinds import CRD
from omnipipeline_operator.settings import ConversionSettings, Settings
from omnipipeline_spec.conversion import versions as released
from omnipipeline_spec.conversion.versions import Versions

if TYPE_CHECKING:
    from omnipipeline_operator.conversion.publishing import Publisher

log = logging.getLogger(__name__)

STUCK_S: Final = 120.0  # the liveness probe fails when a pipeline has been due for so long
RELIST_RETRY_S: Final = 2.0
KINDS_EVERY_S: Final = 30.0  # a kind that the cluster lacks is asked for: no watch reports that it has come


class StopRequested(errors.OperatorError):
    """A signal has asked the process to end; raised to end its other parts."""


class WatchesChanged(errors.OperatorError):
    """Other namespaces or kinds can be read than at the start: kopf's watches are chosen once, so the process ends, and
    the kubelet starts it again."""


class Operator:
    """One operator process."""

    def __init__(
        self,
        settings: Settings,
        client: Client,
        status_client: StatusClient,
        served: OperatorMetrics,
        versions: Versions = released.RELEASED,
    ) -> None:
        self._settings = settings
        self._client = client
        self._store = Store()
        self._queue = WorkQueue()
        self._watcher = Watcher(self._store, self._queue)
        self._lease = Lease(client, settings.lease)
        self._metrics = served
        self._webhook = Server(versions)
        self._reconciler = Reconciler(
            client,
            self._store,
            status_client,
            settings,
            clock=time.time,
            wake=self._queue.add,
            lacking=lambda: self._watcher.lacking,
        )
        self._listed_at: float | None = None  #: Monotonic time at which the last complete list ended…
        self._listed_from = -math.inf  #: …and at which it began: the store is not older than that.
        self._readable: tuple[str, ...] | None = None  #: Readable ones of the watched namespaces; None: not known yet.
        self._lacking: Mapping[str, errors.ClusterError] = {}  #: Optional kinds that were not there at the first list.
        self._relist_now = asyncio.Event()
        self._leads = False
        self._serve_metrics()

    async def run(self) -> None:
        """Run until SIGTERM.

        Raises: an exception group with what ended a part: LeaseLost, WatchesChanged, a fault.
        """
        live, ready = self._why_not_live, self._why_not_ready
        async with contextlib.AsyncExitStack() as stack:
            registry = self._metrics.registry
            await stack.enter_async_context(
                probes.serving(self._settings.probe_port, live=live, ready=ready, registry=registry)
            )
            if self._settings.conversion is not None:
                port = self._settings.conversion.port
                await stack.enter_async_context(
                    self._webhook.listening(port, leave=lambda: asyncio.sleep(serving.LEAVING_S))
                )
            try:
                async with asyncio.TaskGroup() as group:
                    if self._settings.conversion is not None:
                        group.create_task(self._publisher(self._settings.conversion).keep())
                    group.create_task(self._watch())
                    group.create_task(self._relist_forever())
                    group.create_task(self._look_for_kinds())
                    group.create_task(self._lead(group))
            except* StopRequested:
                log.info("stopped by a signal")
            finally:
                self._leads = False
                await self._lease.release()

    def _publisher(self, settings: ConversionSettings) -> Publisher:
        from omnipipeline_operator.conversion.publishing import Publisher  # 9 MiB of cryptography, mostly not needed

        return Publisher(self._client, self._webhook, settings, clock=lambda: datetime.now(UTC))

    async def _watch(self) -> None:
        """Run kopf's operator after the first complete list, until SIGTERM or SIGINT.

        kopf discovers the kinds once. An API server that is just starting refuses some of the answers, and kopf would
        never watch those kinds. It ends when a watch is refused, as where the CRD has been deleted.

        Raises: StopRequested; WatchesChanged.
        """
        stop = asyncio.Event()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
        while self._listed_at is None and not stop.is_set():
            await asyncio.sleep(0.05)
        if stop.is_set():
            raise StopRequested("stopped by a signal")
        try:
            await kopf.operator(
                registry=self._watcher.registry(),
                memories=watching.NoMemories(),
                standalone=True,
                # The identity is for peering, which is off. kopf looks up the user's name without it, which an
                # arbitrary uid does not have.
                identity=cast(Any, self._settings.lease.identity),
                clusterwide=not self._settings.namespaces,
                namespaces=self._readable or (),
                stop_flag=stop,
            )
        except Exception as error:
            if not watching.is_refusal(error):
                raise
            if not await self._watcher.is_defined(self._client, self._settings.namespaces):
                gone = f"the API server no longer serves pipelines: the CRD {CRD} has been deleted"
                raise WatchesChanged(gone) from error
            raise WatchesChanged(f"a watch has ended: {str(error).strip()}") from error
        raise StopRequested("stopped by a signal")

    async def _relist_forever(self) -> None:
        said = ""
        while True:
            wait, began = self._settings.relist_s, time.monotonic()
            try:
                spread_s = (
                    self._settings.relist_s / 5 if self._leads else 0.0
                )  # a process that is taking over reconciles at once
                unreadable = await self._watcher.relist(self._client, self._settings.namespaces, spread_s=spread_s)
                self._compare_readable(unreadable)
                if self._listed_at is None:
                    free_memory.keep_out_of_collections()
                free_memory.give_back()
                self._listed_at, self._listed_from = time.monotonic(), began
                self._metrics.relists.labels("success").inc()
                said = ""
            except errors.ClusterError as error:
                if str(error) != said:  # not every two seconds the same
                    log.warning("list: %s", error)
                said = str(error)
                self._metrics.relists.labels("error").inc()
                wait = min(wait, RELIST_RETRY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._relist_now.wait()
            self._relist_now.clear()

    def _compare_readable(self, unreadable: Mapping[str, errors.ClusterError]) -> None:
        """Log what cannot be read, once. Raises: WatchesChanged: other namespaces or kinds can be read than then."""
        readable = tuple(each for each in self._settings.namespaces if each not in unreadable)
        if self._readable is None:
            for namespace, error in unreadable.items():
                log.warning("namespace %s is not watched: %s", namespace, error)
            for kind, error in self._watcher.lacking.items():
                log.info("%s is not watched: %s", kind, error)
            self._readable, self._lacking = readable, self._watcher.lacking
        elif self._watcher.lacking.keys() != self._lacking.keys():
            changed = sorted(self._watcher.lacking.keys() ^ self._lacking.keys())
            raise WatchesChanged(f"the kinds that can be read have changed: {', '.join(changed)}")
        elif readable != self._readable:
            changed = sorted(set(readable) ^ set(self._readable))
            now = [
                f"{each} ({unreadable[each]})" if each in unreadable else f"{each} (readable now)" for each in changed
            ]
            raise WatchesChanged(f"the readable namespaces have changed: {', '.join(now)}")

    async def _look_for_kinds(self) -> None:
        """List again as soon as a kind that was lacking can be read."""
        while True:
            await asyncio.sleep(min(KINDS_EVERY_S, self._settings.relist_s))
            if self._lacking and await self._watcher.has_appeared(self._client, self._settings.namespaces):
                self._relist_now.set()

    async def _lead(self, group: asyncio.TaskGroup) -> None:
        """Start the workers once this process holds the Lease and has a complete list."""
        known_from = -math.inf
        if self._settings.lease.enabled:
            await self._lease.acquire()
            group.create_task(self._lease.keep())
            # A standby's watch may have broken unnoticed, and its store may be old. A list that began within the last
            # lease duration is recent enough.
            known_from = time.monotonic() - self._settings.lease.duration_s
            if self._listed_from < known_from:
                self._relist_now.set()
        while self._listed_at is None or self._listed_from < known_from:
            await asyncio.sleep(0.05)
        self._leads = True
        log.info("managing %d pipelines", sum(1 for _ in self._store.pipelines()))
        worker = Worker(
            self._queue,
            self._store,
            reconcile=self._reconciler.reconcile,
            timed=self._metrics.reconcile_time.time,
            failed=lambda kind: self._metrics.reconcile_errors.labels(kind).inc(),
        )
        for _ in range(self._settings.workers):
            group.create_task(worker.run())

    # --- health -------------------------------------------------------------------------------------------------

    def _why_not_ready(self) -> str | None:
        if self._settings.conversion is not None:
            # The first list may need a conversion, and the Service leads to ready replicas alone.
            return None if self._webhook.serves else "no certificate of the conversion webhook yet"
        return None if self._listed_at is not None else "no complete list yet"

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
        read(metrics.WORKQUEUE_LONGEST_FAILING, self._queue.longest_failing_s)
        read(metrics.STORE_OBJECTS, lambda: float(len(self._store)))
        read(metrics.PIPELINES, lambda: float(sum(1 for _ in self._store.pipelines())))
        read(metrics.WATCH_EVENTS, lambda: float(self._watcher.events))
        self._metrics.read_status(self._pipelines)

    def _pipelines(self) -> list[Mapping[str, Any]]:
        found = map(self._store.pipeline, self._store.pipelines()) if self._leads else ()
        return [each for each in found if each is not None]


async def run(settings: Settings, writes: WriteLimiter, versions: Versions = released.RELEASED) -> None:
    """Run one operator until SIGTERM. ``writes``: limits the rate of all writes. ``versions``: what it converts."""
    async with contextlib.AsyncExitStack() as stack:
        served = OperatorMetrics()
        client = await stack.enter_async_context(await Client.connect(writes, served.count_request))
        status_client = await stack.enter_async_context(StatusClient())
        await Operator(settings, client, status_client, served, versions).run()
