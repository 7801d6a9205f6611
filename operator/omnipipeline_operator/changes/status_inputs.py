"""What is known of a pipeline at one moment, from which its status follows; and simple questions about it. Pure.

Here: no judgement. Not here: conditions (`assessment`), the status itself (`status`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from omnipipeline_operator.changes.diagnostics import Diagnostic
from omnipipeline_operator.changes.rollout import Decision, Goal
from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_operator.desired.pods import COORDINATOR_START_S
from omnipipeline_spec.types.plan import PipelinePlan, PipelineRevision
from omnipipeline_spec.types.pods import COORDINATOR


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a spec is not carried out."""

    reason: str  #: InvalidSpec, NotAllowed, PlanningFailed, NameConflict, ChildRefused, QuotaExceeded.
    message: str


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """How the pipeline is reached."""

    url: str
    external: str | None = None
    pending: str | None = None  #: What has no address yet.


class StatusInputs(msgspec.Struct, frozen=True, kw_only=True):
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
    refusal: Refusal | None = None  #: Such as a name that is taken; the other inputs still hold.
    progress_deadline_s: float = 3600.0
    fetching: Diagnostic | None = None  #: Why units are waiting for the model; None: they are not.
    image: str = ""  #: Of the desired revision.
    images: Mapping[str, str] = {}  #: Of the others.
    missing: Sequence[Diagnostic] = ()  #: Missing references, and kubelet warnings about pods that do not start.
    note: str | None = None  #: A remark for the author in the Accepted condition.


def is_complete(revision: PipelineRevision, observed: Sequence[Workload]) -> bool:
    """Whether requests can be bound to this revision: each unit has a ready pod."""
    ready = {(each.unit, each.revision) for each in observed if each.ready}
    return ready.issuperset(revision.units.items())


def is_available(entries: Sequence[PipelineRevision], observed: Sequence[Workload]) -> bool:
    """Whether requests are answered: a coordinator is ready, and one revision is complete."""
    return coordinator_is_ready(observed) and any(is_complete(each, observed) for each in entries)


def desired_workloads(inputs: StatusInputs) -> Iterator[tuple[Workload, float]]:
    """The workloads of desired revisions, each with its startup deadline."""
    deadlines = {unit.name: unit.startup_deadline_s for unit in inputs.plan.units}
    for each in inputs.observed:
        desired = inputs.goal.coordinator if each.unit == COORDINATOR else inputs.goal.units.get(each.unit)
        if desired is not None and desired.revision == each.revision:
            yield each, deadlines.get(each.unit, COORDINATOR_START_S)


def is_short(inputs: StatusInputs) -> bool:
    units = [(name, one) for name, one in inputs.goal.units.items()] + [(COORDINATOR, inputs.goal.coordinator)]
    return any(workload_ready(inputs, name, one.revision) < one.replicas for name, one in units)


def workload_ready(inputs: StatusInputs, unit: str, revision: str) -> int:
    return sum(each.ready for each in inputs.observed if (each.unit, each.revision) == (unit, revision))


def old_revision_serves(inputs: StatusInputs) -> bool:
    """Whether pods of another revision still take new requests; draining ones do not."""
    desired = {name: one.revision for name, one in inputs.goal.units.items()} | {
        COORDINATOR: inputs.goal.coordinator.revision
    }
    return any(desired.get(each.unit) != each.revision and (each.replicas or each.ready) for each in inputs.observed)


def coordinator_is_ready(observed: Sequence[Workload], inputs: StatusInputs | None = None) -> bool:
    """Whether a coordinator is ready; with ``inputs``: one of the desired revision."""
    revision = inputs.goal.coordinator.revision if inputs else None
    return any(each.ready and revision in (None, each.revision) for each in observed if each.unit == COORDINATOR)
