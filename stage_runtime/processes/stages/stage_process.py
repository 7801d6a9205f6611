"""Wiring of a stage process: sockets, relays, stages, and what happens to it. It is rank 0 of a TP stage.

Reactions to that have modules of its own: `incarnations`, `draining`, `watchdog`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from typing import Final

from stage_runtime import breakpoints
from stage_runtime.errors import ConfigurationError
from stage_runtime.kv_transfer.interface import KVTransport
from stage_runtime.processes import logs, loops, process_context, traces
from stage_runtime.processes.stages import incarnations
from stage_runtime.processes.stages.draining import StageDrain
from stage_runtime.processes.stages.follower import FollowerProcess
from stage_runtime.processes.stages.incarnations import Incarnations
from stage_runtime.processes.stages.rank import EXIT_DRAINED, THREADS_S, RankProcess
from stage_runtime.processes.stages.watchdog import Watchdog
from stage_runtime.processes.supervision import statuspipe
from stage_runtime.processes.tasks import Tasks
from stage_runtime.profiler.recording.recorder import recorder
from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.memory import pages
from stage_runtime.rules.flow import ticks
from stage_runtime.rules.graph import edges
from stage_runtime.settings import StageSettings
from stage_runtime.sockets.channels import Channels, LinkTimes
from stage_runtime.sockets.endpoints import addresses, limits
from stage_runtime.sockets.endpoints.doors import Doors
from stage_runtime.stage.control.registration import Registration
from stage_runtime.stage.host import Host
from stage_runtime.stage.inputs.mutation_check import MutationCheck
from stage_runtime.stage.ranks.tensor_parallel import Leader
from stage_runtime.telemetry.authors import AuthorSpans
from stage_runtime.wire.messages import Hello
from stage_runtime.wire.parts import Incarnation, Member

log = logging.getLogger(__name__)

IDLE_AFTER_S: Final = 60.0  # a link to a neighbour's instance without traffic is closed; opening it takes milliseconds


def run(settings: StageSettings) -> int:
    """Serve this process's stages until SIGTERM. Returns the exit code."""
    logs.configure(settings.log_format, name=settings.process, level=settings.log_level)
    limits.raise_limits()
    pages.limit_heaps()
    _meet_ranks(settings)
    return loops.run(_serve(FollowerProcess if settings.tp_rank > 0 else StageProcess, settings))


async def _serve(kind: type[FollowerProcess] | type[StageProcess], settings: StageSettings) -> int:
    return await kind(settings).serve()


def _meet_ranks(settings: StageSettings) -> None:
    """Set the variables that torch.distributed's ``env://`` reads, for factories of a TP stage."""
    if settings.rendezvous is None:
        return
    host, _, port = settings.rendezvous.removeprefix("tcp://").rpartition(":")
    os.environ.update(
        MASTER_ADDR=host,
        MASTER_PORT=port,
        RANK=str(settings.tp_rank),
        LOCAL_RANK=str(settings.tp_rank),
        WORLD_SIZE=str(settings.group.tp_size),
    )


