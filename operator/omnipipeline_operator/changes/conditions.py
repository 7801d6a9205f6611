"""Conditions of a pipeline, with the time of their last transition.

Here: their form, their times, and which transitions are worth an Event. Not here: what they report (`status`). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

MAX_MESSAGE: Final = 8192  # the CRD allows 32768; an Event and a terminal show less
MAX_REASON: Final = 128  # characters, as of an Event; the CRD allows 253
_NOT_OF_A_REASON: Final = re.compile(r"[^A-Za-z0-9_,:]")  # Kubernetes' form of a condition's reason
#: The CRD's default reason: no operator has reconciled this pipeline.
NOT_RECONCILED: Final = "NoOperatorYet"
#: Conditions whose transitions are posted as Events; the others follow from them.
WITH_EVENTS: Final = ("Accepted", "Available", "Ready", "Progressing", "Suspended")


class ObservedCondition(msgspec.Struct, frozen=True, kw_only=True):
    """One condition as it is now."""

    type: str
    status: str  #: True, False, Unknown.
    reason: str
    message: str = ""


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """A condition that has changed; posted as an Event."""

    condition: ObservedCondition
    warning: bool


def reported(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status if an operator has written it; the CRD's default status counts as none."""
    conditions = status.get("conditions", ())
    return {} if conditions and all(each.get("reason") == NOT_RECONCILED for each in conditions) else status


def condition(type: str, holds: bool | None, reason: str, message: str = "") -> ObservedCondition:
    """A condition. ``holds``: None is Unknown."""
    status = "Unknown" if holds is None else str(holds)
    return ObservedCondition(type=type, status=status, reason=word(reason), message=message[:MAX_MESSAGE])


def word(reason: str) -> str:
    """A reason in the form that Kubernetes asks for. It may be that of an Event, which anybody can post."""
    formed = _NOT_OF_A_REASON.sub("_", reason)[:MAX_REASON].rstrip(",:")
    return formed if formed[:1].isalpha() else "Unknown"


def merged(
    conditions: Sequence[ObservedCondition], before: Sequence[Mapping[str, Any]], *, generation: int, now: float
) -> list[dict[str, Any]]:
    """The conditions in the status's form; one whose status has not changed keeps its transition time."""
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


def transitions(conditions: Sequence[ObservedCondition], before: Sequence[Mapping[str, Any]]) -> list[Transition]:
    """Transitions that are worth an Event; for a new pipeline only failures."""
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
    """Whether this condition of a written status is True."""
    return any(each["type"] == type and each["status"] == "True" for each in status.get("conditions", ()))


def is_bad(condition: ObservedCondition) -> bool:
    """Whether the condition is a failure; pods that are starting are not one."""
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


def _time(was: Mapping[str, Any], condition: ObservedCondition, now: float) -> str:
    same = was.get("status") == condition.status and was.get("lastTransitionTime")
    return str(was["lastTransitionTime"]) if same else rfc3339(now)
