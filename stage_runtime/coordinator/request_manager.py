"""The request manager: admits requests and follows them to their one end. Implements `events.RequestManagerApi`.

What may happen to a request is `rules.requests`' table: `_happen` feeds it and carries its instructions out. Beside it:
`bindings`, `submission`, `answers`, `admission`, `deadlines`. Everything runs on the coordinator's I/O thread; no HTTP.
One room, because every instruction of that table is carried out here, and `RequestManagerApi` is one interface.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

from omnipipeline_spec.types.plan import CoordinatorPlan, PipelineRevision
from stage_runtime.coordinator.admitting.admission import Admission
from stage_runtime.coordinator.admitting.service_health import ServiceHealth
from stage_runtime.coordinator.admitting.submission import Submission
from stage_runtime.coordinator.admitting.terminal_stages import TerminalStagesCaller, TerminalStagesResult, Watch
from stage_runtime.coordinator.answering.answers import Answers
from stage_runtime.coordinator.answering.readers import Readers
from stage_runtime.coordinator.answering.request_handles import RequestHandle, Resulted
from stage_runtime.coordinator.answering.shown_failures import shown
from stage_runtime.coordinator.answering.unread_answers import DEFAULT_LIMITS, AnswerLimits, UnreadAnswers
from stage_runtime.coordinator.binding.bindings import RETRY_AFTER_S, Bindings
from stage_runtime.coordinator.binding.broken_connections import BrokenConnections
from stage_runtime.coordinator.binding.suspects import UNREACHABLE_S, Suspects
from stage_runtime.coordinator.binding.waiting import Waiting
from stage_runtime.coordinator.ending.abort_forwarding import AbortForwarding
from stage_runtime.coordinator.ending.deadlines import Deadlines
from stage_runtime.coordinator.ending.notifications import ConsumedNotifier, EndedNotifier
from stage_runtime.coordinator.events import RequestRecord, StageNeed
from stage_runtime.coordinator.membership import Membership
from stage_runtime.coordinator.reporting import recorded
from stage_runtime.coordinator.reporting.demand import GroupDemand
from stage_runtime.coordinator.reporting.reports import Reports
from stage_runtime.coordinator.reporting.stats import RequestStats
from stage_runtime.coordinator.reporting.tracing import RequestTracer
from stage_runtime.errors import IllegalEvent, RequestError
from stage_runtime.metrics import planes
from stage_runtime.metrics.samples import Samples
from stage_runtime.profiler.recorder import recorder
from stage_runtime.relays.dispatch import Relays
from stage_runtime.rules.requests import (
    NOTHING,
    AttemptBegan,
    Cancelled,
    CoordinatorStopped,
    DeadlinePassed,
    HandedBack,
    InstanceLost,
    Instruction,
    Instructions,
    NoInstanceCame,
    StageAway,
    StageFailed,
    Stimulus,
    Tracked,
)
from stage_runtime.transfers.receiving import Fetching
from stage_runtime.transfers.sending import SendQueues, attempt_key
from stage_runtime.wire.frames import RequestRef
from stage_runtime.wire.messages import Abort, HandBack, InputComplete, Message
from stage_runtime.wire.parts import Failure
from stage_runtime.wire.values import OmniRequest

log = logging.getLogger(__name__)

#: Instances up to which an abort is published beside what each bound one is sent: it reaches all, bound or not.
PUBLISHED_MOST: Final = 64


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
        clocks_us: Mapping[str, int] = {},
        tracing: RequestTracer | None = None,
        answer_limits: AnswerLimits = DEFAULT_LIMITS,
    ) -> None:
        """clocks_us: instance -> what to add to its times. tracing: None: requests are not traced."""
        self.stats = RequestStats()
        self.send_queues = SendQueues(relays, send)
        self.abort_forwarding = AbortForwarding(membership.incarnation, send)
        self._plan = plan
        self._membership = membership
        self._loop = loop
        self._relays = relays
        self._fetching = Fetching(relays, loop)
        self._bindings = Bindings(membership)
        self.suspects = Suspects(loop)
        self._health = ServiceHealth(membership, loop, chosen=terminal_stages is not None)
        self._waiting = Waiting(
            self._bindings, membership, loop, plan, self.suspects, submit=self._submit, gave_up=self._gave_up
        )
        self._submission = Submission(
            self.send_queues, loop, owner=membership.incarnation, backend=plan.relay_backend, failed=self._failed
        )
        self.broken_connections = BrokenConnections(self._bindings, loop, failed=self._failed)
        self._unread = UnreadAnswers(
            loop,
            answer_limits,
            end_unread=lambda handle: self._end_unread(handle, "its client does not read"),
            fail=self._end_too_large,
        )
        self._consumed_notifier = ConsumedNotifier(membership.incarnation, send)
        self.answers = Answers(
            self._fetching,
            owner=membership.incarnation,
            find=lambda request_id: self._handles.get(request_id),
            happen=self._happen,
            failed=self._failed,
            unread=self._unread,
            unwanted=self._consumed_notifier.refuse,
        )
        self._send = send
        self._publish = publish
        self._admission = Admission(plan, terminal_stages)
        self._terminal_stages_caller = TerminalStagesCaller(terminal_stages) if terminal_stages is not None else None
        self._deadlines = Deadlines(
            loop, passed=self._deadline_passed, wanted=lambda one, deadline: self._deadline_of(one) == deadline
        )
        self._ended_notifier = EndedNotifier(loop, send)
        self.readers = Readers(loop, bound_to=self._bindings.on, end=self._end_unread)
        self._handles: dict[str, RequestHandle] = {}  #: In flight, by id.
        #: Increases across all requests: a reused id gets a higher number than its tombstone.
        self._attempts = itertools.count(1)
        self.last_attempt = 0  #: Any that is begun later has a higher number.
        self._draining = False
        self._refusing: str | None = None  #: Why nothing is admitted any more.
        self._clocks_us = clocks_us
        self._tracing = tracing
        self._demand = GroupDemand(membership, loop)
        self._reports = Reports(plan, membership, relays, self.send_queues, tracing)
        self._started_at = time.monotonic()

    # --- events.RequestManagerApi -------------------------------------------------------------------------------------

    async def call_terminal_stages(
        self, request: OmniRequest, *, timeout_s: float | None = None, watch: Watch | None = None
    ) -> TerminalStagesResult | None:
        if self._terminal_stages_caller is None:
            return None
        self.check_room()
        return await self._terminal_stages_caller.call(request, self._admission.timeout_s(timeout_s), watch)

    def admit(
        self,
        request: OmniRequest,
        *,
        timeout_s: float | None = None,
        trace: str | None = None,
        trace_state: str | None = None,
        hook_result: TerminalStagesResult | None = None,
        prefer: AbstractSet[str] = frozenset(),
    ) -> RequestHandle:
        self.check_room()
        if request.id in self._handles:
            raise RequestError("duplicate_request", f"request {request.id} is in flight", request_id=request.id)
        wanted = self._admission.wanted_terminals(request, self._membership.state.revisions, hook_result)
        left_s = self._admission.timeout_s(timeout_s) - (hook_result.took_s if hook_result is not None else 0.0)
        self._demand.arrived(wanted)
        revision, bindings = self._waiting.choose(request.id, wanted, prefer)
        try:
            admitted = self._admission.admit(request, revision, wanted, left_s)
            if bindings is None:
                self._waiting.check(request.id, wanted, admitted.extracted.held_nbytes)
        except BaseException:
            self._bindings.give_back(bindings or {})
            raise
        whole = not request.stream  # the client gets nothing before the end
        context = self._tracing.begin(trace, trace_state) if self._tracing is not None else None
        tracked = Tracked(request.id, admitted.terminals, retries=admitted.retries, whole=whole)
        handle = RequestHandle(
            request,
            tracked,
            admitted.extracted,
            cancel=self._cancel,
            consumed=self._consumed,
            unread_bytes=self._unread.bytes,
            owner=self._membership.incarnation,
            traceparent=trace if context is None else context.header,
            trace_context=context,
            deadline=self._loop.time() + admitted.timeout_s,
            whole=whole,
            clocks_us=self._clocks_us,
        )
        self._handles[request.id] = handle
        self._deadlines.add(handle.id, handle.deadline)
        if recorder.active:
            recorder.note(recorded.ADMISSION[request.kind], request.id, 0)
        if bindings is None:
            self._waiting.add(handle)
        else:
            self._submit(handle, revision, bindings)
        return handle

    def check_room(self) -> None:
        if self._refusing is not None:
            raise _refusal(self._refusing)
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

    def latest(self, most: int) -> list[RequestRecord]:
        running = itertools.islice(reversed(self._handles.values()), most)
        return [*(handle.record() for handle in running), *self.stats.latest(most)]

    def status(self) -> Mapping[str, Any]:
        waiting, problem = len(self._waiting), self._health.problem()
        status = self._reports.status(in_flight=len(self._handles), awaiting_instance=waiting, problem=problem)
        demand = self._demand.status(self._waiting.by_group())
        return {**status, "groups": demand, "draining": self._draining}

    def needs(self) -> Sequence[StageNeed]:
        return self._health.needs()

    def ready(self) -> bool:
        return not self._draining and self._membership.ready()

    def problem(self) -> str | None:
        return self._health.problem()

    def metrics(self) -> Samples:
        own = self._reports.samples(in_flight=len(self._handles), kept_nbytes=self._admission.kept_nbytes)
        demand = self._demand.samples(self._waiting.by_group())
        return {**self.stats.samples(), **own, **self._waiting.samples(), **demand}

    def member_gauges(self) -> Mapping[str, planes.Gauges]:
        return self._membership.gauges()

    @property
    def in_flight(self) -> int:
        return len(self._handles)

    def drain(self) -> None:
        """Be ready no longer, so that balancers send no new client. Requests that come all the same are admitted."""
        self._draining = True

    def refuse(self, reason: str) -> None:
        """Admit nothing more. Requests of which nothing was sent yet are refused, too: they have begun nowhere."""
        self._refusing = reason
        self._membership.stopping = True
        if self._terminal_stages_caller is not None:
            self._terminal_stages_caller.give_up(lambda: _refusal(reason))
        for handle in self._waiting.unsent():
            self._happen(handle, CoordinatorStopped(reason))

    def fail_all(self, reason: str) -> None:
        """End everything that is in flight."""
        for handle in list(self._handles.values()):
            self._happen(handle, CoordinatorStopped(reason))

    def close(self) -> None:
        self._fetching.close()
        self._deadlines.close()
        self.readers.close()
        self._waiting.close()

    # --- events from processes ------------------------------------------------------------------------------------

    def unreadable(self, sender: str, request: RequestRef, problem: str) -> None:
        """A message about a request cannot be decoded. A retry would produce the same message, so the request fails."""
        handle = self._handles.get(request.request_id)
        if handle is not None:
            stage = next((stage for stage, bound in handle.bindings.items() if bound == sender), None)
            failure = Failure("stage_failed", f"a message of {sender} could not be read: {problem}", stage, "receive")
            self._failed(handle, request.attempt, failure)

    def hand_back(self, sender: str, message: HandBack) -> None:
        """A draining instance returns a request that it has not begun.

        If no other instance is ready, it keeps the request.
        """
        handle = self._handles.get(message.request_id)
        if handle is None:
            return
        self._membership.state.mark(sender, draining=True)
        if self._membership.state.complete(terminals=handle.tracked.terminals):
            handle.avoid.add(sender)
            self._happen(handle, HandedBack(message.attempt))

    def input_complete(self, message: InputComplete) -> None:
        """A stage needs nothing more of those before it."""
        handle = self._handles.get(message.request_id)
        if handle is not None and handle.tracked.accepts(message.attempt):
            handle.supplied.add(message.source)

    def draining(self, incarnation: str) -> None:
        """An instance takes no new request."""
        self._bindings.spare(incarnation)

    def instance_lost(self, incarnation: str) -> None:
        """An instance is proven gone; its requests are bound elsewhere or fail."""
        self.send_queues.forget(incarnation)
        self.abort_forwarding.forget(incarnation)
        self._ended_notifier.forget(incarnation)
        self.readers.forget(incarnation)
        for handle, (stage, blame) in self.suspects.died(incarnation, self._bindings.lost(incarnation)).items():
            handle.avoid.add(incarnation)
            self._happen(handle, InstanceLost(stage, handle.tracked.attempt, blame))
        self.suspects.died_unreached(incarnation, self._handles.values())
        self._bindings.drop(incarnation)
        self._waiting.instances_changed()  # some are suspects no longer

    def instances_changed(self) -> None:
        """An instance is ready: bind the requests that wait for one."""
        self._waiting.instances_changed()

    def bound_to(self, incarnation: str) -> int:
        """How many requests are bound to an instance."""
        return self._bindings.count(incarnation)

    # --- following ----------------------------------------------------------------------------------------------

    def _submit(self, handle: RequestHandle, revision: PipelineRevision, bindings: dict[str, str]) -> None:
        self._bindings.attach(handle, revision, bindings)
        self.last_attempt = next(self._attempts)
        self._happen(handle, AttemptBegan(self.last_attempt))
        handle.begin_attempt(revision.entry, revision.edges)
        self.suspects.began(handle)
        self._submission.send(handle, revision, self._membership.introduce(revision, bindings))

    def _gave_up(self, handle: RequestHandle, reason: str, group: str) -> None:
        self._happen(handle, NoInstanceCame(reason, group))

    def _failed(self, handle: RequestHandle, attempt: int, failure: Failure) -> None:
        if failure.code == "transport_failed":
            # It is unknown which end failed, so a retry avoids all bound instances where others are ready.
            handle.avoid.update(handle.bindings.values())
        if failure.unreachable is not None and handle.tracked.accepts(attempt):
            # A stage may notice a death before it is declared here: a retry is not spent on the dead instance.
            if self.suspects.not_reached(handle, failure.unreachable):
                self._loop.call_later(UNREACHABLE_S, self._happen, handle, StageFailed(attempt, failure))
                return
        if failure.away is not None and failure.away in handle.away and handle.tracked.accepts(attempt):
            handle.required.add(failure.away)
            self._happen(handle, StageAway(failure.away, attempt))
            return
        self._happen(handle, StageFailed(attempt, failure))

    def _happen(self, handle: RequestHandle, event: Stimulus, delivered: Resulted | None = None) -> Instructions:
        try:
            instructions = handle.tracked.handle(event)
        except IllegalEvent as error:  # a fault of ours: what waits for the request ends at its deadline
            log.exception("request %s; its history: %s", error, "; ".join(error.history) or "none")
            return NOTHING
        if Instruction.REBIND in instructions and not isinstance(event, HandedBack | StageAway):
            self.stats.retried += (
                1  # a retry follows a fault; one that is handed back, or needs another stage, had none
            )
        self._carry_out(handle, instructions, delivered)
        return instructions

    def _carry_out(self, handle: RequestHandle, instructions: Instructions, delivered: Resulted | None) -> None:
        for instruction in instructions:
            match instruction:
                case Instruction.DELIVER:
                    if delivered is not None:
                        handle.push(delivered)
                case Instruction.ABORT:
                    self._abort_attempt(handle)
                case Instruction.REBIND:
                    self._waiting.rebind(handle)
                case Instruction.FINISH:
                    self._note_ended(handle)
                    self._forget(handle)
                    handle.finish()
                case Instruction.FAIL:
                    failure = handle.tracked.failure
                    assert failure is not None
                    self._forget(handle)
                    self._fail(handle, failure)

    def _deadline_of(self, request_id: str) -> float | None:
        handle = self._handles.get(request_id)
        return handle.deadline if handle is not None else None

    def _deadline_passed(self, request_id: str, deadline: float) -> None:
        handle = self._handles.get(request_id)
        if handle is not None and handle.deadline == deadline:
            self._happen(handle, DeadlinePassed())

    def _cancel(self, handle: RequestHandle, reason: str) -> bool:
        return bool(self._happen(handle, Cancelled(reason)))

    def _end_unread(self, handle: RequestHandle, reason: str) -> None:
        """Its client does not read. If the request is complete, only its unread events are dropped."""
        if not self._cancel(handle, reason):
            handle.fail(Failure("cancelled", reason))

    def _end_too_large(self, handle: RequestHandle, failure: Failure) -> None:
        """Its answer takes too much memory. If the request is complete, only its unread events are dropped."""
        if not self._happen(handle, StageFailed(handle.tracked.attempt, failure)):
            self._fail(handle, failure)

    def _fail(self, handle: RequestHandle, failure: Failure) -> None:
        retry_after_s = RETRY_AFTER_S if failure.code in ("unavailable", "rate_limited") else None
        handle.fail(shown(handle, failure, self._membership), retry_after_s=retry_after_s)

    def _consumed(self, handle: RequestHandle, stage: str, weight: int) -> None:
        if handle.tracked.live:
            self._consumed_notifier.read(
                handle.id, handle.tracked.attempt, stage, handle.bindings.get(stage, ""), weight
            )

    # --- ending -------------------------------------------------------------------------------------------------

    def _abort_attempt(self, handle: RequestHandle) -> None:
        """Send the abort to all instances that the attempt may have reached, then unbind it."""
        abort = Abort(handle.id, handle.tracked.attempt, self._membership.incarnation, handle.tracked.public_state)
        for incarnation in set(handle.bindings.values()):
            self._send(incarnation, abort)
        if len(self._membership.state.instances) <= PUBLISHED_MOST:
            self._publish(abort)
        self._bindings.release(handle)
        handle.give_up_attempt()
        handle.sending.aborted = True
        self.send_queues.abort(self._membership.incarnation, handle.id, handle.tracked.attempt)
        self._relays.cleanup(attempt_key(self._membership.incarnation, handle.id, handle.tracked.attempt))

    def _forget(self, handle: RequestHandle) -> None:
        if self._handles.pop(handle.id, None) is None:
            return
        self._waiting.forget(handle)
        if self.suspects.forget(handle):
            self._loop.call_soon(self._waiting.instances_changed)  # another one's turn
        if handle.extracted is not None:
            self._admission.ended(handle.extracted)
            handle.extracted = None
        handle.sending.aborted = True
        self._consumed_notifier.forget(handle.id, handle.streams)
        handle.ended_at = time.monotonic()
        if recorder.active:
            recorder.note(recorded.RESPONSE[handle.tracked.public_state], handle.id, 0)
        if self._tracing is not None and handle.trace_context is not None:
            self._tracing.ended(handle.trace_context, handle.record)
        self.stats.timed(handle.timings.values())
        failure = handle.tracked.failure
        if failure is None:
            self._demand.served(handle.bindings, handle.timings.values())
        self.stats.ended(handle.id, handle.kind, failure.code if failure is not None else "completed", handle.record)

    def _note_ended(self, handle: RequestHandle) -> None:
        """The request is complete: unbind it, and notify the instances that may still hold data of it."""
        self._bindings.release(handle)
        if self._membership.leaves_rest(handle.revision):
            self._ended_notifier.add(set(handle.bindings.values()), handle.id, handle.tracked.attempt)


def _refusal(reason: str) -> RequestError:
    return RequestError("unavailable", reason, retry_after_s=RETRY_AFTER_S)
