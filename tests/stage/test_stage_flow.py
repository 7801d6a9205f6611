"""Results, chunks and ends on their way between stages, in one process and in several."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stage_runtime as omni
from omnipipeline_spec.types.plan import RelayPlan, StagePlan
from stage_runtime.rules.flow.streams import STREAM_WINDOW
from stage_runtime.wire.messages import (
    Complete,
    Ended,
    ForwardAbort,
    ForwardAbortReply,
    HandBack,
    Members,
    PeerUnreachable,
)
from stage_runtime.wire.parts import Member
from tests.stage.stage_kit import PATIENCE_S, World, plan, world
from tests.thoroughness import examples

LARGE = 120_000
FLAT = RelayPlan(credits=1)


def echo(payload: omni.StagePayload) -> Any:
    return payload.data


def place(made: World, plans: list[StagePlan], functions: dict[str, Any], *, apart: bool) -> None:
    if apart:
        for one in plans:
            made.process(f"p{one.name}", [one], functions)
    else:
        made.process("p", plans, functions)


@pytest.mark.parametrize("apart", [True, False])
async def test_a_target_that_the_request_is_not_bound_to_gets_nothing_and_the_others_get_all(apart: bool) -> None:
    """No terminal that the request waits for can be reached from there: the coordinator has left it out."""

    def produce(payload: omni.StagePayload) -> Iterator[Any]:
        for number in range(2 * STREAM_WINDOW):  # what nobody takes must not fill the window
            yield omni.Chunk(number, to="unmet" if number % 2 else ["unmet", "met"])
        yield omni.Result(payload.data)

    async def collect(session: omni.Session) -> AsyncIterator[Any]:
        chunks = [chunk.data async for chunk in session.chunks()]
        yield omni.Result([(await session.payload()).data, sum(chunks)])

    plans = [
        plan("a", next=("met", "unmet"), stream_to=("met", "unmet"), entry=True),
        plan("met", terminal=True, inputs_from=("a",), stream_from=("a",)),
        plan("unmet", terminal=True, inputs_from=("a",), stream_from=("a",)),
    ]
    functions = {"a": produce, "met": omni.Streaming(collect), "unmet": omni.Streaming(collect)}
    async with world() as made:
        place(made, plans, functions, apart=apart)
        del made.stage_of["unmet"]
        made.submit("r", "a", "x")
        await made.until(lambda: bool(made.received))
        assert completed(made) == [("r", "met", ["x", sum(range(0, 2 * STREAM_WINDOW, 2))])]
        assert made.failed() == {}
        hosts = [host for host in made.hosts.values() if "unmet" in host.stages]
        assert [list(host.stages["unmet"].input.works()) for host in hosts] == [[]]


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {"route_fn": "stage_functions:own_data"},
        {"project_payload": {"b": "stage_functions:for_b", "c": "stage_functions:for_c"}},
    ],
    ids=["routed", "projected"],
)
async def test_each_target_gets_its_own_payload(fields: dict[str, Any], apart: bool) -> None:
    plans = [
        plan("a", next=("b", "c"), **fields),
        plan("b", terminal=True, inputs_from=("a",)),
        plan("c", terminal=True, inputs_from=("a",)),
    ]
    async with world() as made:
        place(made, plans, {"a": echo, "b": echo, "c": echo}, apart=apart)
        for number in range(20):
            made.submit(f"r{number}", "a", number)
        await made.until(lambda: len(completed(made)) == 40)
        assert {(source, data["for"]) for _, source, data in completed(made)} == {("b", "b"), ("c", "c")}


@pytest.mark.parametrize("apart", [True, False])
async def test_a_projection_that_sets_the_data_of_its_payload_changes_no_other_target_s(apart: bool) -> None:
    plans = [
        plan("a", next=("b", "c"), project_payload={"b": "stage_functions:given_for_b"}),
        plan("b", terminal=True, inputs_from=("a",)),
        plan("c", terminal=True, inputs_from=("a",)),
    ]
    async with world() as made:
        place(made, plans, {"a": echo, "b": echo, "c": echo}, apart=apart)
        made.submit("r", "a", "whole")
        await made.until(lambda: len(completed(made)) == 2)
        assert sorted(completed(made)) == [("r", "b", {"for": "b"}), ("r", "c", "whole")]


def completed(made: World) -> list[tuple[str, str, Any]]:
    return [
        (one.request_id, one.source, made.opened(one.body, one.source))
        for one in made.received
        if isinstance(one, Complete) and one.body is not None
    ]


async def test_results_that_wait_for_a_slot_are_sent_though_their_stage_is_through() -> None:
    """One slot, and a receiver that holds it: the others wait at the sender, where their requests are over."""
    go = threading.Event()

    def hold(payload: omni.StagePayload) -> int:
        assert go.wait(PATIENCE_S)
        return len(payload.data)

    async with world() as made:
        a = plan("a", next=("b",), relay=RelayPlan(credits=8))
        made.process("pa", [a], {"a": lambda payload: np.zeros(LARGE, np.uint8)}, slots=1)
        made.process("pb", [plan("b", terminal=True, inputs_from=("a",))], {"b": hold})
        for number in range(6):
            made.submit(f"r{number}", "a")
        await made.until(
            lambda: made.hosts["pa"].process.send_queues.queued == 5 and made.hosts["pa"].stages["a"].running == 0
        )
        go.set()
        await made.until(lambda: made.results() == {f"r{number}": LARGE for number in range(6)})
        await made.until(lambda: made.outstanding == 0)


def sizes(payload: omni.StagePayload) -> Iterator[Any]:
    """Chunks that travel inline and by relay in turn: the short ones overtake."""
    for index, large in enumerate(payload.data):
        yield omni.Chunk({"index": index, "long": np.zeros(LARGE if large else 1, np.uint8)}, metadata={"n": index})
    yield omni.Result(len(payload.data))


async def listen(session: omni.Session) -> AsyncIterator[Any]:
    seen = [[chunk.index, chunk.data["index"], (chunk.metadata or {})["n"]] async for chunk in session.chunks()]
    payload = await session.payload()
    yield omni.Result([seen, payload.data])


async def stream_in_any_order(seed: int, large: list[bool], apart: bool) -> None:
    plans = [
        plan("a", next=("b",), stream_to=("b",), relay=FLAT),
        plan("b", terminal=True, inputs_from=("a",), stream_from=("a",)),
    ]
    async with world(seed) as made:
        place(made, plans, {"a": sizes, "b": omni.Streaming(listen)}, apart=apart)
        for number in range(3):
            made.submit(f"r{number}", "a", large)
        await made.until(lambda: len(made.results()) == 3)
        wanted = [[[index] * 3 for index in range(len(large))], len(large)]
        assert made.results() == {f"r{number}": wanted for number in range(3)}
        await made.until(lambda: made.outstanding == 0)


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32), st.lists(st.booleans(), max_size=12), st.booleans())
def test_chunks_are_numbered_and_come_in_order_and_the_end_comes_last(
    seed: int, large: list[bool], apart: bool
) -> None:
    asyncio.run(stream_in_any_order(seed, large, apart))


@pytest.mark.parametrize("apart", [True, False])
async def test_a_producer_is_held_back_by_a_consumer_that_lags(apart: bool) -> None:
    sent = 0
    go = asyncio.Event()
    consumer_loop: list[asyncio.AbstractEventLoop] = []

    def produce(payload: omni.StagePayload) -> Iterator[Any]:
        nonlocal sent
        for index in range(1000):
            yield omni.Chunk(index)
            sent = index + 1
        yield omni.Result(None)

    async def consume(session: omni.Session) -> AsyncIterator[Any]:
        consumer_loop.append(asyncio.get_running_loop())
        await go.wait()
        yield omni.Result([chunk.data async for chunk in session.chunks()])

    plans = [
        plan("a", next=("b",), stream_to=("b",)),
        plan("b", terminal=True, inputs_from=("a",), stream_from=("a",)),
    ]
    async with world() as made:
        place(made, plans, {"a": produce, "b": omni.Streaming(consume)}, apart=apart)
        made.submit("r1", "a")
        await made.until(lambda: sent >= STREAM_WINDOW - 1 and bool(consumer_loop))
        await made.settle()
        assert sent <= STREAM_WINDOW
        consumer_loop[0].call_soon_threadsafe(go.set)
        await made.until(lambda: made.results() == {"r1": list(range(1000))})


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize(
    "large",
    [
        lambda index: np.full(64 << 10, index % 251, np.uint8),
        lambda index: {"beside": 1, "samples": torch.full((64 << 10,), index % 251, dtype=torch.uint8)},
        lambda index: bytes([index % 251]) * (64 << 10),
    ],
    ids=["array", "tensor", "bytes"],
)
async def test_a_window_holds_fewer_large_chunks_and_opens_as_they_are_taken(
    large: Callable[[int], Any], apart: bool
) -> None:
    """64 KiB take two units each: 128 of them fill the window, and every one that is taken gives two back."""
    sent = 0
    go = asyncio.Event()
    consumer_loop: list[asyncio.AbstractEventLoop] = []

    def produce(payload: omni.StagePayload) -> Iterator[Any]:
        nonlocal sent
        for index in range(500):
            yield omni.Chunk(large(index))
            sent = index + 1
        yield omni.Result(None)

    def first(data: Any) -> int:
        return int(data["samples"][0] if isinstance(data, dict) else data[0])

    async def consume(session: omni.Session) -> AsyncIterator[Any]:
        consumer_loop.append(asyncio.get_running_loop())
        await go.wait()
        yield omni.Result([first(chunk.data) async for chunk in session.chunks()])

    plans = [
        plan("a", next=("b",), stream_to=("b",), relay=RelayPlan(credits=1000)),
        plan("b", terminal=True, inputs_from=("a",), stream_from=("a",)),
    ]
    async with world() as made:
        place(made, plans, {"a": produce, "b": omni.Streaming(consume)}, apart=apart)
        made.submit("r1", "a")
        await made.until(lambda: sent >= STREAM_WINDOW // 2 - 1 and bool(consumer_loop))
        await made.settle()
        assert sent <= STREAM_WINDOW // 2
        consumer_loop[0].call_soon_threadsafe(go.set)
        await made.until(lambda: made.results() == {"r1": [index % 251 for index in range(500)]})


async def test_a_producer_that_waits_for_its_consumer_ends_when_the_request_is_aborted() -> None:
    ended = threading.Event()

    def produce(payload: omni.StagePayload) -> Iterator[Any]:
        try:
            while True:
                yield omni.Chunk(0)
        finally:
            ended.set()

    async def never(session: omni.Session) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield omni.Result(None)

    plans = [
        plan("a", next=("b",), stream_to=("b",)),
        plan("b", terminal=True, inputs_from=("a",), stream_from=("a",)),
    ]
    async with world() as made:
        place(made, plans, {"a": produce, "b": omni.Streaming(never)}, apart=True)
        made.submit("r1", "a")
        await made.until(lambda: made.hosts["pa"].stages["a"].inbox.parking.at_gates == 1)
        made.abort("r1")
        await made.until(ended.is_set)
        assert made.received == []


def talk(payload: omni.StagePayload) -> Iterator[Any]:
    yield omni.Chunk("a", modality="text")
    yield omni.Chunk("b", modality="audio", metadata={"k": 1})
    yield omni.Result("end")


async def test_a_terminals_chunks_go_to_the_coordinator_numbered_with_their_modality() -> None:
    async with world() as made:
        made.process("pa", [plan("a", terminal=True)], {"a": talk})
        made.submit("r1", "a")
        await made.until(lambda: bool(made.results()))
        streamed = made.streamed("r1")
        assert [(one.chunk_id, one.modality) for one in streamed] == [(0, "text"), (1, "audio")]
        assert made.opened(streamed[1].body, "a") == {"data": "b", "metadata": {"k": 1}}
        (done,) = [one for one in made.received if isinstance(one, Complete)]
        assert done.chunks == 2
        assert [timing.stage for timing in done.timings] == ["a"]


@pytest.mark.parametrize("apart", [True, False])
async def test_a_stream_whose_producer_fails_fails_the_consumer_too_and_frees_it(apart: bool) -> None:
    def produce(payload: omni.StagePayload) -> Iterator[Any]:
        yield omni.Chunk(1)
        if payload.data == "bad":
            raise ValueError("broken source")
        yield omni.Result("fine")

    async def consume(session: omni.Session) -> AsyncIterator[Any]:
        seen = [chunk.data async for chunk in session.chunks()]
        yield omni.Result(seen)

    plans = [
        plan("a", next=("b",), stream_to=("b",)),
        plan("b", terminal=True, inputs_from=("a",), stream_from=("a",)),
    ]
    async with world() as made:
        place(made, plans, {"a": produce, "b": omni.Streaming(consume, concurrency=1)}, apart=apart)
        made.submit("r1", "a", "bad")
        await made.until(lambda: "r1" in made.failed())
        assert made.failed()["r1"].message == "ValueError: broken source"
        made.submit("r2", "a", "good")
        await made.until(lambda: made.results() == {"r2": [1]})


def one_stage(made: World, function: Callable[[omni.StagePayload], Any]) -> None:
    made.process("pa", [plan("a", terminal=True, entry=True)], {"a": function})


async def test_an_id_may_come_again_once_its_request_is_over() -> None:
    """Attempts of one coordinator only go up, so the second request is above the first one's tombstone."""
    async with world() as made:
        one_stage(made, echo)
        for attempt in (1, 2, 3):
            made.submit("again", "a", attempt, attempt=attempt)
            await made.until(partial(lambda attempt: made.results() == {"again": attempt}, attempt))


