"""Passes messages of requests to the process's stages; drops those of ended requests. It runs on the I/O thread.

Called by `host`, which looks a message's handler up in `Requests.handlers`. `stage_input` decides what happens to a
request inside a stage.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from stage_runtime.errors import TransferError
from stage_runtime.stage.inputs.arrivals import Sealed
from stage_runtime.stage.inputs.mutation_check import CheckedPayload
from stage_runtime.stage.inputs.stage_input import StageInput
from stage_runtime.stage.process_context import ProcessContext
from stage_runtime.stage.stage import Stage
from stage_runtime.transfers.receiving import Fetched, Fetching
from stage_runtime.transfers.sending import attempt_key
from stage_runtime.wire.messages import (
    Abort,
    Consumed,
    DataReady,
    Ended,
    HandBack,
    RelayFailure,
    Release,
    Skip,
    StreamStalled,
    Submit,
)
from stage_runtime.wire.parts import Body, Header, Member

log = logging.getLogger(__name__)

LOST_OWNERS_KEPT: Final = 100


class Requests:
    """All requests of one process."""

    _fetching: Fetching  #: The fetching of this incarnation.

    def __init__(
        self,
        stages: Mapping[str, Stage],
        process: ProcessContext,
        loop: asyncio.AbstractEventLoop,
        meet: Callable[[str, Sequence[Member]], None],
    ) -> None:
        """meet: called with a request's owner and the instances that it brings along, before it is handled."""
        self._meet = meet
        self._stages = stages
        self._process = process
        self._loop = loop
        #: Coordinators that are gone and have not come back, the oldest first. Messages of their requests are
        #: dropped: it would never be ended.
        self._lost_owners: OrderedDict[str, None] = OrderedDict()
        #: Coordinators -> attempts up to which all is over here: of before they declared this process dead, or were
        #: gone. The oldest first.
        self._attempts_over: OrderedDict[str, int] = OrderedDict()
        self.handlers: Mapping[type, Callable[[str, Any], None]] = {
            Submit: self._submit,
            DataReady: self._data_ready,
            Skip: self._skip,
            StreamStalled: self._stalled,
            Abort: self._abort,
            Ended: self._ended,
            Release: self._release,
            RelayFailure: self._relay_failed,
            Consumed: self._consumed,
        }

    def wire(self) -> None:
        """The process has its ends of the planes."""
        self._fetching = Fetching(self._process.relays, self._loop)

    def owner_back(self, owner: str, attempts_over: int) -> None:
        """A coordinator is there; again, perhaps: then what others still send of its attempts up to ``attempts_over``
        is dropped.
        """
        self._lost_owners.pop(owner, None)
        if attempts_over:
            self._attempts_over[owner] = max(attempts_over, self._attempts_over.pop(owner, 0))
            if len(self._attempts_over) > LOST_OWNERS_KEPT:
                self._attempts_over.popitem(last=False)

    def drop_owner(self, owner: str) -> int:
        """A coordinator is gone. Messages of its requests that others still send are dropped as they
        come. Returns how
        many.
        """
        self._lost_owners[owner] = None
        if len(self._lost_owners) > LOST_OWNERS_KEPT:
            self._lost_owners.popitem(last=False)
        works = [work for stage in self._stages.values() for work in stage.input.works() if work.owner == owner]
        orphans = {(work.request_id, work.attempt) for work in works}
        orphans |= self._process.send_queues.waiting_of(owner)
        for request_id, attempt in orphans:
            self._drop(owner, request_id, attempt)
        self._fetching.drop(attempt_key(owner, "", 0).partition("#")[0])
        return len(orphans)

    def hand_back(self) -> None:
        """Requests that have not begun at an entry stage may go to another instance, if there is one."""
        for stage in self._stages.values():
            if stage.plan.entry:
                for work in stage.input.works():
                    if work.began_at is None:
                        self._process.send(work.owner, HandBack(work.request_id, work.attempt, stage.plan.name))

    def drop_all(self) -> None:
        """Abort all requests of the earlier incarnation. `wire` must follow."""
        self.abort_all()
        self._fetching.close()
        self._lost_owners.clear()  # what was bound to the life before is addressed to it
        self._attempts_over.clear()

    def abort_all(self) -> None:
        """Run the `finally` blocks of what is left."""
        for stage in self._stages.values():
            stage.input.abort_all()

    def close(self) -> None:
        self._fetching.close()

    # --- what is received ---------------------------------------------------------------------------------------

    def _submit(self, sender: str, message: Submit) -> None:
        if message.header.members:
            self._meet(message.header.owner, message.header.members)
        stage_input = self._target(message.target)
        if stage_input is not None and not self._orphan(message.header, sender, message.body):
            if not message.body.transfer:
                self._submitted(stage_input, message, Fetched(message.body, None))
                return
            self._fetching.fetch(
                sender,
                message.body,
                attempt_key(message.header.owner, message.header.request_id, message.header.attempt),
                lambda fetched: self._submitted(stage_input, message, fetched),
                lambda error: stage_input.lost(message.header, error),
                holder=message.target,
            )

    def _submitted(self, stage_input: StageInput, message: Submit, received: Fetched) -> None:
        fetched = self._checked(message.header, message.target, "the client", "payload", received)
        stage_input.payload(message.header, "", fetched)

    def _data_ready(self, sender: str, message: DataReady) -> None:
        header, source, body = message.header, message.source, message.body
        if header.members:
            self._meet(header.owner, header.members)
        stage_input = self._target(message.target)
        if stage_input is None or self._orphan(header, sender, body):
            return
        if message.failure is not None:
            stage_input.broken(header, source, message.failure)
        elif message.is_done and body is None:
            stage_input.end(header, source, message.chunk_id or 0, timings=message.timings)
        elif body is not None:
            if not body.transfer:
                self._arrived(stage_input, message, Fetched(body, None))
                return
            self._fetching.fetch(
                sender,
                body,
                attempt_key(header.owner, header.request_id, header.attempt),
                lambda fetched: self._arrived(stage_input, message, fetched),
                lambda error: stage_input.lost(header, error),
                holder=message.target,
            )

    def _arrived(self, stage_input: StageInput, message: DataReady, received: Sealed) -> None:
        header, source, chunk_id, sealed = message.header, message.source, message.chunk_id, received
        if self._process.mutation_check is not None:
            name = "payload" if chunk_id is None else "chunk"
            sealed = self._checked(header, message.target, source, name, received)
        if message.is_done:
            stage_input.end(header, source, chunk_id or 0, sealed, message.timings)
        elif chunk_id is None:
            stage_input.payload(header, source, sealed, message.timings)
        else:
            stage_input.chunk(header, source, chunk_id, message.modality, sealed, message.weight)

    def _checked(self, header: Header, target: str, source: str, name: str, fetched: Sealed) -> Sealed:
        mutation_check = self._process.mutation_check
        if mutation_check is None:
            return fetched
        key = attempt_key(header.owner, header.request_id, header.attempt)
        return CheckedPayload(fetched, mutation_check, target, source, key, name)

    def _skip(self, sender: str, message: Skip) -> None:
        if message.header.members:
            self._meet(message.header.owner, message.header.members)
        stage_input = self._target(message.target)
        if stage_input is not None and not self._orphan(message.header, sender, None):
            stage_input.skip(message.header, message.source, message.chunks)

    def _stalled(self, sender: str, message: StreamStalled) -> None:
        stage_input = self._process.sibling(message.target)
        if stage_input is not None:
            stage_input.source_stalled(message.source, sender, message.stalled)

    def _abort(self, sender: str, message: Abort) -> None:
        self._drop(message.owner, message.request_id, message.attempt)

    def _ended(self, sender: str, message: Ended) -> None:
        for request_id, attempt in message.requests:
            self._drop(sender, request_id, attempt)

    def _release(self, sender: str, message: Release) -> None:
        self._process.send_queues.released(sender, message.transfers)

    def _relay_failed(self, sender: str, message: RelayFailure) -> None:
        self._process.relays.fail(sender, message.relay, message.reason, notify=False)

    def _consumed(self, sender: str, message: Consumed) -> None:
        stage_input = self._process.sibling(message.source)
        if stage_input is not None:
            stage_input.consumed(message)

    # --- inside -------------------------------------------------------------------------------------------------

    def _target(self, name: str) -> StageInput | None:
        stage_input = self._process.inputs.get(name)
        if stage_input is None:
            self._process.counters["misdirected"] += 1
            log.warning("message for stage %r, which is not in this process", name)
        return stage_input

    def _orphan(self, header: Header, sender: str, body: Body | None) -> bool:
        """Whether the request's coordinator is gone, or was for a while when it ended this attempt."""
        if header.owner not in self._lost_owners and header.attempt > self._attempts_over.get(header.owner, 0):
            return False
        self._process.counters["orphaned_requests"] += 1
        if body is not None and body.transfer:
            with contextlib.suppress(TransferError):
                self._process.relays.decline(body.transfer, peer=sender)
        return True

    def _drop(self, owner: str, request_id: str, attempt: int) -> None:
        """The attempt has ended: free what engines, send queues and relays hold of it."""
        for stage in self._stages.values():
            stage.input.abort(owner, request_id, attempt)
        self._process.send_queues.abort(owner, request_id, attempt)
        key = attempt_key(owner, request_id, attempt)
        self._process.relays.cleanup(key)
        if self._process.mutation_check is not None:
            self._process.mutation_check.forget(key)
