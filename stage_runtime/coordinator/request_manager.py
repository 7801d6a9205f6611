"""The request manager: admits requests, binds them, follows them to their one end. Implements
`events.RequestManagerApi`; knows no HTTP.

What may happen to a request and what follows is `rules.requests`' table; who may be bound is `rules.membership`'.
Here both are fed and carried out. Everything runs on the coordinator's I/O thread.

Over 450 lines and one room: whatever happens ends in one table of request handles, and each of these short methods
changes it. What could be taken out is beside it: `admission`, `deadlines`, `abort_forwarding`, `stats`, `telling`,
`handles`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from omnipipeline_spec.types.plan import CoordinatorPlan, PipelineRevision
from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.coordinator.abort_forwarding import AbortForwarding
from stage_runtime.coordinator.admission import Admission
from stage_runtime.coordinator.deadlines import Deadlines
from stage_runtime.coordinator.events import RequestRecord
from stage_runtime.coordinator.membership import Membership
from stage_runtime.coordinator.notifications import ConsumedNotifier, EndedNotifier
from stage_runtime.coordinator.readers import Readers
from stage_runtime.coordinator.request_handles import RequestHandle, Resulted, Streamed
from stage_runtime.coordinator.stats import RequestStats
from stage_runtime.coordinator.terminal_stages import TerminalStagesCaller, TerminalStagesResult
from stage_runtime.errors import IllegalEvent, ProtocolError, RequestError, TransferError, ValueRefused, describe
from stage_runtime.relays.fetching import Fetched, Fetching
from stage_runtime.relays.registry import Relays
from stage_runtime.relays.send_queues import PendingSend, SendQueues, attempt_key
from stage_runtime.rules.membership import Unbindable
from stage_runtime.rules.requests import (
    NOTHING,
    AttemptBegan,
    Cancelled,
    ChunkCame,
    CoordinatorStopped,
    DeadlinePassed,
    Event,
    HandedBack,
    InstanceLost,
    Instruction,
    NoInstanceCame,
    StageFailed,
    TerminalDone,
    Tracked,
)
from stage_runtime.wire.messages import (
    Abort,
    Body,
    Complete,
    Failure,
    HandBack,
    Header,
    Message,
    RequestRef,
    Stream,
    Submit,
)
from stage_runtime.wire.values import OmniRequest

log = logging.getLogger(__name__)

RECONNECT_S: Final = 1.0  # two that cannot reach each other are given so long: is one of them dead, or back?
NEW_INSTANCE_WAIT_S: Final = 5.0  # a retry without another instance waits so long for a new incarnation
RETRY_AFTER_S: Final = 1.0
BODY_CREDITS: Final = 8  # bodies under way to one entry instance


class RequestManager:
    """All requests of one coordinator."""

    def __init__(
        self,
        plan: CoordinatorPlan,
        membership: Membership,
        *,
        loop: asyncio.AbstractEventLoop,
        relays: Relays,
        send: Callable[[str, Message], bool],
        publish: Callable[[Message], None],
        terminal_stages: Callable[[OmniRequest], Any] | None = None,
    ) -> None:
        self.stats = RequestStats()
        self.send_queues = SendQueues(relays, send)
        self.abort_forwarding = AbortForwarding(membership.incarnation, send)
        self._plan = plan
        self._membership = membership
        self._loop = loop
        self._relays = relays
        self._fetching = Fetching(relays, loop)
        self._send = send
        self._publish = publish
        self._admission = Admission(plan, terminal_stages)
        self._terminal_stages_caller = TerminalStagesCaller(terminal_stages) if terminal_stages is not None else None
        self._deadlines = Deadlines(
            loop, passed=self._deadline_passed, wanted=lambda one, deadline: self._deadline_of(one) == deadline
        )
        self._ended_notifier = EndedNotifier(loop, send)
        self._consumed_notifier = ConsumedNotifier(membership.incarnation, send)
        self.readers = Readers(loop, bound_to=self._bound_here, end=self._end_unread)
        self._handles: dict[str, RequestHandle] = {}
        self._by_instance: dict[str, set[str]] = {}  #: incarnation -> ids of requests bound to it
        self._awaiting_instance: dict[str, asyncio.TimerHandle] = {}  #: Requests to bind again when somebody comes.
        self._attempts = itertools.count(1)  #: Across all requests: ids come again, and stages remember the dead.
        self._refusing: str | None = None  #: Why nothing is admitted any more.
        self._started_at = time.monotonic()

    # --- events.RequestManagerApi -------------------------------------------------------------------------------------

    async def call_terminal_stages(
        self, request: OmniRequest, *, timeout_s: float | None = None
    ) -> TerminalStagesResult | None:
        if self._terminal_stages_caller is None:
            return None
        self.check_room()
        return await self._terminal_stages_caller.call(request, self._admission.timeout_s(timeout_s))

    def admit(
        self,
        request: OmniRequest,
        *,
        timeout_s: float | None = None,
        trace: str | None = None,
        hook_result: TerminalStagesResult | None = None,
    ) -> RequestHandle:
        self.check_room()
        if request.id in self._handles:
            raise RequestError("duplicate_request", f"request {request.id} is in flight", request_id=request.id)
        state = self._membership.state
        wanted = self._admission.wanted_terminals(request, state.revisions, hook_result)
        left_s = self._admission.timeout_s(timeout_s) - (hook_result.took_s if hook_result is not None else 0.0)
        revision, bindings = self._bind(request.id, set(), wanted)
        try:
            admitted = self._admission.admit(request, revision, wanted, left_s)
        except BaseException:
            state.unbind(bindings)
            raise
        whole = not request.stream  # the client hears nothing before the end
        tracked = Tracked(request.id, admitted.terminals, retries=admitted.retries, whole=whole)
        handle = RequestHandle(
            request,
            tracked,
            admitted.extracted,
            cancel=self._cancel,
            consumed=self._consumed,
            owner=self._membership.incarnation,
            traceparent=trace,
            deadline=self._loop.time() + admitted.timeout_s,
            whole=whole,
        )
        self._handles[request.id] = handle
        self._deadlines.add(handle.id, handle.deadline)
        self._submit(handle, revision, bindings)
        return handle

    def check_room(self) -> None:
        if self._refusing is not None:
            raise RequestError("unavailable", self._refusing, retry_after_s=RETRY_AFTER_S)
        most = self._plan.max_in_flight
        if len(self._handles) >= most:
            raise RequestError("rate_limited", f"{most} requests are in flight", retry_after_s=RETRY_AFTER_S)

    def abort(self, request_id: str, reason: str) -> bool:
        handle = self._handles.get(request_id)
        return handle is not None and self._cancel(handle, reason)

    async def forward_abort(self, request_id: str, reason: str) -> bool:
        return await self.abort_forwarding.abort(request_id, reason, self._membership.state.instances)

    def record(self, request_id: str) -> RequestRecord | None:
        handle = self._handles.get(request_id)
        return handle.record() if handle is not None else self.stats.record(request_id)

    def status(self) -> Mapping[str, Any]:
        return {
            "pipeline": self._plan.pipeline,
            "coordinator": self._membership.incarnation,
            "ready": self.ready(),
            "in_flight": len(self._handles),
            "awaiting_instance": len(self._awaiting_instance),
            **self._membership.status(),
        }

    def ready(self) -> bool:
        return self._membership.ready()

    def metrics(self) -> Mapping[str, Any]:
        return {
            "requests": dict(self.stats.outcomes),
            "requests_in_flight": len(self._handles),
            "requests_retried_total": self.stats.retried,
            "stages": _merged(self.stats.stages(), self._membership.loads()),
            "instances_ready": self._membership.ready_count(),
            "transfers_in_flight": self.send_queues.outstanding,
            "sends_queued": self.send_queues.queued,
            "retained_body_bytes": self._admission.kept_nbytes,
            "relay": self._relays.stats(),
            "control": self._membership.counters(),
        }

    @property
    def in_flight(self) -> int:
        return len(self._handles)

    def refuse(self, reason: str) -> None:
        """Admit nothing more."""
        self._refusing = reason

    def fail_all(self, reason: str) -> None:
        """End everything that is in flight."""
        for handle in list(self._handles.values()):
            self._happen(handle, CoordinatorStopped(reason))

    def close(self) -> None:
        self._fetching.close()
        self._deadlines.close()
        self.readers.close()
        for timer in self._awaiting_instance.values():
            timer.cancel()

    # --- what processes say -------------------------------------------------------------------------------------

    def stream(self, sender: str, message: Stream) -> None:
        self._fetching.fetch(
            sender,
            message.body,
            attempt_key(self._membership.incarnation, message.request_id, message.attempt),
            lambda fetched: self._chunk(message, fetched),
            lambda error: self._broken(message, error),
        )

    def complete(self, sender: str, message: Complete) -> None:
        if message.skipped:
            self._skipped(message)
        elif message.failure is not None:
            handle = self._current(message)
            if handle is not None:
                self._learn(handle, message)
                self._failed(handle, message.attempt, message.failure)
        elif message.body is None:
            self._result(message, None)
        else:
            self._fetching.fetch(
                sender,
                message.body,
                attempt_key(self._membership.incarnation, message.request_id, message.attempt),
                lambda fetched: self._result(message, fetched),
                lambda error: self._broken(message, error),
            )

    def unreadable(self, sender: str, request: RequestRef, problem: str) -> None:
        """What an instance said of a request cannot be read: no retry makes it readable."""
        handle = self._handles.get(request.request_id)
        if handle is not None:
            stage = next((stage for stage, bound in handle.bindings.items() if bound == sender), None)
            failure = Failure("stage_failed", f"a message of {sender} could not be read: {problem}", stage, "receive")
            self._failed(handle, request.attempt, failure)

    def hand_back(self, sender: str, message: HandBack) -> None:
        """A draining instance has not begun. Without another one it shall go on: draining takes what is bound."""
        handle = self._handles.get(message.request_id)
        if handle is None:
            return
        self._membership.state.mark(sender, draining=True)
        if self._membership.state.complete(terminals=handle.tracked.terminals):
            handle.avoid.add(sender)
            self._happen(handle, HandedBack(message.attempt))

    def instance_lost(self, incarnation: str) -> None:
        """An instance is proven gone; its requests are bound elsewhere or fail."""
        self.send_queues.forget(incarnation)
        self.abort_forwarding.forget(incarnation)
        self._ended_notifier.forget(incarnation)
        self.readers.forget(incarnation)
        for request_id in list(self._by_instance.get(incarnation, ())):
            handle = self._handles[request_id]
            handle.avoid.add(incarnation)
            stage = next(stage for stage, bound in handle.bindings.items() if bound == incarnation)
            self._happen(handle, InstanceLost(stage, handle.tracked.attempt))
        self._by_instance.pop(incarnation, None)

    def peer_unreachable(self, sender: str, peer: str) -> None:
        """Two instances have lost each other, and with it what was under way between them.

        If one of them is dead, that is known soon and `instance_lost` says more. Else their requests would wait for
        each other until their deadlines.
        """
        both = self._by_instance.get(sender, set()) & self._by_instance.get(peer, set())
        attempts = [(request_id, self._handles[request_id].tracked.attempt) for request_id in both]
        if attempts:
            self._loop.call_later(RECONNECT_S, self._give_up, attempts, peer)

    def instances_changed(self) -> None:
        """Somebody is ready: requests that wait for an instance may go."""
        for request_id in list(self._awaiting_instance):
            handle = self._handles.get(request_id)
            if handle is not None:
                self._rebind(handle)

    def bound_to(self, incarnation: str) -> int:
        """How many requests are bound to an instance."""
        return len(self._by_instance.get(incarnation, ()))

    # --- admitting ----------------------------------------------------------------------------------------------

    def _bind(
        self, request_id: str, avoid: set[str], terminals: tuple[str, ...] | None
    ) -> tuple[PipelineRevision, dict[str, str]]:
        try:
            return self._membership.state.bind(avoid=avoid, terminals=terminals)
        except Unbindable as error:
            raise RequestError(
                "unavailable",
                str(error),
                stage=error.groups[0],
                request_id=request_id,
                retry_after_s=RETRY_AFTER_S,
            ) from error

    def _submit(self, handle: RequestHandle, revision: PipelineRevision, bindings: dict[str, str]) -> None:
        handle.bindings = bindings
        handle.revision = revision.revision
        self._happen(handle, AttemptBegan(next(self._attempts)))
        handle.begin_attempt()
        for incarnation in set(bindings.values()):
            self._by_instance.setdefault(incarnation, set()).add(handle.id)
        entry = revision.entry
        attempt = handle.tracked.attempt

        def make(body: Body) -> Message:
            remaining_ms = max(0, int((handle.deadline - self._loop.time()) * 1000))
            header = Header(
                handle.id, attempt, self._membership.incarnation, bindings, remaining_ms, handle.traceparent
            )
            return Submit(header, entry, body)

        assert handle.extracted is not None

        def lost(error: BaseException) -> None:
            if isinstance(error, ValueRefused):  # what does not fit into a message is what the client sent
                failure = Failure("invalid_request", error.problem)
            else:
                log.error("request %s cannot be sent", handle.id, exc_info=error)
                failure = Failure("transport_failed", describe(error), entry, "relay")
            self._failed(handle, attempt, failure)

        pending = PendingSend(handle.sending, handle.extracted, make, self._plan.relay_backend, lost)
        try:
            if self.send_queues.ship((COORDINATOR, entry, bindings[entry]), pending, credits=BODY_CREDITS):
                return
            problem = f"no connection to the instance of {entry!r}"
        except TransferError as error:
            problem = str(error)
        except Exception as error:
            lost(error)
            return
        self._failed(handle, attempt, Failure("transport_failed", problem, entry, "relay"))

    # --- following ----------------------------------------------------------------------------------------------

    def _current(self, message: Stream | Complete) -> RequestHandle | None:
        handle = self._handles.get(message.request_id)
        if handle is None or not handle.tracked.hears(message.attempt):
            return None
        return handle

    def _chunk(self, message: Stream, fetched: Fetched) -> None:
        handle = self._current(message)
        inbound = handle.streams.get(message.source) if handle is not None else None
        if handle is None or inbound is None:
            fetched.discard()
            return
        streamed = Streamed(message.source, message.chunk_id, message.modality, fetched, message.weight)
        try:
            ready = inbound.offer(message.chunk_id, streamed)
        except ProtocolError as error:
            self._broken(message, error)
            return
        for one in ready:
            if Instruction.DELIVER in self._happen(handle, ChunkCame(message.source, message.attempt)):
                handle.push(one)
        self._end_if_whole(handle, message.source, message.attempt)

    def _skipped(self, message: Complete) -> None:
        """Nothing of the request can reach a terminal: where it is waited for, its request fails now."""
        handle = self._current(message)
        if handle is not None and message.source in handle.tracked.waiting:
            problem = f"no route leads the request to {message.source!r}, a terminal stage that it waits for: "
            problem += "leave it out by terminalStagesFn, or send it something"
            self._failed(handle, message.attempt, Failure("stage_failed", problem, message.source, "route_fn"))

    def _result(self, message: Complete, fetched: Fetched | None) -> None:
        handle = self._current(message)
        inbound = handle.streams.get(message.source) if handle is not None else None
        if handle is None or inbound is None:
            if fetched is not None:
                fetched.discard()
            return
        self._learn(handle, message)
        try:
            inbound.end(message.chunks)
        except ProtocolError as error:
            self._broken(message, error)
            return
        handle.undelivered[message.source] = (message.chunks, fetched)
        self._end_if_whole(handle, message.source, message.attempt)

    def _end_if_whole(self, handle: RequestHandle, source: str, attempt: int) -> None:
        """A terminal is through once its result and all its chunks are here, in whatever order they came."""
        if source in handle.undelivered and handle.streams[source].closed:
            _, fetched = handle.undelivered.pop(source)
            self._happen(handle, TerminalDone(source, attempt), Resulted(source, fetched))

    def _broken(self, message: Stream | Complete, error: Exception) -> None:
        handle = self._current(message)
        if handle is not None:
            failure = Failure("transport_failed", str(error), message.source, "relay")
            self._failed(handle, message.attempt, failure)

    def _failed(self, handle: RequestHandle, attempt: int, failure: Failure) -> None:
        if failure.code == "transport_failed":
            # Which end is cut off, neither knows: sent again, it goes to others where there are others.
            handle.avoid.update(handle.bindings.values())
        self._happen(handle, StageFailed(attempt, failure))

    def _give_up(self, attempts: list[tuple[str, int]], peer: str) -> None:
        """Whatever of ``attempts`` has not ended since is stuck between ``peer`` and another."""
        for request_id, attempt in attempts:
            handle = self._handles.get(request_id)
            if handle is not None and handle.tracked.attempt == attempt and peer in handle.bindings.values():
                stage = next(stage for stage, bound in handle.bindings.items() if bound == peer)
                self._failed(handle, attempt, Failure("transport_failed", "the connection to it broke", stage))

    def _learn(self, handle: RequestHandle, message: Complete) -> None:
        for timing in message.timings:
            handle.timings[timing.stage] = timing

    def _happen(
        self, handle: RequestHandle, event: Event, delivered: Resulted | None = None
    ) -> tuple[Instruction, ...]:
        try:
            instructions = handle.tracked.handle(event)
        except IllegalEvent as error:  # a fault of ours: what waits for the request ends at its deadline
            log.exception("request %s; its history: %s", error, "; ".join(error.history) or "none")
            return NOTHING
        if Instruction.REBIND in instructions and not isinstance(event, HandedBack):
            self.stats.retried += 1  # what had not begun loses nothing by going elsewhere: that is no retry
        self._carry_out(handle, instructions, delivered)
        return instructions

    def _carry_out(
        self, handle: RequestHandle, instructions: tuple[Instruction, ...], delivered: Resulted | None
    ) -> None:
        for instruction in instructions:
            match instruction:
                case Instruction.DELIVER:
                    if delivered is not None:
                        handle.push(delivered)
                case Instruction.ABORT:
                    self._abort_attempt(handle)
                case Instruction.REBIND:
                    if not self._rebind(handle):
                        self._await_instance(handle)
                case Instruction.FINISH:
                    self._note_ended(handle)
                    self._forget(handle)
                    handle.finish()
                case Instruction.FAIL:
                    failure = handle.tracked.failure
                    assert failure is not None
                    self._forget(handle)
                    retry_after_s = RETRY_AFTER_S if failure.code in ("unavailable", "rate_limited") else None
                    handle.fail(failure, retry_after_s=retry_after_s)

    def _deadline_of(self, request_id: str) -> float | None:
        handle = self._handles.get(request_id)
        return handle.deadline if handle is not None else None

    def _deadline_passed(self, request_id: str, deadline: float) -> None:
        handle = self._handles.get(request_id)
        if handle is not None and handle.deadline == deadline:
            self._happen(handle, DeadlinePassed())

    def _cancel(self, handle: RequestHandle, reason: str) -> bool:
        return bool(self._happen(handle, Cancelled(reason)))

    def _bound_here(self, incarnation: str) -> list[RequestHandle]:
        return [self._handles[request_id] for request_id in self._by_instance.get(incarnation, ())]

    def _end_unread(self, handle: RequestHandle, reason: str) -> None:
        """Its client does not read. Of one that is complete already, only what waits to be read is dropped."""
        if not self._cancel(handle, reason):
            handle.fail(Failure("cancelled", reason))

    def _consumed(self, handle: RequestHandle, stage: str, weight: int) -> None:
        if handle.tracked.live:
            self._consumed_notifier.read(
                handle.id, handle.tracked.attempt, stage, handle.bindings.get(stage, ""), weight
            )

    # --- ending -------------------------------------------------------------------------------------------------

    def _abort_attempt(self, handle: RequestHandle) -> None:
        """Tell everybody that this attempt could have reached; then its instances carry one less."""
        abort = Abort(handle.id, handle.tracked.attempt, self._membership.incarnation, handle.tracked.public_state)
        for incarnation in set(handle.bindings.values()):
            self._send(incarnation, abort)
        self._publish(abort)
        self._unbind(handle)
        handle.sending.aborted = True
        self.send_queues.drop_cancelled()
        self._relays.cleanup(attempt_key(self._membership.incarnation, handle.id, handle.tracked.attempt))

    def _unbind(self, handle: RequestHandle) -> None:
        self._membership.state.unbind(handle.bindings)
        for incarnation in set(handle.bindings.values()):
            bound = self._by_instance.get(incarnation)
            if bound is not None:
                bound.discard(handle.id)
                if not bound:
                    del self._by_instance[incarnation]
                    self._membership.unbound(incarnation)

    def _rebind(self, handle: RequestHandle) -> bool:
        try:
            revision, bindings = self._bind(handle.id, handle.avoid, handle.tracked.terminals)
        except RequestError:
            return False
        waiting = self._awaiting_instance.pop(handle.id, None)
        if waiting is not None:
            waiting.cancel()
        log.info("request %s is sent again, attempt %d", handle.id, handle.tracked.attempt)
        self._submit(handle, revision, bindings)
        return True

    def _await_instance(self, handle: RequestHandle) -> None:
        handle.bindings = {}

        def give_up() -> None:
            self._awaiting_instance.pop(handle.id, None)
            lacking = ", ".join(self._membership.state.lacking(terminals=handle.tracked.terminals))
            self._happen(handle, NoInstanceCame(f"no instance of {lacking} came within {NEW_INSTANCE_WAIT_S:.0f} s"))

        self._awaiting_instance[handle.id] = self._loop.call_later(NEW_INSTANCE_WAIT_S, give_up)

    def _forget(self, handle: RequestHandle) -> None:
        if self._handles.pop(handle.id, None) is None:
            return
        awaiting = self._awaiting_instance.pop(handle.id, None)
        if awaiting is not None:
            awaiting.cancel()
        if handle.extracted is not None:
            self._admission.ended(handle.extracted)
            handle.extracted = None
        handle.sending.aborted = True
        self._consumed_notifier.forget(handle.id, handle.streams)
        handle.ended_at = time.monotonic()
        self.stats.timed(handle.timings.values())
        failure = handle.tracked.failure
        self.stats.ended(handle.id, handle.kind, failure.code if failure is not None else "completed", handle.record)

    def _note_ended(self, handle: RequestHandle) -> None:
        """It is complete, so its instances carry one less; those that may still hold something of it are told."""
        self._unbind(handle)
        if self._membership.leaves_rest(handle.revision):
            self._ended_notifier.add(set(handle.bindings.values()), handle.id, handle.tracked.attempt)


def _merged(*parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, row in part.items():
            merged.setdefault(name, {}).update(row)
    return merged
