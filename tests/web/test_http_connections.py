"""The bounds of one connection: heads, waiting, framing, bytes that nobody reads. Raw bytes over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.web.listening.limits.connection_limits import ConnectionLimit, ConnectionLimits
from stage_runtime.wire.values import Text
from tests.web.running import ALL, PATIENCE_S, Running, start
from tests.web.scripted_manager import Event, ScriptedHandle, chunk, play
from tests.web.test_http_limits import until

OK = play(ResultEvent(stage="talk", data=Text("ok")))
BODY = b'{"inputs": 1}'
POST = b"POST /v1/pipeline HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
WHOLE = POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
#: Short times, and a timer that looks often.
QUICK = ConnectionLimits(sweep_s=0.02, head_s=0.3, idle_s=0.3, discard_s=0.3, write_s=0.3)


@asynccontextmanager
async def connected(running: Running) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answered(running: Running, *pieces: bytes) -> tuple[int, dict[str, Any], bytes]:
    """Status, JSON and whatever follows, up to the end of the connection."""
    async with connected(running) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            return await answer_of(reader)


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status = int(head.split(" ")[1])
    (length,) = [int(line[16:]) for line in head.lower().split("\r\n") if line.startswith("content-length: ")]
    body = await reader.readexactly(length)
    rest = await reader.read() if "connection: close" in head.lower() else b""
    return status, msgspec.json.decode(body), rest


async def serves(running: Running) -> None:
    """The next innocent request is answered. A request whose head a busy machine sends late is not, with `QUICK`
    limits.
    """
    async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client, asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                answer = await client.post("/v1/pipeline", json={"inputs": 1})
                if answer.status_code != 408:
                    break
    assert answer.status_code == 200


@pytest.mark.proves("abusive-client")
@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/pipeline HTTP/1.1\r\nhost: x\r\nx: " + b"a" * (70 << 10) + b"\r\n\r\n",
        b"POST /v1/pipeline HTTP/1.1\r\nhost: x\r\nx: " + b"a" * (1 << 20),  # that never ends
        b"POST /" + b"a" * (70 << 10) + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/pipeline HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 200 + b"\r\n",
        b"POST /v1/pipeline HTTP/1.1\r\nhost: x\r\n" + b"a" * (70 << 10) + b": x\r\n\r\n",
        POST + b"content-length: 13\r\nx: " + b"a" * (70 << 10) + b"\r\n\r\n" + BODY,
    ],
    ids=["a header", "an endless header", "a path", "many headers", "a name", "before a body"],
)
async def test_a_head_that_is_too_large_is_431_before_there_is_a_request(head: bytes) -> None:
    async with start(OK) as running:
        status, body, rest = await answered(running, head)
        assert (status, body["error"]["code"], rest) == (431, "too_large", b"")
        assert running.manager.handles == []
        await serves(running)


async def test_a_header_of_200_mebibytes_is_not_kept() -> None:
    """The parser keeps what it has of a header; it is ended while that is little."""
    before = psutil.Process().memory_info().rss
    async with start(OK, limits=QUICK) as running, connected(running) as (_, writer):
        writer.write(b"GET / HTTP/1.1\r\nx: ")
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):  # after QUICK.discard_s
                for _ in range(200):
                    writer.write(b"a" * (1 << 20))
                    await writer.drain()
        await serves(running)
    assert psutil.Process().memory_info().rss - before < 64 << 20


async def test_a_head_within_the_limits_is_read() -> None:
    head = POST + b"x: " + b"a" * (48 << 10) + b"\r\n" + b"y: z\r\n" * 100
    async with start(OK) as running:
        async with connected(running) as (reader, writer):
            writer.write(head + b"content-length: 13\r\n\r\n" + BODY)
            status, _, _ = await answer_of(reader)
    assert status == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50,  # TLS
        b"\r\n\r\n\r\nhello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"get / HTTP/1.1\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET //[ HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET http://[::1 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        POST + b"content-length: 9999999999999999999999\r\n\r\n",
        POST + b"content-length: -1\r\n\r\n",
        POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n1",
        POST + b"content-length: 13\r\ntransfer-encoding: chunked\r\n\r\n" + BODY,
        POST + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\nhello\r\n",
        POST + b"x y: z\r\n\r\n",
        POST + b"x: \x00\r\n\r\n",
        b"POST /v1/pipeline HTTP/1.1\r\ncontent-length: 0\r\n\r\n",  # without Host
        b"POST /v1/pipeline HTTP/1.1\r\nhost: x\r\nhost: y\r\ncontent-length: 0\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_a_400_of_ours(raw: bytes) -> None:
    async with start(OK) as running:
        async with connected(running) as (reader, writer):
            writer.write(raw)
            async with asyncio.timeout(PATIENCE_S):
                status, body, _ = await answer_of(reader)
        assert (status, body["error"]["code"]) in [(400, "invalid_request"), (404, "unsupported_endpoint")], body
        assert running.manager.handles == []
        await serves(running)


async def test_who_asks_for_another_protocol_is_answered_in_this_one() -> None:
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    async with start(OK) as running, connected(running) as (reader, writer):
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + upgrade + b"\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert (await answer_of(reader))[0] == 200


@pytest.mark.parametrize("begun", [b"", b"POST /v1/pipeline HTTP/1.1\r\nhost: x\r\n"], ids=["nothing", "half a head"])
async def test_a_connection_that_brings_no_whole_head_is_closed(begun: bytes) -> None:
    async with start(OK, limits=QUICK) as running, connected(running) as (reader, writer):
        writer.write(begun)
        async with asyncio.timeout(PATIENCE_S):
            if begun:
                status, body, _ = await answer_of(reader)
                assert (status, body["error"]["code"]) == (408, "deadline")
            assert await reader.read() == b""


async def test_a_head_that_drips_has_no_more_time() -> None:
    async with start(OK, limits=QUICK) as running, connected(running) as (reader, writer):
        async with asyncio.timeout(PATIENCE_S):
            while not reader.at_eof() and not running.manager.handles:
                writer.write(b"x")
                await asyncio.sleep(0.02)
                if running.server.open_connections == 0:
                    break
        assert running.server.open_connections == 0


async def test_a_connection_at_rest_is_closed_and_one_that_waits_for_us_is_not() -> None:
    gate = asyncio.Event()
    limits = msgspec.structs.replace(QUICK, head_s=2.0)  # longer than a busy machine takes to send one
    async with start(play(gate, ResultEvent(stage="talk", data=1)), limits=limits) as running:
        async with connected(running) as (reader, writer):
            writer.write(WHOLE)
            await until(lambda: running.manager.handles)
            async with connected(running) as (idle, _):
                async with asyncio.timeout(PATIENCE_S):
                    assert await idle.read() == b""  # opened later, closed before
            gate.set()
            async with asyncio.timeout(PATIENCE_S):
                assert (await answer_of(reader))[0] == 200
                assert await reader.read() == b""


@pytest.mark.proves("abusive-client")
@pytest.mark.parametrize("framing", [b"content-length: 99\r\n\r\n" + BODY, b"transfer-encoding: chunked\r\n\r\n1\r\n{"])
async def test_a_body_that_does_not_come_is_408(framing: bytes) -> None:
    settings = msgspec.structs.replace(ALL, body_grace_s=0.3)
    async with start(OK, settings, limits=QUICK) as running, connected(running) as (reader, writer):
        writer.write(POST + framing)
        async with asyncio.timeout(PATIENCE_S):
            status, body, _ = await answer_of(reader)
            assert await reader.read() == b""  # the rest is waited for a little, then no more
    assert (status, body["error"]["code"]) == (408, "deadline")
    assert running.manager.handles == []


async def test_the_rest_of_a_refused_body_is_not_read_for_ever() -> None:
    settings = msgspec.structs.replace(ALL, max_body_bytes=1024)
    async with start(OK, settings, limits=QUICK) as running, connected(running) as (reader, writer):
        writer.write(POST + b"content-length: %d\r\n\r\n" % (1 << 40))
        async with asyncio.timeout(PATIENCE_S):
            status, body, _ = await answer_of(reader)
            assert (status, body["error"]["code"]) == (413, "too_large")
            with pytest.raises(ConnectionError):
                while True:
                    writer.write(b"x" * 65_536)
                    await writer.drain()
        await serves(running)


async def test_a_small_body_that_nobody_read_does_not_cost_the_connection() -> None:
    async with start(OK) as running, connected(running) as (reader, writer):
        writer.write(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n12")
        async with asyncio.timeout(PATIENCE_S):
            assert (await answer_of(reader))[0] == 404
            writer.write(b"345" + WHOLE)
            assert (await answer_of(reader))[0] == 200


async def test_a_body_that_is_all_framing_is_refused() -> None:
    head = POST + b"transfer-encoding: chunked\r\n\r\n"
    async with start(OK) as running:
        for piece in (b"1;x=" + b"y" * 1000 + b"\r\n \r\n", b"1\r\n \r\n"):
            async with connected(running) as (reader, writer):
                async with asyncio.timeout(PATIENCE_S):
                    writer.write(head + piece * ((2 << 20) // len(piece)))
                    status, body, _ = await answer_of(reader)
            assert (status, body["error"]["code"]) == (400, "invalid_request")
        await serves(running)


@pytest.mark.parametrize(
    ("name", "codings", "framing"),
    [
        ("content-encoding", ["gzip"], "content-length: 13"),
        ("content-encoding", ["identity", "BR"], "content-length: 13"),
        ("content-encoding", ["identity, zstd"], "content-length: 13"),
        ("content-encoding", ["\xff"], "content-length: 13"),
        ("transfer-encoding", ["gzip, chunked"], ""),
        ("transfer-encoding", ["gzip", "chunked"], ""),
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=b"])
async def test_a_body_that_is_compressed_is_415_and_never_read_as_it_comes(
    name: str, codings: list[str], framing: str, kind: str
) -> None:
    lines = [*(f"{name}: {coding}" for coding in codings), *([framing] if framing else [])]
    head = "\r\n".join(["POST /v1/pipeline HTTP/1.1", "host: x", f"content-type: {kind}", *lines, "\r\n"])
    sent = BODY if framing else b"d\r\n" + BODY + b"\r\n0\r\n\r\n"
    async with start(OK) as running:
        status, answer, _ = await answered(running, head.encode("latin-1") + sent)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (415, "invalid_request", name)
        assert running.manager.handles == []
        await serves(running)


async def test_a_body_that_is_said_to_be_as_it_is_is_read() -> None:
    framed = b"Content-Encoding: Identity\r\ntransfer-encoding: Chunked\r\n\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n"
    async with start(OK) as running:
        assert (await answered(running, POST + framed))[0] == 200


async def test_trailers_mean_nothing() -> None:
    trailers = b"0\r\nx-request-id: mine\r\nx-request-timeout: nonsense\r\n\r\n"
    async with start(OK) as running, connected(running) as (reader, writer):
        writer.write(POST + b"transfer-encoding: chunked\r\n\r\nd\r\n" + BODY + b"\r\n")
        await asyncio.sleep(0)
        writer.write(trailers)
        async with asyncio.timeout(PATIENCE_S):
            assert (await answer_of(reader))[0] == 200
    assert running.manager.last.id != "mine"


async def endless(_: ScriptedHandle) -> AsyncIterator[Event]:
    for index in range(100_000):
        yield chunk("x" * 65_536, index=index)


@pytest.mark.proves("abusive-client")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_never_reads_is_cut_off_and_one_that_reads_slowly_is_not(stream: bool) -> None:
    huge = play(ResultEvent(stage="talk", data="x" * (16 << 20)))
    limits = msgspec.structs.replace(QUICK, write_s=1.0)  # a busy machine may hold the slow one up, too
    async with start(endless if stream else huge, limits=limits) as running:
        raw = msgspec.json.encode({"inputs": 1, "stream": stream})
        request = POST + b"content-length: %d\r\n\r\n" % len(raw) + raw
        never, slowly = narrow(running), narrow(running)
        with never, slowly:
            loop = asyncio.get_running_loop()
            for client in (never, slowly):
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", running.server.port))
                await loop.sock_sendall(client, request)
            await until(lambda: len(running.manager.handles) == 2)
            taken = 0
            async with asyncio.timeout(PATIENCE_S):
                while running.server.open_connections == 2:
                    taken += len(await loop.sock_recv(slowly, 65_536))
                    await asyncio.sleep(0.02)
            assert running.server.open_connections == 1
            taken_before = taken
            while taken < taken_before + (1 << 20):
                got = len(await loop.sock_recv(slowly, 65_536))
                assert got
                taken += got


@pytest.mark.parametrize("headers", [[], [b"connection: close"]])
async def test_unread_answers_are_bounded_together_and_the_last_of_them_is_never_cut_off(headers: list[bytes]) -> None:
    """Their requests are over, so neither ``maxInFlight`` nor the bytes of bodies count them."""
    size, count = 8 << 20, 8
    limits = ConnectionLimits(sweep_s=0.02, unread_nbytes=1 << 20, unread_s=0.1)
    async with start(play(ResultEvent(stage="talk", data="x" * size)), limits=limits) as running:
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            for number in range(1, count + 1):
                last = stack.enter_context(narrow(running))
                last.setblocking(False)
                await loop.sock_connect(last, ("127.0.0.1", running.server.port))
                await loop.sock_sendall(last, post(1, *headers))
                await until(partial(completed, running, number))
            await until(lambda: running.server.open_connections == 1)
            taken = 0
            async with asyncio.timeout(PATIENCE_S):
                while taken < size:
                    taken += len(await loop.sock_recv(last, 65_536))
                    await asyncio.sleep(0.001)
        await serves(running)


def completed(running: Running, count: int) -> bool:
    return [handle.outcome for handle in running.manager.handles] == ["completed"] * count


def narrow(running: Running) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
    return client


async def test_more_connections_than_there_may_be_are_asked_to_come_again() -> None:
    limits = ConnectionLimits(connections=3)
    async with start(OK, limits=limits) as running:
        async with connected(running), connected(running), connected(running):
            await until(lambda: running.server.open_connections == 3)
            async with connected(running) as (reader, _):
                async with asyncio.timeout(PATIENCE_S):
                    head = (await reader.readuntil(b"\r\n\r\n")).decode()
                    body = msgspec.json.decode(await reader.read())
        assert (head.split(" ")[1], body["error"]["code"]) == ("429", "rate_limited")
        assert "retry-after: 1" in head
        await until(lambda: running.server.open_connections == 0)
        await serves(running)


async def test_a_client_is_refused_by_the_limit_of_descriptors_with_its_name_and_the_log_has_it_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = 200
    monkeypatch.setattr(resource, "getrlimit", lambda _: (allowed, allowed))
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(start(OK))
        for _ in range(allowed // 2):
            await stack.enter_async_context(connected(running))
        await until(lambda: running.server.open_connections == allowed // 2)
        answers = [await answered(running, WHOLE) for _ in range(2)]
        message = "100 connections are open: half of the 200 descriptors that the process may open (RLIMIT_NOFILE)"
        assert [(status, body["error"]["message"]) for status, body, _ in answers] == [(429, message)] * 2
    [line] = [
        record.getMessage() for record in caplog.records if record.name == "stage_runtime.web.listening.connections"
    ]
    assert message in line and "raise the hard limit" in line


async def test_as_many_clients_are_served_as_the_process_may_have_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = [1000]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (allowed[0], 1000))
    async with start(OK, limits=ConnectionLimits(sweep_s=0.02)) as running, contextlib.AsyncExitStack() as stack:
        for _ in range(20):
            await stack.enter_async_context(connected(running))
        await until(lambda: running.server.open_connections == 20)
        allowed[0] = 40

        async def refused() -> bool:
            status, body, _ = await answered(running, WHOLE)
            return status == 429 and body["error"]["message"].startswith("20 connections are open: half of the 40 ")

        async with asyncio.timeout(PATIENCE_S):
            while not await refused():
                pass
        allowed[0] = 1000
        async with asyncio.timeout(PATIENCE_S):
            while (await answered(running, WHOLE))[0] != 200:
                pass


@pytest.mark.parametrize(
    ("connections", "descriptors", "most", "reason"),
    [
        (3, 1000, 3, ""),
        (0, 1000, 500, ": half of the 1000 descriptors that the process may open (RLIMIT_NOFILE)"),
        (0, 20, 16, ""),
        (0, 1 << 20, 16_384, ""),
    ],
)
def test_as_many_connections_may_be_open_as_half_of_the_descriptors(
    connections: int, descriptors: int, most: int, reason: str
) -> None:
    limit = ConnectionLimit(ConnectionLimits(connections=connections), descriptors)
    assert (limit.most, limit.reason) == (most, f"{most} connections are open{reason}")


async def echoed(handle: ScriptedHandle) -> AsyncIterator[Event]:
    yield ResultEvent(stage="talk", data=handle.request.inputs)


def post(inputs: Any, *headers: bytes) -> bytes:
    raw = msgspec.json.encode({"inputs": inputs})
    return POST + b"".join(line + b"\r\n" for line in headers) + b"content-length: %d\r\n\r\n" % len(raw) + raw


@pytest.mark.parametrize(("count", "size"), [(17, 1), (100, 60_000)], ids=["in one read", "in many"])
async def test_requests_sent_ahead_are_answered_in_their_order(count: int, size: int) -> None:
    async with start(echoed) as running, connected(running) as (reader, writer):
        writer.write(b"".join(post([index, "x" * size]) for index in range(count)))
        async with asyncio.timeout(PATIENCE_S):
            answers = [await answer_of(reader) for _ in range(count)]
            writer.write(post("after"))
            status, after, _ = await answer_of(reader)
    assert [(status, body["results"]["talk"][0]) for status, body, _ in answers] == [(200, at) for at in range(count)]
    assert (status, after["results"]["talk"]) == (200, "after")


async def test_a_connection_that_sends_requests_ahead_without_end_is_refused_after_the_first() -> None:
    flood = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 7000
    async with start(OK, limits=QUICK) as running:
        async with connected(running) as (reader, writer), asyncio.timeout(PATIENCE_S):
            writer.write(flood)
            status, body, _ = await answer_of(reader)
            with contextlib.suppress(ConnectionError):  # after QUICK.discard_s
                while True:
                    writer.write(flood)
                    await writer.drain()
        assert (status, body["error"]["code"]) == (429, "rate_limited")
        await serves(running)


async def test_an_answer_that_has_begun_is_never_followed_by_a_refusal_in_its_middle() -> None:
    gate = asyncio.Event()
    async with start(play(chunk("first"), gate)) as running, connected(running) as (reader, writer):
        raw = msgspec.json.encode({"inputs": 1, "stream": True})
        writer.write(POST + b"content-length: %d\r\n\r\n" % len(raw) + raw)
        async with asyncio.timeout(PATIENCE_S):
            begun = await reader.readuntil(b"first")
            writer.write(WHOLE + b"no request\r\n\r\n")
            rest = b""
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(1000):
                    rest += piece
        await until(lambda: running.manager.last.outcome)
    assert (begun + rest).count(b"HTTP/1.1 ") == 1
    assert [(handle.outcome, handle.reason) for handle in running.manager.handles] == [
        ("cancelled", "the client disconnected")
    ]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("wish", [b"h2c", b"websocket"])
async def test_the_body_of_who_asks_for_another_protocol_is_its_body_and_not_the_next_request(
    wish: bytes, split: bool
) -> None:
    asks = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: " + wish, b"http2-settings: AAEAAEAA")
    sent = post("hi", *asks) + post("next", *asks) + post("last")
    async with start(echoed) as running, connected(running) as (reader, writer):
        for at in range(0, len(sent), 9 if split else len(sent)):
            writer.write(sent[at : at + (9 if split else len(sent))])
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            answers = [await answer_of(reader) for _ in range(3)]
    assert [(status, body["results"]["talk"]) for status, body, _ in answers] == [
        (200, "hi"),
        (200, "next"),
        (200, "last"),
    ]
