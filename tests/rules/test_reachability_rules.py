"""The stages that a request may meet: whatever hooks decide, no request meets another one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omnipipeline_spec.types.plan import PipelineRevision
from stage_runtime.rules.graph import reachability

NAMES = [f"s{number}" for number in range(8)]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[PipelineRevision, list[str]]:
    """A graph without cycles, all of it reached from s0, and some of its terminals."""
    count = draw(st.integers(2, len(NAMES)))
    edges = set()
    for target in range(1, count):
        for source in draw(st.sets(st.integers(0, target - 1), min_size=1, max_size=3)):
            edges.add((NAMES[source], NAMES[target], draw(st.sampled_from(["normal", "stream"]))))
    terminals = [name for name in NAMES[:count] if not any(source == name for source, _, _ in edges)]
    revision = PipelineRevision(
        revision="r",
        units={"u": "1"},
        groups={"g": "u"},
        stages=dict.fromkeys(NAMES[:count], "g"),
        entry=NAMES[0],
        terminals=tuple(terminals),
        edges=tuple(sorted(edges)),
    )
    return revision, draw(st.lists(st.sampled_from(terminals), min_size=1, unique=True))


def walks(revision: PipelineRevision, at: str) -> list[list[str]]:
    """Every way from ``at`` to a terminal that some choice of routes takes."""
    after = [target for source, target, _ in revision.edges if source == at]
    return [[at, *rest] for target in after for rest in walks(revision, target)] or [[at]]


@given(graphs())
def test_every_way_to_a_wanted_terminal_leads_through_the_stages_that_are_met_and_no_other_stage_does(
    drawn: tuple[PipelineRevision, list[str]],
) -> None:
    revision, wanted = drawn
    on_the_way = {stage for way in walks(revision, revision.entry) if way[-1] in wanted for stage in way}
    assert reachability.stages(revision, wanted) == on_the_way


@given(graphs())
def test_a_stage_that_is_met_has_all_its_sources_met(drawn: tuple[PipelineRevision, list[str]]) -> None:
    """Or a fan-in would wait for a source that gets nothing."""
    revision, wanted = drawn
    met = reachability.stages(revision, wanted)
    assert {source for source, target, _ in revision.edges if target in met} <= met
