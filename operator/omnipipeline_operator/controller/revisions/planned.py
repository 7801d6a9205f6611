"""The consequences of one spec and the pins of its pipeline.

Here: one value, and the goal of the roll-out in it. Not here: planning (the contract's `planning`), the children
(`desired.children`). Made by `reconciling`, read by it and by `reporting`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from omnipipeline_operator.changes.deciding.canary import Canary
from omnipipeline_operator.changes.deciding.rollout import DesiredUnit, Goal, UnitRevision
from omnipipeline_operator.changes.deciding.scaling import Scaling
from omnipipeline_operator.controller.revisions.pinning import PinnedChoices
from omnipipeline_operator.desired import children
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.plan import PipelinePlan, PipelineRevision


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A spec, its plan, and the children that it asks for."""

    spec: PipelineConfig
    plan: PipelinePlan
    goal: Goal
    pins: PinnedChoices
    desired: children.Children
    #: Kinds that the cluster lacks -> the API server's refusal; no child of these is in ``desired``.
    lacking: Mapping[str, str] = {}
    note: str | None = None  #: A remark for the author on what the cluster lacks.
    scaling: Scaling = Scaling()  #: The decision that is in ``goal`` already, once coordinators were asked.
    canary: Canary | None = None  #: The revision that is tried, or was taken back; in ``goal`` already.
    back_to: PipelineRevision | None = (
        None  #: The revision that serves again, since the spec's was taken back, or waits.
    )

    @property
    def target(self) -> PipelineRevision:
        """The pipeline revision that the roll leads to."""
        return self.back_to or self.plan.current

    @property
    def near(self) -> dict[UnitRevision, tuple[UnitRevision, ...]]:
        """The unit revisions of the goal -> those that their pods prefer to be near."""
        goal = {unit: (unit, one.revision) for unit, one in self.goal.units.items()}
        wished = {unit.name: unit.pod.get("placement", {}).get("near", ()) for unit in self.plan.units}
        return {key: tuple(goal[one] for one in wished.get(unit, ()) if one in goal) for unit, key in goal.items()}


def rollout_goal(spec: PipelineConfig, plan: PipelinePlan) -> Goal:
    """The goal of the roll-out of this spec."""
    units = {unit.name: DesiredUnit(revision=unit.revision, replicas=plan.replicas[unit.name]) for unit in plan.units}
    return Goal(
        units=units,
        coordinator=DesiredUnit(revision=plan.coordinator.revision, replicas=children.coordinators(spec)),
        strategy=spec.rollout.strategy,
        max_surge=spec.rollout.max_surge,
        max_unavailable=spec.rollout.max_unavailable,
        paused=spec.rollout.paused,
        suspended=spec.suspend,
        history=spec.rollout.revision_history_limit,
    )
