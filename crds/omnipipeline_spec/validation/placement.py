"""Faults of placement: processes, tensor parallelism, GPUs, memory budgets, fusion, process groups.

Here: the faults that follow from ``process``, ``tpSize``, ``gpu``, ``gpuMemory``, ``fusedStages`` and
``processGroups``. Not here: edges (`graph`), the cluster's other fields (`deployment`). Called by `topology` on a spec
of valid form.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from omnipipeline_spec.cluster import ProcessGroup, Resources
from omnipipeline_spec.pipeline import GpuMemory, PipelineConfig, StageConfig
from omnipipeline_spec.types import quantities
from omnipipeline_spec.types.canonical import INT_BOUND
from omnipipeline_spec.types.errors import Fault
from omnipipeline_spec.types.pods import COORDINATOR
from omnipipeline_spec.validation import amounts, disaggregation, grouping, nearness
from omnipipeline_spec.validation.graph import quoted
from omnipipeline_spec.validation.grouping import Grouping

LIMIT_SLACK = 0.0001  # sums of decimal fractions are not exact in binary; the CRD's rule has the same slack
DEFAULT_GPU_RESOURCE = "nvidia.com/gpu"


def faults(spec: PipelineConfig) -> Iterator[Fault]:
    """All faults of the placement, of prefill stages too."""
    for fault in _faults(disaggregation.expanded(spec)):
        yield msgspec.structs.replace(fault, path=disaggregation.declared_path(spec, fault.path))


def _faults(spec: PipelineConfig) -> Iterator[Fault]:
    groups = grouping.group(spec)
    for index, stage in enumerate(spec.stages):
        yield from _process(stage, f"stages[{index}]")
        yield from _gpus(stage, f"stages[{index}]")
        yield from _budget_form(stage, f"stages[{index}]")
    yield from _tensor_parallel_alone(spec)
    yield from _colliding_names(spec, groups)
    yield from _groups_on_two_gpus(spec, groups)
    yield from _budgets(spec)
    yield from _fusion(spec)
    yield from _refinements(spec, groups)
    yield from _units(spec, groups)
    yield from nearness.faults(spec, groups)
    yield from amounts.faults(spec, groups, _own_devices(spec, groups))


def _process(stage: StageConfig, path: str) -> Iterator[Fault]:
    if stage.tp_size == 1 and not stage.process:
        message = f"of {stage.name!r} is required: stages with the same value share an OS process; it has no default"
        yield Fault(path=f"{path}.process", message=message, names=(stage.name,))
    for field, name in (("name", stage.name), ("process", stage.process)):
        if name == COORDINATOR:
            message = f"{name!r} is reserved for the coordinator"
            yield Fault(path=f"{path}.{field}", message=message, names=(stage.name,))


def _gpus(stage: StageConfig, path: str) -> Iterator[Fault]:
    count = len(stage.gpus)
    if stage.tp_size > 1 and count != stage.tp_size:
        message = f"of {stage.name!r} must list {stage.tp_size} distinct ids, one per rank of tpSize; it lists {count}"
        yield Fault(path=f"{path}.gpu", message=message, names=(stage.name,))
    if stage.tp_size == 1 and count > 1:
        message = f"of {stage.name!r} lists {count} ids, but its tpSize is 1: such a stage has at most one GPU"
        yield Fault(path=f"{path}.gpu", message=message, names=(stage.name,))


def _budget_form(stage: StageConfig, path: str) -> Iterator[Fault]:
    budget = stage.gpu_memory
    if budget is None:
        return
    if not stage.gpus:
        message = f"of {stage.name!r} is set, but the stage has no gpu"
        yield Fault(path=f"{path}.gpuMemory", message=message, names=(stage.name,))
    if (budget.fraction is None) == (budget.bytes is None):
        message = f"of {stage.name!r} must have exactly one of fraction and bytes"
        yield Fault(path=f"{path}.gpuMemory", message=message, names=(stage.name,))
    if budget.bytes is not None and quantities.parse_quantity(budget.bytes) <= 0:
        message = f"{budget.bytes!r} must be more than 0"
        yield Fault(path=f"{path}.gpuMemory.bytes", message=message, names=(stage.name,))
    if budget.bytes is not None and quantities.parse_quantity(budget.bytes) >= INT_BOUND:
        message = f"{budget.bytes!r} is beyond 64 bits"
        yield Fault(path=f"{path}.gpuMemory.bytes", message=message, names=(stage.name,))


def _tensor_parallel_alone(spec: PipelineConfig) -> Iterator[Fault]:
    for index, stage in enumerate(spec.stages):
        others = [other.name for other in spec.stages if other.group == stage.group and other.name != stage.name]
        if stage.tp_size > 1 and others:
            message = (
                f"{stage.group!r} is the process of {quoted(others)} too; {stage.name!r} with tpSize > 1 shares none"
            )
            yield Fault(path=f"stages[{index}].process", message=message, names=(stage.name, *others))


def _colliding_names(spec: PipelineConfig, groups: Grouping) -> Iterator[Fault]:
    """Processes or stages that get one name on the machine, or on the cluster, where ``_`` becomes ``-``."""
    index_of = {stage.name: index for index, stage in enumerate(spec.stages)}
    taken: dict[str, str] = {}
    for name, members in groups.groups.items():
        path = f"stages[{index_of[members[0].name]}].process"
        derived = [rank for rank in grouping.process_names(name, members[0].tp_size) if rank != name]
        for process, what in [(name, f"process group {name!r}"), *((rank, f"a rank of {name!r}") for rank in derived)]:
            holder = taken.setdefault(quantities.slug(process), what)
            if holder != what:
                message = f"{process!r}, {what}, collides with {holder}: both are called {quantities.slug(process)!r}"
                yield Fault(path=path, message=message, names=(process, name))
    first: dict[str, str] = {}
    for stage in spec.stages:
        twin = first.setdefault(quantities.slug(stage.name), stage.name)
        if twin != stage.name:
            message = f"{stage.name!r} and {twin!r} become one name when _ is replaced by -"
            yield Fault(path=f"stages[{index_of[stage.name]}].name", message=message, names=(twin, stage.name))


def _groups_on_two_gpus(spec: PipelineConfig, groups: Grouping) -> Iterator[Fault]:
    for name, members in groups.groups.items():
        plain = [stage for stage in members if stage.tp_size == 1 and stage.gpus]
        if len(grouping.gpus_of(plain)) > 1:
            where = ", ".join(f"{stage.name!r} on GPU {', '.join(map(str, stage.gpus))}" for stage in plain)
            message = f"process group {name!r} would span several GPUs: {where}; give them processes of their own"
            path = f"stages[{_index(spec, plain[0].name)}].process"
            yield Fault(path=path, message=message, names=(name, *(stage.name for stage in plain)))


def _budgets(spec: PipelineConfig) -> Iterator[Fault]:
    for gpu in grouping.gpus_of(spec.stages):
        users = [stage for stage in spec.stages if gpu in stage.gpus]
        yield from _missing_budgets(spec, gpu, users)
        budgets = [(stage.name, stage.gpu_memory) for stage in users if stage.gpu_memory is not None]
        by_kind: Mapping[str, list[str]] = {
            "fraction": [name for name, budget in budgets if budget.fraction is not None],
            "bytes": [name for name, budget in budgets if budget.bytes is not None],
        }
        if all(by_kind.values()):
            message = f"GPU {gpu} has budgets by fraction ({quoted(by_kind['fraction'])}) and by bytes "
            message += f"({quoted(by_kind['bytes'])}); use one of the two"
            path = f"stages[{_index(spec, by_kind['bytes'][0])}].gpuMemory"
            yield Fault(path=path, message=message, names=(*by_kind["fraction"], *by_kind["bytes"]))
        yield from _too_much(spec, gpu, budgets)


def _missing_budgets(spec: PipelineConfig, gpu: int, users: Sequence[StageConfig]) -> Iterator[Fault]:
    sharing = list(dict.fromkeys(stage.group for stage in users))
    if len(sharing) < 2:
        return
    for stage in users:
        if stage.gpu_memory is None:
            message = f"of {stage.name!r} is required: processes {quoted(sharing)} share GPU {gpu}"
            path = f"stages[{_index(spec, stage.name)}].gpuMemory"
            yield Fault(path=path, message=message, names=(stage.name, *sharing))


def _too_much(spec: PipelineConfig, gpu: int, budgets: Sequence[tuple[str, GpuMemory]]) -> Iterator[Fault]:
    shares = {name: budget.fraction for name, budget in budgets if budget.fraction is not None}
    total = sum(shares.values())
    if total > spec.gpu_memory_limit + LIMIT_SLACK:
        summed = " + ".join(f"{name} {share:g}" for name, share in shares.items())
        message = f"the budgets on GPU {gpu} sum to {total:g} ({summed}); gpuMemoryLimit is {spec.gpu_memory_limit:g}"
        path = f"stages[{_index(spec, next(iter(shares)))}].gpuMemory"
        yield Fault(path=path, message=message, names=tuple(shares))


def _fusion(spec: PipelineConfig) -> Iterator[Fault]:
    by_name = {stage.name: stage for stage in spec.stages}
    fused_at: dict[str, int] = {}
    for index, fused in enumerate(spec.fused_stages):
        path = f"fusedStages[{index}]"
        for name in fused:
            if fused_at.setdefault(name, index) != index:
                message = f"{name!r} is in fusedStages[{fused_at[name]}] too: merge the lists"
                yield Fault(path=path, message=message, names=(name,))
        known = [by_name[name] for name in fused if name in by_name]
        parallel = [stage.name for stage in known if stage.tp_size > 1]
        if parallel:
            message = f"{quoted(parallel)} has tpSize > 1 and cannot be fused"
            yield Fault(path=path, message=message, names=tuple(parallel))
        if len(known) == len(fused):
            yield from _linear(spec, known, path)


def _linear(spec: PipelineConfig, fused: Sequence[StageConfig], path: str) -> Iterator[Fault]:
    for stage, after in itertools.pairwise(fused):
        if tuple(stage.next) != (after.name,):
            goes = quoted(tuple(stage.next)) or "the client"
            message = f"{stage.name!r} must route to {after.name!r} alone to be fused with it; it routes to {goes}"
            yield Fault(path=path, message=message, names=(stage.name, after.name))
        others = [other.name for other in spec.stages if after.name in other.next and other.name != stage.name]
        if others:
            message = f"{after.name!r} must get results from {stage.name!r} alone to be fused with it; "
            message += f"{quoted(others)} routes to it too"
            yield Fault(path=path, message=message, names=(after.name, *others))


def _refinements(spec: PipelineConfig, groups: Grouping) -> Iterator[Fault]:
    for index, refined in enumerate(spec.process_groups):
        path = f"processGroups[{index}]"
        if refined.name in groups.absorbed:
            into = groups.absorbed[refined.name]
            message = f"{refined.name!r} was fused into process group {into!r}: configure that one"
            yield Fault(path=f"{path}.name", message=message, names=(refined.name, into))
        elif refined.name not in groups.groups:
            message = f"{refined.name!r} is not a process group; there are {quoted(list(groups.groups))}"
            yield Fault(path=f"{path}.name", message=message, names=(refined.name,))
        else:
            yield from _devices(refined, groups, path)
            yield from _amounts_of_devices(spec, refined, groups, path)
            yield from _local_gpus(refined, _replicas(spec, groups, refined.name), groups, path)
            yield from _autoscaling(spec, refined, path)


def _replicas(spec: PipelineConfig, groups: Grouping, name: str) -> int:
    """The most replicas of a group: its own, or those of the groups in its pod."""
    beside = groups.units[groups.unit_of(name)]
    given = (
        group.replicas if group.autoscaling is None else group.autoscaling.max_replicas
        for group in spec.process_groups
        if group.name in beside
    )
    return next((count for count in given if count is not None), 1)


def _autoscaling(spec: PipelineConfig, refined: ProcessGroup, path: str) -> Iterator[Fault]:
    limits, name = refined.autoscaling, refined.name
    if limits is None:
        return
    where = f"{path}.autoscaling"
    if refined.replicas is not None:
        message = f"{name!r} has both replicas and autoscaling: leave one out"
        yield Fault(path=where, message=message, names=(name,))
    if limits.min_replicas > limits.max_replicas:
        message = f"of {name!r} must not be more than maxReplicas: {limits.min_replicas} > {limits.max_replicas}"
        yield Fault(path=f"{where}.minReplicas", message=message, names=(name,))
    if limits.target_queue_seconds is not None and limits.target_utilization is not None:
        message = f"{name!r} has both targetQueueSeconds and targetUtilization: leave one out"
        yield Fault(path=where, message=message, names=(name,))
    hold = spec.coordinator.hold
    bounds = {"seconds": hold.seconds, "maxRequests": hold.max_requests, "maxBytes": hold.max_bytes}
    nothing = [field for field, bound in bounds.items() if bound == 0]
    if limits.min_replicas == 0 and nothing:
        message = f"of {name!r} is 0 and needs coordinator.hold.{nothing[0]}: a request waits for its first instance"
        yield Fault(path=f"{where}.minReplicas", message=message, names=(name,))


def _devices(refined: ProcessGroup, groups: Grouping, path: str) -> Iterator[Fault]:
    given = {"gpuResourceName": refined.gpu_resource_name, "gpuClaim": refined.gpu_claim}
    for field in [field for field, value in given.items() if value]:
        if not grouping.gpus_of(groups.groups[refined.name]):
            message = f"process group {refined.name!r} runs on the CPU and has no devices"
            yield Fault(path=f"{path}.{field}", message=message, names=(refined.name,))


def _amounts_of_devices(spec: PipelineConfig, refined: ProcessGroup, groups: Grouping, path: str) -> Iterator[Fault]:
    """Devices are requested for the stages' `gpu` and `dataPlane.rdma`: another amount would have no effect."""
    resource = _gpu_resource(spec, groups, refined.name)
    gpus, rdma = len(grouping.gpus_of(groups.groups[refined.name])), spec.data_plane.rdma
    wanted = {resource: (gpus, f"the stages of {refined.name!r} have gpu ids for {gpus}")} if gpus else {}
    if gpus and _claims(spec, groups, refined.name):
        wanted = {resource: (0, f"the GPUs of {refined.name!r} come by gpuClaim")}
    if rdma is not None:
        wanted[rdma.resource_name] = (rdma.count, f"dataPlane.rdma.count is {rdma.count}")
    given = refined.resources or Resources()
    for kind, amount_of in (("requests", given.requests), ("limits", given.limits)):
        for name, (count, why) in wanted.items():
            if name in amount_of and quantities.parse_quantity(amount_of[name]) != count:
                message = f"is {amount_of[name]}, but {why}: leave it out"
                yield Fault(path=f"{path}.resources.{kind}.{name}", message=message, names=(refined.name,))


