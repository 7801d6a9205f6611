"""Events of every stream are lines for clients that break them at U+0085, U+2028 and U+2029, as httpx does."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.errors import RequestError
from stage_runtime.wire.values import Note, Text, ToolCall
from tests.web.running import PATIENCE_S, start
from tests.web.scripted_manager import chunk, play

BREAKS = "a\u0085b\u2028c\u2029d\x0be\x0cf\x1cg\x1dh\x1ei\r\nj"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


async def lines(script: Any, path: str, **options: Any) -> list[str]:
    async with (
        start(script) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client,
        client.stream("POST", path, **options) as answer,
    ):
        return [line async for line in answer.aiter_lines() if line]


def data(found: list[str]) -> list[Any]:
    assert not [line for line in found if not line.startswith(("data: ", "event: "))]
    return [json.loads(line[len("data: ") :]) for line in found if line.startswith("data: ") and line != "data: [DONE]"]


async def test_a_chats_events_are_one_line_each() -> None:
    call = ToolCall("c", BREAKS, json.dumps({BREAKS: BREAKS}, ensure_ascii=False))
    script = play(chunk([Text(BREAKS), Note("n", {BREAKS: BREAKS}), call]), ResultEvent(stage="talk", data=None))
    found = data(await lines(script, "/v1/chat/completions", json=CHAT))
    deltas = [choice["delta"] for one in found for choice in one["choices"]]
    assert "".join(one.get("content") or "" for one in deltas) == BREAKS
    assert [one["notes"][0]["value"] for one in found if "notes" in one] == [{BREAKS: BREAKS}]
    [function] = [one["tool_calls"][0]["function"] for one in deltas if "tool_calls" in one]
    assert (function["name"], json.loads(function["arguments"])) == (BREAKS, {BREAKS: BREAKS})


async def test_a_pipelines_events_are_two_lines_each() -> None:
    script = play(chunk({BREAKS: BREAKS}), ResultEvent(stage="talk", data=BREAKS))
    found = data(await lines(script, "/v1/pipeline", json={"inputs": "x", "stream": True}))
    assert [one["data"] for one in found] == [{BREAKS: BREAKS}, BREAKS]


async def test_a_transcriptions_events_are_one_line_each() -> None:
    script = play(chunk(Text(BREAKS)), ResultEvent(stage="talk", data=None))
    given = {"data": {"stream": "true"}, "files": {"file": ("a.wav", b"RIFF", "audio/wav")}}
    found = data(await lines(script, "/v1/audio/transcriptions", **given))
    assert found[0]["delta"] == found[-1]["text"] == BREAKS


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/pipeline", {"inputs": "x", "stream": True})]
)
async def test_an_error_inside_a_stream_is_one_line(path: str, body: dict[str, Any]) -> None:
    script = play(chunk(Text("x")), RequestError("stage_failed", BREAKS))
    found = data(await lines(script, path, json=body))
    assert found[-1]["error"]["message"] == BREAKS
