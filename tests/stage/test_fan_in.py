"""Joins between processes: any order, any credits, interleaved requests, aborts, late words."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stage_runtime as omni
from omnipipeline_spec.types.plan import RelayPlan
from stage_runtime.wire.messages import Abort, Complete
from tests.stage.stage_kit import PATIENCE_S, World, plan, world
from tests.thoroughness import examples

LARGE = 120_000  # by relay, not inline


@pytest.fixture(autouse=True)
def without_the_garbage_collector() -> Iterator[None]:
    """Slots are to be free when they are let go of, not when somebody looks for cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def branch(payload: omni.StagePayload) -> dict[str, Any]:
    return {
        "id": f"{payload.request.id} of {payload.data['me']}",
        "long": np.zeros(LARGE, np.uint8),
        "wait": payload.data["wait"],
    }


FUNCTIONS = {"a": branch, "b": branch, "join": lambda payload: payload.data}


def join_world(made: World, *, credits: int = 2, slots: int = 1000, **fields: Any) -> None:
    for name in ("a", "b"):
        made.process(f"p{name}", [plan(name, next=("join",), relay=RelayPlan(credits=credits))], FUNCTIONS, slots=slots)
    fields.setdefault("merge_fn", "stage_functions:merge_all")
    join = plan("join", wait_for=("a", "b"), inputs_from=("a", "b"), terminal=True, **fields)
    made.process("pj", [join], FUNCTIONS)


def ask(made: World, request_id: str, branches: str = "ab", *, wait: str = "ab", attempt: int = 1) -> None:
    for name in branches:
        made.submit(request_id, name, {"me": name, "wait": wait}, attempt=attempt)


def gathered(made: World, source: str) -> list[str]:
    """Requests that wait at the join with what ``source`` gave."""
    works = made.hosts["pj"].stages["join"].input.works()
    return [work.request_id for work in works if work.gathering and source in work.gathering.inputs()]


async def join_in_any_order(seed: int, first: list[int], second: list[int], credits: int, slots: int) -> None:
    async with world(seed) as made:
        join_world(made, credits=credits, slots=slots)
        for number in first:
            ask(made, f"r{number}", "a")
        for number in second:
            ask(made, f"r{number}", "b")
        await made.until(lambda: len(made.results()) == len(first))
        assert made.results() == {f"r{n}": {"a": f"r{n} of a", "b": f"r{n} of b"} for n in first}
        assert made.failed() == {}
        await made.until(lambda: made.outstanding == 0)


@settings(max_examples=examples(25))
@given(
    st.integers(0, 2**32),
    st.integers(1, 7).flatmap(lambda count: st.tuples(*[st.permutations(range(count))] * 2)),
    st.integers(1, 3),
    st.sampled_from([1, 2, 1000]),
)
def test_a_join_makes_progress_under_any_order_and_any_credits(
    seed: int, orders: tuple[list[int], list[int]], credits: int, slots: int
) -> None:
    asyncio.run(join_in_any_order(seed, *orders, credits, slots))


def test_two_branches_that_begin_with_different_requests_do_not_wait_for_each_other() -> None:
    """A delivers r1 r2 and B r3 r4, with two credits each: all slots are taken, and no request is whole."""
    asyncio.run(join_in_any_order(1, [1, 2, 3, 4], [3, 4, 1, 2], 2, 1000))


async def test_a_merge_function_may_take_the_payloads_out_of_what_it_gets() -> None:
    async with world() as made:
        join_world(made, merge_fn="stage_functions:popping_merge")
        ask(made, "r1")
        await made.until(lambda: "r1" in made.results() or "r1" in made.failed())
        assert (made.results(), made.failed()) == ({"r1": {"a": "r1 of a", "b": "r1 of b"}}, {})


async def test_an_abort_during_the_fan_in_frees_what_had_come() -> None:
    async with world() as made:
        join_world(made, credits=8)
        for number in range(4):
            ask(made, f"r{number}", "a")
        await made.until(lambda: len(gathered(made, "a")) == 4)
        await made.until(lambda: made.outstanding == 0)  # what waits at a join holds no slot
        works = made.hosts["pj"].stages["join"].input.works()
        waiting = [weakref.ref(work.gathering.inputs()["a"].data["long"]) for work in works if work.gathering]
        assert len(waiting) == 4
        del works
        for number in range(4):
            made.abort(f"r{number}")
        await made.until(lambda: all(one() is None for one in waiting))
        assert list(made.hosts["pj"].stages["join"].input.works()) == []
        ask(made, "r9")
        await made.until(lambda: made.results() == {"r9": {"a": "r9 of a", "b": "r9 of b"}})


async def test_a_payload_that_comes_after_the_abort_is_dropped_and_its_slot_freed() -> None:
    async with world() as made:
        join_world(made)
        ask(made, "r1", "a")
        await made.settle()
        made.send("cc", "pj", Abort("r1", 1, "cc", "x"))
        await made.settle()
        ask(made, "r1", "b")
        await made.settle()
        assert made.results() == {}
        await made.until(lambda: made.outstanding == 0)


async def test_a_later_attempt_is_joined_afresh() -> None:
    """Inputs that the first attempt had brought are not taken for the second's."""
    async with world() as made:
        join_world(made)
        ask(made, "r1", "a", attempt=1)
        await made.settle()
        made.abort("r1", attempt=1)
        await made.settle()
        ask(made, "r1", "b", attempt=2)
        await made.settle()
        assert made.results() == {}
        ask(made, "r1", "a", attempt=2)
        await made.until(lambda: made.results() == {"r1": {"a": "r1 of a", "b": "r1 of b"}})


