"""How many replicas each unit revision should have now: a stateless step function of the observed workloads.

Here: Coherent and Recreate, pause and suspend, which pipeline revisions the coordinator may serve, which old
Deployments are deleted, of which units requests wait for a new pod. Not here: writing anything (`controller`), what is
reported of it (`status`). Pure.

Coherent. Let ``f`` be the completed share of the new revision: the minimum, over the units that change, of ready new
pods / desired replicas. Each changing unit keeps ``ceil(R * (1 - f)) - U`` old pods, and new ones are made as long as
``new + old <= R + maxSurge``, where an old pod counts until it is terminating: a Deployment controller that is asked to
remove one pod and to make another may make it first. So an old pod is removed only when every changing unit has its
share of ready new pods, complete sets of the old revision remain, and ``ready new + old >= R - U`` at every step. A new
revision that never becomes ready has f = 0: the old one remains complete, and is scaled when the author scales. The old
units also outlast the old coordinator across two control keys.

While a revision is tried (`changes.deciding.canary`), f is at most its share of the requests, and it has as many pods
as that is worth; so each changing unit keeps an old pod. One that was taken back is dropped: the old revision is the
goal again.

U is maxUnavailable, and at most R - 1, so that a complete set remains. An old pod counts until it has ended without a
surge, because its GPU is not free before; and the only pod of a unit ends first, as under Recreate: requests wait
for its successor (`awaited`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import ceil
from typing import Literal

import msgspec

from omnipipeline_operator.changes.deciding import required
from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_spec.types.plan import PipelineRevision
from omnipipeline_spec.types.pods import COORDINATOR

UnitRevision = tuple[str, str]  # name of a unit, its revision


class DesiredUnit(msgspec.Struct, frozen=True, kw_only=True):
    """The spec's wishes for one unit."""

    revision: str
    replicas: int
    asleep: bool = False  #: It has none until a request needs it: what is complete does without.


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """The spec's wishes."""

    units: Mapping[str, DesiredUnit]  #: Units without the coordinator.
    coordinator: DesiredUnit
    strategy: Literal["Coherent", "Recreate"] = "Coherent"
    max_surge: int = 1
    max_unavailable: int = 0  #: Not 0 where ``max_surge`` is 0.
    paused: bool = False
    suspended: bool = False
    history: int = 5
    tried: Fraction | None = None  #: Share of the requests that the new revision gets, and of the pods; None: all.
    #: Unit revisions of a pipeline revision that was taken back: their pods leave at once.
    dropped: frozenset[UnitRevision] = frozenset()

    @property
    def asleep(self) -> frozenset[str]:
        """The units that have no pod until a request needs them."""
        return frozenset(unit for unit, one in self.units.items() if one.asleep)

    def unavailable(self, replicas: int) -> int:
        """How many pods of a unit with so many replicas may be missing during a roll."""
        if replicas <= 1:
            return replicas if not self.max_surge else 0
        return min(self.max_unavailable, replicas - 1)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The next step of a roll-out. Applying it and deciding again leads to the goal."""

    #: Replicas of every Deployment that should exist; missing ones of the goal are made.
    replicas: Mapping[UnitRevision, int]
    retired: tuple[Workload, ...]  #: Old Deployments beyond the history limit.
    rolling: bool  #: Old pods are still desired, or have not ended yet.
    complete: Fraction  #: Share of the new revision that is ready; 1 when nothing changes.


def decide(goal: Goal, observed: Sequence[Workload], serving: Mapping[str, str]) -> Decision:
    """The next replicas of everything.

    observed: all Deployments of the pipeline, the coordinator's too.
    serving:  unit -> unit revision of the pipeline revision that served last; empty when none has served.
    """
    of_units = [each for each in observed if each.unit != COORDINATOR]
    of_coordinator = [each for each in observed if each.unit == COORDINATOR]
    desired = {COORDINATOR: goal.coordinator}
    if goal.suspended:
        replicas = {(each.unit, each.revision): 0 for each in observed}
        replicas |= {(unit, each.revision): 0 for unit, each in {**goal.units, **desired}.items()}
        complete = Fraction(1)
    else:
        before = {each.unit: each.revision for each in of_coordinator if each.ready}
        if goal.paused and any(_old(desired, of_coordinator)):
            replicas = _paused(desired, of_coordinator, surge=1).replicas
        else:
            beside = msgspec.structs.replace(goal, max_surge=1, max_unavailable=0)  # it has no GPU
            replicas = _coherent(beside, desired, of_coordinator, before).replicas
        step = _step(goal, of_units, serving)
        replicas |= step.replicas | dict.fromkeys(goal.dropped & step.replicas.keys(), 0)
        complete = step.complete
        if goal.strategy == "Coherent" and not goal.paused:
            replicas |= _held_across_keys(goal, of_units, of_coordinator, complete)
        if awaited(goal, of_units):
            replicas |= _with_waiting_requests(goal, of_coordinator)
    current = {(unit, each.revision) for unit, each in {**goal.units, **desired}.items()}
    outdated = [each for each in observed if (each.unit, each.revision) not in current]
    return Decision(
        replicas=replicas,
        retired=_retired(outdated, goal.history),
        rolling=any(each.replicas or each.awaited for each in outdated),
        complete=complete,
    )


def worth(replicas: int, share: Fraction) -> int:
    """How many of a unit's pods a share of the requests is worth."""
    return min(max(ceil(replicas * share), 1), replicas)


