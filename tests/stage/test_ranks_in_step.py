"""All ranks begin and end what one rank of a TP stage begins, in one order: else a collective waits for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import stage_runtime as omni
from stage_runtime.engines import events
from stage_runtime.engines.making.loading import as_engine
from stage_runtime.stage.ranks.rank_following import FollowedWork, FollowerInbox, FollowerOutput
from stage_runtime.stage.ranks.tensor_parallel import LeaderInbox, WorkKey, couple
from stage_runtime.wire.values import OmniRequest, StagePayload
from tests.engines.engine_kit import OneWork, Opening, Recorder
from tests.stage.stage_kit import PATIENCE_S, plan, world

BAD = {"an object": object(), "to nobody": omni.Chunk(1, to="ghost"), "a client's text": omni.Text(5)}  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", ["sync", "async", "streaming", "custom"])
async def test_a_chunk_that_rank_0_alone_cannot_send_fails_the_request_and_not_the_computation(
    kind: str, bad: str
) -> None:
    steps: list[str] = []
    ended = threading.Event()
    given = BAD[bad] if isinstance(BAD[bad], omni.Chunk) else omni.Chunk(BAD[bad])

    def produce(payload: omni.StagePayload) -> Iterator[Any]:
        for step in "abc":
            steps.append(step)
            yield given
        ended.set()

    async def asynchronous(payload: omni.StagePayload) -> AsyncIterator[Any]:
        for chunk in produce(payload):
            yield chunk

    async def streaming(session: omni.Session) -> AsyncIterator[Any]:
        for chunk in produce(await session.payload()):
            yield chunk

    class Custom:
        def run(self, inbox: Any, outbox: Any, stop: threading.Event) -> None:
            for event in inbox:
                if isinstance(event, events.Start):
                    for chunk in produce(event.payload):
                        outbox.put(events.Emit(event.request_id, chunk))
                    outbox.put(events.Done(event.request_id))

    functions = {
        "sync": produce,
        "async": omni.Simple(asynchronous, concurrency=1),
        "streaming": omni.Streaming(streaming, concurrency=1),
        "custom": Custom(),
    }
    async with world() as made:
        made.process("pa", [plan("a", terminal=True, tp_size=2)], {"a": functions[kind]})
        made.submit("r1", "a")
        await made.until(lambda: "r1" in made.failed() and ended.is_set())
        assert steps == ["a", "b", "c"]
        assert made.failed()["r1"].code == "stage_failed"
        assert made.streamed("r1") == [] and made.failures == []
        await made.until(lambda: made.hosts["pa"].idle)


@pytest.mark.parametrize("kind", ["async", "streaming"])
async def test_an_aborted_function_goes_on_as_on_the_other_ranks_until_the_process_ends(kind: str) -> None:
    begun, computed, ended = threading.Event(), threading.Event(), threading.Event()
    loop: list[asyncio.AbstractEventLoop] = []
    go = asyncio.Event()

    async def compute(payload: omni.StagePayload) -> None:
        loop.append(asyncio.get_running_loop())
        begun.set()
        try:
            await go.wait()
            computed.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def streaming(session: omni.Session) -> AsyncIterator[Any]:
        await compute(await session.payload())
        yield omni.Result(None)

    functions = {"async": omni.Simple(compute, concurrency=1), "streaming": omni.Streaming(streaming, concurrency=1)}
    async with world() as made:
        made.process("pa", [plan("a", terminal=True, tp_size=2)], {"a": functions[kind]})
        made.submit("r1", "a")
        await made.until(begun.is_set)
        made.abort("r1")
        await made.settle()
        loop[0].call_soon_threadsafe(go.set)
        await made.until(computed.is_set)
        assert not ended.is_set()
    assert ended.is_set()


class Rank:
    """One rank's engine. Messages that it is given before `start` have come at once, as far as its function can
    tell.
    """

    def __init__(self, function: Any, sources: tuple[str, ...] = ("s", "t")) -> None:
        self.engine = as_engine(function, sources=sources)
        couple(self.engine, "a")
        self.inbox = FollowerInbox()
        output = FollowerOutput("a", failed=lambda key, error: None, crashed=lambda error: None)
        self.thread = threading.Thread(
            target=self.engine.run, args=(self.inbox, output, threading.Event()), daemon=True
        )

    def close(self) -> None:
        self.inbox.close()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "the engine does not end"


def made_events(kinds: Sequence[str]) -> list[Any]:
    """``chunk r1`` and the like; at last each request is aborted, so that nothing waits."""
    works: dict[str, FollowedWork] = {}
    counts: dict[str, int] = {}
    made: list[Any] = []
    for one in kinds:
        kind, name = one.split()
        work = works.setdefault(name, FollowedWork(WorkKey("cc", name, 1)))
        request = OmniRequest(id=name)
        match kind:
            case "start":
                made.append(events.Start(name, StagePayload(request=request, data=f"{name} payload"), work))
            case "chunk":
                index = counts[name] = counts.get(name, -1) + 1
                chunk = omni.Chunk(f"{name} {index}", source="s", index=index, request=request)
                made.append(events.ChunkIn(name, chunk, work))
            case "done":
                made.append(events.StreamDone(name, "s", work, request))
            case "abort":
                made.append(events.Abort(name, work))
            case "failed":
                made.append(events.StreamFailed(name, "t", "ValueError: no", work))
    return [*made, *(events.Abort(name, work) for name, work in works.items())]


class Steps:
    """The steps that a function has computed."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def take(self, step: str) -> None:
        self.taken.append(step)

    async def every_chunk(self, session: omni.Session) -> AsyncIterator[Any]:
        async for chunk in session.chunks():
            self.take(chunk.data)
        self.take("end")
        yield omni.Result(None)

    async def of_s(self, session: omni.Session) -> AsyncIterator[Any]:
        async for chunk in session.chunks("s"):
            self.take(chunk.data)
        self.take("end of s")
        async for _ in session.chunks("t"):
            pass
        yield omni.Result(None)

    async def first_chunk(self, session: omni.Session) -> AsyncIterator[Any]:
        async for chunk in session.chunks():
            self.take(chunk.data)
            yield omni.Result(None)
            return

    async def payload_first(self, session: omni.Session) -> AsyncIterator[Any]:
        payload = await session.payload()
        self.take(payload.data)
        async for chunk in session.chunks("s"):
            self.take(chunk.data)
        yield omni.Result(None)

    async def simple(self, payload: omni.StagePayload) -> None:
        self.take(f"{payload.request.id} begun")
        await asyncio.sleep(0)
        self.take(f"{payload.request.id} ended")


