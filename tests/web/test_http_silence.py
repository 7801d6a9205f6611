"""Chats that asked for audio, of pipelines that make none."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.wire.values import Audio, Note, Text, ToolCall
from tests.web.running import ALL, PATIENCE_S, start
from tests.web.scripted_manager import Script, chunk, play
from tests.web.test_http_chat import frames

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = play(chunk(Text("hello")))
NONE = play(ResultEvent(stage="talk", data=None))
EMPTY = play(chunk(Audio(np.zeros(0, np.float32), 24_000)))
NO_SOUND = "no terminal stage gave an omni.Audio"


async def chat(script: Script, *modalities: str, stream: bool = False) -> httpx.Response:
    settings = msgspec.structs.replace(ALL, accepts=frozenset(["tools"]))
    async with (
        start(script, settings) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        return await client.post("/v1/chat/completions", json={**ASK, "modalities": modalities, "stream": stream})


@pytest.mark.parametrize("script", [TEXT, NONE], ids=["text", "nothing"])
@pytest.mark.parametrize("stream", [False, True])
async def test_audio_alone_that_nobody_made_fails_the_request(script: Script, stream: bool) -> None:
    answer = await chat(script, "audio", stream=stream)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["message"]) == (500, "stage_failed", NO_SOUND)


async def test_a_stream_that_has_begun_ends_with_the_error() -> None:
    answer = await chat(play(chunk(Note("voice", "amy")), chunk(Text("hello"), index=1)), "audio", stream=True)
    last = frames(answer.text)[-1]
    assert (answer.status_code, last["error"]["code"], last["error"]["message"]) == (200, "stage_failed", NO_SOUND)


@pytest.mark.parametrize("stream", [False, True])
async def test_where_text_was_asked_for_too_the_text_is_the_answer(stream: bool) -> None:
    answer = await chat(TEXT, "text", "audio", stream=stream)
    assert answer.status_code == 200
    if stream:
        choices = [one["choices"][0] for one in frames(answer.text)[:-1]]
        assert [one["delta"].get("content") for one in choices] == ["", "hello", None]
        assert choices[-1]["finish_reason"] == "stop"
    else:
        assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": "hello", "refusal": None}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_a_tool_is_an_answer_without_sound(stream: bool) -> None:
    answer = await chat(play(chunk(ToolCall("c1", "f", "{}"))), "audio", stream=stream)
    assert answer.status_code == 200
    assert '"name":"f"' in answer.text
    assert "error" not in answer.text


@pytest.mark.parametrize("text", ["🙂", "…", "\n", "   ", "?!", "***"])
@pytest.mark.parametrize("more", [{}, {"stream_format": "sse"}, {"response_format": "flac"}], ids=str)
@pytest.mark.parametrize("script", [NONE, EMPTY], ids=["nothing", "no samples"])
async def test_a_text_without_a_word_is_to_blame_for_the_missing_sound(
    text: str, more: dict[str, str], script: Script
) -> None:
    async with (
        start(script, ALL) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        answer = await client.post("/v1/audio/speech", json={"input": text, "voice": "amy", **more})
        words = await client.post("/v1/audio/speech", json={"input": f"{text} 7", "voice": "amy", **more})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", "input")
    assert (words.status_code, words.json()["error"]["code"]) == (500, "stage_failed")
