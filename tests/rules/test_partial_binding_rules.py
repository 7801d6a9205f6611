"""A request is bound while stages are away: to all that it certainly meets, and nothing behind what is away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnipipeline_spec.types.plan import PipelineRevision
from stage_runtime.rules.binding.instances import Unbindable
from stage_runtime.rules.binding.membership_state import MembershipState
from stage_runtime.rules.graph import edges, partial_binding, reachability
from stage_runtime.wire.parts import Member
from tests.rules.test_reachability_rules import graphs

GROUPS = ("front", "listen", "language", "voice")
#: `take` chooses: `listen` gives speech at once, `chat` asks `language` first.
TALK = PipelineRevision(
    revision="talk",
    units=dict.fromkeys(GROUPS, "1"),
    groups={name: name for name in GROUPS},
    stages={"take": "front", "listen": "listen", "chat": "front", "language": "language", "speak": "voice"},
    entry="take",
    terminals=("speak",),
    edges=(
        ("take", "listen", "normal"),
        ("take", "chat", "normal"),
        ("listen", "speak", "normal"),
        ("chat", "language", "normal"),
        ("language", "speak", "normal"),
    ),
    routing=("take",),
)
ALL = frozenset(TALK.stages)


def talk(*groups: str, revision: PipelineRevision = TALK) -> MembershipState:
    made = MembershipState((revision,))
    schemas = edges.of_revision(revision)
    for group in groups:
        made.join(Member(group, group, group, "1", group, {}, (), True), schemas[group])
    return made


@pytest.mark.parametrize(
    ("missing", "required", "bound"),
    [
        ([], [], ALL),
        (["language"], [], {"take", "listen", "speak"}),
        (["chat"], [], {"take", "listen", "speak"}),
        (["listen"], [], {"take", "chat", "language", "speak"}),
        (["language"], ["chat"], None),
        (["language"], ["listen"], {"take", "listen", "speak"}),
        (["listen", "language"], [], None),
        (["speak"], [], None),
        (["take"], [], None),
    ],
)
def test_a_request_is_bound_to_what_it_meets_without_the_stages_that_are_away(
    missing: list[str], required: list[str], bound: set[str] | None
) -> None:
    assert partial_binding.stages(TALK, ["speak"], missing=missing, required=required) == bound


def test_only_stages_that_no_route_leads_past_are_certain() -> None:
    assert partial_binding.certain(TALK, ["speak"]) == {"take", "speak"}
    assert partial_binding.certain(TALK, ["speak"], ["chat"]) == {"take", "chat", "language", "speak"}
    assert partial_binding.of_every_request(TALK, chosen=False) == {"take", "speak"}


def test_a_fan_in_without_a_hook_needs_all_its_sources_and_a_stream_its_target() -> None:
    joined = PipelineRevision(
        **{name: getattr(TALK, name) for name in TALK.__struct_fields__ if name != "joining"}, joining=("speak",)
    )
    assert partial_binding.stages(joined, ["speak"], missing=["language"]) is None
    edge = ("listen", "language", "stream")
    streamed = PipelineRevision(
        **{name: getattr(TALK, name) for name in TALK.__struct_fields__ if name != "edges"}, edges=(*TALK.edges, edge)
    )
    assert partial_binding.stages(streamed, ["speak"], missing=["language"]) is None


@given(graphs(), st.data())
def test_a_request_is_never_bound_to_a_stage_that_nothing_reaches(
    drawn: tuple[PipelineRevision, list[str]], data: st.DataObject
) -> None:
    revision, wanted = drawn
    names = st.sampled_from(sorted(revision.stages))
    revision = PipelineRevision(
        **{name: getattr(revision, name) for name in revision.__struct_fields__ if name != "routing"},
        routing=tuple(data.draw(st.sets(names))),
    )
    missing = data.draw(st.sets(names))
    bound = partial_binding.stages(revision, wanted, missing=missing)
    met = reachability.stages(revision, wanted)
    if not missing & met:
        assert bound == met
    if bound is not None:
        assert bound <= met - missing and {revision.entry, *wanted} <= bound
        for stage in bound - {revision.entry}:
            assert any(target == stage and source in bound for source, target, _ in revision.edges)
        for source, target, _ in revision.edges:
            if source in bound and target in met and source not in revision.routing:
                assert target in bound
        assert partial_binding.certain(revision, wanted) <= bound


def test_instances_of_what_is_there_are_bound_and_what_is_away_is_named() -> None:
    made = talk("front", "listen", "voice")
    revision, bindings = made.bind()
    assert bindings == {"take": "front", "listen": "listen", "speak": "voice"}
    assert made.away(revision, bindings) == ("chat", "language")
    assert not made.complete() and made.missing_groups() == ["language"] and made.lacks(None) == [[]]
    with pytest.raises(Unbindable) as caught:
        made.bind(required={"chat"})
    assert caught.value.groups == ("language",)
    made.join(
        Member("language", "language", "language", "1", "language", {}, (), True), edges.of_revision(TALK)["language"]
    )
    revision, bindings = made.bind()
    assert bindings.keys() == ALL and made.away(revision, bindings) == ()


def test_where_all_branches_are_away_all_are_named() -> None:
    with pytest.raises(Unbindable) as caught:
        talk("front", "voice").bind()
    assert caught.value.groups == ("listen", "language")


def test_a_revision_that_has_all_is_taken_before_one_that_lacks_a_stage() -> None:
    newer = PipelineRevision(
        **{name: getattr(TALK, name) for name in TALK.__struct_fields__ if name not in ("revision", "units", "groups")},
        revision="newer",
        units={**TALK.units, "more": "2"},
        groups={**TALK.groups, "language": "more"},
    )
    made = talk("front", "listen", "language", "voice")
    made.update((TALK, newer))
    assert {made.bind()[0].revision for _ in range(4)} == {"talk"}
