"""The reports of a coordinator on its members: for /status, /metrics, and the rule that scales groups.

Here: reading `membership.Membership`. Not here: changing it. Called by `reports`, `demand` and the request manager.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from stage_runtime.coordinator.membership import Membership
from stage_runtime.metrics import catalog, planes
from stage_runtime.metrics.samples import Samples
from stage_runtime.rules.members.demand import StageBeat
from stage_runtime.wire.messages import Beat


def ready_count(membership: Membership) -> dict[str, int]:
    """Instances that requests can be bound to, by group."""
    counts: Counter[str] = Counter()
    for instance in membership.state.instances.values():
        counts[instance.member.group] += instance.eligible
    return dict(counts)


def loading_count(membership: Membership) -> dict[str, int]:
    """Instances that are registered, and not ready yet, by group."""
    found = membership.state.instances.values()
    return Counter(one.member.group for one in found if not one.ready and not one.draining)


def samples(membership: Membership) -> Samples:
    """Ready instances, and what the last beats of all instances report of each stage."""
    waiting: Counter[tuple[str, ...]] = Counter()
    running: Counter[tuple[str, ...]] = Counter()
    shares: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for beat in membership.beats.values():
        for name, count in beat.waiting.items():
            waiting[name,] += count
            running[name,] += beat.running.get(name, 0)
        for name, share in planes.busy(beat.gauges).items():
            shares[name,].append(share)
    return {
        catalog.INSTANCES_READY: {(group,): count for group, count in ready_count(membership).items()},
        catalog.STAGE_WAITING: dict(waiting),
        catalog.STAGE_RUNNING: dict(running),
        catalog.STAGE_BUSY: {labels: sum(each) / len(each) for labels, each in shares.items()},
    }


def stage_beats(membership: Membership) -> Iterator[StageBeat]:
    """The last beats of all instances, by stage."""
    for incarnation, beat in membership.beats.items():
        group = membership.state.instances[incarnation].member.group
        for name, count in beat.waiting.items():
            places = planes.places_of(beat.gauges, name)
            running = beat.running.get(name, 0)
            yield StageBeat(stage=name, group=group, waiting=count, running=running, places=places)


def gauges(membership: Membership) -> Mapping[str, planes.Gauges]:
    """The planes' numbers of each process, by group, incarnation and rank, as of its instance's last beat."""
    return {
        f"{instance.member.group}.{incarnation}{f'.rank{rank}' if rank else ''}": gauges
        for incarnation, instance in membership.state.instances.items()
        if incarnation in membership.beats
        for rank, gauges in planes.by_rank(membership.beats[incarnation].gauges).items()
    }


def status(membership: Membership) -> Mapping[str, Any]:
    state, beats = membership.state, membership.beats
    return {
        "complete": state.complete(),
        "missing_groups": state.missing_groups(),
        "revisions": [one.revision for one in state.revisions],
        "instances": [
            {
                "incarnation": incarnation,
                "group": instance.member.group,
                "unit": instance.member.unit,
                "revision": instance.member.revision,
                "endpoint": instance.member.endpoint,
                "stages": list(instance.member.stages),
                "ready": instance.ready,
                "loading": [] if instance.ready else planes.loading_of(_gauges_of(beats, incarnation)),
                "draining": instance.draining,
                "aside": instance.aside,
                "ineligible_reason": state.ineligible_reason(instance),
                "waiting": instance.waiting,
                "running": instance.running,
                "bound": instance.bound,
                "bound_total": instance.bound_total,
                "gauges": _gauges_of(beats, incarnation),
                "transports": planes.transports(_gauges_of(beats, incarnation)),
            }
            for incarnation, instance in state.instances.items()
        ],
    }


def _gauges_of(beats: Mapping[str, Beat], incarnation: str) -> planes.Gauges:
    return beats[incarnation].gauges if incarnation in beats else {}