class StageProcess(RankProcess):
    """One process of a group, from its start to its exit code. `stage.host.Lifecycle`."""

    _registration: Registration  #: The registration of the current incarnation.

    def __init__(self, settings: StageSettings) -> None:
        super().__init__(settings)
        self._stopping = False  #: It drains. Never unset.
        self._loading = False  #: The engines are being loaded, or are. Never unset.
        self._incarnations = Incarnations(self._over)
        self._drain = StageDrain()
        self._leader = Leader(settings.tp_endpoints) if settings.group.tp_size > 1 else None
        self._profiles = process_context.profiles(settings, lambda: self._incarnations.current)
        self._host = Host(
            settings.stages(),
            self,
            incarnation=self._incarnations.current,
            loop=asyncio.get_running_loop(),
            mutation_check=MutationCheck() if settings.debug_values else None,
            profiles=self._profiles,
            leader=self._leader,
        )
        stuck_after_s = breakpoints.PATIENCE_S if settings.debugged else settings.plan.stuck_after_s
        self._watchdog = Watchdog(self._host.stages, stuck_after_s=stuck_after_s, stuck=self.failed)

    async def serve(self) -> int:
        async with contextlib.AsyncExitStack() as stack:
            self._tasks = stack.enter_context(Tasks(self._task_ended))
            self._trace_authors(stack)
            self._tasks.start_finite("watchdog", self._watchdog.run())
            if self._leader is not None:
                self._meet_followers(self._leader, stack)
            await self._incarnations.run(self._begin, self._renew)
            self._tasks.cancel()
            self._profiles.close()
            if self._loaded and not self._host.close(THREADS_S):
                log.warning("a stage's thread did not end; leaving it")
        return self._over.result()

    def _trace_authors(self, stack: contextlib.AsyncExitStack) -> None:
        """Send authors' spans to the collector that the coordinator sends to, which reports what is wrong with it."""
        try:
            found = traces.exporter(self._settings.plan.pipeline, self._incarnations.current, stack)
        except ConfigurationError as error:
            log.debug("no spans are sent: %s", error)
            return
        if found is not None:
            recorder.traces = AuthorSpans(found[0])
            stack.callback(setattr, recorder, "traces", None)

    # --- one incarnation ----------------------------------------------------------------------------------------

    def _begin(self, stack: contextlib.AsyncExitStack) -> None:
        """Open the planes under the current incarnation and register."""
        settings, host = self._settings, self._host
        channels = self._listen(
            host,
            host.release,
            stack,
            incarnation=self._incarnations.current,
            idle_after_s=IDLE_AFTER_S,
            relay_failed=host.relay_failed,
        )
        self._registration = Registration(
            channels,
            endpoints=settings.coordinators,
            resolve=_resolve,
            hello=self._hello,
            welcomed=self._welcomed,
        )
        host.wire(channels, self._registration, self._relays)
        tasks = stack.enter_context(Tasks(self._task_ended))
        tasks.start("registration", self._registration.run())
        tasks.start("beat", self._beat())
        if not self._loading:
            self._loading = True
            host.load(self._make)
        elif self._loaded:
            host.announce_ready()

    def _renew(self, incarnation: Incarnation) -> None:
        self._drain.reset()
        self._host.reborn(incarnation)

    def _meet_followers(self, leader: Leader, stack: contextlib.AsyncExitStack) -> None:
        """Open the plane of the ranks: it outlives the incarnations that coordinators know."""
        settings, loop = self._settings, asyncio.get_running_loop()
        plane = self._host.open_ranks(leader)
        incarnation = incarnations.fresh()
        security = process_context.security(settings.control_key)
        listen, advertise, relay_settings = process_context.rank_addresses(settings)
        channels = Channels(
            plane,
            incarnation=incarnation,
            loop=loop,
            security=security,
            times=LinkTimes(settings.plan.dead_after_s),
        )
        stack.callback(channels.close)
        stack.push_async_callback(self._settle, channels)
        relays = Relays(
            loop=loop,
            incarnation=incarnation,
            on_release=plane.release,
            security=security,
            doors=Doors(loop, at=" by the tcp relay"),
            settings=relay_settings,
        )
        stack.callback(relays.close)
        plane.wire(channels, relays, endpoint=process_context.advertised(advertise, channels.bind(listen)))
        self._tasks.start_finite("greeting of ranks", plane.greet())

    def _hello(self, via: str) -> Hello:
        return Hello(self._member(), edges.of_process(self._settings.stages()), self._settings.plan.pipeline, via)

    def _member(self) -> Member:
        settings = self._settings
        return Member(
            self._incarnations.current,
            settings.group.name,
            settings.plan.name,
            settings.plan.revision,
            self._endpoint,
            self._relays.facts(),
            tuple(stage.name for stage in settings.stages()),
            self._loaded and not self._stopping,
            settings.group.tp_size,
        )

    def _kv(self, stage: str) -> KVTransport | None:
        return self._host.kv.get(stage)

    # --- what happens -------------------------------------------------------------------------------------------

    def loaded(self) -> None:
        logs.protect()
        self._loaded = True
        self._watchdog.arm()
        statuspipe.report(self._settings.status_fd, statuspipe.Loaded())
        log.info("ready: %s", ", ".join(self._host.stages))
        self._host.announce_ready()

    def unbound(self, coordinator: str) -> None:
        self._drain.unbound(coordinator)

    def fenced(self) -> None:
        self._incarnations.fence()

    def _welcomed(self) -> None:
        statuspipe.report(self._settings.status_fd, statuspipe.Registered())

    def _stop(self, reason: str) -> None:
        """Drain; a second time: end now."""
        if self._stopping or not self._loaded:
            self._finish(EXIT_DRAINED)
            return
        self._stopping = True
        statuspipe.report(self._settings.status_fd, statuspipe.Draining())
        self._host.deregister(reason)
        self._tasks.start_finite("drain", self._drain_and_end())

    async def _drain_and_end(self) -> None:
        await self._drain.run(
            coordinators=lambda: self._registration.coordinators,
            idle=lambda: self._host.idle,
            most_s=self._settings.plan.drain_timeout_s,
        )
        self._finish(EXIT_DRAINED)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._until_beat_s())
            gauges = self._host.beat(loading={} if self._loaded else dict(self._shares))
            statuspipe.report_stats(self._settings.status_fd, gauges)

    def _until_beat_s(self) -> float:
        """Few beat together, with the other timers of each process: their coordinator wakes once. Many are spread."""
        asked_s, planned_s = self._registration.beat_s, self._settings.plan.heartbeat_s
        if not asked_s:
            return ticks.next_s(time.time(), planned_s)
        beat_s = max(planned_s, asked_s)
        least_s = beat_s * random.uniform(0.9, 1.1)
        return ticks.delay_s(time.time(), least_s, beat_s / ticks.BEAT_TICKS)


async def _resolve(endpoint: str) -> list[str]:
    if addresses.is_resolved(endpoint):  # a thread would be woken for nothing
        return [endpoint]
    return await asyncio.get_running_loop().run_in_executor(None, addresses.resolve, endpoint)
