"""The resource's status: a summary of the observed workloads, for people and for ``kubectl wait``.

Here: conditions, units, counts, revisions. Not here: writing it (`cluster.applying`). Pure: equal facts
give an equal status, so that nothing is written when nothing has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from omnipipeline_operator.changes import conditions, diagnostics
from omnipipeline_operator.changes.conditions import Condition, condition
from omnipipeline_operator.changes.diagnostics import Diagnostic
from omnipipeline_operator.changes.rollout import Decision, Goal
from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_spec.types.plan import PipelinePlan, PipelineRevision
from omnipipeline_spec.types.pods import COORDINATOR

START_DEADLINE_S: Final = 120.0  # of a coordinator, which loads no model


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a spec is not carried out."""

    reason: str  #: InvalidSpec, NotAllowed, NameConflict, ChildRefused, QuotaExceeded.
    message: str


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """How the pipeline is reached."""

    url: str
    external: str | None = None
    pending: str | None = None  #: What has no address yet.


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the status is made of."""

    plan: PipelinePlan
    goal: Goal
    decision: Decision
    observed: Sequence[Workload]
    entries: Sequence[PipelineRevision]
    exposure: Exposure
    registered: Mapping[tuple[str, str], int] | None = (
        None  #: (unit, revision) -> instances; None: no coordinator answered.
    )
    refusal: Refusal | None = None  #: Such as a name that is taken; the other facts still hold.
    progress_deadline_s: float = 3600.0
    fetching: Diagnostic | None = None  #: Why units are waiting for the model; None: they are not.
    image: str = ""  #: Of the desired revision.
    images: Mapping[str, str] = {}  #: Of the others.
    missing: Sequence[Diagnostic] = ()  #: Missing references, and kubelet warnings about pods that do not start.
    note: str | None = None  #: A remark for the author in the Accepted condition.


def refused(refusal: Refusal, before: Mapping[str, Any], *, generation: int, available: bool, now: float) -> Any:
    """The status of a spec that is not carried out: running pods are left alone, and their conditions are kept."""
    known = list(before.get("conditions", ()))
    reported = [
        condition("Accepted", False, refusal.reason, refusal.message),
        condition("Ready", False, refusal.reason, refusal.message),
        condition("Available", available, "Serving" if available else refusal.reason, _still(available)),
    ]
    fresh = conditions.merged(reported, known, generation=generation, now=now)
    kept = [each for each in known if each["type"] not in {one.type for one in reported}]
    return {**before, "observedGeneration": generation, "conditions": [*fresh, *kept]}, reported


def summarise(
    facts: Facts, before: Mapping[str, Any], *, generation: int, now: float
) -> tuple[dict[str, Any], list[Condition]]:
    """The whole status, and its conditions on their own."""
    found = _found(facts, before, now)
    reported = _conditions(facts, found, now)
    units = [_unit(facts, name, found.get(name)) for name in (*facts.goal.units, COORDINATOR)]
    ready = {each["name"]: each["ready"] for each in units}
    stages = [(stage.name, unit.name) for unit in facts.plan.units for stage in unit.stages]
    endpoint = {"url": facts.exposure.url, "external": facts.exposure.external}
    serving = serving_revision(facts, before)
    status = {
        "observedGeneration": generation,
        "endpoint": _set(endpoint),
        "stagesReady": f"{sum(ready[unit] > 0 for _, unit in stages)}/{len(stages)}",
        "gpus": _gpus(facts),
        "revision": _revision(facts, serving),
        "units": units,
        "conditions": conditions.merged(reported, before.get("conditions", ()), generation=generation, now=now),
    }
    return status, reported


def is_complete(revision: PipelineRevision, observed: Sequence[Workload]) -> bool:
    """Whether requests can be bound to this revision: each unit has a ready pod."""
    ready = {(each.unit, each.revision) for each in observed if each.ready}
    return ready.issuperset(revision.units.items())


def is_available(entries: Sequence[PipelineRevision], observed: Sequence[Workload]) -> bool:
    """Whether requests are answered: a coordinator is ready, and one revision is complete."""
    return _coordinator_is_ready(observed) and any(is_complete(each, observed) for each in entries)


def serving_revision(facts: Facts, before: Mapping[str, Any]) -> str | None:
    """The current revision: the new one when the roll has finished, until then the one that served before."""
    update = facts.plan.current
    was = before.get("revision", {}).get("current")
    known = {each.revision: each for each in facts.entries}
    if is_complete(update, facts.observed) and (not facts.decision.rolling or facts.decision.complete == 1):
        return update.revision
    if was in known:
        return str(was)
    complete = [each.revision for each in facts.entries if is_complete(each, facts.observed)]
    return complete[0] if complete else None


# --- conditions -------------------------------------------------------------------------------------------------


def _conditions(facts: Facts, found: Mapping[str, Diagnostic], now: float) -> list[Condition]:
    worst = diagnostics.worst(found.values())
    stages = _stages_ready(facts, found)
    available = is_available(facts.entries, facts.observed)
    progressing = _progressing(facts, found, now)
    return [
        _accepted(facts),
        _ready(facts, worst, available, progressing),
        condition("Available", available, *_why_available(facts, available, worst)),
        _scheduled(facts, found),
        _coordinator_ready(facts, found),
        stages,
        _exposed(facts),
        progressing,
        condition("Suspended", facts.goal.suspended, "Suspended" if facts.goal.suspended else "NotSuspended"),
    ]


def _accepted(facts: Facts) -> Condition:
    if facts.refusal is not None:
        return condition("Accepted", False, facts.refusal.reason, facts.refusal.message)
    planned = f"{len(facts.plan.units)} pod units are planned"
    return condition("Accepted", True, "Valid", f"{planned}; {facts.note}" if facts.note else planned)


def _ready(facts: Facts, worst: Diagnostic | None, available: bool, progressing: Condition) -> Condition:
    """Ready: available, and the desired revision serves."""
    if facts.refusal is not None:
        return condition("Ready", False, facts.refusal.reason, facts.refusal.message)
    if facts.goal.suspended:
        return condition("Ready", False, "Suspended", "spec.suspend is true")
    if progressing.reason == "InsufficientCapacity":  # its message names the remedies
        return condition("Ready", False, progressing.reason, progressing.message)
    replaced = not _old_revision_serves(facts)
    if (
        available
        and replaced
        and is_complete(facts.plan.current, facts.observed)
        and _coordinator_is_ready(facts.observed, facts)
    ):
        return condition("Ready", True, "Serving", f"revision {facts.plan.current.revision} answers requests")
    if worst is not None:
        return condition("Ready", False, worst.reason, worst.description)
    if progressing.status == "False":
        return condition("Ready", False, progressing.reason, progressing.message)
    if facts.decision.rolling and available:
        return condition("Ready", False, "Paused" if facts.goal.paused else "RollingOut", progressing.message)
    return condition("Ready", False, "Starting", _waiting_for(facts))


def _why_available(facts: Facts, available: bool, worst: Diagnostic | None) -> tuple[str, str]:
    if available:
        complete = [each.revision for each in facts.entries if is_complete(each, facts.observed)]
        return "Serving", f"complete sets of revision {' and '.join(complete)}"
    if facts.goal.suspended:
        return "Suspended", "spec.suspend is true"
    if worst is not None:
        return worst.reason, worst.description
    return "Starting", _waiting_for(facts)


def _scheduled(facts: Facts, found: Mapping[str, Diagnostic]) -> Condition:
    unplaced = [each for each in found.values() if each.reason in ("Unschedulable", *_UNMADE)]
    worst = diagnostics.worst(unplaced)
    if worst is not None:
        return condition("Scheduled", False, worst.reason, worst.description)
    return condition("Scheduled", True, "AllScheduled")


_UNMADE: Final = ("QuotaExceeded", "PodSecurity", "PodsRefused")


def _coordinator_ready(facts: Facts, found: Mapping[str, Diagnostic]) -> Condition:
    if _coordinator_is_ready(facts.observed):
        return condition("CoordinatorReady", True, "Serving")
    if facts.goal.suspended:
        return condition("CoordinatorReady", False, "Suspended")
    diagnostic = found.get(COORDINATOR)
    return condition(
        "CoordinatorReady", False, *((diagnostic.reason, diagnostic.message) if diagnostic else ("Starting", ""))
    )


def _stages_ready(facts: Facts, found: Mapping[str, Diagnostic]) -> Condition:
    short = []
    for name, desired in facts.goal.units.items():
        ready = _workload_ready(facts, name, desired.revision)
        if ready < desired.replicas:
            short.append(f"{name} {ready}/{desired.replicas}")
    if facts.goal.suspended:
        return condition("StagesReady", False, "Suspended")
    if not short:
        return condition("StagesReady", True, "AllReady")
    worst = diagnostics.worst(each for unit, each in found.items() if unit != COORDINATOR)
    return condition("StagesReady", False, worst.reason if worst else "Starting", f"ready pods: {', '.join(short)}")


def _exposed(facts: Facts) -> Condition:
    if facts.exposure.pending:
        return condition("Exposed", False, "AddressPending", facts.exposure.pending)
    return condition("Exposed", True, "Exposed", facts.exposure.external or facts.exposure.url)


def _progressing(facts: Facts, found: Mapping[str, Diagnostic], now: float) -> Condition:
    goal = facts.goal
    if goal.suspended:
        return condition("Progressing", None, "Suspended")
    done = not facts.decision.rolling and not _is_short(facts)
    if done:
        return condition("Progressing", True, "RolledOut", f"revision {facts.plan.current.revision} is complete")
    if goal.paused and facts.decision.rolling:
        return condition("Progressing", None, "Paused", "rollout.paused is true")
    squeezed = _insufficient_capacity(facts, found)
    if squeezed is not None:
        return condition("Progressing", False, "InsufficientCapacity", squeezed)
    since = _last_progress(facts)
    late = since is not None and now - since > facts.progress_deadline_s
    if late and (facts.decision.rolling or not is_available(facts.entries, facts.observed)):
        worst = diagnostics.worst(found.values())
        why = f": {worst.description}" if worst else ""
        return condition("Progressing", False, "ProgressDeadlineExceeded", f"no progress{why}")
    return condition("Progressing", True, "RollingOut" if facts.decision.rolling else "Starting", _waiting_for(facts))


def _insufficient_capacity(facts: Facts, found: Mapping[str, Diagnostic]) -> str | None:
    """Whether the roll waits for a GPU or a node that the old revision uses; None: no."""
    if not facts.decision.rolling or facts.goal.strategy != "Coherent":
        return None
    for diagnostic in found.values():
        if diagnostic.reason == "Unschedulable" and diagnostic.unit:
            cure = "free that much, lower its replicas, or choose rollout.strategy: Recreate"
            return f"unit {diagnostic.unit} cannot be scheduled beside the old revision: {diagnostic.message}; {cure}"
    return None


def deadline(facts: Facts, now: float) -> float | None:
    """When time alone changes the status next: a deadline of the roll or of a start, a crash that expires.

    None: it does not.
    """
    times = []
    if _is_short(facts):
        since = _last_progress(facts)
        times += [] if since is None else [since + facts.progress_deadline_s]
    for each, limit in _desired_workloads(facts):
        for pod in each.pods:
            if not (pod.ready or pod.finished or pod.terminating):  # a second later: timestamps have whole seconds
                times += [pod.reason_until or 0.0, (pod.starting_since or -limit) + limit + 1]
    return min((each for each in times if each > now), default=None)


def _last_progress(facts: Facts) -> float | None:
    """When a workload of the desired revision was last made or became ready."""
    desired = {(name, one.revision) for name, one in facts.goal.units.items()}
    current = [each for each in facts.observed if (each.unit, each.revision) in desired]
    times = [each.created_at for each in current]
    times += [pod.ready_since for each in current for pod in each.pods if pod.ready_since]
    return max(times, default=None)


# --- counts -----------------------------------------------------------------------------------------------------


def _unit(facts: Facts, name: str, diagnostic: Diagnostic | None) -> dict[str, Any]:
    desired = facts.goal.coordinator if name == COORDINATOR else facts.goal.units[name]
    own = [each for each in facts.observed if each.unit == name]
    current = next((each for each in own if each.revision == desired.revision), None)
    ready = sum(each.ready for each in own)
    unit = {
        "name": name,
        "workload": current.name if current else None,
        "replicas": 0 if facts.goal.suspended else desired.replicas,
        "ready": ready,
        "updated": sum(not pod.terminating for pod in current.present) if current else 0,
        "registered": _registered(facts, own) if name != COORDINATOR else ready,
        "revision": desired.revision,
    }
    if diagnostic is not None:
        unit |= {"reason": diagnostic.reason, "message": diagnostic.message[: conditions.MAX_MESSAGE]}
    elif current is not None and current.drifted:
        unit |= {"reason": "TemplateEdited", "message": f"{current.name} was edited by hand; `restart` makes a new one"}
    return _set(unit)


def _revision(facts: Facts, serving: str | None) -> dict[str, Any]:
    """Each pipeline revision with its image."""
    update = facts.plan.current.revision
    images = {**facts.images, update: facts.image}
    revisions = {
        "current": serving,
        "currentImage": images.get(serving or ""),
        "update": update,
        "updateImage": facts.image,
    }
    return {key: value for key, value in revisions.items() if value}


def _registered(facts: Facts, own: Sequence[Workload]) -> int:
    if facts.registered is None:
        return sum(each.ready for each in own)
    return sum(facts.registered.get((each.unit, each.revision), 0) for each in own)


def _gpus(facts: Facts) -> dict[str, int]:
    desired = {unit.name: len(unit.gpu_ids) for unit in facts.plan.units}
    leaving = [(each.gpus, pod) for each in facts.observed for pod in each.present if pod.terminating]
    return {
        "requested": sum(count * facts.goal.units[name].replicas for name, count in desired.items()),
        "ready": sum(each.gpus * each.ready for each in facts.observed),
        "terminating": sum(count for count, _ in leaving),
    }


def _found(facts: Facts, before: Mapping[str, Any], now: float) -> dict[str, Diagnostic]:
    """The worst diagnostic of each unit's desired revision; its message is kept when only numbers have changed."""
    previous = {each.get("name"): each for each in before.get("units", ())}
    given = [*filter(None, [facts.fetching]), *facts.missing]
    for each, limit in _desired_workloads(facts):
        diagnostic = diagnostics.of_workload(each, startup_deadline_s=limit, now=now)
        if diagnostic is not None:
            given.append(diagnostic)
    found = {}
    for unit in {each.unit for each in given}:
        worst = diagnostics.worst(each for each in given if each.unit == unit)
        assert worst is not None
        was = previous.get(unit, {})
        found[unit] = diagnostics.stabilized(worst, was.get("reason"), was.get("message"))
    return found


