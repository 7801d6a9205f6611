"""The observed workloads of a pipeline, reduced to the facts that decisions need.

Here: `Workload`, `ObservedPod`, and how they are read from live objects. Not here: where those come from
(`cluster.store`), any decision (`rollout`, `status`). Called by `controller`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Any, Final

import msgspec

from omnipipeline_operator.desired import naming, podgroups
from omnipipeline_operator.desired.pod_templates import fetching, pods
from omnipipeline_operator.kinds import Kind
from omnipipeline_spec import crashes
from omnipipeline_spec.types.pods import COORDINATOR

TEMPLATE_REVISION: Final = "deployment.kubernetes.io/revision"
FINISHED: Final = ("Succeeded", "Failed")
PREEMPTS: Final = "PreemptLowerPriority"  # the default of a PriorityClass
LOST_S: Final = 60.0  # after the end of its grace period, a kubelet has long killed a pod and given back its devices
_CONTAINERS: Final = ("initContainerStatuses", "containerStatuses")
MAX_DIGITS: Final = 12

#: Reasons of a waiting container: its image cannot be pulled.
UNPULLABLE: Final = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")


class ObservedPod(msgspec.Struct, frozen=True, kw_only=True):
    """One pod of a unit revision, and why it is not ready."""

    name: str
    uid: str = ""
    ip: str | None = None
    ready: bool = False
    terminating: bool = False
    #: It is terminating, and nothing waits for its end: its node does not answer, or its grace period is long over.
    lost: bool = False
    lost_at: float | None = None  #: When a terminating pod counts as lost, if it still exists.
    node: str | None = None
    priority: int = 0  #: The value of its PriorityClass, as admission has found it.
    preempts: bool = False  #: Whether the scheduler ends other pods for it.
    finished: bool = False  #: It has ended and will not run again; it is not counted.
    created_at: float = 0.0
    ready_since: float | None = None
    reason: str | None = None  #: Why it is not ready; None: it is ready or starting.
    message: str = ""
    #: When the reason is too old: it is of the container's previous run, or of a pod that has failed. None: never.
    reason_until: float | None = None
    started_at: float = 0.0  #: When the generated container was started, if it runs.
    was_ready: bool = False  #: It was ready since then.

    @property
    def starting_since(self) -> float | None:
        """The time since which it has been starting; None: it is or was ready, has ended, or fetches its model
        first.
        """
        started = self.ready or self.was_ready or self.finished or self.terminating or self.fetches
        return None if started else max(self.created_at, self.started_at) or None

    leaving_since: float | None = None  #: When it was told to end; None: it was not.
    unschedulable: bool = False
    restarts: int = 0
    waits_for_volumes: bool = False  #: It has a node, and none of its containers has been created.
    started: bool = False  #: The generated container is running or has run.
    admitted: bool = False  #: Its kubelet has accepted it.
    fetches: bool = False  #: Its model is being fetched to its node: no container of its stages runs.


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The Deployment of one unit revision and its pods."""

    unit: str
    revision: str
    name: str
    uid: str
    replicas: int  #: The number in its spec.
    created_at: float = 0.0
    pods: tuple[ObservedPod, ...] = ()
    gpus: int = 0  #: GPUs per pod.
    image: str = ""  #: The image pinned when it was made; a spec or a podTemplate may name another one.
    control_secret: str | None = None
    drifted: bool = False  #: Its template was edited by hand; the operator never edits one.
    grouped: str = ""  #: The key of the kind of PodGroup that its pods name.
    refused: str | None = None  #: Why the API server refuses its pods: a quota, pod security.
    refused_since: float = 0.0
    tried_at: float = 0.0  #: When a retry was last requested.

    @property
    def ready(self) -> int:
        """The number of ready pods that are not terminating."""
        return sum(pod.ready and not pod.terminating for pod in self.pods)

    @property
    def started(self) -> bool:
        """Whether a generated container of it is running or has run: then it is neither held back nor made anew."""
        return any(pod.started for pod in self.present)

    @property
    def serves(self) -> bool:
        """Whether it has started pods that are to stay: then it is not made anew. Pods that end do not count."""
        return bool(self.replicas) and self.started

    @property
    def idle(self) -> bool:
        return not self.replicas and not self.present

    @property
    def waits_for_image(self) -> bool:
        """Whether its image cannot be pulled and none of its pods has ever run it."""
        return not self.started and any(pod.reason in UNPULLABLE for pod in self.present)

    @property
    def present(self) -> tuple[ObservedPod, ...]:
        """Pods that hold resources, terminating ones included."""
        return tuple(pod for pod in self.pods if not pod.finished)

    @property
    def staying(self) -> int:
        """The number of pods that hold resources and are not terminating."""
        return sum(not pod.terminating for pod in self.present)

    @property
    def awaited(self) -> tuple[ObservedPod, ...]:
        """Pods that a roll-out waits for when they are old: those that are present and not lost."""
        return tuple(pod for pod in self.present if not pod.lost)


