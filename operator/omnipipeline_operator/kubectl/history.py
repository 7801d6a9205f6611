"""The history of a pipeline, and undoing to one of its entries.

Here: reading the entries, what differs between two specs, the spec that `undo` writes. Not here: recording (the
operator's `controller.revisions.revision_history`). Called by the commands.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import msgspec

from omnipipeline_operator.desired import naming
from omnipipeline_operator.kinds import Manifest
from omnipipeline_operator.kubectl.access import Kubectl, KubectlError
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.validation import disaggregation, grouping


class ServedRevision(msgspec.Struct, frozen=True, kw_only=True):
    """One revision that has served."""

    number: int
    revision: str  #: The pipeline revision, as in the resource's status.
    created: str
    spec: Manifest
    changed: tuple[str, ...]  #: Paths that differ from the entry before it.
    current: bool  #: The resource's spec is this one, as far as `undo` would change it.


def entries(kubectl: Kubectl, name: str) -> list[ServedRevision]:
    """The entries, oldest first. Raises: KubectlError."""
    pipeline = kubectl.pipeline(name)
    live, uid = pipeline["spec"], pipeline["metadata"]["uid"]
    listed = [
        one
        for one in kubectl.listed("controllerrevisions", naming.selector(name))
        if any(owner.get("uid") == uid for owner in one["metadata"].get("ownerReferences", ()))
    ]
    found: list[ServedRevision] = []
    for one in sorted(listed, key=lambda each: int(each["revision"])):
        spec = one["data"]["spec"]
        found.append(
            ServedRevision(
                number=one["revision"],
                revision=one["metadata"]["labels"][naming.REVISION_LABEL],
                created=one["metadata"]["creationTimestamp"],
                spec=spec,
                changed=differences(found[-1].spec, spec) if found else (),
                current=not differences(spec, live),
            )
        )
    return found


def chosen(found: list[ServedRevision], number: int | None) -> ServedRevision:
    """The entry with ``number``, else the newest that is not the current spec. Raises: KubectlError: it is missing."""
    if number is None:
        earlier = [one for one in found if not one.current]
        if not earlier:
            raise KubectlError("no earlier revision has served")
        return earlier[-1]
    for one in found:
        if one.number == number:
            return one
    known = ", ".join(str(one.number) for one in found) or "nothing"
    raise KubectlError(f"revision {number} is not in the history, which has {known}")


def undo(kubectl: Kubectl, name: str, entry: ServedRevision) -> None:
    """Give the resource the spec of ``entry``; all replicas, ``suspend`` and ``rollout.paused`` stay as they are.

    Raises: KubectlError: also when the resource is edited at the same time.
    """
    pipeline = kubectl.pipeline(name)
    kubectl.replace_spec(name, restored(entry.spec, pipeline["spec"]), pipeline["metadata"]["resourceVersion"])


def restored(old: Mapping[str, Any], live: Mapping[str, Any]) -> Manifest:
    """The old spec with the replicas (of the coordinator, too), ``suspend`` and ``rollout.paused`` of the live one.

    A process that the live spec does not have, or whose replicas follow its load there, has those of the old spec.
    """
    spec: Manifest = copy.deepcopy(dict(old))
    _carry(spec, live, "suspend")
    for section, key in (("rollout", "paused"), ("coordinator", "replicas")):
        settings: Manifest = spec.setdefault(section, {})
        _carry(settings, live.get(section, {}), key)
        if not settings:
            del spec[section]
    groups = {group["name"]: group for group in spec.get("processGroups", ())}
    counts = _counts(live)
    devices = {group["name"]: group.get("localGpus") for group in live.get("processGroups", ())}
    for members in _pods(spec):
        carried = {name: counts[name] for name in members if name in counts}
        if not carried or any("autoscaling" in groups.get(name, ()) for name in members):
            continue  # beside autoscaling, replicas are refused
        most = max((one.of_pod for one in carried.values() if one.of_pod is not None), default=None)
        if most == 0 and not _prefills(spec).issuperset(members):
            continue  # only prefill may have none
        own = {name for name, one in carried.items() if one.own is not None}
        agree = own and all(carried[name].own == most for name in own)
        for name in members:
            groups.get(name, {}).pop("replicas", None)
        for name in () if most is None else own if agree else carried:
            groups.setdefault(name, {"name": name})["replicas"] = most
        for name in members:
            if len(groups.get(name, {}).get("localGpus", ())) not in (0, most or 1):  # a list for each replica
                _carry(groups[name], {"localGpus": devices[name]} if devices.get(name) else {}, "localGpus")
    if groups:
        order = [*(group["name"] for group in spec.get("processGroups", ())), *counts, *groups]
        spec["processGroups"] = sorted(groups.values(), key=lambda group: order.index(group["name"]))
    return spec


class _Count(msgspec.Struct, frozen=True):
    """The replicas of one process; None: unset."""

    own: int | None
    of_pod: int | None  #: Its own, or those of a group that shares its pod.


def _counts(spec: Mapping[str, Any]) -> dict[str, _Count]:
    """The replicas of each process whose replicas do not follow its load."""
    groups = {group["name"]: group for group in spec.get("processGroups", ())}
    found = {name: _Count(group.get("replicas"), group.get("replicas")) for name, group in groups.items()}
    for members in _pods(spec):
        of_members = {name: groups.get(name, {}).get("replicas") for name in members}
        of_pod = next((count for count in of_members.values() if count is not None), None)
        found |= {name: _Count(count, of_pod) for name, count in of_members.items()}
        if any("autoscaling" in groups.get(name, ()) for name in members):
            found = {name: count for name, count in found.items() if name not in members}
    return found


def _pods(spec: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The processes that share a pod. Only what decides that is read: a spec of another version may have more."""
    stages = [_placed(stage, "name", "process", "gpu") | {"factory": "m:f"} for stage in spec["stages"]]
    for made, stage in zip(stages, spec["stages"], strict=True):
        if stage.get("disaggregation"):
            parts = {role: part for role, part in stage["disaggregation"].items() if role in ("prefill", "decode")}
            made["disaggregation"] = {role: _placed(part, "process", "gpu") for role, part in parts.items() if part}
    read = msgspec.convert({"stages": stages, "fusedStages": spec.get("fusedStages") or []}, PipelineConfig)
    return list(grouping.group(disaggregation.expanded(read)).units.values())


