"""Every answer names its request, whoever made it: a route, the framework or the middleware."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from stage_runtime.web.exchanges.apikeys import ApiKeys
from tests.web.running import ALL, PATIENCE_S, start
from tests.web.scripted_manager import play

KEYED = msgspec.structs.replace(ALL, api_keys=ApiKeys(("k",)))
LOCAL = msgspec.structs.replace(ALL, local=True)
MAX_BODY = msgspec.structs.replace(ALL, max_body_bytes=4)


@pytest.mark.parametrize("given", ["mine-1", "ü", "", None])
@pytest.mark.parametrize(
    ("settings", "method", "path", "headers", "status"),
    [
        (KEYED, "POST", "/v1/chat/completions", {}, 401),
        (KEYED, "GET", "/v1/models", {}, 401),
        (LOCAL, "POST", "/v1/pipeline", {"origin": "http://evil.example"}, 403),
        (ALL, "POST", "/v1/nothing", {}, 404),
        (ALL, "GET", "/v1/requests/none", {}, 404),
        (ALL, "PUT", "/v1/pipeline", {}, 405),
        (MAX_BODY, "POST", "/v1/pipeline", {"content-type": "application/json"}, 413),
        (ALL, "GET", "/v1/models", {}, 200),
        (ALL, "GET", "/openapi.json", {}, 200),
    ],
)
async def test_every_answer_has_the_requests_id_or_one_that_was_made(
    settings: object, method: str, path: str, headers: dict[str, str], status: int, given: str | None
) -> None:
    sent = {name.encode(): value.encode() for name, value in headers.items()}
    if given is not None:
        sent[b"x-request-id"] = given.encode()
    async with start(play(), settings) as running:  # type: ignore[arg-type]
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
            answer = await client.request(method, path, headers=sent, content=b"x" * 5 if method == "POST" else None)
    assert answer.status_code == status
    found = answer.headers.get_list("x-request-id")
    assert len(found) == 1
    if given == "mine-1":
        assert found == [given]
    else:
        assert len(found[0]) > 20
    if status >= 400:
        assert answer.json()["error"]["request_id"] == found[0]


async def test_an_id_that_is_there_twice_is_none() -> None:
    async with start(play()) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        twice = [("x-request-id", "a"), ("x-request-id", "b")]
        answers = [await client.request(method, "/v1/models", headers=twice) for method in ("GET", "PUT")]
    assert [answer.status_code for answer in answers] == [200, 405]
    assert not {answer.headers["x-request-id"] for answer in answers} & {"a", "b"}
