"""The PodGroup of a pipeline: its pods with GPUs get their nodes together, where the scheduler knows such groups.

Here: which pods are members, and the group. Not here: pods (`pods`), what happens without such a scheduler
(`changes.gangs`). Called by `children` and `pods`. The kind is that of Kubernetes' scheduler-plugins (Coscheduling).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from omnipipeline_operator import kinds
from omnipipeline_operator.desired import naming
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec import scaling
from omnipipeline_spec.types.plan import PipelinePlan

LABEL: Final = "scheduling.x-k8s.io/pod-group"


def is_member(settings: Mapping[str, Any]) -> bool:
    """Whether the pods with these settings are members.

    Pods that are to be near others are made when those have nodes: a group that waited for them would wait for ever.
    """
    return bool(settings.get("gpus")) and not settings.get("placement", {}).get("near")


class Grouped(msgspec.Struct, frozen=True, kw_only=True):
    """The units whose pods have the group's label already: switching groups on or off changes none."""

    units: frozenset[str] = frozenset()  #: Units of the desired revision, with it.
    others: frozenset[str] = frozenset()  #: Units of the desired revision, made without it.
    any: bool = False  #: Whether pods of any revision have it; the scheduler places none of these without the group.


def remark(plan: PipelinePlan, scheduler: str, lacks: str | None) -> str | None:
    """A remark that pods come one by one though a scheduler for groups is named.

    lacks: the API server's refusal of the kind; None: the cluster has it.
    """
    if not scheduler or lacks is None or not any(is_member(unit.pod) for unit in plan.units):
        return None
    kind = f"{kinds.POD_GROUP.name} of {kinds.POD_GROUP.api_version}"
    unread = f"which the operator cannot read in this cluster ({lacks})"
    return f"podGroupScheduler needs {kind}, {unread}: pods come one by one"


def group(plan: PipelinePlan, owner: Owner, grouped: Grouped, *, wanted: bool) -> Manifest | None:
    """The group; None: no pod is a member.

    Members that may come later, or leave, are not waited for: those beyond the least number of an autoscaled unit.
    """
    new = [unit.name for unit in plan.units if wanted and is_member(unit.pod) and unit.name not in grouped.others]
    members = {*new, *grouped.units}
    if not members and not grouped.any:
        return None
    manifest = naming.child(kinds.POD_GROUP, owner.name, owner, of=naming.labels(owner.name))
    least = sum(scaling.least(plan, unit) for unit in members)
    return {**manifest, "spec": {"minMember": max(least, 1)}}
