"""The ranks of a TP stage in lockstep: rank 0 alone talks to the outside; what its engine takes, all take, in order.

`LeaderInbox` tells the followers every event at the moment when rank 0's engine takes it; `FollowerInbox` gives
exactly that sequence, timeouts included, so that all ranks make the same decisions and their collectives meet.
Results of followers go nowhere (`Silence`). `Leader` and `Follower` are the two ends over the control plane.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from stage_runtime.engines import events
from stage_runtime.engines.base import Engine, Gate, Inbox, Work
from stage_runtime.errors import ConfigurationError
from stage_runtime.relays import payloads
from stage_runtime.relays.fetching import Fetched
from stage_runtime.relays.lanes import Lanes, Parcel
from stage_runtime.rules.streams import Inbound
from stage_runtime.sockets.channels import Channels
from stage_runtime.wire.messages import Body, Message, RankHello, RankWork
from stage_runtime.wire.values import Chunk, StagePayload

log = logging.getLogger(__name__)

REMEMBERED: Final = 4096  # requests of which a follower may still hear after it is through with them
RANK_CREDITS: Final = 64  # followers keep up with rank 0 by construction: collectives hold it back


class Broadcast(Protocol):
    """How a leader's inbox reaches the followers; from the engine's thread."""

    def __call__(self, kind: str, request_id: str = "", fields: dict[str, Any] | None = None) -> None: ...


def check(engine: Engine, stage: str) -> None:
    """Raises: ConfigurationError: the engine would let ranks see different orders."""
    if engine.concurrency != 1:
        raise ConfigurationError(
            f"stages.{stage}: tpSize > 1 needs concurrency=1 (the factory gave {engine.concurrency}): "
            "all ranks must take requests in the same order"
        )


class LeaderInbox(Inbox):
    """Rank 0's. Taking an event tells the followers."""

    def __init__(self, fail: Callable[[Work, BaseException], None], tell: Broadcast) -> None:
        super().__init__(fail)
        self._tell = tell
        self._loops = False

    def on_arrival(self, wake: Callable[[], None]) -> None:
        self._loops = True  # an event loop asks until there is nothing: followers need not hear of nothing
        super().on_arrival(wake)

    def get(self, timeout: float | None = None) -> events.Incoming | None:
        return self._told(super().get(timeout))

    def get_nowait(self) -> events.Incoming | None:
        event = super().get_nowait()
        return self._told(event) if event is not None or not self._loops else None

    def _told(self, event: events.Incoming | None) -> events.Incoming | None:
        match event:
            case None:
                self._tell("close" if self.closed else "nothing")
            case events.Start():
                self._tell("start", event.request_id, {"request": event.payload.request, "data": event.payload.data})
            case events.ChunkIn():
                self._tell("chunk", event.request_id, _chunk_fields(event.chunk))
            case events.StreamDone():
                self._tell("done", event.request_id, {"source": event.source})
            case events.StreamFailed():
                self._tell("failed", event.request_id, {"source": event.source, "error": event.error})
            case events.Abort():
                self._tell("abort", event.request_id)
            case events.Admin():
                fields = {"call_id": event.call_id, "operation": event.operation, "arguments": event.arguments}
                self._tell("admin", "", fields)
        return event


class FollowerInbox(Inbox):
    """Ranks 1..: gives what rank 0's engine took, in that order, whatever timeout is asked for."""

    def __init__(self) -> None:
        super().__init__(lambda work, error: log.error("rank work of %s is broken: %s", work.request_id, error))
        self._sequence: queue.SimpleQueue[events.Incoming | None] = queue.SimpleQueue()
        self._ended = False
        self._loops = False
        self._wake_engine: Callable[[], None] | None = None

    def follow(self, event: events.Incoming | None) -> None:
        """The next thing that rank 0's engine saw; None: nothing, within its timeout."""
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


class FollowedWork:
    """`engines.base.Work` of a follower: never cancelled, rank 0 says what happens."""

    cancelled = False

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.over = False  #: This rank is through with it; what still comes must not begin it anew.