def _own_devices(spec: PipelineConfig, groups: Grouping) -> dict[str, set[str]]:
    """Process group -> the resources that its pod gets by the stages' ``gpu`` and by ``dataPlane.rdma``."""
    rdma = {spec.data_plane.rdma.resource_name} if spec.data_plane.rdma is not None else set()
    return {
        name: rdma | ({_gpu_resource(spec, groups, name)} if grouping.gpus_of(stages) else set())
        for name, stages in groups.groups.items()
    }


def _gpu_resource(spec: PipelineConfig, groups: Grouping, name: str) -> str:
    """The extended resource of the GPUs of the group's pod."""
    beside = groups.units[groups.unit_of(name)]
    named = (group.gpu_resource_name for group in spec.process_groups if group.name in beside)
    return next(filter(None, named), DEFAULT_GPU_RESOURCE)


def _claims(spec: PipelineConfig, groups: Grouping, name: str) -> bool:
    """Whether the group's pod gets its GPUs by Dynamic Resource Allocation."""
    beside = groups.units[groups.unit_of(name)]
    return any(group.gpu_claim for group in spec.process_groups if group.name in beside)


def _local_gpus(refined: ProcessGroup, replicas: int, groups: Grouping, path: str) -> Iterator[Fault]:
    if not refined.local_gpus:
        return
    where, name = f"{path}.localGpus", refined.name
    wanted = len(grouping.gpus_of(groups.groups[name]))
    if wanted == 0:
        yield Fault(path=where, message=f"process group {name!r} runs on the CPU and has no devices", names=(name,))
        return
    if len(refined.local_gpus) != replicas:
        message = f"of {name!r} must have one list per replica: {replicas}, not {len(refined.local_gpus)}"
        yield Fault(path=where, message=message, names=(name,))
    for index, devices in enumerate(refined.local_gpus):
        if len(devices) != wanted or len(set(devices)) != len(devices):
            message = f"{list(devices)} must be {wanted} distinct device id{'s' if wanted > 1 else ''}, as the stages "
            message += f"of {name!r} have"
            yield Fault(path=f"{where}[{index}]", message=message, names=(name,))


