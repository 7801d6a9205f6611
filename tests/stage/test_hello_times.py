"""When a process says Hello: ever less often, and not all processes at once."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.sockets.channels import Channels
from stage_runtime.stage.control.registration import HELLO_MOST_S, REFUSED_S, HelloTimes, Registration, Unanswered
from tests.patience import patience


def sent(times: HelloTimes, until_s: float, step_s: float = 0.01) -> list[float]:
    return [step * step_s for step in range(int(until_s / step_s)) if times.due(step * step_s)]


def test_it_is_said_at_once_and_then_ever_less_often() -> None:
    found = sent(HelloTimes(0.0, spread_s=0.0, random=lambda low, high: (low + high) / 2), 60.0)
    gaps = [later - earlier for earlier, later in itertools.pairwise(found)]
    assert found[0] == 0.0
    assert gaps[0] < 0.12
    assert all(longer >= shorter - 0.02 for shorter, longer in itertools.pairwise(gaps))
    assert HELLO_MOST_S - 0.02 < gaps[-1] < HELLO_MOST_S + 0.02
    assert len(found) < 40


def test_one_that_was_refused_has_no_connection_for_some_seconds_and_then_asks_again() -> None:
    times = HelloTimes(0.0, spread_s=0.0, random=lambda low, high: (low + high) / 2)
    assert times.rested(0.0) and times.due(0.0)
    times.refused(1.0)
    quiet = [step / 100 for step in range(100, int(100 * (1.0 + REFUSED_S)))]
    assert not any(times.rested(now) or times.due(now) for now in quiet)
    assert times.rested(1.0 + REFUSED_S) and times.due(1.0 + REFUSED_S)
    assert times.rested(1.01 + REFUSED_S), "it waits for the answer"


@given(st.lists(st.floats(0.0, 1.0), min_size=30, max_size=30))
def test_the_first_comes_within_the_spread_whatever_is_drawn(drawn: list[float]) -> None:
    values = iter(drawn)
    times = HelloTimes(0.0, spread_s=4.0, random=lambda low, high: low + (high - low) * next(values, 0.5))
    found = sent(times, 10.0)
    assert found[0] <= 4.01


def test_that_no_coordinator_answers_is_logged_late_and_ever_less_often_until_one_does() -> None:
    unanswered = Unanswered(0.0, patience_s=15.0)
    logged = [now for now in range(2000) if unanswered.due(now, answered=False) is not None]
    assert logged == [15, 45, 105, 225, 465, 765, 1065, 1365, 1665, 1965]
    assert unanswered.due(2000, answered=True) is None
    assert [unanswered.due(now, answered=False) for now in (2001, 2014, 2015, 2016)] == [None, None, 15.0, None]


@pytest.mark.parametrize(
    "addresses, asked",
    [
        (["tcp://10.0.0.1:5550", "tcp://10.0.0.2:5550"], "(asked tcp://10.0.0.1:5550, tcp://10.0.0.2:5550)"),
        ([], "(tcp://duo-peers:5550: the name has no address)"),
    ],
)
async def test_a_process_that_no_coordinator_answers_logs_whom_it_asked(
    addresses: list[str], asked: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def resolve(endpoint: str) -> list[str]:
        return addresses

    silent = SimpleNamespace(connect=lambda peer, endpoint: SimpleNamespace(connected=False))
    registration = Registration(
        cast(Channels, silent),
        endpoints=["tcp://duo-peers:5550"],
        resolve=resolve,
        hello=lambda endpoint: pytest.fail("nobody is connected"),
        welcomed=lambda: None,
        patience_s=0.0,
    )
    runs = asyncio.ensure_future(registration.run())
    async with asyncio.timeout(patience(20)):
        while not caplog.records:
            await asyncio.sleep(0.01)
    runs.cancel()
    assert caplog.messages[0].startswith("no coordinator has answered for 0 s, so this process gets no request")
    assert asked in caplog.messages[0]
