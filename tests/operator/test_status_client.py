"""Reading coordinators' status over real sockets: a silent address gets a shorter timeout after its first request."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from omnipipeline_operator.cluster.status_client import (
    MAX_ADDRESSES,
    TIMEOUT_S,
    UNANSWERED_TIMEOUT_S,
    StatusClient,
)

INSTANCES = [
    {"unit": "u", "revision": "r", "endpoint": "tcp://10.0.0.1:5", "ready": True, "bound": 2, "waiting": 1},
    {"unit": "u", "revision": "r", "endpoint": "tcp://10.0.0.1:6", "ready": True, "running": 4, "more": "ignored"},
    {"unit": "u", "revision": "r", "endpoint": "tcp://[::2]:5", "ready": True, "draining": True},
]


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A coordinator's `/status` on 127.0.0.1 only."""

    async def status(_: web.Request) -> web.Response:
        return web.json_response({"revisions": ["a", "b"], "instances": INSTANCES})

    application = web.Application()
    application.router.add_get("/status", status)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found: int = runner.addresses[0][1]
    yield found
    await runner.cleanup()


async def test_coordinators_that_answer_are_read_and_others_skipped(port: int) -> None:
    async with StatusClient(port=port) as client:
        found = await client.ask(["127.0.0.1", "127.0.0.2"])
    [status] = found
    assert status.revisions == ("a", "b")
    assert status.registered() == {("u", "r"): 1}, "two processes of one pod; the other drains"
    assert status.loads() == {"10.0.0.1": 7, "::2": 0}


async def test_an_address_that_never_answered_gets_a_short_timeout(port: int) -> None:
    with socket.create_server(("127.0.0.3", port), backlog=0) as silent:  # accepts, and never answers
        address = silent.getsockname()[0]
        async with StatusClient(port=port) as client:
            assert client.timeout_s(address) == TIMEOUT_S
            assert await client.ask([address]) == []
            assert client.timeout_s(address) == UNANSWERED_TIMEOUT_S
            assert await client.ask(["127.0.0.1"])
            assert client.timeout_s("127.0.0.1") == TIMEOUT_S


async def test_the_least_recently_asked_addresses_are_forgotten(port: int) -> None:
    async with StatusClient(port=port) as client:
        await client.ask(["127.0.0.2"])  # refused
        for block in range(MAX_ADDRESSES // 250):
            await client.ask([f"127.1.{block}.{number}" for number in range(1, 251)])
        assert client.timeout_s("127.0.0.2") == TIMEOUT_S
        assert client.timeout_s("127.1.7.250") == UNANSWERED_TIMEOUT_S
