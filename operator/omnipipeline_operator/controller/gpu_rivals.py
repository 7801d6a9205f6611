"""Whether a pipeline lets go of its GPUs for another one, from what the store knows of all pipelines.

Here: reading pipelines as `changes.gangs` wants them, and which pods a verdict concerns. Not here: the rule. Called by
`reconciling`. Pods that Kueue has not admitted have no node, so that its queues are treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from omnipipeline_operator.changes import conditions, gangs, workloads
from omnipipeline_operator.changes.diagnostics import Diagnostic
from omnipipeline_operator.changes.gangs import Gang, Yielded
from omnipipeline_operator.changes.rollout import UnitRevision
from omnipipeline_operator.changes.status_inputs import is_available
from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_operator.cluster.store import PipelineKey, Store
from omnipipeline_operator.controller.planned import Planned
from omnipipeline_operator.controller.snapshots import Snapshot
from omnipipeline_operator.desired import pods
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.kinds import DEPLOYMENT, Manifest

READ_EVERY_S: Final = 0.02  # times the pipelines: reading all takes a few milliseconds for each that waits
LEAST_S: Final = 1.0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The future of one pipeline's GPUs."""

    yielded: Yielded | None = None
    held: frozenset[UnitRevision] = frozenset()  #: Unit revisions that get no pods.
    diagnostics: tuple[Diagnostic, ...] = ()
    again_s: float | None = None


NO_VERDICT: Final = Verdict()  #: Its pods get GPUs as the scheduler gives them.


class _Rival(msgspec.Struct, frozen=True, kw_only=True):
    resources: frozenset[str]
    gang: Gang


class GpuRivals:
    """All pipelines that want GPUs."""

    def __init__(self, store: Store, *, patience_s: float, clock: Callable[[], float]) -> None:
        self._store = store
        self._patience_s = patience_s
        self._clock = clock
        self._known: dict[PipelineKey, _Rival] = {}
        self._read_at = float("-inf")

    def decide(self, resource: Manifest, planned: Planned, snapshot: Snapshot) -> Verdict:
        """The verdict on one pipeline, and when to ask again though nothing happens to it."""
        now, key = self._clock(), (snapshot.owner.namespace, snapshot.owner.name)
        wanting = {unit.name: len(unit.gpu_ids) for unit in planned.plan.units if unit.gpu_ids}
        if not wanting or planned.goal.suspended:
            return NO_VERDICT
        own = msgspec.structs.replace(
            _gang(resource, snapshot, asleep=planned.goal.asleep),
            needs=sum(count * planned.goal.units[unit].replicas for unit, count in wanting.items()),
        )
        asks = own.yielded is not None or (own.stuck_since is not None and now - own.stuck_since >= self._patience_s)
        others = self._others(key, _of_manifests(each.deployment for each in planned.desired.workloads)) if asks else []
        yielded = gangs.decide(own, others, now=now, patience_s=self._patience_s)
        due = gangs.next_at(msgspec.structs.replace(own, yielded=yielded), now=now, patience_s=self._patience_s)
        again_s = None if due is None else max(due - now, LEAST_S)
        if yielded is None or yielded.since is None:
            return Verdict(yielded=yielded, again_s=again_s)
        units = {(unit.name, unit.revision) for unit in planned.plan.units if unit.gpu_ids}
        units |= {(each.unit, each.revision) for each in snapshot.workloads if each.gpus}
        message = _message(yielded, own.needs)
        found = tuple(Diagnostic(unit=unit, reason=gangs.REASON, message=message) for unit in wanting)
        return Verdict(yielded=yielded, held=frozenset(units), diagnostics=found, again_s=again_s)

    def _others(self, own: PipelineKey, resources: frozenset[str]) -> list[Gang]:
        """The other pipelines that want GPUs of the same kind; read again only after a while."""
        now = self._clock()
        if now - self._read_at >= READ_EVERY_S * len(self._known):
            self._read_at = now
            self._known = {key: found for key in self._store.pipelines() if (found := self._read(key)) is not None}
        return [each.gang for key, each in self._known.items() if key != own and each.resources & resources]

    def _read(self, key: PipelineKey) -> _Rival | None:
        resource = self._store.pipeline(key)
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            return None
        status = conditions.reported(resource.get("status", {}))
        counts = status.get("gpus", {})
        resources = _of_manifests(self._store.children(key, DEPLOYMENT))
        if not resources or not any(counts.values()):
            return None
        if conditions.is_true(status, "Available"):
            held = int(counts.get("ready", 0)) + int(counts.get("terminating", 0))
            gang = Gang(name="/".join(key), created_at=_created(resource), serves=True, held=held)
            return _Rival(resources=resources, gang=gang)
        owner = Owner(namespace=key[0], name=key[1], uid=resource["metadata"]["uid"])
        gang = _gang(resource, Snapshot(self._store, key, owner, now=self._clock()))
        if resource.get("spec", {}).get("suspend"):
            gang = msgspec.structs.replace(gang, stuck_since=None, yielded=None)
        return _Rival(resources=resources, gang=msgspec.structs.replace(gang, needs=int(counts.get("requested", 0))))


def _gang(resource: Manifest, snapshot: Snapshot, asleep: frozenset[str] = frozenset()) -> Gang:
    wanting = [each for each in snapshot.workloads if each.gpus]
    status = conditions.reported(resource.get("status", {}))
    return Gang(
        name=f"{snapshot.owner.namespace}/{snapshot.owner.name}",
        created_at=_created(resource),
        serves=is_available(snapshot.entries(), snapshot.workloads, asleep),
        held=sum(each.gpus * sum(pod.node is not None for pod in each.present) for each in wanting),
        stuck_since=_stuck_since(wanting),
        yielded=read_yielded(status.get("yielded")),
    )


def _stuck_since(wanting: Sequence[Workload]) -> float | None:
    stuck = [pod.created_at for each in wanting for pod in each.present if pod.unschedulable and not pod.terminating]
    return min(stuck, default=None)


def read_yielded(recorded: Mapping[str, Any] | None) -> Yielded | None:
    """As the status has it."""
    if not recorded:
        return None
    since = workloads.timestamp(recorded.get("since"))
    return Yielded(
        since=since or None,
        to=str(recorded.get("to", "")),
        gpus=int(recorded.get("gpus", 0)),
        tries=int(recorded.get("tries", 0)),
        failed=int(recorded.get("failed", 0)),
    )


def _message(yielded: Yielded, needs: int) -> str:
    why = f"{yielded.to} waits for GPUs" if yielded.to else "there were too few"
    return f"has let go of its GPUs, because {why}; it comes back when there may be room for all {needs} that it needs"


def _of_manifests(deployments: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """The extended resources that these Deployments' pods ask for."""
    annotations = (each["spec"]["template"]["metadata"].get("annotations", {}) for each in deployments)
    return frozenset(each[pods.GPU_RESOURCE] for each in annotations if each.get(pods.GPU_RESOURCE))


def _created(resource: Manifest) -> float:
    return workloads.timestamp(resource["metadata"].get("creationTimestamp"))
