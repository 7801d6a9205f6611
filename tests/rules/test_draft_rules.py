"""Drafts of next tokens: room for them, what is computed of them, and where the tokens of prompt lookup come from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.rules.autoregressive import drafts
from stage_runtime.rules.autoregressive.blocks import hash_blocks
from stage_runtime.rules.autoregressive.prompt_lookup import PromptLookup
from stage_runtime.rules.autoregressive.requests import Request, RequestStatus
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import SchedulerOutput
from tests.rules.paper_kit import Given, Paper, ask, expected, make
from tests.thoroughness import examples


def run(paper: Paper, overlap: bool) -> list[SchedulerOutput]:
    """All steps until nothing is left. overlap: one is scheduled before the result of the one before it is known."""
    scheduler, steps = paper.scheduler, list[SchedulerOutput]()
    under_way: list[tuple[SchedulerOutput, Given]] = []
    while scheduler.has_requests() or under_way:
        step = scheduler.schedule()
        if step.rows:
            steps.append(step)
            under_way.append((step, paper.run(step)))
        if under_way and (len(under_way) > overlap or not step.rows):
            before, given = under_way.pop(0)
            for row in before.rows:
                if row.request.state is RequestStatus.RUNNING:
                    one = drafts.written(row)
                    assert 0 <= one.start and one.start + one.count <= len(row.request.tokens)
            scheduler.update_from_output(before, given, {}, {}, given.accepted)
        assert len(steps) < 2000
    return steps


def check_cache(paper: Paper, request: Request) -> int:
    """Blocks of its tokens that are found hold these tokens. Returns: how many there are."""
    size = paper.size
    found = paper.scheduler.pool.find(hash_blocks(request.tokens, size))
    for index, block in enumerate(found):
        assert paper.memory[block] == request.tokens[index * size : (index + 1) * size]
    return len(found)


@settings(max_examples=examples(100), deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=4),
    max_tokens=st.lists(st.integers(1, 25), min_size=4, max_size=4),
    blocks=st.integers(16, 24),
    size=st.integers(1, 5),
    overlap=st.booleans(),
    ends=st.sampled_from([frozenset[int](), frozenset(range(0, 50, 5))]),
)
def test_drafts_change_no_token_leave_no_block_and_reach_no_shared_prefix(
    prompts: list[list[int]],
    max_tokens: list[int],
    blocks: int,
    size: int,
    overlap: bool,
    ends: frozenset[int],
) -> None:
    scheduler = make(blocks=blocks, num_speculative_tokens=size, max_batched_tokens=16)
    paper = Paper(scheduler)
    asked = [
        ask(scheduler, str(index), prompt, speculates=index != 2, max_tokens=most, end_ids=ends)
        for index, (prompt, most) in enumerate(zip(prompts, max_tokens, strict=False))
    ]
    run(paper, overlap)
    for prompt, request in zip(prompts, asked, strict=False):
        whole = expected(prompt, request.limits)[: scheduler.longest]
        assert request.tokens == whole
        check_cache(paper, request)
    assert scheduler.pool.free == scheduler.pool.capacity


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_that_are_right_save_steps_and_their_blocks_are_cached(overlap: bool) -> None:
    steps = {}
    for size in (0, 4):
        scheduler = make(num_speculative_tokens=size, max_model_len=39)
        paper = Paper(scheduler)
        request = ask(scheduler, "a", [1, 2, 3], speculates=True, max_tokens=30)
        steps[size] = len(run(paper, overlap))
        if not overlap:
            assert steps[size] == 30 - paper.accepted.get("a", 0)
        # The last tokens may be a draft's, whose blocks would become known with the next step.
        assert check_cache(paper, request) >= (len(request.tokens) - 1 - size) // paper.size
    assert steps[4] < 20


def test_a_draft_of_before_a_preemption_is_not_counted_after_it() -> None:
    scheduler = make(blocks=17, num_speculative_tokens=4, max_batched_tokens=40)
    paper = Paper(scheduler)
    for name in "abc":
        ask(scheduler, name, [ord(name), 1, 2], speculates=True, max_tokens=24)
    run(paper, overlap=False)
    assert scheduler.stats.preemptions > 0


def rows(scheduler: Scheduler) -> dict[str, tuple[int, int]]:
    return {row.request.id: (row.count, row.spare) for row in scheduler.schedule().rows}


def begun(names: str, **limits: Any) -> Scheduler:
    """Requests whose prompts of three tokens are computed."""
    scheduler = make(**{"num_speculative_tokens": 4, "max_batched_tokens": 40, **limits})
    paper = Paper(scheduler)
    for name in names:
        ask(scheduler, name, [ord(name), 1, 2], speculates=name != "x", max_tokens=20)
    paper.step()
    return scheduler


def test_there_is_room_for_a_draft_where_tokens_and_blocks_are_left_when_all_else_has_its_own() -> None:
    assert rows(begun("ax")) == {"a": (1, 4), "x": (1, 0)}
    assert rows(begun("abx", max_batched_tokens=9)) == {"a": (1, 4), "b": (1, 2), "x": (1, 0)}
    # Three tokens of each are in two blocks of two tokens; two blocks are free. The fourth token needs none.
    assert rows(begun("ab", blocks=7)) == {"a": (1, 4), "b": (1, 0)}
    scheduler = begun("a", max_batched_tokens=9)
    ask(scheduler, "long", list(range(20)))
    assert rows(scheduler) == {"a": (1, 0), "long": (8, 0)}


def test_a_row_that_is_scheduled_while_a_draft_is_verified_has_blocks_for_wherever_it_will_stand() -> None:
    scheduler = begun("a", max_batched_tokens=9)
    (first,) = scheduler.schedule().rows
    ask(scheduler, "long", list(range(20)))
    row, _chunk = scheduler.schedule().rows
    assert (first.start, first.spare, row.start, row.spare, row.unknown) == (3, 4, 4, 0, 1)
    assert len(row.blocks) == 5  # for nine tokens: the draft may be right, and then the row's own is the ninth


def test_a_draft_ends_where_its_request_must() -> None:
    scheduler = make(num_speculative_tokens=4, max_batched_tokens=40)
    paper = Paper(scheduler)
    for most in (2, 3, 4, 20):
        ask(scheduler, str(most), [most, 1, 2], speculates=True, max_tokens=most)
    paper.step()
    assert rows(scheduler) == {"2": (1, 0), "3": (1, 1), "4": (1, 2), "20": (1, 4)}
    assert rows(begun("a", max_model_len=6)) == {"a": (1, 1)}


def looked_up(tokens: list[int], most: int = 4, longest: int = 3, shortest: int = 2) -> list[int]:
    found = PromptLookup(longest, shortest)
    found.add(tokens[:2])
    found.add(tokens[2:])
    return found.draft(most)


def test_prompt_lookup_gives_what_followed_the_longest_known_end_at_its_first_place() -> None:
    assert looked_up([1, 2, 3, 4, 5, 1, 2]) == [3, 4, 5, 1]
    assert looked_up([1, 2, 3, 4, 5, 1, 2], most=2) == [3, 4]
    assert looked_up([1, 2, 9, 0, 1, 2, 8, 0, 1, 2]) == [8, 0, 1, 2]  # of three tokens, before that of two
    assert looked_up([1, 2, 9, 1, 2, 8, 7, 1, 2]) == [9, 1, 2, 8]
    assert looked_up([5, 5, 5, 5]) == [5]
    assert looked_up([1, 2, 3, 4, 5, 9, 2]) == []
    assert looked_up([1, 2, 3, 9, 2], shortest=1) == [3, 9, 2]
    assert looked_up([7]) == []
    assert looked_up([1, 2, 3, -4, 5, 1, 2]) == [3]
    assert looked_up([1, 2, -3, 4, 1, 2]) == []
