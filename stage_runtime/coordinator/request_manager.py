"""The request manager: admits requests, and tells what became of them. Implements `events.RequestManagerApi`.

Here: admission, the order to stop, status and counts. Not here: what happens to a request once it is admitted
(`live_requests`). Everything runs on the coordinator's I/O thread; no HTTP.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from omnipipeline_spec.types.plan import CoordinatorPlan
from stage_runtime.coordinator.admitting.admission import Admission
from stage_runtime.coordinator.admitting.service_health import ServiceHealth
from stage_runtime.coordinator.admitting.terminal_stages import TerminalStagesCaller, TerminalStagesResult, Watch
from stage_runtime.coordinator.answering.request_handles import HandleContext, RequestHandle, RequestTrace
from stage_runtime.coordinator.answering.unread_answers import DEFAULT_LIMITS, AnswerLimits
from stage_runtime.coordinator.binding.bindings import RETRY_AFTER_S
from stage_runtime.coordinator.events import RequestRecord, StageNeed
from stage_runtime.coordinator.live_requests import LiveRequests
from stage_runtime.coordinator.membership import Membership
from stage_runtime.coordinator.plane_ends import PlaneEnds
from stage_runtime.coordinator.reporting import member_reports, recorded
from stage_runtime.coordinator.reporting.demand import GroupDemand
from stage_runtime.coordinator.reporting.reports import Reports
from stage_runtime.coordinator.reporting.stats import RequestStats
from stage_runtime.coordinator.reporting.tracing import RequestTracer
from stage_runtime.errors import RequestError
from stage_runtime.metrics import catalog, planes
from stage_runtime.metrics.samples import Samples
from stage_runtime.profiler.recording.recorder import recorder
from stage_runtime.rules.binding import prefixes
from stage_runtime.rules.requests.lifecycle import Tracked
from stage_runtime.wire.values import OmniRequest


class RequestManager:
    """All requests of one coordinator."""

    def __init__(
        self,
        plan: CoordinatorPlan,
        membership: Membership,
        ends: PlaneEnds,
        *,
        terminal_stages: Callable[[OmniRequest], Any] | None = None,
        clocks_us: Mapping[str, int] = {},
        tracing: RequestTracer | None = None,
        answer_limits: AnswerLimits = DEFAULT_LIMITS,
    ) -> None:
        """clocks_us: instance -> what to add to its times. tracing: None: requests are not traced."""
        self.stats = RequestStats()
        self.live = LiveRequests(plan, membership, ends, ended=self._ended, answer_limits=answer_limits)
        self._plan = plan
        self._membership = membership
        self._loop = ends.loop
        self._health = ServiceHealth(membership, chosen=terminal_stages is not None)
        self._admission = Admission(plan, terminal_stages)
        self._terminal_stages_caller = TerminalStagesCaller(terminal_stages) if terminal_stages is not None else None
        self._draining = False
        self._refusing: str | None = None  #: Why nothing is admitted any more.
        self._handle_context = HandleContext(
            owner=membership.incarnation,
            cancel=self.live.cancel,
            consumed=self.live.consumed,
            unread_bytes=self.live.unread.bytes,
            clocks_us=clocks_us,
        )
        self._tracing = tracing
        self._demand = GroupDemand(membership, ends.loop)
        self._reports = Reports(plan, membership, ends.relays, self.live.send_queues, tracing)

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
        if self.live.find(request.id) is not None:
            raise RequestError("duplicate_request", f"request {request.id} is in flight", request_id=request.id)
        wanted = self._admission.wanted_terminals(request, self._membership.state.revisions, hook_result)
        left_s = self._admission.timeout_s(timeout_s) - (hook_result.took_s if hook_result is not None else 0.0)
        self._demand.arrived(wanted)
        prompt = self._prompt(request)
        revision, bindings = self.live.waiting.choose(request.id, wanted, prefer, prompt)
        try:
            admitted = self._admission.admit(request, revision, wanted, left_s)
            if bindings is None:
                self.live.waiting.check(request.id, wanted, admitted.extracted.held_nbytes)
        except BaseException:
            self.live.bindings.give_back(bindings or {})
            raise
        context = self._tracing.begin(trace, trace_state) if self._tracing is not None else None
        tracked = Tracked(request.id, admitted.terminals, retries=admitted.retries, whole=not request.stream)
        handle = RequestHandle(
            request,
            tracked,
            admitted.extracted,
            self._handle_context,
            trace=RequestTrace(trace if context is None else context.header, context),
            deadline=self._loop.time() + admitted.timeout_s,
            prompt=prompt,
        )
        if recorder.active:
            recorder.note(recorded.ADMISSION[request.kind], request.id, 0)
        self._admission.begun(admitted.extracted)
        self.live.begin(handle, revision, bindings)
        return handle

    def _prompt(self, request: OmniRequest) -> prefixes.Hashes:
        """Hashes of the prompt, for the choice of instances. Empty where they cannot change the choice."""
        if not self._membership.state.caches_apart:
            return ()
        return prefixes.hashes(request.kind, request.inputs, request.params)

    def check_room(self) -> None:
        if self._refusing is not None:
            raise _refusal(self._refusing)
        most = self._plan.max_in_flight
        if len(self.live) >= most:
            raise RequestError("rate_limited", f"{most} requests are in flight", retry_after_s=RETRY_AFTER_S)

    def abort(self, request_id: str, reason: str) -> bool:
        handle = self.live.find(request_id)
        return handle is not None and self.live.cancel(handle, reason)

    async def forward_abort(self, request_id: str, reason: str) -> bool:
        return await self.live.abort_forwarding.abort(request_id, reason, self._membership.state.instances)

    def record(self, request_id: str) -> RequestRecord | None:
        handle = self.live.find(request_id)
        return handle.record() if handle is not None else self.stats.record(request_id)

    def latest(self, most: int) -> list[RequestRecord]:
        running = itertools.islice(self.live.newest_first(), most)
        return [*(handle.record() for handle in running), *self.stats.latest(most)]

    def status(self) -> Mapping[str, Any]:
        waiting, problem = len(self.live.waiting), self._health.problem()
        status = self._reports.status(in_flight=len(self.live), awaiting_instance=waiting, problem=problem)
        demand = self._demand.status(self.live.waiting.by_group())
        outcomes = self.live.outcomes.status()
        return {**status, "groups": demand, "outcomes": outcomes, "draining": self._draining}

    def needs(self) -> Sequence[StageNeed]:
        return self._health.needs()

    def ready(self) -> bool:
        return not self._draining and self._membership.ready()

    def problem(self) -> str | None:
        return self._health.problem()

    def metrics(self) -> Samples:
        own = self._reports.samples(in_flight=len(self.live), kept_nbytes=self._admission.kept_nbytes)
        demand = self._demand.samples(self.live.waiting.by_group())
        retried: Samples = {catalog.REQUESTS_RETRIED: {(): self.live.retried}}
        counts = {**self.stats.samples(), **retried, **self.live.outcomes.samples()}
        return {**counts, **own, **self.live.waiting.samples(), **demand}

    def member_gauges(self) -> Mapping[str, planes.Gauges]:
        return member_reports.gauges(self._membership)

    @property
    def in_flight(self) -> int:
        return len(self.live)

    def drain(self) -> None:
        """Be ready no longer, so that balancers send no new client. Requests that come all the same are admitted."""
        self._draining = True

    def refuse(self, reason: str) -> None:
        """Admit nothing more. Requests of which nothing was sent yet are refused, too: they have begun nowhere."""
        self._refusing = reason
        self._membership.stopping = True
        if self._terminal_stages_caller is not None:
            self._terminal_stages_caller.give_up(lambda: _refusal(reason))
        self.live.stop_unsent(reason)

    def fail_all(self, reason: str) -> None:
        """End everything that is in flight."""
        self.live.stop_all(reason)

    def close(self) -> None:
        self.live.close()

    # --- inside -------------------------------------------------------------------------------------------------

    def _ended(self, handle: RequestHandle) -> None:
        """Count a request that is over, and release its body."""
        if handle.extracted is not None:
            self._admission.ended(handle.extracted)
            handle.extracted = None
        handle.ended_at = time.monotonic()
        if recorder.active:
            recorder.note(recorded.RESPONSE[handle.tracked.public_state], handle.id, 0)
        if self._tracing is not None and handle.trace.context is not None:
            self._tracing.ended(handle.trace.context, handle.record)
        self.stats.timed(handle.timings.values())
        failure = handle.tracked.failure
        if failure is None:
            self._demand.served(handle.bindings, handle.timings.values())
        self.live.outcomes.ended(handle, None if failure is None else failure.code)
        self.stats.ended(handle.id, handle.kind, failure.code if failure is not None else "completed", handle.record)


def _refusal(reason: str) -> RequestError:
    return RequestError("unavailable", reason, retry_after_s=RETRY_AFTER_S)
