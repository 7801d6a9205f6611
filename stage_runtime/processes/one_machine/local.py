"""A whole pipeline on this machine: coordinator, every process group, every replica, as processes of their own.

Here: the life of one run, as `omni up` has it without its terminal; tests use it as ``async with LocalPipeline(...)``.
Not here: the table on the terminal and ^C (`cli`), what was read (`prepared`), how many instances there are (`fleet`).
Called by `cli.serving.up` and by tests.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import msgspec

from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.plan import PipelinePlan
from omnipipeline_spec.types.pods import COORDINATOR, PROFILING_FILE
from stage_runtime.processes.one_machine import admitted, autoscaling
from stage_runtime.processes.one_machine.fleet import Fleet
from stage_runtime.processes.one_machine.kept_output import KeptOutput
from stage_runtime.processes.one_machine.launcher import KEY_FILE, SHOWN_CERTIFICATE
from stage_runtime.processes.one_machine.preparing.prepared import LocalOptions as LocalOptions
from stage_runtime.processes.one_machine.preparing.prepared import Prepared
from stage_runtime.processes.starting import rundir
from stage_runtime.processes.supervision import reaper
from stage_runtime.processes.supervision.instances import ProcessView
from stage_runtime.processes.supervision.supervisor import OnProcessChange, Printer, Supervisor

AUTOSCALING = "autoscaling"  # what its lines are shown as


class LocalPipeline:
    """Runs from `start` (or ``async with``) to `stop`; afterwards nothing of it is left."""

    def __init__(
        self,
        source: str | os.PathLike[str] | PipelineConfig,
        *,
        overrides: Sequence[str] = (),
        options: LocalOptions | None = None,
        environ: Mapping[str, str] | None = None,
        on_change: OnProcessChange | None = None,
        on_line: Printer | None = None,
    ) -> None:
        """Read and plan it; nothing is started yet.

        source: a file that `loading` reads, or a spec. environ: instead of this process's own.
        Raises: SpecError, ConfigurationError.
        """
        prepared = Prepared(source, overrides=overrides, options=options, environ=environ)
        self.options = prepared.options
        self._supervisor = Supervisor(on_change=self._changed, on_line=self._printed)
        self._fleet = Fleet(
            prepared,
            self._supervisor,
            admitted=self._admitted,
            printed=lambda line: self._printed(AUTOSCALING, line),
        )
        #: Bearer tokens, one of which clients must send. They stay as they were at the start.
        self._api_keys = prepared.api_keys
        self._on_line = on_line or _drop
        self._kept: KeptOutput | None = None  #: The output is kept as long as the run lives.
        self._on_change = on_change or _ignore
        self._url: str | None = None
        self._dir: rundir.RunDir | None = None
        self._autoscaling: asyncio.Task[None] | None = None  #: While the run is up, if some unit follows its load.
        self._reaper: subprocess.Popen[bytes] | None = None
        self._living: int | None = None  #: Held open as long as the run lives.

    @property
    def notices(self) -> tuple[str, ...]:
        """Fields of the spec that runs, and null entries, without effect; one line each."""
        return self._fleet.prepared.notices

    @property
    def spec(self) -> PipelineConfig:
        """The spec that runs; `update` changes it."""
        return self._fleet.prepared.spec

    @property
    def plan(self) -> PipelinePlan:
        """The plan that runs; `update` changes it."""
        return self._fleet.prepared.plan

    @property
    def url(self) -> str:
        """The address where the coordinator answers."""
        if self._url is None:
            raise RuntimeError("the pipeline is not up")
        return self._url

    @property
    def key_file(self) -> Path | None:
        """A file with the key that clients must send; None when they need none. Gone with the run."""
        return self.folder / KEY_FILE if self._api_keys else None

    @property
    def _certificate(self) -> Path | None:
        """The file of the certificate that the HTTP server shows."""
        return None if self.options.certificate is None else self.folder / SHOWN_CERTIFICATE

    @property
    def folder(self) -> Path:
        """The run's private folder."""
        assert self._dir is not None, "the pipeline is not up"
        return self._dir.path

    def views(self) -> list[ProcessView]:
        """Every process, as people are shown it."""
        return self._supervisor.views()

    def pids(self) -> dict[str, int]:
        """Process name -> pid, of those that run now."""
        return {view.process: view.pid for view in self.views() if view.pid is not None}

    async def __aenter__(self) -> LocalPipeline:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is not None:
            self.ask_to_stop()  # no request may go on
            self.ask_to_stop()
        await self.stop()

    def check(self) -> None:
        """Refuse what cannot run here, before a minute is spent on loading models.

        Raises: ConfigurationError: names what to change.
        """
        self._fleet.prepared.check(self._port())

    async def start(self) -> None:
        """Start everything and wait until it can answer.

        Raises: ConfigurationError: it cannot run here. StartupFailed: a process did not get ready; all is stopped.
        """
        self.check()
        base = self.spec.endpoints.base_path
        rundir.sweep(base)
        self._dir = rundir.RunDir(base)
        run = {"pipeline": self.plan.pipeline, "pid": os.getpid()}
        try:
            self._kept = KeptOutput(self._dir.path)
            self._dir.publish(run)  # `omni logs` shows what a model that loads has written
            self._reaper, self._living = reaper.start(str(self._dir.path))
            limits = {"enabled": self.spec.profiling.enabled, "maxSeconds": self.spec.profiling.max_seconds}
            self._dir.write(PROFILING_FILE, msgspec.json.encode(limits))
            self._fleet.start(self._dir, self._port)
            await self.ready()
            self._supervisor.settle()
            self._follow()
            shown = {"certificate": str(self._certificate)} if self._certificate else {}
            self._dir.publish({**run, "url": self.url, **shown})
        except BaseException:
            await self.abandon()
            raise

    async def ready(self) -> None:
        """Wait until every process is ready (again), and the coordinator knows it.

        Raises: StartupFailed: one never will be.
        """
        await self._admitted(self._supervisor.started)

    def ask_to_stop(self) -> None:
        """Begin to drain; a second time: cut it short."""
        if self._autoscaling is not None:
            self._autoscaling.cancel()
        self._fleet.stopping = True
        self._supervisor.ask_all_to_stop()

    async def stop(self) -> None:
        """Drain, wait until everything is gone, and remove what is left of the run."""
        if not self._fleet.stopping:
            self.ask_to_stop()
        try:
            await self._supervisor.gone()
        finally:
            await self.abandon()

    async def abandon(self) -> None:
        """End everything now. A caller that is cancelled meanwhile is so when nothing is left."""
        ending = asyncio.create_task(self._abandon())
        cancelled: asyncio.CancelledError | None = None
        while not ending.done():
            try:
                await asyncio.wait({ending})
            except asyncio.CancelledError as error:
                cancelled = error
        ending.result()
        if cancelled is not None:
            raise cancelled

    async def _abandon(self) -> None:
        ending = self._fleet.cancel_orders()
        if self._autoscaling is not None:
            self._autoscaling.cancel()
            ending.append(self._autoscaling)
        try:
            await self._supervisor.close()
            await asyncio.gather(*ending, return_exceptions=True)
            if self._living is not None and self._reaper is not None:
                os.close(self._living)
                self._living = None
                await asyncio.to_thread(self._reaper.wait)  # it ends what our processes have left behind
        finally:
            if self._kept is not None:
                self._kept.close()
            if self._dir is not None:
                self._dir.remove()

    async def scale(self, group: str, replicas: int) -> None:
        """The same as `Fleet.scale`."""
        await self._fleet.scale(group, replicas)

    async def restart(self, group: str) -> None:
        """The same as `Fleet.restart`."""
        await self._fleet.restart(group)

    async def update(self, changed: set[Path]) -> str:
        """The same as `Fleet.update`."""
        try:
            return await self._fleet.update(changed)
        finally:
            self._follow()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Begin to follow the load when some unit does, once."""
        if self.plan.autoscaling and self._autoscaling is None and not self._fleet.stopping:
            self._autoscaling = asyncio.create_task(self._follow_load(), name=AUTOSCALING)

    async def _follow_load(self) -> None:
        key, problem = next(iter(self._api_keys), None), ""
        while True:
            try:
                if self.plan.autoscaling:
                    self._fleet.step(await admitted.status(self.url, key, self._certificate))
                problem = ""
            except Exception as error:  # the outermost loop: a full disk, for one; the next step may succeed
                if str(error) != problem:
                    problem = str(error)
                    self._printed(AUTOSCALING, f"{type(error).__name__}: {error}; tried again every second")
            await asyncio.sleep(autoscaling.STEP_S)

    def _changed(self, view: ProcessView) -> None:
        if view.process == COORDINATOR and view.state == "ready":
            self._url = view.message
        self._on_change(view)

    def _printed(self, process: str, line: str) -> None:
        if self._kept is not None:
            self._kept.add(process, line)
        self._on_line(process, line)

    async def _admitted(self, ready: Callable[[], Awaitable[None]], group: str | None = None) -> None:
        key = next(iter(self._api_keys), None)
        await admitted.wait(ready, self._supervisor, lambda: self.url, key, group, self._certificate)

    def _port(self) -> int:
        """The one to bind; a coordinator that is started again stays at the one it had."""
        if self._url is not None:
            return urlsplit(self._url).port or 80
        return self.plan.coordinator.http_port if self.options.port is None else self.options.port


def _ignore(_view: ProcessView) -> None:
    """Ignores changes."""


def _drop(_process: str, _line: str) -> None:
    """Ignores lines."""
