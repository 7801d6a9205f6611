"""Data URLs as RFC 2397 and browsers have them: case and spaces mean nothing in what is before the comma."""

from __future__ import annotations

import base64
import contextlib
import tracemalloc
import urllib.parse
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.errors import InvalidRequest
from stage_runtime.web.reading import schemas
from stage_runtime.web.translating import media
from stage_runtime.wire.values import Media, Text
from tests.web.running import PATIENCE_S, start
from tests.web.scripted_manager import chunk, play

PNG = b"\x89PNG"
DATA = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    ("url", "mime", "data"),
    [
        (f"data:image/png;base64,{DATA}", "image/png", PNG),
        (f"data:image/png; base64,{DATA}", "image/png", PNG),
        (f"data:image/png;charset=x ; BASE64 ,{DATA}", "image/png", PNG),
        (f"data:image/png;Base64,{DATA}", "image/png", PNG),
        (f"DATA:Image/PNG;base64,{DATA}", "image/png", PNG),
        (f"data: image/png ;base64,{DATA}", "image/png", PNG),
        ("data:image/svg+xml,%3Csvg/%3E", "image/svg+xml", b"<svg/>"),
        ("data:image/svg+xml;x=base64,ab", "image/svg+xml", b"ab"),
    ],
)
def test_a_data_url_is_read_whatever_its_case_and_spaces(url: str, mime: str, data: bytes) -> None:
    assert media.data_url(url, "image", "p") == Media("image", mime, data)


@pytest.mark.parametrize("url", ["data:image/png;base64,?", "data:audio/wav;base64,aGk=", "data:;base64,aGk=", "x"])
def test_what_is_no_data_url_of_the_kind_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest):
        media.data_url(url, "image", "p")


@pytest.mark.parametrize("url", ["data:image/png;base64,aGk=", "DATA:image/png;base64,aGk=", "Data:,x"])
def test_no_data_url_is_fetched(url: str) -> None:
    part = schemas.ImageUrlPart(image_url=schemas.Url(url))
    assert list(media.to_fetch([schemas.Message(role="user", content=[part])])) == []


async def heard(data: str, format: str = "wav") -> Any:
    """The sound that the stages get, or the parameter and the problem."""
    part = {"type": "input_audio", "input_audio": {"data": data, "format": format}}
    async with (
        start(play(chunk(Text("ok")))) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        body = {"messages": [{"role": "user", "content": [part]}]}
        answer = await client.post("/v1/chat/completions", json=body)
        if answer.status_code == 200:
            return running.manager.last.request.inputs["messages"][0]["content"]
    return answer.json()["error"]["param"], answer.json()["error"]["message"]


@pytest.mark.parametrize("head", ["data:;base64,", "data:audio/wav;base64,", "DATA:audio/x-wav; BASE64,", ""])
async def test_sound_may_come_as_a_data_url_whose_format_is_the_named_one(head: str) -> None:
    assert await heard(f"{head}aGk=") == [{"type": "audio", "mime": "audio/wav", "data": b"hi"}]


LONG = bytes(range(256)) * 2 + b"\xfb\xff"
WHOLE = base64.b64encode(LONG).decode()
FORMS = {
    "one line": WHOLE,
    "base64 FILE": base64.encodebytes(LONG).decode(),
    "a line's end": WHOLE + "\n",
    "lines of windows": base64.encodebytes(LONG).decode().replace("\n", "\r\n"),
    "url-safe": base64.urlsafe_b64encode(LONG).decode(),
    "without padding": WHOLE.rstrip("="),
    "url-safe without padding, in lines": base64.urlsafe_b64encode(LONG).decode().rstrip("=").replace("A", "A\n"),
    "escaped in a URL": WHOLE.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D"),
    "lines escaped in a URL": urllib.parse.quote(base64.encodebytes(LONG).replace(b"\n", b"\r\n"), safe=""),
}


@pytest.mark.parametrize("form", FORMS)
def test_base64_is_read_in_every_form_that_programs_write(form: str) -> None:
    assert "=" in WHOLE and "+" in WHOLE and "/" in WHOLE
    part = schemas.AudioPart(input_audio=schemas.InputAudio(data=FORMS[form], format="wav"))
    message = schemas.Message(role="user", content=[part])
    assert media.content(message, 0, {})[0]["data"] == LONG
    assert media.data_url(f"data:image/png;base64,{FORMS[form]}", "image", "p").data == LONG


@pytest.mark.parametrize("text", ["%2b", "AB ", "%41", "A\n"])
def test_base64_takes_a_few_times_its_length_in_memory_whatever_its_form(text: str) -> None:
    whole = text * (1 << 16)
    tracemalloc.start()
    try:
        with contextlib.suppress(InvalidRequest):
            media.from_base64(whole, "p")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8 * len(whole)


@given(st.binary(max_size=200), st.sampled_from((57, 76)), st.booleans(), st.booleans())
def test_what_was_written_as_base64_is_read_back(data: bytes, width: int, url_safe: bool, padded: bool) -> None:
    text = (base64.urlsafe_b64encode(data) if url_safe else base64.b64encode(data)).decode()
    text = text if padded else text.rstrip("=")
    lines = "\n".join(text[at : at + width] for at in range(0, len(text), width))
    assert media.data_url(f"data:image/png;base64,{lines}", "image", "p").data == data


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("data:image/png;base64,aGk=", "a data URL of type 'image/png', not audio/…"),
        ("data:audio/wav,hi", "a data URL of sound must be base64"),
        ("data:audio/wav;base64", "no data URL (data:audio/…;base64,…)"),
        ("data:;base64,?", "expected base64, got the character '?' after 0 of its alphabet"),
        ("?", "expected base64, got the character '?' after 0 of its alphabet"),
        ("QUJD\x00", "expected base64, got the character '\\x00' after 4"),
        ("QQ==QQ==", "expected base64, got the character '=' after 2"),
        ("QUJDR", "expected base64, got 5 characters: no bytes have that many"),
    ],
)
async def test_sound_that_cannot_be_read_is_refused_by_its_place(data: str, problem: str) -> None:
    param = "messages[0].content[0].input_audio.data"
    found, message = await heard(data)
    assert found == param
    assert message.startswith(f"{param}: {problem}")
