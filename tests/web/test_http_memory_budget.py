"""How much is held of all requests together, and that who is refused is refused before his body is read."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.errors import RequestError
from stage_runtime.web.exchanges.apikeys import ApiKeys
from stage_runtime.web.exchanges.exchange import CLIENT, Exchange
from stage_runtime.web.exchanges.memory_budget import MemoryBudget, MemoryReservation
from stage_runtime.web.idempotency import Repeats
from tests.web.running import ALL, PATIENCE_S, Running, start
from tests.web.scripted_manager import play
from tests.web.test_http_connections import POST, answer_of, connected
from tests.web.test_http_limits import until

OK = play(ResultEvent(stage="talk", data=1))


def held(running: Running, text: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith("omnipipeline_http_buffered_bytes ")]
    return float(line.split(" ")[1])


@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60) | st.none()), max_size=40))
def test_what_is_held_is_the_sum_of_the_shares_and_never_over_the_limit_but_of_one(
    steps: list[tuple[int, int | None]],
) -> None:
    budget = MemoryBudget(100)
    holdings = [MemoryReservation(budget) for _ in range(4)]
    model = [0] * 4
    for who, nbytes in steps:
        if nbytes is None:
            holdings[who].release()
            model[who] = 0
        else:
            try:
                holdings[who].add(nbytes)
                model[who] += nbytes
            except RequestError as error:
                assert error.code == "rate_limited"
                assert sum(model) + nbytes > 100 and sum(model) > model[who]
        assert budget.held_nbytes == sum(model)
        assert sum(model) <= 100 or sum(1 for one in model if one) == 1
    for reservation in holdings:
        reservation.release()
    assert budget.held_nbytes == 0


@pytest.mark.proves("abusive-client")
async def test_bodies_in_flight_are_bounded_as_a_sum_and_given_back() -> None:
    gate = asyncio.Event()
    settings = msgspec.structs.replace(ALL, max_held_bytes=100_000)
    async with start(play(gate, ResultEvent(stage="talk", data=1)), settings) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
            large = {"inputs": "x" * 60_000}
            first = asyncio.create_task(client.post("/v1/pipeline", json=large))
            await until(lambda: running.manager.in_flight)
            second = await client.post("/v1/pipeline", json=large)
            small = asyncio.create_task(client.post("/v1/pipeline", json={"inputs": 1}))
            await until(lambda: len(running.manager.in_flight) == 2)
            during = held(running, (await client.get("/metrics")).text)
            gate.set()
            assert [(await first).status_code, (await small).status_code] == [200, 200]
            third = await client.post("/v1/pipeline", json=large)
            after = held(running, (await client.get("/metrics")).text)
    assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limited")
    assert second.headers["retry-after"] == "1"
    assert third.status_code == 200
    assert 60_000 < during < 61_000
    assert after == 0


class Arrived:
    """A client whose request is here, in pieces of a few bytes."""

    received = True

    def __init__(self, body: bytes, size: int) -> None:
        self._body = body
        self._size = size
        self._at = 0

    async def receive(self) -> Any:
        piece = self._body[self._at : self._at + self._size]
        self._at += self._size
        return {"type": "http.request", "body": piece, "more_body": self._at < len(self._body)}

    async def send(self, _: Any) -> None:
        """Nobody reads it."""


@pytest.mark.parametrize(("body", "size"), [(b"ab" * 100_000, 2), (b"--aXY" * 100_000, 1 << 16)])
async def test_a_body_takes_a_few_times_its_length_however_it_is_cut_into_pieces(body: bytes, size: int) -> None:
    client = Arrived(body, size)
    headers = [(b"idempotency-key", b"k"), (b"content-type", b"multipart/form-data; boundary=a")]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, CLIENT: client}
    exchange = Exchange(scope, client.receive, client.send, MemoryReservation(MemoryBudget(1 << 30)))
    read = b""

    async def handle(given: Exchange) -> None:
        nonlocal read
        read = await given.body(1 << 30)

    tracemalloc.start()
    try:
        await Repeats().once(exchange, handle)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read == body
    assert most < 6 * len(body)


async def test_who_has_no_length_is_refused_when_it_gets_too_much() -> None:
    gate = asyncio.Event()
    settings = msgspec.structs.replace(ALL, max_held_bytes=100_000)
    async with start(play(gate, ResultEvent(stage="talk", data=1)), settings) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
            first = asyncio.create_task(client.post("/v1/pipeline", json={"inputs": "x" * 60_000}))
            await until(lambda: running.manager.in_flight)

            async def pieces() -> AsyncIterator[bytes]:
                for _ in range(10):
                    yield b" " * 10_000

            refused = await client.post("/v1/pipeline", content=pieces(), headers={"content-type": "application/json"})
            gate.set()
            await first
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")


@pytest.mark.proves("abusive-client")
@pytest.mark.parametrize("reason", ["full", "no key", "no room", "too large", "no json"])
async def test_a_request_that_cannot_be_taken_is_refused_before_its_body_is_read(reason: str) -> None:
    """Nothing of the body is sent; who reads first would wait."""
    settings = msgspec.structs.replace(
        ALL, api_keys=ApiKeys("k") if reason == "no key" else ApiKeys(), max_held_bytes=1000, max_body_bytes=10_000
    )
    async with start(play(asyncio.Event()), settings, cap=2 if reason != "full" else 1) as running:
        async with connected(running) as (_, busy), connected(running) as (reader, writer):
            if reason in ("full", "no room"):
                raw = msgspec.json.encode({"inputs": "x" * 600})
                busy.write(POST + b"content-length: %d\r\n\r\n" % len(raw) + raw)
                await until(lambda: running.manager.in_flight)
            nbytes = 20_000 if reason == "too large" else 600
            head = POST if reason != "no json" else POST.replace(b"application/json", b"text/plain")
            writer.write(head + b"content-length: %d\r\n\r\n" % nbytes)
            async with asyncio.timeout(PATIENCE_S):
                status, _, _ = await answer_of(reader)
    assert status == {"full": 429, "no key": 401, "no room": 429, "too large": 413, "no json": 415}[reason]
