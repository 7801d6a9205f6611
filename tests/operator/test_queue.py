"""One place per pipeline, one look at a time, and patience after failures."""

from __future__ import annotations

import asyncio

from omnipipeline_operator.handlers.queueing import CHANGED_RETRY_S, FIRST_RETRY_S, LAST_RETRY_S, Queue

A, B = ("space", "a"), ("space", "b")


def queue() -> Queue:
    return Queue(jitter=lambda: 0.0)


async def is_idle(given: Queue) -> bool:
    taking = asyncio.ensure_future(given.take())
    for _ in range(5):
        await asyncio.sleep(0)
    idle = not taking.done()
    taking.cancel()
    return idle


async def test_many_events_are_one_look() -> None:
    given = queue()
    for _ in range(10):
        given.add(A)
    assert await given.take() == A
    given.done(A)
    assert await is_idle(given)


async def test_a_pipeline_is_never_looked_at_twice_at_a_time_and_no_event_is_lost() -> None:
    given = queue()
    given.add(A)
    assert await given.take() == A
    given.add(A)
    assert await is_idle(given)
    given.done(A)
    assert await given.take() == A


async def test_a_failing_pipeline_waits_longer_each_time_and_holds_up_nobody() -> None:
    given = queue()
    waits = []
    for _ in range(12):
        given.add(A)
        assert await given.take() == A
        waits.append(given.failed(A))
    assert waits[:3] == [FIRST_RETRY_S, FIRST_RETRY_S * 2, FIRST_RETRY_S * 4]
    assert waits[-1] == LAST_RETRY_S
    given.add(B)
    assert await given.take() == B


async def test_success_makes_the_next_failure_a_first_one() -> None:
    given = queue()
    for _ in range(5):
        given.add(A)
        await given.take()
        given.failed(A)
    given.add(A)
    await given.take()
    given.done(A)
    given.add(A)
    await given.take()
    assert given.failed(A) == FIRST_RETRY_S


async def test_a_change_during_a_failing_look_is_looked_at_soon_but_not_at_once() -> None:
    given = queue()
    for _ in range(9):
        given.add(A)
        await given.take()
        given.failed(A)
    given.add(A)
    await given.take()
    given.add(A)
    assert given.failed(A) == CHANGED_RETRY_S
    assert await is_idle(given)


async def test_the_api_servers_retry_after_is_kept() -> None:
    given = queue()
    given.add(A)
    await given.take()
    assert given.failed(A, least_s=30.0) == 30.0


async def test_a_later_look_does_not_put_off_an_earlier_one() -> None:
    given = queue()
    given.add(A)
    given.add(A, 100.0)
    assert await given.take() == A
    given.done(A, again_s=100.0)
    given.add(A)
    assert await given.take() == A
