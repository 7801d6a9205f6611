"""The PodGroup of a pipeline: its pods with GPUs get their nodes together, where the scheduler knows such groups.

Here: which pods are members, how they name their group, and the group. Not here: pods (`pods`), what happens without
such a scheduler (`changes.gangs`). Called by `children` and `pods`. Two kinds: that of Kubernetes' scheduler-plugins
(Coscheduling), and Kubernetes' own (GangScheduling).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from omnipipeline_operator import kinds
from omnipipeline_operator.desired import naming
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.kinds import Kind, Manifest
from omnipipeline_spec import scaling
from omnipipeline_spec.types.plan import PipelinePlan

#: New pods get the first that the cluster has.
KINDS: Final = (kinds.POD_GROUP, kinds.OWN_POD_GROUP)
LABEL: Final = "scheduling.x-k8s.io/pod-group"  #: A pod names a group of POD_GROUP by it.
FIELD: Final = "schedulingGroup"  #: A pod's spec names a group of OWN_POD_GROUP in it.


def is_member(settings: Mapping[str, Any]) -> bool:
    """Whether the pods with these settings are members.

    Pods that are to be near others are made when those have nodes: a group that waited for them would wait for ever.
    """
    return bool(settings.get("gpus")) and not settings.get("placement", {}).get("near")


def members(plan: PipelinePlan) -> frozenset[str]:
    """The units whose pods are members."""
    return frozenset(unit.name for unit in plan.units if is_member(unit.pod))


class Grouped(msgspec.Struct, frozen=True, kw_only=True):
    """The units whose pods name a group of one kind already: switching groups on or off changes none."""

    units: frozenset[str] = frozenset()  #: Units of the desired revision that name it.
    others: frozenset[str] = frozenset()  #: Units of the desired revision that do not, though they were made.
    any: bool = False  #: Whether pods of any revision name it; the scheduler places none of these without the group.
    #: Whether pods without it hold GPUs until members replace them, a few at a time: one that waited for all of these
    #: would end the roll.
    apart: bool = False


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """The group that new pods name, and those that pods name already."""

    kind: Kind | None = None  #: None: new pods name no group.
    scheduler: str = ""  #: The scheduler of these pods.
    grouped: Mapping[str, Grouped] = {}  #: Key of a kind -> the units.


def chosen(scheduler: str, lacking: Collection[str], queue: str = "") -> Kind | None:
    """The kind of group that new pods name; None: no scheduler for groups is named, or Kueue admits the pods.

    lacking: keys of kinds that cannot be read in this cluster; None follows also where all are in it.
    """
    return next((each for each in KINDS if scheduler and not queue and each.key not in lacking), None)


def joined(template: Manifest, kind: Kind, group: str) -> Manifest:
    """A pod template whose pods name the group."""
    if kind is kinds.POD_GROUP:
        metadata = template["metadata"]
        return {**template, "metadata": {**metadata, "labels": {**metadata["labels"], LABEL: group}}}
    return {**template, "spec": {**template["spec"], FIELD: {"podGroupName": group}}}


def key_in(template: Mapping[str, Any]) -> str:
    """The key of the kind of group that a template's pods name; empty: of none."""
    if LABEL in template.get("metadata", {}).get("labels", {}):
        return kinds.POD_GROUP.key
    return kinds.OWN_POD_GROUP.key if template["spec"].get(FIELD) else ""


def remark(plan: PipelinePlan, scheduler: str, lacking: Mapping[str, str]) -> str | None:
    """A remark that pods come one by one though a scheduler for groups is named.

    lacking: key of a kind -> the API server's refusal.
    """
    if not scheduler or chosen(scheduler, lacking) or not members(plan):
        return None
    needed = " or ".join(each.api_version for each in KINDS)
    unread = "; ".join(dict.fromkeys(lacking[each.key] for each in KINDS))
    return (
        f"podGroupScheduler needs PodGroup of {needed}, which the operator cannot read in this cluster ({unread}): "
        "pods come one by one"
    )


def made(plan: PipelinePlan, owner: Owner, groups: Groups) -> list[Manifest]:
    """The groups that pods name or will name."""
    found = (
        _group(plan, owner, each, groups.grouped.get(each.key, Grouped()), wanted=each is groups.kind) for each in KINDS
    )
    return [each for each in found if each is not None]


def _group(plan: PipelinePlan, owner: Owner, kind: Kind, grouped: Grouped, *, wanted: bool) -> Manifest | None:
    """The group of one kind; None: no pod is a member.

    Members that may come later, or leave, are not waited for: those beyond the least number of an autoscaled unit.
    """
    new = members(plan) - grouped.others if wanted else frozenset()
    all_of_them = new | grouped.units
    if not all_of_them and not grouped.any:
        return None
    least = 1 if grouped.apart else max(sum(scaling.least(plan, unit) for unit in all_of_them), 1)
    own = {"schedulingPolicy": {"gang": {"minCount": least}}}
    manifest = naming.child(kind, owner.name, owner, of=naming.labels(owner.name))
    return {**manifest, "spec": own if kind is kinds.OWN_POD_GROUP else {"minMember": least}}
