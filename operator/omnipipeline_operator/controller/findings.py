"""The facts that the writes of one reconcile follow from, and the state that they lead to. Pure.

Made by `reconciling`, which writes the state; `reporting` reads the facts again beside the snapshot after the writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from omnipipeline_operator.changes.deciding import nearness, rollout
from omnipipeline_operator.changes.deciding.rollout import UnitRevision
from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_operator.cluster.status_client import CoordinatorStatus
from omnipipeline_operator.controller.observing import coordinators
from omnipipeline_operator.controller.observing.gpu_rivals import NO_VERDICT, Verdict
from omnipipeline_operator.controller.observing.missing import MissingReferences, retry_at
from omnipipeline_operator.controller.observing.snapshots import Snapshot
from omnipipeline_operator.controller.revisions import canaries
from omnipipeline_operator.controller.revisions.planned import Planned
from omnipipeline_operator.controller.writing import DesiredState
from omnipipeline_spec import scaling


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline before the writes of a reconcile."""

    planned: Planned  #: The decisions on its replicas and on its canary are in its goal.
    snapshot: Snapshot
    statuses: Sequence[CoordinatorStatus]
    serving: Mapping[str, str]  #: Unit -> its revision in the pipeline revision that serves.
    decision: rollout.Decision
    missing: MissingReferences = MissingReferences()
    gpus: Verdict = NO_VERDICT
    now: float

    @property
    def observed(self) -> Sequence[Workload]:
        return self.snapshot.workloads

    @property
    def held(self) -> frozenset[UnitRevision]:
        """The unit revisions that get no pods yet."""
        return self.missing.held | self.gpus.held

    @property
    def all_know_target(self) -> bool:
        """Whether all coordinators know the revision that the roll leads to."""
        return all(self.planned.target.revision in each.revisions for each in self.statuses)


def desired_state(found: Findings, aside: Sequence[str]) -> DesiredState:
    """aside: addresses of pods that were taken out of their unit."""
    planned, observed, statuses, held = found.planned, found.observed, found.statuses, found.held
    update, tried = planned.target, planned.canary
    taken_back = tried.revision if tried is not None and tried.is_away else None
    asleep = planned.goal.asleep
    return DesiredState(
        desired=planned.desired,
        decision=found.decision,
        entries=rollout.entries(
            update,
            [each for each in found.snapshot.entries() if each.revision != taken_back],
            observed,
            kept=found.decision.replicas if coordinators.have_complete(statuses, update, asleep) else None,
            asleep=asleep,
        ),
        pins=planned.pins,
        image=planned.pins.images.get(update.revision, planned.pins.image) if planned.back_to else planned.pins.image,
        canary=canaries.share(tried),
        held=held,
        waiting=nearness.waiting(planned.near, found.decision.replicas, observed, held),
        prefetch_held=found.missing.prefetch_held,
        aside=aside,
        retried=[each for each in observed if each.refused is not None and retry_at(each, found.now) <= found.now],
        now=found.now,
        profiling=planned.spec.profiling,
        on_demand=coordinators.expected_groups(planned, observed, statuses, held),
        curve=planned.spec.control.security.mode == "Curve",
        may_shrink=found.all_know_target or planned.goal.suspended,
        lacking=planned.lacking.keys(),
        loads=coordinators.loads(statuses),
    )


def awaits_coordinators(found: Findings, state: DesiredState) -> bool:
    """Whether coordinators have not read all of the state yet: no watch reports when they have."""
    if not found.all_know_target:
        return True
    if len(state.entries) == 1 and coordinators.have_switched(found.statuses, found.planned.target) is False:
        return True
    return bool(found.statuses) and set(state.on_demand) > set(scaling.on_demand(found.planned.plan))
