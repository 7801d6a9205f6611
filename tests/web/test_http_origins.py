"""Browsers that ask for pages of other sites, and pages that were given our address; and who is not a browser."""

from __future__ import annotations

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI

from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.web.exchanges.apikeys import ApiKeys
from stage_runtime.wire.values import Text
from tests.web.running import ALL, PATIENCE_S, start
from tests.web.scripted_manager import play

OK = play(ResultEvent(stage="talk", data=Text("ok")))
LOCAL = msgspec.structs.replace(ALL, local=True, hosts=("models.lan",))
CHAT = b'{"messages": [{"role": "user", "content": "hi"}]}'
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        (path, content_type)
        for path in ("/v1/chat/completions", "/v1/audio/speech", "/v1/pipeline")
        for content_type in (
            *(None, "", "application/x-www-form-urlencoded", "application/jsonx"),
            *(("text/plain", "text/plain; application/json") if path != "/v1/audio/speech" else ()),  # it is spoken
        )
    ],
)
@pytest.mark.parametrize("keys", [(), ("k",)])
async def test_a_body_that_is_not_said_to_be_json_is_415(path: str, content_type: str | None, keys: tuple[str]) -> None:
    headers = {"authorization": "Bearer k"} | ({} if content_type is None else {"content-type": content_type})
    settings = msgspec.structs.replace(LOCAL, api_keys=ApiKeys(keys))
    async with start(OK, settings) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        answer = await client.post(path, content=CHAT, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (415, "invalid_request", "content-type")
    assert running.manager.handles == []


@pytest.mark.parametrize("origin", ["http://evil.example", "null"])
async def test_a_text_to_speak_is_not_taken_from_pages_of_other_sites(origin: str) -> None:
    """A browser sends this content type without asking first, so the page's origin is all that tells."""
    headers = {"content-type": "text/plain", "origin": origin}
    async with start(OK, LOCAL) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        answer = await client.post("/v1/audio/speech", content=b"Hello.", headers=headers)
    assert answer.status_code == 403
    assert running.manager.handles == []


@pytest.mark.parametrize(
    "content_type", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json"]
)
async def test_what_is_said_to_be_json_is_read(content_type: str) -> None:
    async with start(OK, LOCAL) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        answer = await client.post("/v1/chat/completions", content=CHAT, headers={"content-type": content_type})
    assert answer.status_code == 200


FOREIGN = [
    {"origin": "http://evil.example"},
    {"origin": "https://evil.example", "sec-fetch-site": "cross-site"},
    {"origin": "null"},
    {"origin": ""},
    {"origin": "http://[::"},
    {"origin": "http://localhost:1"},  # another program of this machine
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]


@pytest.mark.proves("foreign-page")
@pytest.mark.parametrize("headers", FOREIGN)
async def test_a_page_of_another_site_changes_nothing_here(headers: dict[str, str]) -> None:
    async with (
        start(OK, LOCAL) as running,
        httpx.AsyncClient(base_url=running.url, headers=headers, timeout=PATIENCE_S) as client,
    ):
        answers = [
            await client.post("/v1/pipeline", json={"inputs": 1}),
            await client.post("/v1/pipeline", files={"a": b"x"}),
            await client.post("/v1/audio/transcriptions", files={"file": b"x"}),
            await client.delete("/v1/requests/r-1"),
        ]
    assert [answer.status_code for answer in answers] == [403] * 4
    assert {answer.json()["error"]["code"] for answer in answers} == {"unauthorized"}
    assert running.manager.handles == []


async def test_with_a_key_no_origin_is_asked_for() -> None:
    settings = msgspec.structs.replace(LOCAL, api_keys=ApiKeys(("k",)))
    headers = {"origin": "https://app.example", "authorization": "Bearer k", "host": "models.example"}
    async with start(OK, settings) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        assert (await client.post("/v1/pipeline", json={"inputs": 1}, headers=headers)).status_code == 200


@pytest.mark.proves("foreign-page")
@pytest.mark.parametrize(
    ("host", "passes"),
    [
        ("localhost", True),
        ("LOCALHOST.:9000", True),
        ("127.0.0.1:8000", True),
        ("127.1.2.3", True),
        ("[::1]:8000", True),
        ("me.localhost:8000", True),
        ("models.lan:8000", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("192.168.0.2:8000", False),
        ("[", False),
        ("[::1", True),
        ("[fe80::1]", False),
        ("localhost:8000@evil.example", True),  # no browser sends it
        ("", False),
        ("x" * 1000, False),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_a_name_that_was_made_to_point_here_is_refused(host: str, passes: bool, method: str) -> None:
    path = {"GET": "/v1/models", "POST": "/v1/pipeline", "DELETE": "/v1/requests/none"}[method]
    body = b'{"inputs": 1}' if method == "POST" else None
    async with start(OK, LOCAL) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        answer = await client.request(method, path, content=body, headers={**JSON, "host": host})
    assert (answer.status_code != 403) is passes
    if not passes:
        assert answer.json()["error"]["param"] == "host"


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:8000", "localhost:8000"),
        ("http://LOCALHOST", "localhost"),
        ("https://localhost", "localhost:443"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("http://models.lan", "localhost:8000"),
        ("https://models.lan:8443", "localhost:8000"),
        ("http://localhost.:8000", "localhost.:8000"),
        ("http://models.lan.", "localhost:8000"),
    ],
)
async def test_pages_of_this_origin_and_of_named_hosts_may_ask(origin: str, host: str) -> None:
    headers = {"origin": origin, "host": host}
    async with (
        start(OK, LOCAL) as running,
        httpx.AsyncClient(base_url=running.url, headers=headers, timeout=PATIENCE_S) as client,
    ):
        assert (await client.post("/v1/pipeline", json={"inputs": 1})).status_code == 200


async def test_where_it_is_served_to_others_any_name_of_it_will_do() -> None:
    async with start(OK, ALL) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        headers = {"host": "pipeline.models.svc.cluster.local:8000"}
        assert (await client.post("/v1/pipeline", json={"inputs": 1}, headers=headers)).status_code == 200


async def test_the_openai_client_is_no_browser() -> None:
    async with start(OK, LOCAL) as running:
        async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
            chat = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
            heard = await client.audio.transcriptions.create(model="m", file=("a.wav", b"RIFF"))
    assert chat.choices[0].message.content == heard.text == "ok"
