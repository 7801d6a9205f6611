"""Draws a pipeline, its conditions, its units and their pods as a tree.

Here: what is shown of live objects. Pure. Not here: reading them (`access`), why a unit is not ready (the operator
reports it in the status). Called by ``kubectl omni status``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text
from rich.tree import Tree

from omnipipeline_operator.desired import naming
from omnipipeline_spec import crashes
from omnipipeline_spec.types.pods import COORDINATOR

LiveObject = Mapping[str, Any]

_GOOD_WHEN_FALSE = frozenset({"Suspended"})


def tree(pipeline: LiveObject, pods: Sequence[LiveObject], stages: Mapping[str, Sequence[str]]) -> Tree:
    """stages: unit -> the stages that run in it; empty when the spec can't be planned."""
    root = Tree(_title(pipeline))
    conditions = root.add("conditions")
    for condition in pipeline.get("status", {}).get("conditions", ()):
        conditions.add(_condition(condition))
    canary = pipeline.get("status", {}).get("canary")
    if canary:
        root.add(_canary(canary))
    by_unit = _by_unit([pod for pod in pods if naming.UNIT_LABEL in pod["metadata"]["labels"]])
    fetching = [pod for pod in pods if naming.UNIT_LABEL not in pod["metadata"]["labels"]]
    if fetching:
        branch = root.add("prefetch of the model")
        for pod in fetching:
            branch.add(_pod(pod))
    for unit in pipeline.get("status", {}).get("units", ()):
        branch = root.add(_unit(unit, stages.get(unit["name"], ())))
        for pod in by_unit.pop(unit["name"], ()):
            branch.add(_pod(pod))
    for name, left in sorted(by_unit.items()):
        branch = root.add(Text(f"{name} (no longer in the spec)", style="yellow"))
        for pod in left:
            branch.add(_pod(pod))
    return root


def _title(pipeline: LiveObject) -> Text:
    metadata, status = pipeline["metadata"], pipeline.get("status", {})
    title = Text.assemble((f"{metadata['namespace']}/{metadata['name']}", "bold"))
    url = status.get("endpoint", {}).get("url")
    if url:
        title.append(f"  {url}")
    revision = status.get("revision", {})
    current, update = revision.get("current"), revision.get("update")
    if update and update != current:
        title.append(f"  revision {current or 'none'} → {update}", style="yellow")
    elif current:
        title.append(f"  revision {current}", style="dim")
    if not status:
        title.append("  no operator has reconciled it yet", style="red")
    elif status.get("observedGeneration") != metadata.get("generation"):
        title.append("  (the operator has not reconciled the last change yet)", style="yellow")
    return title


def _canary(canary: LiveObject) -> Text:
    """The revision that is tried with a share of the requests."""
    if canary.get("aborted"):
        return Text(f"canary: {canary.get('message', '')}", style="red")
    what = canary.get("message") or f"waits for pods; then it gets {canary.get('weight')} % of the requests"
    return Text(f"canary: revision {canary['revision']} {what}", style="yellow")


def _condition(condition: LiveObject) -> Text:
    name, status = condition["type"], condition["status"]
    good = status == ("False" if name in _GOOD_WHEN_FALSE else "True")
    style = "green" if good else "yellow" if status == "Unknown" else "red"
    line = Text.assemble((f"{name}={status}", style))
    reason, message = condition.get("reason"), condition.get("message")
    if reason and reason != name:
        line.append(f"  {reason}")
    if message:
        line.append(f": {message}", style="" if not good else "dim")
    return line


def _unit(unit: LiveObject, stages: Sequence[str]) -> Text:
    ready, desired = unit.get("ready", 0), unit.get("replicas", 0)
    style = "green" if ready >= desired else "red"
    line = Text.assemble((f"{unit['name']}  {ready}/{desired} ready", style))
    if unit["name"] != COORDINATOR:
        line.append(f", {unit.get('registered', 0)} registered")
    if unit.get("updated", desired) < desired:
        line.append(f", {unit.get('updated', 0)} of revision {unit.get('revision')}", style="yellow")
    if stages:
        line.append(f"  [{', '.join(stages)}]", style="dim")
    if unit.get("scaling"):
        line.append(f"  by its load: {unit['scaling']}", style="dim")
    if unit.get("reason"):
        line.append(f"  {unit['reason']}: {unit.get('message', '')}", style="red")
    return line


def _by_unit(pods: Sequence[LiveObject]) -> dict[str, list[LiveObject]]:
    found: dict[str, list[LiveObject]] = {}
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        found.setdefault(pod["metadata"]["labels"][naming.UNIT_LABEL], []).append(pod)
    return found


def _pod(pod: LiveObject) -> Text:
    status = pod.get("status", {})
    state, style = _state(pod)
    line = Text.assemble(pod["metadata"]["name"], "  ", (state, style))
    restarts = sum(container.get("restartCount", 0) for container in status.get("containerStatuses", ()))
    if restarts:
        line.append(f"  {restarts} restart{'' if restarts == 1 else 's'}", style="yellow")
    for label, value in (("node", pod.get("spec", {}).get("nodeName")), ("ip", status.get("podIP"))):
        if value:
            line.append(f"  {label} {value}", style="dim")
    return line


def _state(pod: LiveObject) -> tuple[str, str]:
    """The pod's state in a few words and its colour; the worst of its containers."""
    status = pod.get("status", {})
    if "deletionTimestamp" in pod["metadata"]:
        return "draining", "yellow"
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return _with_cause(waiting["reason"], container), "red"
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', 'Unschedulable')}: {condition.get('message', '')}", "red"
        if condition["type"] == "Ready" and condition["status"] == "True":
            return "ready", "green"
    phase = str(status.get("phase", "Pending"))
    if phase == "Failed":
        return _with_cause("failed", *status.get("containerStatuses", ())), "red"
    if phase == "Succeeded":
        return "done", "green"
    return ("loading" if phase == "Running" else phase), "yellow"


def _with_cause(reason: str, *containers: LiveObject) -> str:
    """The reason and the cause of the end, which the operator's conditions have, too."""
    for container in containers:
        ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated", {})
        cause = crashes.cause(str(ended.get("message") or ""))
        if cause:
            return f"{reason}: {cause}"
    return reason
