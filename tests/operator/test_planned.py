"""The replicas that are written for a spec: through the goal of the roll-out, as a reconcile goes."""

from __future__ import annotations

from typing import Any

import pytest

from omnipipeline_operator.changes.deciding import rollout
from omnipipeline_operator.controller.revisions.planned import rollout_goal
from omnipipeline_spec import loading, planning

STAGES = [
    {"name": "first", "process": "first", "factory": "m:first", "next": ["last"]},
    {"name": "last", "process": "last", "factory": "m:last", "terminal": True},
]


def replicas(**spec: Any) -> dict[str, int]:
    """unit -> replicas of a new pipeline with this spec."""
    head = {"apiVersion": "omnipipeline.dev/v1alpha1", "kind": "OmniPipeline", "metadata": {"name": "duo"}}
    pipeline = loading.from_resource({**head, "spec": {"stages": STAGES, **spec}}).spec
    goal = rollout_goal(pipeline, planning.plan(pipeline, name="duo"))
    return {unit: count for (unit, _), count in rollout.decide(goal, [], {}).replicas.items()}


@pytest.mark.parametrize(
    "spec, wanted",
    [
        ({}, {"first": 1, "last": 1, "coordinator": 2}),
        ({"coordinator": {"replicas": 1}}, {"first": 1, "last": 1, "coordinator": 1}),
        ({"coordinator": {"replicas": 3}}, {"first": 1, "last": 1, "coordinator": 3}),
        (
            {"coordinator": {"replicas": 2}, "processGroups": [{"name": "last", "replicas": 4}]},
            {"first": 1, "last": 4, "coordinator": 2},
        ),
        ({"coordinator": {"replicas": 3}, "suspend": True}, {"first": 0, "last": 0, "coordinator": 0}),
    ],
)
def test_a_new_pipeline_gets_the_replicas_of_its_spec_the_coordinators_too(
    spec: dict[str, Any], wanted: dict[str, int]
) -> None:
    assert replicas(**spec) == wanted
