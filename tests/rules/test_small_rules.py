"""Credits, tombstones and what hooks may answer."""

from __future__ import annotations

from contextlib import nullcontext
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.errors import HookError, RequestError
from stage_runtime.rules.flow.credits import Reservation, Window
from stage_runtime.rules.graph import routing
from stage_runtime.rules.requests.tombstones import Tombstones

# --- credits ------------------------------------------------------------------------------------------------------


@given(
    limit=st.integers(1, 3),
    shared_nbytes=st.integers(0, 20),
    small_nbytes=st.integers(0, 25) | st.none(),
    steps=st.lists(st.integers(0, 25) | st.none(), max_size=40),  # a transfer of so many bytes; a release
    random=st.randoms(use_true_random=False),
)
def test_a_window_is_never_overdrawn_and_refuses_only_while_one_transfer_is_copied(
    limit: int, shared_nbytes: int, small_nbytes: int | None, steps: list[int | None], random: Random
) -> None:
    window = Window(limit, shared_nbytes, small_nbytes=small_nbytes)
    out: list[tuple[Reservation, int]] = []
    for nbytes in steps:
        if nbytes is None:
            if out:
                window.give(*out.pop(random.randrange(len(out))))
            continue
        reservation = window.take(nbytes)
        if reservation is not None:
            out.append((reservation, nbytes))
        credits = [reservation for reservation, _ in out if reservation is not Reservation.SHARED]
        shared = sum(nbytes for reservation, nbytes in out if reservation is Reservation.SHARED)
        assert len(credits) <= limit
        assert shared <= shared_nbytes
        if reservation is None:
            assert len(credits) == limit
            assert Reservation.LAST_CREDIT in credits, "it is in motion, and its release lets this one through"
            is_small = small_nbytes is None or nbytes <= small_nbytes
            assert shared + nbytes > (shared_nbytes if is_small else shared_nbytes // 8)
    for reservation, nbytes in out:
        window.give(reservation, nbytes)
    assert (window.credits, window.shared) == (0, 0)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_window_that_lets_nothing_through_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match="would never let anything through"):
        Window(limit)


# --- tombstones ---------------------------------------------------------------------------------------------------


def test_an_attempt_and_all_before_it_are_dead_and_later_ones_are_not() -> None:
    dead = Tombstones()
    dead.add("cc", "r1", 5, now=0.0)
    assert [dead.has("cc", "r1", attempt) for attempt in (4, 5, 6)] == [True, True, False]
    dead.add("cc", "r1", 3, now=1.0)  # an abort that came late takes nothing back
    assert dead.has("cc", "r1", 5)


def test_an_attempt_that_gave_its_result_is_known_until_a_later_one_is_over() -> None:
    dead = Tombstones()
    dead.add("cc", "r1", 4, now=0.0, served=True)
    dead.add("cc", "r1", 4, now=1.0)  # the coordinator ends what is over
    dead.add("cc", "r1", 3, now=2.0)
    assert [dead.served("cc", "r1", attempt) for attempt in (3, 4, 5)] == [False, True, False]
    dead.add("cc", "r1", 5, now=3.0)
    dead.add("cc", "r1", 4, now=4.0, served=True)  # it comes late
    assert [dead.served("cc", "r1", attempt) for attempt in (4, 5)] == [False, False]


def test_each_coordinators_dead_are_its_own() -> None:
    dead = Tombstones()
    dead.add("cc", "r1", 5, now=0.0)
    assert not dead.has("other", "r1", 1)


def test_the_dead_are_forgotten_after_their_time_and_the_oldest_first_beyond_the_limit() -> None:
    dead = Tombstones(keep_s=10.0, limit=3)
    for number in range(4):
        dead.add("cc", f"r{number}", 1, now=float(number))
    assert [dead.has("cc", f"r{number}", 1) for number in range(4)] == [False, True, True, True]
    dead.add("cc", "r1", 1, now=4.0)  # said again: kept longer
    dead.add("cc", "r9", 1, now=12.5)
    assert [dead.has("cc", f"r{number}", 1) for number in (1, 2, 3, 9)] == [True, False, True, True]
    assert len(dead) == 3


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 3), st.integers(0, 5)), max_size=60))
def test_tombstones_are_bounded_whatever_ends(endings: list[tuple[str, int, int]]) -> None:
    dead = Tombstones(keep_s=8.0, limit=4)
    now = 0.0
    for request_id, attempt, later in endings:
        now += later
        dead.add("cc", request_id, attempt, now)
        assert dead.has("cc", request_id, attempt)
        assert len(dead) <= 4