def read_workload(
    deployment: Mapping[str, Any], own_pods: Iterable[Mapping[str, Any]], *, now: float = 0.0
) -> Workload:
    """A workload from a live Deployment and the live pods with its labels."""
    metadata, spec, refusal = deployment["metadata"], deployment["spec"], _refusal(deployment)
    annotations = metadata.get("annotations", {})
    labels, template = metadata.get("labels", {}), spec["template"]
    selector = spec["selector"].get("matchLabels", {})  # immutable, unlike the labels
    secrets = [volume["secret"]["secretName"] for volume in template["spec"].get("volumes", ()) if _is_control(volume)]
    return Workload(
        unit=selector.get(naming.UNIT_LABEL, labels.get(naming.UNIT_LABEL, "")),
        revision=selector.get(naming.REVISION_LABEL, labels.get(naming.REVISION_LABEL, "")),
        name=metadata["name"],
        uid=metadata["uid"],
        replicas=spec.get("replicas", 1),
        created_at=timestamp(metadata.get("creationTimestamp")),
        pods=tuple(read_pod(one, now=now) for one in own_pods),
        gpus=pods.gpus(deployment),
        image=annotations.get(naming.IMAGE_PIN) or template["spec"]["containers"][0].get("image", ""),
        control_secret=secrets[0] if secrets else None,
        grouped=podgroups.key_in(template),
        drifted=annotations.get(TEMPLATE_REVISION, "1") != "1",
        refused=None if refusal is None else str(refusal.get("message") or refusal.get("reason") or "pods are refused"),
        refused_since=timestamp((refusal or {}).get("lastTransitionTime")),
        tried_at=_seconds(annotations.get(naming.RETRIED_AT, "")),
    )


def read_pod(manifest: Mapping[str, Any], *, now: float = 0.0) -> ObservedPod:
    """A pod from a live one. ``now``: decides only whether a terminating one is lost."""
    metadata, spec, status = manifest["metadata"], manifest.get("spec", {}), manifest.get("status", {})
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    ready = conditions.get("Ready", {}).get("status") == "True"
    started_at = _started_at(manifest)
    deleted_at = timestamp(metadata.get("deletionTimestamp"))
    diagnostic = None if ready or _has_succeeded(manifest) else _pod_diagnostic(manifest, conditions)
    return ObservedPod(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        ip=status.get("podIP"),
        ready=ready,
        terminating=bool(deleted_at),
        lost=bool(deleted_at) and (_is_node_lost(conditions) or now >= deleted_at + LOST_S),
        lost_at=deleted_at + LOST_S if deleted_at else None,
        leaving_since=deleted_at - metadata.get("deletionGracePeriodSeconds", 0) if deleted_at else None,
        node=spec.get("nodeName"),
        priority=int(spec.get("priority") or 0),
        preempts=bool(spec.get("priority")) and spec.get("preemptionPolicy", PREEMPTS) == PREEMPTS,
        finished=status.get("phase") in FINISHED,
        created_at=timestamp(metadata.get("creationTimestamp")),
        ready_since=timestamp(conditions["Ready"].get("lastTransitionTime")) if ready else None,
        reason=None if diagnostic is None else diagnostic.reason,
        message="" if diagnostic is None else diagnostic.message,
        reason_until=None if diagnostic is None else diagnostic.until,
        started_at=started_at,
        was_ready=bool(started_at) and timestamp(conditions.get("Ready", {}).get("lastTransitionTime")) > started_at,
        unschedulable=diagnostic is not None and diagnostic.reason == "Unschedulable",
        waits_for_volumes=_waits_for_volumes(manifest),
        started=ready or any(map(_has_run, _generated(manifest))),
        admitted=any(status.get(kind) for kind in _CONTAINERS),
        fetches=_fetches(manifest),
        restarts=sum(each.get("restartCount", 0) for each in status.get("containerStatuses", ())),
    )