def _held_across_keys(
    goal: Goal, of_units: Sequence[Workload], of_coordinator: Sequence[Workload], complete: Fraction
) -> dict[UnitRevision, int]:
    """Old workloads that stay a while longer, because pods of two control keys never meet.

    An old coordinator binds requests to old units alone: it stays until the new revision is complete, and the old units
    until its pods have ended. Clients that keep connections send requests to it while it drains.
    """
    secrets = {each.control_secret for each in of_coordinator if each.revision == goal.coordinator.revision}
    old = [each for each in of_coordinator if secrets and each.control_secret not in secrets and each.awaited]
    if complete < 1:
        return {(each.unit, each.revision): each.replicas for each in old}
    served = {each.control_secret for each in old}
    return {(each.unit, each.revision): each.replicas for each in of_units if each.control_secret in served}


def _with_waiting_requests(goal: Goal, of_coordinator: Sequence[Workload]) -> dict[UnitRevision, int]:
    """Old coordinators that stay until the new pods are ready: requests wait at them, and would end with their drain.

    Those of another control key never meet the new pods.
    """
    secrets = {each.control_secret for each in of_coordinator if each.revision == goal.coordinator.revision}
    old = [each for each in of_coordinator if each.revision != goal.coordinator.revision]
    return {(each.unit, each.revision): each.replicas for each in old if not secrets or each.control_secret in secrets}


def entries(
    goal: PipelineRevision,
    known: Sequence[PipelineRevision],
    observed: Sequence[Workload],
    *,
    kept: Mapping[UnitRevision, int] | None = None,
    asleep: frozenset[str] = frozenset(),
) -> tuple[PipelineRevision, ...]:
    """The pipeline revisions that may be served, the goal's last; others while all their units have pods.

    kept: the replicas decided now, once all coordinators have a complete set of the goal: then a revision ends as soon
        as one of its units has none, and no new request meets pods that are told to end.
    asleep: units that have no pod until a request needs them; a request starts those of the goal.
    """
    alive = {(each.unit, each.revision) for each in observed if each.replicas or each.present}
    if kept is not None:
        alive = {key for key in alive if kept.get(key)}

    def serves(one: PipelineRevision) -> bool:
        spared = asleep
        if kept is not None:
            spared = frozenset(unit for unit in asleep if one.units.get(unit) == goal.units.get(unit))
        return alive.issuperset(required.units(one, spared).items())

    return (*(one for one in known if one.revision != goal.revision and serves(one)), goal)


