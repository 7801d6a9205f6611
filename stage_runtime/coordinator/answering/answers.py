"""The outputs of terminal stages for a request: fetched, put in order, turned into events. This runs on the I/O thread.

`rules.requests.lifecycle` decides what an event leads to, and `live_requests`, which calls this, carries it out.
"""

from __future__ import annotations

from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.coordinator.answering.request_handles import RequestHandle, Resulted, Streamed
from stage_runtime.coordinator.answering.unread_answers import UnreadAnswers, nbytes_of
from stage_runtime.coordinator.ending.notifications import ConsumedNotifier
from stage_runtime.coordinator.following import Following
from stage_runtime.errors import ProtocolError
from stage_runtime.profiler import events as profile
from stage_runtime.profiler.recording.recorder import recorder
from stage_runtime.rules.requests.lifecycle import ChunkCame, Instruction, TerminalDone
from stage_runtime.transfers.receiving import Fetched, Fetching
from stage_runtime.transfers.sending import attempt_key
from stage_runtime.wire.messages import Complete, Stream
from stage_runtime.wire.parts import Failure


class Answers:
    """Orders and delivers the output of one coordinator's requests."""

    def __init__(
        self,
        following: Following,
        fetching: Fetching,
        unread: UnreadAnswers,
        consumed_notifier: ConsumedNotifier,
        *,
        owner: str,
    ) -> None:
        """owner: this coordinator."""
        self._following = following
        self._fetching = fetching
        self._unread = unread
        self._consumed_notifier = consumed_notifier
        self._owner = owner

    def stream(self, sender: str, message: Stream) -> None:
        if not message.body.transfer:  # nearly all are
            self._chunk(sender, message, Fetched.whole(message.body))
            return
        self._fetching.fetch(
            sender,
            message.body,
            attempt_key(self._owner, message.request_id, message.attempt),
            lambda fetched: self._chunk(sender, message, fetched),
            lambda error: self._broken(message, error),
        )

    def complete(self, sender: str, message: Complete) -> None:
        if message.skipped:
            self._skipped(message)
        elif message.failure is not None:
            handle = self._current(message)
            if handle is not None:
                handle.add_timings(message.timings)
                self._following.failed(handle, message.attempt, message.failure)
        elif message.body is None:
            self._result(message, None)
        else:
            self._fetching.fetch(
                sender,
                message.body,
                attempt_key(self._owner, message.request_id, message.attempt),
                lambda fetched: self._result(message, fetched),
                lambda error: self._broken(message, error),
            )

    def _current(self, message: Stream | Complete) -> RequestHandle | None:
        """The request, if the attempt that the message belongs to is under way."""
        handle = self._following.find(message.request_id)
        if handle is None or not handle.tracked.accepts(message.attempt):
            return None
        return handle

    def _chunk(self, sender: str, message: Stream, fetched: Fetched) -> None:
        handle = self._current(message)
        inbound = handle.streams.get(message.source) if handle is not None else None
        if handle is None or inbound is None:
            fetched.discard()
            if handle is not None and message.chunk_id == 0:
                self._consumed_notifier.refuse(sender, message)
            return
        if recorder.active:
            _record(message)
        handle.begun.add(message.source)
        nbytes = nbytes_of(fetched)
        if not self._has_room(handle, message, nbytes):
            fetched.discard()
            return
        streamed = Streamed(message.source, message.chunk_id, message.modality, fetched, message.weight, nbytes)
        try:
            ready = inbound.offer(message.chunk_id, streamed)
        except ProtocolError as error:
            self._broken(message, error)
            return
        for one in ready:
            if Instruction.DELIVER in self._following.happen(handle, ChunkCame(message.source, message.attempt)):
                handle.push(one)
            else:
                handle.hold(-one.nbytes)
        self._end_if_whole(handle, message.source, message.attempt)

    def _skipped(self, message: Complete) -> None:
        """No data of the request can reach this terminal stage. If the request waits for the stage, it fails now."""
        handle = self._current(message)
        if handle is not None and message.source in handle.tracked.waiting:
            problem = f"no route leads the request to {message.source!r}, a terminal stage that it waits for: "
            problem += "leave it out by terminalStagesFn, or send it something"
            self._following.failed(handle, message.attempt, Failure("stage_failed", problem, message.source, "routeFn"))

    def _result(self, message: Complete, fetched: Fetched | None) -> None:
        handle = self._current(message)
        inbound = handle.streams.get(message.source) if handle is not None else None
        if handle is None or inbound is None:
            if fetched is not None:
                fetched.discard()
            return
        handle.add_timings(message.timings)
        try:
            inbound.end(message.chunks)
        except ProtocolError as error:
            self._broken(message, error)
            return
        nbytes = nbytes_of(fetched)
        if not self._has_room(handle, message, nbytes):
            if fetched is not None:
                fetched.discard()
            return
        handle.undelivered[message.source] = Resulted(message.source, fetched, nbytes)
        self._end_if_whole(handle, message.source, message.attempt)

    def _end_if_whole(self, handle: RequestHandle, source: str, attempt: int) -> None:
        """A terminal stage is done when its result and all its chunks have arrived, in any order."""
        if source in handle.undelivered and handle.streams[source].closed:
            resulted = handle.undelivered.pop(source)
            if Instruction.DELIVER not in self._following.happen(handle, TerminalDone(source, attempt), resulted):
                handle.hold(-resulted.nbytes)

    def _has_room(self, handle: RequestHandle, message: Stream | Complete, nbytes: int) -> bool:
        """False: the request has ended, because unread answers take too much."""
        self._unread.came(handle, message.source, nbytes)
        return handle.tracked.accepts(message.attempt)

    def _broken(self, message: Stream | Complete, error: Exception) -> None:
        handle = self._current(message)
        if handle is not None:
            failure = Failure("transport_failed", str(error), message.source, "relay")
            self._following.failed(handle, message.attempt, failure)


def _record(message: Stream) -> None:
    """A chunk has arrived, for the profiler."""
    facts = {
        "from_stage": message.source,
        "chunk_id": message.chunk_id,
        "modality": message.modality,
        "attempt": message.attempt,
    }
    recorder.record(profile.COORDINATOR_STREAM_RECEIVED, message.request_id, COORDINATOR, facts)
    recorder.record(profile.STAGE_STREAM_CHUNK_RECEIVED, message.request_id, COORDINATOR, facts)
