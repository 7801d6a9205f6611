"""Chunks in order whatever order they come in; an end that overtakes nothing; a window that bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.errors import ProtocolError
from stage_runtime.rules.flow.streams import STREAM_WINDOW, UNIT_NBYTES, Inbound, Merge, Outbound, weight


@given(st.integers(0, 12).flatmap(lambda count: st.tuples(st.just(count), st.permutations(range(-1, count)))))
def test_chunks_are_delivered_in_order_and_done_never_overtakes(case: tuple[int, list[int]]) -> None:
    """-1 stands for the end."""
    count, order = case
    inbound: Inbound[int] = Inbound()
    delivered: list[int] = []
    for index in order:
        assert not inbound.closed
        if index < 0:
            inbound.end(count)
        else:
            delivered += inbound.offer(index, index)
        assert delivered == list(range(len(delivered)))
        assert inbound.closed == (len(delivered) == count and (index < 0 or -1 in order[: order.index(index)]))
    assert inbound.closed
    assert delivered == list(range(count))
    assert inbound.pending() == []


@pytest.mark.parametrize("again", [0, 2])
def test_a_chunk_given_twice_is_refused_delivered_or_not(again: int) -> None:
    inbound: Inbound[str] = Inbound()
    inbound.offer(0, "a")
    inbound.offer(2, "c")
    with pytest.raises(ProtocolError, match=f"chunk {again}"):
        inbound.offer(again, "again")
    assert inbound.offer(1, "b") == ["b", "c"]


def test_a_chunk_after_the_announced_end_is_refused() -> None:
    inbound: Inbound[str] = Inbound()
    inbound.end(1)
    with pytest.raises(ProtocolError):
        inbound.offer(1, "b")
    assert inbound.offer(0, "a") == ["a"]


@pytest.mark.parametrize("total", [0, 1, 2])
def test_an_end_before_what_has_come_is_refused(total: int) -> None:
    inbound: Inbound[str] = Inbound()
    inbound.offer(0, "a")
    inbound.offer(2, "c")
    if total < 2:
        with pytest.raises(ProtocolError):
            inbound.end(total)
        assert not inbound.closed


def test_an_end_below_a_chunk_that_waits_is_refused() -> None:
    """Chunk 5 is here, so there are at least six: an end after two would close a stream and strand it."""
    inbound: Inbound[str] = Inbound()
    inbound.offer(5, "f")
    with pytest.raises(ProtocolError):
        inbound.end(2)


def test_two_different_ends_are_refused_and_the_same_one_twice_is_not() -> None:
    inbound: Inbound[str] = Inbound()
    inbound.end(3)
    inbound.end(3)
    with pytest.raises(ProtocolError):
        inbound.end(4)


def test_chunks_that_wait_for_an_earlier_one_can_be_found_and_freed() -> None:
    inbound: Inbound[str] = Inbound()
    inbound.offer(1, "b")
    inbound.offer(3, "d")
    assert inbound.pending() == ["b", "d"]


@pytest.mark.proves("slow-receiver")
@given(st.integers(1, 6), st.lists(st.one_of(st.just("send"), st.integers(0, 20)), max_size=60))
def test_a_window_is_never_exceeded_and_false_counts_do_not_open_it(window: int, steps: list[str | int]) -> None:
    outbound = Outbound(window)
    taken = 0
    for step in steps:
        if step == "send":
            if not outbound.full:
                assert outbound.number() == outbound.count - 1
        else:
            was_full = outbound.full
            opened = outbound.consumed(int(step))
            taken = min(taken + int(step), outbound.count)
            assert opened == (was_full and not outbound.full)
        assert outbound.count - taken <= window
        assert outbound.full == (outbound.count - taken == window)


@given(st.lists(st.integers(0, 8 << 20), min_size=1, max_size=300))
def test_what_a_window_lets_out_is_bounded_in_bytes_and_never_less_than_four_chunks(sizes: list[int]) -> None:
    outbound = Outbound(STREAM_WINDOW)
    sent: list[int] = []
    for nbytes in sizes:
        if outbound.full:
            break
        outbound.number(weight(nbytes))
        sent.append(nbytes)
    assert sum(sent) < STREAM_WINDOW * UNIT_NBYTES + 4 * max(sent, default=0) + 1
    assert len(sent) >= min(4, len(sizes))


@pytest.mark.parametrize(
    ("nbytes", "taken"),
    [
        (0, 1),
        (UNIT_NBYTES - 1, 1),
        (UNIT_NBYTES, 2),
        (5 * UNIT_NBYTES // 2, 3),
        (STREAM_WINDOW * UNIT_NBYTES, STREAM_WINDOW // 4),
    ],
)
def test_a_chunk_takes_a_unit_and_one_for_each_64_kib_up_to_a_quarter_of_the_window(nbytes: int, taken: int) -> None:
    assert weight(nbytes) == taken


def test_what_was_taken_opens_the_window_by_its_weight() -> None:
    outbound = Outbound(4)
    outbound.number(3)
    outbound.number(2)
    assert outbound.full
    assert outbound.consumed(3)
    assert not outbound.full
    outbound.consumed(99)
    outbound.number(4)
    assert outbound.full, "a lie opens nothing beyond"


def test_sources_close_one_by_one_and_the_merge_with_the_last() -> None:
    merge = Merge(("a", "b"))
    merge.of("a").offer(0, "x")
    merge.of("a").end(1)
    assert merge.of("a").closed
    assert not merge.closed
    merge.of("b").end(0)
    assert merge.closed


def test_a_chunk_of_a_stage_that_does_not_stream_here_is_refused() -> None:
    with pytest.raises(ProtocolError, match="'ghost'"):
        Merge(("a",)).of("ghost")


def test_a_consumer_that_has_finished_opens_a_full_window_once_and_for_all() -> None:
    outbound = Outbound(2)
    assert outbound.closed is False
    assert [outbound.number(), outbound.number()] == [0, 1]
    assert outbound.full
    assert outbound.close() is True
    assert outbound.closed is True
    outbound.number()
    assert not outbound.full and outbound.close() is False


def test_early_chunks_of_every_source_are_pending() -> None:
    merge = Merge(("a", "b"))
    assert merge.pending() == []
    merge.of("a").offer(1, "second")
    merge.of("b").offer(2, "third")
    assert merge.pending() == ["second", "third"]
