"""The state of one request at one stage: inputs received, outputs sent, aborted or not."""

from __future__ import annotations

import time
from collections import deque
from threading import Lock
from typing import Any, Final

from stage_runtime.engines.gates import Gate, Parking
from stage_runtime.payloads import encoding
from stage_runtime.rules.expecting import Expecting
from stage_runtime.rules.gathering import Gathering
from stage_runtime.rules.streams import STREAM_WINDOW, Merge, Outbound
from stage_runtime.transfers.sending import attempt_key
from stage_runtime.wire import outputs
from stage_runtime.wire.messages import Header, Timing
from stage_runtime.wire.values import OmniRequest


class Fate:
    """What user code may ask of a request, kept apart from its work: a request that knew its work would be a cycle,
    and the slots of its senders would wait for the garbage collector.
    """

    __slots__ = ("aborted", "lockstep")

    def __init__(self, lockstep: bool) -> None:
        self.aborted = False
        self.lockstep = lockstep

    def cancelled(self) -> bool:
        return self.aborted and not self.lockstep


class RequestWork:
    """`engines.base.Work`. Made by a request's first message at this stage, whatever it is.

    Invariant: after ``over`` nothing more is sent for it, and every gate is open.
    """

    def __init__(
        self,
        header: Header,
        *,
        gathering: Gathering | None,
        sources: tuple[str, ...],
        inputs: tuple[str, ...] = (),
        parking: Parking | None = None,
        lockstep: bool = False,
    ) -> None:
        """lockstep: the ranks of a TP stage compute it: what one begins all end, or a collective would hang."""
        self.request_id = header.request_id
        self.attempt = header.attempt
        self.owner = header.owner
        self.bindings = header.bindings
        self.traceparent = header.traceparent
        self._members = header.members  #: Brought along for the stages after this one.
        self.deadline: Final = None if header.remaining_ms is None else time.monotonic() + header.remaining_ms / 1000
        self.request: OmniRequest | None = None
        self.gathering = gathering
        self.merge = Merge(sources)
        self.expecting = Expecting(inputs, sources)
        self.ended_sources: set[str] = set()  #: Streams that have ended, whether the engine has been notified or not.
        self.untold_ends: list[str] = []  #: Those of them to tell the engine when something begins the request.
        self.told_no_payload = False
        self.timings: dict[str, Timing] = {}  #: Of the stages before this one.
        self._fate = Fate(lockstep)
        self.over = False  #: Done, failed or aborted here.
        self.served = False  #: Its payload was complete, and its result was given here.
        self.at_engine = False  #: See `engines.base.Work`.
        self.queued_at: float | None = None
        self.began_at: float | None = None
        #: (source, by stream) -> when its first input arrived. None: there is one input, and ``queued_at`` is its time.
        self._received_at: dict[tuple[str, bool], float] | None = {} if len(inputs) + len(sources) > 1 else None
        self._streamed_at: dict[str, float] = {}  #: target -> when its first chunk was sent.
        self._payload_claimed = False
        self._outbound: dict[str, Outbound] = {}
        self._weights: dict[str, deque[int]] = {}  #: source -> of its chunks that were not taken, in order
        self._unreported: dict[str, int] = {}  #: source -> weight of chunks taken and not reported to the producer yet
        self._gate: Gate | None = None
        self._shows = False  #: Something was given that the client's route can show.
        self._unshown: str | None = None  #: The type of the first thing that it cannot.
        self._parking = parking
        self._lock = Lock()

    @property
    def key(self) -> str:
        """What the process calls it, its relays too: unlike ``request_id``, no other attempt or owner has it."""
        return attempt_key(self.owner, self.request_id, self.attempt)

    @property
    def aborted(self) -> bool:
        """The request was aborted: no client waits for it."""
        return self._fate.aborted

    def abort(self) -> None:
        self._fate.aborted = True

    @property
    def dead(self) -> bool:
        """Output for a finished or aborted request is discarded."""
        return self.aborted or self.over

    @property
    def cancelled(self) -> bool:
        """Whether user code and engines should stop working on it."""
        return self._fate.cancelled()

    def header(self) -> Header:
        """For a message that leaves now."""
        remaining = None if self.deadline is None else max(0, int((self.deadline - time.monotonic()) * 1000))
        return Header(
            self.request_id, self.attempt, self.owner, self.bindings, remaining, self.traceparent, self._members
        )

    def know(self, request: OmniRequest) -> None:
        """The request has arrived, with a payload or a first chunk; user code may ask it whether it was cancelled."""
        encoding.received(request)
        request.__dict__["_cancelled"] = self._fate.cancelled
        if self.request is None:
            self.request = request

    def claim_payload(self) -> bool:
        """The stage's payload is complete. False when it was before: a stage starts a request once."""
        with self._lock:
            claimed, self._payload_claimed = self._payload_claimed, True
        return not claimed

    @property
    def has_payload(self) -> bool:
        """The stage's payload is complete. One that takes a stream may be through without it."""
        return self._payload_claimed

    def finish(self) -> bool:
        """Mark it as over here. False when it was already: only the first end is reported."""
        with self._lock:
            if self.over:
                return False
            self.over = True
            gate, self._gate = self._gate, None
        if gate is not None:
            gate.set_result(None)
        return True

    def let_go(self) -> list[Any]:
        """It is over here: drop all references. Returns the chunks that wait for an earlier one, to be freed."""
        self.gathering = self.request = None
        return self.merge.pending()

    # --- what a client sees -------------------------------------------------------------------------------------

    def look(self, data: Any) -> None:
        """A terminal stage gives this to the client: note whether its route can show it."""
        request = self.request  # gone when an abort comes in between
        if request is not None and request.kind != "pipeline":
            self._shows = self._shows or outputs.shows(data)
            self._unshown = self._unshown or outputs.unshown(data)

    @property
    def unshown(self) -> str | None:
        """The type of what was given in vain: nothing that was can be shown. A word beside it is the author's own."""
        return None if self._shows else self._unshown

    # --- streams out --------------------------------------------------------------------------------------------

    def number(self, target: str, weight: int = 1) -> int:
        """The next chunk's number on the edge to ``target``."""
        with self._lock:
            outbound = self._outbound.get(target)
            if outbound is None:
                outbound = self._outbound[target] = Outbound(STREAM_WINDOW)
                self._streamed_at[target] = time.monotonic()
            return outbound.number(weight)

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
        with self._lock:
            if self.dead or not any(outbound.full for outbound in self._outbound.values()):
                return None
            self._gate = self._gate or Gate(self._parking)
            return self._gate

    def full_targets(self) -> list[str]:
        """Consumers whose window is full."""
        with self._lock:
            return [] if self.dead else [target for target, outbound in self._outbound.items() if outbound.full]

    def consumed(self, target: str, weight: int, *, over: bool = False) -> None:
        """``target`` has taken so much more. over: and takes no more after that."""
        with self._lock:
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
        gate.set_result(None)

    # --- streams in ---------------------------------------------------------------------------------------------

    def weigh(self, source: str, weight: int) -> None:
        """The next chunk of ``source`` waits here."""
        self._weights.setdefault(source, deque()).append(weight)

    def taken(self, source: str, count: int) -> int:
        """So many chunks of ``source`` were taken, in their order. Returns their weight."""
        weights = self._weights.get(source)
        return sum(weights.popleft() if weights else 1 for _ in range(count))

    def note_consumed(self, source: str, weight: int) -> int:
        """Count what was taken of ``source``. Returns how much to tell its producer now: a quarter window at a time."""
        unreported = self._unreported.get(source, 0) + weight
        report = unreported if unreported >= STREAM_WINDOW // 4 else 0
        self._unreported[source] = unreported - report
        return report

    # --- time ---------------------------------------------------------------------------------------------------

    def queued(self, source: str, *, stream: bool = False) -> None:
        """Something of ``source`` has arrived."""
        if self.queued_at is None:
            self.queued_at = time.monotonic()
        received_at = self._received_at
        if received_at is not None and (source, stream) not in received_at:
            received_at[source, stream] = time.monotonic()

    def began(self) -> None:
        if self.began_at is None:
            self.began_at = time.monotonic()

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
            () if self._received_at is None else _after(queued, self._received_at.copy()),
            tuple((target, int((now - at) * 1e6)) for target, at in self._streamed_at.copy().items()),
        )
        return (*self.timings.values(), own)

    def learn(self, timings: Any) -> None:
        for timing in timings:
            self.timings[timing.stage] = timing


def _after(queued_at: float, received_at: dict[tuple[str, bool], float]) -> tuple[tuple[str, bool, int], ...]:
    return tuple((source, stream, int((at - queued_at) * 1e6)) for (source, stream), at in received_at.items())
