"""Nobody waits for what cannot come, and what nobody takes counts as taken: early returns, routes that skip, empty
streams; in one process and in several.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stage_runtime as omni
from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.rules.flow.streams import STREAM_WINDOW
from stage_runtime.wire.messages import Complete, Consumed, InputComplete
from tests.stage.stage_kit import OWNER, World, plan, world
from tests.thoroughness import examples

MANY = 4 * STREAM_WINDOW
APART = pytest.mark.parametrize("apart", [True, False])


def echo(payload: omni.StagePayload) -> Any:
    return payload.data


def pour(payload: omni.StagePayload) -> Iterator[Any]:
    """``chunks`` chunks, then what it got."""
    for index in range(payload.data.get("chunks", 0)):
        yield omni.Chunk(index)
    yield omni.Result(payload.data)


async def read_all(session: omni.Session) -> AsyncIterator[Any]:
    yield omni.Result([chunk.data async for chunk in session.chunks()])


async def read_one(session: omni.Session) -> AsyncIterator[Any]:
    async for chunk in session.chunks():
        yield omni.Result(chunk.data)
        return


async def read_nothing(session: omni.Session) -> AsyncIterator[Any]:
    yield omni.Result("left")


async def read_all_and_payload(session: omni.Session) -> AsyncIterator[Any]:
    read = [chunk.data async for chunk in session.chunks()]
    yield omni.Result([read, (await session.payload()).data["id"]])


def place(made: World, plans: list[StagePlan], functions: dict[str, Any], *, apart: bool) -> None:
    if apart:
        for one in plans:
            made.process(f"p{one.name}", [one], functions)
    else:
        made.process("p", plans, functions)


def given_by(made: World, source: str) -> list[Any]:
    """The outputs of a terminal, request by request."""
    found = [one for one in made.received if isinstance(one, Complete) and one.source == source]
    assert all(one.failure is None for one in found), found
    return [made.opened(one.body, one.source) for one in found if one.body is not None]


def skipped(made: World) -> list[tuple[str, str]]:
    return [(one.request_id, one.source) for one in made.received if isinstance(one, Complete) and one.skipped]


@APART
@pytest.mark.parametrize("reader", [read_one, read_nothing])
async def test_a_consumer_that_leaves_early_holds_no_producer_back(reader: Any, apart: bool) -> None:
    """a streams to b and gives c its result; b has its payload from the router, perhaps before a has begun."""
    plans = [
        plan("r", entry=True, next=("a", "b")),
        plan("a", next=("c",), stream_to=("b",), inputs_from=("r",)),
        plan("b", terminal=True, inputs_from=("r",), stream_from=("a",)),
        plan("c", terminal=True, inputs_from=("a",)),
    ]
    async with world() as made:
        place(made, plans, {"r": echo, "a": pour, "b": omni.Streaming(reader), "c": echo}, apart=apart)
        for number in range(3):
            made.submit(f"r{number}", "r", {"chunks": MANY, "id": number})
        await made.until(lambda: len(given_by(made, "c")) == len(given_by(made, "b")) == 3)
        await made.until(lambda: all(host.idle for host in made.hosts.values()))


def pour_to(to: str | list[str]) -> Any:
    def run(payload: omni.StagePayload) -> Iterator[Any]:
        for index in range(MANY):
            yield omni.Chunk(index, to=to)
        yield omni.Result("through")

    return run


@APART
@pytest.mark.parametrize("to", ["coordinator", ["coordinator", "voice"]])
async def test_a_terminal_stage_streams_to_its_client_and_to_another_stage(to: str | list[str], apart: bool) -> None:
    """The client's window holds it back though the other stage has taken all."""
    async with world() as made:
        chat = plan("chat", terminal=True, stream_to=("voice",))
        voice = plan("voice", stream_from=("chat",), terminal=True)
        place(made, [chat, voice], {"chat": pour_to(to), "voice": omni.Streaming(read_all)}, apart=apart)
        made.submit("r", "chat", 1)
        for taken in range(STREAM_WINDOW, MANY + 1, STREAM_WINDOW):
            await made.until(lambda taken=taken: len(made.streamed("r")) == taken)  # type: ignore[misc]
            await made.settle()
            assert len(made.streamed("r")) == taken
            made.send(OWNER, made.stage_of["chat"], Consumed("r", 1, OWNER, "chat", "coordinator", STREAM_WINDOW))
        await made.until(lambda: len([one for one in made.received if isinstance(one, Complete)]) == 2)
        assert made.failed() == {}
        assert [one.chunk_id for one in made.streamed("r")] == list(range(MANY))
        ends = {one.source: one for one in made.received if isinstance(one, Complete)}
        assert ends["chat"].chunks == MANY
        heard = {name: made.opened(end.body, name) for name, end in ends.items() if end.body is not None}
        assert heard == {"chat": "through", "voice": list(range(MANY)) if "voice" in to else []}


