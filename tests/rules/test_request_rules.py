"""A request's life: one end, whatever happens in whatever order."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stage_runtime.errors import IllegalEvent
from stage_runtime.rules.requests.lifecycle import (
    HISTORY_KEPT,
    LIVE,
    TABLE,
    AttemptBegan,
    Cancelled,
    ChunkCame,
    CoordinatorStopped,
    DeadlinePassed,
    HandedBack,
    InstanceLost,
    Instruction,
    NoInstanceCame,
    RequestState,
    StageFailed,
    Stimulus,
    TerminalDone,
    Tracked,
)
from stage_runtime.rules.requests.suspicion import Blame
from stage_runtime.wire.parts import Failure
from tests.thoroughness import examples

TERMINALS = ("voice", "text")
STAGES = st.sampled_from([*TERMINALS, "other"])
ENDS = {Instruction.FINISH, Instruction.FAIL}
UNDER_WAY = (RequestState.BOUND, RequestState.ANSWERING)


class RequestLife(RuleBasedStateMachine):
    """Every event at any time, of this attempt, an earlier or a later one; legal or not."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[Instruction] = []
        self.rebinds = 0
        self.done: set[str] = set()

    @initialize(retries=st.integers(0, 2), whole=st.booleans(), terminals=st.sampled_from([TERMINALS, TERMINALS[:1]]))
    def admit(self, retries: int, whole: bool, terminals: tuple[str, ...]) -> None:
        self.retries = retries
        self.whole = whole
        self.tracked = Tracked("r1", terminals, retries=retries, whole=whole)

    def facts(self) -> tuple[object, ...]:
        one = self.tracked
        return one.state, one.attempt, one.tries, set(one.waiting), one.streamed, one.failure, tuple(one.history)

    def happen(self, event: Stimulus) -> tuple[Instruction, ...]:
        before, facts = self.tracked.state, self.facts()
        try:
            given = self.tracked.handle(event)
        except IllegalEvent as error:
            assert type(event) not in TABLE[before], "an event that is listed is never refused"
            assert self.facts() == facts, "an illegal event changes nothing"
            assert error.history == tuple(map(str, self.tracked.history))
            return ()
        if getattr(event, "attempt", facts[1]) != facts[1]:
            assert given == () and self.facts() == facts, "what is said of another attempt changes nothing"
            return ()
        assert type(event) in TABLE[before]
        if before not in UNDER_WAY:
            assert Instruction.DELIVER not in given
        if before not in LIVE:
            assert given == () and self.tracked.state is before, "an end is the end"
        if Instruction.DELIVER in given and isinstance(event, ChunkCame | TerminalDone):
            assert event.stage not in self.done
        if isinstance(event, TerminalDone) and given:
            self.done.add(event.stage)
        if Instruction.REBIND in given:
            assert given == (Instruction.ABORT, Instruction.REBIND)
            assert not self.tracked.streamed
            assert self.tracked.state is RequestState.UNBOUND
            free = isinstance(event, HandedBack) or getattr(event, "blame", None) is Blame.UNCLEAR
            self.rebinds += not free
            self.done.clear()
        if Instruction.ABORT in given:
            assert before in UNDER_WAY, "an attempt is aborted once"
        self.ends += [one for one in given if one in ENDS]
        return given

    attempts = st.sampled_from([-1, 0, 0, 0, 0, 1])

    @rule(further=st.integers(1, 3))
    def begin(self, further: int) -> None:
        self.happen(AttemptBegan(self.tracked.attempt + further))

    @rule()
    def find_no_instance(self) -> None:
        self.happen(NoInstanceCame("nobody came"))

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

    @rule(off=attempts, blame=st.sampled_from([*Blame, Blame.NONE, Blame.NONE]))
    def lose(self, off: int, blame: Blame) -> None:
        self.happen(InstanceLost("voice", self.tracked.attempt + off, blame))

    @rule(off=attempts)
    def hand_back(self, off: int) -> None:
        self.happen(HandedBack(self.tracked.attempt + off))

    @rule()
    def cancel(self) -> None:
        self.happen(Cancelled("the client went away"))

    @rule()
    def stop(self) -> None:
        self.happen(CoordinatorStopped("the coordinator ends"))

    @rule()
    def be_late(self) -> None:
        self.happen(DeadlinePassed())

    @invariant()
    def at_most_one_end(self) -> None:
        if not hasattr(self, "tracked"):
            return
        one = self.tracked
        assert len(self.ends) <= 1
        assert one.live == (not self.ends)
        assert one.waiting <= set(one.terminals)
        assert self.rebinds <= self.retries
        assert (one.failure is None) == (self.ends != [Instruction.FAIL])
        assert one.streamed or one.state is not RequestState.ANSWERING
        assert not (self.whole and one.streamed)
        assert one.accepts(one.attempt) == (one.state in UNDER_WAY)

    @invariant()
    def the_history_leads_to_the_state(self) -> None:
        if not hasattr(self, "tracked"):
            return
        history = list(self.tracked.history)
        assert len(history) <= HISTORY_KEPT
        assert all(left.after is right.before for left, right in itertools.pairwise(history))
        assert (history[-1].after if history else RequestState.UNBOUND) is self.tracked.state

    def teardown(self) -> None:
        """Every admitted request ends: its deadline sees to it."""
        if hasattr(self, "tracked"):
            self.be_late()
            assert len(self.ends) == 1