def _units(spec: PipelineConfig, groups: Grouping) -> Iterator[Fault]:
    """Groups in one pod must agree on what a pod has only once."""
    index_of = {refined.name: index for index, refined in enumerate(spec.process_groups)}
    once: tuple[tuple[str, Callable[[ProcessGroup], Any]], ...] = (
        ("replicas", lambda refined: refined.replicas),
        ("autoscaling", lambda refined: refined.autoscaling),
        ("gpuResourceName", lambda refined: refined.gpu_resource_name),
        ("gpuClaim", lambda refined: refined.gpu_claim),
        ("placement", lambda refined: refined.placement),
        ("podTemplate", lambda refined: refined.pod_template or None),
    )
    for members in groups.units.values():
        refined = [spec.process_groups[index_of[name]] for name in members if name in index_of]
        for field, of in once:
            given = [(group.name, of(group)) for group in refined if of(group) is not None]
            odd = [(name, value) for name, value in given if value != given[0][1]]
            if odd:
                with_values = field == "replicas" or field == "gpuResourceName"
                stated = [given[0], *odd]
                both = ", ".join(f"{name!r}: {value}" if with_values else repr(name) for name, value in stated)
                message = f"process groups that share a GPU share a pod and must have the same {field}: {both}"
                path = f"processGroups[{index_of[odd[0][0]]}].{field}"
                yield Fault(path=path, message=message, names=tuple(name for name, _ in stated))
        yield from _one_in_charge(refined, index_of)
        yield from _one_way_to_gpus(refined, index_of)


