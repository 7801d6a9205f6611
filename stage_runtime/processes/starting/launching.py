"""The commands that start a plan's processes. Only this module writes ``OMNI_…`` variables.

Here: arguments, environment and addresses of stage and coordinator processes, on one machine and in a pod. Not here:
reading them (`settings`), running anything (`instances`). Called by `local` and `pod`.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from omnipipeline_spec.cluster import Tracing
from omnipipeline_spec.types.plan import GroupPlan, UnitPlan
from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime import breakpoints
from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.supervision import statuspipe
from stage_runtime.processes.supervision.children import Command
from stage_runtime.processes.supervision.instances import InstanceSpec

#: Variables that a person may set for all processes of a run; every other OMNI_ variable is ours to write.
INHERITED = (
    "OMNI_CACHE",
    "OMNI_MODELS_DIR",
    "OMNI_PROFILE_ROOT",
    "OMNI_LOG_FORMAT",
    "OMNI_LOG_LEVEL",
    "OMNI_DEBUG_VALUES",
    "OMNI_ARENA_MB",
    "OMNI_HTTP_HOSTS",
    "OMNI_HTTP_BODIES_MB",
    "OMNI_HTTP_ANSWERS_MB",
)

_LEADER = frozenset({statuspipe.Loaded, statuspipe.Registered})
_FOLLOWER = frozenset({statuspipe.Loaded})  # ranks 1.. talk to rank 0 alone
_SERVING = frozenset({statuspipe.Serving})


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of one life of an instance."""

    listen: str
    advertise: str
    followers: tuple[str, ...] = ()  #: Addresses of ranks 1..n-1.


class StageLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The start parameters of one instance's processes."""

    unit: UnitPlan
    group: GroupPlan
    plan_file: Path
    replica: int
    coordinators: str
    environment: Mapping[str, str]  #: Variables that `environment` made.
    addresses: Callable[[], Addresses]  #: Called for each life.
    gpus: tuple[str, ...] | None = None
    terminal: tuple[int, int] | None = None  #: Our descriptors of the terminal where its breakpoints stop.


def environment(base: Mapping[str, str], *, path: Sequence[Path], code_dir: Path | None) -> dict[str, str]:
    """The environment that all processes of a run have in common.

    path: folders to import from, ahead of PYTHONPATH. Never the working directory: it would surprise.
    """
    kept = {name: value for name, value in base.items() if not name.startswith("OMNI_") or name in INHERITED}
    folders = [*map(str, path), kept.get("PYTHONPATH", "")]
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    if code_dir is not None:
        kept["OMNI_CODE_DIR"] = str(code_dir)
    return {"PYTHONBREAKPOINT": breakpoints.HOOK, **kept, "PYTHONUNBUFFERED": "1"}


def tracing(spec: Tracing | None) -> dict[str, str]:
    """The variables of OpenTelemetry that ``observability.tracing`` sets, as the operator does in pods."""
    if spec is None or spec.endpoint is None:
        return {}
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": spec.endpoint,
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(spec.sample_ratio),
    }


def instance_name(group: str, replica: int) -> str:
    """The first replica goes by its group's name."""
    return f"{group}.{replica}" if replica else group


def stage_instance(launch: StageLaunch) -> InstanceSpec:
    """One instance of a process group; of a TP stage: all its ranks."""
    group = launch.group
    return InstanceSpec(
        name=instance_name(group.name, launch.replica),
        group=group.name,
        replica=launch.replica,
        stages=group.stages,
        processes=tuple(instance_name(process, launch.replica) for process in group.processes),
        commands=lambda: _stage_commands(launch),
    )


def coordinator_instance(environment: Mapping[str, str], variables: Callable[[], Mapping[str, str]]) -> InstanceSpec:
    """The coordinator; ``variables`` gives its own variables for each life."""

    def commands() -> list[Command]:
        env = {**environment, **variables()}
        return [Command(name=COORDINATOR, argv=_argv(COORDINATOR, COORDINATOR), env=env, awaits=_SERVING)]

    return InstanceSpec(
        name=COORDINATOR, group=COORDINATOR, replica=0, stages=(), processes=(COORDINATOR,), commands=commands
    )


