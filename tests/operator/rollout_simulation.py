"""Simulates roll-outs: Deployments that make pods, pods that become ready, drain and end.

Here: what a Deployment controller and kubelets do, as far as `rollout` observes it. Not here: any assertion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from omnipipeline_operator.changes.deciding.rollout import Decision, DesiredUnit, Goal, decide
from omnipipeline_operator.changes.workloads import ObservedPod, Workload
from omnipipeline_spec.types.pods import COORDINATOR

Key = tuple[str, str]


@dataclass
class SimulatedDeployment:
    """One Deployment: what its spec asks for, and its pods by state."""

    replicas: int = 0
    starting: int = 0
    ready: int = 0
    leaving: int = 0
    born: int = 0

    @property
    def idle(self) -> bool:
        return not (self.replicas or self.starting or self.ready or self.leaving)


@dataclass
class RolloutSimulation:
    """All Deployments of a pipeline. ``broken``: revisions whose pods never become ready."""

    held: dict[Key, SimulatedDeployment] = field(default_factory=dict)
    broken: set[Key] = field(default_factory=set)
    serving: dict[str, str] = field(default_factory=dict)
    time: int = 0

    def observed(self) -> list[Workload]:
        return [_workload(key, held) for key, held in self.held.items()]

    def act(self, goal: Goal) -> Decision:
        """Reconcile, and let the Deployment controller make and end pods, until neither changes anything."""
        before: Mapping[Key, int] = {}
        while True:
            made = self.reconcile(goal)
            self.settle()
            if made.replicas == before:
                return made
            before = made.replicas

    def reconcile(self, goal: Goal) -> Decision:
        """Decide and apply; the Deployment controller has done nothing yet."""
        made = decide(goal, self.observed(), self.serving)
        self.time += 1
        for key, replicas in made.replicas.items():
            held = self.held.setdefault(key, SimulatedDeployment(born=self.time))
            held.replicas = replicas
        for each in made.retired:
            del self.held[each.unit, each.revision]
        desired = {unit: one.revision for unit, one in goal.units.items()}
        if not made.rolling and all(
            self.ready(unit, rev) >= one.replicas
            for (unit, rev), one in zip(desired.items(), goal.units.values(), strict=True)
        ):
            self.serving = desired
        return made

    def settle(self) -> None:
        """The Deployment controller looks at all Deployments."""
        for key in self.held:
            self.control(key)

    def control(self, key: Key) -> None:
        """The Deployment controller: pods that are not ready end first, at once; ready ones drain before they end."""
        held = self.held.get(key, SimulatedDeployment())
        excess = held.starting + held.ready - held.replicas
        cut = min(max(excess, 0), held.starting)
        held.starting -= cut
        gone = max(excess - cut, 0)
        held.ready -= gone
        held.leaving += gone
        held.starting += max(held.replicas - held.starting - held.ready, 0)

    def start(self, key: Key) -> None:
        """One pod becomes ready, if it can."""
        held = self.held.get(key)
        if held and held.starting and key not in self.broken:
            held.starting -= 1
            held.ready += 1

    def finish(self, key: Key) -> None:
        """One draining pod ends."""
        held = self.held.get(key)
        if held and held.leaving:
            held.leaving -= 1

    def fail(self, key: Key) -> None:
        """A ready pod's container ends; it starts again."""
        held = self.held.get(key)
        if held and held.ready:
            held.ready -= 1
            held.starting += 1

    def ready(self, unit: str, revision: str | None = None) -> int:
        return sum(held.ready for (name, rev), held in self.held.items() if name == unit and revision in (None, rev))

    def replicas_of(self, unit: str) -> int:
        return sum(held.replicas for (name, _), held in self.held.items() if name == unit)

    def staying(self, unit: str) -> int:
        """Pods that start or are ready."""
        return sum(held.starting + held.ready for (name, _), held in self.held.items() if name == unit)

    def holding(self, unit: str) -> int:
        """Pods that have not ended."""
        return self.staying(unit) + sum(held.leaving for (name, _), held in self.held.items() if name == unit)

    def settle_everything(self) -> None:
        """Let all pods start that can, and all draining pods end."""
        for key, held in self.held.items():
            while held.starting and key not in self.broken:
                self.start(key)
            held.leaving = 0

    def run(self, goal: Goal, steps: int = 200) -> int:
        """Reconcile until nothing changes; returns the number of steps."""
        for step in range(steps):
            before = {key: (h.replicas, h.starting, h.ready, h.leaving) for key, h in self.held.items()}
            self.act(goal)
            self.settle_everything()
            if before == {key: (h.replicas, h.starting, h.ready, h.leaving) for key, h in self.held.items()}:
                return step
        raise AssertionError(f"no end after {steps} steps: {self.held}")


def running(revisions: Mapping[str, str], replicas: Mapping[str, int]) -> RolloutSimulation:
    """A pipeline that is complete and has served."""
    held = {(u, r): SimulatedDeployment(replicas=replicas[u], ready=replicas[u]) for u, r in revisions.items()}
    held[COORDINATOR, "c"] = SimulatedDeployment(replicas=1, ready=1)
    return RolloutSimulation(held=held, serving=dict(revisions))


def goal(revisions: Mapping[str, str], replicas: Mapping[str, int], **more: object) -> Goal:
    units = {unit: DesiredUnit(revision=rev, replicas=replicas[unit]) for unit, rev in revisions.items()}
    return Goal(units=units, coordinator=DesiredUnit(revision="c", replicas=1), **more)  # type: ignore[arg-type]


def _workload(key: Key, held: SimulatedDeployment) -> Workload:
    unit, revision = key
    pods = [ObservedPod(name=f"{unit}-{revision}-{i}", ready=i < held.ready) for i in range(held.ready + held.starting)]
    pods += [ObservedPod(name=f"{unit}-{revision}-l{i}", ready=True, terminating=True) for i in range(held.leaving)]
    return Workload(
        unit=unit,
        revision=revision,
        name=f"p-{unit}-{revision}",
        uid=f"uid-{unit}-{revision}",
        replicas=held.replicas,
        created_at=float(held.born),
        pods=tuple(pods),
    )
