"""Producers that meet requests in opposite orders at a consumer with one place; and who counts as standing still."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import stage_runtime as omni
from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.engines import events
from stage_runtime.rules.flow.streams import STREAM_WINDOW
from stage_runtime.rules.flow.turns import ROOM
from stage_runtime.stage.stage import Stage
from stage_runtime.wire.messages import Complete, StreamStalled
from tests.stage.stage_kit import PATIENCE_S, World, plan, world

APART = pytest.mark.parametrize("apart", [True, False])
PLANS = [
    plan("a", next=("enda",), stream_to=("c",), entry=True),
    plan("b", next=("endb",), stream_to=("c",), entry=True),
    plan("c", terminal=True, stream_from=("a", "b")),
    plan("enda", terminal=True, inputs_from=("a",)),
    plan("endb", terminal=True, inputs_from=("b",)),
]


def pour(payload: omni.StagePayload) -> Iterator[Any]:
    for index in range(payload.data["chunks"]):
        yield omni.Chunk(index)
    yield omni.Result(None)


async def count(session: omni.Session) -> AsyncIterator[Any]:
    counts = {"a": 0, "b": 0}
    async for chunk in session.chunks():
        counts[chunk.source or ""] += 1
    yield omni.Result(counts)


async def count_b_first(session: omni.Session) -> AsyncIterator[Any]:
    counts = {}
    for source in ("b", "a"):
        counts[source] = len([0 async for _ in session.chunks(source)])
    yield omni.Result(counts)


def place(made: World, plans: list[StagePlan], functions: dict[str, Any], *, apart: bool) -> None:
    if apart:
        for one in plans:
            made.process(f"p{one.name}", [one], functions)
    else:
        made.process("p", plans, functions)


async def meet(made: World, reader: Any, *, apart: bool, chunks: int) -> None:
    """r1 comes to a first, r2 to b first, and only then the other way round."""
    met = threading.Event()

    def pour_later(payload: omni.StagePayload) -> Iterator[Any]:
        """A request that pours at once may be over at a before the other one has come to b."""
        met.wait(PATIENCE_S)
        yield from pour(payload)

    functions = {"a": pour_later, "b": pour_later, "c": omni.Streaming(reader, concurrency=1)}
    place(made, PLANS, {**functions, "enda": lambda payload: None, "endb": lambda payload: None}, apart=apart)
    data = {"chunks": chunks}
    made.submit("r1", "a", data)
    made.submit("r2", "b", data)
    try:
        await made.until(lambda: stage(made, "a").running == 1 == stage(made, "b").running)
        made.submit("r2", "a", data)
        made.submit("r1", "b", data)
    finally:
        met.set()


def read(made: World) -> dict[str, Any]:
    """request -> what c gave."""
    ends = [one for one in made.received if isinstance(one, Complete) and one.source == "c" and one.body is not None]
    return {one.request_id: made.opened(one.body, one.source) for one in ends if one.body is not None}


def stage(made: World, name: str) -> Stage:
    return next(host.stages[name] for host in made.hosts.values() if name in host.stages)


@pytest.mark.proves("opposite-orders")
@APART
@pytest.mark.parametrize("reader", [count, count_b_first])
async def test_producers_that_meet_requests_in_opposite_orders_do_not_lock_each_other_out(
    reader: Any, apart: bool
) -> None:
    chunks = 2 * STREAM_WINDOW + 50
    async with world() as made:
        await meet(made, reader, apart=apart, chunks=chunks)
        await made.until(lambda: read(made).keys() == {"r1", "r2"})
        assert not made.failed()
        await made.until(lambda: all(host.idle for host in made.hosts.values()) and made.outstanding == 0)


@pytest.mark.proves("opposite-orders")
async def test_beyond_the_bound_the_newest_request_fails_and_the_other_is_served() -> None:
    async with world() as made:
        await meet(made, count, apart=False, chunks=2 * ROOM)
        await made.until(lambda: bool(made.failed()))
        (lost,) = made.failed()
        assert (made.failed()[lost].code, made.failed()[lost].stage) == ("unavailable", "c")
        made.abort(lost)
        left = ({"r1", "r2"} - {lost}).pop()
        await made.until(lambda: left in read(made))
        assert read(made)[left] == {"a": 2 * ROOM, "b": 2 * ROOM}
        await made.until(lambda: all(host.idle for host in made.hosts.values()) and made.outstanding == 0)


async def test_a_reader_that_computes_holds_everybody_back_as_ever() -> None:
    """No lock-out: nothing is taken early though all workers of the producers wait."""
    go = threading.Event()
    taken: list[int] = []

    async def compute(session: omni.Session) -> AsyncIterator[Any]:
        while not go.is_set():
            await asyncio.sleep(0.01)
        async for _ in session.chunks():
            pass
        yield omni.Result("read")

    async with world() as made:
        await meet(made, compute, apart=True, chunks=2 * STREAM_WINDOW)
        c = stage(made, "c")
        await made.until(
            lambda: stage(made, "a").inbox.parking.at_gates == 1 == stage(made, "b").inbox.parking.at_gates
        )
        await made.settle()
        taken = [work.taken("a", 0) + sum(work._unreported.values()) for work in c.input.works()]
        assert sum(taken) == 0, "somebody's chunks were counted as taken"
        go.set()
        await made.until(lambda: read(made).keys() == {"r1", "r2"})


# --- what the watchdog asks ------------------------------------------------------------------------------------------


def hold_back(gate_of: Callable[[Any], Any]) -> Any:
    """An engine of its own that waits at its gates."""

    class Waits:
        def run(self, inbox: Any, outbox: Any, stop: Any) -> None:
            for event in inbox:
                if isinstance(event, events.Start):
                    for index in range(event.payload.data["chunks"]):
                        gate = outbox.put(events.Emit(event.request_id, omni.Chunk(index)))
                        if gate is not None:
                            gate_of(gate)
                    outbox.put(events.Done(event.request_id))

    return Waits()


@pytest.mark.proves("client-never-reads")
@pytest.mark.parametrize("producer", [pour, hold_back(lambda gate: gate.result())], ids=["generator", "engine"])
async def test_waiting_for_a_reader_is_not_stuck_and_computing_without_progress_is(producer: Any) -> None:
    """The result is the same whatever waits behind it."""
    go = threading.Event()

    async def never(session: omni.Session) -> AsyncIterator[Any]:
        import asyncio

        while not go.is_set():
            await asyncio.sleep(0.01)
        yield omni.Result(None)

    plans = [plan("a", next=("d",), stream_to=("c",), entry=True), plan("c", terminal=True, stream_from=("a",))]
    plans.append(plan("d", terminal=True, inputs_from=("a",)))

    def stuck(payload: omni.StagePayload) -> None:
        assert go.wait(PATIENCE_S)

    async with world() as made:
        functions = {"a": producer, "c": omni.Streaming(never), "d": stuck}
        place(made, plans, functions, apart=True)
        for number in range(3):
            made.submit(f"r{number}", "a", {"chunks": STREAM_WINDOW + 1})
        a, d = stage(made, "a"), stage(made, "d")
        await made.until(lambda: a.inbox.parking.at_gates == 1 and len(a.inbox) == 2)
        assert a.busy and not a.computing
        made.submit("direct", "d")
        await made.until(lambda: d.running == 1)
        assert d.computing
        go.set()
        await made.until(lambda: all(host.idle for host in made.hosts.values()))


async def test_an_engine_that_waits_for_input_of_a_request_that_it_has_begun_does_not_stand_still() -> None:
    class Gathers:
        def run(self, inbox: Any, outbox: Any, stop: Any) -> None:
            for event in inbox:
                if isinstance(event, events.StreamDone):
                    outbox.put(events.Done(event.request_id, "all"))

    plans = [plan("c", terminal=True, stream_from=("a",), entry=True)]
    async with world() as made:
        place(made, plans, {"c": Gathers()}, apart=True)
        made.submit("r1", "c")
        c = stage(made, "c")
        await made.until(lambda: c.running == 1 and c.inbox.parking.idle == 1)
        assert c.busy and not c.computing
        made.abort("r1")
        await made.until(lambda: made.hosts["pc"].idle)


async def test_a_coordinator_is_notified_that_clients_hold_a_stage_up_only_while_others_wait_for_it() -> None:
    def sent(source: str = "a") -> list[bool]:
        found = [one for one in made.received if isinstance(one, StreamStalled) and one.source == source]
        assert {one.target for one in found} <= {"coordinator"}
        return [one.stalled for one in found]

    async with world() as made:
        plans = [plan(name, terminal=True, entry=True) for name in ("a", "later")]
        place(made, plans, {"a": pour, "later": pour}, apart=True)
        for name in ("a", "later"):
            made.submit(f"r1 {name}", name, {"chunks": 2 * STREAM_WINDOW})
            await made.until(lambda name=name: stage(made, name).inbox.parking.at_gates == 1)  # type: ignore[misc]
        made.submit("r2 later", "later", {"chunks": 1})
        await made.until(lambda: sent("later") == [True])
        made.abort("r2 later")
        await made.until(lambda: sent("later") == [True, False])  # at its second look: a has looked twice before
        assert sent() == []
        made.abort("r1 later")
        made.submit("r2", "a", {"chunks": 1})
        await made.until(lambda: sent() == [True])
        made.abort("r2")
        await made.until(lambda: sent() == [True, False])
        made.submit("r3", "a", {"chunks": 1})
        await made.until(lambda: sent() == [True, False, True])
        made.abort("r1 a")
        await made.until(lambda: sent() == [True, False, True, False])
        await made.until(lambda: all(host.idle for host in made.hosts.values()))
