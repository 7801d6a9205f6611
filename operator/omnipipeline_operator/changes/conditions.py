"""Conditions: one aspect of a pipeline each, with the time it last changed.

Here: making them, keeping their times, and which changes are worth an Event. Not here: what they say (`status`). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

MAX_MESSAGE: Final = 8192  # of the CRD's 32768: an Event and a terminal have to hold it too
#: The definition's default: no operator has looked at this pipeline.
NOT_RECONCILED: Final = "NoOperatorYet"
#: Changes of these are told as Events; the others follow from them.
WITH_EVENTS: Final = ("Accepted", "Available", "Ready", "Progressing", "Suspended")


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """What is held to be so now."""

    type: str
    status: str  #: True, False, Unknown.
    reason: str
    message: str = ""


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """A condition that has changed, for an Event."""

    condition: Condition
    warning: bool


def reported(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """A status that an operator has written; what the definition gives to a pipeline that none has seen is none."""
    conditions = status.get("conditions", ())
    return {} if conditions and all(each.get("reason") == NOT_RECONCILED for each in conditions) else status


def condition(type: str, holds: bool | None, reason: str, message: str = "") -> Condition:
    """A condition; None: unknown."""
    status = "Unknown" if holds is None else str(holds)
    return Condition(type=type, status=status, reason=reason, message=message[:MAX_MESSAGE])


def merged(
    conditions: Sequence[Condition], before: Sequence[Mapping[str, Any]], *, generation: int, now: float
) -> list[dict[str, Any]]:
    """The conditions as the status holds them; one whose status is as before keeps its time."""
    known = {each.get("type"): each for each in before}
    return [
        {
            "type": each.type,
            "status": each.status,
            "observedGeneration": generation,
            "lastTransitionTime": _time(known.get(each.type, {}), each, now),
            "reason": each.reason,
            "message": each.message,
        }
        for each in conditions
    ]


def transitions(conditions: Sequence[Condition], before: Sequence[Mapping[str, Any]]) -> list[Transition]:
    """What has changed and matters to people; of a new pipeline only what is wrong."""
    known = {each.get("type"): each for each in before}
    found = []
    for each in conditions:
        was = known.get(each.type)
        if each.type not in WITH_EVENTS or (
            was is not None and (was["status"], was["reason"]) == (each.status, each.reason)
        ):
            continue
        bad = is_bad(each)
        if was is None and not (bad and each.type in ("Accepted", "Progressing")):
            continue
        found.append(Transition(condition=each, warning=bad))
    return found


def is_true(status: Mapping[str, Any], type: str) -> bool:
    """Whether a written status says so."""
    return any(each["type"] == type and each["status"] == "True" for each in status.get("conditions", ()))


def is_bad(condition: Condition) -> bool:
    """Whether somebody should look; not while pods merely start."""
    if condition.type == "Suspended":
        return False
    return condition.status == "False" and condition.reason not in (
        "Starting",
        "Prefetching",
        "RollingOut",
        "Suspended",
    )


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _time(was: Mapping[str, Any], condition: Condition, now: float) -> str:
    same = was.get("status") == condition.status and was.get("lastTransitionTime")
    return str(was["lastTransitionTime"]) if same else rfc3339(now)
