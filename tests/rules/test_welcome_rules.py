"""A repeated Hello is answered ever less often, until its Welcome was read."""

from __future__ import annotations

import itertools

from stage_runtime.rules.members.welcomes import AGAIN_MOST_S, AGAIN_S, Welcomes
from stage_runtime.wire.messages import Hello
from stage_runtime.wire.parts import Member


def hello(via: str = "tcp://c:1", endpoint: str = "tcp://m:1") -> Hello:
    return Hello(Member("m", "group", "unit", "rev", endpoint, {}, ()), "1:", "pipeline", via)


def test_a_hello_that_is_repeated_is_answered_at_once_and_then_ever_less_often() -> None:
    welcomes = Welcomes()
    answered = [step / 10 for step in range(1000) if welcomes.due("m", hello(), step / 10)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(answered)]
    assert answered[0] == 0.0
    assert abs(gaps[0] - AGAIN_S) < 0.2
    assert all(abs(later - min(2 * earlier, AGAIN_MOST_S)) < 0.5 for earlier, later in itertools.pairwise(gaps))
    assert abs(gaps[-1] - AGAIN_MOST_S) < 0.2


def test_another_hello_another_member_and_one_that_was_gone_are_answered_at_once() -> None:
    welcomes = Welcomes()
    assert welcomes.due("m", hello(), 0.0)
    assert not welcomes.due("m", hello(), 0.1)
    assert welcomes.due("n", hello(), 0.1)
    assert welcomes.due("m", hello(via="tcp://c:2"), 0.1)
    assert welcomes.due("m", hello(), 0.1)
    welcomes.forget("m")
    assert welcomes.due("m", hello(), 0.1)


def test_one_that_has_read_its_welcome_is_answered_again_in_a_second_however_often_it_asked() -> None:
    welcomes = Welcomes()
    for step in range(300):
        welcomes.due("m", hello(), step / 10)
    answered = next(step / 10 for step in range(300, 400) if welcomes.due("m", hello(), step / 10))
    welcomes.read("m")
    assert not welcomes.due("m", hello(), answered + 0.9 * AGAIN_S)
    assert welcomes.due("m", hello(), answered + AGAIN_S)


def test_one_that_says_hello_and_ready_without_end_gets_one_a_second() -> None:
    welcomes = Welcomes()
    answered = 0
    for step in range(1000):
        answered += welcomes.due("m", hello(), step / 100)
        welcomes.read("m")
    assert answered <= 1 + 10.0 / AGAIN_S
