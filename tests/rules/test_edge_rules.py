"""The schema of declared edges: a process and the coordinator derive the same one, and it tells edges apart."""

from __future__ import annotations

import msgspec
import pytest

from omnipipeline_spec import planning
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from omnipipeline_spec.types.plan import PipelinePlan
from stage_runtime.rules.graph import edges


def planned(**changes: dict[str, object]) -> PipelinePlan:
    """split streams to shout and gives it its result; count joins both."""
    fields: dict[str, dict[str, object]] = {
        "split": {"next": ["shout", "count"], "stream_to": ["shout"], "process": "front"},
        "shout": {"next": ["count"], "process": "voice"},
        "count": {"wait_for": ["split", "shout"], "merge_fn": "x:y", "terminal": True, "process": "voice"},
    }
    stages = [
        StageConfig(name=name, **{"factory": "x:y", **own, **changes.get(name, {})})  # type: ignore[arg-type]
        for name, own in fields.items()
    ]
    return planning.plan(PipelineConfig(name="p", stages=stages))


def declared(plan: PipelinePlan) -> dict[str, str]:
    """group -> what its process says."""
    return {
        group.name: edges.of_process([stage for stage in unit.stages if stage.name in group.stages])
        for unit in plan.units
        for group in unit.groups
    }


def test_a_process_and_the_coordinator_derive_the_same_schema() -> None:
    plan = planned()
    assert declared(plan) == edges.of_revision(plan.current)
    assert len(set(declared(plan).values())) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"split": {"stream_to": []}},
        {"split": {"next": ["count"]}, "count": {"wait_for": ["split"]}, "shout": {"next": [], "terminal": True}},
    ],
    ids=["a stream less", "an edge less, a terminal more"],
)
def test_an_edge_more_or_less_is_another_schema_at_both_its_ends(changes: dict[str, dict[str, object]]) -> None:
    before, after = declared(planned()), declared(planned(**changes))
    assert {group for group in before if before[group] != after[group]} == {"front", "voice"}


def test_what_is_no_edge_leaves_the_schema_alone() -> None:
    """Another factory is another unit revision, and nothing that a neighbour could misread."""
    plan = planned()
    other = planned(shout={"factory": "other:one", "factory_args": {"times": 3}})
    assert plan.current.units != other.current.units
    assert declared(plan) == declared(other)


def test_the_order_in_which_a_file_lists_edges_means_nothing() -> None:
    plan = planned()
    turned = msgspec.structs.replace(plan.current, edges=plan.current.edges[::-1])
    assert edges.of_revision(turned) == declared(plan)
