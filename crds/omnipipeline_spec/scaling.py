"""How many instances each process group should have, from the pipeline's own numbers. Pure.

Here: one rule, for one machine and for a cluster. Not here: where the numbers come from (a coordinator knows them),
carrying a decision out. No clock: the time is passed in. `decide` is a step function: its caller keeps `Seen` and
passes it in again.

A group's offered load is its arrivals times the time that one takes: the number of requests that it would work on if
none waited. It is given these beyond that:

- Room for chance: the square root of the load, less where requests may wait for longer than they take; or, where the
  author names a utilization, the load divided by it.
- Room for what waits too long already. It is worked off within a cold start, because an instance that comes later does
  not help. Nothing is added for it while instances load: those were ordered for the same requests.
- What its sources will send when they have grown: a source that cannot keep up sends less than arrives at it.

Up: to the least that was wanted during all of ``up_delay_s``. Down: to the most that was wanted during the last
``down_delay_s``, or during two cold starts where they take longer: an instance that is given up is missed for as long
as the next one loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, sqrt
from typing import Final, NamedTuple

import msgspec

from omnipipeline_spec.types.plan import Limits as Limits
from omnipipeline_spec.types.plan import PipelinePlan

STEADY: Final = 0.1  # of an instance: a smaller excess orders none
COLD_STARTS: Final = 2.0
BAND: Final = 0.1  # of the instances: a group is not made smaller by less
FULLEST: Final = 0.95  # no group is planned to be busier, however long requests may wait
MOST_GROWTH: Final = 8.0  # of what sources send, in one step
MOST_SEEN: Final = 256  # changes of one group that are remembered


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The observed load of one group now. All numbers are finite and not negative."""

    ready: int  #: Instances that take requests.
    pending: int = 0  #: Ordered, and not ready yet.
    arrivals_per_s: float | None = None  #: Rate of requests, recently; None: unknown.
    service_s: float | None = None  #: Mean time at work of one; None: none has ended yet.
    running: float = 0.0  #: Requests at work.
    waiting: float = 0.0  #: Requests that wait: at instances, and at the coordinator for this group.
    held: float = 0.0  #: Those of them that wait at the coordinator.
    per_instance: float = 1.0  #: How many requests one instance works on at once.
    cold_start_s: float | None = None  #: Measured, from order to ready; None: none was.


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The wanted instances of one group lately: (time, instances), oldest first; each holds until the next one."""

    wanted: tuple[tuple[float, int], ...] = ()


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas of one group, and why."""

    replicas: int
    reason: str
    seen: Seen


def shown(plan: PipelinePlan, unit: str) -> str:
    """A unit's replicas, for people."""
    limits = plan.autoscaling.get(unit)
    return str(plan.replicas[unit]) if limits is None else f"{limits.least} to {limits.most}, by load"


def most(plan: PipelinePlan, unit: str) -> int:
    """How many instances of a unit there may be."""
    limits = plan.autoscaling.get(unit)
    return plan.replicas[unit] if limits is None else limits.most


def least(plan: PipelinePlan, unit: str) -> int:
    """How many instances of a unit there always are."""
    limits = plan.autoscaling.get(unit)
    return plan.replicas[unit] if limits is None else limits.least


def on_demand(plan: PipelinePlan) -> list[str]:
    """The groups that may have no instance until a request needs one."""
    asleep = {unit for unit, limits in plan.autoscaling.items() if not limits.least}
    return [group.name for unit in plan.units for group in unit.groups if unit.name in asleep]


