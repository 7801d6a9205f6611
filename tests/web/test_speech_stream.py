"""`/v1/audio/speech/stream` over a real socket, by the client of `websockets`: a sentence sounds once it is whole."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import soundfile
import websockets

from stage_runtime.errors import RequestError
from stage_runtime.web.exchanges.memory_budget import MemoryBudget
from stage_runtime.web.settings import WebSettings
from stage_runtime.web.spoken.script import MAX_CHARS, MAX_UTTERANCES, Script, Sentence
from stage_runtime.web.spoken.spoken_messages import InputDone, InputText, SpeechConfig
from stage_runtime.wire.values import Audio
from tests.web import scripted_manager
from tests.web.running import ALL, PATIENCE_S, Running, start
from tests.web.scripted_manager import ScriptedHandle, chunk, play

SOUND = Audio(np.full(2400, 0.5, np.float32), 24_000)
SPOKEN = play(chunk(SOUND), chunk(SOUND, index=1))
PCM = {"type": "session.config", "response_format": "pcm", "stream_audio": True}


class Speaking:
    """A connection, and what it was sent."""

    def __init__(self, connection: websockets.ClientConnection, running: Running) -> None:
        self.connection = connection
        self.running = running
        self.sounds: list[bytes] = []

    async def send(self, *given: Any) -> None:
        for message in given:
            await self.connection.send(
                message if isinstance(message, str | bytes) else msgspec.json.encode(message).decode()
            )

    async def say(self, *pieces: str) -> None:
        await self.send(*({"type": "input.text", "text": piece} for piece in pieces))

    async def until(self, type: str) -> dict[str, Any]:
        """Read up to a message of a type."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self.connection.recv()
                if isinstance(message, bytes):
                    self.sounds.append(message)
                    continue
                read: dict[str, Any] = msgspec.json.decode(message)
                if read["type"] == type:
                    return read

    async def closed(self) -> int | None:
        async with asyncio.timeout(PATIENCE_S):
            await self.connection.wait_closed()
        return self.connection.close_code

    def texts(self) -> list[str]:
        return [handle.request.inputs["text"] for handle in self.running.manager.handles]


@asynccontextmanager
async def speaking(
    script: scripted_manager.Script = SPOKEN,
    settings: WebSettings = ALL,
    *,
    cap: int = 8,
    budget: MemoryBudget | None = None,
) -> AsyncIterator[Speaking]:
    async with start(script, settings, cap=cap, budget=budget) as running:
        url = f"{running.url.replace('http', 'ws')}/v1/audio/speech/stream"
        async with websockets.connect(url, max_size=None) as connection:
            yield Speaking(connection, running)


async def test_the_first_sentence_sounds_before_the_text_ends() -> None:
    async with speaking() as one:
        await one.send({**PCM, "voice": "amy", "speed": 2, "seed": 7, "instructions": "kindly"})
        await one.say("The first sen", "tence is 1.", "5 long. And the sec")
        begun = await one.until("audio.start")
        assert begun["sentence_text"] == "The first sentence is 1.5 long."
        assert (begun["utterance_index"], begun["sentence_index"], begun["sample_rate"]) == (0, 0, 24_000)
        done = await one.until("audio.done")
        assert (done["total_bytes"], done["error"]) == (9600, False)
        assert [len(piece) for piece in one.sounds] == [4800, 4800]
        request = one.running.manager.last.request
        assert request.id == begun["request_id"]
        assert (request.kind, request.modalities, request.stream) == ("speech", ["audio"], True)
        assert request.inputs == {"text": begun["sentence_text"], "voice": "amy", "format": "pcm", "speed": 2.0}
        assert request.params == {"instructions": "kindly", "seed": 7}
        await one.say("ond")
        await one.send({"type": "input.done"})
        assert (await one.until("session.done")) == {"type": "session.done", "utterance_index": 0, "total_sentences": 2}
        assert one.texts() == ["The first sentence is 1.5 long.", "And the second"]


