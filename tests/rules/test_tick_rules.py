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