def joined(reports: Sequence[Mapping[str, Load]]) -> dict[str, Load]:
    """The reports of several coordinators on the same groups, as one: each has its own requests, and all instances."""
    found: dict[str, Load] = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        loads = [report[name] for report in reports if name in report]
        served = [one for one in loads if one.service_s is not None and one.arrivals_per_s is not None]
        weights = [max(one.arrivals_per_s or 0.0, 1e-9) for one in served]
        weighed = sum((one.service_s or 0.0) * weight for one, weight in zip(served, weights, strict=True))
        found[name] = Load(
            ready=max(one.ready for one in loads),
            pending=max(one.pending for one in loads),
            arrivals_per_s=sum(one.arrivals_per_s or 0.0 for one in loads),
            service_s=weighed / sum(weights) if served else None,
            running=max(one.running for one in loads),  # of instances, which beat to all coordinators
            waiting=max(one.waiting - one.held for one in loads) + sum(one.held for one in loads),
            held=sum(one.held for one in loads),
            per_instance=max(one.per_instance for one in loads),
        )
    return found


def of_units(loads: Mapping[str, Load], plan: PipelinePlan) -> dict[str, Load]:
    """Each pod unit has the load of its group that needs most instances: a pod has one of each."""
    found: dict[str, Load] = {}
    for unit in plan.units:
        its = [loads[group.name] for group in unit.groups if group.name in loads]
        if its:
            found[unit.name] = max(its, key=_instances)
    return found


def _instances(load: Load) -> float:
    """That it needs, roughly."""
    return max(_offered(load), load.running + load.waiting) / load.per_instance


def unit_edges(plan: PipelinePlan) -> list[tuple[str, str]]:
    """(unit, unit that it sends to), each once."""
    unit_of = {stage.name: unit.name for unit in plan.units for stage in unit.stages}
    pairs = ((unit_of[edge.source], unit_of[edge.target]) for edge in plan.edges if edge.kind != "kv")
    return list(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))


class _Want(NamedTuple):
    instances: int
    reason: str


def decide(
    limits: Mapping[str, Limits],
    loads: Mapping[str, Load],
    seen: Mapping[str, Seen],
    *,
    edges: Sequence[tuple[str, str]] = (),
    now: float,
) -> dict[str, Decision]:
    """The desired replicas of each group that has limits.

    loads: of all groups. edges: (group, group that it sends to).
    """
    growth = _growth(loads, edges)
    woken = _woken(loads, edges)
    return {
        name: _decide(
            one,
            loads[name],
            _want(one, loads[name], growth[name], woken=name in woken),
            seen.get(name, Seen()),
            now,
        )
        for name, one in limits.items()
        if name in loads
    }


# --- what is wanted now -----------------------------------------------------------------------------------------


def _want(limits: Limits, load: Load, growth: float, *, woken: bool) -> _Want:
    """The instances for the load of this moment, not yet within the limits."""
    offered, per = _offered(load) * growth, max(load.per_instance, 1e-9)
    if not offered and not load.waiting and not load.running:
        return _Want(1, "a neighbour starts") if woken else _Want(0, "no request")
    if not load.ready and load.service_s is None:  # how much one does is not known before there was one
        return _Want(1, f"{load.waiting:.0f} wait for the first instance")
    room = _with_room(limits, load, offered)
    late = _late(limits, load)
    wanted = max(1, ceil((room + late) / per - STEADY))
    if late:
        why = f"{load.waiting:.0f} wait, too long for {limits.target_queue_s:g} s"
    elif growth > 1:
        why = f"load {offered:.1f} once its sources have grown {growth:.1f} times"
    else:
        why = f"load {offered:.1f}"
    return _Want(wanted, f"{why}, {per:g} at once each")


def _offered(load: Load) -> float:
    """Requests at work if none had to wait."""
    if load.arrivals_per_s is None or load.service_s is None:
        return load.running + load.waiting
    return load.arrivals_per_s * load.service_s


def _with_room(limits: Limits, load: Load, offered: float) -> float:
    if limits.target_utilization is not None:
        return offered / limits.target_utilization
    patience = limits.target_queue_s / load.service_s if load.service_s else 0.0
    return max(offered + sqrt(offered) / (1 + patience), offered / FULLEST)


def _late(limits: Limits, load: Load) -> float:
    """Requests at work that work off what waits longer than it may, within a cold start."""
    if load.pending or load.service_s is None or load.arrivals_per_s is None:
        return 0.0
    excess = load.waiting - load.arrivals_per_s * limits.target_queue_s
    within_s = max(limits.target_queue_s, load.cold_start_s or 0.0, load.service_s)
    return max(0.0, excess - load.per_instance) * load.service_s / within_s


