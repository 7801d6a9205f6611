"""`/v1/images/generations` and edits over a real socket, judged by the official client."""

from __future__ import annotations

import base64
import io
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from stage_runtime.wire import outputs
from stage_runtime.wire.values import Image, Text, Usage
from tests.web.running import PATIENCE_S, Running, start
from tests.web.scripted_manager import chunk, play

PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)
JPEG = b"\xff\xd8\xff" + bytes(20)
TWO = play(chunk([Image(PNG), Usage(5, 9)]), chunk(Image(PNG + b"2"), index=1))


def client_of(running: Running) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


async def test_pictures_reach_the_client_and_its_wishes_the_stages() -> None:
    async with start(TWO) as running, client_of(running) as client:
        answer = await client.images.generate(
            model="m",
            prompt="a cat",
            n=2,
            size="512x256",
            quality="high",
            extra_body={"seed": 7, "guidance_scale": 2, "metadata": {"by": "me"}},
        )
        request = running.manager.last.request
    assert [base64.b64decode(one.b64_json or "") for one in answer.data or []] == [PNG, PNG + b"2"]
    assert answer.output_format == "png"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (5, 9, 14)
    assert (request.kind, request.modalities) == ("image", ["image"])
    assert request.inputs == {"prompt": "a cat", "n": 2, "size": [512, 256]}
    assert request.params == {"quality": "high", "seed": 7, "guidance_scale": 2.0}
    assert request.metadata == {"by": "me"}


async def test_an_edit_brings_its_pictures_and_its_mask() -> None:
    async with start(play(chunk(Image(JPEG, "image/jpeg")))) as running, client_of(running) as client:
        answer = await client.images.edit(
            model="m", image=[io.BytesIO(PNG), io.BytesIO(JPEG)], mask=io.BytesIO(PNG), prompt="a hat", size="auto", n=1
        )
        request = running.manager.last.request
    assert (answer.output_format, answer.usage) == ("jpeg", None)
    assert request.inputs == {
        "prompt": "a hat",
        "n": 1,
        "size": None,
        "images": [{"mime": "image/png", "data": PNG}, {"mime": "image/jpeg", "data": JPEG}],
        "mask": {"mime": "image/png", "data": PNG},
    }


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "n": 11}, "n"),
        ({"prompt": "a", "size": "0x5"}, "size"),
        ({"prompt": "a", "response_format": "url"}, "response_format"),
        ({"prompt": "a", "stream": True}, "stream"),
        ({"prompt": "a", "qualty": "high"}, "qualty"),
    ],
)
async def test_what_cannot_be_had_is_refused_by_name(given: Any, param: str) -> None:
    async with start(TWO) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        answer = await client.post("/v1/images/generations", json=given)
        assert not running.manager.handles
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("files", "param"),
    [
        ([("prompt", (None, "a"))], "image"),
        ([("image", ("a.gif", b"GIF89a")), ("prompt", (None, "a"))], "image"),
        ([("image", ("a.wav", b"RIFF\x24\x00\x00\x00WAVEfmt ")), ("prompt", (None, "a"))], "image"),
        ([("image", ("a.png", PNG)), ("prompt", (None, "a")), ("guidance_scale", (None, "inf"))], "guidance_scale"),
        ([("image", ("a.png", PNG)), ("prompt", (None, "a")), ("timeout", (None, "inf"))], "timeout"),
        ([("image", ("a.png", PNG)), ("mask", ("m", PNG)), ("mask", ("m", PNG)), ("prompt", (None, "a"))], "mask"),
        ([("image", ("a.png", PNG)), ("prompt", (None, "a")), ("prompt", (None, "b"))], "prompt"),
        ([("image", ("a.png", PNG))], "prompt"),
    ],
)
async def test_a_form_that_is_no_edit_is_refused_by_name(files: Any, param: str) -> None:
    async with start(TWO) as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
        answer = await client.post("/v1/images/edits", files=files)
        assert not running.manager.handles
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("given", [Image(PNG), Text("a picture"), [Image(PNG), Image(JPEG, "image/jpeg")]])
async def test_other_pictures_than_were_asked_for_are_the_stage_s_fault(given: Any) -> None:
    async with start(play(chunk(given))) as running, client_of(running) as client:
        with pytest.raises(openai.InternalServerError, match="expected 2 of one format"):
            await client.images.generate(model="m", prompt="a cat", n=2)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (Image(b""), "use the bytes of a file"),
        (Image("png"), "use the bytes of a file"),  # type: ignore[arg-type]
        (Image(b"GIF89a", "image/gif"), "use one of image/png"),
        (Image(PNG), None),
    ],
)
def test_a_picture_that_no_client_can_read_is_refused_at_its_stage(image: Image, words: str | None) -> None:
    problem = outputs.problem(image)
    assert (problem is None) if words is None else words in str(problem)
