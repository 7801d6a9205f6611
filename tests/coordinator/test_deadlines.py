"""One timer for all deadlines, for the first of them: whatever one request's deadline does, the later ones pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.coordinator.ending.deadlines import CHECK_EVERY_S, Deadlines


async def test_a_deadline_whose_end_raises_does_not_stop_the_later_ones() -> None:
    loop, passed, over = asyncio.get_running_loop(), [], asyncio.Event()
    raised: list[str] = []
    loop.set_exception_handler(lambda _, context: raised.append(str(context["exception"])))

    def end(request_id: str, deadline: float) -> None:
        passed.append(request_id)
        if request_id == "odd":
            raise RuntimeError("odd")
        over.set()

    deadlines = Deadlines(loop, passed=end, wanted=lambda *_: True)
    deadlines.add("odd", loop.time())
    deadlines.add("next", loop.time() + 0.001)
    async with asyncio.timeout(30):
        await over.wait()
    deadlines.close()
    assert (passed, raised) == (["odd", "next"], ["odd"])


class Clock:
    """A stand-in for an event loop whose time the test passes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.woken = 0  #: Timers that have called back.
        self._timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> Timer:
        timer = Timer(when, call)
        self._timers.append(timer)
        return timer

    def pass_to(self, now: float) -> None:
        while due := [one for one in self._timers if not one.is_over and one.when <= now]:
            timer = min(due, key=lambda one: one.when)
            timer.cancel()
            self.now, self.woken = timer.when, self.woken + 1
            timer.call()
        self.now = now


class Timer:
    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when, self.call, self.is_over = when, call, False

    def cancel(self) -> None:
        self.is_over = True


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 50)), max_size=20))
def test_each_deadline_passes_soon_after_it_and_wakes_nobody_before(added: list[tuple[int, int]]) -> None:
    clock: Any = Clock()
    passed: dict[str, float] = {}
    deadlines = Deadlines(
        clock, passed=lambda one, _: passed.__setitem__(one, clock.now), wanted=lambda one, _: one not in passed
    )
    due: dict[str, float] = {}
    for index, (at, timeout) in enumerate(sorted(added)):
        clock.pass_to(float(at))
        due[str(index)] = float(at + timeout)
        deadlines.add(str(index), due[str(index)])
    clock.pass_to(200.0)
    assert {one: passed[one] - due[one] for one in due} == dict.fromkeys(due, pytest.approx(CHECK_EVERY_S))
    assert clock.woken <= len(set(due.values()))
