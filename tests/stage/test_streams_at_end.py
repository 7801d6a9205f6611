"""A target in ``streamAtEnd`` gets a stage's chunks when it has ended: the same ones, and nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime.rules.flow.streams import STREAM_WINDOW
from stage_runtime.wire.messages import Complete
from tests.stage.stage_kit import World, plan, world

MANY = 4 * STREAM_WINDOW
APART = pytest.mark.parametrize("apart", [True, False])
PATIENCE_S = 30.0


async def read_all(session: omni.Session) -> AsyncIterator[Any]:
    yield omni.Result([chunk.data async for chunk in session.chunks()])


async def read_one(session: omni.Session) -> AsyncIterator[Any]:
    async for chunk in session.chunks():
        yield omni.Result(chunk.data)
        return


def place(made: World, produce: Any, read: Any, *, apart: bool, **fields: Any) -> None:
    """a streams to b, to c as it goes, and gives d its result."""
    plans = [
        plan("a", entry=True, next=("d",), stream_to=("b", "c"), stream_at_end=("b",), **fields),
        plan("b", terminal=True, stream_from=("a",)),
        plan("c", terminal=True, stream_from=("a",)),
        plan("d", terminal=True, inputs_from=("a",)),
    ]
    functions = {"a": produce, "b": omni.Streaming(read), "c": omni.Streaming(read_all), "d": lambda got: got.data}
    for name, some in [(one.name, [one]) for one in plans] if apart else [("p", plans)]:
        made.process(name, some, functions)


def found(made: World) -> dict[str, Any]:
    """The output of each stage for its request "r"."""
    ends = [one for one in made.received if isinstance(one, Complete)]
    return {one.source: made.opened(one.body, one.source) for one in ends if one.body is not None}


@APART
async def test_no_chunk_comes_before_the_end_and_then_all_do(apart: bool) -> None:
    go_on, heard = threading.Event(), threading.Event()

    async def listen(session: omni.Session) -> AsyncIterator[Any]:
        read = []
        async for chunk in session.chunks():
            heard.set()
            read.append([chunk.index, chunk.data])
        yield omni.Result(read)

    def produce(payload: omni.StagePayload) -> Iterator[Any]:
        for index in range(5):
            yield omni.Chunk(index)
        assert go_on.wait(PATIENCE_S)
        yield omni.Result("done")

    async with world() as made:
        place(made, produce, listen, apart=apart)
        made.submit("r", "a", 1)
        await made.settle()
        assert not heard.is_set()
        go_on.set()
        await made.until(lambda: found(made).keys() == {"b", "c", "d"})
        assert found(made) == {"b": [[index, index] for index in range(5)], "c": [0, 1, 2, 3, 4], "d": "done"}
        await made.until(lambda: all(host.idle for host in made.hosts.values()))


@APART
async def test_more_chunks_than_a_window_arrive_though_none_is_taken_meanwhile(apart: bool) -> None:
    def produce(payload: omni.StagePayload) -> Iterator[Any]:
        for index in range(MANY):
            yield omni.Chunk(index, to="b")
        yield omni.Result("done")

    async with world() as made:
        place(made, produce, read_all, apart=apart)
        made.submit("r", "a", 1)
        await made.until(lambda: found(made).keys() == {"b", "c", "d"})
        assert found(made)["b"] == list(range(MANY))
        await made.until(lambda: all(host.idle for host in made.hosts.values()))


@APART
async def test_a_consumer_that_takes_one_chunk_and_leaves_holds_nothing_back(apart: bool) -> None:
    def produce(payload: omni.StagePayload) -> Iterator[Any]:
        for index in range(MANY):
            yield omni.Chunk(index)
        yield omni.Result("done")

    async with world() as made:
        place(made, produce, read_one, apart=apart)
        made.submit("r", "a", 1)
        await made.until(lambda: found(made).keys() == {"b", "c", "d"})
        assert found(made)["b"] == 0
        await made.until(lambda: all(host.idle for host in made.hosts.values()))


@APART
async def test_a_chunk_is_kept_as_it_was_when_it_was_given(apart: bool) -> None:
    def produce(payload: omni.StagePayload) -> Iterator[Any]:
        same = {"count": 0}
        for index in range(3):
            same["count"] = index
            yield omni.Chunk({"same": same})
        yield omni.Result("done")

    async with world() as made:
        place(made, produce, read_all, apart=apart)
        made.submit("r", "a", 1)
        await made.until(lambda: found(made).keys() == {"b", "c", "d"})
        assert found(made)["b"] == found(made)["c"] == [{"same": {"count": index}} for index in range(3)]


@APART
async def test_a_stage_that_fails_gives_none_of_what_was_kept_and_a_bad_chunk_fails_its_request(apart: bool) -> None:
    def produce(payload: omni.StagePayload) -> Iterator[Any]:
        yield omni.Chunk("kept", to="b")
        if payload.data == "odd":
            yield omni.Chunk({1, 2}, to="b")
        raise ValueError("half way")

    async with world() as made:
        place(made, produce, read_all, apart=apart)
        made.submit("r", "a", 1)
        made.submit("odd", "a", "odd")
        await made.until(lambda: made.failed().keys() >= {"r", "odd"})
        assert found(made) == {}
        for name in ("r", "odd"):
            made.abort(name)
        await made.until(lambda: all(host.idle for host in made.hosts.values()))
        assert made.outstanding == 0


@APART
async def test_an_abort_frees_what_was_kept(apart: bool) -> None:
    go_on = threading.Event()

    def produce(payload: omni.StagePayload) -> Iterator[Any]:
        yield omni.Chunk(b"x" * 100_000, to="b")
        assert go_on.wait(PATIENCE_S)
        yield omni.Result("done")

    async with world() as made:
        place(made, produce, read_all, apart=apart)
        made.submit("r", "a", 1)
        await made.settle()
        made.abort("r")
        go_on.set()
        await made.until(lambda: all(host.idle for host in made.hosts.values()))
        assert (found(made), made.outstanding) == ({}, 0)
