"""A request's life at the coordinator: a table (state, event) -> (state, instructions), applied by `Tracked.handle`.

The request manager turns what happens into events and carries the instructions out; nothing here sends, waits or keeps
time. An event of another attempt changes nothing: messages cross on the wire. An event that the table does not list
for the state is a fault of the caller: `IllegalEvent`, with the request's history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

import msgspec

from stage_runtime.errors import IllegalEvent
from stage_runtime.rules.requests.suspicion import Blame
from stage_runtime.wire.parts import Failure

HISTORY_KEPT: Final = 16  # transitions of one request; chunks that change no state are not among them
EVENT_SHOWN: Final = 200  # characters of an event in a history


class RequestState(Enum):
    UNBOUND = "unbound"  #: No attempt is under way: just admitted, or the last attempt was given up.
    BOUND = "bound"  #: An attempt is under way, and the client was shown nothing of it: it may be sent again.
    ANSWERING = "answering"  #: The client was shown a part of the answer: a retry would repeat it.
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


LIVE: Final = frozenset(
    {RequestState.UNBOUND, RequestState.BOUND, RequestState.ANSWERING}
)  #: These hold an admission slot.


class Stimulus(msgspec.Struct, frozen=True):
    """Base of what may happen."""


class AttemptBegan(Stimulus, frozen=True):
    """The request is bound, and sent under this number."""

    number: int


class ChunkCame(Stimulus, frozen=True):
    """A terminal streamed a chunk, in order."""

    stage: str
    attempt: int


class TerminalDone(Stimulus, frozen=True):
    """A terminal has completed, all its chunks delivered."""

    stage: str
    attempt: int


class StageFailed(Stimulus, frozen=True):
    attempt: int
    failure: Failure


class InstanceLost(Stimulus, frozen=True):
    """An instance that this attempt is bound to is gone. ``stage``: one that it served. ``blame``: why, perhaps."""

    stage: str
    attempt: int
    blame: Blame = Blame.NONE


class HandedBack(Stimulus, frozen=True):
    """A draining instance had not begun: take it elsewhere, at no cost."""

    attempt: int


class StageAway(Stimulus, frozen=True):
    """The route of this attempt leads to a stage that it is not bound to, because none of its instances was ready."""

    stage: str
    attempt: int


class NoInstanceCame(Stimulus, frozen=True):
    """Nothing can be bound to it in time. ``stage``: what is missing."""

    reason: str
    stage: str | None = None


class Cancelled(Stimulus, frozen=True):
    """The client disconnected, or cancelled the request."""

    reason: str


class DeadlinePassed(Stimulus, frozen=True):
    pass


class CoordinatorStopped(Stimulus, frozen=True):
    """Everything in flight ends."""

    reason: str


class Instruction(Enum):
    """The orders to the request manager, in this order."""

    DELIVER = "deliver"  #: Pass the event on to the client.
    ABORT = "abort"  #: Tell every bound instance to drop this attempt.
    REBIND = "rebind"  #: Bind again; `AttemptBegan` or `NoInstanceCame` follows.
    FINISH = "finish"  #: Tell the client it is complete; free the admission slot.
    FAIL = "fail"  #: Tell the client why it failed; free the admission slot.


Instructions: TypeAlias = tuple[Instruction, ...]
NOTHING: Final[Instructions] = ()


class HistoryEntry(NamedTuple):
    """One entry of a request's history."""

    before: RequestState
    event: Stimulus
    after: RequestState

    def __str__(self) -> str:
        return f"{self.before.value}: {repr(self.event)[:EVENT_SHOWN]} -> {self.after.value}"


