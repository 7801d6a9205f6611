"""Who belongs to the pipeline: hello, welcome, refused, fenced, replaced."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from omnipipeline_spec.types.plan import PipelineRevision
from stage_runtime.coordinator import membership
from stage_runtime.errors import RequestError
from stage_runtime.metrics import catalog
from stage_runtime.wire.messages import Beat, Deregister, Members, Rejected, Welcome
from tests.coordinator.manager_kit import REVISION, SCHEMAS, CoordinatorHarness, asked, came, coordinator_harness


def said(made: CoordinatorHarness, incarnation: str, kind: type) -> list[object]:
    return [one for one in made.channels.said[incarnation] if isinstance(one, kind)]


async def test_who_joins_is_welcomed_with_the_others_and_they_are_told() -> None:
    async with coordinator_harness(joined=False) as made:
        assert made.hello("f1", "front")
        assert made.hello("v1", "voice")
        (first,) = said(made, "f1", Welcome)
        (second,) = said(made, "v1", Welcome)
        assert isinstance(first, Welcome) and isinstance(second, Welcome)
        assert first.members == ()
        assert [one.incarnation for one in second.members] == ["f1"]
        assert (second.publisher, second.coordinator.incarnation, second.via) == ("ipc:///pub", "cc", "ipc:///cc")
        (news,) = said(made, "f1", Members)
        assert isinstance(news, Members)
        assert [one.incarnation for one in news.joined] == ["v1"]


async def test_who_says_hello_again_is_welcomed_again_and_nobody_else_is_troubled() -> None:
    """It has found the coordinator at a second address, or has given its link up."""
    async with coordinator_harness() as made:
        news = len(said(made, "f1", Members))
        assert made.hello("v1", "voice", via="tcp://[::1]:1")
        last = said(made, "v1", Welcome)[-1]
        assert isinstance(last, Welcome)
        assert last.via == "tcp://[::1]:1"
        assert [one.incarnation for one in last.members] == ["f1"]
        assert len(said(made, "f1", Members)) == news
        assert made.membership.state.instances["v1"].ready


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"pipeline": "other"}, "belongs to pipeline 'other'"), ({"edges": "99:edges"}, "speaks edges '99:edges'")],
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
            made.manager.admit(asked(f"r{number}"))
        assert {one.header.bindings["shout"] for one in made.submitted("f1")} == {"v1"}
        told = {one["incarnation"]: one["ineligible_reason"] for one in made.manager.status()["instances"]}
        assert told == {
            "f1": None,
            "v1": None,
            "v2": "declares other edges than 'voice' has in pipeline revision rev1",
        }


async def test_the_dead_may_not_come_back_under_their_old_name() -> None:
    async with coordinator_harness() as made:
        made.coordinator.lost("v1")
        (gone,) = said(made, "f1", Members)[-1:]
        assert isinstance(gone, Members)
        assert gone.gone == ("v1",)
        assert not made.hello("v1", "voice")
        assert made.refused("v1")[-1] == Rejected("v1", "this incarnation was declared dead", True)


async def test_one_that_was_buried_and_still_speaks_is_told() -> None:
    """A frozen process thaws and beats on: it must come back under a new name, or it would be idle for ever."""
    async with coordinator_harness() as made:
        made.coordinator.lost("v1")
        assert not made.coordinator.introduced("v1", Beat({}, {}, {}))
        assert [one.fenced for one in made.refused("v1")] == [True]
        assert not made.coordinator.introduced("stranger", Beat({}, {}, {}))
        assert made.refused("stranger") == []


async def test_another_life_at_the_same_endpoint_buries_the_one_before_and_its_requests_move() -> None:
    async with coordinator_harness() as made:
        made.manager.admit(asked())
        made.join("v2", "voice", endpoint="ipc:///v1")
        assert set(made.membership.state.instances) == {"f1", "v2"}
        assert made.submitted("f1")[-1].header.bindings["shout"] == "v2"
        (welcome,) = said(made, "v2", Welcome)
        assert isinstance(welcome, Welcome)
        assert [one.incarnation for one in welcome.members] == ["f1"]  # not its own earlier life


async def test_an_instance_is_bound_only_once_it_is_ready() -> None:
    async with coordinator_harness(joined=False) as made:
        made.join("f1", "front")
        assert made.hello("v1", "voice")
        with pytest.raises(RequestError, match="voice"):
            made.manager.admit(asked())
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


async def test_it_is_ready_in_time_without_a_set_unless_others_speak_another_protocol(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with coordinator_harness(joined=False) as made:
        monkeypatch.setattr(membership, "READY_AFTER_S", 0.05)
        made.channels.other_protocol_at = time.monotonic() + 0.2
        await asyncio.sleep(0.1)
        assert not made.manager.ready(), "an older coordinator serves them, and goes when this one is ready"
        await came(made.manager.ready)
        assert time.monotonic() > made.channels.other_protocol_at + 0.05


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


async def test_a_draining_instance_without_requests_is_let_go_at_once() -> None:
    async with coordinator_harness() as made:
        made.coordinator.received("v1", Deregister("SIGTERM"))
        assert type(made.channels.said["v1"][-1]).__name__ == "Unbound"
        assert made.manager.status()["instances"][1]["draining"]


@pytest.fixture
def newer() -> PipelineRevision:
    return msgspec.structs.replace(REVISION, revision="rev2", units={"front": "f1", "voice": "v2"})


async def test_a_request_never_mixes_revisions_in_a_roll(newer: PipelineRevision) -> None:
    async with coordinator_harness(max_in_flight=100) as made:
        made.join("w1", "voice", revision="v2")
        for number in range(10):
            made.manager.admit(asked(f"a{number}"))
        assert {one.header.bindings["shout"] for one in made.submitted("f1")} == {"v1"}
        made.coordinator.update_revisions((REVISION, newer))
        for number in range(10):
            made.manager.admit(asked(f"b{number}"))
        bound = [one.header.bindings["shout"] for one in made.submitted("f1")[10:]]
        assert sorted(bound) == ["v1"] * 5 + ["w1"] * 5
        made.coordinator.update_revisions((newer,))
        for number in range(10):
            made.manager.admit(asked(f"c{number}"))
        assert {one.header.bindings["shout"] for one in made.submitted("f1")[20:]} == {"w1"}
