"""Faults of what carries tensors: relays, their ranks and devices, and ways between pods.

Here: `relayBackend`, `stages[].relay`, `dataPlane`. Not here: placement itself (`placement`); what only the running
processes know, such as whether a backend starts. Called by `topology` on a spec of valid form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import msgspec

from omnipipeline_spec.pipeline import PipelineConfig, RelayConfig, StageConfig
from omnipipeline_spec.types.errors import Fault
from omnipipeline_spec.types.relays import RELAYS
from omnipipeline_spec.validation import disaggregation, grouping

Pairs: TypeAlias = Mapping[str, tuple[str, ...]]  #: Prefill stage -> the decode stage that it sends KV blocks to.


def faults(spec: PipelineConfig) -> Iterator[Fault]:
    """All faults of relays and ways between pods."""
    for fault in _faults(disaggregation.expanded(spec), disaggregation.pairs(spec)):
        yield msgspec.structs.replace(fault, path=disaggregation.declared_path(spec, fault.path))


def _faults(spec: PipelineConfig, pairs: Pairs) -> Iterator[Fault]:
    yield from _ranks(spec)
    yield from _devices(spec)
    yield from _without_gpu(spec, pairs)
    yield from _mooncake(spec)
    yield from _without_tcp(spec, pairs)


def on_cluster(spec: PipelineConfig) -> Iterator[Fault]:
    """Transports that are refused on a cluster and work on one machine."""
    far = _between_pods(disaggregation.expanded(spec), disaggregation.pairs(spec))
    named = RELAYS.get(spec.relay_backend)
    if named is not None and named.one_pod and far is not None:
        message = f"is {spec.relay_backend}, which never crosses pods, "
        message += f"and on a cluster {far[0]!r} and {far[1]!r} run in different pods"
        yield Fault(path="relayBackend", message=f"{message}: use auto", names=far)


def _targets(stage: StageConfig, pairs: Pairs) -> tuple[str, ...]:
    return (*stage.next, *stage.stream_to, *pairs.get(stage.name, ()))


def _between_pods(spec: PipelineConfig, pairs: Pairs) -> tuple[str, str] | None:
    """The first edge between pods."""
    groups = grouping.group(spec)
    unit_of = {stage.name: groups.unit_of(name) for name, members in groups.groups.items() for stage in members}
    for stage in spec.stages:
        here = unit_of[stage.name]
        for name in _targets(stage, pairs):
            if unit_of.get(name, here) != here:
                return stage.name, name
    return None


def _ranks(spec: PipelineConfig) -> Iterator[Fault]:
    """A rank is a process's: its stages have one, and no other process of the world has it."""
    taken: dict[int, str] = {}
    worlds: dict[int, str] = {}
    groups = grouping.group(spec)
    group_of = {stage.name: name for name, members in groups.groups.items() for stage in members}
    rank_of: dict[str, int] = {}
    for index, stage in enumerate(spec.stages):
        relay = stage.relay or RelayConfig()
        path = f"stages[{index}].relay"
        rank, world = relay.rank, relay.world_size
        if rank is None and world is None:
            continue
        if rank is None or world is None:
            missing, given = ("rank", "worldSize") if rank is None else ("worldSize", "rank")
            yield Fault(path=f"{path}.{given}", message=f"needs {missing}, too", names=(stage.name,))
            continue
        if spec.relay_backend != "nccl":
            message = f"is of an NCCL world, and relayBackend is {spec.relay_backend}: remove it, or set nccl"
            yield Fault(path=f"{path}.rank", message=message, names=(stage.name,))
        if rank >= world:
            message = f"{rank} is not a rank of a world of {world}: use 0 to {world - 1}"
            yield Fault(path=f"{path}.rank", message=message, names=(stage.name,))
        other = worlds.setdefault(world, stage.name)
        if len(worlds) > 1:
            first = next(iter(worlds))
            message = f"{world} of {stage.name!r} differs from {first} of {worlds[first]!r}"
            yield Fault(path=f"{path}.worldSize", message=message, names=(stage.name, other))
        group = group_of.get(stage.name, stage.name)
        if rank_of.setdefault(group, rank) != rank:
            message = f"{rank} of {stage.name!r} differs from {rank_of[group]} of its process {group!r}"
            yield Fault(path=f"{path}.rank", message=message, names=(stage.name,))
        elif taken.setdefault(rank, group) != group:
            message = f"{rank} is taken by the process {taken[rank]!r}"
            yield Fault(path=f"{path}.rank", message=message, names=(stage.name,))


def _devices(spec: PipelineConfig) -> Iterator[Fault]:
    for index, stage in enumerate(spec.stages):
        if stage.relay is not None and stage.relay.device == "cuda" and not stage.gpus:
            message = f"is cuda, and {stage.name!r} has no gpu"
            yield Fault(path=f"stages[{index}].relay.device", message=message, names=(stage.name,))


def _without_gpu(spec: PipelineConfig, pairs: Pairs) -> Iterator[Fault]:
    """A relay between GPUs reaches no stage without one: each request on such an edge would fail."""
    named = RELAYS.get(spec.relay_backend)
    if named is None or not named.of_gpus:
        return
    groups = grouping.group(spec)
    group_of = {stage.name: name for name, members in groups.groups.items() for stage in members}
    gpus_of = {stage.name: stage.gpus for stage in spec.stages}
    for stage in spec.stages:
        for target in _targets(stage, pairs):
            if group_of.get(target) in (None, group_of[stage.name]):
                continue
            without = [name for name in (stage.name, target) if not gpus_of[name]]
            if without:
                message = f"is {spec.relay_backend}, and {without[0]!r} of the edge {stage.name} -> {target} "
                message += "has no gpu: give it one, or use auto"
                yield Fault(path="relayBackend", message=message, names=tuple(without))
                return


def _mooncake(spec: PipelineConfig) -> Iterator[Fault]:
    protocol = spec.data_plane.mooncake_protocol
    if protocol is None:
        return
    if spec.relay_backend not in ("auto", "mooncake"):
        message = f"is of mooncake, and relayBackend is {spec.relay_backend}"
        yield Fault(path="dataPlane.mooncakeProtocol", message=message)
    elif protocol == "tcp" and not spec.data_plane.allow_tcp:
        yield Fault(path="dataPlane.mooncakeProtocol", message="is tcp, and allowTCP is false")


def _without_tcp(spec: PipelineConfig, pairs: Pairs) -> Iterator[Fault]:
    """A fault where TCP is forbidden and an edge between pods lacks RDMA devices, or a backend that uses them: the
    other backends write to sockets, each by its own library.
    """
    by_rdma = spec.relay_backend == "auto" or RELAYS[spec.relay_backend].by_rdma
    if spec.data_plane.allow_tcp or (by_rdma and spec.data_plane.rdma is not None):
        return
    far = _between_pods(spec, pairs)
    if far is not None:
        message = f"is false, but {far[0]!r} and {far[1]!r} run in different pods and relayBackend "
        message += f"{spec.relay_backend!r} cannot connect them without TCP"
        message += ": set dataPlane.rdma" if by_rdma else ""
        yield Fault(path="dataPlane.allowTCP", message=message, names=far)
