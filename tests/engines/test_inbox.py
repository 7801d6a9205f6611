"""What waits for an engine: order, the end, and what is not opened at all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from threading import Thread

import pytest
from engine_kit import OneWork, Opening

from stage_runtime.engines import events
from stage_runtime.engines.base import Inbox


def admin(index: int) -> events.Admin:
    return events.Admin(str(index), "step", {})


def ignore(work: object, error: BaseException) -> None:
    raise AssertionError(error)


@pytest.fixture
def eager_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_looking_for_the_end_never_changes_the_order(eager_switching: None) -> None:
    """Two chunks of one stream may stand next to each other: swapped, the stream would be wrong."""
    inbox = Inbox(ignore)
    count = 30_000

    def put() -> None:
        for index in range(count):
            inbox.put(admin(index))
        inbox.close()

    writer = Thread(target=put)
    writer.start()
    seen: list[int] = []
    while not any(inbox.closed for _ in range(20)):
        event = inbox.get_nowait()
        if event is not None:
            assert isinstance(event, events.Admin)
            seen.append(int(event.call_id))
    writer.join()
    assert seen == list(range(count))


def test_every_reader_finds_the_end_after_what_waits_before_it() -> None:
    inbox = Inbox(ignore)
    inbox.put(admin(0))
    inbox.close()
    assert not inbox.closed
    assert inbox.get() == admin(0)
    assert inbox.closed
    assert [inbox.get(), inbox.get(), inbox.get_nowait()] == [None] * 3


def test_an_open_inbox_without_anything_is_not_closed() -> None:
    inbox = Inbox(ignore)
    assert inbox.get(timeout=0.001) is None
    assert not inbox.closed


@pytest.mark.parametrize("late", ["cancelled", "over"])
def test_what_comes_late_is_dropped_unopened(late: str) -> None:
    inbox = Inbox(ignore)
    work = OneWork("r1")
    setattr(work, late, True)
    arrival = Opening(work, ValueError("must not be opened"))
    inbox.put(arrival)
    inbox.put(events.StreamDone("r1", "a", work))
    inbox.put(events.StreamFailed("r1", "a", "why", work))
    inbox.put(events.Abort("r1", work))
    assert inbox.get_nowait() == events.Abort("r1", work)
    assert inbox.get_nowait() is None
    assert arrival.discarded


def test_a_wake_up_comes_with_every_arrival_and_at_once() -> None:
    inbox = Inbox(ignore)
    woken: list[int] = []
    inbox.on_arrival(lambda: woken.append(len(inbox)))
    inbox.put(admin(0))
    inbox.close()
    assert woken == [0, 1, 2]
