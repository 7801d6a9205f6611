"""Checks before a local run starts anything: ports, GPUs, names of sockets. Called by `local`."""

from __future__ import annotations

import errno
import ipaddress
import socket
from pathlib import Path

from omnipipeline_spec.types.plan import GroupPlan, PipelinePlan, UnitPlan
from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.starting import launching
from stage_runtime.web.listening import certificates


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it, whatever the name resolves to."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"--host {host!r}: {getattr(error, 'strerror', None) or error}") from error
    return all(ipaddress.ip_address(str(one[4][0]).partition("%")[0]).is_loopback for one in found)


def check_port(host: str, port: int) -> None:
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
        except TypeError as error:  # characters that no name of a host has
            raise ConfigurationError(f"cannot listen on {host!r}: {error}") from error


def check_debugged(plan: PipelinePlan, stage: str) -> None:
    """Refuse to debug a stage that is not there, or whose ranks wait for each other."""
    groups = {name: group for unit in plan.units for group in unit.groups for name in group.stages}
    if stage not in groups:
        raise ConfigurationError(f"--debug {stage!r} is not a stage of {plan.pipeline}: {', '.join(groups)}")
    if groups[stage].tp_size > 1:
        raise ConfigurationError(f"--debug {stage}: it has {groups[stage].tp_size} ranks, which wait for each other")


def check_certificate(chain: Path, key: Path) -> None:
    """Refuse files that are not a certificate and its key."""
    try:
        certificates.context(certificates.read(chain, key))
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: {error.strerror}") from error
    except ConfigurationError as error:
        raise ConfigurationError(f"--tls-cert {chain}, --tls-key {key}: {error}") from error


def check_gpus(plan: PipelinePlan, shown: str | None) -> None:
    """Refuse GPUs that this machine does not have. shown: CUDA_VISIBLE_DEVICES, if set: then they are not counted."""
    there = launching.gpus_here() if shown is None else None
    for unit in plan.units:
        for group in unit.groups:
            for replica in range(plan.replicas[unit.name]):
                gpus_of(plan, unit, group, replica, shown)
            wanted = max((max(devices, default=-1) for devices in plan.local_gpus[group.name]), default=-1)
            if there is None or wanted < there:
                continue
            stage = next(stage for stage in unit.stages if stage.name in group.stages and stage.gpus)
            cure = "run with --cpu" if there == 0 else "choose others with processGroups[].localGpus, or --cpu"
            has = "none (/dev/nvidia0 is missing)" if there == 0 else f"{there} of them"
            raise ConfigurationError(
                f"stages.{stage.name}.gpu: {group.name} needs GPU {wanted}, and this machine has {has}: {cure}"
            )


def gpus_of(plan: PipelinePlan, unit: UnitPlan, group: GroupPlan, replica: int, shown: str | None) -> tuple[str, ...]:
    """The GPUs of this machine that each rank of an instance is shown."""
    devices = plan.local_gpus.get(group.name, ())
    own = devices[replica % len(devices)] if devices else ()
    return launching.visible_gpus(unit, group, own, shown)


def socket_names(plan: PipelinePlan) -> dict[str, str]:
    """Names as long as any that this run will use."""
    processes = [process for unit in plan.units for group in unit.groups for process in group.processes]
    longest = {launching.socket_name(launching.instance_name(name, 99), 999): name for name in processes}
    return {**longest, "coordinator.sock": COORDINATOR}
