"""What the coordinators of one pipeline report, and which of their instances must get no more requests.

Here: asking all that are ready, and merging their answers: during a roll-out there are two coordinators. Not here: the
request (`cluster.status_client`). Called by `reconciling` and `reporting`.
"""

from __future__ import annotations

from collections.abc import Sequence

from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.cluster.status_client import CoordinatorStatus, StatusClient
from omnipipeline_operator.controller.snapshots import Snapshot
from omnipipeline_operator.desired import naming
from omnipipeline_spec.types.pods import COORDINATOR


async def ask(status_client: StatusClient, snapshot: Snapshot) -> list[CoordinatorStatus]:
    """The statuses of all coordinators that are ready and answer."""
    coordinators = [each for each in snapshot.workloads if each.unit == COORDINATOR]
    ready = [pod.ip for each in coordinators for pod in each.pods if pod.ready and not pod.terminating and pod.ip]
    return await status_client.ask(ready)


async def aside(client: Client, snapshot: Snapshot, coordinators: Sequence[CoordinatorStatus]) -> list[str]:
    """Addresses of registered pods that now have the labels of another unit, or none of ours.

    A pod that a coordinator knows and the snapshot does not may be new: the API server is asked first.
    """
    known = snapshot.addresses()
    strange = {
        each
        for coordinator in coordinators
        for each in coordinator.instances
        if (each.unit, each.revision, each.host) not in known
    }
    aside = set()
    for each in strange:
        if each.host in aside:
            continue
        desired = naming.selector(snapshot.owner.name, each.unit, each.revision).items()
        pods = [one["metadata"] for one in await client.pods_at(snapshot.owner.namespace, each.host)]
        if pods and not any(desired <= one.get("labels", {}).items() for one in pods):
            aside.add(each.host)
    return sorted(aside)


def registered(coordinators: Sequence[CoordinatorStatus]) -> dict[tuple[str, str], int] | None:
    """(unit, revision) -> pods that requests can be bound to; None: no coordinator has answered."""
    registered: dict[tuple[str, str], int] | None = None
    for coordinator in coordinators:  # during a roll-out a stage registers with both
        counts = coordinator.registered()
        registered = {
            unit: max(counts.get(unit, 0), (registered or {}).get(unit, 0)) for unit in {*counts, *(registered or {})}
        }
    return registered


def loads(coordinators: Sequence[CoordinatorStatus]) -> dict[str, int]:
    """Address of a pod -> requests bound, waiting and running there."""
    return {host: load for coordinator in coordinators for host, load in coordinator.loads().items()}
