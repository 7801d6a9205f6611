"""What comes to a stage: payloads, chunks, ends, aborts; checked, put in order, joined, and put into the inbox.

Called by the I/O thread for what comes over the wire and by worker threads of sibling stages for what is passed
inside the process, so its state stands behind one lock. No user code runs here: fan-in hooks have a thread.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterable
from threading import Lock, Thread

from omnipipeline_spec.plan import StagePlan
from stage_runtime.engines import events
from stage_runtime.engines.base import Engine, Inbox
from stage_runtime.engines.simple import TakesNoChunks
from stage_runtime.errors import ProtocolError
from stage_runtime.rules.gathering import Gathering
from stage_runtime.rules.tombstones import Tombstones
from stage_runtime.stage.arrivals import ChunkArrival, MergedArrival, PayloadArrival, Sealed, open_payload
from stage_runtime.stage.hooks import Hooks
from stage_runtime.stage.work import RequestWork
from stage_runtime.wire.messages import Failure, Header, Timing

log = logging.getLogger(__name__)


class Intake:
    """One stage's side towards its sources."""

    def __init__(
        self, plan: StagePlan, hooks: Hooks, inbox: Inbox, fail: Callable[[RequestWork, BaseException, str], None]
    ) -> None:
        self.engine: Engine | None = None  #: Set when it is loaded.
        self._plan = plan
        self._hooks = hooks
        self._inbox = inbox
        self._fail = fail
        self._sources = frozenset(plan.inputs_from)
        self._works: dict[tuple[str, str], RequestWork] = {}  #: By (owner, request id); those not over here.
        self._dead = Tombstones()
        self._lock = Lock()
        self._joins: queue.SimpleQueue[tuple[RequestWork, str, Sealed] | None] | None = None
        if plan.wait_for:
            self._joins = queue.SimpleQueue()
            Thread(target=self._join, name=f"{plan.name}-joins", daemon=True).start()

    # --- what comes ---------------------------------------------------------------------------------------------

    def payload(self, header: Header, source: str, sealed: Sealed, timings: tuple[Timing, ...] = ()) -> None:
        """A payload of ``source`` (of the coordinator: empty) has arrived."""
        work = self._work(header)
        if work is None:
            sealed.discard()
            return
        work.learn(timings)
        work.queued()
        if self._joins is not None and source:
            self._joins.put((work, source, sealed))
            return
        if (source and source not in self._sources) or not work.claim_payload():
            log.warning("%s: unexpected payload from %r for %s dropped", self._plan.name, source, work.request_id)
            sealed.discard()
            return
        self._inbox.put(PayloadArrival(work, sealed))

    def chunk(
        self, header: Header, source: str, index: int, modality: str | None, sealed: Sealed, weight: int = 1
    ) -> None:
        """Chunk ``index`` of ``source`` has arrived, perhaps before an earlier one."""
        work = self._work(header)
        if work is None:
            sealed.discard()
            return
        if self.engine is not None and not self.engine.takes_chunks:
            self._fail(work, TakesNoChunks(source), "chunks")
            return
        work.queued()
        with self._lock:  # offered and put in one step: two threads must not swap what became ready
            try:
                ready = work.merge.of(source).offer(index, ChunkArrival(work, source, index, modality, sealed, weight))
            except ProtocolError as error:
                failure: ProtocolError | None = error
            else:
                failure = None
                for arrival in ready:
                    work.weigh(source, arrival.weight)
                    self._inbox.put(arrival)
                self._tell_end(work, source)
        if failure is not None:
            self._fail(work, failure, "chunks")

    def end(self, header: Header, source: str, total: int) -> None:
        """``source`` has sent ``total`` chunks and sends no more."""
        work = self._work(header)
        if work is None:
            return
        try:
            with self._lock:
                work.merge.of(source).end(total)
                self._tell_end(work, source)
        except ProtocolError as error:
            self._fail(work, error, "chunks")

    def broken(self, header: Header, source: str, failure: Failure) -> None:
        """``source`` failed in mid-stream."""
        work = self._work(header)
        if work is not None:
            self._inbox.put(events.StreamFailed(work.request_id, source, failure.message, work, failure))

    def lost(self, header: Header, error: Exception) -> None:
        """A payload was announced and could not be fetched."""
        work = self._work(header)
        if work is not None:
            self._fail(work, error, "relay")

    # --- what ends ----------------------------------------------------------------------------------------------

    def abort(self, owner: str, request_id: str, attempt: int) -> None:
        """Nobody waits for it: drop what is here, and what still comes."""
        with self._lock:
            self._dead.add(owner, request_id, attempt, time.monotonic())
            work = self._works.get((owner, request_id))
            if work is None or work.attempt > attempt:
                return
            del self._works[owner, request_id]
        self._drop(work)

    def abort_owner(self, owner: str) -> int:
        """A coordinator is gone, and everybody who waited for its requests. Returns how many those were."""
        with self._lock:
            orphans = [work for work in self._works.values() if work.owner == owner]
        for work in orphans:
            self.abort(owner, work.request_id, work.attempt)
        return len(orphans)

    def abort_all(self) -> None:
        """This process lives on under another incarnation: whoever waited for the old one does no more."""
        for work in self.works():
            self.abort(work.owner, work.request_id, work.attempt)

    def forget(self, work: RequestWork) -> None:
        """It is over here; late messages of it are dropped."""
        with self._lock:
            self._dead.add(work.owner, work.request_id, work.attempt, time.monotonic())
            if self._works.get((work.owner, work.request_id)) is work:
                del self._works[work.owner, work.request_id]

    def find(self, owner: str, request_id: str, attempt: int) -> RequestWork | None:
        work = self._works.get((owner, request_id))
        return work if work is not None and work.attempt == attempt else None

    def works(self) -> Iterable[RequestWork]:
        return list(self._works.values())

    def close(self) -> None:
        if self._joins is not None:
            self._joins.put(None)

    # --- inside -------------------------------------------------------------------------------------------------

    def _work(self, header: Header) -> RequestWork | None:
        """The request's work, made if this is the first we hear of it; None when it is over here."""
        superseded = None
        with self._lock:
            if self._dead.has(header.owner, header.request_id, header.attempt):
                return None
            work = self._works.get((header.owner, header.request_id))
            if work is not None and work.attempt > header.attempt:
                return None
            if work is None or work.attempt < header.attempt:
                superseded = work
                plan = self._plan
                gathering = None
                if plan.wait_for:
                    gathering = Gathering(plan.name, plan.wait_for, static=not self._hooks.has_wait_for)
                work = RequestWork(header, gathering=gathering, sources=plan.stream_from, lockstep=plan.tp_size > 1)
                self._works[header.owner, header.request_id] = work
        if superseded is not None:
            self._drop(superseded)
        return work

    def _drop(self, work: RequestWork) -> None:
        work.abort()
        if work.finish():
            self._inbox.put(events.Abort(work.request_id, work))

    def _tell_end(self, work: RequestWork, source: str) -> None:
        if work.merge.of(source).closed and source not in work.ended_sources:
            work.ended_sources.add(source)
            self._inbox.put(events.StreamDone(work.request_id, source, work))

    def _join(self) -> None:
        """The stage's hook thread: opens payloads, asks wait_for_fn, merges."""
        assert self._joins is not None
        while (item := self._joins.get()) is not None:
            work, source, sealed = item
            if work.dead:
                sealed.discard()
                continue
            try:
                self._gather(work, source, sealed)
            except BaseException as error:
                self._fail(work, error, "merge_fn")
            del item, work, sealed

    def _gather(self, work: RequestWork, source: str, sealed: Sealed) -> None:
        gathering = work.gathering
        assert gathering is not None
        if gathering.waits_after(source):
            # Two requests that wait for each other's slots would never go on, however many slots there are.
            sealed.copy_out()
        payload = open_payload(work, sealed)
        if not gathering.arrive(source, payload):
            log.warning("%s: unexpected payload from %r for %s dropped", self._plan.name, source, work.request_id)
            return
        if not gathering.resolved:
            gathering.resolve(self._hooks.active_sources(work.request_id, source, payload))
        if gathering.complete and work.claim_payload():
            self._inbox.put(MergedArrival(work, self._hooks.merge(gathering.take())))
