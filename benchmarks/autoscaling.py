"""The scaling rule beside other ways of scaling, in a simulated pipeline: `python -m benchmarks.autoscaling`.

Two groups in a row, a thinker and a talker; requests arrive by chance at a rate that changes: steps, a ramp, a daily
wave, bursts of ten times. Each instance works on a few requests at once and takes a while to load. Compared for the
same arrivals, each by instance-seconds (ordered to gone) and by the share of requests whose waits together are within
the objective:

rule    `omnipipeline_spec.scaling`, told what a coordinator knows.
oracle  knows the rate to come, orders a cold start ahead, gives up at once. Its utilization is the highest at which as
        many requests are in time as by the rule.
fixed   the smallest fleet that never changes and serves as many in time.
hpa     Kubernetes' autoscaler on the use of processors: every 15 s, to 70 %, with its stabilization of 300 s.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from omnipipeline_spec import scaling
from omnipipeline_spec.scaling import Limits, Load, Seen

STEP_S: Final = 2.0  # between two decisions
OBJECTIVE_S: Final = 2.0  # of all waits of one request
MOST: Final = 200
RATE_WINDOW_S: Final = 15.0
HPA_EVERY_S, HPA_STABLE_S, HPA_TARGET, HPA_TOLERANCE = 15.0, 300.0, 0.7, 0.1

Rate = Callable[[float], float]


@dataclass(frozen=True)
class GroupSpec:
    """The properties of one process group."""

    name: str
    service_s: float
    per_instance: int
    cold_start_s: float


GROUPS: Final = (GroupSpec("thinker", 2.0, 4, 30.0), GroupSpec("talker", 1.0, 2, 15.0))
EDGES: Final = (("thinker", "talker"),)


@dataclass
class Group:
    """One simulated group."""

    spec: GroupSpec
    ready: int
    pending: list[float] = field(default_factory=list)  #: When each will be ready, ascending.
    running: int = 0
    queue: deque[int] = field(default_factory=deque)  #: Requests.
    instance_s: float = 0.0
    arrived: deque[float] = field(default_factory=deque)

    def capacity(self) -> int:
        return self.ready * self.spec.per_instance

    def order(self, replicas: int, now: float) -> None:
        """Instances that load are given up first; one at work ends its requests, which cost nothing here."""
        there = self.ready + len(self.pending)
        if replicas > there:
            self.pending += [now + self.spec.cold_start_s] * (replicas - there)
        for _ in range(there - replicas):
            if self.pending:
                self.pending.pop()
            else:
                self.ready -= 1

    def load(self, now: float) -> Load:
        while self.arrived and self.arrived[0] < now - RATE_WINDOW_S:
            self.arrived.popleft()
        return Load(
            ready=self.ready,
            pending=len(self.pending),
            arrivals_per_s=len(self.arrived) / min(RATE_WINDOW_S, max(now, STEP_S)),
            service_s=self.spec.service_s,
            running=self.running,
            waiting=len(self.queue),
            per_instance=self.spec.per_instance,
            cold_start_s=self.spec.cold_start_s,
        )


class Policy:
    """Decides replicas at each step."""

    def start(self, spec: GroupSpec) -> int:
        raise NotImplementedError

    def decide(self, groups: Sequence[Group], now: float) -> dict[str, int]:
        raise NotImplementedError


class Rule(Policy):
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._seen: dict[str, Seen] = {}

    def start(self, spec: GroupSpec) -> int:
        return self._limits.least

    def decide(self, groups: Sequence[Group], now: float) -> dict[str, int]:
        loads = {group.spec.name: group.load(now) for group in groups}
        limits = dict.fromkeys(loads, self._limits)
        decided = scaling.decide(limits, loads, self._seen, edges=EDGES, now=now)
        self._seen = {name: one.seen for name, one in decided.items()}
        return {name: one.replicas for name, one in decided.items()}


class Fixed(Policy):
    """A fixed number of instances in each group: enough for this utilization at the busiest moment."""

    def __init__(self, rate: Rate, length_s: float, utilization: float) -> None:
        self._peak, self._utilization = max(rate(float(at)) for at in range(int(length_s))), utilization

    def start(self, spec: GroupSpec) -> int:
        return max(1, math.ceil(self._peak * spec.service_s / spec.per_instance / self._utilization))

    def decide(self, groups: Sequence[Group], now: float) -> dict[str, int]:
        return {group.spec.name: self.start(group.spec) for group in groups}


class Oracle(Policy):
    """Knows the rate."""

    def __init__(self, rate: Rate, utilization: float) -> None:
        self._rate, self._utilization = rate, utilization

    def _needed(self, spec: GroupSpec, now: float) -> int:
        """Those that the greatest rate needs between now and the moment when an instance ordered now is ready."""
        ahead = spec.cold_start_s + 2 * STEP_S
        peak = max(self._rate(now + ahead * part / 8) for part in range(9))
        return max(1, math.ceil(peak * spec.service_s / spec.per_instance / self._utilization))

    def start(self, spec: GroupSpec) -> int:
        return self._needed(spec, 0.0)

    def decide(self, groups: Sequence[Group], now: float) -> dict[str, int]:
        return {group.spec.name: self._needed(group.spec, now) for group in groups}


class Hpa(Policy):
    """Horizontal Pod Autoscaler, autoscaling/v2 with its defaults; the use of an instance is its share at work."""

    def __init__(self) -> None:
        self._wanted: dict[str, deque[tuple[float, int]]] = {}
        self._next = 0.0
        self._replicas: dict[str, int] = {}

    def start(self, spec: GroupSpec) -> int:
        self._replicas[spec.name] = 1
        return 1

    def decide(self, groups: Sequence[Group], now: float) -> dict[str, int]:
        if now >= self._next:
            self._next = now + HPA_EVERY_S
            for group in groups:
                self._replicas[group.spec.name] = self._one(group, now)
        return self._replicas

    def _one(self, group: Group, now: float) -> int:
        there = group.ready + len(group.pending)
        ratio = group.running / max(group.capacity(), 1) / HPA_TARGET
        wanted = there if abs(ratio - 1) <= HPA_TOLERANCE else math.ceil(max(group.ready, 1) * ratio)
        wanted = max(1, min(wanted, max(2 * there, there + 4)))  # its default policy for scaling up
        lately = self._wanted.setdefault(group.spec.name, deque())
        lately.append((now, wanted))
        while lately[0][0] < now - HPA_STABLE_S:
            lately.popleft()
        return wanted if wanted > there else min(there, max(count for _, count in lately))


@dataclass(frozen=True)
class Outcome:
    in_time: float  #: Share of the requests.
    instance_s: float
    steps: int  #: Changes of replicas.


def arrivals(rate: Rate, length_s: float, seed: int) -> Iterator[float]:
    """Times by chance, with the given rate (thinned from its maximum)."""
    chance = random.Random(seed)
    most = max(rate(float(at)) for at in range(int(length_s)))
    now = chance.expovariate(most)
    while now < length_s:
        if chance.random() * most < rate(now):
            yield now
        now += chance.expovariate(most)


def simulate(rate: Rate, length_s: float, policy: Policy, *, seed: int = 1) -> Outcome:
    """One run; the times of service vary by chance around their mean."""
    chance = random.Random(seed + 1)
    groups = [Group(spec, policy.start(spec)) for spec in GROUPS]
    events: list[tuple[float, int, int, int]] = []  # time, kind (0 done, 1 arrival), group, request
    for request, at in enumerate(arrivals(rate, length_s, seed)):
        heapq.heappush(events, (at, 1, 0, request))
    queued_at: dict[tuple[int, int], float] = {}
    waited: dict[int, float] = {}
    ended = steps = 0
    now, decide_at = 0.0, 0.0

    def begin(index: int) -> None:
        group = groups[index]
        while group.queue and group.running < group.capacity():
            request = group.queue.popleft()
            waited[request] = waited.get(request, 0.0) + now - queued_at.pop((index, request))
            group.running += 1
            took = group.spec.service_s * chance.uniform(0.5, 1.5)
            heapq.heappush(events, (now + took, 0, index, request))

    while events or any(group.queue for group in groups):
        upcoming = min(events[0][0] if events else math.inf, decide_at)
        for group in groups:
            group.instance_s += (upcoming - now) * (group.ready + len(group.pending))
        now = upcoming
        if now == decide_at:
            decide_at += STEP_S
            for index, group in enumerate(groups):
                came = [at for at in group.pending if at <= now]
                group.pending = [at for at in group.pending if at > now]
                group.ready += len(came)
                begin(index)
            for name, replicas in policy.decide(groups, now).items():
                group = next(each for each in groups if each.spec.name == name)
                steps += replicas != group.ready + len(group.pending)
                group.order(min(replicas, MOST), now)
            continue
        _, kind, index, request = heapq.heappop(events)
        if kind == 0:
            groups[index].running -= 1
            begin(index)
            index += 1
            if index == len(groups):
                ended += 1
                continue
        groups[index].arrived.append(now)
        groups[index].queue.append(request)
        queued_at[index, request] = now
        begin(index)
    in_time = sum(each <= OBJECTIVE_S for each in waited.values())
    return Outcome(in_time / max(ended, 1), sum(group.instance_s for group in groups), steps)


def steps(at: float) -> float:
    return (4.0, 20.0, 8.0, 40.0, 2.0)[min(int(at // 600), 4)]


def ramp(at: float) -> float:
    return 2.0 + 40.0 * (at / 1500 if at < 1500 else max(0.0, 2 - at / 1500))


def wave(at: float) -> float:
    """A day in an hour and a half."""
    return 22.0 - 20.0 * math.cos(at / 5400 * 2 * math.pi)


def bursts(at: float) -> float:
    """A minute of ten times the load, every ten minutes."""
    return 40.0 if 300 <= at % 600 < 360 else 4.0


SCENARIOS: Final[dict[str, tuple[Rate, float]]] = {
    "steps": (steps, 3000.0),
    "ramp": (ramp, 3000.0),
    "wave": (wave, 10800.0),
    "bursts": (bursts, 3000.0),
}
UTILIZATIONS: Final = [share / 100 for share in range(98, 20, -4)]


def cheapest(run: Callable[[float], Outcome], in_time: float) -> Outcome:
    """The outcome at the highest utilization at which as many requests are in time; at the lowest where none is."""
    outcomes = (run(utilization) for utilization in UTILIZATIONS)
    last = Outcome(0.0, 0.0, 0)
    for last in outcomes:
        if last.in_time >= in_time:
            break
    return last


def compare(name: str, limits: Limits, *, seed: int = 1) -> dict[str, Outcome]:
    rate, length_s = SCENARIOS[name]
    rule = simulate(rate, length_s, Rule(limits), seed=seed)

    def oracle(utilization: float) -> Outcome:
        return simulate(rate, length_s, Oracle(rate, utilization), seed=seed)

    def fixed(utilization: float) -> Outcome:
        return simulate(rate, length_s, Fixed(rate, length_s, utilization), seed=seed)

    return {
        "rule": rule,
        "oracle": cheapest(oracle, rule.in_time),
        "fixed": cheapest(fixed, rule.in_time),
        "hpa": simulate(rate, length_s, Hpa(), seed=seed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--queue", type=float, default=1.0, help="targetQueueSeconds of both groups")
    parser.add_argument("--down", type=float, default=45.0, help="scaleDownDelaySeconds")
    chosen = parser.parse_args()
    limits = Limits(least=1, most=MOST, target_queue_s=chosen.queue, down_delay_s=chosen.down)
    print(f"in time: at most {OBJECTIVE_S:g} s of waiting; instance-seconds of both groups, and beside the oracle's")
    print(f"{'load':8} {'by':8} {'in time':>8} {'instance-s':>11} {'ratio':>6} {'steps':>6}")
    for name in SCENARIOS:
        outcomes = compare(name, limits, seed=chosen.seed)
        for by, one in outcomes.items():
            ratio = one.instance_s / outcomes["oracle"].instance_s
            print(f"{name:8} {by:8} {one.in_time:8.2%} {one.instance_s:11.0f} {ratio:6.2f} {one.steps:6}")


if __name__ == "__main__":
    main()
