"""Clients that close their sending half: those that wait get their answer, those that are gone end their request."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest

from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.wire.values import Text
from tests.web.running import ALL, PATIENCE_S, Running, start
from tests.web.scripted_manager import Event, ScriptedHandle, chunk, play
from tests.web.test_http_connections import BODY, OK, POST, WHOLE, answer_of, connected
from tests.web.test_http_limits import until

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


def post(body: object, version: str = "1.1") -> bytes:
    raw = msgspec.json.encode(body)
    return POST.replace(b"1.1", version.encode()) + b"content-length: %d\r\n\r\n" % len(raw) + raw


async def after_eof(running: Running, sent: bytes, gate: asyncio.Event) -> bytes:
    """All that a client gets that sends this, then closes its sending half, and waits."""
    async with connected(running) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(sent)
        await until(lambda: running.manager.handles)
        writer.write_eof()
        if sent.count(b"HTTP/1.1") == 1:  # while others wait behind it the connection is not read
            await reader.readuntil(INTERIM)  # the server has seen it
        gate.set()
        return await reader.read()


@pytest.mark.proves("half-closed-client")
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_closes_its_sending_half_gets_its_whole_answer(version: str, stream: bool) -> None:
    gate = asyncio.Event()
    script = play(gate, chunk(Text("first")), ResultEvent(stage="talk", data=Text("last")))
    async with start(script) as running:
        got = await after_eof(running, post({"inputs": 1, "stream": stream}, version), gate)
        assert running.manager.last.outcome == "completed"
    assert got.startswith(b"HTTP/1.1 200 OK") and b"last" in got


async def test_requests_sent_ahead_are_all_answered_before_the_connection_closes() -> None:
    gate = asyncio.Event()
    script = play(gate, ResultEvent(stage="talk", data=Text("ok")))
    async with start(script) as running:
        got = await after_eof(running, WHOLE * 3, gate)
    assert got.count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.proves("half-closed-client")
async def test_a_stream_that_has_begun_goes_on_after_the_sending_half_is_closed() -> None:
    gate = asyncio.Event()
    async with start(play(chunk("first"), gate, chunk("second", index=1))) as running:
        async with connected(running) as (reader, writer), asyncio.timeout(PATIENCE_S):
            writer.write(post({"inputs": 1, "stream": True}))
            await reader.readuntil(b"first")
            writer.write_eof()
            await reader.readuntil(b": waiting")  # it is asked whether it is there
            gate.set()
            rest = await reader.read()
        assert b"second" in rest and rest.endswith(b"0\r\n\r\n")
        assert running.manager.last.outcome == "completed"


@pytest.mark.proves("client-disconnects")
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_is_gone_ends_its_request_though_it_looks_the_same(begun: bool) -> None:
    """It has read all that there is, so that its kernel sends no reset by itself."""
    first = [chunk("first")] if begun else []
    async with start(play(*first, asyncio.Event())) as running, asyncio.timeout(PATIENCE_S):
        client = socket.create_connection(("127.0.0.1", running.server.port))
        client.sendall(post({"inputs": 1, "stream": True}))
        await until(lambda: running.manager.handles)
        if begun:
            await asyncio.to_thread(read_until, client, b"first")
        client.close()
        await until(lambda: running.manager.last.outcome)
        assert (running.manager.last.outcome, running.manager.last.reason) == ("cancelled", "the client disconnected")


@pytest.mark.proves("client-disconnects")
@pytest.mark.parametrize("killed", [False, True])
async def test_a_client_that_is_gone_ends_its_request_though_others_wait_behind_it(killed: bool) -> None:
    """The connection is not read while requests wait, so its end is not seen by reading."""
    async with start(play(asyncio.Event())) as running, asyncio.timeout(PATIENCE_S):
        client = socket.create_connection(("127.0.0.1", running.server.port))
        client.sendall(post({"inputs": 1}) * 3)
        await until(lambda: running.manager.handles)
        if killed:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        await until(lambda: running.manager.last.outcome)
        assert running.manager.last.reason == "the client disconnected"
        assert len(running.manager.handles) == 1


@pytest.mark.proves("client-disconnects")
async def test_a_client_that_is_gone_ends_its_request_though_one_before_it_failed() -> None:
    async def script(handle: ScriptedHandle) -> AsyncIterator[Event]:
        if handle.request.inputs == {"text": "fails"}:
            yield chunk(Text("first"))
            yield chunk(Text("second", 0, [{}]), index=1)  # not a log probability
        await asyncio.Event().wait()

    first = post({"prompt": ["fails", "waits"], "stream": True, "logprobs": 1}).replace(
        b"/v1/pipeline", b"/v1/completions"
    )
    settings = msgspec.structs.replace(ALL, accepts=frozenset({"logprobs"}))
    async with start(script, settings) as running, asyncio.timeout(PATIENCE_S):
        client = socket.create_connection(("127.0.0.1", running.server.port))
        client.sendall(first + post({"inputs": 1}))
        await until(lambda: len(running.manager.handles) == 3)
        await asyncio.to_thread(read_until, client, b"omni.Text.logprobs")
        client.close()
        await until(lambda: running.manager.last.outcome)
        assert running.manager.last.reason == "the client disconnected"


async def test_a_client_that_waits_and_then_goes_ends_its_request() -> None:
    async with start(play(asyncio.Event())) as running, asyncio.timeout(PATIENCE_S):
        client = socket.create_connection(("127.0.0.1", running.server.port))
        client.sendall(post({"inputs": 1}))
        await until(lambda: running.manager.handles)
        client.shutdown(socket.SHUT_WR)
        await asyncio.to_thread(read_until, client, b"100 Continue\r\n\r\n")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # its process is killed
        client.close()
        await until(lambda: running.manager.last.outcome)


async def test_a_request_that_is_cut_off_in_its_body_is_no_request() -> None:
    async with start(OK) as running, connected(running) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(POST + b"content-length: %d\r\n\r\n" % (len(BODY) + 1) + BODY)
        writer.write_eof()
        assert await reader.read() == b""
        assert running.manager.handles == []


async def test_a_client_without_a_request_is_let_go() -> None:
    async with start(OK) as running, connected(running) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(WHOLE)
        await answer_of(reader)
        writer.write_eof()
        assert await reader.read() == b""


def read_until(client: socket.socket, end: bytes) -> None:
    got = b""
    while end not in got:
        piece = client.recv(4096)
        assert piece, f"the connection ended after {got!r}"
        got += piece
