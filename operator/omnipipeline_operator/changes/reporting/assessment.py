"""The conditions of a pipeline, from its inputs; and when they change next without an event. Pure.

Here: which conditions hold, why, and the diagnostic of each unit. Not here: their form and times (`conditions`), the
rest of the status (`status`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from omnipipeline_operator.changes.conditions import ObservedCondition, condition
from omnipipeline_operator.changes.deciding import canary, gangs
from omnipipeline_operator.changes.reporting import diagnostics
from omnipipeline_operator.changes.reporting.diagnostics import Diagnostic
from omnipipeline_operator.changes.reporting.status_inputs import (
    StatusInputs,
    coordinator_is_ready,
    desired_workloads,
    ends_of_taking,
    is_available,
    is_complete,
    is_short,
    old_revision_serves,
    workload_ready,
)
from omnipipeline_spec.types.pods import COORDINATOR


def conditions_of(inputs: StatusInputs, found: Mapping[str, Diagnostic], now: float) -> list[ObservedCondition]:
    worst = diagnostics.worst(found.values())
    stages = _stages_ready(inputs, found)
    available = is_available(inputs.entries, inputs.observed, inputs.goal.asleep)
    progressing = _progressing(inputs, found, now)
    return [
        _accepted(inputs),
        _ready(inputs, worst, available, progressing, now),
        condition("Available", available, *_why_available(inputs, available, worst)),
        _scheduled(inputs, found),
        _coordinator_ready(inputs, found),
        stages,
        _exposed(inputs),
        progressing,
        condition("Suspended", inputs.goal.suspended, "Suspended" if inputs.goal.suspended else "NotSuspended"),
    ]


def _accepted(inputs: StatusInputs) -> ObservedCondition:
    if inputs.refusal is not None:
        return condition("Accepted", False, inputs.refusal.reason, inputs.refusal.message)
    planned = f"{len(inputs.plan.units)} pod units are planned"
    return condition("Accepted", True, "Valid", f"{planned}; {inputs.note}" if inputs.note else planned)


def _ready(
    inputs: StatusInputs, worst: Diagnostic | None, available: bool, progressing: ObservedCondition, now: float
) -> ObservedCondition:
    """Ready: available, and a new request meets the desired revision."""
    if inputs.refusal is not None:
        return condition("Ready", False, inputs.refusal.reason, inputs.refusal.message)
    if inputs.goal.suspended:
        return condition("Ready", False, "Suspended", "spec.suspend is true")
    if inputs.canary is not None and inputs.canary.aborted:
        return condition("Ready", False, canary.REASON, inputs.canary.message)
    if progressing.reason == "InsufficientCapacity":  # its message names the remedies
        return condition("Ready", False, progressing.reason, progressing.message)
    replaced = not old_revision_serves(inputs, now)
    if (
        available
        and replaced
        and is_complete(inputs.plan.current, inputs.observed, inputs.goal.asleep)
        and coordinator_is_ready(inputs.observed, inputs)
    ):
        return condition("Ready", True, "Serving", f"revision {inputs.plan.current.revision} answers requests")
    if worst is not None:
        return condition("Ready", False, worst.reason, worst.description)
    if progressing.status == "False":
        return condition("Ready", False, progressing.reason, progressing.message)
    if inputs.decision.rolling and available:
        return condition("Ready", False, "Paused" if inputs.goal.paused else "RollingOut", progressing.message)
    if available and not replaced:
        return condition("Ready", False, "RollingOut", "new requests may still meet the previous revision")
    return condition("Ready", False, "Starting", _waiting_for(inputs))


def _why_available(inputs: StatusInputs, available: bool, worst: Diagnostic | None) -> tuple[str, str]:
    if available:
        complete = [each.revision for each in inputs.entries if is_complete(each, inputs.observed, inputs.goal.asleep)]
        return "Serving", f"complete sets of revision {' and '.join(complete)}"
    if inputs.goal.suspended:
        return "Suspended", "spec.suspend is true"
    if worst is not None:
        return worst.reason, worst.description
    return "Starting", _waiting_for(inputs)


def _scheduled(inputs: StatusInputs, found: Mapping[str, Diagnostic]) -> ObservedCondition:
    unplaced = [
        each for each in found.values() if each.reason in ("Unschedulable", gangs.REASON, gangs.TAKEN, *_UNMADE)
    ]
    worst = diagnostics.worst(unplaced)
    if worst is not None:
        return condition("Scheduled", False, worst.reason, worst.description)
    return condition("Scheduled", True, "AllScheduled")


_UNMADE: Final = ("QuotaExceeded", "PodSecurity", "PodsRefused")


def _coordinator_ready(inputs: StatusInputs, found: Mapping[str, Diagnostic]) -> ObservedCondition:
    if coordinator_is_ready(inputs.observed):
        ready = sum(each.ready for each in inputs.observed if each.unit == COORDINATOR)
        wanted = 0 if inputs.goal.suspended else inputs.goal.coordinator.replicas
        message = f"ready pods: {ready}/{wanted}" if ready < wanted else ""
        return condition("CoordinatorReady", True, "Serving", message)
    if inputs.goal.suspended:
        return condition("CoordinatorReady", False, "Suspended")
    diagnostic = found.get(COORDINATOR)
    return condition(
        "CoordinatorReady", False, *((diagnostic.reason, diagnostic.message) if diagnostic else ("Starting", ""))
    )


def _stages_ready(inputs: StatusInputs, found: Mapping[str, Diagnostic]) -> ObservedCondition:
    short = []
    for name, desired in inputs.goal.units.items():
        ready = workload_ready(inputs, name, desired.revision)
        if ready < desired.replicas:
            short.append(f"{name} {ready}/{desired.replicas}")
    if inputs.goal.suspended:
        return condition("StagesReady", False, "Suspended")
    if not short:
        return condition("StagesReady", True, "AllReady")
    worst = diagnostics.worst(each for unit, each in found.items() if unit != COORDINATOR)
    return condition("StagesReady", False, worst.reason if worst else "Starting", f"ready pods: {', '.join(short)}")


def _exposed(inputs: StatusInputs) -> ObservedCondition:
    if inputs.exposure.pending:
        return condition("Exposed", False, inputs.exposure.reason, inputs.exposure.pending)
    return condition("Exposed", True, "Exposed", inputs.exposure.external or inputs.exposure.url)


def _progressing(inputs: StatusInputs, found: Mapping[str, Diagnostic], now: float) -> ObservedCondition:
    goal = inputs.goal
    if goal.suspended:
        return condition("Progressing", None, "Suspended")
    tried = inputs.canary
    if tried is not None and tried.aborted:
        return condition("Progressing", False, canary.REASON, tried.message)
    if tried is not None and tried.is_interrupted:
        return condition("Progressing", True, "Canary", f"revision {tried.revision} {tried.message}")
    done = not inputs.decision.rolling and not is_short(inputs)
    if done:
        return condition("Progressing", True, "RolledOut", f"revision {inputs.plan.current.revision} is complete")
    if goal.paused and inputs.decision.rolling:
        return condition("Progressing", None, "Paused", "rollout.paused is true")
    squeezed = _insufficient_capacity(inputs, found)
    if squeezed is not None:
        return condition("Progressing", False, "InsufficientCapacity", squeezed)
    if tried is not None and tried.runs and tried.since is not None:
        return condition("Progressing", True, "Canary", f"revision {tried.revision} {tried.message}")
    since = _last_progress(inputs)
    late = since is not None and now - since > inputs.progress_deadline_s
    if late and (inputs.decision.rolling or not is_available(inputs.entries, inputs.observed, inputs.goal.asleep)):
        worst = diagnostics.worst(found.values())
        why = f": {worst.description}" if worst else ""
        return condition("Progressing", False, "ProgressDeadlineExceeded", f"no progress{why}")
    return condition("Progressing", True, "RollingOut" if inputs.decision.rolling else "Starting", _waiting_for(inputs))


def _insufficient_capacity(inputs: StatusInputs, found: Mapping[str, Diagnostic]) -> str | None:
    """Whether the roll waits for a GPU or a node that the old revision uses; None: no."""
    if not inputs.decision.rolling or inputs.goal.strategy != "Coherent":
        return None
    for diagnostic in found.values():
        if diagnostic.reason in _SQUEEZED and diagnostic.unit:
            what, cure = _SQUEEZED[diagnostic.reason]
            # The coordinator always rolls beside the old one.
            is_alone = diagnostic.unit == COORDINATOR
            cures = [cure, "lower its replicas"]
            if not is_alone and inputs.goal.units[diagnostic.unit].replicas > 1 and not inputs.goal.max_unavailable:
                cures.append("set rollout.maxUnavailable")
            then = " or lower its replicas" if is_alone else ", or choose rollout.strategy: Recreate"
            cure = cure if is_alone else ", ".join(cures)
            return f"unit {diagnostic.unit} {what} beside the old revision: {diagnostic.message}; {cure}{then}"
    return None


#: Reason of a pod that finds no room -> what it says, and what helps.
_SQUEEZED: Final = {
    "Unschedulable": ("cannot be scheduled", "free that much"),
    "QuotaExceeded": ("gets no pod", "raise the quota"),
}


def deadline(inputs: StatusInputs, now: float) -> float | None:
    """When time alone changes the status next: a deadline of the roll or of a start, a crash that expires, a lost pod.

    None: it does not.
    """
    times = []
    if is_short(inputs):
        since = _last_progress(inputs)
        times += [] if since is None else [since + inputs.progress_deadline_s]
    times += ends_of_taking(inputs)
    if inputs.decision.rolling:
        times += [pod.lost_at or 0.0 for each in inputs.observed for pod in each.awaited]
    for each, limit in desired_workloads(inputs):
        for pod in each.pods:
            if pod.ready or pod.terminating:
                continue
            times += [pod.reason_until or 0.0]
            if not pod.finished:  # a second later: timestamps have whole seconds
                times += [(pod.starting_since or -limit) + limit + 1]
    return min((each for each in times if each > now), default=None)


def _last_progress(inputs: StatusInputs) -> float | None:
    """When a workload of the desired revision was last made or became ready; the coordinator's while it rolls."""
    desired = {(name, one.revision) for name, one in inputs.goal.units.items()}
    revision = inputs.goal.coordinator.revision
    if any(each.unit == COORDINATOR and each.revision != revision and not each.idle for each in inputs.observed):
        desired.add((COORDINATOR, revision))
    current = [each for each in inputs.observed if (each.unit, each.revision) in desired]
    times = [each.created_at for each in current]
    times += [pod.ready_since for each in current for pod in each.pods if pod.ready_since]
    return max(times, default=None)


