"""However a request ends here, nothing of it is left: engines drop it, `finally` runs, send queues and relays are
free.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import stage_runtime as omni
from omnipipeline_spec.types.plan import RelayPlan
from stage_runtime.engines import events
from stage_runtime.engines.making.loading import as_engine
from stage_runtime.stage.ranks.rank_following import Follower, FollowerInbox, FollowerOutput
from stage_runtime.stage.ranks.tensor_parallel import couple
from stage_runtime.transfers.sending import attempt_key
from stage_runtime.wire.messages import Ended, RankWork, Welcome
from stage_runtime.wire.parts import Member
from stage_runtime.wire.values import OmniRequest
from tests.stage.stage_kit import OWNER, PATIENCE_S, World, plan, world

LARGE = 100_000


def by_abort(made: World) -> None:
    made.abort("r1")


def by_the_end(made: World) -> None:
    for name in made.hosts:
        made.send(OWNER, name, Ended((("r1", 1),)))


def by_a_lost_coordinator(made: World) -> None:
    for host in made.hosts.values():
        host.lost(OWNER)


@pytest.mark.proves("nothing-left")
@pytest.mark.parametrize("end", [by_abort, by_the_end, by_a_lost_coordinator])
async def test_whatever_ends_a_request_nothing_of_it_is_left(end: Any) -> None:
    """a is through, with its result waiting for a slot; b waits for its reader; c waits for chunks."""
    ended = {name: threading.Event() for name in "bc"}

    def produce(payload: omni.StagePayload) -> Iterator[Any]:
        try:
            while True:
                yield omni.Chunk(0)
        finally:
            ended["b"].set()

    async def consume(session: omni.Session) -> AsyncIterator[Any]:
        try:
            await asyncio.Event().wait()
            yield omni.Result(None)
        finally:
            ended["c"].set()

    def stay(payload: omni.StagePayload) -> Iterator[Any]:
        yield omni.Result(None)

    plans = {
        "a": plan("a", entry=True, next=("d",), relay=RelayPlan(credits=4)),
        "b": plan("b", entry=True, next=("d",), stream_to=("c",)),
        "c": plan("c", terminal=True, stream_from=("b",)),
        "d": plan("d", terminal=True, inputs_from=("a", "b")),
    }
    functions = {"a": lambda _: np.zeros(LARGE), "b": produce, "c": omni.Streaming(consume), "d": stay}
    async with world() as made:
        for name, one in plans.items():
            made.process(f"p{name}", [one], functions, slots=0 if name == "a" else 1000)
        made.submit("r1", "a")
        made.submit("r1", "b")
        a, b, c = (made.hosts[f"p{name}"] for name in "abc")
        await made.until(lambda: a.process.send_queues.queued == 1 and a.stages["a"].running == 0)
        await made.until(lambda: b.stages["b"].inbox.parking.at_gates == 1 and c.stages["c"].running == 1)
        end(made)
        await made.until(lambda: all(one.is_set() for one in ended.values()))
        await made.until(lambda: all(host.idle for host in made.hosts.values()))
        assert a.process.send_queues.queued == 0
        for host in (a, b, c):
            assert attempt_key(OWNER, "r1", 1) in made.relays[host.process.incarnation].cleaned


@pytest.mark.proves("nothing-left")
async def test_late_messages_of_a_lost_coordinator_start_nothing_and_are_freed() -> None:
    """A neighbour has not noticed yet. Its slot comes back; when the coordinator is back its requests are served."""
    begun: list[str] = []

    def note(payload: omni.StagePayload) -> int:
        begun.append(payload.request.id)
        return len(payload.data)

    async with world() as made:
        made.process("pa", [plan("a", entry=True, next=("b",))], {"a": lambda _: b"x" * LARGE})
        made.process("pb", [plan("b", terminal=True, inputs_from=("a",))], {"b": note})
        b = made.hosts["pb"]
        b.lost(OWNER)
        made.submit("late", "a")
        await made.until(lambda: b.process.counters["orphaned_requests"] == 1)
        await made.until(lambda: made.outstanding == 0)
        assert begun == [] and b.idle
        b.requests._lost_owners.clear()  # as Welcome does it
        made.submit("next", "a")
        await made.until(lambda: made.results().get("next") == LARGE)
        assert begun == ["next"]


@pytest.mark.proves("frozen-coordinator")
async def test_late_messages_of_attempts_that_a_coordinator_has_ended_meanwhile_start_nothing_and_are_freed() -> None:
    """It is back, and a neighbour has not heard yet that the attempt is over."""
    begun: list[str] = []

    def note(payload: omni.StagePayload) -> int:
        begun.append(payload.request.id)
        return len(payload.data)

    async with world() as made:
        made.process("pa", [plan("a", entry=True, next=("b",))], {"a": lambda _: b"x" * LARGE})
        made.process("pb", [plan("b", terminal=True, inputs_from=("a",))], {"b": note})
        b = made.hosts["pb"]
        b.lost(OWNER)
        for attempts_over in (7, 0):  # the second one is to another address of ours
            me = Member(OWNER, "coordinator", "", "", "", {}, (), attempts_over=attempts_over)
            b.received(OWNER, Welcome("ipc:///pub", me, "via"))
        made.submit("late", "a", attempt=7)
        await made.until(lambda: b.process.counters["orphaned_requests"] == 1)
        await made.until(lambda: made.outstanding == 0)
        assert begun == [] and b.idle
        made.submit("next", "a", attempt=8)
        await made.until(lambda: made.results().get("next") == LARGE)
        assert begun == ["next"]


@pytest.mark.proves("nothing-left")
@pytest.mark.parametrize("kind", ["waits for chunks", "gets an abort"])
def test_a_follower_whose_leader_is_gone_or_has_aborted_runs_finally_blocks(kind: str) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def consume(session: omni.Session) -> AsyncIterator[Any]:
        begun.set()
        try:
            async for _ in session.chunks():
                pass
            yield omni.Result(None)
        finally:
            ended.set()

    inbox = FollowerInbox()
    follower = Follower(inbox)
    silence = FollowerOutput("s", failed=lambda key, error: None, crashed=lambda error: None)
    engine = as_engine(omni.Streaming(consume, concurrency=1), sources=("a",))
    couple(engine, "s")
    thread = threading.Thread(target=engine.run, args=(inbox, silence, threading.Event()))
    thread.start()
    inbox.follow(events.ChunkIn("r1", omni.Chunk(1, source="a", request=OmniRequest(id="r1")), work_of(follower)))
    assert begun.wait(PATIENCE_S)
    if kind == "gets an abort":
        follower.work(RankWork(0, "abort", "r1", OWNER, 1), None)
    else:
        follower.abort_all()
    assert ended.wait(PATIENCE_S)
    inbox.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def work_of(follower: Follower) -> Any:
    from stage_runtime.stage.ranks.tensor_parallel import WorkKey

    return follower._work(WorkKey(OWNER, "r1", 1))
