"""The fan-in of one stage: its hook thread opens the payloads, asks ``waitForFn``, and merges.

Here: what waits for the hooks. Not here: what may still come of a request (`rules.flow.expecting`), what follows from a
merged payload (`stage_input`, which calls this).
"""

from __future__ import annotations

from collections.abc import Callable

from stage_runtime.engines.backlog import Backlog
from stage_runtime.profiler.recording.recorder import recorder, set_active_stage
from stage_runtime.rules.flow.gathering import Gathering
from stage_runtime.stage.hooks import Hooks
from stage_runtime.stage.inputs.arrivals import MergedArrival, Sealed, open_payload
from stage_runtime.stage.work import RequestWork


class Joins:
    """Payloads and skips in the order of their arrival. `run` has a thread of its own; `put` and `drop` any."""

    def __init__(
        self,
        stage: str,
        hooks: Hooks,
        *,
        begin: Callable[[RequestWork, MergedArrival], None],
        fail: Callable[[RequestWork, BaseException, str], None],
        look_ahead: Callable[[RequestWork], None],
    ) -> None:
        """begin: takes a request's merged payload. look_ahead: no payload can come of it any more."""
        self._stage = stage
        self._hooks = hooks
        self._begin = begin
        self._fail = fail
        self._look_ahead = look_ahead
        self._waiting: Backlog[tuple[RequestWork, str, Sealed | None]] = Backlog()

    def put(self, work: RequestWork, source: str, sealed: Sealed | None) -> None:
        """A payload of ``source``; None: it sends none."""
        self._waiting.put((work, source, sealed), work)

    def drop(self, work: RequestWork) -> None:
        """The request is over here: free what waits of it."""
        for _, _, sealed in self._waiting.drop(work):
            if sealed is not None:
                sealed.discard()

    def close(self) -> None:
        self._waiting.close()

    def run(self) -> None:
        """Gathers what waits, one after another, until it is closed. The stage's thread for hooks runs it."""
        set_active_stage(self._stage)  # what the hooks record belongs to it
        while (item := self._waiting.take()) is not None:
            work, source, sealed = item
            if work.dead:
                if sealed is not None:
                    sealed.discard()
                continue
            try:
                self._gather(work, source, sealed)
            except BaseException as error:
                self._fail(work, error, "mergeFn")
            del item, work, sealed

    def _gather(self, work: RequestWork, source: str, sealed: Sealed | None) -> None:
        gathering = work.gathering
        if gathering is None:  # it has ended
            if sealed is not None:
                sealed.discard()
            return
        if sealed is None:
            gathering.skip(source)
            self._check_possible(work, gathering)
            return
        if gathering.waits_after(source):
            # Two requests that wait for each other's slots would deadlock, however many slots there are.
            sealed.copy_out()
        if recorder.traces is not None:  # the hooks may make spans before the stage's function begins
            recorder.traces.working(work.request_id, self._stage, work.traceparent)
        payload = open_payload(work, sealed)
        gathering.arrive(source, payload)
        if not gathering.resolved:
            gathering.resolve(self._hooks.active_sources(work.request_id, source, payload))
        if gathering.complete and work.claim_payload():
            self._begin(work, MergedArrival(work, self._hooks.merge(gathering.take())))
        else:
            self._check_possible(work, gathering)

    def _check_possible(self, work: RequestWork, gathering: Gathering) -> None:
        if not gathering.possible:
            gathering.take()  # each may hold a slot of its sender
            work.expecting.no_payload()
            self._look_ahead(work)
