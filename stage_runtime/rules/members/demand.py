"""The demand of requests for each process group: how many come, how long one is at work, how many wait. Pure.

Here: counting at one coordinator. Not here: how many instances that needs (`omnipipeline_spec.scaling`). The time is
passed in. Also counted while a group has no instance, so that whoever starts instances knows of the demand.

A group of several stages is as loaded as the stage that needs most instances.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from omnipipeline_spec.scaling import Load

WINDOW_S: Final = 15.0  # of arrivals: long enough for a rate, short enough for a step of the load
MOST_WINDOW_S: Final = 120.0  # where a request takes long, few arrive in the shorter one
LEAST_WINDOW_S: Final = 2.0  # a coordinator that started a moment ago
SERVICES: Final = 64  # a mean over about so many of the last requests


class StageBeat(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one instance on one stage."""

    stage: str
    group: str
    waiting: int
    running: int
    places: int = 0  #: Requests that it works on at once; 0: its engine does not say.


class _Arrivals:
    """Requests that need one group, by second."""

    def __init__(self) -> None:
        self.total = 0
        self._by_second: deque[tuple[int, int]] = deque()  #: (second, count), ascending.

    def note(self, now: float) -> None:
        self.total += 1
        second = int(now)
        count = self._by_second.pop()[1] if self._by_second and self._by_second[-1][0] == second else 0
        self._by_second.append((second, count + 1))
        while self._by_second[0][0] < now - MOST_WINDOW_S:
            self._by_second.popleft()

    def per_s(self, now: float, window_s: float) -> float:
        return sum(count for second, count in self._by_second if second + 1 > now - window_s) / window_s


class _Mean:
    """The mean of the first few values, later of about the last `SERVICES`."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, SERVICES)
        self.value = value if self.value is None else self.value + (value - self.value) / self._count


class Demand:
    """All groups of one coordinator."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._arrivals: dict[str, _Arrivals] = {}
        self._services: dict[str, _Mean] = {}  #: Means by stage, in seconds.
        #: Places by stage, as reported, else the most that one instance was seen to run.
        self._places: dict[str, int] = {}

    def arrived(self, groups: Iterable[str], now: float) -> None:
        """A request needs these groups, whether it is admitted or not."""
        for group in groups:
            self._arrivals.setdefault(group, _Arrivals()).note(now)

    def served(self, stages: Iterable[str], run_s: Mapping[str, float]) -> None:
        """A request is complete that might meet these stages. run_s: of those that it did meet."""
        for stage in stages:
            self._services.setdefault(stage, _Mean()).add(run_s.get(stage, 0.0))

    def totals(self) -> dict[str, int]:
        """Requests that have needed each group so far."""
        return {group: arrivals.total for group, arrivals in self._arrivals.items()}

    def loads(
        self,
        stages: Mapping[str, str],
        beats: Iterable[StageBeat],
        *,
        ready: Mapping[str, int],
        loading: Mapping[str, int],
        held: Mapping[str, int],
        now: float,
    ) -> dict[str, Load]:
        """stages: stage -> group. ready, loading: instances. held: requests that wait at the coordinator, by group."""
        waiting, running = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
        for beat in beats:
            if beat.stage not in stages:
                continue
            waiting[beat.stage] += beat.waiting
            running[beat.stage] += beat.running
            seen = beat.places or max(self._places.get(beat.stage, 0), beat.running)
            self._places[beat.stage] = seen
        found: dict[str, Load] = {}
        for stage, group in stages.items():
            service = self._services.get(stage)
            service_s = service.value if service is not None else None
            load = Load(
                ready=ready.get(group, 0),
                pending=loading.get(group, 0),
                arrivals_per_s=self._per_s(group, service_s, now),
                service_s=service_s,
                running=running[stage],
                waiting=waiting[stage] + held.get(group, 0),
                held=held.get(group, 0),
                per_instance=max(1, self._places.get(stage, 0)),
            )
            if group not in found or _needs(load) > _needs(found[group]):
                found[group] = load
        return found

    def _per_s(self, group: str, service_s: float | None, now: float) -> float:
        arrivals = self._arrivals.get(group)
        if arrivals is None:
            return 0.0
        window_s = min(max(WINDOW_S, 2 * (service_s or 0.0)), MOST_WINDOW_S)
        return arrivals.per_s(now, min(window_s, max(now - self._began, LEAST_WINDOW_S)))


def _needs(load: Load) -> float:
    """Instances, roughly."""
    offered = (load.arrivals_per_s or 0.0) * (load.service_s or 0.0)
    return max(offered, load.running + load.waiting) / load.per_instance
