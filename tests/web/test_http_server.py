"""Starting, stopping and draining a server in a loop that goes on."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from stage_runtime.errors import ConfigurationError
from stage_runtime.web.app import make_app
from stage_runtime.web.listening.server import Server
from stage_runtime.web.sound.pool import CodecPool
from stage_runtime.wire.values import Text
from tests.web.running import ALL, PATIENCE_S
from tests.web.scripted_manager import ScriptedManager, chunk, play

STREAM = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


async def test_open_streams_end_while_it_drains_and_nobody_new_is_let_in() -> None:
    gate = asyncio.Event()
    manager = ScriptedManager(play(chunk(Text("a")), gate, chunk(Text("b"), index=1)))
    server = Server(make_app(manager, ALL, codecs=CodecPool()), port=0, drain_s=10)
    async with server, httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        async with client.stream("POST", "/v1/chat/completions", json=STREAM) as answer:
            pieces = answer.aiter_text()
            await anext(pieces)
            stopping = asyncio.create_task(server.stop())
            await refused(server.port)
            gate.set()
            rest = "".join([piece async for piece in pieces])
        await asyncio.wait_for(stopping, PATIENCE_S)
    assert rest.endswith("data: [DONE]\n\n")
    assert manager.last.outcome == "completed"


async def test_what_is_open_after_the_drain_is_cut_off_and_aborted() -> None:
    manager = ScriptedManager(play(chunk(Text("a")), asyncio.Event()))
    server = Server(make_app(manager, ALL, codecs=CodecPool()), port=0)
    async with server, httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        async with client.stream("POST", "/v1/chat/completions", json=STREAM) as answer:
            pieces = answer.aiter_text()
            await anext(pieces)
            await asyncio.wait_for(server.stop(drain_s=0.05), PATIENCE_S)
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(pieces)
    assert manager.last.outcome == "cancelled"
    assert manager.in_flight == {}


async def test_a_drain_is_cut_short_by_a_second_stop_and_waiting_requests_fail() -> None:
    manager = ScriptedManager(play(asyncio.Event()))
    server = Server(make_app(manager, ALL, codecs=CodecPool()), port=0, drain_s=60)
    async with server, httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        caller = asyncio.create_task(client.post("/v1/pipeline", json={"inputs": 1}))
        while not manager.in_flight:
            await asyncio.sleep(0.001)
        draining = asyncio.create_task(server.stop())
        await refused(server.port)
        assert not draining.done()
        await asyncio.wait_for(server.stop(drain_s=0), PATIENCE_S)
        answer = await caller
        await asyncio.wait_for(draining, PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert manager.last.outcome == "cancelled"


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
            async with Server(make_app(ScriptedManager(play()), ALL, codecs=CodecPool()), port=port):
                pass


async def test_it_stops_once_however_often_it_is_asked() -> None:
    server = Server(make_app(ScriptedManager(play()), ALL, codecs=CodecPool()), port=0)
    async with server:
        await server.stop()
        await server.stop()
    await refused(server.port)


async def refused(port: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return
            except ConnectionResetError:  # it was in the backlog as the listener closed
                continue
            writer.close()
            await asyncio.sleep(0.01)
