"""Replicas of a local run that follow the load: when the rule is asked, what is done about its answers.

Here: one step (look, decide, order), and what is remembered between steps. Not here: the rule
(`omnipipeline_spec.scaling`), starting and ending instances (`fleet`). The time is passed in. Called by `fleet`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec

from omnipipeline_spec import scaling
from omnipipeline_spec.scaling import Load, Seen
from omnipipeline_spec.types.plan import PipelinePlan

STEP_S: Final = 1.0  # between two decisions: as often as instances report their load
REST_S: Final = 5.0  # after a start that failed; doubled with each one
MOST_REST_S: Final = 60.0


class Instances(msgspec.Struct, frozen=True):
    """Counts of one unit, without those that are being ended."""

    ready: int
    pending: int


class Scaled(Protocol):
    """The part of `fleet.Fleet` that the autoscaler needs."""

    def instances(self, unit: str) -> Instances | None:
        """None: a person changes them at the moment, or has taken the unit out."""

    def order(self, unit: str, replicas: int) -> None:
        """Begin to start or to end as many as that takes."""

    def say(self, line: str) -> None:
        """Shows a line to whoever watches the run."""


class Autoscaler:
    """Follows the load of all units of one run that have limits."""

    def __init__(self, plan: PipelinePlan, pipeline: Scaled) -> None:
        self._pipeline = pipeline
        self._seen: dict[str, Seen] = {}
        self._cold_start_s: dict[str, float] = {}  #: Seconds as last measured, by unit.
        self._failures: dict[str, int] = {}  #: Starts in a row that failed.
        self._rests_until: dict[str, float] = {}
        self._last: dict[str, str] = {}  #: Why the replicas were changed last, by unit.
        self.follow(plan)

    def follow(self, plan: PipelinePlan) -> None:
        """Obey the limits of this plan from now on. A unit that still has some keeps what was seen of it."""
        self._plan, self._edges = plan, scaling.unit_edges(plan)
        for of_unit in (self._seen, self._cold_start_s, self._failures, self._rests_until, self._last):
            for unit in of_unit.keys() - plan.autoscaling.keys():
                of_unit.pop(unit, None)

    def step(self, status: Mapping[str, Any], now: float) -> None:
        """status: the coordinator's; empty: it did not answer, and nothing is decided."""
        loads = _loads(status)
        if not loads:
            return
        of_units = scaling.of_units(loads, self._plan)
        there = {unit: self._pipeline.instances(unit) for unit in of_units}
        for unit, counts in there.items():
            if counts is not None:
                of_units[unit] = msgspec.structs.replace(
                    of_units[unit],
                    ready=counts.ready,
                    pending=counts.pending,
                    cold_start_s=self._cold_start_s.get(unit),
                )
        decided = scaling.decide(self._plan.autoscaling, of_units, self._seen, edges=self._edges, now=now)
        self._seen = {unit: one.seen for unit, one in decided.items()}
        for unit, decision in decided.items():
            counts = there[unit]
            if counts is None or decision.replicas == counts.ready + counts.pending:
                continue
            if decision.replicas > counts.ready + counts.pending and now < self._rests_until.get(unit, 0.0):
                continue
            self._last[unit] = decision.reason
            self._pipeline.say(f"{unit}: {decision.reason}")
            self._pipeline.order(unit, decision.replicas)

    def started(self, unit: str, took_s: float) -> None:
        """An instance that was ordered is ready."""
        self._cold_start_s[unit] = took_s
        self._failures.pop(unit, None)

    def start_failed(self, unit: str, reason: str, now: float) -> None:
        """An instance that was ordered is gone again: no other is started for a while."""
        failures = self._failures[unit] = self._failures.get(unit, 0) + 1
        rest_s = min(REST_S * 2 ** min(failures - 1, 10), MOST_REST_S)  # beyond 1,024 a float would overflow
        self._rests_until[unit] = now + rest_s
        self._pipeline.say(f"{unit}: {reason}; tried again in {rest_s:.0f} s")

    def in_charge(self, unit: str) -> str | None:
        """Why a person may not set the replicas; None: nothing follows the load."""
        limits = self._plan.autoscaling.get(unit)
        if limits is None:
            return None
        last = f"; last: {self._last[unit]}" if unit in self._last else ""
        return f"its load sets its replicas (autoscaling, {limits.least} to {limits.most}){last}"


def _loads(status: Mapping[str, Any]) -> dict[str, Load]:
    try:
        return msgspec.convert(status.get("groups", {}), dict[str, Load])
    except msgspec.ValidationError:
        return {}  # a coordinator that is being replaced
