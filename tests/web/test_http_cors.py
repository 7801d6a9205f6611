"""Pages of the hosts that `OMNI_HTTP_HOSTS` names: their browsers ask first, and hide answers without our headers."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.errors import RequestError
from stage_runtime.web.exchanges.apikeys import ApiKeys
from stage_runtime.web.settings import WebSettings
from stage_runtime.wire.values import Text
from tests.web.running import ALL, PATIENCE_S, start
from tests.web.scripted_manager import Script, chunk, play

OK = play(ResultEvent(stage="talk", data=Text("ok")))
OPEN = msgspec.structs.replace(ALL, hosts=("ui.example",))
KEYED = msgspec.structs.replace(OPEN, api_keys=ApiKeys(("k",)))
LOCAL = msgspec.structs.replace(OPEN, local=True)
PAGE = "https://ui.example:8443"
ASKS = {"origin": PAGE, "access-control-request-method": "POST"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


async def answer(
    method: str, path: str, headers: dict[str, str], settings: WebSettings, *, script: Script = OK, **body: Any
) -> httpx.Response:
    async with start(script, settings) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
            return await client.request(method, path, headers=headers, **body)


def cors(given: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in given.headers.items() if name.startswith("access-control-")}


@pytest.mark.parametrize("settings", [OPEN, KEYED, LOCAL], ids=["open", "with keys", "on loopback"])
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("DELETE", "/v1/requests/r")]
)
async def test_a_browser_that_asks_for_a_listed_page_is_answered_before_a_key_is_needed(
    settings: WebSettings, method: str, path: str
) -> None:
    wanted = "Authorization, content-type,x-stainless-lang, X-Stainless-Retry-Count,x-evil,x-stainless-(,x-stainless-"
    asks = {**ASKS, "access-control-request-method": method, "access-control-request-headers": wanted}
    given = await answer("OPTIONS", path, asks, settings)
    assert (given.status_code, given.content) == (204, b"")
    assert given.headers["vary"] == "Origin"
    assert "content-length" not in given.headers
    headers = cors(given)
    allowed = headers.pop("access-control-allow-headers").split(", ")
    assert {"authorization", "content-type", "x-request-id", "x-request-timeout"} <= set(allowed)
    assert [name for name in allowed if "stainless" in name] == ["x-stainless-lang", "x-stainless-retry-count"]
    assert "x-evil" not in allowed
    assert headers == {
        "access-control-allow-origin": PAGE,
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-expose-headers": "x-request-id, retry-after, x-should-retry, idempotent-replayed",
        "access-control-max-age": "7200",
    }


@pytest.mark.parametrize("settings", [OPEN, KEYED], ids=["open", "with keys"])
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "", "https://ui.example.evil.example", "http://[::"]
)
async def test_a_page_that_is_not_listed_gets_no_header(settings: WebSettings, origin: str) -> None:
    preflight = await answer("OPTIONS", "/v1/chat/completions", {**ASKS, "origin": origin}, settings)
    seen = await answer("GET", "/v1/models", {"origin": origin, "authorization": "Bearer k"}, settings)
    assert (cors(preflight), cors(seen)) == ({}, {})
    assert preflight.status_code != 204
    assert "vary" not in seen.headers


SHOWN = {
    "access-control-allow-origin": PAGE,
    "access-control-expose-headers": "x-request-id, retry-after, x-should-retry, idempotent-replayed",
}


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/chat/completions", CHAT, 200),
        ("POST", "/v1/chat/completions", {**CHAT, "stream": True}, 200),
        ("POST", "/v1/chat/completions", {"messages": []}, 400),
        ("GET", "/v1/models", None, 200),
        ("GET", "/v1/nothing", None, 404),
        ("PUT", "/v1/models", None, 405),
        ("GET", "/openapi.json", None, 200),
    ],
)
async def test_a_listed_page_may_read_every_answer(
    method: str, path: str, body: dict[str, Any] | None, status: int
) -> None:
    headers = {"origin": PAGE, "authorization": "Bearer k"}
    given = await answer(method, path, headers, KEYED, json=body)
    assert (given.status_code, cors(given), given.headers["vary"]) == (status, SHOWN, "Origin")


@pytest.mark.parametrize(
    ("error", "status", "named"),
    [
        (RequestError("unavailable", "no"), 503, "retry-after"),
        (RequestError("stage_failed", "no"), 500, "x-should-retry"),
    ],
)
async def test_a_listed_page_may_read_when_to_come_again(error: RequestError, status: int, named: str) -> None:
    given = await answer("POST", "/v1/chat/completions", {"origin": PAGE}, OPEN, script=play(error), json=CHAT)
    assert (given.status_code, cors(given)) == (status, SHOWN)
    assert named in given.headers
    assert named in given.headers["access-control-expose-headers"]


async def test_a_listed_page_reads_that_its_key_is_wrong() -> None:
    given = await answer("POST", "/v1/chat/completions", {"origin": PAGE}, KEYED, json=CHAT)
    assert (given.status_code, cors(given)) == (401, SHOWN)


async def test_options_that_ask_for_nothing_are_no_preflight() -> None:
    given = await answer("OPTIONS", "/v1/models", {"origin": PAGE}, OPEN)
    assert given.status_code == 405


async def test_a_stream_that_fails_later_still_has_the_headers_of_its_head() -> None:
    script = play(chunk(Text("a")), RequestError("transport_failed", "lost"))
    given = await answer(
        "POST", "/v1/chat/completions", {"origin": PAGE}, OPEN, script=script, json={**CHAT, "stream": True}
    )
    assert cors(given) == SHOWN
