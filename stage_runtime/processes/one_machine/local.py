"""A whole pipeline on this machine: coordinator, every process group, every replica, as processes of their own.

Here: what `omni up` does without its terminal; tests use it as ``async with LocalPipeline(...)``. Not here: the table
on the terminal and ^C (`cli`), the life of a process (`instances`), what a changed file means (`updating`), when the
load asks for another number (`autoscaling`). Called by `cli.up` and by tests.

One room for `scale`, `restart`, `update` and the autoscaler's orders: they share one lock, one launcher and one count
of the instances that each group should have.
"""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import msgspec

from omnipipeline_spec import loading, planning
from omnipipeline_spec.loading import LoadedPipeline
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.plan import GroupPlan, UnitPlan
from omnipipeline_spec.types.pods import COORDINATOR, PROFILING_FILE
from omnipipeline_spec.validation import variables
from stage_runtime.errors import ConfigurationError
from stage_runtime.processes import codefiles, launching, rundir
from stage_runtime.processes.one_machine import (
    admitted,
    author_folder,
    autoscaling,
    client_keys,
    preflight,
    references,
    unsupported,
    updating,
)
from stage_runtime.processes.one_machine.kept_output import KeptOutput
from stage_runtime.processes.one_machine.launcher import KEY_FILE, Debug, Launcher
from stage_runtime.processes.supervision import reaper
from stage_runtime.processes.supervision.instances import ProcessView
from stage_runtime.processes.supervision.startup_failures import StartupFailed
from stage_runtime.processes.supervision.supervisor import OnProcessChange, Printer, Supervisor

AUTOSCALING = "autoscaling"  # what its lines are shown as
STARTUP_S = 300.0  # without progress; `omni up --startup-timeout` changes it


class LocalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to run it here."""

    cpu: bool = False  #: GPU ids are ignored.
    host: str = "127.0.0.1"
    port: int | None = None  #: None: the spec's ``coordinator.http.port``; 0: any free one.
    startup_s: float = STARTUP_S
    debug_values: bool = False
    api_key_file: Path | None = None  #: Bearer token that clients must send; None: the Secret's of the spec, if any.
    certificate: tuple[Path, Path] | None = None  #: Files of a certificate and its key; None: plain HTTP is served.
    log_level: str | None = None  #: One of `settings.LOG_LEVELS`; None: the environment's.
    no_auth: bool = False  #: Require no key, even if others can reach ``host``.
    debug: Debug | None = None


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
        self.options = options or LocalOptions()
        self._given = (source, tuple(overrides), environ)
        loaded, folder = read(source, overrides)
        self.spec, self.plan = loaded.spec, planning.plan(loaded.spec, name=loaded.name)
        if self.options.cpu:
            self.plan = planning.without_gpus(self.plan)
        environ = os.environ if environ is None else environ
        found = references.resolve(
            self.spec, loaded.beside, environ, namespace=loaded.metadata.get("namespace") or None
        )
        taken = {name: why for name in found.environment if (why := variables.taken(name, self.spec))}
        vain = (f"envFrom: {name} is left out: it {why}" for name, why in taken.items())
        self._environ = {**environ, **{name: value for name, value in found.environment.items() if name not in taken}}
        self._shown_gpus = self._environ.get("CUDA_VISIBLE_DEVICES")
        self._code = found.code | self.plan.coordinator.code
        for unit in self.plan.units:
            self._code |= unit.code
        self._api_keys, unkeyed = client_keys.resolve(
            self.spec.coordinator.http.api_key_secret_ref,
            file=self.options.api_key_file,
            no_auth=self.options.no_auth,
            found=found.api_keys,
        )
        #: Fields of the spec without effect, one line each.
        self.notices = (*unsupported.notices(self.spec, local=True), *found.notices, *vain, *unkeyed)
        self._author_folder = folder
        self._supervisor = Supervisor(on_change=self._changed, on_line=self._printed)
        self._on_line = on_line or _drop
        self._kept: KeptOutput | None = None  #: As long as the run lives.
        self._on_change = on_change or _ignore
        self._url: str | None = None
        self._dir: rundir.RunDir | None = None
        self._changing = asyncio.Lock()
        self._stopping = False
        #: Group -> the instances that it should have.
        self._wanted = {group.name: self.plan.replicas[unit.name] for unit in self.plan.units for group in unit.groups}
        self._autoscaler = autoscaling.Autoscaler(self.plan, self)
        self._autoscaling: asyncio.Task[None] | None = None  #: While the run is up, if some unit follows its load.
        self._orders: set[asyncio.Task[None]] = set()  #: Of the autoscaler, under way.
        self._version = 0  #: Of the plan; see `update`.
        self._launcher: Launcher  #: From `start` on.
        self._reaper: subprocess.Popen[bytes] | None = None
        self._living: int | None = None  #: Held open as long as the run lives.

    @property
    def url(self) -> str:
        """Where the coordinator answers."""
        if self._url is None:
            raise RuntimeError("the pipeline is not up")
        return self._url

    @property
    def key_file(self) -> Path | None:
        """A file with the key that clients must send; None when they need none. Gone with the run."""
        return self.folder / KEY_FILE if self._api_keys else None

    @property
    def _certificate(self) -> Path | None:
        """The file of the HTTP server's certificate."""
        return None if self.options.certificate is None else self.options.certificate[0]

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
        rundir.check_access(self.spec.endpoints.base_path)
        rundir.check_budget(self.spec.endpoints.base_path, preflight.socket_names(self.plan))
        if not self._api_keys and not self.options.no_auth and not preflight.is_loopback(self.options.host):
            raise ConfigurationError(
                f"--host {self.options.host} is reached from other machines, and no API key is set: name a file that "
                "holds one with --api-key-file, or allow everybody to use it with --no-auth"
            )
        if self.options.debug is not None:
            preflight.check_debugged(self.plan, self.options.debug.stage)
        if self.options.certificate is not None:
            preflight.check_certificate(*self.options.certificate)
        preflight.check_gpus(self.plan, self._shown_gpus)
        preflight.check_port(self.options.host, self._port())

    async def start(self) -> None:
        """Start everything and wait until it can answer.

        Raises: ConfigurationError: it cannot run here. StartupFailed: a process did not get ready; all is stopped.
        """
        self.check()
        base = self.spec.endpoints.base_path
        rundir.sweep(base)
        self._dir = rundir.RunDir(base)
        try:
            self._kept = KeptOutput(self._dir.path)
            self._reaper, self._living = reaper.start(str(self._dir.path))
            self._launch()
            await self.ready()
            self._supervisor.settle()
            if self.plan.autoscaling:
                self._autoscaling = asyncio.create_task(self._follow_load(), name=AUTOSCALING)
            shown = {"certificate": str(self._certificate)} if self._certificate else {}
            self._dir.publish({"pipeline": self.plan.pipeline, "pid": os.getpid(), "url": self.url, **shown})
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
        self._stopping = True
        self._supervisor.ask_all_to_stop()

    async def stop(self) -> None:
        """Drain, wait until everything is gone, and remove what is left of the run."""
        if not self._stopping:
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
        ending = [*self._orders, *([] if self._autoscaling is None else [self._autoscaling])]
        for task in ending:
            task.cancel()
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
        """Let ``group`` have so many instances: new ones are ready, or old ones drained, when this returns.

        Raises: ConfigurationError: no such group, no such number, or the pipeline is stopping. StartupFailed: a new
            instance did not get ready; all that were added are gone again.
        """
        unit, plan = self._find(group)
        in_charge = self._autoscaler.in_charge(unit.name)
        if in_charge is not None:
            raise ConfigurationError(f"{group}: {in_charge}")
        least = 0 if _is_prefill(unit, plan) else 1
        if replicas < least:
            raise ConfigurationError(f"{group}: {replicas} replicas would serve nothing; the least is {least}")
        async with self._changing:
            there = self._supervisor.instances(group)
            await self._grow(unit, plan, replicas - len(there))
            self._wanted[group] = replicas
            there.sort(key=lambda one: not one.ready)  # those that serve stay
            await asyncio.gather(*(self._supervisor.stop(one.spec.name) for one in there[replicas:]))

    async def restart(self, group: str) -> None:
        """Replace every instance of ``group`` by a new one, one after another, and start those that are missing.

        On CPU the new one is ready before the old one drains. A GPU has no room for both: there the old one goes first.
        Raises: ConfigurationError: no such group, or the pipeline is stopping. StartupFailed: a new instance did not
            get ready and is gone again; the old ones that it was not the turn of go on.
        """
        unit, plan = self._find(group)
        async with self._changing:
            await asyncio.gather(*self._orders, return_exceptions=True)
            for old in self._supervisor.instances(group):
                if unit.gpu_ids:
                    self._refuse_when_stopping()
                    await self._supervisor.stop(old.spec.name)
                    await self._grow(unit, plan, 1, old.spec.replica)
                else:
                    await self._grow(unit, plan, 1)
                    await self._supervisor.stop(old.spec.name)
            await self._grow(unit, plan, self._wanted[group] - len(self._supervisor.instances(group)))

    async def update(self, changed: set[Path]) -> str:
        """Read the file again; what differs from what runs gets new instances, and the old ones finish their requests.

        changed: files of its folder that were written. On a GPU the old instances go first. Returns: what was done.
        Raises: SpecError, ConfigurationError: the file is wrong. StartupFailed: a new instance did not get ready. What
            ran goes on.
        """
        source, overrides, environ = self._given
        fresh = LocalPipeline(source, overrides=overrides, options=self.options, environ=environ)
        preflight.check_gpus(fresh.plan, fresh._shown_gpus)
        wanted = updating.change(self.plan, fresh.plan, changed, self._author_folder)
        async with self._changing:
            self._refuse_when_stopping()
            await asyncio.gather(*self._orders, return_exceptions=True)
            if wanted.begin or wanted.end or self.plan.current != fresh.plan.current:
                await self._replace(fresh, wanted)
        grown = updating.scaled(self.plan, fresh.plan, wanted)
        self.spec, self.plan = fresh.spec, fresh.plan
        for group, replicas in grown.items():
            await self.scale(group, replicas)
        return wanted.told(grown)

    async def _replace(self, fresh: LocalPipeline, wanted: updating.Change) -> None:
        ended = [(unit, group) for unit in self.plan.units if unit.name in wanted.end for group in unit.groups]
        begun = [(unit, group) for unit in fresh.plan.units if unit.name in wanted.begin for group in unit.groups]
        old = [(unit, group, one) for unit, group in ended for one in self._supervisor.instances(group.name)]
        before, self._version = self._launcher, self._version + 1
        launcher = self._launcher_of(fresh)
        launcher.serve([self.plan.current, fresh.plan.current])
        added: list[str] = []
        try:
            await asyncio.gather(*(self._supervisor.stop(one.spec.name) for unit, _, one in old if unit.gpu_ids))
            for unit, group in begun:
                added += [launcher.add_replica(unit, group) for _ in range(fresh.plan.replicas[unit.name])]
            await self._admitted(functools.partial(self._supervisor.ready, added))
            self._supervisor.settle(added)
        except BaseException:
            launcher.serve([self.plan.current])
            await asyncio.shield(asyncio.gather(*map(self._supervisor.take_back, added)))
            for unit, group, one in old:
                if unit.gpu_ids and not self._stopping:
                    before.add_replica(unit, group, one.spec.replica)
            raise
        self._launcher = launcher
        launcher.serve([fresh.plan.current])
        self._wanted = {
            name: count for name, count in self._wanted.items() if name not in {one.name for _, one in ended}
        }
        self._wanted |= {group.name: fresh.plan.replicas[unit.name] for unit, group in begun}
        await asyncio.gather(*(self._supervisor.stop(one.spec.name) for unit, _, one in old if not unit.gpu_ids))

    # --- autoscaling.Scaled -----------------------------------------------------------------------------------------

    def instances(self, unit: str) -> autoscaling.Instances | None:
        if self._changing.locked():
            return None
        groups = next(one.groups for one in self.plan.units if one.name == unit)
        there = [[one for one in self._supervisor.instances(group.name) if not one.stopping] for group in groups]
        ready = min(sum(one.ready for one in its) for its in there)
        return autoscaling.Instances(ready, max(map(len, there)) - ready)

    def order(self, unit: str, replicas: int) -> None:
        plan = next(one for one in self.plan.units if one.name == unit)
        for group in plan.groups:
            self._wanted[group.name] = replicas
            every = self._supervisor.instances(group.name)
            there = sorted((one for one in every if not one.stopping), key=lambda one: not one.ready)
            room = self.plan.autoscaling[unit].most - len(every)  # one that ends still has its GPU
            for _ in range(min(replicas - len(there), room)):
                self._begin(self._start_one(plan, group))
            for one in there[replicas:]:
                self._begin(self._supervisor.stop(one.spec.name))

    def say(self, line: str) -> None:
        self._printed(AUTOSCALING, line)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    async def _start_one(self, unit: UnitPlan, group: GroupPlan) -> None:
        began = time.monotonic()
        name = self._launcher.add_replica(unit, group)
        try:
            await self._admitted(functools.partial(self._supervisor.ready, [name]), group.name)
            self._supervisor.settle([name])
            self._autoscaler.started(unit.name, time.monotonic() - began)
        except BaseException as error:
            there = next((one for one in self._supervisor.instances(group.name) if one.spec.name == name), None)
            if there is None or there.stopping:
                return  # it was given up, or all is
            await asyncio.shield(self._supervisor.take_back(name))
            if not isinstance(error, StartupFailed):
                raise
            self._autoscaler.start_failed(unit.name, str(error), time.monotonic())

    async def _follow_load(self) -> None:
        key = next(iter(self._api_keys), None)
        while True:
            self._autoscaler.step(await admitted.status(self.url, key, self._certificate), time.monotonic())
            await asyncio.sleep(autoscaling.STEP_S)

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _grow(self, unit: UnitPlan, group: GroupPlan, count: int, replica: int | None = None) -> None:
        """Add instances and wait until the coordinator gives them work; if one fails, take all of them back."""
        self._refuse_when_stopping()
        if count < 1:
            return
        added: list[str] = []
        try:
            for _ in range(count):
                added.append(self._launcher.add_replica(unit, group, replica))
            await self._admitted(functools.partial(self._supervisor.ready, added), group.name)
            self._supervisor.settle(added)
        except BaseException as error:
            await asyncio.shield(asyncio.gather(*map(self._supervisor.take_back, added)))
            left, wanted = len(self._supervisor.instances(group.name)), self._wanted[group.name]
            if isinstance(error, StartupFailed) and left < wanted and not self._stopping:
                cure = f"{left} of {wanted} instances of {group.name} run now: `omni restart {group.name}` tries again"
                raise error.with_cure(cure) from error
            raise

    def _refuse_when_stopping(self) -> None:
        if self._stopping:
            raise ConfigurationError(f"{self.plan.pipeline} is stopping")

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

    def _launch(self) -> None:
        assert self._dir is not None
        self._launcher = self._launcher_of(self)
        limits = {"enabled": self.spec.profiling.enabled, "maxSeconds": self.spec.profiling.max_seconds}
        self._dir.write(PROFILING_FILE, msgspec.json.encode(limits))
        self._launcher.add_coordinator(
            host=self.options.host,
            port=self._port,
            api_keys=self._api_keys,
            certificate=self.options.certificate,
        )
        for unit in self.plan.units:
            for group in unit.groups:
                for _ in range(self.plan.replicas[unit.name]):
                    self._launcher.add_replica(unit, group)

    def _launcher_of(self, prepared: LocalPipeline) -> Launcher:
        """prepared: this pipeline, or a later version of it. Each has a folder of its own for code."""
        assert self._dir is not None
        folder = self._dir.path / (f"code-{self._version}" if self._version else "code")
        common = {**prepared.environment(folder), reaper.RUN: str(self._dir.path)}
        if self.options.debug_values:
            common["OMNI_DEBUG_VALUES"] = "1"
        if self.options.log_level is not None:
            common["OMNI_LOG_LEVEL"] = self.options.log_level
        return Launcher(
            prepared.plan,
            self._supervisor,
            self._dir,
            environment=common,
            startup_s=self.options.startup_s,
            shown_gpus=prepared._shown_gpus,
            version=self._version,
            debug=self.options.debug,
        )

    def environment(self, code_dir: Path) -> dict[str, str]:
        """The environment of all processes of the run; the inline files are written to ``code_dir``."""
        if self._code:
            codefiles.write(self._code, code_dir)
        path = (*([code_dir] if self._code else []), *([self._author_folder] if self._author_folder else []))
        environ = {**self._environ, **launching.tracing(self.spec.observability.tracing)}
        return launching.environment(environ, path=path, code_dir=code_dir if self._code else None)

    def _find(self, group: str) -> tuple[UnitPlan, GroupPlan]:
        groups = {plan.name: (unit, plan) for unit in self.plan.units for plan in unit.groups}
        if group not in groups:
            raise ConfigurationError(f"{group!r} is not a process group of {self.plan.pipeline}: {', '.join(groups)}")
        return groups[group]

    def _port(self) -> int:
        """The one to bind; a coordinator that is started again stays at the one it had."""
        if self._url is not None:
            return urlsplit(self._url).port or 80
        return self.plan.coordinator.http_port if self.options.port is None else self.options.port


def read(
    source: str | os.PathLike[str] | PipelineConfig, overrides: Sequence[str] = ()
) -> tuple[LoadedPipeline, Path | None]:
    """A sound spec, and the folder of its file, whose modules may be imported.

    Raises: SpecError: with all faults. ConfigurationError: a module there has a name that is taken.
    """
    if isinstance(source, PipelineConfig):
        name = planning.plan(source).pipeline
        return LoadedPipeline(name=name, spec=source, source="the spec", sources={}), None
    folder = author_folder.of(os.fspath(source))
    author_folder.check(folder)
    return loading.load(os.fspath(source), overrides=overrides), folder


def _ignore(_view: ProcessView) -> None:
    """Ignores changes."""


def _drop(_process: str, _line: str) -> None:
    """Ignores lines."""


def _is_prefill(unit: UnitPlan, group: GroupPlan) -> bool:
    """Whether requests do without the group: decode computes their prompts then."""
    return all(stage.kv_role == "prefill" for stage in unit.stages if stage.name in group.stages)
