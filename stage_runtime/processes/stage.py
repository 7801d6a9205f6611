"""Wiring of one process of a process group: sockets, relays, stages; loading, draining, the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable
from typing import Any, Final

import uvloop

from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.engines import gpumemory, loading
from stage_runtime.engines.base import Engine
from stage_runtime.errors import ConfigurationError, describe, format_traceback
from stage_runtime.processes import logs, process_context, statuspipe
from stage_runtime.processes.tasks import Tasks
from stage_runtime.relays.registry import Relays
from stage_runtime.rules import edges
from stage_runtime.settings import StageSettings
from stage_runtime.sockets import addresses
from stage_runtime.sockets.channels import Channels, Handler
from stage_runtime.stage.context import Context
from stage_runtime.stage.follower import FollowerHost
from stage_runtime.stage.host import Host
from stage_runtime.stage.mutation_check import MutationCheck
from stage_runtime.stage.registration import Registration
from stage_runtime.stage.tensor_parallel import Leader
from stage_runtime.wire.messages import Hello, Incarnation, Member

log = logging.getLogger(__name__)

EXIT_DRAINED: Final = 0
EXIT_FAILED: Final = 1  # a factory or the configuration: starting again would end the same way
EXIT_CRASHED: Final = 3  # an engine's own loop, or a task of ours, ended
IDLE_EVERY_S: Final = 0.02
SETTLE_S: Final = 2.0
THREADS_S: Final = 1.0


def run(settings: StageSettings) -> int:
    """Serve this process's stages until told to stop. Returns the exit code."""
    logs.configure(settings.log_format, name=settings.process)
    _meet_ranks(settings)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if settings.tp_rank > 0:
            return runner.run(_serve(FollowerProcess, settings))
        return runner.run(_serve(StageProcess, settings))


async def _serve(kind: type[FollowerProcess] | type[StageProcess], settings: StageSettings) -> int:
    return await kind(settings).serve()


def _meet_ranks(settings: StageSettings) -> None:
    """What torch.distributed's ``env://`` reads, for factories of a TP stage."""
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


class Process:
    """What all ranks have in common: planes, loading, signals, the exit code."""

    _relays: Relays
    _endpoint: str
    _over: asyncio.Future[int]

    def __init__(self, settings: StageSettings) -> None:
        """To be made inside the running loop."""
        self._settings = settings
        self._over = asyncio.get_running_loop().create_future()
        self._incarnation = Incarnation(secrets.token_hex(8))
        self._loaded = False

    def _listen(
        self, handler: Handler, release: Callable[[str, int], None], stack: contextlib.AsyncExitStack
    ) -> Channels:
        """Open both planes; ``stack`` closes them, relays first."""
        settings = self._settings
        loop = asyncio.get_running_loop()
        security = process_context.security(settings.control_key)
        channels = Channels(
            handler,
            incarnation=self._incarnation,
            loop=loop,
            security=security,
            dead_after_s=settings.plan.dead_after_s,
        )
        stack.callback(channels.close)
        stack.push_async_callback(self._settle, channels)
        self._relays = Relays(
            loop=loop,
            incarnation=self._incarnation,
            on_release=release,
            security=security,
            settings=process_context.relay_settings(settings),
        )
        stack.callback(self._relays.close)
        self._endpoint = process_context.advertised(settings.advertise, channels.bind(settings.listen))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, signal.Signals(number).name)
        return channels

    async def _settle(self, channels: Channels) -> None:
        """What was said is heard before the sockets close; of a life that nobody listens to any more, nothing is."""
        if self._over.done():
            await channels.settled(SETTLE_S)

    def _stop(self, reason: str) -> None:
        self._finish(EXIT_DRAINED)

    def _make(self, plan: StagePlan) -> Engine:
        """The stage's engine; on its own thread."""
        settings = self._settings
        self._report_progress(plan.name, "loading")
        gpu_id = settings.gpu_id(plan)
        gpumemory.keep(settings.stages(), gpu_id)
        context = Context(
            plan,
            model_path=settings.plan.model_path,
            model_revision=settings.plan.model_revision,
            gpu_id=gpu_id,
            tp_rank=settings.tp_rank,
            rendezvous=settings.rendezvous,
            allocate=lambda shape, dtype: self._relays.allocate(shape, dtype),  # of the life that it is called in
            progress=self._report_progress,
            emit=lambda *_, **__: None,
        )
        return loading.create(
            plan,
            context,
            model_path=settings.plan.model_path,
            model_revision=settings.plan.model_revision,
            gpu_id=gpu_id,
            on_cpu=settings.plan.on_cpu,
        )

    def _report_progress(self, stage: str, message: str) -> None:
        statuspipe.report(self._settings.status_fd, statuspipe.Loading(stage=stage, message=message))

    def failed(self, stage: str, error: BaseException) -> None:
        """A stage cannot be loaded, or its engine has crashed."""
        code = EXIT_CRASHED if self._loaded else EXIT_FAILED
        if not isinstance(error, ConfigurationError):
            log.error("stage %s: %s\n%s", stage, describe(error), format_traceback(error).rstrip())
        elif self._settings.status_fd is None:  # or our supervisor shows that line
            log.error("%s", error)
        statuspipe.report(self._settings.status_fd, statuspipe.failed(error, stage=stage))
        # Leave the loop one turn: what the crash made of its requests is on its way out.
        asyncio.get_running_loop().call_later(IDLE_EVERY_S, self._finish, code)

    def _task_ended(self, name: str, error: BaseException) -> None:
        """Without it this process would go on half: ready for others, and without beats, say."""
        log.error("the task %r has ended: %s\n%s", name, describe(error), format_traceback(error).rstrip())
        statuspipe.report(self._settings.status_fd, statuspipe.failed(error))
        self._finish(EXIT_CRASHED)

    def _finish(self, code: int) -> None:
        if not self._over.done():
            self._over.set_result(code)


