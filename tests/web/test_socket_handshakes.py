"""Handshakes of WebSockets that cannot be read are answered, and their connections end: none is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import msgspec
import pytest

from stage_runtime.errors import CODES
from stage_runtime.web.exchanges.exchange import CLIENT, KEY
from stage_runtime.web.exchanges.memory_budget import MemoryBudget
from stage_runtime.web.exchanges.middleware import Middleware
from stage_runtime.web.exchanges.web_sockets import WebSocket
from stage_runtime.web.listening import server
from tests.web.running import PATIENCE_S, start
from tests.web.scripted_manager import play
from tests.web.test_http_limits import until

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


def framed(first: int, data: bytes) -> bytes:
    return bytes([first, 0x80 | len(data)]) + bytes(4) + data


FRAMES = {
    "without a mask": (b"\x81\x05hello", 1002),
    "reserved bits": (b"\xff\xff\xff\xff", 1002),
    "a continuation of none": (framed(0x80, b""), 1002),
    "text that is not UTF-8": (framed(0x81, b"\xff"), 1007),
    "text in two frames that is not UTF-8": (framed(0x01, b"\xff") + framed(0x80, b"\xfe"), 1007),
    "half a close code": (framed(0x88, b"\x03"), 1002),
    "a close code that none may send": (framed(0x88, b"\x00\x01"), 1002),
    "an end in the middle of a message": (framed(0x01, b"a") + framed(0x88, b""), 1002),
    "a message beyond any size": (b"\x82\xff\x7f" + b"\xff" * 7 + bytes(4), 1009),
    "pings and the end": (framed(0x89, b"a") * 3 + framed(0x88, b"\x03\xe8"), 1000),
}


@pytest.mark.parametrize("path", SOCKETS)
@pytest.mark.parametrize("frames", FRAMES)
@pytest.mark.parametrize("early", [True, False], ids=["with the handshake", "after it"])
async def test_frames_that_cannot_be_read_end_the_connection_by_their_code_and_are_not_logged(
    path: str, frames: str, early: bool, caplog: pytest.LogCaptureFixture
) -> None:
    raw, code = FRAMES[frames]
    async with start(play()) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
        async with asyncio.timeout(PATIENCE_S):
            writer.write(handshake(path) + (raw if early else b""))
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"" if early else raw)
            answer = await reader.read()
        writer.transport.abort()
    assert head.startswith(b"HTTP/1.1 101 ")
    at = answer.rindex(b"\x88", 0, -2)
    assert int.from_bytes(answer[at + 2 : at + 4]) == code
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_message_that_comes_with_the_handshake_is_read_after_it() -> None:
    async with start(play()) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
        async with asyncio.timeout(PATIENCE_S):
            writer.write(handshake(SOCKETS[1]) + framed(0x81, b'{"type":"session.close"}'))
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"all is spoken")
        writer.transport.abort()
    assert head.startswith(b"HTTP/1.1 101 ")


@pytest.mark.parametrize(("error", "codes"), [(ValueError("secret"), [1011]), (asyncio.CancelledError(), [])])
async def test_a_socket_whose_route_fails_is_closed_and_one_that_is_cut_off_waits_for_no_client(
    error: BaseException, codes: list[int]
) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await WebSocket(scope[KEY], receive, send).accept(None)
        raise error

    async def receive() -> Any:
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "websocket", "method": "GET", "path": "/v1/realtime", "headers": [], CLIENT: None}
    await Middleware(app)(scope, receive, send)
    accepted, *closed = sent
    assert accepted["type"] == "websocket.accept"
    assert [(one["type"], one["code"]) for one in closed] == [("websocket.close", code) for code in codes]
    assert "secret" not in str(closed)


async def opened(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(handshake(path))
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


@pytest.mark.proves("abusive-client")
@pytest.mark.parametrize("path", SOCKETS)
@pytest.mark.parametrize(
    "begun",
    [b"\x81\xff" + (1 << 24).to_bytes(8) + bytes(4 + 600_000), framed(0x01, b"") + framed(0x00, b"") * 12_000],
    ids=["a frame", "empty frames"],
)
async def test_messages_count_in_memory_from_their_first_byte_and_end_their_connection_without_room(
    path: str, begun: bytes
) -> None:
    budget = MemoryBudget(1_000_000)
    async with start(play(), budget=budget) as running, asyncio.timeout(PATIENCE_S):
        _, first = await opened(running.server.port, path)
        first.write(begun)
        await until(lambda: budget.held_nbytes >= 600_000)
        reader, second = await opened(running.server.port, path)
        second.write(begun)
        with contextlib.suppress(ConnectionResetError):  # it was sent more than it has read
            await reader.read()
        assert 600_000 <= budget.held_nbytes < 1_000_000
        for one in (first, second):
            one.transport.abort()
        await until(lambda: not budget.held_nbytes)


async def test_a_message_that_waits_to_be_read_counts_in_memory_until_it_is() -> None:
    budget, reads, ends = MemoryBudget(1 << 30), asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        socket = WebSocket(scope[KEY], receive, send)
        await socket.accept(None)
        await reads.wait()
        await socket.receive()
        await ends.wait()

    async with server.Server(Middleware(app, budget=budget), port=0) as running, asyncio.timeout(PATIENCE_S):
        _, writer = await opened(running.port, SOCKETS[0])
        writer.write(b"\x82\xff" + (600_000).to_bytes(8) + bytes(4 + 600_000))
        writer.write(framed(0x89, b""))
        await until(lambda: budget.held_nbytes >= 600_000)
        await until(lambda: budget.held_nbytes < 601_000)  # the message is whole, and alone
        reads.set()
        await until(lambda: not budget.held_nbytes)
        ends.set()
        writer.transport.abort()
