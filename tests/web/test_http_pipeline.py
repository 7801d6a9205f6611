"""/v1/pipeline and /v1/requests over a real socket: whole answers and whole events compared."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from stage_runtime.coordinator.events import ChunkEvent, ResultEvent
from stage_runtime.errors import RequestError
from stage_runtime.web.exchanges.apikeys import ApiKeys
from stage_runtime.wire.values import Audio, RawTensor, Text
from tests.web.running import ALL, PATIENCE_S, start
from tests.web.scripted_manager import chunk, play

FLOATS = RawTensor("float32", (2,), np.array([1.0, 2.0], np.float32).tobytes())
FLOATS_JSON = {"dtype": "float32", "shape": [2], "data": base64.b64encode(bytes(FLOATS.data)).decode()}
VALUES = {
    "n": 1,
    "list": [None, 0.5, b"hi"],
    "tensor": FLOATS,
    "array": np.arange(2, dtype=np.int64),
    "text": Text("x"),
}
VALUES_JSON = {
    "n": 1,
    "list": [None, 0.5, {"bytes": "aGk="}],
    "tensor": FLOATS_JSON,
    "array": {"dtype": "int64", "shape": [2], "data": base64.b64encode(np.arange(2, dtype="<i8").tobytes()).decode()},
    "text": {"type": "text", "text": "x"},
}


async def test_results_are_by_stage_and_chunks_stand_in_where_there_is_no_result() -> None:
    script = play(
        chunk("a", stage="words"),
        chunk(Audio(FLOATS, 8000), stage="voice"),
        chunk("b", stage="words", index=1),
        ResultEvent(stage="words", has_data=False),
        ResultEvent(stage="voice", data=VALUES),
        ResultEvent(stage="quiet", has_data=False),
    )
    async with start(script) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        answer = await client.post("/v1/pipeline", json={"inputs": {"x": 1}}, headers={"x-request-id": "p-1"})
    assert answer.json() == {"id": "p-1", "results": {"words": ["a", "b"], "voice": VALUES_JSON, "quiet": []}}
    request = running.manager.last.request
    assert (request.kind, request.inputs, request.modalities, request.stream) == ("pipeline", {"x": 1}, [], False)


async def test_a_stream_is_chunks_and_results_by_name() -> None:
    script = play(
        chunk("a"),
        ChunkEvent(stage="talk", index=1, data=FLOATS, modality="audio", metadata={"at": b"x"}),
        ResultEvent(stage="talk", data=[1]),
        ResultEvent(stage="quiet", has_data=False),
    )
    async with start(script) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        answer = await client.post("/v1/pipeline", json={"inputs": "hi", "stream": True})
    audio = {
        "stage": "talk",
        "index": 1,
        "data": FLOATS_JSON,
        "modality": "audio",
        "metadata": {"at": {"bytes": "eA=="}},
    }
    assert events(answer.text) == [
        ("chunk", {"stage": "talk", "index": 0, "data": "a"}),
        ("chunk", audio),
        ("result", {"stage": "talk", "data": [1]}),
        ("result", {"stage": "quiet"}),
    ]
    assert running.manager.last.request.inputs == "hi"


async def test_a_stream_that_fails_says_so_as_its_last_event() -> None:
    script = play(chunk("a"), RequestError("deadline", "too slow", stage="talk"))
    async with start(script) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        answer = await client.post("/v1/pipeline", json={"inputs": 1, "stream": True}, headers={"x-request-id": "p-2"})
    facts = {"message": "too slow", "type": "server_error", "code": "deadline", "param": None, "stage": "talk"}
    assert events(answer.text)[1:] == [("error", {"error": {**facts, "request_id": "p-2"}})]


async def test_everything_in_the_body_reaches_the_request_manager() -> None:
    body = {
        "inputs": [1, {"a": None}],
        "params": {"p": 1},
        "modalities": ["text"],
        "metadata": {"m": "n"},
        "timeout": 9.5,
    }
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"x-request-timeout": "4", "traceparent": trace}
    async with start(play(ResultEvent(stage="talk", data=1))) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
            await client.post("/v1/pipeline", json=body, headers=headers)
            await client.post("/v1/pipeline", json=body, headers={"traceparent": "junk"})
    first, second = running.manager.handles
    request = first.request
    assert (request.inputs, request.params, request.modalities) == ([1, {"a": None}], {"p": 1}, ["text"])
    assert request.metadata == {"m": "n"}
    assert (first.timeout_s, first.trace) == (4.0, trace)  # the shorter of the two
    assert (second.timeout_s, second.trace) == (9.5, None)


@pytest.mark.parametrize(
    "given", ["1_0", "", "+1", "1e3", "nan", "inf", "-1", "0", "\u0661".encode().decode("latin-1")]
)
async def test_a_time_that_is_not_plain_digits_is_refused(given: str) -> None:
    async with start(play(ResultEvent(stage="talk", data=1))) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
            headers = [(b"x-request-timeout", given.encode("latin-1"))]
            answer = await client.post("/v1/pipeline", json={"inputs": 1}, headers=headers)
            good = await client.post("/v1/pipeline", json={"inputs": 1}, headers={"x-request-timeout": "2.5"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout")
    assert good.status_code == 200
    assert [handle.timeout_s for handle in running.manager.handles] == [2.5]


@pytest.mark.parametrize("name", ["x-request-timeout", "x-request-id", "authorization"])
async def test_a_header_that_says_two_things_is_refused(name: str) -> None:
    settings = msgspec.structs.replace(ALL, api_keys=ApiKeys(("1",)))
    async with start(play(ResultEvent(stage="talk", data=1)), settings) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
            headers = [("authorization", "Bearer 1"), (name, "Bearer 1"), (name, "2")]
            answer = await client.post("/v1/pipeline", json={"inputs": 1}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (
        400,
        "authorization" if name == "authorization" else name,
    )
    assert running.manager.handles == []


async def test_files_of_a_form_are_bytes_in_inputs() -> None:
    fields = {"inputs": '{"text": "hi"}', "params": '{"p": 1}', "stream": "false"}
    files = [
        ("audio", ("q.wav", b"RIFF\r\n--x", "audio/wav")),
        ("pages", ("1.png", b"one", "image/png")),
        ("pages", ("2.png", b"", "image/png")),
    ]
    async with start(play(ResultEvent(stage="talk", data=1))) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
            answer = await client.post("/v1/pipeline", data=fields, files=files)
    assert answer.status_code == 200
    request = running.manager.last.request
    assert request.inputs == {"text": "hi", "audio": b"RIFF\r\n--x", "pages": [b"one", b""]}
    assert request.metadata == {
        "files": {
            "audio": [{"filename": "q.wav", "mime": "audio/wav"}],
            "pages": [{"filename": "1.png", "mime": "image/png"}, {"filename": "2.png", "mime": "image/png"}],
        }
    }
    assert request.params == {"p": 1}


@pytest.mark.parametrize(
    ("send", "message"),
    [
        ({"content": b"{"}, "the body is not JSON: Input data was truncated"),
        ({"content": b""}, "the body is not JSON: Input data was truncated"),
        ({"content": b"[]"}, "body: expected `object`, got `array`"),
        ({"content": b'{"inputs": "\xff"}'}, "the body is not JSON: "),
        ({"json": {}}, "inputs: required"),
        ({"json": {"inputs": 1, "imputs": 2}}, "imputs: unknown parameter; did you mean 'inputs'?"),
        ({"json": {"inputs": 1, "params": 2}}, "params: expected `object | null`, got `int`"),
        ({"files": {"a": b"x"}, "data": {"inputs": "hi"}}, "inputs is not JSON: "),
        ({"files": {"a": b"x"}, "data": {"inputs": "1"}}, "inputs: must be an object where files come with it"),
        ({"files": {"a": b"x"}, "data": {"inputs": '{"a": 1}'}}, "inputs.a: given in inputs and as a file"),
        ({"files": {"a": b"x"}, "data": {"steam": "true"}}, "steam: unknown parameter; did you mean 'stream'?"),
        (
            {"files": {"a": b"x"}, "data": {"question": "why"}},
            "question: unknown parameter; a value for the stages goes into the field inputs, a JSON object",
        ),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, "content-type: "),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=b"}}, "the body is not multi"),
    ],
)
async def test_a_body_that_is_wrong_is_refused_with_the_place(send: dict[str, Any], message: str) -> None:
    async with start(play(chunk(1))) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        if "content" in send:
            send = {"headers": {"content-type": "application/json"}, **send}
        answer = await client.post("/v1/pipeline", **send)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_request")
    assert error["message"].startswith(message)
    assert running.manager.handles == []


async def test_a_request_can_be_looked_at_and_cancelled_by_its_id() -> None:
    async with (
        start(play(asyncio.Event())) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        waiting = asyncio.create_task(client.post("/v1/pipeline", json={"inputs": 1}, headers={"x-request-id": "p-3"}))
        while not running.manager.in_flight:
            await asyncio.sleep(0.001)
        shown = (await client.get("/v1/requests/p-3")).json()
        again = await client.post("/v1/pipeline", json={"inputs": 1}, headers={"x-request-id": "p-3"})
        gone = (await client.delete("/v1/requests/p-3")).json()
        answer = await waiting
        late = (await client.delete("/v1/requests/p-3")).json()
        unknown = [await client.get("/v1/requests/p-4"), await client.delete("/v1/requests/p-4")]
    assert (shown["id"], shown["state"], shown["bindings"]) == ("p-3", "running", {"talk": "talk-1"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "duplicate_request")
    assert gone == {"id": "p-3", "cancelled": True}
    assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")
    assert late == {"id": "p-3", "cancelled": False}
    assert [(item.status_code, item.json()["error"]["code"]) for item in unknown] == [(404, "not_found")] * 2


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_an_id_that_no_request_can_have_is_404_and_asked_of_nobody(method: str) -> None:
    async with (
        start(play(asyncio.Event())) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        for request_id in ("x" * 129, "x" * 8000):
            running.manager.owned_elsewhere.add(request_id)
            answer = await client.request(method, f"/v1/requests/{request_id}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
            assert len(answer.content) < 1000
    assert len(running.manager.owned_elsewhere) == 2, "the other coordinators are not asked"


async def test_a_request_of_another_coordinator_is_cancelled_there() -> None:
    async with (
        start(play(asyncio.Event())) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        running.manager.owned_elsewhere.add("theirs")
        gone = await client.delete("/v1/requests/theirs")
        late = await client.delete("/v1/requests/theirs")
    assert (gone.status_code, gone.json()) == (200, {"id": "theirs", "cancelled": True})
    assert late.status_code == 404


def events(text: str) -> list[tuple[str, Any]]:
    assert text.endswith("\n\n")
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        assert name.startswith("event: ") and data.startswith("data: ")
        found.append((name[len("event: ") :], msgspec.json.decode(data[len("data: ") :])))
    return found