class FollowerProcess(Process):
    """Rank 1.. of a TP stage: lives and dies with rank 0, which needs it while it drains."""

    _stopping = False

    async def serve(self) -> int:
        settings = self._settings
        async with contextlib.AsyncExitStack() as stack:
            host = FollowerHost(
                settings.stages()[0],
                rank=settings.tp_rank,
                loop=asyncio.get_running_loop(),
                on_loaded=self.loaded,
                on_failed=self.failed,
                on_lost=self._lost_leader,
            )
            channels = self._listen(host, host.release, stack)
            host.wire(channels, self._relays, endpoint=self._endpoint)
            stack.callback(host.close, THREADS_S)
            host.load(self._make)
            return await self._over

    def loaded(self) -> None:
        self._loaded = True
        statuspipe.report(self._settings.status_fd, statuspipe.Ready())

    def _stop(self, reason: str) -> None:
        if self._stopping or not self._loaded:
            self._finish(EXIT_DRAINED)
        self._stopping = True

    def _lost_leader(self, reason: str) -> None:
        log.info("%s", reason)
        self._finish(EXIT_DRAINED if self._stopping else EXIT_CRASHED)


class StageProcess(Process):
    """One life of one process of a group; of a TP stage, its rank 0."""

    def __init__(self, settings: StageSettings) -> None:
        super().__init__(settings)
        self._stopping = False
        self._unbound: set[str] = set()
        self._leader = Leader(settings.tp_endpoints) if settings.group.tp_size > 1 else None

    async def serve(self) -> int:
        host = self._host = Host(
            self._settings.stages(),
            self,
            incarnation=self._incarnation,
            loop=asyncio.get_running_loop(),
            mutation_check=MutationCheck() if self._settings.debug_values else None,
            leader=self._leader,
        )
        async with contextlib.AsyncExitStack() as stack:
            self._tasks = stack.enter_context(Tasks(self._task_ended))
            self._tasks.start_finite("watchdog", self._watch_progress())
            if self._leader is not None:
                self._meet_followers(self._leader, stack)
            await self._life(first=True)
            while not self._over.done():
                self._unbound.clear()  # that nothing is bound to it was said of the life before
                self._incarnation = Incarnation(secrets.token_hex(8))
                log.warning("declared dead by a coordinator: going on as %s", self._incarnation)
                host.reborn(self._incarnation)
                await self._life(first=False)
            self._tasks.cancel()
            if self._loaded and not host.close(THREADS_S):
                log.warning("a stage's thread did not end; leaving it")
        return self._over.result()

    async def _life(self, *, first: bool) -> None:
        """One incarnation, until the end or until it is fenced. The stages and their engines outlive it."""
        self._fenced = asyncio.Event()
        fenced = asyncio.ensure_future(self._fenced.wait())
        async with contextlib.AsyncExitStack() as stack:
            self._wire(stack)
            tasks = stack.enter_context(Tasks(self._task_ended))
            tasks.start("registration", self._registration.run())
            tasks.start("beat", self._beat())
            if first:
                self._host.load(self._make)
            elif self._loaded:
                self._host.announce_ready()
            ends: list[asyncio.Future[Any]] = [self._over, fenced]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            fenced.cancel()

    # --- wiring -------------------------------------------------------------------------------------------------

    def _wire(self, stack: contextlib.AsyncExitStack) -> None:
        settings = self._settings
        channels = self._listen(self._host, self._host.release, stack)
        self._registration = Registration(
            channels,
            endpoints=settings.coordinators,
            resolve=_resolve,
            hello=self._hello,
            welcomed=self._welcomed,
        )
        self._host.wire(channels, self._registration, self._relays)

    def _meet_followers(self, leader: Leader, stack: contextlib.AsyncExitStack) -> None:
        """Open the plane of the ranks: it outlives the incarnations that coordinators know."""
        settings, loop = self._settings, asyncio.get_running_loop()
        plane = self._host.open_ranks(leader)
        incarnation = Incarnation(secrets.token_hex(8))
        security = process_context.security(settings.control_key)
        listen, advertise, relay_settings = process_context.rank_addresses(settings)
        channels = Channels(
            plane, incarnation=incarnation, loop=loop, security=security, dead_after_s=settings.plan.dead_after_s
        )
        stack.callback(channels.close)
        stack.push_async_callback(self._settle, channels)
        relays = Relays(
            loop=loop, incarnation=incarnation, on_release=plane.release, security=security, settings=relay_settings
        )
        stack.callback(relays.close)
        plane.wire(channels, relays, endpoint=process_context.advertised(advertise, channels.bind(listen)))
        self._tasks.start_finite("greeting of ranks", plane.greet())

    def _hello(self, via: str) -> Hello:
        return Hello(self._member(), edges.of_process(self._settings.stages()), self._settings.plan.pipeline, via)

    def _member(self) -> Member:
        settings = self._settings
        return Member(
            self._incarnation,
            settings.group.name,
            settings.plan.name,
            settings.plan.revision,
            self._endpoint,
            self._relays.facts(),
            tuple(stage.name for stage in settings.stages()),
            self._loaded and not self._stopping,
        )

    # --- what happens -------------------------------------------------------------------------------------------

    def loaded(self) -> None:
        self._loaded = True
        self._arm_watchdog()
        statuspipe.report(self._settings.status_fd, statuspipe.Ready())
        log.info("ready: %s", ", ".join(self._host.stages))
        self._host.announce_ready()

    def shut_down(self, reason: str) -> None:
        self._stop(reason)

    def unbound(self, coordinator: str) -> None:
        self._unbound.add(coordinator)

    def fenced(self) -> None:
        self._fenced.set()

    def _welcomed(self) -> None:
        statuspipe.report(self._settings.status_fd, statuspipe.Registered())

    def _stop(self, reason: str) -> None:
        """Drain; a second time: end now."""
        if self._stopping or not self._loaded:
            self._finish(EXIT_DRAINED)
            return
        self._stopping = True
        statuspipe.report(self._settings.status_fd, statuspipe.Draining())
        log.info("draining: %s", reason)
        self._host.deregister(reason)
        self._tasks.start_finite("drain", self._drain())

    async def _drain(self) -> None:
        """Until every coordinator says that nothing is bound here, and nothing is left to send."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.plan.drain_timeout_s
        while loop.time() < deadline:
            if self._unbound.issuperset(self._registration.coordinators) and self._host.idle:
                break
            await asyncio.sleep(IDLE_EVERY_S)
        else:
            log.warning("not drained within %.0f s", self._settings.plan.drain_timeout_s)
        self._finish(EXIT_DRAINED)

    async def _watch_progress(self) -> None:
        """End a process whose loop makes no progress though it has work: long computing is not death, this is.

        The log gets the stacks of all threads. Where something keeps the GIL for so long that this loop cannot run,
        C code (`faulthandler`) prints them and ends the process.
        """
        stuck_after_s = self._settings.plan.stuck_after_s
        seen: dict[str, tuple[int, float]] = {}  # stage -> (steps, since when)
        try:
            while True:
                await asyncio.sleep(self._look_every_s)
                if self._loaded:  # a loader may keep the GIL as long as it likes: the supervisor sees what it does
                    self._arm_watchdog()
                now = time.monotonic()
                for name, stage in self._host.stages.items():
                    steps, since = seen.get(name, (-1, now))
                    if not self._loaded or not stage.computing or stage.steps != steps:
                        seen[name] = (stage.steps, now)
                    elif now - since > stuck_after_s:
                        faulthandler.dump_traceback()
                        self.failed(name, TimeoutError(f"no progress for {stuck_after_s:.0f} s with work at hand"))
                        return
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _arm_watchdog(self) -> None:
        """Anew at each look: who cannot look for so long is ended."""
        faulthandler.dump_traceback_later(self._settings.plan.stuck_after_s + self._look_every_s, exit=True)

    @property
    def _look_every_s(self) -> float:
        return min(self._settings.plan.stuck_after_s / 10, 5.0)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._settings.plan.heartbeat_s)
            self._host.beat()


async def _resolve(endpoint: str) -> list[str]:
    return await asyncio.get_running_loop().run_in_executor(None, addresses.resolve, endpoint)
