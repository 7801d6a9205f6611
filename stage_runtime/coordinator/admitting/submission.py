"""Sending a request's body to its entry instance, with its bindings in the header. Called by `live_requests`."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from omnipipeline_spec.types.plan import PipelineRevision
from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.coordinator.answering.request_handles import RequestHandle
from stage_runtime.coordinator.following import Following
from stage_runtime.errors import NoConnection, TransferError, ValueRefused, describe
from stage_runtime.transfers.sending import PendingSend, SendQueues
from stage_runtime.wire.messages import Message, Submit
from stage_runtime.wire.parts import Body, Failure, Header, Member

log = logging.getLogger(__name__)

BODY_CREDITS: Final = 8  # bodies under way to one entry instance


class Submission:
    """Sends the bodies of one coordinator's requests to the entry instances."""

    def __init__(
        self,
        following: Following,
        send_queues: SendQueues,
        loop: asyncio.AbstractEventLoop,
        *,
        owner: str,
        backend: str,
    ) -> None:
        """owner: this coordinator. backend: the pipeline's relay."""
        self._following = following
        self._send_queues = send_queues
        self._loop = loop
        self._owner = owner
        self._backend = backend

    def send(self, handle: RequestHandle, revision: PipelineRevision, members: tuple[Member, ...]) -> None:
        """Send the current attempt, or let it wait for a credit. members: those that its stages may not know yet."""
        entry, bindings, attempt = revision.entry, handle.bindings, handle.tracked.attempt

        def make(body: Body) -> Message:
            remaining_ms = max(0, int((handle.deadline - self._loop.time()) * 1000))
            trace = handle.trace.header
            header = Header(
                handle.id,
                attempt,
                self._owner,
                bindings,
                remaining_ms,
                trace,
                members,
                handle.away,
                streamed=not handle.whole,
            )
            return Submit(header, entry, body)

        def lost(error: BaseException) -> None:
            if isinstance(error, ValueRefused):  # what does not fit into a message is what the client sent
                failure = Failure("invalid_request", error.problem)
            else:
                log.error("request %s cannot be sent", handle.id, exc_info=error)
                failure = Failure("transport_failed", describe(error), entry, "relay")
            self._following.failed(handle, attempt, failure)

        assert handle.extracted is not None
        pending = PendingSend(handle.sending, handle.extracted, make, self._backend, lost)
        unreachable: str | None = bindings[entry]
        try:
            if self._send_queues.ship((COORDINATOR, entry, bindings[entry]), pending, credits=BODY_CREDITS):
                return
            problem = f"no connection to the instance of {entry!r}"
        except NoConnection as error:
            problem = str(error)
        except TransferError as error:
            problem, unreachable = str(error), None
        except Exception as error:
            lost(error)
            return
        failure = Failure("transport_failed", problem, entry, "relay", unreachable=unreachable)
        self._following.failed(handle, attempt, failure)
