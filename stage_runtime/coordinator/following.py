"""The interface by which the parts of the request manager read and report a request in flight.

`live_requests` implements it. One interface serves all parts, so that none is given callbacks of its own.
"""

from __future__ import annotations

from typing import Protocol

from omnipipeline_spec.types.plan import PipelineRevision
from stage_runtime.coordinator.answering.request_handles import RequestHandle, Resulted
from stage_runtime.rules.requests.lifecycle import Instructions, Stimulus
from stage_runtime.wire.parts import Failure


class Following(Protocol):
    """The requests of one coordinator in flight. This runs on the I/O thread."""

    def find(self, request_id: str) -> RequestHandle | None:
        """A request in flight."""

    def submit(self, handle: RequestHandle, revision: PipelineRevision, bindings: dict[str, str]) -> None:
        """Begin an attempt under these bindings."""

    def happen(self, handle: RequestHandle, event: Stimulus, delivered: Resulted | None = None) -> Instructions:
        """Apply an event to a request and carry its instructions out. delivered: what DELIVER gives the client."""

    def failed(self, handle: RequestHandle, attempt: int, failure: Failure) -> None:
        """An attempt cannot go on: it is retried, or the request fails."""

    def end_unread(self, handle: RequestHandle) -> None:
        """The client does not read. If the request is complete, only its unread events are dropped."""

    def end_too_large(self, handle: RequestHandle, failure: Failure) -> None:
        """The answer takes too much memory. If the request is complete, only its unread events are dropped."""
