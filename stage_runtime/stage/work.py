"""The state of one request at one stage: inputs received, outputs sent, aborted or not."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from threading import Lock
from typing import Any, Final

import msgspec

from stage_runtime.engines.gates import Gate, Parking
from stage_runtime.payloads import encoding
from stage_runtime.rules.flow.expecting import Expecting
from stage_runtime.rules.flow.gathering import Gathering
from stage_runtime.rules.flow.streams import STREAM_WINDOW, Merge, Outbound
from stage_runtime.stage.observing.busy import Busy
from stage_runtime.transfers.sending import attempt_key
from stage_runtime.wire import outputs
from stage_runtime.wire.parts import Header, Member, Timing
from stage_runtime.wire.values import Chunk, OmniRequest, detached

_NO_STREAMS: Final = Merge(())
#: The lock of all works: held for a few steps at a time, so it serves as well as one made for each visit.
_lock: Final = Lock()


class Fate(msgspec.Struct, eq=False):
    """The facts that user code may ask of a request, kept apart from its work: a request that knew its work would be a
    cycle, and the slots of its senders would wait for the garbage collector.
    """

    is_cancelled: bool = False

    def cancelled(self) -> bool:
        return self.is_cancelled


class RequestWork(msgspec.Struct, eq=False, kw_only=True):
    """`engines.base.Work`. Made by a request's first message at this stage, whatever it is.

    A Struct, because one is made per visit: its fields are set in C.
    Invariant: after ``over`` nothing more is sent for it, and every gate is open.
    """

    request_id: str
    attempt: int
    owner: str
    bindings: dict[str, str]
    traceparent: str | None
    members: tuple[Member, ...]  #: Brought along for the stages after this one.
    away: tuple[str, ...]  #: The same as of `Header`.
    streamed: bool  #: The same as of `Header`.
    deadline: float | None
    merge: Merge
    expecting: Expecting
    fate: Fate
    gathering: Gathering | None = None
    parking: Parking | None = None
    busy: Busy | None = None  #: The busy share of the stage.
    device: str = "cpu"  #: The device where the tensors lie that the stage is given.
    lockstep: bool = False  #: The ranks of a TP stage compute it: what one begins all end, or a collective would hang.
    joined: bool = False  #: Several inputs may arrive: note when each does.
    request: OmniRequest | None = None
    ended_sources: set[str] = set()  #: Streams that have ended, whether the engine has been notified or not.
    unsent_ends: list[str] = []  #: Those of them that the engine gets when something begins the request.
    notified_no_payload: bool = False
    reported_complete: bool = False  #: Its owner knows that all its input is here.
    timings: dict[str, Timing] = {}  #: Timings of the stages before this one.
    aborted: bool = False  #: The request was aborted: no client waits for it.
    over: bool = False  #: Done, failed or aborted here.
    dead: bool = False  #: Aborted or over: its output is discarded.
    cancelled: bool = False  #: User code and engines should stop working on it.
    served: bool = False  #: Its payload was complete, and its result was given here.
    at_engine: bool = False  #: See `engines.base.Work`.
    left_depth: int | None = None
    has_payload: bool = False  #: The stage's payload is complete. One that takes a stream may finish without it.
    queued_at: float | None = None
    began_at: float | None = None
    _received_at: dict[tuple[str, bool], float] = {}  #: (source, by stream) -> when its first input arrived; if joined.
    _streamed_at: dict[str, float] = {}  #: target -> when its first chunk was sent.
    _outbound: dict[str, Outbound] = {}
    _weights: dict[str, deque[int]] = {}  #: source -> of its chunks that were not taken, in order
    _unreported: dict[str, int] = {}  #: source -> weight of chunks taken and not reported to the producer yet
    _held: dict[str, list[Chunk]] = {}  #: target in ``streamAtEnd`` -> its chunks so far.
    _gate: Gate | None = None
    _shows: bool = False  #: Something was given that the client's route can show.
    _unshown: str | None = None  #: The type of the first thing that it cannot.

    @property
    def key(self) -> str:
        """Its key in the process and its relays: unlike ``request_id``, no other attempt or owner has it."""
        return attempt_key(self.owner, self.request_id, self.attempt)

    def abort(self) -> None:
        self.aborted = self.dead = True
        if not self.lockstep:
            self.cancelled = True
            self.fate.is_cancelled = True

    def header(self) -> Header:
        """The header of a message that leaves now, with the time that remains."""
        deadline = self.deadline
        remaining = None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000))
        return Header(
            self.request_id,
            self.attempt,
            self.owner,
            self.bindings,
            remaining,
            self.traceparent,
            self.members,
            self.away,
            self.streamed,
        )

    def know(self, request: OmniRequest) -> None:
        """The request has arrived, with a payload or a first chunk; user code may ask it whether it was cancelled."""
        encoding.received(request)
        request.__dict__["_cancelled"] = self.fate.cancelled
        if self.request is None:
            self.request = request

    def claim_payload(self) -> bool:
        """The stage's payload is complete. False when it was before: a stage starts a request once."""
        with _lock:
            claimed, self.has_payload = self.has_payload, True
        return not claimed

    def finish(self) -> bool:
        """Mark it as over here. False when it was already: only the first end is reported."""
        with _lock:
            if self.over:
                return False
            self.over = self.dead = True
            if self.began_at is not None and self.busy is not None:
                self.busy.ended()
            gate, self._gate = self._gate, None
        if gate is not None:
            gate.open()
        return True

    def let_go(self) -> list[Any]:
        """It is over here: drop all references. Returns the chunks that wait for an earlier one, to be freed."""
        self.gathering = self.request = None
        self._held.clear()
        return self.merge.pending()

    # --- what a client sees -------------------------------------------------------------------------------------

    def look(self, data: Any) -> None:
        """A terminal stage gives this to the client: note whether its route can show it."""
        request = self.request  # gone when an abort comes in between
        if request is not None and request.kind != "pipeline":
            self._shows = self._shows or outputs.shows(data, request.kind)
            self._unshown = self._unshown or outputs.unshown(data, request.kind)

    @property
    def unshown(self) -> str | None:
        """The type of an output that the route cannot show. None: it has none, or another output can be shown."""
        return None if self._shows else self._unshown

    # --- streams out --------------------------------------------------------------------------------------------

    def number(self, target: str, weight: int = 1) -> int:
        """The next chunk's number on the edge to ``target``."""
        with _lock:
            outbound = self._outbound.get(target)
            if outbound is None:
                outbound = self._outbound[target] = Outbound(STREAM_WINDOW)
                self._streamed_at[target] = time.monotonic()
            return outbound.number(weight)

    def hold(self, target: str, chunk: Chunk) -> None:
        """Keep a chunk, as it is now, until the stage has ended."""
        own = Chunk(detached(chunk.data), to=target, modality=chunk.modality, metadata=detached(chunk.metadata))
        self._held.setdefault(target, []).append(own)

    def held(self, target: str) -> list[Chunk]:
        """The values that were kept for ``target``, in order; they are kept no longer."""
        return self._held.pop(target, [])

    def takes(self, target: str) -> bool:
        """Whether ``target`` still takes chunks."""
        outbound = self._outbound.get(target)
        return outbound is None or not outbound.closed

    def sent(self, target: str) -> int:
        """How many chunks have gone to ``target``."""
        outbound = self._outbound.get(target)
        return outbound.count if outbound is not None else 0

    def gate(self) -> Gate | None:
        """None, or the gate to wait for before the next chunk: the window of a consumer is full."""
        with _lock:
            if self.dead or not any(outbound.full for outbound in self._outbound.values()):
                return None
            self._gate = self._gate or Gate(self.parking)
            return self._gate

    def full_targets(self) -> list[str]:
        """Consumers whose window is full."""
        with _lock:
            return [] if self.dead else [target for target, outbound in self._outbound.items() if outbound.full]

    def consumed(self, target: str, weight: int, *, over: bool = False) -> None:
        """``target`` has taken so much more. over: it takes no more after that."""
        with _lock:
            outbound = self._outbound.get(target)
            if outbound is None:
                return
            opened = outbound.consumed(weight)
            if over:
                opened = outbound.close() or opened
            if not opened or self._gate is None:
                return
            if any(other.full for other in self._outbound.values()):
                return
            gate, self._gate = self._gate, None
        gate.open()

    # --- streams in ---------------------------------------------------------------------------------------------

    def weigh(self, source: str, weight: int) -> None:
        """The next chunk of ``source`` waits here."""
        self._weights.setdefault(source, deque()).append(weight)

    def taken(self, source: str, count: int) -> int:
        """So many chunks of ``source`` were taken, in their order. Returns their weight."""
        weights = self._weights.get(source)
        return sum(weights.popleft() if weights else 1 for _ in range(count))

    def note_consumed(self, source: str, weight: int) -> int:
        """Count what was taken of ``source``. Returns how much its producer is notified of: a quarter window each."""
        unreported = self._unreported.get(source, 0) + weight
        report = unreported if unreported >= STREAM_WINDOW // 4 else 0
        self._unreported[source] = unreported - report
        return report

    # --- time ---------------------------------------------------------------------------------------------------

    def queued(self, source: str, *, stream: bool = False) -> None:
        """Something of ``source`` has arrived."""
        if self.queued_at is None:
            self.queued_at = time.monotonic()
        if self.joined and (source, stream) not in self._received_at:
            self._received_at[source, stream] = time.monotonic()

    def began(self) -> None:
        """The stage's function has it. Nothing is noted after its end here, which another thread may have brought."""
        with _lock:
            if self.began_at is None and not self.over:
                self.began_at = time.monotonic()
                if self.busy is not None:
                    self.busy.began()

    def timing(self, stage: str) -> tuple[Timing, ...]:
        """All timings known, this stage's among them, as of now."""
        now = time.monotonic()
        began = self.began_at or now
        queued = self.queued_at or began
        own = Timing(
            stage,
            int((began - queued) * 1e6),
            int((now - began) * 1e6),
            time.time_ns() // 1000,
            _after(queued, self._received_at.copy()) if self._received_at else (),
            _until(now, self._streamed_at.copy()) if self._streamed_at else (),
        )
        return (*self.timings.values(), own)

    def add_timings(self, timings: Iterable[Timing]) -> None:
        for timing in timings:
            self.timings[timing.stage] = timing


