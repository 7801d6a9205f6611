"""Derives the plan from a spec: pure, deterministic, no clock, no cluster.

Here: `plan`, and `without_gpus` for runs on a CPU. Not here: validation (`topology`, called first), the types of the
plan (`plan`), the pod's settings (`podsettings`). Called by the CLI, by local runs and by the operator, which must get
the same bytes for the same spec.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from omnipipeline_spec.cluster import Autoscaling, Coordinator, Drain, ProcessGroup, Startup
from omnipipeline_spec.pipeline import PipelineConfig, RelayConfig, StageConfig
from omnipipeline_spec.planning import inlinecode, podsettings
from omnipipeline_spec.types import quantities
from omnipipeline_spec.types.canonical import canonical, short_hash
from omnipipeline_spec.types.errors import Fault, InvalidPipeline
from omnipipeline_spec.types.plan import (
    QUEUE_S,
    CoordinatorPlan,
    EdgePlan,
    GroupPlan,
    Limits,
    PipelinePlan,
    PipelineRevision,
    RelayPlan,
    StagePlan,
    UnitPlan,
)
from omnipipeline_spec.types.relays import RELAYS
from omnipipeline_spec.validation import disaggregation, grouping, topology
from omnipipeline_spec.validation.disaggregation import Part
from omnipipeline_spec.validation.grouping import Grouping

Revised = TypeVar("Revised", UnitPlan, CoordinatorPlan, PipelineRevision)

STUCK_AFTER_S = 300.0  # a long computation is allowed; five minutes without a step are not


def plan(spec: PipelineConfig, *, name: str | None = None, checked: bool = False) -> PipelinePlan:
    """Everything that follows from a spec.

    name:    the resource's name; without it one is made of the spec's.
    checked: the spec is as `loading` has read it, which has refused its faults: they are not looked for again.
    Raises: InvalidPipeline: with all faults of the spec, and of the name.
    """
    if name is None and not isinstance(spec.name, str | None):
        topology.check(spec)  # refuses it
    pipeline = quantities.pipeline_slug(spec.name or "pipeline") if name is None else name
    unnamed = _name_faults(pipeline)
    if unnamed:
        raise InvalidPipeline([*unnamed, *topology.faults(spec)])
    declared = spec if checked else topology.check(spec)
    spec, parts = disaggregation.expanded(declared), disaggregation.parts(declared)
    groups = grouping.group(spec)
    refined = {group.name: group for group in spec.process_groups}
    units = tuple(_unit(spec, pipeline, members, groups, refined, parts) for members in groups.units.values())
    edges = (*_edges(spec, groups), *_kv_edges(spec, groups, parts))
    return PipelinePlan(
        pipeline=pipeline,
        coordinator=_coordinator(spec, pipeline),
        units=units,
        edges=edges,
        replicas={unit: _replicas(members, refined) for unit, members in groups.units.items()},
        autoscaling=_autoscaling(groups, refined),
        local_gpus=_local_gpus(groups, refined),
        current=_revision(units, edges, spec),
    )


def without_gpus(plan: PipelinePlan) -> PipelinePlan:
    """The same plan for a machine without GPUs: GPU ids are removed, tensor-parallel ranks stay.

    A relay between GPUs that the pipeline names becomes what `auto` chooses.
    """
    units = tuple(_unit_without_gpus(unit) for unit in plan.units)
    revisions = {unit.name: unit.revision for unit in units}
    return msgspec.structs.replace(
        plan,
        units=units,
        coordinator=msgspec.structs.replace(
            plan.coordinator, relay_backend=_backend_without_gpus(plan.coordinator.relay_backend)
        ),
        edges=tuple(_edge_without_gpus(edge) for edge in plan.edges),
        local_gpus={group: ((),) * len(devices) for group, devices in plan.local_gpus.items()},
        current=_stamped(msgspec.structs.replace(plan.current, units=revisions, revision="")),
    )


def _backend_without_gpus(backend: str) -> str:
    named = RELAYS.get(backend)
    return "auto" if named is not None and named.of_gpus else backend


def _edge_without_gpus(edge: EdgePlan) -> EdgePlan:
    if edge.relay != "cuda_ipc":
        return edge
    return msgspec.structs.replace(edge, relay="shm", medium="memory")


def _name_faults(name: str) -> list[Fault]:
    if quantities.is_pipeline_name(name):
        return []
    message = f"{name!r} is not a pipeline name: use at most {quantities.MAX_PIPELINE_NAME} lower case letters, digits "
    message += f"and -, with a letter first, no - last, not ending in {quantities.RESERVED_SUFFIX}"
    return [Fault(path="metadata.name", message=message, names=(name,))]


def _unit(
    spec: PipelineConfig,
    pipeline: str,
    members: Sequence[str],
    groups: Grouping,
    refined: Mapping[str, ProcessGroup],
    parts: Mapping[str, Part],
) -> UnitPlan:
    own = [refined[member] for member in members if member in refined]
    names = {stage.name for member in members for stage in groups.groups[member]}
    stages = [stage for stage in spec.stages if stage.name in names]
    gpu_ids = grouping.gpus_of(stages)
    group_of = {stage.name: member for member in members for stage in groups.groups[member]}
    return _stamped(
        UnitPlan(
            pipeline=pipeline,
            name=members[0],
            groups=tuple(_group(member, index, members[0], groups) for index, member in enumerate(members)),
            stages=tuple(_stage(spec, stage, group_of[stage.name], gpu_ids, parts) for stage in stages),
            gpu_ids=gpu_ids,
            model_path=spec.model_path,
            model_revision=spec.model_revision,
            env_defaults=canonical(spec.env_defaults),
            code=_code_of_stages(spec, stages),
            code_config_map=_code_config_map(spec),
            drain_timeout_s=_longest((group.drain.timeout_seconds for group in own if group.drain), _DRAIN_S),
            startup_deadline_s=_longest((g.startup.deadline_seconds for g in own if g.startup), _STARTUP_S),
            stuck_after_s=_longest((g.stuck_after_seconds for g in own if g.stuck_after_seconds), STUCK_AFTER_S),
            heartbeat_s=float(spec.control.heartbeat_seconds),
            dead_after_s=float(spec.control.dead_after_seconds),
            security=spec.control.security.mode,
            gpu_memory_limit=spec.gpu_memory_limit,
            allow_tcp=spec.data_plane.allow_tcp,
            mooncake_protocol=spec.data_plane.mooncake_protocol,
            pod=podsettings.of_unit(spec, own, len(gpu_ids)),
        )
    )


_DRAIN_S = float(Drain().timeout_seconds)
_STARTUP_S = float(Startup().deadline_seconds)


def _longest(given: Iterable[float], otherwise: float) -> float:
    return float(max(given, default=otherwise))


def _group(name: str, index: int, unit: str, groups: Grouping) -> GroupPlan:
    stages = groups.groups[name]
    tp_size = stages[0].tp_size
    return GroupPlan(
        name=name,
        unit=unit,
        index=index,
        stages=tuple(stage.name for stage in stages),
        processes=grouping.process_names(name, tp_size),
        tp_size=tp_size,
    )


def _stage(
    spec: PipelineConfig, stage: StageConfig, group: str, gpu_ids: Sequence[int], parts: Mapping[str, Part]
) -> StagePlan:
    budget = stage.gpu_memory
    part = parts.get(stage.name, Part())
    return StagePlan(
        name=stage.name,
        group=group,
        factory=stage.factory,
        factory_args=canonical({**stage.factory_args, **_overrides(spec, stage)}),
        next=tuple(stage.next),
        terminal=stage.terminal,
        route_fn=stage.route_fn,
        wait_for=tuple(stage.wait_for),
        wait_for_fn=stage.wait_for_fn,
        merge_fn=stage.merge_fn,
        stream_to=tuple(stage.stream_to),
        stream_at_end=tuple(stage.stream_at_end),
        stream_from=tuple(other.name for other in spec.stages if stage.name in other.stream_to),
        inputs_from=tuple(other.name for other in spec.stages if stage.name in other.next),
        entry=stage.name == spec.resolved_entry_stage,
        stream_done_to_fn=stage.stream_done_to_fn,
        project_payload=canonical(stage.project_payload),
        gpus=tuple(gpu_ids.index(gpu) for gpu in stage.gpus),
        gpu_memory_fraction=float(budget.fraction) if budget and budget.fraction is not None else None,
        gpu_memory_bytes=quantities.parse_bytes(budget.bytes) if budget and budget.bytes is not None else None,
        tp_size=stage.tp_size,
        relay=_relay(spec, stage),
        kv_role=part.role,
        kv_peer=part.peer,
    )


def _relay(spec: PipelineConfig, stage: StageConfig) -> RelayPlan:
    given = stage.relay or RelayConfig()
    return RelayPlan(
        backend=spec.relay_backend,
        slot_bytes=given.slot_size_mb << 20,
        credits=given.credits,
        device=given.device or ("cuda" if stage.gpus else "cpu"),
        rank=given.rank,
        world_size=given.world_size,
    )


def _coordinator(spec: PipelineConfig, pipeline: str) -> CoordinatorPlan:
    http = spec.coordinator.http
    return _stamped(
        CoordinatorPlan(
            pipeline=pipeline,
            model=spec.model_path or pipeline,
            serves=tuple(spec.serves),
            accepts=tuple(spec.accepts),
            terminal_stages_fn=spec.terminal_stages_fn,
            env_defaults=canonical(spec.env_defaults),
            code=_code(spec, [spec.terminal_stages_fn]),
            code_config_map=_code_config_map(spec),
            http_port=http.port,
            max_body_bytes=http.max_body_bytes,
            request_timeout_s=float(http.request_timeout_seconds),
            max_in_flight=http.max_in_flight,
            media_hosts=tuple(http.media_hosts),
            allowed_hosts=tuple(host.lower() for host in http.allowed_hosts),
            retries=spec.coordinator.retries,
            hold_s=float(spec.coordinator.hold.seconds),
            hold_requests=_hold_requests(spec.coordinator),
            hold_bytes=spec.coordinator.hold.max_bytes,
            dead_after_s=float(spec.control.dead_after_seconds),
            security=spec.control.security.mode,
            relay_backend=spec.relay_backend,
            drain_timeout_s=float((spec.coordinator.drain or Drain()).timeout_seconds),
            pod=podsettings.of_coordinator(spec),
        )
    )


def _hold_requests(coordinator: Coordinator) -> int:
    given = coordinator.hold.max_requests
    return max(1, coordinator.http.max_in_flight * 3 // 4) if given is None else given


def _code_of_stages(spec: PipelineConfig, stages: Sequence[StageConfig]) -> dict[str, str]:
    functions = [
        function
        for stage in stages
        for function in (
            stage.factory,
            stage.route_fn,
            stage.wait_for_fn,
            stage.merge_fn,
            stage.stream_done_to_fn,
            *stage.project_payload.values(),
        )
    ]
    return _code(spec, functions, [[stage.factory_args, _overrides(spec, stage)] for stage in stages])


def _code(spec: PipelineConfig, functions: Iterable[str | None], values: Any = None) -> dict[str, str]:
    """The inline files that one process needs: an edit of the others must not restart it."""
    return inlinecode.used(spec.code.inline, filter(None, functions), values) if spec.code else {}


def _overrides(spec: PipelineConfig, stage: StageConfig) -> Mapping[str, Any]:
    return spec.runtime_overrides.get(stage.name, {})


def _code_config_map(spec: PipelineConfig) -> str | None:
    return spec.code.config_map_ref.name if spec.code and spec.code.config_map_ref else None


def _edges(spec: PipelineConfig, groups: Grouping) -> Iterable[EdgePlan]:
    kinds: tuple[Literal["normal", "stream"], ...] = ("normal", "stream")
    for stage in spec.stages:
        for kind in kinds:
            for target in stage.next if kind == "normal" else stage.stream_to:
                yield _edge(spec, groups, stage.name, target, kind)


def _kv_edges(spec: PipelineConfig, groups: Grouping, parts: Mapping[str, Part]) -> Iterable[EdgePlan]:
    for stage in spec.stages:
        part = parts.get(stage.name, Part())
        if part.role == "decode":
            yield _edge(spec, groups, part.peer, stage.name, "kv")


def _edge(
    spec: PipelineConfig, groups: Grouping, source: str, target: str, kind: Literal["normal", "stream", "kv"]
) -> EdgePlan:
    group_of = {stage.name: name for name, members in groups.groups.items() for stage in members}
    gpu_of = {stage.name: stage.gpus[:1] for stage in spec.stages}  # of rank 0, which has the edges
    transport = _transport(group_of[source], group_of[target], groups)
    relay = _edge_relay(spec, transport, one_gpu=bool(gpu_of[source]) and gpu_of[source] == gpu_of[target])
    medium = _edge_medium(spec, relay)
    return EdgePlan(source=source, target=target, kind=kind, transport=transport, relay=relay, medium=medium)


def _transport(source: str, target: str, groups: Grouping) -> Literal["in_process", "same_pod", "network"]:
    if source == target:
        return "in_process"
    return "same_pod" if groups.unit_of(source) == groups.unit_of(target) else "network"


def _edge_relay(spec: PipelineConfig, transport: str, *, one_gpu: bool) -> str:
    """The relay to expect: the one that is named, else what `auto` chooses; facts of both processes decide.

    one_gpu: both ends compute on the same.
    """
    if transport == "in_process":
        return "in_process"
    if spec.relay_backend != "auto":
        return spec.relay_backend
    if transport == "same_pod":
        return "cuda_ipc" if one_gpu else "shm"
    # Shared memory works within a pod; `omni up` runs all on one machine and uses it there, too.
    return "tcp" if spec.data_plane.rdma is None else "nixl"


def _edge_medium(spec: PipelineConfig, relay: str) -> str:
    """The medium that carries the bytes of an edge on a cluster. relay: as of `_edge_relay`."""
    if relay == "in_process":
        return "reference"
    traits = RELAYS[relay]
    # mooncakeProtocol is refused with another relay than mooncake
    by_rdma = spec.data_plane.rdma is not None and spec.data_plane.mooncake_protocol != "tcp"
    return "rdma" if traits.by_rdma and by_rdma else traits.medium


def _replicas(members: Sequence[str], refined: Mapping[str, ProcessGroup]) -> int:
    """Replicas of the groups in a pod; `placement` has refused different counts."""
    limits = _limits(members, refined)
    if limits is not None:
        return limits.min_replicas
    return next((count for member in members if (count := _count(refined.get(member))) is not None), 1)


def _count(refined: ProcessGroup | None) -> int | None:
    return refined.replicas if refined else None


def _limits(members: Sequence[str], refined: Mapping[str, ProcessGroup]) -> Autoscaling | None:
    """The limits of the groups in a pod; `placement` has refused different ones, and such beside replicas."""
    given = (refined[member].autoscaling for member in members if member in refined)
    return next((limits for limits in given if limits is not None), None)


def _autoscaling(groups: Grouping, refined: Mapping[str, ProcessGroup]) -> dict[str, Limits]:
    found = {unit: _limits(members, refined) for unit, members in groups.units.items()}
    return {
        unit: Limits(
            least=limits.min_replicas,
            most=limits.max_replicas,
            target_queue_s=float(limits.target_queue_seconds or QUEUE_S),
            target_utilization=limits.target_utilization,
            up_delay_s=float(limits.scale_up_delay_seconds),
            down_delay_s=float(limits.scale_down_delay_seconds),
        )
        for unit, limits in found.items()
        if limits is not None
    }


def _local_gpus(groups: Grouping, refined: Mapping[str, ProcessGroup]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Devices of each local replica: ``localGpus``, else the stages' own ids for every replica."""
    devices: dict[str, tuple[tuple[int, ...], ...]] = {}
    for members in groups.units.values():
        for name in members:
            own = refined.get(name)
            given = tuple(tuple(ids) for ids in own.local_gpus) if own else ()
            limits = _limits(members, refined)
            most = limits.max_replicas if limits is not None else _replicas(members, refined)
            devices[name] = given or (grouping.gpus_of(groups.groups[name]),) * most
    return devices


