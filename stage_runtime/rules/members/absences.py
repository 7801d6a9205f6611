"""Process groups without an instance that takes requests: since when, and whether one is on its way. Pure.

The coordinator is told of no orders: whoever ends an instance (a crash, a roll, a drain) does not say what follows. So
an instance is expected for a while after the last one left, longer while one loads that has not failed to. One is
always expected of a group that starts on demand, because a request that waits is what starts it, and of a group whose
old instances end before new ones start (the operator names both); after one has failed to start, for a while, and then
again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

#: group, unit, unit revision, edge schema: what one instance may stand in for.
UnitKind: TypeAlias = tuple[str, str, str, str]

RETRY_MOST_S: Final = 30.0  # a client is asked to come back at least so often
RETRIED_AFTER: Final = 2.0  # of the time that one is expected: then a group on demand may be started again


class Outlook(IntEnum):
    """The prospect of a request for a set of groups; a greater one is worse."""

    HERE = 0  #: Each has an instance.
    COMING = 1  #: The ones that have none are expected to have one.
    GONE = 2  #: One has none, and none is expected.


class Prospect(NamedTuple):
    """The outlook of a request, and what it is due to."""

    outlook: Outlook
    groups: tuple[str, ...] = ()  #: Those without an instance.
    away_s: float = 0.0  #: Seconds for which the one that has been away longest is away.

    @property
    def retry_after_s(self) -> float:
        """Seconds after which to ask again. A group that has been away for a while mostly stays away as long again."""
        return min(max(1.0, self.away_s), RETRY_MOST_S)


class Absence:
    """One group without an instance that takes requests."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.failed_at: float | None = None  #: One has ended since, before it was ready.


def outlook(
    *, away_s: float, expected_s: float, loading: bool, failed_s: float | None, on_demand: bool = False
) -> Outlook:
    """Whether an instance is on its way. away_s: since the last one left. expected_s: 0: none is ever expected.

    loading: one is registered, and loads. failed_s: since one has ended before it was ready: those that load no longer
    count, so that a program that always fails to load is not expected for ever. None: none has. on_demand: requests
    that wait for the group start an instance.
    """
    if expected_s <= 0:
        return Outlook.GONE
    failed = failed_s is not None
    if on_demand and not (failed_s is not None and expected_s <= failed_s < RETRIED_AFTER * expected_s):
        return Outlook.COMING
    return Outlook.COMING if away_s < expected_s or (loading and not failed) else Outlook.GONE


class Absences:
    """All groups without an instance, of all pipeline revisions that are served.

    Invariant: its kinds are those of the last `observe`.
    """

    def __init__(self, expected_s: float) -> None:
        self._expected_s = expected_s
        self._absences: dict[UnitKind, Absence] = {}
        self.on_demand: Collection[str] = ()  #: Groups that requests may start.

    def observe(self, missing: Collection[UnitKind], now: float) -> None:
        """missing: the kinds that have no instance now."""
        self._absences = {kind: self._absences.get(kind) or Absence(now) for kind in missing}

    def start_failed(self, group: str, unit_revision: str, now: float) -> None:
        """An instance has ended before it was ready."""
        for kind, absence in self._absences.items():
            if (kind[0], kind[2]) == (group, unit_revision):
                since = absence.failed_at
                if since is None or now - since >= RETRIED_AFTER * self._expected_s:
                    absence.failed_at = now

    def prospect(self, missing: Iterable[UnitKind], now: float, loading: Callable[[UnitKind], bool]) -> Prospect:
        """The prospect of what needs these kinds, which have no instance. loading: whether an instance of it loads."""
        worst, groups, longest_s = Outlook.HERE, [], 0.0
        for kind in missing:
            absence = self._absences.get(kind) or Absence(now)
            away_s = now - absence.since
            its = outlook(
                away_s=away_s,
                expected_s=self._expected_s,
                loading=loading(kind),
                failed_s=None if absence.failed_at is None else now - absence.failed_at,
                on_demand=kind[0] in self.on_demand,
            )
            worst, longest_s = max(worst, its), max(longest_s, away_s)
            groups.append(kind[0])
        return Prospect(worst, tuple(groups), longest_s)
