"""Requests that wait at the coordinator for an instance that is on its way."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from stage_runtime.coordinator.binding.waiting import LOOK_AGAIN_S
from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.errors import RequestError
from stage_runtime.metrics import catalog
from stage_runtime.rules.graph import edges
from stage_runtime.wire.messages import Deregister, Submit
from stage_runtime.wire.values import OmniRequest
from tests.coordinator.manager_kit import (
    REVISION,
    CoordinatorHarness,
    came,
    coordinator_harness,
    error_of,
    events_of,
    new_request,
    read,
)
from tests.coordinator.set_clock import SetClock
from tests.coordinator.test_request_manager import BRANCHES


def ids(sent: list[Submit]) -> list[str]:
    return [one.header.request_id for one in sent]


def waiting(made: CoordinatorHarness) -> int:
    return int(made.manager.status()["awaiting_instance"])


@pytest.mark.proves("group-on-its-way")
async def test_new_requests_wait_for_the_next_life_and_are_sent_in_their_order() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        made.coordinator.lost("v1")
        handles = [made.manager.admit(new_request(f"r{number}")) for number in range(4)]
        assert (waiting(made), made.submitted("f1")) == (4, [])
        assert made.hello("v2", "voice")
        assert made.submitted("f1") == [], "it loads"
        made.join("v2", "voice")
        assert (waiting(made), ids(made.submitted("f1"))) == (0, ["r0", "r1", "r2", "r3"])
        for handle, sent in zip(handles, made.submitted("f1"), strict=True):
            made.complete(sent, "shout", handle.id)
            assert await read(handle) == [ResultEvent(stage="shout", data=handle.id)]
            assert made.record(handle.id).attempt == 1


async def test_what_was_admitted_first_is_sent_first_be_it_new_or_sent_again() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        made.manager.admit(new_request("sent"))
        made.coordinator.lost("v1")
        made.manager.admit(new_request("new"))
        made.join("v2", "voice")
        assert ids(made.submitted("f1")[1:]) == ["sent", "new"]


async def test_several_groups_may_be_away_at_once() -> None:
    async with coordinator_harness(joined=False) as made:
        made.manager.admit(new_request())
        made.join("v1", "voice")
        assert waiting(made) == 1
        made.join("f1", "front")
        assert ids(made.submitted("f1")) == ["r1"]


async def test_a_draining_instance_is_expected_to_be_replaced() -> None:
    async with coordinator_harness() as made:
        made.coordinator.received("v1", Deregister("SIGTERM"))
        made.manager.admit(new_request())
        assert waiting(made) == 1
        made.join("v2", "voice")
        assert made.submitted("f1")[0].header.bindings["shout"] == "v2"


@pytest.mark.proves("group-on-its-way")
async def test_beyond_the_bounds_of_count_and_bytes_requests_are_refused() -> None:
    async with coordinator_harness(hold_requests=2, hold_bytes=5000) as made:
        made.coordinator.lost("v1")
        made.manager.admit(new_request("r1", inputs="x" * 3000))
        with pytest.raises(RequestError, match="no ready instance of voice, and requests of 5000 bytes") as caught:
            made.manager.admit(new_request("large", inputs="x" * 3000))
        assert (caught.value.code, caught.value.stage, caught.value.retry_after_s) == ("unavailable", "voice", 1.0)
        made.manager.admit(new_request("r2"))
        with pytest.raises(RequestError, match="no ready instance of voice, and 2 requests wait for one"):
            made.manager.admit(new_request("r3"))
        metrics = made.manager.metrics()
        assert metrics[catalog.REQUESTS_WAITING] == {("front",): 0, ("voice",): 2}
        assert metrics[catalog.REQUESTS_NOT_HELD] == {("gone",): 0, ("bytes",): 1, ("requests",): 1}
        assert 3000 < metrics[catalog.WAITING_BYTES][()] < 5000  # type: ignore[operator]
        made.manager.abort("r1", "enough")
        made.manager.admit(new_request("r3"))
        made.join("v2", "voice")
        assert ids(made.submitted("f1")) == ["r2", "r3"]
        assert made.manager.metrics()[catalog.WAITING_BYTES] == {(): 0}


async def test_the_body_of_a_request_that_may_not_wait_is_not_kept() -> None:
    async with coordinator_harness(hold_bytes=50_000) as made:
        made.coordinator.lost("v1")
        made.manager.admit(new_request("waits"))  # the only one that waits may be of any size
        before = made.manager.metrics()[catalog.RETAINED_BODY_BYTES]
        with pytest.raises(RequestError, match="no ready instance of voice, and requests of"):
            made.manager.admit(new_request("refused", inputs=bytes(100_000)))
        assert made.manager.metrics()[catalog.RETAINED_BODY_BYTES] == before


async def test_requests_that_wait_for_terminals_that_no_revision_has_any_more_end_and_others_go_on() -> None:
    clock = SetClock()
    async with coordinator_harness(terminal_stages=lambda request: request.inputs, clock=clock) as made:
        made.coordinator.lost("v1")
        removed = made.manager.admit(new_request("removed", inputs=["write"]))
        made.manager.admit(new_request("kept", inputs=["shout"]))
        made.coordinator.update_revisions((msgspec.structs.replace(REVISION, terminals=("shout",)),))
        clock.advance(LOOK_AGAIN_S)
        error = await error_of(removed)
        assert (error.code, error.message) == (
            "unavailable",
            "the pipeline has no terminal stage 'write' any more",
        )
        clock.advance(LOOK_AGAIN_S)
        assert waiting(made) == 1, "its time is looked at, as before"


async def test_what_is_sent_again_waits_whatever_the_bounds() -> None:
    async with coordinator_harness(hold_requests=1, hold_bytes=1) as made:
        for number in range(3):
            made.manager.admit(new_request(f"r{number}"))
        made.coordinator.lost("v1")
        assert waiting(made) == 3
        with pytest.raises(RequestError):
            made.manager.admit(new_request("new"))


@pytest.mark.proves("group-on-its-way")
@pytest.mark.parametrize("end", ["abort", "deadline", "client", "drain", "stop"])
async def test_whatever_ends_a_request_that_waits_frees_its_place(end: str) -> None:
    async with coordinator_harness(hold_requests=1) as made:
        made.coordinator.lost("v1")
        handle = made.manager.admit(new_request(stream=True), timeout_s=0.05 if end == "deadline" else None)
        match end:
            case "abort":
                made.manager.abort("r1", "enough")
            case "client":
                events = events_of(handle)
                reading = asyncio.ensure_future(anext(events))
                await asyncio.sleep(0)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            case "drain":
                made.manager.refuse("the coordinator is draining")
            case "stop":
                made.manager.fail_all("the coordinator has stopped")
        if end != "client":
            code = {"abort": "cancelled", "deadline": "deadline"}.get(end, "unavailable")
            assert (await error_of(handle)).code == code
        assert (waiting(made), made.manager.in_flight) == (0, 0)
        assert made.manager.metrics()[catalog.RETAINED_BODY_BYTES] == {(): 0}
        made.join("v2", "voice")
        assert made.submitted("f1") == []


async def test_a_drain_leaves_a_request_that_had_begun_to_its_next_instance() -> None:
    async with coordinator_harness() as made:
        made.manager.admit(new_request())
        made.coordinator.lost("v1")
        made.manager.refuse("the coordinator is draining")
        assert waiting(made) == 1
        made.join("v2", "voice")
        assert len(made.submitted("f1")) == 2


@pytest.mark.proves("group-gone")
async def test_a_group_that_is_gone_for_good_ends_the_wait_with_its_name() -> None:
    async with coordinator_harness(hold_s=0.3) as made:
        made.coordinator.lost("v1")
        error = await error_of(made.manager.admit(new_request()))
        assert (error.code, error.stage) == ("unavailable", "voice")
        assert error.message.startswith("no instance of voice is ready or expected")
        with pytest.raises(RequestError, match="no ready instance of voice"):
            made.manager.admit(new_request("late"))
        assert made.manager.metrics()[catalog.REQUESTS_NOT_HELD] == {("gone",): 1, ("bytes",): 0, ("requests",): 0}


@pytest.mark.proves("group-gone")
async def test_one_that_loads_is_waited_for_longer_and_a_crash_loop_is_not() -> None:
    clock = SetClock()
    async with coordinator_harness(hold_s=10.0, clock=clock) as made:
        assert made.hello("v2", "voice")
        made.coordinator.lost("v1")
        clock.advance(11.0)
        first = made.manager.admit(new_request("first"))
        made.coordinator.lost("v2")
        assert made.hello("v3", "voice")
        clock.advance(LOOK_AGAIN_S)
        assert (await error_of(first)).code == "unavailable", "one has failed to load"
        with pytest.raises(RequestError):
            made.manager.admit(new_request("second"))
        made.join("v3", "voice")
        made.manager.admit(new_request("third"))
        assert ids(made.submitted("f1")) == ["third"]


async def test_those_who_need_the_missing_group_wait_and_the_others_are_served() -> None:
    def terminals(request: OmniRequest) -> list[str]:
        return [str(request.inputs)]

    schemas: dict[str, Any] = edges.of_revision(BRANCHES)
    async with coordinator_harness(joined=False, revisions=(BRANCHES,), terminal_stages=terminals) as made:
        made.join("f1", "front", edges=schemas["front"])
        made.join("v1", "voice", edges=schemas["voice"])
        made.manager.admit(new_request("written", inputs="write"))
        made.manager.admit(new_request("heard", inputs="shout"))
        assert (waiting(made), ids(made.submitted("f1"))) == (1, ["heard"])
        made.join("p1", "paper", edges=schemas["paper"])
        assert await came(lambda: ids(made.submitted("f1")) == ["heard", "written"])


@pytest.mark.proves("starts-on-demand")
async def test_requests_for_a_group_that_starts_on_demand_wait_for_its_first_instance() -> None:
    clock = SetClock()
    async with coordinator_harness(joined=False, hold_s=10.0, hold_requests=2, clock=clock) as made:
        made.join("f1", "front")
        clock.advance(11.0)
        with pytest.raises(RequestError, match="no ready instance of voice"):
            made.manager.admit(new_request("before"))
        assert made.manager.problem() is not None
        made.coordinator.start_on_demand(["voice"])
        assert (made.manager.problem(), made.manager.ready()) == (None, True)
        for number in range(2):
            made.manager.admit(new_request(f"r{number}"))
        with pytest.raises(RequestError, match="and 2 requests wait for one") as caught:
            made.manager.admit(new_request("third"))
        assert caught.value.retry_after_s is not None
        assert made.manager.status()["groups"]["voice"]["waiting"] == 2
        made.join("v1", "voice")
        assert ids(made.submitted("f1")) == ["r0", "r1"]
