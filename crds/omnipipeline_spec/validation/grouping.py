"""Stages that share a process, and processes that share a pod.

Here: process groups after fusion, the pod units that shared GPU ids make of them, and the names of OS processes. Not
here: whether that is allowed (`placement`), the plan of a process (`planning`). Called by both; works on invalid specs
too, so that all faults are reported at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from omnipipeline_spec.pipeline import PipelineConfig, StageConfig


class Grouping(msgspec.Struct, frozen=True, kw_only=True):
    """Stages by process group and groups by pod unit, all in order of their first stage in the spec."""

    groups: Mapping[str, tuple[StageConfig, ...]]  #: Group -> its stages. Every stage is in exactly one.
    units: Mapping[str, tuple[str, ...]]  #: Unit, called after its first group -> its groups.
    absorbed: Mapping[str, str]  #: Group that fusion merged away -> group that has its stages now.

    def unit_of(self, group: str) -> str:
        """The pod unit of a group."""
        return next(unit for unit, members in self.units.items() if group in members)


def group(spec: PipelineConfig) -> Grouping:
    """Process groups and pod units of a spec."""
    absorbed = _fuse(spec)
    groups: dict[str, list[StageConfig]] = {}
    for stage in spec.stages:
        groups.setdefault(_root(stage.group, absorbed), []).append(stage)
    units = _units({name: gpus_of(stages) for name, stages in groups.items()})
    return Grouping(
        groups={name: tuple(stages) for name, stages in groups.items()},
        units=units,
        absorbed={name: _root(name, absorbed) for name in absorbed},
    )


def gpus_of(stages: Iterable[StageConfig]) -> tuple[int, ...]:
    """The distinct GPU ids that stages name, ascending."""
    return tuple(sorted({gpu for stage in stages for gpu in stage.gpus}))


def process_names(group_name: str, tp_size: int) -> tuple[str, ...]:
    """Names of the OS processes of a group: its own, or one per tensor-parallel rank."""
    return (group_name,) if tp_size == 1 else tuple(f"{group_name}_tp{rank}" for rank in range(tp_size))


def _fuse(spec: PipelineConfig) -> dict[str, str]:
    """Group -> group it was merged into, one step; a fused group is called after its first stage's group."""
    declared = {stage.name: stage.group for stage in spec.stages}
    merged: dict[str, str] = {}
    for fused in spec.fused_stages:
        known = [declared[name] for name in fused if name in declared]
        for other in known[1:]:
            into, away = _root(known[0], merged), _root(other, merged)
            if into != away:
                merged[away] = into
    return merged


def _root(name: str, merged: Mapping[str, str]) -> str:
    while name in merged:
        name = merged[name]
    return name


def _units(gpus: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, ...]]:
    """Groups that name a common GPU id share a unit, transitively."""
    merged: dict[str, str] = {}
    holder: dict[int, str] = {}
    for name, ids in gpus.items():
        for gpu in ids:
            first, own = _root(holder.setdefault(gpu, name), merged), _root(name, merged)
            if first != own:
                merged[own] = first
    order = list(gpus)
    units: dict[str, list[str]] = {}
    for name in order:
        units.setdefault(_root(name, merged), []).append(name)
    ranked = sorted(units.values(), key=lambda members: order.index(members[0]))
    return {members[0]: tuple(members) for members in ranked}
