"""The bodies that clients send, as msgspec types: what is read, what is refused, by which name.

Types and the texts of their errors only; their meaning is in `translating`. Unknown parameters are refused
(a typo must not be a silent default); inside of messages unknown keys are skipped, since clients send back what
other servers gave them.
"""

from __future__ import annotations

import difflib
import math
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from omnipipeline_spec.types.errors import clipped
from stage_runtime.errors import InvalidRequest
from stage_runtime.web.reading import leniency, strictjson
from stage_runtime.web.reading.generation_fields import ChatFields, CompletionFields, Positive, Share

Body = TypeVar("Body")
Seconds = Annotated[float, Meta(gt=0)]
Speed = Annotated[float, Meta(ge=0.25, le=4)]  # of speech


class Url(msgspec.Struct):
    url: str


class InputAudio(msgspec.Struct):
    data: str
    format: str


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str


class AudioPart(msgspec.Struct, tag_field="type", tag="input_audio"):
    input_audio: InputAudio


class ImageUrlPart(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: Url


class AudioUrlPart(msgspec.Struct, tag_field="type", tag="audio_url"):
    audio_url: Url


class VideoUrlPart(msgspec.Struct, tag_field="type", tag="video_url"):
    video_url: Url


ContentPart = TextPart | RefusalPart | AudioPart | ImageUrlPart | AudioUrlPart | VideoUrlPart


class SpokenAudio(msgspec.Struct):
    """The sound of an earlier answer. Its ``data`` and ``expires_at`` are skipped as unknown keys are: the words
    are enough.
    """

    id: str | None = None
    transcript: str | None = None


class Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: SpokenAudio | None = None
    refusal: str | None = None
    reasoning_content: Any = None  # other servers give other things than texts by these names, which are skipped
    reasoning: Any = None


class VoiceId(msgspec.Struct):
    id: str


class AudioOut(msgspec.Struct, forbid_unknown_fields=True):
    format: str | None = None
    voice: str | VoiceId | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: the usage so far in every chunk


class ChatBody(ChatFields, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    model: str | None = None
    modalities: Annotated[list[Literal["text", "audio"]], Meta(min_length=1)] | None = None
    audio: AudioOut | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timeout: Seconds | None = None
    max_completion_tokens: Positive | None = None
    include_reasoning: bool | None = None  # false: what the model thinks is not shown
    # accepted, without effect
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    # accepted only with their default value: see `translating.generation.chat.REFUSED`
    store: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    prediction: Any = None
    moderation: Any = None
    web_search_options: Any = None


class CompletionBody(CompletionFields, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]  # one text or one list of token ids, or a list of either: see `text_completions.prompts`
    model: str | None = None
    suffix: str | None = None  # refused by name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    timeout: Seconds | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None


class EmbeddingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings."""

    input: str | list[Any]  # one text or one list of token ids, or a list of either: see `vectors.inputs`
    model: str | None = None
    dimensions: Positive | None = None
    encoding_format: Literal["float", "base64"] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    timeout: Seconds | None = None


class Document(msgspec.Struct):
    text: str


class RerankBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/rerank, as Jina's and Cohere's."""

    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=2048)]
    model: str | None = None
    top_n: Positive | None = None
    return_documents: bool | None = None
    user: str | None = None
    timeout: Seconds | None = None


class ScoreBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/score, as vLLM's."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    user: str | None = None
    timeout: Seconds | None = None


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize, as vLLM's: of a text or of a chat."""

    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None
    timeout: Seconds | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize, as vLLM's."""

    tokens: Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=1 << 20)]
    model: str | None = None
    user: str | None = None
    timeout: Seconds | None = None


class SpeechBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/audio/speech."""

    input: Annotated[str, Meta(min_length=1)]
    model: str | None = None
    voice: str | VoiceId | None = None
    instructions: str | None = None
    response_format: str | None = None
    speed: Speed | None = None
    stream_format: Literal["audio", "sse"] | None = None
    seed: int | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    timeout: Seconds | None = None


class ImageBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/images/generations."""

    prompt: Annotated[str, Meta(min_length=1, max_length=32_000)]
    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=10)] | None = None
    size: Annotated[str, Meta(pattern=r"^([1-9][0-9]{0,4}x[1-9][0-9]{0,4}|auto)$")] | None = None
    response_format: Literal["b64_json"] | None = None
    stream: Literal[False] | None = None  # pictures come whole
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    background: str | None = None
    quality: str | None = None
    style: str | None = None
    input_fidelity: str | None = None
    negative_prompt: str | None = None
    num_inference_steps: Positive | None = None
    guidance_scale: Annotated[float, Meta(ge=0)] | None = None
    seed: int | None = None
    metadata: dict[str, Any] | None = None
    moderation: str | None = None
    user: str | None = None
    timeout: Seconds | None = None


