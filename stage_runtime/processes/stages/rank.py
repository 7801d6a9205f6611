"""The common part of the processes of all ranks: planes, loading, signals, the exit code.

`stage_process` is rank 0, and every process of a stage without ranks; `follower` is ranks 1...
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable
from typing import Final

from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.engines.base import Engine
from stage_runtime.engines.gpus import gpumemory
from stage_runtime.engines.making import loading
from stage_runtime.errors import ConfigurationError, describe, format_traceback
from stage_runtime.kv_transfer.interface import KVTransport
from stage_runtime.processes import process_context, signals
from stage_runtime.processes.supervision import statuspipe
from stage_runtime.profiler.recording.recorder import recorder
from stage_runtime.relays.dispatch import Relays
from stage_runtime.settings import StageSettings
from stage_runtime.sockets.channels import Channels, LinkTimes
from stage_runtime.sockets.endpoints.doors import Doors
from stage_runtime.sockets.frames.receiving import Handler
from stage_runtime.stage.context import Rank, RankContext
from stage_runtime.weights import folders
from stage_runtime.wire.parts import Incarnation

log = logging.getLogger(__name__)

EXIT_DRAINED: Final = 0
EXIT_FAILED: Final = 1  # a factory or the configuration: starting again would end the same way
EXIT_CRASHED: Final = 3  # an engine's own loop, or a task of ours, ended
LAST_WORDS_S: Final = 0.02  # between a crash and the end: what it made of its requests is on its way out
SETTLE_S: Final = 2.0
THREADS_S: Final = 1.0


class RankProcess:
    """The common part of all ranks: planes, loading, signals, the exit code."""

    _relays: Relays
    _endpoint: str
    _over: asyncio.Future[int]

    def __init__(self, settings: StageSettings) -> None:
        """Must be called inside the running loop."""
        self._settings = settings
        self._over = asyncio.get_running_loop().create_future()
        self._loaded = False
        #: Shares by stage, what it reported last while it loaded.
        self._shares: dict[str, tuple[float, float, str]] = {}

    def _listen(
        self,
        handler: Handler,
        release: Callable[[str, int], None],
        stack: contextlib.AsyncExitStack,
        *,
        incarnation: Incarnation,
        idle_after_s: float | None = None,
        relay_failed: Callable[[str, str, str], None] = lambda peer, relay, reason: None,
    ) -> Channels:
        """Open both planes under ``incarnation``; ``stack`` closes them, relays first. idle_after_s: of links.
        relay_failed: `Relays`' ``on_failed``.
        """
        settings = self._settings
        loop = asyncio.get_running_loop()
        security = process_context.security(settings.control_key)
        channels = Channels(
            handler,
            incarnation=incarnation,
            loop=loop,
            security=security,
            times=LinkTimes(settings.plan.dead_after_s, idle_after_s=idle_after_s),
        )
        stack.callback(channels.close)
        stack.push_async_callback(self._settle, channels)
        self._relays = Relays(
            loop=loop,
            incarnation=incarnation,
            on_release=release,
            on_failed=relay_failed,
            security=security,
            doors=Doors(loop, at=" by the tcp relay"),
            settings=process_context.relay_settings(settings),
        )
        stack.callback(self._relays.close)
        self._endpoint = process_context.advertised(settings.advertise, channels.bind(settings.listen))
        signals.handle(self._stop, signal.SIGTERM, signal.SIGINT)
        return channels

    async def _settle(self, channels: Channels) -> None:
        """Wait until sent messages are acknowledged before the sockets close; not after a life that was fenced."""
        if self._over.done():
            await channels.settled(SETTLE_S)

    def _stop(self, reason: str) -> None:
        self._finish(EXIT_DRAINED)

    def _make(self, plan: StagePlan) -> Engine:
        """The stage's engine; on its own thread."""
        settings = self._settings
        self._report_progress(plan.name, "loading")
        gpu_id = settings.gpu_id(plan)
        plan_ = settings.plan
        gpumemory.keep(settings.stages(), gpu_id, loading=plan, beside=plan_.stages, limit=plan_.gpu_memory_limit)
        model_path = folders.local(plan_.model_path, os.environ)
        context = RankContext(
            plan,
            model_path=model_path,
            model_revision=settings.plan.model_revision,
            rank=Rank(settings.tp_rank, gpu_id, settings.rendezvous),
            allocate=lambda shape, dtype: self._relays.allocate(shape, dtype),  # of the life that it is called in
            progress=self._report_progress,
            emit=recorder.emit,
            kv=self._kv(plan.name),
        )
        return loading.create(
            plan,
            context,
            model_path=model_path,
            model_revision=settings.plan.model_revision,
            gpu_id=gpu_id,
            on_cpu=settings.plan.on_cpu,
        )

    def _kv(self, stage: str) -> KVTransport | None:
        """The rooms of a stage with disaggregation; followers have none."""
        return None

    def _report_progress(self, stage: str, message: str, done: float = 0, total: float = 0, unit: str = "") -> None:
        event = statuspipe.Loading(stage=stage, message=message, done=done, total=total, unit=unit)
        self._shares[stage] = done, total, unit
        statuspipe.report(self._settings.status_fd, event)

    def failed(self, stage: str, error: BaseException) -> None:
        """A stage cannot be loaded, or its engine has crashed."""
        code = EXIT_CRASHED if self._loaded else EXIT_FAILED
        if not isinstance(error, ConfigurationError):
            log.error("stage %s: %s\n%s", stage, describe(error), format_traceback(error).rstrip())
        elif self._settings.status_fd is None:  # otherwise the supervisor prints that line
            log.error("%s", error)
        statuspipe.report(self._settings.status_fd, statuspipe.failed(error, stage=stage))
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._finish, code)

    def _task_ended(self, name: str, error: BaseException) -> None:
        """Ends the process: without the task it would continue in part, ready but without beats, for example."""
        log.error("the task %r has ended: %s\n%s", name, describe(error), format_traceback(error).rstrip())
        statuspipe.report(self._settings.status_fd, statuspipe.failed(error))
        self._finish(EXIT_CRASHED)

    def _finish(self, code: int) -> None:
        if not self._over.done():
            self._over.set_result(code)
