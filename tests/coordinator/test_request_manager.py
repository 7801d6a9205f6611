"""Requests at the request manager: admitted, bound, followed to their one end."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.coordinator.admitting.submission import BODY_CREDITS
from stage_runtime.coordinator.answering.readers import LOOK_EVERY_S
from stage_runtime.coordinator.binding.broken_connections import RECONNECT_S
from stage_runtime.coordinator.events import ChunkEvent, ResultEvent, TokenUsage
from stage_runtime.coordinator.live_requests import PUBLISHED_MOST
from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.rules.flow.streams import STREAM_WINDOW
from stage_runtime.rules.graph import edges
from stage_runtime.rules.requests.lifecycle import AttemptBegan
from stage_runtime.rules.requests.readers import ROOM
from stage_runtime.transfers.sending import SHARED_NBYTES
from stage_runtime.wire.frames import RequestRef
from stage_runtime.wire.messages import (
    Complete,
    Consumed,
    Deregister,
    Ended,
    HandBack,
    PeerUnreachable,
    Ready,
    Release,
    StreamStalled,
    Unbound,
)
from stage_runtime.wire.parts import Body, Failure
from stage_runtime.wire.values import OmniRequest, RawTensor, Text, Usage
from tests.coordinator.manager_kit import (
    REVISION,
    CoordinatorHarness,
    came,
    coordinator_harness,
    error_of,
    events_of,
    new_request,
    read,
    request_of,
)
from tests.coordinator.set_clock import SetClock
from tests.thoroughness import examples


def only(made: CoordinatorHarness, incarnation: str = "f1") -> Any:
    (sent,) = made.submitted(incarnation)
    return sent


async def test_a_request_goes_to_the_entry_stage_with_its_bindings_and_deadline() -> None:
    async with coordinator_harness(request_timeout_s=60.0) as made:
        made.manager.admit(new_request(inputs={"text": "hi"}), timeout_s=5.0, trace="00-ab-cd-01")
        sent = only(made)
        assert sent.target == "split"
        assert sent.header.bindings == {"split": "f1", "shout": "v1", "write": "v1"}
        assert (sent.header.request_id, sent.header.owner, sent.header.traceparent) == ("r1", "cc", "00-ab-cd-01")
        assert 4000 < sent.header.remaining_ms <= 5000
        assert request_of(sent).inputs == {"text": "hi"}


async def test_a_client_may_shorten_the_pipelines_deadline_and_not_lengthen_it() -> None:
    async with coordinator_harness(request_timeout_s=2.0) as made:
        made.manager.admit(new_request(), timeout_s=900.0)
        assert only(made).header.remaining_ms <= 2000


async def test_a_request_is_complete_when_all_its_terminals_are() -> None:
    async with coordinator_harness() as made:
        handle = made.manager.admit(new_request())
        sent = only(made)
        made.complete(sent, "write", "text")
        assert made.record("r1").waiting_for == ("shout",)
        made.complete(sent, "shout", has_data=False)
        assert await read(handle) == [
            ResultEvent(stage="write", data="text"),
            ResultEvent(stage="shout", has_data=False),
        ]
        record = made.record("r1")
        assert (record.state, record.attempt, record.waiting_for) == ("completed", 1, ())
        assert record.stages["write"].run_ms == 2.0
        assert made.manager.in_flight == 0


async def test_a_subset_of_terminals_is_waited_for_and_others_are_ignored() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["write"]) as made:
        handle = made.manager.admit(new_request())
        sent = only(made)
        made.complete(sent, "shout", "nobody asked")
        made.chunk(sent, "shout", 0, "nobody asked")
        made.complete(sent, "write", "text")
        assert await read(handle) == [ResultEvent(stage="write", data="text")]


@pytest.mark.parametrize("returned", [[], "write", ["ghost"], ValueError("broken")])
async def test_a_wrong_subset_is_refused_before_anything_is_sent(returned: Any) -> None:
    def choose(request: object) -> Any:
        if isinstance(returned, Exception):
            raise returned
        return returned

    async with coordinator_harness(terminal_stages=choose) as made:
        with pytest.raises(RequestError) as caught:
            made.manager.admit(new_request())
        assert (caught.value.code, caught.value.hook) == ("stage_failed", "terminalStagesFn")
        assert made.submitted("f1") == []
        assert made.manager.in_flight == 0
        assert all(one.bound == 0 for one in made.membership.state.instances.values())


async def test_chunks_are_read_in_order_before_the_result_whatever_came_first() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        handle = made.manager.admit(new_request(stream=True))
        sent = only(made)
        made.complete(sent, "shout", "end", chunks=3)  # short messages overtake long ones
        made.chunk(sent, "shout", 2, "c")
        made.chunk(sent, "shout", 0, "a")
        made.chunk(sent, "shout", 1, "b")
        events = await read(handle)
        assert [(one.index, one.data) for one in events if isinstance(one, ChunkEvent)] == [
            (0, "a"),
            (1, "b"),
            (2, "c"),
        ]
        assert events[3:] == [ResultEvent(stage="shout", data="end")]


@pytest.mark.parametrize(("again", "code"), [(True, "duplicate_request"), (False, None)])
async def test_an_id_is_refused_while_it_is_in_flight_and_welcome_afterwards(again: bool, code: str | None) -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        handle = made.manager.admit(new_request())
        first = only(made)
        if again:
            with pytest.raises(RequestError) as caught:
                made.manager.admit(new_request())
            assert caught.value.code == code
        made.complete(first, "shout", "one")
        assert await read(handle) == [ResultEvent(stage="shout", data="one")]
        second = made.manager.admit(new_request())
        sent = made.submitted("f1")[-1]
        assert sent.header.attempt > first.header.attempt  # or stages would take it for the dead one
        made.complete(first, "shout", "late")
        made.complete(sent, "shout", "two")
        assert await read(second) == [ResultEvent(stage="shout", data="two")]


async def test_admission_is_capped_before_anything_is_sent() -> None:
    async with coordinator_harness(max_in_flight=2) as made:
        made.manager.admit(new_request("r1"))
        made.manager.admit(new_request("r2"))
        with pytest.raises(RequestError) as caught:
            made.manager.admit(new_request("r3"))
        assert (caught.value.code, caught.value.retry_after_s) == ("rate_limited", 1.0)
        made.manager.abort("r1", "enough")
        made.manager.admit(new_request("r3"))
        assert len(made.submitted("f1")) == 3


async def test_without_an_instance_of_a_group_the_error_names_the_group() -> None:
    async with coordinator_harness(joined=False, hold_s=0.0) as made:
        made.join("f1", "front")
        with pytest.raises(RequestError, match="no ready instance of voice") as caught:
            made.manager.admit(new_request())
        assert (caught.value.code, caught.value.stage, caught.value.retry_after_s) == ("unavailable", "voice", 1.0)


BRANCHES = msgspec.structs.replace(
    REVISION,
    units={"front": "f1", "voice": "v1", "paper": "p1"},
    groups={"front": "front", "voice": "voice", "paper": "paper"},
    stages={"split": "front", "shout": "voice", "write": "paper"},
)


@pytest.mark.proves("unneeded-stage-missing")
async def test_a_request_that_does_not_need_a_stage_is_served_while_that_stage_is_missing() -> None:
    def terminals(request: OmniRequest) -> list[str]:
        return [str(request.inputs)]

    schemas = edges.of_revision(BRANCHES)
    async with coordinator_harness(joined=False, revisions=(BRANCHES,), terminal_stages=terminals, hold_s=0.0) as made:
        made.join("f1", "front", edges=schemas["front"])
        made.join("v1", "voice", edges=schemas["voice"])
        handle = made.manager.admit(new_request("heard", inputs="shout"))
        [sent] = made.submitted("f1")
        assert sent.header.bindings == {"split": "f1", "shout": "v1"}
        with pytest.raises(RequestError, match="no ready instance of paper"):
            made.manager.admit(new_request("written", inputs="write"))
        made.coordinator.lost("v1")  # and the retry needs no more than the first attempt
        made.join("v2", "voice", edges=schemas["voice"])
        again = made.submitted("f1")[-1]
        assert again.header.bindings == {"split": "f1", "shout": "v2"}
        made.complete(again, "shout", "HELLO")
        assert [event.data for event in await read(handle)] == ["HELLO"]


async def test_a_value_that_cannot_travel_is_the_clients_fault() -> None:
    async with coordinator_harness() as made:
        with pytest.raises(RequestError, match=r"inputs\['x'\]") as caught:
            made.manager.admit(new_request(inputs={"x": (1, 2)}))
        assert caught.value.code == "invalid_request"
        assert all(one.bound == 0 for one in made.membership.state.instances.values())


async def test_a_failed_terminal_fails_the_request_at_once_and_everybody_drops_it() -> None:
    async with coordinator_harness() as made:
        handle = made.manager.admit(new_request())
        sent = only(made)
        made.complete(sent, "write", "partial")
        made.fail(sent, "shout", message="ValueError: no", hook="run")
        error = await error_of(handle)
        assert (error.code, error.stage, error.hook, error.message) == (
            "stage_failed",
            "shout",
            "run",
            "ValueError: no",
        )
        assert made.aborted("f1") == made.aborted("v1") == [("r1", sent.header.attempt)]
        assert len(made.channels.published) == 1
        assert made.manager.in_flight == 0
        assert all(one.bound == 0 for one in made.membership.state.instances.values())


async def test_an_abort_is_published_to_a_small_fleet_and_sent_to_the_bound_in_any() -> None:
    """A publication to more than `PUBLISHED_MOST` instances would wake up all of them for the few that it concerns."""
    async with coordinator_harness() as made:
        made.manager.admit(new_request("r1"))
        made.manager.abort("r1", "no longer wanted")
        assert len(made.channels.published) == 1
        for number in range(PUBLISHED_MOST):
            made.join(f"more{number}", "voice")
        bound = made.manager.admit(new_request("r2")).bindings
        made.manager.abort("r2", "no longer wanted")
        assert len(made.channels.published) == 1
        assert [name for name in set(bound.values()) if ("r2", 2) not in made.aborted(name)] == []


async def test_an_aborted_request_is_cancelled_once() -> None:
    async with coordinator_harness() as made:
        handle = made.manager.admit(new_request())
        assert made.manager.abort("r1", "enough")
        assert not made.manager.abort("r1", "again")
        assert not handle.abort("again")
        assert not made.manager.abort("ghost", "who")
        assert (await error_of(handle)).code == "cancelled"
        assert made.aborted("v1") == [("r1", only(made).header.attempt)]
        made.complete(only(made), "shout", "late")
        assert made.record("r1").state == "cancelled"


async def test_a_reader_that_goes_away_aborts_and_one_that_reads_to_the_end_does_not() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        handle = made.manager.admit(new_request(stream=True))
        events = events_of(handle)
        made.chunk(only(made), "shout", 0, "a")
        assert (await anext(events)).data == "a"
        await events.aclose()
        assert made.record("r1").state == "cancelled"
        assert len(made.aborted("f1")) == 1
        whole = made.manager.admit(new_request("r2"))
        made.complete(made.submitted("f1")[-1], "shout", "all")
        await read(whole)
        assert len(made.aborted("f1")) == 1


async def test_the_record_of_a_request_has_its_tokens_also_when_it_was_cancelled() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        for name, ends in (("r1", False), ("r2", True)):
            handle = made.manager.admit(new_request(name, stream=True))
            events = events_of(handle)
            sent = made.submitted("f1")[-1]
            made.chunk(sent, "shout", 0, [Text("a"), Usage(5, 1)])
            await anext(events)
            assert made.record(name).usage == TokenUsage(prompt_tokens=5, completion_tokens=1, cached_tokens=0)
            if ends:
                made.complete(sent, "shout", Usage(0, 2), chunks=1)
                assert [one async for one in events] == [ResultEvent(stage="shout", data=Usage(0, 2))]
            await events.aclose()
        assert (made.record("r1").state, made.record("r2").state) == ("cancelled", "completed")
        counts = [made.record(name).usage for name in ("r1", "r2")]
        assert [one and one.completion_tokens for one in counts] == [1, 3]


@pytest.mark.parametrize(
    ("kind", "params", "param"),
    [("chat", {"seed": 2**64}, "seed"), ("chat", {"metadata": {"a": [2**64]}}, "metadata.a[0]"),
     ("pipeline", {"seed": 2**64}, "params['seed']")],
)  # fmt: skip
async def test_a_value_that_cannot_travel_is_named_as_the_client_wrote_it(kind: Any, params: Any, param: str) -> None:
    async with coordinator_harness() as made:
        with pytest.raises(InvalidRequest) as raised:
            made.manager.admit(OmniRequest(id="r1", kind=kind, params=params))
        assert raised.value.param == param
        assert raised.value.message.startswith(f"{param}: ")


async def test_a_cancelled_reader_aborts_the_request() -> None:
    async with coordinator_harness() as made:
        handle = made.manager.admit(new_request())
        reader = asyncio.create_task(read(handle))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert made.record("r1").state == "cancelled"
        assert len(made.aborted("f1")) == 1


async def test_a_deadline_that_passes_ends_the_request_and_names_what_it_waited_for() -> None:
    async with coordinator_harness() as made:
        handle = made.manager.admit(new_request(), timeout_s=0.02)
        made.complete(only(made), "write", "text")
        error = await error_of(handle)
        assert error.code == "deadline"
        assert "['shout']" in error.message
        assert len(made.aborted("v1")) == 1


# --- instances that go --------------------------------------------------------------------------------------------


async def test_a_lost_instance_is_replaced_by_another_at_once() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        handle = made.manager.admit(new_request())
        first = only(made)
        made.join("v2", "voice")
        made.coordinator.lost("v1")
        second = made.submitted("f1")[-1]
        assert second.header.bindings == {"split": "f1", "shout": "v2"}
        assert second.header.attempt > first.header.attempt
        assert made.aborted("f1") == [("r1", first.header.attempt)]
        made.complete(first, "shout", "of the dead")
        made.complete(second, "shout", "alive")
        assert await read(handle) == [ResultEvent(stage="shout", data="alive")]
        assert made.record("r1").attempt == 2


async def test_without_another_instance_a_request_waits_for_the_next_life() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        handle = made.manager.admit(new_request())
        made.coordinator.lost("v1")
        assert made.manager.status()["awaiting_instance"] == 1
        assert len(made.submitted("f1")) == 1
        made.join("v2", "voice")
        assert made.manager.status()["awaiting_instance"] == 0
        made.complete(made.submitted("f1")[-1], "shout", "alive")
        assert await read(handle) == [ResultEvent(stage="shout", data="alive")]


async def test_one_that_joins_loaded_is_given_what_waits_for_an_instance() -> None:
    """It was fenced by mistake or frozen, and has its models still."""
    async with coordinator_harness() as made:
        made.manager.admit(new_request())
        made.coordinator.lost("v1")
        assert made.hello("v2", "voice", ready=True)
        assert len(made.submitted("f1")) == 1, "it has not heard Welcome, and could not answer"
        made.coordinator.received("v2", Ready())
        assert made.manager.status()["awaiting_instance"] == 0
        assert [one.header.bindings["shout"] for one in made.submitted("f1")] == ["v1", "v2"]


@pytest.mark.parametrize("end", ["abort", "deadline"])
async def test_a_request_that_waits_for_an_instance_can_end_meanwhile(end: str) -> None:
    async with coordinator_harness() as made:
        handle = made.manager.admit(new_request(), timeout_s=0.05 if end == "deadline" else None)
        made.coordinator.lost("v1")
        if end == "abort":
            made.manager.abort("r1", "enough")
        assert (await error_of(handle)).code == ("cancelled" if end == "abort" else "deadline")
        assert made.manager.status()["awaiting_instance"] == 0
        made.join("v2", "voice")
        assert len(made.submitted("f1")) == 1


async def test_a_second_loss_ends_the_request_with_its_reason() -> None:
    async with coordinator_harness() as made:
        handle = made.manager.admit(new_request())
        made.join("v2", "voice")
        made.coordinator.lost("v1")
        made.coordinator.lost("f1")
        error = await error_of(handle)
        assert (error.code, error.stage, error.retry_after_s) == ("unavailable", "split", 1.0)


@pytest.mark.proves("tenth-of-fleet-dies")
async def test_of_many_that_die_at_once_none_gets_what_another_had() -> None:
    """Their connections break within milliseconds of each other; each is declared dead after a grace of its own."""
    async with coordinator_harness() as made:
        for name in ("v2", "v3", "v4"):
            made.join(name, "voice")
        handles = [made.manager.admit(new_request(f"r{number}")) for number in range(8)]
        made.channels.interrupted = {"v1", "v2", "v3"}
        for gone in ("v1", "v2", "v3"):
            made.coordinator.lost(gone)
            made.channels.interrupted -= {gone}
        assert {handle.bindings["shout"] for handle in handles} == {"v4"}
        assert made.manager.live.retried == 6


async def test_an_instance_whose_connection_is_broken_serves_while_there_is_no_other() -> None:
    async with coordinator_harness() as made:
        made.channels.interrupted = {"v1"}
        assert made.manager.admit(new_request("r1")).bindings["shout"] == "v1"
        made.join("v2", "voice")
        assert made.manager.admit(new_request("r2")).bindings["shout"] == "v2"


async def test_what_was_streamed_to_the_client_is_not_sent_again() -> None:
    async with coordinator_harness() as made:
        handle = made.manager.admit(new_request(stream=True))
        made.join("v2", "voice")
        made.chunk(only(made), "shout", 0, "said")
        made.coordinator.lost("v1")
        assert (await error_of(handle)).code == "unavailable"
        assert len(made.submitted("f1")) == 1


async def test_a_client_that_waits_for_all_of_it_gets_one_attempts_answer_alone() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        handle = made.manager.admit(new_request(stream=False))
        made.join("v2", "voice")
        made.chunk(only(made), "shout", 0, "of the dead")
        made.coordinator.lost("v1")
        second = made.submitted("f1")[-1]
        made.chunk(second, "shout", 0, "alive")
        made.complete(second, "shout", "end", chunks=1)
        events = await read(handle)
        assert [one.data for one in events] == ["alive", "end"]


def sent_after(made: CoordinatorHarness, count: int) -> list[Any]:
    return list(made.submitted("f1")[count:])


async def test_only_the_requests_of_a_lost_instance_notice() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        made.join("v2", "voice")
        handles = [made.manager.admit(new_request(f"r{number}")) for number in range(6)]
        sent = made.submitted("f1")
        hurt = {one.header.request_id for one in sent if one.header.bindings["shout"] == "v1"}
        assert len(hurt) == 3
        made.coordinator.lost("v1")
        for one in sent:
            made.complete(one, "shout", one.header.bindings["shout"])
        for number in range(3):  # one after the other: one of them may have ended it
            (again,) = await came(partial(sent_after, made, 6 + number))
            hurt.remove(again.header.request_id)
            made.complete(again, "shout", again.header.bindings["shout"])
        for handle in handles:
            assert await read(handle) == [ResultEvent(stage="shout", data="v2")]


async def test_a_transfer_that_failed_is_tried_on_other_instances() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        made.join("f2", "front")
        made.join("v2", "voice")
        made.manager.admit(new_request())
        (first,) = made.submitted("f1") + made.submitted("f2")
        made.fail(first, "shout", "transport_failed", "no connection")
        everything = made.submitted("f1") + made.submitted("f2")
        (second,) = [one for one in everything if one is not first]
        assert not set(second.header.bindings.values()) & set(first.header.bindings.values())


@pytest.mark.proves("instances-lose-each-other")
async def test_requests_between_two_instances_that_lost_each_other_are_retried_on_others() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        stuck = made.manager.admit(new_request("stuck"))
        made.manager.admit(new_request("through"))
        (first, second) = made.submitted("f1")
        made.join("f2", "front")
        made.join("v2", "voice")
        made.coordinator.received("f1", PeerUnreachable("v1"))
        made.complete(second, "shout", "in time")
        (again,) = await came(lambda: made.submitted("f2"))
        assert again.header.request_id == "stuck"
        assert again.header.attempt > first.header.attempt
        assert again.header.bindings == {"split": "f2", "shout": "v2"}
        assert made.aborted("v1") == [("stuck", first.header.attempt)]
        made.complete(again, "shout", "served")
        assert await read(stuck) == [ResultEvent(stage="shout", data="served")]
        assert made.record("through").attempt == 1


async def test_one_that_is_found_dead_after_another_has_lost_it_costs_one_retry() -> None:
    clock = SetClock()
    async with coordinator_harness(terminal_stages=lambda request: ["shout"], clock=clock) as made:
        handle = made.manager.admit(new_request())
        made.coordinator.received("f1", PeerUnreachable("v1"))
        made.coordinator.lost("v1")
        made.join("v2", "voice")
        (_, again) = made.submitted("f1")
        clock.advance(RECONNECT_S)  # what was said of the first attempt does not touch the second
        made.complete(again, "shout", "served")
        assert await read(handle) == [ResultEvent(stage="shout", data="served")]


async def test_a_retry_is_not_spent_on_an_instance_that_a_stage_has_found_dead_first() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        handle = made.manager.admit(new_request())
        made.fail(only(made), "split", "transport_failed", "no connection", unreachable="v1")
        assert made.manager.status()["awaiting_instance"] == 1
        made.coordinator.lost("v1")
        made.join("v2", "voice")
        (_, again) = made.submitted("f1")
        made.complete(again, "shout", "alive")
        assert await read(handle) == [ResultEvent(stage="shout", data="alive")]


async def test_a_retry_is_not_spent_on_an_instance_whose_connection_is_broken() -> None:
    """Two of different groups die at once, and the first is declared dead before the second."""
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        handle = made.manager.admit(new_request())
        made.channels.interrupted = {"f1", "v1"}
        made.coordinator.lost("f1")
        made.channels.interrupted = {"v1"}
        made.join("f2", "front")
        assert made.submitted("f2") == []
        made.coordinator.lost("v1")
        made.channels.interrupted = set()
        made.join("v2", "voice")
        made.complete(only(made, "f2"), "shout", "alive")
        assert await read(handle) == [ResultEvent(stage="shout", data="alive")]


async def test_a_retry_goes_to_an_instance_again_when_its_connection_is_back() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        handle = made.manager.admit(new_request())
        made.channels.interrupted = {"v1"}
        made.coordinator.lost("f1")
        made.join("f2", "front")
        assert made.submitted("f2") == []
        made.channels.interrupted = set()
        (again,) = await came(lambda: made.submitted("f2"))
        made.complete(again, "shout", "back")
        assert await read(handle) == [ResultEvent(stage="shout", data="back")]


async def test_two_that_lose_each_other_and_are_the_only_ones_get_the_retry_when_they_may_have_met_again() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        handle = made.manager.admit(new_request())
        made.coordinator.received("f1", PeerUnreachable("v1"))
        await came(lambda: made.manager.status()["awaiting_instance"])
        assert len(made.submitted("f1")) == 1
        (_, again) = await came(lambda: made.submitted("f1")[1:] and made.submitted("f1"))
        made.complete(again, "shout", "met")
        assert await read(handle) == [ResultEvent(stage="shout", data="met")]


async def test_an_instance_that_nobody_replaces_is_tried_at_the_end_of_the_wait() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        handle = made.manager.admit(new_request())
        made.channels.interrupted = {"f1", "v1"}
        made.fail(only(made), "split", "transport_failed", "no connection")
        (_, again) = await came(lambda: made.submitted("f1")[1:] and made.submitted("f1"))
        made.complete(again, "shout", "there all the time")
        assert await read(handle) == [ResultEvent(stage="shout", data="there all the time")]


async def test_a_result_that_cannot_be_fetched_counts_as_a_failed_transfer() -> None:
    async with coordinator_harness(retries=0) as made:
        handle = made.manager.admit(new_request())
        header = only(made).header
        made.coordinator.received("v1", Complete("r1", header.attempt, "shout", Body(transfer=b"gone")))
        error = await error_of(handle)
        assert (error.code, error.stage) == ("transport_failed", "shout")


async def test_a_body_that_cannot_be_sent_leaves_nothing_behind() -> None:
    async with coordinator_harness(retries=1) as made:
        made.relays.unreachable.add("f1")
        handle = made.manager.admit(new_request(inputs=b"x" * 100_000))
        error = await error_of(handle)
        assert (error.code, error.message) == ("transport_failed", "no relay reaches f1")
        assert made.manager.in_flight == 0
        assert made.manager.live.send_queues.outstanding == made.manager.live.send_queues.queued == 0
        assert all(one.bound == 0 for one in made.membership.state.instances.values())


async def test_the_body_of_an_aborted_request_is_counted_as_quarantined_until_it_is_released() -> None:
    async with coordinator_harness() as made:
        made.manager.admit(new_request(inputs=LARGE))
        ((edge, numbers),) = made.manager.live.send_queues.edges().items()
        assert (numbers.in_flight, numbers.quarantined) == (1, 0)
        made.manager.abort("r1", "no longer wanted")
        numbers = made.manager.live.send_queues.edges()[edge]
        assert (numbers.in_flight, numbers.quarantined) == (1, 1)
        made.coordinator.received("f1", Release(tuple(put.transfer for put in made.relays.held.values())))
        numbers = made.manager.live.send_queues.edges()[edge]
        assert (numbers.in_flight, numbers.quarantined) == (0, 0)


async def test_a_large_body_goes_by_relay_and_is_freed_by_its_receiver() -> None:
    async with coordinator_harness() as made:
        made.manager.admit(new_request(inputs=b"x" * 100_000))
        sent = only(made)
        assert sent.body.transfer
        assert sent.body.inline == b""
        assert made.manager.status()["gauges"]["transfers_in_flight"] == 1
        made.coordinator.received("f1", Release((1,)))
        assert made.manager.status()["gauges"]["transfers_in_flight"] == 0
        assert made.relays.held == {}


async def test_a_draining_instance_hands_back_what_it_has_not_begun_at_no_cost() -> None:
    async with coordinator_harness(retries=0, terminal_stages=lambda request: ["shout"]) as made:
        handle = made.manager.admit(new_request())
        made.join("f2", "front")
        made.coordinator.received("f1", HandBack("r1", only(made).header.attempt, "split"))
        made.coordinator.received("f1", Deregister("SIGTERM"))
        (again,) = made.submitted("f2")
        made.complete(again, "shout", "served")
        assert await read(handle) == [ResultEvent(stage="shout", data="served")]
        assert any(isinstance(one, Unbound) for one in made.channels.sent["f1"])
        assert made.manager.live.retried == 0


async def test_a_draining_instance_is_notified_when_nothing_is_bound_to_it_any_more() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        made.manager.admit(new_request())
        made.coordinator.received("v1", Deregister("SIGTERM"))
        assert Unbound() not in made.channels.sent["v1"]
        made.manager.admit(new_request("r2"))
        assert len(made.submitted("f1")) == 1, "it waits for another one"
        made.complete(only(made), "shout", "done")
        assert made.channels.sent["v1"].count(Unbound()) == 1


async def test_stages_that_may_hold_something_of_a_complete_request_learn_of_its_end() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        made.manager.admit(new_request())
        sent = only(made)
        made.complete(sent, "shout", "done")
        async with asyncio.timeout(60):
            while Ended((("r1", sent.header.attempt),)) not in made.channels.sent["v1"]:
                await asyncio.sleep(0.005)


async def test_a_reader_lets_its_producer_go_on() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        handle = made.manager.admit(new_request(stream=True))
        sent = only(made)
        for index in range(128):
            made.chunk(sent, "shout", index, index)
        assert not any(isinstance(one, Consumed) for one in made.channels.sent["v1"])
        events = events_of(handle)
        for _ in range(128):
            await anext(events)
        found = [one for one in made.channels.sent["v1"] if isinstance(one, Consumed)]
        assert sum(one.weight for one in found) == 128
        assert {(one.request_id, one.owner, one.source, one.target) for one in found} == {
            ("r1", "cc", "shout", "coordinator")
        }
        await events.aclose()


def taken(made: CoordinatorHarness) -> int:
    """The weight whose consumption was reported to the producer."""
    return sum(one.weight for one in made.channels.sent["v1"] if isinstance(one, Consumed))


async def test_an_unread_window_is_taken_early_while_others_wait_and_read_in_order_later() -> None:
    clock = SetClock()
    async with coordinator_harness(terminal_stages=lambda request: ["shout"], clock=clock) as made:
        handle = made.manager.admit(new_request(stream=True))
        sent = only(made)
        made.coordinator.received("v1", StreamStalled("shout", "coordinator", True))
        nearly = STREAM_WINDOW * 3 // 4
        for index in range(nearly):
            made.chunk(sent, "shout", index, index)
        clock.advance(3 * LOOK_EVERY_S)
        assert (taken(made), handle.early) == (0, 0), "nobody waits for this client"
        for index in range(nearly, STREAM_WINDOW):
            made.chunk(sent, "shout", index, index)
        clock.advance(LOOK_EVERY_S)
        assert (taken(made), handle.early) == (STREAM_WINDOW, STREAM_WINDOW)
        made.coordinator.received("v1", StreamStalled("shout", "coordinator", False))
        for index in range(STREAM_WINDOW, 2 * STREAM_WINDOW):
            made.chunk(sent, "shout", index, index)
        clock.advance(3 * LOOK_EVERY_S)
        assert taken(made) == STREAM_WINDOW, "nobody waits any more"
        made.complete(sent, "shout", "done", chunks=2 * STREAM_WINDOW)
        chunks = [event.data for event in await read(handle) if isinstance(event, ChunkEvent)]
        assert (chunks, handle.early) == (list(range(2 * STREAM_WINDOW)), 0)


@pytest.mark.parametrize("complete", [False, True])
async def test_who_holds_the_room_that_others_need_and_does_not_read_ends(complete: bool) -> None:
    """Whether it is in flight or complete and unread."""
    half = ROOM // 2
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        handles = [made.manager.admit(new_request(name, stream=True)) for name in ("r1", "r2", "r3")]
        sents = made.submitted("f1")
        made.coordinator.received("v1", StreamStalled("shout", "coordinator", True))
        for handle, sent in zip(handles[:2], sents[:2], strict=True):
            for index in range(half):
                made.chunk(sent, "shout", index, index)
            await came(partial(lambda handle: handle.early == half, handle))
            if complete:
                made.complete(sent, "shout", "done", chunks=half)
        for index in range(STREAM_WINDOW):
            made.chunk(sents[2], "shout", index, index)
        await came(lambda: handles[2].early)
        error = await error_of(handles[0])
        assert (error.code, error.message) == ("cancelled", "its client does not read")
        assert handles[0].record().state == ("completed" if complete else "cancelled")
        assert [handle.early for handle in handles] == [0, half, STREAM_WINDOW]


async def test_a_coordinator_that_was_stopped_does_not_end_a_request_whose_client_it_could_not_write_to() -> None:
    clock = SetClock()
    async with coordinator_harness(terminal_stages=lambda request: ["shout"], clock=clock) as made:
        handles = [made.manager.admit(new_request(name, stream=True)) for name in ("r1", "r2", "r3")]
        sents = made.submitted("f1")
        made.coordinator.received("v1", StreamStalled("shout", "coordinator", True))
        for sent in sents[:2]:
            for index in range(ROOM // 2):
                made.chunk(sent, "shout", index, index)
        clock.advance(2 * LOOK_EVERY_S)
        for index in range(STREAM_WINDOW):
            made.chunk(sents[2], "shout", index, index)
        clock.stop(60.0)
        clock.advance(0.0)
        assert made.aborted("v1") == [] and [handle.early for handle in handles] == [ROOM // 2, ROOM // 2, 0]
        clock.advance(2 * LOOK_EVERY_S)
        error = await error_of(handles[0])
        assert (error.code, error.message) == ("cancelled", "its client does not read")


async def test_an_answer_that_is_given_as_a_whole_has_no_slow_reader() -> None:
    clock = SetClock()
    async with coordinator_harness(terminal_stages=lambda request: ["shout"], clock=clock) as made:
        handle = made.manager.admit(new_request(stream=False))
        sent = only(made)
        made.coordinator.received("v1", StreamStalled("shout", "coordinator", True))
        for index in range(ROOM + STREAM_WINDOW):
            made.chunk(sent, "shout", index, index)
        clock.advance(3 * LOOK_EVERY_S)
        assert (handle.early, taken(made), made.aborted("v1")) == (0, ROOM + STREAM_WINDOW, [])


async def test_a_terminal_stage_that_the_request_does_not_wait_for_streams_without_a_window() -> None:
    """It also streams to a stage on the way to the terminal that is waited for: its client's window holds nobody up."""
    async with coordinator_harness(terminal_stages=lambda request: ["write"]) as made:
        handle = made.manager.admit(new_request(stream=True))
        sent = only(made)
        for index in range(3):
            made.chunk(sent, "shout", index, index)
        assert [one for one in made.channels.sent["v1"] if isinstance(one, Consumed)] == [
            Consumed("r1", sent.header.attempt, "cc", "shout", "coordinator", 0, over=True)
        ]
        made.complete(sent, "shout", chunks=3)
        made.complete(sent, "write", "text")
        assert await read(handle) == [ResultEvent(stage="write", data="text")]
        made.chunk(sent, "shout", 0, "late")
        assert sum(isinstance(one, Consumed) for one in made.channels.sent["v1"]) == 1