async def test_the_same_id_of_two_coordinators_are_two_requests() -> None:
    async with world() as made:
        made.known.add("other")
        one_stage(made, echo)
        made.submit("r1", "a", "ours", attempt=7)
        await made.until(lambda: len(made.received) == 1)
        made.submit("r1", "a", "theirs", attempt=1, owner="other")
        await made.until(lambda: len(made.received) == 2)
        assert made.results() == {"r1": "theirs"}
        made.abort("r1", attempt=9, owner="other")
        made.submit("r1", "a", "ours again", attempt=8)
        await made.until(lambda: made.results() == {"r1": "ours again"})


async def test_what_an_earlier_attempt_still_says_is_dropped() -> None:
    async with world() as made:
        one_stage(made, echo)
        made.submit("r1", "a", "second", attempt=2)
        await made.until(lambda: made.results() == {"r1": "second"})
        made.submit("r1", "a", "first, late", attempt=1)
        await made.settle()
        assert len(made.received) == 1


async def test_a_lost_coordinators_requests_are_aborted_and_others_are_not() -> None:
    cancelled = threading.Event()
    go = threading.Event()

    def wait(payload: omni.StagePayload) -> str:
        while not payload.request.cancelled() and not go.wait(0.001):
            pass
        cancelled.set() if payload.request.cancelled() else None
        return "kept"

    async with world() as made:
        made.known.add("other")
        made.process("pa", [plan("a", terminal=True)], {"a": omni.Simple(wait, concurrency=2)})
        made.submit("mine", "a")
        made.submit("theirs", "a", owner="other")
        await made.until(lambda: made.hosts["pa"].stages["a"].running == 2)
        made.hosts["pa"].membership.registration.coordinators["other"] = None  # type: ignore[assignment]
        made.hosts["pa"].lost("other")
        await made.until(cancelled.is_set)
        go.set()
        await made.until(lambda: made.results() == {"mine": "kept"})


