"""The debug mode for shared values (OMNI_DEBUG_VALUES=1): who writes into what stages of one process share?

Tensors are hashed when they are handed over, when the receiver begins and when it ends. A change before the begin
was the sender's, one before the end the receiver's. Both break the read-only contract.
"""

from __future__ import annotations

import logging
from threading import Lock
from typing import Any

import msgspec

from stage_runtime.relays import payloads

log = logging.getLogger(__name__)


class Handover(msgspec.Struct):
    """One value on its way from one stage to a sibling."""

    source: str
    where: str  #: What the value is called: ``payload.data``.
    value: Any
    digests: dict[str, str]


class Watch:
    """All handovers inside this process. Costs three hashes of every shared tensor."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self._under_way: dict[tuple[str, str], list[Handover]] = {}  #: (request id, target)
        self._lock = Lock()

    def handed(self, source: str, target: str, request_id: str, value: Any, where: str) -> None:
        digests = payloads.fingerprint(value, where=where)
        if digests:
            with self._lock:
                self._under_way.setdefault((request_id, target), []).append(Handover(source, where, value, digests))

    def began(self, target: str, request_id: str) -> None:
        """``target`` begins: what has changed by now, its sender wrote."""
        for handover in self._under_way.get((request_id, target), []):
            self._compare(handover, request_id, by=handover.source)

    def ended(self, target: str, request_id: str) -> None:
        """``target`` is through: what has changed since it began, it wrote."""
        with self._lock:
            handovers = self._under_way.pop((request_id, target), [])
        for handover in handovers:
            self._compare(handover, request_id, by=target)

    def _compare(self, handover: Handover, request_id: str, *, by: str) -> None:
        now = payloads.fingerprint(handover.value, where=handover.where)
        for path in payloads.written(handover.digests, now):
            violation = f"stage {by!r} wrote into {path}, handed over by {handover.source!r} (request {request_id})"
            self.violations.append(violation)
            log.error("%s: received tensors are read-only; use payload.detach()", violation)
        handover.digests = now
