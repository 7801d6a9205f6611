"""A new revision that is tried with a share of the requests: when it gets more of them, and when it is taken back.

Here: one rule, and the numbers it reads. Not here: which pods it has (`rollout`), who counts (coordinators). Pure.

A step takes ``stepSeconds`` from when the revision gets its share, and lasts until coordinators answer and the pods of
that share are ready. Each look compares the attempts of the new revision with a bound, and with the old one's over the
same time: the revision is taken back when it had so many failed ones (or so many slow ones) as would come up once in a
thousand looks, were it as good as the worse of the two. A few requests decide nothing, unless they nearly all fail. A
fault that hurts both revisions alike, such as a lost node, takes nothing back.

``suspend`` interrupts a trial: nothing runs, so nothing can be compared. The old revision stays the one that serves. It
comes back first, and the new one is tried from the beginning when coordinators can bind requests to the old one again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from omnipipeline_operator.changes import conditions, workloads
from omnipipeline_spec.cluster import AbortOn
from omnipipeline_spec.cluster import Canary as Policy

REASON: Final = "CanaryAborted"
LEAST_ATTEMPTS: Final = 5  # fewer decide nothing
SURPRISE: Final = 0.001  # a revision that is as good as its bound is taken back by chance so rarely, at each look
SLOW_SHARE: Final = 0.01  # p99: one in a hundred may take longer


class Attempts(msgspec.Struct, frozen=True, kw_only=True):
    """The ended attempts of one revision at all coordinators, since the new one is tried."""

    completed: int = 0
    failed: int = 0
    times: Mapping[float, int] = {}  #: Seconds -> completed ones that took about as long.

    @property
    def ended(self) -> int:
        return self.completed + self.failed

    def slower(self, than_s: float) -> int:
        return sum(count for seconds, count in self.times.items() if seconds > than_s)

    @property
    def p99_s(self) -> float | None:
        """The time that one in a hundred exceeds; None: none has completed."""
        left = sum(self.times.values()) * SLOW_SHARE
        for seconds in sorted(self.times, reverse=True):
            left -= self.times[seconds]
            if left < 0:
                return seconds
        return min(self.times, default=None)


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """The revision that is tried; kept in the status."""

    revision: str
    weight: int = 0  #: Its share of requests in percent; 100: all, until the old pods have ended. 0: it has no pods.
    since: float | None = None  #: When it got that share; None: its pods are not ready yet.
    aborted: bool = False
    message: str = ""  #: Why the last step was taken.

    @property
    def runs(self) -> bool:
        """Whether its share is limited."""
        return not self.aborted and self.weight < 100

    @property
    def is_away(self) -> bool:
        """Whether the old revision is the goal: this one was taken back, or its trial is interrupted."""
        return self.weight == 0

    @property
    def is_interrupted(self) -> bool:
        """Whether it is tried again once the old revision is back."""
        return self.is_away and not self.aborted


def decide(
    policy: Policy,
    before: Canary | None,
    *,
    update: str,
    serving: str,
    reached: bool,
    filled: bool,
    attempts: Mapping[str, Attempts],
    now: float,
    suspended: bool = False,
    restored: bool = True,
) -> Canary | None:
    """The revision that is tried from now on; None: the spec asks for the revision that serves.

    before:   as the status has it.
    update:   the revision that the spec asks for. serving: the one that served last.
    reached:  whether coordinators answer, and each can bind requests to the new revision.
    filled:   whether as many new pods are ready as its share is worth, and the roll is not paused.
    attempts: by revision.
    suspended: whether no pod may run. restored: whether coordinators can bind requests to the old revision.
    """
    if update == serving:
        return None
    if before is not None and before.since is not None and before.since > now:
        # The clock was set back: the step would last until it is there again.
        before = msgspec.structs.replace(before, since=now)
    stands = before is not None and before.aborted and before.revision == update
    if before is not None and not stands and before.weight < 100:
        if suspended or (before.is_interrupted and not restored):
            message = f"is tried from the beginning once {serving} serves again: the pipeline was suspended meanwhile"
            return Canary(revision=update, message=message)
    if before is None or before.revision != update or before.is_interrupted:
        return Canary(revision=update, weight=policy.weight)
    if before.aborted or before.weight >= 100:
        return before
    if before.since is None:
        began = {"since": now, "message": f"gets {policy.weight} % of the requests"} if reached else {}
        return msgspec.structs.replace(before, weight=policy.weight, **began)
    new, old = attempts.get(update, Attempts()), attempts.get(serving, Attempts())
    why = worse(policy.abort_on, new, old)
    if why is not None:
        message = f"revision {update} was taken back, {serving} serves: {why}. Edit the pipeline again: {CURE}"
        return msgspec.structs.replace(before, weight=0, since=now, aborted=True, message=message)
    if not (reached and filled) or now - before.since < policy.step_seconds:
        return before
    weight = min(before.weight + policy.weight, 100)
    message = f"gets {weight} % of the requests after {_compared(new, old)}"
    return msgspec.structs.replace(before, weight=weight, since=now, message=message)


#: Advice for a person when a revision was taken back.
CURE: Final = (
    "another revision is tried anew, `kubectl omni restart` tries this one again, without rollout.canary it rolls"
)


def worse(bounds: AbortOn, new: Attempts, old: Attempts) -> str | None:
    """Why the new revision is worse than its bounds and than the old one, in a few words; None: nothing shows that."""
    if new.ended < LEAST_ATTEMPTS:
        return None
    if _exceeds(new.failed, new.ended, bounds.error_rate, old.failed, old.ended):
        return f"{_compared(new, old)} (errorRate {bounds.error_rate:g})"
    limit_s = bounds.p99_seconds
    if limit_s is None:
        return None
    if _exceeds(new.slower(limit_s), new.completed, SLOW_SHARE, old.slower(limit_s), old.completed):
        slow = f"{new.slower(limit_s)} of {new.completed} took longer than {limit_s:g} s"
        return f"{slow}, with the old revision {old.slower(limit_s)} of {old.completed}; {_compared(new, old)}"
    return None


def joined(reports: Iterable[Mapping[str, Attempts]]) -> dict[str, Attempts]:
    """The sum of what several coordinators report, by revision."""
    found: dict[str, Attempts] = {}
    for report in reports:
        for revision, each in report.items():
            known = found.get(revision, Attempts())
            times = dict(known.times)
            for seconds, count in each.times.items():
                times[seconds] = times.get(seconds, 0) + count
            found[revision] = Attempts(
                completed=known.completed + each.completed, failed=known.failed + each.failed, times=times
            )
    return found


def chance(least: int, of: int, probability: float) -> float:
    """How probable at least ``least`` of ``of`` are, each with the same probability; sums no more than it must.

    Returns: 1 where so many are to be expected.
    """
    if least <= of * probability or least <= 0:
        return 1.0
    if probability <= 0:
        return 0.0
    each = math.lgamma(of + 1) - math.lgamma(least + 1) - math.lgamma(of - least + 1)
    term = math.exp(each + least * math.log(probability) + (of - least) * math.log1p(-probability))
    odds, total = probability / (1 - probability), 0.0
    for count in range(least, of + 1):
        total += term
        if term <= total * 1e-9:
            break
        term *= odds * (of - count) / (count + 1)
    return min(total, 1.0)


def read(recorded: Mapping[str, Any] | None) -> Canary | None:
    """The canary that the status records. None: it records none."""
    if not recorded:
        return None
    return Canary(
        revision=str(recorded.get("revision", "")),
        weight=int(recorded.get("weight", 0)),
        since=workloads.timestamp(recorded.get("since")) or None,
        aborted=bool(recorded.get("aborted", False)),
        message=str(recorded.get("message", "")),
    )


def recorded(canary: Canary) -> dict[str, Any]:
    """The canary as the status records it."""
    found = {
        "revision": canary.revision,
        "weight": canary.weight,
        "since": None if canary.since is None else conditions.rfc3339(canary.since),
        "aborted": canary.aborted,
        "message": canary.message or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _exceeds(new: int, of_new: int, bound: float, old: int, of_old: int) -> bool:
    """Whether more of the new ones are bad than the bound allows and the old ones explain."""
    usual = old / of_old if of_old >= LEAST_ATTEMPTS else 0.0
    return chance(new, of_new, max(bound, usual)) < SURPRISE


def _compared(new: Attempts, old: Attempts) -> str:
    return f"{_numbers(new)}, with the old revision {_numbers(old)}"


def _numbers(attempts: Attempts) -> str:
    p99 = attempts.p99_s
    slowest = "" if p99 is None else f" (p99 {p99:.3g} s)"
    return f"{attempts.failed} of {attempts.ended} attempts failed{slowest}"