def awaited(
    goal: Goal, observed: Sequence[Workload], taking: Mapping[UnitRevision, int] | None = None
) -> frozenset[str]:
    """The units whose old pods end before new ones start, while a new one is due: requests wait for it.

    A pod that fails to start is not due; one that waits for a node is.
    taking: instances that every coordinator can bind requests to; None: no coordinator has answered.
    """
    if goal.suspended or goal.paused or (goal.strategy == "Coherent" and goal.max_surge):
        return frozenset()
    desired = {(each.unit, each.revision): each for each in observed}
    due = set()
    for unit, one in goal.units.items():
        current = desired.get((unit, one.revision))
        pods = () if current is None else current.present
        failed = current is not None and current.refused is not None
        failed = failed or any(pod.reason is not None and not pod.unschedulable for pod in pods)
        takes = any(pod.ready for pod in pods) and (taking is None or taking.get((unit, one.revision), 0) > 0)
        if one.replicas and not failed and not takes:
            due.add(unit)
    return frozenset(due)


class _Step(msgspec.Struct, frozen=True, kw_only=True):
    replicas: dict[UnitRevision, int]
    complete: Fraction


def _step(goal: Goal, observed: Sequence[Workload], serving: Mapping[str, str]) -> _Step:
    if goal.paused and any(_old(goal.units, observed)):
        return _paused(goal.units, observed, surge=goal.max_surge if goal.strategy == "Coherent" else 0)
    if goal.strategy == "Recreate":
        return _recreate(goal.units, observed)
    return _coherent(goal, goal.units, observed, serving)


def _old(desired: Mapping[str, DesiredUnit], observed: Iterable[Workload]) -> list[Workload]:
    """Deployments of other revisions whose replicas are not 0."""
    return [each for each in observed if each.replicas and _revision(desired, each.unit) != each.revision]


def _revision(desired: Mapping[str, DesiredUnit], unit: str) -> str | None:
    return desired[unit].revision if unit in desired else None


def _paused(desired: Mapping[str, DesiredUnit], observed: Sequence[Workload], *, surge: int) -> _Step:
    """Keep the roll where it is; a unit that does not take part may still be scaled.

    One whose old pods are ending takes part until they leave room.
    """
    outdated = [each for each in observed if _revision(desired, each.unit) != each.revision]
    rolling = {each.unit for each in outdated if each.replicas or _occupying(each, surge)}
    replicas = {(each.unit, each.revision): each.replicas for each in observed}
    for unit, one in desired.items():
        if unit not in rolling and (unit, one.revision) in replicas:
            replicas[unit, one.revision] = one.replicas
    changing = rolling & desired.keys() | {
        unit for unit, one in desired.items() if (unit, one.revision) not in replicas
    }
    return _Step(replicas=replicas, complete=_completeness(desired, changing, observed))


def _recreate(desired: Mapping[str, DesiredUnit], observed: Sequence[Workload]) -> _Step:
    """Make no new pod before the last old one, draining ones included, has released its GPU, or is lost."""
    leaving = [each for each in observed if each.awaited and _revision(desired, each.unit) != each.revision]
    leaving += _old(desired, observed)
    replicas = {(each.unit, each.revision): 0 for each in observed}
    existing = {(each.unit, each.revision): each for each in observed}
    left = {each.unit for each in leaving}
    removed = left - set(desired)
    for unit, one in desired.items():
        here = existing.get((unit, one.revision))
        # A unit whose revision is unchanged holds its GPU already; a new unit waits for those that were regrouped.
        waits = unit in left or (bool(removed) and (here is None or not here.replicas))
        replicas[unit, one.revision] = 0 if waits else one.replicas
    return _Step(replicas=replicas, complete=_completeness(desired, left & set(desired), observed))