@pytest.mark.proves("instances-lose-each-other")
async def test_a_neighbour_that_only_we_lost_is_reported_and_connected_again() -> None:
    """Memory that it may still look at is not written over meanwhile."""
    async with world() as made:
        made.process("pb", [plan("b", terminal=True, inputs_from=("a",))], {"b": lambda payload: len(payload.data)})
        one_credit = plan("a", next=("b",), relay=FLAT)
        host = made.process("pa", [one_credit], {"a": lambda payload: b"x" * 100_000})
        made.send("cc", "pa", Members(joined=(Member("pb", "b", "b", "1", "ipc:///pb", {}, ("b",)),)))
        made.submit("under way", "a")
        await made.until(lambda: bool(made.links.get(("pa", "pb"))))
        made.links["pa", "pb"].clear()  # announced and not heard
        host.process.channels.drop("pb")
        host.lost("pb")
        made.submit("between", "a")
        await made.until(lambda: "between" in made.failed())
        assert made.failed()["between"].code == "transport_failed"
        assert [one for one in made.received if isinstance(one, PeerUnreachable)] == [PeerUnreachable("pb")]
        assert made.outstanding == 1, "the other may still look at it"
        await made.until(lambda: made.outstanding == 0)
        made.submit("after", "a")
        await made.until(lambda: made.results().get("after") == 100_000)


