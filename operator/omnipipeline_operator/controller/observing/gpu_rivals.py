"""Whether a pipeline lets go of its GPUs for another one, from what the store knows of all pipelines.

Here: reading pipelines as `changes.deciding.gangs` wants them, and which pods a verdict concerns. Not here: the rule.
Called by `reconciling`. Pods that Kueue has not admitted have no node, so that its queues are treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from omnipipeline_operator.changes import conditions, workloads
from omnipipeline_operator.changes.deciding import gangs
from omnipipeline_operator.changes.deciding.gangs import Gang, Yielded
from omnipipeline_operator.changes.deciding.rollout import UnitRevision
from omnipipeline_operator.changes.reporting.diagnostics import Diagnostic
from omnipipeline_operator.changes.reporting.status_inputs import is_available
from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_operator.cluster.store import PipelineKey, Store
from omnipipeline_operator.controller.observing.snapshots import Snapshot
from omnipipeline_operator.controller.revisions.planned import Planned
from omnipipeline_operator.desired import naming
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.desired.pod_templates import pods
from omnipipeline_operator.kinds import DEPLOYMENT, POD, Manifest

READ_EVERY_S: Final = 0.02  # times the pipelines: reading all takes a few milliseconds for each that waits
LEAST_S: Final = 1.0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The future of one pipeline's GPUs."""

    yielded: Yielded | None = None
    held: frozenset[UnitRevision] = frozenset()  #: Unit revisions that get no pods.
    diagnostics: tuple[Diagnostic, ...] = ()
    again_s: float | None = None
    note: str | None = None  #: A remark for the author on the priority of its pods.


NO_VERDICT: Final = Verdict()  #: Its pods get GPUs as the scheduler gives them.


class _Rival(msgspec.Struct, frozen=True, kw_only=True):
    resources: frozenset[str]
    gang: Gang


