"""Requests under an ``Idempotency-Key``, sent again: over sockets, and the bounds of what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI

import stage_runtime as omni
from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.errors import RequestError
from stage_runtime.web import idempotency
from stage_runtime.web.exchanges.apikeys import ApiKeys
from tests.web.running import ALL, PATIENCE_S, Running, start
from tests.web.scripted_manager import ScriptedHandle, chunk, play

KEY = {"idempotency-key": "k-1"}
KEYED = msgspec.structs.replace(ALL, api_keys=ApiKeys(("one", "other")))


def client(running: Running, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S, headers=headers)


async def numbered(handle: ScriptedHandle) -> AsyncIterator[Any]:
    """An answer that says how many requests there were before it."""
    yield ResultEvent(stage="talk", has_data=True, data=len(handle.manager.handles))


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_a_repeat_gets_the_answer_that_was_kept_and_computes_nothing() -> None:
    async with start(numbered) as running, client(running) as http:
        answers = [await http.post("/v1/pipeline", json={"inputs": 1}, headers=KEY) for _ in range(3)]
    first, *repeats = answers
    assert first.status_code == 200 and "idempotent-replayed" not in first.headers
    for repeat in repeats:
        assert (repeat.content, repeat.headers["content-type"]) == (first.content, first.headers["content-type"])
        assert repeat.headers.get_list("idempotent-replayed") == ["true"]
    assert len(running.manager.handles) == 1


async def test_a_repeat_while_the_first_runs_is_409_and_the_first_goes_on() -> None:
    gate = asyncio.Event()
    async with start(play(gate)) as running, client(running) as http:
        first = asyncio.create_task(http.post("/v1/pipeline", json={"inputs": 1}, headers=KEY))
        while not running.manager.in_flight:
            await asyncio.sleep(0.001)
        repeat = await http.post("/v1/pipeline", json={"inputs": 1}, headers=KEY)
        gate.set()
        assert (await first).status_code == 200
        again = await http.post("/v1/pipeline", json={"inputs": 1}, headers=KEY)
    assert code(repeat) == (409, "duplicate_request")
    assert again.headers["idempotent-replayed"] == "true" and len(running.manager.handles) == 1


async def test_a_repeat_of_a_request_whose_client_went_away_runs_anew() -> None:
    async def stuck_at_first(handle: ScriptedHandle) -> AsyncIterator[Any]:
        if len(handle.manager.handles) == 1:
            await asyncio.Event().wait()
        yield ResultEvent(stage="talk", has_data=False)

    async with start(stuck_at_first) as running, client(running) as http:
        first = asyncio.create_task(http.post("/v1/pipeline", json={"inputs": 1}, headers=KEY))
        while not running.manager.in_flight:
            await asyncio.sleep(0.001)
        first.cancel()
        await running.manager.last.ended.wait()
        while (repeat := await http.post("/v1/pipeline", json={"inputs": 1}, headers=KEY)).status_code == 409:
            await asyncio.sleep(0.001)  # the first one's handler is about to end
    assert repeat.status_code == 200 and "idempotent-replayed" not in repeat.headers
    assert [one.outcome for one in running.manager.handles] == ["cancelled", "completed"]


@pytest.mark.parametrize("error", [RequestError("unavailable", "none"), RequestError("stage_failed", "x", stage="t")])
async def test_an_error_is_not_kept(error: RequestError) -> None:
    async with start(play(error)) as running, client(running) as http:
        for _ in range(2):
            answer = await http.post("/v1/pipeline", json={"inputs": 1}, headers=KEY)
            assert code(answer)[1] == error.code
    assert len(running.manager.handles) == 2


async def test_a_stream_is_not_kept_and_runs_anew() -> None:
    async with start(play(chunk("a"))) as running, client(running) as http:
        body = {"inputs": 1, "stream": True}
        texts = [(await http.post("/v1/pipeline", json=body, headers=KEY)).text for _ in range(2)]
    assert all(text.count("event: chunk") == 1 for text in texts) and len(running.manager.handles) == 2


async def test_another_body_route_or_api_key_does_not_get_the_answer() -> None:
    async with start(numbered, KEYED) as running, client(running, authorization="Bearer one") as http:
        first = await http.post("/v1/pipeline", json={"inputs": 1}, headers=KEY)
        other_body = await http.post("/v1/pipeline", json={"inputs": 2}, headers=KEY)
        again = await http.post("/v1/pipeline", json={"inputs": 1}, headers=KEY)
        foreign = await http.post("/v1/pipeline", json={"inputs": 1}, headers=KEY | {"authorization": "Bearer other"})
        other_route = await http.post("/v1/embeddings", json={"input": "x"}, headers=KEY)
    assert code(other_body) == (409, "duplicate_request") and other_body.json()["error"]["param"] == "idempotency-key"
    assert again.content == first.content, "the first one's answer stays"
    assert foreign.status_code == 200 and foreign.json()["results"] != first.json()["results"]
    assert "idempotent-replayed" not in other_route.headers
    assert len(running.manager.handles) == 3


async def test_a_form_that_is_sent_again_is_the_same_whatever_its_boundary() -> None:
    async with start(numbered) as running, client(running) as http:
        forms = [("one", b"RIFF"), ("two", b"RIFF"), ("three", b"RIFX")]
        answers = [
            await http.post(
                "/v1/pipeline",
                files={"audio": ("a.wav", sound)},
                headers=KEY | {"content-type": f'multipart/form-data; boundary="{boundary}"'},
            )
            for boundary, sound in forms
        ]
    assert [one.status_code for one in answers] == [200, 200, 409]
    assert answers[1].content == answers[0].content and answers[1].headers["idempotent-replayed"] == "true"
    assert len(running.manager.handles) == 1


@pytest.mark.parametrize("given", [[""], ["x" * 256], ["a\tb"], ["a", "a"]])
async def test_what_is_not_a_key_is_refused(given: list[str]) -> None:
    async with start(numbered) as running, client(running) as http:
        headers = [("idempotency-key", one) for one in given]
        answer = await http.post("/v1/pipeline", json={"inputs": 1}, headers=headers)
    assert code(answer) == (400, "invalid_request")
    assert running.manager.handles == []


async def test_the_official_client_repeats_under_its_key() -> None:
    async with start(play(chunk(omni.Text("hello")))) as running:
        async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as http:
            asked: Any = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "extra_headers": KEY}
            first, repeat = [await http.chat.completions.create(**asked) for _ in range(2)]
    assert first == repeat and len(running.manager.handles) == 1


async def test_answers_are_kept_within_a_bound_of_bytes_and_of_time() -> None:
    now = 0.0
    repeats = idempotency.Repeats(kept_nbytes=4 * idempotency.OVERHEAD_NBYTES, clock=lambda: now)
    asked = 0

    async def handle(exchange: Any) -> None:
        nonlocal asked
        asked += 1
        await exchange.body()
        await exchange.reply(b"x" * 10)

    async def ask(key: str) -> bool:
        """Whether the answer was kept."""
        exchange = Written(key)
        await repeats.once(exchange, handle)  # type: ignore[arg-type]
        assert exchange.sent[-1] == b"x" * 10
        return idempotency.REPLAYED in exchange.headers

    for number in range(50):
        assert not await ask(f"k{number}")
        assert repeats.kept_nbytes <= 4 * idempotency.OVERHEAD_NBYTES
    assert await ask("k49") and await ask("k47") and not await ask("k46"), "three with their overhead fit"
    now = idempotency.KEPT_S - 1
    assert await ask("k49")
    now = idempotency.KEPT_S + 1
    assert not await ask("k49") and repeats.kept_nbytes == idempotency.OVERHEAD_NBYTES + 10

    async def unread(exchange: Any) -> None:
        await exchange.reply(b"y" * 10)

    for _ in range(9):  # another body each time, which nothing compares: the last answer stays
        await repeats.once(Written("k49"), unread)  # type: ignore[arg-type]
    assert repeats.kept_nbytes == idempotency.OVERHEAD_NBYTES + 10


async def test_an_answer_is_kept_from_its_end_on_however_long_it_took() -> None:
    now, asked = 0.0, 0
    repeats = idempotency.Repeats(clock=lambda: now)

    async def handle(exchange: Any) -> None:
        nonlocal asked, now
        await exchange.body()
        asked += 1
        now += 2 * idempotency.KEPT_S
        await exchange.reply(b"late")

    for _ in range(2):
        await repeats.once(Written("key"), handle)  # type: ignore[arg-type]
        now += idempotency.KEPT_S - 1
    assert asked == 1


class Written:
    """The part of an exchange that `Repeats` uses."""

    path = "/v1/pipeline"

    def __init__(self, key: str) -> None:
        self.claim: Any = None
        self.sent: list[bytes] = []
        self.headers: list[tuple[bytes, bytes]] = []
        self._key = key

    def header(self, name: bytes) -> str | None:
        return self._key if name == b"idempotency-key" else None

    only_header = header

    async def body(self) -> None:
        await self.claim.read(b"asked")

    async def reply(self, body: bytes, *, content_type: bytes = b"", headers: Any = ()) -> None:
        if self.claim is not None:
            self.claim.replied(body, 200, content_type, list(headers))
        self.sent.append(body)
        self.headers = list(headers)