async def test_a_request_that_the_coordinator_says_is_ended_is_dropped() -> None:
    async def forever(session: omni.Session) -> AsyncIterator[Any]:
        async for _ in session.chunks():
            pass
        yield omni.Result(None)

    async with world() as made:
        made.process("pa", [plan("a", terminal=True, stream_from=("x",))], {"a": omni.Streaming(forever)})
        made.submit("r1", "a")
        await made.settle()
        host = made.hosts["pa"]
        assert not host.idle
        made.send("cc", "pa", Ended((("r1", 1),)))
        await made.until(lambda: host.idle)
        assert made.received == []


async def test_an_abort_for_a_request_of_another_coordinator_is_passed_on_to_it_and_its_answer_back() -> None:
    async with world() as made:
        one_stage(made, echo)
        host = made.hosts["pa"]
        forwarded = ForwardAbort("r1", "cc", "DELETE")
        made.send("cc", "pa", forwarded)
        await made.until(lambda: made.received == [ForwardAbortReply("r1", "cc", False, 0)])  # and no other message
        made.received.clear()
        made.known.add("other")
        host.membership.registration.coordinators["other"] = None  # type: ignore[assignment]
        made.send("cc", "pa", forwarded)
        await made.until(lambda: made.received == [forwarded])
        made.send("other", "pa", ForwardAbortReply("r1", "cc", True))
        await made.until(lambda: made.received == [forwarded, ForwardAbortReply("r1", "cc", True, 1)])