def grouped(
    observed: Iterable[Workload], desired: Mapping[str, str], members: Collection[str], *, wanted: Kind | None
) -> dict[str, podgroups.Grouped]:
    """The units whose pods name a PodGroup, by the key of its kind.

    desired: unit -> its desired revision.
    members: units whose pods are to name one.
    wanted:  new ones name such a group. Nobody asks who lacks another kind that no pod names.
    """
    live = list(observed)
    replaced = [
        each
        for each in live
        if each.gpus
        and not each.idle
        and desired.get(each.unit) != each.revision
        and (each.unit in members or each.unit not in desired)
    ]
    own = [each for each in live if desired.get(each.unit) == each.revision]
    return {
        kind.key: podgroups.Grouped(
            units=frozenset(each.unit for each in own if each.grouped == kind.key),
            others=frozenset(each.unit for each in own if each.grouped != kind.key),
            any=any(each.grouped == kind.key and not each.idle for each in live),
            apart=any(each.grouped != kind.key for each in replaced),
        )
        for kind in podgroups.KINDS
        if kind is wanted or any(each.grouped == kind.key for each in live)
    }


def timestamp(text: str | None) -> float:
    """Seconds since the epoch of an RFC 3339 time; 0 for none, and for one that Python cannot hold: the year 0."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else 0.0
    except ValueError:
        return 0.0


def _seconds(text: str) -> float:
    """A number of whole seconds that the operator has written; 0 for anything else."""
    return float(text) if text.isdecimal() and len(text) < MAX_DIGITS else 0.0


def _has_succeeded(manifest: Mapping[str, Any]) -> bool:
    return bool(manifest.get("status", {}).get("phase") == "Succeeded")


def _started_at(manifest: Mapping[str, Any]) -> float:
    """When the generated container was started, if it runs; else 0."""
    states = [each.get("state", {}) for each in _generated(manifest)]
    return max((timestamp(state["running"].get("startedAt")) for state in states if "running" in state), default=0.0)


def _generated(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The status of the container that the operator has made; an author's own may run without it."""
    unit = manifest["metadata"].get("labels", {}).get(naming.UNIT_LABEL)
    name = COORDINATOR if unit == COORDINATOR else pods.STAGE
    return [each for each in manifest.get("status", {}).get("containerStatuses", ()) if each.get("name") == name]


def _waits_for_volumes(manifest: Mapping[str, Any]) -> bool:
    """Whether the kubelet has made no container yet; with init containers it calls that PodInitializing."""
    status = manifest.get("status", {})
    if any(map(_has_run, status.get(_CONTAINERS[0], ()))):
        return False
    reasons = [each.get("state", {}).get("waiting", {}).get("reason") for each in status.get(_CONTAINERS[1], ())]
    waits = bool(reasons) and all(reason in _UNMADE for reason in reasons)
    return waits and "deletionTimestamp" not in manifest["metadata"]


def _fetches(manifest: Mapping[str, Any]) -> bool:
    own = [each for each in manifest.get("status", {}).get(_CONTAINERS[0], ()) if each.get("name") == fetching.NAME]
    return any("running" in each.get("state", {}) for each in own)


def _has_run(container: Mapping[str, Any]) -> bool:
    """Whether it runs, or has ended."""
    states = (container.get("state", {}), container.get("lastState", {}))
    return any("running" in state or "terminated" in state for state in states)


def _is_control(volume: Mapping[str, Any]) -> bool:
    return volume.get("name") == "control" and "secret" in volume


