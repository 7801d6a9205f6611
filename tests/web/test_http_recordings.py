"""How long an uploaded recording is: what phones and browsers record, and what a program wrote to a pipe."""

from __future__ import annotations

import io
import math
import struct

import httpx
import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.web.sound.codecs import containers, headers
from stage_runtime.wire.values import Text
from tests.web.recordings import M4A, MP4_IN_PIECES, WEBM, WEBM_LIVE
from tests.web.running import PATIENCE_S, start
from tests.web.scripted_manager import play

SOUNDS = {"webm": WEBM, "live webm": WEBM_LIVE, "m4a": M4A, "fragmented mp4": MP4_IN_PIECES}


def wav(*, data_nbytes: int | None = None, riff_nbytes: int = 0, chunk: bytes = b"") -> bytes:
    """Half a second at 16 kHz; with a length of the samples that is not theirs, as a writer to a pipe leaves it."""
    out = io.BytesIO()
    soundfile.write(out, np.zeros(8000, np.float32), 16_000, format="WAV", subtype="PCM_16")
    whole = out.getvalue()
    if data_nbytes is None:
        return whole
    at = whole.index(b"data")
    head = whole[:4] + struct.pack("<I", riff_nbytes) + whole[8:at] + chunk
    return head + b"data" + struct.pack("<I", data_nbytes) + whole[at + 8 :]


PIPED = {
    "zeros": wav(data_nbytes=0),
    "all ones": wav(data_nbytes=0xFFFFFFFF, riff_nbytes=0xFFFFFFFF),
    "ones and zeros": wav(data_nbytes=0, riff_nbytes=0xFFFFFFFF),
    "a chunk before the samples": wav(data_nbytes=0, chunk=b"LIST\x03\0\0\0abc\0"),
}


async def verbose(data: bytes) -> object:
    async with start(play(ResultEvent(stage="talk", data=Text("words")))) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
            form = {"response_format": "verbose_json"}
            answer = await client.post("/v1/audio/transcriptions", files={"file": data}, data=form)
    return answer.json()["duration"]


@pytest.mark.parametrize("name", SOUNDS)
async def test_a_recording_of_a_phone_or_a_browser_has_its_length(name: str) -> None:
    assert await verbose(SOUNDS[name]) == pytest.approx(1.5, abs=0.03)


@pytest.mark.parametrize("name", PIPED)
async def test_a_wav_that_was_written_to_a_pipe_has_its_length(name: str) -> None:
    assert await verbose(PIPED[name]) == 0.5


def test_a_wav_without_samples_stays_empty() -> None:
    whole = wav()
    empty = whole[: whole.index(b"data") + 4] + bytes(4)
    for rest in (b"", b"LIST\x04\0\0\0abcd"):
        assert headers.duration_s(empty + rest) in (0.0, None)


@pytest.mark.parametrize("name", SOUNDS)
def test_a_recording_that_was_cut_off_has_a_length_or_none(name: str) -> None:
    whole = SOUNDS[name]
    for size in range(len(whole)):
        seconds = containers.duration_s(whole[:size])
        assert seconds is None or 0 < seconds <= 1.6


@given(st.data())
def test_no_bytes_hang_or_break_the_reader(data: st.DataObject) -> None:
    whole = bytearray(data.draw(st.sampled_from(list(SOUNDS.values()))))
    places = st.integers(0, len(whole) - 1)
    for at in data.draw(st.lists(places, min_size=1, max_size=20)):
        whole[at] = data.draw(st.sampled_from((0, 1, 0x7F, 0x80, 0xFF)))
    seconds = headers.duration_s(bytes(whole))
    assert seconds is None or math.isfinite(seconds)


@given(st.binary(max_size=200), st.sampled_from((b"\x1a\x45\xdf\xa3", b"\0\0\0\x08ftyp", b"RIFF\0\0\0\0WAVE")))
def test_what_only_begins_like_a_recording_has_no_length(rest: bytes, begin: bytes) -> None:
    seconds = headers.duration_s(begin + rest)
    assert seconds is None or math.isfinite(seconds)
