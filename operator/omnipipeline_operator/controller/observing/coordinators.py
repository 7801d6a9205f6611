"""The reports of the coordinators of one pipeline, and which of their instances must get no more requests.

Here: asking all that are ready, and merging their answers: during a roll-out there are two coordinators. Not here: the
request (`cluster.status_client`). Called by `reconciling` and `reporting`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from omnipipeline_operator.changes.deciding import required, rollout
from omnipipeline_operator.changes.deciding.rollout import UnitRevision
from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.cluster.status_client import CoordinatorStatus, InstanceStatus, StatusClient
from omnipipeline_operator.cluster.store import PipelineKey
from omnipipeline_operator.controller.observing.snapshots import Snapshot
from omnipipeline_operator.controller.revisions.planned import Planned
from omnipipeline_operator.desired import naming
from omnipipeline_spec import scaling
from omnipipeline_spec.types.plan import PipelineRevision
from omnipipeline_spec.types.pods import COORDINATOR, PROBE_PORT

MAX_ASKED: Final = 64  # addresses at each of which the API server lists pods, in one reconcile


UNANSWERED_S: Final = 30.0  # a coordinator that starts, or a slow operator, is silent for less
_SILENT: Final = (
    f"no coordinator answers the operator at port {PROBE_PORT}, so what follows the load or a canary stays as it is: "
    "does a NetworkPolicy, of the operator's namespace or of this one, stand between them?"
)


class Silence:
    """Pipelines that need their coordinators' answers, and since when none has come. A restart forgets them."""

    def __init__(self) -> None:
        self._since: dict[PipelineKey, float] = {}

    def remark(
        self, snapshot: Snapshot, planned: Planned, answers: Sequence[CoordinatorStatus], *, now: float
    ) -> str | None:
        """A sentence for the status, once no ready coordinator has answered for long; None: not so, or not needed."""
        pipeline = (snapshot.owner.namespace, snapshot.owner.name)
        tried = planned.canary
        needed = bool(planned.plan.autoscaling) or (tried is not None and tried.runs)
        asked = any(each.ready for each in snapshot.workloads if each.unit == COORDINATOR)
        if answers or not (needed and asked):
            self._since.pop(pipeline, None)
            return None
        return _SILENT if now - self._since.setdefault(pipeline, now) >= UNANSWERED_S else None

    def forget(self, pipeline: PipelineKey) -> None:
        """The pipeline has been deleted."""
        self._since.pop(pipeline, None)


async def ask(status_client: StatusClient, snapshot: Snapshot) -> list[CoordinatorStatus]:
    """The statuses of all coordinators that are ready and answer."""
    coordinators = [each for each in snapshot.workloads if each.unit == COORDINATOR]
    ready = [pod.ip for each in coordinators for pod in each.pods if pod.ready and not pod.terminating and pod.ip]
    return await status_client.ask(ready)


async def aside(client: Client, snapshot: Snapshot, coordinators: Sequence[CoordinatorStatus]) -> list[str]:
    """Addresses of registered pods that now have the labels of another unit, or none of ours.

    A pod that a coordinator knows and the snapshot does not may be new: the API server is asked first, at most for
    `MAX_ASKED` addresses; those that coordinators leave aside already come first, so that they stay so.
    """
    known = snapshot.addresses()
    strange: dict[str, list[InstanceStatus]] = {}
    for coordinator in coordinators:
        for each in coordinator.instances:
            if each.host and (each.unit, each.revision, each.host) not in known:
                strange.setdefault(each.host, []).append(each)
    left_aside = {host for host, instances in strange.items() if any(each.aside for each in instances)}
    aside = []
    for host in sorted(strange, key=lambda host: (host not in left_aside, host))[:MAX_ASKED]:
        labels = [one["metadata"].get("labels", {}) for one in await client.pods_at(snapshot.owner.namespace, host)]
        desired = {(each.unit, each.revision) for each in strange[host]}
        selectors = [naming.selector(snapshot.owner.name, unit, revision).items() for unit, revision in desired]
        if labels and not all(any(one <= each.items() for each in labels) for one in selectors):
            aside.append(host)
    return sorted(aside)


def have_complete(
    coordinators: Sequence[CoordinatorStatus], revision: PipelineRevision, asleep: Collection[str] = ()
) -> bool:
    """Whether coordinators answered, and each can bind requests to this revision. asleep: units that requests start."""
    units = required.units(revision, asleep).items()
    return bool(coordinators) and all(each.registered().keys() >= units for each in coordinators)


def have_switched(coordinators: Sequence[CoordinatorStatus], revision: PipelineRevision) -> bool | None:
    """Whether all that answered bind new requests to this revision alone; None: none answered."""
    return all(set(each.revisions) == {revision.revision} for each in coordinators) if coordinators else None


def registered(coordinators: Sequence[CoordinatorStatus]) -> dict[tuple[str, str], int] | None:
    """(unit, revision) -> pods that requests can be bound to; None: no coordinator has answered."""
    registered: dict[tuple[str, str], int] | None = None
    for coordinator in coordinators:  # during a roll-out a stage registers with both
        counts = coordinator.registered()
        registered = {
            unit: max(counts.get(unit, 0), (registered or {}).get(unit, 0)) for unit in {*counts, *(registered or {})}
        }
    return registered


def expected_groups(
    planned: Planned,
    observed: Sequence[Workload],
    coordinators: Sequence[CoordinatorStatus],
    held: Collection[UnitRevision] = (),
) -> tuple[str, ...]:
    """The groups that will have an instance however long that takes: requests wait for it.

    held: unit revisions that get no pods: references are missing, or another pipeline comes first.
    """
    counts = [each.registered() for each in coordinators]
    everywhere = {unit: min(count.get(unit, 0) for count in counts) for unit in {*counts[0]}} if counts else None
    awaited = rollout.awaited(planned.goal, observed, everywhere) - {unit for unit, _ in held}
    groups = [group.name for unit in planned.plan.units if unit.name in awaited for group in unit.groups]
    return tuple(dict.fromkeys([*scaling.on_demand(planned.plan), *groups]))


def loads(coordinators: Sequence[CoordinatorStatus]) -> dict[str, int]:
    """Address of a pod -> requests bound, waiting and running there."""
    return {host: load for coordinator in coordinators for host, load in coordinator.loads().items()}
