"""Events: one for each transition, a series with a count for repeated ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from omnipipeline_operator import errors
from omnipipeline_operator.changes.conditions import Transition, condition
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.controller import event_recorder
from omnipipeline_operator.controller.event_recorder import EventRecorder
from omnipipeline_operator.desired.naming import Owner

OWNER = Owner(namespace="n", name="p", uid="u")
DOWN = Transition(condition=condition("Ready", False, "CrashLoopBackOff", "no weights"), warning=True)
UP = Transition(condition=condition("Ready", True, "Serving", "all well"), warning=False)


class Posted:
    """An API server that stores Events."""

    def __init__(self) -> None:
        self.events: dict[str, dict[str, Any]] = {}
        self.writes = 0

    async def create(self, manifest: Mapping[str, Any], **_: Any) -> None:
        self.writes += 1
        self.events[manifest["metadata"]["name"]] = dict(manifest)

    async def merge(self, kind: Any, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        self.writes += 1
        if name not in self.events:
            raise errors.NotFound("PATCH", 404, "gone")
        self.events[name] |= patch


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_condition_that_flaps_is_a_few_events_with_a_count() -> None:
    posted, clock = Posted(), Clock()
    reporter = EventRecorder(cast(Client, posted), name="operator", clock=clock)
    for _ in range(40):  # of a pod that crashes whenever it was ready for a moment: eleven minutes
        for transition in (DOWN, UP):
            clock.now += 8.25
            await reporter.report(OWNER, [transition])
    reasons = sorted(each["reason"] for each in posted.events.values())
    assert reasons == ["CrashLoopBackOff"] * event_recorder.BEFORE_SERIES + ["Serving"] * event_recorder.BEFORE_SERIES
    counts = [each["series"]["count"] for each in posted.events.values() if "series" in each]
    assert len(counts) == 2 and all(30 < count <= 38 for count in counts)
    assert posted.writes <= 2 * event_recorder.BEFORE_SERIES + 2 * (660 / event_recorder.PATCH_S)


async def test_a_repeat_after_the_gap_or_after_the_event_expired_is_a_new_event() -> None:
    posted, clock = Posted(), Clock()
    reporter = EventRecorder(cast(Client, posted), name="operator", clock=clock)
    await reporter.report(OWNER, [DOWN])
    clock.now += event_recorder.SERIES_GAP_S + 1
    await reporter.report(OWNER, [DOWN])
    assert len(posted.events) == 2
    for _ in range(event_recorder.BEFORE_SERIES):
        await reporter.report(OWNER, [DOWN])
    posted.events.clear()
    clock.now += event_recorder.PATCH_S + 1
    await reporter.report(OWNER, [DOWN])
    assert len(posted.events) == 1


async def test_the_number_of_remembered_series_is_bounded() -> None:
    reporter = EventRecorder(cast(Client, Posted()), name="operator")
    for number in range(event_recorder.MAX_SERIES + 5):
        await reporter.report(Owner(namespace="n", name="p", uid=f"u{number}"), [DOWN])
    assert len(reporter._series) == event_recorder.MAX_SERIES


async def test_transitions_of_one_reason_are_one_event() -> None:
    posted = Posted()
    reporter = EventRecorder(cast(Client, posted), name="operator")
    available = Transition(condition=condition("Available", True, "Serving", "all well"), warning=False)
    complete = Transition(condition=condition("Progressing", True, "RolledOut", "complete"), warning=False)
    await reporter.report(OWNER, [UP, available, complete])
    notes = [(each["reason"], each["type"], each["note"]) for each in posted.events.values()]
    assert notes == [
        ("Serving", "Normal", "Ready is True and Available is True: all well"),
        ("RolledOut", "Normal", "Progressing is True: complete"),
    ]