def _one_in_charge(refined: Sequence[ProcessGroup], index_of: Mapping[str, int]) -> Iterator[Fault]:
    """No group in a pod may have replicas when another one has autoscaling."""
    scaled = next((group.name for group in refined if group.autoscaling is not None), None)
    for group in refined:
        if scaled not in (None, group.name) and group.replicas is not None and group.autoscaling is None:
            message = f"{group.name!r} shares a pod with {scaled!r}, which has autoscaling: leave replicas out"
            yield Fault(path=f"processGroups[{index_of[group.name]}].replicas", message=message, names=(group.name,))


def _one_way_to_gpus(refined: Sequence[ProcessGroup], index_of: Mapping[str, int]) -> Iterator[Fault]:
    """The groups of a pod get their GPUs as an extended resource or by a claim, all in the same way."""
    claiming = next((group.name for group in refined if group.gpu_claim is not None), None)
    for group in refined:
        if claiming is None or not group.gpu_resource_name:
            continue
        message = f"and gpuClaim of {claiming!r} exclude each other in a pod: write one of them"
        path = f"processGroups[{index_of[group.name]}].gpuResourceName"
        yield Fault(path=path, message=message, names=(group.name, claiming))


def _index(spec: PipelineConfig, name: str) -> int:
    return next(index for index, stage in enumerate(spec.stages) if stage.name == name)
