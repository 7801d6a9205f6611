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
from stage_runtime.engines.blocking import LoopWatch
from stage_runtime.engines.loading import as_engine
from stage_runtime.engines.loops import LoopEngine
from tests.engines.engine_kit import running

PATIENCE_S = 20.0


class Warnings(logging.Handler):
    """What is logged, as it is logged."""

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


def test_a_blocking_call_in_an_async_function_is_named_with_stage_function_and_line(warnings: Warnings) -> None:
    async def run(payload: omni.StagePayload) -> str:
        return helper(warnings)

    with running(as_engine(run)) as rig:
        rig.start("r1", "a")
        ((request_id, word, said),) = rig.outbox.several(1)
    assert (request_id, word) == ("r1", "done")
    assert f"next ({__file__}:" in said  # the author's innermost frame
    assert "return self._new.get(timeout=PATIENCE_S)" in said
    assert said.startswith("stage ")


def test_one_in_a_streaming_stage_is_named_too_and_waiting_is_not(warnings: Warnings) -> None:
    blocked = asyncio.Event()

    async def run(session: Any) -> AsyncIterator[Any]:
        payload = await session.payload()
        if payload.data == "block":
            said = helper(warnings)
            blocked.set()
            yield omni.Result(said)
        else:
            await asyncio.wait_for(blocked.wait(), PATIENCE_S)
            yield omni.Result(len(warnings.all))

    with running(as_engine(omni.Streaming(run))) as rig:
        rig.start("waits", "wait")
        rig.start("blocks", "block")
        said = {one[0]: one[2] for one in rig.outbox.several(2)}
    assert "blocks the event loop" in said["blocks"]
    assert said["waits"] == 1


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
        said = warnings.next()
        released.set()
    assert "request r1 was aborted" in said
    assert f"stubborn ({__file__}:" in said
    assert "caught asyncio.CancelledError" in said


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


def test_a_loop_that_turns_is_never_named_and_the_watch_ends_with_it(warnings: Warnings) -> None:
    looked = Looked()
    with watch(looked) as made:
        for _ in range(8):
            looked.times(1)
            made.turned()
    assert warnings.all == []
    assert not any(thread.name == "talker watch" for thread in threading.enumerate())


def test_a_computation_that_keeps_the_gil_is_named_when_it_lets_go(warnings: Warnings) -> None:
    def computes(made: LoopWatch) -> None:
        sum(range(20_000_000))  # half a second in C, without a chance to look
        for _ in range(10_000):
            pass  # here there is one
        made.turned()

    with watch(Looked()) as made:
        computes(made)
        assert "computes (" in warnings.next()