def diagnostics_of(inputs: StatusInputs, before: Mapping[str, Any], now: float) -> dict[str, Diagnostic]:
    """The worst diagnostic of each unit's desired revision; its message is kept when only numbers have changed."""
    previous = {each.get("name"): each for each in before.get("units", ())}
    given = [*filter(None, [inputs.fetching]), *inputs.missing]
    for each, limit in desired_workloads(inputs):
        diagnostic = diagnostics.of_workload(each, startup_deadline_s=limit, now=now)
        if diagnostic is not None:
            given.append(diagnostic)
    found = {}
    for unit in {each.unit for each in given}:
        worst = diagnostics.worst(each for each in given if each.unit == unit)
        assert worst is not None
        was = previous.get(unit, {})
        edited, said = _edited(inputs, unit), was.get("message")
        steady = diagnostics.stabilized(worst, was.get("reason"), said and said.removeprefix(edited))
        found[unit] = msgspec.structs.replace(steady, message=f"{edited}{steady.message}")
    return found


def _edited(inputs: StatusInputs, unit: str) -> str:
    """The beginning of the diagnostic of a unit whose template is not the spec's: the spec does not show the cause."""
    names = [each.name for each, _ in desired_workloads(inputs) if each.unit == unit and each.drifted]
    return f"Deployment {names[0]} was edited by hand (`kubectl omni restart` makes a new one): " if names else ""


