"""Replicas of units that follow their load: what is decided now, from what coordinators report and what runs. Pure.

Here: the inputs of the rule, and what stands while nobody reports. Not here: the rule (`omnipipeline_spec.scaling`),
the roll-out that carries the replicas out (`rollout`). The replicas that were decided last are read from the resource's
status: an operator that restarts goes on with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from omnipipeline_operator.changes.deciding.rollout import Goal
from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_spec import scaling
from omnipipeline_spec.scaling import Load, Seen
from omnipipeline_spec.types.plan import PipelinePlan


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of one pipeline that follow its load."""

    replicas: Mapping[str, int] = {}  #: Replicas by unit.
    reasons: Mapping[str, str] = {}  #: Why they were changed last, by unit.
    seen: Mapping[str, Seen] = {}


def decide(
    plan: PipelinePlan,
    observed: Sequence[Workload],
    before: Mapping[str, Any],
    reports: Sequence[Mapping[str, Load]],
    seen: Mapping[str, Seen],
    *,
    now: float,
) -> Scaling:
    """The replicas of all units that have limits.

    before: the status, as it was reported last. reports: each coordinator's loads by group; without any nothing
    changes.
    """
    units = {each.get("name"): each for each in before.get("units", ())}
    current = {
        unit: min(max(int(units.get(unit, {}).get("replicas", limits.least)), limits.least), limits.most)
        for unit, limits in plan.autoscaling.items()
    }
    reasons = {unit: str(units[unit]["scaling"]) for unit in current if units.get(unit, {}).get("scaling")}
    reasons = {unit: reasons.get(unit, f"starts with {count}") for unit, count in current.items()}
    loads = scaling.of_units(scaling.joined(reports), plan)
    if not loads:
        return Scaling(replicas=current, reasons=reasons, seen=seen)
    loads |= {unit: _of_pods(load, current[unit], unit, observed) for unit, load in loads.items() if unit in current}
    known = {unit: seen.get(unit) or Seen(wanted=((now, count),)) for unit, count in current.items()}
    decided = scaling.decide(plan.autoscaling, loads, known, edges=scaling.unit_edges(plan), now=now)
    changed = {unit: one for unit, one in decided.items() if one.replicas != current[unit]}
    return Scaling(
        replicas=current | {unit: one.replicas for unit, one in changed.items()},
        reasons=reasons | {unit: one.reason for unit, one in changed.items()},
        seen={unit: one.seen for unit, one in decided.items()},
    )


def scaled(goal: Goal, decided: Scaling) -> Goal:
    """The goal of a roll-out with the replicas that were decided."""
    units = {
        unit: msgspec.structs.replace(
            one,
            replicas=decided.replicas.get(unit, one.replicas),
            asleep=unit in decided.replicas and not decided.replicas[unit],
        )
        for unit, one in goal.units.items()
    }
    return msgspec.structs.replace(goal, units=units)


def _of_pods(load: Load, ordered: int, unit: str, observed: Sequence[Workload]) -> Load:
    """The load beside the pods that were ordered: a pod that waits for a node is on its way, too."""
    pods = [pod for each in observed if each.unit == unit for pod in each.pods if pod.ready and not pod.terminating]
    ready = min(len(pods), ordered)
    newest = max(pods, key=lambda pod: pod.created_at, default=None)
    took_s = newest.ready_since - newest.created_at if newest is not None and newest.ready_since else None
    return msgspec.structs.replace(
        load, ready=ready, pending=ordered - ready, cold_start_s=None if took_s is None else max(took_s, 0.0)
    )
