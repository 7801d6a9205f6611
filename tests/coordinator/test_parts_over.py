"""An instance ends whose part of a request is over."""

from __future__ import annotations

import pytest

from stage_runtime.coordinator.events import ChunkEvent, ResultEvent
from stage_runtime.wire.messages import InputComplete, PeerUnreachable
from tests.coordinator.manager_kit import coordinator_harness, error_of, new_request, read


@pytest.mark.proves("finished-part-ends")
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_goes_on_when_an_instance_ends_whose_part_is_over(stream: bool) -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["shout"]) as made:
        handle = made.manager.admit(new_request(stream=stream))
        (sent,) = made.submitted("f1")
        made.chunk(sent, "shout", 0, "a")
        made.coordinator.received("v1", PeerUnreachable("f1"))
        made.coordinator.lost("f1")
        made.chunk(sent, "shout", 1, "b")
        made.complete(sent, "shout", "end", chunks=2)
        events = await read(handle)
        assert [one.data for one in events if isinstance(one, ChunkEvent)] == ["a", "b"]
        assert events[-1] == ResultEvent(stage="shout", data="end")
        assert (made.record("r1").state, made.record("r1").attempt) == ("completed", 1)
        assert made.manager.live.bindings.count("f1") == made.manager.live.bindings.count("v1") == 0


@pytest.mark.proves("finished-part-ends")
async def test_an_answer_whose_source_still_streams_ends_with_it() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["write"]) as made:
        handle = made.manager.admit(new_request(stream=True))
        (sent,) = made.submitted("f1")
        made.chunk(sent, "write", 0, "a")
        made.coordinator.lost("f1")
        assert (await error_of(handle)).code == "unavailable"


@pytest.mark.proves("finished-part-ends")
@pytest.mark.parametrize("attempts_before", [0, 1])
async def test_an_answer_goes_on_when_a_source_ends_whose_stream_is_over(attempts_before: int) -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["write"]) as made:
        handle = made.manager.admit(new_request(stream=True))
        (sent,) = made.submitted("f1")
        number = sent.header.attempt - attempts_before
        made.chunk(sent, "write", 0, "a")
        made.coordinator.received("v1", InputComplete("r1", number, "write"))
        made.coordinator.lost("f1")
        made.complete(sent, "write", "end", chunks=1)
        if attempts_before:
            assert (await error_of(handle)).code == "unavailable", "an earlier attempt's input is another one"
            return
        assert (await read(handle))[-1] == ResultEvent(stage="write", data="end")
        assert (made.record("r1").state, made.record("r1").attempt) == ("completed", 1)


@pytest.mark.proves("finished-part-ends")
async def test_a_connection_that_breaks_to_a_source_whose_part_is_over_ends_no_answer() -> None:
    async with coordinator_harness(terminal_stages=lambda request: ["write"]) as made:
        handles = [made.manager.admit(new_request(name, stream=True)) for name in ("over", "hurt")]
        over, hurt = made.submitted("f1")
        for sent in (over, hurt):
            made.chunk(sent, "write", 0, "a")
        made.coordinator.received("v1", InputComplete("over", over.header.attempt, "write"))
        made.coordinator.received("v1", PeerUnreachable("f1"))
        assert (await error_of(handles[1])).code == "transport_failed"
        made.complete(over, "write", "end", chunks=1)
        assert (await read(handles[0]))[-1] == ResultEvent(stage="write", data="end")
