"""Members of the pipeline: hello, welcome, refused, fenced, replaced."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from omnipipeline_spec.types.plan import PipelineRevision
from stage_runtime.coordinator import membership, neighbours
from stage_runtime.errors import RequestError
from stage_runtime.metrics import catalog, planes
from stage_runtime.wire.messages import Beat, Deregister, Detour, Members, PeerUnreachable, Ready, Rejected, Welcome
from tests.coordinator.manager_kit import REVISION, SCHEMAS, CoordinatorHarness, came, coordinator_harness, new_request
from tests.coordinator.set_clock import SetClock


def sent(made: CoordinatorHarness, incarnation: str, kind: type) -> list[object]:
    return [one for one in made.channels.sent[incarnation] if isinstance(one, kind)]


async def test_who_joins_is_welcomed_and_introduced_only_once_a_request_is_bound_to_both() -> None:
    async with coordinator_harness(joined=False) as made:
        assert made.hello("f1", "front")
        assert made.hello("v1", "voice")
        (first,) = sent(made, "f1", Welcome)
        (second,) = sent(made, "v1", Welcome)
        assert isinstance(first, Welcome) and isinstance(second, Welcome)
        assert (second.publisher, second.coordinator.incarnation, second.via) == ("ipc:///pub", "cc", "ipc:///cc")
        assert sent(made, "f1", Members) == sent(made, "v1", Members) == []


async def test_the_first_message_to_any_member_of_a_growing_fleet_is_its_welcome() -> None:
    async with coordinator_harness(joined=False) as made:
        for number in range(60):  # at some of them, the time between beats grows
            assert made.hello(f"v{number}", "voice")
        for number in range(60):
            first, *rest = made.channels.sent[f"v{number}"]
            assert isinstance(first, Welcome)
            assert not any(isinstance(one, Welcome) for one in rest)


async def test_the_same_beat_is_accounted_for_again_while_something_is_bound() -> None:
    """A beat that comes again may be the same object, and changes nothing only for an instance at rest."""
    async with coordinator_harness() as made:
        instance, beat = made.membership.state.instances["f1"], Beat({"split": 0}, {"split": 0}, {"split": 0})
        made.coordinator.received("f1", beat)
        made.manager.admit(new_request("r1"))
        assert instance.bound == 1
        made.coordinator.received("f1", beat)
        assert instance.bound_at_beat == 1
        made.manager.abort("r1", "over")
        made.coordinator.received("f1", beat)
        assert (instance.bound, instance.bound_at_beat) == (0, 0)


def announced(made: CoordinatorHarness, incarnation: str) -> list[list[str]]:
    """The members that each Members message to it named."""
    return [[one.incarnation for one in news.joined] for news in sent(made, incarnation, Members)]  # type: ignore[attr-defined]


async def test_a_bound_request_tells_its_instances_of_each_other_once_and_brings_their_facts_along() -> None:
    async with coordinator_harness() as made:
        made.join("v2", "voice")
        for number in range(4):
            made.manager.admit(new_request(f"r{number}"))
        assert announced(made, "f1") in ([["v1"], ["v2"]], [["v2"], ["v1"]])
        assert announced(made, "v1") == announced(made, "v2") == [["f1"]]
        for one in made.submitted("f1"):
            assert {member.incarnation for member in one.header.members} == {"f1", one.header.bindings["shout"]}


async def test_instances_that_have_no_connection_are_introduced_again_by_the_next_request() -> None:
    async with coordinator_harness() as made:
        made.manager.admit(new_request("r1"))
        made.coordinator.received("f1", PeerUnreachable("v1"))
        made.coordinator.received("f1", PeerUnreachable("unknown"))
        made.manager.admit(new_request("r2"))
        made.manager.admit(new_request("r3"))
        assert announced(made, "f1") == [["v1"], ["v1"]]
        assert announced(made, "v1") == [["f1"], ["f1"]]


async def test_who_is_unreachable_and_was_declared_dead_is_reported_gone() -> None:
    """It was introduced by another coordinator, or before: nobody else would tell."""
    async with coordinator_harness() as made:
        made.coordinator.received("f1", PeerUnreachable("v1"))
        made.coordinator.lost("v1")
        made.coordinator.received("f1", PeerUnreachable("v1"))
        assert sent(made, "f1", Members) == [Members(gone=("v1",))]


@pytest.mark.parametrize("how", ["unreachable", "passed on"])
async def test_who_is_no_member_is_reported_gone_when_it_has_not_registered_in_time(how: str) -> None:
    """This coordinator may have started a moment ago: who lives must not be called gone."""
    async with coordinator_harness(times=membership.MembershipTimes(registered_by_s=0.05)) as made:
        member = made.membership.state.instances["v1"].member
        for name in ("v2", "v3"):
            other = msgspec.structs.replace(member, incarnation=name)
            message = PeerUnreachable(name) if how == "unreachable" else Members(joined=(other,))
            made.coordinator.received("f1", message)
        assert sent(made, "f1", Members) == []
        made.join("v2", "voice")
        await came(lambda: sent(made, "f1", Members) == [Members(gone=("v3",))])
        made.coordinator.lost("v2")
        await came(lambda: sent(made, "f1", Members)[1:] == [Members(gone=("v2",))])


@pytest.mark.parametrize("registers", [True, False])
async def test_who_could_not_register_because_this_coordinator_was_stopped_is_not_reported_gone(
    registers: bool,
) -> None:
    clock = SetClock()
    async with coordinator_harness(clock=clock) as made:
        made.coordinator.received("f1", PeerUnreachable("v2"))
        clock.stop(600.0)
        clock.advance(1.0)
        assert sent(made, "f1", Members) == []
        if registers:
            made.join("v2", "voice")
        clock.advance(membership.REGISTERED_BY_S)
        assert sent(made, "f1", Members) == ([] if registers else [Members(gone=("v2",))])


async def test_what_a_coordinator_that_is_gone_has_introduced_is_reported_by_the_next_one() -> None:
    async with coordinator_harness() as made:
        made.join("v0", "voice")
        members = [made.membership.state.instances[name].member for name in ("v0", "v1")]
        made.coordinator.lost("v0")
        made.coordinator.received("f1", Members(joined=tuple(members)))
        made.coordinator.received("nobody", Members(joined=tuple(members)))
        assert sent(made, "f1", Members) == [Members(gone=("v0",))]
        made.coordinator.lost("v1")
        await came(lambda: sent(made, "f1", Members)[1:] == [Members(gone=("v1",))])


async def test_of_a_departure_only_those_hear_who_shared_requests_and_once_for_all_of_a_moment() -> None:
    async with coordinator_harness() as made:
        made.join("f2", "front")
        made.join("v2", "voice")
        made.join("v3", "voice")
        for number in range(24):
            made.manager.admit(new_request(f"r{number}"))
        knew = {name: {one for names in announced(made, name) for one in names} for name in ("f1", "f2")}
        made.coordinator.lost("v1")
        made.coordinator.lost("v2")
        await came(lambda: all(sent(made, name, Members)[-1].gone for name in knew if knew[name] & {"v1", "v2"}))  # type: ignore[attr-defined]
        for name, others in knew.items():
            gone = [news.gone for news in sent(made, name, Members) if news.gone]  # type: ignore[attr-defined]
            assert [set(names) for names in gone] == ([others & {"v1", "v2"}] if others & {"v1", "v2"} else [])
        assert not any(news.gone for news in sent(made, "v3", Members))  # type: ignore[attr-defined]


async def test_who_says_hello_again_is_welcomed_again_and_nobody_else_is_troubled() -> None:
    """It has found the coordinator at a second address, or has given its link up."""
    async with coordinator_harness() as made:
        news = len(sent(made, "f1", Members))
        assert made.hello("v1", "voice", via="tcp://[::1]:1")
        last = sent(made, "v1", Welcome)[-1]
        assert isinstance(last, Welcome)
        assert last.via == "tcp://[::1]:1"
        assert len(sent(made, "f1", Members)) == news
        assert made.membership.state.instances["v1"].ready


async def test_who_repeats_its_hello_before_it_has_read_the_answer_is_welcomed_once() -> None:
    async with coordinator_harness(joined=False) as made:
        for _ in range(20):
            assert made.hello("v1", "voice")
        assert len(sent(made, "v1", Welcome)) <= 2, "a second one after a second at the earliest"


@pytest.mark.proves("join-and-leave")
async def test_of_two_processes_with_one_incarnation_the_second_is_refused_and_the_first_is_not_troubled() -> None:
    async with coordinator_harness() as made:
        before = list(made.channels.sent["v1"])
        assert not made.hello("v1", "voice", endpoint="ipc:///another")
        assert made.channels.sent["v1"] == before
        instance = made.membership.state.instances["v1"]
        assert instance.ready and instance.member.endpoint != "ipc:///another"


async def test_a_detour_is_passed_on_to_members_alone() -> None:
    async with coordinator_harness() as made:
        detour = Detour("v1", b"a frame")
        made.coordinator.received("f1", detour)
        made.coordinator.received("f1", Detour("nobody", b"a frame"))
        assert made.channels.sent["v1"][-1] == detour
        assert made.channels.sent["nobody"] == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"pipeline": "other"}, "belongs to pipeline 'other'"), ({"edges": "99:edges"}, "has the edges '99:edges'")],
)
async def test_who_does_not_belong_here_is_refused_with_the_reason(fields: dict[str, Any], reason: str) -> None:
    async with coordinator_harness(joined=False) as made:
        assert not made.hello("x1", "voice", **fields)
        (refused,) = made.refused("x1")
        assert reason in refused.reason
        assert not refused.fenced
        assert made.membership.state.instances == {}


async def test_who_declares_other_edges_than_its_revision_has_gets_no_request_and_status_says_why() -> None:
    async with coordinator_harness() as made:
        made.join("v2", "voice", edges=SCHEMAS["front"])
        for number in range(4):
            made.manager.admit(new_request(f"r{number}"))
        assert {one.header.bindings["shout"] for one in made.submitted("f1")} == {"v1"}
        reasons = {one["incarnation"]: one["ineligible_reason"] for one in made.manager.status()["instances"]}
        assert reasons == {
            "f1": None,
            "v1": None,
            "v2": "declares other edges than 'voice' has in pipeline revision rev1",
        }


async def test_a_fenced_process_that_sends_hello_is_taken_back_and_learns_which_attempts_are_over() -> None:
    """It says Hello when it has lost this coordinator, too: then it has dropped all that was bound to it."""
    async with coordinator_harness() as made:
        for number in range(3):
            made.manager.admit(new_request(f"r{number}"))
        last = made.submitted("f1")[-1].header.attempt
        made.coordinator.lost("v1")
        await came(lambda: sent(made, "f1", Members)[-1] == Members(gone=("v1",)))
        before = len(made.submitted("f1"))
        assert made.hello("v1", "voice")
        welcome = sent(made, "v1", Welcome)[-1]
        assert isinstance(welcome, Welcome) and welcome.coordinator.attempts_over == last
        assert made.hello("v1", "voice", via="tcp://[::1]:1")
        welcome = sent(made, "v1", Welcome)[-1]
        assert isinstance(welcome, Welcome) and welcome.coordinator.attempts_over == last, "nothing is bound to it yet"
        made.coordinator.received("v1", Ready())
        again = made.submitted("f1")[before:]
        assert len(again) == 3 and all(one.header.attempt > last for one in again)
        assert made.hello("v1", "voice", via="tcp://[::1]:2")
        welcome = sent(made, "v1", Welcome)[-1]
        assert isinstance(welcome, Welcome) and welcome.coordinator.attempts_over == 0, "these are not over"


async def test_who_comes_back_at_once_is_introduced_after_its_departure_was_reported() -> None:
    """Departures wait for others of the same moment; sent after the return, they would remove it for good."""
    clock = SetClock()
    async with coordinator_harness(clock=clock) as made:
        made.manager.admit(new_request("r1"))
        made.coordinator.lost("v1")
        made.join("v1", "voice")
        made.manager.admit(new_request("r2"))
        clock.advance(2 * neighbours.TICK_S)
        news = [([one.incarnation for one in each.joined], each.gone) for each in sent(made, "f1", Members)]  # type: ignore[attr-defined]
        assert news == [(["v1"], ()), ([], ("v1",)), (["v1"], ())]


async def test_who_was_declared_dead_may_not_come_back_where_another_life_has_begun() -> None:
    """Its Hello is one that was late."""
    async with coordinator_harness() as made:
        made.join("v2", "voice", endpoint="ipc:///v1")
        assert not made.hello("v1", "voice")
        assert made.refused("v1")[-1] == Rejected("v1", "this incarnation was declared dead", True, "ipc:///cc")
        assert set(made.membership.state.instances) == {"f1", "v2"}
        assert not made.coordinator.introduced("v1", Beat({}, {}, {}))
        assert len(made.refused("v1")) == 1, "nobody would hear it"


async def test_who_was_declared_dead_and_finds_no_room_is_to_ask_again_as_it_is() -> None:
    async with coordinator_harness() as made:
        made.coordinator.lost("v1")
        made.channels.full = True
        assert not made.hello("v1", "voice")
        assert not made.refused("v1")[-1].fenced
        made.channels.full = False
        assert made.hello("v1", "voice")


async def test_a_fenced_instance_that_still_sends_is_notified() -> None:
    """A frozen process thaws and beats on: it must come back under a new name, or it would be idle for ever."""
    async with coordinator_harness() as made:
        made.coordinator.lost("v1")
        assert not made.coordinator.introduced("v1", Beat({}, {}, {}))
        assert [one.fenced for one in made.refused("v1")] == [True]
        assert not made.coordinator.introduced("stranger", Beat({}, {}, {}))
        assert made.refused("stranger") == []


async def test_another_life_at_the_same_endpoint_buries_the_one_before_and_its_requests_move() -> None:
    async with coordinator_harness() as made:
        made.manager.admit(new_request())
        made.join("v2", "voice", endpoint="ipc:///v1")
        assert set(made.membership.state.instances) == {"f1", "v2"}
        assert made.submitted("f1")[-1].header.bindings["shout"] == "v2"
        assert announced(made, "v2") == [["f1"]]  # not its own earlier life


async def test_an_instance_is_bound_only_once_it_is_ready() -> None:
    async with coordinator_harness(joined=False, hold_s=0.0) as made:
        made.join("f1", "front")
        assert made.hello("v1", "voice")
        with pytest.raises(RequestError, match="voice"):
            made.manager.admit(new_request())
        assert made.manager.status()["missing_groups"] == ["voice"]


async def test_a_coordinator_that_was_complete_once_stays_ready() -> None:
    async with coordinator_harness(joined=False) as made:
        assert not made.manager.ready()
        made.join("f1", "front")
        made.join("v1", "voice")
        assert made.manager.ready()
        made.coordinator.lost("v1")
        assert made.manager.ready()
        assert not made.manager.status()["complete"]


async def test_it_is_ready_in_time_without_a_set_unless_others_speak_another_protocol() -> None:
    times = membership.MembershipTimes(ready_after_s=0.05)
    async with (
        coordinator_harness(joined=False, times=times) as made,
        coordinator_harness(joined=False, times=times, incarnation="alone") as alone,
    ):
        made.channels.other_protocol_at = time.monotonic() + 3600
        await came(alone.manager.ready)
        assert not made.manager.ready(), "an older coordinator serves them, and goes when this one is ready"
        made.channels.other_protocol_at = last = time.monotonic() + 0.2
        await came(made.manager.ready)
        assert time.monotonic() > last + 0.05


async def test_beats_carry_load_and_are_forgotten_with_their_instance() -> None:
    async with coordinator_harness() as made:
        made.coordinator.received("v1", Beat({"shout": 3}, {"shout": 2}, {"shout": 9}, {"kv_blocks": 7.0}))
        assert made.manager.metrics()[catalog.STAGE_WAITING] == {("shout",): 3}
        assert made.manager.metrics()[catalog.STAGE_RUNNING] == {("shout",): 2}
        assert made.manager.member_gauges() == {"voice.v1": {"kv_blocks": 7.0}}
        (voice,) = [one for one in made.manager.status()["instances"] if one["incarnation"] == "v1"]
        assert (voice["waiting"], voice["running"], voice["gauges"]) == (3, 2, {"kv_blocks": 7.0})
        made.coordinator.lost("v1")
        assert made.manager.metrics()[catalog.STAGE_WAITING] == {}
        assert made.manager.member_gauges() == {}
        made.coordinator.received("v1", Beat({"shout": 3}, {}, {}))  # was on its way
        assert made.manager.metrics()[catalog.STAGE_WAITING] == {}


async def test_the_status_says_how_far_an_instance_has_loaded_until_it_is_ready() -> None:
    async with coordinator_harness(joined=False) as made:
        made.hello("v1", "voice", ready=False)
        shares = planes.loading({"shout": (1.0, 4.0, "")})
        made.coordinator.received("v1", Beat({"shout": 0}, {"shout": 0}, {"shout": 0}, shares))

        def loading() -> Any:
            (voice,) = made.manager.status()["instances"]
            return voice["loading"]

        assert loading() == [{"stage": "shout", "done": 1.0, "total": 4.0, "unit": ""}]
        made.coordinator.received("v1", Ready())
        assert loading() == [], "its next beat has not come yet"


async def test_a_draining_instance_without_requests_is_let_go_at_once() -> None:
    async with coordinator_harness() as made:
        made.coordinator.received("v1", Deregister("SIGTERM"))
        assert type(made.channels.sent["v1"][-1]).__name__ == "Unbound"
        assert made.manager.status()["instances"][1]["draining"]


@pytest.fixture
def newer() -> PipelineRevision:
    return msgspec.structs.replace(REVISION, revision="rev2", units={"front": "f1", "voice": "v2"})


async def test_a_request_never_mixes_revisions_in_a_roll(newer: PipelineRevision) -> None:
    async with coordinator_harness(max_in_flight=100) as made:
        made.join("w1", "voice", revision="v2")
        for number in range(10):
            made.manager.admit(new_request(f"a{number}"))
        assert {one.header.bindings["shout"] for one in made.submitted("f1")} == {"v1"}
        made.coordinator.update_revisions((REVISION, newer))
        for number in range(10):
            made.manager.admit(new_request(f"b{number}"))
        bound = [one.header.bindings["shout"] for one in made.submitted("f1")[10:]]
        assert sorted(bound) == ["v1"] * 5 + ["w1"] * 5
        made.coordinator.update_revisions((newer,))
        for number in range(10):
            made.manager.admit(new_request(f"c{number}"))
        assert {one.header.bindings["shout"] for one in made.submitted("f1")[20:]} == {"w1"}
