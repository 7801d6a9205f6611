"""`stage.observing.busy`: the share of time in which a stage computes, however many requests at a time."""

from __future__ import annotations

from stage_runtime.stage.observing.busy import Busy
from stage_runtime.stage.work import begun
from stage_runtime.wire.parts import Header


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_requests_of_a_batch_count_once() -> None:
    busy = Busy(clock := Clock())
    clock.now_s += 1
    for _ in range(8):
        busy.began()
    clock.now_s += 1
    for _ in range(8):
        busy.ended()
    clock.now_s += 2
    assert busy.share() == 0.25


def test_a_request_that_is_not_over_counts_until_now() -> None:
    busy = Busy(clock := Clock())
    busy.began()
    clock.now_s += 4
    assert busy.share() == 1
    clock.now_s += 1
    busy.ended()
    clock.now_s += 3
    assert (busy.share(), busy.share()) == (0.25, 0.0)


def test_an_idle_stage_reports_the_same_number_every_time() -> None:
    busy = Busy(clock := Clock())
    shares = []
    for _ in range(3):
        clock.now_s += 1.1
        shares.append(busy.share())
    assert shares == [0.0, 0.0, 0.0]


def test_a_request_that_was_over_before_it_began_is_not_counted() -> None:
    busy = Busy(clock := Clock())
    work = begun(Header("r", 1, "o", {}), gathering=None, sources=(), busy=busy)
    work.finish()
    work.began()
    clock.now_s += 1
    assert busy.share() == 0.0


def test_a_request_counts_from_its_begin_to_its_end() -> None:
    busy = Busy(clock := Clock())
    work = begun(Header("r", 1, "o", {}), gathering=None, sources=(), busy=busy)
    work.began()
    work.began()
    clock.now_s += 1
    work.finish()
    work.finish()
    clock.now_s += 1
    assert busy.share() == 0.5
