"""Fan-in: which payloads a request waits for, and when it has them all."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.errors import HookError
from stage_runtime.rules.flow.gathering import Gathering, names_of

SOURCES = ("vision", "audio", "text")


@pytest.mark.parametrize("order", list(permutations(SOURCES)))
def test_a_static_fan_in_is_complete_with_its_last_source_whatever_the_order(order: tuple[str, ...]) -> None:
    gathering = Gathering("join", SOURCES, static=True)
    complete = []
    for source in order:
        gathering.arrive(source, source.upper())
        complete.append(gathering.complete)
    assert complete == [False, False, True]
    assert list(gathering.inputs().items()) == [("vision", "VISION"), ("audio", "AUDIO"), ("text", "TEXT")]


@given(st.permutations(SOURCES), st.sets(st.sampled_from(SOURCES), min_size=1), st.data())
def test_a_resolved_fan_in_is_complete_when_the_resolved_sources_are_there(
    order: list[str], active: set[str], data: st.DataObject
) -> None:
    """wait_for_fn may say None for a while; what came before is kept."""
    arrivals = [source for source in order if source in active]
    decisive = data.draw(st.integers(0, len(arrivals) - 1))
    gathering = Gathering("join", SOURCES, static=False)
    for index, source in enumerate(arrivals):
        gathering.arrive(source, index)
        gathering.resolve(sorted(active) if index >= decisive else None)
        assert gathering.complete == (index == len(arrivals) - 1)
    assert gathering.inputs().keys() == active


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ([], "empty list"),
        ((), "empty list"),
        (["ghost"], "ghost"),
        (["vision", "ghost"], "ghost"),
        ("vision", "expected a list"),
        ([1], "expected a list"),
        (7, "expected a list"),
        ({"vision": 1}, "expected a list"),
    ],
)
def test_what_wait_for_fn_may_not_say_blames_it(returned: object, problem: str) -> None:
    gathering = Gathering("join", SOURCES, static=False)
    gathering.arrive("vision", 1)
    with pytest.raises(HookError, match=problem) as caught:
        gathering.resolve(returned)
    assert (caught.value.stage, caught.value.hook) == ("join", "waitForFn")
    assert not gathering.resolved


def test_a_source_that_the_resolved_set_leaves_out_is_an_error_before_and_after() -> None:
    early = Gathering("join", SOURCES, static=False)
    early.arrive("text", 1)
    with pytest.raises(HookError, match="text"):
        early.resolve(["vision"])
    late = Gathering("join", SOURCES, static=False)
    late.arrive("vision", 1)
    late.resolve(["vision", "audio"])
    with pytest.raises(HookError, match="text"):
        late.arrive("text", 2)


def test_an_unexpected_or_second_payload_is_an_error_and_changes_nothing() -> None:
    gathering = Gathering("join", SOURCES, static=True)
    gathering.arrive("vision", "first")
    with pytest.raises(HookError, match="second payload from 'vision'"):
        gathering.arrive("vision", "second")
    with pytest.raises(HookError, match="'ghost'"):
        gathering.arrive("ghost", "x")
    assert gathering.inputs() == {"vision": "first"}


@given(st.permutations(SOURCES))
def test_a_wait_for_fn_that_returns_none_for_the_last_input_fails_with_the_reason(order: list[str]) -> None:
    """Nobody would ask it again, and the request would wait for its deadline."""
    gathering = Gathering("join", SOURCES, static=False)
    for source in order[:-1]:
        gathering.arrive(source, 1)
        gathering.resolve(None)
    gathering.arrive(order[-1], 1)
    with pytest.raises(HookError, match="no other source sends") as caught:
        gathering.resolve(None)
    assert (caught.value.stage, caught.value.hook) == ("join", "waitForFn")


def test_what_is_resolved_stays_resolved() -> None:
    gathering = Gathering("join", SOURCES, static=False)
    gathering.arrive("vision", 1)
    gathering.resolve(["vision"])
    gathering.resolve(["text"])
    assert gathering.complete


def test_taken_inputs_are_not_held_any_longer() -> None:
    """A payload may be a view of a sender's slot: the slot is free when the merge is through, not the request."""
    gathering = Gathering("join", SOURCES, static=True)
    payloads = [Big() for _ in SOURCES]
    for source, payload in zip(SOURCES, payloads, strict=True):
        gathering.arrive(source, payload)
    assert list(gathering.take().values()) == payloads
    assert list(gathering.inputs().values()) == [None] * 3
    with pytest.raises(HookError, match="second payload"):
        gathering.arrive("vision", "again")


class Big:
    pass


@pytest.mark.parametrize(
    ("returned", "names"),
    [(["a"], ["a"]), (("a", "b"), ["a", "b"]), ({"a"}, ["a"]), (frozenset(["a"]), ["a"]), ([], [])],
)
def test_lists_tuples_and_sets_are_lists_of_names(returned: Any, names: list[str]) -> None:
    assert names_of(returned) == names


def test_who_will_wait_is_known_before_a_payload_is_taken() -> None:
    static = Gathering("join", ("a", "b"), static=True)
    assert static.waits_after("a")
    static.arrive("a", 1)
    assert static.waits_after("a")
    assert not static.waits_after("b")
    unresolved = Gathering("join", ("a",), static=False)
    assert unresolved.waits_after("a")