@APART
@pytest.mark.parametrize("to", [["a"], ["b"], ["a", "b"]])
async def test_a_route_round_a_streams_source_ends_that_stream(to: list[str], apart: bool) -> None:
    """It is skipped where nothing begins b, and so is what comes after it."""
    plans = [
        plan("r", entry=True, next=("a", "b"), route_fn="stage_functions:routes_as_requested"),
        plan(
            "a",
            next=("c",),
            stream_to=("b",),
            inputs_from=("r",),
            stream_done_to_fn="stage_functions:ends_as_requested",
        ),
        plan("b", next=("d",), inputs_from=("r",), stream_from=("a",)),
        plan("c", terminal=True, inputs_from=("a",)),
        plan("d", terminal=True, inputs_from=("b",)),
    ]
    functions = {"r": echo, "a": pour, "b": omni.Streaming(read_all), "c": echo, "d": echo}
    async with world() as made:
        place(made, plans, functions, apart=apart)
        made.submit("silent", "r", {"to": to, "chunks": 0, "done": None})
        made.submit("some", "r", {"to": to, "chunks": 2, "done": None})
        made.submit("explicit", "r", {"to": to, "chunks": 0, "done": ["b"]})
        await made.until(lambda: len(made.received) == 6)
        assert all(one.failure is None for one in made.received if isinstance(one, Complete)), made.received
        begun = {"silent"} if "b" in to else set()
        begun |= {"some", "explicit"} if "a" in to or "b" in to else set()
        assert made.results().keys() >= begun
        assert sorted(given_by(made, "d"), key=len) == ([[], [], []] if "a" not in to else
                                                        [[], [], [0, 1]] if "b" in to else [[], [0, 1]])  # fmt: skip
        assert {request for request, source in skipped(made) if source == "c"} == (
            set() if "a" in to else {"silent", "some", "explicit"}
        )
        assert ("silent", "d") in skipped(made) or "b" in to
        await made.until(lambda: all(host.idle for host in made.hosts.values()))


@APART
async def test_of_several_streams_those_that_are_skipped_are_not_waited_for(apart: bool) -> None:
    plans = [
        plan("r", entry=True, next=("a", "b", "c"), route_fn="stage_functions:routes_as_requested"),
        plan("a", next=("c",), stream_to=("c",), inputs_from=("r",)),
        plan("b", next=("c",), stream_to=("c",), inputs_from=("r",)),
        plan("c", terminal=True, inputs_from=("r", "a", "b"), stream_from=("a", "b")),
    ]
    functions = {"r": echo, "a": pour, "b": pour, "c": omni.Streaming(read_all_and_payload)}
    async with world() as made:
        place(made, plans, functions, apart=apart)
        for number, to in enumerate((["a"], ["b"], ["c"])):
            made.submit(f"r{number}", "r", {"to": to, "chunks": 2, "id": number})
        await made.until(lambda: len(made.results()) == 3)
        assert made.results() == {"r0": [[0, 1], 0], "r1": [[0, 1], 1], "r2": [[], 2]}


