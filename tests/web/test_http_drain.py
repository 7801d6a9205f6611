"""A server that drains serves clients that keep their connections, and tells each that its connection ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from stage_runtime.web.app import make_app
from stage_runtime.web.listening.limits.connection_limits import ConnectionLimits
from stage_runtime.web.listening.server import Server
from stage_runtime.web.sound.pool import CodecPool
from stage_runtime.wire.values import Text
from tests.web.running import ALL, PATIENCE_S
from tests.web.scripted_manager import Script, ScriptedManager, chunk, play

LONG_S = 600.0  # a quiet time that never passes in a test
KEPT = httpx.Limits(keepalive_expiry=None)
ASK = {"inputs": 1}
STREAM = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
HEAD = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"


@asynccontextmanager
async def serving(script: Script | None = None) -> AsyncIterator[Server]:
    app = make_app(ScriptedManager(script or play(), cap=64), ALL, codecs=CodecPool())
    limits = ConnectionLimits(sweep_s=0.01)
    async with Server(app, port=0, drain_s=PATIENCE_S, limits=limits) as server:
        yield server


def client(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, limits=KEPT)


def draining(server: Server, quiet_s: float) -> asyncio.Task[None]:
    return asyncio.create_task(server.drain(quiet_s=quiet_s))


async def begun(server: Server) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not server.drains:
            await asyncio.sleep(0)


async def test_a_kept_connection_is_served_once_more_and_told_that_it_ends() -> None:
    async with serving() as server, client(server) as kept:
        first = await kept.get("/livez")
        assert "connection" not in first.headers
        drain = draining(server, LONG_S)
        await begun(server)
        answer = await kept.get("/livez")
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert answer.extensions["network_stream"] is not None
        await asyncio.wait_for(drain, PATIENCE_S)  # nobody is connected any more


async def test_each_of_many_clients_of_a_kept_connection_loses_nothing() -> None:
    statuses: list[int] = []
    async with serving() as server:
        clients = [client(server) for _ in range(32)]
        for one in clients:
            await one.get("/livez")
        drain = draining(server, LONG_S)
        await begun(server)
        for one in clients:
            statuses.append((await one.get("/livez")).status_code)
        await asyncio.wait_for(drain, PATIENCE_S)
        for one in clients:
            await one.aclose()
    assert statuses == [200] * 32


async def test_a_stream_begun_before_leaves_its_connection_fit_for_one_more_request() -> None:
    gate = asyncio.Event()
    async with serving(play(chunk(Text("a")), gate, chunk(Text("b"), index=1))) as server, client(server) as kept:
        async with kept.stream("POST", "/v1/chat/completions", json=STREAM) as answer:
            pieces = answer.aiter_text()
            await anext(pieces)
            assert "connection" not in answer.headers
            drain = draining(server, LONG_S)
            await begun(server)
            gate.set()
            rest = "".join([piece async for piece in pieces])
            used = answer.extensions["network_stream"]
        assert rest.endswith("data: [DONE]\n\n")
        again = await kept.get("/livez")
        assert again.extensions["network_stream"] is used, "the client used the connection of its stream"
        assert (again.status_code, again.headers["connection"]) == (200, "close")
        await asyncio.wait_for(drain, PATIENCE_S)


async def test_an_answer_that_is_awaited_as_the_drain_begins_says_that_it_is_the_last() -> None:
    gate = asyncio.Event()
    async with serving(play(gate, chunk(Text("a")))) as server, client(server) as kept:
        asking = asyncio.create_task(kept.post("/v1/pipeline", json=ASK))
        async with asyncio.timeout(PATIENCE_S):
            while not server.open_connections:
                await asyncio.sleep(0.001)
        drain = draining(server, LONG_S)
        await begun(server)
        gate.set()
        assert (await asking).headers["connection"] == "close"
        await asyncio.wait_for(drain, PATIENCE_S)


async def test_a_connection_opened_before_its_first_request_is_served() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(PATIENCE_S):
            while not server.open_connections:
                await asyncio.sleep(0.001)
        drain = draining(server, LONG_S)
        await begun(server)
        writer.write(HEAD)
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer
        writer.close()
        await asyncio.wait_for(drain, PATIENCE_S)


async def test_only_the_last_of_pipelined_requests_ends_their_connection() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(HEAD)
        await reader.readuntil(b"ok\n")
        drain = draining(server, LONG_S)
        await begun(server)
        writer.write(HEAD * 3)
        answers = await asyncio.wait_for(reader.read(), PATIENCE_S)
        heads = answers.split(b"HTTP/1.1 ")[1:]
        assert [head[:3] for head in heads] == [b"200"] * 3
        assert [b"connection: close" in head for head in heads] == [False, False, True]
        writer.close()
        await asyncio.wait_for(drain, PATIENCE_S)


async def test_a_client_s_own_wish_to_close_stands_though_more_requests_wait() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(HEAD)
        await reader.readuntil(b"ok\n")
        drain = draining(server, LONG_S)
        await begun(server)
        writer.write(HEAD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") + HEAD)
        answers = await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert answers.count(b"HTTP/1.1 200") == 1 and answers.count(b"connection: close") == 1
        writer.close()
        await asyncio.wait_for(drain, PATIENCE_S)


async def test_new_connections_are_served_until_the_quiet_time_is_over() -> None:
    async with serving() as server, client(server) as kept:
        await kept.get("/livez")
        drain = draining(server, LONG_S)
        await begun(server)
        async with client(server) as late:
            answer = await late.get("/livez")
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert not drain.done(), "the kept connection is still there"
        await server.stop(drain_s=0)
        await asyncio.wait_for(drain, PATIENCE_S)


async def test_a_connection_that_rests_for_the_quiet_time_is_closed() -> None:
    async with serving() as server, client(server) as kept:
        await kept.get("/livez")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.wait_for(draining(server, 0.05), PATIENCE_S)
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        assert server.open_connections == 0
        writer.close()


async def test_a_drain_waits_for_nobody_when_nobody_is_connected() -> None:
    async with serving() as server:
        await asyncio.wait_for(server.drain(quiet_s=LONG_S), PATIENCE_S)
        with_error: Any = None
        try:
            await asyncio.open_connection("127.0.0.1", server.port)
        except ConnectionRefusedError as error:
            with_error = error
        assert with_error is not None, "it takes no connection any more"