@pytest.mark.parametrize(("wait", "merged"), [("a", {"a"}), ("ab", {"a", "b"})])
@pytest.mark.parametrize("order", ["ab", "ba"])
async def test_wait_for_fn_decides_when_it_can_and_what_came_before_is_kept(
    wait: str, merged: set[str], order: str
) -> None:
    async with world() as made:
        join_world(made, wait_for_fn="stage_functions:wait_as_asked")
        for name in order if "b" in wait else "a":
            ask(made, "r1", name, wait=wait)
            await made.settle()
        await made.until(lambda: set(made.results().get("r1", ())) == merged)


async def test_a_source_outside_what_was_resolved_fails_its_request_alone() -> None:
    async with world() as made:
        join_world(made, wait_for_fn="stage_functions:wait_as_asked")
        ask(made, "r1", "b", wait="a")
        await made.until(lambda: len(gathered(made, "b")) == 1)
        ask(made, "r1", "a", wait="a")
        ask(made, "r2", "ab", wait="ab")
        await made.until(lambda: "r1" in made.failed() and "r2" in made.results())
        failure = made.failed()["r1"]
        assert (failure.code, failure.stage, failure.hook) == ("stage_failed", "join", "waitFor")


async def test_a_payload_that_cannot_be_fetched_fails_its_request_alone() -> None:
    async with world() as made:
        join_world(made)
        made.relays["pj"].breaks.add("r1")
        ask(made, "r1")
        ask(made, "r2")
        await made.until(lambda: "r1" in made.failed() and "r2" in made.results())
        assert made.failed()["r1"].code == "transport_failed"
        # A value that could not be fetched is let go of, too, or its credit would be lost for ever.
        await made.until(lambda: not any(host.process.send_queues.outstanding for host in made.hosts.values()))


async def test_the_abort_of_an_attempt_drops_no_transfer_of_the_next_one() -> None:
    """It may come after them: one is the coordinator's word, the other a stage's, and nothing orders the two."""
    async with world() as made:
        join_world(made)
        ask(made, "r1")
        await made.until(lambda: "r1" in made.results())
        made.abort("r1", attempt=0)
        relay = made.relays["pj"]
        await made.until(lambda: relay.cleaned != [])
        assert relay.fetched and not set(relay.cleaned) & set(relay.fetched)


@pytest.mark.proves("second-payload")
@pytest.mark.parametrize("order", ["ab", "ba"])
async def test_a_wait_for_fn_that_never_knows_fails_its_request_at_once_and_by_name(order: str) -> None:
    async with world() as made:
        join_world(made, wait_for_fn="stage_functions:never_knows")
        for name in order:
            ask(made, "r1", name, wait="")
            await made.settle()
        ask(made, "r2", "ab", wait="ab")
        await made.until(lambda: "r1" in made.failed() and "r2" in made.results())
        failure = made.failed()["r1"]
        assert (failure.code, failure.stage, failure.hook) == ("stage_failed", "join", "waitForFn")
        assert "no other source sends" in failure.message


@pytest.mark.proves("second-payload")
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("when", ["before the function", "in it", "after its result"])
async def test_a_second_payload_is_an_error_of_its_request_whenever_it_comes(when: str, apart: bool) -> None:
    """And no log line with half of the data; the next request is served by the same processes."""
    go = threading.Event()

    def sink(payload: omni.StagePayload) -> Any:
        assert when == "after its result" or go.wait(PATIENCE_S)
        return payload.data["id"]

    async with world() as made:
        functions = {**FUNCTIONS, "sink": sink}
        plans = [plan(name, next=("sink",)) for name in "ab"]
        plans.append(plan("sink", inputs_from=("a", "b"), terminal=True))
        if apart:
            for one in plans:
                made.process(f"p{one.name}", [one], functions)
        else:
            made.process("p", plans, functions)
        sink_stage = made.hosts["psink" if apart else "p"].stages["sink"]
        if when == "before the function":
            ask(made, "r0", "a")  # which keeps the stage's only thread
            await made.until(lambda: sink_stage.running == 1)
        ask(made, "r1", "a")
        if when == "in it":
            await made.until(lambda: sink_stage.running == 1)
        elif when == "after its result":
            await made.until(lambda: "r1" in made.results())
        else:
            await made.until(lambda: sink_stage.waiting == 1)
        ask(made, "r1", "b")
        await made.until(lambda: "r1" in made.failed())
        failure = made.failed()["r1"]
        assert (failure.code, failure.stage, failure.hook) == ("stage_failed", "sink", "receive")
        assert "second payload, from 'b'" in failure.message
        go.set()
        ask(made, "r2", "b")
        await made.until(lambda: made.results().get("r2") == "r2 of b")
        assert "r1" not in made.results() or when == "after its result"


async def test_a_payload_that_comes_after_a_failure_or_an_abort_is_no_second_one() -> None:
    def sink(payload: omni.StagePayload) -> Any:
        raise ValueError(payload.data["id"])

    async with world() as made:
        for name in "ab":
            made.process(f"p{name}", [plan(name, next=("sink",))], FUNCTIONS)
        made.process("ps", [plan("sink", inputs_from=("a", "b"), terminal=True)], {"sink": sink})
        ask(made, "r1", "a")
        await made.until(lambda: "r1" in made.failed())
        ask(made, "r1", "b")
        await made.settle()
        assert [one.failure.message for one in made.received if isinstance(one, Complete) and one.failure] == [
            "ValueError: r1 of a"
        ]
