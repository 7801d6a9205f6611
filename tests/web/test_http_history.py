"""Earlier answers that clients send back: what was spoken, refused or called is part of the conversation."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from openai import AsyncOpenAI

from stage_runtime.wire.values import Audio, Text
from tests.web.running import ALL, PATIENCE_S, start
from tests.web.scripted_manager import chunk, play

USER: Any = [{"role": "user", "content": "hi"}]
OK = play(chunk(Text("ok")))
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NO_AUDIO = "messages[1].audio.id: no audio is kept here; send its transcript as content"


async def sent_back(message: dict[str, Any], accepts: frozenset[str] = frozenset()) -> Any:
    """The part of the history that the stages get of it, or the error."""
    settings = msgspec.structs.replace(ALL, accepts=accepts)
    async with start(OK, settings) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        body = {"messages": [*USER, {"role": "assistant", **message}, *USER]}
        answer = await client.post("/v1/chat/completions", json=body)
        if answer.status_code == 200:
            return running.manager.last.request.inputs["messages"][1]["content"]
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": None, "audio": {"id": "a", "data": "", "expires_at": 1, "transcript": "I am Bob"}}, "I am Bob"),
        ({"audio": {"transcript": "I am Bob"}}, "I am Bob"),
        ({"content": "", "audio": {"id": "a", "transcript": "I am Bob"}}, "I am Bob"),
        ({"content": "Bob", "audio": {"id": "a", "transcript": "I am Bob"}}, "Bob"),
        ({"content": "Bob", "audio": {"id": "a"}}, "Bob"),
        ({"content": "Bob", "audio": None}, "Bob"),
        ({"content": None, "audio": {"id": "a", "transcript": ""}}, ""),  # it spoke without words
        ({"content": None, "refusal": "I cannot"}, "I cannot"),
        ({"content": "", "refusal": None}, ""),
        ({"content": None}, ""),  # a stream that was stopped before its first word
        ({"content": None, "tool_calls": [], "refusal": None}, ""),
        ({"audio": {}}, ""),
    ],
)
async def test_what_was_said_in_any_way_reaches_the_stages_as_text(message: dict[str, Any], words: str) -> None:
    assert await sent_back(message) == [{"type": "text", "text": words}]


@pytest.mark.parametrize(
    ("message", "param", "problem"),
    [
        ({"audio": {"id": "audio_1"}}, "messages[1].audio.id", NO_AUDIO),
        ({"content": None, "audio": {"id": "audio_1", "data": "AAAA"}}, "messages[1].audio.id", NO_AUDIO),
        ({"content": "", "audio": {"id": "audio_1"}}, "messages[1].audio.id", NO_AUDIO),
        ({"content": [], "audio": {"id": "audio_1"}}, "messages[1].audio.id", NO_AUDIO),
        ({"tool_calls": [CALL], "audio": {"id": "audio_1"}}, "messages[1].audio.id", NO_AUDIO),
    ],
)
async def test_a_message_of_sound_alone_is_refused_and_not_forgotten(
    message: dict[str, Any], param: str, problem: str
) -> None:
    assert await sent_back(message, frozenset(["tools"])) == (400, param, problem)


async def test_a_call_of_a_tool_needs_no_words() -> None:
    assert await sent_back({"content": None, "tool_calls": [CALL]}, frozenset(["tools"])) == []


async def test_a_spoken_answer_of_this_server_may_be_sent_back_as_history() -> None:
    script = play(chunk(Text("I am Bob")), chunk(Audio(np.zeros(240, np.float32), 24_000), stage="voice"))
    async with start(script) as running:
        async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            options: Any = {"model": "any", "modalities": ["audio"], "audio": {"voice": "a", "format": "wav"}}
            first = await client.chat.completions.create(messages=USER, **options)
            again: Any = [*USER, first.choices[0].message, *USER]
            await client.chat.completions.create(messages=again, **options)
    assert running.manager.last.request.inputs["messages"][1] == {
        "role": "assistant",
        "content": [{"type": "text", "text": "I am Bob"}],
    }
