"""HTTP/1.0, as old proxies and health checks speak it: it has no chunks, and an answer ends with its connection."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from stage_runtime.wire.values import Text
from tests.web.running import PATIENCE_S, start
from tests.web.scripted_manager import chunk, play
from tests.web.test_http_connections import connected

STREAM = play(chunk(Text("Hel")), chunk(Text("lo"), index=1))


def post(body: object, version: str, *headers: str) -> bytes:
    raw = msgspec.json.encode(body)
    fixed = ("host: x", "content-type: application/json", f"content-length: {len(raw)}")
    return "\r\n".join([f"POST /v1/pipeline HTTP/{version}", *fixed, *headers, "", ""]).encode() + raw


async def answered(request: bytes) -> tuple[str, bytes]:
    """Head and whatever follows, up to the end of the connection."""
    async with start(STREAM) as running, connected(running) as (reader, writer):
        writer.write(request)
        async with asyncio.timeout(PATIENCE_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            return head, await reader.read()


@pytest.mark.parametrize("headers", [[], ["connection: keep-alive"]])
async def test_a_stream_of_http_1_0_is_not_chunked_and_ends_with_its_connection(headers: list[str]) -> None:
    head, body = await answered(post({"inputs": 1, "stream": True}, "1.0", *headers))
    assert "transfer-encoding" not in head
    assert "content-length" not in head
    assert "connection: close" in head
    events = body.decode().removesuffix("\n\n").split("\n\n")
    assert [event.split("\n")[0] for event in events] == ["event: chunk", "event: chunk", "event: result"]


async def test_an_answer_of_known_length_has_it_for_http_1_0_too() -> None:
    head, body = await answered(post({"inputs": 1}, "1.0"))
    assert f"content-length: {len(body)}" in head
    assert "transfer-encoding" not in head
    assert msgspec.json.decode(body)["results"]["talk"]


async def test_a_stream_of_http_1_1_is_chunked() -> None:
    head, body = await answered(post({"inputs": 1, "stream": True}, "1.1", "connection: close"))
    assert "transfer-encoding: chunked" in head
    assert body.endswith(b"0\r\n\r\n")


async def test_a_request_of_http_1_0_after_one_of_1_1_is_answered_in_its_turn() -> None:
    first = post({"inputs": 1, "stream": True}, "1.1")
    head, body = await answered(first + post({"inputs": 1, "stream": True}, "1.0"))
    assert "transfer-encoding: chunked" in head
    second = body.partition(b"0\r\n\r\n")[2].lower()
    assert second.startswith(b"http/1.1 200")
    assert b"transfer-encoding" not in second
    assert second.rstrip().endswith(b'data: {"stage":"talk"}')
