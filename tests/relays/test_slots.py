"""The allocator of extents and the table of a slot's life."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stage_runtime.relays.memory.slots import TRANSITIONS, Extents, IllegalTransition, Slot, SlotEvent, SlotState
from tests.thoroughness import examples


class ExtentsMachine(RuleBasedStateMachine):
    """Any order of allocations and frees, against a plain set of units."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(64, 64 * 41, 64)
        self.free = set(range(1, 41))
        self.used: dict[int, int] = {}

    @rule(nbytes=st.integers(0, 64 * 12))
    def allocate(self, nbytes: int) -> None:
        units = max(1, -(-nbytes // 64))
        lowest = next((at for at in range(1, 41) if set(range(at, at + units)) <= self.free), None)
        got = self.extents.allocate(nbytes)
        if lowest is None:
            assert got is None
            return
        assert got == (lowest * 64, units * 64)
        self.free -= set(range(lowest, lowest + units))
        self.used[got[0]] = got[1]

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        start = data.draw(st.sampled_from(sorted(self.used)))
        size = self.used.pop(start)
        self.extents.free(start, size)
        self.free |= set(range(start // 64, (start + size) // 64))

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def free_what_is_free(self, data: Any) -> None:
        at = data.draw(st.sampled_from(sorted(self.free)))
        with pytest.raises(ValueError, match="free already"):
            self.extents.free(at * 64, 64)

    @invariant()
    def what_is_free_is_exactly_what_is_not_used(self) -> None:
        extents = self.extents.free_extents()
        assert {unit for start, end in extents for unit in range(start // 64, end // 64)} == self.free
        assert all(before[1] < after[0] for before, after in itertools.pairwise(extents))  # merged, ascending

    def teardown(self) -> None:
        for start, size in self.used.items():
            self.extents.free(start, size)
        assert self.extents.free_extents() == [(64, 64 * 41)]


ExtentsMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestAnyOrderOfAllocationsKeepsExtentsApartAndFreesThemOnce = ExtentsMachine.TestCase


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SlotState, SlotEvent)))
def test_an_event_moves_a_slot_by_the_table_or_changes_nothing(state: SlotState, event: SlotEvent) -> None:
    slot = Slot(0, 64, 64, 0, 1)
    slot.state = state
    after = TRANSITIONS[state].get(event)
    if after is None:
        with pytest.raises(IllegalTransition, match=state.value):
            slot.take(event)
        assert slot.state is state
    else:
        assert slot.take(event) is after


def test_a_slot_that_receivers_may_read_becomes_free_only_through_their_release() -> None:
    for state in (SlotState.IN_FLIGHT, SlotState.QUARANTINED):
        assert SlotState.FREE not in TRANSITIONS[state].values()
        assert [event for event, after in TRANSITIONS[state].items() if after is SlotState.ACKED] == [
            SlotEvent.RELEASED
        ]
