"""POST /v1/chat/completions: the body as an `OmniRequest`, its parameters checked. Answers: `completions`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

import msgspec

from stage_runtime.errors import InvalidRequest
from stage_runtime.web.reading import schemas
from stage_runtime.web.sound import formats
from stage_runtime.web.translating import media
from stage_runtime.web.translating.generation import parameters
from stage_runtime.wire.values import Media, OmniRequest

DECODER: Final = msgspec.json.Decoder(schemas.ChatBody)

#: name -> (default values, why anything else is refused)
REFUSED: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "store": ((False,), "nothing is stored"),
    "functions": (([],), "functions cannot be called"),
    "function_call": (("none", "auto"), "functions cannot be called"),
    "prediction": ((), "predicted outputs are not known here"),
    "moderation": ((), "moderation is not known here"),
    "web_search_options": ((), "the pipeline does not search the web"),
}


class ChatCall(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that the answer's shape depends on; stages get those alone that `request` hands on."""

    stream: bool
    include_usage: bool
    continuous_usage: bool = False  #: Every chunk of a stream has the usage so far.
    text: bool  #: Text is shown as ``content``; else only as the audio's transcript.
    choices: int = 1
    logprobs: bool = False  #: They were asked for.
    token_ids: bool = False  #: They were asked for.
    reasoning: bool = True  #: The model's thoughts are shown.
    audio: str | None  #: The format of the requested audio; None: none was requested.

    @property
    def needs_sound(self) -> bool:
        """The answer shows sound alone, and calls of tools."""
        return self.audio is not None and not self.text


def decode(raw: bytes) -> schemas.ChatBody:
    return schemas.decode(raw, schemas.ChatBody, DECODER)


def call(body: schemas.ChatBody, accepts: Set[str] = frozenset()) -> ChatCall:
    """Refuse what the body asks for and this server does not have, before anything is fetched or admitted.

    accepts: the parameters that this pipeline's stages honour.
    Raises: InvalidRequest: naming the parameter.
    """
    parameters.check(body, accepts)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs: only with logprobs: true", param="top_logprobs")
    parameters.refuse(body, REFUSED)
    for index, message in enumerate(body.messages):
        _check_message(message, f"messages[{index}]", tools="tools" in accepts)
    options = body.stream_options or schemas.StreamOptions()  # without a stream they are ignored
    modalities = body.modalities or ["text"]
    return ChatCall(
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        text="text" in modalities,
        choices=body.n or 1,
        logprobs=bool(body.logprobs),
        token_ids=bool(body.return_token_ids),
        reasoning=body.include_reasoning is not False,
        audio=_audio_format(body) if "audio" in modalities else None,
    )


def request(
    body: schemas.ChatBody,
    request_id: str,
    fetched: Mapping[str, Media],
    accepts: Set[str] = frozenset(),
    model: str = "",
) -> OmniRequest:
    """The request that the entry stage gets. ``fetched``: what the URLs of `media.to_fetch` hold. accepts: as of
    `call`. model: of `OmniRequest`.
    """
    return OmniRequest(
        id=request_id,
        kind="chat",
        inputs={"messages": [_message(item, index, fetched) for index, item in enumerate(body.messages)]},
        params=_params(body, accepts),
        modalities=list(body.modalities or ("text",)),
        stream=bool(body.stream),
        metadata=body.metadata or {},
        model=model,
    )


def spoken(messages: Sequence[schemas.Message], fetched: Mapping[str, Media], *, tools: bool) -> list[dict[str, Any]]:
    """Messages as stages get them. tools: the pipeline can call them. Raises: InvalidRequest: names the place."""
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]", tools=tools)
    return [_message(item, index, fetched) for index, item in enumerate(messages)]


def _message(item: schemas.Message, index: int, fetched: Mapping[str, Media]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": item.role, "content": media.content(item, index, fetched)}
    if item.name is not None:
        message["name"] = item.name
    thought = item.reasoning_content or item.reasoning
    if item.role == "assistant" and isinstance(thought, str) and thought:
        message["reasoning_content"] = thought
    if item.tool_calls:
        message["tool_calls"] = item.tool_calls
    if item.tool_call_id is not None:
        message["tool_call_id"] = item.tool_call_id
    return message


def _params(body: schemas.ChatBody, accepts: Set[str]) -> dict[str, Any]:
    params = parameters.handed_on(body, accepts)
    if body.max_completion_tokens is not None:
        params["max_tokens"] = body.max_completion_tokens  # one name for stage authors
    if body.audio is not None and body.audio.voice is not None:
        params["voice"] = voice_name(body.audio.voice)
    return params


def voice_name(voice: str | schemas.VoiceId | None) -> str | None:
    return voice.id if isinstance(voice, schemas.VoiceId) else voice


def _audio_format(body: schemas.ChatBody) -> str:
    audio_format = body.audio.format if body.audio is not None else None
    if not body.stream:
        return formats.check(audio_format or "wav", param="audio.format")
    if audio_format not in (None, "pcm16", "pcm"):
        raise InvalidRequest(f"audio.format: a stream's audio is 'pcm16', not {audio_format!r}", param="audio.format")
    return "pcm"


def _check_message(message: schemas.Message, param: str, *, tools: bool) -> None:
    if message.role == "function" or (message.role == "tool" and not tools):
        raise InvalidRequest(f"{param}.role: {message.role!r}: tools cannot be called", param=f"{param}.role")
    if (message.tool_calls and not tools) or message.function_call:
        raise InvalidRequest(f"{param}.tool_calls: tools cannot be called", param=f"{param}.tool_calls")
    if not message.content and message.audio is not None and message.audio.transcript is None and message.audio.id:
        problem = "no audio is kept here; send its transcript as content"
        raise InvalidRequest(f"{param}.audio.id: {problem}", param=f"{param}.audio.id")
    if message.content is None and message.role != "assistant":  # an answer may have been stopped before its first word
        raise InvalidRequest(f"{param}.content: required", param=f"{param}.content")