def _stage_commands(launch: StageLaunch) -> list[Command]:
    addresses = launch.addresses()
    variables = {
        **launch.environment,
        "OMNI_PLAN": str(launch.plan_file),
        "OMNI_GROUP": launch.group.name,
        "OMNI_COORDINATOR": launch.coordinators,
        "OMNI_ADVERTISE": addresses.advertise,
    }
    if launch.terminal is not None:
        variables[breakpoints.TERMINAL] = ",".join(map(str, launch.terminal))
        variables["PYTHONBREAKPOINT"] = breakpoints.HOOK
    if launch.gpus is not None:
        variables["OMNI_GPUS"] = ",".join(launch.gpus)
    if launch.group.tp_size > 1:
        variables["OMNI_TP_ENDPOINTS"] = ",".join(addresses.followers)
        variables["OMNI_RENDEZVOUS"] = f"tcp://127.0.0.1:{free_port()}"
    listens = (addresses.listen, *addresses.followers)
    return [
        _rank_command(launch, rank, {**variables, "OMNI_LISTEN": listen, "OMNI_TP_RANK": str(rank)})
        for rank, listen in enumerate(listens)
    ]


def _rank_command(launch: StageLaunch, rank: int, variables: dict[str, str]) -> Command:
    name = instance_name(launch.group.processes[rank], launch.replica)
    if rank:
        variables = {**variables, "OMNI_ADVERTISE": variables["OMNI_LISTEN"]}
    return Command(
        name=name,
        argv=_argv("stage", name),
        env=variables,
        awaits=_FOLLOWER if rank else _LEADER,
        inherits=launch.terminal or (),
    )


def _argv(role: str, name: str) -> tuple[str, ...]:
    # The name is not read by anybody but people who look at a list of processes.
    return (sys.executable, "-P", "-m", "stage_runtime", role, name)


def socket_name(process: str, life: int) -> str:
    """File of a process's control socket. Each life has its own, so that messages to one never reach the next."""
    return f"{process}-{life}.sock"


def local_addresses(folder: Path, processes: Sequence[str]) -> Callable[[], Addresses]:
    """Unix sockets in ``folder``, new ones for each life; those of the life before are removed."""
    lives = itertools.count()
    before: list[Path] = []

    def fresh() -> Addresses:
        life = next(lives)
        while before:
            before.pop().unlink(missing_ok=True)
        before.extend(folder / socket_name(process, life) for process in processes)
        first, *others = (f"ipc://{path}" for path in before)
        return Addresses(listen=first, advertise=first, followers=tuple(others))

    return fresh


def visible_gpus(unit: UnitPlan, group: GroupPlan, devices: Sequence[int], shown: str | None) -> tuple[str, ...]:
    """The value of CUDA_VISIBLE_DEVICES that makes the plan's renumbered ids of ``group`` be ``devices``.

    devices: of this replica, in the order of the group's ids. shown: CUDA_VISIBLE_DEVICES of this machine's user.
    Raises:  ConfigurationError: the user's own CUDA_VISIBLE_DEVICES has no such device.
    """
    used = sorted({gpu for stage in unit.stages if stage.name in group.stages for gpu in stage.gpus})
    place = dict(zip(used, devices, strict=True))
    # Ids of other groups in the unit keep their places, so that ours keep theirs.
    ids = [place.get(position, author_id) for position, author_id in enumerate(unit.gpu_ids)] if used else []
    if shown is None:
        return tuple(str(one) for one in ids)
    listed = (one.strip() for one in shown.split(",") if one.strip())
    available = list(itertools.takewhile(lambda one: not one.startswith("-"), listed))  # -1 ends CUDA's list
    missing = sorted({one for one in ids if one >= len(available)})
    if missing:
        raise ConfigurationError(
            f"{group.name} needs GPU {missing[0]}, and CUDA_VISIBLE_DEVICES={shown} shows {len(available)} of them: "
            "choose others with processGroups[].localGpus, or run with --cpu"
        )
    return tuple(available[one] for one in ids)


def gpus_here(dev: Path = Path("/dev")) -> int | None:
    """How many GPUs this machine has; None where there are some of a kind that device files do not count."""
    counted = sum(1 for _ in dev.glob("nvidia[0-9]*"))
    uncounted = any(any(dev.glob(pattern)) for pattern in ("kfd", "dxg", "nvgpu*", "nvhost*"))
    return None if uncounted and not counted else counted


def free_port() -> int:
    """A TCP port of the loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