def begun(
    header: Header,
    *,
    gathering: Gathering | None,
    sources: tuple[str, ...],
    inputs: tuple[str, ...] = (),
    parking: Parking | None = None,
    busy: Busy | None = None,
    lockstep: bool = False,
    device: str = "cpu",
) -> RequestWork:
    """The work of a request whose first message has this header. sources: of streams; inputs: of payloads. device:
    `payloads.devices.of_stage`.
    """
    remaining_ms = header.remaining_ms
    return RequestWork(
        request_id=header.request_id,
        attempt=header.attempt,
        owner=header.owner,
        bindings=header.bindings,
        traceparent=header.traceparent,
        members=header.members,
        away=header.away,
        streamed=header.streamed,
        deadline=None if remaining_ms is None else time.monotonic() + remaining_ms / 1000,
        merge=Merge(sources) if sources else _NO_STREAMS,
        expecting=Expecting(inputs, sources),
        fate=Fate(),
        gathering=gathering,
        parking=parking,
        busy=busy,
        lockstep=lockstep,
        device=device,
        joined=len(inputs) + len(sources) > 1,
    )


def _after(queued_at: float, received_at: dict[tuple[str, bool], float]) -> tuple[tuple[str, bool, int], ...]:
    return tuple((source, stream, int((at - queued_at) * 1e6)) for (source, stream), at in received_at.items())


def _until(now: float, streamed_at: dict[str, float]) -> tuple[tuple[str, int], ...]:
    return tuple((target, int((now - at) * 1e6)) for target, at in streamed_at.items())
