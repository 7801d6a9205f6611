"""The process of rank 1.. of a TP stage. Called by `stage_process.run`."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from stage_runtime.processes import logs, process_context
from stage_runtime.processes.stages import incarnations
from stage_runtime.processes.stages.rank import EXIT_CRASHED, EXIT_DRAINED, THREADS_S, RankProcess
from stage_runtime.processes.supervision import statuspipe
from stage_runtime.processes.tasks import Tasks
from stage_runtime.stage.ranks.follower import FollowerHost

log = logging.getLogger(__name__)


class FollowerProcess(RankProcess):
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
                profiles=lambda name: process_context.profiles(settings, name),
            )
            stack.callback(host.profiles.close)
            channels = self._listen(host, host.release, stack, incarnation=incarnations.fresh())
            host.wire(channels, self._relays, endpoint=self._endpoint)
            stack.callback(host.close, THREADS_S)
            host.load(self._make)
            tasks = stack.enter_context(Tasks(self._task_ended))
            tasks.start("beat", self._beat(host))
            return await self._over

    async def _beat(self, host: FollowerHost) -> None:
        while True:
            await asyncio.sleep(self._settings.plan.heartbeat_s)
            statuspipe.report_stats(self._settings.status_fd, host.beat())

    def loaded(self) -> None:
        logs.protect()
        self._loaded = True
        statuspipe.report(self._settings.status_fd, statuspipe.Loaded())

    def _stop(self, reason: str) -> None:
        if self._stopping or not self._loaded:
            self._finish(EXIT_DRAINED)
        self._stopping = True

    def _lost_leader(self, reason: str) -> None:
        log.info("%s", reason)
        self._finish(EXIT_DRAINED if self._stopping else EXIT_CRASHED)