def _coherent(
    goal: Goal, desired: Mapping[str, DesiredUnit], observed: Sequence[Workload], serving: Mapping[str, str]
) -> _Step:
    surge, old = goal.max_surge, _old(desired, observed)
    changing = {unit for unit, one in desired.items() if serving.get(unit) != one.revision}
    changing |= {each.unit for each in old if each.unit in desired}
    complete = _completeness(desired, changing, observed) if old else Fraction(1)
    if goal.tried is not None and old:
        complete = min(complete, goal.tried)
    existing = {(each.unit, each.revision): each.replicas for each in observed}
    replicas = dict.fromkeys(existing, 0)
    for unit, one in desired.items():
        stays = max(ceil(one.replicas * (1 - complete)) - goal.unavailable(one.replicas), 0)
        room = one.replicas + surge - existing.get((unit, one.revision), 0)
        kept = _kept([each for each in old if each.unit == unit], serving, stays, room if complete == 0 else 0)
        replicas |= kept
        made = existing.get((unit, one.revision), 0)
        outdated = [each for each in observed if each.unit == unit and each.revision != one.revision]
        occupied = sum(max(kept.get((unit, each.revision), 0), _occupying(each, surge)) for each in outdated)
        most = one.replicas if goal.tried is None or unit not in changing else worth(one.replicas, goal.tried)
        replicas[unit, one.revision] = min(most, max(made, one.replicas + surge - occupied))
    for each in old:
        if (
            each.unit not in desired and complete < 1
        ):  # regrouped away: it has no share of the new revision, and stays complete
            was_serving = serving.get(each.unit) == each.revision
            replicas[each.unit, each.revision] = each.replicas if was_serving else min(each.replicas, each.ready)
    return _Step(replicas=replicas, complete=complete)


def _occupying(workload: Workload, surge: int) -> int:
    """Pods beside which no more than ``surge`` new ones are made. Pods that are ending hold their GPUs, too, if
    nothing surges.
    """
    return workload.staying if surge else len(workload.awaited)


def _completeness(
    desired: Mapping[str, DesiredUnit], changing: Iterable[str], observed: Sequence[Workload]
) -> Fraction:
    # Others are about to be ended: their Deployment controller has not come to it yet.
    ready = {(each.unit, each.revision): min(each.ready, each.replicas) for each in observed}
    some = [unit for unit in changing if desired[unit].replicas]  # of prefill there may be none
    shares = (Fraction(ready.get((unit, desired[unit].revision), 0), desired[unit].replicas) for unit in some)
    return min((min(share, Fraction(1)) for share in shares), default=Fraction(1))


def _kept(old: Sequence[Workload], serving: Mapping[str, str], stays: int, room: int) -> dict[UnitRevision, int]:
    """``stays`` pods of a unit's old revisions: first of the one that served last, of the others only ready ones.

    room: how many pods may be added to the one that serves (the author scales while a roll is blocked).
    """
    ordered = sorted(old, key=lambda each: (serving.get(each.unit) != each.revision, -each.created_at, each.revision))
    kept: dict[UnitRevision, int] = {}
    for each in ordered:
        serves = serving.get(each.unit) == each.revision
        offered = each.replicas if serves else min(each.replicas, each.ready)
        kept[each.unit, each.revision] = min(offered, stays - sum(kept.values()))
    shortfall = min(stays, room) - sum(kept.values())
    if ordered and shortfall > 0 and serving.get(ordered[0].unit) == ordered[0].revision:
        kept[ordered[0].unit, ordered[0].revision] += shortfall
    return kept


def _retired(outdated: Sequence[Workload], history: int) -> tuple[Workload, ...]:
    """Deployments without pods to delete: those of each unit but the newest ``history``, kept for a rollback."""
    idle: dict[str, list[Workload]] = {}
    for each in sorted(outdated, key=lambda each: (-each.created_at, each.revision)):
        if not each.replicas and not each.present:
            idle.setdefault(each.unit, []).append(each)
    return tuple(each for kept in idle.values() for each in kept[history:])
