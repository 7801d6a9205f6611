"""Faults of placements: tolerations, stages to be near, GPU types, and an author's own affinity beside them.

Here: what `placement.tolerations`, `placement.near` and `placement.gpuProducts` need. Not here: which processes share a
pod (`placement`).
Called by `placement` on a spec with its prefill stages.
"""

from __future__ import annotations

from collections.abc import Iterator

from omnipipeline_spec.cluster import Placement
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.errors import Fault
from omnipipeline_spec.validation import grouping
from omnipipeline_spec.validation.grouping import Grouping


def faults(spec: PipelineConfig, groups: Grouping) -> Iterator[Fault]:
    """All faults of the placements of groups and of the coordinator."""
    for index, group in enumerate(spec.process_groups):
        if group.placement is not None:
            path = f"processGroups[{index}].placement"
            yield from _near(group.placement, groups, path, own=group.name)
            has_gpu = group.name in groups.groups and bool(grouping.gpus_of(groups.groups[group.name]))
            yield from _products(group.placement, path, group.name, has_gpu=has_gpu)
            yield from _tolerations(group.placement, path)
    if spec.coordinator.placement is not None:
        yield from _near(spec.coordinator.placement, groups, "coordinator.placement", own=None)
        yield from _products(spec.coordinator.placement, "coordinator.placement", "coordinator", has_gpu=False)
        yield from _tolerations(spec.coordinator.placement, "coordinator.placement")


def _near(placement: Placement, groups: Grouping, path: str, *, own: str | None) -> Iterator[Fault]:
    """own: the group; None: the coordinator."""
    group_of = {stage.name: name for name, stages in groups.groups.items() for stage in stages}
    unit = groups.unit_of(own) if own is not None and own in groups.groups else None
    for index, stage in enumerate(placement.near):
        if stage not in group_of:
            yield Fault(path=f"{path}.near[{index}]", message=f"{stage!r} is not a stage", names=(stage,))
        elif unit is not None and groups.unit_of(group_of[stage]) == unit:
            message = f"{stage!r} runs in the same pod as {own!r}"
            yield Fault(path=f"{path}.near[{index}]", message=message, names=(stage,))
    if placement.near and not placement.near_topology_keys:
        message = "is empty, and near has stages: name the label of a domain, such as kubernetes.io/hostname"
        yield Fault(path=f"{path}.nearTopologyKeys", message=message)
    if placement.near and "podAffinity" in placement.affinity:
        yield Fault(path=f"{path}.near", message="and affinity.podAffinity exclude each other: write one of them")


def _tolerations(placement: Placement, path: str) -> Iterator[Fault]:
    for index, each in enumerate(placement.tolerations):
        where = f"{path}.tolerations[{index}]"
        if not each.key and each.operator != "Exists":
            yield Fault(path=f"{where}.operator", message="must be Exists where key is unset: all taints are tolerated")
        if each.value and each.operator == "Exists":
            yield Fault(path=f"{where}.value", message="is for operator Equal; Exists tolerates all values")
        if each.toleration_seconds is not None and each.effect != "NoExecute":
            yield Fault(path=f"{where}.tolerationSeconds", message="needs effect: NoExecute")


def _products(placement: Placement, path: str, name: str, *, has_gpu: bool) -> Iterator[Fault]:
    if placement.gpu_products and not has_gpu:
        yield Fault(path=f"{path}.gpuProducts", message=f"{name!r} has no gpu", names=(name,))
    if placement.gpu_products and "nodeAffinity" in placement.affinity:
        message = "and affinity.nodeAffinity exclude each other: write one of them"
        yield Fault(path=f"{path}.gpuProducts", message=message)