class Silence:
    """A follower's outbox: results are rank 0's to send, failures are told to it."""

    def __init__(self, *, over: Callable[[str], None], failed: Callable[[str, str], None]) -> None:
        self._over = over
        self._failed = failed

    def began(self, work: Work) -> None: ...

    def emit(self, work: Work, chunk: Any) -> Gate | None:
        return None

    def done(self, work: Work, data: Any, *, has_data: bool = True) -> None:
        self._over(work.request_id)

    def consumed(self, work: Work, source: str, count: int) -> None: ...

    def fail(self, work: Work, error: BaseException, *, hook: str = "run") -> None:
        log.error("request %s failed on this rank", work.request_id, exc_info=error)
        self._over(work.request_id)
        self._failed(work.request_id, f"{type(error).__name__}: {error}")


class Leader:
    """Rank 0's side: finds the followers and tells them what happens. Made before the stage."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self.endpoints = tuple(endpoints)
        self.ready: set[str] = set()  #: Followers whose engine is loaded.
        self._followers: dict[str, int] = {}  #: incarnation -> rank
        self._answered: set[str] = set()  #: Endpoints behind which a follower has answered.
        self._index = 0
        self._channels: Channels
        self._lanes: Lanes
        self._stage = ""

    def wire(self, channels: Channels, lanes: Lanes, stage: str) -> None:
        self._channels = channels
        self._lanes = lanes
        self._stage = stage

    def greet(self, me: Callable[[str], RankHello]) -> None:
        """Say who leads, to whoever has not answered."""
        for endpoint in self.endpoints:
            if endpoint not in self._answered:
                self._channels.connect("", endpoint).say(me(endpoint))

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

    def tell(self, kind: str, request_id: str = "", fields: dict[str, Any] | None = None) -> None:
        """`Broadcast`: from the engine's thread, in the order in which it takes events."""
        index = self._index
        self._index += 1
        if fields is None:
            for follower in self._followers:
                self._channels.send(follower, RankWork(index, kind, request_id))
            return
        extracted = payloads.extract(fields, where="payload", as_fields=True)

        def make(body: Body) -> Message:
            return RankWork(index, kind, request_id, body)

        for follower, rank in self._followers.items():
            parcel = Parcel(FollowedParcel(request_id), extracted, make, "auto")
            self._lanes.ship((self._stage, f"rank {rank}", follower), parcel, credits=RANK_CREDITS)


class FollowedParcel:
    """`relays.lanes.Wanted` of what goes to followers: always wanted, they take the same steps as rank 0."""

    aborted = False
    attempt = 0

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id


class Follower:
    """The side of ranks 1..: puts what rank 0 tells into its engine's inbox, in order."""

    def __init__(self, inbox: FollowerInbox) -> None:
        self._inbox = inbox
        self._order: Inbound[tuple[RankWork, Fetched | None]] = Inbound()
        self._works: dict[str, FollowedWork] = {}  #: Oldest first; those that are over stay for a while.

    def work(self, message: RankWork, fetched: Fetched | None) -> None:
        """One step has arrived, perhaps before an earlier one."""
        for step, body in self._order.offer(message.index, (message, fetched)):
            self._step(step, body)

    def over(self, request_id: str) -> None:
        """This rank is through with a request; on the engine's thread. It may be so before rank 0 is."""
        work = self._works.get(request_id)
        if work is not None:
            work.over = True

    def _step(self, message: RankWork, fetched: Fetched | None) -> None:
        if message.kind == "close":
            self._inbox.close()
            return
        fields = fetched.open() if fetched is not None else {}
        self._inbox.follow(self._event(message.kind, message.request_id, fields))

    def _event(self, kind: str, request_id: str, fields: dict[str, Any]) -> events.Incoming | None:
        work = self._work(kind, request_id) if request_id else None
        match kind:
            case "start":
                return events.Start(request_id, StagePayload(request=fields["request"], data=fields["data"]), work)
            case "chunk":
                return events.ChunkIn(request_id, Chunk(**fields), work)
            case "done":
                return events.StreamDone(request_id, fields["source"], work)
            case "failed":
                return events.StreamFailed(request_id, fields["source"], fields["error"], work)
            case "abort":
                self._works.pop(request_id, None)
                return events.Abort(request_id, work)
            case "admin":
                return events.Admin(fields["call_id"], fields["operation"], fields["arguments"], lambda _: None)
        return None

    def _work(self, kind: str, request_id: str) -> FollowedWork:
        work = self._works.get(request_id)
        if work is None or (work.over and kind == "start"):  # the same id again, or a next attempt
            self._works.pop(request_id, None)
            work = self._works[request_id] = FollowedWork(request_id)
            if len(self._works) > REMEMBERED:
                del self._works[next(iter(self._works))]
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
