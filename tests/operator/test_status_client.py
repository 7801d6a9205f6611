"""Reading coordinators' status over real sockets: only the first request to a silent address waits a whole second."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from omnipipeline_operator.cluster import status_client
from omnipipeline_operator.cluster.status_client import CoordinatorStatus, StatusClient

INSTANCES = [
    {"unit": "u", "revision": "r", "endpoint": "tcp://10.0.0.1:5", "ready": True, "bound": 2, "waiting": 1},
    {"unit": "u", "revision": "r", "endpoint": "tcp://10.0.0.1:6", "ready": True, "running": 4, "more": "ignored"},
    {"unit": "u", "revision": "r", "endpoint": "tcp://[::2]:5", "ready": True, "draining": True},
]


def nobody_answers(asked: StatusClient, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let no coordinator answer; returns the list of timeouts used."""
    patience: list[float] = []

    async def never(_: str, timeout_s: float) -> CoordinatorStatus | None:
        patience.append(timeout_s)
        return None

    monkeypatch.setattr(asked, "_ask", never)
    return patience


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


async def test_coordinators_that_answer_are_read_and_others_skipped(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_client, "PROBE_PORT", port)
    async with StatusClient() as asked:
        found = await asked.ask(["127.0.0.1", "127.0.0.2"])
    [status] = found
    assert status.revisions == ("a", "b")
    assert status.registered() == {("u", "r"): 1}, "two processes of one pod; the other drains"
    assert status.loads() == {"10.0.0.1": 7, "::2": 0}


async def test_an_address_that_never_answered_gets_a_short_timeout(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.3", port), backlog=0) as silent:  # accepts, and never answers
        monkeypatch.setattr(status_client, "PROBE_PORT", port)
        async with StatusClient() as asked:
            waits = []
            for _ in range(2):
                began = time.monotonic()
                assert await asked.ask([silent.getsockname()[0]]) == []
                waits.append(time.monotonic() - began)
            assert waits[0] >= status_client.TIMEOUT_S
            assert status_client.UNANSWERED_TIMEOUT_S <= waits[1] < status_client.TIMEOUT_S
            assert await asked.ask(["127.0.0.1"])
            patience = nobody_answers(asked, monkeypatch)
            await asked.ask(["127.0.0.1"])
            assert patience == [status_client.TIMEOUT_S]


async def test_the_least_recently_asked_addresses_are_forgotten(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_client, "PROBE_PORT", port)
    monkeypatch.setattr(status_client, "MAX_ADDRESSES", 3)
    async with StatusClient() as asked:
        await asked.ask(["127.0.0.2"])  # refused
        for number in range(10, 13):
            await asked.ask([f"127.0.0.{number}"])
        patience = nobody_answers(asked, monkeypatch)
        await asked.ask(["127.0.0.2"])
        await asked.ask(["127.0.0.12"])
        assert patience == [status_client.TIMEOUT_S, status_client.UNANSWERED_TIMEOUT_S]
