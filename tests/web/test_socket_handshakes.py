"""Handshakes of WebSockets that cannot be read are answered, and their connections end: none is left behind."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from stage_runtime.errors import CODES
from tests.web.running import PATIENCE_S, start
from tests.web.scripted_manager import play

SOCKETS = ("/v1/realtime", "/v1/audio/speech/stream")


def handshake(path: str, *more: str, key: str = "dGhlIHNhbXBsZSBub25jZQ==", version: int = 13) -> bytes:
    head = [f"GET {path} HTTP/1.1", "Host: localhost", "Upgrade: websocket", "Connection: Upgrade"]
    lines = [*head, f"Sec-WebSocket-Key: {key}", f"Sec-WebSocket-Version: {version}", *more]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"


async def all_of(port: int, raw: bytes) -> bytes:
    """All that is answered, up to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw)
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("path", SOCKETS)
@pytest.mark.parametrize(
    ("query", "more", "behind", "status"),
    [
        ("", ["Content-Length: 5"], b"", 400),
        ("", ["Content-Length: 5"], b"hello", 400),
        ("", ["Transfer-Encoding: chunked"], b"", 400),
        ("", [f"Cookie: {'x' * 9000}"], b"", 431),
        (f"?{'a=b&' * 3000}", [], b"", 431),
    ],
    ids=["a body to come", "a body", "chunks", "a long header", "a long query"],
)
async def test_a_handshake_that_cannot_be_read_is_refused_and_its_connection_ends(
    path: str, query: str, more: list[str], behind: bytes, status: int
) -> None:
    async with start(play()) as running:
        answer = await all_of(running.server.port, handshake(path + query, *more) + behind)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split(b" ")[1]) == status, answer[:300]
    error = msgspec.json.decode(body)["error"]
    assert error["code"] in CODES and "handshake" in error["message"], error


@pytest.mark.parametrize(("key", "version"), [("x", 13), ("", 13), ("dGhlIHNhbXBsZSBub25jZQ==", 8)])
async def test_a_handshake_without_its_key_or_version_is_400(key: str, version: int) -> None:
    async with start(play()) as running:
        answer = await all_of(running.server.port, handshake(SOCKETS[0], key=key, version=version))
    assert answer.startswith(b"HTTP/1.1 400 ")
