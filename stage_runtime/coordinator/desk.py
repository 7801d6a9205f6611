"""The desk: admits requests, binds them, follows them to their one end. Implements `events.Desk`; knows no HTTP.

What may happen to a request and what follows is `rules.requests`' table; who may be bound is `rules.members`'.
Here both are fed and carried out. Everything runs on the coordinator's I/O thread.

Over 450 lines and one room: whatever happens ends in one table of tickets, and each of these short methods changes it.
What could be taken out is beside it: `admission`, `deadlines`, `elsewhere`, `tallies`, `telling`, `tickets`.
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
from stage_runtime.coordinator.admission import Admission
from stage_runtime.coordinator.asking import Asked, Asking
from stage_runtime.coordinator.deadlines import Deadlines
from stage_runtime.coordinator.elsewhere import Elsewhere
from stage_runtime.coordinator.events import RequestRecord
from stage_runtime.coordinator.readers import Readers
from stage_runtime.coordinator.roster import Roster
from stage_runtime.coordinator.tallies import Tallies
from stage_runtime.coordinator.telling import Endings, Readings
from stage_runtime.coordinator.tickets import Resulted, Streamed, Ticket
from stage_runtime.errors import ProtocolError, RequestError, TransferError, ValueRefused, told
from stage_runtime.relays.choosing import Relays
from stage_runtime.relays.fetching import Fetched, Fetching
from stage_runtime.relays.lanes import Lanes, Parcel, attempt_key
from stage_runtime.rules.members import Unbindable
from stage_runtime.rules.requests import (
    Cancelled,
    ChunkCame,
    DeadlinePassed,
    Event,
    HandedBack,
    InstanceLost,
    Instruction,
    StageFailed,
    State,
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


class RequestDesk:
    """All requests of one coordinator."""

    def __init__(
        self,
        plan: CoordinatorPlan,
        roster: Roster,
        *,
        loop: asyncio.AbstractEventLoop,
        relays: Relays,
        say: Callable[[str, Message], bool],
        publish: Callable[[Message], None],
        terminal_stages: Callable[[OmniRequest], Any] | None = None,
    ) -> None:
        self.tallies = Tallies()
        self.lanes = Lanes(relays, say)
        self.elsewhere = Elsewhere(roster.incarnation, say)
        self._plan = plan
        self._roster = roster
        self._loop = loop
        self._relays = relays
        self._fetching = Fetching(relays, loop)
        self._say = say
        self._publish = publish
        self._admission = Admission(plan, terminal_stages)
        self._asking = Asking(terminal_stages) if terminal_stages is not None else None
        self._deadlines = Deadlines(
            loop, passed=self._deadline_passed, wanted=lambda one, deadline: self._deadline_of(one) == deadline
        )
        self._endings = Endings(loop, say)
        self._readings = Readings(roster.incarnation, say)
        self.readers = Readers(loop, bound_to=self._bound_here, end=self._end_unread)
        self._tickets: dict[str, Ticket] = {}
        self._by_instance: dict[str, set[str]] = {}  #: incarnation -> ids of requests bound to it
        self._stranded: dict[str, asyncio.TimerHandle] = {}  #: Requests to bind again when somebody comes.
        self._attempts = itertools.count(1)  #: Across all requests: ids come again, and stages remember the dead.
        self._refusing: str | None = None  #: Why nothing is admitted any more.
        self._started_at = time.monotonic()

    # --- events.Desk --------------------------------------------------------------------------------------------

    async def ask(self, request: OmniRequest, *, timeout_s: float | None = None) -> Asked | None:
        if self._asking is None:
            return None
        self.check_room()
        return await self._asking.ask(request, self._admission.timeout_s(timeout_s))

    def admit(
        self,
        request: OmniRequest,
        *,
        timeout_s: float | None = None,
        trace: str | None = None,
        asked: Asked | None = None,
    ) -> Ticket:
        self.check_room()
        if request.id in self._tickets:
            raise RequestError("duplicate_request", f"request {request.id} is in flight", request_id=request.id)
        membership = self._roster.membership
        wanted = self._admission.wanted_terminals(request, membership.revisions, asked)
        left_s = self._admission.timeout_s(timeout_s) - (asked.took_s if asked is not None else 0.0)
        revision, bindings = self._bind(request.id, set(), wanted)
        try:
            admitted = self._admission.admit(request, revision, wanted, left_s)
        except BaseException:
            membership.unbind(bindings)
            raise
        whole = not request.stream  # the client hears nothing before the end
        tracked = Tracked(
            request.id, admitted.terminals, retries=admitted.retries, attempt=next(self._attempts), whole=whole
        )
        ticket = Ticket(
            request,
            tracked,
            admitted.extracted,
            cancel=self._cancel,
            consumed=self._consumed,
            owner=self._roster.incarnation,
            traceparent=trace,
            deadline=self._loop.time() + admitted.timeout_s,
            whole=whole,
        )
        self._tickets[request.id] = ticket
        self._deadlines.add(ticket.id, ticket.deadline)
        self._submit(ticket, revision, bindings)
        return ticket

    def check_room(self) -> None:
        if self._refusing is not None:
            raise RequestError("unavailable", self._refusing, retry_after_s=RETRY_AFTER_S)
        most = self._plan.max_in_flight
        if len(self._tickets) >= most:
            raise RequestError("rate_limited", f"{most} requests are in flight", retry_after_s=RETRY_AFTER_S)

    def abort(self, request_id: str, reason: str) -> bool:
        ticket = self._tickets.get(request_id)
        return ticket is not None and self._cancel(ticket, reason)

    async def abort_elsewhere(self, request_id: str, reason: str) -> bool:
        return await self.elsewhere.abort(request_id, reason, self._roster.membership.instances)

    def record(self, request_id: str) -> RequestRecord | None:
        ticket = self._tickets.get(request_id)
        return ticket.record() if ticket is not None else self.tallies.record(request_id)

    def status(self) -> Mapping[str, Any]:
        return {
            "pipeline": self._plan.pipeline,
            "coordinator": self._roster.incarnation,
            "ready": self.ready(),
            "in_flight": len(self._tickets),
            "stranded": len(self._stranded),
            **self._roster.status(),
        }

    def ready(self) -> bool:
        return self._roster.ready()

    def metrics(self) -> Mapping[str, Any]:
        return {
            "requests": dict(self.tallies.outcomes),
            "in_flight": len(self._tickets),
            "retried_total": self.tallies.retried,
            "stages": _merged(self.tallies.stages(), self._roster.loads()),
            "instances_ready": self._roster.ready_count(),
            "lanes_outstanding": self.lanes.outstanding,
            "lanes_queued": self.lanes.queued,
            "kept_bytes": self._admission.kept_nbytes,
            "relay": self._relays.stats(),
            "control": self._roster.counters(),
        }

    @property
    def in_flight(self) -> int:
        return len(self._tickets)

    def refuse(self, reason: str) -> None:
        """Admit nothing more."""
        self._refusing = reason

    def fail_all(self, reason: str) -> None:
        """End everything that is in flight."""
        for ticket in list(self._tickets.values()):
            self._carry_out(ticket, ticket.tracked.fail(Failure("unavailable", reason)), None)

    def close(self) -> None:
        self._fetching.close()
        self._deadlines.close()
        self.readers.close()
        for timer in self._stranded.values():
            timer.cancel()

    # --- what processes say -------------------------------------------------------------------------------------

    def stream(self, sender: str, message: Stream) -> None:
        self._fetching.fetch(
            sender,
            message.body,
            attempt_key(self._roster.incarnation, message.request_id, message.attempt),
            lambda fetched: self._chunk(message, fetched),
            lambda error: self._broken(message, error),
        )

    def complete(self, sender: str, message: Complete) -> None:
        if message.skipped:
            self._skipped(message)
        elif message.failure is not None:
            ticket = self._current(message)
            if ticket is not None:
                self._learn(ticket, message)
                self._failed(ticket, message.attempt, message.failure)
        elif message.body is None:
            self._result(message, None)
        else:
            self._fetching.fetch(
                sender,
                message.body,
                attempt_key(self._roster.incarnation, message.request_id, message.attempt),
                lambda fetched: self._result(message, fetched),
                lambda error: self._broken(message, error),
            )

    def unreadable(self, sender: str, request: RequestRef, problem: str) -> None:
        """What an instance said of a request cannot be read: no retry makes it readable."""
        ticket = self._tickets.get(request.request_id)
        if ticket is not None:
            stage = next((stage for stage, bound in ticket.bindings.items() if bound == sender), None)
            failure = Failure("stage_failed", f"a message of {sender} could not be read: {problem}", stage, "receive")
            self._failed(ticket, request.attempt, failure)

    def hand_back(self, sender: str, message: HandBack) -> None:
        """A draining instance has not begun. Without another one it shall go on: draining takes what is bound."""
        ticket = self._tickets.get(message.request_id)
        if ticket is None:
            return
        self._roster.membership.mark(sender, draining=True)
        if self._roster.membership.complete(terminals=ticket.tracked.terminals):
            ticket.avoid.add(sender)
            self._happen(ticket, HandedBack(message.attempt))

    def instance_lost(self, incarnation: str) -> None:
        """An instance is proven gone; its requests are bound elsewhere or fail."""
        self.lanes.forget(incarnation)
        self.elsewhere.forget(incarnation)
        self._endings.forget(incarnation)
        self.readers.forget(incarnation)
        for request_id in list(self._by_instance.get(incarnation, ())):
            ticket = self._tickets[request_id]
            ticket.avoid.add(incarnation)
            stage = next(stage for stage, bound in ticket.bindings.items() if bound == incarnation)
            self._happen(ticket, InstanceLost(stage, ticket.tracked.attempt))
        self._by_instance.pop(incarnation, None)

    def severed(self, sender: str, peer: str) -> None:
        """Two instances have lost each other, and with it what was under way between them.

        If one of them is dead, that is known soon and `instance_lost` says more. Else their requests would wait for
        each other until their deadlines.
        """
        both = self._by_instance.get(sender, set()) & self._by_instance.get(peer, set())
        attempts = [(request_id, self._tickets[request_id].tracked.attempt) for request_id in both]
        if attempts:
            self._loop.call_later(RECONNECT_S, self._give_up, attempts, peer)

    def instances_changed(self) -> None:
        """Somebody is ready: requests that wait for an instance may go."""
        for request_id in list(self._stranded):
            ticket = self._tickets.get(request_id)
            if ticket is not None:
                self._rebind(ticket)

    def bound_to(self, incarnation: str) -> int:
        """How many requests are bound to an instance."""
        return len(self._by_instance.get(incarnation, ()))

    # --- admitting ----------------------------------------------------------------------------------------------

    def _bind(
        self, request_id: str, avoid: set[str], terminals: tuple[str, ...] | None
    ) -> tuple[PipelineRevision, dict[str, str]]:
        try:
            return self._roster.membership.bind(avoid=avoid, terminals=terminals)
        except Unbindable as error:
            raise RequestError(
                "unavailable",
                str(error),
                stage=error.groups[0],
                request_id=request_id,
                retry_after_s=RETRY_AFTER_S,
            ) from error

    def _submit(self, ticket: Ticket, revision: PipelineRevision, bindings: dict[str, str]) -> None:
        ticket.bindings = bindings
        ticket.revision = revision.revision
        ticket.begin_attempt()
        for incarnation in set(bindings.values()):
            self._by_instance.setdefault(incarnation, set()).add(ticket.id)
        entry = revision.entry
        attempt = ticket.tracked.attempt

        def make(body: Body) -> Message:
            remaining_ms = max(0, int((ticket.deadline - self._loop.time()) * 1000))
            header = Header(ticket.id, attempt, self._roster.incarnation, bindings, remaining_ms, ticket.traceparent)
            return Submit(header, entry, body)

        assert ticket.extracted is not None

        def lost(error: BaseException) -> None:
            if isinstance(error, ValueRefused):  # what does not fit into a message is what the client sent
                failure = Failure("invalid_request", error.problem)
            else:
                log.error("request %s cannot be sent", ticket.id, exc_info=error)
                failure = Failure("transport_failed", told(error), entry, "relay")
            self._failed(ticket, attempt, failure)

        parcel = Parcel(ticket.sending, ticket.extracted, make, self._plan.relay_backend, lost)
        try:
            if self.lanes.ship((COORDINATOR, entry, bindings[entry]), parcel, credits=BODY_CREDITS):
                return
            problem = f"no connection to the instance of {entry!r}"
        except TransferError as error:
            problem = str(error)
        except Exception as error:
            lost(error)
            return
        self._failed(ticket, attempt, Failure("transport_failed", problem, entry, "relay"))

    # --- following ----------------------------------------------------------------------------------------------

    def _current(self, message: Stream | Complete) -> Ticket | None:
        ticket = self._tickets.get(message.request_id)
        if ticket is None or ticket.tracked.attempt != message.attempt:
            return None
        return ticket

    def _chunk(self, message: Stream, fetched: Fetched) -> None:
        ticket = self._current(message)
        inbound = ticket.streams.get(message.source) if ticket is not None else None
        if ticket is None or inbound is None:
            fetched.discard()
            return
        streamed = Streamed(message.source, message.chunk_id, message.modality, fetched, message.weight)
        try:
            ready = inbound.offer(message.chunk_id, streamed)
        except ProtocolError as error:
            self._broken(message, error)
            return
        for one in ready:
            if Instruction.DELIVER in self._happen(ticket, ChunkCame(message.source, message.attempt)):
                ticket.push(one)
        self._end_if_whole(ticket, message.source, message.attempt)

    def _skipped(self, message: Complete) -> None:
        """Nothing of the request can reach a terminal: where it is waited for, its request fails now."""
        ticket = self._current(message)
        if ticket is not None and message.source in ticket.tracked.waiting:
            told = f"no route leads the request to {message.source!r}, a terminal stage that it waits for: "
            told += "leave it out by terminalStagesFn, or send it something"
            self._failed(ticket, message.attempt, Failure("stage_failed", told, message.source, "route_fn"))

    def _result(self, message: Complete, fetched: Fetched | None) -> None:
        ticket = self._current(message)
        inbound = ticket.streams.get(message.source) if ticket is not None else None
        if ticket is None or inbound is None:
            if fetched is not None:
                fetched.discard()
            return
        self._learn(ticket, message)
        try:
            inbound.end(message.chunks)
        except ProtocolError as error:
            self._broken(message, error)
            return
        ticket.endings[message.source] = (message.chunks, fetched)
        self._end_if_whole(ticket, message.source, message.attempt)

    def _end_if_whole(self, ticket: Ticket, source: str, attempt: int) -> None:
        """A terminal is through once its result and all its chunks are here, in whatever order they came."""
        if source in ticket.endings and ticket.streams[source].closed:
            _, fetched = ticket.endings.pop(source)
            self._happen(ticket, TerminalDone(source, attempt), Resulted(source, fetched))

    def _broken(self, message: Stream | Complete, error: Exception) -> None:
        ticket = self._current(message)
        if ticket is not None:
            failure = Failure("transport_failed", str(error), message.source, "relay")
            self._failed(ticket, message.attempt, failure)

    def _failed(self, ticket: Ticket, attempt: int, failure: Failure) -> None:
        if failure.code == "transport_failed":
            # Which end is cut off, neither knows: sent again, it goes to others where there are others.
            ticket.avoid.update(ticket.bindings.values())
        self._happen(ticket, StageFailed(attempt, failure))

    def _give_up(self, attempts: list[tuple[str, int]], peer: str) -> None:
        """Whatever of ``attempts`` has not ended since is stuck between ``peer`` and another."""
        for request_id, attempt in attempts:
            ticket = self._tickets.get(request_id)
            if ticket is not None and ticket.tracked.attempt == attempt and peer in ticket.bindings.values():
                stage = next(stage for stage, bound in ticket.bindings.items() if bound == peer)
                self._failed(ticket, attempt, Failure("transport_failed", "the connection to it broke", stage))

    def _learn(self, ticket: Ticket, message: Complete) -> None:
        for timing in message.timings:
            ticket.timings[timing.stage] = timing

    def _happen(self, ticket: Ticket, event: Event, delivered: Resulted | None = None) -> tuple[Instruction, ...]:
        instructions = ticket.tracked.handle(event)
        if Instruction.REBIND in instructions and not isinstance(event, HandedBack):
            self.tallies.retried += 1  # what had not begun loses nothing by going elsewhere: that is no retry
        self._carry_out(ticket, instructions, delivered)
        return instructions

    def _carry_out(self, ticket: Ticket, instructions: tuple[Instruction, ...], delivered: Resulted | None) -> None:
        for instruction in instructions:
            match instruction:
                case Instruction.DELIVER:
                    if delivered is not None:
                        ticket.push(delivered)
                case Instruction.ABORT:
                    self._abort_attempt(ticket)
                case Instruction.REBIND:
                    ticket.tracked.retry(next(self._attempts))
                    if not self._rebind(ticket):
                        self._strand(ticket)
                case Instruction.FINISH:
                    self._note_ended(ticket)
                    self._forget(ticket)
                    ticket.finish()
                case Instruction.FAIL:
                    failure = ticket.tracked.failure
                    assert failure is not None
                    self._forget(ticket)
                    retry_after_s = RETRY_AFTER_S if failure.code in ("unavailable", "rate_limited") else None
                    ticket.fail(failure, retry_after_s=retry_after_s)

    def _deadline_of(self, request_id: str) -> float | None:
        ticket = self._tickets.get(request_id)
        return ticket.deadline if ticket is not None else None

    def _deadline_passed(self, request_id: str, deadline: float) -> None:
        ticket = self._tickets.get(request_id)
        if ticket is not None and ticket.deadline == deadline:
            self._happen(ticket, DeadlinePassed())

    def _cancel(self, ticket: Ticket, reason: str) -> bool:
        return bool(self._happen(ticket, Cancelled(reason)))

    def _bound_here(self, incarnation: str) -> list[Ticket]:
        return [self._tickets[request_id] for request_id in self._by_instance.get(incarnation, ())]

    def _end_unread(self, ticket: Ticket, reason: str) -> None:
        """Its client does not read. Of one that is complete already, only what waits to be read is dropped."""
        if not self._cancel(ticket, reason):
            ticket.fail(Failure("cancelled", reason))

    def _consumed(self, ticket: Ticket, stage: str, weight: int) -> None:
        if ticket.tracked.state is State.RUNNING:
            self._readings.read(ticket.id, ticket.tracked.attempt, stage, ticket.bindings.get(stage, ""), weight)

    # --- ending -------------------------------------------------------------------------------------------------

    def _abort_attempt(self, ticket: Ticket) -> None:
        """Tell everybody that this attempt could have reached; then its instances carry one less."""
        said = Abort(ticket.id, ticket.tracked.attempt, self._roster.incarnation, ticket.tracked.state.value)
        for incarnation in set(ticket.bindings.values()):
            self._say(incarnation, said)
        self._publish(said)
        self._unbind(ticket)
        ticket.sending.aborted = True
        self.lanes.drop_cancelled()
        self._relays.cleanup(attempt_key(self._roster.incarnation, ticket.id, ticket.tracked.attempt))

    def _unbind(self, ticket: Ticket) -> None:
        self._roster.membership.unbind(ticket.bindings)
        for incarnation in set(ticket.bindings.values()):
            bound = self._by_instance.get(incarnation)
            if bound is not None:
                bound.discard(ticket.id)
                if not bound:
                    del self._by_instance[incarnation]
                    self._roster.unbound(incarnation)

    def _rebind(self, ticket: Ticket) -> bool:
        try:
            revision, bindings = self._bind(ticket.id, ticket.avoid, ticket.tracked.terminals)
        except RequestError:
            return False
        waiting = self._stranded.pop(ticket.id, None)
        if waiting is not None:
            waiting.cancel()
        log.info("request %s is sent again, attempt %d", ticket.id, ticket.tracked.attempt)
        self._submit(ticket, revision, bindings)
        return True

    def _strand(self, ticket: Ticket) -> None:
        ticket.bindings = {}

        def give_up() -> None:
            self._stranded.pop(ticket.id, None)
            lacking = ", ".join(self._roster.membership.lacking(terminals=ticket.tracked.terminals))
            failure = Failure("unavailable", f"no instance of {lacking} came within {NEW_INSTANCE_WAIT_S:.0f} s")
            if ticket.tracked.state is State.RUNNING:
                self._carry_out(ticket, ticket.tracked.fail(failure), None)

        self._stranded[ticket.id] = self._loop.call_later(NEW_INSTANCE_WAIT_S, give_up)

    def _forget(self, ticket: Ticket) -> None:
        if self._tickets.pop(ticket.id, None) is None:
            return
        stranded = self._stranded.pop(ticket.id, None)
        if stranded is not None:
            stranded.cancel()
        if ticket.extracted is not None:
            self._admission.ended(ticket.extracted)
            ticket.extracted = None
        ticket.sending.aborted = True
        self._readings.forget(ticket.id, ticket.streams)
        ticket.ended_at = time.monotonic()
        self.tallies.timed(ticket.timings.values())
        failure = ticket.tracked.failure
        self.tallies.ended(ticket.id, ticket.kind, failure.code if failure is not None else "completed", ticket.record)

    def _note_ended(self, ticket: Ticket) -> None:
        """It is complete, so its instances carry one less; those that may still hold something of it are told."""
        self._unbind(ticket)
        if self._roster.leaves_rest(ticket.revision):
            self._endings.add(set(ticket.bindings.values()), ticket.id, ticket.tracked.attempt)


def _merged(*parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, row in part.items():
            merged.setdefault(name, {}).update(row)
    return merged
