"""POST /v1/chat/completions: the body as an `OmniRequest`, which parameters mean what. Answers: `completions`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from stage_runtime.errors import InvalidRequest
from stage_runtime.web import schemas
from stage_runtime.web.sound import formats
from stage_runtime.web.translating import media
from stage_runtime.wire.values import Media, OmniRequest

DECODER: Final = msgspec.json.Decoder(schemas.ChatBody)

#: Handed to the stages under their own names when given.
_PARAMS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "stop",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "reasoning_effort",
    "verbosity",
)

#: name -> (values that ask for nothing, why anything else is refused)
REFUSED: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "n": ((1,), "one choice per request"),
    "store": ((False,), "nothing is stored"),
    "logprobs": ((False,), "stages give no log probabilities"),
    "top_logprobs": ((0,), "stages give no log probabilities"),
    "response_format": (({"type": "text"},), "only {'type': 'text'}"),
    "tools": (([],), "tools cannot be called"),
    "tool_choice": (("none", "auto"), "tools cannot be called"),
    "functions": (([],), "functions cannot be called"),
    "function_call": (("none", "auto"), "functions cannot be called"),
    "prediction": ((), "predicted outputs are not known here"),
    "moderation": ((), "moderation is not known here"),
    "web_search_options": ((), "there is no web search"),
}


class ChatCall(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer's shape depends on; the stages see none of it but what `request` hands on."""

    stream: bool
    include_usage: bool
    text: bool  #: Text is shown as ``content``; else only as the audio's transcript.
    audio: str | None  #: The format of the requested audio; None: none was requested.


def decode(raw: bytes) -> schemas.ChatBody:
    return schemas.decode(raw, schemas.ChatBody, DECODER)


def call(body: schemas.ChatBody) -> ChatCall:
    """Check all that a body may ask for and this server has not, before anything is fetched or admitted.

    Raises: InvalidRequest: naming the parameter.
    """
    for name, (harmless, reason) in REFUSED.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            raise InvalidRequest(f"{name}: {reason}", param=name)
    for index, message in enumerate(body.messages):
        _check_message(message, f"messages[{index}]")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: only with stream: true", param="stream_options")
    modalities = body.modalities or ["text"]
    return ChatCall(
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        text="text" in modalities,
        audio=_audio_format(body) if "audio" in modalities else None,
    )


def request(body: schemas.ChatBody, request_id: str, fetched: Mapping[str, Media]) -> OmniRequest:
    """What the entry stage gets. ``fetched``: what the URLs of `media.to_fetch` hold."""
    messages = [
        {"role": item.role, "content": media.content(item, index, fetched)}
        if item.name is None
        else {"role": item.role, "name": item.name, "content": media.content(item, index, fetched)}
        for index, item in enumerate(body.messages)
    ]
    return OmniRequest(
        id=request_id,
        kind="chat",
        inputs={"messages": messages},
        params=_params(body),
        modalities=list(body.modalities or ("text",)),
        stream=bool(body.stream),
        metadata=body.metadata or {},
    )


def _params(body: schemas.ChatBody) -> dict[str, Any]:
    params = {name: value for name in _PARAMS if (value := getattr(body, name)) is not None}
    if body.max_completion_tokens is not None:
        params["max_tokens"] = body.max_completion_tokens  # one name for stage authors
    if body.audio is not None and body.audio.voice is not None:
        params["voice"] = voice_name(body.audio.voice)
    return params


def voice_name(voice: str | schemas.VoiceId | None) -> str | None:
    return voice.id if isinstance(voice, schemas.VoiceId) else voice


def _audio_format(body: schemas.ChatBody) -> str:
    asked = body.audio.format if body.audio is not None else None
    if not body.stream:
        return formats.check(asked or "wav", param="audio.format")
    if asked not in (None, "pcm16", "pcm"):
        raise InvalidRequest(f"audio.format: a stream's audio is 'pcm16', not {asked!r}", param="audio.format")
    return "pcm"


def _check_message(message: schemas.Message, param: str) -> None:
    if message.role in ("tool", "function"):
        raise InvalidRequest(f"{param}.role: {message.role!r}: tools cannot be called", param=f"{param}.role")
    if message.tool_calls or message.function_call:
        raise InvalidRequest(f"{param}.tool_calls: tools cannot be called", param=f"{param}.tool_calls")
    if message.content is None and message.role != "assistant":
        raise InvalidRequest(f"{param}.content: required", param=f"{param}.content")
