"""Only instances that stand together in one revision are bound, in proportion, the least loaded."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnipipeline_spec.types.plan import PipelineRevision
from stage_runtime.rules.binding.instances import Unbindable
from stage_runtime.rules.binding.membership_state import MembershipState
from stage_runtime.rules.graph import edges
from stage_runtime.wire.parts import Member

GROUPS = {"front": "u1", "voice": "u2"}
STAGES = {"split": "front", "count": "front", "shout": "voice"}


def revision(name: str, **units: str) -> PipelineRevision:
    return PipelineRevision(
        revision=name,
        units=units,
        groups=GROUPS,
        stages=STAGES,
        entry="split",
        terminals=("shout",),
        edges=(("split", "shout", "normal"),),
    )


OLD = revision("old", u1="a1", u2="b1")
NEW = revision("new", u1="a1", u2="b2")


SCHEMAS = edges.of_revision(OLD)


def member(incarnation: str, group: str, unit_revision: str, *, ready: bool = True, endpoint: str = "") -> Member:
    return Member(incarnation, group, GROUPS[group], unit_revision, endpoint or incarnation, {}, (), ready)


def membership(*members: Member, revisions: tuple[PipelineRevision, ...] = (OLD,)) -> MembershipState:
    made = MembershipState(revisions)
    for one in members:
        made.join(one, SCHEMAS[one.group])
    return made


def test_all_stages_of_a_group_are_bound_to_one_instance() -> None:
    made = membership(member("f1", "front", "a1"), member("f2", "front", "a1"), member("v1", "voice", "b1"))
    for _ in range(10):
        _, bindings = made.bind()
        assert bindings["split"] == bindings["count"]
        assert bindings["shout"] == "v1"


@given(
    st.lists(
        st.tuples(st.sampled_from(["front", "voice"]), st.sampled_from(["a1", "a2", "b1", "b2"]), st.booleans()),
        max_size=12,
    ),
    st.integers(1, 30),
)
def test_what_is_bound_is_ready_and_stands_together_in_one_revision(
    instances: list[tuple[str, str, bool]], count: int
) -> None:
    revisions = (OLD, NEW, revision("newest", u1="a2", u2="b2"))
    made = membership(
        *[member(f"i{n}", group, rev, ready=ready) for n, (group, rev, ready) in enumerate(instances)],
        revisions=revisions,
    )
    for _ in range(count):
        try:
            chosen, bindings = made.bind()
        except Unbindable:
            for one in revisions:
                assert any(
                    not any(group == wanted and rev == one.units[unit] and ready for group, rev, ready in instances)
                    for wanted, unit in one.groups.items()
                )
            return
        for stage, incarnation in bindings.items():
            instance = made.instances[incarnation]
            assert instance.eligible
            assert instance.member.group == STAGES[stage]
            assert instance.member.revision == chosen.units[instance.member.unit]


@pytest.mark.parametrize(("old", "new"), [(1, 1), (2, 1), (3, 1), (1, 3), (2, 0), (0, 2)])
def test_new_requests_are_shared_in_proportion_to_complete_sets_and_evenly(old: int, new: int) -> None:
    made = membership(
        member("f", "front", "a1"),
        *[member(f"f{n}", "front", "a1") for n in range(5)],
        *[member(f"o{n}", "voice", "b1") for n in range(old)],
        *[member(f"n{n}", "voice", "b2") for n in range(new)],
        revisions=(OLD, NEW),
    )
    total = old + new
    order = [made.bind()[0].revision for _ in range(total * 4)]
    for start in range(len(order) - total + 1):  # in every window, not only in the long run
        assert Counter(order[start : start + total]) == Counter({"old": old, "new": new}) - Counter()


def test_a_revision_with_an_incomplete_set_gets_nothing() -> None:
    """A failed new revision never gets traffic: its voice is there, but not ready."""
    made = membership(
        member("f1", "front", "a1"),
        member("v1", "voice", "b1"),
        member("v2", "voice", "b2", ready=False),
        revisions=(OLD, NEW),
    )
    assert {made.bind()[0].revision for _ in range(10)} == {"old"}
    made.mark("v2", ready=True)
    assert {made.bind()[0].revision for _ in range(10)} == {"old", "new"}


def test_the_least_loaded_instance_is_bound_and_what_waits_counts_twice() -> None:
    made = membership(member("f1", "front", "a1"), member("v1", "voice", "b1"), member("v2", "voice", "b1"))
    made.beat("v1", waiting=2, running=0)
    made.beat("v2", waiting=0, running=3)
    assert made.bind()[1]["shout"] == "v2"  # 3 < 4
    made.leave("v1")
    made.join(member("v3", "voice", "b1"), SCHEMAS["voice"])
    made.beat("v3", waiting=1, running=0)
    assert made.bind()[1]["shout"] == "v3"  # 2 < 3 + the one just bound


def test_between_beats_each_binding_counts_so_a_burst_is_spread() -> None:
    made = membership(member("f1", "front", "a1"), *[member(f"v{n}", "voice", "b1") for n in range(4)])
    assert Counter(made.bind()[1]["shout"] for _ in range(40)) == {f"v{n}": 10 for n in range(4)}


def test_a_draining_instance_gets_nothing_new() -> None:
    made = membership(member("f1", "front", "a1"), member("v1", "voice", "b1"), member("v2", "voice", "b1"))
    made.mark("v1", draining=True)
    assert {made.bind()[1]["shout"] for _ in range(5)} == {"v2"}
    made.mark("v2", draining=True)
    with pytest.raises(Unbindable, match="no ready instance of voice"):
        made.bind()


def test_an_instance_that_failed_an_attempt_is_avoided_while_there_is_another() -> None:
    made = membership(member("f1", "front", "a1"), member("v1", "voice", "b1"), member("v2", "voice", "b1"))
    made.beat("v2", waiting=50, running=0)
    assert made.bind(avoid={"v1"})[1]["shout"] == "v2"
    made.leave("v2")
    assert made.bind(avoid={"v1"})[1]["shout"] == "v1"


@pytest.mark.parametrize("voices", [3, 40])
def test_a_session_keeps_its_instances_while_they_are_ready_and_not_overloaded(voices: int) -> None:
    made = membership(
        member("f1", "front", "a1"),
        *(member(f"v{one}", "voice", "b1") for one in range(voices)),
        *(member(f"n{one}", "voice", "b2") for one in range(voices)),
        revisions=(OLD, NEW),
    )
    mine = frozenset({"f1", "v1"})

    def next_turn() -> tuple[str, str]:
        bound, bindings = made.bind(prefer=mine)
        made.unbind(bindings)
        return bound.revision, bindings["shout"]

    assert {next_turn() for _ in range(20)} == {("old", "v1")}  # in a roll, too
    at_once = [made.bind(prefer=mine)[1] for _ in range(4)]
    assert [one["shout"] == "v1" for one in at_once] == [True, True, True, False]  # its load is more than a cache saves
    for bindings in at_once:
        made.unbind(bindings)
    assert next_turn()[1] == "v1"
    assert made.bind(prefer=mine, avoid={"v1"})[1]["shout"] != "v1"  # it failed an earlier attempt
    made.mark("v1", draining=True)
    assert "v1" not in {next_turn()[1] for _ in range(20)}
    made.leave("v1")
    assert "v1" not in {next_turn()[1] for _ in range(20)}


@pytest.mark.parametrize("voices", [2, 40])
def test_an_instance_that_is_excluded_gets_nothing_though_there_is_no_other(voices: int) -> None:
    made = membership(member("f1", "front", "a1"), *(member(f"v{one}", "voice", "b1") for one in range(voices)))
    everyone = {f"v{one}" for one in range(voices)}
    assert made.bind(exclude=everyone - {"v1"}, avoid=everyone)[1]["shout"] == "v1"
    with pytest.raises(Unbindable, match="no ready instance of voice"):
        made.bind(exclude=everyone)
    with pytest.raises(Unbindable, match="no ready instance of front, voice"):
        made.bind(exclude=everyone | {"f1"})


def test_a_revision_that_is_complete_without_the_excluded_gets_the_request() -> None:
    made = membership(
        member("f1", "front", "a1"),
        member("old", "voice", "b1"),
        member("new", "voice", "b2"),
        revisions=(OLD, NEW),
    )
    assert {made.bind(exclude={"new"})[0].revision for _ in range(4)} == {"old"}


def test_another_life_at_the_same_endpoint_proves_the_earlier_one_gone() -> None:
    made = membership(member("v1", "voice", "b1", endpoint="tcp://a:1"))
    assert made.join(member("v1", "voice", "b1", endpoint="tcp://a:1"), SCHEMAS["voice"]) == []
    assert made.join(member("v2", "voice", "b1", endpoint="tcp://a:1"), SCHEMAS["voice"]) == ["v1"]


def test_bindings_that_end_are_given_back_even_of_those_that_left() -> None:
    made = membership(member("f1", "front", "a1"), member("v1", "voice", "b1"))
    _, bindings = made.bind()
    assert (made.instances["f1"].bound, made.instances["v1"].bound) == (1, 1)
    made.leave("v1")
    made.unbind(bindings)
    assert made.instances["f1"].bound == 0  # once, though two stages are bound to it


def test_what_is_lacking_is_named_for_the_newest_revision() -> None:
    made = membership(member("f1", "front", "a1"), member("v1", "voice", "b1", ready=False), revisions=(OLD, NEW))
    assert made.lacking() == ["voice"]
    assert not made.complete()
    assert MembershipState(()).lacking() == ["(no pipeline revision known)"]
    with pytest.raises(Unbindable):
        MembershipState(()).bind()


def test_a_new_list_of_revisions_is_followed_at_once() -> None:
    made = membership(member("f1", "front", "a1"), member("v2", "voice", "b2"))
    with pytest.raises(Unbindable):
        made.bind()
    made.update((NEW,))
    assert made.bind()[0].revision == "new"


def test_whose_declared_edges_are_not_the_revision_s_is_never_bound_and_says_why() -> None:
    made = membership(member("f1", "front", "a1"))
    made.join(member("odd", "voice", "b1"), SCHEMAS["front"])
    assert made.lacking() == ["voice"]
    assert (
        made.ineligible_reason(made.instances["odd"])
        == "declares other edges than 'voice' has in pipeline revision old"
    )
    made.join(member("v1", "voice", "b1"), SCHEMAS["voice"])
    assert {made.bind()[1]["shout"] for _ in range(5)} == {"v1"}
    assert made.ineligible_reason(made.instances["v1"]) is None


def test_one_whose_revision_is_not_listed_yet_is_bound_once_it_is() -> None:
    """A new pod may be there before the list of revisions is read again."""
    made = membership(member("f1", "front", "a1"), member("v2", "voice", "b2"))
    assert made.ineligible_reason(made.instances["v2"]) == (
        "unit revision b2 of 'u2' is in no pipeline revision that is served"
    )
    made.update((OLD, NEW))
    assert made.ineligible_reason(made.instances["v2"]) is None
    assert made.bind()[1]["shout"] == "v2"


def test_in_a_roll_each_is_measured_by_its_own_revision() -> None:
    """The edit of a unit that gives it another edge changes its schema with its revision."""
    streams = msgspec.structs.replace(
        NEW, edges=(*NEW.edges, ("split", "shout", "stream")), units={"u1": "a2", "u2": "b2"}
    )
    made = membership(member("f1", "front", "a1"), member("v1", "voice", "b1"), revisions=(OLD, streams))
    new = edges.of_revision(streams)
    made.join(member("f2", "front", "a2"), new["front"])
    made.join(member("v2", "voice", "b2"), new["voice"])
    assert new["front"] != SCHEMAS["front"] and new["voice"] != SCHEMAS["voice"]
    found = {(one.revision, *sorted(set(bindings.values()))) for one, bindings in (made.bind() for _ in range(10))}
    assert found == {("old", "f1", "v1"), ("new", "f2", "v2")}


BRANCHES = PipelineRevision(
    revision="branches",
    units={"front": "u", "text": "u", "voice": "u"},
    groups={"front": "front", "text": "text", "voice": "voice"},
    stages={"take": "front", "aside": "front", "write": "text", "talk": "voice", "speak": "voice"},
    entry="take",
    terminals=("aside", "write", "speak"),
    edges=(
        ("take", "aside", "normal"),
        ("take", "write", "normal"),
        ("take", "talk", "normal"),
        ("talk", "speak", "stream"),
    ),
)


def branches(*groups: str) -> MembershipState:
    made = MembershipState((BRANCHES,))
    schemas = edges.of_revision(BRANCHES)
    for group in groups:
        made.join(Member(group, group, group, "u", group, {}, (), True), schemas[group])
    return made


def test_a_request_is_bound_to_what_its_terminals_can_be_reached_by_and_to_nothing_else() -> None:
    made = branches("front", "text", "voice")
    assert made.bind(terminals=["write"])[1] == {"take": "front", "write": "text"}
    assert made.bind(terminals=["speak"])[1] == {"take": "front", "talk": "voice", "speak": "voice"}
    assert made.bind(terminals=["aside"])[1] == {"take": "front", "aside": "front"}
    assert set(made.bind(terminals=["write", "aside", "speak"])[1]) == set(BRANCHES.stages) == set(made.bind()[1])
    assert [one.bound for one in made.instances.values()] == [5, 3, 3]


def test_a_group_that_a_request_never_meets_may_be_away() -> None:
    made = branches("front", "text")
    assert made.bind(terminals=["write"])[1] == {"take": "front", "write": "text"}
    assert made.complete(terminals=["write"]) and not made.complete(terminals=["speak"]) and not made.complete()
    for terminals in (None, ["speak"], ["write", "speak"]):
        with pytest.raises(Unbindable) as caught:
            made.bind(terminals=terminals)
        assert caught.value.groups == ("voice",)


def test_only_a_revision_that_has_the_terminals_gets_their_request() -> None:
    newer = msgspec.structs.replace(
        BRANCHES,
        revision="newer",
        terminals=("aside", "write"),
        stages={"take": "front", "aside": "front", "write": "text"},
        groups={"front": "front", "text": "text"},
        edges=BRANCHES.edges[:2],
    )
    made = branches("front", "text", "voice")
    made.update((BRANCHES, newer))
    for _ in range(4):
        assert made.bind(terminals=["speak"])[0] is BRANCHES
    made.leave("voice")
    with pytest.raises(Unbindable) as caught:
        made.bind(terminals=["speak"])
    assert caught.value.groups == ("voice",)


def test_a_pod_that_is_set_aside_gets_nothing_new_until_it_is_back() -> None:
    made = membership(
        member("f1", "front", "a1"),
        member("v1", "voice", "b1", endpoint="tcp://10.0.0.1:5550"),
        member("v2", "voice", "b1", endpoint="tcp://[fd00::2]:5550"),
    )
    assert {made.bind()[1]["shout"] for _ in range(4)} == {"v1", "v2"}
    bound = made.instances["v1"].bound
    assert made.set_aside(["10.0.0.1", "10.9.9.9"]) == ["v1"]
    assert {made.bind()[1]["shout"] for _ in range(4)} == {"v2"}
    assert made.instances["v1"].bound == bound, "what is bound to it stays"
    made.join(member("v3", "voice", "b1", endpoint="tcp://10.0.0.1:5551"), SCHEMAS["voice"])
    assert {made.bind()[1]["shout"] for _ in range(4)} == {"v2"}, "who joins from there later, too"
    assert sorted(made.set_aside(["fd00::2"])) == ["v1", "v2", "v3"]
    assert {made.bind()[1]["shout"] for _ in range(6)} == {"v1", "v3"}
    assert made.set_aside(["fd00::2"]) == []
    assert sorted(made.set_aside([])) == ["v2"]


def test_nobody_is_set_aside_by_a_host_that_is_none() -> None:
    made = membership(member("f1", "front", "a1"), member("v1", "voice", "b1", endpoint="ipc:///run/v1"))
    assert made.set_aside([""]) == [] or not made.instances["v1"].aside
    made.bind()
