"""The queue whose entries go with their request."""

from __future__ import annotations

import threading
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.engines.backlog import COMPACT_FROM, Backlog

REQUESTS = "abc"


@given(st.lists(st.one_of(st.sampled_from(REQUESTS), st.sampled_from([None, "take", "drop a", "drop b", "drop c"]))))
def test_it_gives_what_was_put_in_order_but_what_was_dropped(steps: list[str | None]) -> None:
    backlog: Backlog[tuple[str | None, int]] = Backlog()
    model: deque[tuple[str | None, int]] = deque()
    for number, step in enumerate(steps):
        match step:
            case "take":
                assert backlog.take_nowait() == (model.popleft() if model else None)
            case "drop a" | "drop b" | "drop c":
                request = step[-1]
                assert backlog.drop(request) == [one for one in model if one[0] == request]
                model = deque(one for one in model if one[0] != request)
            case _:
                backlog.put((step, number), step)
                model.append((step, number))
        assert len(backlog) == len(model)
    backlog.close()
    assert backlog.closed == (not model)
    assert [backlog.take() for _ in range(len(model) + 2)] == [*model, None, None]
    assert backlog.closed


def test_many_that_were_dropped_leave_no_cells_behind() -> None:
    backlog: Backlog[int] = Backlog()
    backlog.put(-1)
    for number in range(10_000):
        backlog.put(number, number)
        backlog.drop(number)
    assert len(backlog) == 1
    assert len(backlog._entries) <= 2 * COMPACT_FROM
    assert not backlog._of
    assert backlog.take() == -1


def test_a_reader_that_waits_gets_what_is_put_after_everything_before_was_dropped() -> None:
    backlog: Backlog[str] = Backlog()
    backlog.put("dropped", "r")
    backlog.drop("r")
    found: list[str | None] = []
    reader = threading.Thread(target=lambda: found.append(backlog.take()))
    reader.start()
    backlog.put("kept")
    reader.join(10)
    assert found == ["kept"]
    assert backlog.take(0.01) is None


def test_every_reader_finds_the_end() -> None:
    backlog: Backlog[str] = Backlog()
    found: list[str | None] = []
    readers = [threading.Thread(target=lambda: found.append(backlog.take())) for _ in range(4)]
    for reader in readers:
        reader.start()
    backlog.put("one")
    backlog.close()
    for reader in readers:
        reader.join(10)
    assert sorted(found, key=str) == [None, None, None, "one"]


def test_threads_that_put_take_and_drop_lose_nothing_and_double_nothing() -> None:
    backlog: Backlog[tuple[int, int]] = Backlog()
    taken: list[tuple[int, int]] = []
    dropped: list[tuple[int, int]] = []

    def put(writer: int) -> None:
        for number in range(2000):
            backlog.put((writer, number), number % 50)

    def take() -> None:
        while (item := backlog.take()) is not None:
            taken.append(item)

    def drop() -> None:
        for number in range(2000):
            dropped.extend(backlog.drop(number % 50))

    writers = [threading.Thread(target=put, args=(one,)) for one in range(3)]
    others = [threading.Thread(target=drop), *(threading.Thread(target=take) for _ in range(2))]
    for thread in (*writers, *others):
        thread.start()
    for thread in writers:
        thread.join(20)
    backlog.close()
    for thread in others:
        thread.join(20)
    assert sorted(taken + dropped) == [(writer, number) for writer in range(3) for number in range(2000)]