def _desired_workloads(facts: Facts) -> Iterator[tuple[Workload, float]]:
    """The workloads of desired revisions, each with its startup deadline."""
    deadlines = {unit.name: unit.startup_deadline_s for unit in facts.plan.units}
    for each in facts.observed:
        desired = facts.goal.coordinator if each.unit == COORDINATOR else facts.goal.units.get(each.unit)
        if desired is not None and desired.revision == each.revision:
            yield each, deadlines.get(each.unit, START_DEADLINE_S)


def _is_short(facts: Facts) -> bool:
    units = [(name, one) for name, one in facts.goal.units.items()] + [(COORDINATOR, facts.goal.coordinator)]
    return any(_workload_ready(facts, name, one.revision) < one.replicas for name, one in units)


def _workload_ready(facts: Facts, unit: str, revision: str) -> int:
    return sum(each.ready for each in facts.observed if (each.unit, each.revision) == (unit, revision))


def _old_revision_serves(facts: Facts) -> bool:
    """Whether pods of another revision still take new requests; draining ones do not."""
    desired = {name: one.revision for name, one in facts.goal.units.items()} | {
        COORDINATOR: facts.goal.coordinator.revision
    }
    return any(desired.get(each.unit) != each.revision and (each.replicas or each.ready) for each in facts.observed)


def _coordinator_is_ready(observed: Sequence[Workload], facts: Facts | None = None) -> bool:
    """Whether a coordinator is ready; with ``facts``: one of the desired revision."""
    revision = facts.goal.coordinator.revision if facts else None
    return any(each.ready and revision in (None, each.revision) for each in observed if each.unit == COORDINATOR)


def _waiting_for(facts: Facts) -> str:
    units = [*facts.goal.units.items(), (COORDINATOR, facts.goal.coordinator)]
    short = [
        f"{name} {ready}/{one.replicas}"
        for name, one in units
        if (ready := _workload_ready(facts, name, one.revision)) < one.replicas
    ]
    return f"waiting for {', '.join(short)}" if short else "waiting for old pods to end"


def _still(available: bool) -> str:
    return "the previous revision serves" if available else "no revision serves"


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