def _revision(units: Sequence[UnitPlan], edges: Sequence[EdgePlan], spec: PipelineConfig) -> PipelineRevision:
    group_of = {stage.name: stage.group for unit in units for stage in unit.stages}
    return _stamped(
        PipelineRevision(
            revision="",
            units={unit.name: unit.revision for unit in units},
            groups={group.name: unit.name for unit in units for group in unit.groups},
            stages={stage.name: group_of[stage.name] for stage in spec.stages},
            entry=spec.resolved_entry_stage,
            terminals=spec.terminal_stages,
            edges=tuple((edge.source, edge.target, edge.kind) for edge in edges),
            routing=tuple(stage.name for stage in spec.stages if stage.route_fn),
            joining=tuple(stage.name for stage in spec.stages if stage.wait_for and not stage.wait_for_fn),
        )
    )


def _unit_without_gpus(unit: UnitPlan) -> UnitPlan:
    stages = tuple(
        msgspec.structs.replace(
            stage,
            gpus=(),
            gpu_memory_fraction=None,
            gpu_memory_bytes=None,
            relay=msgspec.structs.replace(
                stage.relay, device="cpu", backend=_backend_without_gpus(stage.relay.backend)
            ),
        )
        for stage in unit.stages
    )
    pod = {key: value for key, value in unit.pod.items() if key not in ("gpus", "gpuResourceName", "gpuClaim")}
    return _stamped(msgspec.structs.replace(unit, stages=stages, gpu_ids=(), on_cpu=True, pod=pod, revision=""))


def _stamped(value: Revised) -> Revised:
    """The value with ``revision`` set to the hash of its other fields, of inline code to that of its meaning."""
    hashed = value
    if not isinstance(hashed, PipelineRevision) and hashed.code:
        hashed = msgspec.structs.replace(hashed, code=inlinecode.meanings(hashed.code))
    return msgspec.structs.replace(value, revision=short_hash(hashed))