def _placed(given: Mapping[str, Any], *fields: str) -> Manifest:
    return {field: given[field] for field in fields if given.get(field) is not None}


def _prefills(spec: Mapping[str, Any]) -> set[str]:
    return {each["disaggregation"]["prefill"]["process"] for each in spec["stages"] if each.get("disaggregation")}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that `undo` would change, those of a stage with its name."""
    old, new = restored(old, new), dict(new)
    names = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key) and _said(old, key) != _said(new, key)]
    found: list[str] = []
    for name in names:
        if name != "stages":
            found.append(name)
            continue
        before, after = ({stage["name"]: stage for stage in spec["stages"]} for spec in (old, new))
        if list(before) != list(after) and set(before) == set(after):
            found.append("the order of stages")
        for stage in [*before, *(each for each in after if each not in before)]:
            one, other = before.get(stage), after.get(stage)
            if one is None or other is None:
                found.append(f"stages[{stage}] {'added' if one is None else 'removed'}")
            else:
                fields = sorted(key for key in {*one, *other} if one.get(key) != other.get(key))
                found += [f"stages[{stage}].{field}" for field in fields]
    return tuple(found)


def _said(spec: Mapping[str, Any], key: str) -> Any:
    """A field's value for comparison; a process group with nothing but a name equals none."""
    value = spec.get(key)
    if key == "processGroups":
        return sorted((group for group in value or () if len(group) > 1), key=lambda group: str(group["name"])) or None
    return value or None


def _carry(spec: Manifest, live: Mapping[str, Any], key: str) -> None:
    if key in live:
        spec[key] = live[key]
    else:
        spec.pop(key, None)
