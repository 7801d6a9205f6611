"""An async generator per request that takes chunks while they come."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime.engines import events
from stage_runtime.engines.base import Engine
from stage_runtime.engines.making.loading import as_engine
from stage_runtime.errors import RequestError
from tests.engines.engine_kit import Rig, running


def streaming(fn: Any, *, sources: tuple[str, ...] = ("a",), concurrency: int = 64) -> Engine:
    return as_engine(omni.Streaming(fn, concurrency=concurrency), sources=sources)


async def relay_chunks(session: omni.Session) -> AsyncIterator[Any]:
    """The usual shape: chunks first, then the payload with the totals."""
    async for chunk in session.chunks():
        yield omni.Chunk(f"{chunk.source}{chunk.data}")
    payload = await session.payload()
    yield omni.Result(payload.data)


@pytest.mark.parametrize("payload_first", [True, False])
def test_payload_and_chunks_may_come_in_any_order(payload_first: bool) -> None:
    with running(streaming(relay_chunks)) as rig:
        if payload_first:
            rig.start("r1", "sum")
        rig.chunk("r1", 1)
        assert rig.outbox.next() == ("r1", "chunk", "a1")
        rig.chunk("r1", 2, index=1)
        rig.done("r1")
        if not payload_first:
            rig.start("r1", "sum")
        assert rig.outbox.several(2) == [("r1", "chunk", "a2"), ("r1", "done", "sum")]
        assert rig.outbox.taken == [("r1", "a")] * 2


def test_a_request_with_no_chunks_at_all_is_served() -> None:
    with running(streaming(relay_chunks)) as rig:
        rig.done("r1")
        rig.start("r1", "nothing streamed")
        assert rig.outbox.next() == ("r1", "done", "nothing streamed")


def test_chunks_of_several_sources_end_with_the_last_source() -> None:
    with running(streaming(relay_chunks, sources=("a", "b"))) as rig:
        rig.start("r1")
        rig.chunk("r1", 1, "a")
        rig.done("r1", "a")
        rig.chunk("r1", 2, "b")
        assert rig.outbox.several(2) == [("r1", "chunk", "a1"), ("r1", "chunk", "b2")]
        rig.done("r1", "b")
        assert rig.outbox.next() == ("r1", "done", None)


async def by_source(session: omni.Session) -> AsyncIterator[Any]:
    async for chunk in session.chunks("b"):
        yield omni.Chunk(f"b{chunk.data}")
    async for chunk in session.chunks("a"):
        yield omni.Chunk(f"a{chunk.data}")


def test_a_source_that_does_not_stream_here_is_not_an_empty_one() -> None:
    async def fn(session: omni.Session) -> AsyncIterator[Any]:
        yield omni.Chunk([chunk.data async for chunk in session.chunks("B")])

    with running(streaming(fn, sources=("a", "b"))) as rig:
        rig.chunk("r1", 1, "a")
        _, what, error = rig.outbox.next()
        assert what == "failed"
        assert error == "ValueError: session.chunks('B'): not a stage that streams to this one, which are 'a', 'b'"


def test_chunks_can_be_taken_by_source_and_none_is_lost() -> None:
    with running(streaming(by_source, sources=("a", "b"))) as rig:
        rig.chunk("r1", 1, "a")
        rig.chunk("r1", 2, "b")
        rig.chunk("r1", 3, "a", index=1)
        rig.done("r1", "b")
        rig.done("r1", "a")
        assert rig.outbox.several(4) == [
            ("r1", "chunk", "b2"),
            ("r1", "chunk", "a1"),
            ("r1", "chunk", "a3"),
            ("r1", "done"),
        ]
        assert sorted(rig.outbox.taken) == [("r1", "a"), ("r1", "a"), ("r1", "b")]


async def payload_then_chunks(session: omni.Session) -> AsyncIterator[Any]:
    payload = await session.payload()
    async for chunk in session.chunks():
        yield omni.Chunk(payload.data + chunk.data)


def test_a_function_that_waits_for_the_payload_first_does_not_hold_up_its_producer() -> None:
    """The producer sends its payload last; if its window filled meanwhile, both would wait for each other."""
    with running(streaming(payload_then_chunks)) as rig:
        for index in range(300):
            rig.chunk("r1", index, index=index)
        while len(rig.outbox.taken) < 300:
            pass
        rig.start("r1", 1000)
        rig.done("r1")
        assert rig.outbox.several(300) == [("r1", "chunk", 1000 + index) for index in range(300)]
        assert rig.outbox.next() == ("r1", "done")
        assert len(rig.outbox.taken) == 300  # and each is reported once


async def gives_up(session: omni.Session) -> None:
    waiting = asyncio.create_task(session.payload())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])


async def is_refused(session: omni.Session) -> None:
    with pytest.raises(RequestError, match="no payload can arrive"):
        await session.payload()


@pytest.mark.parametrize("asks", [gives_up, is_refused])
def test_a_function_that_has_given_up_on_its_payload_takes_chunks_only_when_it_reads_them(asks: Any) -> None:
    async def fn(session: omni.Session) -> AsyncIterator[Any]:
        await asks(session)
        yield omni.Chunk("goes on")
        async for _ in session.chunks("b"):
            break
        yield omni.Chunk([source for _, source in rig.outbox.taken])
        yield omni.Chunk([chunk.data async for chunk in session.chunks("a")])

    with running(streaming(fn, sources=("a", "b"))) as rig:
        rig.chunk("r1", 0)
        rig.inbox.put(events.NoPayload("r1", rig.work("r1")))
        assert rig.outbox.next() == ("r1", "chunk", "goes on")
        before = len(rig.outbox.taken)
        for index in range(1, 4):
            rig.chunk("r1", index, index=index)
        rig.chunk("r1", 0, "b")
        rig.done("r1")
        assert rig.outbox.next() == ("r1", "chunk", ["a"] * before + ["b"])
        assert rig.outbox.next() == ("r1", "chunk", [0, 1, 2, 3])


@pytest.mark.parametrize("first", ["nothing", "payload", "chunk"])
def test_a_source_that_fails_fails_the_request_with_its_words(first: str) -> None:
    with running(streaming(relay_chunks)) as rig:
        if first == "payload":
            rig.start("r1")
        if first == "chunk":
            rig.chunk("r1", 1)
            rig.outbox.next()
        rig.failed("r1", "a", "ValueError: the source is broken")
        assert rig.outbox.next() == ("r1", "failed", "RequestError: ValueError: the source is broken")
        rig.chunk("r2", 1)
        assert rig.outbox.next() == ("r2", "chunk", "a1")
        rig.abort("r2")


async def first_only(session: omni.Session) -> AsyncIterator[Any]:
    async for chunk in session.chunks():
        yield omni.Result(chunk.data)
        return


def test_chunks_that_come_after_the_function_returned_do_not_start_it_again() -> None:
    """Started again, it would wait for a payload that never comes, and keep its place for ever."""
    calls: list[str] = []

    async def counted(session: omni.Session) -> AsyncIterator[Any]:
        calls.append(session.request.id)
        async for item in first_only(session):
            yield item

    with running(streaming(counted, concurrency=1)) as rig:
        rig.chunk("r1", "early")
        assert rig.outbox.next() == ("r1", "done", "early")
        rig.chunk("r1", "late", index=1)
        rig.done("r1")
        rig.chunk("r2", "next")
        assert rig.outbox.next() == ("r2", "done", "next")
    assert calls == ["r1", "r2"]


async def broken(session: omni.Session) -> AsyncIterator[Any]:
    async for chunk in session.chunks():
        if chunk.data == "bad":
            raise ValueError("bad chunk")
        yield omni.Chunk(chunk.data)


def test_a_function_that_raises_in_mid_stream_fails_its_request_and_frees_its_place() -> None:
    with running(streaming(broken, concurrency=1)) as rig:
        rig.chunk("r1", "bad")
        rig.chunk("r1", "more", index=1)
        assert rig.outbox.next() == ("r1", "failed", "ValueError: bad chunk")
        rig.chunk("r2", "good")
        assert rig.outbox.next() == ("r2", "chunk", "good")
        rig.abort("r2")


def test_a_chunk_that_cannot_be_read_frees_the_place_of_its_request() -> None:
    with running(streaming(relay_chunks, concurrency=1)) as rig:
        rig.chunk("r1", 1)
        rig.outbox.next()
        rig.broken("r1", ValueError("garbage"))
        assert rig.outbox.next() == ("r1", "failed", "ValueError: garbage")
        rig.chunk("r2", 2)
        assert rig.outbox.next() == ("r2", "chunk", "a2")
        rig.abort("r2")


def test_an_aborted_session_is_cancelled_and_the_next_one_begins() -> None:
    cancelled = threading.Event()

    async def fn(session: omni.Session) -> AsyncIterator[Any]:
        try:
            async for chunk in session.chunks():
                yield omni.Chunk(chunk.data)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with running(streaming(fn, concurrency=1)) as rig:
        rig.chunk("r1", 1)
        rig.outbox.next()
        rig.chunk("r2", 2)
        rig.abort("r1")
        assert rig.outbox.next() == ("r2", "chunk", 2)
        assert cancelled.is_set()
        rig.abort("r2")


def test_sessions_beyond_the_concurrency_wait_with_their_chunks() -> None:
    with running(streaming(relay_chunks, concurrency=1)) as rig:
        rig.chunk("r1", 1)
        assert rig.outbox.next() == ("r1", "chunk", "a1")
        rig.chunk("r2", 2)
        rig.done("r2")
        rig.start("r2", "two")
        rig.done("r1")
        rig.start("r1", "one")
        assert rig.outbox.several(3) == [("r1", "done", "one"), ("r2", "chunk", "a2"), ("r2", "done", "two")]


def test_the_request_is_known_before_the_payload_from_the_first_chunk() -> None:
    async def fn(session: omni.Session) -> AsyncIterator[Any]:
        yield omni.Chunk(session.request.id)

    with running(streaming(fn)) as rig:
        rig.chunk("r1", 1)
        assert rig.outbox.several(2) == [("r1", "chunk", "r1"), ("r1", "done")]


def test_a_plain_coroutine_in_place_of_a_generator_is_distinguished() -> None:
    async def fn(session: omni.Session) -> None: ...

    with running(streaming(lambda session: fn(session))) as rig:  # without the lambda it is refused when it is loaded
        rig.start("r1")
        kind, message = rig.outbox.next()[1:]
        assert kind == "failed"
        assert "needs an async generator" in message


def test_a_hundred_sessions_at_once_stay_apart() -> None:
    with running(streaming(relay_chunks)) as rig:
        for index in range(100):
            rig.chunk(f"r{index}", index)
        for index in range(100):
            rig.start(f"r{index}", f"sum{index}")
            rig.done(f"r{index}")
        outputs = rig.outbox.several(200)
        for index in range(100):
            mine = [one[1:] for one in outputs if one[0] == f"r{index}"]
            assert mine == [("chunk", f"a{index}"), ("done", f"sum{index}")]


def test_closing_waits_for_a_session_at_work() -> None:
    rig = Rig(streaming(relay_chunks))
    rig.thread.start()
    rig.chunk("r1", 1)
    rig.outbox.next()
    rig.done("r1")
    rig.start("r1", "end")
    rig.close()
    assert rig.outbox.next() == ("r1", "done", "end")
