"""PID 1 of a stage pod: all process groups of a pod unit under one supervisor, with probes for the kubelet.

Here: what a pod adds to the supervisor: fixed ports, probes, the termination message, adopted zombies. Not here:
starting and restarting (`supervisor`), the same for a whole pipeline on one machine (`local`). Called by `__main__`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TextIO

import msgspec

from omnipipeline_spec import crashes
from omnipipeline_spec.types.plan import GroupPlan
from stage_runtime.metrics import catalog, exposition, planes
from stage_runtime.metrics.samples import Samples
from stage_runtime.processes import signals
from stage_runtime.processes.containers import termination
from stage_runtime.processes.containers.pod_probes import ProbeServer, Reply, Routes
from stage_runtime.processes.starting import codefiles, launching, rundir
from stage_runtime.processes.starting.launching import Addresses, StageLaunch
from stage_runtime.processes.supervision import activity, parent_death
from stage_runtime.processes.supervision.instances import ProcessView, RestartPolicy
from stage_runtime.processes.supervision.progress import LoadingLines
from stage_runtime.processes.supervision.supervisor import Supervisor
from stage_runtime.settings import SupervisorSettings
from stage_runtime.sockets.endpoints import hosts

EXIT_FAILED = 1
#: Deaths before ready, in a row, after which the pod ends: CrashLoopBackOff then has the reason, where people look.
GIVE_UP_AFTER = 5


def run(settings: SupervisorSettings) -> int:
    """Run the pod's processes until SIGTERM (exit code 0) or until one cannot start (1; 4: it did nothing)."""
    return asyncio.run(Pod(settings).run())


class Pod:
    """One pod unit in this container."""

    def __init__(self, settings: SupervisorSettings) -> None:
        self._settings = settings
        self._lines = LoadingLines()
        self._alone = sum(len(group.processes) for group in settings.plan.groups) == 1
        self._supervisor = Supervisor(on_change=self._changed, on_line=self._printed)
        self._stopping = False
        self._memory_kills = activity.memory_kills()

    async def run(self) -> int:
        """See `run`."""
        loop = asyncio.get_running_loop()
        signals.handle(self._stop, signal.SIGTERM, signal.SIGINT)
        parent_death.adopt_orphans()  # as PID 1 we do anyway
        loop.add_signal_handler(signal.SIGCHLD, self._reap_adopted)
        folder = rundir.RunDir(None)
        try:
            async with ProbeServer(
                self.routes(), host=hosts.host(self._settings.probe_host), port=self._settings.probe_port
            ):
                self._launch(folder)
                return await self._until_over()
        finally:
            await self._supervisor.close()
            folder.remove()

    def routes(self) -> Routes:
        """The routes that the kubelet and Prometheus ask for."""
        return {"/livez": self._livez, "/readyz": self._readyz, "/metrics": self._metrics, "/status": self._status}

    def _launch(self, folder: rundir.RunDir) -> None:
        settings = self._settings
        code_dir = folder.path / "code" if settings.plan.code else None
        if code_dir is not None:
            codefiles.write(settings.plan.code, code_dir)
        path = () if code_dir is None else (code_dir,)
        common = launching.environment(os.environ, path=path, code_dir=code_dir) | settings.passed_on
        policy = RestartPolicy(
            startup_s=settings.startup_timeout_s, grace_s=settings.grace_s, give_up_after=GIVE_UP_AFTER
        )
        for group in settings.plan.groups:
            launch = StageLaunch(
                unit=settings.plan,
                group=group,
                plan_file=settings.plan_file,
                replica=0,
                coordinators=settings.coordinators,
                environment=common,
                addresses=_addresses(settings.address, settings.control_port + group.index, group, folder.path),
            )
            self._supervisor.add(launching.stage_instance(launch), policy)
        self._supervisor.settle()  # a pod forgives the death of what had been ready, though others still load

    async def _until_over(self) -> int:
        over = asyncio.ensure_future(self._supervisor.gone())
        failed = asyncio.ensure_future(self._supervisor.until(lambda: False))
        await asyncio.wait([over, failed], return_when=asyncio.FIRST_COMPLETED)
        failed.cancel()
        over.cancel()
        failure = self._supervisor.failure
        if failure is None or self._stopping:
            return 0
        killed = activity.memory_kills() - self._memory_kills
        cause = f"{failure}; the container ran out of memory" if killed > 0 else str(failure)
        termination.write(self._settings.termination_log, cause, failure.details)
        _print(failure.explanation(), sys.stderr)
        return crashes.EXIT_HUNG if failure.hung else EXIT_FAILED

    def _stop(self, reason: str) -> None:
        _print(f"draining: {reason}")
        self._stopping = True
        self._supervisor.ask_all_to_stop()

    def _reap_adopted(self) -> None:
        """Reap orphans that the kernel has re-parented to this process; each `Child` waits for its own process."""
        own = {child.pid for one in self._supervisor.instances() for child in one.children if not child.exited.done()}
        for entry in os.listdir("/proc"):
            if entry.isdecimal() and int(entry) not in own and activity.is_zombie_of(int(entry), os.getpid()):
                os.waitpid(int(entry), os.WNOHANG)

    def _changed(self, view: ProcessView) -> None:
        if not self._lines.is_due(view.process, view.message, view.share):
            return
        if not self._alone or view.share is not None or view.state in ("restarting", "failed"):
            _print(f"{view.process}: {view.state}{f': {view.detail}' if view.detail else ''}")

    def _printed(self, process: str, line: str) -> None:
        plain = self._alone or line.startswith("{")  # a JSON log line names its process itself
        _print(line if plain else f"{process} | {line}")

    def _livez(self) -> Reply:
        return Reply(body="alive\n")  # PID 1 is; the model never counts

    def _readyz(self) -> Reply:
        if self._stopping:
            return Reply(body="draining\n", status=HTTPStatus.SERVICE_UNAVAILABLE)
        waiting = [view for view in self._supervisor.views() if view.state != "ready"]
        if not waiting:
            return Reply(body="ready\n")
        lines = "".join(f"{view.process}: {view.state} {view.detail}".rstrip() + "\n" for view in waiting)
        return Reply(body=lines, status=HTTPStatus.SERVICE_UNAVAILABLE)

    def _status(self) -> Reply:
        plan = self._settings.plan
        body = {
            "pipeline": plan.pipeline,
            "unit": plan.name,
            "revision": plan.revision,
            "draining": self._stopping,
            "processes": [msgspec.to_builtins(view) for view in self._supervisor.views()],
        }
        return Reply(body=json.dumps(body) + "\n", content_type="application/json")

    def _metrics(self) -> Reply:
        return Reply(body=exposition.render(samples(self._supervisor.views())), content_type=exposition.CONTENT_TYPE)


