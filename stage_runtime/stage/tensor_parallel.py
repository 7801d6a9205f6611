"""The ranks of a TP stage in lockstep: rank 0 alone talks to the outside; what its engine takes, all take, in order.

`LeaderInbox` sends the followers every event at the moment when rank 0's engine takes it; `FollowerInbox` gives
exactly that sequence, timeouts included, so that all ranks make the same decisions and their collectives meet.
Results of followers go nowhere (`FollowerOutput`). `Leader` and `Follower` are the two ends over the control plane.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from stage_runtime.engines import events
from stage_runtime.engines.base import Engine, Gate, Inbox, Work
from stage_runtime.errors import ConfigurationError, RequestError, ValueRefused, describe
from stage_runtime.payloads import encoding
from stage_runtime.rules.failures import failure_of, log_failure
from stage_runtime.rules.streams import Inbound
from stage_runtime.sockets.channels import Channels
from stage_runtime.stage.work import RequestWork
from stage_runtime.transfers.receiving import Fetched
from stage_runtime.transfers.sending import PendingSend, SendQueues
from stage_runtime.wire.messages import Body, Message, RankHello, RankWork
from stage_runtime.wire.values import Chunk, StagePayload

log = logging.getLogger(__name__)

REMEMBERED: Final = 4096  # requests of which a follower may still hear after it is through with them
RANK_CREDITS: Final = 64  # followers keep up with rank 0 by construction: collectives hold it back


class Broadcast(Protocol):
    """How a leader's inbox reaches the followers; from the engine's thread."""

    def __call__(self, kind: str, work: RequestWork | None = None, fields: dict[str, Any] | None = None) -> None: ...


def check(engine: Engine, stage: str) -> None:
    """Raises: ConfigurationError: the engine would let ranks see different orders."""
    if engine.concurrency != 1:
        raise ConfigurationError(
            f"stages.{stage}: tpSize > 1 needs concurrency=1 (the factory gave {engine.concurrency}): "
            "all ranks must take requests in the same order"
        )


class LeaderInbox(Inbox):
    """Rank 0's inbox. Each event that the engine takes is sent to the followers."""

    def __init__(self, fail: Callable[[Work, BaseException], None], broadcast: Broadcast) -> None:
        super().__init__(fail)
        self._broadcast = broadcast
        self._loops = False

    def on_arrival(self, wake: Callable[[], None]) -> None:
        self._loops = True  # an event loop polls until the inbox is empty: followers need not see empty polls
        super().on_arrival(wake)

    def get(self, timeout: float | None = None) -> events.Incoming | None:
        while True:
            event = super().get(timeout)
            if self._told(event):
                return event

    def get_nowait(self) -> events.Incoming | None:
        while True:
            event = super().get_nowait()
            if event is None and self._loops:
                return None
            if self._told(event):
                return event

    def _told(self, event: events.Incoming | None) -> bool:
        """Send the event to the followers.

        False: it cannot be encoded (for example a merged value): its request fails on all ranks.
        """
        try:
            self._send(event)
        except ValueRefused as error:
            if event is None or isinstance(event, events.Admin | events.Stalled):
                raise
            self._fail(event.work, error)
            return False
        return True

    def _send(self, event: events.Incoming | None) -> None:
        match event:
            case None:
                self._broadcast("close" if self.closed else "nothing")
            case events.Start():
                self._broadcast("start", event.work, {"request": event.payload.request, "data": event.payload.data})
            case events.ChunkIn():
                self._broadcast("chunk", event.work, _chunk_fields(event.chunk))
            case events.StreamDone():
                self._broadcast("done", event.work, {"source": event.source, "request": event.request})
            case events.NoPayload():
                self._broadcast("no payload", event.work)
            case events.StreamFailed():
                self._broadcast("failed", event.work, {"source": event.source, "error": event.error})
            case events.Abort():
                self._broadcast("abort", event.work)
            case events.Admin():
                fields = {"call_id": event.call_id, "operation": event.operation, "arguments": event.arguments}
                self._broadcast("admin", None, fields)


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
            if event is not None:
                return event
        return None

    @property
    def closed(self) -> bool:
        return self._ended and self._sequence.empty()

    def __len__(self) -> int:
        return self._sequence.qsize()


class WorkKey(NamedTuple):
    """Which request of rank 0's: two coordinators may use one request id at the same time."""

    owner: str
    request_id: str
    attempt: int


NO_WORK: Final = WorkKey("", "", 0)  # for a step without a request


