"""Ticks that all processes have in common."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.rules.flow import ticks

NOW = st.floats(1.7e9, 1.9e9)
ROUNDED_S = 1e-5  # what a float loses in seconds since 1970


@given(now=NOW, least_s=st.floats(0.0, 20.0), tick_s=st.sampled_from([0.03125, 0.04, 0.25, 1.0]))
def test_a_delay_ends_at_the_first_tick_that_is_far_enough_away(now: float, least_s: float, tick_s: float) -> None:
    delay_s = ticks.delay_s(now, least_s, tick_s)
    assert least_s <= delay_s <= least_s + tick_s
    off = (now + delay_s) % tick_s
    assert min(off, tick_s - off) < ROUNDED_S


@given(now=NOW, apart_s=st.lists(st.floats(0.0, 0.3), min_size=20, max_size=20))
def test_what_is_sent_by_many_processes_comes_at_few_moments(now: float, apart_s: list[float]) -> None:
    tick_s = 0.04
    moments = {round((now + one + ticks.delay_s(now + one, 0.02, tick_s)) / tick_s) for one in apart_s}
    assert len(moments) <= math.ceil(0.3 / tick_s) + 2


@pytest.mark.parametrize(("now", "delay_s"), [(100.0, 0.5), (100.1, 0.4), (100.4, 0.6), (100.6, 0.4)])
def test_some_delays(now: float, delay_s: float) -> None:
    assert ticks.delay_s(now, 0.3, 0.5) == pytest.approx(delay_s)


@given(now=NOW, apart_s=st.floats(-0.1, 0.1))
def test_a_timer_that_is_early_or_late_fires_once_a_tick_and_with_the_others(now: float, apart_s: float) -> None:
    tick = now + ticks.next_s(now, 0.5)
    assert ticks.next_s(tick + apart_s, 0.5) == pytest.approx(0.5 - apart_s, abs=ROUNDED_S)


@pytest.mark.parametrize(("now", "next_s"), [(100.0, 1.0), (100.4, 0.6), (100.6, 1.4), (100.9, 1.1)])
def test_the_next_tick_is_not_one_that_is_nearer_than_half_of_one(now: float, next_s: float) -> None:
    assert ticks.next_s(now, 1.0) == pytest.approx(next_s)