@pytest.mark.parametrize("waited_for", [True, False])
async def test_a_terminal_that_was_skipped_fails_who_waits_for_it_and_nobody_else(waited_for: bool) -> None:
    async with coordinator_harness(
        terminal_stages=lambda request: ["write", "shout"] if waited_for else ["write"]
    ) as made:
        handle = made.manager.admit(new_request())
        sent = only(made)
        skipped = Complete(sent.header.request_id, sent.header.attempt, "shout", skipped=True)
        made.coordinator.received("v1", skipped)
        made.complete(sent, "write", "text")
        if waited_for:
            error = await error_of(handle)
            assert (error.code, error.stage) == ("stage_failed", "shout")
        else:
            assert await read(handle) == [ResultEvent(stage="write", data="text")]


async def test_a_chunk_after_the_end_is_a_fault_of_the_stage_and_not_of_the_request_manager() -> None:
    async with coordinator_harness(retries=0) as made:
        handle = made.manager.admit(new_request())
        sent = only(made)
        made.complete(sent, "shout", "end", chunks=1)
        made.chunk(sent, "shout", 5, "beyond")
        assert (await error_of(handle)).code == "transport_failed"


async def test_a_manager_that_refuses_says_why_and_one_that_fails_ends_everything() -> None:
    async with coordinator_harness() as made:
        handles = [made.manager.admit(new_request(f"r{number}")) for number in range(3)]
        made.manager.refuse("shutting down")
        with pytest.raises(RequestError, match="shutting down") as caught:
            made.manager.admit(new_request("r9"))
        assert caught.value.code == "unavailable"
        made.manager.fail_all("the coordinator ends")
        for handle in handles:
            assert (await error_of(handle)).message == "the coordinator ends"
        assert made.manager.in_flight == 0


