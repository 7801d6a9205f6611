"""When the end of a received buffer is noticed, and by whom. The loop is one whose timers and wake-ups a test runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stage_runtime.relays.base import Peer, TransferId
from stage_runtime.relays.memory import pages
from stage_runtime.relays.memory.pins import DELAY_S, MANY, SMALL_NBYTES, Pins


class Loop:
    """Calls nothing by itself."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.woken: list[Callable[[], None]] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.timers.append((delay_s, call))

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        self.woken.append(call)


class Made:
    """Pins, and the buffers that are held: drop one from ``held`` and its last view is dead."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.thread = threading.local()
        self.released: list[int] = []
        self.held: dict[int, np.ndarray[Any, Any]] = {}
        self.pins = Pins(self.loop, lambda peer, transfer: self.released.append(transfer), self.thread)  # type: ignore[arg-type]

    def receive(self, *transfers: int, nbytes: int = 100) -> None:
        for transfer in transfers:
            region = self.held[transfer] = pages.fresh(nbytes)
            self.pins.add(region, Peer("p"), TransferId(transfer), request_id="r", holder="s", nbytes=nbytes)


def test_a_small_buffers_end_wakes_nobody_and_is_noticed_by_the_timer_of_an_arrival() -> None:
    made = Made()
    made.receive(1, 2, 3)
    del made.held[1], made.held[3]
    assert (made.loop.woken, made.released) == ([], [])
    ((delay_s, look),) = made.loop.timers
    assert delay_s == DELAY_S
    look()
    assert made.released == [1, 3]


def test_a_small_buffer_that_outlives_the_timer_wakes_the_loop() -> None:
    made = Made()
    made.receive(1)
    made.loop.timers.pop()[1]()
    del made.held[1]
    assert made.released == []
    (wake,) = made.loop.woken
    wake()
    assert made.released == [1]


def test_an_arrival_reports_what_has_died_when_that_is_much() -> None:
    made = Made()
    made.receive(*range(MANY // 2))
    made.held.clear()
    assert made.released == []
    made.receive(MANY)
    assert (made.released, made.loop.woken) == (list(range(MANY // 2)), [])


def test_many_small_buffers_wake_the_loop_once() -> None:
    made = Made()
    made.receive(*range(2 * MANY))
    made.held.clear()
    assert len(made.loop.woken) == 1
    made.loop.woken[0]()
    assert sorted(made.released) == list(range(2 * MANY))


def test_a_large_buffers_end_wakes_the_loop_at_once() -> None:
    made = Made()
    made.receive(1)
    made.receive(2, nbytes=SMALL_NBYTES)
    del made.held[1], made.held[2]
    (wake,) = made.loop.woken
    wake()
    assert made.released == [1, 2]


@pytest.mark.parametrize("nbytes", [100, SMALL_NBYTES])
def test_a_thread_that_lets_go_reports_large_buffers_itself_and_wakes_nobody(nbytes: int) -> None:
    made = Made()
    made.receive(1, nbytes=nbytes)

    def work() -> None:
        made.thread.lets_go = True
        del made.held[1]
        assert made.released == []
        made.pins.let_go()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (made.released, made.loop.woken) == ([1] if nbytes == SMALL_NBYTES else [], [])


def test_a_thread_that_lets_go_of_a_small_buffer_without_a_timer_reports_it() -> None:
    made = Made()
    made.receive(1)
    made.loop.timers.pop()[1]()
    made.thread.lets_go = True
    del made.held[1]
    made.pins.let_go()
    assert (made.released, made.loop.woken) == ([1], [])


def test_only_the_thread_that_lets_go_defers_the_wake_up() -> None:
    made = Made()
    made.receive(1, nbytes=SMALL_NBYTES)
    thread = threading.Thread(target=setattr, args=(made.thread, "lets_go", True))
    thread.start()
    thread.join()
    del made.held[1]
    assert len(made.loop.woken) == 1


def test_what_died_is_reported_once_and_not_to_a_peer_that_is_forgotten() -> None:
    made = Made()
    made.receive(1, 2)
    made.held.clear()
    made.pins.flush()
    made.pins.flush()
    assert made.released == [1, 2]
    made.receive(3)
    made.pins.forget(Peer("p"))
    made.held.clear()
    made.pins.flush()
    assert made.released == [1, 2]
    assert len(made.pins) == 0
