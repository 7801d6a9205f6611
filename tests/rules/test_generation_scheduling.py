"""The scheduler: order, budget, chunks, preemption, holds; and, in any order of events, the right tokens and no leak.

`paper_kit.Paper` stands for the model.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stage_runtime.errors import IllegalEvent
from stage_runtime.rules.autoregressive.requests import (
    QUEUED,
    FinishReason,
    Hold,
    Request,
    RequestStatus,
    TokenLimits,
)
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import SchedulerOutput
from stage_runtime.rules.autoregressive.waiting_queue import STALE_MOST
from tests.rules.paper_kit import Given, Paper, ask, expected, make, successor


def shape(step: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(row.request.id, row.start, row.count) for row in step.rows]


def test_rows_that_decode_come_first_and_prompts_fill_the_budget_in_chunks() -> None:
    scheduler = make(max_chunk=5)
    paper = Paper(scheduler)
    ask(scheduler, "a", [1, 2, 3])
    paper.step()
    ask(scheduler, "b", list(range(12)))
    ask(scheduler, "c", list(range(20, 24)))
    step = scheduler.schedule()
    assert shape(step) == [("a", 3, 1), ("b", 0, 5), ("c", 0, 2)]
    scheduler.update_from_output(step, paper.run(step), {})
    assert shape(scheduler.schedule()) == [("a", 4, 1), ("b", 5, 5), ("c", 2, 2)]


def chunks(prompt: int, tail: int, **limits: Any) -> list[int]:
    scheduler = make(max_chunk=5, **limits)
    paper = Paper(scheduler)
    request = ask(scheduler, "a", list(range(prompt)), tail=tail)
    found = []
    while request.computed < prompt:
        found.append(request.computed)
        paper.step()
    return [after - before for before, after in zip(found, [*found[1:], prompt], strict=True)]


@pytest.mark.parametrize(
    ("prompt", "tail", "expected"),
    [
        (10, 0, [5, 5]),
        (10, 2, [5, 3, 2]),
        (13, 2, [5, 5, 3]),  # hardly longer than the tail
        (14, 2, [5, 5, 2, 2]),
        (11, 2, [5, 5, 1]),  # shorter
        (4, 3, [4]),
        (5, 3, [2, 3]),
        (10, 9, [5, 5]),  # no chunk is so long
    ],
)
def test_the_tail_of_a_prompt_is_a_chunk_of_its_own(prompt: int, tail: int, expected: list[int]) -> None:
    assert chunks(prompt, tail) == expected


def test_a_tail_is_divided_only_by_a_budget_that_is_smaller() -> None:
    assert chunks(10, 4, max_batched_tokens=3) == [3, 3, 3, 1]
    assert chunks(10, 2, max_batched_tokens=5) == [5, 3, 2]


def test_a_prompt_that_is_preempted_or_found_in_the_cache_keeps_its_tail() -> None:
    scheduler = make(max_chunk=5)
    paper = Paper(scheduler)
    ask(scheduler, "a", list(range(9)), tail=2)
    paper.step()
    scheduler._preempt(next(iter(scheduler)))
    assert shape(scheduler.schedule()) == [("a", 4, 3)], "four tokens were found, the last two wait"


def test_a_row_of_a_request_that_is_preempted_gives_its_tokens_back() -> None:
    scheduler = make(blocks=7, max_chunk=4)
    paper = Paper(scheduler)
    ask(scheduler, "a", list(range(10)))
    ask(scheduler, "b", [1])
    paper.step()
    paper.step()
    assert shape(scheduler.schedule()) == [("a", 8, 2)], "b had a row before a found no block"
    assert scheduler._budget == 8 - 2


def test_a_step_has_a_row_of_each_request_whose_token_is_under_way() -> None:
    scheduler = make()
    paper = Paper(scheduler)
    request = ask(scheduler, "a", [1, 2, 3])
    first = scheduler.schedule()
    ask(scheduler, "b", [4])
    second = scheduler.schedule()
    assert (shape(first), shape(second)) == ([("a", 0, 3)], [("a", 3, 1), ("b", 0, 1)])
    assert [(row.place, row.unknown, row.samples) for row in second.rows] == [(1, 1, True), (0, 0, True)]
    scheduler.update_from_output(first, paper.run(first), {})
    assert (request.unknown, request.in_flight) == (1, 1)
    assert shape(scheduler.schedule()) == [("a", 4, 1), ("b", 1, 1)]


def test_a_request_that_the_step_under_way_ends_for_sure_is_not_in_the_next_one() -> None:
    scheduler = make(max_model_len=6)
    paper = Paper(scheduler)
    ask(scheduler, "last token", [1, 2], max_tokens=1)
    ask(scheduler, "longest", [5, 4, 3, 2, 1], max_tokens=9)
    ask(scheduler, "goes on", [1])
    first = scheduler.schedule()
    assert shape(scheduler.schedule()) == [("goes on", 1, 1)]
    updates = scheduler.update_from_output(first, paper.run(first), {})
    assert [one.request.id for one in updates if one.finish is FinishReason.LENGTH] == ["last token", "longest"]


def test_a_token_past_an_end_is_dropped_and_its_blocks_are_free() -> None:
    scheduler = make()
    paper = Paper(scheduler)
    request = ask(scheduler, "a", [1, 2], end_ids=frozenset({successor([1, 2])}))
    first = scheduler.schedule()
    results = paper.run(first)
    second = scheduler.schedule()
    assert shape(second) == [("a", 2, 1)]
    assert [one.finish for one in scheduler.update_from_output(first, results, {})] == [FinishReason.STOP]
    assert scheduler.update_from_output(second, paper.run(second), {}) == []
    assert (len(request.tokens), scheduler.pool.free) == (3, scheduler.pool.capacity)


def test_a_preempted_request_keeps_the_token_that_was_under_way() -> None:
    scheduler = make(blocks=6, prefix_caching=False)
    paper = Paper(scheduler)
    old, new = (ask(scheduler, name, [1, 2, 3, at], max_tokens=6) for at, name in enumerate("ab"))
    first = scheduler.schedule()
    result = paper.run(first)
    assert shape(scheduler.schedule()) == [("a", 4, 1)]
    assert (old.preemptions, new.preemptions, new.state) == (0, 1, RequestStatus.PREEMPTED)
    scheduler.update_from_output(first, result, {})
    assert (old.generated, new.generated, new.unknown, new.blocks) == (1, 1, 0, [])


@pytest.mark.parametrize(("policy", "order"), [("fcfs", ["a", "b", "c"]), ("priority", ["c", "a", "b"])])
def test_requests_begin_in_the_order_of_the_policy(policy: str, order: list[str]) -> None:
    scheduler = make(policy=policy)
    for name, priority in (("a", 1), ("b", 1), ("c", 0)):
        ask(scheduler, name, [1], priority=priority)
    assert [name for name, _start, _count in shape(scheduler.schedule())] == order


def test_out_of_blocks_the_newest_is_preempted_computed_again_and_ends_with_the_same_tokens() -> None:
    scheduler = make(blocks=6, prefix_caching=False)
    paper = Paper(scheduler)
    old, new = ask(scheduler, "old", [1, 2, 3], max_tokens=6), ask(scheduler, "new", [4, 5, 6], max_tokens=6)
    while scheduler.has_unfinished_requests():
        paper.step()
    assert (old.preemptions, scheduler.stats.preemptions) == (0, new.preemptions)
    assert new.preemptions > 0
    assert old.tokens == expected([1, 2, 3], TokenLimits(max_tokens=6))
    assert new.tokens == expected([4, 5, 6], TokenLimits(max_tokens=6))
    assert scheduler.pool.free == scheduler.pool.capacity


def test_a_shared_prefix_is_computed_once_and_the_last_token_always() -> None:
    scheduler = make()
    paper = Paper(scheduler)
    ask(scheduler, "a", [1, 2, 3, 4], max_tokens=1)
    paper.step()
    again = ask(scheduler, "b", [1, 2, 3, 4], max_tokens=1)
    assert shape(scheduler.schedule()) == [("b", 2, 2)]
    assert again.hit_tokens == 2
    assert (scheduler.stats.prompt_tokens, scheduler.stats.hit_tokens) == (8, 2)


def eight(**limits: Any) -> Scheduler:
    """Eight requests of 400 equal tokens, in blocks of 16 and chunks of 128."""
    chosen = {"block_size": 16, "max_requests": 8, "max_batched_tokens": 512, "max_chunk": 128, "max_model_len": 500}
    scheduler = make(blocks=300, **{**chosen, **limits})
    for index in range(8):
        ask(scheduler, str(index), [at * 7 % 50 for at in range(400)], max_tokens=2)
    return scheduler


def test_a_prefix_of_requests_that_come_together_is_computed_once() -> None:
    scheduler = eight()
    paper = Paper(scheduler)
    while scheduler.has_requests():
        paper.step()
    assert scheduler.stats.prompt_tokens - scheduler.stats.hit_tokens == 400 + 7 * 16
    assert scheduler.stats.generated_tokens == 16


def test_a_prefix_that_is_not_shared_is_not_waited_for() -> None:
    computed = eight(prefix_caching=False).schedule()
    assert shape(computed) == [(str(index), 0, 128) for index in range(4)]


def test_requests_that_wait_for_a_prefix_stop_no_others_and_keep_their_places() -> None:
    scheduler = eight(max_requests=3)
    ask(scheduler, "other", [1, 2, 3])
    scheduler.finish(["2", "3", "4"])
    assert shape(scheduler.schedule()) == [("0", 0, 128)]  # 1 and 5 wait, and there are three places
    scheduler.finish(["5", "6", "7"])
    assert shape(scheduler.schedule()) == [("0", 128, 128), ("other", 0, 3)]
    assert (scheduler.running, scheduler.waiting) == (2, 1)


def test_requests_that_wait_for_a_prefix_keep_the_blocks_that_they_will_need() -> None:
    scheduler = make(blocks=10, max_chunk=4)  # nine of two tokens
    ask(scheduler, "a", [1, 2, 3, 4, 5, 6])
    ask(scheduler, "b", [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3])
    ask(scheduler, "c", [9] * 9)
    assert shape(scheduler.schedule()) == [("a", 0, 4)]  # seven are free: c would need five, and b will need three
    scheduler.finish(["b"])
    assert shape(scheduler.schedule()) == [("a", 4, 2), ("c", 0, 4)]


def test_a_prefix_whose_request_is_aborted_is_computed_for_the_next_one() -> None:
    scheduler = eight()
    paper = Paper(scheduler)
    paper.step()
    step = scheduler.schedule()
    assert shape(step) == [("0", 128, 128)]
    scheduler.finish(["0"])
    scheduler.update_from_output(step, paper.run(step), {})
    assert shape(scheduler.schedule()) == [("1", 128, 128)]
    while scheduler.has_requests():
        paper.step()
    assert scheduler.stats.generated_tokens == 14
    assert scheduler.pool.free == scheduler.pool.capacity


def test_a_prefix_is_waited_for_only_behind_the_request_that_it_is_computed_for() -> None:
    """Else an urgent request would wait for one that waits itself for all between them."""
    scheduler = make(policy="priority", max_chunk=2)
    ask(scheduler, "late", [1, 2, 3, 4, 5], priority=2)
    assert shape(scheduler.schedule()) == [("late", 0, 2)]
    ask(scheduler, "urgent", [1, 2, 3, 4, 5], priority=1)
    ask(scheduler, "latest", [1, 2, 3, 4, 5], priority=3)
    assert shape(scheduler.schedule()) == [("late", 2, 2), ("urgent", 0, 2)]


def test_a_held_request_is_no_work_until_it_is_released() -> None:
    scheduler = make()
    ask(scheduler, "a", [1], hold=Hold.REMOTE_KV)
    assert (scheduler.has_requests(), scheduler.has_unfinished_requests(), scheduler.held) == (False, True, 1)
    assert shape(scheduler.schedule()) == []
    scheduler.release("a")
    assert (scheduler.has_requests(), scheduler.held) == (True, 0)
    assert shape(scheduler.schedule()) == [("a", 0, 1)]
    with pytest.raises(IllegalEvent):
        scheduler.release("a")
    scheduler.release("never heard of")


def test_a_prompt_that_grows_is_computed_as_it_comes_and_answered_when_it_is_whole() -> None:
    scheduler = make()
    paper = Paper(scheduler)
    request = ask(scheduler, "a", [], open=True)
    assert (request.state, scheduler.has_requests(), scheduler.held) == (RequestStatus.HELD, False, 1)
    scheduler.extend("a", [1], last=False)  # the last token waits: the answer may follow it
    assert (request.state, scheduler.has_requests()) == (RequestStatus.HELD, False)
    scheduler.extend("a", [2, 3], last=False)
    step = scheduler.schedule()
    assert (shape(step), step.rows[0].samples) == ([("a", 0, 2)], False)
    assert scheduler.update_from_output(step, paper.run(step), {}) == []
    assert (request.state, scheduler.has_requests(), scheduler.held) == (RequestStatus.PAUSED, False, 1)
    assert request.blocks
    scheduler.extend("a", [4], last=False)
    assert (scheduler.has_requests(), scheduler.held) == (True, 0)
    step = scheduler.schedule()
    scheduler.extend("a", [], last=True)  # while its row is computed
    assert shape(step) == [("a", 2, 1)]
    scheduler.update_from_output(step, paper.run(step), {})
    while scheduler.has_unfinished_requests():
        assert scheduler.has_requests()
        paper.step()
    assert request.tokens == expected([1, 2, 3, 4], TokenLimits(max_tokens=4))
    assert scheduler.stats.prompt_tokens == 4
    assert scheduler.pool.free == scheduler.pool.capacity


def test_a_paused_prompt_gives_its_blocks_to_others_and_is_computed_again() -> None:
    scheduler = make(blocks=6, prefix_caching=False)
    paper = Paper(scheduler)
    paused = ask(scheduler, "paused", [1, 2, 3, 4, 5, 6, 7], open=True)
    paper.step()
    assert paused.state is RequestStatus.PAUSED
    other = ask(scheduler, "other", [1, 2, 3, 4, 5], max_tokens=3)
    while scheduler.has_requests():
        paper.step()
    assert other.tokens == expected([1, 2, 3, 4, 5], TokenLimits(max_tokens=3))
    assert (paused.state, paused.preemptions, paused.blocks) == (RequestStatus.HELD, 1, [])
    scheduler.extend("paused", [], last=True)
    while scheduler.has_requests():
        paper.step()
    assert paused.tokens[:9] == expected([1, 2, 3, 4, 5, 6, 7], TokenLimits(max_tokens=4))[:9]
    assert scheduler.pool.free == scheduler.pool.capacity


def test_an_extension_that_does_not_fit_raises_and_changes_nothing() -> None:
    scheduler = make()
    request = ask(scheduler, "a", [1, 2], open=True)
    with pytest.raises(ValueError, match="30 tokens"):
        scheduler.extend("a", [1] * 28, last=False)
    assert (request.tokens, request.open) == ([1, 2], True)
    scheduler.extend("a", [], last=True)
    with pytest.raises(IllegalEvent, match="whole"):
        scheduler.extend("a", [3], last=True)
    ask(scheduler, "b", [], open=True)
    with pytest.raises(ValueError, match="empty"):
        scheduler.extend("b", [], last=True)
    scheduler.extend("never heard of", [1], last=True)
    assert request.tokens == [1, 2]


def test_a_request_computes_no_more_tokens_than_rows_of_its_stream_have_come() -> None:
    scheduler = make()
    paper = Paper(scheduler)
    request = ask(scheduler, "a", [1, 2, 3], feeds_itself=True, fed=0)
    paper.step()
    assert (request.generated, request.state, scheduler.has_requests()) == (1, RequestStatus.PAUSED, False)
    scheduler.feed("a", 2, last=False)
    assert scheduler.has_requests()
    paper.step()
    paper.step()
    assert (request.generated, request.state, scheduler.held) == (3, RequestStatus.PAUSED, 1)
    scheduler.feed("a", 0, last=True)
    while scheduler.has_requests():
        paper.step()
    assert request.tokens == expected([1, 2, 3], TokenLimits(max_tokens=4), "a", feeds_itself=True)
    assert scheduler.pool.free == scheduler.pool.capacity
    scheduler.feed("a", 1, last=False)  # it has finished


def test_a_request_that_waits_for_rows_gives_its_blocks_to_others_and_loses_no_token() -> None:
    scheduler = make(blocks=7, prefix_caching=False)
    paper = Paper(scheduler)
    waits = ask(scheduler, "waits", [1, 2, 3, 4, 5], feeds_itself=True, fed=1)
    paper.step()
    paper.step()
    assert (waits.generated, waits.state) == (2, RequestStatus.PAUSED)
    other = ask(scheduler, "other", [1, 2, 3, 4, 5, 6, 7], max_tokens=3)
    while scheduler.has_requests():
        paper.step()
    assert (other.state, waits.state, waits.blocks) == (RequestStatus.FINISHED, RequestStatus.HELD, [])
    scheduler.feed("waits", 5, last=False)
    while scheduler.has_requests():
        paper.step()
    assert waits.tokens == expected([1, 2, 3, 4, 5], TokenLimits(max_tokens=4), "waits", feeds_itself=True)


def test_blocks_of_tokens_that_a_request_feeds_itself_are_not_shared() -> None:
    scheduler = make()
    paper = Paper(scheduler)
    first = ask(scheduler, "first", [1, 2, 3], feeds_itself=True)
    while scheduler.has_requests():
        paper.step()
    second = ask(scheduler, "second", first.tokens[:6])
    paper.step()
    assert second.hit_tokens == 2, "the whole block of the prompt, and none of what was generated"


def test_rows_for_a_request_that_waits_for_none_are_refused() -> None:
    scheduler = make()
    ask(scheduler, "a", [1])
    with pytest.raises(IllegalEvent, match="waits for no rows"):
        scheduler.feed("a", 1, last=False)


def test_what_can_never_be_computed_is_refused_and_changes_nothing() -> None:
    scheduler = make(blocks=6)
    ask(scheduler, "a", [1])
    for prompt, problem in (([], "empty"), ([1] * 10, "10 tokens")):
        with pytest.raises(ValueError, match=problem):
            ask(scheduler, "b", prompt)
    with pytest.raises(IllegalEvent, match="added twice"):
        ask(scheduler, "a", [2])
    assert (scheduler.waiting, scheduler.running) == (1, 0)


def test_a_request_ends_at_the_model_s_length_and_a_failed_row_ends_its_request_alone() -> None:
    scheduler = make(max_model_len=4)
    paper = Paper(scheduler)
    ask(scheduler, "a", [1, 2], max_tokens=100)
    ask(scheduler, "b", [3, 2], max_tokens=100)
    step = scheduler.schedule()
    updates = scheduler.update_from_output(step, {"a": 1}, {"b": "NaN"})
    assert [(one.request.id, one.token, one.finish, one.reason) for one in updates] == [
        ("a", 1, None, None),
        ("b", None, FinishReason.ERROR, "NaN"),
    ]
    (last,) = paper.step()
    assert (last.request.id, last.finish) == ("a", FinishReason.LENGTH)
    assert scheduler.schedule().finished == ("a",)  # b was in the step of a's last token
    assert scheduler.pool.free == scheduler.pool.capacity


def test_a_failed_row_leaves_nothing_in_the_prefix_cache() -> None:
    scheduler = make()
    ask(scheduler, "a", [1, 2, 3, 4])
    scheduler.update_from_output(scheduler.schedule(), {}, {"a": "NaN"})
    assert scheduler.pool.cached == 0


def test_the_runner_gets_no_notice_of_an_end_whose_id_is_in_use_again() -> None:
    scheduler = make()
    ask(scheduler, "a", [1])
    ask(scheduler, "b", [1])
    scheduler.finish(["a", "b"])
    ask(scheduler, "a", [2])
    step = scheduler.schedule()
    assert (shape(step), step.finished) == ([("a", 0, 1)], ("b",))


def test_an_abort_during_a_step_discards_its_result_and_may_come_twice() -> None:
    scheduler = make()
    paper = Paper(scheduler)
    request = ask(scheduler, "a", [1, 2, 3])
    step = scheduler.schedule()
    sampled = paper.run(step)
    assert scheduler.finish(["a", "a", "unknown"]) == [request]
    assert scheduler.update_from_output(step, sampled, {}) == []
    assert request.tokens == [1, 2, 3]
    assert scheduler.pool.free == scheduler.pool.capacity


def test_what_is_aborted_behind_a_request_that_waits_is_forgotten() -> None:
    scheduler = make(max_requests=1)
    paper = Paper(scheduler)
    ask(scheduler, "runs", [1], max_tokens=20)
    paper.step()
    ask(scheduler, "first", [2])
    ask(scheduler, "aborted", [3]).matcher = paper
    kept = weakref.ref(paper)
    scheduler.finish(["aborted"])
    del paper
    assert kept() is None
    for index in range(1000):
        ask(scheduler, str(index), [3])
        scheduler.finish([str(index)])
    assert scheduler._queue.entries < 100
    scheduler.finish(["runs"])
    assert shape(scheduler.schedule()) == [("first", 0, 1)]


class Schedulers(RuleBasedStateMachine):
    """Requests come, grow, are held, aborted and failed, and steps overlap, in any order."""

    limits: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make(blocks=9, max_chunk=5, max_requests=3, num_speculative_tokens=3, **self.limits)
        self.paper = Paper(self.scheduler)
        self.under_way: list[tuple[SchedulerOutput, Given]] = []
        self.requests: dict[str, tuple[list[int], Request]] = {}
        self.ended: dict[str, FinishReason] = {}

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        open=st.booleans(),
        max_tokens=st.integers(1, 8) | st.just(40),
        end_ids=st.sampled_from([frozenset[int](), frozenset(range(0, 50, 5))]),
        speculates=st.booleans(),
        priority=st.integers(0, 2),
        hold=st.sampled_from([None, None, Hold.UPSTREAM_ROWS]),
        feeds_itself=st.booleans(),
        fed=st.sampled_from([None, 0, 2]),
        tail=st.integers(0, 5),
    )
    def add(self, prompt: list[int], max_tokens: int, open: bool, **fields: Any) -> None:
        name = str(len(self.requests))
        prompt = prompt[1:] if open else prompt
        request = ask(self.scheduler, name, prompt, open=open, max_tokens=max_tokens, **fields)
        self.requests[name] = (prompt, request)

    @precondition(lambda self: self.waiting_for_rows())
    @rule(data=st.data(), rows=st.integers(0, 3), last=st.booleans())
    def feed(self, data: st.DataObject, rows: int, last: bool) -> None:
        self.scheduler.feed(data.draw(st.sampled_from(self.waiting_for_rows())), rows, last=last)

    def waiting_for_rows(self) -> list[str]:
        return [
            name
            for name, (_prompt, one) in self.requests.items()
            if one.fed is not None and one.state is not RequestStatus.FINISHED
        ]

    @precondition(lambda self: self.growing())
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), max_size=5), last=st.booleans())
    def extend(self, data: st.DataObject, tokens: list[int], last: bool) -> None:
        name = data.draw(st.sampled_from(self.growing()))
        prompt, request = self.requests[name]
        try:
            self.scheduler.extend(name, tokens, last=last)
        except ValueError:
            assert request.tokens == prompt
            assert len(prompt) + len(tokens) >= self.scheduler.longest or (last and not prompt and not tokens)
            return
        self.requests[name] = ([*prompt, *tokens], request)

    def growing(self) -> list[str]:
        return [
            name
            for name, (_prompt, one) in self.requests.items()
            if one.open and one.state is not RequestStatus.FINISHED
        ]

    @rule()
    def begin_a_step(self) -> None:
        if len(self.under_way) < 2:
            step = self.scheduler.schedule()
            left = self.scheduler.limits.max_batched_tokens - step.total_num_scheduled_tokens
            assert self.scheduler._budget == left, "rows of preempted requests give their tokens back"
            assert all(row.start + row.count <= row.request.ready for row in step.rows)
            self.under_way.append((step, self.paper.run(step)))

    @precondition(lambda self: self.under_way)
    @rule()
    def end_a_step(self) -> None:
        self._ended(*self.under_way.pop(0), {})

    @precondition(lambda self: self.under_way and self.under_way[0][0].rows)
    @rule(data=st.data())
    def end_a_step_with_a_failure(self, data: st.DataObject) -> None:
        step, sampled = self.under_way.pop(0)
        self._ended(step, sampled, {data.draw(st.sampled_from(step.rows)).request.id: "NaN"})

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        for request in self.scheduler.finish([name]):
            self.ended[request.id] = FinishReason.ABORT

    @precondition(lambda self: any(one.state is RequestStatus.HELD for _prompt, one in self.requests.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = [name for name, (_prompt, one) in self.requests.items() if one.state is RequestStatus.HELD]
        self.scheduler.release(data.draw(st.sampled_from(held)))

    def _ended(self, step: SchedulerOutput, sampled: Given, failed: dict[str, str]) -> None:
        for update in self.scheduler.update_from_output(step, sampled, failed, {}, sampled.accepted):
            if update.finish is not None:
                assert update.request.id not in self.ended
                self.ended[update.request.id] = update.finish

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        pool = self.scheduler.pool
        having = (RequestStatus.RUNNING, RequestStatus.PAUSED)
        live = [request for _prompt, request in self.requests.values() if request.state in having]
        used = [block for request in live for block in request.blocks]
        assert pool.free == pool.capacity - len(set(used))
        assert [pool.users(block) for block in range(pool.capacity + 1)] == [
            used.count(block) for block in range(pool.capacity + 1)
        ]
        assert not [one for _prompt, one in self.requests.values() if one.state not in having and one.blocks]

    @invariant()
    def the_queue_has_each_request_that_waits_once(self) -> None:
        scheduler = self.scheduler
        waiting = [name for name, (_prompt, one) in self.requests.items() if one.state in QUEUED]
        entered = [one.id for one in scheduler._queue.live()]
        assert sorted(entered) == sorted(waiting)
        assert scheduler.waiting == len(waiting)
        assert scheduler._queue.entries <= STALE_MOST + 2 * len(self.requests)

    @invariant()
    def blocks_that_are_waited_for_are_about_to_be_filled(self) -> None:
        for content, request in self.scheduler._filling.items():
            assert request.state is RequestStatus.RUNNING
            at = request.hashes.index(content)
            assert (at + 1) * self.paper.size <= request.ready
            assert request.in_flight or (at + 1) * self.paper.size > request.computed

    @invariant()
    def what_waits_for_others_is_no_work(self) -> None:
        scheduler = self.scheduler
        requests = [one for _prompt, one in self.requests.values()]
        paused = [one for one in requests if one.state is RequestStatus.PAUSED]
        resuming = [one for one in paused if one.ready > one.computed]
        queued = [
            one
            for one in requests
            if one.state in (RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED)
        ]
        assert scheduler.has_requests() == bool(queued or resuming or scheduler._finished)
        assert scheduler.held == sum(one.state is RequestStatus.HELD for one in requests) + len(paused) - len(resuming)

    @invariant()
    def keys_and_values_are_computed_up_to_the_last_token(self) -> None:
        for _prompt, request in self.requests.values():
            if request.state is RequestStatus.RUNNING and request.speculates and request.generated:
                assert request.computed <= len(request.tokens) - 1 + request.unknown
                assert request.hoped == sum(
                    row.spare for step, _g in self.under_way for row in step.rows if row.request is request
                )

    @invariant()
    def tokens_are_those_of_a_request_alone(self) -> None:
        for prompt, request in self.requests.values():
            if request.open:
                assert request.tokens == prompt
                continue
            whole = expected(prompt, request.limits, request.id, request.feeds_itself)
            assert request.tokens == whole[: len(request.tokens)]
            if self.ended.get(request.id) is FinishReason.LENGTH:
                assert request.tokens == whole[: self.scheduler.longest]

    def teardown(self) -> None:
        """All requests that are not held come to its end in a bounded number of steps."""
        while self.under_way:
            self._ended(*self.under_way.pop(0), {})
        steps = 0
        while self.scheduler.has_requests():
            step = self.scheduler.schedule()
            self._ended(step, self.paper.run(step), {})
            steps += 1
            assert steps < 2000
        waiting = (RequestStatus.HELD, RequestStatus.PAUSED)
        held = [name for name, (_prompt, one) in self.requests.items() if one.state in waiting]
        assert set(self.ended) == set(self.requests) - set(held)
        for name in held:
            request = self.requests[name][1]
            assert request.open or request.fed is not None or request.state is RequestStatus.HELD
        self.scheduler.finish(held)
        assert self.scheduler.pool.free == self.scheduler.pool.capacity
        assert not self.scheduler._filling


TestSchedulers = Schedulers.TestCase
