"""What the resource's status says: a summary of what is, for people and for ``kubectl wait``.

Here: conditions, units, counts, revisions. Not here: writing it (`cluster.applying`). Pure: the same facts give the
same status, so that nothing is written when nothing changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from omnipipeline_operator.changes import conditions, troubles
from omnipipeline_operator.changes.conditions import Condition, say
from omnipipeline_operator.changes.observed import Workload
from omnipipeline_operator.changes.rollout import Decision, Goal
from omnipipeline_operator.changes.troubles import Trouble
from omnipipeline_operator.desired.naming import COORDINATOR
from omnipipeline_spec.plan import PipelinePlan, PipelineRevision

START_DEADLINE_S: Final = 120.0  # of a coordinator, which loads no model


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a spec was not taken."""

    reason: str  #: InvalidSpec, NotAllowed, NameConflict.
    message: str


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """How the pipeline is reached."""

    url: str
    external: str | None = None
    pending: str | None = None  #: What has no address yet.


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All that the status is made of."""

    plan: PipelinePlan
    goal: Goal
    decision: Decision
    seen: Sequence[Workload]
    entries: Sequence[PipelineRevision]
    exposure: Exposure
    registered: Mapping[tuple[str, str], int] | None = None  #: (unit, revision) -> instances; None: nobody could say.
    refusal: Refusal | None = None  #: A name that is taken; the rest still holds.
    progress_deadline_s: float = 3600.0
    fetching: Trouble | None = None  #: Why units wait for the model; None: they do not.
    image: str = ""  #: Of the wanted revision.
    images: Mapping[str, str] = {}  #: Of the others.
    lacking: Sequence[Trouble] = ()  #: What units name that is not there, and what the kubelet says of their pods.
    note: str | None = None  #: What the author should know though nothing is refused.


def refused(refusal: Refusal, before: Mapping[str, Any], *, generation: int, available: bool, now: float) -> Any:
    """The status of a spec that was not taken: what runs goes on, and is still told of as before."""
    known = list(before.get("conditions", ()))
    said = [
        say("Accepted", False, refusal.reason, refusal.message),
        say("Ready", False, refusal.reason, refusal.message),
        say("Available", available, "Serving" if available else refusal.reason, _still(available)),
    ]
    fresh = conditions.written(said, known, generation=generation, now=now)
    kept = [each for each in known if each["type"] not in {one.type for one in said}]
    return {**before, "observedGeneration": generation, "conditions": [*fresh, *kept]}, said


def summarise(
    facts: Facts, before: Mapping[str, Any], *, generation: int, now: float
) -> tuple[dict[str, Any], list[Condition]]:
    """The whole status, and its conditions on their own."""
    found = _found(facts, before, now)
    said = _conditions(facts, found, now)
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
        "conditions": conditions.written(said, before.get("conditions", ()), generation=generation, now=now),
    }
    return status, said


def is_complete(revision: PipelineRevision, seen: Sequence[Workload]) -> bool:
    """Whether requests can be bound to this revision: a ready pod of each unit."""
    ready = {(each.unit, each.revision) for each in seen if each.ready}
    return ready.issuperset(revision.units.items())


def is_available(entries: Sequence[PipelineRevision], seen: Sequence[Workload]) -> bool:
    """Whether requests are answered: a coordinator and a complete set of one revision."""
    return _coordinates(seen) and any(is_complete(each, seen) for each in entries)


def serving_revision(facts: Facts, before: Mapping[str, Any]) -> str | None:
    """The revision to call current: the new one when the roll is over, before that the one that served."""
    update = facts.plan.current
    was = before.get("revision", {}).get("current")
    known = {each.revision: each for each in facts.entries}
    if is_complete(update, facts.seen) and (not facts.decision.rolling or facts.decision.complete == 1):
        return update.revision
    if was in known:
        return str(was)
    complete = [each.revision for each in facts.entries if is_complete(each, facts.seen)]
    return complete[0] if complete else None


# --- conditions -------------------------------------------------------------------------------------------------


def _conditions(facts: Facts, found: Mapping[str, Trouble], now: float) -> list[Condition]:
    worst = troubles.worst(found.values())
    stages = _stages_ready(facts, found)
    available = is_available(facts.entries, facts.seen)
    progressing = _progressing(facts, found, now)
    return [
        _accepted(facts),
        _ready(facts, worst, available, progressing),
        say("Available", available, *_why_available(facts, available, worst)),
        _scheduled(facts, found),
        _coordinator_ready(facts, found),
        stages,
        _exposed(facts),
        progressing,
        say("Suspended", facts.goal.suspended, "Suspended" if facts.goal.suspended else "NotSuspended"),
    ]


def _accepted(facts: Facts) -> Condition:
    if facts.refusal is not None:
        return say("Accepted", False, facts.refusal.reason, facts.refusal.message)
    planned = f"{len(facts.plan.units)} pod units are planned"
    return say("Accepted", True, "Valid", f"{planned}; {facts.note}" if facts.note else planned)


def _ready(facts: Facts, worst: Trouble | None, available: bool, progressing: Condition) -> Condition:
    """Available, and what serves is this generation."""
    if facts.refusal is not None:
        return say("Ready", False, facts.refusal.reason, facts.refusal.message)
    if facts.goal.suspended:
        return say("Ready", False, "Suspended", "spec.suspend is true")
    if progressing.reason == "InsufficientCapacity":  # its message says what to do
        return say("Ready", False, progressing.reason, progressing.message)
    replaced = not _old_wanted(facts)
    if available and replaced and is_complete(facts.plan.current, facts.seen) and _coordinates(facts.seen, facts):
        return say("Ready", True, "Serving", f"revision {facts.plan.current.revision} answers requests")
    if worst is not None:
        return say("Ready", False, worst.reason, worst.told)
    if progressing.status == "False":
        return say("Ready", False, progressing.reason, progressing.message)
    if facts.decision.rolling and available:
        return say("Ready", False, "Paused" if facts.goal.paused else "RollingOut", progressing.message)
    return say("Ready", False, "Starting", _lacking(facts))


def _why_available(facts: Facts, available: bool, worst: Trouble | None) -> tuple[str, str]:
    if available:
        complete = [each.revision for each in facts.entries if is_complete(each, facts.seen)]
        return "Serving", f"complete sets of revision {' and '.join(complete)}"
    if facts.goal.suspended:
        return "Suspended", "spec.suspend is true"
    if worst is not None:
        return worst.reason, worst.told
    return "Starting", _lacking(facts)


def _scheduled(facts: Facts, found: Mapping[str, Trouble]) -> Condition:
    unplaced = [each for each in found.values() if each.reason in ("Unschedulable", *_UNMADE)]
    worst = troubles.worst(unplaced)
    if worst is not None:
        return say("Scheduled", False, worst.reason, worst.told)
    return say("Scheduled", True, "AllScheduled")


_UNMADE: Final = ("QuotaExceeded", "PodSecurity", "PodsRefused")


def _coordinator_ready(facts: Facts, found: Mapping[str, Trouble]) -> Condition:
    if _coordinates(facts.seen):
        return say("CoordinatorReady", True, "Serving")
    if facts.goal.suspended:
        return say("CoordinatorReady", False, "Suspended")
    trouble = found.get(COORDINATOR)
    return say("CoordinatorReady", False, *((trouble.reason, trouble.message) if trouble else ("Starting", "")))


def _stages_ready(facts: Facts, found: Mapping[str, Trouble]) -> Condition:
    short = []
    for name, wanted in facts.goal.units.items():
        ready = _workload_ready(facts, name, wanted.revision)
        if ready < wanted.replicas:
            short.append(f"{name} {ready}/{wanted.replicas}")
    if facts.goal.suspended:
        return say("StagesReady", False, "Suspended")
    if not short:
        return say("StagesReady", True, "AllReady")
    worst = troubles.worst(each for unit, each in found.items() if unit != COORDINATOR)
    return say("StagesReady", False, worst.reason if worst else "Starting", f"ready pods: {', '.join(short)}")


def _exposed(facts: Facts) -> Condition:
    if facts.exposure.pending:
        return say("Exposed", False, "AddressPending", facts.exposure.pending)
    return say("Exposed", True, "Exposed", facts.exposure.external or facts.exposure.url)


def _progressing(facts: Facts, found: Mapping[str, Trouble], now: float) -> Condition:
    goal = facts.goal
    if goal.suspended:
        return say("Progressing", None, "Suspended")
    done = not facts.decision.rolling and not _short(facts)
    if done:
        return say("Progressing", True, "RolledOut", f"revision {facts.plan.current.revision} is complete")
    if goal.paused and facts.decision.rolling:
        return say("Progressing", None, "Paused", "rollout.paused is true")
    squeezed = _squeezed(facts, found)
    if squeezed is not None:
        return say("Progressing", False, "InsufficientCapacity", squeezed)
    since = _last_progress(facts)
    late = since is not None and now - since > facts.progress_deadline_s
    if late and (facts.decision.rolling or not is_available(facts.entries, facts.seen)):
        worst = troubles.worst(found.values())
        why = f": {worst.told}" if worst else ""
        return say("Progressing", False, "ProgressDeadlineExceeded", f"no progress{why}")
    return say("Progressing", True, "RollingOut" if facts.decision.rolling else "Starting", _lacking(facts))


def _squeezed(facts: Facts, found: Mapping[str, Trouble]) -> str | None:
    """A roll that waits for a GPU or a node which the old revision holds."""
    if not facts.decision.rolling or facts.goal.strategy != "Coherent":
        return None
    for trouble in found.values():
        if trouble.reason == "Unschedulable" and trouble.unit:
            cure = "free that much, lower its replicas, or choose rollout.strategy: Recreate"
            return f"unit {trouble.unit} has no room beside the old revision: {trouble.message}; {cure}"
    return None


def deadline(facts: Facts, now: float) -> float | None:
    """When time alone will change the status: a deadline of the roll or of a start, a crash that was long ago.

    None: nothing more will.
    """
    times = []
    if _short(facts):
        since = _last_progress(facts)
        times += [] if since is None else [since + facts.progress_deadline_s]
    for each, limit in _wanted(facts):
        for pod in each.pods:
            if not (pod.ready or pod.over or pod.terminating):  # a second later: times are told in whole seconds
                times += [pod.reason_until or 0.0, (pod.starting_since or -limit) + limit + 1]
    return min((each for each in times if each > now), default=None)


def _last_progress(facts: Facts) -> float | None:
    """The last time that something of the wanted revision was made or became ready."""
    wanted = {(name, one.revision) for name, one in facts.goal.units.items()}
    current = [each for each in facts.seen if (each.unit, each.revision) in wanted]
    times = [each.created_at for each in current]
    times += [pod.ready_since for each in current for pod in each.pods if pod.ready_since]
    return max(times, default=None)


# --- counts -----------------------------------------------------------------------------------------------------


def _unit(facts: Facts, name: str, trouble: Trouble | None) -> dict[str, Any]:
    wanted = facts.goal.coordinator if name == COORDINATOR else facts.goal.units[name]
    own = [each for each in facts.seen if each.unit == name]
    current = next((each for each in own if each.revision == wanted.revision), None)
    ready = sum(each.ready for each in own)
    told = {
        "name": name,
        "workload": current.name if current else None,
        "replicas": 0 if facts.goal.suspended else wanted.replicas,
        "ready": ready,
        "updated": sum(not pod.terminating for pod in current.present) if current else 0,
        "registered": _registered(facts, own) if name != COORDINATOR else ready,
        "revision": wanted.revision,
    }
    if trouble is not None:
        told |= {"reason": trouble.reason, "message": trouble.message[: conditions.MAX_MESSAGE]}
    elif current is not None and current.drifted:
        told |= {"reason": "TemplateEdited", "message": f"{current.name} was edited by hand; `restart` makes a new one"}
    return _set(told)


def _revision(facts: Facts, serving: str | None) -> dict[str, Any]:
    """Each pipeline revision with the one image that its units run."""
    update = facts.plan.current.revision
    images = {**facts.images, update: facts.image}
    told = {"current": serving, "currentImage": images.get(serving or ""), "update": update, "updateImage": facts.image}
    return {key: value for key, value in told.items() if value}


def _registered(facts: Facts, own: Sequence[Workload]) -> int:
    if facts.registered is None:
        return sum(each.ready for each in own)
    return sum(facts.registered.get((each.unit, each.revision), 0) for each in own)


def _gpus(facts: Facts) -> dict[str, int]:
    wanted = {unit.name: len(unit.gpu_ids) for unit in facts.plan.units}
    leaving = [(each.gpus, pod) for each in facts.seen for pod in each.present if pod.terminating]
    return {
        "requested": sum(count * facts.goal.units[name].replicas for name, count in wanted.items()),
        "ready": sum(each.gpus * each.ready for each in facts.seen),
        "terminating": sum(count for count, _ in leaving),
    }


def _found(facts: Facts, before: Mapping[str, Any], now: float) -> dict[str, Trouble]:
    """The worst of each unit's wanted revision, in the words of before where nothing but numbers has changed."""
    told = {each.get("name"): each for each in before.get("units", ())}
    given = [*filter(None, [facts.fetching]), *facts.lacking]
    for each, limit in _wanted(facts):
        trouble = troubles.of_workload(each, startup_deadline_s=limit, now=now)
        if trouble is not None:
            given.append(trouble)
    found = {}
    for unit in {each.unit for each in given}:
        worst = troubles.worst(each for each in given if each.unit == unit)
        assert worst is not None
        was = told.get(unit, {})
        found[unit] = troubles.steady(worst, was.get("reason"), was.get("message"))
    return found


