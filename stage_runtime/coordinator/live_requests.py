"""The requests of one coordinator in flight, each followed to its one end. Implements `following.Following`.

`rules.requests.lifecycle`'s table says what may happen to a request: `happen` feeds it and carries its instructions
out. The methods stand in the order of a request's life: it waits or is submitted, its answer comes, an instance is
lost, it ends. The work is done by `binding`, `submission`, `answering` and `ending`, which get this object. This runs
on the I/O thread.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Final

from omnipipeline_spec.types.plan import CoordinatorPlan, PipelineRevision
from stage_runtime.coordinator.admitting.submission import Submission
from stage_runtime.coordinator.answering.answers import Answers
from stage_runtime.coordinator.answering.readers import Readers
from stage_runtime.coordinator.answering.request_handles import RequestHandle, Resulted
from stage_runtime.coordinator.answering.shown_failures import shown
from stage_runtime.coordinator.answering.unread_answers import AnswerLimits, UnreadAnswers
from stage_runtime.coordinator.binding.bindings import RETRY_AFTER_S, Bindings
from stage_runtime.coordinator.binding.broken_connections import BrokenConnections
from stage_runtime.coordinator.binding.suspects import UNREACHABLE_S, Suspects
from stage_runtime.coordinator.binding.waiting import Waiting
from stage_runtime.coordinator.ending.abort_forwarding import AbortForwarding
from stage_runtime.coordinator.ending.deadlines import Deadlines
from stage_runtime.coordinator.ending.notifications import ConsumedNotifier, EndedNotifier
from stage_runtime.coordinator.membership import Membership
from stage_runtime.coordinator.plane_ends import PlaneEnds
from stage_runtime.coordinator.reporting.outcomes import RevisionOutcomes
from stage_runtime.errors import IllegalEvent
from stage_runtime.rules.requests.lifecycle import (
    NOTHING,
    AttemptBegan,
    Cancelled,
    CoordinatorStopped,
    DeadlinePassed,
    HandedBack,
    InstanceLost,
    Instruction,
    Instructions,
    StageAway,
    StageFailed,
    Stimulus,
)
from stage_runtime.transfers.receiving import Fetching
from stage_runtime.transfers.sending import SendQueues, attempt_key
from stage_runtime.wire.frames import RequestRef
from stage_runtime.wire.messages import Abort, HandBack, InputComplete
from stage_runtime.wire.parts import Failure

log = logging.getLogger(__name__)

#: Instances up to which an abort is published beside what each bound one is sent: it reaches all, bound or not.
PUBLISHED_MOST: Final = 64


class LiveRequests:
    """The requests of one coordinator from their admission to their end."""

    def __init__(
        self,
        plan: CoordinatorPlan,
        membership: Membership,
        ends: PlaneEnds,
        *,
        ended: Callable[[RequestHandle], None],
        answer_limits: AnswerLimits,
    ) -> None:
        """ended: called once with each request, when nothing more can happen to it."""
        owner, (channels, relays, loop) = membership.incarnation, ends
        send = channels.send
        self.send_queues = SendQueues(relays, send)
        self.abort_forwarding = AbortForwarding(owner, send)
        self.bindings = Bindings(membership)
        self.suspects = Suspects(loop)
        self.waiting = Waiting(self, self.bindings, membership, loop, plan, self.suspects)
        self._submission = Submission(self, self.send_queues, loop, owner=owner, backend=plan.relay_backend)
        self.broken_connections = BrokenConnections(self, self.bindings, loop)
        self.unread = UnreadAnswers(self, loop, answer_limits)
        self._fetching = Fetching(relays, loop)
        self._consumed_notifier = ConsumedNotifier(owner, send)
        self.answers = Answers(self, self._fetching, self.unread, self._consumed_notifier, owner=owner)
        self.readers = Readers(self, self.bindings, loop)
        self._deadlines = Deadlines(
            loop, passed=self._deadline_passed, wanted=lambda one, deadline: self._deadline_of(one) == deadline
        )
        self._ended_notifier = EndedNotifier(loop, send)
        self._membership = membership
        self._loop = loop
        self._relays = relays
        self._channels = channels
        self._ended = ended
        self._handles: dict[str, RequestHandle] = {}  #: Handles by id, the oldest first.
        #: Increases across all requests: a reused id gets a higher number than its tombstone.
        self._attempts = itertools.count(1)
        self.last_attempt = 0  #: Any that is begun later has a higher number.
        self.retried = 0  #: Attempts that followed a fault.
        self.outcomes = RevisionOutcomes(membership, loop)

    def __len__(self) -> int:
        return len(self._handles)

    def find(self, request_id: str) -> RequestHandle | None:
        return self._handles.get(request_id)

    def newest_first(self) -> Iterator[RequestHandle]:
        return reversed(self._handles.values())

    # --- a request comes, and is sent ---------------------------------------------------------------------------

    def begin(self, handle: RequestHandle, revision: PipelineRevision, bindings: dict[str, str] | None) -> None:
        """A request is admitted. bindings: of its first attempt; None: it waits for an instance."""
        self._handles[handle.id] = handle
        self._deadlines.add(handle.id, handle.deadline)
        if bindings is None:
            self.waiting.add(handle)
        else:
            self.submit(handle, revision, bindings)

    def submit(self, handle: RequestHandle, revision: PipelineRevision, bindings: dict[str, str]) -> None:
        self.bindings.attach(handle, revision, bindings)
        self.last_attempt = next(self._attempts)
        self.happen(handle, AttemptBegan(self.last_attempt))
        handle.begin_attempt(revision.entry, revision.edges)
        self.suspects.began(handle)
        self._submission.send(handle, revision, self._membership.neighbours.introduce(revision, bindings))

    # --- its answer comes ---------------------------------------------------------------------------------------

    def input_complete(self, message: InputComplete) -> None:
        """A stage needs nothing more of those before it."""
        handle = self._handles.get(message.request_id)
        if handle is not None and handle.tracked.accepts(message.attempt):
            handle.supplied.add(message.source)

    def consumed(self, handle: RequestHandle, stage: str, weight: int) -> None:
        """The client has taken chunks of ``stage``: their producer may send more."""
        if handle.tracked.live:
            producer = handle.bindings.get(stage, "")
            self._consumed_notifier.read(handle.id, handle.tracked.attempt, stage, producer, weight)

    def end_unread(self, handle: RequestHandle) -> None:
        reason = "its client does not read"
        if not self.cancel(handle, reason):
            handle.fail(Failure("cancelled", reason))

    def end_too_large(self, handle: RequestHandle, failure: Failure) -> None:
        if not self.happen(handle, StageFailed(handle.tracked.attempt, failure)):
            self._fail(handle, failure)

    # --- something goes wrong -----------------------------------------------------------------------------------

    def unreadable(self, sender: str, request: RequestRef, problem: str) -> None:
        """A message about a request cannot be decoded. A retry would produce the same message, so the request fails."""
        handle = self._handles.get(request.request_id)
        if handle is not None:
            stage = next((stage for stage, bound in handle.bindings.items() if bound == sender), None)
            failure = Failure("stage_failed", f"a message of {sender} could not be read: {problem}", stage, "receive")
            self.failed(handle, request.attempt, failure)

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
            self.happen(handle, HandedBack(message.attempt))

    def draining(self, incarnation: str) -> None:
        """An instance takes no new request."""
        self.bindings.spare(incarnation)

    def instance_lost(self, incarnation: str) -> None:
        """An instance is proven gone; its requests are bound elsewhere or fail."""
        self.send_queues.forget(incarnation)
        self.abort_forwarding.forget(incarnation)
        self._ended_notifier.forget(incarnation)
        self.readers.forget(incarnation)
        for handle, (stage, blame) in self.suspects.died(incarnation, self.bindings.lost(incarnation)).items():
            handle.avoid.add(incarnation)
            self.happen(handle, InstanceLost(stage, handle.tracked.attempt, blame))
        self.suspects.died_unreached(incarnation, self._handles.values())
        self.bindings.drop(incarnation)
        self.waiting.instances_changed()  # some are suspects no longer

    def failed(self, handle: RequestHandle, attempt: int, failure: Failure) -> None:
        if failure.code == "transport_failed":
            # It is unknown which end failed, so a retry avoids all bound instances where others are ready.
            handle.avoid.update(handle.bindings.values())
        if failure.unreachable is not None and handle.tracked.accepts(attempt):
            # A stage may notice a death before it is declared here: a retry is not spent on the dead instance.
            if self.suspects.not_reached(handle, failure.unreachable):
                self._loop.call_later(UNREACHABLE_S, self.happen, handle, StageFailed(attempt, failure))
                return
        if failure.away is not None and failure.away in handle.away and handle.tracked.accepts(attempt):
            handle.required.add(failure.away)
            self.happen(handle, StageAway(failure.away, attempt))
            return
        self.happen(handle, StageFailed(attempt, failure))

    def cancel(self, handle: RequestHandle, reason: str) -> bool:
        """Its client has gone away or has ended it. False: it is over already."""
        return bool(self.happen(handle, Cancelled(reason)))

    def stop_unsent(self, reason: str) -> None:
        """End the requests of which nothing was sent yet: they have begun nowhere."""
        for handle in self.waiting.unsent():
            self.happen(handle, CoordinatorStopped(reason))

    def stop_all(self, reason: str) -> None:
        """End everything that is in flight."""
        for handle in list(self._handles.values()):
            self.happen(handle, CoordinatorStopped(reason))

    def close(self) -> None:
        self._fetching.close()
        self._deadlines.close()
        self.readers.close()
        self.waiting.close()

    # --- the table ----------------------------------------------------------------------------------------------

    def happen(self, handle: RequestHandle, event: Stimulus, delivered: Resulted | None = None) -> Instructions:
        try:
            instructions = handle.tracked.handle(event)
        except IllegalEvent as error:  # a fault of ours: what waits for the request ends at its deadline
            log.exception("request %s; its history: %s", error, "; ".join(error.history) or "none")
            return NOTHING
        # One that is handed back, or needs another stage, had no fault.
        if Instruction.REBIND in instructions and not isinstance(event, HandedBack | StageAway):
            self.retried += 1
            self.outcomes.attempt_failed(handle)
        for instruction in instructions:
            match instruction:
                case Instruction.DELIVER:
                    if delivered is not None:
                        handle.push(delivered)
                case Instruction.ABORT:
                    self._abort_attempt(handle)
                case Instruction.REBIND:
                    self.waiting.rebind(handle)
                case Instruction.FINISH:
                    self._unbind_complete(handle)
                    self._forget(handle)
                    handle.finish()
                case Instruction.FAIL:
                    failure = handle.tracked.failure
                    assert failure is not None
                    self._forget(handle)
                    self._fail(handle, failure)
        return instructions

    # --- its end ------------------------------------------------------------------------------------------------

    def _deadline_of(self, request_id: str) -> float | None:
        handle = self._handles.get(request_id)
        return handle.deadline if handle is not None else None

    def _deadline_passed(self, request_id: str, deadline: float) -> None:
        handle = self._handles.get(request_id)
        if handle is not None and handle.deadline == deadline:
            self.happen(handle, DeadlinePassed())

    def _abort_attempt(self, handle: RequestHandle) -> None:
        """Send the abort to all instances that the attempt may have reached, then unbind it."""
        owner = self._membership.incarnation
        abort = Abort(handle.id, handle.tracked.attempt, owner, handle.tracked.public_state)
        for incarnation in set(handle.bindings.values()):
            self._channels.send(incarnation, abort)
        if len(self._membership.state.instances) <= PUBLISHED_MOST:
            self._channels.publish(abort)
        self.bindings.release(handle)
        handle.give_up_attempt()
        handle.sending.aborted = True
        self.send_queues.abort(owner, handle.id, handle.tracked.attempt)
        self._relays.cleanup(attempt_key(owner, handle.id, handle.tracked.attempt))

    def _unbind_complete(self, handle: RequestHandle) -> None:
        """The request is complete: unbind it, and notify the instances that may still hold data of it."""
        self.bindings.release(handle)
        if self._membership.leaves_rest(handle.revision):
            self._ended_notifier.add(set(handle.bindings.values()), handle.id, handle.tracked.attempt)

    def _forget(self, handle: RequestHandle) -> None:
        if self._handles.pop(handle.id, None) is None:
            return
        self.waiting.forget(handle)
        if self.suspects.forget(handle):
            self._loop.call_soon(self.waiting.instances_changed)  # another one's turn
        handle.sending.aborted = True
        self._consumed_notifier.forget(handle.id, handle.streams)
        self._ended(handle)

    def _fail(self, handle: RequestHandle, failure: Failure) -> None:
        retry_after_s = RETRY_AFTER_S if failure.code in ("unavailable", "rate_limited") else None
        handle.fail(shown(handle, failure, self._membership), retry_after_s=retry_after_s)