class Tracked:
    """One admitted request.

    Invariants: ``waiting`` ⊆ its terminals; FINISH or FAIL is given exactly once; nothing follows it.
    """

    def __init__(self, request_id: str, terminals: tuple[str, ...], *, retries: int, whole: bool = False) -> None:
        """whole: the client gets nothing before the end, so that output of a lost attempt can be discarded."""
        self.id = request_id
        self.terminals = terminals
        self.attempt = 0  #: The number of the latest attempt, which UNBOUND has given up; 0: none has begun.
        self.tries = 0  #: Attempts that have begun.
        self.state = RequestState.UNBOUND
        self.waiting = set(terminals)
        self.streamed = False  #: The client was shown something of this request. Never unset.
        self.failure: Failure | None = None  #: Set exactly in FAILED and CANCELLED.
        self.history: deque[HistoryEntry] = deque(maxlen=HISTORY_KEPT)  #: The latest, oldest first.
        self._rows = TABLE[RequestState.UNBOUND]  #: Rows of ``state``.
        self._retries_left = retries
        self._whole = whole

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def public_state(self) -> str:
        """The state as `events.RequestRecord.state` has it: every live one is ``running``."""
        return "running" if self.live else self.state.value

    def accepts(self, attempt: int) -> bool:
        """Whether output of that attempt is accepted now."""
        return attempt == self.attempt and (self.state is RequestState.BOUND or self.state is RequestState.ANSWERING)

    def handle(self, event: Stimulus) -> Instructions:
        """Apply one event. Returns what to do; one of another attempt changes nothing.

        Raises: IllegalEvent: the table has no row for it. Nothing has changed.
        """
        if getattr(event, "attempt", self.attempt) != self.attempt:
            return NOTHING
        for row in self._rows.get(type(event), ()):
            if row.when is None or row.when(self, event):
                break
        else:
            raise IllegalEvent(self.id, f"{event!r} in state {self.state.value}", tuple(map(str, self.history)))
        if row.to is not self.state or type(event) is not ChunkCame:
            self.history.append(HistoryEntry(self.state, event, row.to))
            self.state = row.to
            self._rows = TABLE[row.to]
        if row.effect is not None:
            row.effect(self, event)
        return row.instructions

    # --- guards -------------------------------------------------------------------------------------------------

    def _unwaited(self, event: Stimulus) -> bool:
        """Whether the event is of a terminal that this request does not wait for, or that had completed already."""
        assert isinstance(event, ChunkCame | TerminalDone)
        return event.stage not in self.waiting

    def _held_back(self, _: Stimulus) -> bool:
        return self._whole

    def _last(self, event: Stimulus) -> bool:
        assert isinstance(event, TerminalDone)
        return self.waiting == {event.stage}

    def _retry_left(self, _: Stimulus) -> bool:
        return self._retries_left > 0

    def _to_blame(self, event: Stimulus) -> bool:
        assert isinstance(event, InstanceLost)
        return event.blame is Blame.ITS_OWN

    def _perhaps_to_blame(self, event: Stimulus) -> bool:
        assert isinstance(event, InstanceLost)
        return event.blame is Blame.UNCLEAR

    def _transport_retry_left(self, event: Stimulus) -> bool:
        """Whether to try other instances, because two could not reach each other."""
        assert isinstance(event, StageFailed)
        return event.failure.code == "transport_failed" and self._retries_left > 0

    # --- effects ------------------------------------------------------------------------------------------------

    def _begin(self, event: Stimulus) -> None:
        assert isinstance(event, AttemptBegan)
        self.attempt = event.number
        self.tries += 1
        self.waiting = set(self.terminals)

    def _show(self, _: Stimulus) -> None:
        self.streamed = True

    def _through(self, event: Stimulus) -> None:
        assert isinstance(event, TerminalDone)
        self.waiting.discard(event.stage)

    def _show_through(self, event: Stimulus) -> None:
        self.streamed = True  # a retry would run this terminal again and answer it twice
        self._through(event)

    def _spend_retry(self, _: Stimulus) -> None:
        self._retries_left -= 1

    def _fail_as_reported(self, event: Stimulus) -> None:
        assert isinstance(event, StageFailed)
        self.failure = event.failure

    def _fail_lost(self, event: Stimulus) -> None:
        assert isinstance(event, InstanceLost)
        when = "after part of the answer was sent" if self.streamed else "again"
        self.failure = Failure("unavailable", f"an instance of {event.stage!r} was lost {when}", event.stage)

    def _fail_blamed(self, event: Stimulus) -> None:
        assert isinstance(event, InstanceLost)
        message = f"instances of {event.stage!r} ended each time that this request was sent there; it is not sent again"
        self.failure = Failure("stage_failed", message, event.stage)

    def _fail_away(self, event: Stimulus) -> None:
        assert isinstance(event, StageAway)
        reason = f"the route leads to {event.stage!r}, which had no ready instance, after part of the answer was sent"
        self.failure = Failure("unavailable", reason, event.stage)

    def _fail_handed_back(self, _: Stimulus) -> None:
        self.failure = Failure("unavailable", "a draining instance handed the request back")

    def _fail_unavailable(self, event: Stimulus) -> None:
        assert isinstance(event, NoInstanceCame | CoordinatorStopped)
        stage = event.stage if isinstance(event, NoInstanceCame) else None
        self.failure = Failure("unavailable", event.reason, stage)

    def _fail_cancelled(self, event: Stimulus) -> None:
        assert isinstance(event, Cancelled)
        self.failure = Failure("cancelled", event.reason)

    def _fail_late(self, _: Stimulus) -> None:
        begun = f"waiting for {sorted(self.waiting)}" if self.tries else "no instance could take it"
        self.failure = Failure("deadline", f"not done in time; {begun}")


class TransitionRow(NamedTuple):
    """The consequences of an event. The first of several rows of one event whose ``when`` holds is taken."""

    to: RequestState
    instructions: Instructions = NOTHING
    when: Callable[[Tracked, Stimulus], bool] | None = None
    effect: Callable[[Tracked, Stimulus], None] | None = None