# --- routing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "targets"),
    [("b", ("b",)), (["c", "b"], ("c", "b")), (("b",), ("b",)), ({"c"}, ("c",)), (["b", "b"], ("b",))],
)
def test_a_route_may_be_a_name_or_several(returned: Any, targets: tuple[str, ...]) -> None:
    assert routing.route("a", ["b", "c"], returned) == targets


@pytest.mark.parametrize("returned", [None, [], "", "ghost", ["b", "ghost"], 7, [7], {"b": 1}])
def test_a_route_that_leads_nowhere_blames_route_fn(returned: Any) -> None:
    with pytest.raises(HookError) as caught:
        routing.route("a", ["b", "c"], returned)
    assert (caught.value.stage, caught.value.hook) == ("a", "routeFn")


@pytest.mark.parametrize(
    ("to", "targets"), [(None, ("b", "c")), ("c", ("c",)), (["c"], ("c",)), (["b", "c"], ("b", "c"))]
)
def test_a_chunk_goes_to_all_stream_targets_or_those_it_names(to: Any, targets: tuple[str, ...]) -> None:
    assert routing.stream_targets("a", ["b", "c"], to) == targets


@pytest.mark.parametrize(
    ("declared", "to", "targets"),
    [
        (["b"], "coordinator", ("coordinator",)),
        (["b"], ["coordinator", "b", "coordinator"], ("coordinator", "b")),
        (["b"], None, ("b",)),
        ([], "coordinator", ("coordinator",)),
    ],
)
def test_a_terminal_stage_names_its_client_beside_its_stream_targets(
    declared: list[str], to: Any, targets: tuple[str, ...]
) -> None:
    assert routing.stream_targets("a", declared, to, terminal=True) == targets
    with pytest.raises(HookError) if to is not None else nullcontext():
        routing.stream_targets("a", declared, to)


@pytest.mark.parametrize("to", ["ghost", [], ["b", "ghost"], 7])
def test_a_chunk_to_somebody_else_is_refused(to: Any) -> None:
    with pytest.raises(HookError, match=r"streamTo|one or more of"):
        routing.stream_targets("a", ["b", "c"], to)


@pytest.mark.parametrize(("returned", "targets"), [(None, ()), ([], ()), ("b", ("b",)), (["c"], ("c",))])
def test_the_done_signal_goes_to_those_named_and_to_nobody_for_none(returned: Any, targets: tuple[str, ...]) -> None:
    assert routing.done_targets("a", ["b", "c"], returned) == targets


@pytest.mark.parametrize("returned", ["ghost", 7, [7], {"b": 1}])
def test_a_done_signal_to_somebody_else_blames_its_hook(returned: Any) -> None:
    with pytest.raises(HookError) as caught:
        routing.done_targets("a", ["b", "c"], returned)
    assert caught.value.hook == "streamDoneToFn"


@pytest.mark.parametrize(
    ("returned", "terminals"),
    [(None, ("text", "voice")), (["voice"], ("voice",)), ({"voice", "text"}, ("text", "voice"))],
)
def test_a_request_waits_for_the_terminals_that_were_named(returned: Any, terminals: tuple[str, ...]) -> None:
    assert routing.terminals(("text", "voice"), returned) == terminals


@pytest.mark.parametrize("returned", [[], "voice", ["ghost"], ["voice", "ghost"], 7])
def test_an_impossible_set_of_terminals_is_refused_before_anything_is_sent(returned: Any) -> None:
    with pytest.raises(RequestError) as caught:
        routing.terminals(("text", "voice"), returned)
    assert (caught.value.code, caught.value.hook) == ("stage_failed", "terminalStagesFn")