class FollowedWork:
    """`engines.base.Work` of a follower: never cancelled, rank 0 decides what happens."""

    cancelled = False

    def __init__(self, key: WorkKey) -> None:
        self.key = key
        self.bindings: dict[str, str] = {}  #: Rank 0 has the links.
        self.over = False  #: This rank is through with it; what still comes must not begin it anew.
        self.at_engine = False

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
        *,
        over: Callable[[WorkKey], None],
        failed: Callable[[WorkKey, str], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._over = over
        self._failed = failed
        self._crashed = crashed

    def began(self, work: Work) -> None: ...

    def emit(self, work: Work, chunk: Any) -> Gate | None:
        return None

    def done(self, work: Work, data: Any, *, has_data: bool = True) -> None:
        self._over(_followed(work).key)

    def consumed(self, work: Work, source: str, count: int) -> int:
        return count

    def turn_away(self, work: Work, error: RequestError) -> None: ...

    def letting_go(self) -> None: ...

    def settle(self) -> None: ...

    def fail(self, work: Work, error: BaseException, *, hook: str = "run") -> None:
        log_failure(work.request_id, failure_of(error, "this rank", hook), error)
        key = _followed(work).key
        self._over(key)
        self._failed(key, describe(error))

    def crashed(self, error: BaseException) -> None:
        self._crashed(error)


class Leader:
    """Rank 0's side: finds the followers and sends them every step. Made before the stage."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self.endpoints = tuple(endpoints)
        self.ready: set[str] = set()  #: Followers whose engine is loaded.
        self._followers: dict[str, int] = {}  #: incarnation -> rank
        self._answered: set[str] = set()  #: Endpoints behind which a follower has answered.
        self._index = 0
        self._channels: Channels
        self._send_queues: SendQueues
        self._lost: Callable[[BaseException], None]
        self._stage = ""

    def wire(
        self, channels: Channels, send_queues: SendQueues, stage: str, lost: Callable[[BaseException], None]
    ) -> None:
        """lost: called when a step cannot be sent to a follower, whose engine would wait for it for ever."""
        self._channels = channels
        self._send_queues = send_queues
        self._stage = stage
        self._lost = lost

    def greet(self, me: Callable[[str], RankHello]) -> None:
        """Send RankHello to followers that have not answered."""
        for endpoint in self.endpoints:
            if endpoint not in self._answered:
                self._channels.connect("", endpoint).send_unordered(me(endpoint))

    def introduced(self, sender: str, message: RankHello) -> bool:
        """A follower has answered."""
        if self._channels.name(message.via, sender) is None:
            return False
        self._answered.add(message.via)
        self._followers[sender] = message.rank
        return True

    def complete(self) -> bool:
        """All followers are here and loaded."""
        return len(self.ready) == len(self.endpoints)

    def is_follower(self, peer: str) -> bool:
        return peer in self._followers

    def broadcast(self, kind: str, work: RequestWork | None = None, fields: dict[str, Any] | None = None) -> None:
        """`Broadcast`: from the engine's thread, in the order in which it takes events."""
        index = self._index
        key = NO_WORK if work is None else WorkKey(work.owner, work.request_id, work.attempt)
        if fields is None:
            for follower in self._followers:
                self._channels.send(follower, RankWork(index, kind, key.request_id, key.owner, key.attempt))
            self._index += 1
            return
        extracted = encoding.extract(fields, where="payload", as_fields=True)

        def make(body: Body) -> Message:
            return RankWork(index, kind, key.request_id, key.owner, key.attempt, body)

        for follower, rank in self._followers.items():
            pending = PendingSend(StepSend(key), extracted, make, "auto", self._lost)
            self._send_queues.ship((self._stage, f"rank {rank}", follower), pending, credits=RANK_CREDITS)
        self._index += 1  # only after a step was sent: followers wait for each number, and a refused step takes none


class StepSend:
    """`transfers.sending.SendOwner` of what goes to followers: always wanted, they take the same steps as rank 0."""

    aborted = False

    def __init__(self, key: WorkKey) -> None:
        self.owner, self.request_id, self.attempt = key


class Follower:
    """The side of ranks 1..: puts what rank 0 sends into its engine's inbox, in order."""

    def __init__(self, inbox: FollowerInbox) -> None:
        self._inbox = inbox
        self._order: Inbound[tuple[RankWork, Fetched | None]] = Inbound()
        self._works: dict[WorkKey, FollowedWork] = {}  #: Oldest first; those that are over stay for a while.

    def work(self, message: RankWork, fetched: Fetched | None) -> None:
        """One step has arrived, perhaps before an earlier one."""
        for step, body in self._order.offer(message.index, (message, fetched)):
            self._step(step, body)

    def over(self, key: WorkKey) -> None:
        """This rank is through with a request; on the engine's thread. It may be so before rank 0 is."""
        work = self._works.get(key)
        if work is not None:
            work.over = True

    def abort_all(self) -> None:
        """Rank 0 is gone, or this process ends: nothing that was begun here is ended otherwise."""
        for work in list(self._works.values()):
            if not work.over:
                self._inbox.follow(events.Abort(work.request_id, work))

    def _step(self, message: RankWork, fetched: Fetched | None) -> None:
        if message.kind == "close":
            self._inbox.close()
            return
        fields = fetched.open() if fetched is not None else {}
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
                return events.Admin(fields["call_id"], fields["operation"], fields["arguments"], lambda _: None)
        return None

    def _work(self, key: WorkKey) -> FollowedWork:
        work = self._works.get(key)
        if work is None:
            work = self._works[key] = FollowedWork(key)
            if len(self._works) > REMEMBERED:
                del self._works[next(iter(self._works))]
        return work


def _followed(work: Work) -> FollowedWork:
    assert isinstance(work, FollowedWork)
    return work


def _chunk_fields(chunk: Chunk) -> dict[str, Any]:
    return {
        "data": chunk.data,
        "modality": chunk.modality,
        "metadata": chunk.metadata,
        "source": chunk.source,
        "index": chunk.index,
        "request": chunk.request,
    }
