"""The policy ``shortest``: which prompts are computed first, and how long one may be passed over."""

from __future__ import annotations

from typing import Any, ClassVar

from stage_runtime.rules.autoregressive.requests import RequestStatus
from stage_runtime.rules.autoregressive.waiting_queue import OVERTAKING
from tests.rules.paper_kit import Paper, ask, make
from tests.rules.test_generation_scheduling import Schedulers, shape


def test_a_prompt_goes_before_longer_ones_that_came_somewhat_earlier() -> None:
    scheduler = make(policy="shortest", max_model_len=60, blocks=60)
    ask(scheduler, "long", [1] * 40)
    ask(scheduler, "a little shorter", [2] * (40 - OVERTAKING))
    ask(scheduler, "short", [3] * 5)
    assert shape(scheduler.schedule()) == [("short", 0, 5), ("long", 0, 3)]


def test_a_short_prompt_is_computed_before_the_rest_of_a_long_one() -> None:
    scheduler = make(policy="shortest", max_model_len=60, blocks=60)
    paper = Paper(scheduler)
    ask(scheduler, "long", [1] * 40)
    paper.step()
    ask(scheduler, "short", [3] * 5)
    paper.step()
    assert shape(scheduler.schedule()) == [("short", 5, 1), ("long", 11, 7)], "and three tokens of the long one before"


def test_a_long_prompt_is_passed_over_by_no_more_short_ones_than_its_length_says() -> None:
    scheduler = make(policy="shortest", max_model_len=60, blocks=60, max_requests=1)
    paper = Paper(scheduler)
    ask(scheduler, "now", [9], max_tokens=1)
    long, passing = ask(scheduler, "long", [1] * 40), 0
    while long.state is RequestStatus.WAITING:
        ask(scheduler, f"short {passing}", [3] * 5, max_tokens=1)  # there is always one
        passing += 1
        paper.step()
    assert passing <= 40 // OVERTAKING + 2


class ShortestFirst(Schedulers):
    """The same in any order of events, with that policy."""

    limits: ClassVar[dict[str, Any]] = {"policy": "shortest"}


TestShortestFirst = ShortestFirst.TestCase
