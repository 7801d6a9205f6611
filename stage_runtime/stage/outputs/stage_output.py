"""The output of a stage: routes and projects results, numbers chunks, sends ends and failures. Any thread.

Runs in the thread that computed: user hooks and copies into the relay stay off the I/O thread, and the message
goes straight from here to the socket.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from omnipipeline_spec.types.plan import StagePlan
from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.engines.base import Gate, Work
from stage_runtime.errors import HookError, RequestError, RouteAway, TransferError, ValueRefused
from stage_runtime.profiler import events as profile
from stage_runtime.profiler.recording.recorder import recorder
from stage_runtime.rules.graph import routing
from stage_runtime.rules.requests.failures import failure_of, log_failure
from stage_runtime.stage import forks
from stage_runtime.stage.hooks import Hooks
from stage_runtime.stage.observing.recorded import OutputEvents
from stage_runtime.stage.outputs.edges import Edges, Packed
from stage_runtime.stage.process_context import ProcessContext
from stage_runtime.stage.work import RequestWork
from stage_runtime.wire import outputs
from stage_runtime.wire.messages import Complete
from stage_runtime.wire.parts import Failure, Header, Timing
from stage_runtime.wire.values import Chunk, StagePayload

#: The error of a terminal stage that gives an OpenAI route nothing but what that cannot show.
UNSHOWN: Final = "{kind}: this request's route shows {shown}: wrap it, or ask by /v1/pipeline"


class StageOutput:
    """`engines.base.Outbox` of one stage."""

    def __init__(
        self,
        plan: StagePlan,
        hooks: Hooks,
        process: ProcessContext,
        forget: Callable[[RequestWork], None],
        crashed: Callable[[BaseException], None],
        take_back: Callable[[RequestWork, BaseException, str], None],
    ) -> None:
        """take_back: fails a request and has the engine drop it."""
        self._plan = plan
        self._hooks = hooks
        self._process = process
        self._forget = forget
        self._crashed = crashed
        self._take_back = take_back
        self._edges = Edges(plan, process, self._lost)
        self._events = OutputEvents(plan)
        #: The one target that gets all results as they are: no hook is asked.
        self._only_next = plan.next[0] if len(plan.next) == 1 and hooks.passes_on and not plan.terminal else None
        self.given = 0  #: Results, chunks and failures that the engine has given.

    # --- engines.base.Outbox ------------------------------------------------------------------------------------

    def began(self, work: Work) -> None:
        ours = _ours(work)
        ours.began()
        if recorder.active:
            if (depth := ours.left_depth) is None:
                recorder.note(self._events.run_start, ours.request_id, ours.attempt)
            else:
                recorder.note(self._events.left_and_started, ours.request_id, ours.attempt, depth)
        if recorder.traces is not None:
            recorder.traces.working(ours.request_id, self._plan.name, ours.traceparent)
        if self._process.mutation_check is not None:
            self._process.began(self._plan.name)

    def emit(self, work: Work, chunk: Chunk) -> Gate | None:
        if forks.in_child:
            forks.end(self._plan.name, None)
        ours = _ours(work)
        self.given += 1
        if ours.dead:
            return None
        try:
            outputs.check_chunk(chunk)
            for target in _met(ours, self._chunk_targets(chunk)):
                if ours.takes(target):
                    if recorder.active:
                        self._record_chunk(ours, target, chunk.modality)
                    if target == COORDINATOR:
                        self._edges.client(ours.owner).chunk(ours, chunk)
                    elif target in self._plan.stream_at_end:
                        ours.hold(target, chunk)
                    else:
                        self._edges.to(target, ours.bindings[target]).chunk(ours, chunk)
            self._process.gave(self._plan.name, ours, {"chunk.data": chunk.data, "chunk.metadata": chunk.metadata})
            return ours.gate()
        except BaseException as error:
            if not ours.lockstep:
                raise
            # The other ranks send nothing and go on: what is left is computed here, too, and discarded.
            self._take_back(ours, error, "run")
            return None

    def done(self, work: Work, data: Any, *, has_data: bool = True) -> None:
        if forks.in_child:
            forks.end(self._plan.name, None)
        ours = _ours(work)
        self.given += 1
        if ours.dead:
            return
        ended_ns = time.time_ns() if recorder.active else 0
        try:
            if self._process.mutation_check is not None:
                self._process.ended(self._plan.name, ours)  # before the result is handed on, which may share
            if self._plan.stream_to:
                notified = self._hooks.stream_done_targets(ours.request_id, data)
                for target in _met(ours, self._plan.stream_to):
                    self._send_held(ours, target)
                    if target in notified:
                        self._edges.to(target, ours.bindings[target]).end(ours)
                    else:
                        self._skip(ours, target, chunks=ours.sent(target))
            if self._only_next is not None:
                self._hand_on(ours, data, self._only_next, ended_ns)
            else:
                if self._plan.terminal:
                    self._note_complete(ours, ended_ns)
                    self._complete(ours, data, has_data=has_data)
                else:
                    self._pass_on(ours, data, ended_ns)
        except BaseException as error:
            self.fail(ours, error, hook="result")
            return
        if ours.finish():
            ours.served = ours.has_payload
            self._end(ours)

    def fail(self, work: Work, error: BaseException, *, hook: str = "run") -> None:
        if forks.in_child:
            forks.end(self._plan.name, error)
        ours = _ours(work)
        self.given += 1
        if not ours.finish():
            return
        failure = failure_of(error, self._plan.name, hook)
        log_failure(ours.request_id, failure, error)
        if recorder.active:
            self._record(profile.STAGE_RUN_END, ours, error=failure.code)
        try:
            self._send_failed(ours, failure, timings=ours.timing(self._plan.name))
            for target in self._plan.stream_to:
                if ours.sent(target):
                    self._edges.to(target, ours.bindings.get(target, "")).failed(ours, failure)
            self._end(ours)
        except BaseException as trouble:  # a bug of the runtime: else the request would wait until its deadline
            self._crashed(trouble)

    def together(self) -> AbstractContextManager[None]:
        return self._process.channels.together()

    def letting_go(self) -> None:
        self._process.relays.letting_go()

    def settle(self) -> None:
        self._process.relays.settle()

    def crashed(self, error: BaseException) -> None:
        self._crashed(error)

    def skip(self, work: RequestWork) -> None:
        """The request is skipped at this stage: skip it at the stage's targets too."""
        if not work.finish():
            return
        with contextlib.suppress(TransferError):  # a neighbour is away: the coordinator ends the request for that
            for target in self._plan.next:
                self._skip(work, target)
            for target in self._plan.stream_to:
                self._skip(work, target, chunks=0)
        if self._plan.terminal:
            self._process.send(work.owner, Complete(work.request_id, work.attempt, self._plan.name, skipped=True))
        self._end(work)

    def refuse(self, header: Header, source: str) -> None:
        """``source`` streams to a request that is over here: notify it to send without a window."""
        self._edges.to(source, header.bindings.get(source, "")).refuse(header)

    def turn_away(self, work: Work, error: RequestError) -> None:
        self._take_back(_ours(work), error, "streams")

    def reject(self, header: Header, error: HookError) -> None:
        """A request that is over here turns out to be wrong. Too late when it is over everywhere."""
        failure = failure_of(error, self._plan.name, error.hook)
        log_failure(header.request_id, failure, error)
        self._process.send(header.owner, Complete(header.request_id, header.attempt, self._plan.name, failure=failure))

    def consumed(self, work: Work, source: str, count: int) -> int:
        ours = _ours(work)
        weight = ours.taken(source, count)
        self._edges.to(source, ours.bindings.get(source, "")).consumed(ours, weight)
        return weight

    def stalled(self, target: str, instance: str, stalled: bool) -> None:
        """All workers of the stage wait for the instance of ``target``, or no longer."""
        self._edges.stalled(target, instance, stalled)

    def renew(self) -> None:
        """The process has another incarnation: bind all edges again."""
        self._edges.clear()

    # --- results ------------------------------------------------------------------------------------------------

    def _complete(self, work: RequestWork, data: Any, *, has_data: bool) -> None:
        if has_data:
            work.look(data)
        if work.unshown is not None:
            kind = "" if work.request is None else work.request.kind
            raise ValueRefused("result", UNSHOWN.format(kind=work.unshown, shown=outputs.shown_words(kind)))
        self._edges.client(work.owner).result(work, data, has_data=has_data)
        if has_data:
            self._process.gave(self._plan.name, work, {"result": data})

    def _hand_on(self, work: RequestWork, data: Any, target: str, ended_ns: int) -> None:
        """The same as `_pass_on`, for a stage with one target and no hooks."""
        request, instance = work.request, work.bindings.get(target)
        if request is None or instance is None:  # see `_pass_on`, `_met`
            self._note_complete(work, ended_ns)
            return
        if recorder.active:
            recorder.note(self._events.handed_on[target], work.request_id, work.attempt, 0, ended_ns)
        self._edges.to(target, instance).payload(work, StagePayload(request=request, data=data), None)
        if self._process.mutation_check is not None:
            self._process.gave(self._plan.name, work, {"payload.data": data})

    def _pass_on(self, work: RequestWork, data: Any, ended_ns: int) -> None:
        targets, own = self._hooks.route(work.request_id, data)
        if work.away and (away := next((one for one in targets if one in work.away), None)) is not None:
            raise RouteAway(self._plan.name, away)
        request = work.request
        met = _met(work, targets) if request is not None else []
        self._note_complete(work, ended_ns, met)
        if request is None:  # a result needs a payload or a chunk, and both bring it: it was aborted a moment ago
            return
        payload = StagePayload(request=request, data=data)
        sent = {}  # all projections first: one that writes into the result must not change what some have got already
        for target in met:
            given = payload if own is None else StagePayload(request=request, data=own[target])
            sent[target] = self._hooks.project(target, given)
        packed: Packed = {}
        for target, projected in sent.items():
            if recorder.active:  # before it is sent: the receiver's event must not come first
                recorder.note(self._events.sent[target], work.request_id, work.attempt)
            self._edges.to(target, work.bindings[target]).payload(work, projected, packed)
        for projected in sent.values():
            self._process.gave(self._plan.name, work, {"payload.data": projected.data})
        for target in self._plan.next:
            if target not in targets:
                self._skip(work, target)

    def _chunk_targets(self, chunk: Chunk) -> tuple[str, ...]:
        plan = self._plan
        if plan.stream_to:
            return routing.stream_targets(plan.name, plan.stream_to, chunk.to, terminal=plan.terminal)
        if plan.terminal and chunk.to in (None, COORDINATOR, [COORDINATOR]):
            return (COORDINATOR,)
        if chunk.to is None:
            raise HookError(plan.name, "chunk", "a chunk without a target: add streamTo, or make the stage terminal")
        raise HookError(plan.name, "chunk", f"a chunk to {chunk.to}: declare it in streamTo")

    def _send_held(self, work: RequestWork, target: str) -> None:
        """Sends chunks that were held, without a window: the stage has ended, so nothing waits for one."""
        for chunk in work.held(target):
            if work.takes(target):
                self._edges.to(target, work.bindings[target]).chunk(work, chunk)

    def _skip(self, work: RequestWork, target: str, *, chunks: int | None = None) -> None:
        """Tell ``target`` that nothing more comes on this edge: it stops waiting and begins nothing."""
        peer = work.bindings.get(target)
        if peer is not None:  # or the request has no instance of it
            self._edges.to(target, peer).skip(work, chunks)

    # --- events of a profile ------------------------------------------------------------------------------------

    def _note_complete(self, work: RequestWork, ended_ns: int, targets: Sequence[str] = ()) -> None:
        if recorder.active:
            self._events.note_complete(work, ended_ns, targets)

    def _record(self, event: str, work: RequestWork, **facts: Any) -> None:
        facts["attempt"] = work.attempt
        recorder.record(event, work.request_id, self._plan.name, facts)

    def _record_chunk(self, work: RequestWork, target: str, modality: str | None) -> None:
        index = work.sent(target)
        if index == 0:
            self._record(profile.STAGE_FIRST_STREAM_CHUNK_SENT, work, to_stage=target, modality=modality)
        self._record(profile.STAGE_STREAM_CHUNK_SENT, work, to_stage=target, chunk_id=index, modality=modality)

    # --- inside -------------------------------------------------------------------------------------------------

    def _lost(self, work: RequestWork, error: BaseException) -> None:
        """A payload that waited in a send queue cannot be sent. Its work may be over here, but its request is not."""
        failure = failure_of(error, self._plan.name, "send")
        log_failure(work.request_id, failure, error)
        self._send_failed(work, failure)

    def _send_failed(self, work: RequestWork, failure: Failure, timings: tuple[Timing, ...] = ()) -> None:
        message = Complete(work.request_id, work.attempt, self._plan.name, failure=failure, timings=timings)
        self._process.send(work.owner, message)

    def _end(self, work: RequestWork) -> None:
        self._forget(work)
        for source in self._plan.stream_from:
            if source not in work.ended_sources:  # the rest of that stream is not consumed
                self.refuse(work.header(), source)
        if self._process.mutation_check is not None:
            self._process.ended(self._plan.name, work)


def _met(work: RequestWork, targets: Sequence[str]) -> list[str]:
    """The targets that the request may meet. A stage that it is not bound to leads to no terminal that it waits for
    (`rules.graph.reachability`).
    """
    return [target for target in targets if target in work.bindings or target == COORDINATOR]


def _ours(work: Work) -> RequestWork:
    assert isinstance(work, RequestWork)
    return work