def _waiting_for(inputs: StatusInputs) -> str:
    units = [*inputs.goal.units.items(), (COORDINATOR, inputs.goal.coordinator)]
    short = [
        f"{name} {ready}/{one.replicas}"
        for name, one in units
        if (ready := workload_ready(inputs, name, one.revision)) < one.replicas
    ]
    ending = _ending(inputs)
    if not short:
        return f"waiting for {ending or 'old pods'} to end"
    waits = f", until {ending} has ended" if ending and inputs.goal.strategy == "Recreate" else ""
    return f"waiting for {', '.join(short)}{waits}"


def _ending(inputs: StatusInputs) -> str:
    """The first old pod that still ends, its node, and how many more there are; empty: no old pod is left."""
    desired = {name: one.revision for name, one in inputs.goal.units.items()}
    desired[COORDINATOR] = inputs.goal.coordinator.revision
    old = [each for each in inputs.observed if desired.get(each.unit) != each.revision]
    pods = sorted((pod for each in old for pod in each.awaited if pod.terminating), key=lambda pod: pod.name)
    if not pods:
        return ""
    more = f" and {len(pods) - 1} more" if len(pods) > 1 else ""
    return f"old pod {pods[0].name} on node {pods[0].node}{more}"


def still(available: bool) -> str:
    return "the previous revision serves" if available else "no revision serves"
