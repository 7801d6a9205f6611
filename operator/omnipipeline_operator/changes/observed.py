"""What was seen of a pipeline's children, in the few facts that decisions are made from.

Here: `Workload`, `Pod`, `Observed` and how they are read from plain dicts. Not here: how the dicts were got
(`cluster.store`), any decision (`rollout`, `status`). Called by the handlers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

import msgspec

from omnipipeline_operator.desired import naming, pods

TEMPLATE_REVISION: Final = "deployment.kubernetes.io/revision"
OVER: Final = ("Succeeded", "Failed")


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """One pod of a unit revision, with what is wrong with it."""

    name: str
    ip: str | None = None
    ready: bool = False
    terminating: bool = False
    over: bool = False  #: It has ended and will not run again; it counts for nothing.
    created_at: float = 0.0
    ready_since: float | None = None
    reason: str | None = None  #: Why it is not ready, in one word; None: it is, or it is just starting.
    message: str = ""
    unschedulable: bool = False
    restarts: int = 0
    waits_for_volumes: bool = False  #: It has a node, and none of its containers has been made.


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The Deployment of one unit revision and its pods."""

    unit: str
    revision: str
    name: str
    uid: str
    replicas: int  #: What its spec asks for.
    created_at: float = 0.0
    pods: tuple[Pod, ...] = ()
    gpus: int = 0  #: Per pod.
    image: str = ""
    control_secret: str | None = None
    drifted: bool = False  #: Somebody edited its template, which is never edited.
    refused: str | None = None  #: Why its pods cannot even be made: quota, pod security.

    @property
    def ready(self) -> int:
        """Pods that work and will go on working."""
        return sum(pod.ready and not pod.terminating for pod in self.pods)

    @property
    def present(self) -> tuple[Pod, ...]:
        """Pods that hold resources, those on their way out too."""
        return tuple(pod for pod in self.pods if not pod.over)


def workload(deployment: Mapping[str, Any], own_pods: Iterable[Mapping[str, Any]]) -> Workload:
    """A Deployment as the API server gives it, with the pods that bear its labels."""
    metadata, spec = deployment["metadata"], deployment["spec"]
    labels, template = metadata.get("labels", {}), spec["template"]
    selector = spec["selector"].get("matchLabels", {})  # immutable: the truth where a label was edited
    secrets = [volume["secret"]["secretName"] for volume in template["spec"].get("volumes", ()) if _is_control(volume)]
    return Workload(
        unit=selector.get(naming.UNIT_LABEL, labels.get(naming.UNIT_LABEL, "")),
        revision=selector.get(naming.REVISION_LABEL, labels.get(naming.REVISION_LABEL, "")),
        name=metadata["name"],
        uid=metadata["uid"],
        replicas=spec.get("replicas", 1),
        created_at=timestamp(metadata.get("creationTimestamp")),
        pods=tuple(pod(one) for one in own_pods),
        gpus=pods.gpus(deployment),
        image=template["spec"]["containers"][0].get("image", ""),
        control_secret=secrets[0] if secrets else None,
        drifted=metadata.get("annotations", {}).get(TEMPLATE_REVISION, "1") != "1",
        refused=_refusal(deployment),
    )


def pod(manifest: Mapping[str, Any]) -> Pod:
    """A pod as the API server gives it."""
    metadata, status = manifest["metadata"], manifest.get("status", {})
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    ready = conditions.get("Ready", {}).get("status") == "True"
    reason, message = (None, "") if ready else _trouble(manifest, conditions)
    return Pod(
        name=metadata["name"],
        ip=status.get("podIP"),
        ready=ready,
        terminating="deletionTimestamp" in metadata,
        over=status.get("phase") in OVER,
        created_at=timestamp(metadata.get("creationTimestamp")),
        ready_since=timestamp(conditions["Ready"].get("lastTransitionTime")) if ready else None,
        reason=reason,
        message=message,
        unschedulable=reason == "Unschedulable",
        waits_for_volumes=_waits_for_volumes(manifest),
        restarts=sum(each.get("restartCount", 0) for each in status.get("containerStatuses", ())),
    )