async def test_a_stage_in_flight_is_not_cancelled_by_a_sibling_that_is_through() -> None:
    """Both look at one request object inside a process."""
    forwarded: list[bool] = []

    def produce(payload: omni.StagePayload) -> Iterator[Any]:
        yield omni.Chunk(1)
        assert over.wait(PATIENCE_S)
        forwarded.append(payload.request.cancelled())
        yield omni.Result(None)

    over = threading.Event()

    async def consume(session: omni.Session) -> AsyncIterator[Any]:
        async for chunk in session.chunks():
            yield omni.Result(chunk.data)
            return

    plans = [
        plan("a", next=("c",), stream_to=("b",)),
        plan("b", terminal=True, stream_from=("a",)),
        plan("c", terminal=True, inputs_from=("a",)),
    ]
    async with world() as made:
        place(made, plans, {"a": produce, "b": omni.Streaming(consume), "c": echo}, apart=False)
        made.submit("r1", "a")
        await made.until(lambda: len(made.received) == 1)
        over.set()
        await made.until(lambda: len(made.received) == 2)
        assert forwarded == [False]


async def test_a_draining_entry_stage_hands_back_what_it_has_not_begun() -> None:
    go = threading.Event()

    def wait(payload: omni.StagePayload) -> None:
        assert go.wait(PATIENCE_S)

    async with world() as made:
        one_stage(made, wait)
        made.submit("begun", "a")
        await made.until(lambda: made.hosts["pa"].stages["a"].running == 1)
        made.submit("waits", "a")
        await made.settle()
        made.hosts["pa"].deregister("SIGTERM")
        await made.until(lambda: any(isinstance(one, HandBack) for one in made.received))
        await made.settle()
        assert [one.request_id for one in made.received if isinstance(one, HandBack)] == ["waits"]
        made.abort("waits")
        go.set()
        await made.until(lambda: any(isinstance(one, Complete) for one in made.received))
        await made.until(lambda: made.hosts["pa"].idle)