class ImageEditFields(ImageBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/images/edits, the fields beside ``image`` and ``mask``."""


class TranscriptionFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/audio/transcriptions, the fields beside ``file``."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: str | None = None
    temperature: Share | None = None
    stream: bool | None = None
    timestamp_granularities: list[Literal["word", "segment"]] | None = None
    chunking_strategy: Literal["auto"] | None = None  # stages split audio as they do
    include: list[str] | None = None
    seed: int | None = None
    user: str | None = None
    timeout: Seconds | None = None


class PipelineBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/pipeline."""

    inputs: Any
    params: dict[str, Any] | None = None
    modalities: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    timeout: Seconds | None = None


def decode(raw: bytes, body: type[Body], decoder: msgspec.json.Decoder[Body]) -> Body:
    """A JSON body as its type. Unknown keys with default values are dropped, see `leniency`.

    Raises: InvalidRequest: what is wrong and where: ``messages[1].content[0].type: …``.
    """
    try:
        return strictjson.decode(raw, decoder)
    except msgspec.ValidationError as error:
        if _UNKNOWN not in str(error):
            raise refusal(str(error), body) from None
    try:
        given = strictjson.decode(raw, _ANY)
    except msgspec.ValidationError as error:  # a number that no float holds, behind an unknown key
        raise refusal(str(error), body) from None
    return _without_idle_keys(given, body)


def _without_idle_keys(given: Any, body: type[Body]) -> Body:
    """The body, once its unknown keys are dropped. Each is found by reading the body from its begin."""
    dropped, of_chat = 0, issubclass(body, ChatFields)
    while True:
        try:
            return msgspec.convert(given, body)
        except msgspec.ValidationError as error:
            found = _AT.match(str(error))
            field = None if found is None else _FIELD.match(found["what"])
            place = _object_at(given, found["path"] or "") if found is not None else None
            name = "" if field is None or field["fault"] != "contains unknown" else field["name"]
            idle = place is not None and name in place and leniency.asks_for_nothing(name, place[name], of_chat=of_chat)
            if place is None or not idle or dropped == _IDLE_KEYS:
                raise refusal(str(error), body) from None
            del place[name]
            dropped += 1


def _object_at(value: Any, path: str) -> dict[str, Any] | None:
    """The object at a path of names. None: the path leads nowhere, or through a list."""
    for name in filter(None, path.split(".")):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else None


def convert(fields: dict[str, Any], body: type[Body]) -> Body:
    """Form fields as their type; strings become numbers and booleans where the type is one.

    Raises: InvalidRequest: as `decode`; a number is not finite, which JSON has no text for.
    """
    try:
        made: Body = msgspec.convert(fields, body, strict=False)
    except msgspec.ValidationError as error:
        raise refusal(str(error), body) from None
    for name in fields:
        value = getattr(made, name, None)
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(f"{name}: expected a finite number, got {value}", param=name)
    return made


_IDLE_KEYS: int = 64  # unknown keys that one body may have; clients send a few
_NAME: int = 64  # characters of a key that may be a misspelt one; comparing takes time
_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_STEP = re.compile(r"[^.\[\]]+")
_UNKNOWN = "contains unknown field"
_ANY = msgspec.json.Decoder(Any)
_FIELD = re.compile(r"^Object (?P<fault>contains unknown|missing required) field `(?P<name>.*)`$")


def refusal(message: str, body: Any) -> InvalidRequest:
    """msgspec's message as an error for the client, with the parameter's name."""
    found = _AT.match(clipped(message))
    what, path = (found["what"], found["path"] or "") if found else (message, "")
    if (field := _FIELD.match(what)) is not None:
        name = f"{path}.{field['name']}" if path else field["name"]
        if field["fault"] == "missing required":
            return InvalidRequest(f"{name}: required", param=name)
        return InvalidRequest(f"{name}: unknown parameter{_nearest(field['name'], body, path)}", param=name)
    what = what[:1].lower() + what[1:] + _allowed(path, body)
    return InvalidRequest(f"{path or 'body'}: {what}", param=path or None)


def unknown(name: str, body: Any) -> InvalidRequest:
    """The error for a field that ``body`` does not have."""
    return InvalidRequest(f"{name}: unknown parameter{_nearest(name, body)}", param=name)


def _nearest(name: str, body: Any, path: str = "") -> str:
    if path or len(name) > _NAME:
        return ""
    if known := leniency.counterpart(name):
        return known
    near = difflib.get_close_matches(name, body.__struct_fields__, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _allowed(path: str, body: Any) -> str:
    """The values of a place that takes some values only."""
    if re.search(r"content\[[^\]]*\]\.type$", path):
        return "; known are text, input_audio, image_url, audio_url, video_url"
    values = _values(msgspec.inspect.type_info(body), _STEP.findall(path))
    return f"; known are {', '.join(values)}" if values else ""


def _values(kind: msgspec.inspect.Type, steps: list[str]) -> list[str]:
    """The values of a literal type, at the end of a path through ``kind``."""
    match kind:
        case msgspec.inspect.Metadata():
            return _values(kind.type, steps)
        case msgspec.inspect.UnionType():
            return [value for one in kind.types for value in _values(one, steps)]
        case msgspec.inspect.ListType() if steps:
            return _values(kind.item_type, steps[1:])
        case msgspec.inspect.StructType() if steps:
            return [
                value
                for field in kind.fields
                if field.encode_name == steps[0]
                for value in _values(field.type, steps[1:])
            ]
        case msgspec.inspect.LiteralType() if not steps:
            return [str(value) for value in kind.values]
    return []
