"""Rank 0 of a TP stage, which alone communicates with other processes; all ranks take what its engine takes, in order.

`LeaderInbox` sends the followers every event at the moment when rank 0's engine takes it, so that all ranks make the
same decisions and their collectives meet. `Leader` is its end over the control plane; the other is `rank_following`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from stage_runtime.engines import events
from stage_runtime.engines.base import Engine, Inbox, Work
from stage_runtime.engines.threads.loops import LoopEngine
from stage_runtime.errors import ConfigurationError, ValueRefused
from stage_runtime.payloads import encoding
from stage_runtime.profiler.recording.templates import Template
from stage_runtime.sockets.channels import Channels
from stage_runtime.stage.work import RequestWork
from stage_runtime.transfers.sending import PendingSend, SendQueues
from stage_runtime.wire.messages import Message, RankHello, RankWork
from stage_runtime.wire.parts import Body
from stage_runtime.wire.values import Chunk

RANK_CREDITS: Final = 64  # followers keep up with rank 0 by construction: collectives hold it back


class Broadcast(Protocol):
    """How a leader's inbox reaches the followers; from the engine's thread."""

    def __call__(self, kind: str, work: RequestWork | None = None, fields: dict[str, Any] | None = None) -> None: ...


def couple(engine: Engine, stage: str) -> None:
    """Make an engine one rank's, before it runs.

    Raises: ConfigurationError: the engine would let ranks see different orders.
    """
    if engine.concurrency != 1:
        raise ConfigurationError(
            f"stages.{stage}: tpSize > 1 needs concurrency=1 (the factory gave {engine.concurrency}): "
            "all ranks must take requests in the same order"
        )
    if isinstance(engine, LoopEngine):
        engine.lockstep = True


class LeaderInbox(Inbox):
    """Rank 0's inbox. Each event that the engine takes is sent to the followers."""

    def __init__(
        self, fail: Callable[[Work, BaseException], None], broadcast: Broadcast, leaves: Template | None = None
    ) -> None:
        super().__init__(fail, leaves)
        self._broadcast = broadcast
        self._loops = False

    def on_arrival(self, wake: Callable[[], None]) -> None:
        self._loops = True  # an event loop polls until the inbox is empty: followers need not see empty polls
        super().on_arrival(wake)

    def get(self, timeout: float | None = None) -> events.Incoming | None:
        while True:
            event = super().get(timeout)
            if self._broadcast_event(event):
                return event

    def get_nowait(self) -> events.Incoming | None:
        while True:
            event = super().get_nowait()
            if event is None and self._loops:
                return None
            if self._broadcast_event(event):
                return event

    def _broadcast_event(self, event: events.Incoming | None) -> bool:
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
                fields = {name: getattr(event, name) for name in ("call_id", "operation", "arguments", "asker")}
                self._broadcast("admin", None, fields)


class WorkKey(NamedTuple):
    """The key of rank 0's request: two coordinators may use one request id at the same time."""

    owner: str
    request_id: str
    attempt: int


NO_WORK: Final = WorkKey("", "", 0)  # for a step without a request


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

    def follower(self, rank: int) -> str | None:
        """Its incarnation on this plane."""
        return next((peer for peer, known in self._followers.items() if known == rank), None)

    def rank_of(self, follower: str) -> int:
        return self._followers[follower]

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


def _chunk_fields(chunk: Chunk) -> dict[str, Any]:
    return {
        "data": chunk.data,
        "modality": chunk.modality,
        "metadata": chunk.metadata,
        "source": chunk.source,
        "index": chunk.index,
        "request": chunk.request,
    }