class GpuRivals:
    """All pipelines that want GPUs."""

    def __init__(
        self,
        store: Store,
        *,
        patience_s: float,
        taking_s: float,
        clock: Callable[[], float],
        wake: Callable[[PipelineKey], None],
    ) -> None:
        self._store = store
        self._patience_s = patience_s
        self._taking_s = taking_s
        self._clock = clock
        self._wake = wake  #: Has a pipeline reconciled though nothing has happened to it.
        self._taking: dict[PipelineKey, int] = {}  #: Those that wait for lower ones' GPUs, with their priority.
        #: Those that may sleep and hold GPUs or wait for some, with `Gang.serving_since`.
        self._sleepers: dict[PipelineKey, float | None] = {}
        self._known: dict[PipelineKey, _Rival] = {}
        self._read_at = float("-inf")

    def decide(self, resource: Manifest, planned: Planned, snapshot: Snapshot) -> Verdict:
        """The verdict on one pipeline, and when to ask again though nothing happens to it."""
        now, key = self._clock(), (snapshot.owner.namespace, snapshot.owner.name)
        wanting = {unit.name: len(unit.gpu_ids) for unit in planned.plan.units if unit.gpu_ids}
        if not wanting or planned.goal.suspended:
            self._taking.pop(key, None)
            self._sleepers.pop(key, None)
            return NO_VERDICT
        limits = planned.plan.autoscaling
        own = msgspec.structs.replace(
            _gang(resource, snapshot, asleep=planned.goal.asleep),
            needs=sum(count * planned.goal.units[unit].replicas for unit, count in wanting.items()),
            sleeps=all(unit in limits and not limits[unit].least for unit in wanting),
        )
        if own.sleeps and (own.held or own.waits):
            self._sleepers[key] = own.serving_since
        else:
            self._sleepers.pop(key, None)
        resources = _of_manifests(each.deployment for each in planned.desired.workloads)
        others = self._others(key, resources) if self._asks(key, own, now) else []
        yielded = gangs.decide(own, others, now=now, patience_s=self._patience_s, taking_s=self._taking_s)
        after = msgspec.structs.replace(own, yielded=yielded)
        due = gangs.next_at(after, now=now, patience_s=self._patience_s, taking_s=self._taking_s)
        again_s = None if due is None else max(due - now, LEAST_S)
        note = _note(snapshot.workloads)
        if yielded is None or yielded.since is None:
            found = self._take(key, after, others, wanting)
            return Verdict(yielded=yielded, diagnostics=found, again_s=again_s, note=note)
        self._taking.pop(key, None)
        units = {(unit.name, unit.revision) for unit in planned.plan.units if unit.gpu_ids}
        units |= {(each.unit, each.revision) for each in snapshot.workloads if each.gpus}
        message = _message(yielded, own.needs)
        found = tuple(Diagnostic(unit=unit, reason=gangs.REASON, message=message) for unit in wanting)
        return Verdict(yielded=yielded, held=frozenset(units), diagnostics=found, again_s=again_s, note=note)

    def _asks(self, key: PipelineKey, own: Gang, now: float) -> bool:
        """Whether what others have matters: reading them costs."""
        if own.yielded is not None:
            return True
        waited = 0.0 if own.stuck_since is None else now - own.stuck_since
        if own.stuck_since is not None and waited >= (self._taking_s if gangs.takes(own) else self._patience_s):
            return True
        for known in (self._taking, self._sleepers):
            for gone in [each for each in known if self._store.pipeline(each) is None]:
                del known[gone]
        had_its_turn = own.sleeps and own.serves and now - (own.serving_since or now) >= self._patience_s
        if had_its_turn and len(self._sleepers) > 1:
            return True
        return any(priority > own.priority for other, priority in self._taking.items() if other != key)

    def _take(
        self, key: PipelineKey, own: Gang, others: Sequence[Gang], wanting: Iterable[str]
    ) -> tuple[Diagnostic, ...]:
        """Have those of a lower priority look whether they let go for it; what is said of those that have."""
        if not gangs.takes(own):
            self._taking.pop(key, None)
            return ()
        self._taking[key] = own.priority
        for each in others:
            if each.held and not each.is_away and each.priority < own.priority:
                namespace, _, name = each.name.partition("/")
                self._wake((namespace, name))
        givers = gangs.givers(own.name, others)
        if not givers:
            return ()
        said = ", ".join(f"{one.name} ({one.yielded.given})" for one in givers if one.yielded is not None)
        message = f"waits for GPUs of pipelines {_whose(givers)}, which let go of them: {said}"
        return tuple(Diagnostic(unit=unit, reason=gangs.TAKEN, message=message) for unit in wanting)

    def _others(self, own: PipelineKey, resources: frozenset[str]) -> list[Gang]:
        """The other pipelines that want GPUs of the same kind; read again only after a while."""
        now = self._clock()
        if not 0 <= now - self._read_at < READ_EVERY_S * len(self._known):  # nor when the clock was set back
            self._read_at = now
            self._known = {key: found for key in self._store.pipelines() if (found := self._read(key)) is not None}
        gangs_of = {key: each.gang for key, each in self._known.items() if key != own and each.resources & resources}
        return [
            msgspec.structs.replace(gang, sleeps=True, serving_since=self._sleepers[key])
            if key in self._sleepers
            else gang
            for key, gang in gangs_of.items()
        ]

    def _read(self, key: PipelineKey) -> _Rival | None:
        resource = self._store.pipeline(key)
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            return None
        status = conditions.reported(resource.get("status", {}))
        counts = status.get("gpus", {})
        resources = _of_manifests(self._store.children(key, DEPLOYMENT))
        if not resources or not any(counts.values()):
            return None
        if conditions.is_true(status, "Available") and not status.get("yielded"):
            held = int(counts.get("ready", 0)) + int(counts.get("terminating", 0))
            gang = Gang(name="/".join(key), created_at=_created(resource), serves=True, held=held)
            return _Rival(resources=resources, gang=msgspec.structs.replace(gang, priority=self._priority(key)))
        owner = Owner(namespace=key[0], name=key[1], uid=resource["metadata"]["uid"])
        gang = _gang(resource, Snapshot(self._store, key, owner, now=self._clock()))
        if resource.get("spec", {}).get("suspend"):
            gang = msgspec.structs.replace(gang, stuck_since=None, yielded=None)
        return _Rival(resources=resources, gang=msgspec.structs.replace(gang, needs=int(counts.get("requested", 0))))

    def _priority(self, key: PipelineKey) -> int:
        """The lowest of its pods that want GPUs."""
        wanting = {
            each["metadata"]["labels"].get(naming.UNIT_LABEL)
            for each in self._store.children(key, DEPLOYMENT)
            if _of_manifests([each])
        }
        found = self._store.children(key, POD)
        of_pods = (
            int(each["spec"].get("priority") or 0)
            for each in found
            if each["metadata"]["labels"].get(naming.UNIT_LABEL) in wanting
        )
        return min(of_pods, default=0)


