"""The failures that a client is told of. Log and record have the instances' own names. Called by `live_requests`."""

from __future__ import annotations

import logging

from stage_runtime.coordinator.answering.request_handles import RequestHandle
from stage_runtime.coordinator.membership import Membership
from stage_runtime.rules.requests.failures import for_client
from stage_runtime.wire.parts import Failure

log = logging.getLogger(__name__)


def shown(handle: RequestHandle, failure: Failure, membership: Membership) -> Failure:
    """The failure for the request's reader: without names that mean nothing to it."""
    told = for_client(failure, lambda incarnation: _name_of(handle, incarnation, membership))
    if told is not failure:
        log.warning("request %s failed: %s", handle.id, failure.message)
    return told


def _name_of(handle: RequestHandle, incarnation: str, membership: Membership) -> str | None:
    """The name of an instance, for a client."""
    if incarnation == membership.incarnation:
        return "the coordinator"
    for stage, bound in handle.bindings.items():
        if bound == incarnation:
            return f"the instance of {stage!r}"
    instance = membership.state.instances.get(incarnation)
    return None if instance is None else f"an instance of {instance.member.group!r}"
