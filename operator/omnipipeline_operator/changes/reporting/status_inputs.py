"""The known facts of a pipeline at one moment, from which its status follows; and simple questions about them. Pure.

Here: no judgement. Not here: conditions (`assessment`), the status itself (`status`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from omnipipeline_operator.changes.deciding import required
from omnipipeline_operator.changes.deciding.canary import Canary
from omnipipeline_operator.changes.deciding.gangs import Yielded
from omnipipeline_operator.changes.deciding.rollout import Decision, Goal
from omnipipeline_operator.changes.reporting.diagnostics import Diagnostic
from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_operator.desired.pod_templates.pods import COORDINATOR_START_S, PRE_STOP_S
from omnipipeline_spec.types.plan import PipelinePlan, PipelineRevision
from omnipipeline_spec.types.pods import COORDINATOR

ROUNDED_S: Final = 1.0  # timestamps have whole seconds


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a spec is not carried out."""

    reason: str  #: InvalidSpec, NotAllowed, PlanningFailed, NameConflict, ChildRefused, QuotaExceeded.
    message: str


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """How the pipeline is reached."""

    url: str
    external: str | None = None
    pending: str | None = None  #: Says what is not there yet, or not accepted.
    reason: str = "AddressPending"  #: The reason of ``pending``; also GatewayAPIMissing, RouteRefused, ServiceMissing.


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
    image: str = ""  #: The image of the desired revision.
    images: Mapping[str, str] = {}  #: Images of the others.
    missing: Sequence[Diagnostic] = ()  #: Missing references, and kubelet warnings about pods that do not start.
    #: Whether all coordinators that answered bind new requests to the desired revision alone; None: none answered.
    switched: bool | None = None
    scaling: Mapping[str, str] = {}  #: Why the load set the replicas last, by unit.
    canary: Canary | None = None  #: The revision that is tried, or was taken back.
    target: PipelineRevision | None = None  #: That the roll leads to; None: the plan's.
    yielded: Yielded | None = None  #: That it has let go of its GPUs since it served last.
    note: str | None = None  #: A remark for the author in the Accepted condition.

    @property
    def wanted(self) -> PipelineRevision:
        """The pipeline revision that the roll leads to."""
        return self.target or self.plan.current


def is_complete(revision: PipelineRevision, observed: Sequence[Workload], asleep: Collection[str] = ()) -> bool:
    """Whether requests can be bound to this revision: each unit that they need has a ready pod."""
    ready = {(each.unit, each.revision) for each in observed if each.ready}
    return ready.issuperset(required.units(revision, asleep).items())


def is_available(
    entries: Sequence[PipelineRevision], observed: Sequence[Workload], asleep: Collection[str] = ()
) -> bool:
    """Whether requests are answered: a coordinator is ready, and one revision is complete."""
    return coordinator_is_ready(observed) and any(is_complete(each, observed, asleep) for each in entries)


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


def old_revision_serves(inputs: StatusInputs, now: float) -> bool:
    """Whether a new request may still meet another revision.

    A pod takes requests until it drains, `PRE_STOP_S` after it was told to end; one of a stage only as long as a
    coordinator binds to it.
    """
    if inputs.switched is False:
        return True
    for each in outdated(inputs):
        if each.replicas or each.ready:
            return True
        if each.unit == COORDINATOR or inputs.switched is None:
            if any(ends > now for ends in _ends_of_taking(each)):
                return True
    return False


def outdated(inputs: StatusInputs) -> list[Workload]:
    """The workloads that are not of the desired revision."""
    desired = {name: one.revision for name, one in inputs.goal.units.items()}
    desired[COORDINATOR] = inputs.goal.coordinator.revision
    return [each for each in inputs.observed if desired.get(each.unit) != each.revision]


def ends_of_taking(inputs: StatusInputs) -> list[float]:
    """When each old pod that was told to end takes no more requests."""
    return [ends for each in outdated(inputs) for ends in _ends_of_taking(each)]


def _ends_of_taking(workload: Workload) -> list[float]:
    since = [pod.leaving_since for pod in workload.awaited if pod.leaving_since is not None]
    return [each + PRE_STOP_S + ROUNDED_S for each in since]


def coordinator_is_ready(observed: Sequence[Workload], inputs: StatusInputs | None = None) -> bool:
    """Whether a coordinator is ready; with ``inputs``: one of the desired revision."""
    revision = inputs.goal.coordinator.revision if inputs else None
    return any(each.ready and revision in (None, each.revision) for each in observed if each.unit == COORDINATOR)
