"""The work queue: one reconcile per pipeline at a time, and back-off after failures."""

from __future__ import annotations

import asyncio

import pytest

from omnipipeline_operator.controller.work_queue import (
    CHANGED_RETRY_S,
    COOL_DOWN_S,
    MAX_CHANGED_DELAY_S,
    MAX_COOL_DOWNS,
    MAX_RETRY_S,
    MAX_URGENT_IN_A_ROW,
    MIN_RETRY_S,
    WorkQueue,
)

A, B = ("space", "a"), ("space", "b")


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def given(clock: Clock) -> WorkQueue:
    return WorkQueue(jitter=lambda: 0.0, clock=clock)


async def is_idle(given: WorkQueue) -> bool:
    taking = asyncio.ensure_future(given.take())
    for _ in range(5):
        await asyncio.sleep(0)
    idle = not taking.done()
    taking.cancel()
    return idle


async def test_many_events_are_one_reconcile(given: WorkQueue) -> None:
    for _ in range(10):
        given.add(A)
    assert await given.take() == A
    given.done(A)
    assert await is_idle(given)


async def test_a_pipeline_is_never_in_two_reconciles_and_no_event_is_lost(given: WorkQueue, clock: Clock) -> None:
    given.add(A)
    assert await given.take() == A
    given.add(A)
    assert await is_idle(given)
    given.done(A)
    clock.now_s += COOL_DOWN_S
    assert await given.take() == A


async def test_a_failing_pipeline_waits_longer_each_time_and_holds_up_nobody(given: WorkQueue, clock: Clock) -> None:
    waits = []
    given.add(A)
    for _ in range(12):
        assert await given.take() == A
        waits.append(given.failed(A))
        clock.now_s += waits[-1] - 0.001
        assert await is_idle(given)
        clock.now_s += 0.002
    assert waits[:3] == [MIN_RETRY_S, MIN_RETRY_S * 2, MIN_RETRY_S * 4]
    assert waits[-1] == MAX_RETRY_S
    await given.take()
    given.failed(A)
    given.add(B)
    assert await given.take() == B


async def test_success_makes_the_next_failure_a_first_one(given: WorkQueue, clock: Clock) -> None:
    for _ in range(5):
        given.add(A)
        await given.take()
        given.failed(A)
    given.add(A)
    await given.take()
    given.done(A)
    clock.now_s += COOL_DOWN_S
    given.add(A)
    await given.take()
    assert given.failed(A) == MIN_RETRY_S


async def test_a_change_during_a_failing_reconcile_is_retried_soon_but_not_at_once(given: WorkQueue) -> None:
    for _ in range(9):
        given.add(A)
        await given.take()
        given.failed(A)
    given.add(A)
    await given.take()
    given.add(A)
    assert given.failed(A) == CHANGED_RETRY_S
    assert await is_idle(given)


async def test_the_api_servers_retry_after_is_respected(given: WorkQueue, clock: Clock) -> None:
    given.add(A)
    await given.take()
    assert given.failed(A, least_s=30.0) == 30.0
    clock.now_s += 29.9
    assert await is_idle(given)
    clock.now_s += 0.2
    assert await given.take() == A


async def test_a_later_reconcile_does_not_delay_an_earlier_one(given: WorkQueue, clock: Clock) -> None:
    given.add(A)
    given.add(A, 100.0)
    assert await given.take() == A
    given.done(A, again_s=100.0)
    given.add(A)
    clock.now_s += COOL_DOWN_S
    assert await given.take() == A


async def test_an_edit_is_reconciled_before_other_events(given: WorkQueue) -> None:
    given.add(A)
    given.add(B, urgent=True)
    assert [await given.take(), await given.take()] == [B, A]


async def test_an_edit_during_a_reconcile_is_taken_first_after_it(given: WorkQueue) -> None:
    given.add(A)
    assert await given.take() == A
    given.add(B)
    given.add(A, urgent=True)
    given.done(A)
    assert await given.take() == A


async def test_a_stream_of_edits_does_not_starve_the_others(given: WorkQueue) -> None:
    given.add(A)
    taken = []
    for number in range(MAX_URGENT_IN_A_ROW + 1):
        given.add(("space", f"edited-{number}"), urgent=True)
        taken.append(await given.take())
    assert taken.index(A) == MAX_URGENT_IN_A_ROW


async def test_an_edit_does_not_shorten_the_back_off_after_a_failure(given: WorkQueue) -> None:
    given.add(A, urgent=True)
    assert await given.take() == A
    given.add(A, urgent=True)
    given.failed(A, least_s=30.0)
    assert await is_idle(given)
    given.add(B)
    assert await given.take() == B


async def test_an_event_waits_for_the_cool_down_and_an_edit_does_not(given: WorkQueue, clock: Clock) -> None:
    given.add(A)
    await given.take()
    given.done(A)
    given.add(A)
    assert await is_idle(given)
    given.add(A, urgent=True)
    assert await given.take() == A
    given.done(A)
    given.add(A)
    clock.now_s += COOL_DOWN_S
    assert await given.take() == A


async def test_a_reconcile_that_changed_something_is_repeated_with_growing_delay(given: WorkQueue) -> None:
    given.add(A)
    waits: list[float] = []
    for _ in range(9):
        assert await given.take() == A
        given.done(A, again_s=1000.0, changed=True)
        waits.append(given.next_in_s() or 0.0)
        given.add(A, urgent=True)  # an edit does not wait for the cool-down
    assert waits == sorted(waits) and waits[:2] == pytest.approx([COOL_DOWN_S, 2 * COOL_DOWN_S])
    assert waits[-1] == pytest.approx(MAX_CHANGED_DELAY_S)
    assert await given.take() == A
    given.done(A)
    assert await is_idle(given) and len(given) == 0


async def test_expired_cool_downs_are_pruned(given: WorkQueue, clock: Clock) -> None:
    for number in range(3 * MAX_COOL_DOWNS):
        key = ("space", f"p{number}")
        given.add(key)
        assert await given.take() == key
        given.done(key)
        clock.now_s += COOL_DOWN_S / 10
    kept = [
        name for name, value in vars(given).items() if isinstance(value, dict | list) and len(value) > MAX_COOL_DOWNS
    ]
    assert kept == []


async def test_a_key_that_always_fails_is_measured_from_its_first_failure(given: WorkQueue, clock: Clock) -> None:
    began = clock.now_s
    for _ in range(5):
        given.add(A)
        clock.now_s += MAX_RETRY_S
        given.failed(await given.take())
    assert given.longest_failing_s() == clock.now_s - began - MAX_RETRY_S
    given.add(B)
    given.done(await given.take())
    assert given.longest_failing_s() > 0, "another key's success changes nothing"
    clock.now_s += MAX_RETRY_S
    given.done(await given.take())
    assert given.longest_failing_s() == 0.0


async def test_a_pipeline_that_fails_for_days_is_still_retried(given: WorkQueue, clock: Clock) -> None:
    for _ in range(1_100):  # 2.0 ** 1_024 is not a float
        given.add(A)
        clock.now_s += MAX_RETRY_S
        await given.take()
        wait_s = given.failed(A)
    assert wait_s == MAX_RETRY_S


async def test_a_pipeline_whose_writes_are_undone_for_days_is_still_reconciled(given: WorkQueue, clock: Clock) -> None:
    given.add(A)
    for _ in range(1_100):
        await given.take()
        given.done(A, changed=True)
        clock.now_s += MAX_CHANGED_DELAY_S
    assert await given.take() == A
