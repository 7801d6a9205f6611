"""Ranks 1.. of a TP stage: each takes the steps of rank 0, in order, timeouts included.

`Follower` puts what rank 0 sends into the engine's `FollowerInbox`; its results are discarded (`FollowerOutput`). The
other end is `tensor_parallel`. Called by `follower`.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

from stage_runtime.engines import events
from stage_runtime.engines.base import Gate, Inbox, Work
from stage_runtime.errors import RequestError, describe
from stage_runtime.payloads import devices
from stage_runtime.profiler import events as profile
from stage_runtime.profiler.recording.recorder import recorder
from stage_runtime.rules.flow.streams import Inbound
from stage_runtime.rules.requests.failures import failure_of, log_failure
from stage_runtime.stage.ranks.tensor_parallel import NO_WORK, WorkKey
from stage_runtime.transfers.receiving import Fetched
from stage_runtime.wire.messages import RankWork
from stage_runtime.wire.values import Chunk, StagePayload

log = logging.getLogger(__name__)

REMEMBERED: Final = 4096  # requests whose messages may still reach a follower after it has finished them


class FollowerInbox(Inbox):
    """The inbox of ranks 1..: returns the events that rank 0's engine took, in that order, whatever the timeout is."""

    def __init__(self) -> None:
        super().__init__(lambda work, error: log.error("rank work of %s is broken: %s", work.request_id, error))
        self._sequence: queue.SimpleQueue[events.Incoming | None] = queue.SimpleQueue()
        self._ended = False
        self._loops = False
        self._wake_engine: Callable[[], None] | None = None

    def follow(self, event: events.Incoming | None) -> None:
        """Add the next event of rank 0's engine; None: its `get` timed out."""
        self._sequence.put(event)
        if self._wake_engine is not None:
            self._wake_engine()

    def close(self) -> None:
        self._ended = True
        self.follow(None)

    def on_arrival(self, wake: Callable[[], None]) -> None:
        self._wake_engine = wake
        wake()

    def get(self, timeout: float | None = None) -> events.Incoming | None:
        if self.closed:
            return None
        self.taken += 1
        return self._sequence.get()

    def get_nowait(self) -> events.Incoming | None:
        if self._wake_engine is None:
            return self.get()
        while not self._sequence.empty():
            event = self._sequence.get()
            self.taken += 1
            if event is not None and not _is_late(event):
                return event
        return None

    @property
    def closed(self) -> bool:
        return self._ended and self._sequence.empty()

    def __len__(self) -> int:
        return self._sequence.qsize()


class FollowedWork:
    """`engines.base.Work` of a follower: never cancelled, rank 0 decides what happens."""

    cancelled = False

    def __init__(self, key: WorkKey) -> None:
        self.key = key
        self.bindings: dict[str, str] = {}  #: Rank 0 has the links.
        self.over = False  #: This rank has finished it; late messages must not begin it anew.
        self.at_engine = False
        self.left_depth: int | None = None

    @property
    def request_id(self) -> str:
        return self.key.request_id

    @property
    def attempt(self) -> int:
        return self.key.attempt


