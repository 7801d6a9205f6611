"""Requests wait for an engine: their order, the end, and those that are not opened at all."""

from __future__ import annotations

import pytest

from stage_runtime.engines import events
from stage_runtime.engines.base import Inbox
from tests.engines.engine_kit import OneWork, Opening


def admin(index: int) -> events.Admin:
    return events.Admin(str(index), "step", {})


def ignore(work: object, error: BaseException) -> None:
    raise AssertionError(error)


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
    assert woken == [0, 1, 1]