RequestLife.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=25, deadline=None)
TestRequestLife = RequestLife.TestCase

ABORT, REBIND, FAIL, DELIVER, FINISH = (
    Instruction.ABORT,
    Instruction.REBIND,
    Instruction.FAIL,
    Instruction.DELIVER,
    Instruction.FINISH,
)


def bound(*, terminals: tuple[str, ...] = TERMINALS, whole: bool = False) -> Tracked:
    """A request whose first attempt is under way."""
    one = Tracked("r1", terminals, retries=1, whole=whole)
    assert one.handle(AttemptBegan(1)) == ()
    return one


def test_a_request_is_complete_with_its_last_terminal() -> None:
    one = bound()
    assert one.handle(TerminalDone("text", 1)) == (DELIVER,)
    assert one.handle(TerminalDone("text", 1)) == ()
    assert one.handle(TerminalDone("voice", 1)) == (DELIVER, FINISH)
    assert one.state is RequestState.COMPLETED
    assert one.handle(Cancelled("late")) == ()


def test_a_lost_instance_costs_the_one_retry_and_the_second_the_request() -> None:
    one = bound()
    assert one.handle(InstanceLost("voice", 1)) == (ABORT, REBIND)
    assert one.handle(InstanceLost("voice", 1)) == ()  # the first loss is reported twice
    one.handle(AttemptBegan(2))
    assert one.handle(InstanceLost("voice", 1)) == ()  # and once more
    assert one.handle(InstanceLost("voice", 2)) == (ABORT, FAIL)
    assert one.failure == Failure("unavailable", "an instance of 'voice' was lost again", "voice")


def test_what_was_streamed_cannot_be_taken_back_so_nothing_is_sent_again() -> None:
    one = bound()
    one.handle(ChunkCame("voice", 1))
    assert one.handle(InstanceLost("voice", 1)) == (ABORT, FAIL)
    assert one.failure is not None
    assert "after part of the answer was sent" in one.failure.message


def test_a_client_that_gets_nothing_before_the_end_may_be_served_again_in_mid_answer() -> None:
    one = bound(whole=True)
    one.handle(ChunkCame("voice", 1))
    one.handle(TerminalDone("text", 1))
    assert one.handle(InstanceLost("voice", 1)) == (ABORT, REBIND)
    one.handle(AttemptBegan(2))
    assert one.waiting == set(TERMINALS)  # all of it again


def test_handing_back_costs_no_retry() -> None:
    one = bound()
    for attempt in range(1, 5):
        assert one.handle(HandedBack(attempt)) == (ABORT, REBIND)
        one.handle(AttemptBegan(attempt + 1))
    assert one.handle(InstanceLost("voice", 5)) == (ABORT, REBIND)
    assert one.tries == 5


def test_a_failed_stage_is_final_and_a_failed_transfer_is_tried_again() -> None:
    assert bound().handle(StageFailed(1, Failure("stage_failed", "no"))) == (ABORT, FAIL)
    assert bound().handle(StageFailed(1, Failure("transport_failed", "no"))) == (ABORT, REBIND)


def test_chunks_and_ends_of_a_terminal_that_nobody_waits_for_are_ignored() -> None:
    one = bound(terminals=("text",))
    assert one.handle(ChunkCame("voice", 1)) == ()
    assert one.handle(TerminalDone("voice", 1)) == ()
    assert not one.streamed


@pytest.mark.parametrize(
    "end", [Cancelled("enough"), DeadlinePassed(), NoInstanceCame("nobody"), CoordinatorStopped("the end")]
)
def test_a_request_without_an_attempt_ends_and_nothing_is_aborted(end: Stimulus) -> None:
    one = bound()
    one.handle(HandedBack(1))
    assert one.handle(end) == (FAIL,)
    assert one.failure is not None


def test_an_illegal_event_is_refused_with_the_history_and_changes_nothing() -> None:
    one = bound()
    one.handle(InstanceLost("voice", 1))
    one.handle(AttemptBegan(2))
    with pytest.raises(IllegalEvent, match=r"r1: AttemptBegan\(number=3\) in state bound") as refused:
        one.handle(AttemptBegan(3))
    assert refused.value.history == (
        "unbound: AttemptBegan(number=1) -> bound",
        "bound: InstanceLost(stage='voice', attempt=1, blame=<Blame.NONE: 'none'>) -> unbound",
        "unbound: AttemptBegan(number=2) -> bound",
    )
    assert (one.state, one.attempt) == (RequestState.BOUND, 2)


def test_chunks_do_not_crowd_out_the_history() -> None:
    one = bound()
    for _ in range(10 * HISTORY_KEPT):
        one.handle(ChunkCame("voice", 1))
    assert [type(each.event) for each in one.history] == [AttemptBegan, ChunkCame]


def test_the_table_ends_and_lists_no_unreachable_row() -> None:
    """Ends lead nowhere else; every live state ends by a deadline; behind a row without a condition stands no other."""
    for state, rows in TABLE.items():
        for kind, listed in rows.items():
            assert listed[-1].when is None, f"{kind.__name__} in {state} may find no row"
            assert all(row.when is not None for row in listed[:-1])
            for row in listed:
                ends = set(row.instructions) & ENDS
                assert (row.to not in LIVE) == (state not in LIVE or bool(ends))
        assert (TABLE[state][DeadlinePassed][0].to is RequestState.FAILED) == (
            state in LIVE or state is RequestState.FAILED
        )
