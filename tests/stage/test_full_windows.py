"""Waits at a full window that end early: the gate stays the runtime's, and the request ends as every other."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime.engines import events
from stage_runtime.engines.gates import Gate
from stage_runtime.rules.flow.streams import STREAM_WINDOW
from tests.stage.stage_kit import PATIENCE_S, World, plan, world

Full = concurrent.futures.Future[None]  #: Set once the window is full.


def placed(made: World, produce: Any, consume: Any) -> None:
    plans = [
        plan("a", next=("b",), stream_to=("b",)),
        plan("b", terminal=True, inputs_from=("a",), stream_from=("a",)),
    ]
    made.process("p", plans, {"a": produce, "b": omni.Streaming(consume)})


async def never(session: omni.Session) -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield omni.Result(None)


def once(full: Full, act: Callable[[], object]) -> None:
    """Call ``act`` on this loop once the window is full."""
    loop = asyncio.get_running_loop()
    full.add_done_callback(lambda _: loop.call_soon_threadsafe(act))


async def bounded(full: Full, payload: omni.StagePayload) -> AsyncIterator[Any]:
    async with asyncio.timeout(None) as limit:
        once(full, lambda: limit.reschedule(0))
        while True:
            yield omni.Chunk(0)


async def grouped(full: Full, payload: omni.StagePayload) -> AsyncIterator[Any]:
    breaks = asyncio.Event()
    once(full, breaks.set)

    async def broken() -> None:
        await breaks.wait()
        raise ValueError("the side task is broken")

    async with asyncio.TaskGroup() as group:
        group.create_task(broken())
        while True:
            yield omni.Chunk(0)


async def cancelled(full: Full, payload: omni.StagePayload) -> AsyncIterator[Any]:
    own = asyncio.current_task()
    assert own is not None
    once(full, own.cancel)
    while True:
        yield omni.Chunk(0)


@pytest.mark.parametrize("produce", [bounded, grouped, cancelled])
async def test_a_request_whose_wait_at_a_full_window_is_cancelled_by_its_own_code_fails_at_once(produce: Any) -> None:
    full = Full()
    async with world() as made:
        placed(made, partial(produce, full), never)
        made.submit("r1", "a")
        await made.until(lambda: made.hosts["p"].stages["a"].inbox.parking.at_gates == 1)
        full.set_result(None)
        await made.until(lambda: "r1" in made.failed())
        failure = made.failed()["r1"]
        assert (failure.code, failure.stage, failure.hook) == ("stage_failed", "a", "run")
        made.abort("r1")
        await made.until(lambda: made.hosts["p"].idle)
        assert made.failures == []


async def test_a_loop_that_gives_up_waiting_for_a_gate_finds_it_closed_until_its_consumer_has_caught_up() -> None:
    sent = 0
    go = asyncio.Event()
    consumer_loop: list[asyncio.AbstractEventLoop] = []
    gave_up = threading.Event()

    class Impatient:
        def run(self, inbox: Any, outbox: Any, stop: threading.Event) -> None:
            for event in inbox:
                if isinstance(event, events.Start):
                    asyncio.run(self.stream(event.request_id, outbox))

        async def stream(self, request_id: str, outbox: Any) -> None:
            nonlocal sent
            for number in range(2 * STREAM_WINDOW):
                sent += 1
                gate = outbox.put(events.Emit(request_id, omni.Chunk(number)))
                while gate is not None and not gate.done():
                    try:
                        await asyncio.wait_for(asyncio.wrap_future(gate), 0.01)
                    except TimeoutError:
                        gave_up.set()
            outbox.put(events.Done(request_id))

    async def consume(session: omni.Session) -> AsyncIterator[Any]:
        consumer_loop.append(asyncio.get_running_loop())
        await go.wait()
        yield omni.Result([chunk.data async for chunk in session.chunks()])

    async with world() as made:
        placed(made, Impatient(), consume)
        made.submit("r1", "a")
        await made.until(lambda: gave_up.is_set() and bool(consumer_loop))
        await made.settle()
        assert sent == STREAM_WINDOW
        consumer_loop[0].call_soon_threadsafe(go.set)
        await made.until(lambda: made.results() == {"r1": list(range(2 * STREAM_WINDOW))})
        assert made.failures == []


def test_only_the_runtime_opens_a_gate() -> None:
    gate = Gate()
    assert not gate.cancel() and not gate.done()
    with pytest.raises(concurrent.futures.TimeoutError):
        gate.result(0.0)
    gate.open()
    assert gate.done() and not gate.cancelled()


def exits(future: Any) -> None:
    raise SystemExit("on purpose")


@pytest.mark.parametrize("meddle", [lambda gate: gate.set_result(None), lambda gate: gate.add_done_callback(exits)])
async def test_whatever_an_engine_does_to_a_gate_its_request_is_aborted_and_the_next_one_served(meddle: Any) -> None:
    waits = threading.Event()

    class Meddler:
        def run(self, inbox: Any, outbox: Any, stop: threading.Event) -> None:
            for event in inbox:
                if isinstance(event, events.Start):
                    if event.payload.data == "flood":
                        gate = None
                        while gate is None:
                            gate = outbox.put(events.Emit(event.request_id, omni.Chunk(0)))
                        meddle(gate)
                        waits.set()
                    else:
                        outbox.put(events.Done(event.request_id, event.payload.data))

    async def consume(session: omni.Session) -> AsyncIterator[Any]:
        yield omni.Result((await session.payload()).data)

    async with world() as made:
        placed(made, Meddler(), consume)
        made.submit("r1", "a", "flood")
        await made.until(waits.is_set)
        made.abort("r1")
        made.submit("r2", "a", "x")
        await made.until(lambda: made.results() == {"r2": "x"})
        assert made.failures == []


def test_a_thread_that_waits_at_a_gate_goes_on_when_it_opens() -> None:
    gate, passed = Gate(), threading.Event()

    def wait() -> None:
        gate.result()
        passed.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    gate.open()
    assert passed.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
