"""The revision of one pipeline that is tried with a share of the requests, and the goal of the roll that follows.

Here: the inputs of the rule, and what a revision that is tried or taken back means for the roll-out; so does one whose
roll is paused while nothing runs. Not here: the rule (`changes.deciding.canary`). Called by `reconciling`. The decision
is read from the status and written into it, so that another operator goes on with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import msgspec

from omnipipeline_operator.changes.deciding import canary, rollout
from omnipipeline_operator.changes.deciding.canary import Canary
from omnipipeline_operator.changes.deciding.rollout import DesiredUnit, Goal
from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_operator.cluster.status_client import CoordinatorStatus
from omnipipeline_operator.controller.observing import coordinators
from omnipipeline_operator.controller.revisions.planned import Planned
from omnipipeline_spec.types.plan import CanaryShare, PipelineRevision


def decide(
    planned: Planned,
    known: Sequence[PipelineRevision],
    before: Mapping[str, Any],
    observed: Sequence[Workload],
    statuses: Sequence[CoordinatorStatus],
    *,
    now: float,
) -> Planned:
    """The plan with the revision that is tried, and with the goal that it leads to.

    known: the revisions that the list has. before: the status, as it was reported last.
    """
    policy, update = planned.spec.rollout.canary, planned.plan.current
    current = before.get("revision", {}).get("current")
    serving = next((each for each in known if each.revision == current), None)
    if serving is None:
        return planned
    if policy is None:
        if not _is_paused_without_pods(serving, planned, observed):
            return planned
        return msgspec.structs.replace(planned, goal=_back(planned.goal, serving, update, observed), back_to=serving)
    last = canary.read(before.get("canary"))
    suspended = planned.goal.suspended
    stands = last is not None and last.aborted and last.revision == update.revision
    interrupted = last is not None and last.weight < 100 and (suspended or last.is_interrupted)
    interrupted = interrupted and _can_come_back(serving, planned, observed)
    if not (stands or interrupted) and (suspended or not _is_beside(serving, planned, observed)):
        return planned
    decided = canary.decide(
        policy,
        last,
        update=update.revision,
        serving=serving.revision,
        reached=coordinators.have_complete(statuses, update, planned.goal.asleep),
        filled=not planned.goal.paused and _is_filled(planned.goal, last, serving, observed),
        attempts=canary.joined(each.attempts() for each in statuses),
        now=now,
        suspended=suspended,
        restored=coordinators.have_complete(statuses, serving, planned.goal.asleep),
    )
    if decided is None:
        return planned
    if decided.is_away:
        goal = _back(planned.goal, serving, update, observed)
        return msgspec.structs.replace(planned, canary=decided, goal=goal, back_to=serving)
    tried = Fraction(decided.weight, 100)
    goal = msgspec.structs.replace(planned.goal, tried=tried if decided.runs else None)
    return msgspec.structs.replace(planned, canary=decided, goal=goal)


def holds_key(planned: Planned, before: Mapping[str, Any]) -> str | None:
    """Why the units may not restart with another key now; None: they may.

    Another key makes another revision of the spec, which shares no requests with the one that serves: a revision that
    is not judged yet, or was taken back, would get all of them.
    """
    last, update = canary.read(before.get("canary")), planned.plan.current.revision
    if planned.spec.rollout.canary is None or last is None or last.revision != update or last.weight >= 100:
        return None
    if last.aborted:
        return f"revision {update} was taken back. The key stays until the pipeline is edited: {canary.CURE}"
    return f"revision {update} is tried. The key stays until that has ended"


def share(decided: Canary | None) -> CanaryShare | None:
    """The share that coordinators are told; of a revision that was taken back, too: they may still know it."""
    return None if decided is None else CanaryShare(revision=decided.revision, weight=decided.weight / 100)


def _is_beside(serving: PipelineRevision, planned: Planned, observed: Sequence[Workload]) -> bool:
    """Whether old pods are there to be compared with, and coordinators can bind to old ones and to new ones.

    Pods of two control keys have coordinators of their own, and share no requests.
    """
    changes = {unit: its for unit, its in serving.units.items() if planned.plan.current.units.get(unit) != its}
    old = [each for each in observed if changes.get(each.unit) == each.revision and each.replicas]
    keys = {each.control_secret for each in old} - {None, planned.pins.control_secret}
    return not keys and (bool(old) or not changes)


def _can_come_back(serving: PipelineRevision, planned: Planned, observed: Sequence[Workload]) -> bool:
    """Whether the old revision's Deployments exist, perhaps with no pods, with the pipeline's key."""
    known = {(each.unit, each.revision): each.control_secret for each in observed}
    old = [unit for unit in serving.units.items() if planned.plan.current.units.get(unit[0]) != unit[1]]
    return all(unit in known and known[unit] in (None, planned.pins.control_secret) for unit in old)


def _is_paused_without_pods(serving: PipelineRevision, planned: Planned, observed: Sequence[Workload]) -> bool:
    """Whether a paused roll has no pods to keep, as it is or was suspended: then the old revision comes back."""
    goal = planned.goal
    changes = {unit for unit, one in goal.units.items() if serving.units.get(unit) != one.revision and one.replicas}
    if not (goal.paused and changes and _can_come_back(serving, planned, observed)):
        return False
    taking_part = set(serving.units.items()) ^ {(unit, one.revision) for unit, one in goal.units.items()}
    return goal.suspended or not any(each.replicas for each in observed if (each.unit, each.revision) in taking_part)


def _is_filled(goal: Goal, last: Canary | None, serving: PipelineRevision, observed: Sequence[Workload]) -> bool:
    """Whether each unit that changes has as many ready pods as the share is worth."""
    ready = {(each.unit, each.revision): each.ready for each in observed}
    weight = Fraction(last.weight if last is not None else 0, 100)
    changing = [(unit, one) for unit, one in goal.units.items() if serving.units.get(unit) != one.revision]
    return all(ready.get((unit, one.revision), 0) >= rollout.worth(one.replicas, weight) for unit, one in changing)


def _back(goal: Goal, serving: PipelineRevision, update: PipelineRevision, observed: Sequence[Workload]) -> Goal:
    """The revision that serves is the goal again, and the pods of the other one leave at once."""
    replicas = {(each.unit, each.revision): each.replicas for each in observed}
    units = {unit: msgspec.structs.replace(one, replicas=0) for unit, one in goal.units.items()}
    for unit, revision in serving.units.items():
        desired = goal.units.get(unit)
        if desired is not None:
            units[unit] = msgspec.structs.replace(desired, revision=revision)
        else:
            units[unit] = DesiredUnit(revision=revision, replicas=max(replicas.get((unit, revision), 0), 1))
    dropped = set(update.units.items()) - set(serving.units.items())
    return msgspec.structs.replace(goal, units=units, dropped=frozenset(dropped))