# --- neighbours -------------------------------------------------------------------------------------------------


def _growth(loads: Mapping[str, Load], edges: Sequence[tuple[str, str]]) -> dict[str, float]:
    """The factor by which each group's arrivals grow once its sources keep up with theirs; 1: not at all."""
    growth = dict.fromkeys(loads, 1.0)
    for _ in loads:  # along the longest path
        for source, target in edges:
            if source in loads and target in loads:
                growth[target] = min(max(growth[target], growth[source] * _held_back(loads[source])), MOST_GROWTH)
    return growth


def _held_back(load: Load) -> float:
    """How many times as much arrives at a group as it can send on."""
    if not load.waiting or not load.arrivals_per_s or not load.service_s or not load.ready:
        return 1.0
    return max(1.0, load.arrivals_per_s * load.service_s / (load.ready * load.per_instance))


def _woken(loads: Mapping[str, Load], edges: Sequence[tuple[str, str]]) -> set[str]:
    """The groups that requests will reach through one that has none ready: they load beside it, not after it."""
    woken = {name for name, load in loads.items() if load.waiting and not load.ready}
    for _ in loads:
        woken |= {target for source, target in edges if source in woken and target in loads}
    return woken


# --- delays -----------------------------------------------------------------------------------------------------


def _decide(limits: Limits, load: Load, want: _Want, seen: Seen, now: float) -> Decision:
    wanted = min(max(want.instances, limits.least), limits.most)
    down_s = max(limits.down_delay_s, COLD_STARTS * (load.cold_start_s or 0.0))
    kept = _kept(seen.wanted, wanted, now, max(down_s, limits.up_delay_s))
    there = load.ready + load.pending
    least_lately = min(_during(kept, now - limits.up_delay_s, now))
    most_lately = max(_during(kept, now - down_s, now))
    bound = _bound(want.instances, limits)
    if wanted > there and (least_lately > there or not load.ready):
        replicas = wanted if not load.ready else least_lately
        reason = f"up to {replicas}: {want.reason}{bound}"
    elif there - most_lately >= max(1, ceil(there * BAND)) or (most_lately < there and wanted == limits.least):
        replicas, reason = most_lately, f"down to {most_lately}: {want.reason} for {down_s:.0f} s{bound}"
    else:
        replicas = min(max(there, limits.least), limits.most)
        reason = f"stays at {replicas}: {want.reason}{bound}"
    return Decision(replicas=replicas, reason=reason, seen=Seen(wanted=kept))


def _bound(wanted: int, limits: Limits) -> str:
    if wanted > limits.most:
        return f"; {wanted} would be wanted, maxReplicas is {limits.most}"
    return f"; minReplicas is {limits.least}" if wanted < limits.least else ""


def _kept(
    seen: tuple[tuple[float, int], ...], wanted: int, now: float, window_s: float
) -> tuple[tuple[float, int], ...]:
    """The changes of what was wanted within the window, with the one that it began with, and what is wanted now."""
    begun = max((index for index, (at, _) in enumerate(seen) if at <= now - window_s), default=0)
    kept = [(min(at, now), count) for at, count in seen[begun:]]
    if not kept or kept[-1][1] != wanted:
        kept.append((now, wanted))
    while len(kept) > MOST_SEEN:  # the greater of two neighbours stands for both: nothing is given up too early
        kept[:2] = [(kept[0][0], max(kept[0][1], kept[1][1]))]
    return tuple(kept)


def _during(wanted: Sequence[tuple[float, int]], begin: float, end: float) -> Iterable[int]:
    """The instances wanted at any moment between the two; before the first change, nothing is known."""
    held = [count for at, count in wanted if at <= begin][-1:]
    return [*held, *(count for at, count in wanted if begin < at <= end)] or [wanted[-1][1]]
