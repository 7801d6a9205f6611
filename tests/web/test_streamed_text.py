"""`POST /v1/audio/speech` with a text that still comes: a sentence sounds before the body ends. h11, httpx and curl."""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode

import h11
import httpx
import msgspec
import numpy as np
import pytest
import soundfile

from stage_runtime.errors import RequestError
from stage_runtime.web.exchanges.memory_budget import MemoryBudget
from stage_runtime.web.settings import WebSettings
from stage_runtime.web.spoken.script import MAX_CHARS
from stage_runtime.wire.values import Audio, Usage
from tests.web import scripted_manager
from tests.web.running import ALL, PATIENCE_S, Running, start
from tests.web.scripted_manager import ScriptedHandle, chunk, play

SOUND = Audio(np.full(2400, 0.5, np.float32), 24_000)
PCM_NBYTES = 4800
SPOKEN = play(chunk(SOUND))
PCM = {"response_format": "pcm"}


class Writer:
    """A client that writes its body and reads its answer at the same time, by h11."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, running: Running) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(our_role=h11.CLIENT)
        self.running = running

    def send(self, *events: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        for event in events:
            self._writer.write(self._http.send(event) or b"")

    def write(self, *pieces: str | bytes) -> None:
        for piece in pieces:
            self.send(h11.Data(data=piece.encode() if isinstance(piece, str) else piece))

    def end(self) -> None:
        self.send(h11.EndOfMessage())

    async def event(self) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(1 << 16))
            return event

    async def head(self) -> h11.Response:
        while not isinstance(event := await self.event(), h11.Response):
            pass
        return event

    async def sound(self, nbytes: int) -> bytes:
        got = b""
        while len(got) < nbytes:
            got += bytes((await self.event()).data)
        return got

    async def rest(self) -> bytes:
        got = b""
        while not isinstance(event := await self.event(), h11.EndOfMessage):
            got += bytes(event.data)
        return got

    def vanish(self) -> None:
        self._writer.transport.abort()

    def texts(self) -> list[str]:
        return [handle.request.inputs["text"] for handle in self.running.manager.handles]


@asynccontextmanager
async def writing(
    script: scripted_manager.Script = SPOKEN,
    settings: WebSettings = ALL,
    *,
    cap: int = 8,
    budget: MemoryBudget | None = None,
    headers: dict[str, str] | None = None,
    **query: Any,
) -> AsyncIterator[Writer]:
    async with start(script, settings, cap=cap, budget=budget) as running:
        host = running.url.removeprefix("http://")
        reader, writer = await asyncio.open_connection(*host.split(":"))
        made = Writer(reader, writer, running)
        sent = {"host": host, "content-type": "text/plain; charset=utf-8", "transfer-encoding": "chunked"}
        target = f"/v1/audio/speech?{urlencode(PCM | query)}"
        made.send(h11.Request(method="POST", target=target, headers=list((sent | (headers or {})).items())))
        try:
            yield made
        finally:
            made.vanish()


async def refused(one: Writer) -> tuple[int, dict[str, Any]]:
    status = (await one.head()).status_code
    return status, msgspec.json.decode(await one.rest())["error"]


async def test_the_first_sentence_sounds_while_the_text_is_still_written() -> None:
    given: dict[str, Any] = {"voice": "amy", "speed": "2", "seed": "7", "instructions": "kindly"}
    async with writing(headers={"x-request-id": "mine"}, **given) as one:
        one.write("The first sen", "tence is 1.", "5 long. And the sec")
        head = await one.head()
        assert (head.status_code, dict(head.headers)[b"content-type"]) == (200, b"audio/pcm")
        assert len(await one.sound(PCM_NBYTES)) == PCM_NBYTES
        assert one.texts() == ["The first sentence is 1.5 long."]
        request = one.running.manager.last.request
        assert (request.id, request.kind, request.modalities, request.stream) == ("mine.0", "speech", ["audio"], True)
        assert request.inputs == {"text": one.texts()[0], "voice": "amy", "format": "pcm", "speed": 2.0}
        assert request.params == {"instructions": "kindly", "seed": 7}
        one.write("ond: ", "é".encode()[:1], "é".encode()[1:])  # a letter of two bytes, cut
        one.end()
        assert len(await one.rest()) == PCM_NBYTES
        assert one.texts()[1:] == ["And the second: é"]
        assert [handle.outcome for handle in one.running.manager.handles] == ["completed"] * 2


async def test_all_sentences_are_one_file_and_events_tell_the_tokens_of_all() -> None:
    script = play(chunk([SOUND, Usage(2, 3)]))
    async with start(script) as running, httpx.AsyncClient(timeout=PATIENCE_S) as client:

        async def text() -> AsyncIterator[bytes]:
            for piece in (b"One. Two", b", three. ", b"Four"):
                yield piece

        async def ask(**query: str) -> httpx.Response:
            url = f"{running.url}/v1/audio/speech"
            return await client.post(url, params=query, headers={"content-type": "text/plain"}, content=text())

        answer = await ask(response_format="flac")
        samples, rate = soundfile.read(io.BytesIO(answer.content))
        assert (answer.status_code, len(samples), rate) == (200, 3 * 2400, 24_000)
        assert (await ask()).headers["content-type"] == "audio/mpeg"
        assert len((await ask(response_format="pcm", split_granularity="clause")).content) == 4 * PCM_NBYTES
        assert len((await ask(response_format="pcm", split_granularity="none")).content) == PCM_NBYTES
        lines = (await ask(response_format="pcm", stream_format="sse")).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        *deltas, done = (msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-2])
        assert len(b"".join(base64.b64decode(one["audio"]) for one in deltas)) == 3 * PCM_NBYTES
        assert done["usage"] == {"input_tokens": 6, "output_tokens": 9, "total_tokens": 15}


async def test_curl_writes_what_a_program_says_and_hears_it_at_once() -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    async with start(SPOKEN) as running:
        url = f"{running.url}/v1/audio/speech?response_format=pcm"
        given = [curl, "-sNT", ".", "-X", "POST", "-H", "content-type: text/plain", url]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*given, stdin=pipe, stdout=pipe)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"The first. The sec")
        async with asyncio.timeout(PATIENCE_S):
            assert len(await process.stdout.readexactly(PCM_NBYTES)) == PCM_NBYTES
            process.stdin.write(b"ond.")
            process.stdin.close()
            assert len(await process.stdout.read()) == PCM_NBYTES
            assert await process.wait() == 0


BAD: list[tuple[dict[str, Any], dict[str, str], int, str, str]] = [
    ({"voise": "amy"}, {}, 400, "voise", "did you mean 'voice'"),
    ({"input": "hi"}, {}, 400, "input", "unknown parameter"),
    ({"speed": "9"}, {}, 400, "speed", "4"),
    ({"speed": "nan"}, {}, 400, "speed", "speed"),
    ({"response_format": "aac"}, {}, 400, "response_format", "'aac' is not available"),
    ({"voice": b"\xff"}, {}, 400, "", "not UTF-8"),
    ({}, {"content-type": "text/plain; charset=latin-1"}, 415, "content-type", "UTF-8"),
    ({}, {"content-encoding": "gzip"}, 415, "content-encoding", "uncompressed"),
    ({}, {"x-request-timeout": "soon"}, 400, "x-request-timeout", "seconds"),
]


@pytest.mark.parametrize(("query", "headers", "status", "param", "words"), BAD, ids=lambda one: str(one)[:30])
async def test_what_is_wrong_before_the_text_has_a_status_and_a_place(
    query: dict[str, Any], headers: dict[str, str], status: int, param: str, words: str
) -> None:
    async with writing(headers=headers, **query) as one:
        got, error = await refused(one)
        assert (got, error["code"], error["param"] or "") == (status, "invalid_request", param)
        assert words in error["message"]
        assert one.texts() == []


async def test_a_parameter_that_is_there_twice_is_refused() -> None:
    async with start(SPOKEN) as running, httpx.AsyncClient() as client:
        url = f"{running.url}/v1/audio/speech?voice=amy&voice=joe"
        answer = await client.post(url, content=b"Hi.", headers={"content-type": "text/plain"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "voice")


@pytest.mark.parametrize("text", [b"", b" \n ", b"...", b"\xff", b"\xc3"], ids=repr)
async def test_a_body_without_anything_to_pronounce_or_in_other_bytes_is_refused(text: bytes) -> None:
    async with writing() as one:
        if text:
            one.write(text)
        one.end()
        status, error = await refused(one)
        assert (status, error["code"]) == (400, "invalid_request")
        assert error["message"].startswith("the body: expected a text")
        assert one.texts() == []


async def test_no_room_is_told_before_the_text_is_read() -> None:
    async with writing(cap=0) as one:
        status, error = await refused(one)
        assert (status, error["code"]) == (429, "rate_limited")


def failing(at: int) -> scripted_manager.Script:
    """The sentence ``at`` fails; those before it sound."""

    async def script(handle: ScriptedHandle) -> AsyncIterator[Any]:
        if handle.request.id.endswith(f".{at}"):
            raise RequestError("stage_failed", "the stage broke", stage="talk")
        yield chunk(SOUND)

    return script


async def test_a_sentence_that_fails_first_has_a_status() -> None:
    async with writing(failing(0)) as one:
        one.write("One. Two.")
        status, error = await refused(one)
        assert (status, error["code"], error["stage"]) == (500, "stage_failed", "talk")


async def test_a_sentence_that_fails_later_tears_the_file_off() -> None:
    async with writing(failing(1)) as one:
        one.write("One. Two. Three.")
        assert (await one.head()).status_code == 200
        await one.sound(PCM_NBYTES)
        with pytest.raises(h11.RemoteProtocolError):
            await one.rest()
        assert one.texts() == ["One.", "Two."]


async def test_a_sentence_that_fails_later_is_an_event_of_a_stream() -> None:
    async with writing(failing(1), stream_format="sse") as one:
        one.write("One. Two. Three.")
        await one.head()
        events = (await one.rest()).decode().split("\n\n")
        error = msgspec.json.decode(events[-2].removeprefix("data: "))["error"]
        assert (error["code"], error["stage"]) == ("stage_failed", "talk")
        assert "data: [DONE]" not in events


async def test_a_writer_that_pauses_for_too_long_is_told() -> None:
    settings = msgspec.structs.replace(ALL, text_idle_s=0.05)
    async with writing(settings=settings) as one:
        one.write("A beginn")
        status, error = await refused(one)
        assert (status, error["code"]) == (408, "deadline")
        assert "0.05 s" in error["message"]


async def test_a_client_that_leaves_ends_its_sentence_at_every_stage() -> None:
    gate = asyncio.Event()
    async with writing(play(chunk(SOUND), gate)) as one:
        one.write("First. Second. Thi")
        await one.head()
        await one.sound(PCM_NBYTES)
        one.vanish()
        async with asyncio.timeout(PATIENCE_S):
            await one.running.manager.last.ended.wait()
        assert (one.running.manager.last.outcome, one.running.manager.in_flight) == ("cancelled", {})
        assert one.texts() == ["First."]


class Watched(MemoryBudget):
    """Tells the most that was held, and when it is nearly all that may wait."""

    most = 0

    def __init__(self) -> None:
        self.full = asyncio.Event()
        super().__init__(1 << 30)

    @property
    def held_nbytes(self) -> int:
        return self._held

    @held_nbytes.setter
    def held_nbytes(self, value: int) -> None:
        self._held, self.most = value, max(self.most, value)
        if value > MAX_CHARS - 8192:
            self.full.set()


async def test_a_fast_writer_is_held_back_and_all_of_its_text_is_spoken() -> None:
    budget, sentence, count = Watched(), "a" * 99 + ". ", 4 * MAX_CHARS // 101

    async def script(handle: ScriptedHandle) -> AsyncIterator[Any]:
        await budget.full.wait()
        yield chunk(Audio(np.zeros(1, np.float32), 24_000))

    async with writing(script, budget=budget) as one:
        one.write(*[sentence] * count)
        one.end()
        assert (await one.head()).status_code == 200
        assert len(await one.rest()) == 2 * count
        assert MAX_CHARS - 8192 < budget.most <= MAX_CHARS
        assert set(one.texts()) == {sentence.strip()}


async def test_an_uncut_text_is_bounded() -> None:
    async with writing(split_granularity="none") as one:
        one.write(*["a" * 4096] * (MAX_CHARS // 4096 + 1))
        status, error = await refused(one)
        assert (status, error["code"]) == (413, "too_large")
