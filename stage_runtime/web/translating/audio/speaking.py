"""POST /v1/audio/speech: the body as an `OmniRequest`. Pure; the sound is encoded by `sound.pool`."""

from __future__ import annotations

from typing import Final

import msgspec

from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.web.reading import schemas
from stage_runtime.web.sound import formats
from stage_runtime.web.translating.answer_outputs import no_sound
from stage_runtime.web.translating.generation.chat import voice_name
from stage_runtime.wire.values import OmniRequest

DECODER: Final = msgspec.json.Decoder(schemas.SpeechBody)
_PARAMS: Final = ("instructions", "seed", "temperature")


def decode(raw: bytes) -> schemas.SpeechBody:
    return schemas.decode(raw, schemas.SpeechBody, DECODER)


def format_name(body: schemas.SpeechBody) -> str:
    """OpenAI's default is mp3.

    Raises: InvalidRequest: a format that cannot be had.
    """
    return formats.check(body.response_format or "mp3", param="response_format")


def without_sound(body: schemas.SpeechBody) -> RequestError:
    """Why no stage gave any sound: a text without a word or a number has none."""
    if any(character.isalnum() for character in body.input):
        return no_sound()
    return InvalidRequest(
        "input: expected a text with something to pronounce; no stage gave sound for it", param="input"
    )


def request(body: schemas.SpeechBody, request_id: str) -> OmniRequest:
    """Always a stream: the sound is sent while it is made."""
    inputs = {
        "text": body.input,
        "voice": voice_name(body.voice),
        "format": format_name(body),
        "speed": 1.0 if body.speed is None else body.speed,
    }
    return OmniRequest(
        id=request_id,
        kind="speech",
        inputs=inputs,
        params={name: value for name in _PARAMS if (value := getattr(body, name)) is not None},
        modalities=["audio"],
        stream=True,
        metadata=body.metadata or {},
    )
