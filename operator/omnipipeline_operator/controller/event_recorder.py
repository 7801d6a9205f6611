"""Posts Events for the transitions of conditions; a transition that repeats becomes a series with a count.

Transitions that one write of the status reports with one reason are one Event: a pipeline that serves is Ready and
Available at once.

Here: making and posting them. Not here: which transitions are worth one (`changes.conditions`). Called by `reporting`.
An Event that cannot be posted is dropped: it must not delay a reconcile.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from omnipipeline_operator import errors
from omnipipeline_operator.changes.conditions import ObservedCondition as Condition
from omnipipeline_operator.changes.conditions import Transition
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.kinds import EVENT, PIPELINE, Manifest

log = logging.getLogger(__name__)

MAX_NOTE: Final = 1024  # bytes that the API server accepts
SERIES_GAP_S: Final = 600.0  # the same transition within this time continues its series
BEFORE_SERIES: Final = 3  # so many equal transitions are an Event each; later ones only raise the count
PATCH_S: Final = 60.0  # least time between two writes of one series' count
MAX_SERIES: Final = 2000  # above it, the least recently posted series is forgotten


class _Series(msgspec.Struct):
    name: str
    count: int
    at: float  #: When the transition last happened.
    written_at: float


class EventRecorder:
    """Posts Events and counts repeated ones."""

    def __init__(self, client: Client, *, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._name = name
        self._clock = clock
        self._series: dict[tuple[object, ...], _Series] = {}

    async def report(self, owner: Owner, transitions: Sequence[Transition]) -> None:
        """Post an Event for the transitions of each reason, or count them in its series."""
        joined: dict[tuple[str, bool], list[Condition]] = {}
        for transition in transitions:
            condition = transition.condition
            log.info(
                "%s/%s: %s is %s: %s: %s",
                owner.namespace,
                owner.name,
                condition.type,
                condition.status,
                condition.reason,
                condition.message,
            )
            joined.setdefault((condition.reason, transition.warning), []).append(condition)
        for (_, warning), conditions in joined.items():
            try:
                await self._post(owner, conditions, warning=warning)
            except errors.ClusterError as error:
                log.warning("event not posted: %s", error)

    async def _post(self, owner: Owner, conditions: Sequence[Condition], *, warning: bool) -> None:
        """conditions: with one reason."""
        now = self._clock()
        key = (owner.uid, conditions[0].reason, *((each.type, each.status) for each in conditions))
        known = self._series.pop(key, None)
        if known is None or now - known.at >= SERIES_GAP_S:
            known = _Series(name="", count=0, at=now, written_at=now)
        known.count, known.at = known.count + 1, now
        self._series[key] = known
        if len(self._series) > MAX_SERIES:
            del self._series[next(iter(self._series))]
        if known.count > BEFORE_SERIES:
            if now - known.written_at < PATCH_S:
                return
            known.written_at = now
            observed = datetime.now(UTC).strftime(_MICRO_TIME)
            patch = {"series": {"count": known.count - BEFORE_SERIES + 1, "lastObservedTime": observed}}
            try:
                await self._client.merge(EVENT, owner.namespace, known.name, patch)
                return
            except errors.NotFound:
                pass  # the Event has expired
        made = _event(owner, conditions, self._name, warning=warning)
        known.name, known.written_at = made["metadata"]["name"], now
        await self._client.create(made)


_MICRO_TIME: Final = "%Y-%m-%dT%H:%M:%S.%fZ"


def _event(owner: Owner, conditions: Sequence[Condition], reporter: str, *, warning: bool) -> Manifest:
    said: dict[str, list[str]] = {}
    for each in conditions:
        said.setdefault(each.message, []).append(f"{each.type} is {each.status}")
    note = "; ".join(" and ".join(states) + (f": {message}" if message else "") for message, states in said.items())
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.name,
        "metadata": {"name": f"{owner.name}.{secrets.token_hex(8)}", "namespace": owner.namespace},
        "eventTime": datetime.now(UTC).strftime(_MICRO_TIME),
        "reportingController": "omnipipeline.dev/operator",
        "reportingInstance": reporter[:128],
        "action": "Reconcile",
        "reason": conditions[0].reason,
        "note": note.encode()[:MAX_NOTE].decode(errors="ignore"),
        "type": "Warning" if warning else "Normal",
        "regarding": {
            "apiVersion": PIPELINE.api_version,
            "kind": PIPELINE.name,
            "namespace": owner.namespace,
            "name": owner.name,
            "uid": owner.uid,
        },
    }
