"""Beats that come densely are read after a pause, together; everything else at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stage_runtime.sockets.frames.pacing import DENSE_S, PAUSE_S, ReadPacing
from stage_runtime.wire.messages import Beat
from tests.sockets.peers import PATIENCE_S, End, ends, introduce

TCP = "tcp://127.0.0.1:*"


class Timer:
    def __init__(self, at: float, callback: Callable[[], object]) -> None:
        self.at = at
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Clock:
    """`asyncio.AbstractEventLoop`, as far as it is used."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, callback: Callable[..., object], *arguments: Any) -> Timer:
        self.timers.append(Timer(self.now + delay_s, lambda: callback(*arguments)))
        return self.timers[-1]

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [timer for timer in self.timers if timer.at <= self.now]
        self.timers = [timer for timer in self.timers if timer.at > self.now]
        for timer in due:
            if timer.callback is not None:
                timer.callback()


class Socket:
    """One, and whoever reads it: `opening.Sockets`, as far as it is used."""

    closed = False

    def __init__(self) -> None:
        self.ready: Callable[[], None] | None = None  #: None: nobody reads it.

    def read(self, socket: Socket, ready: Callable[[], None]) -> None:
        assert socket is self and self.ready is None
        self.ready = ready

    def stop_reading(self, socket: Socket) -> None:
        assert socket is self
        self.ready = None


class Coordinator:
    def __init__(self) -> None:
        self.clock, self.socket = Clock(), Socket()
        self.pacing = ReadPacing(self.clock, self.socket)  # type: ignore[arg-type]
        self.pacing.allowed = lambda: True
        self.expected: list[bool] = []  #: One entry of each read: whether many frames were likely.
        self._arrived = (0, 0)
        self.pacing.read(self.socket, self._drain)  # type: ignore[arg-type]

    def arrive(self, *, beats: int = 0, others: int = 0) -> bool:
        """Frames come. Returns whether they were read at once."""
        self._arrived = self._arrived[0] + beats, self._arrived[1] + others
        if self.socket.ready is None:
            return False
        self.socket.ready()
        assert self._arrived == (0, 0)
        return True

    def _drain(self, many: bool) -> int:
        self.expected.append(many)
        (beats, others), self._arrived = self._arrived, (0, 0)
        self.pacing.beats += beats
        return beats + others


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    made = Coordinator()
    yield made
    made.pacing.close()


def test_a_beat_that_comes_alone_is_read_at_once_and_sets_no_timer(coordinator: Coordinator) -> None:
    for _ in range(5):
        assert coordinator.arrive(beats=1)
        coordinator.clock.advance(2 * DENSE_S)
    assert coordinator.clock.timers == [] and not any(coordinator.expected)


def test_beats_that_come_densely_are_read_together(coordinator: Coordinator) -> None:
    assert coordinator.arrive(beats=1)
    assert coordinator.arrive(beats=1)
    assert [coordinator.arrive(beats=1) for _ in range(20)] == [False] * 20
    coordinator.clock.advance(PAUSE_S)
    assert coordinator.arrive()  # it is read again, with what came meanwhile
    assert coordinator.expected == [False, False, True]


def test_after_a_pause_in_which_nothing_came_there_is_no_other(coordinator: Coordinator) -> None:
    coordinator.arrive(beats=1)
    coordinator.arrive(beats=1)
    coordinator.clock.advance(PAUSE_S)
    assert coordinator.arrive()
    assert coordinator.clock.timers == []


def test_what_is_no_beat_causes_no_pause(coordinator: Coordinator) -> None:
    for _ in range(5):
        assert coordinator.arrive(beats=3, others=1)
        assert coordinator.arrive(others=1)
    assert coordinator.clock.timers == []


def test_nothing_waits_while_somebody_waits_for_a_request(coordinator: Coordinator) -> None:
    coordinator.pacing.allowed = lambda: False
    assert all(coordinator.arrive(beats=1) for _ in range(20))


def test_a_pause_ends_with_its_process(coordinator: Coordinator) -> None:
    coordinator.arrive(beats=1)
    coordinator.arrive(beats=1)
    coordinator.pacing.close()
    coordinator.clock.advance(PAUSE_S)
    assert coordinator.socket.ready is None


async def test_of_beats_and_messages_over_a_socket_that_pauses_none_is_lost() -> None:
    a, b = (End(name, TCP) for name in ("aa", "bb"))
    async with ends(a, b):
        introduce(a, b)
        b.channels.allow_paced_reads(lambda: True)
        a.send("bb", "first")
        await b.listener.until(lambda: b.listener.received_words == ["first"])
        for number in range(300):
            a.channels.hint("bb", Beat({"s": number % 2}, {}, {}))
            if number % 50 == 0:
                a.send("bb", str(number))
            await asyncio.sleep(0)
        await b.listener.until(lambda: len(b.listener.messages) == 307)
        assert b.listener.received_words == ["first", *(str(number) for number in range(0, 300, 50))]
        assert await a.channels.settled(PATIENCE_S)