def _refusal(deployment: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The condition with the API server's message, when the ReplicaSet could not create a pod."""
    for condition in deployment.get("status", {}).get("conditions", ()):
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            found: Mapping[str, Any] = condition
            return found
    return None


#: Reasons of a waiting container that pass within seconds, or that follow from its previous end.
_UNMADE: Final = ("ContainerCreating", "PodInitializing")
_PASSING: Final = (*_UNMADE, "CrashLoopBackOff", "RunContainerError")
_CRASHED: Final = "CrashLoopBackOff"
_OUT_OF_MEMORY: Final = "needs more memory than resources.limits.memory; shared memory counts towards it"
_TOLD: Final = (0, 137, 143)  #: Exit codes of a process that was told to end, or killed: mostly by a failed probe.
_UNSTARTABLE: Final = ("StartError", "ContainerCannotRun")  # of containerd and of other runtimes
#: The kubelet alternates between the two; only the first is sure to have the cause.
_UNPULLED: Final = ("ErrImagePull", "ImagePullBackOff")
_ILLEGAL: Final = re.compile(r"[^A-Za-z0-9_,:]")  # in a condition's reason, as in OutOfnvidia.com/gpu
MAX_FAILED_S: Final = 1800.0  # of a pod that lived for days, its successor's start is not reported by its reason
MIN_RUNNING_S: Final = 60.0  # until a restarted container has run so long, its previous end is reported


class _PodDiagnostic(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    message: str
    until: float | None = None  #: When the diagnostic expires.


def _pod_diagnostic(manifest: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> _PodDiagnostic | None:
    """The first thing that keeps a pod from being ready."""
    status = manifest.get("status", {})
    if status.get("phase") == "Failed" and status.get("reason"):  # refused, evicted: its containers did not end it
        return _failure(manifest)
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return _PodDiagnostic(reason="Unschedulable", message=str(scheduled.get("message", "")))
    unready_since = timestamp(conditions.get("Ready", {}).get("lastTransitionTime"))
    for kind in _CONTAINERS:
        for container in status.get(kind, ()):
            found = _container_diagnostic(container, unready_since, may_end=kind == _CONTAINERS[0])
            if found is not None:
                if kind == _CONTAINERS[0] and container["name"] == fetching.NAME and found.reason == _CRASHED:
                    found = msgspec.structs.replace(found, reason="PrefetchFailed")
                return msgspec.structs.replace(found, message=f"container {container['name']}: {found.message}")
    if _is_node_lost(conditions):
        node = manifest.get("spec", {}).get("nodeName")
        return _PodDiagnostic(reason="NodeLost", message=f"node {node} does not answer; another pod will replace it")
    return _failure(manifest) if status.get("phase") == "Failed" else None


def _failure(manifest: Mapping[str, Any]) -> _PodDiagnostic:
    """Why the kubelet, or a controller, has ended a pod that will not run again.

    Its reason counts for as long as it lived and as long again, at least a minute, as that of a crash does.
    """
    status, created = manifest["status"], timestamp(manifest["metadata"].get("creationTimestamp"))
    times = [each.get("lastTransitionTime") for each in status.get("conditions", ())] + [status.get("startTime")]
    states = [each.get("state", {}) for kind in _CONTAINERS for each in status.get(kind, ())]
    times += [each.get("terminated", {}).get("finishedAt") for each in states]
    ended = max(created, *map(timestamp, times))
    return _PodDiagnostic(
        reason=_ILLEGAL.sub("_", str(status.get("reason") or "Failed")),
        message=" ".join(str(status.get("message") or "the pod has failed").split()),
        until=ended + min(max(MIN_RUNNING_S, 2 * (ended - created)), MAX_FAILED_S),
    )


def _is_node_lost(conditions: Mapping[str, Mapping[str, Any]]) -> bool:
    """The node controller sets Ready to False without a reason; the kubelet's other conditions stay as they were."""
    ready, containers = conditions.get("Ready", {}), conditions.get("ContainersReady", {})
    return ready.get("status") == "False" and not ready.get("reason") and containers.get("status") == "True"


def _container_diagnostic(
    container: Mapping[str, Any], unready_since: float, *, may_end: bool
) -> _PodDiagnostic | None:
    """Why a container is not ready; a crash has one reason, whether it is waiting, has just ended or runs again.

    may_end: it is an init container, whose exit code 0 is a success. A sidecar among them is in back-off after it.
    """
    state, last = container.get("state", {}), container.get("lastState", {}).get("terminated")
    waiting, running = state.get("waiting", {}), state.get("running")
    reason, message = waiting.get("reason"), str(waiting.get("message") or "")
    if reason in _UNPULLED:
        return _PodDiagnostic(
            reason="ImagePullBackOff", message=message.rpartition(f"{_UNPULLED[0]}: ")[2] or str(reason)
        )
    if reason and reason not in _PASSING:
        return _PodDiagnostic(reason=str(reason), message=message or str(reason))
    ended = state.get("terminated") or last
    if not ended:
        return (
            _PodDiagnostic(reason=_UNSTARTABLE[0], message=crashes.cause(message))
            if reason == "RunContainerError"
            else None
        )
    if may_end and ended.get("exitCode") == 0 and reason != "CrashLoopBackOff":
        return None
    if running is None:
        return _crash(ended)
    started = timestamp(running.get("startedAt"))
    if container.get("ready") or unready_since > started:  # it has been ready since the restart
        return None
    life = timestamp(ended.get("finishedAt")) - timestamp(ended.get("startedAt"))
    return msgspec.structs.replace(_crash(ended), until=started + max(MIN_RUNNING_S, 2 * life))


def _crash(ended: Mapping[str, Any]) -> _PodDiagnostic:
    word, code, cause = ended.get("reason"), ended.get("exitCode"), crashes.cause(str(ended.get("message") or ""))
    if word == "OOMKilled":
        return _PodDiagnostic(reason=word, message=_OUT_OF_MEMORY)
    if word in _UNSTARTABLE:
        return _PodDiagnostic(reason=_UNSTARTABLE[0], message=cause or "cannot be started")
    if code == crashes.EXIT_HUNG and cause:
        return _PodDiagnostic(reason="StartupDeadlineExceeded", message=cause)
    told = "; if a probe failed, the pod's Events say so" if code in _TOLD else ""
    return _PodDiagnostic(reason=_CRASHED, message=cause or f"ended with exit code {code} and no output{told}")
