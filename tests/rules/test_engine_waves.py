"""The coordinator of an instance's engines: waves, counts at most every 100 ms, stale ones refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.rules.autoregressive import waves
from stage_runtime.rules.autoregressive.waves import (
    Counts,
    EnginesScaled,
    Instruction,
    PublishState,
    SendStartWave,
    Subscribed,
    Tick,
    WaveBegun,
    WaveEvent,
    Waves,
)


def run(engines: int, *events: tuple[float, WaveEvent]) -> tuple[Waves, list[list[Instruction]]]:
    state = Waves(engines)
    return state, [state.on(event, now) for now, event in events]


@pytest.mark.parametrize(
    ("events", "given"),
    [
        ([WaveBegun(0, 1)], [[SendStartWave(0, 1)]]),
        ([WaveBegun(0, 1), WaveBegun(0, 0)], [[SendStartWave(0, 1)], []]),  # all have been told
        ([WaveBegun(0, 1), WaveBegun(1, 0), WaveBegun(0, 1)], [[SendStartWave(0, 1)], [SendStartWave(1, 0)], []]),
        ([WaveBegun(0, 2)], [[]]),
        ([Subscribed()], [[PublishState(((0, 0), (0, 0)))]]),
        ([Tick()], [[]]),
    ],
)
def test_what_a_wave_s_events_lead_to(events: list[WaveEvent], given: list[list[Instruction]]) -> None:
    assert run(2, *((0.0, event) for event in events))[1] == given


def test_counts_are_published_at_most_every_100_ms() -> None:
    state, given = run(
        2,
        (0.0, Counts(0, 1, 3, 1)),
        (0.05, Counts(1, 1, 0, 2)),
        (0.06, Tick()),
        (0.1, Tick()),
        (0.3, Tick()),
        (0.4, Counts(0, 2, 3, 1)),
    )
    first, second = PublishState(((3, 1), (0, 0))), PublishState(((3, 1), (0, 2)))
    assert given == [[first], [], [], [second], [], []]
    assert state.due_in(0.4) is None


def test_a_tick_is_wanted_only_while_counts_wait_to_be_published() -> None:
    state, _ = run(1, (1.0, Counts(0, 1, 1, 0)), (1.04, Counts(0, 2, 2, 0)))
    assert state.due_in(1.04) == pytest.approx(0.06)
    assert state.due_in(5.0) == 0.0
    state.on(Tick(), 1.2)
    assert state.due_in(1.2) is None


@pytest.mark.parametrize("stale", [Counts(0, 5, 9, 9), Counts(0, 4, 9, 9), Counts(5, 9, 9, 9)])
def test_stale_counts_and_those_of_unknown_engines_are_refused(stale: Counts) -> None:
    state, given = run(1, (0.0, Counts(0, 5, 1, 1)), (9.0, stale))
    assert given[1] == [] and state.counts == ((1, 1),)


def test_one_engine_s_counts_make_no_other_s_stale() -> None:
    state, _ = run(2, (0.0, Counts(0, 900, 1, 1)), (0.0, Counts(1, 1, 2, 2)))
    assert state.counts == ((1, 1), (2, 2)) and state.stale == 0


def test_counts_of_engines_that_are_added_or_removed_are_published_at_once() -> None:
    _state, given = run(1, (0.0, EnginesScaled(3)), (0.0, EnginesScaled(1)), (0.0, EnginesScaled(0)))
    assert given == [[PublishState(((0, 0),) * 3)], [PublishState(((0, 0),))], []]


_numbers = st.integers(-1, 4)
_events = st.one_of(
    st.builds(WaveBegun, _numbers, _numbers),
    st.builds(Counts, _numbers, _numbers, _numbers, _numbers),
    st.builds(EnginesScaled, _numbers),
    st.just(Subscribed()),
    st.just(Tick()),
)


@given(st.lists(st.tuples(st.floats(0, 0.05), _events), max_size=60))
def test_each_wave_is_started_once_and_counts_wait_their_turn(steps: list[tuple[float, WaveEvent]]) -> None:
    state, now, wave, last = Waves(2), 0.0, -1, float("-inf")
    for passed, event in steps:
        now += passed
        for one in state.on(event, now):
            if isinstance(one, SendStartWave):
                assert one.wave > wave
                wave = one.wave
            else:
                if isinstance(event, Counts | Tick):
                    assert now >= last + waves.PUBLISH_EVERY_S  # as the rule adds: a difference may be rounded below it
                last = now
    assert state.begun == wave