async def test_memory_is_given_back_each_time_that_a_process_comes_to_rest_and_ever_less_often_then() -> None:
    given = list[int]()
    held, go_on = threading.Event(), threading.Event()

    def wait(payload: omni.StagePayload) -> Any:
        held.set()
        assert go_on.wait(PATIENCE_S)
        return payload.data

    async with world() as made:
        host = made.process("p", [plan("a", terminal=True)], {"a": wait}, give_back=lambda: given.append(1))
        for _ in range(200):
            host.beat()
        assert not given, "nothing was done yet"
        for done in (1, 2):
            held.clear()
            go_on.clear()
            made.submit(f"r{done}", "a", done)
            await made.until(held.is_set)
            given.clear()
            for _ in range(3):
                host.beat()
            assert not given, "while it computes"
            for number in range(3):
                made.submit(f"late{done}{number}", "a", 0)
            await made.until(lambda: host.stages["a"].waiting == 3)
            for number in range(3):
                made.abort(f"late{done}{number}")
            await made.until(lambda: host.stages["a"].waiting == 0)
            for _ in range(8):
                host.beat()
            assert given == [1], "once, for what ended while it waited"
            go_on.set()
            await made.until(partial(lambda done: len(completed(made)) == done and not host.stages["a"].busy, done))
            at = []
            for beat in range(200):
                given.clear()
                host.beat()
                at += [beat] * len(given)
            assert at == [0, 1, 3, 7, 15, 31, 63]


def reused(payload: omni.StagePayload) -> Iterator[Any]:
    """Eight chunks from one buffer, each written over the one before."""
    arrays, tensor = np.empty(payload.data, np.uint8), torch.empty(payload.data // 4, dtype=torch.int32)
    for number in range(8):
        arrays[:] = number
        tensor.fill_(number)
        yield omni.Chunk({"array": arrays, "tensor": tensor}, metadata={"mask": arrays[::2]})
    arrays[:] = 99
    yield omni.Result({"array": arrays})
    arrays[:] = 77


@pytest.mark.proves("buffer-written-again")
@pytest.mark.parametrize("nbytes", [800, LARGE, 1 << 18])
async def test_a_buffer_that_is_written_again_arrives_as_it_was_when_it_was_given(nbytes: int) -> None:
    """A chunk that waits for a credit must not be what the generator wrote over it since."""
    go = threading.Event()

    async def gather(session: Any) -> AsyncIterator[Any]:
        while not go.is_set():
            await asyncio.sleep(0.001)
        seen = []
        async for chunk in session.chunks():
            parts = (chunk.data["array"], chunk.data["tensor"].numpy(), chunk.metadata["mask"])
            seen.append(sorted({int(value) for part in parts for value in np.unique(part)}))
        payload = await session.payload()
        yield omni.Result([seen, np.unique(payload.data["array"]).tolist()])

    async with world() as made:
        made.process("pa", [plan("a", next=("b",), stream_to=("b",), relay=FLAT)], {"a": reused})
        b = plan("b", terminal=True, inputs_from=("a",), stream_from=("a",))
        made.process("pb", [b], {"b": omni.Streaming(gather)})
        made.submit("r", "a", nbytes)
        await made.until(lambda: made.hosts["pa"].stages["a"].running == 0)
        go.set()
        await made.until(lambda: "r" in made.results())
        assert made.results()["r"] == [[[number] for number in range(8)], [99]]


@pytest.mark.proves("buffer-written-again")
async def test_results_from_one_buffer_of_the_module_arrive_as_they_were_returned() -> None:
    """The stage's next request writes over what the one before it returned, and two targets still wait for."""
    buffer = np.empty(LARGE, np.uint8)
    go = threading.Event()

    def fill(payload: omni.StagePayload) -> Any:
        buffer[:] = payload.data
        return [buffer, bytes(LARGE)]

    def read(payload: omni.StagePayload) -> Any:
        assert go.wait(PATIENCE_S)
        return np.unique(payload.data[0]).tolist()

    async with world() as made:
        made.process("pa", [plan("a", next=("b", "c"), relay=FLAT)], {"a": fill})
        for name in "bc":
            made.process(f"p{name}", [plan(name, terminal=True, inputs_from=("a",))], {name: read})
        for number in range(6):
            made.submit(f"r{number}", "a", number)
        await made.until(
            lambda: made.hosts["pa"].stages["a"].inbox.taken == 6 and not made.hosts["pa"].stages["a"].running
        )
        go.set()
        await made.until(lambda: len(completed(made)) == 12)
        assert all(data == [int(name[1:])] for name, _, data in completed(made))
