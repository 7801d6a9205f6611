"""A whole pipeline on this machine: coordinator, every process group, every replica, as processes of their own.

Here: what `omni up` does when nobody looks; tests use it as ``async with LocalPipeline(...)``. Not here: the table on
the terminal and ^C (`cli`), the life of a process (`instances`). Called by `cli.up` and by tests.
"""

from __future__ import annotations

import asyncio
import errno
import http.client
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import msgspec

from omnipipeline_spec import loading, planning
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.plan import GroupPlan, PipelinePlan, UnitPlan
from stage_runtime.errors import ConfigurationError
from stage_runtime.processes import codefiles, launching, rundir
from stage_runtime.processes.instances import Patience, ProcessView
from stage_runtime.processes.launching import COORDINATOR, StageLaunch
from stage_runtime.processes.supervisor import Printer, Supervisor, Watcher

ADMISSION_POLL_S = 0.02
STARTUP_S = 300.0  # without progress; `omni up --startup-timeout` says otherwise


class LocalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to run it here."""

    cpu: bool = False  #: GPU ids become nothing.
    host: str = "127.0.0.1"
    port: int | None = None  #: None: the spec's ``coordinator.http.port``; 0: any free one.
    startup_s: float = STARTUP_S
    debug_values: bool = False


class LocalPipeline:
    """Runs from `start` (or ``async with``) to `stop`; afterwards nothing of it is left."""

    def __init__(
        self,
        source: str | os.PathLike[str] | PipelineConfig,
        *,
        overrides: Sequence[str] = (),
        options: LocalOptions | None = None,
        environ: Mapping[str, str] | None = None,
        on_change: Watcher | None = None,
        on_line: Printer | None = None,
    ) -> None:
        """Read and plan it; nothing is started yet.

        source: a file that `loading` reads, or a spec. environ: instead of this process's own.
        Raises: SpecError, ConfigurationError.
        """
        self.options = options or LocalOptions()
        self.spec, self.plan, folder = read(source, overrides)
        if self.options.cpu:
            self.plan = planning.without_gpus(self.plan)
        self._environ = os.environ if environ is None else environ
        self._path = () if folder is None else (folder,)
        self._supervisor = Supervisor(on_change=self._changed, on_line=on_line or _drop)
        self._on_change = on_change or _ignore
        self._url: str | None = None
        self._dir: rundir.RunDir | None = None
        self._changing = asyncio.Lock()
        self._common: dict[str, str] = {}

    @property
    def url(self) -> str:
        """Where the coordinator answers."""
        if self._url is None:
            raise RuntimeError("the pipeline is not up")
        return self._url

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
            self.ask_to_stop()  # nobody waits for answers any more
            self.ask_to_stop()
        await self.stop()

    async def start(self) -> None:
        """Start everything and wait until it can answer.

        Raises: ConfigurationError: it cannot run here. StartupFailed: a process did not get ready; all is stopped.
        """
        base = self.spec.endpoints.base_path
        rundir.check_budget(base, self._sockets())
        _check_port(self.options.host, self._port())
        rundir.sweep(base)
        self._dir = rundir.RunDir(base)
        try:
            self._launch()
            await self.ready()
            self._supervisor.settle()
            self._dir.publish({"pipeline": self.plan.pipeline, "pid": os.getpid(), "url": self.url})
        except BaseException:
            await self.abandon()
            raise

    async def ready(self) -> None:
        """Wait until every process is ready (again), and the coordinator knows it.

        Raises: StartupFailed: one never will be.
        """
        await self._supervisor.started()
        await self._admitted()

    def ask_to_stop(self) -> None:
        """Begin to drain; a second time: cut it short."""
        self._supervisor.ask_all_to_stop()

    async def stop(self) -> None:
        """Drain, wait until everything is gone, and remove what is left of the run."""
        if not any(instance.stopping for instance in self._supervisor.instances()):
            self.ask_to_stop()
        try:
            await self._supervisor.gone()
        finally:
            await self.abandon()

    async def abandon(self) -> None:
        """End everything now."""
        await self._supervisor.close()
        if self._dir is not None:
            self._dir.remove()

    async def scale(self, group: str, replicas: int) -> None:
        """Let ``group`` have so many instances: new ones are ready, or old ones drained, when this returns.

        Raises: ConfigurationError: no such group, or no such number.
        """
        unit, plan = self._find(group)
        if replicas < 1:
            raise ConfigurationError(f"{group}: {replicas} replicas would serve nothing; the least is 1")
        async with self._changing:
            there = self._supervisor.instances(group)
            for _ in range(replicas - len(there)):
                self._add_replica(unit, plan)
            await self.ready()
            leaving = [one.spec.name for one in there[replicas:]]
            await asyncio.gather(*(self._supervisor.stop(name) for name in leaving))

    async def restart(self, group: str) -> None:
        """Replace every instance of ``group`` by a new one, one after another.

        On CPU the new one is ready before the old one drains. A GPU has no room for both: there the old one goes first.
        Raises: ConfigurationError: no such group.
        """
        unit, plan = self._find(group)
        async with self._changing:
            for old in self._supervisor.instances(group):
                if not unit.gpu_ids:
                    self._add_replica(unit, plan)
                    await self.ready()
                    await self._supervisor.stop(old.spec.name)
                else:
                    await self._supervisor.stop(old.spec.name)
                    self._add_replica(unit, plan, old.spec.replica)
                    await self.ready()

    def _changed(self, view: ProcessView) -> None:
        if view.process == COORDINATOR and view.state == "ready":
            self._url = view.message
        self._on_change(view)

    async def _admitted(self) -> None:
        """Wait until the coordinator gives work to every instance that says it is ready: a few milliseconds."""
        wanted = Counter(one.spec.group for one in self._supervisor.instances() if one.spec.group != COORDINATOR)
        while wanted - await self._known_ready():
            await asyncio.sleep(ADMISSION_POLL_S)
            # An instance that has died meanwhile is not waited for here, but by its own readiness.
            await self._supervisor.started()

    async def _known_ready(self) -> Counter[str]:
        status = await asyncio.to_thread(_status, self.url)
        instances = status.get("instances", [])
        return Counter(one["group"] for one in instances if one["ready"] and not one["draining"])

    def _launch(self) -> None:
        assert self._dir is not None
        code = self.plan.coordinator.code
        code_dir = self._dir.path / "code" if code else None
        if code_dir is not None:
            codefiles.write(code, code_dir)
        path = (*([code_dir] if code_dir else []), *self._path)
        self._common = launching.environment(self._environ, path=path, code_dir=code_dir)
        if self.options.debug_values:
            self._common["OMNI_DEBUG_VALUES"] = "1"
        for unit in self.plan.units:
            self._dir.write(f"{unit.name}.unit.json", msgspec.json.encode(unit))
        self._add_coordinator()
        for unit in self.plan.units:
            for group in unit.groups:
                for _ in range(self.plan.replicas[unit.name]):
                    self._add_replica(unit, group)

    def _add_coordinator(self) -> None:
        assert self._dir is not None
        plan = self.plan.coordinator
        told = {
            "OMNI_PLAN": str(self._dir.write("coordinator.json", msgspec.json.encode(plan))),
            "OMNI_REVISIONS": str(self._dir.write("revisions.json", msgspec.json.encode([self.plan.current]))),
            "OMNI_LISTEN": self._dir.endpoint("coordinator.sock"),
            "OMNI_PUBLISH": self._dir.endpoint("publisher.sock"),
            "OMNI_HTTP_HOST": self.options.host,
        }
        common = {**self._common, "CUDA_VISIBLE_DEVICES": ""}
        spec = launching.coordinator_instance(common, lambda: {**told, "OMNI_HTTP_PORT": str(self._port())})
        self._supervisor.add(spec, Patience(startup_s=self.options.startup_s, grace_s=plan.drain_timeout_s))

    def _add_replica(self, unit: UnitPlan, group: GroupPlan, replica: int | None = None) -> str:
        """Start one more instance; its name."""
        assert self._dir is not None
        if replica is None:
            taken = {one.spec.replica for one in self._supervisor.instances(group.name)}
            replica = next(number for number in range(len(taken) + 1) if number not in taken)
        name_of = [launching.instance_name(process, replica) for process in group.processes]
        launch = StageLaunch(
            unit=unit,
            group=group,
            plan_file=self._dir.path / f"{unit.name}.unit.json",
            replica=replica,
            coordinators=self._dir.endpoint("coordinator.sock"),
            environment=self._common,
            addresses=launching.local_addresses(self._dir.path, name_of),
            gpus=self._gpus(unit, group, replica),
        )
        spec = launching.stage_instance(launch)
        self._supervisor.add(spec, Patience(startup_s=self.options.startup_s, grace_s=unit.drain_timeout_s))
        return spec.name

    def _gpus(self, unit: UnitPlan, group: GroupPlan, replica: int) -> tuple[str, ...]:
        devices = self.plan.local_gpus.get(group.name, ())
        own = devices[replica % len(devices)] if devices else ()
        return launching.visible_gpus(unit, group, own, self._environ.get("CUDA_VISIBLE_DEVICES"))

    def _find(self, group: str) -> tuple[UnitPlan, GroupPlan]:
        groups = {plan.name: (unit, plan) for unit in self.plan.units for plan in unit.groups}
        if group not in groups:
            raise ConfigurationError(f"{group!r} is no process group of {self.plan.pipeline}: {', '.join(groups)}")
        return groups[group]

    def _port(self) -> int:
        """The one to bind; a coordinator that is started again stays at the one it had."""
        if self._url is not None:
            return urlsplit(self._url).port or 80
        return self.plan.coordinator.http_port if self.options.port is None else self.options.port

    def _sockets(self) -> dict[str, str]:
        """Names as long as any that this run will use."""
        processes = [process for unit in self.plan.units for group in unit.groups for process in group.processes]
        longest = {launching.socket_name(launching.instance_name(name, 99), 999): name for name in processes}
        return {**longest, "coordinator.sock": COORDINATOR}


def read(
    source: str | os.PathLike[str] | PipelineConfig, overrides: Sequence[str] = ()
) -> tuple[PipelineConfig, PipelinePlan, Path | None]:
    """A spec, its plan, and the folder of its file, whose modules may be imported.

    Raises: SpecError: with all faults.
    """
    if isinstance(source, PipelineConfig):
        return source, planning.plan(source), None
    loaded = loading.load(os.fspath(source), overrides=overrides)
    return loaded.spec, planning.plan(loaded.spec, name=loaded.name), _folder(os.fspath(source))


def _folder(source: str) -> Path | None:
    """Of ``pipeline.yaml``, ``pipeline.py`` and ``pipeline.py:name``; a module's name has none of its own."""
    file = Path(source if os.path.exists(source) else source.rpartition(":")[0])
    return file.resolve().parent if file.is_file() else None


def _check_port(host: str, port: int) -> None:
    """Refuse a port that is taken before a minute is spent on loading models."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigurationError(f"port {port} of {host} is taken: choose another with --port") from error
            raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def _status(url: str) -> dict[str, Any]:
    """The coordinator's `/status`; empty when it does not answer now."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=5)
    try:
        connection.request("GET", "/status")
        return msgspec.json.decode(connection.getresponse().read(), type=dict[str, Any])
    except (OSError, http.client.HTTPException, msgspec.MsgspecError):
        return {}
    finally:
        connection.close()


def _ignore(_view: ProcessView) -> None:
    """Nobody watches."""


def _drop(_process: str, _line: str) -> None:
    """Nobody reads."""
