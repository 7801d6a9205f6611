"""An author's code that raises or returns wrongly fails that request, tells where, and nobody else notices."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from threading import Event
from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime.engines import events
from stage_runtime.wire.frames import RequestRef
from stage_runtime.wire.messages import AdminCall, AdminReply, Complete, DataReady, Ready
from stage_runtime.wire.parts import Body, Failure
from tests.stage.stage_kit import World, plan, world


def echo(payload: omni.StagePayload) -> Any:
    return payload.data


def two_stages(made: World, function: Any = echo, **fields: Any) -> None:
    fields.setdefault("next", ("b",))
    made.process("pa", [plan("a", **fields)], {"a": function})
    made.process("pb", [plan("b", terminal=True, inputs_from=("a",), stream_from=("a",))], {"b": after})


async def streamed_and_given(session: omni.Session) -> AsyncIterator[Any]:
    payload = await session.payload()
    yield omni.Result(payload.data)


after = omni.Streaming(streamed_and_given)


def streams(payload: omni.StagePayload) -> Iterator[Any]:
    yield omni.Chunk(1)
    yield omni.Result(payload.data)


async def test_a_result_that_its_relay_never_carries_fails_its_request_alone() -> None:
    async with world() as made:
        two_stages(made, lambda payload: b"x" * payload.data)
        made.relays["pa"].most_nbytes = 200_000
        for name, nbytes in (("bad", 300_000), ("good", 150_000)):
            made.submit(name, "a", nbytes)
        await made.until(lambda: "bad" in made.failed() and "good" in made.results())
        failure = made.failed()["bad"]
        assert (failure.code, failure.stage) == ("stage_failed", "a")
        assert "payload: 300000 bytes, and at most 200000" in failure.message
        assert made.failures == [] and made.hosts["pa"].process.send_queues.queued == 0


LAZY = "is async or a generator; a hook is a plain function that returns"


@pytest.mark.parametrize(
    ("fields", "function", "hook", "message"),
    [
        ({"route_fn": "stage_functions:bad_route"}, echo, "routeFn", "ValueError: on purpose"),
        ({"route_fn": "stage_functions:exits"}, echo, "routeFn", "SystemExit: on purpose"),
        ({"route_fn": "stage_functions:nowhere"}, echo, "routeFn", "names ['ghost'], not in next; it declares ['b']"),
        (
            {"route_fn": "stage_functions:routed_to_a_list"},
            echo,
            "routeFn",
            "returned omni.Routed of a list; expected a dict: the data of each target",
        ),
        (
            {"project_payload": {"b": "stage_functions:bad_project"}},
            echo,
            "projectPayload.b",
            "ValueError: on purpose",
        ),
        ({"project_payload": {"b": "stage_functions:async_project"}}, echo, "projectPayload.b", LAZY),
        ({"route_fn": "stage_functions:async_route"}, echo, "routeFn", LAZY),
        ({"route_fn": "stage_functions:lazy_route"}, echo, "routeFn", LAZY),
        (
            {"stream_to": ("b",), "stream_done_to_fn": "stage_functions:bad_done"},
            streams,
            "streamDoneToFn",
            "ValueError: on purpose",
        ),
    ],
)
async def test_a_hook_that_raises_fails_its_request_with_its_name(
    fields: dict[str, Any], function: Any, hook: str, message: str
) -> None:
    async with world() as made:
        two_stages(made, function, **fields)
        made.submit("bad", "a", "x")
        made.submit("good", "a", "y")
        await made.until(lambda: "bad" in made.failed() and "good" in made.results())
        assert made.failed()["bad"] == Failure("stage_failed", message, "a", hook)
        assert made.results() == {"good": "y"}
        assert made.failures == []  # the process goes on


@pytest.mark.parametrize(
    ("fields", "hook", "message"),
    [
        (
            {"wait_for_fn": "stage_functions:bad_wait", "merge_fn": "stage_functions:merge_all"},
            "waitForFn",
            "ValueError: on purpose",
        ),
        ({"merge_fn": "stage_functions:bad_merge"}, "mergeFn", "ValueError: on purpose"),
        ({"merge_fn": "stage_functions:async_merge"}, "mergeFn", LAZY),
    ],
)
async def test_a_fan_in_hook_that_raises_fails_its_request_with_its_name(
    fields: dict[str, Any], hook: str, message: str
) -> None:
    async with world() as made:
        for name in ("a", "b"):
            made.process(f"p{name}", [plan(name, next=("join",))], {name: lambda payload: {"id": payload.request.id}})
        join = plan("join", wait_for=("a", "b"), inputs_from=("a", "b"), terminal=True, **fields)
        made.process("pj", [join], {"join": echo})
        for request_id in ("bad", "good"):
            for name in ("a", "b"):
                made.submit(request_id, name)
        await made.until(lambda: "bad" in made.failed() and "good" in made.results())
        assert made.failed()["bad"] == Failure("stage_failed", message, "join", hook)


@pytest.mark.parametrize(
    ("field", "hook"),
    [("route_fn", "routeFn"), ("project_payload", "projectPayload.b"), ("stream_done_to_fn", "streamDoneToFn")],
)
async def test_a_hook_that_refuses_the_request_is_named_in_the_refusal(field: str, hook: str) -> None:
    function = f"stage_functions:refusing_{field}"
    fields: dict[str, Any] = {field: {"b": function} if field == "project_payload" else function}
    if field == "stream_done_to_fn":
        fields["stream_to"] = ("b",)
    async with world() as made:
        two_stages(made, streams if "stream_to" in fields else echo, **fields)
        made.submit("bad", "a", "x")
        made.submit("good", "a", "y")
        await made.until(lambda: "bad" in made.failed() and "good" in made.results())
        assert made.failed()["bad"] == Failure("invalid_request", "no speech", "a", hook, "audio")


@pytest.mark.parametrize(("field", "hook"), [("wait_for_fn", "waitForFn"), ("merge_fn", "mergeFn")])
async def test_a_fan_in_hook_that_refuses_the_request_is_named_in_the_refusal(field: str, hook: str) -> None:
    fields = {"merge_fn": "stage_functions:merge_all"} | {field: f"stage_functions:refusing_{field}"}
    async with world() as made:
        for name in ("a", "b"):
            made.process(f"p{name}", [plan(name, next=("join",))], {name: lambda payload: {"id": payload.request.id}})
        join = plan("join", wait_for=("a", "b"), inputs_from=("a", "b"), terminal=True, **fields)
        made.process("pj", [join], {"join": echo})
        for name in ("a", "b"):
            made.submit("bad", name)
        await made.until(lambda: "bad" in made.failed())
        assert made.failed()["bad"] == Failure("invalid_request", "no speech", "join", hook, "audio")


def raises(error: BaseException) -> Any:
    def run(payload: omni.StagePayload) -> Any:
        if payload.request.id == "bad":
            raise error
        return payload.data

    return run


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ValueError("no"), Failure("stage_failed", "ValueError: no", "a", "run")),
        (SystemExit(3), Failure("stage_failed", "SystemExit: 3", "a", "run")),
        (omni.InvalidRequest("too loud", param="volume"), Failure("invalid_request", "too loud", "a", "run", "volume")),
        (omni.RequestError("unheard of", "x"), Failure("stage_failed", "x", "a", "run")),
        (
            OSError("no such file: 'caf\udce9'"),
            Failure("stage_failed", "OSError: no such file: 'caf\\udce9'", "a", "run"),
        ),
        (ValueError("x" * 3_000_000), Failure("stage_failed", ("ValueError: " + "x" * 2000)[:2000], "a", "run")),
    ],
    ids=["error", "exit", "invalid request", "unknown code", "surrogate", "megabytes"],
)
async def test_what_a_function_raises_is_reported_whatever_its_words(error: BaseException, failure: Failure) -> None:
    async with world() as made:
        two_stages(made, raises(error))
        made.submit("bad", "a", "x")
        made.submit("good", "a", "y")
        await made.until(lambda: "bad" in made.failed() and "good" in made.results())
        assert made.failed()["bad"] == failure


@pytest.mark.parametrize(
    ("result", "where"),
    [((1, 2), "payload.data: "), ({"cache": {"x": object()}}, "payload.data['cache']['x']: ")],
)
@pytest.mark.parametrize("apart", [True, False])
async def test_a_result_that_cannot_travel_is_refused_alike_in_and_between_processes(
    result: Any, where: str, apart: bool
) -> None:
    functions = {"a": lambda payload: result, "b": echo}
    plans = [plan("a", next=("b",)), plan("b", terminal=True, inputs_from=("a",))]
    async with world() as made:
        if apart:
            for one in plans:
                made.process(f"p{one.name}", [one], functions)
        else:
            made.process("p", plans, functions)
        made.submit("r1", "a")
        await made.until(lambda: "r1" in made.failed())
        assert made.failed()["r1"].message.startswith(where)


def to_ghost(payload: omni.StagePayload) -> Iterator[Any]:
    yield omni.Chunk(1, to="ghost")


def to_nobody(payload: omni.StagePayload) -> Iterator[Any]:
    yield omni.Chunk(1)


@pytest.mark.parametrize(
    ("function", "fields", "problem"),
    [
        (to_nobody, {"next": ("b",)}, "add streamTo, or make the stage terminal"),
        (to_ghost, {"next": ("b",)}, "declare it in streamTo"),
        (to_ghost, {"next": ("b",), "stream_to": ("b",)}, "names ['ghost'], not in streamTo"),
        (to_ghost, {"next": (), "terminal": True}, "declare it in streamTo"),
    ],
)
async def test_a_chunk_that_may_go_nowhere_is_refused_with_the_cure(
    function: Any, fields: dict[str, Any], problem: str
) -> None:
    async with world() as made:
        two_stages(made, function, **fields)
        made.submit("r1", "a")
        await made.until(lambda: "r1" in made.failed())
        assert problem in made.failed()["r1"].message
        assert made.failed()["r1"].stage == "a"


async def test_a_chunk_for_a_function_that_takes_none_fails_the_request_and_names_the_cure() -> None:
    async with world() as made:
        made.process("pa", [plan("a", next=("b",), stream_to=("b",))], {"a": streams})
        made.process("pb", [plan("b", terminal=True, inputs_from=("a",), stream_from=("a",))], {"b": echo})
        made.submit("r1", "a")
        await made.until(lambda: "r1" in made.failed())
        assert "return omni.Streaming(fn)" in made.failed()["r1"].message


async def test_garbage_for_a_payload_fails_its_request_alone() -> None:
    async with world() as made:
        two_stages(made)
        for request_id, value in (("r1", b"\xff\xff"), ("r2", b"\xa5hello"), ("r3", b"\x80")):
            made.send("pa", "pb", DataReady(made.header(request_id), "a", "b", Body(value)))
        made.submit("good", "a", "y")
        await made.until(lambda: len(made.failed()) == 3 and "good" in made.results())
        assert {one.code for one in made.failed().values()} == {"transport_failed"}


async def test_a_chunk_out_of_its_order_fails_its_request_and_frees_its_place() -> None:
    async with world() as made:
        made.process("pa", [plan("a", next=("b",), stream_to=("b",))], {"a": streams})
        b = plan("b", terminal=True, inputs_from=("a",), stream_from=("a",))
        made.process("pb", [b], {"b": omni.Streaming(streamed_and_given, concurrency=1)})
        body = Body(b"\x81\xa4data\x01")
        for index in (0, 0):  # twice
            made.send("pa", "pb", DataReady(made.header("r1"), "a", "b", body, index))
        await made.until(lambda: "r1" in made.failed())
        made.submit("good", "a", "y")
        await made.until(lambda: made.results() == {"good": "y"})


class Crashes:
    """An engine whose loop ends at the word."""

    def run(self, inbox: Any, outbox: Any, stop: Event) -> None:
        for event in inbox:
            if event.payload.data == "now":
                raise MemoryError("out of memory")


async def test_an_engine_that_crashes_fails_all_its_requests_and_ends_the_process() -> None:
    async with world() as made:
        made.process("pa", [plan("a", terminal=True)], {"a": Crashes()})
        made.submit("r1", "a", "wait")
        made.submit("r2", "a", "wait")
        await made.settle()
        made.submit("r3", "a", "now")
        await made.until(lambda: len(made.failed()) == 3)
        assert {one.message for one in made.failed().values()} == {
            "RuntimeError: scheduler crashed: MemoryError: out of memory"
        }
        await made.until(lambda: [stage for stage, _ in made.failures] == ["a"])


async def test_a_factory_that_raises_ends_loading_with_its_stage() -> None:
    async with world() as made:
        made.process("pa", [plan("a", terminal=True), plan("b", terminal=True)], {"a": echo, "b": None})
        await made.until(lambda: [stage for stage, _ in made.failures] == ["b"])


async def test_a_message_for_a_stage_of_another_process_is_counted_and_dropped() -> None:
    async with world() as made:
        two_stages(made)
        made.send("pa", "pb", DataReady(made.header("r1"), "x", "a", Body(b"\x80")))
        await made.settle()
        assert made.hosts["pb"].process.counters["misdirected"] == 1


class Operated:
    """An engine with operations of its own."""

    def run(self, inbox: Any, outbox: Any, stop: Event) -> None:
        for event in inbox:
            if isinstance(event, events.Admin):
                if event.operation == "crash":
                    raise RuntimeError("no such operation")
                event.reply(object() if event.operation == "odd" else event.arguments.get("value"))
                event.reply("again")


async def test_every_operation_is_answered_once_whatever_the_engine_makes_of_it() -> None:
    async with world() as made:
        made.process("pa", [plan("a", terminal=True, entry=True)], {"a": Operated()})
        made.process("pb", [plan("b", terminal=True, entry=True)], {"b": lambda payload: None})
        await made.until(
            lambda: all(made.hosts[process].stages[name].input.engine for name, process in made.stage_of.items())
        )
        for number, (stage, operation) in enumerate(
            [("a", "echo"), ("a", "odd"), ("b", "echo"), ("nobody", "echo"), ("a", "crash")]
        ):
            process = made.stage_of.get(stage, "pa")
            made.send("cc", process, AdminCall(f"call {number}", stage, operation, {"value": [1, "two"]}))
        await made.until(lambda: len(made.received) == 5)
        await made.settle()
        answers = {one.call_id: one for one in made.received if isinstance(one, AdminReply)}
        assert answers["call 0"] == AdminReply("call 0", "a", 0, [1, "two"])
        assert "object" in (answers["call 1"].error or "")
        assert answers["call 2"].error == "stage 'b' takes no operations"
        assert answers["call 3"].error == "no stage 'nobody' here"
        assert answers["call 4"].error == "the engine crashed: RuntimeError: no such operation"
        assert len(made.received) == len(answers) == 5


async def test_coordinators_learn_which_adapters_an_instance_has_loaded_and_dropped() -> None:
    async with world() as made:
        made.process("pa", [plan("a", terminal=True, entry=True)], {"a": Operated()})
        host = made.hosts["pa"]
        await made.until(lambda: host.stages["a"].input.engine is not None)
        made.send("cc", "pa", AdminCall("0", "a", "load_adapter", {"name": "early", "path": "/a/early"}))
        await made.until(lambda: len(made.received) == 1)
        await made.settle()
        host.announce_ready()
        made.send("cc", "pa", AdminCall("1", "a", "load_adapter", {"name": "sql", "path": "/a/sql"}))
        made.send("cc", "pa", AdminCall("2", "a", "unload_adapter", {"name": "early"}))
        made.send("cc", "pa", AdminCall("3", "a", "echo"))
        await made.until(lambda: len(made.received) >= 7)
        await made.settle()
        assert [one for one in made.received if isinstance(one, Ready)] == [
            Ready({"a": {"early": "/a/early"}}),
            Ready({"a": {"early": "/a/early", "sql": "/a/sql"}}),
            Ready({"a": {"sql": "/a/sql", "early": None}}),
        ]


@pytest.mark.proves("undecodable-message")
async def test_an_unreadable_message_is_reported_to_the_owner_of_its_request() -> None:
    async with world() as made:
        two_stages(made)
        for request in (None, RequestRef("", 1, "cc"), RequestRef("x" * 1000, 1, "cc"), RequestRef("r1", 4, "cc")):
            made.hosts["pb"].unreadable("pa", request, "no message")
        await made.until(lambda: made.received != [])
        await made.settle()
        failure = Failure("stage_failed", "a message of pa could not be read: no message", "b", "receive")
        assert made.received == [Complete("r1", 4, "b", failure=failure)]
