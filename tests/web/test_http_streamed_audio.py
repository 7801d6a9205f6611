"""Streamed sound as clients put it together: each piece decoded, or all base64 joined and decoded at the end."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI

from stage_runtime.web.translating.audio.base64pieces import Base64Pieces
from stage_runtime.wire.values import Audio, Text
from tests.thoroughness import examples
from tests.web.running import PATIENCE_S, start
from tests.web.scripted_manager import chunk, play
from tests.web.test_http_chat import frames

USER: Any = [{"role": "user", "content": "hi"}]
ODD = (np.arange(6502) % 200 / 400).astype(np.float32)  # 13,004 bytes: neither a multiple of 3 nor of 6
PIECES = [Audio(ODD[:3001], 24_000), Audio(ODD[3001:3002], 24_000), Audio(ODD[3002:], 24_000)]
PCM = np.round(ODD * 32767).astype("<i2").tobytes()
VOICE = play(chunk(Text("Hel")), *(chunk(one, stage="voice", index=at) for at, one in enumerate(PIECES)))
AUDIO: Any = {
    "model": "any",
    "messages": USER,
    "modalities": ["text", "audio"],
    "audio": {"voice": "a", "format": "pcm16"},
}


def unpadded_but_the_last(data: list[str]) -> bool:
    return not any(piece.endswith("=") for piece in data[:-1])


async def test_a_chats_audio_may_be_joined_before_it_is_decoded() -> None:
    async with start(VOICE) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        answer = await client.post("/v1/chat/completions", json={**AUDIO, "stream": True})
    chunks = [one["choices"][0]["delta"] for one in frames(answer.text)[:-1]]
    deltas = [delta["audio"] for delta in chunks if "audio" in delta]
    data = [delta["data"] for delta in deltas if "data" in delta]
    assert len(data) > 2
    assert unpadded_but_the_last(data)
    whole = base64.b64decode("".join(data))
    np.testing.assert_allclose(np.frombuffer(whole, "<i2"), np.frombuffer(PCM, "<i2"), atol=1)
    assert b"".join(map(base64.b64decode, data)) == whole
    assert all(len(base64.b64decode(piece)) % 2 == 0 for piece in data)  # whole samples, for those who play each
    assert ["id" in delta for delta in deltas] == [True] + [False] * (len(deltas) - 1)


async def test_the_official_clients_own_stream_has_the_whole_sound_and_one_id() -> None:
    async with start(VOICE) as running:
        async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            async with client.chat.completions.stream(**AUDIO) as stream:
                final = await stream.get_final_completion()
    audio = final.choices[0].message.audio
    assert audio is not None
    assert len(base64.b64decode(audio.data)) == len(PCM)
    assert (audio.id, audio.transcript) == (f"audio-{final.id}", "Hel")


@pytest.mark.parametrize("format", ["pcm", "wav", "mp3", "opus"])
async def test_speech_as_events_may_be_joined_before_it_is_decoded(format: str) -> None:
    body = {"input": "hi", "response_format": format, "stream_format": "sse"}
    async with start(VOICE) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        answer = await client.post("/v1/audio/speech", json=body)
    *deltas, done, mark = frames(answer.text)
    assert (done["type"], mark) == ("speech.audio.done", "[DONE]")
    data = [delta["audio"] for delta in deltas]
    assert unpadded_but_the_last(data)
    assert base64.b64decode("".join(data)) == b"".join(map(base64.b64decode, data))
    assert len(base64.b64decode("".join(data))) > 1000


@settings(max_examples=examples(100), deadline=None)
@given(given=st.lists(st.binary(max_size=20), max_size=6), rest=st.binary(max_size=20))
def test_any_pieces_are_the_whole_joined_and_one_by_one(given: list[bytes], rest: bytes) -> None:
    pieces = Base64Pieces()
    data = [*(pieces.add(one) for one in given), pieces.finish(rest)]
    whole = b"".join([*given, rest])
    assert base64.b64decode("".join(data), validate=True) == whole
    assert b"".join(base64.b64decode(one, validate=True) for one in data) == whole
    assert all(len(base64.b64decode(one)) % 6 == 0 for one in data[:-1])
