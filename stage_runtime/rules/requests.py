"""A request's life at the coordinator, as a table: events in, instructions out, one end.

The request manager turns what happens into events and carries the instructions out; nothing here sends, waits or keeps
time. An event that a state does not list is late or foreign and changes nothing (`IGNORED`): messages cross on the
wire.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final, TypeAlias

import msgspec

from stage_runtime.wire.messages import Failure


class State(Enum):
    RUNNING = "running"  #: Bound and sent; the only state that holds an admission slot.
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Event(msgspec.Struct, frozen=True):
    """Base of what may happen."""


class ChunkCame(Event, frozen=True):
    """A terminal streamed to the client; from now on a retry would repeat what was said."""

    stage: str
    attempt: int


class TerminalDone(Event, frozen=True):
    """A terminal is through, all its chunks delivered."""

    stage: str
    attempt: int


class StageFailed(Event, frozen=True):
    attempt: int
    failure: Failure


class InstanceLost(Event, frozen=True):
    """An instance that this attempt is bound to is gone. ``stage``: one that it served."""

    stage: str
    attempt: int


class HandedBack(Event, frozen=True):
    """A draining instance had not begun: take it elsewhere, at no cost."""

    attempt: int


class Cancelled(Event, frozen=True):
    """The client went away, or asked for it."""

    reason: str


class DeadlinePassed(Event, frozen=True):
    pass


class Instruction(Enum):
    """What the request manager must do, in this order."""

    DELIVER = "deliver"  #: Pass the event on to the client.
    ABORT = "abort"  #: Tell every bound instance to drop this attempt.
    REBIND = "rebind"  #: Bind again and submit under the next attempt number.
    FINISH = "finish"  #: Tell the client it is complete; free the admission slot.
    FAIL = "fail"  #: Tell the client why it failed; free the admission slot.


Instructions: TypeAlias = tuple[Instruction, ...]
IGNORED: Final[Instructions] = ()


class Tracked:
    """One admitted request.

    Invariants: ``waiting`` ⊆ its terminals; FINISH or FAIL is given exactly once; nothing follows it.
    """

    def __init__(
        self, request_id: str, terminals: tuple[str, ...], *, retries: int, attempt: int = 1, whole: bool = False
    ) -> None:
        """attempt: the first one's number, above that of any earlier request of the same id.

        whole: the client is told nothing before the end, so that what came of a lost attempt can be thrown away.
        """
        self.id = request_id
        self.terminals = terminals
        self.attempt = attempt
        self.tries = 1
        self.state = State.RUNNING
        self.waiting = set(terminals)
        self.streamed = False  #: Something of this request has been said to the client.
        self.failure: Failure | None = None
        self._retries_left = retries
        self._whole = whole

    def handle(self, event: Event) -> Instructions:
        """Apply one event. Returns what to do; an event that does not belong changes nothing."""
        if self.state is not State.RUNNING:
            return IGNORED
        attempt = getattr(event, "attempt", self.attempt)
        if attempt != self.attempt:
            return IGNORED  # said by an attempt that was given up
        return TABLE[type(event)](self, event)

    def retry(self, attempt: int) -> None:
        """It is sent again under this number; what is said under another one is ignored from now on."""
        self.attempt = attempt
        self.tries += 1

    def fail(self, failure: Failure, state: State = State.FAILED) -> Instructions:
        self.state = state
        self.failure = failure
        return (Instruction.ABORT, Instruction.FAIL)

    def _chunk(self, event: Event) -> Instructions:
        assert isinstance(event, ChunkCame)
        if event.stage not in self.waiting:
            return IGNORED  # a terminal that this request does not wait for, or that was through already
        self.streamed = not self._whole
        return (Instruction.DELIVER,)

    def _done(self, event: Event) -> Instructions:
        assert isinstance(event, TerminalDone)
        if event.stage not in self.waiting:
            return IGNORED
        self.waiting.discard(event.stage)
        if self.waiting:
            self.streamed = not self._whole  # a retry would run this terminal again and answer it twice
            return (Instruction.DELIVER,)
        self.state = State.COMPLETED
        return (Instruction.DELIVER, Instruction.FINISH)

    def _failed(self, event: Event) -> Instructions:
        assert isinstance(event, StageFailed)
        if event.failure.code == "transport_failed" and not self.streamed and self._retries_left:
            self._retries_left -= 1  # two instances could not reach each other; others may
            return self._again()
        return self.fail(event.failure)

    def _lost(self, event: Event) -> Instructions:
        assert isinstance(event, InstanceLost)
        if self.streamed or self._retries_left == 0:
            when = "after part of the answer was sent" if self.streamed else "again"
            return self.fail(Failure("unavailable", f"an instance of {event.stage!r} was lost {when}", event.stage))
        self._retries_left -= 1
        return self._again()

    def _handed_back(self, event: Event) -> Instructions:
        if self.streamed:
            return self.fail(Failure("unavailable", "a draining instance handed the request back"))
        return self._again()

    def _again(self) -> Instructions:
        self.waiting = set(self.terminals)
        return (Instruction.ABORT, Instruction.REBIND)

    def _cancelled(self, event: Event) -> Instructions:
        assert isinstance(event, Cancelled)
        return self.fail(Failure("cancelled", event.reason), State.CANCELLED)

    def _late(self, event: Event) -> Instructions:
        return self.fail(Failure("deadline", f"not done in time; waiting for {sorted(self.waiting)}"))


TABLE: Final[dict[type[Event], Callable[[Tracked, Event], Instructions]]] = {
    ChunkCame: Tracked._chunk,
    TerminalDone: Tracked._done,
    StageFailed: Tracked._failed,
    InstanceLost: Tracked._lost,
    HandedBack: Tracked._handed_back,
    Cancelled: Tracked._cancelled,
    DeadlinePassed: Tracked._late,
}