def _wanted(facts: Facts) -> Iterator[tuple[Workload, float]]:
    """The Deployments of wanted revisions, with the time that a start may take."""
    deadlines = {unit.name: unit.startup_deadline_s for unit in facts.plan.units}
    for each in facts.seen:
        wanted = facts.goal.coordinator if each.unit == COORDINATOR else facts.goal.units.get(each.unit)
        if wanted is not None and wanted.revision == each.revision:
            yield each, deadlines.get(each.unit, START_DEADLINE_S)


def _short(facts: Facts) -> bool:
    units = [(name, one) for name, one in facts.goal.units.items()] + [(COORDINATOR, facts.goal.coordinator)]
    return any(_workload_ready(facts, name, one.revision) < one.replicas for name, one in units)


def _workload_ready(facts: Facts, unit: str, revision: str) -> int:
    return sum(each.ready for each in facts.seen if (each.unit, each.revision) == (unit, revision))


def _old_wanted(facts: Facts) -> bool:
    """Whether pods of another revision still take requests; those that drain take no new ones."""
    wanted = {name: one.revision for name, one in facts.goal.units.items()} | {
        COORDINATOR: facts.goal.coordinator.revision
    }
    return any(wanted.get(each.unit) != each.revision and (each.replicas or each.ready) for each in facts.seen)


def _coordinates(seen: Sequence[Workload], facts: Facts | None = None) -> bool:
    """Whether a coordinator is ready; with ``facts``: one of the wanted revision."""
    revision = facts.goal.coordinator.revision if facts else None
    return any(each.ready and revision in (None, each.revision) for each in seen if each.unit == COORDINATOR)


def _lacking(facts: Facts) -> str:
    units = [*facts.goal.units.items(), (COORDINATOR, facts.goal.coordinator)]
    short = [
        f"{name} {ready}/{one.replicas}"
        for name, one in units
        if (ready := _workload_ready(facts, name, one.revision)) < one.replicas
    ]
    return f"waiting for {', '.join(short)}" if short else "old pods are leaving"


def _still(available: bool) -> str:
    return "what ran before goes on" if available else "nothing serves"


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
