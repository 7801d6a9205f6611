"""Coordinators that know each other's load only by beats, and instances of one group, simulated without sockets.

The rules are the real ones (`rules.binding.membership_state`); time, arrivals and lengths come from a seeded generator.
Called by `benchmarks/scale.py` and by the test of the rules.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from omnipipeline_spec.types.plan import PipelineRevision
from stage_runtime.rules.binding.membership_state import MembershipState
from stage_runtime.rules.graph import edges
from stage_runtime.wire.parts import Member

#: Mean length of a request: 1 s.
LENGTHS: Final[dict[str, Callable[[random.Random], float]]] = {
    "equal": lambda chance: 1.0,
    "exponential": lambda chance: chance.expovariate(1.0),
    "mixed": lambda chance: 0.5 if chance.random() < 0.9 else 5.5,
}
REVISION: Final = PipelineRevision(
    revision="r",
    units={"entry": "u", "work": "u"},
    groups={"entry": "entry", "work": "work"},
    stages={"take": "entry", "do": "work"},
    entry="take",
    terminals=("do",),
    edges=(("take", "do", "normal"),),
)


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated load. Each request spends no time at the entry and its length at the other group."""

    instances: int  #: Instances of either group.
    coordinators: int = 4
    concurrency: int = 8  #: Requests that an instance computes at the same time.
    busy: float = 0.8  #: Part of all places that requests take on average.
    beat_s: float = 1.0
    lengths: str = "mixed"
    shares: tuple[float, ...] = ()  #: Shares of the requests, by coordinator; empty: equal ones.
    slow: float = 1.0  #: Every second instance takes so many times as long.
    seconds: float = 30.0  #: The last two thirds are measured.
    seed: int = 1


class Outcome(msgspec.Struct, frozen=True):
    """The result of the measured part. A load is the number of requests at one instance, waiting or running."""

    mean: float
    worst_average: float  #: The load of the worst instance, averaged over time, divided by the mean.
    worst_moment: float  #: The largest load at one moment, divided by the mean then, averaged over moments.
    worst_partners: int  #: The worst of the entry instances: to how many instances its requests went.


class Simulation:
    """One run of `run`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._chance = random.Random(fleet.seed)
        self._states = [self._state() for _ in range(fleet.coordinators)]
        count = fleet.instances
        self._names = sorted(name for name in self._states[0].instances if name.startswith("w"))
        self._number = {name: number for number, name in enumerate(self._names)}
        self._queues: list[deque[tuple[int, dict[str, str]]]] = [deque() for _ in range(count)]
        self._running = [0] * count
        self._load = [0] * count
        self._seconds = [0.0] * count  #: Sum of load over the measured time.
        self._since = [0.0] * count
        self._partners: dict[str, set[str]] = {}
        self._moments: list[float] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._now = 0.0
        places = count * fleet.concurrency * (2 / (1 + fleet.slow))
        self._rate = fleet.busy * places
        self._ends_at = fleet.seconds
        self._measured_from = self._ends_at / 3

    def run(self) -> Outcome:
        for number in range(self._fleet.instances):
            self._at(self._chance.random() * self._fleet.beat_s, partial(self._beat, number))
        self._at(0.0, self._arrive)
        self._at(self._measured_from, self._moment)
        while self._events and self._events[0][0] <= self._ends_at:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        self._now = self._ends_at
        for number in range(self._fleet.instances):
            self._account(number, 0)
        mean = sum(self._seconds) / len(self._seconds)
        return Outcome(
            mean / (self._ends_at - self._measured_from),
            max(self._seconds) / mean,
            sum(self._moments) / len(self._moments),
            max(len(partners) for partners in self._partners.values()),
        )

    def _state(self) -> MembershipState:
        made = MembershipState([REVISION], chance=self._chance.random)
        schemas = edges.of_revision(REVISION)
        names = random.Random(0)
        for _ in range(self._fleet.instances):
            for group in ("entry", "work"):
                name = f"{group[0]}{names.getrandbits(60):015x}"
                made.join(Member(name, group, group, "u", name, {}, (), True), schemas[group])
        return made

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, happen))

    def _arrive(self) -> None:
        fleet = self._fleet
        shares = fleet.shares or (1.0,) * fleet.coordinators
        owner = self._chance.choices(range(fleet.coordinators), shares)[0]
        _, bindings = self._states[owner].bind()
        number = self._number[bindings["do"]]
        self._partners.setdefault(bindings["take"], set()).add(bindings["do"])
        self._account(number, 1)
        self._queues[number].append((owner, bindings))
        self._begin(number)
        self._at(self._now + self._chance.expovariate(self._rate), self._arrive)

    def _begin(self, number: int) -> None:
        while self._queues[number] and self._running[number] < self._fleet.concurrency:
            owner, bindings = self._queues[number].popleft()
            self._running[number] += 1
            takes_s = LENGTHS[self._fleet.lengths](self._chance) * (self._fleet.slow if number % 2 else 1.0)
            self._at(self._now + takes_s, partial(self._end, number, owner, bindings))

    def _end(self, number: int, owner: int, bindings: dict[str, str]) -> None:
        self._account(number, -1)
        self._running[number] -= 1
        self._states[owner].unbind(bindings)
        self._begin(number)

    def _beat(self, number: int) -> None:
        for state in self._states:
            state.beat(self._names[number], len(self._queues[number]), self._running[number])
        self._at(self._now + self._fleet.beat_s, partial(self._beat, number))

    def _moment(self) -> None:
        self._moments.append(max(self._load) / (sum(self._load) / len(self._load)))
        self._at(self._now + (self._ends_at - self._measured_from) / 50, self._moment)

    def _account(self, number: int, change: int) -> None:
        if self._now > self._measured_from:
            self._seconds[number] += self._load[number] * (self._now - max(self._since[number], self._measured_from))
        self._since[number] = self._now
        self._load[number] += change


def run(fleet: Fleet) -> Outcome:
    return Simulation(fleet).run()
