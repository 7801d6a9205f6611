"""Adds the coordinator and the instances of a local run to its supervisor. Called by `fleet`.

How a process is started is `launching`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from omnipipeline_spec import scaling
from omnipipeline_spec.types.plan import GroupPlan, PipelinePlan, PipelineRevision, UnitPlan
from omnipipeline_spec.types.pods import ON_DEMAND_FILE
from stage_runtime.processes.one_machine.preparing import preflight
from stage_runtime.processes.starting import launching
from stage_runtime.processes.starting.launching import StageLaunch
from stage_runtime.processes.starting.rundir import RunDir
from stage_runtime.processes.supervision.instances import RestartPolicy
from stage_runtime.processes.supervision.supervisor import Supervisor

KEY_FILE = "api-key"  # in the run's folder, which is the user's alone
SHOWN_CERTIFICATE = "certificate.pem"  # there, too: what the coordinator shows, whatever the author's file holds now


class Debug(msgspec.Struct, frozen=True, kw_only=True):
    """Breakpoints of ``stage`` stop at a terminal."""

    stage: str
    terminal: tuple[int, int]  #: Its descriptors in this process: input, output.


class Launcher:
    """Adds the processes of one run to its supervisor."""

    def __init__(
        self,
        plan: PipelinePlan,
        supervisor: Supervisor,
        directory: RunDir,
        *,
        environment: Mapping[str, str],
        startup_s: float,
        shown_gpus: str | None,
        version: int = 0,
        debug: Debug | None = None,
    ) -> None:
        """environment: of all processes. shown_gpus: CUDA_VISIBLE_DEVICES, if it is set.

        version: of the plan; processes of an earlier one that are started again read that one. debug: the first
        instance of its stage's group gets the terminal.
        """
        self._prefix = f"{version}." if version else ""
        self._plan = plan
        self._supervisor = supervisor
        self._dir = directory
        self._environment = environment
        self._startup_s = startup_s
        self._shown_gpus = shown_gpus
        self._debug = debug
        for unit in plan.units:
            directory.write(f"{self._prefix}{unit.name}.unit.json", msgspec.json.encode(unit))

    def add_coordinator(
        self,
        *,
        host: str,
        port: Callable[[], int],
        api_keys: Sequence[str],
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        """Start the coordinator. port: called at each start; a restarted one keeps its port.

        certificate: files of the HTTP server's certificate and its key.
        """
        plan = self._plan.coordinator
        self.start_on_demand(scaling.on_demand(self._plan))
        variables = {
            "OMNI_PLAN": str(self._dir.write("coordinator.json", msgspec.json.encode(plan))),
            "OMNI_REVISIONS": str(self.serve([self._plan.current])),
            "OMNI_LISTEN": self._dir.endpoint("coordinator.sock"),
            "OMNI_PUBLISH": self._dir.endpoint("publisher.sock"),
            "OMNI_HTTP_HOST": host,
            "OMNI_HTTP_QUIET_S": "0",  # it ends together with all that it could send requests to
        }
        if api_keys:
            variables["OMNI_API_KEY_FILE"] = str(self._dir.write(KEY_FILE, "\n".join(api_keys).encode()))
        if certificate is not None:
            names = ("OMNI_TLS_CERT_FILE", "OMNI_TLS_KEY_FILE")
            variables |= zip(names, map(str, certificate), strict=True)
            variables["OMNI_TLS_SHOWN_FILE"] = str(self._dir.path / SHOWN_CERTIFICATE)
        common = {**self._environment, "CUDA_VISIBLE_DEVICES": ""}
        spec = launching.coordinator_instance(common, lambda: {**variables, "OMNI_HTTP_PORT": str(port())})
        self._supervisor.add(spec, RestartPolicy(startup_s=self._startup_s, grace_s=plan.drain_timeout_s))

    def serve(self, revisions: Sequence[PipelineRevision]) -> Path:
        """Tell the coordinator, now or when it starts, which revisions of the pipeline there are; the newest last."""
        return self._dir.write("revisions.json", msgspec.json.encode(revisions))

    def start_on_demand(self, groups: Sequence[str]) -> None:
        """Tell the coordinator, now or when it starts, which groups requests wait for until an instance is started."""
        self._dir.write(ON_DEMAND_FILE, msgspec.json.encode(groups))

    def add_replica(self, unit: UnitPlan, group: GroupPlan, replica: int | None = None) -> str:
        """Start one more instance; its name."""
        if replica is None:
            taken = {one.spec.replica for one in self._supervisor.instances(group.name)}
            replica = next(number for number in range(len(taken) + 1) if number not in taken)
        name_of = [launching.instance_name(process, replica) for process in group.processes]
        debug = self._debug if self._debug is not None and self._debug.stage in group.stages and not replica else None
        launch = StageLaunch(
            unit=unit,
            group=group,
            plan_file=self._dir.path / f"{self._prefix}{unit.name}.unit.json",
            replica=replica,
            coordinators=self._dir.endpoint("coordinator.sock"),
            environment=self._environment,
            addresses=launching.local_addresses(self._dir.path, name_of),
            gpus=preflight.gpus_of(self._plan, unit, group, replica, self._shown_gpus),
            terminal=None if debug is None else debug.terminal,
        )
        spec = launching.stage_instance(launch)
        self._supervisor.add(spec, RestartPolicy(startup_s=self._startup_s, grace_s=unit.drain_timeout_s))
        return spec.name
