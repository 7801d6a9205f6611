"""The resource's status: a summary of the observed workloads, for people and for ``kubectl wait``.

Here: units, counts, revisions. Not here: conditions (`assessment`), writing it (`cluster.applying`). Pure: equal inputs
give an equal status, so that nothing is written when nothing has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from omnipipeline_operator.changes import conditions
from omnipipeline_operator.changes.conditions import ObservedCondition, condition
from omnipipeline_operator.changes.deciding import canary
from omnipipeline_operator.changes.deciding.gangs import Yielded
from omnipipeline_operator.changes.reporting.assessment import conditions_of, diagnostics_of, still
from omnipipeline_operator.changes.reporting.diagnostics import Diagnostic
from omnipipeline_operator.changes.reporting.status_inputs import Refusal, StatusInputs, is_complete
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


def asleep(before: Mapping[str, Any]) -> frozenset[str]:
    """The units that had no pod until a request needs them, as the status reports them; none while suspended."""
    units = before.get("units", ())
    return frozenset(str(each["name"]) for each in units if each.get("scaling") and not each["replicas"])


def summarise(
    inputs: StatusInputs, before: Mapping[str, Any], *, generation: int, now: float
) -> tuple[dict[str, Any], list[ObservedCondition]]:
    """The whole status, and its conditions on their own."""
    found = diagnostics_of(inputs, before, now)
    reported = conditions_of(inputs, found, now)
    units = [_unit(inputs, name, found.get(name)) for name in (*inputs.goal.units, COORDINATOR)]
    ready = {each["name"]: each["ready"] for each in units}
    stages = [(stage.name, unit.name) for unit in inputs.plan.units for stage in unit.stages]
    endpoint = {"url": inputs.exposure.url, "external": inputs.exposure.external}
    serving = serving_revision(inputs, before)
    status = {
        "observedGeneration": generation,
        "endpoint": _set(endpoint),
        "stagesReady": f"{sum(ready[unit] > 0 for _, unit in stages)}/{len(stages)}",
        "gpus": _gpus(inputs),
        "revision": _revision(inputs, serving),
        "units": units,
        "conditions": conditions.merged(reported, before.get("conditions", ()), generation=generation, now=now),
    }
    if inputs.canary is not None:
        status["canary"] = canary.recorded(inputs.canary)
    if inputs.yielded is not None:
        status["yielded"] = _yielded(inputs.yielded)
    return status, reported


#: Fields that follow pods one by one while a pipeline starts.
_COUNTS: Final = frozenset({"ready", "updated", "registered", "terminating", "stagesReady", "message"})


def differs_in_counts_alone(status: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether a later write may join this change with the next: only counts and messages have changed."""
    return bool(_without_counts(status) == _without_counts(before))


def _without_counts(value: Any) -> Any:
    match value:
        case Mapping():
            return {key: _without_counts(item) for key, item in value.items() if key not in _COUNTS}
        case list() | tuple():
            return [_without_counts(each) for each in value]
        case _:
            return value


def _yielded(yielded: Yielded) -> dict[str, Any]:
    since = None if yielded.since is None else conditions.rfc3339(yielded.since)
    counts = {"gpus": yielded.gpus, "tries": yielded.tries, "failed": yielded.failed}
    counts |= {"given": yielded.given, "priority": yielded.priority} if yielded.given or yielded.priority else {}
    return _set({"since": since, "to": yielded.to or None, "turn": yielded.turn or None, **counts})


def serving_revision(inputs: StatusInputs, before: Mapping[str, Any]) -> str | None:
    """The current revision: the new one when the roll has finished, until then the one that served before."""
    update = inputs.wanted
    was = before.get("revision", {}).get("current")
    known = {each.revision: each for each in inputs.entries}
    complete_now = is_complete(update, inputs.observed, inputs.goal.asleep)
    if complete_now and (not inputs.decision.rolling or inputs.decision.complete == 1):
        return update.revision
    if was in known:
        return str(was)
    complete = [each.revision for each in inputs.entries if is_complete(each, inputs.observed, inputs.goal.asleep)]
    return complete[0] if complete else None


# --- counts -----------------------------------------------------------------------------------------------------


def _unit(inputs: StatusInputs, name: str, diagnostic: Diagnostic | None) -> dict[str, Any]:
    desired = inputs.goal.coordinator if name == COORDINATOR else inputs.goal.units[name]
    own = [each for each in inputs.observed if each.unit == name]
    current = next((each for each in own if each.revision == desired.revision), None)
    ready = sum(each.ready for each in own)
    unit = {
        "name": name,
        "workload": current.name if current else None,
        "replicas": 0 if inputs.goal.suspended else desired.replicas,
        "ready": ready,
        "updated": sum(not pod.terminating for pod in current.present) if current else 0,
        "registered": _registered(inputs, own) if name != COORDINATOR else ready,
        "revision": desired.revision,
        "scaling": inputs.scaling.get(name),
    }
    if diagnostic is not None:
        unit |= {"reason": conditions.word(diagnostic.reason), "message": diagnostic.message[: conditions.MAX_MESSAGE]}
    elif current is not None and current.drifted:
        unit |= {"reason": "TemplateEdited", "message": f"{current.name} was edited by hand; `restart` makes a new one"}
    return _set(unit)


def _revision(inputs: StatusInputs, serving: str | None) -> dict[str, Any]:
    """Each pipeline revision with its image."""
    update = inputs.plan.current.revision
    images = {**inputs.images, update: inputs.image}
    revisions = {
        "current": serving,
        "currentImage": images.get(serving or ""),
        "update": update,
        "updateImage": inputs.image,
    }
    return {key: value for key, value in revisions.items() if value}


def _registered(inputs: StatusInputs, own: Sequence[Workload]) -> int:
    if inputs.registered is None:
        return sum(each.ready for each in own)
    return sum(inputs.registered.get((each.unit, each.revision), 0) for each in own)


def _gpus(inputs: StatusInputs) -> dict[str, int]:
    desired = {unit.name: len(unit.gpu_ids) for unit in inputs.plan.units}
    leaving = [(each.gpus, pod) for each in inputs.observed for pod in each.present if pod.terminating]
    return {
        "requested": sum(count * inputs.goal.units[name].replicas for name, count in desired.items()),
        "ready": sum(each.gpus * each.ready for each in inputs.observed),
        "terminating": sum(count for count, _ in leaving),
    }


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
