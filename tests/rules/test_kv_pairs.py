"""Prefill instances: bound to by load and within one revision, needed by no request."""

from __future__ import annotations

from collections import Counter

import msgspec

from omnipipeline_spec import planning
from omnipipeline_spec.loading import from_resource
from omnipipeline_spec.types.plan import PipelinePlan, PipelineRevision
from omnipipeline_spec.types.resource import API_VERSION, KIND
from stage_runtime.rules.binding.membership_state import MembershipState
from stage_runtime.rules.graph import edges, kvpairs, needed, partial_binding, reachability
from stage_runtime.wire.parts import Member


def planned() -> PipelinePlan:
    """take → think (prefill apart) → say."""
    stages = [
        {"name": "take", "process": "front", "factory": "m:f", "next": ["think"]},
        {
            "name": "think",
            "process": "thinker",
            "factory": "m:f",
            "next": ["say"],
            "disaggregation": {"prefill": {"process": "apart"}},
        },
        {"name": "say", "process": "back", "factory": "m:f", "terminal": True},
    ]
    resource = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "p"}, "spec": {"stages": stages}}
    return planning.plan(from_resource(resource).spec)


PLAN = planned()
CURRENT = PLAN.current
#: Prefill and decode were rolled; the rest stands in both revisions.
NEXT = msgspec.structs.replace(CURRENT, revision="next", units={**CURRENT.units, "thinker": "t2", "apart": "p2"})
SCHEMAS = edges.of_revision(CURRENT)


def member(incarnation: str, group: str, unit_revision: str = "") -> Member:
    return Member(incarnation, group, group, unit_revision or CURRENT.units[group], incarnation, {}, (), True)


def membership(*members: Member, revisions: tuple[PipelineRevision, ...] = (CURRENT,)) -> MembershipState:
    made = MembershipState(revisions)
    for one in members:
        made.join(one, SCHEMAS[one.group])
    return made


REST = (member("f", "front"), member("d", "thinker"), member("b", "back"))


def test_a_pair_of_processes_derives_the_coordinators_schema() -> None:
    declared = {
        group.name: edges.of_process([stage for stage in unit.stages if stage.name in group.stages])
        for unit in PLAN.units
        for group in unit.groups
    }
    assert declared == SCHEMAS


def test_a_request_meets_and_needs_no_prefill_stage() -> None:
    assert kvpairs.served(CURRENT) == {"take": "front", "think": "thinker", "say": "back"}
    assert reachability.stages(CURRENT, ["say"]) == {"take", "think", "say"}
    assert partial_binding.of_every_request(CURRENT, chosen=False) == {"take", "think", "say"}
    assert partial_binding.of_every_request(CURRENT, chosen=True) == {"take", "think", "say"}
    assert needed.stages(CURRENT.edges, {"say"}, ()) == {"take", "think", "say"}


def test_without_prefill_the_pipeline_is_complete_and_binds_none() -> None:
    made = membership(*REST)
    assert (made.complete(), made.lacking(), made.missing()) == (True, [], set())
    for terminals in (None, ["say"]):
        assert made.bind(terminals=terminals)[1] == {"take": "f", "think": "d", "say": "b"}


def test_prefill_alone_is_not_complete() -> None:
    made = membership(member("p", "apart"))
    assert not made.complete()
    assert made.lacking() == ["front", "thinker", "back"]


def test_requests_are_shared_among_prefill_instances_by_load() -> None:
    made = membership(*REST, *(member(f"p{n}", "apart") for n in range(3)))
    bound = [made.bind()[1] for _ in range(9)]
    assert Counter(one["think-prefill"] for one in bound) == {"p0": 3, "p1": 3, "p2": 3}
    for one in bound:
        if one["think-prefill"] == "p1":
            made.unbind(one)
    assert {made.bind()[1]["think-prefill"] for _ in range(3)} == {"p1"}


def test_load_is_given_back_when_a_request_ends() -> None:
    made = membership(*REST, member("p", "apart"))
    made.unbind(made.bind()[1])
    assert made.instances["p"].bound == 0


def test_a_prefill_instance_that_is_draining_loading_or_avoided_is_not_bound() -> None:
    made = membership(*REST, member("p", "apart"))
    assert "think-prefill" not in made.bind(avoid=["p"])[1]
    assert "think-prefill" not in made.bind(exclude=frozenset(["p"]))[1]
    made.mark("p", ready=False)
    assert "think-prefill" not in made.bind()[1]
    made.mark("p", ready=True, draining=True)
    assert "think-prefill" not in made.bind()[1]
    made.mark("p", draining=False)
    assert made.bind()[1]["think-prefill"] == "p"


def test_no_pair_spans_two_revisions() -> None:
    rolled = (member("d2", "thinker", "t2"), member("p2", "apart", "p2"))
    made = membership(*REST, member("p", "apart"), *rolled, revisions=(CURRENT, NEXT))
    pairs = {(one["think"], one["think-prefill"]) for _, one in (made.bind() for _ in range(20))}
    assert pairs == {("d", "p"), ("d2", "p2")}
    made.leave("p")
    pairs_left = {(one["think"], one.get("think-prefill")) for _, one in (made.bind() for _ in range(20))}
    assert pairs_left == {("d", None), ("d2", "p2")}


def test_a_large_prefill_group_costs_a_few_comparisons_and_is_used_whole() -> None:
    made = membership(*REST, *(member(f"p{n}", "apart") for n in range(40)))
    assert len({made.bind()[1]["think-prefill"] for _ in range(400)}) == 40


def test_an_instance_is_spared_only_as_prefill() -> None:
    bindings = {"take": "f", "think": "d", "think-prefill": "p"}
    assert kvpairs.prefills_alone(CURRENT.edges, bindings, "p")
    assert not kvpairs.prefills_alone(CURRENT.edges, bindings, "d")
    assert not kvpairs.prefills_alone(CURRENT.edges, bindings, "gone")
    assert not kvpairs.prefills_alone(CURRENT.edges, {**bindings, "take": "p"}, "p")
