"""Reading coordinators' status over real sockets: a silent address gets a shorter timeout after its first request."""

from __future__ import annotations

import contextlib
import gzip
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from omnipipeline_operator.cluster.status_client import (
    MAX_ADDRESSES,
    MAX_BODY_BYTES,
    MAX_INSTANCES,
    TIMEOUT_S,
    UNANSWERED_TIMEOUT_S,
    FetchStatus,
    InstanceStatus,
    StatusClient,
)

INSTANCES = [
    {"unit": "u", "revision": "r", "endpoint": "tcp://10.0.0.1:5", "ready": True, "bound": 2, "waiting": 1},
    {"unit": "u", "revision": "r", "endpoint": "tcp://10.0.0.1:6", "ready": True, "running": 4, "more": "ignored"},
    {"unit": "u", "revision": "r", "endpoint": "tcp://[::2]:5", "ready": True, "draining": True},
]


@contextlib.asynccontextmanager
async def serving(status: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[int]:
    """A coordinator's `/status` on 127.0.0.1 only; its port."""
    application = web.Application()
    application.router.add_get("/status", status)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found: int = runner.addresses[0][1]
    yield found
    await runner.cleanup()


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """The port of a coordinator that answers."""

    async def status(_: web.Request) -> web.Response:
        return web.json_response({"revisions": ["a", "b"], "instances": INSTANCES})

    async with serving(status) as found:
        yield found


async def test_coordinators_that_answer_are_read_and_others_skipped(port: int) -> None:
    async with StatusClient(port=port) as client:
        found = await client.ask(["127.0.0.1", "127.0.0.2"])
    [status] = found
    assert status.revisions == ("a", "b")
    assert status.registered() == {("u", "r"): 1}, "two processes of one pod; the other drains"
    assert status.loads() == {"10.0.0.1": 7, "::2": 0}


@pytest.mark.parametrize(
    "body, expected",
    [
        ({"bytes_done": 3, "bytes_total": 9, "more": 1}, FetchStatus(bytes_done=3, bytes_total=9)),
        ({"bytes_done": -1, "bytes_total": 9}, None),
        ({"bytes_done": 1 << 61, "bytes_total": 9}, None),
        ({"bytes_done": "3", "bytes_total": 9}, None),
        ([], None),
    ],
)
async def test_a_fetch_is_read_and_a_forged_one_is_none(body: object, expected: FetchStatus | None) -> None:
    async def status(_: web.Request) -> web.Response:
        return web.json_response(body)

    async with serving(status) as port, StatusClient(port=port) as client:
        assert await client.fetch("127.0.0.1") == expected
        assert await client.fetch("127.0.0.2") is None


@pytest.mark.parametrize(
    "endpoint, host",
    [
        ("tcp://10.0.0.1:5", "10.0.0.1"),
        ("tcp://[::2]:5", "::2"),
        ("tcp://name:5", ""),
        ("tcp://10.0.0.1,metadata.name=x:5", ""),
        ("tcp://[fe80::1%a=b,metadata.name]:5", ""),
        ("tcp://[", ""),
        ("ipc:///x", ""),
        ("", ""),
    ],
)
def test_the_host_of_an_instance_is_an_address_or_none(endpoint: str, host: str) -> None:
    assert InstanceStatus(unit="u", revision="r", endpoint=endpoint).host == host


@pytest.mark.proves("hostile-pod")
async def test_an_answer_that_is_too_long_or_leads_elsewhere_is_no_answer(port: int) -> None:
    """The pods are a tenant's: what they answer may be anything."""

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(4 * MAX_BODY_BYTES // 2**16):
                await response.write(b" " * 2**16)
                sent.append(2**16)
        return response

    async def elsewhere(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect(f"http://127.0.0.1:{port}/status")

    async def compressed(request: web.Request) -> web.Response:
        return web.Response(body=gzip.compress(b'{"revisions": []}'), headers={"Content-Encoding": "gzip"})

    async def crowded(request: web.Request) -> web.Response:
        return web.json_response({"instances": INSTANCES[:1] * (MAX_INSTANCES + 1)})

    async def negative(request: web.Request) -> web.Response:
        return web.json_response({"instances": [{**INSTANCES[0], "waiting": -(2**40)}]})

    async def lengthy(request: web.Request) -> web.Response:
        return web.json_response({"instances": [{**INSTANCES[0], "unit": "u" * 1000}]})

    async def deep(request: web.Request) -> web.Response:
        return web.Response(body=b'{"other": ' + b"[" * 10**5 + b"]" * 10**5 + b"}")

    async def other_text(request: web.Request) -> web.Response:
        return web.Response(body=b'{"revisions": ["\xff"]}')

    sent: list[int] = []
    for handler in (endless, elsewhere, compressed, crowded, negative, lengthy, deep, other_text):
        async with serving(handler) as bad, StatusClient(port=bad) as client:
            assert await client.ask(["127.0.0.1"]) == [], handler.__name__
    assert sum(sent) < 3 * MAX_BODY_BYTES, "it is not read to its end"


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