async def test_a_connection_speaks_several_utterances_and_closes_when_all_is_spoken() -> None:
    async with speaking() as one:
        await one.send({"type": "session.config"})
        await one.say("One.")
        await one.send({"type": "input.done"}, {"type": "input.done"})
        await one.send({"type": "session.config", "split_granularity": "clause", "response_format": "flac"})
        await one.say("Two, three")
        await one.send({"type": "session.close"})
        ends = [await one.until("session.done") for _ in range(3)]
        assert [end["total_sentences"] for end in ends] == [1, 0, 2]
        assert await one.closed() == 1000
        assert one.texts() == ["One.", "Two,", "three"]
    assert [sound[:4] for sound in one.sounds] == [b"RIFF", b"fLaC", b"fLaC"]
    for sound in one.sounds:  # a file for each sentence, with its right length
        samples, rate = soundfile.read(io.BytesIO(sound))
        assert (len(samples), rate) == (4800, 24_000)


async def test_nothing_is_split_where_the_client_asks_for_that() -> None:
    async with speaking() as one:
        await one.send({**PCM, "split_granularity": "none"})
        await one.say("One. Two. ", "Three.")
        await one.send({"type": "input.done"})
        await one.until("session.done")
        assert one.texts() == ["One. Two. Three."]


async def test_a_sentence_that_fails_is_named_and_the_next_one_sounds() -> None:
    async def script(handle: ScriptedHandle) -> AsyncIterator[Any]:
        if "bad" in handle.request.inputs["text"]:
            raise RequestError("stage_failed", "the stage broke", stage="talk")
        yield chunk(SOUND)

    async with speaking(script) as one:
        await one.send(PCM)
        await one.say("Good. A bad one. Good again. ")
        await one.send({"type": "input.done"})
        error = await one.until("error")
        assert (error["utterance_index"], error["sentence_index"]) == (0, 1)
        assert error["message"] == "the stage broke"
        assert (error["error"]["code"], error["error"]["stage"]) == ("stage_failed", "talk")
        assert (await one.until("audio.done"))["error"] is True
        assert (await one.until("session.done"))["total_sentences"] == 3
        assert len(one.sounds) == 2


BAD: list[tuple[Any, str, str]] = [
    ("{", "invalid_request", "not JSON"),
    ("[]", "invalid_request", "JSON object"),
    (b"{}", "invalid_request", "binary"),
    ({"type": "input.txt"}, "invalid_request", "input.text"),
    ({"type": "input.text"}, "invalid_request", "text"),
    ({"type": "input.text", "text": 3}, "invalid_request", "text"),
    ({"type": "session.config", "voise": "amy"}, "invalid_request", "did you mean 'voice'"),
    ({"type": "session.config", "speed": 9}, "invalid_request", "speed"),
    ({"type": "session.config", "response_format": "aac"}, "invalid_request", "'aac' is not available"),
    ({"type": "input.text", "text": "a" * (MAX_CHARS + 1)}, "too_large", "wait to be spoken"),
    ({"type": "input.text", "text": "a" * (128 << 10)}, "too_large", "characters"),
]


async def test_what_cannot_be_read_is_named_and_the_connection_lives_on() -> None:
    async with speaking() as one:
        await one.send(PCM)
        for message, code, words in BAD:
            await one.send(message)
            error = await one.until("error")
            assert error["error"]["code"] == code, str(message)[:80]
            assert words in error["message"]
        await one.say("Well.")
        await one.send({"type": "input.done"})
        assert (await one.until("session.done"))["total_sentences"] == 1
        assert one.texts() == ["Well."]


async def test_text_is_refused_before_a_configuration_and_a_configuration_inside_of_an_utterance() -> None:
    async with speaking() as one:
        await one.say("Who")
        assert "expected a session.config first" in (await one.until("error"))["message"]
        await one.send(PCM)
        await one.say("An utterance")
        await one.send({**PCM, "voice": "joe"})
        assert "an utterance has begun" in (await one.until("error"))["message"]
        await one.send({"type": "session.close"})
        await one.say("Late")
        await one.until("session.done")
        assert one.texts() == ["An utterance"]
        assert one.running.manager.last.request.inputs["voice"] is None


