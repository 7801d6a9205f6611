"""Clients that read slowly, or never, hold a stage up for a bounded time, within a bound of memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.rules.flow.streams import STREAM_WINDOW
from stage_runtime.rules.requests.readers import (
    EACH,
    PATIENCE_S,
    ROOM,
    EndRequest,
    Holder,
    Reader,
    Step,
    TakeUnread,
    decide,
    first_to_end,
)
from tests.thoroughness import examples

NOW = 100.0
LATE = NOW - PATIENCE_S


def reader(request: str, *, fresh: int = STREAM_WINDOW, early: int = 0, read_at: float = LATE) -> Reader[str]:
    return Reader(request, fresh, early, read_at)


@pytest.mark.parametrize(
    ("readers", "steps"),
    [
        ([], []),
        ([reader("r1")], [TakeUnread("r1")]),
        ([reader("r1", read_at=NOW)], [TakeUnread("r1")]),
        ([reader("r1", fresh=0, early=9)], []),  # it holds no worker up
        ([reader("r1", early=EACH)], [EndRequest("r1")]),
        ([reader("r1", early=EACH, read_at=NOW)], []),  # it reads
        ([reader("r1", early=EACH), reader("r2")], [TakeUnread("r2")]),  # one worker is enough
        ([reader("r1", early=EACH, read_at=LATE - 1), reader("r2", early=EACH)], [EndRequest("r1")]),
        # r0 holds nobody up: while there is room it may lie unread.
        ([reader("r0", fresh=0, early=9, read_at=0.0), reader("r1", early=EACH)], [EndRequest("r1")]),
        ([reader("r0", fresh=0, early=ROOM, read_at=0.0), reader("r1")], [EndRequest("r0")]),
        ([reader("r0", fresh=0, early=ROOM, read_at=NOW), reader("r1")], [EndRequest("r1")]),
        ([reader("r0", fresh=0, early=ROOM, read_at=0.0)], []),
        ([reader("r0", fresh=0, read_at=0.0), reader("r3", fresh=0, early=ROOM), reader("r1")], [EndRequest("r3")]),
        ([reader("r1", early=ROOM - 1), reader("r2")], [TakeUnread("r2")]),
        ([reader("r0", fresh=0, early=ROOM - 1), reader("r1"), reader("r2")], [TakeUnread("r1")]),
    ],
)
def test_what_is_unread_is_taken_early_up_to_a_bound_and_then_who_read_least_recently_ends(
    readers: list[Reader[str]], steps: list[Step[str]]
) -> None:
    assert decide(readers, now=NOW) == steps


def holder(request: str, nbytes: int = 1, *, streamed: bool = True, read_at: float = NOW) -> Holder[str]:
    return Holder(request, nbytes, streamed, read_at)


@pytest.mark.parametrize(
    ("holders", "ended"),
    [
        ([holder("r1")], "r1"),
        ([holder("r1", 9), holder("r2", read_at=LATE)], "r2"),
        ([holder("r1", 9, read_at=LATE), holder("r2", read_at=LATE - 1)], "r2"),
        ([holder("r1"), holder("r2", 9)], "r2"),  # both read
        # An answer that is not streamed has no reader yet.
        ([holder("r1", streamed=False, read_at=0.0), holder("r2", 9)], "r2"),
        ([holder("r1", 9, streamed=False), holder("r2")], "r1"),
    ],
)
def test_where_unread_answers_take_too_much_the_least_recent_reader_ends_else_the_largest_answer(
    holders: list[Holder[str]], ended: str
) -> None:
    assert first_to_end(holders, now=NOW).request == ended


@pytest.mark.proves("client-never-reads")
@given(
    lengths=st.lists(st.integers(1, 2 * ROOM), min_size=1, max_size=12),
    places=st.integers(1, 4),
    paces=st.lists(st.sampled_from([0, 0, 20, 200]), min_size=12, max_size=12),
)
@settings(deadline=None, max_examples=examples(60))
def test_every_request_is_served_or_ends_whatever_its_client_reads(
    lengths: list[int], places: int, paces: list[int]
) -> None:
    """A stage with few places that gives as fast as it may, and clients that read some units each 50 ms, or none."""
    queue = list(range(len(lengths)))
    left, fresh, early = dict(enumerate(lengths)), dict.fromkeys(queue, 0), dict.fromkeys(queue, 0)
    read_at = dict.fromkeys(queue, 0.0)
    begun: list[int] = []
    ended: set[int] = set()
    now = 0.0
    while queue:
        now += 0.05
        assert now < 60 * len(lengths), "somebody waits for ever"
        for one in fresh:
            if paces[one] and (early[one] or fresh[one]):
                read = min(paces[one], early[one] + fresh[one])
                early[one], fresh[one] = max(0, early[one] - read), fresh[one] - max(0, read - early[one])
                read_at[one] = now
        begun += [queue.pop(0) for _ in range(min(places - len(begun), len(queue)))]
        for one in list(begun):
            given_now = min(left[one], STREAM_WINDOW - fresh[one])
            left[one] -= given_now
            read_at[one] = read_at[one] if early[one] or fresh[one] else now
            fresh[one] += given_now
            if not left[one]:
                begun.remove(one)
        if len(begun) < places or not queue:
            continue
        for step in decide(
            [Reader(one, fresh[one] if one in begun else 0, early[one], read_at[one]) for one in fresh], now=now
        ):
            one = step.request
            if isinstance(step, TakeUnread):
                early[one] += fresh[one]
                fresh[one] = 0
            else:
                assert now - read_at[one] >= PATIENCE_S
                assert not paces[one] or not (early[one] + fresh[one]), "it reads, and is ended"
                ended.add(one)
                early[one] = fresh[one] = left[one] = 0
                begun = [other for other in begun if other != one]
        assert sum(early.values()) < ROOM + STREAM_WINDOW
        assert max(early.values()) < EACH + STREAM_WINDOW
    small = [one for one, length in enumerate(lengths) if length <= STREAM_WINDOW]
    assert not ended & set(small), "what fits into its window costs nobody anything"
