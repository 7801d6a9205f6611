"""Whether an instance is on its way, and what becomes of requests that need one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.rules.members import absences
from stage_runtime.rules.members.absences import Absences, Outlook, Prospect
from stage_runtime.rules.requests import holding
from stage_runtime.rules.requests.holding import HoldLimits, Step, Verdict
from tests.thoroughness import examples

VOICE = ("voice", "voice", "v1", "edges")
FRONT = ("front", "front", "f1", "edges")
LIMITS = HoldLimits(requests=2, nbytes=100)


@pytest.mark.parametrize(
    ("away_s", "expected_s", "loading", "failed", "outlook"),
    [
        (0.0, 60.0, False, False, Outlook.COMING),
        (59.0, 60.0, False, True, Outlook.COMING),  # a first start that fails is tried again
        (60.0, 60.0, False, False, Outlook.GONE),
        (600.0, 60.0, True, False, Outlook.COMING),  # a large model loads for long
        (600.0, 60.0, True, True, Outlook.GONE),  # a program that fails to load again and again
        (0.0, 0.0, True, False, Outlook.GONE),
    ],
)
def test_an_instance_is_expected_for_a_while_and_as_long_as_the_first_one_loads(
    away_s: float, expected_s: float, loading: bool, failed: bool, outlook: Outlook
) -> None:
    failed_s = 1.0 if failed else None
    found = absences.outlook(away_s=away_s, expected_s=expected_s, loading=loading, failed_s=failed_s)
    assert found is outlook


@pytest.mark.parametrize(
    ("expected_s", "failed_s", "outlook"),
    [
        (60.0, None, Outlook.COMING),
        (60.0, 59.0, Outlook.COMING),  # a first start that fails is tried again
        (60.0, 60.0, Outlook.GONE),
        (60.0, 119.0, Outlook.GONE),
        (60.0, 120.0, Outlook.COMING),  # and so is one of a program that was mended meanwhile
        (0.0, None, Outlook.GONE),
    ],
)
def test_of_a_group_that_starts_on_demand_an_instance_is_expected_unless_one_has_failed_to_start_lately(
    expected_s: float, failed_s: float | None, outlook: Outlook
) -> None:
    away_s, loading = 86_400.0, False
    found = absences.outlook(away_s=away_s, expected_s=expected_s, loading=loading, failed_s=failed_s, on_demand=True)
    assert found is outlook


def test_a_failed_start_on_demand_counts_from_the_first_failure_and_again_after_the_pause() -> None:
    known = Absences(60.0)
    known.on_demand = ("voice",)
    known.observe({VOICE, FRONT}, 0.0)
    assert known.prospect([FRONT], 1000.0, never).outlook is Outlook.GONE
    found = []
    for at in (1000.0, 1050.0, 1061.0, 1130.0):
        known.start_failed("voice", "v1", at)
        found.append(known.prospect([VOICE], at, always).outlook)
    assert found == [Outlook.COMING, Outlook.COMING, Outlook.GONE, Outlook.COMING]


def test_an_absence_counts_from_the_last_instance_and_is_over_with_the_next_one() -> None:
    known = Absences(60.0)
    known.observe({VOICE}, 100.0)
    known.observe({VOICE, FRONT}, 150.0)
    assert known.prospect([VOICE], 159.0, never) == Prospect(Outlook.COMING, ("voice",), 59.0)
    assert known.prospect([VOICE, FRONT], 170.0, never) == Prospect(Outlook.GONE, ("voice", "front"), 70.0)
    known.observe({FRONT}, 171.0)
    known.observe({FRONT, VOICE}, 172.0)
    assert known.prospect([VOICE], 173.0, never) == Prospect(Outlook.COMING, ("voice",), 1.0)
    assert known.prospect([], 173.0, never) == Prospect(Outlook.HERE)


def test_one_that_fails_to_load_is_not_expected_for_ever_and_another_revision_is() -> None:
    known = Absences(60.0)
    known.observe({VOICE}, 0.0)
    known.start_failed("voice", "v0", 1.0)
    assert known.prospect([VOICE], 100.0, always).outlook is Outlook.COMING
    known.start_failed("voice", "v1", 1.0)
    assert known.prospect([VOICE], 100.0, always).outlook is Outlook.GONE


@pytest.mark.parametrize(("away_s", "asked_s"), [(0.0, 1.0), (7.0, 7.0), (4000.0, 30.0)])
def test_a_refused_client_is_asked_to_wait_about_as_long_as_the_group_is_away(away_s: float, asked_s: float) -> None:
    assert Prospect(Outlook.GONE, ("voice",), away_s).retry_after_s == asked_s


@pytest.mark.parametrize(
    ("outlook", "nbytes", "waiting", "waiting_nbytes", "verdict"),
    [
        (Outlook.COMING, 100, 0, 0, Verdict.WAIT),
        (Outlook.COMING, 1000, 0, 0, Verdict.WAIT),
        (Outlook.HERE, 1, 1, 99, Verdict.WAIT),
        (Outlook.COMING, 1, 2, 2, Verdict.REQUESTS),
        (Outlook.COMING, 2, 1, 99, Verdict.BYTES),
        (Outlook.GONE, 0, 0, 0, Verdict.GONE),
        (Outlook.GONE, 1, 2, 100, Verdict.GONE),
    ],
)
def test_a_new_request_waits_within_the_bounds_for_what_is_expected(
    outlook: Outlook, nbytes: int, waiting: int, waiting_nbytes: int, verdict: Verdict
) -> None:
    found = holding.verdict(outlook, nbytes, waiting=waiting, waiting_nbytes=waiting_nbytes, limits=LIMITS)
    assert found is verdict


@pytest.mark.parametrize(
    ("outlook", "waited_s", "again", "step"),
    [
        (Outlook.HERE, 4.9, True, Step.WAIT),
        (Outlook.HERE, 5.0, True, Step.TAKE_ANY),
        (Outlook.COMING, 500.0, False, Step.WAIT),
        (Outlook.COMING, 500.0, True, Step.WAIT),
        (Outlook.GONE, 0.0, False, Step.GIVE_UP),
        (Outlook.GONE, 4.9, True, Step.WAIT),
        (Outlook.GONE, 5.0, True, Step.GIVE_UP),
    ],
)
def test_a_waiting_request_goes_on_waiting_is_bound_or_given_up(
    outlook: Outlook, waited_s: float, again: bool, step: Step
) -> None:
    assert holding.step(outlook, waited_s, again=again) is step


@settings(max_examples=examples(200))
@given(st.lists(st.integers(0, 60), max_size=30), st.integers(0, 8), st.integers(0, 120))
def test_what_may_wait_never_exceeds_the_bounds(bodies: list[int], most: int, nbytes: int) -> None:
    limits, held = HoldLimits(requests=most, nbytes=nbytes), list[int]()
    for body in bodies:
        found = holding.verdict(Outlook.COMING, body, waiting=len(held), waiting_nbytes=sum(held), limits=limits)
        if found is Verdict.WAIT:
            held.append(body)
        assert len(held) <= most and (sum(held) <= nbytes or (len(held) == 1 and nbytes > 0))


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.floats(0, 50), st.booleans()), max_size=20), st.floats(0, 100))
def test_a_group_that_nothing_loads_for_is_gone_exactly_when_its_time_is_over(
    changes: list[tuple[float, bool]], later_s: float
) -> None:
    known, now, since = Absences(60.0), 0.0, None
    for after_s, missing in changes:
        now += after_s
        known.observe({VOICE} if missing else set(), now)
        since = (now if since is None else since) if missing else None
    if since is not None:
        found = known.prospect([VOICE], now + later_s, never).outlook
        assert found is (Outlook.COMING if now + later_s - since < 60.0 else Outlook.GONE)


def never(kind: absences.UnitKind) -> bool:
    return False


def always(kind: absences.UnitKind) -> bool:
    return True