class FollowerOutput:
    """A follower's outbox: drops results, which rank 0 sends, and reports failures to rank 0."""

    def __init__(
        self,
        stage: str,
        *,
        failed: Callable[[WorkKey, str], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._stage = stage
        self._failed = failed
        self._crashed = crashed

    def began(self, work: Work) -> None:
        if recorder.active:
            self._record(profile.STAGE_RUN_START, work)

    def emit(self, work: Work, chunk: Any) -> Gate | None:
        return None

    def done(self, work: Work, data: Any, *, has_data: bool = True) -> None:
        self._ended(work)

    def consumed(self, work: Work, source: str, count: int) -> int:
        return count

    def turn_away(self, work: Work, error: RequestError) -> None: ...

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def letting_go(self) -> None: ...

    def settle(self) -> None: ...

    def fail(self, work: Work, error: BaseException, *, hook: str = "run") -> None:
        log_failure(work.request_id, failure_of(error, "this rank", hook), error)
        self._ended(work, error=type(error).__name__)
        self._failed(_followed(work).key, describe(error))

    def crashed(self, error: BaseException) -> None:
        self._crashed(error)

    def _ended(self, work: Work, **facts: Any) -> None:
        followed = _followed(work)
        if recorder.active and not followed.over:
            self._record(profile.STAGE_RUN_END, work, **facts)
        followed.over = True  # the work itself: the follower forgets it with its abort, which may wait for the engine

    def _record(self, event: str, work: Work, **facts: Any) -> None:
        recorder.record(event, work.request_id, self._stage, {**facts, "attempt": work.attempt})


def _unasked(asker: str, call_id: str, value: Any) -> None:
    """The reply of a follower that nobody asks: it drops the answer."""


class Follower:
    """The side of ranks 1..: puts what rank 0 sends into its engine's inbox, in order."""

    def __init__(
        self, inbox: FollowerInbox, device: str = "cpu", *, reply: Callable[[str, str, Any], None] = _unasked
    ) -> None:
        """device: where the tensors lie that this rank is given.

        reply: takes an operation's asker, its call and what this rank's engine answers. Called in any thread.
        """
        self._inbox = inbox
        self._reply = reply
        self._device = device
        self._order: Inbound[tuple[RankWork, Fetched | None]] = Inbound()
        self._works: dict[WorkKey, FollowedWork] = {}  #: Oldest first; those that are over stay for a while.

    def work(self, message: RankWork, fetched: Fetched | None) -> None:
        """One step has arrived, perhaps before an earlier one."""
        for step, body in self._order.offer(message.index, (message, fetched)):
            self._step(step, body)

    def abort_all(self) -> None:
        """Abort everything: rank 0 is gone, or this process ends, and no other event would end it."""
        for work in list(self._works.values()):
            if not work.over:
                self._inbox.follow(events.Abort(work.request_id, work))

    def _step(self, message: RankWork, fetched: Fetched | None) -> None:
        if message.kind == "close":
            self._inbox.close()
            return
        fields = fetched.open() if fetched is not None else {}
        for name in fields.keys() & {"data", "metadata"}:
            fields[name] = devices.moved(fields[name], self._device)
        key = WorkKey(message.owner, message.request_id, message.attempt)
        self._inbox.follow(self._event(message.kind, key, fields))

    def _event(self, kind: str, key: WorkKey, fields: dict[str, Any]) -> events.Incoming | None:
        request_id = key.request_id
        work = self._work(key) if key != NO_WORK else None
        match kind:
            case "start":
                return events.Start(request_id, StagePayload(request=fields["request"], data=fields["data"]), work)
            case "chunk":
                return events.ChunkIn(request_id, Chunk(**fields), work)
            case "done":
                return events.StreamDone(request_id, fields["source"], work, fields["request"])
            case "no payload":
                return events.NoPayload(request_id, work)
            case "failed":
                return events.StreamFailed(request_id, fields["source"], fields["error"], work)
            case "abort":
                self._works.pop(key, None)
                return events.Abort(request_id, work)
            case "admin":
                asker, call_id = fields["asker"], fields["call_id"]
                reply = partial(self._reply, asker, call_id)
                return events.Admin(call_id, fields["operation"], fields["arguments"], reply, asker)
        return None

    def _work(self, key: WorkKey) -> FollowedWork:
        work = self._works.get(key)
        if work is None:
            work = self._works[key] = FollowedWork(key)
            if len(self._works) > REMEMBERED:
                over = next((one for one, known in self._works.items() if known.over), None)
                if over is not None:  # one that is not over is still to be ended
                    del self._works[over]
        return work


def _is_late(event: events.Incoming) -> bool:
    """Rank 0 took it, and this rank has finished its request already: begun anew, it would wait for rank 0."""
    return not isinstance(event, events.Abort | events.Admin | events.Stalled) and event.work.over


def _followed(work: Work) -> FollowedWork:
    assert isinstance(work, FollowedWork)
    return work
