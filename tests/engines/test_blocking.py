"""A call that blocks a stage's event loop is named by function and line, once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime.engines.making.loading import as_engine
from stage_runtime.engines.threads.blocking import ClockReading, LoopWatch, is_blocked
from stage_runtime.engines.threads.loops import LoopEngine
from tests.engines.engine_kit import running

PATIENCE_S = 100.0  # how long a test waits before it fails, on a machine that others use


class Warnings(logging.Handler):
    """A handler that collects lines as they are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []
        self._new: queue.SimpleQueue[str] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(record.getMessage())
        self._new.put(record.getMessage())

    def next(self) -> str:
        return self._new.get(timeout=PATIENCE_S)


@pytest.fixture
def warnings() -> Iterator[Warnings]:
    handler = Warnings()
    logger = logging.getLogger("stage_runtime.engines")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def helper(warnings: Warnings) -> str:
    return warnings.next()  # the blocking call: until it is named


@pytest.mark.proves("blocked-event-loop")
def test_a_blocking_call_in_an_async_function_is_named_with_stage_function_and_line(warnings: Warnings) -> None:
    async def run(payload: omni.StagePayload) -> str:
        return helper(warnings)

    with running(as_engine(run)) as rig:
        rig.start("r1", "a")
        ((request_id, word, message),) = rig.outbox.several(1)
    assert (request_id, word) == ("r1", "done")
    assert f"next ({__file__}:" in message  # the author's innermost frame
    assert "return self._new.get(timeout=PATIENCE_S)" in message
    assert message.startswith("stage ")


def test_one_in_a_streaming_stage_is_named_too_and_waiting_is_not(warnings: Warnings) -> None:
    blocked = asyncio.Event()

    async def run(session: Any) -> AsyncIterator[Any]:
        payload = await session.payload()
        if payload.data == "block":
            message = helper(warnings)
            blocked.set()
            yield omni.Result(message)
        else:
            await asyncio.wait_for(blocked.wait(), PATIENCE_S)
            yield omni.Result(len(warnings.all))

    with running(as_engine(omni.Streaming(run))) as rig:
        rig.start("waits", "wait")
        rig.start("blocks", "block")
        outputs = {one[0]: one[2] for one in rig.outbox.several(2)}
    assert "blocks the event loop" in outputs["blocks"]
    assert outputs["waits"] == 1


def test_a_coroutine_that_swallows_its_cancellation_is_named_with_its_line(warnings: Warnings) -> None:
    gone_on, released = threading.Event(), threading.Event()

    async def stubborn() -> None:
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.02)
            gone_on.set()

    async def run(payload: omni.StagePayload) -> str:
        await stubborn()
        return "late"

    engine = as_engine(run)
    assert isinstance(engine, LoopEngine)
    engine.cancel_s = 0.0
    with running(engine) as rig:
        rig.start("r1", "a")
        assert gone_on.wait(PATIENCE_S)
        rig.abort("r1")
        warning = warnings.next()
        released.set()
    assert "request r1 was aborted" in warning
    assert f"stubborn ({__file__}:" in warning
    assert "caught asyncio.CancelledError" in warning


class Looked:
    """`busy` of a watch: counts how often the loop's stack may be looked at."""

    def __init__(self) -> None:
        self.count = threading.Semaphore(0)

    def __call__(self) -> bool:
        self.count.release()
        return True

    def times(self, number: int) -> None:
        for _ in range(number):
            assert self.count.acquire(timeout=PATIENCE_S)


@contextmanager
def watch(looked: Looked) -> Iterator[LoopWatch]:
    made = LoopWatch("talker", busy=looked, held_s=0.1, turn_s=0.02)
    with made.watching():
        yield made


@pytest.mark.proves("blocked-event-loop")
def test_a_function_is_named_once_however_long_and_often_it_blocks(warnings: Warnings) -> None:
    looked = Looked()

    def holds(number: int) -> None:
        looked.times(number)

    with watch(looked):
        warnings.next()  # this test itself blocks what it says is its loop
        holds(12)
        holds(12)
    functions = [line.split(": ")[1].split(" ")[0] for line in warnings.all]
    assert len(functions) == len(set(functions))


def test_the_watch_ends_with_its_loop(warnings: Warnings) -> None:
    looked = Looked()
    with watch(looked):
        looked.times(1)
    assert not any(thread.name == "talker watch" for thread in threading.enumerate())


def test_a_call_that_blocks_is_named_after_a_time_without_requests(warnings: Warnings) -> None:
    running = threading.Event()
    idle = threading.Semaphore(0)

    def busy() -> bool:
        idle.release()
        return running.is_set()

    made = LoopWatch("talker", busy=busy, held_s=0.1, turn_s=0.02)
    with made.watching():
        for _ in range(2):  # a look, and another one before the thread rests
            assert idle.acquire(timeout=PATIENCE_S)
        running.set()
        made.begun()
        assert "blocks the event loop" in warnings.next()  # this test


def test_a_computation_that_keeps_the_gil_is_named_when_it_lets_go(warnings: Warnings) -> None:
    def computes() -> None:
        sum(range(20_000_000))  # in C, without a chance to look
        while not warnings.all:
            pass  # here there is one

    with watch(Looked()):
        computes()
    assert "computes (" in warnings.all[0]


@pytest.mark.parametrize(
    ("waited", "computed", "runnable", "since_turn", "blocked"),
    [
        pytest.param(0.25, 0.25, True, 1.3, True, id="it computes"),
        pytest.param(0.25, 0.0, False, 1.3, True, id="it waits in a blocking call"),
        pytest.param(0.25, 0.01, True, 1.3, False, id="it waits for a processor"),
        pytest.param(0.25, 0.25, True, 1.2, False, id="not for long enough"),
        pytest.param(0.25, 0.0, False, 0.25, False, id="it turns"),
        pytest.param(3.0, 2.9, True, 3.0, True, id="it computed and kept the GIL, so nobody looked in time"),
        pytest.param(3.0, 0.5, True, 3.0, True, id="so with a sixth of a processor"),
        pytest.param(3.0, 0.0, False, 3.0, False, id="the process was frozen"),
        pytest.param(3.0, 0.1, False, 3.0, False, id="another thread computed and kept the GIL"),
        pytest.param(3.0, 2.9, True, 0.25, False, id="it computed, and has turned since"),
    ],
)
def test_a_loop_is_blocked_by_its_last_turn_and_by_who_computed(
    waited: float, computed: float, runnable: bool, since_turn: float, blocked: bool
) -> None:
    before = ClockReading(100.0, 7.0)
    last = ClockReading(100.0 + waited, 7.0 + computed, runnable)
    assert is_blocked(before, last, last.now - since_turn, held_s=1.0, turn_s=0.25) is blocked