def _print(text: str, file: TextIO | None = None) -> None:
    """Print a line, to standard output by default. The processes go on when nobody reads it, or a disk is full."""
    try:
        print(text, file=file, flush=True)
    except BrokenPipeError:  # for good, and Python's end would fail by what is left in its buffer
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), (file or sys.stdout).fileno())
    except OSError:
        pass


def samples(views: Sequence[ProcessView]) -> Samples:
    """The samples that a pod serves of its processes."""
    running = [(view.process, view.pid) for view in views if view.pid is not None]
    activities = [(name, activity.of_session(pid)) for name, pid in running]
    of_processes: Samples = {
        catalog.PROCESS_READY: {(view.process,): float(view.state == "ready") for view in views},
        catalog.PROCESS_RESTARTS: {(view.process,): view.restarts for view in views},
        catalog.PROCESS_RESIDENT_MEMORY: {(name,): activity.resident_bytes(pid) for name, pid in running},
        catalog.PROCESS_CPU: {(name,): found.cpu_s for name, found in activities if found is not None},
    }
    return {**of_processes, **planes.samples({view.process: view.gauges for view in views})}


def _addresses(pod_ip: str, port: int, group: GroupPlan, folder: Path) -> Callable[[], Addresses]:
    """Rank 0 on its fixed port, for everybody; the other ranks on Unix sockets, for rank 0 alone."""
    fresh = launching.local_addresses(folder, group.processes)
    listen = hosts.written_out(f"tcp://{hosts.ANYWHERE}:{port}")
    advertise = hosts.written_out(f"tcp://{pod_ip}:{port}")

    def addresses() -> Addresses:
        return Addresses(listen=listen, advertise=advertise, followers=fresh().followers)

    return addresses