def test_text_that_waits_is_bounded_and_what_is_spoken_makes_room() -> None:
    script = Script()
    script.take(SpeechConfig())
    script.take(InputText(text="First. " + "a" * (MAX_CHARS - 107)))
    with pytest.raises(RequestError, match="wait to be spoken") as refused:
        script.take(InputText(text="b" * 200))
    assert refused.value.code == "too_large"
    spoken = script.next()
    while isinstance(spoken, Sentence):
        spoken = script.next()
    script.take(InputText(text="b" * (MAX_CHARS - script.waiting_chars)))
    assert script.waiting_chars == MAX_CHARS
    script.take(InputDone())
    for _ in range(MAX_UTTERANCES - 1):
        script.take(InputDone())
    with pytest.raises(RequestError, match="utterances wait"):
        script.take(InputDone())
    said = ""
    while (spoken := script.next()) is not None:
        said += spoken.text if isinstance(spoken, Sentence) else ""
    assert said.endswith("b" * 200)
    assert (script.waiting_chars, script.idle) == (0, True)


async def test_a_text_that_is_spoken_takes_no_memory_of_others() -> None:
    budget = MemoryBudget(1 << 20)
    async with speaking(budget=budget) as one:
        await one.send(PCM, {"type": "input.text", "text": "A sentence to speak."}, {"type": "input.done"})
        await one.until("session.done")
        assert budget.held_nbytes == 0


async def test_a_sentence_without_a_place_is_refused_by_its_error_and_later_ones_are_spoken() -> None:
    async with speaking(cap=0) as one:
        await one.send(PCM)
        await one.say("No room. ", "Now")
        assert (await one.until("error"))["error"]["code"] == "rate_limited"
        one.running.manager.cap = 1
        await one.send({"type": "input.done"})
        await one.until("session.done")
        assert one.texts() == ["Now"]


async def test_a_client_that_leaves_ends_its_sentence_at_every_stage() -> None:
    gate = asyncio.Event()
    async with speaking(play(chunk(SOUND), gate)) as one:
        await one.send(PCM)
        await one.say("First. Second. Third. ")
        await one.until("audio.start")
        handle = one.running.manager.last
        await one.connection.close()
        async with asyncio.timeout(PATIENCE_S):
            await handle.ended.wait()
        assert (handle.outcome, one.running.manager.in_flight) == ("cancelled", {})
        assert one.texts() == ["First."]


async def test_a_client_that_does_not_listen_holds_its_sound_at_the_stages() -> None:
    piece = chunk(Audio(np.zeros(1 << 18, np.float32), 24_000))
    async with speaking(play(*[piece] * 64)) as slow:
        slow.connection.transport.pause_reading()
        await slow.send(PCM)
        await slow.say("First. Second. Third. ")
        url = f"{slow.running.url.replace('http', 'ws')}/v1/audio/speech/stream"
        async with websockets.connect(url, max_size=None) as connection:
            other = Speaking(connection, slow.running)
            await other.send(PCM, {"type": "input.done"})
            await other.until("session.done")
        assert slow.running.manager.handles[0].pulled < 64
        slow.connection.transport.abort()
        async with asyncio.timeout(PATIENCE_S):
            await slow.running.manager.handles[0].ended.wait()
        assert slow.running.manager.handles[0].outcome == "cancelled"


async def test_a_draining_server_lets_an_utterance_end() -> None:
    gate = asyncio.Event()
    async with speaking(play(chunk(SOUND), gate)) as one:
        await one.send(PCM)
        await one.say("First. Sec")
        await one.until("audio.start")
        draining = asyncio.create_task(one.running.server.drain(quiet_s=0.0))
        gate.set()
        await one.say("ond.")
        await one.send({"type": "input.done"})
        assert (await one.until("session.done"))["total_sentences"] == 2
        assert await one.closed() == 1001
        async with asyncio.timeout(PATIENCE_S):
            await draining


async def test_a_pipeline_that_serves_no_speech_opens_no_socket() -> None:
    settings = msgspec.structs.replace(ALL, serves=("chat",))
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with speaking(settings=settings):
            pass
    assert refused.value.response.status_code == 404