LARGE = "x" * 1_000_000
UNRELEASED = BODY_CREDITS + SHARED_NBYTES // len(LARGE)  #: Such bodies that an entry instance has at most.
EVENTS = ["complete shout", "complete write", "chunk", "fail", "transport", "lose", "join", "abort", "old", "hand back"]


async def live(steps: list[str], stream: bool) -> None:
    """One request under any events; at the end its deadline."""
    async with coordinator_harness() as made:
        handle = made.manager.admit(new_request(stream=stream), timeout_s=0.05)
        reader = asyncio.create_task(read(handle))
        born = 1
        chunks = {1: 0}
        for step in steps:
            sent = [one for name in list(made.channels.sent) for one in made.submitted(name)]
            latest = max(sent, key=lambda one: one.header.attempt)
            attempt = latest.header.attempt
            bound = latest.header.bindings["shout"]
            match step:
                case "complete shout" | "complete write":
                    source = step.split()[1]
                    made.complete(latest, source, chunks=chunks.get(attempt, 0) if source == "shout" else 0)
                case "chunk":
                    made.chunk(latest, "shout", chunks.setdefault(attempt, 0), "x")
                    chunks[attempt] += 1
                case "fail" | "transport":
                    made.fail(latest, "shout", "stage_failed" if step == "fail" else "transport_failed")
                case "lose":
                    made.coordinator.lost(bound)
                case "join":
                    born += 1
                    made.join(f"v{born}", "voice")
                case "abort":
                    made.manager.abort("r1", "enough")
                case "old":
                    made.complete(sent[0], "shout", "old", chunks=99)
                case "hand back":
                    made.coordinator.received("f1", HandBack("r1", attempt, "split"))
            await asyncio.sleep(0)
        outcome = (await asyncio.gather(reader, return_exceptions=True))[0]
        record = made.record("r1")
        assert record.state in ("completed", "failed", "cancelled")
        assert isinstance(outcome, RequestError) == (record.state != "completed"), outcome
        if not isinstance(outcome, BaseException):
            assert sorted(one.stage for one in outcome if isinstance(one, ResultEvent)) == ["shout", "write"]
        assert made.manager.in_flight == 0
        assert made.manager.status()["awaiting_instance"] == 0
        assert made.manager.stats.outcomes.total() == 1
        assert all(one.bound == 0 for one in made.membership.state.instances.values())
        assert all(made.manager.live.bindings.count(name) == 0 for name in made.channels.sent)


