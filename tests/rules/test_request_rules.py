"""A request's life: one end, whatever happens in whatever order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stage_runtime.rules.requests import (
    Cancelled,
    ChunkCame,
    DeadlinePassed,
    Event,
    HandedBack,
    InstanceLost,
    Instruction,
    StageFailed,
    State,
    TerminalDone,
    Tracked,
)
from stage_runtime.wire.messages import Failure

TERMINALS = ("voice", "text")
STAGES = st.sampled_from([*TERMINALS, "other"])
ENDS = {Instruction.FINISH, Instruction.FAIL}


class RequestLife(RuleBasedStateMachine):
    """Every event at any time, of this attempt, an earlier or a later one."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[Instruction] = []
        self.rebinds = 0
        self.delivered_after_done: list[str] = []
        self.done: set[str] = set()

    @initialize(retries=st.integers(0, 2), whole=st.booleans(), terminals=st.sampled_from([TERMINALS, TERMINALS[:1]]))
    def admit(self, retries: int, whole: bool, terminals: tuple[str, ...]) -> None:
        self.retries = retries
        self.whole = whole
        self.handed_back = 0
        self.tracked = Tracked("r1", terminals, retries=retries, attempt=10, whole=whole)

    def happen(self, event: Event) -> tuple[Instruction, ...]:
        before = (self.tracked.state, self.tracked.attempt)
        given = self.tracked.handle(event)
        if before[0] is not State.RUNNING or getattr(event, "attempt", before[1]) != before[1]:
            assert given == (), "an end is the end, and what another attempt says is ignored"
        if Instruction.DELIVER in given and isinstance(event, ChunkCame | TerminalDone):
            assert event.stage not in self.done
        if isinstance(event, TerminalDone) and given:
            self.done.add(event.stage)
        if Instruction.REBIND in given:
            assert given == (Instruction.ABORT, Instruction.REBIND)
            assert not self.tracked.streamed
            self.rebinds += not isinstance(event, HandedBack)
            self.done.clear()
            self.tracked.retry(self.tracked.attempt + 3)
        self.ends += [one for one in given if one in ENDS]
        return given

    attempts = st.sampled_from([-1, 0, 0, 0, 0, 1])

    @rule(stage=STAGES, off=attempts)
    def chunk(self, stage: str, off: int) -> None:
        self.happen(ChunkCame(stage, self.tracked.attempt + off))

    @rule(stage=STAGES, off=attempts)
    def terminal_done(self, stage: str, off: int) -> None:
        given = self.happen(TerminalDone(stage, self.tracked.attempt + off))
        if Instruction.FINISH in given:
            assert self.done == set(self.tracked.terminals)

    @rule(code=st.sampled_from(["stage_failed", "transport_failed"]), off=attempts)
    def fail(self, code: str, off: int) -> None:
        self.happen(StageFailed(self.tracked.attempt + off, Failure(code, "why")))

    @rule(off=attempts)
    def lose(self, off: int) -> None:
        self.happen(InstanceLost("voice", self.tracked.attempt + off))

    @rule(off=attempts)
    def hand_back(self, off: int) -> None:
        self.happen(HandedBack(self.tracked.attempt + off))

    @rule()
    def cancel(self) -> None:
        self.happen(Cancelled("the client went away"))

    @rule()
    def be_late(self) -> None:
        self.happen(DeadlinePassed())

    @invariant()
    def at_most_one_end(self) -> None:
        if not hasattr(self, "tracked"):
            return
        assert len(self.ends) <= 1
        assert (self.tracked.state is State.RUNNING) == (not self.ends)
        assert self.tracked.waiting <= set(self.tracked.terminals)
        assert self.rebinds <= self.retries
        assert (self.tracked.failure is None) == (self.ends != [Instruction.FAIL])

    def teardown(self) -> None:
        """Every admitted request ends: its deadline sees to it."""
        if hasattr(self, "tracked"):
            self.be_late()
            assert len(self.ends) == 1


RequestLife.TestCase.settings = settings(max_examples=200, stateful_step_count=25)
TestRequestLife = RequestLife.TestCase

ABORT, REBIND, FAIL, DELIVER, FINISH = (
    Instruction.ABORT,
    Instruction.REBIND,
    Instruction.FAIL,
    Instruction.DELIVER,
    Instruction.FINISH,
)


def tracked(**options: int | bool) -> Tracked:
    return Tracked("r1", TERMINALS, retries=1, **options)  # type: ignore[arg-type]


def test_a_request_is_complete_with_its_last_terminal() -> None:
    one = tracked()
    assert one.handle(TerminalDone("text", 1)) == (DELIVER,)
    assert one.handle(TerminalDone("text", 1)) == ()
    assert one.handle(TerminalDone("voice", 1)) == (DELIVER, FINISH)
    assert one.state is State.COMPLETED
    assert one.handle(Cancelled("late")) == ()


def test_a_lost_instance_costs_the_one_retry_and_the_second_the_request() -> None:
    one = tracked()
    assert one.handle(InstanceLost("voice", 1)) == (ABORT, REBIND)
    one.retry(2)
    assert one.handle(InstanceLost("voice", 1)) == ()  # told twice of the first
    assert one.handle(InstanceLost("voice", 2)) == (ABORT, FAIL)
    assert one.failure == Failure("unavailable", "an instance of 'voice' was lost again", "voice")


def test_what_was_streamed_cannot_be_taken_back_so_nothing_is_sent_again() -> None:
    one = tracked()
    one.handle(ChunkCame("voice", 1))
    assert one.handle(InstanceLost("voice", 1)) == (ABORT, FAIL)
    assert one.failure is not None
    assert "after part of the answer was sent" in one.failure.message


def test_a_client_that_hears_nothing_before_the_end_may_be_served_again_in_mid_answer() -> None:
    one = tracked(whole=True)
    one.handle(ChunkCame("voice", 1))
    one.handle(TerminalDone("text", 1))
    assert one.handle(InstanceLost("voice", 1)) == (ABORT, REBIND)
    one.retry(2)
    assert one.waiting == set(TERMINALS)  # all of it again


def test_handing_back_costs_no_retry() -> None:
    one = tracked()
    for attempt in range(1, 5):
        assert one.handle(HandedBack(attempt)) == (ABORT, REBIND)
        one.retry(attempt + 1)
    assert one.handle(InstanceLost("voice", 5)) == (ABORT, REBIND)
    assert one.tries == 5


def test_a_failed_stage_is_final_and_a_failed_transfer_is_tried_again() -> None:
    assert tracked().handle(StageFailed(1, Failure("stage_failed", "no"))) == (ABORT, FAIL)
    assert tracked().handle(StageFailed(1, Failure("transport_failed", "no"))) == (ABORT, REBIND)


def test_chunks_and_ends_of_a_terminal_that_nobody_waits_for_are_ignored() -> None:
    one = Tracked("r1", ("text",), retries=1)
    assert one.handle(ChunkCame("voice", 1)) == ()
    assert one.handle(TerminalDone("voice", 1)) == ()
    assert not one.streamed
