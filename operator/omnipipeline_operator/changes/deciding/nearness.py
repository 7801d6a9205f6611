"""The units that get no further pods until those that they are to be near have nodes.

Here: one rule. Not here: the affinity that it serves (`desired.pod_templates.affinity`). Called by `controller`. Pure.

The scheduler looks for pods to be near only when it places a pod, and a pod then stays where it is. Deployments that
are made at once have their pods made in any order; one that came first would start far from those it names. So it waits
until the scheduler has looked at each of them: a pod that finds no node now counts, too, because an autoscaler of nodes
must see all pods that wait for one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from omnipipeline_operator.changes.deciding.rollout import UnitRevision
from omnipipeline_operator.changes.workloads import Workload


def waiting(
    near: Mapping[UnitRevision, Sequence[UnitRevision]],
    replicas: Mapping[UnitRevision, int],
    observed: Sequence[Workload],
    held: Collection[UnitRevision] = (),
) -> frozenset[UnitRevision]:
    """The unit revisions whose Deployments are not made, nor given more pods, yet.

    near:     all that the goal has -> those that their pods prefer to be near. The first of two that name each other,
              also by way of others, does not wait.
    replicas: the decided ones; of a unit that is missing here none are made.
    held:     they get no pods for another reason: nobody waits for them.
    """
    workloads = {(each.unit, each.revision): each for each in observed}
    unplaced = {one for one in near if one not in held and not _are_placed(workloads.get(one), replicas.get(one, 0))}
    order = {one: index for index, one in enumerate(near)}
    found = set()
    for one, others in near.items():
        awaited = (other for other in others if order[other] < order[one] or one not in _reached(other, near))
        if not unplaced.isdisjoint(awaited):
            found.add(one)
    return frozenset(found)


def _are_placed(workload: Workload | None, replicas: int) -> bool:
    """Whether the scheduler has looked at as many pods as are wanted, or the API server refuses to make more."""
    if not replicas or (workload is not None and workload.refused is not None):
        return True
    pods = () if workload is None else workload.present
    return sum(not pod.terminating and (pod.node is not None or pod.unschedulable) for pod in pods) >= replicas


def _reached(start: UnitRevision, near: Mapping[UnitRevision, Sequence[UnitRevision]]) -> set[UnitRevision]:
    """All that it is to be near, what these are to be near, and so on."""
    found: set[UnitRevision] = set()
    left = [start]
    while left:
        for each in near[left.pop()]:
            if each not in found:
                found.add(each)
                left.append(each)
    return found
