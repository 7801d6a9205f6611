"""One client cannot harm others: sizes, keys, caps, slow readers, clients that go away."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.errors import RequestError
from stage_runtime.web.exchanges.apikeys import ApiKeys
from stage_runtime.wire.values import Audio, Text
from tests.web.running import ALL, PATIENCE_S, Running, start
from tests.web.scripted_manager import Event, ScriptedHandle, chunk, play

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
JSON = {"content-type": "application/json"}
STACK_TOO_LARGE = 1 << 47  # bytes: all that a process can address, so that no thread can start
OK = play(ResultEvent(stage="talk", data=Text("ok")))


async def until(fact: Callable[[], object]) -> None:
    """Wait for a fact."""
    async with asyncio.timeout(PATIENCE_S):
        while not fact():
            await asyncio.sleep(0.002)


async def test_a_body_that_needs_a_thread_is_503_while_none_can_start() -> None:
    large = CHAT | {"metadata": {"note": "x" * (1 << 17)}}
    async with start(OK) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        before = threading.stack_size(STACK_TOO_LARGE)
        try:
            refused = await client.post("/v1/chat/completions", json=large)
        finally:
            threading.stack_size(before)
        taken = await client.post("/v1/chat/completions", json=large)
    assert (refused.status_code, refused.json()["error"]["code"], taken.status_code) == (503, "unavailable", 200)
    assert refused.headers["retry-after"] == "1"


async def opened(
    running: Running, path: str, body: dict[str, Any], *, receive_buffer: int | None = None
) -> socket.socket:
    """A connection on which a request has been sent, and nothing read."""
    head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", running.server.port))
    raw = msgspec.json.encode(body)
    await loop.sock_sendall(client, head % (path.encode(), len(raw)) + raw)
    return client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/v1/pipeline", {"inputs": 1}),
        ("/v1/pipeline", {"inputs": 1, "stream": True}),
        ("/v1/pipeline", {"inputs": "x" * (300 << 10)}),  # so much that the connection is paused meanwhile
        ("/v1/audio/speech", {"input": "hi"}),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_goes_away_ends_its_request_at_once(path: str, body: dict[str, Any], begun: bool) -> None:
    first: list[Any] = [chunk([Text("a"), Audio(np.zeros(9000, np.float32), 24_000)])] if begun else []
    async with start(play(*first, asyncio.Event())) as running:
        client = await opened(running, path, body)
        await until(lambda: running.manager.handles and running.manager.last.pulled == len(first))
        client.close()
        await until(lambda: running.manager.last.outcome)
        handle = running.manager.last
    assert (handle.outcome, handle.reason) == ("cancelled", "the client disconnected")


@pytest.mark.proves("slow-receiver")
async def test_a_client_that_stops_reading_stops_the_events() -> None:
    async def endless(_: ScriptedHandle) -> AsyncIterator[Event]:
        for index in range(100_000):
            yield chunk("x" * 65_536, index=index)

    async with start(endless) as running:
        client = await opened(running, "/v1/pipeline", {"inputs": 1, "stream": True}, receive_buffer=65_536)
        await until(lambda: running.manager.handles and running.manager.last.pulled)
        pulled = -1
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as other:
            while pulled != running.manager.last.pulled:  # until nothing moves while others are answered
                pulled = running.manager.last.pulled
                for _ in range(20):
                    assert (await other.get("/livez")).status_code == 200
        client.close()
        await until(lambda: running.manager.last.outcome == "cancelled")
    assert pulled * 65_536 < 32 << 20  # the kernel's buffers, and one write buffer; not the 6.5 GB there are


async def test_a_request_that_is_over_does_not_wait_for_its_reader() -> None:
    async with start(OK) as running:
        client = await opened(running, "/v1/chat/completions", CHAT)
        await until(lambda: running.manager.handles and running.manager.last.outcome)
        client.close()
    assert running.manager.last.outcome == "completed"


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_refused_before_it_is_read(declared: bool) -> None:
    taken = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(64):
            taken += 1
            yield b"x" * 65_536

    settings = msgspec.structs.replace(ALL, max_body_bytes=100_000)
    headers = JSON | ({"content-length": str(64 * 65_536)} if declared else {})
    async with start(OK, settings) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        answer = await client.post("/v1/pipeline", content=body(), headers=headers)
        after = await client.post("/v1/pipeline", json={"inputs": "x" * 99_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert answer.json()["error"]["message"] == "the body is larger than 100000 bytes"
    assert after.status_code == 200
    assert len(running.manager.handles) == 1


async def test_keys_open_v1_and_nothing_else_does() -> None:
    settings = msgspec.structs.replace(ALL, api_keys=ApiKeys(("one", "two")))
    async with start(OK, settings) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:

        async def status(path: str, authorization: str | None) -> int:
            headers = [] if authorization is None else [(b"authorization", authorization.encode("latin-1"))]
            if path == "/v1/pipeline":
                return (await client.post(path, json={"inputs": 1}, headers=headers)).status_code
            return (await client.get(path, headers=headers)).status_code

        keys = [None, "Bearer", "Bearer three", "Basic one", "one", "Bearer onetwo", "Bearer \xe9"]
        assert [await status("/v1/pipeline", key) for key in keys] == [401] * len(keys)
        assert [await status("/v1/pipeline", key) for key in ("Bearer one", "bearer two")] == [200, 200]
        assert [await status(path, None) for path in ("/v1/models", "/metrics", "/status", "/nope")] == [401] * 4
        assert [await status(path, None) for path in ("/livez", "/readyz")] == [200, 200]
        refused = await client.get("/v1/models")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json()["error"]["type"] == "authentication_error"


@pytest.mark.proves("slow-receiver")
async def test_a_full_request_manager_answers_with_a_time_to_retry() -> None:
    async with (
        start(play(asyncio.Event()), cap=1) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        first = await opened(running, "/v1/pipeline", {"inputs": 1})
        await until(lambda: running.manager.in_flight)
        answer = await client.post("/v1/pipeline", json={"inputs": 1})
        first.close()
        await until(lambda: not running.manager.in_flight)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert answer.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.proves("deadline")
async def test_a_deadline_is_504() -> None:
    async with (
        start(play(asyncio.Event())) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        answer = await client.post("/v1/pipeline", json={"inputs": 1}, headers={"x-request-timeout": "0.05"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("r-1", True),
        ("a.b:c_D-9", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("-x", False),
        ("a b", False),
        ("a/b", False),
    ],
)
async def test_a_sane_request_id_is_kept_and_any_other_replaced(given: str, kept: bool) -> None:
    async with start(OK) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": given})
    echoed = answer.headers["x-request-id"]
    assert echoed == running.manager.last.id == answer.json()["id"]
    assert (echoed == given) is kept
    assert kept or (echoed.startswith("chatcmpl-") and len(echoed) == len("chatcmpl-") + 32)


async def test_only_what_the_pipeline_serves_is_served() -> None:
    settings = msgspec.structs.replace(ALL, serves=("speech",))
    async with start(OK, settings) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        chat = await client.post("/v1/chat/completions", json=CHAT)
        transcription = await client.post("/v1/audio/transcriptions", files={"file": b"x"})
        pipeline = await client.post("/v1/pipeline", json={"inputs": 1})
    assert (chat.status_code, chat.json()["error"]["code"]) == (404, "unsupported_endpoint")
    assert chat.json()["error"]["message"] == "this pipeline serves speech, not chat; /v1/pipeline always works"
    assert (transcription.status_code, pipeline.status_code) == (404, 200)


async def test_unknown_routes_and_methods_are_refused_in_the_same_shape() -> None:
    async with start(OK) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        missing = await client.post("/v1/moderations", json={})
        method = await client.get("/v1/chat/completions")
        several = await client.post("/v1/requests/one")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unsupported_endpoint")
    assert missing.json()["error"]["message"] == "POST /v1/moderations is not a route of this server"
    assert (method.status_code, method.headers["allow"]) == (405, "POST")
    assert set(several.headers["allow"].split(", ")) == {"GET", "HEAD", "DELETE"}
    assert method.json()["error"]["code"] == "unsupported_endpoint"


async def test_a_fault_of_this_program_is_a_500_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        start(play(RuntimeError("secret"))) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        answer = await client.post("/v1/pipeline", json={"inputs": 1}, headers={"x-request-id": "r-7"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "stage_failed")
    assert "secret" not in answer.text
    assert "request r-7: POST /v1/pipeline failed" in caplog.text
    assert "RuntimeError: secret" in caplog.text


async def test_each_request_is_one_line_in_the_log_and_probes_are_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="stage_runtime.web.requests")
    async with start(OK) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        began = time.monotonic()
        answer = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "r-1"})
        took_ms = 1000 * (time.monotonic() - began)
        await client.get("/livez")
        await client.get("/v1/requests/none", headers={"x-request-id": "g-1"})
        await client.post("/v1/chat/completions", content=b"{", headers={**JSON, "x-request-id": "r-2"})
    lines = [record.facts for record in caplog.records if record.name == "stage_runtime.web.requests"]  # type: ignore[attr-defined]
    assert [(line["request_id"], line["route"], line["status"], line["outcome"]) for line in lines] == [
        ("r-1", "POST /v1/chat/completions", 200, "completed"),
        ("g-1", "GET /v1/requests/{id}", 404, "not_found"),
        ("r-2", "POST /v1/chat/completions", 400, "invalid_request"),
    ]
    assert lines[0]["bytes"] == len(answer.content)
    assert 0 < lines[0]["first_byte_ms"] <= lines[0]["ms"] <= took_ms + 1


async def test_the_line_of_a_refused_request_names_its_parameter_and_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="stage_runtime.web.requests")
    hostile = "x\n2026 INFO forged\u2028"
    refused = [{**CHAT, "temperature": "hot"}, {**CHAT, hostile: 1}]
    async with start(OK) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        errors = [(await client.post("/v1/chat/completions", json=body)).json()["error"] for body in refused]
        await client.post("/v1/chat/completions", json=CHAT)
    records = [record for record in caplog.records if record.name == "stage_runtime.web.requests"]
    facts = [record.facts for record in records]  # type: ignore[attr-defined]
    assert [(line.get("param"), line["message"]) for line in facts[:2]] == [
        (error["param"], error["message"][:300]) for error in errors
    ]
    assert facts[0]["param"] == "temperature"
    assert f'param="temperature" message="{facts[0]["message"]}"' in records[0].getMessage().replace('\\"', '"')
    assert [len(record.getMessage().splitlines()) for record in records] == [1, 1, 1]
    assert not {"param", "message"} & set(facts[2])


async def after_a_comment(event: Event | RequestError) -> tuple[int, str]:
    """The status of a stream that was quiet until its first comment, and all that came after that."""
    gate = asyncio.Event()
    settings = msgspec.structs.replace(ALL, heartbeat_s=0.02)
    async with start(play(gate, event), settings) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
            async with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
                pieces = answer.aiter_text()
                assert await asyncio.wait_for(anext(pieces), PATIENCE_S) == ": waiting\n\n"
                gate.set()
                return answer.status_code, "".join([piece async for piece in pieces])


async def test_a_quiet_stream_is_kept_alive_by_comments_that_stand_between_events() -> None:
    _, rest = await after_a_comment(chunk(Text("a")))
    blocks = [block for block in rest.removesuffix("\n\n").split("\n\n") if block != ": waiting"]
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks[-1] == "data: [DONE]"


async def test_a_stream_that_fails_after_its_first_comment_has_the_status_200_and_an_event_with_the_error() -> None:
    status, rest = await after_a_comment(RequestError("unavailable", "gone"))
    assert status == 200
    assert '"code":"unavailable"' in rest
    assert "[DONE]" not in rest
