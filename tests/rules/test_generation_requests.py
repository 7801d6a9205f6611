"""The table of a request's states in the engine core, and which token ends it."""

from __future__ import annotations

import pytest

from stage_runtime.errors import IllegalEvent
from stage_runtime.rules.autoregressive.requests import (
    TRANSITIONS,
    FinishReason,
    Request,
    RequestEvent,
    RequestStatus,
    TokenLimits,
)


@pytest.mark.parametrize("state", RequestStatus)
@pytest.mark.parametrize("event", RequestEvent)
def test_an_event_that_the_table_does_not_list_raises_and_changes_nothing(
    state: RequestStatus, event: RequestEvent
) -> None:
    request = Request("a", [1], TokenLimits(max_tokens=4))
    request.state = state
    after = TRANSITIONS.get((state, event))
    if after is None:
        with pytest.raises(IllegalEvent, match=f"request a: {event.value} while it is {state.value}"):
            request.happen(event)
        assert request.state is state
    else:
        request.happen(event)
        assert request.state is after


def test_nothing_follows_the_end_and_every_other_state_may_end() -> None:
    assert not [event for state, event in TRANSITIONS if state is RequestStatus.FINISHED]
    assert {state for state, event in TRANSITIONS if event is RequestEvent.FINISHED} == set(RequestStatus) - {
        RequestStatus.FINISHED
    }


@pytest.mark.parametrize(
    ("generated", "limits", "ending"),
    [
        ([5], TokenLimits(max_tokens=2), None),
        ([5, 6], TokenLimits(max_tokens=2), (FinishReason.LENGTH, None)),
        ([9], TokenLimits(max_tokens=2, end_ids=frozenset({9})), (FinishReason.STOP, None)),
        ([7], TokenLimits(max_tokens=2, stop_ids=frozenset({7})), (FinishReason.STOP, 7)),
        ([9], TokenLimits(max_tokens=4, min_tokens=2, end_ids=frozenset({9})), None),
        ([5, 9], TokenLimits(max_tokens=4, min_tokens=2, end_ids=frozenset({9})), (FinishReason.STOP, None)),
        ([5, 9], TokenLimits(max_tokens=2, end_ids=frozenset({9})), (FinishReason.STOP, None)),  # an end is not a cut
    ],
)
def test_the_last_token_ends_a_request(
    generated: list[int], limits: TokenLimits, ending: tuple[FinishReason, int | None] | None
) -> None:
    request = Request("a", [1, 2, 3], limits)
    request.tokens += generated
    assert request.ending() == ending
