"""A coordinator keeps a bounded part of answers that nobody has read: of each answer, and of all."""

from __future__ import annotations

import numpy as np

from stage_runtime.coordinator.answering.request_handles import RequestHandle
from stage_runtime.coordinator.answering.unread_answers import EVENT_NBYTES, MIB, AnswerLimits
from stage_runtime.coordinator.events import ChunkEvent
from stage_runtime.rules.requests.readers import PATIENCE_S
from stage_runtime.wire.messages import Submit
from tests.coordinator.manager_kit import (
    CoordinatorHarness,
    coordinator_harness,
    error_of,
    events_of,
    new_request,
    read,
)

PIECE = 60_000
LIMITS = AnswerLimits(of_one=MIB, of_all=4 * MIB)
FILLS_ONE = MIB // (PIECE + EVENT_NBYTES) + 1
FILLS_ALL = 4 * MIB // (PIECE + EVENT_NBYTES) + 1


def admitted(made: CoordinatorHarness, request_id: str, *, stream: bool) -> tuple[RequestHandle, Submit]:
    handle = made.manager.admit(new_request(request_id, stream=stream))
    return handle, made.submitted("f1")[-1]


def give(made: CoordinatorHarness, sent: Submit, pieces: range) -> None:
    for index in pieces:
        made.chunk(sent, "shout", index, np.zeros(PIECE, np.uint8))


async def test_an_answer_that_is_not_streamed_and_too_large_fails_alone() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"], answer_limits=LIMITS) as made:
        endless, sent = admitted(made, "endless", stream=False)
        other, other_sent = admitted(made, "other", stream=False)
        give(made, other_sent, range(2))
        give(made, sent, range(10 * FILLS_ONE))
        error = await error_of(endless)
        problem = "its answer takes more than 1 MiB, the most that is kept of an answer that is not streamed"
        assert (error.code, error.stage, error.message) == ("stage_failed", "shout", f"{problem}: ask for a stream")
        assert made.aborted("v1") == [("endless", sent.header.attempt)]
        assert endless.unread_nbytes == 0
        made.complete(other_sent, "shout", chunks=2, has_data=False)
        assert [event.stage for event in await read(other)] == ["shout"] * 3


async def test_a_result_that_is_too_large_fails_its_request() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"], answer_limits=LIMITS) as made:
        handle, sent = admitted(made, "r1", stream=False)
        made.complete(sent, "shout", b"x" * (MIB + 1))
        assert (await error_of(handle)).code == "stage_failed"


async def test_many_small_chunks_count_with_what_they_take_beside_their_values() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"], answer_limits=LIMITS) as made:
        handle, sent = admitted(made, "r1", stream=False)
        for index in range(MIB // EVENT_NBYTES + 1):
            made.chunk(sent, "shout", index, None)
        assert (await error_of(handle)).code == "stage_failed"


async def test_beyond_the_room_of_all_the_client_that_has_read_nothing_for_longest_ends_and_others_go_on() -> None:
    """No stage is stalled: nobody waits for the instance."""
    async with coordinator_harness(terminal_stages=lambda request: ["shout"], answer_limits=LIMITS) as made:
        idle, idle_sent = admitted(made, "idle", stream=True)
        give(made, idle_sent, range(5))
        idle.read_at -= PATIENCE_S
        busy, busy_sent = admitted(made, "busy", stream=True)
        give(made, busy_sent, range(FILLS_ALL - 5))
        error = await error_of(idle)
        assert (error.code, error.message) == ("cancelled", "its client does not read")
        events = events_of(busy)
        given = [await anext(events) for _ in range(FILLS_ALL - 5)]
        assert [event.index for event in given if isinstance(event, ChunkEvent)] == list(range(FILLS_ALL - 5))
        assert busy.unread_nbytes == 0
        await events.aclose()


async def test_beyond_the_room_of_all_the_largest_answer_ends_where_every_client_reads() -> None:
    limits = AnswerLimits(of_one=4 * MIB, of_all=4 * MIB)
    async with coordinator_harness(terminal_stages=lambda request: ["shout"], answer_limits=limits) as made:
        small, small_sent = admitted(made, "small", stream=True)
        give(made, small_sent, range(5))
        large, large_sent = admitted(made, "large", stream=False)
        give(made, large_sent, range(FILLS_ALL))
        error = await error_of(large)
        assert (error.code, error.retry_after_s) == ("rate_limited", 1.0)
        assert "4 MiB (OMNI_HTTP_ANSWERS_MB)" in error.message
        made.complete(small_sent, "shout", chunks=5, has_data=False)
        assert len(await read(small)) == 6


async def test_a_complete_answer_that_nobody_reads_gives_its_room_to_others() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"], answer_limits=LIMITS) as made:
        unread, unread_sent = admitted(made, "unread", stream=True)
        give(made, unread_sent, range(FILLS_ALL - 1))
        made.complete(unread_sent, "shout", chunks=FILLS_ALL - 1, has_data=False)
        unread.read_at -= PATIENCE_S
        other, other_sent = admitted(made, "other", stream=True)
        give(made, other_sent, range(5))
        made.complete(other_sent, "shout", chunks=5, has_data=False)
        assert (await error_of(unread)).code == "cancelled"
        assert unread.record().state == "completed"
        assert len(await read(other)) == 6


async def test_what_is_read_dropped_or_never_delivered_takes_no_room() -> None:
    """Chunks out of order, a result before its chunks, an attempt that is given up, an abort, a closed reader."""
    async with coordinator_harness(terminal_stages=lambda request: ["shout"], answer_limits=LIMITS, retries=1) as made:
        ended = []
        for number in range(4):
            handle, sent = admitted(made, f"r{number}", stream=number % 2 == 0)
            made.chunk(sent, "shout", 1, b"x" * PIECE)
            made.complete(sent, "shout", b"y" * PIECE, chunks=2)
            assert handle.unread_nbytes > 2 * (PIECE + EVENT_NBYTES)
            ended.append((handle, sent))
        (one, one_sent), (two, _), (three, three_sent), (_, four_sent) = ended
        made.chunk(one_sent, "shout", 0, "first")
        assert len(await read(one)) == 3
        two.abort("no")
        made.fail(four_sent, "shout", "transport_failed")
        made.chunk(three_sent, "shout", 0, "first")
        events = events_of(three)
        await anext(events)
        await events.aclose()
        assert [handle.unread_nbytes for handle, _ in ended] == [0, 0, 0, 0]


async def test_an_attempt_that_was_given_up_takes_no_room_while_the_request_waits_for_another_instance() -> None:
    """A request without an attempt could not be ended for the room that its lost answer takes."""
    async with coordinator_harness(terminal_stages=lambda request: ["shout"], answer_limits=LIMITS, retries=1) as made:
        waiting, sent = admitted(made, "waiting", stream=False)
        give(made, sent, range(5))
        made.chunk(sent, "shout", 6, "early")
        made.coordinator.lost("v1")
        assert (waiting.tracked.live, waiting.unread_nbytes) == (True, 0)
        made.join("v2", "voice")
        again = made.submitted("f1")[-1]
        made.chunk(again, "shout", 0, "whole")
        made.complete(again, "shout", chunks=1, has_data=False)
        assert [event.data for event in await read(waiting) if isinstance(event, ChunkEvent)] == ["whole"]
