"""The input of a stage: payloads, chunks, ends and aborts are checked, ordered, joined, and put into the inbox.

Called by the I/O thread for what comes over the wire and by worker threads of sibling stages for what is passed
inside the process, so its state is behind one lock. No user code runs here: fan-in hooks have a thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any, NamedTuple

from omnipipeline_spec.types.plan import StagePlan
from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.engines import events
from stage_runtime.engines.base import Engine, Inbox
from stage_runtime.engines.simple import TakesNoChunks
from stage_runtime.engines.streaming import StreamingEngine
from stage_runtime.engines.threads import stage_threads
from stage_runtime.errors import HookError, ProtocolError
from stage_runtime.payloads import devices
from stage_runtime.profiler import events as profile
from stage_runtime.profiler.recording.recorder import recorder
from stage_runtime.rules.flow.expecting import Outlook
from stage_runtime.rules.flow.gathering import Gathering
from stage_runtime.rules.requests.tombstones import Tombstones
from stage_runtime.stage.hooks import Hooks
from stage_runtime.stage.inputs.arrivals import (
    ChunkArrival,
    EndArrival,
    MergedArrival,
    PayloadArrival,
    Sealed,
)
from stage_runtime.stage.inputs.joins import Joins
from stage_runtime.stage.inputs.works import Works
from stage_runtime.stage.observing.busy import Busy
from stage_runtime.stage.observing.recorded import InputEvents
from stage_runtime.stage.work import RequestWork, begun
from stage_runtime.wire.messages import Consumed
from stage_runtime.wire.parts import Failure, Header, Timing

log = logging.getLogger(__name__)


class InputOutcomes(NamedTuple):
    """The reactions of a stage to what becomes of its input."""

    fail: Callable[[RequestWork, BaseException, str], None]
    crashed: Callable[[BaseException], None]  #: The stage's hook thread has ended by an exception; on that thread.
    skipped: Callable[[RequestWork], None]  #: Nothing can begin here any more for a request.
    unwanted: Callable[[Header, str], None]  #: A source begins to stream to a request that is over here.
    reject: Callable[[Header, HookError], None]  #: Fails a request that is over here, wherever it still runs.
    complete: Callable[[RequestWork], object]  #: All input of a request is here that is streamed to its client.


class StageInput:
    """Receives the input of one stage from all its sources."""

    def __init__(self, plan: StagePlan, hooks: Hooks, inbox: Inbox, outcomes: InputOutcomes) -> None:
        self.engine: Engine | None = None  #: Set when it is loaded.
        self.busy = Busy()
        self._plan = plan
        self._hooks = hooks
        self._inbox = inbox
        self._outcomes = outcomes
        self._sources = frozenset(plan.inputs_from)
        self._events = InputEvents(plan)
        self._device = devices.of_stage(plan)
        self._works = Works()  #: Those not over here.
        self._dead = Tombstones()
        self._lock = Lock()
        self._joins: Joins | None = None
        if plan.wait_for:
            self._joins = Joins(
                plan.name, hooks, begin=self._begin_merged, fail=outcomes.fail, look_ahead=self._look_ahead
            )
            stage_threads.start(f"{plan.name}-joins", self._joins.run, crashed=outcomes.crashed)

    # --- what comes ---------------------------------------------------------------------------------------------

    def payload(self, header: Header, source: str, sealed: Sealed, timings: tuple[Timing, ...] = ()) -> None:
        """A payload of ``source`` (of the coordinator: empty) has arrived."""
        work = self._work(header)
        if work is None:
            sealed.discard()
            if source and self._dead.served(header.owner, header.request_id, header.attempt):
                self._outcomes.reject(header, self._second(source))
            return
        if timings:
            work.add_timings(timings)
        work.queued(source)
        if self._joins is not None and source:
            self._note_received(work, source)
            self._joins.put(work, source, sealed)
            self._look_back(work)
            return
        if source and source not in self._sources:
            self._note_received(work, source)
            log.warning("%s: unexpected payload from %r for %s dropped", self._plan.name, source, work.request_id)
            sealed.discard()
        elif not work.claim_payload():
            self._note_received(work, source)
            sealed.discard()
            self._outcomes.fail(work, self._second(source), "receive")
        else:
            if recorder.active:
                arrived = self._events.arrived[source or COORDINATOR]
                recorder.note(arrived, work.request_id, work.attempt, self._inbox.depth())
            self._begin(work, PayloadArrival(work, sealed))

    def chunk(
        self, header: Header, source: str, index: int, modality: str | None, sealed: Sealed, weight: int = 1
    ) -> None:
        """Chunk ``index`` of ``source`` has arrived, perhaps before an earlier one."""
        work = self._work(header)
        if work is None:
            sealed.discard()
            if index == 0:  # a source that had begun before was notified when the request ended here
                self._outcomes.unwanted(header, source)
            return
        if self.engine is not None and not self.engine.takes_chunks:
            self._outcomes.fail(work, TakesNoChunks(source), "chunks")
            return
        work.queued(source, stream=True)
        if recorder.active:
            self._record(
                profile.STAGE_STREAM_CHUNK_RECEIVED, work, from_stage=source, chunk_id=index, modality=modality
            )
        with self._lock:  # offered and put in one step: two threads must not swap what became ready
            try:
                ready = work.merge.of(source).offer(index, ChunkArrival(work, source, index, modality, sealed, weight))
            except ProtocolError as error:
                failure: ProtocolError | None = error
            else:
                failure = None
                for arrival in ready:
                    if recorder.active:
                        self._record_chunk(work, arrival)
                    work.weigh(source, arrival.weight)
                    self._inbox.put(arrival)
                if ready:
                    work.expecting.begin()
                self._note_end(work, source)
        if failure is not None:
            self._outcomes.fail(work, failure, "chunks")
        self._look_ahead(work)
        self._look_back(work)

    def end(
        self,
        header: Header,
        source: str,
        total: int,
        sealed: Sealed | None = None,
        timings: tuple[Timing, ...] = (),
    ) -> None:
        """``source`` has sent ``total`` chunks and sends no more. sealed: the request, which an empty stream brings."""
        work = self._work(header)
        if work is None:
            if sealed is not None:
                sealed.discard()
            return
        work.add_timings(timings)
        work.queued(source, stream=True)
        try:
            with self._lock:
                work.merge.of(source).end(total)
                if total == 0:  # of others the chunks begin it
                    work.expecting.begin()
                self._note_end(work, source, sealed)
        except ProtocolError as error:
            self._outcomes.fail(work, error, "chunks")
        self._look_ahead(work)

    def skip(self, header: Header, source: str, chunks: int | None) -> None:
        """``source`` sends no payload; or its stream ends after so many chunks, without a done signal."""
        work = self._work(header)
        if work is None:
            return
        if chunks is None and self._joins is not None:
            self._joins.put(work, source, None)
            self._look_back(work)
            return
        try:
            with self._lock:
                if chunks is None:
                    work.expecting.skip(source)
                else:
                    work.merge.of(source).end(chunks)
                    self._note_end(work, source)
        except ProtocolError as error:
            self._outcomes.fail(work, error, "chunks")
        self._look_ahead(work)

    def broken(self, header: Header, source: str, failure: Failure) -> None:
        """``source`` failed in mid-stream."""
        work = self._work(header)
        if work is not None:
            self._inbox.put(events.StreamFailed(work.request_id, source, failure.message, work, failure))

    def source_stalled(self, source: str, instance: str, stalled: bool) -> None:
        """All workers of an instance of ``source`` wait for full windows, or no longer."""
        if isinstance(self.engine, StreamingEngine):
            self._inbox.put(events.Stalled(source, instance, stalled))

    def consumed(self, message: Consumed) -> None:
        """A consumer has taken chunks of this stage."""
        work = self.find(message.owner, message.request_id, message.attempt)
        if work is not None:
            work.consumed(message.target, message.weight, over=message.over)

    def lost(self, header: Header, error: Exception) -> None:
        """A payload was announced and could not be fetched."""
        work = self._work(header)
        if work is not None:
            self._outcomes.fail(work, error, "relay")

    # --- what ends ----------------------------------------------------------------------------------------------

    def abort(self, owner: str, request_id: str, attempt: int) -> None:
        """Abort the request: drop its data here, and what still arrives of it."""
        with self._lock:
            self._dead.add(owner, request_id, attempt, time.monotonic())
            work = self._works.find(owner, request_id)
            if work is None or work.attempt > attempt:
                return
            self._works.remove(work)
        self._drop(work)

    def abort_all(self) -> None:
        """This process continues under another incarnation: all waits for the old one end."""
        for work in self.works():
            self.abort(work.owner, work.request_id, work.attempt)

    def forget(self, work: RequestWork) -> None:
        """It is over here; late messages of it are dropped. A second payload after the result is an error."""
        with self._lock:
            self._dead.add(work.owner, work.request_id, work.attempt, time.monotonic(), served=work.served)
            self._works.remove(work)
            early = work.let_go()
        self._discard(work, early)
        self._inbox.drop(work)

    def find(self, owner: str, request_id: str, attempt: int) -> RequestWork | None:
        work = self._works.find(owner, request_id)
        return work if work is not None and work.attempt == attempt else None

    def works(self) -> Iterable[RequestWork]:
        return self._works.all()

    def named(self, name: str) -> Sequence[RequestWork]:
        """Requests by their id, or one by its key. Any thread."""
        return self._works.named(name)

    def close(self) -> None:
        if self._joins is not None:
            self._joins.close()

    # --- inside -------------------------------------------------------------------------------------------------

    def _work(self, header: Header) -> RequestWork | None:
        """The request's work, made at its first message; None when the request is over here."""
        superseded = None
        with self._lock:
            if self._dead.has(header.owner, header.request_id, header.attempt):
                return None
            work = self._works.find(header.owner, header.request_id)
            if work is not None and work.attempt > header.attempt:
                return None
            if work is None or work.attempt < header.attempt:
                plan = self._plan
                gathering = None
                if plan.wait_for:
                    gathering = Gathering(plan.name, plan.wait_for, static=not self._hooks.has_wait_for)
                work = begun(
                    header,
                    gathering=gathering,
                    sources=plan.stream_from,
                    parking=self._inbox.parking,
                    busy=self.busy,
                    inputs=("",) if plan.entry else plan.wait_for or plan.inputs_from,
                    lockstep=plan.tp_size > 1,
                    device=self._device,
                )
                superseded = self._works.add(work)
                if header.away:
                    self._end_absent(work, header)
        if superseded is not None:
            self._drop(superseded)
        return work

    def _end_absent(self, work: RequestWork, header: Header) -> None:
        """The request has no instance of some sources: these send nothing."""
        for source in self._plan.inputs_from:
            if source not in header.bindings:
                work.expecting.skip(source)
        if work.gathering is not None:
            work.gathering.lack(source for source in self._plan.wait_for if source not in header.bindings)
        for source in self._plan.stream_from:
            if source not in header.bindings:
                work.merge.of(source).end(0)
                self._note_end(work, source)

    def _second(self, source: str) -> HookError:
        cure = "name it in waitFor" if self._plan.wait_for else "join its sources by waitFor, or let routeFn choose one"
        return HookError(self._plan.name, "receive", f"a second payload, from {source!r}: {cure}")

    def _drop(self, work: RequestWork) -> None:
        work.abort()
        first = work.finish()
        self._let_go(work)
        if first:
            self._inbox.abort(work)

    def _let_go(self, work: RequestWork) -> None:
        """It is over here. Messages that came for it hold memory and its senders' slots: free it now, wherever it
        waits.
        """
        with self._lock:
            early = work.let_go()
        self._discard(work, early)

    def _discard(self, work: RequestWork, early: list[Any]) -> None:
        """early: chunks that waited for an earlier one."""
        for arrival in early:
            arrival.discard()
        if self._joins is not None:
            self._joins.drop(work)

    def _look_back(self, work: RequestWork) -> None:
        """Frees what a thread has just put aside for a request, if the request has ended meanwhile."""
        if work.dead:
            self._let_go(work)

    def _begin_merged(self, work: RequestWork, arrival: MergedArrival) -> None:
        if recorder.active:
            recorder.note(self._events.merged, work.request_id, work.attempt, self._inbox.depth())
        self._begin(work, arrival)

    def _begin(self, work: RequestWork, arrival: PayloadArrival | MergedArrival) -> None:
        """The payload is complete."""
        with self._lock:
            work.expecting.payload()
            self._inbox.put(arrival)
            if work.unsent_ends:
                self._flush_ends(work)
        self._report_complete(work)

    def _note_received(self, work: RequestWork, source: str) -> None:
        """A payload has come that does not begin the request by itself."""
        if not recorder.active:
            return
        if (template := self._events.received.get(source or COORDINATOR)) is not None:
            recorder.note(template, work.request_id, work.attempt)
        else:
            self._record(profile.STAGE_INPUT_RECEIVED, work, from_stage=source)

    def _record_chunk(self, work: RequestWork, arrival: ChunkArrival) -> None:
        facts = {"from_stage": arrival.source, "chunk_id": arrival.index, "depth": len(self._inbox)}
        self._record(profile.STAGE_QUEUE_ENTER, work, kind="chunk", **facts)

    def _record(self, event: str, work: RequestWork, **facts: Any) -> None:
        facts["attempt"] = work.attempt
        recorder.record(event, work.request_id, self._plan.name, facts)

    def _note_end(self, work: RequestWork, source: str, sealed: Sealed | None = None) -> None:
        """Note the end of a stream if all of it is here. The engine is notified once something has begun the
        request."""
        if not work.merge.of(source).closed or source in work.ended_sources:
            return
        work.ended_sources.add(source)
        work.expecting.ended(source)
        if sealed is not None:
            self._inbox.put(EndArrival(work, source, sealed))
        else:
            work.unsent_ends.append(source)
        self._flush_ends(work)

    def _flush_ends(self, work: RequestWork) -> None:
        if work.expecting.begun:
            ends, work.unsent_ends = work.unsent_ends, []
            for source in ends:
                self._inbox.put(events.StreamDone(work.request_id, source, work, work.request))

    def _look_ahead(self, work: RequestWork) -> None:
        """End the wait for a payload that no source will send, or skip a request that nothing can begin here."""
        self._report_complete(work)
        with self._lock:
            outlook = work.expecting.outlook
            notify = outlook is Outlook.NO_PAYLOAD and not work.notified_no_payload
            work.notified_no_payload |= notify
        if outlook is Outlook.SKIPPED:
            self._outcomes.skipped(work)
        elif notify:
            self._inbox.put(events.NoPayload(work.request_id, work))

    def _report_complete(self, work: RequestWork) -> None:
        """Report, once, that all input is here, also of a request that the engine has ended meanwhile. The client's
        input comes from the owner itself."""
        if not work.streamed or self._plan.entry:
            return
        with self._lock:
            report = work.expecting.complete and not work.reported_complete and not work.aborted
            work.reported_complete |= report
        if report:
            self._outcomes.complete(work)
