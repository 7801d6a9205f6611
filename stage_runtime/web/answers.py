"""The forms of answers, as types that `openapi` reads. No answer is made of them: `translating` makes plain dicts.

A test compares real answers with the schemas. Fields that may be missing are UNSET.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from stage_runtime.web.sound import formats

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
TEXT: Final = "text/plain"


class ResponseType(msgspec.Struct, frozen=True):
    """One content type that a route answers with."""

    #: Types of the JSON, or of an event's data: any of them; empty: text, or a file's bytes.
    types: tuple[Any, ...] = ()
    media: str = JSON
    status: int = 200


SOUND: Final = tuple(ResponseType(media=one.mime) for one in formats.FORMATS.values())
#: The answers of `/readyz`: ready, and not yet.
READY: Final = (ResponseType(media=TEXT), ResponseType(media=TEXT, status=503))

Reason = Literal["stop", "length", "tool_calls", "content_filter"]


class ShownNote(msgspec.Struct):
    stage: str
    name: str
    value: Any


class PromptTokens(msgspec.Struct):
    """The last three: of a prompt with pictures or sound."""

    cached_tokens: int
    text_tokens: int | UnsetType = UNSET
    image_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET


class CompletionTokens(msgspec.Struct):
    """The last two: of an answer with sound."""

    reasoning_tokens: int
    text_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET


class ChatUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens


class ChatLogprobs(msgspec.Struct):
    content: list[dict[str, Any]]
    refusal: None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ChatToolCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatToolCallDelta(ChatToolCall):
    index: int


class ChatAudio(msgspec.Struct):
    id: str
    data: str
    expires_at: int
    transcript: str


class ChatAudioDelta(msgspec.Struct):
    id: str | UnsetType = UNSET
    data: str | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET
    transcript: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET
    audio: ChatAudio | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage
    notes: list[ShownNote] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatToolCallDelta] | UnsetType = UNSET
    audio: ChatAudioDelta | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Reason | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: ChatUsage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    notes: list[ShownNote] | UnsetType = UNSET


class LegacyLogprobs(msgspec.Struct):
    """The log probabilities of completions: a list for each field, as long as ``tokens``."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Reason | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextCompletion(msgspec.Struct):
    """An answer, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: ChatUsage | UnsetType | None = UNSET
    notes: list[ShownNote] | UnsetType = UNSET


class Response(msgspec.Struct):
    """The answer of /v1/responses; the fields that are not here say again what was asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None


class ResponseEvent(msgspec.Struct):
    """Each is named by its type in the stream, too. The others' fields are OpenAI's."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: dict[str, Any] | UnsetType = UNSET
    part: dict[str, Any] | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


class InputTokens(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct):
    """embedding: base64 of little-endian float32 where that was asked for."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: InputTokens


class ImageData(msgspec.Struct):
    b64_json: str


class ImageTokens(msgspec.Struct):
    text_tokens: int
    image_tokens: int


class ImageUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: ImageTokens


class Images(msgspec.Struct):
    created: int
    data: list[ImageData]
    output_format: Literal["png", "jpeg", "webp"]
    usage: ImageUsage | UnsetType = UNSET


class RankedText(msgspec.Struct):
    text: str


class RankedDocument(msgspec.Struct):
    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(msgspec.Struct):
    """The likeliest documents first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: InputTokens


class PairScore(msgspec.Struct):
    index: int
    object: Literal["score"]
    score: float


class PairScores(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: InputTokens


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    prompt: str


class AudioTokens(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechDelta(msgspec.Struct, tag_field="type", tag="speech.audio.delta"):
    audio: str


class SpeechDone(msgspec.Struct, tag_field="type", tag="speech.audio.done"):
    usage: AudioTokens


class CountedTokens(AudioTokens, tag_field="type", tag="tokens"):
    pass


class CountedSeconds(msgspec.Struct, tag_field="type", tag="duration"):
    seconds: Any


class Transcription(msgspec.Struct):
    text: str
    usage: CountedTokens | CountedSeconds | UnsetType = UNSET


class VerboseTranscription(Transcription, kw_only=True):
    """Values that stages give as notes are as they gave them."""

    task: Literal["transcribe", "translate"]
    language: Any
    duration: Any
    segments: Any = UNSET
    words: Any = UNSET


class TranscriptDelta(msgspec.Struct, tag_field="type", tag="transcript.text.delta"):
    delta: str


class TranscriptDone(msgspec.Struct, tag_field="type", tag="transcript.text.done"):
    text: str
    usage: CountedTokens | UnsetType = UNSET


class Model(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | UnsetType = UNSET  #: The model of a LoRA adapter.


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


class PipelineAnswer(msgspec.Struct):
    """``results`` by terminal stage."""

    id: str
    results: dict[str, Any]


class PipelineChunk(msgspec.Struct):
    """The data of ``event: chunk``."""

    stage: str
    index: int
    data: Any
    modality: str | UnsetType = UNSET
    metadata: dict[str, Any] | UnsetType = UNSET


class PipelineResult(msgspec.Struct):
    """The data of ``event: result``."""

    stage: str
    data: Any = UNSET


class CancelledRequest(msgspec.Struct):
    id: str
    cancelled: bool
