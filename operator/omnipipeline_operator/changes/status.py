"""The resource's status: a summary of the observed workloads, for people and for ``kubectl wait``.

Here: units, counts, revisions. Not here: conditions (`assessment`), writing it (`cluster.applying`). Pure: equal facts
give an equal status, so that nothing is written when nothing has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omnipipeline_operator.changes import conditions
from omnipipeline_operator.changes.assessment import conditions_of, diagnostics_of, still
from omnipipeline_operator.changes.conditions import Condition, condition
from omnipipeline_operator.changes.diagnostics import Diagnostic
from omnipipeline_operator.changes.facts import Facts, Refusal, is_complete
from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_spec.types.pods import COORDINATOR


def refused(refusal: Refusal, before: Mapping[str, Any], *, generation: int, available: bool, now: float) -> Any:
    """The status of a spec that is not carried out: running pods are left alone, and their conditions are kept."""
    known = list(before.get("conditions", ()))
    reported = [
        condition("Accepted", False, refusal.reason, refusal.message),
        condition("Ready", False, refusal.reason, refusal.message),
        condition("Available", available, "Serving" if available else refusal.reason, still(available)),
    ]
    fresh = conditions.merged(reported, known, generation=generation, now=now)
    kept = [each for each in known if each["type"] not in {one.type for one in reported}]
    return {**before, "observedGeneration": generation, "conditions": [*fresh, *kept]}, reported


def summarise(
    facts: Facts, before: Mapping[str, Any], *, generation: int, now: float
) -> tuple[dict[str, Any], list[Condition]]:
    """The whole status, and its conditions on their own."""
    found = diagnostics_of(facts, before, now)
    reported = conditions_of(facts, found, now)
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


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
