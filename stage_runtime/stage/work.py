"""One request at one stage: what has come, what was sent, and whether anybody still waits."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from threading import Lock
from typing import Any, Final

from stage_runtime.engines.base import Gate
from stage_runtime.rules.gathering import Gathering
from stage_runtime.rules.streams import STREAM_WINDOW, Merge, Outbound
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
        self, header: Header, *, gathering: Gathering | None, sources: tuple[str, ...], lockstep: bool = False
    ) -> None:
        """lockstep: the ranks of a TP stage compute it: what one begins all end, or a collective would hang."""
        self.request_id = header.request_id
        self.attempt = header.attempt
        self.owner = header.owner
        self.bindings = header.bindings
        self.traceparent = header.traceparent
        self.deadline: Final = None if header.remaining_ms is None else time.monotonic() + header.remaining_ms / 1000
        self.request: OmniRequest | None = None
        self.gathering = gathering
        self.merge = Merge(sources)
        self.ended_sources: set[str] = set()  #: Told to the engine already.
        self.timings: dict[str, Timing] = {}  #: Of the stages before this one.
        self._fate = Fate(lockstep)
        self.over = False  #: Done, failed or aborted here.
        self.queued_at: float | None = None
        self.began_at: float | None = None
        self._payload_claimed = False
        self._outbound: dict[str, Outbound] = {}
        self._weights: dict[str, deque[int]] = {}  #: source -> of its chunks that nobody has taken, in order
        self._untold: dict[str, int] = {}  #: source -> weight of chunks taken and not told its producer yet
        self._gate: Gate | None = None
        self._lock = Lock()

    @property
    def aborted(self) -> bool:
        """Nobody waits."""
        return self._fate.aborted

    def abort(self) -> None:
        self._fate.aborted = True

    @property
    def dead(self) -> bool:
        """Whatever is still said of it here goes nowhere."""
        return self.aborted or self.over

    @property
    def cancelled(self) -> bool:
        """What user code and engines are told: stop if you can."""
        return self._fate.cancelled()

    def header(self) -> Header:
        """For a message that leaves now."""
        remaining = None if self.deadline is None else max(0, int((self.deadline - time.monotonic()) * 1000))
        return Header(self.request_id, self.attempt, self.owner, self.bindings, remaining, self.traceparent)

    def know(self, request: OmniRequest) -> None:
        """The request itself has arrived; user code may ask it whether it was cancelled."""
        if self.request is None:
            self.request = request
            request.__dict__["_cancelled"] = self._fate.cancelled

    def claim_payload(self) -> bool:
        """The stage's payload is complete. False when it was before: a stage starts a request once."""
        with self._lock:
            claimed, self._payload_claimed = self._payload_claimed, True
        return not claimed

    def finish(self) -> bool:
        """It is over here. False when it was already: only the first ending is told."""
        with self._lock:
            if self.over:
                return False
            self.over = True
            gate, self._gate = self._gate, None
        if gate is not None:
            gate.set_result(None)
        return True

    # --- streams out --------------------------------------------------------------------------------------------

    def number(self, target: str, weight: int = 1) -> int:
        """The next chunk's number on the edge to ``target``."""
        with self._lock:
            return self._outbound.setdefault(target, Outbound(STREAM_WINDOW)).number(weight)

    def sent(self, target: str) -> int:
        """How many chunks have gone to ``target``."""
        outbound = self._outbound.get(target)
        return outbound.count if outbound is not None else 0

    def gate(self) -> Gate | None:
        """None, or what to wait for before the next chunk: a consumer is a whole window behind."""
        with self._lock:
            if self.dead or not any(outbound.full for outbound in self._outbound.values()):
                return None
            self._gate = self._gate or Future()
            return self._gate

    def consumed(self, target: str, weight: int) -> None:
        """``target`` has taken so much more."""
        with self._lock:
            outbound = self._outbound.get(target)
            if outbound is None or not outbound.consumed(weight) or self._gate is None:
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
        untold = self._untold.get(source, 0) + weight
        tell = untold if untold >= STREAM_WINDOW // 4 else 0
        self._untold[source] = untold - tell
        return tell

    # --- time ---------------------------------------------------------------------------------------------------

    def queued(self) -> None:
        if self.queued_at is None:
            self.queued_at = time.monotonic()

    def began(self) -> None:
        if self.began_at is None:
            self.began_at = time.monotonic()

    def timing(self, stage: str) -> tuple[Timing, ...]:
        """All timings known, this stage's among them, as of now."""
        now = time.monotonic()
        began = self.began_at or now
        queued = self.queued_at or began
        own = Timing(stage, int((began - queued) * 1e6), int((now - began) * 1e6))
        return (*self.timings.values(), own)

    def learn(self, timings: Any) -> None:
        for timing in timings:
            self.timings[timing.stage] = timing
