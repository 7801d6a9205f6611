"""Codec processes: what they encode, what their deaths cost, and that they end with the coordinator."""

from __future__ import annotations

import asyncio
import io
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import soundfile

from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.errors import RequestError
from stage_runtime.web.sound import codec_messages, codec_session
from stage_runtime.web.sound.pool import SPARES, CodecPool
from stage_runtime.wire.values import Audio, Text
from tests.web.running import PATIENCE_S, start
from tests.web.scripted_manager import chunk, play

RATE = 24_000
TONE = (0.5 * np.sin(np.arange(RATE) / RATE * 2764)).astype(np.float32)
INSANE = [
    np.full(RATE, np.nan, np.float32),
    np.full(RATE, np.inf, np.float32),
    np.where(np.arange(RATE) % 7 == 0, -np.inf, TONE).astype(np.float32),
    np.full(RATE, 1e38, np.float32),
    np.full(RATE, 1e308, np.float64),
]
SPEECH = {"input": "hi"}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "modalities": ["text", "audio"],
    "audio": {"voice": "x", "format": "mp3"},
}


async def until(fact: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not fact():
            await asyncio.sleep(0.005)


def codec_processes(pool: CodecPool) -> list[psutil.Process]:
    return [] if pool.pid is None else psutil.Process(pool.pid).children()


async def encoded(pool: CodecPool, format: str, *pieces: Audio, whole: bool = False) -> bytes:
    with pool.encoder(format, whole=whole) as made:
        body = [await made.write(piece, stage="voice") for piece in pieces]
        return b"".join([*body, await made.finish()])


@pytest.fixture
async def pool() -> AsyncIterator[CodecPool]:
    async with CodecPool() as made:
        yield made


@pytest.mark.parametrize("format", ["mp3", "opus", "flac", "wav"])
@pytest.mark.parametrize("whole", [True, False])
async def test_a_sound_of_many_blocks_is_encoded_as_it_is(pool: CodecPool, format: str, whole: bool) -> None:
    minute = Audio(np.tile(TONE, 60), RATE)
    assert minute.samples.nbytes > codec_messages.BLOCK_NBYTES
    data = await encoded(pool, format, minute, whole=whole)
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        seconds = sum(len(block) for block in file.blocks(1 << 16)) / file.samplerate
    assert seconds == pytest.approx(60, abs=0.2)


@pytest.mark.parametrize("format", ["mp3", "opus", "flac", "wav", "pcm"])
async def test_insane_samples_are_sound_in_every_format(pool: CodecPool, format: str) -> None:
    for samples in INSANE:
        assert len(await encoded(pool, format, Audio(samples, RATE))) > 100


@pytest.mark.proves("invalid-audio")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/audio/speech", {**SPEECH, "response_format": "mp3"}),
        ("/v1/audio/speech", {**SPEECH, "response_format": "mp3", "stream_format": "sse"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True, "audio": {"voice": "x"}}),
    ],
)
async def test_nan_in_a_voice_costs_neither_the_coordinator_nor_the_request(path: str, body: dict[str, Any]) -> None:
    async with start(play(*(chunk(Audio(samples, RATE), index=i) for i, samples in enumerate(INSANE)))) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
            answers = [await client.post(path, json=body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert "error" not in answers[1].text[:2000]


@pytest.mark.proves("invalid-audio")
@pytest.mark.parametrize(
    ("audio", "problem"),
    [
        (Audio(TONE, 0), "sample_rate 0"),
        (Audio(np.zeros((4, 99), np.float32), RATE), "shape [4, 99]"),
        (Audio(np.zeros(0, np.float32), RATE), "no samples at all"),
        (Audio(TONE, 100_001), "libsndfile: "),  # flac takes no such rate
    ],
)
async def test_what_is_no_sound_fails_its_request_with_the_stage_s_name(audio: Audio, problem: str) -> None:
    async with (
        start(play(chunk(audio))) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        speech = await client.post("/v1/audio/speech", json={**SPEECH, "response_format": "flac"})
        chat = await client.post("/v1/chat/completions", json={**CHAT, "audio": {"voice": "x", "format": "flac"}})
    for answer in (speech, chat):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["stage"]) == (500, "stage_failed", "talk")
        assert error["message"].startswith(f"omni.Audio: {problem}")


async def test_an_empty_piece_among_others_is_nothing(pool: CodecPool) -> None:
    empty = Audio(np.zeros(0, np.float32), RATE)
    assert await encoded(pool, "pcm", empty, Audio(TONE, RATE), empty) == await encoded(pool, "pcm", Audio(TONE, RATE))


@pytest.mark.proves("invalid-audio")
async def test_a_codec_process_that_dies_costs_its_own_request() -> None:
    async with CodecPool(spares=0) as pool:
        with pool.encoder("mp3") as first, pool.encoder("mp3") as second:
            await first.write(Audio(TONE, RATE), stage="voice")
            before = set(codec_processes(pool))
            begun = await second.write(Audio(TONE, RATE), stage="voice")
            (mine,) = set(codec_processes(pool)) - before
            mine.kill()
            with pytest.raises(RequestError) as caught:
                await second.write(Audio(TONE, RATE), stage="voice")
            rest = await first.write(Audio(TONE, RATE)) + await first.finish()
    assert (caught.value.code, caught.value.stage) == ("stage_failed", "voice")
    assert caught.value.message == "omni.Audio: the mp3 encoder's process died"
    assert begun and rest


async def test_spares_and_a_fork_server_that_were_killed_cost_nothing(pool: CodecPool) -> None:
    whole = await encoded(pool, "pcm", Audio(TONE, RATE))
    await until(lambda: len(codec_processes(pool)) >= SPARES)
    with pool.encoder("pcm") as going_on:
        await going_on.write(Audio(TONE, RATE))
        assert pool.pid is not None
        server = psutil.Process(pool.pid)
        server.kill()
        server.wait(PATIENCE_S)
        assert await encoded(pool, "pcm", Audio(TONE, RATE)) == whole
        await going_on.write(Audio(TONE, RATE))
    await until(lambda: pool.pid not in (None, server.pid))  # when spares are made again


async def test_a_process_that_answers_nothing_is_given_up() -> None:
    async with CodecPool(reply_s=0.3) as pool:
        pool.warm()
        await until(lambda: len(codec_processes(pool)) == SPARES)
        for one in codec_processes(pool):
            one.suspend()
        with pytest.raises(RequestError, match=r"did not answer within 0\.3 s") as caught:
            await encoded(pool, "pcm", Audio(TONE, RATE))
    assert caught.value.code == "stage_failed"


LIMITED = """
import ctypes, os, time
from stage_runtime.web.sound import codec_session
codec_session.limit()
codec_session.begin_call({limit_s})
{act}
"""


@pytest.mark.proves("invalid-audio")
@pytest.mark.parametrize(
    ("limit_s", "act", "code"),
    [
        (0.2, "while True: pass", -signal.SIGALRM),
        (0.2, "time.sleep(60)", -signal.SIGALRM),
        (0.2, "ctypes.CDLL(None).pause()", -signal.SIGALRM),
        (60, "bytearray(codec_session.MEMORY_NBYTES)", 1),
        (60, "os.open('/dev/null', os.O_RDONLY); [os.dup(0) for _ in range(16)]", 1),
        (60, "open('/tmp/none-of-ours', 'w').write('x' * 9)", -signal.SIGXFSZ),
        (60, "codec_session.end_call(); codec_session.begin_call(60)", 0),
    ],
    ids=["loops", "sleeps", "hangs in C", "memory", "descriptors", "writes a file", "is good"],
)
def test_the_kernel_ends_what_takes_too_much(limit_s: float, act: str, code: int, tmp_path: Path) -> None:
    program = LIMITED.format(limit_s=limit_s, act=act.replace("/tmp/none-of-ours", str(tmp_path / "file")))
    program = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n" + program  # Python ignores it
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, timeout=PATIENCE_S)
    assert ended.returncode == code, ended.stderr.decode()


ONE_SECOND = """
import resource
before = time.process_time()
codec_session.begin_call(1)
print((before, resource.getrlimit(resource.RLIMIT_CPU), time.process_time()))
"""


def test_each_call_has_processor_time_of_its_own() -> None:
    program = LIMITED.format(limit_s=60, act=ONE_SECOND)
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    before, (soft, hard), after = eval(printed.stdout)
    assert before + 0.9 < soft < after + 2.1  # what the start took, and a second, in whole seconds
    assert hard == codec_session.LIFE_CPU_S


COORDINATOR = """
import asyncio, numpy, sys
from stage_runtime.web.sound.pool import CodecPool
from stage_runtime.wire.values import Audio

async def main():
    async with CodecPool() as pool:
        with pool.encoder("mp3") as made:
            await made.write(Audio(numpy.zeros(9000, "f4"), 24000))
            print(pool.pid, flush=True)
            await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.proves("codecs-end-with-coordinator")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_codec_processes_end_with_the_coordinator(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", COORDINATOR], stdout=subprocess.PIPE, text=True) as coordinator:
        assert coordinator.stdout is not None
        server = psutil.Process(int(coordinator.stdout.readline()))
        family = [server, *server.children()]
        coordinator.send_signal(number)
        coordinator.wait(PATIENCE_S)
    assert len(family) >= 2
    assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []


def test_the_fork_server_has_one_thread() -> None:
    """No fork of a process with threads is safe: libraries must not start any when they are loaded."""
    program = (
        "import os; from stage_runtime.web.sound import forkserver; os.environ.update(forkserver.ONE_THREAD)\n"
        "from stage_runtime.web.sound import codec_session\nprint(len(os.listdir('/proc/self/task')))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"1\n"


def wav(rate: int, channels: int, nbytes: int) -> bytes:
    """A header that promises ``nbytes`` of samples, and four of them."""
    shape = struct.pack("<HHIIHH", 1, channels, rate, 2 * rate, 2, 16)
    return b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0" + shape + b"data" + struct.pack("<I", nbytes) + b"abcd"


BOMBS = {
    "a wav of 2^31 samples": wav(1, 1, 0xFFFFFFFF),
    "a wav of 65,535 channels": wav(8000, 0xFFFF, 4),
    "a wav of no rate": wav(0, 1, 4),
    "a flac of nothing": b"fLaC" + b"\0" * 40,
    "an ogg page": b"OggS" + b"\xff" * 300,
    "mp3 frames": b"\xff\xfb\x90\x44" * 4000,
    "an id3 tag of 256 MiB": b"ID3\4\0\0\x7f\x7f\x7f\x7f" + b"\0" * 100,
    "zeros": b"\0" * (1 << 20),
}


@pytest.mark.proves("invalid-audio")
async def test_an_upload_that_is_a_bomb_costs_at_most_its_length() -> None:
    wanted = {"response_format": "verbose_json"}
    async with start(play(ResultEvent(stage="talk", data=Text("words")))) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
            for name, bomb in BOMBS.items():
                answer = await client.post("/v1/audio/transcriptions", files={"file": bomb}, data=wanted)
                body = answer.json()
                assert (answer.status_code, body["text"]) == (200, "words"), name
                assert body["duration"] is None or body["duration"] >= 0, name


async def test_a_codec_that_cannot_start_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    async with start(play(chunk(Audio(TONE, RATE)))) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
            answer = await client.post("/v1/audio/speech", json=SPEECH)
            after = await client.post("/v1/pipeline", json={"inputs": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert after.status_code == 200