DELIVER, ABORT, REBIND = Instruction.DELIVER, Instruction.ABORT, Instruction.REBIND
FINISH, FAIL = Instruction.FINISH, Instruction.FAIL
UNBOUND, BOUND, ANSWERING = RequestState.UNBOUND, RequestState.BOUND, RequestState.ANSWERING
COMPLETED, FAILED, CANCELLED = RequestState.COMPLETED, RequestState.FAILED, RequestState.CANCELLED

Rows: TypeAlias = Mapping[type[Stimulus], tuple[TransitionRow, ...]]

#: Events of the latest attempt when it has ended.
LATE: Final = (ChunkCame, TerminalDone, StageFailed, InstanceLost, HandedBack, StageAway)


def _over(state: RequestState) -> Rows:
    """Nothing follows an end."""
    return {kind: (TransitionRow(state),) for kind in (*LATE, Cancelled, DeadlinePassed, CoordinatorStopped)}


def _given_up(*instructions: Instruction) -> Rows:
    """The events that end a request in every live state."""
    return {
        Cancelled: (TransitionRow(CANCELLED, instructions, effect=Tracked._fail_cancelled),),
        DeadlinePassed: (TransitionRow(FAILED, instructions, effect=Tracked._fail_late),),
        CoordinatorStopped: (TransitionRow(FAILED, instructions, effect=Tracked._fail_unavailable),),
    }


TABLE: Final[Mapping[RequestState, Rows]] = {
    UNBOUND: {
        **{kind: (TransitionRow(UNBOUND),) for kind in LATE},
        AttemptBegan: (TransitionRow(BOUND, effect=Tracked._begin),),
        NoInstanceCame: (TransitionRow(FAILED, (FAIL,), effect=Tracked._fail_unavailable),),
        **_given_up(FAIL),
    },
    BOUND: {
        ChunkCame: (
            TransitionRow(BOUND, when=Tracked._unwaited),
            TransitionRow(BOUND, (DELIVER,), when=Tracked._held_back),
            TransitionRow(ANSWERING, (DELIVER,), effect=Tracked._show),
        ),
        TerminalDone: (
            TransitionRow(BOUND, when=Tracked._unwaited),
            TransitionRow(COMPLETED, (DELIVER, FINISH), when=Tracked._last, effect=Tracked._through),
            TransitionRow(BOUND, (DELIVER,), when=Tracked._held_back, effect=Tracked._through),
            TransitionRow(ANSWERING, (DELIVER,), effect=Tracked._show_through),
        ),
        StageFailed: (
            TransitionRow(UNBOUND, (ABORT, REBIND), when=Tracked._transport_retry_left, effect=Tracked._spend_retry),
            TransitionRow(FAILED, (ABORT, FAIL), effect=Tracked._fail_as_reported),
        ),
        InstanceLost: (
            TransitionRow(FAILED, (ABORT, FAIL), when=Tracked._to_blame, effect=Tracked._fail_blamed),
            TransitionRow(UNBOUND, (ABORT, REBIND), when=Tracked._perhaps_to_blame),
            TransitionRow(UNBOUND, (ABORT, REBIND), when=Tracked._retry_left, effect=Tracked._spend_retry),
            TransitionRow(FAILED, (ABORT, FAIL), effect=Tracked._fail_lost),
        ),
        HandedBack: (TransitionRow(UNBOUND, (ABORT, REBIND)),),
        StageAway: (TransitionRow(UNBOUND, (ABORT, REBIND)),),
        **_given_up(ABORT, FAIL),
    },
    ANSWERING: {
        ChunkCame: (TransitionRow(ANSWERING, when=Tracked._unwaited), TransitionRow(ANSWERING, (DELIVER,))),
        TerminalDone: (
            TransitionRow(ANSWERING, when=Tracked._unwaited),
            TransitionRow(COMPLETED, (DELIVER, FINISH), when=Tracked._last, effect=Tracked._through),
            TransitionRow(ANSWERING, (DELIVER,), effect=Tracked._through),
        ),
        StageFailed: (TransitionRow(FAILED, (ABORT, FAIL), effect=Tracked._fail_as_reported),),
        InstanceLost: (
            TransitionRow(FAILED, (ABORT, FAIL), when=Tracked._to_blame, effect=Tracked._fail_blamed),
            TransitionRow(FAILED, (ABORT, FAIL), effect=Tracked._fail_lost),
        ),
        HandedBack: (TransitionRow(FAILED, (ABORT, FAIL), effect=Tracked._fail_handed_back),),
        StageAway: (TransitionRow(FAILED, (ABORT, FAIL), effect=Tracked._fail_away),),
        **_given_up(ABORT, FAIL),
    },
    COMPLETED: _over(COMPLETED),
    FAILED: _over(FAILED),
    CANCELLED: _over(CANCELLED),
}