@APART
async def test_a_stream_without_chunks_and_without_a_payload_brings_its_request(apart: bool) -> None:
    async def know(session: omni.Session) -> AsyncIterator[Any]:
        read = [chunk async for chunk in session.chunks()]
        yield omni.Result([session.request.inputs["pad"], read])

    plans = [
        plan("a", entry=True, next=("c",), stream_to=("b",)),
        plan("b", terminal=True, stream_from=("a",)),
        plan("c", terminal=True, inputs_from=("a",)),
    ]
    pad = "x" * 7_000
    async with world() as made:
        place(made, plans, {"a": pour, "b": omni.Streaming(know), "c": echo}, apart=apart)
        made.submit("r1", "a", {"chunks": 0, "pad": pad})
        await made.until(lambda: given_by(made, "b") == [[pad, []]])


@APART
async def test_waiting_for_a_payload_that_went_elsewhere_fails_at_once(apart: bool) -> None:
    plans = [
        plan("a", entry=True, next=("b", "c"), stream_to=("b",), route_fn="stage_functions:routes_as_requested"),
        plan("b", terminal=True, inputs_from=("a",), stream_from=("a",)),
        plan("c", terminal=True, inputs_from=("a",)),
    ]
    functions = {"a": pour, "b": omni.Streaming(read_all_and_payload), "c": echo}
    async with world() as made:
        place(made, plans, functions, apart=apart)
        made.submit("r1", "a", {"chunks": 3, "to": "c"})
        await made.until(lambda: "r1" in made.failed())
        assert "no payload can arrive" in made.failed()["r1"].message
        made.submit("r2", "a", {"chunks": 3, "to": "b", "id": 7})
        await made.until(lambda: made.results().get("r2") == [[0, 1, 2], 7])


@APART
async def test_a_fan_in_that_lacks_a_skipped_source_is_skipped_itself(apart: bool) -> None:
    plans = [
        plan("r", entry=True, next=("a", "b"), route_fn="stage_functions:routes_as_requested"),
        plan("a", next=("j",), inputs_from=("r",)),
        plan("b", next=("j",), inputs_from=("r",)),
        plan("j", terminal=True, inputs_from=("a", "b"), wait_for=("a", "b"), merge_fn="stage_functions:merge_all"),
    ]
    async with world() as made:
        place(made, plans, dict.fromkeys("rabj", echo), apart=apart)
        made.submit("r1", "r", {"to": ["a"], "id": 1})
        made.submit("r2", "r", {"to": ["a", "b"], "id": 2})
        await made.until(lambda: len(made.received) == 2)
        assert skipped(made) == [("r1", "j")]
        assert made.results() == {"r2": {"a": 2, "b": 2}}
        await made.until(lambda: all(host.idle for host in made.hosts.values()) and made.outstanding == 0)