@settings(max_examples=examples(60))
@given(st.lists(st.sampled_from(EVENTS), max_size=10), st.booleans())
def test_every_admitted_request_ends_once_and_leaves_nothing_bound(steps: list[str], stream: bool) -> None:
    asyncio.run(live(steps, stream))


def test_the_revision_of_these_tests_has_every_stage_in_a_group() -> None:
    assert set(REVISION.stages.values()) == set(REVISION.groups)


async def test_no_body_is_sent_for_an_attempt_that_was_given_up() -> None:
    """It waited for a credit of the entry instance, and the next attempt goes there too."""
    async with coordinator_harness(max_in_flight=100) as made:
        for number in range(UNRELEASED):
            made.manager.admit(new_request(f"r{number}", inputs=LARGE))
        sent = made.submitted("f1")
        made.manager.admit(new_request("waits", inputs=LARGE))
        assert made.manager.live.send_queues.queued == 1
        made.coordinator.received(
            "v1", Complete("waits", sent[-1].header.attempt + 1, "shout", failure=Failure("transport_failed", "no"))
        )
        assert made.manager.live.send_queues.queued == 1, "only the second attempt's"
        (slot,) = [put.transfer for put in made.relays.held.values()][:1]
        made.coordinator.received("f1", Release((slot,)))
        (late,) = made.submitted("f1")[UNRELEASED:]
        assert (late.header.request_id, late.header.attempt) == ("waits", sent[-1].header.attempt + 2)


