"""How much of unread answers a coordinator keeps."""

from __future__ import annotations

import pytest

from stage_runtime.coordinator.answering.unread_answers import MIB, AnswerLimits
from stage_runtime.processes.coordinator_process import MAX_ANSWERS, answer_limits


@pytest.mark.parametrize(
    ("configured", "largest_body", "of_one", "of_all"),
    [
        (1024 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB),
        (128 * MIB, 64 * MIB, 64 * MIB, 128 * MIB),  # an answer as large as a body
        (32 * MIB, 64 * MIB, 32 * MIB, 32 * MIB),
    ],
)
def test_one_answer_gets_a_quarter_of_the_room_or_that_of_the_largest_body(
    configured: int, largest_body: int, of_one: int, of_all: int
) -> None:
    assert answer_limits(configured, largest_body) == AnswerLimits(of_one=of_one, of_all=of_all)


def test_without_a_setting_the_room_follows_from_the_memory() -> None:
    limits = answer_limits(None, MIB)
    assert MIB <= limits.of_one <= limits.of_all <= MAX_ANSWERS
    assert answer_limits(None, 2 * MAX_ANSWERS) == AnswerLimits(of_one=2 * MAX_ANSWERS, of_all=2 * MAX_ANSWERS)