def timestamp(text: str | None) -> float:
    """Seconds since the epoch of the API server's spelling; 0 when there is none."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def _waits_for_volumes(manifest: Mapping[str, Any]) -> bool:
    containers = manifest.get("status", {}).get("containerStatuses", ())
    waiting = [each.get("state", {}).get("waiting", {}).get("reason") == "ContainerCreating" for each in containers]
    return "deletionTimestamp" not in manifest["metadata"] and bool(waiting) and all(waiting)


def _is_control(volume: Mapping[str, Any]) -> bool:
    return volume.get("name") == "control" and "secret" in volume


def _refusal(deployment: Mapping[str, Any]) -> str | None:
    """The ReplicaSet could not make a pod: the API server's own words."""
    for condition in deployment.get("status", {}).get("conditions", ()):
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return str(condition.get("message") or condition.get("reason") or "pods are refused")
    return None


#: Reasons of a waiting container that pass by themselves in seconds.
_STARTING: Final = ("ContainerCreating", "PodInitializing")
_TOO_LITTLE_MEMORY: Final = "needs more than resources.limits.memory, to which shared memory counts"


def _trouble(manifest: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> tuple[str | None, str]:
    """The first thing that keeps a pod from being ready."""
    status = manifest.get("status", {})
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return "Unschedulable", str(scheduled.get("message", ""))
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        found = _container_trouble(container)
        if found is not None:
            return found[0], f"container {container['name']}: {found[1]}"
    if _is_cut_off(conditions):
        return (
            "NodeLost",
            f"node {manifest.get('spec', {}).get('nodeName')} does not answer; another pod takes over soon",
        )
    if status.get("phase") == "Failed":
        return str(status.get("reason") or "Failed"), str(status.get("message") or "the pod has failed")
    return None, ""


def _is_cut_off(conditions: Mapping[str, Mapping[str, Any]]) -> bool:
    """The node controller takes the readiness away and gives no reason; what the kubelet said last stands beside it."""
    ready, containers = conditions.get("Ready", {}), conditions.get("ContainersReady", {})
    return ready.get("status") == "False" and not ready.get("reason") and containers.get("status") == "True"


def _container_trouble(container: Mapping[str, Any]) -> tuple[str, str] | None:
    state, last = container.get("state", {}), container.get("lastState", {}).get("terminated")
    waiting, terminated = state.get("waiting", {}), state.get("terminated") or last
    reason = waiting.get("reason")
    if reason == "CrashLoopBackOff" and terminated and terminated.get("reason") == "OOMKilled":
        return "OOMKilled", _TOO_LITTLE_MEMORY  # why it loops is of more use than that it does
    if reason and reason not in _STARTING:
        told = _last_line(terminated) if reason == "CrashLoopBackOff" else ""
        return reason, told or str(waiting.get("message") or reason)
    if terminated and (state.get("terminated") or not state.get("running")):
        word = str(terminated.get("reason") or "Terminated")
        if word == "OOMKilled":
            return word, _TOO_LITTLE_MEMORY
        return word, _last_line(terminated) or f"exit code {terminated.get('exitCode')}"
    if last and not container.get("ready"):
        if last.get("reason") == "OOMKilled":
            return "OOMKilled", _TOO_LITTLE_MEMORY
        return "Restarted", _last_line(last) or f"exit code {last.get('exitCode')} before this start"
    return None


def _last_line(terminated: Mapping[str, Any] | None) -> str:
    """Of the termination message (the kubelet's last log lines): the one that says what went wrong."""
    lines = [line.strip() for line in str((terminated or {}).get("message", "")).splitlines() if line.strip()]
    return lines[-1][:512] if lines else ""
