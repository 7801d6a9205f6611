"""Events for people: one for each change of a condition that matters.

Here: making and posting them. Not here: which changes matter (`changes.conditions`). Called by `reconciling`. An Event
that cannot be posted is lost: it must never hold up work.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from omnipipeline_operator import errors
from omnipipeline_operator.changes.conditions import Transition
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.cluster.kinds import EVENT
from omnipipeline_operator.desired import naming
from omnipipeline_operator.desired.naming import Manifest, Owner

log = logging.getLogger(__name__)

MAX_NOTE: Final = 1024  # bytes that the API server takes


async def report(client: Client, owner: Owner, transitions: Sequence[Transition], *, reporter: str) -> None:
    """Post an Event per transition."""
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
        try:
            await client.create(_event(owner, transition, reporter))
        except errors.ClusterError as error:
            log.warning("event not posted: %s", error)


def _event(owner: Owner, transition: Transition, reporter: str) -> Manifest:
    condition = transition.condition
    note = f"{condition.type} is {condition.status}" + (f": {condition.message}" if condition.message else "")
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.name,
        "metadata": {"name": f"{owner.name}.{secrets.token_hex(8)}", "namespace": owner.namespace},
        "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": "omnipipeline.dev/operator",
        "reportingInstance": reporter[:128],
        "action": "Reconcile",
        "reason": condition.reason,
        "note": note.encode()[:MAX_NOTE].decode(errors="ignore"),
        "type": "Warning" if transition.warning else "Normal",
        "regarding": {
            "apiVersion": naming.API_VERSION,
            "kind": "OmniPipeline",
            "namespace": owner.namespace,
            "name": owner.name,
            "uid": owner.uid,
        },
    }
