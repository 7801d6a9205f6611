"""POST /v1/chat/completions over a real socket, as raw events: whole answers compared."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec

from stage_runtime.errors import RequestError
from stage_runtime.wire.values import Finish, Text, Usage
from tests.web.running import PATIENCE_S, start
from tests.web.scripted_manager import chunk, play

URL = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "say hi"}]}
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 1},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
HI = play(chunk(Text("Hi ")), chunk(Text("there"), index=1), chunk([Usage(3, 2, 1), Finish("length")], index=2))


def frames(text: str) -> list[Any]:
    """The data of every event of a stream; ``[DONE]`` as it stands."""
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else msgspec.json.decode(item) for item in data]


def chunk_of(frame: dict[str, Any]) -> dict[str, Any]:
    """A chunk without what all chunks share, after checking that."""
    assert frame["object"] == "chat.completion.chunk"
    assert frame["id"] == "r-1"
    assert frame["model"] == "org/hello"
    assert isinstance(frame["created"], int)
    return {key: value for key, value in frame.items() if key not in ("id", "object", "created", "model")}


def choice(delta: dict[str, Any], reason: str | None = None) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]


async def test_a_stream_is_role_texts_reason_usage_and_done() -> None:
    body = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
    async with start(HI) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        answer = await client.post(URL, json=body, headers={"x-request-id": "r-1"})
    *chunks, done = frames(answer.text)
    assert [chunk_of(frame) for frame in chunks] == [
        {"choices": choice({"role": "assistant", "content": ""}), "usage": None},
        {"choices": choice({"content": "Hi "}), "usage": None},
        {"choices": choice({"content": "there"}), "usage": None},
        {"choices": choice({}, "length"), "usage": None},
        {"choices": [], "usage": USAGE},
    ]
    assert done == "[DONE]"
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"] == "r-1"


async def test_an_answer_that_is_not_streamed_holds_text_usage_and_reason() -> None:
    async with start(HI) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        answer = await client.post(URL, json=ASK, headers={"x-request-id": "r-1"})
    body = answer.json()
    assert abs(body.pop("created") - 1.79e9) < 1e9
    assert body == {
        "id": "r-1",
        "object": "chat.completion",
        "model": "org/hello",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi there", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": USAGE,
    }


async def test_an_error_before_the_first_event_has_its_status_and_one_after_it_is_an_event_without_done() -> None:
    early = RequestError("stage_failed", "no", stage="think", hook="fn")
    late = RequestError("unavailable", "gone", stage="talk")
    body = {**ASK, "stream": True}
    async with start(play(early)) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        answer = await client.post(URL, json=body, headers={"x-request-id": "r-1"})
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    facts = {"message": "no", "type": "server_error", "code": "stage_failed", "param": None, "stage": "think"}
    assert answer.json() == {"error": {**facts, "request_id": "r-1", "hook": "fn"}}

    async with (
        start(play(chunk(Text("Hi ")), late)) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        answer = await client.post(URL, json=body, headers={"x-request-id": "r-1"})
    facts = {"message": "gone", "type": "server_error", "code": "unavailable", "param": None, "stage": "talk"}
    assert frames(answer.text)[-1] == {"error": {**facts, "request_id": "r-1"}}
    assert "[DONE]" not in answer.text
    assert running.manager.last.outcome == "unavailable"