def _gang(resource: Manifest, snapshot: Snapshot, asleep: frozenset[str] = frozenset()) -> Gang:
    wanting = [each for each in snapshot.workloads if each.gpus]
    status = conditions.reported(resource.get("status", {}))
    yielded = read_yielded(status.get("yielded"))
    priorities = [pod.priority for each in wanting for pod in each.present]
    return Gang(
        name=f"{snapshot.owner.namespace}/{snapshot.owner.name}",
        created_at=_created(resource),
        serves=is_available(snapshot.entries(), snapshot.workloads, asleep),
        held=sum(each.gpus * sum(pod.node is not None for pod in each.present) for each in wanting),
        stuck_since=_stuck_since(wanting),
        lacks=_lacks(wanting),
        serving_since=_serving_since(wanting),
        priority=min(priorities, default=yielded.priority if yielded is not None else 0),
        yielded=yielded,
    )


def _lacks(wanting: Sequence[Workload]) -> int:
    """GPUs of the units that are to have pods and have none with a node, one pod of each."""
    desired = {each.unit: each.gpus for each in wanting if each.replicas}
    placed = {each.unit for each in wanting if any(pod.node and not pod.terminating for pod in each.present)}
    return sum(gpus for unit, gpus in desired.items() if unit not in placed)


def _serving_since(wanting: Sequence[Workload]) -> float | None:
    """The time since which each unit that has ready pods has had one."""
    ready = [[pod.ready_since for pod in each.present if pod.ready_since and not pod.terminating] for each in wanting]
    return max((min(times) for times in ready if times), default=None)


def _stuck_since(wanting: Sequence[Workload]) -> float | None:
    stuck = [pod.created_at for each in wanting for pod in each.present if pod.unschedulable and not pod.terminating]
    return min(stuck, default=None)


def read_yielded(recorded: Mapping[str, Any] | None) -> Yielded | None:
    """The record that the status has. None: it has none."""
    if not recorded:
        return None
    since = workloads.timestamp(recorded.get("since"))
    return Yielded(
        since=since or None,
        to=str(recorded.get("to", "")),
        gpus=int(recorded.get("gpus", 0)),
        tries=int(recorded.get("tries", 0)),
        failed=int(recorded.get("failed", 0)),
        given=int(recorded.get("given", 0)),
        priority=int(recorded.get("priority", 0)),
        turn=bool(recorded.get("turn", False)),
    )


def _whose(givers: Sequence[Gang]) -> str:
    turns = all(one.yielded is not None and one.yielded.turn for one in givers)
    return "that have had their turn" if turns else "of a lower priority"


def _message(yielded: Yielded, needs: int) -> str:
    if yielded.turn:
        return f"has let go of its GPUs, because it is the turn of {yielded.to}; it waits for its own turn after that"
    why = f"{yielded.to} waits for GPUs" if yielded.to else "there were too few"
    why += " and has a higher priority" if yielded.given else ""
    return f"has let go of its GPUs, because {why}; it comes back when there may be room for all {needs} that it needs"


def _note(observed: Sequence[Workload]) -> str | None:
    """A remark on pods for which the scheduler itself ends others, one by one."""
    preempting = sorted({each.unit for each in observed if each.gpus for pod in each.present if pod.preempts})
    if not preempting:
        return None
    units = ", ".join(preempting)
    return f"the PriorityClass of unit {units} preempts pod by pod; with preemptionPolicy: Never pipelines let go whole"


def _of_manifests(deployments: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """The extended resources that these Deployments' pods ask for."""
    annotations = (each["spec"]["template"]["metadata"].get("annotations", {}) for each in deployments)
    return frozenset(each[pods.GPU_RESOURCE] for each in annotations if each.get(pods.GPU_RESOURCE))


def _created(resource: Manifest) -> float:
    return workloads.timestamp(resource["metadata"].get("creationTimestamp"))
