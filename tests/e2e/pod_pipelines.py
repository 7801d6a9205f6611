"""A pipeline as pods have it, on the loopback: TCP and CURVE at every socket, one coordinator or several."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from omnipipeline_spec import planning
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.plan import CanaryShare, PipelinePlan
from omnipipeline_spec.types.pods import CANARY_FILE, ON_DEMAND_FILE
from stage_runtime.processes.starting import launching
from stage_runtime.processes.starting.launching import Addresses, StageLaunch
from stage_runtime.processes.supervision.children import Command
from stage_runtime.processes.supervision.instances import InstanceSpec, RestartPolicy, SupervisedInstance
from stage_runtime.processes.supervision.statuspipe import Serving
from stage_runtime.processes.supervision.supervisor import Supervisor
from tests.e2e.local_pipelines import HERE
from tests.ports import free_port

KEY = b"thirty-two bytes of the pipeline"
POLICY = RestartPolicy(startup_s=120, grace_s=20)
ANYWHERE = "tcp://127.0.0.1:0"


class Pods:
    """One coordinator per name, and one process per group that registers with all of them."""

    def __init__(
        self,
        spec: PipelineConfig,
        folder: Path,
        coordinators: tuple[str, ...],
        environments: Mapping[str, Mapping[str, str]],
    ) -> None:
        """environments: of a coordinator or a group, beside what all have."""
        self._environments = environments
        self.plan = planning.plan(spec)
        self.control = {name: f"tcp://127.0.0.1:{free_port()}" for name in coordinators}
        self.publisher = {name: f"tcp://127.0.0.1:{free_port()}" for name in coordinators}
        self._folder = folder
        self._log = (folder / "log").open("a")
        self._supervisor = Supervisor(on_change=lambda _: None, on_line=self._line)
        self._coordinators: dict[str, SupervisedInstance] = {}
        key = folder / "key"
        key.write_bytes(KEY)
        path = [HERE, *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
        self._environment = launching.environment(os.environ, path=path, code_dir=None)
        self._environment["OMNI_CONTROL_KEY_FILE"] = str(key)

    def url(self, coordinator: str) -> str:
        """The address where it answers HTTP."""
        (child,) = self._coordinators[coordinator].children
        return next(event.url for event in reversed(child.events) if isinstance(event, Serving))

    def pids(self) -> dict[str, int]:
        return {view.process: view.pid for view in self._supervisor.views() if view.pid is not None}

    async def ready(self) -> None:
        await self._supervisor.started()

    async def start(self) -> None:
        plan = self.plan
        revisions = self._file("revisions.json", [plan.current])
        for name in self.control:
            environment = {
                **self._environment,
                "OMNI_PLAN": str(self._file("coordinator.json", plan.coordinator)),
                "OMNI_REVISIONS": str(revisions),
                "OMNI_LISTEN": self.control[name],
                "OMNI_PUBLISH": self.publisher[name],
                "OMNI_HTTP_PORT": "0",
                **self._environments.get(name, {}),
            }
            argv = launching.coordinator_instance({}, dict).commands()[0].argv
            command = Command(name=name, argv=argv, env=environment, awaits=frozenset({Serving}))
            spec = InstanceSpec(
                name=name,
                group=name,
                replica=0,
                stages=(),
                processes=(name,),
                commands=partial(lambda one: [one], command),
            )
            self._coordinators[name] = self._supervisor.add(spec, POLICY)
        self._add(plan)
        await self.ready()
        self._supervisor.settle()

    def _add(self, plan: PipelinePlan) -> None:
        """One process of each group."""
        for unit in plan.units:
            file = self._file(f"{unit.name}-{unit.revision}.json", unit)
            for group in unit.groups:
                launch = StageLaunch(
                    unit=unit,
                    group=group,
                    plan_file=file,
                    replica=0,
                    coordinators=",".join(self.control.values()),
                    environment={**self._environment, **self._environments.get(group.name, {})},
                    addresses=lambda: Addresses(listen=ANYWHERE, advertise=ANYWHERE),
                )
                self._supervisor.add(launching.stage_instance(launch), POLICY)

    def announce(self, spec: PipelineConfig, *, awaited: Sequence[str]) -> PipelinePlan:
        """Do as an operator: this spec's revision is the next one, and requests wait for these groups."""
        plan = planning.plan(spec)
        self._file(ON_DEMAND_FILE, list(awaited))
        self._file("revisions.json", [self.plan.current, plan.current])
        return plan

    def share(self, plan: PipelinePlan, weight: float) -> None:
        """Do as an operator: the coordinators give this revision so much of the requests."""
        self._file(CANARY_FILE, CanaryShare(revision=plan.current.revision, weight=weight))

    async def end_all(self) -> None:
        """Drain the processes of all groups at once."""
        await asyncio.gather(*(self.end(group.name) for unit in self.plan.units for group in unit.groups))

    async def begin(self, plan: PipelinePlan) -> None:
        """Start the processes of another revision, whose predecessors have ended."""
        self._add(plan)
        await self.ready()

    async def end(self, name: str) -> None:
        """Drain one process, as a pod that is deleted: when this returns it is gone."""
        await self._supervisor.stop(name)

    async def stop(self) -> None:
        self._supervisor.ask_all_to_stop()
        await self._supervisor.gone()
        await self._supervisor.close()
        self._log.close()

    def _file(self, name: str, content: Any) -> Path:
        file = self._folder / name
        file.write_bytes(msgspec.json.encode(content))
        return file

    def _line(self, name: str, line: str) -> None:
        print(f"{name}: {line}", file=self._log, flush=True)


@contextlib.asynccontextmanager
async def pods(
    spec: PipelineConfig,
    folder: Path,
    *coordinators: str,
    environments: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> AsyncIterator[Pods]:
    """All of them up; drained and gone afterwards. Their log is in ``folder/log``."""
    made = Pods(spec, folder, coordinators or ("coordinator",), environments)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()