BOTH = ["r1 begun", "r1 ended", "r2 begun", "r2 ended"]
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "aborted": ("every_chunk", ["chunk r1", "chunk r1", "abort r1"], ["r1 0", "r1 1"]),
    "a source failed": ("every_chunk", ["chunk r1", "chunk r1", "failed r1"], ["r1 0", "r1 1"]),
    "a source failed before others' chunks": ("every_chunk", ["chunk r1", "failed r1", "chunk r1"], ["r1 0"]),
    "aborted after the end": ("of_s", ["chunk r1", "done r1", "abort r1"], ["r1 0", "end of s"]),
    "aborted with its payload": ("payload_first", ["start r1", "chunk r1", "abort r1"], ["r1 payload", "r1 0"]),
    "aborted before its payload": ("payload_first", ["chunk r1", "abort r1", "start r1"], []),
    "aborted as it comes": ("payload_first", ["abort r1"], []),
    "failed before it is known": ("every_chunk", ["failed r1", "abort r1"], []),
    "the next one aborted": ("first_chunk", ["chunk r1", "chunk r2", "abort r2", "chunk r3"], ["r1 0", "r2 0", "r3 0"]),
    "late chunks": ("first_chunk", ["chunk r1", "chunk r1", "done r1", "chunk r2"], ["r1 0", "r2 0"]),
    "a function aborted": ("simple", ["start r1", "abort r1", "start r2"], BOTH),
    "functions aborted": ("simple", ["start r1", "start r2", "abort r2"], BOTH),
}


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one by one"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_the_same_however_much_of_it_comes_at_once(case: str, at_once: bool) -> None:
    function, kinds, expected = CASES[case]
    steps = Steps()
    fn = getattr(steps, function)
    rank = Rank(omni.Simple(fn, concurrency=1) if function == "simple" else omni.Streaming(fn, concurrency=1))
    if at_once:
        for event in made_events(kinds):
            rank.inbox.follow(event)
        rank.thread.start()
    else:
        rank.thread.start()
        for event in made_events(kinds):
            rank.inbox.follow(event)
            turn(rank)
    rank.close()
    assert steps.taken == expected


def turn(rank: Rank) -> None:
    """Wait until the rank has taken what was there, and its tasks have had their steps."""
    while len(rank.inbox):
        time.sleep(0.001)
    time.sleep(0.02)  # a rank that is slower than this fails no test: it proves less


def test_a_follower_that_is_through_with_an_aborted_request_begins_it_no_second_time() -> None:
    """Rank 0's abort is known to the follower's I/O thread before its engine has taken the chunks before it."""
    steps = Steps()
    rank = Rank(omni.Streaming(steps.first_chunk, concurrency=1))
    for event in made_events(["chunk r1", "chunk r1", "chunk r1", "abort r1"]):
        rank.inbox.follow(event)
    rank.thread.start()
    rank.close()
    assert steps.taken == ["r1 0"]


def test_a_request_aborted_before_its_turn_is_never_begun_on_any_rank() -> None:
    begun, calls = threading.Event(), list[tuple[str, str]]()
    loop: list[asyncio.AbstractEventLoop] = []
    go = asyncio.Event()

    async def compute(payload: omni.StagePayload) -> None:
        loop.append(asyncio.get_running_loop())
        begun.set()
        await go.wait()

    def record_call(kind: str, work: Any = None, fields: dict[str, Any] | None = None) -> None:
        calls.append((kind, work.request_id))

    engine = as_engine(omni.Simple(compute, concurrency=1), sources=())
    couple(engine, "a")
    outbox, stop = Recorder(), threading.Event()
    inbox = LeaderInbox(lambda work, error: outbox.fail(work, error), record_call)
    thread = threading.Thread(target=engine.run, args=(inbox, outbox, stop), daemon=True)
    thread.start()
    works = {name: OneWork(name) for name in ("r1", "r2", "r3")}
    for name, work in works.items():
        payload = StagePayload(request=OmniRequest(id=name), data=np.zeros(1))
        inbox.put(Opening(work, events.Start(name, payload, work)))
        assert begun.wait(PATIENCE_S)
    works["r2"].over = True
    inbox.abort(works["r2"])
    loop[0].call_soon_threadsafe(go.set)
    assert outbox.several(2) == [("r1", "done", None), ("r3", "done", None)]
    stop.set()
    inbox.close()
    thread.join(PATIENCE_S)
    assert calls == [("start", "r1"), ("start", "r3")]