@pytest.mark.parametrize("busy", [False, True], ids=["a credit is free", "none is free"])
async def test_a_body_of_more_parts_than_a_message_can_name_is_the_clients_fault_and_nobody_waits_for_it(
    busy: bool,
) -> None:
    parts = [RawTensor("uint8", (4,), b"%04d" % (index % 1000)) for index in range(25_000)]
    async with coordinator_harness(max_in_flight=100) as made:
        for number in range(UNRELEASED if busy else 0):
            made.manager.admit(new_request(f"r{number}", inputs=LARGE))
        before = len(made.submitted("f1"))
        error = await error_of(made.manager.admit(new_request("bad", inputs=parts)))
        assert (error.code, error.status) == ("invalid_request", 400)
        assert "over" in error.message and made.manager.live.send_queues.queued == 0
        made.manager.admit(new_request("good"))
        assert [one.header.request_id for one in made.submitted("f1")[before:]] == ["good"]


@pytest.mark.proves("undecodable-message")
async def test_an_unreadable_message_of_an_instance_ends_its_request_at_once_and_no_other() -> None:
    async with coordinator_harness() as made:
        bad, good = made.manager.admit(new_request("bad")), made.manager.admit(new_request("good"))
        sent = made.submitted("f1")[0]
        for attempt in (sent.header.attempt + 9, sent.header.attempt):
            assert bad.tracked.failure is None, "of another attempt: said before, and nobody waits for it"
            made.coordinator.unreadable("v1", RequestRef("bad", attempt), "no message")
        made.coordinator.unreadable("v1", RequestRef("unknown", 1), "no message")
        made.coordinator.unreadable("v1", None, "no message")
        error = await error_of(bad)
        assert (error.code, error.stage, error.hook) == ("stage_failed", "shout", "receive")
        assert made.aborted("f1") == [("bad", sent.header.attempt)]
        assert good.tracked.failure is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no relay reaches {bound}", "no relay reaches the instance of 'shout'"),
        ("transfer 3 from {idle}: lost", "transfer 3 from an instance of 'voice': lost"),
        ("no connection to {own}", "no connection to the coordinator"),
        ("the author's hash is ffffffffffffffff", "the author's hash is ffffffffffffffff"),
    ],
)
async def test_a_client_reads_of_stages_and_groups_and_the_record_of_their_processes(
    text: str, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = {"bound": "0f3a9c1e55aa0001", "idle": "0f3a9c1e55aa0002", "own": "0f3a9c1e55aa0003"}
    async with coordinator_harness(joined=False, retries=0, incarnation=names["own"]) as made:
        made.join("f1", "front")
        made.join(names["bound"], "voice")
        handle = made.manager.admit(new_request())
        made.join(names["idle"], "voice")
        message = text.format(**names)  # as stages write it, of the peers that they know
        made.fail(only(made), "shout", "transport_failed", message)
        assert (await error_of(handle)).message == shown
        assert made.record("r1").error == {"code": "transport_failed", "message": message, "stage": "shout"}
        assert (message in caplog.text) == (message != shown)


async def test_an_illegal_event_is_logged_with_the_history_of_its_request(caplog: pytest.LogCaptureFixture) -> None:
    async with coordinator_harness() as made:
        handle = made.manager.admit(new_request())
        made.coordinator.lost("v1")
        handle.tracked.handle(AttemptBegan(99))  # not by the manager, which waits for an instance
        with caplog.at_level("ERROR"):
            made.join("v2", "voice")
        (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert line.startswith("request r1: AttemptBegan(number=2) in state bound; its history: unbound: AttemptBegan(")
        assert "bound: InstanceLost(stage='shout', attempt=1, blame=<Blame.NONE: 'none'>) -> unbound; " in line
        assert "unbound: AttemptBegan(number=99)" in line
