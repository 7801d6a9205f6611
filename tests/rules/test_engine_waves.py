"""The coordinator of an instance's engines: waves, counts at most every 100 ms, stale ones refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.rules.autoregressive import waves
from stage_runtime.rules.autoregressive.waves import (
    Counts,
    EnginesScaled,
    FirstRequestSent,
    Instruction,
    LateRequestReceived,
    PublishState,
    SendStartWave,
    Subscribed,
    Tick,
    WaveComplete,
    WaveEvent,
    Waves,
)


def run(engines: int, *events: tuple[float, WaveEvent]) -> tuple[Waves, list[list[Instruction]]]:
    state = Waves(engines)
    return state, [state.on(event, now) for now, event in events]


@pytest.mark.parametrize(
    ("events", "given"),
    [
        ([FirstRequestSent(0, 1)], [[SendStartWave(0, 1), PublishState(None, 0, True)]]),
        ([FirstRequestSent(0, 1), FirstRequestSent(0, 0)], [[SendStartWave(0, 1), PublishState(None, 0, True)], []]),
        ([WaveComplete(0)], [[PublishState(None, 1, False)]]),
        ([WaveComplete(0), WaveComplete(0)], [[PublishState(None, 1, False)], []]),
        (
            [WaveComplete(0), FirstRequestSent(0, 1)],
            [[PublishState(None, 1, False)], [SendStartWave(1, None), PublishState(None, 1, True)]],
        ),
        (
            [WaveComplete(0), LateRequestReceived(0, 1)],
            [[PublishState(None, 1, False)], [SendStartWave(1, None), PublishState(None, 1, True)]],
        ),
        ([LateRequestReceived(0, 1)], [[SendStartWave(0, 1), PublishState(None, 0, True)]]),
        ([LateRequestReceived(0, 2)], [[]]),
        # It overtakes the end of the wave before it, which rank 0 sends: its engine steps and waits for the others.
        (
            [FirstRequestSent(0, 0), LateRequestReceived(1, 1), WaveComplete(0)],
            [
                [SendStartWave(0, 0), PublishState(None, 0, True)],
                [SendStartWave(1, 1), PublishState(None, 1, True)],
                [],
            ],
        ),
        ([LateRequestReceived(1, 0)], [[SendStartWave(1, 0), PublishState(None, 1, True)]]),
        ([FirstRequestSent(0, 0), LateRequestReceived(0, 1)], [[SendStartWave(0, 0), PublishState(None, 0, True)], []]),
        ([Subscribed()], [[PublishState(((0, 0), (0, 0)), 0, False)]]),
        ([Tick()], [[]]),
    ],
)
def test_what_a_wave_s_events_lead_to(events: list[WaveEvent], given: list[list[Instruction]]) -> None:
    assert run(2, *((0.0, event) for event in events))[1] == given


def test_counts_are_published_at_most_every_100_ms() -> None:
    state, given = run(
        2,
        (0.0, Counts(0, 0, 1, 3, 1)),
        (0.05, Counts(1, 0, 1, 0, 2)),
        (0.06, Tick()),
        (0.1, Tick()),
        (0.3, Tick()),
        (0.4, Counts(0, 0, 2, 3, 1)),
    )
    first, second = PublishState(((3, 1), (0, 0)), 0, False), PublishState(((3, 1), (0, 2)), 0, False)
    assert given == [[first], [], [], [second], [], []]
    assert state.due_in(0.4) is None


def test_a_tick_is_wanted_only_while_counts_wait_to_be_published() -> None:
    state, _ = run(1, (1.0, Counts(0, 0, 1, 1, 0)), (1.04, Counts(0, 0, 2, 2, 0)))
    assert state.due_in(1.04) == pytest.approx(0.06)
    assert state.due_in(5.0) == 0.0
    state.on(Tick(), 1.2)
    assert state.due_in(1.2) is None


@pytest.mark.parametrize("stale", [Counts(0, 0, 5, 9, 9), Counts(0, 0, 4, 9, 9), Counts(5, 0, 9, 9, 9)])
def test_stale_counts_and_those_of_unknown_engines_are_refused(stale: Counts) -> None:
    state, given = run(1, (0.0, Counts(0, 0, 5, 1, 1)), (9.0, stale))
    assert given[1] == [] and state.counts == ((1, 1),)


def test_counts_of_a_newer_wave_are_newer_whatever_their_step_and_one_engine_s_make_no_other_s_stale() -> None:
    state, _ = run(2, (0.0, Counts(0, 0, 900, 1, 1)), (0.0, Counts(0, 1, 1, 2, 2)), (0.0, Counts(1, 0, 3, 4, 4)))
    assert state.counts == ((2, 2), (4, 4)) and state.stale == 0


def test_engines_that_are_added_take_part_in_the_next_wave() -> None:
    state, given = run(1, (0.0, FirstRequestSent(0, 0)), (0.0, EnginesScaled(3)), (0.0, FirstRequestSent(0, 0)))
    assert given[1:] == [
        [PublishState(((0, 0),) * 3, 0, False)],
        [SendStartWave(0, 0), PublishState(None, 0, True)],
    ]
    assert state.on(EnginesScaled(1), 0.0) == [PublishState(((0, 0),), 0, True)]
    assert state.on(EnginesScaled(0), 0.0) == []


_numbers = st.integers(-1, 4)
_events = st.one_of(
    st.builds(FirstRequestSent, _numbers, _numbers),
    st.builds(LateRequestReceived, _numbers, _numbers),
    st.builds(WaveComplete, _numbers),
    st.builds(Counts, _numbers, _numbers, _numbers, _numbers, _numbers),
    st.builds(EnginesScaled, _numbers),
    st.just(Subscribed()),
    st.just(Tick()),
)


@given(st.lists(st.tuples(st.floats(0, 0.05), _events), max_size=60))
def test_waves_never_fall_clients_know_the_newest_and_counts_wait_their_turn(
    steps: list[tuple[float, WaveEvent]],
) -> None:
    state, now, wave, last = Waves(2), 0.0, 0, float("-inf")
    known = (0, False)
    for passed, event in steps:
        now += passed
        given = state.on(event, now)
        assert state.wave >= wave
        wave = state.wave
        for one in given:
            if isinstance(one, PublishState):
                known = (one.wave, one.running)
                if one.counts is not None and isinstance(event, Counts | Tick):
                    assert now >= last + waves.PUBLISH_EVERY_S  # as the rule adds: a difference may be rounded below it
                if one.counts is not None:
                    last = now
        assert known == (state.wave, state.running)