async def no_stage_is_left_waiting(seed: int, apart: bool) -> None:
    """A graph, routes, chunks and readers by chance; nobody says Ended, and still every stage comes to its end."""
    chance = random.Random(seed)
    names = "rstuv"[: chance.randint(2, 5)]
    edges: dict[str, dict[str, tuple[str, ...]]] = {}
    for at, name in enumerate(names):
        later = names[at + 1 :]
        edges[name] = {
            "next": tuple(chance.sample(later, chance.randint(1, len(later)))) if later else (),
            "stream_to": tuple(chance.sample(later, chance.randint(0, len(later)))),
        }
    reached = {target for out in edges.values() for some in out.values() for target in some}
    edges["r"]["next"] += tuple(name for name in names[1:] if name not in reached)
    plans, functions = list[StagePlan](), dict[str, Any]()
    for name in names:
        inputs_from = tuple(one for one in names if name in edges[one]["next"])
        stream_from = tuple(one for one in names if name in edges[one]["stream_to"])
        joins = len(inputs_from) > 1  # two feeders without a fan-in are a fault
        hooks: dict[str, Any] = {"wait_for": inputs_from, "merge_fn": "stage_functions:first_of"} if joins else {}
        hooks |= {"route_fn": "stage_functions:by_chance"} if edges[name]["next"] else {}
        hooks |= {"stream_done_to_fn": "stage_functions:some_by_chance"} if edges[name]["stream_to"] else {}
        plans.append(
            plan(
                name,
                entry=name == "r",
                terminal=not edges[name]["next"],
                inputs_from=inputs_from,
                stream_from=stream_from,
                **edges[name],
                **hooks,
            )
        )
        functions[name] = any_stage(name, edges[name], chance.choice(["all", "one", "nothing", "payload"]), stream_from)
    async with world(seed) as made:
        place(made, plans, functions, apart=apart)
        for number in range(3):
            data = {"edges": {name: list(edges[name]["next"]) for name in names}, "chunks": chance.choice([0, 1, MANY])}
            data["streams"] = {name: list(edges[name]["stream_to"]) for name in names}
            made.submit(f"r{number}-{seed}", "r", data)
        ends = sum(one.terminal for one in plans)
        await made.until(lambda: len({(one.request_id, one.source) for one in completes(made)}) == 3 * ends)
        await made.until(lambda: all(host.idle for host in made.hosts.values()) and made.outstanding == 0)
        assert not made.failed(), made.failed()


def completes(made: World) -> list[Complete]:
    return [one for one in made.received if isinstance(one, Complete)]


def any_stage(name: str, edges: dict[str, tuple[str, ...]], reads: str, stream_from: tuple[str, ...]) -> Any:
    def result(request: omni.OmniRequest) -> dict[str, Any]:
        return {**request.inputs, "at": name}

    def produce(payload: omni.StagePayload) -> Iterator[Any]:
        if edges["stream_to"]:
            for index in range(payload.request.inputs["chunks"]):
                yield omni.Chunk(index)
        yield omni.Result(result(payload.request))

    async def consume(session: omni.Session) -> AsyncIterator[Any]:
        if reads == "payload":
            try:
                await session.payload()
            except omni.RequestError:
                pass
        if reads != "nothing":
            async for _ in session.chunks():
                if reads == "one":
                    break
        if edges["stream_to"]:
            for index in range(session.request.inputs["chunks"]):
                yield omni.Chunk(index)
        yield omni.Result(result(session.request))

    return omni.Streaming(consume) if stream_from else produce


@pytest.mark.proves("skipped-stage")
@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 1 << 32), st.booleans())
def test_in_any_graph_every_stage_ends_without_an_abort(seed: int, apart: bool) -> None:
    asyncio.run(no_stage_is_left_waiting(seed, apart))


@APART
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_stage_reports_once_that_all_its_input_is_here_if_the_request_is_streamed(
    apart: bool, streamed: bool
) -> None:
    plans = [
        plan("a", next=("b", "c"), stream_to=("b",), entry=True),
        plan("b", next=("c",), inputs_from=("a",), stream_from=("a",)),
        plan("c", terminal=True, wait_for=("a", "b"), inputs_from=("a", "b"), merge_fn="stage_functions:first_of"),
    ]
    functions = {"a": pour, "b": omni.Streaming(read_all), "c": echo}
    async with world() as made:
        made.streams = streamed
        for index in range(2 if apart else 1):
            mine = plans if not apart else plans[:1] if index == 0 else plans[1:]
            made.process(f"p{index}", mine, functions)
        made.submit("r", "a", {"chunks": MANY})
        await made.until(lambda: "r" in made.ended())
        await made.settle()
        reports = sorted(one.source for one in made.received if isinstance(one, InputComplete))
        assert reports == (["b", "c"] if streamed else [])
